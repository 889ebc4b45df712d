"""Times of a CUDA graph."""

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
