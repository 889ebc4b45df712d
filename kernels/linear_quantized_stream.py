"""Quantized linear layers of few rows on Hopper, in Gluon: the `stream` kernel (`kernels/linear_stream.py`) for codes of 8 or 4 bits.

The ring of buffers holds codes, which `kernels/linear_quantized.py` has packed: the multiplying warps load them as 32-bit words,
convert them exactly to the input's data type in registers, and pass them to mma or wgmma as operand A. Scales of rows multiply the
result. Scales of groups of input features come through the ring, too, and multiply the fp32 sums of each group.

Few rows are faster with mma: a warp waits only for what it needs, where all warps wait for a wgmma between two conversions.

A word of 8-bit codes has input features 2t, 2t + 8, 2t + 1, 2t + 9 of 16 (from the lowest byte), for thread t of four: what both
want in two of the thread's registers. One of 4-bit codes has 2t, 2t + 8, 2t + 16, 2t + 24 of 32, and then the same plus 1.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.device import push_pairs, zero_words
from kernels.dispatch import pdl_options
from kernels.linear_config import LOADER_REGISTERS, Format, QuantizedStream
from kernels.linear_quantized import Packed
from kernels.linear_stream import (
    add_pieces,
    descriptor,
    program_share,
    share_counts,
    share_tile,
    store_piece,
    store_tile,
)

if TYPE_CHECKING:
    from kernels.all_reduce import Exchange

_LOADER_REGISTERS = gl.constexpr(LOADER_REGISTERS)

# --- pushes to all ranks, as `kernels/linear_push.py` describes ------------------------------------------------------------------


def destination(exchange: "Exchange | None") -> dict[str, Any]:
    """Arguments of a kernel that pushes its result to this workspace; without one, it stores its result."""
    if exchange is None:
        return {"state": None, "rank": 0, "CAPACITY": 0}
    return {"state": exchange.state, "rank": exchange.rank, "CAPACITY": exchange.capacity // 4}


@gluon.jit
def begin_push(state, CAPACITY: gl.constexpr, PDL: gl.constexpr):
    """To be called after the wait for the previous kernel, and before this program stores a tile or a piece of one. Returns the
    epoch of this launch. CAPACITY: words of a message, at most."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # not earlier: the receiver relies on what the wait has completed
    N: gl.constexpr = len(state.peers)
    WARPS: gl.constexpr = gl.num_warps()
    block = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    epoch = gl.load(state.epochs, volatile=True) + 1
    zero_words(state, epoch, 0, N * CAPACITY, gl.program_id(0), gl.num_programs(0), block, N, N * CAPACITY)
    return epoch


