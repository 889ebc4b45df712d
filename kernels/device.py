"""Device functions shared by the kernels that exchange data with other GPUs, and the state that is passed to these kernels.

`kernels/all_reduce.py` describes the protocol, and why no buffer is overwritten before it has been read.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

MAX_PROGRAMS = 512
MAX_POLLS = 1 << 27  # polls, each at least half a microsecond: more than a minute

_MAX_PROGRAMS = tl.constexpr(MAX_PROGRAMS)
_ZERO_MASK = tl.constexpr((1 << 30) - 1)  # epoch & this: a launch's position in its period of 2^30 launches


class State(NamedTuple):
    """The fields of an `Exchange` that its kernels read. The rank is a separate argument that Triton does not specialize: in a
    tuple, a rank of 1 would become a constant, and rank 1 would compile its own kernels."""

    peers: tuple[int, ...]
    host_buffer: int | None
    epochs: Tensor
    squares: Tensor
    fault: Tensor
    max_polls: int


# --- words of two 16-bit values or one of 32 bits -----------------------------------------------------------------------------


@triton.jit
def first_value(word, DTYPE: tl.constexpr):
    """The first value of each 4-byte word, in fp32. A word has two 16-bit values or one 32-bit value."""
    if DTYPE.primitive_bitwidth == 32:
        value = word.to(DTYPE, bitcast=True)
    else:
        value = word.to(tl.int16).to(DTYPE, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def second_value(word, DTYPE: tl.constexpr):
    """The second value of each 4-byte word, in fp32; 0 if a word has one value."""
    if DTYPE.primitive_bitwidth == 32:
        value = (word & 0).to(tl.float32)
    else:
        value = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return value


@triton.jit
def pack(first, second, DTYPE: tl.constexpr):
    """Round fp32 values to DTYPE and pack them into 4-byte words. `second` is not used for a 32-bit DTYPE."""
    if DTYPE.primitive_bitwidth == 32:
        word = first.to(DTYPE).to(tl.int32, bitcast=True)
    else:
        word = pair_words(first.to(DTYPE), second.to(DTYPE))
    return word


@triton.jit
def pair_words(first, second):
    """Two 16-bit values in each 4-byte word."""
    low = first.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return (second.to(tl.int16, bitcast=True).to(tl.int32) << 16) | low


# --- addresses and epochs -----------------------------------------------------------------------------------------------------


@triton.jit
def pointer_to(address, dtype: tl.constexpr):
    """A pointer to a rank's buffer, or into it at an offset that is a multiple of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def receive_address(state, source, rank, N: tl.constexpr):
    """The address of the buffer for words of `source`: host_buffer for other ranks, if there is one, else this rank's own."""
    if state.host_buffer is None:
        address = state.peers[N - 1]
    else:
        address = tl.where(source == rank, state.peers[N - 1], state.host_buffer)
    return address


@triton.jit
def launch_epoch(epochs):
    """The epoch, which is the number of this launch. Each program has its own counter, so it waits for no other program."""
    return tl.load(epochs + tl.program_id(0)) + 1


@triton.jit
def advance_epoch(epochs, epoch):
    """Program p sets the counters p, p + programs, …, so that all counters agree after a launch of any number of programs."""
    tl.debug_barrier()  # every warp has read this program's counter
    program, programs = tl.program_id(0), tl.num_programs(0)
    counters = tl.arange(0, _MAX_PROGRAMS)
    tl.store(epochs + counters, tl.zeros([_MAX_PROGRAMS], tl.int64) + epoch, mask=counters % programs == program)


# --- words with flags: one-shot -----------------------------------------------------------------------------------------------


@triton.jit
def flag_of(epoch):
    """The 32-bit flag of an epoch, in a word's upper half: never 0, as in a zeroed word. It repeats after 2^31 launches."""
    return ((epoch & 0x7FFFFFFF) | 0x80000000) << 32


@triton.jit
def flag_differs(word, flag):
    """1 where the word's flag is not `flag`, else 0."""
    return (((word ^ flag) >> 32) != 0).to(tl.int32)


