"""Buffers for all-reduces that are fused with GEMMs: each of N ranks owns R token rows, and all ranks address all buffers.

The launches of a rank come in pairs, a scatter and a gather. They use one symmetric buffer per rank, over NVLink or PCIe
(`kernels/fused_rows.py` has its layout). Copies between ranks run on the copy engines, so they use no SMs, which the concurrent
GEMM needs. `comm/fused_strategies.py` lists the strategies. Both launches of a pair have one epoch number, and there must be one gather
after each scatter, before the next scatter, with the same strategy on all ranks. A CUDA graph must capture whole pairs.

No double buffering is needed:

- *Partial sums.* A rank sends those of epoch e + 1 after it has received all rows of e, or their ready flags. The owner of rows sends
  these after it has read all partial sums of e.
- *Rows.* A rank writes and sends those of epoch e + 1 after it has received all partial sums of e + 1. Their sender computed them after its
  last read of rows of e: the current stream waits for the copies of a gather before its last GEMM, or before `gather` returns.
- *Flags* only increase, and are written after their data. The exchange of ready flags is a kernel on the current stream, because on the
  copy stream it might find no free SM. A pull copies its flag from the owner's buffer, after the rows, for the same reason.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from comm.faults import fault_word
from comm.fused_strategies import TILED, Gather, Split, tiling_of
from comm.workspace import SharedBuffer, open_shared
from kernels import fused_rows
from kernels.all_gather_gemm import all_gather_gemm
from kernels.dispatch import rejoin
from kernels.fused_rows import BLOCK_ROWS, BLOCKS, BufferLayout
from kernels.gemm_reduce_scatter import gemm_reduce_scatter
from kernels.tile_gemm import GemmTiling


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
        if split in TILED:
            self._scatter_tiles(x, weight, shard, tiling_of(split, len(x), len(weight), x.shape[1], self.world_size))
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
        if strategy.split in TILED:
            return self._consume_tiles(rows, weight, bias, strategy.split)
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

    def _consume_tiles(self, rows: Tensor, weight: Tensor, bias: Tensor | None, split: Split) -> Tensor:
        layout, n = self.layout, self.world_size
        tiling = tiling_of(split, len(rows), len(weight), rows.shape[1], n)
        flags = self.shared.view(self.rank, layout.row_flags, (n, BLOCKS), torch.int64)
        out = all_gather_gemm(rows, weight, flags, layout.epochs[:1], self.rank, layout.fault, tiling, layout.max_polls)
        self.join()
        rejoin(out)
        return out if bias is None else out.add_(bias)
