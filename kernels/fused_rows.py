"""Triton kernels for all-reduces that are fused with GEMMs: each rank owns some token rows, in symmetric memory.

The buffer of a rank holds, in this order, arrival flags of partial sums (N sources, BLOCKS) int64, arrival flags of rows (N,
BLOCKS) int64, `ready_flags` (N, BLOCKS) int64, `partials` (N, R, C) and `rows` (N * R, C), where each of N ranks owns R rows.
An arrival flag is the epoch in which a block of BLOCK_ROWS rows of its source has arrived. A ready flag is the epoch in which
the rows of its source may be copied from the source; it is stored BLOCKS times. Epochs only increase, so a reader waits until
the flag is at least the epoch. The epoch is in device memory and `advance` increments it, so a CUDA graph may replay all of
this any number of times. `comms/row_buffers.py` writes the partial sums and rows; its docstring says when they may be
overwritten.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import MAX_POLLS, pointer_to, poll
from kernels.dispatch import pdl_options

BLOCK_ROWS = 128  # rows of one flag
BLOCKS = 64  # flags of a source: rows a rank / BLOCK_ROWS, at most
ALIGNMENT = 256  # bytes

_BLOCK_ROWS = tl.constexpr(BLOCK_ROWS)
_BLOCKS = tl.constexpr(BLOCKS)


@dataclass(frozen=True)
class BufferLayout:
    """Addresses and layout of the ranks' buffers, and the synchronization state. Offsets count from the begin of a buffer.

    buffers: address of each rank's buffer, by rank, zeroed before the first launch. epochs (BLOCKS,) int64: the number of this
    scatter and gather, BLOCKS times, so that one copy sets several flags. fault (1,) int32: 0, or the code of the wait that
    gave up after `max_polls` polls. capacity: bytes of `partials`, and of `rows`, in each buffer.
    """

    rank: int
    buffers: tuple[int, ...]
    epochs: Tensor
    fault: Tensor
    capacity: int
    max_polls: int = MAX_POLLS

    @property
    def world_size(self) -> int:
        return len(self.buffers)

    @property
    def row_flags(self) -> int:
        """Byte offset of the arrival flags of rows. Those of partial sums are at offset 0."""
        return self.world_size * BLOCKS * 8

    @property
    def ready_flags(self) -> int:
        """Byte offset of the ready flags."""
        return 2 * self.row_flags

    @property
    def partials(self) -> int:
        """Byte offset of the partial sums."""
        return 3 * self.row_flags

    @property
    def rows(self) -> int:
        """Byte offset of the rows."""
        return self.partials + self.capacity


def buffer_bytes(world_size: int, capacity: int) -> int:
    """Bytes of a rank's buffer for residual streams of up to `capacity` bytes, a multiple of ALIGNMENT."""
    return 3 * world_size * BLOCKS * 8 + 2 * capacity


def blocks_of(rows: int) -> int:
    """Number of blocks, and so of flags, of `rows` rows of one rank."""
    return triton.cdiv(rows, BLOCK_ROWS)


# --- device code --------------------------------------------------------------------------------------------------------------


@triton.jit
def _flags(base, offset, source):
    """A pointer to the first of the BLOCKS flags of `source`, in the flags at byte `offset`."""
    return (base + offset).to(tl.pointer_type(tl.int64)) + source * _BLOCKS


