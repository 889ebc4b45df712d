"""Worker processes of a measurement, spread over the GPUs or over cores of their own, and when they will have done their work."""

import heapq
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from errors import UserError
from scripts.lib.results import ROOT


def same_command(module: str, *more: str) -> list[str]:
    """The command line of this script, with more flags before what follows `--`."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    return [sys.executable, "-m", module, *words[:end], *more, *words[end:]]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Empty without a GPU."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named else [str(i) for i in range(count)])[:count]


def core_sets(count: int, size: int) -> list[frozenset[int]]:
    """`count` sets of `size` cores each, from the end of the cores that this process may use. Raises UserError if they are too few."""
    allowed = sorted(os.sched_getaffinity(0), reverse=True)
    if count * size > len(allowed):
        raise UserError(f"{count} processes with {size} cores each need {count * size} cores, and {len(allowed)} may be used")
    return [frozenset(allowed[i * size : (i + 1) * size]) for i in range(count)]


@contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Run this thread, and the processes that it starts meanwhile, on `cores` alone; on an empty set, as before."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Workers:
    """Processes by name. Each new one gets the GPU that has the fewest of them, and one of `cores` that no other one has."""

    def __init__(self, gpus: Sequence[str], cores: Sequence[frozenset[int]] = (), count: int = 1) -> None:
        """count: of the processes that share the cores, at most so many at a time. Each gets its share of the cores as PyTorch's threads
        and torch.compile's processes: if each had a thread for every core, short operations would wait for threads that do not run."""
        self.gpus, self.cores, self.count = gpus, cores, count
        self.running: dict[str, tuple[subprocess.Popen[bytes], str | None, frozenset[int]]] = {}

    def start(self, name: str, words: Sequence[str], log: Path) -> None:
        """Start a process whose output is appended to the file `log`."""
        taken = [gpu for _, gpu, _ in self.running.values()]
        used = [cores for _, _, cores in self.running.values()]
        cores = next(one for one in self.cores if one not in used) if self.cores else frozenset[int]()
        gpu = min(self.gpus, key=taken.count) if self.gpus else None
        env = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
        env |= {"OMP_NUM_THREADS": str(len(cores))} if cores else {}
        with log.open("ab") as file, on_cores(cores):
            share = str(max(1, len(os.sched_getaffinity(0)) // self.count))
            env = {"OMP_NUM_THREADS": share, "TORCHINDUCTOR_COMPILE_THREADS": share} | env
            process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)
        self.running[name] = process, gpu, cores

    def ended(self) -> dict[str, int]:
        """The exit codes of the processes that have ended since the last call."""
        codes = {name: code for name, (process, *_) in self.running.items() if (code := process.poll()) is not None}
        for name in codes:
            del self.running[name]
        return codes

    def stop(self) -> None:
        """Kill all, each with the session that it leads: the compiler has processes of its own."""
        for process, *_ in self.running.values():
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
