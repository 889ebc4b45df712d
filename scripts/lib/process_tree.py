"""A process and its descendants, found in /proc."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE_SECONDS = 40.0  # for a launcher to end: it gives its ranks 30
MOMENT = 2.0  # seconds for a process to end after each signal, at least


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


def end(*processes: "subprocess.Popen[Any]", seconds: float = GRACE_SECONDS) -> None:
    """End those of the processes that still run, and all that they have started.

    They get SIGTERM, and then what they leave behind does. What still runs after `seconds`, and a moment more for what they leave
    behind, is killed.
    """
    deadline = time.monotonic() + seconds
    alive = [process for process in processes if process.poll() is None]
    descriptors = list[int]()  # since an ended process's id may become another's
    for pid in (pid for process in alive for pid in process_tree(process.pid)):
        with suppress(ProcessLookupError):
            descriptors.append(os.pidfd_open(pid))
    for process in alive:
        process.terminate()
    for process in alive:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for number in (signal.SIGTERM, signal.SIGKILL):
        for descriptor in descriptors:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
        deadline = max(deadline, time.monotonic() + MOMENT)
        for descriptor in descriptors:
            ended = select.poll()  # `select` cannot take descriptors from 1,024 on
            ended.register(descriptor, select.POLLIN)
            ended.poll(1000 * max(0.0, deadline - time.monotonic()))
    for process in alive:
        process.wait()
    for descriptor in descriptors:
        os.close(descriptor)
