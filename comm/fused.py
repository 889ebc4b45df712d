"""All-reduces of many token rows, fused with the GEMMs around them (Chang et al., Flux, arXiv:2406.06858).

A row-parallel layer, the all-reduce of its partial sums, residual addition, norm, and the next column-parallel layer become
GEMM + reduce-scatter over token rows, addition and norm of this rank's rows, and all-gather + GEMM. Of T rows each of N ranks owns
R = T / N, and only the owner of a row has its sum before the gather. `comm/fused_strategies.py` lists the strategies for both
GEMMs, `comm/row_buffers.py` runs them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from comm.fused_strategies import Strategy, best_strategy, names_of, strategies
from comm.fused_table import UNFUSED, Pair, PairTable, PairTimes, bucket, machine_key, open_table
from comm.interface import Communicator, Handle, Product, Scattered
from comm.process_group import all_gather
from comm.row_buffers import RowBuffers, Share
from comm.table import graph_microseconds
from kernels import fused_rows
from kernels.fused_rows import BLOCK_ROWS, BLOCKS
from kernels.linear import linear

CAPACITY = 128 << 20  # bytes of a residual stream: 8,192 tokens of 8,192 features in 16 bits
MIN_ROWS = 32  # a rank; with fewer rows a GEMM is bound by reading the weights, and reading them once is fastest
CHAIN, REPLAYS = 4, 5  # pairs in a graph, and how often it is timed

StreamKey = tuple[int, int, torch.dtype]  # rows rounded up to a power of two, C
ProductKey = tuple[int, int, torch.dtype, int]  # the same, and K


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _stream_key(rows: int, weight: Tensor) -> StreamKey:
    return bucket(rows), weight.shape[0], weight.dtype


def _product_key(rows: int, weight: Tensor) -> ProductKey:
    return *_stream_key(rows, weight), weight.shape[1]


class _Met(NamedTuple):
    """A pair of layers, and its weights (C, K) and (M, C)."""

    pair: Pair
    first: Tensor
    second: Tensor


class FusedCommunicator(Communicator):
    """`inner`, but sums of many rows behind a row-parallel layer (a `Product`) are fused with it and the layers behind, where that is
    faster.

    Which strategy, and whether at all, is decided by rows (rounded up to a power of two), features and dtype: the first step of such a
    shape takes `default`, and at its end, when the stream is whole again, all ways are measured for the layers that it met. All
    such sums of a step are fused, or none is, since a fused one leaves this rank's rows of the stream.
    """

    name = "fused"

    def __init__(
        self,
        inner: Communicator,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        capacity: int = CAPACITY,
        compare: bool = True,
        rebuild: bool = False,
        measure: Callable[["FusedCommunicator", Pair, Tensor, Tensor], PairTimes] | None = None,
        min_rows: int = MIN_ROWS,
        strategy: Strategy | None = None,
    ) -> None:
        """Collective. capacity: bytes of a residual stream, a multiple of 256; longer ones are `inner`'s. compare: whether what is
        faster unfused stays so. rebuild: forget what was measured before. measure: times of a pair of layers (see
        `measured_pair`, which None takes on a GPU; on a CPU nothing is measured then). min_rows: a rank, of the shortest stream
        that is fused. strategy: `default`, from which no measurement leads away; None: one that serves until a pair is measured.
        Raises UserError on every rank if the GPUs of `group` cannot reach each other."""
        self.inner, self.group, self.compare = inner, group, compare
        self.rank, self.world_size = inner.rank, inner.world_size
        self.buffers, self.min_rows, self.default = RowBuffers(device, group, capacity), min_rows, strategy or Strategy()
        self.open: _Rows | None = None  # scattered, and not gathered yet
        self.scatters = 0
        measured = measured_pair if measure is None and device.type == "cuda" else measure
        self.measure = measured if strategy is None else None
        beside = " ".join(getattr(inner, "ways", [inner.name]))  # what an unfused pair sums with
        key = machine_key(device, self.world_size, beside) if device.type == "cuda" else {"device": "cpu"}
        self.table: PairTable = open_table(key, names_of, group) if self.measure and not rebuild else PairTable(key)
        self.chosen: dict[ProductKey, Strategy] = {}
        self.unfused: set[StreamKey] = set()
        self.decided: set[str] = set()  # pairs, by `Pair.key`
        self.met: dict[str, _Met] = {}  # pairs to decide about

    # --- what is inner's -------------------------------------------------------------------------------------------------------

    def start(self, partial: Tensor) -> Handle:
        return self.inner.start(partial)

    def all_gather(self, shard: Tensor) -> Tensor:
        return self.inner.all_gather(shard)

    def check(self) -> None:
        self.inner.check()
        self.buffers.check()

    # --- what is fused ---------------------------------------------------------------------------------------------------------

    def takes_product(self, x: Tensor, weight: Tensor) -> bool:
        return self.fuses(x, weight) or self.inner.takes_product(x, weight)

    def fuses(self, x: Tensor, weight: Tensor) -> bool:
        """Whether this product's sum is fused: possible, and not known to be slower."""
        return self.serves(x, weight) and _stream_key(_rows(x), weight) not in self.unfused

    def serves(self, x: Tensor, weight: Tensor) -> bool:
        """Whether x (..., T, K) @ weight (C, K).T can be scattered: whole rows for every rank, and not too few or too many."""
        rows, n = _rows(x), self.world_size
        fits = rows * len(weight) * x.element_size() <= self.buffers.places.capacity and rows <= n * BLOCKS * BLOCK_ROWS
        plain = not torch.is_grad_enabled() and x.dtype == weight.dtype and weight.is_contiguous()
        return n > 1 and rows % n == 0 and rows >= n * self.min_rows and fits and plain

    def defer(self, partial: Tensor | Product) -> Handle:
        if isinstance(partial, Tensor) or not self.fuses(partial.x, partial.weight):
            return self.inner.defer(partial)
        return _Sum(self, partial, self.chosen.get(_product_key(_rows(partial.x), partial.weight), self.default))

    def scatter(self, partial: Product, strategy: Strategy) -> None:
        """Begin a pair, once the one before is complete."""
        if self.open is not None:
            self.open.gather()
        self.scatters += 1
        self.buffers.scatter(partial.x.reshape(-1, partial.x.shape[-1]), partial.weight, strategy.scatter)

    # --- choosing --------------------------------------------------------------------------------------------------------------

    def meet(self, pair: Pair, first: Tensor, second: Tensor) -> None:
        """Remember a pair of layers to decide about."""
        if self.measure is not None and pair.key not in self.decided:
            self.met.setdefault(pair.key, _Met(pair, first, second))

    def decide(self) -> None:
        """Choose for all pairs of layers that were met: collective, for they are measured if the table does not know them. The
        stream must be whole."""
        if self.measure is None or not self.met or self.buffers.capturing:
            return
        met, self.met = self.met, {}
        self.decided |= set(met)
        missing = {key: those for key, those in met.items() if key not in self.table.times}
        for key, those in missing.items():
            self.table.times[key] = self.measure(self, *those)
        if missing and self.rank == 0:
            self.table.keep()
        gains: dict[StreamKey, float] = {}  # µs of a layer
        for key, (pair, first, second) in met.items():
            times = self.table.times[key]
            strategy, fused = best_strategy(times)
            if self.chosen.setdefault(_product_key(pair.rows, first), strategy) != strategy:
                self.chosen[_product_key(pair.rows, first)] = (
                    self.default
                )  # another pair begins alike and wants another strategy
            if key not in missing:  # what measuring would have compiled, before a graph is captured
                for taken in (strategy, None):
                    pair_call(self, pair, first, second, taken)()
            stream = _stream_key(pair.rows, first)
            gains[stream] = gains.get(stream, 0.0) + times[UNFUSED] - fused
        self.unfused |= {stream for stream, gain in gains.items() if gain <= 0 and self.compare}


