"""Triton kernels that sum over GPUs through memory that all of them can address: stores over NVLink or PCIe, no multicast.

One-shot (`one_shot_*`): every rank pushes its whole message to every rank, and each rank sums all messages. As in NCCL's LL
protocol, each 8-byte word carries 4 bytes of the message and a 4-byte flag of this launch. The flag shows that the word has
arrived, so the all-reduce takes the link's latency once. Two-shot (`two_shot_*`): rank s sums the s-th slice of the message and
pushes the sum to all ranks (reduce-scatter and all-gather by stores). Each program announces what it has stored by one flag.
This takes the link's latency twice, but sends 2 (N - 1) / N messages instead of N - 1.

A launch number, `epoch`, lies in device memory, and the kernels themselves advance it, so a CUDA graph may replay them any
number of times. Launch e uses slot e mod 2 of every buffer. That is all the protection that the buffers need: a rank that has
begun launch e has completed launch e - 1. To that launch every other rank contributed only after it had completed launch e - 2,
and with it all reading of that slot. So all ranks must make the same launches on a workspace in the same order, on one stream
at a time.

The sum of a value is taken in fp32 in rank order and rounded once: every rank gets the same bits.

Where GPUs do not reach each other, one-shot all-reduces use host memory that both GPUs address for what a rank sends to another
one (`Exchange.inbox`), and the rank's own memory for what it keeps. Two-shot all-reduces do not: a program's flag would need a
fence after its stores. Over PCIe such a fence takes µs, and the fences of the programs follow one after the other.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import (
    MAX_PROGRAMS,
    PATIENCE,
    State,
    announce,
    await_all,
    box_of,
    count_launch,
    first_value,
    flag_of,
    lacks,
    normalize_words,
    pack,
    pointer_to,
    push,
    receive_sum,
    second_value,
    sweep,
    sweep_all,
    this_epoch,
)
from kernels.dispatch import pdl_options


@dataclass(frozen=True)
class Exchange:
    """What the kernels need of a workspace.

    peers: addresses of the ranks' buffers, the next rank's first and this rank's own last; zeroed before the first launch.
    inbox: the buffer for what other ranks send to this one, if that is not its own buffer but another one, in host memory. For
    one-shot all-reduces only.
    epochs (MAX_PROGRAMS,) int64: launches so far, as each program counts them. squares (2, MAX_PROGRAMS) int64: what the
    programs of a row exchange. fault (1,) int32: not 0 once a program has given up waiting after `patience` polls.
    capacity: bytes of a message, at most.
    """

    rank: int
    peers: tuple[int, ...]
    epochs: Tensor
    squares: Tensor
    fault: Tensor
    capacity: int
    patience: int = PATIENCE
    inbox: int | None = None

    @property
    def world_size(self) -> int:
        return len(self.peers)

    @property
    def state(self) -> State:
        return State(self.peers, self.inbox, self.epochs, self.squares, self.fault, self.patience)


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its message. block: words (one-shot) or values (two-shot) of a program at a time; programs: at most."""

    block: int
    warps: int
    programs: int = MAX_PROGRAMS


ONE_SHOT = Tiling(block=512, warps=8)
ONE_SHOT_NORM = Tiling(block=512, warps=8)
TWO_SHOT = Tiling(block=4096, warps=8, programs=64)
TWO_SHOT_NORM = Tiling(block=0, warps=16, programs=64)  # a program does a whole row at a time


def one_shot_bytes(world_size: int, capacity: int) -> int:
    """Size of a one-shot workspace's buffer for messages of up to `capacity` bytes: two slots of a message in words from each
    rank."""
    return 2 * world_size * 2 * capacity


def two_shot_bytes(world_size: int, capacity: int) -> int:
    """Size of a two-shot workspace's buffer: arrival flags; two slots, each with the messages and the sums."""
    return flag_bytes(world_size) + 2 * 2 * capacity


def flag_bytes(world_size: int) -> int:
    """Size of the arrival flags: of two phases, each rank and each program."""
    return 2 * world_size * MAX_PROGRAMS * 8