@triton.jit
def zero_words(state, epoch, begin, size, program, programs, block, N: tl.constexpr, SLOT: tl.constexpr):
    """In the last two of each 2^30 launches, zero words of the other slot, which the previous and the next launch use. So no
    word survives until its flag repeats. Before the first launches the buffer is zeroed.

    This is program number `program` of the `programs` that together zero words `begin` to `begin` + `size` of the slot. block: 0, 1,
    … up to the words that it zeroes at a time, as an argument because Gluon's have a layout. No rank writes these words before
    they are zeroed: a rank writes them in the next launch, which it begins after it has received words of this launch from each
    of these programs, and each program zeroes before it sends. In an all-reduce each program sends to all ranks, so all
    programs share all words. A program of a gather sends to one rank; see `_one_shot_gather`."""
    BLOCK: tl.constexpr = block.shape[0]
    if (epoch & _ZERO_MASK) >= _ZERO_MASK - 1:
        other = (epoch + 1) & 1
        zeros = (block & 0).to(tl.int64)
        start = program * BLOCK
        while start < size:
            offset = other * SLOT + begin + start + block
            tl.store(pointer_to(state.peers[N - 1], tl.int64) + offset, zeros, mask=start + block < size)
            if state.host_buffer is not None:
                tl.store(pointer_to(state.host_buffer, tl.int64) + offset, zeros, mask=start + block < size)
            start += programs * BLOCK
        # only this rank's launches write here, one after the other, so any program may zero any part
        start = tl.program_id(0) * BLOCK
        while start < _MAX_PROGRAMS:
            tl.store(state.squares + other * _MAX_PROGRAMS + start + block, zeros, mask=start + block < _MAX_PROGRAMS)
            start += tl.num_programs(0) * BLOCK
        tl.debug_barrier()
        tl.atomic_add(state.fault, 0, sem="acq_rel", scope="sys")  # a fence
        tl.debug_barrier()


