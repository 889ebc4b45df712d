"""Triton kernels that sum over GPUs through memory all of them can address: stores over NVLink or PCIe, no multicast.

One-shot (`one_shot_*`): every rank pushes its whole message to every rank, which sums all of them. As in NCCL's LL protocol, each
8-byte word carries 4 bytes of the message and a 4-byte flag of this launch, so a word announces its own arrival and the sum costs
one way over the link. Two-shot (`two_shot_*`): rank s sums the s-th slice of the message and pushes the sum to all (reduce-scatter
and all-gather by stores), announced by one flag a program: two ways over the link, but 2 (N - 1) / N messages instead of N - 1.

A launch number, `epoch`, lives in device memory and is advanced by the kernels themselves, so a CUDA graph may replay them any
number of times. Launch e uses slot e mod 2 of every buffer, and that is all the protection the buffers need: a rank that has begun
launch e has completed launch e - 1, for which every other rank had completed launch e - 2 and with it all reading of that slot.
So all ranks must make the same launches on a workspace in the same order, on one stream at a time.

The sum of a value is taken in fp32 in rank order and rounded once: every rank gets the same bits.

Where GPUs do not reach each other, one-shot sums take host memory that both address for what a rank sends to another one
(`Exchange.inbox`), and the rank's own for what it keeps. Two-shot sums do not: a program's flag would need a fence behind its stores,
and over PCIe those take µs, one program after the other.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dispatch import pdl_supported

MAX_PROGRAMS = 512
PATIENCE = 1 << 27  # polls, each at least half a microsecond: more than a minute

_MAX_PROGRAMS = tl.constexpr(MAX_PROGRAMS)
_SWEEP = tl.constexpr((1 << 30) - 1)  # of an epoch's bits: where it lies between two sweeps


@dataclass(frozen=True)
class Exchange:
    """What the kernels know of a workspace.

    peers: addresses of the ranks' buffers, the next rank's first and this rank's own last; zeroed before the first launch.
    inbox: where what other ranks send to this one arrives, if that is not its own buffer: another one, in host memory. For one-shot
    sums only.
    epochs (MAX_PROGRAMS,) int64: launches so far, as each program counts them. squares (2, MAX_PROGRAMS) int64: what the
    programs of a row tell each other. fault (1,) int32: not 0 once a program has given up waiting for `patience` polls.
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


def one_shot_bytes(world_size: int, capacity: int) -> int:
    """Size of a one-shot workspace's buffer for messages of up to `capacity` bytes: two slots of a message in words from each
    rank."""
    return 2 * world_size * 2 * capacity


def two_shot_bytes(world_size: int, capacity: int) -> int:
    """Size of a two-shot workspace's buffer: arrival flags; two slots, each of what is to be summed and of the sums."""
    return _flag_bytes(world_size) + 2 * 2 * capacity


def _flag_bytes(world_size: int) -> int:
    return 2 * world_size * MAX_PROGRAMS * 8


# --- words of two 16-bit values or one of 32 bits -------------------------------------------------------------------------------


