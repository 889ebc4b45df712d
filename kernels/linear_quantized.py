"""Quantized linear layers on Hopper GPUs: how their weights are packed, and which kernel computes them.

gemv        up to GEMV_ROWS rows of weights of up to GEMV_CODES bytes, `kernels/linear_quantized_gemv.py`
exact       up to STREAM_ROWS rows, `kernels/linear_quantized_stream.py`: the codes are read once, and converted in registers. The
            input keeps its 16 bits
scaled      a weight of 8 bits with a scale for each row whose scheme quantizes the input, too, with more than EXACT_ROWS rows (fp8) or
            INT8_EXACT_ROWS (int8): each row of the input by its own largest value (`kernels/row_codes.py`), then a product of codes:
            of fp8 up to CODE_ROWS rows by `kernels/linear_stream.py`, else by PyTorch; of int8 by `kernels/linear_int8.py`. With few rows `exact` is used, which
            rounds less than the scheme asks
tiles       more rows of an input that keeps its 16 bits, `kernels/linear_quantized_tiles.py`: the codes are converted in registers
dequantize  else: a Triton kernel writes the weight in 16 bits, one layer at a time, for F.linear
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import swiglu as swiglu_of
from kernels.dispatch import on_gpu, tl, triton
from kernels.linear import aligned, counters
from kernels.linear_config import (
    EXACT_ROWS,
    GROUPS,
    INT8_EXACT_ROWS,
    STREAM_ROWS,
    Format,
    QuantizedConfig,
    QuantizedGemv,
    QuantizedStream,
    QuantizedTiles,
    Stream,
    code_config,
    has_stream,
    quantized_config,
)
from kernels.row_codes import FP8, MAX_SIZE, RowCodes, quantize_rows

if TYPE_CHECKING:
    from kernels.all_reduce import Exchange


@dataclass(frozen=True)
class Packed:
    """A quantized weight (n, k) as the kernels read it.

    codes: (N, K * bits / 16) int16, see `_pairs`. scales: (N,) fp32, or of groups of input features (K / group, N), with up to
    15 more columns. zeros: int16 of the shape of scales, or None. columns: (K,) int64, the input feature of each column of the
    codes, None if they are in order. scaled: whether the scheme quantizes the input, too.
    """

    format: Format
    n: int
    k: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    columns: Tensor | None = None
    scaled: bool = False


KINDS = {"fp8": FP8, "int8": torch.int8, "int4": torch.uint8}


# --- packing ------------------------------------------------------------------------------------------------------------------


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None, scaled: bool = False) -> Packed | None:
    """The fields of a `quantized.weight.Quantized`, on any device, as `Packed`; None if the kernels cannot read such a weight.

    codes: (N, K) fp8 or int8, or (N, K / 2) uint8. scales and zeros: (N, G). groups: (K,). w[n, k] = (code - zero) * scale.
    """
    kind = next(kind for kind, dtype in KINDS.items() if dtype == codes.dtype)
    values = torch.stack([codes & 15, codes >> 4], -1).flatten(1) if kind == "int4" else codes.view(torch.uint8)
    k, columns = values.shape[1], None
    counts = [k // scales.shape[1]] * scales.shape[1]  # input features of each group
    if groups is not None:
        columns = torch.argsort(groups, stable=True)
        values, counts = values.index_select(1, columns), torch.bincount(groups, minlength=scales.shape[1]).tolist()
    group = 0 if len(counts) == 1 and zeros is None else math.gcd(max(GROUPS), *counts)
    fmt = Format(kind, group, zeros is not None, bool(group) and scales.dtype == torch.float32)
    if k % fmt.unit or (group and (group not in GROUPS or group % fmt.unit)):
        return None
    if not group:
        return Packed(fmt, len(codes), k, _pairs(values, fmt), scales[:, 0].float().contiguous(), None, columns, scaled)
    repeats = torch.tensor([count // group for count in counts], device=scales.device)
    wide = [None if t is None else _group_rows(t.repeat_interleave(repeats, 1)) for t in (scales, zeros)]
    assert wide[0] is not None
    return Packed(
        fmt, len(codes), k, _pairs(values, fmt), wide[0], None if wide[1] is None else wide[1].short(), columns, scaled
    )


def _group_rows(values: Tensor) -> Tensor:
    """(N, G) as (G, N) with N rounded up to a multiple of 16, because rows that TMA loads begin at multiples of 16 bytes."""
    return F.pad(values.T, (0, -len(values) % 16)).contiguous()


def _pairs(values: Tensor, fmt: Format) -> Tensor:
    """Codes (N, K) uint8 as pairs of bytes (N, K * bits / 16) int16, in the order of `kernels/linear_quantized_stream.py`."""
    # each `unit` of input features: which code of a pair of bytes, thread of four, which of the thread's two pairs
    codes = values.unflatten(1, (-1, fmt.unit // 8, 4, 2)).permute(0, 1, 3, 4, 2)
    if fmt.bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes.flatten(1).view(torch.int16)


# --- the layer ----------------------------------------------------------------------------------------------------------------


def linear(
    x: Tensor | RowCodes,
    weight: Packed,
    bias: Tensor | None = None,
    swiglu: bool = False,
    activation: Callable[[Tensor], Any] = swiglu_of,
) -> Any:
    """x @ weight.T + bias, (..., K) to (..., N), or silu(gate) * up of it, to (..., N / 2), in x's dtype: bf16 or fp16, on CUDA.

    x: `RowCodes` only if the weight `reads_codes`. bias: (N,). activation: computes silu(gate) * up where the kernel of the product
    does not; the caller may want a result in 8 bits. The conditions are those of `kernels.linear.linear`.
    """
    if isinstance(x, RowCodes):
        y = scaled_linear(x, weight, bias)
        return activation(y) if swiglu else y
    rows = x.numel() // weight.k
    if weight.columns is not None:
        x = x.index_select(-1, weight.columns)
    if (
        rows > 0
        and is_exact(weight, rows, x.dtype)
        and aligned(x)
        and (chosen := quantized_config(rows, weight.n, weight.k, weight.format, swiglu))
    ):
        return linear_with(x, weight, bias, chosen, swiglu)
    if rows > 0 and exact_rows_of(weight, x.dtype) < STREAM_ROWS:
        y = scaled_linear(quantize_rows(x, KINDS[weight.format.kind]), weight, bias)
    else:
        y = F.linear(x, dequantize(weight, x.dtype), bias)
    return activation(y) if swiglu else y


def reads_codes(weight: Packed, like: Tensor) -> bool:
    """Whether `linear` rounds an input with the rows (..., any) and the data type of `like` to fp8, so that the kernel before it
    may."""
    rows = like.numel() // like.shape[-1]
    scaled = weight.columns is None and weight.k <= MAX_SIZE and weight.format.kind == "fp8"
    return scaled and exact_rows_of(weight, like.dtype) < min(rows, STREAM_ROWS) and on_gpu(like)


def exact_rows_of(weight: Packed, dtype: torch.dtype) -> int:
    """The most rows of an input that keeps its 16 bits; with STREAM_ROWS it always does."""
    if has_scaled_product(weight, dtype):
        return EXACT_ROWS
    return INT8_EXACT_ROWS if weight.scaled and weight.format == Format("int8") else STREAM_ROWS


def is_exact(weight: Packed, rows: int, dtype: torch.dtype) -> bool:
    """Whether kernels that keep the input's 16 bits may compute so many rows."""
    most = exact_rows_of(weight, dtype)
    return rows <= most or (most == STREAM_ROWS and exact_scales(weight, dtype))


