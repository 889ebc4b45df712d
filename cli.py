"""Shared by all command-line programs: one-line errors, and the same exit code on every rank. `Parser` is from flags.py."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from errors import UserError
from flags import Parser as Parser
from flags import rank as rank
from processes import is_rank, join_launcher

USER_ERROR, LOST_RANK, INTERRUPTED = 2, 1, 130  # exit codes


def note(text: str = "", end: str = "\n") -> None:
    """Print a note for the user to stderr, on rank 0 only."""
    if rank() == 0:
        print(text, end=end, file=sys.stderr, flush=True)


def check_ranks(count: int, flag: str) -> None:
    """Raises UserError on a rank if the launcher started another number of ranks than the user gave with `flag`."""
    started = os.environ.get("WORLD_SIZE", "1")
    if is_rank() and started != str(count):
        raise UserError(f"{flag} {count}, but torchrun started {started} ranks; leave {flag} out, or start without torchrun")


def run(main: Callable[[], None]) -> NoReturn:
    """Run `main` and exit the process with 0, 2 for a UserError, 1 if another rank was lost, 130 for Ctrl-C."""
    join_launcher()
    code = 0
    try:
        main()
    except UserError as e:
        note(f"error: {' '.join(str(e).splitlines())}")
        code = USER_ERROR
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output has ended, as in `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except RuntimeError as e:
        if not (dist.is_initialized() and _lost_connection(str(e))):
            raise
        what = f"rank {rank()} lost the connection to another rank, which ended or was killed"
        print(f"error: {what} ({str(e).splitlines()[0]})", file=sys.stderr)
        code = LOST_RANK
    leave(code)


def _lost_connection(message: str) -> bool:
    signs = ("Connection closed", "Connection reset", "Connection was likely closed", "Broken pipe", "ncclRemoteError")
    return any(sign in message for sign in signs)


def leave(code: int) -> NoReturn:
    """Exit now. Skip the destructors of a process group, since those of a broken one may wait for ranks that ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        os._exit(code)
    sys.exit(code)
