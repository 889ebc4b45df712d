"""What the processes of a server know of each other: exit codes, the addresses of their sockets, and the ranks that were ready.

Imports nothing heavy.
"""

import os
from pathlib import Path
from typing import NamedTuple

from errors import UserError

FRONTEND = "RUNG_FRONTEND"  # environment variable of ranks: the folder with the sockets of a frontend that runs already
STARTED = "started"  # file in this folder, once ranks have been ready: the fields of `Started`
FAILED = 1  # exit code
SIGNALLED = 128  # exit codes above it are 128 + the signal
TICK = 0.5  # seconds between looks at the frontend, which counts at least as often


class Started(NamedTuple):
    """What is known of a server's ranks that were ready."""

    longest: float = 0.0  # seconds of their longest start so far; 0 if none has ended
    pid: int = 0  # of the newest rank 0 among them


def addresses(folder: Path) -> tuple[str, str]:
    """Where the engine binds its socket, and where the frontend binds its own."""
    return f"ipc://{folder}/to-engine", f"ipc://{folder}/from-engine"


def read_started(folder: Path) -> Started:
    path = folder / STARTED
    if not path.exists():
        return Started()
    longest, pid = path.read_text().split()
    return Started(float(longest), int(pid))


def note_start(folder: Path, seconds: float) -> float:
    """Note that the ranks with this rank 0 are ready, so many seconds after they started. Returns those of the longest start so far.

    If the folder cannot be written, the note of an earlier start stays. Raises UserError if there is none.
    """
    longest, new = max(seconds, read_started(folder).longest), folder / f"{STARTED}.new"
    try:
        new.write_text(f"{longest} {os.getpid()}")
        new.replace(folder / STARTED)  # whole, whenever a frontend reads it
    except OSError as e:
        if not (folder / STARTED).exists():
            raise UserError(
                f"{folder} cannot be written ({e.strerror}); free some space there, or set TMPDIR to another folder"
            ) from None
    return longest
