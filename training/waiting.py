"""Waiting for communication, and how long it held computation up."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Exposed:
    """Adds up the time that computation stood still for communication.

    On a CPU it is the time spent in a wait. On a GPU it is the time between two events around the wait in the compute
    stream, which is read only when asked for, so that measuring never stalls the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if self.device.type == "cuda":
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            yield
            after.record()
            self.events.append((before, after))
        else:
            start = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - start

    def wait(self, work: dist.Work | None) -> None:
        if work is not None:
            with self.waiting():
                work.wait()

    def take(self) -> float:
        """Seconds since the last call. On a GPU the host waits for the device."""
        if self.events:
            torch.cuda.synchronize(self.device)
            self.seconds += sum(before.elapsed_time(after) for before, after in self.events) / 1e3
            self.events.clear()
        seconds, self.seconds = self.seconds, 0.0
        return seconds
