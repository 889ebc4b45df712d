"""Buffers for all-reduces that are fused with GEMMs: each of N ranks owns R token rows, and all ranks address all buffers.

The launches of a rank come in pairs, a scatter and a gather. They use one symmetric buffer per rank, over NVLink or PCIe
(`kernels/fused_rows.py` has its layout). Copies between ranks run on the copy engines, so they use no SMs, which the concurrent
GEMM needs. Both launches of a pair have one epoch number, and there must be one gather after each scatter, before the next scatter, with
the same strategy on all ranks. A CUDA graph must capture whole pairs.

No double buffering is needed:

- *Partial sums.* A rank sends those of epoch e + 1 after it has received all rows of e, or their ready flags. The owner of rows sends
  these after it has read all partial sums of e.
- *Rows.* A rank writes and sends those of epoch e + 1 after it has received all partial sums of e + 1. Their sender computed them after its
  last read of rows of e: the current stream waits for the copies of a gather before its last GEMM, or before `gather` returns.
- *Flags* only increase, and are written after their data. The exchange of ready flags is a kernel on the current stream, because on the
  copy stream it might find no free SM. A pull copies its flag from the owner's buffer, after the rows, for the same reason.

Sections and algorithms are those of Flux (Chang et al., arXiv:2406.06858).

Scatter (GEMM + reduce-scatter):
  owners  one GEMM for the rows of each rank, this rank's last; it writes to the owner's buffer
  spans   one GEMM for the rows of later ranks, one for earlier ranks; copy engines send them during the next GEMM
  tiles   one kernel that sets the flag of each block of rows when it is written (algorithm 1)
Gather (all-gather + GEMM):
  owners  this rank's rows first, then those of each other rank when they have arrived
  spans   this rank's rows first, then those of later ranks, then those of earlier ranks
  tiles   one kernel whose tiles wait for their rows (algorithm 2)

In a gather, rows are pushed by their owner to all buffers, or pulled by each reader from the owner's buffer (section 4.3,
algorithm 3). A rank's rows may be sent in several chunks, the paper's communication tiles. `owners` and `spans` wait for
all chunks of a rank, so chunks are measured with `tiles` only.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from comms.interface import fault_word
from comms.table import bucket
from comms.workspace import SharedBuffer, open_shared
from kernels import fused_rows
from kernels.dispatch import rejoin
from kernels.fused_rows import BLOCK_ROWS, BLOCKS, BufferLayout
from kernels.tile_gemm import GemmTiling, all_gather_gemm, default_tiling, gemm_reduce_scatter

UNFUSED = "unfused"


@dataclass(frozen=True)
class Pair:
    """Two layers with an all-reduce between them, on one rank: (rows, k) x (c, k), the all-reduce, then (rows, c) x (m, c)."""

    rows: int
    k: int
    c: int
    m: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        return f"{bucket(self.rows)},{self.k},{self.c},{self.m},{str(self.dtype).removeprefix('torch.')}"

    @classmethod
    def parse(cls, key: str) -> "Pair":
        """A pair with that key. Raises ValueError, or AttributeError for an unknown dtype."""
        *sizes, dtype = key.split(",")
        rows, k, c, m = map(int, sizes)
        return cls(rows, k, c, m, getattr(torch, dtype))


# --- strategies -----------------------------------------------------------------------------------------------------------

Split = str  # how a GEMM is split: owners, spans, or tiles
UNTILED: tuple[Split, ...] = ("spans", "owners")
TILED: Split = "tiles"


class Gather(NamedTuple):
    """All-gather + GEMM. chunks: number of copies of a rank's rows, at most."""

    split: Split = "spans"
    pull: bool = False
    chunks: int = 1

    def __str__(self) -> str:
        return f"{self.split}{'-pull' if self.pull else ''}{f'/{self.chunks}' if self.chunks > 1 else ''}"


class Strategy(NamedTuple):
    """How two layers and the all-reduce between them are computed."""

    scatter: Split = "spans"
    gather: Gather = Gather()

    def __str__(self) -> str:
        return f"{self.scatter}+{self.gather}"