# --- one-shot -----------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rank"])
def _one_shot(
    partial, x, weight, out, normed, state,
    words,  # of the message; None with x
    rank, eps,
    ROW: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
    N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = sum. With x (else None): out = x + sum and normed = rms_norm(out) * weight, for rows of ROW words that PARTS
    programs share."""
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
    epoch = this_epoch(state.epochs)
    sweep_all(state, epoch, N, CAPACITY, BLOCK)
    flag, slot = flag_of(epoch), (epoch & 1) * (N * CAPACITY)
    push(state.peers, slot + rank * CAPACITY + offset, payload.to(tl.int64) | flag, inside, N)
    count_launch(state.epochs, epoch)
    first, second = receive_sum(state, rank, slot + offset, inside, flag, N, CAPACITY, BLOCK, DTYPE)
    if x is not None:
        first, second = first_value(before, DTYPE) + first, second_value(before, DTYPE) + second
    result = pack(first, second, DTYPE)
    tl.store(out.to(tl.pointer_type(tl.int32)) + offset, result, mask=inside)
    if x is not None:
        result = normalize_words(result, scale, inside, state, epoch, flag, eps, ROW, PARTS, LANES, DTYPE)
        tl.store(normed.to(tl.pointer_type(tl.int32)) + offset, result, mask=inside)


@triton.jit(do_not_specialize=["rank"])
def _one_shot_gather(
    shard, out, state, row, words, rank, N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (block, i) sends a block of this rank's words to rank + 1 + i and receives that of rank - 1 - i, which program
    (block, i) there sends: int32 shard (rows, row words) to out (rows, N, row words).

    When the other slot is due to be zeroed, the programs (·, i) together zero the words that rank + 1 + i writes, and no
    others. That rank begins the next launch, and writes there, only when it has received this launch's blocks from all of them.
    For any other rank's words this would not hold: that rank receives nothing from these programs, and may be one launch ahead
    of them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    offset = program // N * BLOCK + tl.arange(0, BLOCK)
    inside = offset < words
    payload = tl.load(shard.to(tl.pointer_type(tl.uint32)) + offset, mask=inside, other=0)
    epoch = this_epoch(state.epochs)
    source, target = (rank + N - 1 - program % N) % N, (rank + 1 + program % N) % N
    sweep(state, epoch, target * CAPACITY, CAPACITY, program // N, tl.num_programs(0) // N, N, N * CAPACITY, BLOCK)
    flag, slot = flag_of(epoch), (epoch & 1) * (N * CAPACITY)
    theirs = state.peers[N - 1]
    for i in tl.static_range(N - 1):
        theirs = tl.where(program % N == i, state.peers[i], theirs)
    there = pointer_to(theirs, tl.int64) + slot + rank * CAPACITY
    tl.store(there + offset, payload.to(tl.int64) | flag, mask=inside)
    count_launch(state.epochs, epoch)

    sent = pointer_to(box_of(state, source, rank, N), tl.int64) + slot + source * CAPACITY
    word = tl.zeros([BLOCK], tl.int64)
    missing = 1
    polls = 0
    while (missing != 0) & (polls < state.patience):
        word = tl.load(sent + offset, mask=inside, other=flag, volatile=True)
        missing = tl.max(lacks(word, flag), axis=0)
        polls += 1
    if missing != 0:
        tl.store(state.fault, 3)
    tl.store(out + (offset // row * N + source) * row + offset % row, word.to(tl.int32), mask=inside)


# --- two-shot -----------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rank"])
def _two_shot(
    partial, x, weight, out, normed, state, count, share, rank, eps,
    TILE: tl.constexpr,  # values: a whole row with x
    N: tl.constexpr, LANES: tl.constexpr, FLAGS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = sum. With x (else None): out = x + sum and normed = rms_norm(out) * weight; after the gather each rank adds and
    normalizes all rows itself, and slices are whole rows."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    if x is not None:
        scale = tl.load(weight + lane, mask=lane < TILE, other=0.0).to(tl.float32)
    sums = _reduce_scatter_gather(partial, state, count, share, rank, TILE, N, LANES, FLAGS, CAPACITY, BLOCK, DTYPE, PDL)
    start = tl.program_id(0) * TILE
    while start < share:
        if x is None:
            for owner in tl.static_range(N):
                place = owner * share + start + lane
                inside = (start + lane < share) & (place < count)
                tl.store(out + place, tl.load(sums + place, mask=inside, other=0.0), mask=inside)
        else:
            for owner in range(N):
                place = owner * share + start + lane
                inside = (lane < TILE) & (place < count)
                before = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
                after = (before + tl.load(sums + place, mask=inside, other=0.0).to(tl.float32)).to(DTYPE)
                tl.store(out + place, after, mask=inside)
                rounded = after.to(tl.float32)
                factor = tl.rsqrt(tl.sum(rounded * rounded, axis=0) / TILE + eps)
                tl.store(normed + place, (rounded * factor * scale).to(DTYPE), mask=inside)
        start += tl.num_programs(0) * TILE


@triton.jit
def _reduce_scatter_gather(
    partial, state, count, share, rank,
    TILE: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, FLAGS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Both shots: program p does tiles p, p + programs, … of every slice of `share` values. Returns the place of the sums of
    the whole message. This program may read its own tiles of each slice there."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    lane = tl.arange(0, BLOCK)
    begin, step = tl.program_id(0) * TILE, tl.num_programs(0) * TILE
    epoch = this_epoch(state.epochs)
    scattered = FLAGS + (epoch & 1) * (2 * CAPACITY)
    gathered = scattered + CAPACITY
    for i in tl.static_range(N):
        owner = (rank + 1 + i) % N
        there = pointer_to(state.peers[i] + scattered, DTYPE) + rank * share
        start = begin
        while start < share:
            inside = (lane < TILE) & (start + lane < share) & (owner * share + start + lane < count)
            values = tl.load(partial + owner * share + start + lane, mask=inside, other=0.0)
            tl.store(there + start + lane, values, mask=inside)
            start += step
    announce(state.peers, 0, rank, epoch, N, LANES)
    count_launch(state.epochs, epoch)
    await_all(state, 0, epoch, N, LANES)
    here = pointer_to(state.peers[N - 1] + scattered, DTYPE)
    start = begin
    while start < share:
        inside = (lane < TILE) & (start + lane < share) & (rank * share + start + lane < count)
        sum = tl.zeros([BLOCK], tl.float32)
        for r in tl.static_range(N):
            sum += tl.load(here + r * share + start + lane, mask=inside, other=0.0).to(tl.float32)
        for i in tl.static_range(N):
            there = pointer_to(state.peers[i] + gathered, DTYPE) + rank * share
            tl.store(there + start + lane, sum.to(DTYPE), mask=inside)
        start += step
    announce(state.peers, 1, rank, epoch, N, LANES)
    await_all(state, 1, epoch, N, LANES)
    return pointer_to(state.peers[N - 1] + gathered, DTYPE)


# --- launches -----------------------------------------------------------------------------------------------------------------


def one_shot(partial: Tensor, exchange: Exchange, tiling: Tiling = ONE_SHOT, pdl: bool = True) -> Tensor:
    """The sum over ranks of `partial`: contiguous, fp32, bf16 or fp16, at most `exchange.capacity` bytes; same shape and dtype.

    Returns at once; the sum is complete in the current stream's order. Any number of values: an odd number of 16-bit ones is
    padded. Raises ValueError for a message that does not fit."""
    padded = _whole_words(partial)
    words = _words(padded, exchange)
    out = torch.empty_like(padded)
    if words:
        grid = (triton.cdiv(words, tiling.block),)
        check_programs(grid[0])
        _one_shot[grid](
            padded, None, None, out, None, exchange.state, words, exchange.rank, None, ROW=0, PARTS=0, LANES=0,
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
) -> tuple[Tensor, Tensor]:
    """(x + sum of `partial`, its RMSNorm times weight), both in x's dtype; x (..., C) contiguous, weight (C,).

    The new x is rounded once, from the fp32 sum, and its rounded value is normalized. Raises ValueError unless `fits_norm`."""
    if not fits_norm(partial, x, weight):
        raise ValueError(f"partial {_shape(partial)}, x {_shape(x)} and weight {_shape(weight)} have no kernel in common")
    words, (total, normed) = _words(partial, exchange), (torch.empty_like(x) for _ in range(2))
    row = x.shape[-1] * x.element_size() // 4
    parts = triton.cdiv(row, tiling.block)
    if words:
        grid = (words // row * parts,)
        check_programs(grid[0])
        _one_shot[grid](
            partial, x, weight, total, normed, exchange.state, None, exchange.rank, eps, ROW=row, PARTS=parts,
            LANES=triton.next_power_of_2(parts), **one_shot_options(exchange, partial, tiling, pdl),
        )  # fmt: skip
    return total, normed


def one_shot_gather(shard: Tensor, exchange: Exchange, tiling: Tiling = ONE_SHOT, pdl: bool = True) -> Tensor:
    """The ranks' contiguous `shard`s (..., n), rows of whole 4-byte words, side by side: (..., N * n).

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
    """As `one_shot`, for messages where bandwidth counts."""
    count, out = partial.numel(), torch.empty_like(partial)
    share = _share(count, 16, exchange)  # a multiple of 16, so that the compiler knows of slices' alignment
    if count:
        grid = (min(triton.cdiv(share, tiling.block), tiling.programs),)
        _two_shot[grid](
            partial, None, None, out, None, exchange.state, count, share, exchange.rank, None, TILE=tiling.block,
            BLOCK=tiling.block, num_warps=tiling.warps, **_two_shot_options(exchange, partial, share, pdl),
        )  # fmt: skip
    return out


def two_shot_add_norm(
    partial: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    exchange: Exchange,
    tiling: Tiling = TWO_SHOT_NORM,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """As `one_shot_add_norm`, for many rows; the sum is rounded before it is added, as by `two_shot` and a separate
    addition."""
    if not fits_norm(partial, x, weight):
        raise ValueError(f"partial {_shape(partial)}, x {_shape(x)} and weight {_shape(weight)} have no kernel in common")
    count, size, (total, normed) = x.numel(), x.shape[-1], (torch.empty_like(x) for _ in range(2))
    if count:
        share = _share(count, size, exchange)
        _two_shot[(min(share // size, tiling.programs),)](
            partial, x, weight, total, normed, exchange.state, count, share, exchange.rank, eps, TILE=size,
            BLOCK=triton.next_power_of_2(size), num_warps=tiling.warps, **_two_shot_options(exchange, partial, share, pdl),
        )  # fmt: skip
    return total, normed


def fits_norm(partial: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels with a norm serve these: contiguous, aligned, of one dtype, rows of whole 4-byte words, at most 32
    KiB."""
    row = x.shape[-1] * x.element_size()
    same = partial.dtype == x.dtype == weight.dtype and partial.shape == x.shape and weight.shape == x.shape[-1:]
    plain = all(t.is_contiguous() and t.data_ptr() % 4 == 0 for t in (partial, x, weight))
    return same and plain and row % 4 == 0 and row <= 32768


def norm_programs(x: Tensor, tiling: Tiling = ONE_SHOT_NORM) -> int:
    """Programs of `one_shot_add_norm` for x: all of them must be on the GPU at the same time, and have counters."""
    words = x.shape[-1] * x.element_size() // 4
    return x.numel() // x.shape[-1] * triton.cdiv(words, tiling.block) if words else 0


def one_shot_options(exchange: Exchange, x: Tensor, tiling: Tiling, pdl: bool) -> dict[str, Any]:
    """Constants and launch options of the one-shot kernels."""
    cut = {"CAPACITY": exchange.capacity // 4, "BLOCK": tiling.block, "num_warps": tiling.warps}
    return {"N": exchange.world_size, **cut, **pdl_options(x.device, pdl)}


def _two_shot_options(exchange: Exchange, partial: Tensor, share: int, pdl: bool) -> dict[str, Any]:
    ranks = exchange.world_size
    needed = share * ranks * partial.element_size()
    if needed > exchange.capacity:
        raise ValueError(f"a message of {partial.nbytes} bytes needs {needed}, but the workspace takes {exchange.capacity}")
    places = {"LANES": max(2, triton.next_power_of_2(ranks)), "FLAGS": flag_bytes(ranks), "CAPACITY": exchange.capacity}
    return {"N": ranks, **places, **pdl_options(partial.device, pdl)}


def _share(count: int, unit: int, exchange: Exchange) -> int:
    """Values of a rank's slice: whole units, enough slices for all `count` values."""
    return triton.cdiv(count, exchange.world_size * unit) * unit


def _whole_words(x: Tensor) -> Tensor:
    """x itself where it consists of aligned 4-byte words; else a flat copy of them, with a value more if it takes one."""
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
        raise ValueError(f"{programs} programs, but at most {MAX_PROGRAMS} have a counter; take larger blocks")


def _shape(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
