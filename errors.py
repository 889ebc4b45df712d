"""The exception for errors that the user caused and can correct, and what others say in one line."""


class UserError(Exception):
    """Bad input: a file, a flag, a request. The message is one line that says what is wrong and what to do about it.

    Command-line programs print it once and exit with code 2 on every rank; the server answers with a 4xx status.
    """


class RankError(UserError):
    """One that the other ranks do not know of, so that this rank has to print it. The message names the rank."""


class OverflowedError(RuntimeError):
    """The model's numbers are not finite, so that there is no answer. The message is one line, the same on every rank.

    Command-line programs print it once and exit with code 1; the server answers with status 500.
    """


def is_panic(e: BaseException) -> bool:
    """Whether a library written in Rust has panicked. The exception's class cannot be imported and is no `Exception`."""
    return type(e).__name__ == "PanicException"


def first_line(e: BaseException) -> str:
    """The first line of a library's error message, for a message of one line."""
    return (str(e).splitlines() or [repr(e)])[0]
