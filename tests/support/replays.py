"""Replays of a CUDA graph while inputs, the output's memory and the load of the GPU change."""

from collections.abc import Callable

import torch
from torch import Tensor

ROUNDS, EACH = 100, 100


def wrong_replays(compute: Callable[[], Tensor], refresh: Callable[[], None]) -> int:
    """Of 10,000 replays of a captured `compute`, how many gave other bits than a call outside of the graph.

    `refresh` changes the inputs, once in 100 replays. The output holds NaN before each replay, and meanwhile another stream takes
    SMs and bandwidth. Raises AssertionError if the call itself gives NaN."""
    expected, wrong = compute(), torch.zeros((), dtype=torch.int64, device="cuda")
    noise, side, graph = torch.randn(4 << 20, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    bits = expected.view(torch.int16 if expected.itemsize == 2 else torch.int32)
    with torch.cuda.graph(graph):
        out = compute()
        wrong.add_((out.view(bits.dtype) != bits).any())
        out.fill_(torch.nan)
    for _ in range(ROUNDS):
        refresh()
        expected.copy_(compute())
        assert not expected.isnan().any()
        for _ in range(EACH):
            graph.replay()
            with torch.cuda.stream(side):
                noise.mul_(1.0)
    torch.cuda.synchronize()
    return int(wrong)
