"""Triton kernels for all-reduces that are fused with GEMMs: each rank owns some token rows, in memory that all GPUs can
address.

The buffer of a rank holds, in this order, arrival flags of partial sums (N sources, BLOCKS) int64, arrival flags of rows (N,
BLOCKS) int64, `offers` (N, BLOCKS) int64, `partials` (N, R, C) and `rows` (N * R, C), where R rows belong to each of N ranks. A
flag is the epoch in which a block of BLOCK_ROWS rows of its source has arrived. An offer is the epoch in which the rows of its
source may be fetched from the source; it is stored BLOCKS times. Epochs only grow, so a reader waits until the flag is at least
the epoch. The epoch lies in device memory and is advanced by `advance`, so that a CUDA graph may replay all of it any number of
times. `comm/row_buffers.py` has what writes the partial sums and rows, and docs/communication.md says when a place may be
written again.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import PATIENCE, pointer_to, poll
from kernels.dispatch import pdl_options

BLOCK_ROWS = 128  # rows that one flag announces
BLOCKS = 64  # flags of a source: rows a rank / BLOCK_ROWS, at most
ALIGNMENT = 256  # bytes

_BLOCK_ROWS = tl.constexpr(BLOCK_ROWS)
_BLOCKS = tl.constexpr(BLOCKS)


@dataclass(frozen=True)
class Places:
    """Where the kernels find the buffers and their parts.

    buffers: address of each rank's buffer, by rank, zeroed before the first launch. epochs (BLOCKS,) int64: the number of this
    pair of launches, BLOCKS times, so that copies of it set several flags. fault (1,) int32: not 0 once a program has given up
    waiting for `patience` polls. capacity: bytes of the `partials` and of the `rows` of a rank.
    """

    rank: int
    buffers: tuple[int, ...]
    epochs: Tensor
    fault: Tensor
    capacity: int
    patience: int = PATIENCE

    @property
    def world_size(self) -> int:
        return len(self.buffers)

    @property
    def row_flags(self) -> int:
        """Bytes before the flags of rows; the flags of partial sums are first."""
        return self.world_size * BLOCKS * 8

    @property
    def offers(self) -> int:
        """Bytes before the offers of rows."""
        return 2 * self.row_flags

    @property
    def partials(self) -> int:
        """Bytes before the partial sums."""
        return 3 * self.row_flags

    @property
    def rows(self) -> int:
        """Bytes before the rows."""
        return self.partials + self.capacity


def buffer_bytes(world_size: int, capacity: int) -> int:
    """Size of a rank's buffer for residual streams of up to `capacity` bytes, a multiple of ALIGNMENT."""
    return 3 * world_size * BLOCKS * 8 + 2 * capacity


def blocks_of(rows: int) -> int:
    """Flags that announce `rows` rows of one rank."""
    return triton.cdiv(rows, BLOCK_ROWS)


# --- device code --------------------------------------------------------------------------------------------------------------


@triton.jit
def _flags(base, offset, source):
    """Pointers to the flags of `source`, the first of them BLOCKS times `source` after `offset` bytes."""
    return (base + offset).to(tl.pointer_type(tl.int64)) + source * _BLOCKS


