"""What the command lines share: errors in one line and on every rank, and exit codes. `Parser` is that of flags.py."""

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
    """Say something to the human at the terminal: rank 0's stderr."""
    if rank() == 0:
        print(text, end=end, file=sys.stderr, flush=True)


def check_ranks(count: int, flag: str) -> None:
    """Raises UserError on a rank whose launcher started another number than the user gave in `flag`."""
    started = os.environ.get("WORLD_SIZE", "1")
    if is_rank() and started != str(count):
        raise UserError(f"{flag} {count}, but torchrun started {started} ranks; leave {flag} out, or start without torchrun")


def run(main: Callable[[], None]) -> NoReturn:
    """Run `main` and leave the process: 0, 2 for a UserError, 1 when another rank was lost, 130 for Ctrl-C."""
    join_launcher()
    code = 0
    try:
        main()
    except UserError as e:
        note(f"error: {' '.join(str(e).splitlines())}")
        code = USER_ERROR
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as in `… | head`
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
    """Exit now. With a process group, without its destructors: those of a broken group can wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        os._exit(code)
    sys.exit(code)
