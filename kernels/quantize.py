"""Triton kernels of the quantized all-reduce: quantize and pack, unpack and dequantize and sum.

`comm/quantize.py` defines the records and their arithmetic in PyTorch; these kernels give the same bytes and the same sums,
bit for bit. Formats are said as (bits, symmetric, floating), so that nothing is imported from there. Import this module only
where Triton is needed; it also runs in Triton's interpreter (TRITON_INTERPRET=1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

VALUES = 4096  # that one program handles: as many whole groups as fit


@triton.jit
def _round(x):
    """To the nearest integer, ties to even; |x| must be below 2^22. Behind 1.5 * 2^23, fp32 has no fractions."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _to_e4m3(x):
    """fp32 of at most 448 in size to the bits of e4m3, ties to even, by integer arithmetic: GPUs before Hopper have no such
    conversion."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # 3 bits of mantissa, bias 7 for 127
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 15  # below 2^-6: in units of 2^-9
    return tl.where(tl.abs(x) < 0.015625, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _from_e4m3(bits):
    size = bits & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    return tl.where((bits & 0x80) != 0, -value, value)


@triton.jit
def _codes(x, step, zero, LEVELS: tl.constexpr, SYMMETRIC: tl.constexpr, FLOATING: tl.constexpr):
    """(R, H) values of R groups to their codes, int32; step and zero (R,)."""
    known = (step > 0)[:, None]
    ratio = tl.where(known, tl.math.div_rn(tl.where(known, x, 0.0), tl.where(known, step[:, None], 1.0)), 0.0)
    if FLOATING:
        return _to_e4m3(ratio)
    if SYMMETRIC:
        half: tl.constexpr = LEVELS // 2 + 1
        return (tl.minimum(tl.maximum(_round(ratio), -half), half - 1) + half).to(tl.int32)
    return tl.minimum(tl.maximum(_round(ratio) + zero[:, None], 0.0), LEVELS).to(tl.int32)


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
    where = row[:, None] * GROUP + column[None, :]
    first = tl.load(values + where, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(values + where + GROUP // 2, mask=inside, other=0.0).to(tl.float32)

    infinity: tl.constexpr = float("inf")
    high = tl.max(tl.where(inside, tl.maximum(first, second), -infinity), axis=1)
    low = tl.min(tl.where(inside, tl.minimum(first, second), infinity), axis=1)
    finite = (tl.abs(first) < infinity) & (tl.abs(second) < infinity)  # a maximum may drop a NaN
    unknown = tl.max(tl.where(finite, 0, 1), axis=1) > 0
    high, low = tl.where(unknown | (row >= groups), 0.0, high), tl.where(unknown | (row >= groups), 0.0, low)
    largest = tl.maximum(high, -low)
    levels: tl.constexpr = 2**BITS - 1
    if FLOATING:
        step = tl.math.div_rn(largest, largest * 0.0 + 448.0)
    elif SYMMETRIC:
        step = tl.math.div_rn(largest, largest * 0.0 + levels // 2)
    else:
        divisor = largest * 0.0 + levels
        step = tl.math.div_rn(high, divisor) - tl.math.div_rn(low, divisor)
        step = tl.maximum(step, tl.math.div_rn(largest, largest * 0.0 + 32767.0))
    scale = (tl.abs(step).to(tl.int32, bitcast=True) + 0xFFFF) >> 16  # the bits of the next bf16
    scale = tl.where(unknown, 0x7FC0, scale)  # NaN
    step = (scale << 16).to(tl.float32, bitcast=True)
    zero = tl.zeros_like(step)
    tl.store(halfwords + row * (RECORD // 2), scale.to(tl.int16), mask=row < groups)
    header: tl.constexpr = 2 if SYMMETRIC or FLOATING else 4
    if header == 4:
        zero = tl.where(step > 0, -_round(tl.math.div_rn(low, tl.where(step > 0, step, 1.0))), 0.0)
        tl.store(halfwords + row * (RECORD // 2) + 1, zero.to(tl.int16), mask=row < groups)
    a = _codes(first, step, zero, levels, SYMMETRIC, FLOATING)
    b = _codes(second, step, zero, levels, SYMMETRIC, FLOATING)
    place = records + row[:, None] * RECORD + header + column[None, :]
    if BITS == 4:
        tl.store(place, (a | (b << 4)).to(tl.uint8), mask=inside)
    else:
        tl.store(place, a.to(tl.uint8), mask=inside)
        tl.store(place + GROUP // 2, b.to(tl.uint8), mask=inside)


@triton.jit
def _values(codes, zero, step, FLOATING: tl.constexpr):
    if FLOATING:
        return _from_e4m3(codes) * step[:, None]
    return (codes.to(tl.float32) - zero[:, None]) * step[:, None]


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
    first = tl.zeros((ROWS, HALF), tl.float32)
    second = tl.zeros((ROWS, HALF), tl.float32)
    for rank in range(RANKS):
        record = rank * groups + row
        scale = tl.load(halfwords + record * (RECORD // 2), mask=row < groups, other=0)
        step = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        if header == 4:
            zero = tl.load(halfwords + record * (RECORD // 2) + 1, mask=row < groups, other=0).to(tl.float32)
        else:
            zero = tl.zeros((ROWS,), tl.float32) + 2 ** (BITS - 1)
        place = records + record[:, None] * RECORD + header + column[None, :]
        a = tl.load(place, mask=inside, other=0).to(tl.int32)
        if BITS == 4:
            b = a >> 4
            a = a & 15
        else:
            b = tl.load(place + GROUP // 2, mask=inside, other=0).to(tl.int32)
        first += _values(a, zero, step, FLOATING)
        second += _values(b, zero, step, FLOATING)
    where = row[:, None] * GROUP + column[None, :]
    tl.store(sums + where, first, mask=inside)
    tl.store(sums + where + GROUP // 2, second, mask=inside)


def quantize(x: Tensor, bits: int, symmetric: bool, floating: bool) -> Tensor:
    """(G, group) fp32, bf16 or fp16 to (G, record bytes) uint8, as `comm.quantize.quantize_reference` does."""
    groups, group = x.shape
    record = (2 if symmetric or floating else 4) + group * bits // 8
    records = torch.empty(groups, record, dtype=torch.uint8, device=x.device)
    grid, shape = _launch(groups, group)
    _quantize[grid](
        x.contiguous(), records, records.view(torch.int16), groups, group, *shape, record, bits, symmetric, floating
    )
    return records


def dequantize_sum(records: Tensor, bits: int, symmetric: bool, floating: bool) -> Tensor:
    """(N, G, record bytes) uint8 to (G, group) fp32, as `comm.quantize.dequantize_sum_reference` does."""
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
