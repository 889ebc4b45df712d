"""A clock for bounds that a busy machine must not break."""

import contextlib
import time
from pathlib import Path


def quiet_seconds(*pids: int) -> float:
    """Seconds of a clock that stands still while a thread of these processes is ready to run and no core is free; differences
    count. It goes on while they compute, sleep or wait for each other, and so tells what they hold up from what others do.

    Where several threads wait at once, it goes back: a busy machine makes a difference too small, and never too large.
    """
    waited = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                waited += int(path.read_text().split()[1])
    return time.monotonic() - waited / 1e9
