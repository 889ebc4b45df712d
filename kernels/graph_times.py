"""Times of a CUDA graph."""

from collections.abc import Callable
from itertools import pairwise

import torch


def replay_seconds(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Seconds of each of `replays` replays, measured by CUDA events."""
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return times


def successive_seconds(call: Callable[[], object], calls: int) -> list[float]:
    """Seconds on the device of each of `calls` calls in a row, after one that is not timed. The host does not wait between them,
    so that a rank whose host is late does not delay the others."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    for event in events:
        call()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
