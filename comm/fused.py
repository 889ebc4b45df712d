"""Sums fused with the GEMMs around them (Chang et al., Flux, arXiv:2406.06858), for steps of many token rows.

A row-parallel layer, the sum of its partial results, residual addition, norm, and the column-parallel layer behind them become
GEMM + reduce-scatter over token rows, addition and norm of this rank's rows only, and all-gather + GEMM. Of T rows each of N ranks
owns R = T / N, and no rank but their owner has the sum of a row before the gather. Everything meets in one symmetric buffer a rank
(`kernels/fused_rows.py` has its layout), reached over NVLink or PCIe; copies between ranks are the copy engines', so they take no
SM from the GEMM that hides them.

Ways to scatter: `owners` computes the rows of one owner after the other, its own last, and the GEMM stores them where
the owner will sum them; `spans` computes the rows of consecutive owners in one GEMM, which uses the SMs better, and copies them to
their owners beside the next GEMM; `tiles` is one kernel that announces each block of rows (the paper's algorithm 1).
Ways to gather: `owners` computes its own rows first, then each other rank's once they have arrived; `spans` its own rows,
then all that are before them and all behind; `tiles` is one kernel whose tiles wait for their rows (algorithm 2).

Rows travel to a gather in one of two directions, which the paper tunes (section 4.3, algorithm 3). Pushed, they are copied by their
owner into every other rank's buffer. Pulled, they are copied by whoever wants them out of their owner's buffer, once all ranks have
told each other that their rows are there. That meeting is a kernel of the current stream: on the stream of copies it might never
get an SM beside a GEMM that fills all of them and waits for rows. For the same reason a flag never comes from the GPU's own memory,
where a copy may be a kernel: a pull fetches it behind the rows from their owner's buffer, where the meeting has put this rank's
epoch. A share of rows may travel in several chunks (the paper's communication tiles), each announced by flags of its own, so that
tiles of its first rows begin before the last have come. `owners` and `spans` take what chunks bring as well, but wait for whole
shares: a product for each chunk would be a finer split of the GEMM, whose price the paper avoids by separating the two. So chunks
are only measured with tiles.

Why one place each for partial sums and rows will do. The launches of a rank come in pairs, a scatter and a gather, with one epoch.
Partial sums of epoch e + 1 are sent by a rank that has received all rows of epoch e, or the offers to pull them, each of which came
behind its owner's reading of all partial sums of epoch e. Rows of epoch e + 1 are written and sent by a rank that has received all
partial sums of epoch e + 1, each of which was computed behind its sender's last reading of rows of epoch e: in its own buffer, which
is the current stream's, and in other ranks', which is the copies' that it pulls by, for the current stream joins them before the
last GEMM of a gather, or, where there is none, before `gather` returns. So whatever is overwritten has been read, whichever way
either pair goes. Flags and offers only grow: whoever writes them for epoch e + 1 does so behind what was just said of epoch e. What is
required: a gather behind each scatter, before the next one, of the same way on all ranks. `wait` and `settle` do both, and push;
after `add_norm`, the first `linear` of what it returned gathers, more of them read what is there, and if there was none the next
scatter gathers first. Since the order is the host's, a CUDA graph must capture whole pairs.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from comm.fused_table import UNFUSED, Pair, PairTable, PairTimes, bucket, machine_key, open_table
from comm.interface import Communicator, Handle, Product, Scattered
from comm.process_group import all_gather
from comm.table import graph_microseconds
from comm.workspace import SharedBuffer, open_shared
from kernels import fused_rows
from kernels.all_gather_gemm import all_gather_gemm
from kernels.dispatch import rejoin
from kernels.fused_rows import BLOCK_ROWS, BLOCKS, Places
from kernels.gemm_reduce_scatter import gemm_reduce_scatter
from kernels.linear import linear
from kernels.tile_gemm import Tiling, candidates

CAPACITY = 128 << 20  # bytes of a residual stream: 8,192 tokens of 8,192 features in 16 bits
MIN_ROWS = 32  # a rank; below, the weights are what a GEMM waits for, and reading them once is best
CHAIN, REPLAYS = 4, 5  # pairs in a graph, and how often it is timed

Split = str  # of a GEMM around a sum: owners, spans, or tilesI, with the I-th likeliest tiling of the shape
UNTILED: tuple[Split, ...] = ("spans", "owners")
TILED: tuple[Split, ...] = ("tiles0", "tiles1")


class Gather(NamedTuple):
    """How rows come to the layer that wants them: see the module's text. chunks: copies of a rank's rows, fewer if they are few."""

    split: Split = "spans"
    pull: bool = False
    chunks: int = 1

    def __str__(self) -> str:
        return f"{self.split}{'-pull' if self.pull else ''}{f'/{self.chunks}' if self.chunks > 1 else ''}"


class Way(NamedTuple):
    """How a pair of layers around a sum meets: see the module's text."""

    scatter: Split = "spans"
    gather: Gather = Gather()

    def __str__(self) -> str:
        return f"{self.scatter}+{self.gather}"


