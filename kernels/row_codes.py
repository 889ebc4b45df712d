"""Activations in 8 bits: what kernels store for a layer that multiplies matrices of fp8 or int8.

The functions that make such an activation return `RowCodes` where the layer that reads it asks for them (`Linear.reads_codes`).
Its codes are those of its values after rounding to 16 bits, so they do not depend on where it is quantized.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import as_rows, pdl_options, tl, triton

FP8 = torch.float8_e4m3fn
MAX_SIZE = 32768  # values of a row, which a program holds in registers


class RowCodes(NamedTuple):
    """An activation (..., K): codes times scales.

    codes: (R, K) fp8 or int8, in the order of packed 8-bit codes (`kernels/linear_quantized.py`). scales: (R, 1) fp32. shape and dtype: of
    the activation.
    """

    codes: Tensor
    scales: Tensor
    shape: torch.Size
    dtype: torch.dtype


def empty_codes(shape: torch.Size, like: Tensor, kind: torch.dtype = FP8) -> RowCodes:
    """Memory for an activation of this shape, in the data type and on the device of `like`. kind: of the codes."""
    size = shape[-1]
    codes = torch.empty(shape.numel() // size, size, dtype=kind, device=like.device)
    return RowCodes(codes, torch.empty(len(codes), 1, device=like.device), shape, like.dtype)


def quantize_rows(x: Tensor, kind: torch.dtype = FP8) -> RowCodes:
    """x (..., K) with each row divided by its own scale, which makes its largest value 448, or 127.5 before rounding to int8;
    on CUDA, K a multiple of 16. A row with a value that is not finite has the scale NaN. kind: of the codes.
    `quantized.weight.quantized_input` defines it."""
    rows, out = as_rows(x), empty_codes(x.shape, x, kind)
    size = x.shape[-1]
    options = {"BLOCK": triton.next_power_of_2(size), "num_warps": row_warps(size)} | pdl_options(x.device)
    _quantize_rows[(len(rows),)](rows, out.codes, out.scales, rows.stride(0), size, **options)
    return out


def row_warps(size: int) -> int:
    """Warps of a program that holds a row: 16 values a thread, or more if there would be more than 32 warps."""
    return min(max(triton.next_power_of_2(size) // 512, 1), 32)


@triton.jit
def _quantize_rows(x, codes, scales, row_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * row_stride + column, mask=column < size, other=0.0).to(tl.float32)
    store_codes(values, codes, scales, row, size, BLOCK)


@triton.jit
def store_codes(values, codes, scales, row, size, BLOCK: tl.constexpr):
    """Store the codes and the scale of a row: values (BLOCK,) fp32, 0 from `size` on. The scale is NaN if a value is not finite."""
    scale = scale_of(largest_bits(values), codes.dtype.element_ty == tl.int8)
    tl.store(scales + row, scale)
    store_scaled(values, scale, codes + row * size, size, BLOCK)


@triton.jit
def largest_bits(values):
    """The bits, without a sign, of the value furthest from 0. Their order is that of the values, with NaN above infinity; a maximum of
    floats would pass over NaN."""
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)


@triton.jit
def scale_of(bits, INTEGER: tl.constexpr):
    """The scale of values up to the one with these bits, for codes of int8 or fp8."""
    largest = bits.to(tl.float32, bitcast=True)
    scale = tl.where(largest > 0, largest / (127.5 if INTEGER else 448.0), 1.0)
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def store_scaled(values, scale, codes, size, BLOCK: tl.constexpr):
    """Store the codes of values (BLOCK,) fp32, of which the first `size` exist. BLOCK and size: multiples of 16."""
    if codes.dtype.element_ty == tl.int8:  # the addition rounds to an integer, to nearest and half to even
        found = tl.minimum(tl.maximum(values / scale + 12582912.0 - 12582912.0, -128.0), 127.0).to(tl.int8)
    else:
        found = tl.minimum(tl.maximum(values / scale, -448.0), 448.0).to(tl.float8e4nv)
    # of 16 features: which half, thread of four, which of its two neighbours; the halves' codes are neighbours in the result
    parts = tl.permute(tl.reshape(found, (BLOCK // 16, 2, 4, 2)), (0, 2, 3, 1))
    place = tl.arange(0, BLOCK)
    tl.store(codes + place, tl.reshape(parts, (BLOCK,)), mask=place < size)
