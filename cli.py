"""Shared by all command-line programs: their parser, one-line errors, and the same exit code on every rank. Loads no torch."""

import argparse
import os
import re
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from errors import OverflowedError, RankError, UserError, first_line
from ranks.processes import LOST_RANK, is_rank, join_launcher, local_rank, lost_connection, rank

USER_ERROR, OVERFLOWED, INTERRUPTED = 2, 1, 130  # exit codes, beside that of a lost rank
PEERS = Path(__file__).with_name("peers.toml")  # flags of other programs
PRINT_SECONDS = 1.0  # time for the first rank of a host to print what all know, because a launcher ends all once one has ended


def note(text: str = "", end: str = "\n") -> None:
    """Print a note for the user to stderr, on rank 0 only."""
    if rank() == 0:
        print(text, end=end, file=sys.stderr, flush=True)


def check_ranks(count: int) -> None:
    """Raises UserError on a rank if the launcher started another number of ranks than the user gave with --tp."""
    started = os.environ.get("WORLD_SIZE", "1")
    if is_rank() and started != str(count):
        raise UserError(f"--tp {count}, but torchrun started {started} ranks; leave --tp out, or start without torchrun")


def run(main: Callable[[], None]) -> NoReturn:
    """Run `main` and exit the process with 0, 2 for a UserError, 1 for an OverflowedError or if another rank was lost, 130
    for Ctrl-C."""
    join_launcher()
    code = 0
    try:
        main()
    except (UserError, OverflowedError) as e:
        end_bars()
        if local_rank() == 0 or isinstance(e, RankError):  # what all ranks know, once on each host
            print(f"error: {' '.join(str(e).splitlines())}", file=sys.stderr, flush=True)
        elif is_rank():
            time.sleep(PRINT_SECONDS)
        code = USER_ERROR if isinstance(e, UserError) else OVERFLOWED
    except KeyboardInterrupt:
        end_bars()
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output has ended, as in `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as e:
        if not (isinstance(e, RuntimeError) and (is_rank() or _in_process_group()) and lost_connection(str(e))):
            if _in_process_group():  # whose destructors may wait for the other ranks
                traceback.print_exc()
                sys.stdout.flush()
                os._exit(1)
            raise
        if "ranks.hosts" in sys.modules:
            sys.modules["ranks.hosts"].await_cause(e)
        what = f"rank {rank()} lost the connection to another rank, which ended or was killed"
        print(f"error: {what} ({first_line(e)})", file=sys.stderr)
        code = LOST_RANK
    leave(code)


def end_bars() -> None:
    """Close all progress bars, so that what follows is not printed behind one."""
    for bar in list(sys.modules["tqdm"].tqdm._instances) if "tqdm" in sys.modules else []:
        bar.close()


def _in_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")  # not imported here: wrong flags are reported without waiting for torch
    return distributed is not None and distributed.is_initialized()


def leave(code: int) -> NoReturn:
    """Exit now. Skip the destructors of a process group, since those of a broken one may wait for ranks that ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code != LOST_RANK and "ranks.hosts" in sys.modules:  # not imported here, as torch is not
        sys.modules["ranks.hosts"].say_goodbye()
    if _in_process_group():
        os._exit(code)
    sys.exit(code)


def program() -> str:
    """How this program was started: `python -m MODULE`, or the name of the script."""
    spec = sys.modules["__main__"].__spec__
    if spec is not None and spec.origin == sys.argv[0]:
        return f"python -m {spec.name.removesuffix('.__main__')}"
    return os.path.basename(sys.argv[0])


class Parser(argparse.ArgumentParser):
    """An argument parser that shows its description as it is, and raises UserError, so that N ranks do not print N usage texts.

    Unknown flags are reported before missing ones: for a misspelt required flag, argparse itself would only report that it is missing.
    names_model: whether the one argument without a flag is --model, and flags of other programs get the answer that PEERS has.
    """

    def __init__(self, prog: str | None = None, names_model: bool = False, **options: Any) -> None:
        super().__init__(prog or program(), **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})
        self.names_model = names_model
        if names_model:
            self.add_argument("model_word", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="the same as --model")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        if rank() == 0:
            super().print_help(file)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]  # fewer overloads
        given = sys.argv[1:] if args is None else list(args)
        if unknown := self._unknown(given):
            self.error(f"unknown flag{'s' if len(unknown) > 1 else ''} {'; '.join(map(self._with_match, unknown))}")
        if not self.names_model:
            return super().parse_args(given, namespace)
        found, rest = self.parse_known_args(given, namespace)
        # before Python 3.12.7, MODEL is in the rest unless it comes first
        words = [word for word in (found.__dict__.pop("model_word", "--"), *rest) if word != "--"]
        if words[1:]:
            self.error(f"unrecognized arguments: {' '.join(words[1:])}")
        flag = getattr(found, "model", None)
        if words and flag not in (None, words[0]):
            self.error(f"two models are named, {words[0]} and --model {flag}; leave one out")
        if words:
            found.model = words[0]
        return found

    def _unknown(self, given: list[str]) -> list[str]:
        """The words that look like flags but are not."""
        before = given[: given.index("--")] if "--" in given else given
        joined = [word for word in before if self.names_model and re.match("-h.", word)]  # -hf, which argparse takes for -h
        required = [action for action in self._actions if action.required]
        for action in required:
            action.required = False
        try:  # without --help, whose usage has to name what is required
            _, rest = self.parse_known_args([word for word in before if word not in ("-h", "--help", *joined)])
        finally:
            for action in required:
                action.required = True
        return [word.partition("=")[0] for word in joined + rest if re.match(r"--?[a-zA-Z]", word) and " " not in word]

    def _with_match(self, word: str) -> str:
        if self.names_model and (answer := self._of_peers(word.replace("_", "-"))):
            return f"{word}: {answer}"
        close = get_close_matches(word, self._option_string_actions, n=1, cutoff=0.7)
        return f"{word} (did you mean {close[0]}?)" if close else word

    def _of_peers(self, word: str) -> str | None:
        """What the flag of another program is called here, or why there is none; None if it is unknown."""
        if word in self._option_string_actions:
            return f"it is {word} here"
        known = {flag: answer for answer, flags in tomllib.loads(PEERS.read_text()).items() for flag in flags}
        for answer in known[word].split(" | ") if word in known else ():
            own = re.findall(r"--[a-z-]+", answer.partition("launch.py")[0])
            if self._option_string_actions.keys() >= set(own):
                return re.sub(r"^(--[a-z-]+)", r"it is \1 here", answer)
        return None
