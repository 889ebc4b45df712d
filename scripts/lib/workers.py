"""Worker processes of a measurement, spread over the GPUs, and when they will have done their work."""

import heapq
import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from scripts.lib.results import ROOT


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Empty without a GPU."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named else [str(i) for i in range(count)])[:count]


class Workers:
    """Processes by name. Each new one gets the GPU that has the fewest of them."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self.gpus = gpus
        self.running: dict[str, tuple[subprocess.Popen[bytes], str | None]] = {}

    def start(self, name: str, words: Sequence[str], log: Path) -> None:
        """Start a process whose output is appended to the file `log`."""
        taken = [gpu for _, gpu in self.running.values()]
        gpu = min(self.gpus, key=taken.count) if self.gpus else None
        env = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
        with log.open("ab") as file:
            process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)
        self.running[name] = process, gpu

    def ended(self) -> dict[str, int]:
        """The exit codes of the processes that have ended since the last call."""
        codes = {name: code for name, (process, _) in self.running.items() if (code := process.poll()) is not None}
        for name in codes:
            del self.running[name]
        return codes

    def stop(self) -> None:
        """Kill all, each with the session that it leads: the compiler has processes of its own."""
        for process, _ in self.running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.running.clear()


def time_left(running: Iterable[float], waiting: Iterable[float], workers: int) -> float:
    """Seconds until all jobs are done, if each worker that ends a job takes the next of `waiting`.

    running: seconds left of each running job. waiting: seconds of each job that has not begun, in order."""
    free = sorted(running)
    free += [0.0] * (workers - len(free))
    heapq.heapify(free)
    for seconds in waiting:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)