# what is measured for each pair of layers; each tiling takes seconds to compile
SCATTERS: tuple[Split, ...] = (*UNTILED, TILED)
GATHERS: dict[str, Gather] = {
    str(gather): gather
    for gather in (
        *(Gather(split, pull) for split in SCATTERS for pull in (False, True)),
        Gather(TILED, chunks=2),
        Gather(TILED, chunks=4),
        Gather(TILED, pull=True, chunks=4),
    )
}


def scatters(pair: Pair) -> list[Split]:
    """The scatters to measure."""
    tiled = pair.dtype.itemsize == 2 and all(size % 8 == 0 for size in (pair.k, pair.c, pair.m))
    return [split for split in SCATTERS if tiled or split in UNTILED]


def gathers(pair: Pair) -> list[Gather]:
    """The gathers to measure. With two ranks, a rank has at least as many blocks of rows as chunks."""
    blocks = bucket(pair.rows) // 2 // BLOCK_ROWS
    return [gather for gather in GATHERS.values() if gather.split in scatters(pair) and gather.chunks <= max(1, blocks)]


def strategies(pair: Pair) -> list[Strategy]:
    """The strategies to measure: each scatter with the default gather, and each gather with the default scatter."""
    default = Strategy()
    ends = [Strategy(scatter=split) for split in scatters(pair)] + [Strategy(gather=gather) for gather in gathers(pair)]
    return [default, *(strategy for strategy in ends if strategy != default)]


def best_strategy(times: dict[str, float]) -> tuple[Strategy, float]:
    """The fastest scatter combined with the fastest gather, and the expected µs of a pair with both."""
    default = Strategy()
    first = {name.partition("+")[0]: t for name, t in times.items() if name.endswith(f"+{default.gather}")}
    second = {name.partition("+")[2]: t for name, t in times.items() if name.startswith(f"{default.scatter}+")}
    scatter, gather = min(first, key=lambda name: first[name]), min(second, key=lambda name: second[name])
    return Strategy(scatter, GATHERS[gather]), first[scatter] + second[gather] - times[str(default)]


def names_of(key: str) -> set[str]:
    """The names in the table for pairs with this key. Raises ValueError or AttributeError as `Pair.parse`."""
    return {str(strategy) for strategy in strategies(Pair.parse(key))} | {UNFUSED}


# --- buffers ---------------------------------------------------------------------------------------------------------------