@triton.jit(do_not_specialize=["rank", "ready_blocks"])
def _advance(buffers, epochs, rank, ready_blocks, N: tl.constexpr, ROW_FLAGS: tl.constexpr, PDL: tl.constexpr):
    """One program: begin the next epoch, set this rank's own flags, and `ready_blocks` flags of its partial sums at all ranks."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    block = tl.arange(0, _BLOCKS)
    epoch = tl.load(epochs + block) + 1
    tl.debug_barrier()  # all loads come before the stores
    tl.store(epochs + block, epoch)
    for peer in tl.static_range(N):
        ready = (peer == rank) | (block < ready_blocks)
        tl.atomic_xchg(_flags(buffers[peer], 0, rank) + block, epoch, mask=ready, sem="release", scope="sys")
        tl.atomic_xchg(_flags(buffers[peer], ROW_FLAGS, rank) + block, epoch, mask=(peer == rank) & (block >= 0), sem="relaxed")


@triton.jit(do_not_specialize=["first", "last", "blocks"])
def _wait_rows(flags, epochs, first, last, blocks, max_polls, fault, PADDED_FLAGS: tl.constexpr):
    """One program: wait until ranks `first` to `last` - 1 have sent `blocks` blocks of rows each."""
    flag = tl.arange(0, PADDED_FLAGS)
    source, block = flag // _BLOCKS, flag % _BLOCKS
    mask = (source >= first) & (source < last) & (block < blocks)
    poll(flags.to(tl.pointer_type(tl.int64)) + flag, mask, tl.load(epochs), max_polls, fault, 5)


@triton.jit(do_not_specialize=["rank"])
def _ready_barrier(
    buffers, buffer, epochs, rank, max_polls, fault, N: tl.constexpr, PADDED_N: tl.constexpr, READY_FLAGS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program: set this rank's ready flags at all ranks, and wait for the ready flags of all ranks."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    block = tl.arange(0, _BLOCKS)
    epoch = tl.load(epochs + block)
    for peer in tl.static_range(N):
        tl.atomic_xchg(_flags(buffers[peer], READY_FLAGS, rank) + block, epoch, sem="release", scope="sys")
    source = tl.arange(0, PADDED_N)
    poll(_flags(buffer, READY_FLAGS, source), source < N, tl.load(epochs), max_polls, fault, 7)


@triton.jit(do_not_specialize=["rank", "rank_rows"])
def _reduce(
    buffer, epochs, x, weight, total, rank, max_polls, fault, rank_rows, eps,
    C: tl.constexpr, N: tl.constexpr, PADDED_N: tl.constexpr, PARTIALS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x (None: 0) + the partial sums of all ranks, added in fp32 in rank order and rounded once; one program for each row.

    If weight is None, the result is stored in this rank's part of `rows`. Otherwise it is stored in `total`, and its RMSNorm in
    this rank's part of `rows`."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < C
    if weight is not None:
        scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if weight is None:
        total = pointer_to(buffer + ROWS, DTYPE) + rank * rank_rows * C
    source = tl.arange(0, PADDED_N)
    flags = buffer.to(tl.pointer_type(tl.int64)) + source * _BLOCKS + row // _BLOCK_ROWS
    sum = tl.zeros([BLOCK], tl.float32)
    before = tl.zeros([BLOCK], tl.float32)
    if x is not None:
        before = tl.load(x + row * C + column, mask=inside, other=0.0).to(tl.float32)
    poll(flags, source < N, tl.load(epochs), max_polls, fault, 6)
    partials = pointer_to(buffer + PARTIALS, DTYPE) + row * C
    for r in tl.static_range(N):
        sum += tl.load(partials + r * rank_rows.to(tl.int64) * C + column, mask=inside, other=0.0).to(tl.float32)
    rounded = (before + sum).to(DTYPE)
    tl.store(total + row * C + column, rounded, mask=inside)
    if weight is not None:
        values = rounded.to(tl.float32)
        square = tl.sum(values * values, axis=0) / C
        normed = values * (tl.rsqrt(square + eps) + square * 0.0) * scale  # NaN if the squares overflow, see `norm.py`
        out = pointer_to(buffer + ROWS, DTYPE) + (rank * rank_rows + row) * C
        tl.store(out + column, normed.to(DTYPE), mask=inside)


# --- launches -----------------------------------------------------------------------------------------------------------------


def advance(layout: BufferLayout, ready_blocks: int = 0) -> None:
    """Begin the next epoch, and signal to all ranks that the first `ready_blocks` blocks of this rank's partial sums for them
    have arrived: earlier work of the current stream is complete by then. This rank's flags for itself are set at once, because
    the stream orders its own reads and writes."""
    _advance[(1,)](
        layout.buffers, layout.epochs, layout.rank, ready_blocks, N=layout.world_size, ROW_FLAGS=layout.row_flags, num_warps=2,
        **pdl_options(layout.epochs.device),
    )  # fmt: skip


def ready_barrier(layout: BufferLayout) -> None:
    """Signal to all ranks that this rank's rows are in its own buffer, and make the current stream wait for the same signal of
    every rank. Earlier work of the stream is complete by then. At every rank, this rank's ready flags keep its epoch until its
    next `ready_barrier`."""
    n = layout.world_size
    _ready_barrier[(1,)](
        layout.buffers, layout.buffers[layout.rank], layout.epochs, layout.rank, layout.max_polls, layout.fault, N=n,
        PADDED_N=_padded_ranks(n), READY_FLAGS=layout.ready_flags, num_warps=2, **pdl_options(layout.epochs.device),
    )  # fmt: skip


def wait_rows(layout: BufferLayout, first: int, last: int, rows: int) -> None:
    """Make the current stream wait until each of the ranks `first` to `last` - 1 has sent its `rows` rows."""
    padded_flags = triton.next_power_of_2(layout.world_size) * BLOCKS
    _wait_rows[(1,)](
        layout.buffers[layout.rank] + layout.row_flags, layout.epochs, first, last, blocks_of(rows), layout.max_polls,
        layout.fault, PADDED_FLAGS=padded_flags, num_warps=4,
    )  # fmt: skip


def reduce_rows(layout: BufferLayout, rows: int, size: int, dtype: torch.dtype, x: Tensor | None) -> None:
    """Wait for all partial sums of this rank's `rows` rows of `size` values, and store x (rows, size), or 0, plus their sum in
    this rank's part of the buffer's `rows`."""
    buffer = layout.buffers[layout.rank]
    _reduce[(rows,)](
        buffer, layout.epochs, x, None, None, layout.rank, layout.max_polls, layout.fault, rows, None,
        **_options(layout, size, dtype),
    )  # fmt: skip


def reduce_norm_rows(layout: BufferLayout, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Wait for all partial sums of this rank's rows, and return x + their sum (rows, C). Its RMSNorm times `weight` (C,) is
    stored in this rank's part of `rows`. x (rows, C) contiguous, of the partial sums' dtype.

    The sum is rounded once, from fp32, and its rounded value is normalized (Zhang & Sennrich, arXiv:1910.07467)."""
    (rows, size), total, buffer = x.shape, torch.empty_like(x), layout.buffers[layout.rank]
    _reduce[(rows,)](
        buffer, layout.epochs, x, weight, total, layout.rank, layout.max_polls, layout.fault, rows, eps,
        **_options(layout, size, x.dtype),
    )  # fmt: skip
    return total


_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _padded_ranks(world_size: int) -> int:
    """The length of a vector with one element for each rank: a power of two."""
    return max(2, triton.next_power_of_2(world_size))


def _options(layout: BufferLayout, size: int, dtype: torch.dtype) -> dict[str, Any]:
    block, n = triton.next_power_of_2(size), layout.world_size
    return {
        "C": size,
        "N": n,
        "PADDED_N": _padded_ranks(n),
        "PARTIALS": layout.partials,
        "ROWS": layout.rows,
        "BLOCK": block,
        "DTYPE": _TRITON[dtype],
        "num_warps": min(max(block // 512, 1), 16),  # as in kernels/norm.py
        **pdl_options(layout.epochs.device),
    }
