"""A clock for time limits in tests that must also pass on a busy machine."""

import contextlib
import time
from pathlib import Path


def quiet_seconds(*pids: int) -> float:
    """Seconds on a clock that stops while a thread of these processes is ready to run but has no core. Use differences only.

    The clock runs while the processes compute, sleep or wait for each other. So it counts the delays that they cause
    themselves and leaves out those that other processes cause. While several threads wait for a core, the clock runs backwards:
    on a busy machine a difference can be too small, but never too large.
    """
    waited = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                waited += int(path.read_text().split()[1])
    return time.monotonic() - waited / 1e9
