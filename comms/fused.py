"""All-reduces of many token rows, fused with the GEMMs around them (Chang et al., Flux, arXiv:2406.06858).

A row-parallel layer, the all-reduce of its partial sums, residual addition, norm, and the next column-parallel layer become
GEMM + reduce-scatter over token rows, addition and norm of this rank's rows, and all-gather + GEMM. Each of N ranks owns
R = T / N of T rows, and only the owner of a row has its sum before the gather. `comms/row_buffers.py` lists the
strategies for both GEMMs, and runs them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from comms.auto import AutoCommunicator
from comms.interface import Communicator, Input, Linear, Norm, PendingAllReduce, Schedule
from comms.process_group import all_gather
from comms.row_buffers import UNFUSED, Pair, RowBuffers, RowShard, Strategy, best_strategy, names_of, strategies
from comms.table import Table, bucket, graph_microseconds, load, machine_key, save
from kernels import fused_rows
from kernels.fused_rows import BLOCK_ROWS, BLOCKS
from kernels.linear import linear
from kernels.norm import rms_norm

CODE = (  # files that decide how long a pair of layers takes
    "comms/fused*.py",
    "comms/row_buffers.py",
    "comms/table.py",
    "kernels/fused_rows.py",
    "kernels/tile_gemm*.py",
)
CAPACITY = 128 << 20  # bytes of a residual stream: 8,192 tokens of 8,192 features in 16 bits
MIN_ROWS = 32  # per rank; with fewer rows, reading the weight is the limit, so it should be read only once
CHAIN, REPLAYS = 4, 5  # pairs in a CUDA graph, and its timed replays

StreamKey = tuple[int, int, torch.dtype]  # `bucket` of the rows, C


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _stream_key(rows: int, weight: Tensor) -> StreamKey:
    return bucket(rows), weight.shape[0], weight.dtype


class _Layers(NamedTuple):
    """A pair of layers, and its weights (C, K) and (M, C)."""

    pair: Pair
    first: Tensor
    second: Tensor


class FusedCommunicator(Communicator):
    """`inner`, but all-reduces of many rows after a row-parallel layer are fused with this layer and the next one, where
    that is faster.

    Whether and how a shape is fused depends on the `bucket` of its rows, its features and its dtype. The first step of a
    new shape uses `default`. At its end, when every rank has the whole residual stream, all strategies are measured for
    the pairs of layers in that step. All such all-reduces of a step are fused, or none is, since a fused one leaves each
    rank only its own rows of the stream.
    """

    name = "fused"

    def __init__(
        self,
        inner: Communicator,
        device: torch.device,
        capacity: int = CAPACITY,
        compare: bool = True,
        rebuild: bool = False,
        measure: Callable[["FusedCommunicator", Pair, Tensor, Tensor], dict[str, float]] | None = None,
        min_rows: int = MIN_ROWS,
        strategy: Strategy | None = None,
    ) -> None:
        """Collective. capacity: bytes of a residual stream, a multiple of 256; longer ones use `inner`. compare: do not
        fuse what is faster unfused. rebuild: ignore earlier measurements. measure: µs of a pair of layers by strategy, the
        same on all ranks; None for `measured_pair` on a GPU and no measurements on a CPU. min_rows: per rank, of the
        shortest stream that is fused. strategy: used for all shapes, without measurements; None measures and chooses. Raises
        UserError on every rank if the GPUs have no peer access."""
        self.inner, self.compare = inner, compare
        self.rank, self.world_size = inner.rank, inner.world_size
        self.buffers, self.min_rows, self.default = RowBuffers(device, capacity), min_rows, strategy or Strategy()
        self.fused = 0  # all-reduces that were fused
        measured = measured_pair if measure is None and device.type == "cuda" else measure
        self.measure = measured if strategy is None else None
        key = {"device": "cpu"}
        if device.type == "cuda":
            unfused = inner.algorithms if isinstance(inner, AutoCommunicator) else [inner.name]
            key = machine_key(device, self.world_size, torch.bfloat16, CODE) | {"unfused": " ".join(unfused)}
        self.table = Table("fused", key) if self.measure is None else load("fused", key, names_of, rebuild=rebuild)
        self.chosen: dict[str, Strategy] = {}  # by `Pair.key`
        self.unfused: set[StreamKey] = set()
        self.undecided: dict[str, _Layers] = {}  # pairs of this step

    # --- passed on to inner -----------------------------------------------------------------------------------------------

    def use(self, schedule: Schedule) -> None:
        super().use(schedule)
        self.inner.use(schedule)

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        return self.inner.begin_all_reduce(partial, overlap)

    def all_gather(self, shard: Tensor) -> Tensor:
        return self.inner.all_gather(shard)

    # --- fused all-reduces ------------------------------------------------------------------------------------------------

    def begin_linear_all_reduce(self, x: Input, layer: Linear, overlap: bool = False) -> PendingAllReduce:
        if overlap or layer.bias is not None or layer.only_called or not self.fuses(x, layer.weight):
            return self.inner.begin_linear_all_reduce(x, layer, overlap)
        return FusedAllReduce(self, x, layer.weight, self.default)

    def fuses(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the all-reduce after this layer is fused: if that is possible, and not known to be slower."""
        return self.supports(x, weight) and _stream_key(_rows(x), weight) not in self.unfused

    def supports(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the all-reduce of x (..., T, K) @ weight (C, K).T can be fused: the same number of rows for every rank,
        within the limits, without autograd."""
        rows, n = _rows(x), self.world_size
        fits = rows * len(weight) * x.element_size() <= self.buffers.layout.capacity and rows <= n * BLOCKS * BLOCK_ROWS
        plain = not torch.is_grad_enabled() and x.dtype == weight.dtype and weight.is_contiguous()
        return n > 1 and rows % n == 0 and rows >= n * self.min_rows and fits and plain

    def gather_rows(self, rows: Tensor) -> Tensor:
        gathered = rows.new_empty(self.world_size * len(rows), rows.shape[1])
        all_gather(gathered, rows.contiguous())
        return gathered

    # --- choosing ---------------------------------------------------------------------------------------------------------

    def remember(self, pair: Pair, first: Tensor, second: Tensor) -> None:
        """Remember a pair of layers, for `decide` at the end of the step."""
        if self.measure is not None and pair.key not in self.chosen:
            self.undecided.setdefault(pair.key, _Layers(pair, first, second))

    def decide(self) -> None:
        """Choose strategies for the pairs of this step. Measures those that are not in the table."""
        if self.measure is None or not self.undecided or self.buffers.capturing:
            return
        pairs, self.undecided = self.undecided, {}
        missing = {key: layers for key, layers in pairs.items() if key not in self.table.times}
        for key, layers in missing.items():
            self.table.times[key] = self.measure(self, *layers)
        if missing:
            save(self.table, names_of)
        gains: dict[StreamKey, float] = {}  # µs of a layer
        for key, (pair, first, second) in pairs.items():
            times = self.table.times[key]
            self.chosen[key], fused = best_strategy(times)
            if key not in missing:  # compile before a graph is captured, as a measurement would
                for choice in (self.chosen[key], None):
                    pair_call(self, pair, first, second, choice)()
            stream = _stream_key(pair.rows, first)
            gains[stream] = gains.get(stream, 0.0) + times[UNFUSED] - fused
        self.unfused |= {stream for stream, gain in gains.items() if gain <= 0 and self.compare}


class FusedAllReduce(PendingAllReduce):
    """The all-reduce of x (..., T, K) @ weight (C, K).T. The layer is also computed when the result is read."""

    scatters = True

    def __init__(self, comm: FusedCommunicator, x: Tensor, weight: Tensor, strategy: Strategy) -> None:
        self.comm, self.x, self.weight, self.strategy = comm, x, weight, strategy
        self.shape = (*x.shape[:-1], len(weight))
        self.shard = RowShard(_rows(x) // comm.world_size, len(weight), x.dtype)

    def wait(self) -> Tensor:
        return self._all_rows(None)

    def add(self, x: Tensor) -> Tensor:
        return self._all_rows(self._own_rows(x))

    def add_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = self.add(x)
        return total, rms_norm(total, weight, eps)

    def add_norm_linear(self, x: Tensor, norm: Norm, layer: Linear) -> tuple[Tensor, Tensor]:
        """(this rank's rows (R, C) of x + sum, layer(norm(x + sum)))."""
        pair = Pair(_rows(self.x), self.x.shape[-1], self.shard.size, layer.out_features, self.shard.dtype)
        self.strategy = self.comm.chosen.get(pair.key, self.strategy)
        rows = self.scatter_add_norm(x, norm.scale, norm.eps)
        if layer.only_called:
            return rows, layer(self.comm.buffers.gather(self.shard).clone().view(self.shape))
        self.comm.remember(pair, self.weight, layer.weight)
        return rows, layer.finish(self.gather_linear(layer.weight, layer.whole_bias()))

    def scatter_add_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """This rank's rows (R, C) of x + sum. Their norm is stored in the buffers. `gather_linear` must follow."""
        x_rows = self._own_rows(x)
        self._scatter()
        return fused_rows.reduce_norm_rows(self.comm.buffers.layout, x_rows, weight, eps)

    def gather_linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The normed rows of all ranks times weight (M, C).T, + bias: (..., T, M)."""
        out = self.comm.buffers.gather_linear(self.shard, weight, bias, self.strategy.gather)
        return out.view(*self.shape[:-1], len(weight))

    def _own_rows(self, x: Tensor) -> Tensor:
        """This rank's rows (R, C) of the stream x, which has all rows or only those. Raises ValueError for other shapes."""
        rows, rank, shard = x.reshape(-1, x.shape[-1]), self.comm.rank, self.shard
        if rows.shape[1] != shard.size or len(rows) not in (shard.rows, _rows(self.x)) or x.dtype != shard.dtype:
            raise ValueError(f"a stream {tuple(x.shape)} {x.dtype} does not match an all-reduce {self.shape} {shard.dtype}")
        return (rows if len(rows) == shard.rows else rows[rank * shard.rows :][: shard.rows]).contiguous()

    def _scatter(self) -> None:
        self.comm.fused += 1
        self.comm.buffers.scatter(self.x.reshape(-1, self.x.shape[-1]), self.weight, self.strategy.scatter)

    def _all_rows(self, x_rows: Tensor | None) -> Tensor:
        """x_rows (R, C), or 0, + the sum: all rows on every rank."""
        buffers, shard = self.comm.buffers, self.shard
        self._scatter()
        fused_rows.reduce_rows(buffers.layout, shard.rows, shard.size, shard.dtype, x_rows)
        return buffers.gather(shard).clone().view(self.shape)


# --- measuring ------------------------------------------------------------------------------------------------------------


def measured_pair(comm: FusedCommunicator, pair: Pair, first: Tensor, second: Tensor) -> dict[str, float]:
    """µs of two layers, first (C, K) and second (M, C), with an all-reduce between them, by each strategy and unfused, in
    CUDA graphs, on the slowest rank. Collective."""
    calls: dict[str, Callable[[], object]] = {UNFUSED: pair_call(comm, pair, first, second, None)}
    calls |= {str(strategy): pair_call(comm, pair, first, second, strategy) for strategy in strategies(pair)}
    return {name: graph_microseconds(call, CHAIN, REPLAYS) for name, call in calls.items()}


def pair_call(
    comm: FusedCommunicator, pair: Pair, first: Tensor, second: Tensor, strategy: Strategy | None
) -> Callable[[], Tensor]:
    """A function that computes second_layer(norm(stream + all_reduce(first_layer(x)))) for random x (1, T, K) and stream (1, T,
    C), by `strategy`, or unfused if it is None."""
    generator = torch.Generator(first.device).manual_seed(comm.rank)
    shapes = (1, pair.rows, pair.k), (1, pair.rows, pair.c), (pair.c,)
    x, stream, scale = (torch.randn(s, generator=generator, device=first.device, dtype=first.dtype) for s in shapes)

    def call() -> Tensor:
        if strategy is not None:
            fused = FusedAllReduce(comm, x, first, strategy)
            fused.scatter_add_norm(stream, scale, 1e-5)
            return fused.gather_linear(second)
        _, normed = comm.inner.begin_all_reduce(linear(x, first)).add_norm(stream, scale, 1e-5)
        return linear(normed, second)

    return call