@triton.jit
def _first(word, DTYPE: tl.constexpr):
    """fp32 of the value, or of the first of two, in 4-byte words."""
    if DTYPE.primitive_bitwidth == 32:
        value = word.to(DTYPE, bitcast=True)
    else:
        value = word.to(tl.int16).to(DTYPE, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _second(word, DTYPE: tl.constexpr):
    """fp32 of the second of two values in 4-byte words; 0 where there is one."""
    if DTYPE.primitive_bitwidth == 32:
        value = (word & 0).to(tl.float32)
    else:
        value = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _pack(first, second, DTYPE: tl.constexpr):
    """4-byte words of fp32 values, rounded."""
    if DTYPE.primitive_bitwidth == 32:
        word = first.to(DTYPE).to(tl.int32, bitcast=True)
    else:
        low = first.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = (second.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16) | low
    return word


@triton.jit
def _at(address, dtype: tl.constexpr):
    """A pointer to a rank's buffer, or to a place in it that is a multiple of 16 bytes away."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _box(mine, inbox, source, rank):
    """The address of the buffer with what `source` sent to this rank; inbox is None where all of it comes to `mine`."""
    if inbox is None:
        box = mine
    else:
        box = tl.where(source == rank, mine, inbox)
    return box


# --- epochs and flags -----------------------------------------------------------------------------------------------------------


@triton.jit
def _this_epoch(epochs):
    """This launch's number. A program reads its own counter, and so waits for no other program."""
    return tl.load(epochs + tl.program_id(0)) + 1


@triton.jit
def _count(epochs, epoch):
    """Program p advances the counters p, p + programs, …, so that all of them agree whatever the number of programs."""
    tl.debug_barrier()  # every warp has read this program's counter
    program, programs = tl.program_id(0), tl.num_programs(0)
    counters = tl.arange(0, _MAX_PROGRAMS)
    tl.store(epochs + counters, tl.zeros([_MAX_PROGRAMS], tl.int64) + epoch, mask=counters % programs == program)


@triton.jit
def _flag_of(epoch):
    """The 32-bit flag of an epoch, shifted to a word's upper half: never that of a zeroed word, and back after 2^31 launches."""
    return ((epoch & 0x7FFFFFFF) | 0x80000000) << 32


@triton.jit
def _sweep(
    mine, inbox, squares, fault, epoch, begin, size, program, programs, SLOT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """In the last two of each 2^30 launches, zero words of the other slot, that of the launches before and after this one: so no
    word gets as old as a flag's period. The first launches find a buffer that is zeroed already.

    This is program number `program` of the `programs` that zero words `begin` to `begin` + `size` of the slot together. Nobody
    writes there meanwhile: whoever writes there in the next launch must have received something from each of these programs in this
    one, and a program sends behind its sweep. In an all-reduce each program sends to all ranks, so all programs share all words. A
    program of a gather sends to one rank; see `_one_shot_gather`."""
    if (epoch & _SWEEP) >= _SWEEP - 1:
        other = (epoch + 1) & 1
        words = tl.arange(0, BLOCK)
        nothing = tl.zeros([BLOCK], tl.int64)
        start = program * BLOCK
        while start < size:
            place = other * SLOT + begin + start + words
            tl.store(_at(mine, tl.int64) + place, nothing, mask=start + words < size)
            if inbox is not None:
                tl.store(_at(inbox, tl.int64) + place, nothing, mask=start + words < size)
            start += programs * BLOCK
        # only this rank's own launches write here, one after the other: any share of the programs will do
        start = tl.program_id(0) * BLOCK
        while start < _MAX_PROGRAMS:
            tl.store(squares + other * _MAX_PROGRAMS + start + words, nothing, mask=start + words < _MAX_PROGRAMS)
            start += tl.num_programs(0) * BLOCK
        tl.debug_barrier()
        tl.atomic_add(fault, 0, sem="acq_rel", scope="sys")  # a fence
        tl.debug_barrier()


# --- one-shot -------------------------------------------------------------------------------------------------------------------


@triton.jit
def _push(peers, place, words, inside, N: tl.constexpr):
    """Store 8-byte words at `place` of every rank's buffer, nearest neighbour first, so that no rank is everyone's first."""
    for i in tl.static_range(N):
        tl.store(_at(peers[i], tl.int64) + place, words, mask=inside)


@triton.jit
def _receive_sum(
    mine, inbox, me, place, inside, flag, patience, fault,
    N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Poll all ranks' words at `place` (BLOCK,) of this rank's boxes, CAPACITY words apart, until each has its flag; the sums of
    their first and second values. Each poll reads and sums everything, so that all loads are in flight together."""
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    missing = 1
    polls = 0
    while (missing != 0) & (polls < patience):
        late = tl.zeros([BLOCK], tl.int32)
        first = tl.zeros([BLOCK], tl.float32)
        second = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(N):
            words = _at(_box(mine, inbox, rank, me), tl.int64) + rank * CAPACITY
            word = tl.load(words + place, mask=inside, other=flag, volatile=True)
            late |= (((word ^ flag) >> 32) != 0).to(tl.int32)
            payload = word.to(tl.int32)
            first += _first(payload, DTYPE)
            second += _second(payload, DTYPE)
        missing = tl.max(late, axis=0)
        polls += 1
    if missing != 0:
        tl.store(fault, 1)
    return first, second


@triton.jit(do_not_specialize=["rank"])
def _one_shot(
    partial, out, peers, inbox, epochs, squares, fault, words, rank, patience,
    N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < words
    payload = tl.load(partial.to(tl.pointer_type(tl.uint32)) + offset, mask=inside, other=0)
    epoch = _this_epoch(epochs)
    _sweep(
        peers[N - 1], inbox, squares, fault, epoch, 0, N * CAPACITY, tl.program_id(0), tl.num_programs(0), N * CAPACITY, BLOCK
    )  # fmt: skip
    flag, slot = _flag_of(epoch), (epoch & 1) * (N * CAPACITY)
    _push(peers, slot + rank * CAPACITY + offset, payload.to(tl.int64) | flag, inside, N)
    _count(epochs, epoch)
    first, second = _receive_sum(
        peers[N - 1], inbox, rank, slot + offset, inside, flag, patience, fault, N, CAPACITY, BLOCK, DTYPE
    )
    tl.store(out.to(tl.pointer_type(tl.int32)) + offset, _pack(first, second, DTYPE), mask=inside)


@triton.jit
def _sum_of_row(square, squares, epoch, flag, patience, fault, PARTS: tl.constexpr, LANES: tl.constexpr):
    """The sum of `square` over the PARTS programs of this row: words with flags again, in this GPU's own memory."""
    if PARTS == 1:
        total = square
    else:
        program = tl.program_id(0)
        base = squares + (epoch & 1) * _MAX_PROGRAMS
        tl.store(base + program, square.to(tl.uint32, bitcast=True).to(tl.int64) | flag)
        part = tl.arange(0, LANES)
        total = tl.zeros([1], tl.float32).sum(0)
        missing = 1
        polls = 0
        while (missing != 0) & (polls < patience):
            word = tl.load(base + program // PARTS * PARTS + part, mask=part < PARTS, other=flag, volatile=True)
            total = tl.sum(word.to(tl.int32).to(tl.float32, bitcast=True), axis=0)
            missing = tl.max((((word ^ flag) >> 32) != 0).to(tl.int32), axis=0)
            polls += 1
        if missing != 0:
            tl.store(fault, 2)
    return total


@triton.jit
def _normalized(
    words, scale, inside, squares, epoch, flag, patience, fault, eps,
    ROW: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The RMSNorm of a row of ROW words, of which this program has some of the rounded `words`; times `scale`, in words."""
    VALUES: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    first, second = _first(words, DTYPE), _second(words, DTYPE)
    square = tl.sum(tl.where(inside, first * first + second * second, 0.0), axis=0)
    square = _sum_of_row(square, squares, epoch, flag, patience, fault, PARTS, LANES)
    factor = tl.rsqrt(square / (ROW * VALUES) + eps)
    return _pack(first * factor * _first(scale, DTYPE), second * factor * _second(scale, DTYPE), DTYPE)


@triton.jit(do_not_specialize=["rank"])
def _one_shot_norm(
    partial, x, weight, total, normed, peers, inbox, epochs, squares, fault, rank, patience, eps,
    ROW: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
    N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """total = x + sum, normed = rms_norm(total) * weight, for rows of ROW words that PARTS programs share."""
    DTYPE: tl.constexpr = total.dtype.element_ty
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    offset = tl.program_id(0) // PARTS * ROW + column
    inside = column < ROW
    scale = tl.load(weight.to(tl.pointer_type(tl.int32)) + column, mask=inside, other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    payload = tl.load(partial.to(tl.pointer_type(tl.uint32)) + offset, mask=inside, other=0)
    before = tl.load(x.to(tl.pointer_type(tl.int32)) + offset, mask=inside, other=0)
    epoch = _this_epoch(epochs)
    _sweep(
        peers[N - 1], inbox, squares, fault, epoch, 0, N * CAPACITY, tl.program_id(0), tl.num_programs(0), N * CAPACITY, BLOCK
    )  # fmt: skip
    flag, slot = _flag_of(epoch), (epoch & 1) * (N * CAPACITY)
    _push(peers, slot + rank * CAPACITY + offset, payload.to(tl.int64) | flag, inside, N)
    _count(epochs, epoch)
    first, second = _receive_sum(
        peers[N - 1], inbox, rank, slot + offset, inside, flag, patience, fault, N, CAPACITY, BLOCK, DTYPE
    )

    after = _pack(_first(before, DTYPE) + first, _second(before, DTYPE) + second, DTYPE)
    tl.store(total.to(tl.pointer_type(tl.int32)) + offset, after, mask=inside)
    after_norm = _normalized(after, scale, inside, squares, epoch, flag, patience, fault, eps, ROW, PARTS, LANES, DTYPE)
    tl.store(normed.to(tl.pointer_type(tl.int32)) + offset, after_norm, mask=inside)


@triton.jit(do_not_specialize=["rank"])
def _one_shot_gather(
    shard, out, peers, inbox, epochs, squares, fault, row, words, rank, patience,
    N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block, i) sends a block of this rank's words to rank + 1 + i and receives that of rank - 1 - i, which program
    (block, i) there sends: int32 shard (rows, row words) to out (rows, N, row words).

    When the other slot is due to be zeroed, the programs (·, i) together zero the words that rank + 1 + i writes, and no others.
    That rank begins the next launch, and writes there, only when it has received this launch's blocks from all of them. For any
    other rank's words this would not hold: that rank receives nothing from these programs, and may be one launch ahead of them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    offset = program // N * BLOCK + tl.arange(0, BLOCK)
    inside = offset < words
    payload = tl.load(shard.to(tl.pointer_type(tl.uint32)) + offset, mask=inside, other=0)
    epoch = _this_epoch(epochs)
    source, target = (rank + N - 1 - program % N) % N, (rank + 1 + program % N) % N
    _sweep(
        peers[N - 1], inbox, squares, fault, epoch, target * CAPACITY, CAPACITY, program // N, tl.num_programs(0) // N,
        N * CAPACITY, BLOCK,
    )  # fmt: skip
    flag, slot = _flag_of(epoch), (epoch & 1) * (N * CAPACITY)
    theirs = peers[N - 1]
    for i in tl.static_range(N - 1):
        theirs = tl.where(program % N == i, peers[i], theirs)
    there = _at(theirs, tl.int64) + slot + rank * CAPACITY
    tl.store(there + offset, payload.to(tl.int64) | flag, mask=inside)
    _count(epochs, epoch)

    sent = _at(_box(peers[N - 1], inbox, source, rank), tl.int64) + slot + source * CAPACITY
    word = tl.zeros([BLOCK], tl.int64)
    missing = 1
    polls = 0
    while (missing != 0) & (polls < patience):
        word = tl.load(sent + offset, mask=inside, other=flag, volatile=True)
        missing = tl.max((((word ^ flag) >> 32) != 0).to(tl.int32), axis=0)
        polls += 1
    if missing != 0:
        tl.store(fault, 3)
    tl.store(out + (offset // row * N + source) * row + offset % row, word.to(tl.int32), mask=inside)


# --- two-shot -------------------------------------------------------------------------------------------------------------------


@triton.jit
def _flags(base, phase: tl.constexpr, rank, N: tl.constexpr):
    return base.to(tl.pointer_type(tl.int64)) + (phase * N + rank) * _MAX_PROGRAMS + tl.program_id(0)


@triton.jit
def _announce(peers, phase: tl.constexpr, rank, epoch, N: tl.constexpr, LANES: tl.constexpr):
    """Tell this program's twins on all ranks that what it has stored there is complete."""
    lane = tl.arange(0, LANES)
    base = tl.zeros([LANES], tl.int64)
    for i in tl.static_range(N):
        base = tl.where(lane == i, peers[i], base)
    tl.debug_barrier()  # all warps' stores come before the release
    tl.atomic_xchg(_flags(base, phase, rank, N), epoch, mask=lane < N, sem="release", scope="sys")


@triton.jit
def _await(mine, phase: tl.constexpr, epoch, patience, fault, N: tl.constexpr, LANES: tl.constexpr):
    """Wait until this program's twins on all ranks have announced theirs."""
    lane = tl.arange(0, LANES)
    missing = 1
    polls = 0
    while (missing != 0) & (polls < patience):
        seen = tl.atomic_add(
            _flags(mine, phase, lane, N), tl.zeros([LANES], tl.int64), mask=lane < N, sem="acquire", scope="sys"
        )
        missing = tl.max(((lane < N) & (seen < epoch)).to(tl.int32), axis=0)
        polls += 1
    if missing != 0:
        tl.store(fault, 4)
    tl.debug_barrier()  # all warps' loads come after the acquire


@triton.jit
def _reduce_scatter_gather(
    partial, peers, epochs, fault, count, share, rank, patience, tile,
    N: tl.constexpr, LANES: tl.constexpr, FLAGS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Both shots, program p doing tiles p, p + programs, … of every slice of `share` values. Returns where the sums lie: the
    whole message, of which this program may read its own tiles of each slice."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    lane = tl.arange(0, BLOCK)
    begin, step = tl.program_id(0) * tile, tl.num_programs(0) * tile
    epoch = _this_epoch(epochs)
    scattered = FLAGS + (epoch & 1) * (2 * CAPACITY)
    gathered = scattered + CAPACITY
    for i in tl.static_range(N):
        owner = (rank + 1 + i) % N
        there = _at(peers[i] + scattered, DTYPE) + rank * share
        start = begin
        while start < share:
            inside = (lane < tile) & (start + lane < share) & (owner * share + start + lane < count)
            values = tl.load(partial + owner * share + start + lane, mask=inside, other=0.0)
            tl.store(there + start + lane, values, mask=inside)
            start += step
    _announce(peers, 0, rank, epoch, N, LANES)
    _count(epochs, epoch)
    _await(peers[N - 1], 0, epoch, patience, fault, N, LANES)
    here = _at(peers[N - 1] + scattered, DTYPE)
    start = begin
    while start < share:
        inside = (lane < tile) & (start + lane < share) & (rank * share + start + lane < count)
        sum = tl.zeros([BLOCK], tl.float32)
        for r in tl.static_range(N):
            sum += tl.load(here + r * share + start + lane, mask=inside, other=0.0).to(tl.float32)
        for i in tl.static_range(N):
            there = _at(peers[i] + gathered, DTYPE) + rank * share
            tl.store(there + start + lane, sum.to(DTYPE), mask=inside)
        start += step
    _announce(peers, 1, rank, epoch, N, LANES)
    _await(peers[N - 1], 1, epoch, patience, fault, N, LANES)
    return _at(peers[N - 1] + gathered, DTYPE)


@triton.jit(do_not_specialize=["rank"])
def _two_shot(
    partial, out, peers, epochs, fault, count, share, rank, patience,
    N: tl.constexpr, LANES: tl.constexpr, FLAGS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
    sums = _reduce_scatter_gather(
        partial, peers, epochs, fault, count, share, rank, patience, BLOCK, N, LANES, FLAGS, CAPACITY, BLOCK, DTYPE, PDL
    )
    lane = tl.arange(0, BLOCK)
    start = tl.program_id(0) * BLOCK
    while start < share:
        for owner in tl.static_range(N):
            place = owner * share + start + lane
            inside = (start + lane < share) & (place < count)
            tl.store(out + place, tl.load(sums + place, mask=inside, other=0.0), mask=inside)
        start += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["rank"])
def _two_shot_norm(
    partial, x, weight, total, normed, peers, epochs, fault, count, share, rank, patience, eps,
    C: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, FLAGS: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile is a row, a slice whole rows: after the gather each rank adds and normalizes all rows itself."""
    DTYPE: tl.constexpr = total.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    scale = tl.load(weight + lane, mask=lane < C, other=0.0).to(tl.float32)
    sums = _reduce_scatter_gather(
        partial, peers, epochs, fault, count, share, rank, patience, C, N, LANES, FLAGS, CAPACITY, BLOCK, DTYPE, PDL
    )
    start = tl.program_id(0) * C
    while start < share:
        for owner in range(N):
            place = owner * share + start + lane
            inside = (lane < C) & (place < count)
            before = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            after = (before + tl.load(sums + place, mask=inside, other=0.0).to(tl.float32)).to(DTYPE)
            tl.store(total + place, after, mask=inside)
            rounded = after.to(tl.float32)
            factor = tl.rsqrt(tl.sum(rounded * rounded, axis=0) / C + eps)
            tl.store(normed + place, (rounded * factor * scale).to(DTYPE), mask=inside)
        start += tl.num_programs(0) * C


# --- launches -------------------------------------------------------------------------------------------------------------------


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


def one_shot(partial: Tensor, exchange: Exchange, tiling: Tiling = ONE_SHOT, pdl: bool = True) -> Tensor:
    """The sum over ranks of `partial`: contiguous, fp32, bf16 or fp16, at most `exchange.capacity` bytes; same shape and dtype.

    Returns at once; the sum is there when the current stream gets there. Any number of values: an odd one of 16 bits is padded.
    Raises ValueError for a message that does not fit."""
    padded = _whole_words(partial)
    words = _words(padded, exchange)
    out = torch.empty_like(padded)
    if words:
        grid = (triton.cdiv(words, tiling.block),)
        _check_programs(grid[0])
        _one_shot[grid](
            padded, out, *_state(exchange), words, exchange.rank, exchange.patience, BLOCK=tiling.block, num_warps=tiling.warps,
            CAPACITY=exchange.capacity // 4, **_common(exchange, partial, pdl),
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
        _check_programs(grid[0])
        _one_shot_norm[grid](
            partial, x, weight, total, normed, *_state(exchange), exchange.rank, exchange.patience, eps, ROW=row, PARTS=parts,
            LANES=triton.next_power_of_2(parts), BLOCK=tiling.block, num_warps=tiling.warps, CAPACITY=exchange.capacity // 4,
            **_common(exchange, partial, pdl),
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
        _check_programs(grid[0])
        _one_shot_gather[grid](
            shard.view(torch.int32), out.view(torch.int32), *_state(exchange), row, words, exchange.rank, exchange.patience,
            BLOCK=tiling.block, num_warps=tiling.warps, CAPACITY=exchange.capacity // 4, **_common(exchange, shard, pdl),
        )  # fmt: skip
    return out


def two_shot(partial: Tensor, exchange: Exchange, tiling: Tiling = TWO_SHOT, pdl: bool = True) -> Tensor:
    """As `one_shot`, for messages where bandwidth counts."""
    count, out = partial.numel(), torch.empty_like(partial)
    share = _share(count, 16, exchange)  # a multiple of 16, so that the compiler knows of slices' alignment
    if count:
        grid = (min(triton.cdiv(share, tiling.block), tiling.programs),)
        _two_shot[grid](
            partial, out, exchange.peers, exchange.epochs, exchange.fault, count, share, exchange.rank, exchange.patience,
            BLOCK=tiling.block, num_warps=tiling.warps, **_flagged(exchange, partial, share), **_common(exchange, partial, pdl),
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
    """As `one_shot_add_norm`, for many rows; the sum is rounded on its way, as when it is summed and added one after the other."""
    if not fits_norm(partial, x, weight):
        raise ValueError(f"partial {_shape(partial)}, x {_shape(x)} and weight {_shape(weight)} have no kernel in common")
    count, size, (total, normed) = x.numel(), x.shape[-1], (torch.empty_like(x) for _ in range(2))
    if count:
        share = _share(count, size, exchange)
        _two_shot_norm[(min(share // size, tiling.programs),)](
            partial, x, weight, total, normed, exchange.peers, exchange.epochs, exchange.fault, count, share, exchange.rank,
            exchange.patience, eps, C=size, BLOCK=triton.next_power_of_2(size), num_warps=tiling.warps,
            **_flagged(exchange, partial, share), **_common(exchange, partial, pdl),
        )  # fmt: skip
    return total, normed


def fits_norm(partial: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels with a norm serve these: contiguous, aligned, of one dtype, rows of whole 4-byte words, at most 32 KiB."""
    row = x.shape[-1] * x.element_size()
    same = partial.dtype == x.dtype == weight.dtype and partial.shape == x.shape and weight.shape == x.shape[-1:]
    plain = all(t.is_contiguous() and t.data_ptr() % 4 == 0 for t in (partial, x, weight))
    return same and plain and row % 4 == 0 and row <= 32768


def norm_programs(x: Tensor, tiling: Tiling = ONE_SHOT_NORM) -> int:
    """Programs that `one_shot_add_norm` takes for x: all of them must be on the GPU at once, and have counters."""
    words = x.shape[-1] * x.element_size() // 4
    return x.numel() // x.shape[-1] * triton.cdiv(words, tiling.block) if words else 0


def _state(exchange: Exchange) -> tuple[Any, ...]:
    return exchange.peers, exchange.inbox, exchange.epochs, exchange.squares, exchange.fault


def _common(exchange: Exchange, x: Tensor, pdl: bool) -> dict[str, Any]:
    pdl = pdl and pdl_supported(x.device)
    return {"N": exchange.world_size, "PDL": pdl, "launch_pdl": pdl}


def _flagged(exchange: Exchange, partial: Tensor, share: int) -> dict[str, Any]:
    needed = share * exchange.world_size * partial.element_size()
    if needed > exchange.capacity:
        raise ValueError(f"a message of {partial.nbytes} bytes needs {needed}, but the workspace takes {exchange.capacity}")
    lanes = max(2, triton.next_power_of_2(exchange.world_size))
    return {"LANES": lanes, "FLAGS": _flag_bytes(exchange.world_size), "CAPACITY": exchange.capacity}


def _share(count: int, unit: int, exchange: Exchange) -> int:
    """Values of a rank's slice: whole units, enough for all `count` values."""
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


def _check_programs(programs: int) -> None:
    if programs > MAX_PROGRAMS:
        raise ValueError(f"{programs} programs, but at most {MAX_PROGRAMS} have a counter; take larger blocks")


def _shape(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
