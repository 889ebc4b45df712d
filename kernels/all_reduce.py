"""All-reduces and all-gathers as Triton kernels over symmetric memory: stores over NVLink or PCIe, no multicast.

One-shot (`one_shot_*`): every rank stores its whole message to every rank, and each rank adds all messages. As in NCCL's LL
protocol, each 8-byte word carries 4 bytes of the message and a 4-byte flag of this launch. The flag shows that the word has
arrived, so the all-reduce takes the link's latency once. Two-shot (`two_shot_*`): rank s adds the s-th slice of the message and
stores the sum to all ranks (reduce-scatter, then all-gather). Each program signals with one flag that its stores are complete.
This takes the link's latency twice, but each rank sends 2 (N - 1) / N messages instead of N - 1. With two ranks these are equal, so
the slice is the whole message: each rank sends it to the other, and both add. The latency is taken once.

The launch number, `epoch`, is in device memory, and the kernels advance it, so a CUDA graph may replay them any number of
times. Launch e uses slot e mod 2 of every buffer. No other synchronization is needed: a rank that has begun launch e has
completed launch e - 1. Every other rank sent its part of launch e - 1 after it had completed launch e - 2, and so after its
last read of that slot. So all ranks must make the same launches on a workspace in the same order, on one stream at a time.

Each value is added in fp32 in rank order and rounded once, so every rank gets the same bits.

Without peer access between GPUs, one-shot all-reduces send to other ranks through host memory that both GPUs address
(`Exchange.host_buffer`), and a rank keeps its own part in its GPU's memory. Two-shot all-reduces need peer access: a program's
flag would need a fence after its stores. Over PCIe such a fence takes µs, and the fences of the programs run one after another.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import (
    MAX_POLLS,
    MAX_PROGRAMS,
    State,
    advance_epoch,
    first_value,
    flag_differs,
    flag_of,
    launch_epoch,
    max_over_row,
    normalize_words,
    pack,
    pointer_to,
    push,
    receive_address,
    receive_sum,
    second_value,
    signal,
    wait_signals,
    zero_other_slot,
    zero_words,
)
from kernels.dispatch import pdl_options
from kernels.norm import row_warps
from kernels.row_codes import RowCodes, empty_codes, largest_bits, scale_of, store_codes, store_scaled


@dataclass(frozen=True)
class Exchange:
    """A workspace as the kernels see it: addresses and synchronization state. The tensors are on the device.

    peers: addresses of the ranks' buffers, the next rank's first and this rank's own last; zeroed before the first launch.
    host_buffer: address of a buffer in host memory that receives what other ranks send; None if this rank's own buffer does.
    For one-shot kernels only. epochs (MAX_PROGRAMS,) int64: number of launches so far, one counter for each program. squares
    (2, MAX_PROGRAMS) int64: sums of squares, and largest values, that the programs of a row exchange. fault (1,) int32: 0, or the code of the wait
    that gave up after `max_polls` polls. capacity: bytes of a message, at most; values with `quantized_all_reduce`.
    """

    rank: int
    peers: tuple[int, ...]
    epochs: Tensor
    squares: Tensor
    fault: Tensor
    capacity: int
    max_polls: int = MAX_POLLS
    host_buffer: int | None = None

    @property
    def world_size(self) -> int:
        return len(self.peers)

    @property
    def state(self) -> State:
        return State(self.peers, self.host_buffer, self.epochs, self.squares, self.fault, self.max_polls)


@dataclass(frozen=True)
class Tiling:
    """Launch parameters. block: words (one-shot) or values (two-shot) that a program handles at a time; programs: at most."""

    block: int
    warps: int
    programs: int = MAX_PROGRAMS


ONE_SHOT = Tiling(block=512, warps=8)
ONE_SHOT_NORM = Tiling(block=512, warps=8)
TWO_SHOT = Tiling(block=4096, warps=8, programs=64)
TWO_SHOT_NORM_PROGRAMS = 128  # at most; each handles a whole row at a time


def one_shot_bytes(world_size: int, capacity: int) -> int:
    """Bytes of a one-shot workspace's buffer for messages of up to `capacity` bytes: two slots, each with a message from each
    rank in words of twice its size."""
    return 2 * world_size * 2 * capacity


def two_shot_bytes(world_size: int, capacity: int) -> int:
    """Bytes of a two-shot workspace's buffer: arrival flags, and two slots, each with the received slices and the sums."""
    return flag_bytes(world_size) + 2 * 2 * capacity