@triton.jit
def zero_other_slot(state, epoch, N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """`zero_words` for a kernel in which every program sends to all ranks."""
    block = tl.arange(0, BLOCK)
    zero_words(state, epoch, 0, N * CAPACITY, tl.program_id(0), tl.num_programs(0), block, N, N * CAPACITY)


@triton.jit
def push(peers, offsets, words, inside, N: tl.constexpr):
    """Store 8-byte words at `offsets` of every rank's buffer. The next rank's is first, so that ranks begin with different ones."""
    for i in tl.static_range(N):
        tl.store(pointer_to(peers[i], tl.int64) + offsets, words, mask=inside)


@triton.jit
def push_pairs(first, second, row, pair, rows, pairs, peers, epoch, rank, N: tl.constexpr, CAPACITY: tl.constexpr):
    """Push 16-bit values to all ranks: the `first` and the `second` ones of the pairs `pair` of rows `row` of this rank's message
    (rows, 2 pairs)."""
    words = pair_words(first, second).to(tl.uint32, bitcast=True).to(tl.int64) | flag_of(epoch)
    slot = (epoch & 1).to(tl.int32) * (N * CAPACITY)  # offsets of 32 bits take fewer registers
    push(peers, slot + rank * CAPACITY + row * pairs + pair, words, (row < rows) & (pair < pairs), N)


@triton.jit
def receive_sum(
    state, rank, offsets, inside, flag, N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Poll all ranks' words at `offsets` (BLOCK,), CAPACITY words apart, until each has `flag`. Returns the sums over ranks of
    the words' first and second values. Each poll loads and adds all words again, so that all loads are in flight together."""
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    missing = 1
    polls = 0
    while (missing != 0) & (polls < state.max_polls):
        late = tl.zeros([BLOCK], tl.int32)
        for source in tl.static_range(N):
            words = pointer_to(receive_address(state, source, rank, N), tl.int64) + source * CAPACITY
            word = tl.load(words + offsets, mask=inside, other=flag, volatile=True)
            late |= flag_differs(word, flag)
            payload = word.to(tl.int32)
            if source == 0:  # the sum of -0 and -0 is -0
                first, second = first_value(payload, DTYPE), second_value(payload, DTYPE)
            else:
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
    ROW: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The RMSNorm, times `scale`, of a row of ROW words that PARTS programs share: this program's `words`, rounded. All
    operands and the result are 4-byte words."""
    VALUES: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    first, second = first_value(words, DTYPE), second_value(words, DTYPE)
    square = tl.sum(tl.where(inside, first * first + second * second, 0.0), axis=0)
    square = _sum_over_row(square, state, epoch, flag, PARTS, PADDED_PARTS)
    factor = tl.rsqrt(square / (ROW * VALUES) + eps) + square * 0.0  # NaN if the squares overflow, see `norm.py`
    return pack(first * factor * first_value(scale, DTYPE), second * factor * second_value(scale, DTYPE), DTYPE)


@triton.jit
def _sum_over_row(square, state, epoch, flag, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr):
    """The sum of `square` over the PARTS programs of a row. They exchange words with flags through this GPU's memory."""
    if PARTS == 1:
        total = square
    else:
        squares = _exchange_in_row(square.to(tl.uint32, bitcast=True), state, epoch, flag, 0, PARTS, PADDED_PARTS)
        total = tl.sum(squares.to(tl.float32, bitcast=True), axis=0)
    return total


@triton.jit
def max_over_row(bits, state, epoch, flag, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr):
    """The largest `bits` (int32, not negative) of the PARTS programs of a row, at most half of MAX_PROGRAMS in all. Words of its own
    hold them, because a program may still read what others sent for the sum."""
    HALF: tl.constexpr = _MAX_PROGRAMS // 2
    if PARTS == 1:
        largest = bits
    else:
        largest = tl.max(_exchange_in_row(bits.to(tl.uint32), state, epoch, flag, HALF, PARTS, PADDED_PARTS), axis=0)
    return largest


@triton.jit
def _exchange_in_row(payload, state, epoch, flag, FIRST: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr):
    """The `payload` (uint32) of each of the PARTS programs of a row, (PADDED_PARTS,) int32, then zeros. FIRST: the word of program 0."""
    program = tl.program_id(0)
    base = state.squares + (epoch & 1) * _MAX_PROGRAMS + FIRST
    tl.store(base + program, payload.to(tl.int64) | flag)
    part = tl.arange(0, PADDED_PARTS)
    found = tl.zeros([PADDED_PARTS], tl.int32)
    missing = 1
    polls = 0
    while (missing != 0) & (polls < state.max_polls):
        word = tl.load(base + program // PARTS * PARTS + part, mask=part < PARTS, other=flag, volatile=True)
        found = word.to(tl.int32)
        missing = tl.max(flag_differs(word, flag), axis=0)
        polls += 1
    if missing != 0:
        tl.store(state.fault, 2)
    return found


# --- flags of programs: two-shot ----------------------------------------------------------------------------------------------


@triton.jit
def signal(peers, phase: tl.constexpr, rank, epoch, N: tl.constexpr, PADDED_N: tl.constexpr):
    """Signal to the program of the same number on each rank that this program's stores to its buffer are complete."""
    peer = tl.arange(0, PADDED_N)
    base = tl.zeros([PADDED_N], tl.int64)
    for i in tl.static_range(N):
        base = tl.where(peer == i, peers[i], base)
    tl.debug_barrier()  # all warps' stores come before the release
    tl.atomic_xchg(_program_flags(base, phase, rank, N), epoch, mask=peer < N, sem="release", scope="sys")


@triton.jit
def wait_signals(state, phase: tl.constexpr, epoch, N: tl.constexpr, PADDED_N: tl.constexpr):
    """Wait for the signal of the program of the same number on each rank."""
    source = tl.arange(0, PADDED_N)
    poll(_program_flags(state.peers[N - 1], phase, source, N), source < N, epoch, state.max_polls, state.fault, 4)


@triton.jit
def _program_flags(base, phase: tl.constexpr, rank, N: tl.constexpr):
    return base.to(tl.pointer_type(tl.int64)) + (phase * N + rank) * _MAX_PROGRAMS + tl.program_id(0)


@triton.jit
def poll(flags, mask, epoch, max_polls, fault, CODE: tl.constexpr):
    """Wait until all flags selected by `mask` are at least `epoch`. Give up after `max_polls` polls and store CODE in `fault`."""
    missing = 1
    polls = 0
    while (missing != 0) & (polls < max_polls):
        seen = tl.atomic_add(flags, tl.zeros(flags.shape, tl.int64), mask=mask, sem="acquire", scope="sys")
        missing = tl.max((mask & (seen < epoch)).to(tl.int32), axis=0)
        polls += 1
    if missing != 0:
        tl.store(fault, CODE)
    tl.debug_barrier()  # all warps' loads come after the acquire
