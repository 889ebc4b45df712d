"""The options after `--`, which a command passes on to the one that it starts for each model."""

from collections.abc import Sequence

from errors import UserError


def check_passed_on(words: Sequence[str], own: Sequence[str]) -> None:
    """Raise UserError if `words` have one of the options `own`, or a beginning of one, which the command sets itself: its value would
    be replaced."""
    taken = [word for word in words if word[:2] == "--" and any(one.startswith(word.partition("=")[0]) for one in own)]
    if taken:
        raise UserError(
            f"{', '.join(taken)} after --: this command sets that for each model; give its own option before --, if any"
        )