# what is compared for every pair of layers; another tiling costs seconds of compiling
SCATTERS: tuple[Split, ...] = (*UNTILED, TILED[0])
GATHERS: dict[str, Gather] = {
    str(gather): gather
    for gather in (
        *(Gather(split, pull) for split in SCATTERS for pull in (False, True)),
        Gather(TILED[0], chunks=2),
        Gather(TILED[0], chunks=4),
        Gather(TILED[0], pull=True, chunks=4),
    )
}

StreamKey = tuple[int, int, torch.dtype]  # rows rounded up to a power of two, C
ProductKey = tuple[int, int, torch.dtype, int]  # the same, and K


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _stream_key(rows: int, weight: Tensor) -> StreamKey:
    return bucket(rows), weight.shape[0], weight.dtype


def _product_key(rows: int, weight: Tensor) -> ProductKey:
    return *_stream_key(rows, weight), weight.shape[1]


def scatters(pair: Pair) -> list[Split]:
    """What is measured of the ways to scatter."""
    tiled = pair.dtype.itemsize == 2 and all(size % 8 == 0 for size in (pair.k, pair.c, pair.m))
    return [split for split in SCATTERS if tiled or split in UNTILED]


def gathers(pair: Pair) -> list[Gather]:
    """What is measured of the ways to gather: no more chunks than two ranks' shares have blocks."""
    blocks = bucket(pair.rows) // 2 // BLOCK_ROWS
    return [gather for gather in GATHERS.values() if gather.split in scatters(pair) and gather.chunks <= max(1, blocks)]


def ways(pair: Pair) -> list[Way]:
    """What is measured for a pair of layers: each way at either end, beside the default at the other."""
    default = Way()
    ends = [Way(scatter=split) for split in scatters(pair)] + [Way(gather=gather) for gather in gathers(pair)]
    return [default, *(way for way in ends if way != default)]


def best_way(times: PairTimes) -> tuple[Way, float]:
    """The fastest way at either end, and the µs that a pair should take with both."""
    default = Way()
    first = {name.partition("+")[0]: t for name, t in times.items() if name.endswith(f"+{default.gather}")}
    second = {name.partition("+")[2]: t for name, t in times.items() if name.startswith(f"{default.scatter}+")}
    scatter, gather = min(first, key=lambda name: first[name]), min(second, key=lambda name: second[name])
    return Way(scatter, GATHERS[gather]), first[scatter] + second[gather] - times[str(default)]


def tiling_of(split: Split, m: int, n: int, k: int, world_size: int) -> Tiling:
    """The tiling that one of TILED means for (m, k) x (n, k)."""
    found = candidates(m, n, k, world_size)
    return found[min(TILED.index(split), len(found) - 1)]


def names_of(pair: Pair) -> set[str]:
    """What a sound entry of the table has times for."""
    return {str(way) for way in ways(pair)} | {UNFUSED}