def flag_bytes(world_size: int) -> int:
    """Bytes of the arrival flags: one int64 for each of two phases, each rank and each program."""
    return 2 * world_size * MAX_PROGRAMS * 8


# --- one-shot -----------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rank"])
def _one_shot(
    partial, x, weight, out, normed, scales, state,
    words,  # of the message; None with x
    rank, eps,
    ROW: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
    N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = sum. If x is not None: out = x + sum and normed = rms_norm(out) * weight, for rows of ROW words that PARTS
    programs share. If scales is not None, normed gets codes."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    if x is None:
        offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = offset < words
    else:
        column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
        offset = tl.program_id(0) // PARTS * ROW + column
        inside = column < ROW
        scale = tl.load(weight.to(tl.pointer_type(tl.int32)) + column, mask=inside, other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    payload = tl.load(partial.to(tl.pointer_type(tl.uint32)) + offset, mask=inside, other=0)
    if x is not None:
        before = tl.load(x.to(tl.pointer_type(tl.int32)) + offset, mask=inside, other=0)
    epoch = launch_epoch(state.epochs)
    zero_other_slot(state, epoch, N, CAPACITY, BLOCK)
    flag, slot = flag_of(epoch), (epoch & 1) * (N * CAPACITY)
    push(state.peers, slot + rank * CAPACITY + offset, payload.to(tl.int64) | flag, inside, N)
    advance_epoch(state.epochs, epoch)
    first, second = receive_sum(state, rank, slot + offset, inside, flag, N, CAPACITY, BLOCK, DTYPE)
    if x is not None:
        first, second = first_value(before, DTYPE) + first, second_value(before, DTYPE) + second
    result = pack(first, second, DTYPE)
    tl.store(out.to(tl.pointer_type(tl.int32)) + offset, result, mask=inside)
    if x is not None:
        result = normalize_words(result, scale, inside, state, epoch, flag, eps, ROW, PARTS, PADDED_PARTS, DTYPE)
        if scales is None:
            tl.store(normed.to(tl.pointer_type(tl.int32)) + offset, result, mask=inside)
        else:  # of words with two values
            row, begin = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS * (2 * BLOCK)
            values = tl.interleave(first_value(result, DTYPE), second_value(result, DTYPE))
            bits = max_over_row(largest_bits(values), state, epoch, flag, PARTS, PADDED_PARTS)
            scale = scale_of(bits, normed.dtype.element_ty == tl.int8)
            tl.store(scales + row, scale)  # every program of the row stores the same
            store_scaled(values, scale, normed + row * (2 * ROW) + begin, 2 * ROW - begin, 2 * BLOCK)


@triton.jit(do_not_specialize=["rank"])
def _one_shot_gather(
    shard, out, state, row, words, rank, N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (block, i) sends a block of this rank's words to rank + 1 + i, and receives the block that program (block, i) of
    rank - 1 - i sends: int32 shard (rows, row words) to out (rows, N, row words).

    When the other slot must be zeroed, the programs (·, i) together zero only the words that rank + 1 + i writes. That rank
    begins the next launch, in which it writes them, after it has received this launch's blocks from all these programs. They
    may not zero another rank's words: that rank receives nothing from them, and may be one launch ahead."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    offset = program // N * BLOCK + tl.arange(0, BLOCK)
    inside = offset < words
    payload = tl.load(shard.to(tl.pointer_type(tl.uint32)) + offset, mask=inside, other=0)
    epoch = launch_epoch(state.epochs)
    source, target = (rank + N - 1 - program % N) % N, (rank + 1 + program % N) % N
    block, programs = tl.arange(0, BLOCK), tl.num_programs(0) // N
    zero_words(state, epoch, target * CAPACITY, CAPACITY, program // N, programs, block, N, N * CAPACITY)
    flag, slot = flag_of(epoch), (epoch & 1) * (N * CAPACITY)
    peer = state.peers[N - 1]
    for i in tl.static_range(N - 1):
        peer = tl.where(program % N == i, state.peers[i], peer)
    destination = pointer_to(peer, tl.int64) + slot + rank * CAPACITY
    tl.store(destination + offset, payload.to(tl.int64) | flag, mask=inside)
    advance_epoch(state.epochs, epoch)

    received = pointer_to(receive_address(state, source, rank, N), tl.int64) + slot + source * CAPACITY
    word = tl.zeros([BLOCK], tl.int64)
    missing = 1
    polls = 0
    while (missing != 0) & (polls < state.max_polls):
        word = tl.load(received + offset, mask=inside, other=flag, volatile=True)
        missing = tl.max(flag_differs(word, flag), axis=0)
        polls += 1
    if missing != 0:
        tl.store(state.fault, 3)
    tl.store(out + (offset // row * N + source) * row + offset % row, word.to(tl.int32), mask=inside)


# --- two-shot -----------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rank"])
def _two_shot(
    partial, x, weight, out, normed, scales, state, count, slice_size, rank, eps,
    TILE: tl.constexpr,  # values: a whole row with x
    N: tl.constexpr, PADDED_N: tl.constexpr, FLAGS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = sum. If x is not None: out = x + sum and normed = rms_norm(out) * weight. Slices are then whole rows, and every
    rank adds and normalizes all rows after the gather. If scales is not None, normed gets codes."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    SLICES: tl.constexpr = 1 if N == 2 else N
    column = tl.arange(0, BLOCK)
    if x is not None:
        scale = tl.load(weight + column, mask=column < TILE, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if N == 2:
        received = _exchange_messages(partial, state, count, rank, TILE, PADDED_N, FLAGS, CAPACITY, BLOCK, DTYPE)
    else:
        received = _exchange_slices(partial, state, count, slice_size, rank, TILE, N, PADDED_N, FLAGS, CAPACITY, BLOCK, DTYPE)
    start = tl.program_id(0) * TILE
    while start < slice_size:
        if x is None:
            for owner in tl.static_range(SLICES):
                offsets = owner * slice_size + start + column
                inside = (start + column < slice_size) & (offsets < count)
                tl.store(out + offsets, _sums(partial, received, offsets, inside, N), mask=inside)
        else:
            for owner in range(SLICES):
                offsets = owner * slice_size + start + column
                inside = (column < TILE) & (offsets < count)
                before = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
                after = (before + _sums(partial, received, offsets, inside, N).to(tl.float32)).to(DTYPE)
                tl.store(out + offsets, after, mask=inside)
                rounded = after.to(tl.float32)
                square = tl.sum(rounded * rounded, axis=0) / TILE
                factor = tl.rsqrt(square + eps) + square * 0.0  # NaN if the squares overflow, see `norm.py`
                result = (rounded * factor * scale).to(DTYPE)
                if scales is None:
                    tl.store(normed + offsets, result, mask=inside)
                elif owner * slice_size + start < count:
                    store_codes(result.to(tl.float32), normed, scales, (owner * slice_size + start) // TILE, TILE, BLOCK)
        start += tl.num_programs(0) * TILE


@triton.jit
def _exchange_slices(
    partial, state, count, slice_size, rank,
    TILE: tl.constexpr, N: tl.constexpr, PADDED_N: tl.constexpr, FLAGS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Reduce-scatter and all-gather. Program p handles tiles p, p + programs, … of every slice of `slice_size` values. Returns
    a pointer to the sums of the whole message, of which this program may read its own tiles of each slice."""
    column = tl.arange(0, BLOCK)
    begin, step = tl.program_id(0) * TILE, tl.num_programs(0) * TILE
    epoch = launch_epoch(state.epochs)
    scattered = FLAGS + (epoch & 1) * (2 * CAPACITY)
    gathered = scattered + CAPACITY
    for i in tl.static_range(N):
        owner = (rank + 1 + i) % N
        destination = pointer_to(state.peers[i] + scattered, DTYPE) + rank * slice_size
        start = begin
        while start < slice_size:
            inside = (column < TILE) & (start + column < slice_size) & (owner * slice_size + start + column < count)
            values = tl.load(partial + owner * slice_size + start + column, mask=inside, other=0.0)
            tl.store(destination + start + column, values, mask=inside)
            start += step
    signal(state.peers, 0, rank, epoch, N, PADDED_N)
    advance_epoch(state.epochs, epoch)
    wait_signals(state, 0, epoch, N, PADDED_N)
    received = pointer_to(state.peers[N - 1] + scattered, DTYPE)
    start = begin
    while start < slice_size:
        inside = (column < TILE) & (start + column < slice_size) & (rank * slice_size + start + column < count)
        sum = tl.load(received + start + column, mask=inside, other=0.0).to(tl.float32)
        for r in tl.static_range(1, N):
            sum += tl.load(received + r * slice_size + start + column, mask=inside, other=0.0).to(tl.float32)
        for i in tl.static_range(N):
            destination = pointer_to(state.peers[i] + gathered, DTYPE) + rank * slice_size
            tl.store(destination + start + column, sum.to(DTYPE), mask=inside)
        start += step
    signal(state.peers, 1, rank, epoch, N, PADDED_N)
    wait_signals(state, 1, epoch, N, PADDED_N)
    return pointer_to(state.peers[N - 1] + gathered, DTYPE)


@triton.jit
def _exchange_messages(
    partial, state, count, rank,
    TILE: tl.constexpr, PADDED_N: tl.constexpr, FLAGS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Two ranks send each other their messages. Program p handles tiles p, p + programs, …. Returns a pointer to the other
    rank's message, of which this program may read its own tiles."""
    column = tl.arange(0, BLOCK)
    epoch = launch_epoch(state.epochs)
    slot = FLAGS + (epoch & 1) * (2 * CAPACITY)
    destination = pointer_to(state.peers[0] + slot, DTYPE)
    start = tl.program_id(0) * TILE
    while start < count:
        inside = (column < TILE) & (start + column < count)
        tl.store(destination + start + column, tl.load(partial + start + column, mask=inside, other=0.0), mask=inside)
        start += tl.num_programs(0) * TILE
    signal(state.peers, 0, rank, epoch, 2, PADDED_N)
    advance_epoch(state.epochs, epoch)
    wait_signals(state, 0, epoch, 2, PADDED_N)
    return pointer_to(state.peers[1] + slot, DTYPE)


@triton.jit
def _sums(partial, received, offsets, inside, N: tl.constexpr):
    """The sums over ranks at `offsets`, rounded. With two ranks `received` has the other rank's values, else the sums."""
    values = tl.load(received + offsets, mask=inside, other=0.0)
    if N == 2:
        own = tl.load(partial + offsets, mask=inside, other=0.0).to(tl.float32)
        values = (own + values.to(tl.float32)).to(values.dtype)
    return values


# --- launches -----------------------------------------------------------------------------------------------------------------


def one_shot(partial: Tensor, exchange: Exchange, tiling: Tiling = ONE_SHOT, pdl: bool = True) -> Tensor:
    """The sum over ranks of `partial`: contiguous, fp32, bf16 or fp16, at most `exchange.capacity` bytes; same shape and dtype.

    Asynchronous: the sum is complete in the current stream's order. An odd number of 16-bit values is padded. Raises ValueError
    for a message that does not fit."""
    padded = _whole_words(partial)
    words = _words(padded, exchange)
    out = torch.empty_like(padded)
    if words:
        grid = (triton.cdiv(words, tiling.block),)
        check_programs(grid[0])
        _one_shot[grid](
            padded, None, None, out, None, None, exchange.state, words, exchange.rank, None, ROW=0, PARTS=0, PADDED_PARTS=0,
            **one_shot_options(exchange, partial, tiling, pdl),
        )  # fmt: skip
    return out if padded is partial else out[: partial.numel()].view(partial.shape)


def one_shot_add_norm(
    partial: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    exchange: Exchange,
    tiling: Tiling = ONE_SHOT_NORM,
    pdl: bool = True,
    codes: bool = False,
) -> tuple[Tensor, Any]:
    """(x + sum of `partial`, its RMSNorm times weight), both in x's dtype; x (..., C) contiguous, weight (C,).

    The new x is rounded once, from the fp32 sum, and its rounded value is normalized. codes: the norm is rounded again, to `RowCodes`.
    Raises ValueError unless `fits_norm`."""
    total, normed, scales, result = _norm_results(partial, x, weight, codes)
    words = _words(partial, exchange)
    row = x.shape[-1] * x.element_size() // 4
    parts = triton.cdiv(row, tiling.block)
    if words:
        grid = (words // row * parts,)
        check_programs(grid[0])
        _one_shot[grid](
            partial, x, weight, total, normed, scales, exchange.state, None, exchange.rank, eps, ROW=row, PARTS=parts,
            PADDED_PARTS=triton.next_power_of_2(parts), **one_shot_options(exchange, partial, tiling, pdl),
        )  # fmt: skip
    return total, result


def one_shot_gather(shard: Tensor, exchange: Exchange, tiling: Tiling = ONE_SHOT, pdl: bool = True) -> Tensor:
    """The ranks' contiguous `shard`s (..., n), with rows of whole 4-byte words, concatenated along the last dim: (..., N * n).

    Raises ValueError for a message that does not fit."""
    n = exchange.world_size
    words, row = _words(shard, exchange), shard.shape[-1] * shard.element_size() // 4
    out = shard.new_empty(*shard.shape[:-1], n * shard.shape[-1])
    if words:
        grid = (triton.cdiv(words, tiling.block) * n,)
        check_programs(grid[0])
        _one_shot_gather[grid](
            shard.view(torch.int32), out.view(torch.int32), exchange.state, row, words, exchange.rank,
            **one_shot_options(exchange, shard, tiling, pdl),
        )  # fmt: skip
    return out


def two_shot(partial: Tensor, exchange: Exchange, tiling: Tiling = TWO_SHOT, pdl: bool = True) -> Tensor:
    """As `one_shot`, for longer messages, where bandwidth matters more than latency."""
    count, out = partial.numel(), torch.empty_like(partial)
    slice_size = _slice_size(count, 16, exchange)  # a multiple of 16, so that the compiler sees that slices are aligned
    if count:
        grid = (min(triton.cdiv(slice_size, tiling.block), tiling.programs),)
        _two_shot[grid](
            partial, None, None, out, None, None, exchange.state, count, slice_size, exchange.rank, None, TILE=tiling.block,
            BLOCK=tiling.block, num_warps=tiling.warps, **_two_shot_options(exchange, partial, slice_size, pdl),
        )  # fmt: skip
    return out


def two_shot_add_norm(
    partial: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    exchange: Exchange,
    pdl: bool = True,
    codes: bool = False,
) -> tuple[Tensor, Any]:
    """As `one_shot_add_norm`, for many rows. Its bits are those of `two_shot` and `add_rms_norm`: the sum is rounded before it is
    added to x, and as many warps add a row's squares."""
    total, normed, scales, result = _norm_results(partial, x, weight, codes)
    count, size = x.numel(), x.shape[-1]
    if count:
        slice_size = _slice_size(count, size, exchange)
        _two_shot[(min(slice_size // size, TWO_SHOT_NORM_PROGRAMS),)](
            partial, x, weight, total, normed, scales, exchange.state, count, slice_size, exchange.rank, eps, TILE=size,
            BLOCK=triton.next_power_of_2(size), num_warps=row_warps(size), **_two_shot_options(exchange, partial, slice_size, pdl),
        )  # fmt: skip
    return total, result


def _norm_results(
    partial: Tensor, x: Tensor, weight: Tensor, codes: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | RowCodes]:
    """Memory for the sum, the norm and its scales, and the norm as callers see it. Raises ValueError unless `fits_norm`."""
    if not fits_norm(partial, x, weight, codes):
        raise ValueError(f"partial {_shape(partial)}, x {_shape(x)} and weight {_shape(weight)} have no kernel in common")
    if not codes:
        normed = torch.empty_like(x)
        return torch.empty_like(x), normed, None, normed
    rows = empty_codes(x.shape, x)
    return torch.empty_like(x), rows.codes, rows.scales, rows


def fits_norm(partial: Tensor, x: Tensor, weight: Tensor, codes: bool = False) -> bool:
    """Whether the kernels with a norm support these tensors: contiguous, 4-byte aligned, of one dtype, with rows of whole
    4-byte words and at most 32 KiB; for codes of 16 bits, rows of a multiple of 16."""
    if codes and (x.element_size() != 2 or x.shape[-1] % 16):
        return False
    row = x.shape[-1] * x.element_size()
    same = partial.dtype == x.dtype == weight.dtype and partial.shape == x.shape and weight.shape == x.shape[-1:]
    plain = all(t.is_contiguous() and t.data_ptr() % 4 == 0 for t in (partial, x, weight))
    return same and plain and row % 4 == 0 and row <= 32768


def norm_programs(x: Tensor, tiling: Tiling = ONE_SHOT_NORM) -> int:
    """Number of programs of `one_shot_add_norm` for x. All of them must fit on the GPU at the same time, and have counters."""
    words = x.shape[-1] * x.element_size() // 4
    return x.numel() // x.shape[-1] * triton.cdiv(words, tiling.block) if words else 0


def one_shot_options(exchange: Exchange, x: Tensor, tiling: Tiling, pdl: bool) -> dict[str, Any]:
    """Constants and launch options of the one-shot kernels."""
    cut = {"CAPACITY": exchange.capacity // 4, "BLOCK": tiling.block, "num_warps": tiling.warps}
    return {"N": exchange.world_size, **cut, **pdl_options(x.device, pdl)}


def _two_shot_options(exchange: Exchange, partial: Tensor, slice_size: int, pdl: bool) -> dict[str, Any]:
    ranks = exchange.world_size
    needed = slice_size * _slices(exchange) * partial.element_size()
    if needed > exchange.capacity:
        raise ValueError(f"a message of {partial.nbytes} bytes needs {needed}, but the workspace takes {exchange.capacity}")
    constants = {"PADDED_N": max(2, triton.next_power_of_2(ranks)), "FLAGS": flag_bytes(ranks), "CAPACITY": exchange.capacity}
    return {"N": ranks, **constants, **pdl_options(partial.device, pdl)}


def _slices(exchange: Exchange) -> int:
    """Number of slices of a two-shot message: one for each rank, but two ranks send each other the whole message."""
    return 1 if exchange.world_size == 2 else exchange.world_size


def _slice_size(count: int, unit: int, exchange: Exchange) -> int:
    """Values of a slice, a multiple of `unit`, so that all slices hold `count` values."""
    return triton.cdiv(count, _slices(exchange) * unit) * unit


def _whole_words(x: Tensor) -> Tensor:
    """x if it consists of aligned 4-byte words, else a flat copy, padded with a zero if the number of values is odd."""
    if x.nbytes % 4 == 0 and x.data_ptr() % 4 == 0:
        return x
    padded = x.new_zeros(x.numel() + x.nbytes % 4 // x.element_size())
    padded[: x.numel()].copy_(x.view(-1))
    return padded


def _words(x: Tensor, exchange: Exchange) -> int:
    if x.nbytes > exchange.capacity:
        raise ValueError(f"a message of {x.nbytes} bytes, but the workspace takes {exchange.capacity}")
    return x.nbytes // 4


def check_programs(programs: int) -> None:
    """Raise ValueError if there are more programs than counters."""
    if programs > MAX_PROGRAMS:
        raise ValueError(f"{programs} programs, but at most {MAX_PROGRAMS} have a counter; use larger blocks")


def _shape(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