def has_scaled_product(weight: Packed, dtype: torch.dtype) -> bool:
    """Whether many rows of this data type are multiplied as fp8 codes."""
    return weight.scaled and weight.format == Format("fp8") and weight.n % 16 == 0 and dtype == torch.bfloat16


def exact_scales(weight: Packed, dtype: torch.dtype) -> bool:
    """Whether scales of groups in an input's data type are as accurate as the products with them are."""
    scales = weight.scales.dtype
    return not weight.format.group or scales == dtype or (dtype == torch.bfloat16 and scales == torch.float16)


def linear_with(x: Tensor, weight: Packed, bias: Tensor | None, chosen: QuantizedConfig, swiglu: bool) -> Tensor:
    """`linear` by the gemv, stream or tiles kernel, for x with its columns in the order of the codes."""
    out = torch.empty(*x.shape[:-1], weight.n // 2 if swiglu else weight.n, dtype=x.dtype, device=x.device)
    rows = out.view(-1, out.shape[-1])
    if isinstance(chosen, QuantizedTiles):  # the module needs Gluon
        tiles = import_module("kernels.linear_quantized_tiles").tiles
        tiles(x.reshape(-1, weight.k), weight, bias, rows, counters(x.device), chosen, swiglu)
    else:
        launch(x, weight, bias, rows, chosen, swiglu)
    return out


def launch(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    out: Tensor | None,
    chosen: QuantizedGemv | QuantizedStream,
    swiglu: bool = False,
    exchange: "Exchange | None" = None,
) -> None:
    """`linear_with` of few rows into out (rows, features), or, without bias and swiglu, pushed to all ranks (`kernels/linear_push.py`)."""
    # counters are allocated even if this layer needs none, because later ones may be captured
    x, shared = x.reshape(-1, weight.k), counters(x.device)
    if isinstance(chosen, QuantizedGemv):  # the modules need Gluon
        import_module("kernels.linear_quantized_gemv").gemv(x, weight, bias, out, chosen, swiglu, exchange)
    else:
        import_module("kernels.linear_quantized_stream").stream(x, weight, bias, out, shared, chosen, swiglu, exchange)


def scaled_linear(x: RowCodes, weight: Packed, bias: Tensor | None) -> Tensor:
    """The product of codes, (..., N)."""
    if x.codes.dtype == torch.int8:
        product = import_module("kernels.linear_int8").int8_linear  # needs Triton
        y = product(x.codes, x.scales, weight.codes.view(torch.int8), weight.scales, bias, x.dtype)
    else:
        y = scaled_linear_with(x, weight, bias, code_config(len(x.codes), weight.n, weight.k))
    return y.view(*x.shape[:-1], weight.n)


def scaled_linear_with(x: RowCodes, weight: Packed, bias: Tensor | None, chosen: Stream | None) -> Tensor:
    """`scaled_linear` of fp8 codes by the stream kernel, or by PyTorch's, (R, N)."""
    if chosen is None:
        scales = x.scales, weight.scales[None, :]
        codes = weight.codes.view(FP8).T
        return torch._scaled_mm(x.codes, codes, *scales, bias=bias, out_dtype=x.dtype, use_fast_accum=True)
    out = torch.empty(len(x.codes), weight.n, dtype=x.dtype, device=x.codes.device)
    stream = import_module("kernels.linear_stream").stream  # needs Gluon
    scales = x.scales, weight.scales
    stream(x.codes, weight.codes.view(FP8), bias, out, counters(out.device), chosen, False, scales)
    return out


def supports(dtype: torch.dtype) -> bool:
    """Whether this machine's GPUs have the kernels for inputs of this data type; else PyTorch computes the layers."""
    return has_stream() and dtype in (torch.bfloat16, torch.float16)


# --- kernels for many rows ----------------------------------------------------------------------------------------------------


def dequantize(weight: Packed, dtype: torch.dtype) -> Tensor:
    """The weight (N, K), with its columns in the order of the codes; each product is rounded once."""
    fmt, out = weight.format, torch.empty(weight.n, weight.k, dtype=dtype, device=weight.codes.device)
    codes = weight.codes.view(KINDS[fmt.kind])
    block = min(4096 if weight.k % 4096 == 0 else 2048, triton.next_power_of_2(weight.k))
    grid, sizes = (weight.n, triton.cdiv(weight.k, block)), (weight.k, weight.scales.shape[-1])
    constants = {"GROUP": fmt.group, "BITS": fmt.bits, "BLOCK": block, "num_warps": max(1, block // 512)}
    _dequantize[grid](codes, weight.scales, weight.zeros, out, *sizes, **constants)
    return out


@triton.jit
def _dequantize(codes, scales, zeros, out, K, scale_stride, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """One program for BLOCK features of a row. Codes are loaded as they lie, and put in order in registers."""
    PER_PAIR: tl.constexpr = 16 // BITS
    BYTES: tl.constexpr = BLOCK * BITS // 8
    GROUPS: tl.constexpr = BLOCK // GROUP if GROUP else 1
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    place = first * BITS // 8 + tl.arange(0, BYTES)
    found = tl.load(codes + row * (K * BITS // 8) + place, mask=place < K * BITS // 8, other=0.0)
    if BITS == 4:
        found = tl.join(found & 15, found >> 4).to(tl.float32) - 8
    # of a unit: thread of four, which of its two pairs of bytes, which code of a pair; see `_pairs`
    parts = tl.permute(tl.reshape(found.to(tl.float32), (BLOCK // (8 * PER_PAIR), 4, 2, PER_PAIR)), (0, 3, 1, 2))
    values = tl.reshape(parts, (GROUPS, BLOCK // GROUPS))
    if GROUP:
        group = first // GROUP + tl.arange(0, GROUPS)
        at = group.to(tl.int64) * scale_stride + row
        scale = tl.load(scales + at, mask=group * GROUP < K, other=0).to(tl.float32)[:, None]
        if zeros is not None:
            values -= tl.load(zeros + at, mask=group * GROUP < K, other=0).to(tl.float32)[:, None]
    else:
        scale = tl.load(scales + row)
    feature = first + tl.arange(0, GROUPS)[:, None] * (BLOCK // GROUPS) + tl.arange(0, BLOCK // GROUPS)[None, :]
    tl.store(out + row * K + feature, (values * scale).to(out.dtype.element_ty), mask=feature < K)
