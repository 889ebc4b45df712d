"""A rank of the GPU test of GEMMs fused with their collectives: every split and gather against sums in fp32, as exact as a GEMM and
NCCL, and in CUDA graphs that are replayed.

    python launch.py --ranks 4 -m tests.comm.gpu_fused_rank REPORT.json
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from comms.fused import FusedAllReduce, FusedCommunicator
from comms.process_group import all_gather
from comms.row_buffers import GATHERS, TILED, UNTILED, Gather, RowShard, Split, Strategy
from kernels import fused_rows
from scripts.bench.comm.parts import Parts, join_ranks
from tests.support.gpu_checks import Replays
from tp import World
from training.weights import reduce_scatter

CAPACITY, CPU_CAPACITY = 8192 * 12288 * 2, 1 << 18  # bytes of a residual stream on a GPU, and on a CPU
WIDE, NARROW = 512, 64  # features of a layer over all ranks
ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
MOST_ROWS = 64  # most rows of each owner that are checked
REPLAYS = 1000

Call = Callable[[], Tensor]


class Expected(NamedTuple):
    """Numbers of some rows of a result, and the fp32 values of these rows."""

    rows: Tensor
    values: Tensor


def gathered(rows: Tensor, ranks: int) -> Tensor:
    """The rows of all ranks, in the order of the ranks. Collective."""
    found = rows.new_empty(len(rows) * ranks, rows.shape[1])
    all_gather(found, rows)
    return found


class Checks(Parts):
    """The splits and gathers that this machine can run, and their checks."""

    def __init__(self, world: World) -> None:
        """Collective: opens the buffers of the fused algorithms."""
        super().__init__(world)
        self.rank, self.ranks, self.gpu = world.rank, world.world_size, world.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        capacity = CAPACITY if self.gpu else CPU_CAPACITY
        self.comm = FusedCommunicator(world.comm, world.device, capacity=capacity, min_rows=1, strategy=Strategy())
        self.scatters: list[Split] = [*UNTILED, TILED] if self.gpu else list(UNTILED)
        others = [Gather(split) for split in self.scatters if split not in GATHERS]
        self.gathers = [gather for gather in (*GATHERS.values(), *others) if gather.split in self.scatters]

    def check(self) -> None:
        self.comm.check()

    def layer(self, scatter: bool, m: int) -> int:
        """Check all algorithms of a layer for m rows. Returns the number of algorithms. Collective.

        Repeated calls have the same input, so that a rank that is ahead overwrites rows that others still read with equal values.
        """
        n, k = (NARROW, WIDE // self.ranks) if scatter else (WIDE // self.ranks, NARROW)
        weight, x = self.random(n, k) / k**0.5, self.random(m if scatter else m // self.ranks, k)
        expected = self.expected(scatter, x, weight)
        (_, unfused), *fused = self.calls(scatter, x, weight)
        rounding = torch.finfo(self.dtype).eps + (WIDE if scatter else NARROW) ** 0.5 * torch.finfo(torch.float32).eps
        allowed = max(2 * self.error(unfused, expected), rounding * self.largest(expected.values))
        for name, call in fused:
            self.spoil_buffers(scatter, x)
            error = self.error(call, expected)
            assert error <= allowed, f"{name}: an error of {error}, {allowed} is allowed"
        return len(fused)

    def calls(self, scatter: bool, x: Tensor, weight: Tensor) -> Iterator[tuple[str, Call]]:
        """A GEMM and its collective, then the fused ones.

        x: all m rows of this rank's input features (scatter), or this rank's m / ranks rows of all features (gather).
        """
        yield "unfused", partial(self.reduce_scattered if scatter else self.gathered_first, x, weight)
        for split in self.scatters if scatter else ():
            yield split, partial(self.fused_scatter, x, weight, split)
        for gather in () if scatter else self.gathers:
            yield str(gather), partial(self.fused_gather, x, weight, gather)

    def gathered_first(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(gathered(x, self.ranks), weight.t())

    def reduce_scattered(self, x: Tensor, weight: Tensor) -> Tensor:
        products = torch.mm(x, weight.t())
        mine = products.new_empty(len(x) // self.ranks, len(weight))
        reduce_scatter(mine, products)
        return mine

    def fused_scatter(self, x: Tensor, weight: Tensor, split: Split) -> Tensor:
        buffers, shard = self.comm.buffers, RowShard(len(x) // self.ranks, len(weight), x.dtype)
        buffers.scatter(x, weight, split)
        fused_rows.reduce_rows(buffers.layout, shard.rows, shard.size, shard.dtype, None)
        buffers.join()
        return buffers.my_rows(self.rank, shard)

    def fused_gather(self, x: Tensor, weight: Tensor, gather: Gather) -> Tensor:
        """Of rows that are in the buffer already, where the norm before the layer writes them."""
        buffers = self.comm.buffers
        fused_rows.advance(buffers.layout)
        return buffers.gather_linear(RowShard(len(x), x.shape[1], x.dtype), weight, None, gather)

    def spoil_buffers(self, scatter: bool, x: Tensor) -> None:
        """Fill the buffers of partial sums and rows with NaNs, so that results of an earlier call cannot hide an error of a later
        one. A gather's own input rows x are written into the buffer again."""
        buffers = self.comm.buffers
        buffers.shared.views[self.rank][buffers.layout.partials :].fill_(255)
        if not scatter:
            buffers.my_rows(self.rank, RowShard(len(x), x.shape[1], x.dtype)).copy_(x)

    def expected(self, scatter: bool, x: Tensor, weight: Tensor) -> Expected:
        """In a scatter, some of this rank's rows of the result, else some of all rows. Collective."""
        if scatter:
            share = len(x) // self.ranks
            some = torch.arange(0, share, max(1, share // MOST_ROWS), device=x.device)
            parts = torch.cat([x[owner * share + some] for owner in range(self.ranks)]).float() @ weight.float().t()
            dist.all_reduce(parts)
            return Expected(some, parts[self.rank * len(some) :][: len(some)])
        rows = gathered(x, self.ranks)
        some = torch.arange(0, len(rows), max(1, len(x) // MOST_ROWS), device=x.device)
        return Expected(some, rows[some].float() @ weight.float().t())

    def error(self, call: Call, expected: Expected) -> float:
        """The largest error of a call's result on any rank. Collective."""
        dist.barrier()  # no rank is still reading what this call overwrites
        result = call()
        error = self.largest(result[expected.rows].float() - expected.values)
        dist.barrier()
        return error

    def largest(self, x: Tensor) -> float:
        """The largest magnitude on any rank, inf if there is a NaN. Collective."""
        largest = x.abs().max()
        largest = torch.where(largest.isnan(), torch.inf, largest)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    def replays(self, count: int) -> int:
        """Run pairs of layers with every gather repeatedly, on a GPU as replays of a CUDA graph. Returns the number of replays.

        Each replay has other inputs. They are small integers, whose sums are exact, and the graph itself counts wrong values.
        """
        test = Replays(self.world.device)
        pair = IntegerPair(self, test.step)

        def body() -> None:
            for i, gather in enumerate(self.gathers):
                test.wrong.add_(pair.wrong(Strategy(self.scatters[i % len(self.scatters)], gather), salt=i))

        test.run(body, count)
        return count


class IntegerPair:
    """Two layers with an all-reduce between them. Its sums (T, C) are at most 4 x 32, so exact even in bf16."""

    def __init__(self, checks: Checks, step: Tensor) -> None:
        """step: a scalar on the device, on which the inputs depend."""
        self.comm, self.rank, self.ranks, self.step = checks.comm, checks.rank, checks.ranks, step
        self.dtype, device = checks.dtype, checks.world.device
        share, self.k, self.c, m = (544, 32, 256, 128) if checks.gpu else (2, 32, 16, 24)
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


@torch.inference_mode()
def checked(world: World, rows: tuple[int, ...] = ROWS, replays: int = REPLAYS) -> Checks:
    """Run all checks. Collective."""
    checks = Checks(world)
    checks.part("replays", partial(checks.replays, replays))
    for m in rows:
        for scatter in (True, False):
            checks.part(f"{'GEMM + reduce-scatter' if scatter else 'all-gather + GEMM'} {m}", partial(checks.layer, scatter, m))
    return checks


if __name__ == "__main__":
    checked(join_ranks("cuda")).write_gpu_report(Path(sys.argv[1]))
    dist.destroy_process_group()
