"""Quantized linear layers of up to 8 rows on Hopper, in Gluon: small programs without shared memory for their operands.

A program has tiles of `block_n` rows of the weight, and its warps share their columns. A thread loads 16 bytes of a row's codes at a
time, a chunk of four such units a warp, and has `chunks` of them in flight; the first ones are loaded before the previous
kernel has finished. They are converted in registers (`unpack_asm`) and multiplied by mma instructions, whose 8 columns hold
the rows of the input: on FMA units, the conversion to fp32 alone would take longer than loading 4-bit codes.

The order of input features in a product is free, so thread t of four multiplies the features of its own unit. If a chunk has
several groups of features, which one sum cannot tell apart, each group has columns of its own: the other groups' are zero there.
"""

from typing import TYPE_CHECKING

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.dispatch import pdl_options
from kernels.linear_config import COLUMNS, SMS, QuantizedGemv
from kernels.linear_quantized import Packed
from kernels.linear_quantized_stream import begin_push, destination, inline_asm, push_tile, unpack_asm, zero_offset

if TYPE_CHECKING:
    from kernels.all_reduce import Exchange

_COLUMNS = gl.constexpr(COLUMNS)

# --- layouts ------------------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _bits(size, dim, rank, first=1):
    """Steps of the binary digits of an index of dimension `dim`, from `first` up to `size`."""
    return [[(first << i) * (d == dim) for d in range(rank)] for i in range((size // first).bit_length() - 1)]


@gluon.constexpr_function
def _code_layout(warps, block):
    """Of (warps, BLOCK, 4 units, 4 words): a thread has a unit of the rows that it has in operand A of mma."""
    registers = [*_bits(4, 3, 4), *_bits(block, 1, 4, 8)]
    return gl.DistributedLinearLayout(
        registers, [*_bits(4, 2, 4), *_bits(8, 1, 4)], _bits(warps, 0, 4), [], [warps, block, 4, 4]
    )


@gluon.constexpr_function
def _input_layout(warps, per_pair):
    """Of (warps, 4 units, codes of a pair, 4 words, columns): a thread has a unit of a column, as in operand B of mma."""
    registers = [*_bits(4, 3, 5), *_bits(per_pair, 2, 5)]
    shape = [warps, 4, per_pair, 4, COLUMNS]
    return gl.DistributedLinearLayout(registers, [*_bits(4, 1, 5), *_bits(COLUMNS, 4, 5)], _bits(warps, 0, 5), [], shape)


@gluon.jit
def _index(size: gl.constexpr, dim: gl.constexpr, layout: gl.constexpr, rank: gl.constexpr):
    """0, 1, … along one dimension of a tile, of size 1 along the others."""
    LAYOUT: gl.constexpr = _slice(layout, dim, rank)
    index = gl.arange(0, size, LAYOUT)
    for d in gl.static_range(rank):
        if d != dim:
            index = gl.expand_dims(index, d)
    return index


@gluon.constexpr_function
def _slice(layout, dim, rank):
    for d in reversed(range(rank)):
        layout = layout if d == dim else gl.SliceLayout(d, layout)
    return layout


# --- the kernel ---------------------------------------------------------------------------------------------------------------


@gluon.jit
def _weight_row(index, tile, features, BLOCK: gl.constexpr, SWIGLU: gl.constexpr):
    """The weight's row and the output's feature of rows of a tile. With SWIGLU, 8 rows of the gate precede those of the up
    projection, so that a thread has both."""
    if SWIGLU:
        feature = tile * (BLOCK // 2) + index // 16 * 8 + index % 8
        row = gl.minimum(feature, features - 1) + index // 8 % 2 * features
    else:
        feature = tile * BLOCK + index
        row = gl.minimum(feature, features - 1)
    return row


@gluon.jit
def _load_chunk(
    weight, tile, step, UNIT: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, MMA: gl.constexpr
):
    """The codes, scales and zeros of this warp's chunk of a tile's step; zeros beyond the weight."""
    codes, scales, zeros, units, scale_stride, tiles, features, SWIGLU = weight
    end = gl.where(tile < tiles, units, 0)
    WARPS: gl.constexpr = gl.num_warps()
    CODES: gl.constexpr = _code_layout(WARPS, BLOCK)
    unit = (step * WARPS + _index(WARPS, 0, CODES, 4)) * 4 + _index(4, 2, CODES, 4)
    row = _weight_row(_index(BLOCK, 1, CODES, 4), tile, features, BLOCK, SWIGLU)
    place = (row.to(gl.int64) * units + unit) * 4 + _index(4, 3, CODES, 4)
    found = gl.load(_words(codes) + place, mask=unit < end, other=0, eviction_policy="evict_first")
    scale = 0
    zero = 0
    if GROUP:
        first = (step * WARPS + _index(WARPS, 0, MMA, 3)) * (4 * UNIT) // GROUP
        if GROUPS > 1:
            first = first + _index(_COLUMNS, 2, MMA, 3) // (_COLUMNS // GROUPS)
        row = _weight_row(_index(BLOCK, 1, MMA, 3), tile, features, BLOCK, SWIGLU)
        scale = gl.load(scales + first * scale_stride + row, mask=first * GROUP < end * UNIT, other=0)
    if zeros is not None:
        row = _weight_row(_index(BLOCK, 1, CODES, 4), tile, features, BLOCK, SWIGLU)
        zero = gl.load(zeros + unit * UNIT // GROUP * scale_stride + row, mask=unit < end, other=0)
    return found, scale, zero


@gluon.jit
def _load_input(x, x_stride, rows, units, step, UNIT: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """The input's part of this warp's chunk of a step, in the order of _load_chunk's codes."""
    WARPS: gl.constexpr = gl.num_warps()
    X: gl.constexpr = _input_layout(WARPS, UNIT // 8)
    OF_A_GROUP: gl.constexpr = _COLUMNS // GROUPS
    within = _index(4, 1, X, 5)
    unit = (step * WARPS + _index(WARPS, 0, X, 5)) * 4 + within
    column = _index(_COLUMNS, 4, X, 5)
    inside = (unit < units) & (column % OF_A_GROUP < rows)
    if GROUPS > 1:
        inside = inside & (within * UNIT // GROUP == column // OF_A_GROUP)
    place = unit * (UNIT // 2) + _index(UNIT // 8, 2, X, 5) * 4 + _index(4, 3, X, 5)
    return gl.load(_words(x) + column % OF_A_GROUP * (x_stride // 2) + place, mask=inside, other=0)


@gluon.jit
def _words(pointer):
    return pointer.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def _halves(words):
    """(..., n) words as (..., n, 2) int16. Values of 16 bits that live longer would be packed and unpacked each time."""
    return gl.join(words.to(gl.int16), (words >> 16).to(gl.int16))


@gluon.jit
def _multiply(sums, chunk, values, dtype: gl.constexpr, UNPACK: gl.constexpr, GROUP: gl.constexpr):
    """Add the products of a chunk, times the scales of its groups."""
    found, scale, zero = chunk
    ASM: gl.constexpr = UNPACK[0]
    PER_PAIR: gl.constexpr = UNPACK[1]
    ZERO: gl.constexpr = UNPACK[2]
    WARPS: gl.constexpr = sums.shape[0]
    BLOCK: gl.constexpr = sums.shape[1]
    FEATURES: gl.constexpr = 32 * PER_PAIR
    found = _halves(found).reshape((WARPS, BLOCK, 4, 8))
    values = _halves(values).to(dtype, bitcast=True).permute((0, 1, 2, 3, 5, 4))
    if ZERO is not None:
        PAIRS: gl.constexpr = found.type.layout
        zero = gl.convert_layout((zero.to(gl.float32) + ZERO).to(dtype), PAIRS)
        parts = inline_asm(ASM, PER_PAIR, (found, zero), values)
    else:
        parts = inline_asm(ASM, PER_PAIR, (found,), values)
    # words 2 i and 2 i + 1 of a unit, which x has in neighbouring registers, are both halves of an mma's operands
    SHAPE: gl.constexpr = (WARPS, BLOCK, 4, 2, 2, 2)  # unit, two of its words, one of these, one of its two pairs
    if PER_PAIR == 2:
        w = gl.join(parts[0].reshape(SHAPE), parts[1].reshape(SHAPE)).permute((0, 1, 3, 6, 4, 2, 5))
    else:
        even = gl.join(parts[0].reshape(SHAPE), parts[2].reshape(SHAPE))
        odd = gl.join(parts[1].reshape(SHAPE), parts[3].reshape(SHAPE))
        w = gl.join(even, odd).permute((0, 1, 3, 6, 7, 4, 2, 5))
    x = values.reshape((WARPS, 4, PER_PAIR, 2, 2, 2, _COLUMNS)).permute((0, 3, 2, 4, 1, 5, 6))
    a = gl.convert_layout(w.reshape((WARPS, BLOCK, FEATURES)), gl.DotOperandLayout(0, sums.type.layout, 2))
    b = gl.convert_layout(x.reshape((WARPS, FEATURES, _COLUMNS)), gl.DotOperandLayout(1, sums.type.layout, 2))
    if GROUP:
        sums += mma_v2(a, b, gl.zeros_like(sums)) * scale.to(gl.float32)
    else:
        sums = mma_v2(a, b, sums)
    return sums


@gluon.jit
def _multiply_ring(
    sums, ring, values, weight, next_tile, next_step, x, x_stride, rows, step,
    UNPACK: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Add the products of all chunks of the ring, from `step` on. With MORE, each is replaced by one from next_step on.

    values: the input of the first of them; that of the next one is loaded while a chunk is multiplied.
    """
    units = weight[3]
    UNIT: gl.constexpr = 8 * UNPACK[1]
    BLOCK: gl.constexpr = sums.shape[1]
    MMA: gl.constexpr = sums.type.layout
    CHUNKS: gl.constexpr = len(ring)
    later = ()
    for i in gl.static_range(CHUNKS):
        next_values = values
        if i + 1 < CHUNKS:
            next_values = _load_input(x, x_stride, rows, units, step + i + 1, UNIT, GROUP, GROUPS)
        elif MORE:
            next_values = _load_input(x, x_stride, rows, units, next_step, UNIT, GROUP, GROUPS)
        sums = _multiply(sums, ring[i], values, x.dtype.element_ty, UNPACK, GROUP)
        chunk = ring[i]
        if MORE:
            chunk = _load_chunk(weight, next_tile, next_step + i, UNIT, GROUP, GROUPS, BLOCK, MMA)
        later += (chunk,)  # type: ignore[assignment]
        values = next_values
    return sums, later, values


@gluon.jit(do_not_specialize=["rows", "rank"])
def _gemv(
    x,  # (rows, K)
    codes,  # (N, K * bits / 16)
    scales,  # (groups, scale_stride), or (N,)
    zeros,  # as scales, or None
    bias,  # (N,) or None
    out,  # (rows, features), or None if the result is pushed
    rows,
    features,  # N, or N / 2 with SWIGLU
    tiles,  # of the weight's rows
    units,  # of 16 bytes of codes in a row
    x_stride,
    scale_stride,
    state,  # of the workspace that the result is pushed to, or None
    rank,
    BLOCK: gl.constexpr,
    CHUNKS: gl.constexpr,
    ONCE: gl.constexpr,  # no warp has more than CHUNKS of a tile
    UNPACK: gl.constexpr,  # as of `linear_quantized_stream`
    AGAIN: gl.constexpr,  # a program may have several tiles
    GROUP: gl.constexpr,  # input features that share a scale, 0 for all of them
    GROUPS: gl.constexpr,  # of a chunk
    SWIGLU: gl.constexpr,
    CAPACITY: gl.constexpr,  # words of a pushed message, at most
    PDL: gl.constexpr,
):
    UNIT: gl.constexpr = 8 * UNPACK[1]
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    tile = gl.program_id(0)
    if PDL and out is not None:
        tl.extra.cuda.gdc_launch_dependents()
    weight = (codes, scales, zeros, units, scale_stride, tiles, features, SWIGLU)
    ring = ()
    for i in gl.static_range(CHUNKS):
        ring += (_load_chunk(weight, tile, i, UNIT, GROUP, GROUPS, BLOCK, MMA),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
    epoch = 0
    if out is None:
        epoch = begin_push(state, CAPACITY, PDL)
    result = (scales, bias, out, state, rank, epoch, rows, features, CAPACITY)
    values = _load_input(x, x_stride, rows, units, 0, UNIT, GROUP, GROUPS)
    if AGAIN:
        for now in range(tile, tiles, gl.num_programs(0)):
            sums = gl.zeros((WARPS, BLOCK, _COLUMNS), gl.float32, MMA)
            for step in range(0, gl.cdiv(units, 4 * WARPS), CHUNKS):
                last = step + CHUNKS >= gl.cdiv(units, 4 * WARPS)
                next_tile = gl.where(last, now + gl.num_programs(0), now)  # after the last chunks, those of the next tile
                next_step = gl.where(last, 0, step + CHUNKS)
                sums, ring, values = _multiply_ring(
                    sums, ring, values, weight, next_tile, next_step, x, x_stride, rows, step, UNPACK, GROUP, GROUPS, True
                )
            _store(gl.sum(sums, 0), result, now, x.dtype.element_ty, GROUP, GROUPS, SWIGLU)
    else:
        sums = gl.zeros((WARPS, BLOCK, _COLUMNS), gl.float32, MMA)
        if ONCE:
            sums, ring, values = _multiply_ring(
                sums, ring, values, weight, tile, 0, x, x_stride, rows, 0, UNPACK, GROUP, GROUPS, False
            )
        else:
            for step in range(0, gl.cdiv(units, 4 * WARPS), CHUNKS):
                sums, ring, values = _multiply_ring(
                    sums, ring, values, weight, tile, step + CHUNKS, x, x_stride, rows, step, UNPACK, GROUP, GROUPS, True
                )
        _store(gl.sum(sums, 0), result, tile, x.dtype.element_ty, GROUP, GROUPS, SWIGLU)


@gluon.jit
def _store(sums, result, tile, DTYPE: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, SWIGLU: gl.constexpr):
    """Store or push (BLOCK, columns) sums, times the scales of rows if these are not of groups, plus the bias."""
    scales, bias, out, state, rank, epoch, rows, features, CAPACITY = result
    BLOCK: gl.constexpr = sums.shape[0]
    OF_A_GROUP: gl.constexpr = _COLUMNS // GROUPS
    if GROUPS > 1:
        sums = gl.sum(sums.reshape((BLOCK, GROUPS, OF_A_GROUP)), 1)
    OF_SUMS: gl.constexpr = sums.type.layout
    row = _weight_row(_index(BLOCK, 0, OF_SUMS, 2), tile, features, BLOCK, SWIGLU)
    if not GROUP:
        sums *= gl.load(scales + row)
    if bias is not None:
        sums += gl.load(bias + row).to(gl.float32)
    PARTS: gl.constexpr = 2 if SWIGLU else 1
    if SWIGLU:
        pairs = sums.reshape((BLOCK // 16, 2, 8, OF_A_GROUP)).permute((0, 2, 3, 1))
        gate, up = gl.split(pairs.reshape((BLOCK // 2, OF_A_GROUP, 2)))
        sums = gate / (1.0 + gl.exp(-gate)) * up
    if out is not None:
        LAYOUT: gl.constexpr = sums.type.layout
        feature = tile * (BLOCK // PARTS) + _index(BLOCK // PARTS, 0, LAYOUT, 2)
        m = _index(OF_A_GROUP, 1, LAYOUT, 2)
        gl.store(out + m * features + feature, sums.to(DTYPE), mask=(m < rows) & (feature < features))
    else:
        push_tile(sums, state, rank, epoch, 0, tile * BLOCK, rows, features, DTYPE, CAPACITY)


# --- launch -------------------------------------------------------------------------------------------------------------------


def gemv(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    out: Tensor | None,
    chosen: QuantizedGemv,
    swiglu: bool,
    exchange: "Exchange | None" = None,
) -> None:
    """`kernels.linear_quantized.launch` into out (rows, features) or, without swiglu, to a workspace, for x (rows, K), bf16 or fp16.
    Raises ValueError if the config does not support them."""
    fmt, n, k = packed.format, packed.n, packed.k
    if not chosen.fits(len(x), n, k, swiglu, fmt):
        raise ValueError(f"{chosen} cannot multiply {len(x)} rows with a weight {(n, k)} of {fmt}, swiglu={swiglu}")
    tiles, units = -(-n // chosen.block_n), k // fmt.unit
    programs = min(tiles, chosen.on_an_sm * SMS) if chosen.on_an_sm else tiles
    _gemv[(programs,)](
        *(x, packed.codes, packed.scales, packed.zeros, bias, out),
        *(len(x), n // 2 if swiglu else n, tiles, units, x.stride(0), packed.scales.shape[-1]),
        BLOCK=chosen.block_n,
        CHUNKS=chosen.chunks,
        ONCE=units <= 4 * chosen.warps * chosen.chunks,
        UNPACK=(unpack_asm(fmt, x.dtype), 16 // fmt.bits, zero_offset(fmt, x.dtype)),
        AGAIN=programs < tiles,
        GROUP=fmt.group,
        GROUPS=chosen.groups(fmt),
        SWIGLU=swiglu,
        **destination(exchange),
        num_warps=chosen.warps,
        maxnreg=chosen.registers,
        **pdl_options(x.device),
    )
