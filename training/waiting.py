"""Waits for communication, and measures how long it blocked computation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Exposed:
    """Adds up the time in which computation waited for communication.

    On a CPU it is the time spent in waits. On a GPU it is the time between two events in the compute stream, before and
    after a wait. The events are read only by `take`, so that measuring never makes the host wait. In a CUDA graph, which is one
    rank's, nothing is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield
        elif self.device.type == "cuda":
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
