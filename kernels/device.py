"""What kernels that exchange data with other GPUs have in common: device functions, and the state that they all get.

The protocol and the reason why no buffer is overwritten too early are described in `kernels/all_reduce.py`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

MAX_PROGRAMS = 512
PATIENCE = 1 << 27  # polls, each at least half a microsecond: more than a minute

_MAX_PROGRAMS = tl.constexpr(MAX_PROGRAMS)
_SWEEP = tl.constexpr((1 << 30) - 1)  # of an epoch's bits: where it lies between two sweeps


class State(NamedTuple):
    """The fields of an `Exchange` that its kernels get. The rank is a separate argument, not specialized: in a tuple, a rank of
    1 would become a constant, and rank 1 would compile kernels of its own."""

    peers: tuple[int, ...]
    inbox: int | None
    epochs: Tensor
    squares: Tensor
    fault: Tensor
    patience: int


# --- words of two 16-bit values or one of 32 bits -----------------------------------------------------------------------------


@triton.jit
def first_value(word, DTYPE: tl.constexpr):
    """fp32 of the value, or of the first of two, in 4-byte words."""
    if DTYPE.primitive_bitwidth == 32:
        value = word.to(DTYPE, bitcast=True)
    else:
        value = word.to(tl.int16).to(DTYPE, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def second_value(word, DTYPE: tl.constexpr):
    """fp32 of the second of two values in 4-byte words; 0 where there is one."""
    if DTYPE.primitive_bitwidth == 32:
        value = (word & 0).to(tl.float32)
    else:
        value = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return value


@triton.jit
def pack(first, second, DTYPE: tl.constexpr):
    """4-byte words of fp32 values, rounded."""
    if DTYPE.primitive_bitwidth == 32:
        word = first.to(DTYPE).to(tl.int32, bitcast=True)
    else:
        low = first.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = (second.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16) | low
    return word


# --- places and epochs --------------------------------------------------------------------------------------------------------


@triton.jit
def pointer_to(address, dtype: tl.constexpr):
    """A pointer to a rank's buffer, or to a place in it that is a multiple of 16 bytes away."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def box_of(state, source, rank, N: tl.constexpr):
    """The address of the buffer in which the words of `source` arrive; without an inbox, all come to this rank's own buffer."""
    if state.inbox is None:
        box = state.peers[N - 1]
    else:
        box = tl.where(source == rank, state.peers[N - 1], state.inbox)
    return box


@triton.jit
def this_epoch(epochs):
    """This launch's number. A program reads its own counter, so it waits for no other program."""
    return tl.load(epochs + tl.program_id(0)) + 1


@triton.jit
def count_launch(epochs, epoch):
    """Program p advances the counters p, p + programs, …, so that all counters agree, whatever the number of programs."""
    tl.debug_barrier()  # every warp has read this program's counter
    program, programs = tl.program_id(0), tl.num_programs(0)
    counters = tl.arange(0, _MAX_PROGRAMS)
    tl.store(epochs + counters, tl.zeros([_MAX_PROGRAMS], tl.int64) + epoch, mask=counters % programs == program)


# --- words with flags: one-shot -----------------------------------------------------------------------------------------------


@triton.jit
def flag_of(epoch):
    """The 32-bit flag of an epoch, shifted to a word's upper half. It is never that of a zeroed word, and repeats after 2^31
    launches."""
    return ((epoch & 0x7FFFFFFF) | 0x80000000) << 32


@triton.jit
def lacks(word, flag):
    """1 where the word does not have the flag, else 0."""
    return (((word ^ flag) >> 32) != 0).to(tl.int32)


