"""Triton kernels of the quantized all-reduce: quantize and pack; unpack, dequantize and add.

`comms/quantize.py` defines the records and their arithmetic in PyTorch. These kernels give bitwise the same bytes and sums.
Formats are passed as (bits, symmetric, floating), so that nothing is imported from `comm`. `kernels/quantized_all_reduce.py`
uses the same device functions. The kernels also run in Triton's interpreter (TRITON_INTERPRET=1). This module requires Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

VALUES = 4096  # of one program, at most, if a group is not longer: as many whole groups as fit


# The interpreter's fma rounds twice.
_HAS_FMA = tl.constexpr(not triton.knobs.runtime.interpret)
_ROUNDING_OFFSET = tl.constexpr(12582912.0)  # 1.5 * 2^23: x + this is rounded to an integer, which is in the last bits


@triton.jit
def _round(x):
    """To the nearest integer, ties to even; |x| must be below 2^22."""
    return (x + _ROUNDING_OFFSET) - _ROUNDING_OFFSET


@triton.jit
def _divide(negated, divisor, reciprocal):
    """The IEEE quotient -negated / divisor, computed as negated * reciprocal with one correction step. reciprocal: -1 / divisor,
    with an error of at most one unit in the last place (ulp). The signs save a negation, and give zero the right sign.

    Exact for divisors of up to 15 significant bits: then the remainder, quotient * divisor - x, is exact, and x / divisor is at
    least 2^-16 ulp away from the middle of two floats, while the error of the corrected quotient is 2^-22 ulp before it is
    rounded. The caller must prevent underflow."""
    if _HAS_FMA:
        quotient = negated * reciprocal
        return tl.fma(tl.fma(quotient, divisor, negated), reciprocal, quotient)
    return tl.math.div_rn(negated * -1.0, tl.where(divisor > 0, divisor, 1.0))


@triton.jit
def _divide_by(x, DIVISOR: tl.constexpr):
    """x / DIVISOR for a small odd constant. Also right for the smallest fp32 values of x."""
    return _divide(-x, tl.full(x.shape, DIVISOR, tl.float32), tl.full(x.shape, -1.0 / DIVISOR, tl.float32))


@triton.jit
def _to_e4m3(x):
    """fp32 values with |x| <= 448 to the bits of e4m3, ties to even, by integer arithmetic: GPUs before Hopper have no
    instruction for it."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # 3 bits of mantissa, bias 7 for 127
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 15  # subnormal (below 2^-6): in units of 2^-9
    return tl.where(tl.abs(x) < 0.015625, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _from_e4m3(bits):
    size = bits & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    return (value.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(low, high, nonfinite, LEVELS: tl.constexpr, SYMMETRIC: tl.constexpr, FLOATING: tl.constexpr):
    """The bits of the bf16 scales of R groups, int32 (R,). low, high: least and greatest value of each group, fp32 (R,).
    nonfinite: whether a value of the group is not finite."""
    high, low = tl.where(nonfinite, 0.0, high), tl.where(nonfinite, 0.0, low)
    largest = tl.maximum(high, -low)
    if FLOATING:
        step = tl.math.div_rn(largest, largest * 0.0 + 448.0)
    elif SYMMETRIC:
        step = _divide_by(largest, LEVELS // 2)
    else:
        step = tl.maximum(_divide_by(high, LEVELS) - _divide_by(low, LEVELS), _divide_by(largest, 32767))
    scale = (tl.abs(step).to(tl.int32, bitcast=True) + 0xFFFF) >> 16  # the next bf16
    return tl.where(nonfinite, 0x7FC0, scale)  # NaN


@triton.jit
def step_of(scale):
    """The fp32 value of a bf16's bits."""
    return (scale << 16).to(tl.float32, bitcast=True)


@triton.jit
def _divisor(step):
    """(factor, divisor, reciprocal), such that x / step is `_divide(x * factor, divisor, reciprocal)` and underflows only if
    the quotient does. The quotient is 0 for a step of 0, and undefined for NaN."""
    factor = tl.where(step < 8.67e-19, -1.2379400392853803e27, -1.0)  # -2^90
    divisor = step * -factor
    reciprocal = tl.where(
        step > 0, tl.math.div_rn(tl.full(step.shape, -1.0, tl.float32), tl.where(step > 0, divisor, 1.0)), 0.0
    )
    return factor, divisor, reciprocal


@triton.jit
def zero_point(low, step):
    """Zero points of R groups, fp32 (R,); 0 where the scale is 0 or NaN."""
    factor, divisor, reciprocal = _divisor(step)
    return tl.where(step > 0, -_round(_divide(low * factor, divisor, reciprocal)), 0.0)


@triton.jit
def encode(x, step, zero, LEVELS: tl.constexpr, SYMMETRIC: tl.constexpr, FLOATING: tl.constexpr, E4M3: tl.constexpr):
    """(R, H) fp32 values of R groups to uint8 codes; step and zero (R,). E4M3: whether the GPU has an instruction for the
    conversion."""
    factor, divisor, reciprocal = _divisor(step)
    ratio = _divide(x * factor[:, None], divisor[:, None], reciprocal[:, None])
    if FLOATING or SYMMETRIC:
        ratio = tl.where((step > 0)[:, None], ratio, 0.0)  # removes NaN, and -0 where all values are zero
    if FLOATING:
        if E4M3:
            return ratio.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return _to_e4m3(ratio).to(tl.uint8)
    # clamped after _ROUNDING_OFFSET has been added, so that the last byte is the code
    if SYMMETRIC:
        code = (ratio + _ROUNDING_OFFSET) + (LEVELS // 2 + 1)
    else:
        code = (ratio + _ROUNDING_OFFSET) + zero[:, None]
    code = tl.minimum(tl.maximum(code, _ROUNDING_OFFSET), _ROUNDING_OFFSET + LEVELS)
    return code.to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def extremes(first, second, inside):
    """(least, greatest, whether one is not finite), each (R,), of the rows of two (R, H) tensors, where `inside`."""
    infinity: tl.constexpr = float("inf")
    high = tl.max(tl.where(inside, tl.maximum(first, second), -infinity), axis=1)
    low = tl.min(tl.where(inside, tl.minimum(first, second), infinity), axis=1)
    zero_or_nan = tl.sum(tl.where(inside, first * 0.0 + second * 0.0, 0.0), axis=1)  # because a maximum may ignore a NaN
    return low, high, zero_or_nan != 0.0


@triton.jit
def _quantize(
    values,
    records,  # uint8
    halfwords,  # the same memory as int16
    groups,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,  # GROUP / 2, rounded up to a power of two
    ROWS: tl.constexpr,  # groups of one program
    RECORD: tl.constexpr,
    BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    FLOATING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    inside = (row < groups)[:, None] & (column < GROUP // 2)[None, :]
    offsets = row[:, None] * GROUP + column[None, :]
    first = tl.load(values + offsets, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(values + offsets + GROUP // 2, mask=inside, other=0.0).to(tl.float32)

    low, high, nonfinite = extremes(first, second, inside)
    nonfinite |= row >= groups
    levels: tl.constexpr = 2**BITS - 1
    scale = scale_of(low, high, nonfinite, levels, SYMMETRIC, FLOATING)
    step = step_of(scale)
    zero = tl.zeros_like(step)
    tl.store(halfwords + row * (RECORD // 2), scale.to(tl.int16), mask=row < groups)
    header: tl.constexpr = 2 if SYMMETRIC or FLOATING else 4
    if header == 4:
        zero = zero_point(low, step)
        tl.store(halfwords + row * (RECORD // 2) + 1, zero.to(tl.int16), mask=row < groups)
    positive = (step > 0)[:, None]
    a = encode(tl.where(positive, first, 0.0), step, zero, levels, SYMMETRIC, FLOATING, False)
    b = encode(tl.where(positive, second, 0.0), step, zero, levels, SYMMETRIC, FLOATING, False)
    pointers = records + row[:, None] * RECORD + header + column[None, :]
    if BITS == 4:
        tl.store(pointers, a | (b << 4), mask=inside)
    else:
        tl.store(pointers, a, mask=inside)
        tl.store(pointers + GROUP // 2, b, mask=inside)


@triton.jit
def decode(codes, zero, step, FLOATING: tl.constexpr, E4M3: tl.constexpr):
    """(R, H) uint8 codes to fp32 values; zero and step (R,)."""
    if FLOATING:
        if E4M3:
            value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            value = _from_e4m3(codes.to(tl.int32))
    else:  # the bits of 2^23 + code
        value = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (zero[:, None] + 8388608.0)
    return value * step[:, None]


@triton.jit
def negative_zeros(R: tl.constexpr, H: tl.constexpr):
    """(R, H) fp32, the initial value of a sum: -0 + x keeps the sign of a zero x."""
    return tl.zeros((R, H), tl.float32) * -1.0


@triton.jit
def _dequantize_sum(
    records,
    halfwords,
    sums,  # (groups, GROUP) fp32
    groups,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    RECORD: tl.constexpr,
    BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    FLOATING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    inside = (row < groups)[:, None] & (column < GROUP // 2)[None, :]
    header: tl.constexpr = 2 if SYMMETRIC or FLOATING else 4
    first, second = negative_zeros(ROWS, HALF), negative_zeros(ROWS, HALF)
    for rank in range(RANKS):
        record = rank * groups + row
        scale = tl.load(halfwords + record * (RECORD // 2), mask=row < groups, other=0)
        step = step_of(scale.to(tl.int32))
        if header == 4:
            zero = tl.load(halfwords + record * (RECORD // 2) + 1, mask=row < groups, other=0).to(tl.float32)
        else:
            zero = tl.zeros((ROWS,), tl.float32) + 2 ** (BITS - 1)
        pointers = records + record[:, None] * RECORD + header + column[None, :]
        a = tl.load(pointers, mask=inside, other=0)
        if BITS == 4:
            b = a >> 4
            a = a & 15
        else:
            b = tl.load(pointers + GROUP // 2, mask=inside, other=0)
        first += decode(a, zero, step, FLOATING, False)
        second += decode(b, zero, step, FLOATING, False)
    offsets = row[:, None] * GROUP + column[None, :]
    tl.store(sums + offsets, first, mask=inside)
    tl.store(sums + offsets + GROUP // 2, second, mask=inside)


def quantize(x: Tensor, bits: int, symmetric: bool, floating: bool) -> Tensor:
    """(G, group) fp32, bf16 or fp16 to (G, record bytes) uint8 records: `comms.quantize.quantize_reference` defines it."""
    groups, group = x.shape
    record = (2 if symmetric or floating else 4) + group * bits // 8
    records = torch.empty(groups, record, dtype=torch.uint8, device=x.device)
    grid, shape = _launch(groups, group)
    _quantize[grid](
        x.contiguous(), records, records.view(torch.int16), groups, group, *shape, record, bits, symmetric, floating
    )
    return records


def dequantize_sum(records: Tensor, bits: int, symmetric: bool, floating: bool) -> Tensor:
    """(N, G, record bytes) uint8 to the sum (G, group) fp32: `comms.quantize.dequantize_sum_reference` defines it."""
    ranks, groups, record = records.shape
    group = (record - (2 if symmetric or floating else 4)) * 8 // bits
    sums = torch.empty(groups, group, dtype=torch.float32, device=records.device)
    grid, shape = _launch(groups, group)
    records = records.contiguous()
    _dequantize_sum[grid](
        records, records.view(torch.int16), sums, groups, ranks, group, *shape, record, bits, symmetric, floating
    )
    return sums


def _launch(groups: int, group: int) -> tuple[tuple[int], tuple[int, int]]:
    """The grid, and (HALF, ROWS) of a program."""
    half = triton.next_power_of_2(group // 2)
    rows = max(1, VALUES // (2 * half))
    return (triton.cdiv(groups, rows),), (half, rows)