@triton.jit(do_not_specialize=["rank", "announced"])
def _advance(buffers, epochs, rank, announced, N: tl.constexpr, ROW_FLAGS: tl.constexpr, PDL: tl.constexpr):
    """One program: the next epoch, this rank's own flags, and `announced` flags of its partial sums at every rank."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    lane = tl.arange(0, _BLOCKS)
    epoch = tl.load(epochs + lane) + 1
    tl.debug_barrier()  # all loads come before the stores
    tl.store(epochs + lane, epoch)
    for peer in tl.static_range(N):
        reaches = (peer == rank) | (lane < announced)
        tl.atomic_xchg(_flags(buffers[peer], 0, rank) + lane, epoch, mask=reaches, sem="release", scope="sys")
        tl.atomic_xchg(_flags(buffers[peer], ROW_FLAGS, rank) + lane, epoch, mask=(peer == rank) & (lane >= 0), sem="relaxed")


@triton.jit(do_not_specialize=["first", "last", "blocks"])
def _await(flags, epochs, first, last, blocks, patience, fault, LANES: tl.constexpr):
    """One program: wait until ranks `first` to `last` - 1 have announced `blocks` blocks of rows."""
    lane = tl.arange(0, LANES)
    source, block = lane // _BLOCKS, lane % _BLOCKS
    mask = (source >= first) & (source < last) & (block < blocks)
    poll(flags.to(tl.pointer_type(tl.int64)) + lane, mask, tl.load(epochs), patience, fault, 5)


@triton.jit(do_not_specialize=["rank"])
def _offer(
    buffers, mine, epochs, rank, patience, fault, N: tl.constexpr, LANES: tl.constexpr, OFFERS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program: offer this rank's rows to all ranks, and wait for every rank's offer."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    lane = tl.arange(0, _BLOCKS)
    epoch = tl.load(epochs + lane)
    for peer in tl.static_range(N):
        tl.atomic_xchg(_flags(buffers[peer], OFFERS, rank) + lane, epoch, sem="release", scope="sys")
    source = tl.arange(0, LANES)
    poll(_flags(mine, OFFERS, source), source < N, tl.load(epochs), patience, fault, 7)


@triton.jit(do_not_specialize=["rank", "share"])
def _reduce(
    mine, epochs, x, weight, total, rank, patience, fault, share, eps,
    C: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, PARTIALS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x (None: 0) + the partial sums of all ranks, added in fp32 in rank order and rounded once; a program a row.

    Without a weight (None) the result goes to this rank's place of `rows`; with one to total, and its RMSNorm to that place."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = lane < C
    if weight is not None:
        scale = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if weight is None:
        total = pointer_to(mine + ROWS, DTYPE) + rank * share * C
    source = tl.arange(0, LANES)
    flags = mine.to(tl.pointer_type(tl.int64)) + source * _BLOCKS + row // _BLOCK_ROWS
    sum = tl.zeros([BLOCK], tl.float32)
    before = tl.zeros([BLOCK], tl.float32)
    if x is not None:
        before = tl.load(x + row * C + lane, mask=inside, other=0.0).to(tl.float32)
    poll(flags, source < N, tl.load(epochs), patience, fault, 6)
    partials = pointer_to(mine + PARTIALS, DTYPE) + row * C
    for r in tl.static_range(N):
        sum += tl.load(partials + r * share.to(tl.int64) * C + lane, mask=inside, other=0.0).to(tl.float32)
    rounded = (before + sum).to(DTYPE)
    tl.store(total + row * C + lane, rounded, mask=inside)
    if weight is not None:
        values = rounded.to(tl.float32)
        normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / C + eps) * scale
        place = pointer_to(mine + ROWS, DTYPE) + (rank * share + row) * C
        tl.store(place + lane, normed.to(DTYPE), mask=inside)


# --- launches -----------------------------------------------------------------------------------------------------------------


def advance(places: Places, announced: int = 0) -> None:
    """Begin the next epoch, and tell all ranks that `announced` blocks of this rank's partial sums for them are there: all that
    the current stream has been given is complete by then. Its own flags are set at once, since it reads what it wrote itself in
    the stream's order."""
    _advance[(1,)](
        places.buffers, places.epochs, places.rank, announced, N=places.world_size, ROW_FLAGS=places.row_flags, num_warps=2,
        **pdl_options(places.epochs.device),
    )  # fmt: skip


def offer_rows(places: Places) -> None:
    """Tell all ranks that this rank's rows are in their place of its own buffer, since all that the current stream has been
    given is complete, and let the stream wait until every rank has said so. At every rank, this rank's offers hold its epoch
    from then on until it offers rows again."""
    n = places.world_size
    _offer[(1,)](
        places.buffers, places.buffers[places.rank], places.epochs, places.rank, places.patience, places.fault, N=n,
        LANES=_lanes(n), OFFERS=places.offers, num_warps=2, **pdl_options(places.epochs.device),
    )  # fmt: skip


def await_rows(places: Places, first: int, last: int, rows: int) -> None:
    """Let the current stream wait until ranks `first` to `last` - 1 have sent their `rows` rows each."""
    lanes = triton.next_power_of_2(places.world_size) * BLOCKS
    _await[(1,)](
        places.buffers[places.rank] + places.row_flags, places.epochs, first, last, blocks_of(rows), places.patience,
        places.fault, LANES=lanes, num_warps=4,
    )  # fmt: skip


def reduce_rows(places: Places, rows: int, size: int, dtype: torch.dtype, x: Tensor | None) -> None:
    """Wait for all partial sums of this rank's `rows` rows of `size` values; x (rows, size), or 0, plus their sum goes to this
    rank's place of `rows`."""
    mine = places.buffers[places.rank]
    _reduce[(rows,)](
        mine, places.epochs, x, None, None, places.rank, places.patience, places.fault, rows, None,
        **_options(places, size, dtype),
    )  # fmt: skip


def reduce_norm_rows(places: Places, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Wait for all partial sums of this rank's rows; x + their sum (rows, C), whose RMSNorm times `weight` (C,) goes to this
    rank's place of `rows`. x (rows, C) contiguous, of the partial sums' dtype.

    The sum is rounded once, from fp32, and its rounded value is normalized (Zhang & Sennrich, arXiv:1910.07467)."""
    (rows, size), total, mine = x.shape, torch.empty_like(x), places.buffers[places.rank]
    _reduce[(rows,)](
        mine, places.epochs, x, weight, total, places.rank, places.patience, places.fault, rows, eps,
        **_options(places, size, x.dtype),
    )  # fmt: skip
    return total


_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _lanes(world_size: int) -> int:
    """Of a flag from each rank."""
    return max(2, triton.next_power_of_2(world_size))


def _options(places: Places, size: int, dtype: torch.dtype) -> dict[str, Any]:
    block, n = triton.next_power_of_2(size), places.world_size
    return {
        "C": size,
        "N": n,
        "LANES": _lanes(n),
        "PARTIALS": places.partials,
        "ROWS": places.rows,
        "BLOCK": block,
        "DTYPE": _TRITON[dtype],
        "num_warps": min(max(block // 512, 1), 16),  # as in kernels/norm.py
        **pdl_options(places.epochs.device),
    }