@triton.jit
def sweep(state, epoch, begin, size, program, programs, N: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """In the last two of each 2^30 launches, zero words of the other slot, that of the launches before and after this one: so
    no word gets as old as a flag's period. The first launches find a buffer that is zeroed already.

    This is program number `program` of the `programs` that zero words `begin` to `begin` + `size` of the slot together. No rank
    writes there until they have: a rank that writes there does so in the next launch, which it begins when it has received
    words of this one from each of these programs, and a program sends after its sweep. In an all-reduce each program sends to
    all ranks, so all programs share all words. A program of a gather sends to one rank; see `_one_shot_gather`."""
    if (epoch & _SWEEP) >= _SWEEP - 1:
        other = (epoch + 1) & 1
        words = tl.arange(0, BLOCK)
        nothing = tl.zeros([BLOCK], tl.int64)
        start = program * BLOCK
        while start < size:
            place = other * SLOT + begin + start + words
            tl.store(pointer_to(state.peers[N - 1], tl.int64) + place, nothing, mask=start + words < size)
            if state.inbox is not None:
                tl.store(pointer_to(state.inbox, tl.int64) + place, nothing, mask=start + words < size)
            start += programs * BLOCK
        # only this rank's own launches write here, one after the other: any share of the programs will do
        start = tl.program_id(0) * BLOCK
        while start < _MAX_PROGRAMS:
            tl.store(state.squares + other * _MAX_PROGRAMS + start + words, nothing, mask=start + words < _MAX_PROGRAMS)
            start += tl.num_programs(0) * BLOCK
        tl.debug_barrier()
        tl.atomic_add(state.fault, 0, sem="acq_rel", scope="sys")  # a fence
        tl.debug_barrier()


@triton.jit
def sweep_all(state, epoch, N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """`sweep` of a kernel whose programs each send to all ranks."""
    sweep(state, epoch, 0, N * CAPACITY, tl.program_id(0), tl.num_programs(0), N, N * CAPACITY, BLOCK)


@triton.jit
def push(peers, place, words, inside, N: tl.constexpr):
    """Store 8-byte words at `place` of every rank's buffer, the next rank's first: so the ranks begin with different ones."""
    for i in tl.static_range(N):
        tl.store(pointer_to(peers[i], tl.int64) + place, words, mask=inside)


@triton.jit
def receive_sum(
    state, rank, place, inside, flag, N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Poll all ranks' words at `place` (BLOCK,) of this rank's boxes, CAPACITY words apart, until each has its flag; the sums
    of their first and second values. Each poll reads and sums everything, so that all loads are in flight together."""
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    missing = 1
    polls = 0
    while (missing != 0) & (polls < state.patience):
        late = tl.zeros([BLOCK], tl.int32)
        first = tl.zeros([BLOCK], tl.float32)
        second = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(N):
            words = pointer_to(box_of(state, source, rank, N), tl.int64) + source * CAPACITY
            word = tl.load(words + place, mask=inside, other=flag, volatile=True)
            late |= lacks(word, flag)
            payload = word.to(tl.int32)
            first += first_value(payload, DTYPE)
            second += second_value(payload, DTYPE)
        missing = tl.max(late, axis=0)
        polls += 1
    if missing != 0:
        tl.store(state.fault, 1)
    return first, second


@triton.jit
def normalize_words(
    words, scale, inside, state, epoch, flag, eps,
    ROW: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The RMSNorm of a row of ROW words, of which this program has some, rounded; times `scale`. All are words."""
    VALUES: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    first, second = first_value(words, DTYPE), second_value(words, DTYPE)
    square = tl.sum(tl.where(inside, first * first + second * second, 0.0), axis=0)
    square = _sum_over_row(square, state, epoch, flag, PARTS, LANES)
    factor = tl.rsqrt(square / (ROW * VALUES) + eps)
    return pack(first * factor * first_value(scale, DTYPE), second * factor * second_value(scale, DTYPE), DTYPE)


@triton.jit
def _sum_over_row(square, state, epoch, flag, PARTS: tl.constexpr, LANES: tl.constexpr):
    """The sum of `square` over the PARTS programs of a row, which exchange words with flags in this GPU's own memory."""
    if PARTS == 1:
        total = square
    else:
        program = tl.program_id(0)
        base = state.squares + (epoch & 1) * _MAX_PROGRAMS
        tl.store(base + program, square.to(tl.uint32, bitcast=True).to(tl.int64) | flag)
        part = tl.arange(0, LANES)
        total = tl.zeros([1], tl.float32).sum(0)
        missing = 1
        polls = 0
        while (missing != 0) & (polls < state.patience):
            word = tl.load(base + program // PARTS * PARTS + part, mask=part < PARTS, other=flag, volatile=True)
            total = tl.sum(word.to(tl.int32).to(tl.float32, bitcast=True), axis=0)
            missing = tl.max(lacks(word, flag), axis=0)
            polls += 1
        if missing != 0:
            tl.store(state.fault, 2)
    return total


# --- flags of programs: two-shot ----------------------------------------------------------------------------------------------


@triton.jit
def announce(peers, phase: tl.constexpr, rank, epoch, N: tl.constexpr, LANES: tl.constexpr):
    """Tell the program of this number on each rank that what this program has stored there is complete."""
    lane = tl.arange(0, LANES)
    base = tl.zeros([LANES], tl.int64)
    for i in tl.static_range(N):
        base = tl.where(lane == i, peers[i], base)
    tl.debug_barrier()  # all warps' stores come before the release
    tl.atomic_xchg(_program_flags(base, phase, rank, N), epoch, mask=lane < N, sem="release", scope="sys")


@triton.jit
def await_all(state, phase: tl.constexpr, epoch, N: tl.constexpr, LANES: tl.constexpr):
    """Wait until the program of this number on each rank has announced."""
    lane = tl.arange(0, LANES)
    poll(_program_flags(state.peers[N - 1], phase, lane, N), lane < N, epoch, state.patience, state.fault, 4)


@triton.jit
def _program_flags(base, phase: tl.constexpr, rank, N: tl.constexpr):
    return base.to(tl.pointer_type(tl.int64)) + (phase * N + rank) * _MAX_PROGRAMS + tl.program_id(0)


@triton.jit
def poll(flags, mask, epoch, patience, fault, CODE: tl.constexpr):
    """Wait until all flags where `mask` is set are at least `epoch`; after `patience` polls give up, with CODE in `fault`."""
    missing = 1
    polls = 0
    while (missing != 0) & (polls < patience):
        seen = tl.atomic_add(flags, tl.zeros(flags.shape, tl.int64), mask=mask, sem="acquire", scope="sys")
        missing = tl.max((mask & (seen < epoch)).to(tl.int32), axis=0)
        polls += 1
    if missing != 0:
        tl.store(fault, CODE)
    tl.debug_barrier()  # all warps' loads come after the acquire