@gluon.jit
def push_tile(sums, state, rank, epoch, row, column, rows, features, DTYPE: gl.constexpr, CAPACITY: gl.constexpr):
    """Push (BLOCK, ROWS) sums of a (rows, features) message, from this row and this even column on, rounded to DTYPE."""
    N: gl.constexpr = len(state.peers)
    BLOCK: gl.constexpr = sums.shape[0]
    ROWS: gl.constexpr = sums.shape[1]
    values = gl.convert_layout(sums.to(DTYPE), _pair_layout(BLOCK, ROWS, gl.num_warps()))
    first, second = gl.split(values.reshape((BLOCK // 2, 2, ROWS)).permute((0, 2, 1)))
    LAYOUT: gl.constexpr = first.type.layout
    pair = column // 2 + gl.arange(0, BLOCK // 2, gl.SliceLayout(1, LAYOUT))[:, None]
    m = row + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    push_pairs(first, second, m, pair, rows, features // 2, state.peers, epoch, rank, N, CAPACITY)


@gluon.constexpr_function
def _pair_layout(block, rows, warps):
    """Of (BLOCK, ROWS) sums: a thread has neighbouring features, and a warp stores 64 bytes of words of a row at a time. That is one
    exchange of neighbouring lanes' values away from an mma's result: they are shuffled, and need no shared memory."""
    spread = block >= 16 * warps  # else all warps have all sums
    first = 16 * warps if spread else 16
    registers = [[1, 0], *[[0, row] for row in (1, 8) if row < rows]]
    registers += [[first << i, 0] for i in range((block // first).bit_length() - 1)]
    lanes = [*[[0, row if row < rows else 0] for row in (2, 4)], [8, 0], [2, 0], [4, 0]]
    shares = [[16 << i if spread else 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, shares, [], [block, rows])


# --- loads --------------------------------------------------------------------------------------------------------------------


@gluon.jit
def allocate_ring(
    x, codes, scales, zeros, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, READERS: gl.constexpr
):  # fmt: skip
    """(codes, scales, zeros, input, full, free): buffers of STAGES steps, and their barriers. READERS: partitions that arrive at a
    free buffer's barrier."""
    BLOCK: gl.constexpr = codes.block_type.shape[0]
    ROWS: gl.constexpr = x.block_type.shape[0]
    PIECE: gl.constexpr = x.block_type.shape[1]
    a = gl.allocate_shared_memory(codes.dtype, [STAGES * PARTS, BLOCK, codes.block_type.shape[1]], codes.layout)
    b = gl.allocate_shared_memory(x.dtype, [STAGES * (BLOCK_K // PIECE), ROWS, PIECE], x.layout)
    s = b
    z = b
    if scales is not None:
        s = gl.allocate_shared_memory(scales.dtype, [STAGES * PARTS, scales.block_type.shape[0], BLOCK], scales.layout)
    if zeros is not None:
        z = gl.allocate_shared_memory(zeros.dtype, [STAGES * PARTS, zeros.block_type.shape[0], BLOCK], zeros.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=READERS)
    return a, s, z, b, full, free


@gluon.jit
def _load_weight(weight, ring, slot, feature, step, features, SWIGLU: gl.constexpr):
    """Start to load a step's codes, scales and zeros. The buffer's barrier then expects these bytes and those of the input."""
    codes, scales, zeros = weight
    a, s, z, b, full, _free = ring
    PARTS: gl.constexpr = 2 if SWIGLU else 1
    PIECES: gl.constexpr = b.type.shape[0] // full.type.shape[0]
    ready = full.index(slot)
    SCALE_BYTES: gl.constexpr = 0 if scales is None else scales.block_type.nbytes
    ZERO_BYTES: gl.constexpr = 0 if zeros is None else zeros.block_type.nbytes
    X_BYTES: gl.constexpr = PIECES * b.type.shape[1] * b.type.shape[2] * 2
    mbarrier.expect(ready, PARTS * (codes.block_type.nbytes + SCALE_BYTES + ZERO_BYTES) + X_BYTES)
    for part in gl.static_range(PARTS):
        row = feature + part * features
        to = PARTS * slot + part
        tma.async_copy_global_to_shared(codes, [row, step * codes.block_type.shape[1]], ready, a.index(to))
        if scales is not None:
            tma.async_copy_global_to_shared(scales, [step * scales.block_type.shape[0], row], ready, s.index(to))
        if zeros is not None:
            tma.async_copy_global_to_shared(zeros, [step * zeros.block_type.shape[0], row], ready, z.index(to))


@gluon.jit
def _load_input(x, ring, slot, row, step):
    _a, _s, _z, b, full, _free = ring
    PIECES: gl.constexpr = b.type.shape[0] // full.type.shape[0]
    for piece in gl.static_range(PIECES):
        column = (step * PIECES + piece) * b.type.shape[2]
        tma.async_copy_global_to_shared(x, [row, column], full.index(slot), b.index(slot * PIECES + piece))


@gluon.jit
def _load_steps(x, weight, ring, share, features, start, stop, SWIGLU: gl.constexpr, WEIGHT: gl.constexpr, INPUT: gl.constexpr):
    """Start to load the weight, the input or both of this program's steps `start` to `stop`."""
    _a, _s, _z, b, full, free = ring
    STAGES: gl.constexpr = full.type.shape[0]
    tiles, _steps = share_counts(share)
    begin = 0  # of the tile's steps
    for i in range(tiles):
        tile, _shared, first, last = share_tile(share, i)
        for nth in range(gl.maximum(start, begin), gl.minimum(stop, begin + last - first)):
            slot, step = nth % STAGES, first + nth - begin
            if WEIGHT and INPUT:  # the buffer has been used before
                mbarrier.wait(free.index(slot), (nth // STAGES & 1) ^ 1)
            if WEIGHT:
                _load_weight(weight, ring, slot, tile * weight[0].block_type.shape[0], step, features, SWIGLU)
            if INPUT:
                _load_input(x, ring, slot, share[1] * b.type.shape[1], step)
        begin += last - first


@gluon.jit
def load(x, codes, scales, zeros, ring, share, features, SWIGLU: gl.constexpr, PDL: gl.constexpr):
    """The loading warp: weights as far ahead as there are buffers, the input only after the previous kernel."""
    _tiles, steps = share_counts(share)
    weight = (codes, scales, zeros)
    ahead = gl.minimum(ring[4].type.shape[0], steps)
    _load_steps(x, weight, ring, share, features, 0, ahead, SWIGLU, True, False)
    if PDL:
        tl.extra.cuda.gdc_wait()
    _load_steps(x, weight, ring, share, features, 0, ahead, SWIGLU, False, True)
    _load_steps(x, weight, ring, share, features, ahead, steps, SWIGLU, True, True)


# --- products -----------------------------------------------------------------------------------------------------------------


@gluon.jit
def _multiply(
    ring, row_scales, bias, result, partials, counters, rows, features, share,
    UNPACK: gl.constexpr, GROUP: gl.constexpr, SWIGLU: gl.constexpr, MMA: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: for each tile, the products of this program's steps, then the tile's result or its piece's sums.

    With SWIGLU, `sums` are those of the gate and `up` are those of the up projection.
    """
    a, _s, _z, b, full, free = ring
    out, state, rank, CAPACITY = result
    STAGES: gl.constexpr = full.type.shape[0]
    BLOCK: gl.constexpr = a.type.shape[1]
    ROWS: gl.constexpr = b.type.shape[1]
    LAYOUT: gl.constexpr = _sums_layout(gl.num_warps(), ROWS, MMA)
    _row_tiles, row_tile, _nth, _sharers, steps, _whole, _total = share
    tiles, _steps = share_counts(share)
    if PDL:
        tl.extra.cuda.gdc_wait()
    epoch = 0
    if out is None:
        epoch = begin_push(state, CAPACITY, PDL)
    nth = 0
    for i in range(tiles):
        tile, shared, first, last = share_tile(share, i)
        sums = gl.zeros((BLOCK, ROWS), gl.float32, LAYOUT)
        up = gl.zeros((BLOCK, ROWS), gl.float32, LAYOUT)
        for _step in range(first, last):
            slot = nth % STAGES
            mbarrier.wait(full.index(slot), nth // STAGES & 1)
            if MMA:
                sums, up = _mma_step(ring, slot, sums, up, UNPACK, GROUP, SWIGLU)
            else:
                sums, up = _wgmma_step(ring, slot, sums, up, UNPACK, GROUP, SWIGLU)
            mbarrier.arrive(free.index(slot))
            nth += 1
        complete = last - first == steps
        if not complete:
            complete = store_piece(sums, up, partials, counters, share, shared, SWIGLU)
            if complete:
                sums, up = add_pieces(sums, up, partials, counters, share, shared, SWIGLU)
        if complete:
            if row_scales is not None:
                sums *= scale_rows(row_scales, tile * BLOCK, features, sums)
                if SWIGLU:
                    up *= scale_rows(row_scales + features, tile * BLOCK, features, up)
            if out is not None:
                store_tile(sums, up, bias, out, row_tile * ROWS, tile * BLOCK, rows, features, SWIGLU)
            else:
                push_tile(sums, state, rank, epoch, row_tile * ROWS, tile * BLOCK, rows, features, b.dtype, CAPACITY)


@gluon.jit
def scale_rows(pointer, column, features, sums):
    feature = column + gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
    return gl.load(pointer + feature, mask=feature < features, other=0)[:, None]


@gluon.constexpr_function
def _sums_layout(warps, rows, mma):
    if mma:
        return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16])


@gluon.jit
def _mma_step(ring, slot, sums, up, UNPACK: gl.constexpr, GROUP: gl.constexpr, SWIGLU: gl.constexpr):
    """Add a step's products by mma, for which a warp waits only where it needs the result."""
    _a, _s, _z, b, full, _free = ring
    PARTS: gl.constexpr = 2 if SWIGLU else 1
    PIECES: gl.constexpr = b.type.shape[0] // full.type.shape[0]
    PIECE: gl.constexpr = b.type.shape[2]
    added, added_up = sums, up  # without groups, the sums themselves; else those of one group
    for piece in gl.static_range(PIECES):
        if GROUP and piece * PIECE % GROUP == 0:
            added = gl.zeros_like(sums)
            added_up = gl.zeros_like(up)
        x = b.index(slot * PIECES + piece).permute((1, 0)).load(gl.DotOperandLayout(1, sums.type.layout, 2))
        added = mma_v2(weight_piece(ring, PARTS * slot, 0, piece, PIECES, UNPACK, GROUP, sums), x, added)
        if SWIGLU:
            added_up = mma_v2(weight_piece(ring, PARTS * slot + 1, 0, piece, PIECES, UNPACK, GROUP, sums), x, added_up)
        if GROUP and (piece + 1) * PIECE % GROUP == 0:
            sums, up = _scaled(ring, slot, piece, sums, up, added, added_up, GROUP, SWIGLU)
    return (sums, up) if GROUP else (added, added_up)


@gluon.jit
def _wgmma_step(ring, slot, sums, up, UNPACK: gl.constexpr, GROUP: gl.constexpr, SWIGLU: gl.constexpr):
    """Add a step's products. While the tensor cores multiply one piece of it, the next piece is converted."""
    _a, _s, _z, b, full, _free = ring
    PARTS: gl.constexpr = 2 if SWIGLU else 1
    PIECES: gl.constexpr = b.type.shape[0] // full.type.shape[0]
    added, added_up = sums, up  # without groups, the sums themselves; else those of one piece
    w = 0
    w_up = 0
    for piece in gl.static_range(PIECES):
        next_w = weight_piece(ring, PARTS * slot, 0, piece, PIECES, UNPACK, GROUP, sums)
        next_up = w_up
        if SWIGLU:
            next_up = weight_piece(ring, PARTS * slot + 1, 0, piece, PIECES, UNPACK, GROUP, sums)
        if piece > 0:
            added, added_up = _wait(added, added_up, w, w_up, SWIGLU)
            if GROUP:
                sums, up = _scaled(ring, slot, piece - 1, sums, up, added, added_up, GROUP, SWIGLU)
        w = next_w
        w_up = next_up
        x = b.index(slot * PIECES + piece).permute((1, 0))
        added = warpgroup_mma(w, x, sums if GROUP else added, use_acc=not GROUP, is_async=True)
        if SWIGLU:
            added_up = warpgroup_mma(w_up, x, up if GROUP else added_up, use_acc=not GROUP, is_async=True)
    added, added_up = _wait(added, added_up, w, w_up, SWIGLU)
    if GROUP:
        added, added_up = _scaled(ring, slot, PIECES - 1, sums, up, added, added_up, GROUP, SWIGLU)
    return added, added_up


@gluon.jit
def _wait(sums, up, w, w_up, SWIGLU: gl.constexpr):
    """Wait for the wgmmas under way, which read w and w_up until then."""
    if SWIGLU:
        sums, up, w, w_up = warpgroup_mma_wait(0, (sums, up, w, w_up))
    else:
        sums, w = warpgroup_mma_wait(0, (sums, w))
    return sums, up


@gluon.jit
def _scaled(ring, slot, piece, sums, up, added, added_up, GROUP: gl.constexpr, SWIGLU: gl.constexpr):
    """The sums plus those of a piece, times the scales of its group."""
    _a, s, _z, b, _full, _free = ring
    PARTS: gl.constexpr = 2 if SWIGLU else 1
    BLOCK: gl.constexpr = sums.shape[0]
    group: gl.constexpr = piece * b.type.shape[2] // GROUP
    LAYOUT: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    sums += added * _group_values(s.index(PARTS * slot), group, 0, BLOCK, LAYOUT).to(gl.float32)[:, None]
    if SWIGLU:
        up += added_up * _group_values(s.index(PARTS * slot + 1), group, 0, BLOCK, LAYOUT).to(gl.float32)[:, None]
    return sums, up


@gluon.jit
def _group_values(buffer, group: gl.constexpr, first: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """BLOCK values of row `group` of a buffer."""
    values = buffer.slice(group, 1).slice(first, BLOCK, 1).load(_row_layout(BLOCK, gl.num_warps()))
    return gl.convert_layout(values.reshape((BLOCK,)), LAYOUT)


@gluon.constexpr_function
def _row_layout(block, warps):
    """Of (1, BLOCK) values, one for each row of wgmma's operand A: a thread has those of its rows."""
    more = [[0, 64 << i] for i in range((block // 64).bit_length() - 1)]
    shared = (warps // 4).bit_length() - 1
    return gl.DistributedLinearLayout(
        [[0, 8], *more[shared:]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [0, 32], *more[:shared]], [], [1, block]
    )


@gluon.constexpr_function
def _code_layout(block, columns, warps):
    """Of (BLOCK, columns) pairs of bytes: thread t of four has the t-th word of each 16 bytes, of the rows of wgmma's operand A."""
    more = [[64 << i, 0] for i in range((block // 64).bit_length() - 1)]
    shared = (warps // 4).bit_length() - 1
    units = [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [8, 0], *units, *more[shared:]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], *more[:shared]],
        [],
        [block, columns],
    )


@gluon.jit
def weight_piece(
    ring, buffer, NTH: gl.constexpr, piece: gl.constexpr, PIECES: gl.constexpr, UNPACK: gl.constexpr, GROUP: gl.constexpr, sums
):  # fmt: skip
    """Operand A of wgmma for `sums` (BLOCK, any): the buffer's NTH BLOCK rows and a step's piece. Codes minus their zero points, or
    also times their scales, in the input's data type (BLOCK, PIECE)."""
    a, s, z, b, _full, _free = ring
    ASM: gl.constexpr = UNPACK[0]
    PER_PAIR: gl.constexpr = UNPACK[1]  # codes in two bytes
    ZERO: gl.constexpr = UNPACK[2]  # what is added to a zero point, None without any
    SCALED: gl.constexpr = UNPACK[3]
    BLOCK: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = a.type.shape[2] // PIECES
    PIECE: gl.constexpr = b.type.shape[2]
    CODES: gl.constexpr = _code_layout(BLOCK, COLUMNS, gl.num_warps())
    ROW: gl.constexpr = gl.SliceLayout(1, CODES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 2)
    group: gl.constexpr = piece * PIECE // GROUP if GROUP else 0
    operands = (a.index(buffer).slice(NTH * BLOCK, BLOCK).slice(piece * COLUMNS, COLUMNS, 1).load(CODES),)
    if ZERO is not None:
        zero = _group_values(z.index(buffer), group, NTH * BLOCK, BLOCK, ROW).to(gl.float32) + ZERO
        operands += (zero.to(b.dtype)[:, None],)  # type: ignore[assignment]
    if SCALED:
        operands += (_group_values(s.index(buffer), group, NTH * BLOCK, BLOCK, ROW).to(b.dtype)[:, None],)  # type: ignore[assignment]
    w = _interleave(inline_asm(ASM, PER_PAIR, operands, b), PER_PAIR, BLOCK, COLUMNS)
    return gl.convert_layout(w.reshape((BLOCK, PIECE)), OPERAND)


@gluon.jit
def inline_asm(ASM: gl.constexpr, PER_PAIR: gl.constexpr, operands, like):
    """The results of the PTX for pairs of elements, of the data type of `like`."""
    CONSTRAINTS: gl.constexpr = _constraints(PER_PAIR, len(operands))
    if PER_PAIR == 2:
        found = gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, (like.dtype, like.dtype), True, 2)
    else:
        found = gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, (like.dtype, like.dtype, like.dtype, like.dtype), True, 2)
    return found


@gluon.constexpr_function
def _constraints(outputs, inputs):
    return ",".join(["=&r"] * outputs + ["r"] * inputs)


@gluon.jit
def _interleave(found, PER_PAIR: gl.constexpr, BLOCK: gl.constexpr, COLUMNS: gl.constexpr):
    """(BLOCK, columns / 8, codes of a pair, 8) from the tensors of the first codes of all pairs, the second ones, ..."""
    SHAPE: gl.constexpr = (BLOCK, COLUMNS // 8, 8)
    if PER_PAIR == 2:
        w = gl.join(found[0].reshape(SHAPE), found[1].reshape(SHAPE)).permute((0, 1, 3, 2))
    else:
        even = gl.join(found[0].reshape(SHAPE), found[2].reshape(SHAPE))
        odd = gl.join(found[1].reshape(SHAPE), found[3].reshape(SHAPE))
        w = gl.join(even, odd).permute((0, 1, 3, 4, 2))
    return w


# --- the kernel ---------------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["rows", "rank"])
def _stream(
    x,  # descriptor of (rows, K)
    codes,  # descriptor of (N, K * bits / 16)
    scales,  # descriptor of (groups, N), or None
    zeros,  # descriptor of (groups, N), or None
    row_scales,  # (N,), or None
    bias,  # (N,) or None
    out,  # (rows, features), or None if the result is pushed
    partials,  # for each program, the fp32 sums of two tiles
    counters,  # one for each shared tile, fewer than two for each program; zero before and after
    rows,
    features,  # N, or N / 2 with SWIGLU
    K,
    state,  # of the workspace that the result is pushed to, or None
    rank,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    UNPACK: gl.constexpr,  # (PTX, codes in two bytes, offset of zero points or None, whether scales multiply the codes)
    GROUP: gl.constexpr,  # input features that share a scale, 0 for all of them
    SWIGLU: gl.constexpr,
    MMA: gl.constexpr,  # whether mma multiplies rather than wgmma
    CAPACITY: gl.constexpr,  # words of a pushed message, at most
    PDL: gl.constexpr,
):
    if PDL and out is not None:
        tl.extra.cuda.gdc_launch_dependents()
    ring = allocate_ring(x, codes, scales, zeros, BLOCK_K, STAGES, 2 if SWIGLU else 1, 1)
    share = program_share(rows, features, K, x.block_type.shape[0], codes.block_type.shape[0], BLOCK_K)
    result = (out, state, rank, CAPACITY)
    gl.warp_specialize(
        [
            (
                _multiply,
                (ring, row_scales, bias, result, partials, counters, rows, features, share, UNPACK, GROUP, SWIGLU, MMA, PDL),
            ),
            (load, (x, codes, scales, zeros, ring, share, features, SWIGLU, PDL)),
        ],
        [1],
        [_LOADER_REGISTERS],
    )


# --- conversions --------------------------------------------------------------------------------------------------------------


def unpack_asm(fmt: Format, dtype: torch.dtype, scaled: bool = False) -> str:
    """PTX that converts two pairs of bytes, in one word, to two or four words of two 16-bit values: the pairs' first codes, their
    second ones, ... Its next operand, with zero points, is two of them, and its last one, if `scaled`, is two scales.

    All steps but the scales are exact. fp8: sign, exponent and mantissa move to their places, and a product corrects the exponent, also that of
    subnormal values. Integers become mantissas of 128 or 1024, which are then subtracted.
    """
    bf16 = dtype == torch.bfloat16
    kind = "bf16x2" if bf16 else "f16x2"
    magic = 0x43004300 if bf16 else 0x64006400
    outputs = 16 // fmt.bits
    zero = f"${outputs + 1}"
    lines = []
    if fmt.kind == "fp8":
        shift, mask, factor = (4, 0x07F007F0, 0x7B807B80) if bf16 else (1, 0x3F803F80, 0x5C005C00)
        lines += ["mov.b32 f, $2;", "shl.b32 t, f, 8;", f"mov.b32 u, {factor:#x};"]
        for i, source in enumerate("tf"):
            lines += [f"and.b32 p, {source}, 0x80008000;", f"shr.u32 q, {source}, {shift};"]
            lines += [f"lop3.b32 p, q, {mask:#x}, p, 0xEA;", f"mul.rn.{kind} ${i}, p, u;"]
    elif fmt.kind == "int8":
        lines += ["mov.b32 f, $2;", "shr.u32 t, f, 8;", f"mov.b32 u, {magic:#x};"]
        for i, source in enumerate("ft"):  # the low seven bits, minus 128 times the sign
            lines += [f"lop3.b32 p, {source}, 0x007F007F, u, 0xEA;", f"lop3.b32 q, {source}, 0x00800080, u, 0xEA;"]
            lines += [f"sub.rn.{kind} ${i}, p, q;"] + ([f"sub.rn.{kind} ${i}, ${i}, {zero};"] if fmt.zeros else [])
    else:
        lines += ["mov.b32 f, $4;", f"mov.b32 u, {magic:#x};", f"mov.b32 t, {magic + 0x00080008:#x};"]
        for i in range(4):
            lines += [f"shr.u32 p, f, {4 * i};"] if i else ["mov.b32 p, f;"]
            lines += ["lop3.b32 p, p, 0x000F000F, u, 0xEA;", f"sub.rn.{kind} ${i}, p, {zero if fmt.zeros else 't'};"]
    if scaled:
        lines += [f"mul.rn.{kind} ${i}, ${i}, ${outputs + 1 + fmt.zeros};" for i in range(outputs)]
    return "{ .reg .b32 f, t, u, p, q;\n" + "\n".join(lines) + "\n}"


def zero_offset(fmt: Format, dtype: torch.dtype) -> float | None:
    """What the kernel adds to zero points before it subtracts them: that of 4-bit codes, which are stored plus 8."""
    if not fmt.zeros:
        return None
    return 0.0 if fmt.bits == 8 else (128.0 if dtype == torch.bfloat16 else 1024.0) + 8


# --- launch -------------------------------------------------------------------------------------------------------------------


def stream(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    out: Tensor | None,
    counters: Tensor,
    chosen: QuantizedStream,
    swiglu: bool,
    exchange: "Exchange | None" = None,
) -> None:
    """`kernels.linear_quantized.launch` into out (rows, features) or, without bias and swiglu, to a workspace, for x (rows, K), bf16
    or fp16. Raises ValueError if the config does not support them."""
    fmt, n, k = packed.format, packed.n, packed.k
    if not chosen.fits(len(x), n, k, swiglu, fmt):
        raise ValueError(f"{chosen} cannot multiply {len(x)} rows with a weight {(n, k)} of {fmt}, swiglu={swiglu}")
    features = n // 2 if swiglu else n
    tile_rows, block = chosen.tile_rows(len(x)), chosen.block_n * features // n
    steps = -(-features // block) * -(-k // chosen.block_k)
    programs = -(-len(x) // tile_rows) * min(chosen.sharers(len(x)), steps)
    partials = torch.empty(2 * programs * chosen.block_n * tile_rows, dtype=torch.float32, device=x.device)
    scale_block = (chosen.block_k // fmt.group, block) if fmt.group else None
    _stream[(programs,)](
        descriptor(x, (tile_rows, fmt.piece)),
        descriptor(packed.codes, (block, chosen.block_k * fmt.bits // 16)),
        descriptor(packed.scales, scale_block, swizzled=False) if scale_block else None,
        descriptor(packed.zeros, scale_block, swizzled=False) if scale_block and packed.zeros is not None else None,
        None if scale_block else packed.scales,
        *(bias, out, partials, counters, len(x), features, k),
        BLOCK_K=chosen.block_k,
        STAGES=chosen.stages,
        UNPACK=(unpack_asm(fmt, x.dtype), 16 // fmt.bits, zero_offset(fmt, x.dtype), False),
        GROUP=fmt.group,
        SWIGLU=swiglu,
        MMA=chosen.is_mma(len(x)),
        **destination(exchange),
        num_warps=chosen.warps,
        maxnreg=chosen.registers(len(x)),
        **pdl_options(x.device),
    )