class _Sum(Handle):
    """The sum of a Product, which is computed when the sum is asked for."""

    takes_rows = True

    def __init__(self, comm: FusedCommunicator, partial: Product, strategy: Strategy) -> None:
        self.comm, self.partial, self.strategy = comm, partial, strategy
        self.shape = partial.shape

    def wait(self) -> Tensor:
        return self._whole(None)

    def settle(self, x: Tensor) -> Tensor:
        total = self._whole(self._my_rows(x))
        self.comm.decide()
        return total

    def add_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | Scattered]:
        """(this rank's rows (R, C) of x + sum, and all rows' norm, of which every rank has its own)."""
        before = self._my_rows(x)
        self.comm.scatter(self.partial, self.strategy)
        total = fused_rows.reduce_norm_rows(self.comm.buffers.places, before, weight, eps)
        self.comm.open = _Rows(self.comm, self)
        return total, self.comm.open

    def _my_rows(self, x: Tensor) -> Tensor:
        """This rank's rows (R, C) of the stream x, which is whole or just those."""
        rows, n, rank = x.reshape(-1, x.shape[-1]), self.comm.world_size, self.comm.rank
        share = self.share
        if rows.shape[1] != share.size or len(rows) not in (share.rows, share.rows * n) or x.dtype != share.dtype:
            raise ValueError(f"a stream {tuple(x.shape)} {x.dtype} does not match a sum {self.shape} {share.dtype}")
        return (rows if len(rows) == share.rows else rows[rank * share.rows :][: share.rows]).contiguous()

    @property
    def share(self) -> Share:
        return Share(math.prod(self.shape[:-1]) // self.comm.world_size, self.shape[-1], self.partial.x.dtype)

    def _whole(self, before: Tensor | None) -> Tensor:
        """before (R, C), or 0, + the sum: all rows, on every rank."""
        buffers, share = self.comm.buffers, self.share
        self.comm.scatter(self.partial, self.strategy)
        fused_rows.reduce_rows(buffers.places, share.rows, share.size, share.dtype, before)
        return buffers.gather(share).clone().view(self.shape)


class _Rows(Scattered):
    """The normed rows of a scatter, which the first `linear` gathers. They lie in the buffers, so only the newest can be asked."""

    def __init__(self, comm: FusedCommunicator, sum: _Sum) -> None:
        self.comm, self.sum, self.number = comm, sum, comm.scatters

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """(B, T, C) of all ranks together and (M, C) to (B, T, M). Raises RuntimeError once another sum has begun."""
        comm, share = self.comm, self.sum.share
        if self.number != comm.scatters:
            raise RuntimeError("another sum was fused since: its rows lie where these were")
        if comm.open is self:
            comm.open = None
            first = self.sum.partial.weight
            pair = Pair(share.rows * comm.world_size, first.shape[1], share.size, len(weight), share.dtype)
            comm.meet(pair, first, weight)
            out = comm.buffers.gather_linear(share, weight, bias, self.sum.strategy.gather)
        else:
            out = linear(comm.buffers.rows(comm.rank, share), weight, bias)
        return out.view(*self.sum.shape[:-1], len(weight))

    def whole(self, rows: Tensor) -> Tensor:
        everyones = rows.new_empty(self.comm.world_size * len(rows), rows.shape[1])
        all_gather(everyones, rows.contiguous(), group=self.comm.group)
        return everyones.view(self.sum.shape)

    def gather(self) -> None:
        """Nobody has asked for these rows: the ranks exchange them all the same."""
        self.comm.open = None
        self.comm.buffers.gather(self.sum.share)


# --- measuring ---


def measured_pair(comm: FusedCommunicator, pair: Pair, first: Tensor, second: Tensor) -> PairTimes:
    """µs of a sum between two layers, first (C, K) and second (M, C), by each strategy and by none, in CUDA graphs. Collective."""
    calls: dict[str, Callable[[], object]] = {UNFUSED: pair_call(comm, pair, first, second, None)}
    calls |= {str(strategy): pair_call(comm, pair, first, second, strategy) for strategy in strategies(pair)}
    return {name: graph_microseconds(call, CHAIN, REPLAYS, comm.group) for name, call in calls.items()}


def pair_call(
    comm: FusedCommunicator, pair: Pair, first: Tensor, second: Tensor, strategy: Strategy | None
) -> Callable[[], Tensor]:
    """linear(norm(stream + sum of linear(x, first)), second) of random x (1, T, K) and stream (1, T, C), by `strategy` or unfused."""
    generator = torch.Generator(first.device).manual_seed(comm.rank)
    shapes = (1, pair.rows, pair.k), (1, pair.rows, pair.c), (pair.c,)
    x, stream, scale = (torch.randn(s, generator=generator, device=first.device, dtype=first.dtype) for s in shapes)

    def call() -> Tensor:
        handle = comm.inner.defer(linear(x, first)) if strategy is None else _Sum(comm, Product(x, first), strategy)
        _, normed = handle.add_norm(stream, scale, 1e-5)
        return normed.linear(second) if isinstance(normed, Scattered) else linear(normed, second)

    return call