def multiply(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = x @ weight.T + bias: (T, K) and (C, K) into contiguous (T, C), which may be another GPU's memory."""
    if len(x) == 0:
        return
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class RowShard(NamedTuple):
    """The shape and dtype of the part of a residual stream that a rank owns: R = `rows` rows of C = `size` values."""

    rows: int
    size: int
    dtype: torch.dtype


def chunks_of(rows: int, count: int) -> Iterator[slice]:
    """A rank's rows in up to `count` chunks, in order. Chunks are whole blocks, of which the last may be short, and differ
    by at most one block."""
    blocks = fused_rows.blocks_of(rows)
    count = min(count, blocks)
    for i in range(count):
        yield slice(i * blocks // count * BLOCK_ROWS, min(rows, (i + 1) * blocks // count * BLOCK_ROWS))


class RowBuffers:
    """The buffers of all ranks, and pairs of a scatter and a gather over them, on one stream at a time.

    N ranks with R rows each. x, rows and partial sums have one dtype: bf16, fp16 or fp32.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        """Collective. Raises UserError on every rank if the GPUs have no peer access."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.shared: SharedBuffer = open_shared(fused_rows.buffer_bytes(self.world_size, capacity), device)
        self.layout = BufferLayout(
            rank=self.rank,
            buffers=self.shared.addresses,
            epochs=torch.zeros(BLOCKS, dtype=torch.int64, device=device),
            fault=fault_word(device),
            capacity=capacity,
        )
        self.copy_stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.must_join = False  # whether the current stream must still join copy_stream
        self.keep_alive: list[Tensor] = []  # tensors that these copies read

    @property
    def capturing(self) -> bool:
        return self.copy_stream is not None and torch.cuda.is_current_stream_capturing()

    def others(self) -> Iterator[int]:
        """The other ranks, the next one first, so that each rank begins with a different one."""
        return (owner % self.world_size for owner in range(self.rank + 1, self.rank + self.world_size))

    def sources(self) -> list[int]:
        """The other ranks in the order in which their rows arrive: the previous rank sends to this one first."""
        return list(self.others())[::-1]

    def spans(self) -> list[tuple[int, int]]:
        """The consecutive ranks after this one, and those before it: (first, last + 1). Either may be empty."""
        return [(self.rank + 1, self.world_size), (0, self.rank)]

    def rows(self, peer: int, shard: RowShard) -> Tensor:
        """The rows of all ranks in the buffer of `peer`: (N * R, C)."""
        return self.shared.view(peer, self.layout.rows, (self.world_size * shard.rows, shard.size), shard.dtype)

    def rows_of(self, source: int, peer: int, shard: RowShard) -> Tensor:
        """The rows of `source` in the buffer of `peer`: (R, C)."""
        return self.rows(peer, shard)[source * shard.rows :][: shard.rows]

    def my_rows(self, peer: int, shard: RowShard) -> Tensor:
        """This rank's rows in the buffer of `peer`: (R, C)."""
        return self.rows_of(self.rank, peer, shard)

    def partial(self, peer: int, shard: RowShard) -> Tensor:
        """This rank's partial sums of the rows of `peer`, in the buffer of `peer`: (R, C)."""
        offset = self.layout.partials + self.rank * shard.rows * shard.size * shard.dtype.itemsize
        return self.shared.view(peer, offset, (shard.rows, shard.size), shard.dtype)

    def _flags(self, peer: int, first: int, source: int, rows: slice) -> Tensor:
        """The flags for these rows of `source` in the buffer of `peer`. first: offset of the kind of flags: 0 for partial
        sums, `layout.row_flags` for rows, `layout.ready_flags`."""
        blocks = slice(rows.start // BLOCK_ROWS, fused_rows.blocks_of(rows.stop))
        return self.shared.view(peer, first, (self.world_size, BLOCKS), torch.int64)[source, blocks]

    def _copying(self) -> AbstractContextManager[object]:
        """A context that uses copy_stream, after it has waited for the current stream. On CPU: no effect."""
        if self.copy_stream is None:
            return nullcontext()
        self.must_join = True
        self.copy_stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.copy_stream)

    def _set_flags(self, peer: int, first: int, rows: slice) -> None:
        """Set the flags of this rank's `rows` at `peer` after their copy, because copies of one stream arrive in order."""
        flags = self._flags(peer, first, self.rank, rows)
        flags.copy_(self.layout.epochs[: len(flags)])

    # --- scatter ----------------------------------------------------------------------------------------------------------

    def scatter(self, x: Tensor, weight: Tensor, split: Split) -> None:
        """Begin a pair: send each row of x (N * R, K) @ weight (C, K).T to its owner."""
        shard = RowShard(len(x) // self.world_size, len(weight), x.dtype)
        if split == TILED:
            self._scatter_tiles(x, weight, shard, default_tiling(len(x), len(weight), x.shape[1], self.world_size))
        else:
            {"owners": self._scatter_owners, "spans": self._scatter_spans}[split](x, weight, shard)

    def _scatter_owners(self, x: Tensor, weight: Tensor, shard: RowShard) -> None:
        for owner in self.others():
            multiply(x[owner * shard.rows :][: shard.rows], weight, self.partial(owner, shard))
        fused_rows.advance(self.layout, ready_blocks=fused_rows.blocks_of(shard.rows))
        multiply(x[self.rank * shard.rows :][: shard.rows], weight, self.partial(self.rank, shard))

    def _scatter_spans(self, x: Tensor, weight: Tensor, shard: RowShard) -> None:
        fused_rows.advance(self.layout)
        products = x.new_empty(len(x), len(weight))
        self.keep_alive.append(products)
        for first, last in self.spans():
            span = slice(first * shard.rows, last * shard.rows)
            multiply(x[span], weight, products[span])
            with self._copying():
                for owner in range(first, last):
                    self.partial(owner, shard).copy_(products[owner * shard.rows :][: shard.rows])
                    self._set_flags(owner, 0, slice(0, shard.rows))
        multiply(x[self.rank * shard.rows :][: shard.rows], weight, self.partial(self.rank, shard))

    def _scatter_tiles(self, x: Tensor, weight: Tensor, shard: RowShard, tiling: GemmTiling) -> None:
        layout, offset = self.layout, self.rank * shard.rows * shard.size * shard.dtype.itemsize
        fused_rows.advance(layout)
        destinations = tuple(buffer + layout.partials + offset for buffer in layout.buffers)
        flags = tuple(buffer + self.rank * BLOCKS * 8 for buffer in layout.buffers)
        gemm_reduce_scatter(x.contiguous(), weight, destinations, flags, layout.epochs[:1], self.rank, tiling)

    # --- gather -----------------------------------------------------------------------------------------------------------

    def gather_linear(self, shard: RowShard, weight: Tensor, bias: Tensor | None, strategy: Gather) -> Tensor:
        """End a pair: all ranks' rows times weight (M, C).T, (N * R, M). This rank's rows must be in its buffer."""
        (self._pull if strategy.pull else self._push)(shard, strategy.chunks)
        rows = self.rows(self.rank, shard)
        if strategy.split == TILED:
            return self._consume_tiles(rows, weight, bias)
        out = rows.new_empty(len(rows), len(weight))
        {"owners": self._consume_owners, "spans": self._consume_spans}[strategy.split](rows, weight, bias, out)
        return out

    def gather(self, shard: RowShard) -> Tensor:
        """End a pair: all ranks' rows (N * R, C), as a view of this rank's buffer."""
        self._push(shard, 1)
        self.join()
        fused_rows.wait_rows(self.layout, 0, self.world_size, shard.rows)
        return self.rows(self.rank, shard)

    def _push(self, shard: RowShard, chunks: int) -> None:
        mine = self.my_rows(self.rank, shard)
        with self._copying():
            for peer in self.others():
                destination = self.my_rows(peer, shard)
                for chunk in chunks_of(shard.rows, chunks):
                    destination[chunk].copy_(mine[chunk])
                    self._set_flags(peer, self.layout.row_flags, chunk)

    def _pull(self, shard: RowShard, chunks: int) -> None:
        layout, rank = self.layout, self.rank
        fused_rows.ready_barrier(layout)
        with self._copying():
            for source in self.sources():
                source_rows, destination = (self.rows_of(source, peer, shard) for peer in (source, rank))
                for chunk in chunks_of(shard.rows, chunks):
                    destination[chunk].copy_(source_rows[chunk])
                    ready = self._flags(source, layout.ready_flags, rank, chunk)  # this rank set them to the epoch
                    self._flags(rank, layout.row_flags, source, chunk).copy_(ready)

    def join(self) -> None:
        """Make the current stream wait for all copies. It is called before the last GEMM of a pair, so that the kernel after
        that GEMM may start early (see `kernels.dispatch.rejoin`)."""
        if self.copy_stream is not None and self.must_join:
            torch.cuda.current_stream().wait_stream(self.copy_stream)
        self.must_join = False
        self.keep_alive.clear()

    def _consume_owners(self, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        rank_rows = len(rows) // self.world_size
        sources = [self.rank, *self.sources()]
        for source in sources:
            if source == sources[-1]:
                self.join()
            if source != self.rank:
                fused_rows.wait_rows(self.layout, source, source + 1, rank_rows)
            multiply(rows[source * rank_rows :][:rank_rows], weight, out[source * rank_rows :][:rank_rows], bias)

    def _consume_spans(self, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        rank_rows = len(rows) // self.world_size
        own = slice(self.rank * rank_rows, (self.rank + 1) * rank_rows)
        multiply(rows[own], weight, out[own], bias)
        self.join()
        fused_rows.wait_rows(self.layout, 0, self.world_size, rank_rows)
        for first, last in self.spans():
            multiply(rows[first * rank_rows : last * rank_rows], weight, out[first * rank_rows : last * rank_rows], bias)

    def _consume_tiles(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        layout, n = self.layout, self.world_size
        tiling = default_tiling(len(rows), len(weight), rows.shape[1], n)
        flags = self.shared.view(self.rank, layout.row_flags, (n, BLOCKS), torch.int64)
        out = all_gather_gemm(rows, weight, flags, layout.epochs[:1], self.rank, layout.fault, tiling, layout.max_polls)
        self.join()
        rejoin(out)
        return out if bias is None else out.add_(bias)
