"""Buffers for all-reduces that are fused with GEMMs: each of N ranks owns R token rows, and all ranks address all buffers.

The launches of a rank come in pairs, a scatter and a gather. They use one symmetric buffer per rank, over NVLink or PCIe
(`kernels/fused_rows.py` has its layout). Copies between ranks run on the copy engines, so they take no SM from the GEMM
that runs at the same time. `comm/fused_strategies.py` lists the strategies. docs/communication.md shows why one place for
partial sums and one for rows are enough. This requires one gather after each scatter, before the next scatter, with the
same strategy on all ranks. A CUDA graph must capture whole pairs.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from comm.fused_strategies import TILED, Gather, Split, tiling_of
from comm.workspace import SharedBuffer, open_shared
from kernels import fused_rows
from kernels.all_gather_gemm import all_gather_gemm
from kernels.dispatch import rejoin
from kernels.fused_rows import BLOCK_ROWS, BLOCKS, Places
from kernels.gemm_reduce_scatter import gemm_reduce_scatter
from kernels.tile_gemm import Tiling


def multiply(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = x @ weight.T + bias: (T, K) and (C, K) into contiguous (T, C), which may be another GPU's memory."""
    if len(x) == 0:
        return
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class Share(NamedTuple):
    """The part of a stream that a rank owns: R rows of C values."""

    rows: int
    size: int
    dtype: torch.dtype


def chunks_of(rows: int, count: int) -> Iterator[slice]:
    """A rank's rows in up to `count` chunks, in order. Chunks are whole blocks, except that the last block may be short,
    and differ by at most one block."""
    blocks = fused_rows.blocks_of(rows)
    count = min(count, blocks)
    for i in range(count):
        yield slice(i * blocks // count * BLOCK_ROWS, min(rows, (i + 1) * blocks // count * BLOCK_ROWS))


class RowBuffers:
    """The buffers of all ranks, and pairs of a scatter and a gather over them, on one stream at a time.

    N ranks with R rows each. x, rows and partial sums have one dtype: bf16, fp16 or fp32.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, capacity: int) -> None:
        """Collective. Raises UserError on every rank if the GPUs have no peer access."""
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
        self.copying = False  # whether the current stream has yet to join copies
        self.held: list[Tensor] = []  # what these copies read

    @property
    def capturing(self) -> bool:
        return self.copies is not None and torch.cuda.is_current_stream_capturing()

    def check(self) -> None:
        """Raise RuntimeError if a kernel timed out waiting for a rank. Waits for the device."""
        fault = int(self.places.fault)
        if fault:
            raise RuntimeError(f"rank {self.rank} timed out waiting for another rank's rows (place {fault})")

    def others(self) -> Iterator[int]:
        """The other ranks, the next one first, so that the ranks begin with different ones."""
        return (owner % self.world_size for owner in range(self.rank + 1, self.rank + self.world_size))

    def sources(self) -> list[int]:
        """The other ranks in the order in which their rows arrive: the previous rank sends to this one first."""
        return list(self.others())[::-1]

    def spans(self) -> list[tuple[int, int]]:
        """The consecutive ranks after this one, and those before it: (first, last + 1). Either may be empty."""
        return [(self.rank + 1, self.world_size), (0, self.rank)]

    def rows(self, peer: int, share: Share) -> Tensor:
        """The place of all ranks' rows at `peer`: (N * R, C)."""
        return self.shared.view(peer, self.places.rows, (self.world_size * share.rows, share.size), share.dtype)

    def rows_of(self, source: int, peer: int, share: Share) -> Tensor:
        """The place of the rows of `source` at `peer`, (R, C)."""
        return self.rows(peer, share)[source * share.rows :][: share.rows]

    def my_rows(self, peer: int, share: Share) -> Tensor:
        """The place of this rank's rows at `peer`, (R, C)."""
        return self.rows_of(self.rank, peer, share)

    def partial(self, peer: int, share: Share) -> Tensor:
        """The place of this rank's partial sums of `peer`'s rows, at `peer`: (R, C)."""
        offset = self.places.partials + self.rank * share.rows * share.size * share.dtype.itemsize
        return self.shared.view(peer, offset, (share.rows, share.size), share.dtype)

    def _flags(self, peer: int, first: int, source: int, rows: slice) -> Tensor:
        """The flags at `peer` for these rows of `source`. first: 0 for partial sums, `places.row_flags` for rows,
        `places.offers` for offers."""
        blocks = slice(rows.start // BLOCK_ROWS, fused_rows.blocks_of(rows.stop))
        return self.shared.view(peer, first, (self.world_size, BLOCKS), torch.int64)[source, blocks]

    def _on_copy_stream(self) -> AbstractContextManager[object]:
        """Use the stream of copies, after it has waited for the current stream."""
        if self.copies is None:
            return nullcontext()
        self.copying = True
        self.copies.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.copies)

    def _announce(self, peer: int, first: int, rows: slice) -> None:
        """Set the flags of this rank's `rows` at `peer`, after their copy: copies of one stream arrive in order."""
        flags = self._flags(peer, first, self.rank, rows)
        flags.copy_(self.places.epochs[: len(flags)])

    # --- scatter ----------------------------------------------------------------------------------------------------------

    def scatter(self, x: Tensor, weight: Tensor, split: Split) -> None:
        """Begin a pair: x (N * R, K) @ weight (C, K).T, each row sent to its owner."""
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
            with self._on_copy_stream():
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

    # --- gather -----------------------------------------------------------------------------------------------------------

    def gather_linear(self, share: Share, weight: Tensor, bias: Tensor | None, strategy: Gather) -> Tensor:
        """End a pair: all ranks' rows times weight (M, C).T, (N * R, M). This rank's rows (R, C) must be in their place."""
        (self._pull if strategy.pull else self._push)(share, strategy.chunks)
        rows = self.rows(self.rank, share)
        if strategy.split in TILED:
            return self._consume_tiles(rows, weight, bias, strategy.split)
        out = rows.new_empty(len(rows), len(weight))
        {"owners": self._consume_owners, "spans": self._consume_spans}[strategy.split](rows, weight, bias, out)
        return out

    def gather(self, share: Share) -> Tensor:
        """End a pair: all ranks' rows (N * R, C), as a view of this rank's buffer."""
        self._push(share, 1)
        self.join()
        fused_rows.await_rows(self.places, 0, self.world_size, share.rows)
        return self.rows(self.rank, share)

    def _push(self, share: Share, chunks: int) -> None:
        mine = self.my_rows(self.rank, share)
        with self._on_copy_stream():
            for peer in self.others():
                place = self.my_rows(peer, share)
                for chunk in chunks_of(share.rows, chunks):
                    place[chunk].copy_(mine[chunk])
                    self._announce(peer, self.places.row_flags, chunk)

    def _pull(self, share: Share, chunks: int) -> None:
        places, rank = self.places, self.rank
        fused_rows.offer_rows(places)
        with self._on_copy_stream():
            for source in self.sources():
                theirs, place = (self.rows_of(source, peer, share) for peer in (source, rank))
                for chunk in chunks_of(share.rows, chunks):
                    place[chunk].copy_(theirs[chunk])
                    offers = self._flags(source, places.offers, rank, chunk)  # what this rank wrote there: the epoch
                    self._flags(rank, places.row_flags, source, chunk).copy_(offers)

    def join(self) -> None:
        """Make the current stream wait for all copies, before the last GEMM of a pair. So the kernel after that GEMM may
        start early (see `kernels.dispatch.rejoin`)."""
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
