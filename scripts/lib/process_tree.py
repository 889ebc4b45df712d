"""A process and its descendants, found in /proc."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def process_tree(root: int) -> list[int]:
    """The process ids of `root` and all its descendants."""
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        with suppress(OSError):  # the process has ended
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):  # the thread has ended
                    todo += map(int, task.read_text().split())
    return found


def kill(pids: Iterable[int]) -> None:
    """Kill those of the processes that still run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