def multiply(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = x @ weight.T + bias: (T, K) and (C, K) into contiguous (T, C), which may be another GPU's memory."""
    if len(x) == 0:
        return
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


# --- the buffers ---------------------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """What a rank owns of a stream: R rows of C values."""

    rows: int
    size: int
    dtype: torch.dtype


def chunks_of(rows: int, count: int) -> Iterator[slice]:
    """A rank's rows in up to `count` chunks, in order: each of as many whole blocks as the others or one more, but for the last
    block, which may be short."""
    blocks = fused_rows.blocks_of(rows)
    count = min(count, blocks)
    for i in range(count):
        yield slice(i * blocks // count * BLOCK_ROWS, min(rows, (i + 1) * blocks // count * BLOCK_ROWS))


class Meeting:
    """The buffers of all ranks, and pairs of a scatter and a gather over them, on one stream at a time.

    R rows a rank, N ranks; x, rows and partial sums of one dtype: bf16, fp16 or fp32.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, capacity: int) -> None:
        """Collective. Raises UserError on every rank if the GPUs cannot reach each other."""
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.shared: SharedBuffer = open_shared(fused_rows.buffer_bytes(self.world_size, capacity), device, group)
        self.places = Places(
            rank=self.rank,
            buffers=self.shared.addresses,
            epochs=torch.zeros(BLOCKS, dtype=torch.int64, device=device),
            fault=torch.zeros(1, dtype=torch.int32, device=device),
            capacity=capacity,
        )
        self.copies = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.copying = False  # whether there are copies that the current stream has not joined
        self.held: list[Tensor] = []  # what they read

    @property
    def capturing(self) -> bool:
        return self.copies is not None and torch.cuda.is_current_stream_capturing()

    def check(self) -> None:
        """Raise RuntimeError if a kernel has given up waiting for a rank. Waits for the device."""
        fault = int(self.places.fault)
        if fault:
            raise RuntimeError(f"rank {self.rank} waited in vain for another rank's rows (place {fault})")

    def others(self) -> Iterator[int]:
        """The next rank first, so that no rank is everyone's first."""
        return (owner % self.world_size for owner in range(self.rank + 1, self.rank + self.world_size))

    def sources(self) -> list[int]:
        """The other ranks in the order in which their rows arrive: the rank before this one sends to it first."""
        return list(self.others())[::-1]

    def spans(self) -> list[tuple[int, int]]:
        """Runs of consecutive ranks behind this one and before it: (first, last + 1), either may be empty."""
        return [(self.rank + 1, self.world_size), (0, self.rank)]

    def rows(self, peer: int, share: Share) -> Tensor:
        """The place of all ranks' rows at `peer`: (N * R, C)."""
        return self.shared.view(peer, self.places.rows, (self.world_size * share.rows, share.size), share.dtype)

    def rows_of(self, source: int, peer: int, share: Share) -> Tensor:
        """The place of the rows of `source` at `peer`, (R, C)."""
        return self.rows(peer, share)[source * share.rows :][: share.rows]

    def my_rows(self, peer: int, share: Share) -> Tensor:
        """This rank's place there, (R, C)."""
        return self.rows_of(self.rank, peer, share)

    def partial(self, peer: int, share: Share) -> Tensor:
        """The place of this rank's partial sums of `peer`'s rows, at `peer`: (R, C)."""
        offset = self.places.partials + self.rank * share.rows * share.size * share.dtype.itemsize
        return self.shared.view(peer, offset, (share.rows, share.size), share.dtype)

    def _flags(self, peer: int, first: int, source: int, rows: slice) -> Tensor:
        """The flags at `peer` of those rows of `source`: of partial sums from byte 0, of rows from `row_flags`, offers from `offers`."""
        blocks = slice(rows.start // BLOCK_ROWS, fused_rows.blocks_of(rows.stop))
        return self.shared.view(peer, first, (self.world_size, BLOCKS), torch.int64)[source, blocks]

    def _beside(self) -> AbstractContextManager[object]:
        """The stream of copies, once it has waited for what the current stream has been given."""
        if self.copies is None:
            return nullcontext()
        self.copying = True
        self.copies.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.copies)

    def _announce(self, peer: int, first: int, rows: slice) -> None:
        """Behind a copy of those of this rank's rows to `peer`: in the stream's order the flags arrive after the data."""
        flags = self._flags(peer, first, self.rank, rows)
        flags.copy_(self.places.epochs[: len(flags)])

    # --- scatter ---------------------------------------------------------------------------------------------------------------

    def scatter(self, x: Tensor, weight: Tensor, split: Split) -> None:
        """Begin a pair: x (N * R, K) @ weight (C, K).T, the rows of each owner to its owner."""
        share = Share(len(x) // self.world_size, len(weight), x.dtype)
        if split in TILED:
            self._scatter_tiles(x, weight, share, tiling_of(split, len(x), len(weight), x.shape[1], self.world_size))
        else:
            {"owners": self._scatter_owners, "spans": self._scatter_spans}[split](x, weight, share)

    def _scatter_owners(self, x: Tensor, weight: Tensor, share: Share) -> None:
        for owner in self.others():
            multiply(x[owner * share.rows :][: share.rows], weight, self.partial(owner, share))
        fused_rows.advance(self.places, announced=fused_rows.blocks_of(share.rows))
        multiply(x[self.rank * share.rows :][: share.rows], weight, self.partial(self.rank, share))

    def _scatter_spans(self, x: Tensor, weight: Tensor, share: Share) -> None:
        fused_rows.advance(self.places)
        products = x.new_empty(len(x), len(weight))
        self.held.append(products)
        for first, last in self.spans():
            span = slice(first * share.rows, last * share.rows)
            multiply(x[span], weight, products[span])
            with self._beside():
                for owner in range(first, last):
                    self.partial(owner, share).copy_(products[owner * share.rows :][: share.rows])
                    self._announce(owner, 0, slice(0, share.rows))
        multiply(x[self.rank * share.rows :][: share.rows], weight, self.partial(self.rank, share))

    def _scatter_tiles(self, x: Tensor, weight: Tensor, share: Share, tiling: Tiling) -> None:
        places, mine = self.places, self.rank * share.rows * share.size * share.dtype.itemsize
        fused_rows.advance(places)
        destinations = tuple(buffer + places.partials + mine for buffer in places.buffers)
        flags = tuple(buffer + self.rank * BLOCKS * 8 for buffer in places.buffers)
        gemm_reduce_scatter(x.contiguous(), weight, destinations, flags, places.epochs[:1], self.rank, tiling)

    # --- gather ----------------------------------------------------------------------------------------------------------------

    def gather_linear(self, share: Share, weight: Tensor, bias: Tensor | None, way: Gather) -> Tensor:
        """End a pair: all ranks' rows, of which this rank's (R, C) are in their place, times weight (M, C).T: (N * R, M)."""
        (self._pull if way.pull else self._push)(share, way.chunks)
        rows = self.rows(self.rank, share)
        if way.split in TILED:
            return self._consume_tiles(rows, weight, bias, way.split)
        out = rows.new_empty(len(rows), len(weight))
        {"owners": self._consume_owners, "spans": self._consume_spans}[way.split](rows, weight, bias, out)
        return out

    def gather(self, share: Share) -> Tensor:
        """End a pair: all ranks' rows (N * R, C), in this rank's buffer."""
        self._push(share, 1)
        self.join()
        fused_rows.await_rows(self.places, 0, self.world_size, share.rows)
        return self.rows(self.rank, share)

    def _push(self, share: Share, chunks: int) -> None:
        mine = self.my_rows(self.rank, share)
        with self._beside():
            for peer in self.others():
                place = self.my_rows(peer, share)
                for chunk in chunks_of(share.rows, chunks):
                    place[chunk].copy_(mine[chunk])
                    self._announce(peer, self.places.row_flags, chunk)

    def _pull(self, share: Share, chunks: int) -> None:
        places, rank = self.places, self.rank
        fused_rows.offer_rows(places)
        with self._beside():
            for source in self.sources():
                theirs, place = (self.rows_of(source, peer, share) for peer in (source, rank))
                for chunk in chunks_of(share.rows, chunks):
                    place[chunk].copy_(theirs[chunk])
                    offers = self._flags(source, places.offers, rank, chunk)  # of this rank there: its epoch
                    self._flags(rank, places.row_flags, source, chunk).copy_(offers)

    def join(self) -> None:
        """Have all copies behind the current stream, before the last GEMM of a pair: what comes after it may then start early
        (see `kernels.dispatch.rejoin`)."""
        if self.copies is not None and self.copying:
            torch.cuda.current_stream().wait_stream(self.copies)
        self.copying = False
        self.held.clear()

    def _consume_owners(self, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        share = len(rows) // self.world_size
        sources = [self.rank, *self.sources()]
        for source in sources:
            if source == sources[-1]:
                self.join()
            if source != self.rank:
                fused_rows.await_rows(self.places, source, source + 1, share)
            multiply(rows[source * share :][:share], weight, out[source * share :][:share], bias)

    def _consume_spans(self, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        share = len(rows) // self.world_size
        mine = slice(self.rank * share, (self.rank + 1) * share)
        multiply(rows[mine], weight, out[mine], bias)
        self.join()
        fused_rows.await_rows(self.places, 0, self.world_size, share)
        for first, last in self.spans():
            multiply(rows[first * share : last * share], weight, out[first * share : last * share], bias)

    def _consume_tiles(self, rows: Tensor, weight: Tensor, bias: Tensor | None, split: Split) -> Tensor:
        places, n = self.places, self.world_size
        tiling = tiling_of(split, len(rows), len(weight), rows.shape[1], n)
        flags = self.shared.view(self.rank, places.row_flags, (n, BLOCKS), torch.int64)
        out = all_gather_gemm(rows, weight, flags, places.epochs[:1], self.rank, places.fault, tiling, places.patience)
        self.join()
        rejoin(out)
        return out if bias is None else out.add_(bias)


# --- the communicator ----------------------------------------------------------------------------------------------------------


class _Met(NamedTuple):
    """A pair of layers, and its weights (C, K) and (M, C)."""

    pair: Pair
    first: Tensor
    second: Tensor


class FusedCommunicator(Communicator):
    """`inner`, but sums of many rows behind a row-parallel layer (a `Product`) are fused with it and the layers behind, where that is
    faster.

    Which way, and whether at all, is decided by rows (rounded up to a power of two), features and dtype: the first step of such a
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
        way: Way | None = None,
    ) -> None:
        """Collective. capacity: bytes of a residual stream, a multiple of 256; longer ones are `inner`'s. compare: whether what is
        faster unfused stays so. rebuild: forget what was measured before. measure: times of a pair of layers (see
        `measured_pair`, which None takes on a GPU; on a CPU nothing is measured then). min_rows: a rank, of the shortest stream
        that is fused. way: `default`, from which no measurement leads away; None: one that serves until a pair is measured.
        Raises UserError on every rank if the GPUs of `group` cannot reach each other."""
        self.inner, self.group, self.compare = inner, group, compare
        self.rank, self.world_size = inner.rank, inner.world_size
        self.meeting, self.min_rows, self.default = Meeting(device, group, capacity), min_rows, way or Way()
        self.open: _Rows | None = None  # scattered, and not gathered yet
        self.scatters = 0
        measured = measured_pair if measure is None and device.type == "cuda" else measure
        self.measure = measured if way is None else None
        beside = " ".join(getattr(inner, "ways", [inner.name]))  # what an unfused pair sums with
        key = machine_key(device, self.world_size, beside) if device.type == "cuda" else {"device": "cpu"}
        self.table: PairTable = open_table(key, names_of, group) if self.measure and not rebuild else PairTable(key)
        self.chosen: dict[ProductKey, Way] = {}
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
        self.meeting.check()

    # --- what is fused ---------------------------------------------------------------------------------------------------------

    def takes_product(self, x: Tensor, weight: Tensor) -> bool:
        return self.fuses(x, weight) or self.inner.takes_product(x, weight)

    def fuses(self, x: Tensor, weight: Tensor) -> bool:
        """Whether this product's sum is fused: possible, and not known to be slower."""
        return self.serves(x, weight) and _stream_key(_rows(x), weight) not in self.unfused

    def serves(self, x: Tensor, weight: Tensor) -> bool:
        """Whether x (..., T, K) @ weight (C, K).T can be scattered: whole rows for every rank, and not too few or too many."""
        rows, n = _rows(x), self.world_size
        fits = rows * len(weight) * x.element_size() <= self.meeting.places.capacity and rows <= n * BLOCKS * BLOCK_ROWS
        plain = not torch.is_grad_enabled() and x.dtype == weight.dtype and weight.is_contiguous()
        return n > 1 and rows % n == 0 and rows >= n * self.min_rows and fits and plain

    def defer(self, partial: Tensor | Product) -> Handle:
        if isinstance(partial, Tensor) or not self.fuses(partial.x, partial.weight):
            return self.inner.defer(partial)
        return _Sum(self, partial, self.chosen.get(_product_key(_rows(partial.x), partial.weight), self.default))

    def scatter(self, partial: Product, way: Way) -> None:
        """Begin a pair, once the one before is complete."""
        if self.open is not None:
            self.open.gather()
        self.scatters += 1
        self.meeting.scatter(partial.x.reshape(-1, partial.x.shape[-1]), partial.weight, way.scatter)

    # --- choosing --------------------------------------------------------------------------------------------------------------

    def meet(self, pair: Pair, first: Tensor, second: Tensor) -> None:
        """Remember a pair of layers to decide about."""
        if self.measure is not None and pair.key not in self.decided:
            self.met.setdefault(pair.key, _Met(pair, first, second))

    def decide(self) -> None:
        """Choose for all pairs of layers that were met: collective, for they are measured if the table does not know them. The
        stream must be whole."""
        if self.measure is None or not self.met or self.meeting.capturing:
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
            way, fused = best_way(times)
            if self.chosen.setdefault(_product_key(pair.rows, first), way) != way:
                self.chosen[_product_key(pair.rows, first)] = self.default  # another pair begins alike and wants another way
            if key not in missing:  # what measuring would have compiled, before a graph is captured
                for taken in (way, None):
                    pair_call(self, pair, first, second, taken)()
            stream = _stream_key(pair.rows, first)
            gains[stream] = gains.get(stream, 0.0) + times[UNFUSED] - fused
        self.unfused |= {stream for stream, gain in gains.items() if gain <= 0 and self.compare}


class _Sum(Handle):
    """The sum of a Product, which is computed when the sum is asked for."""

    takes_rows = True

    def __init__(self, comm: FusedCommunicator, partial: Product, way: Way) -> None:
        self.comm, self.partial, self.way = comm, partial, way
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
        self.comm.scatter(self.partial, self.way)
        total = fused_rows.reduce_norm_rows(self.comm.meeting.places, before, weight, eps)
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
        meeting, share = self.comm.meeting, self.share
        self.comm.scatter(self.partial, self.way)
        fused_rows.reduce_rows(meeting.places, share.rows, share.size, share.dtype, before)
        return meeting.gather(share).clone().view(self.shape)


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
            out = comm.meeting.gather_linear(share, weight, bias, self.sum.way.gather)
        else:
            out = linear(comm.meeting.rows(comm.rank, share), weight, bias)
        return out.view(*self.sum.shape[:-1], len(weight))

    def whole(self, rows: Tensor) -> Tensor:
        everyones = rows.new_empty(self.comm.world_size * len(rows), rows.shape[1])
        all_gather(everyones, rows.contiguous(), group=self.comm.group)
        return everyones.view(self.sum.shape)

    def gather(self) -> None:
        """Nobody has asked for these rows: the ranks exchange them all the same."""
        self.comm.open = None
        self.comm.meeting.gather(self.sum.share)


# --- measuring -----------------------------------------------------------------------------------------------------------------


def measured_pair(comm: FusedCommunicator, pair: Pair, first: Tensor, second: Tensor) -> PairTimes:
    """µs of a sum between two layers, first (C, K) and second (M, C), by each way and by none, in CUDA graphs. Collective."""
    calls: dict[str, Callable[[], object]] = {UNFUSED: pair_call(comm, pair, first, second, None)}
    calls |= {str(way): pair_call(comm, pair, first, second, way) for way in ways(pair)}
    return {name: graph_microseconds(call, CHAIN, REPLAYS, comm.group) for name, call in calls.items()}


def pair_call(comm: FusedCommunicator, pair: Pair, first: Tensor, second: Tensor, way: Way | None) -> Callable[[], Tensor]:
    """linear(norm(stream + sum of linear(x, first)), second) of random x (1, T, K) and stream (1, T, C), by `way` or unfused."""
    generator = torch.Generator(first.device).manual_seed(comm.rank)
    shapes = (1, pair.rows, pair.k), (1, pair.rows, pair.c), (pair.c,)
    x, stream, scale = (torch.randn(s, generator=generator, device=first.device, dtype=first.dtype) for s in shapes)

    def call() -> Tensor:
        handle = comm.inner.defer(linear(x, first)) if way is None else _Sum(comm, Product(x, first), way)
        _, normed = handle.add_norm(stream, scale, 1e-5)
        return normed.linear(second) if isinstance(normed, Scattered) else linear(normed, second)

    return call
