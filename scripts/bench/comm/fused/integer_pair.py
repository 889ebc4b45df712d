"""Two layers of small integers with an all-reduce between them, whose results a CUDA graph can check itself."""

import torch
from torch import Tensor

from comm.fused import FusedAllReduce
from comm.fused_strategies import Strategy
from scripts.bench.comm.fused.algorithms import Algorithms
from scripts.bench.comm.parts import Replays


def replays(algorithms: Algorithms, count: int) -> int:
    """Run pairs of layers with every gather repeatedly, on a GPU as replays of a CUDA graph. Returns the number of replays.

    Each replay has other inputs. They are small integers, whose sums are exact, and the graph itself counts wrong values.
    """
    test = Replays(algorithms.device)
    pair = IntegerPair(algorithms, test.step)

    def body() -> None:
        for i, gather in enumerate(algorithms.gathers):
            scatter = algorithms.scatters[i % len(algorithms.scatters)]
            test.wrong.add_(pair.wrong(Strategy(scatter, gather), salt=i))

    test.run(body, count)
    return count


class IntegerPair:
    """Two layers with an all-reduce between them. Its sums (T, C) are at most 4 x 32, so exact even in bf16."""

    def __init__(self, algorithms: Algorithms, step: Tensor) -> None:
        """step: a scalar on the device, on which the inputs depend."""
        self.comm, self.rank, self.ranks, self.step = algorithms.comm, algorithms.rank, algorithms.ranks, step
        self.dtype, device = algorithms.dtype, algorithms.device
        share, self.k, self.c, m = (544, 32, 256, 128) if algorithms.gpu else (2, 32, 16, 24)
        self.rows = share * self.ranks
        self.index = torch.arange(self.rows * self.k, device=device).view(self.rows, self.k)
        columns = torch.arange(self.c * self.k, device=device).view(self.c, self.k)
        self.firsts = [((columns * 7 + columns // self.k + r) % 3 - 1).to(self.dtype) for r in range(self.ranks)]
        behind = torch.arange(m * self.c, device=device).view(m, self.c)
        self.second = ((behind * 5 + behind // self.c) % 3 - 1).to(self.dtype)
        self.scale = torch.ones(self.c, dtype=self.dtype, device=device)
        self.stream = torch.zeros(1, self.rows, self.c, dtype=self.dtype, device=device)

    def inputs(self, rank: int, salt: int) -> Tensor:
        """The inputs (1, T, K) of the first layer on a rank."""
        return ((self.index * 3 + self.index // self.k + self.step * 7 + rank * 5 + salt) % 5 < 2).to(self.dtype)[None]

    def wrong(self, strategy: Strategy, salt: int) -> Tensor:
        """Number of wrong values in the output of a fused pair, and in the whole residual stream of a second all-reduce."""
        inputs = [self.inputs(rank, salt) for rank in range(self.ranks)]
        parts = [x @ first.t() for x, first in zip(inputs, self.firsts, strict=True)]
        total = torch.stack(parts).sum(0)
        mine = inputs[self.rank], self.firsts[self.rank]
        pair, last = (FusedAllReduce(self.comm, *mine, strategy) for _ in range(2))
        rows = pair.scatter_add_norm(self.stream, self.scale, 1e-5)
        out = pair.gather_linear(self.second)
        whole = last.add(rows)
        normed = torch.nn.functional.rms_norm(total, self.scale.shape, self.scale, 1e-5)
        expected = (normed @ self.second.t()).float()
        far = (out.float() - expected).abs() > 0.02 * expected.abs().max()  # norms may round differently
        return far.sum() + (whole != 2 * total).sum()
