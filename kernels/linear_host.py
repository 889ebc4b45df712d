"""Quantized linear layers on CPUs by PyTorch's operators, which read codes of 8 or 4 bits and convert them in registers.

For inputs in bf16: the operators take other data types, too, but there without vector code. Products are added in fp32 and rounded
once.

int8    up to INT8_ROWS rows, `torch._weight_int8pack_mm`; more rows convert the weight to bf16 first, which is then faster
int4    any number of rows, `torch._weight_int4pack_mm_for_cpu`, whose layout of the codes depends on the processor
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

INT8_ROWS = 8
INT4_GROUPS = (32, 64, 128, 256)  # what the operator takes
UNIT = 16  # the operators read so many features at once, and do not check the rest
NAMES = ("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu")


@dataclass(frozen=True)
class HostPacked:
    """A weight (N, K) as the operators read it.

    codes: (N, K) int8, or of 4 bits in the operator's layout. scales: (N,) bf16 or fp32, or of groups (K / group, N, 2) bf16: what a
    code less 8 is multiplied by, and what is added. group: 0 for int8.
    """

    codes: Tensor
    scales: Tensor
    group: int = 0


def supports(dtype: torch.dtype) -> bool:
    """Whether this PyTorch has the operators for inputs of this data type; else the layers are computed as they are defined."""
    return dtype == torch.bfloat16 and all(hasattr(torch, name) for name in NAMES)


def multiplies_bf16() -> bool:
    """Whether this processor has instructions for products in bf16, with which reading half the bytes of fp32 saves time."""
    known = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(is_supported is not None and is_supported() for is_supported in known)


def pack(codes: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None) -> HostPacked | None:
    """A weight of neighbouring groups as `HostPacked`; None if the operators cannot read it, or not as accurately.

    codes: (N, K) int8, or packed, which tells 4 bits. values: the same as (N, K) int8. scales, zeros: (N, G)."""
    (n, k), groups = values.shape, scales.shape[1]
    if codes.dtype == torch.int8:
        fits = groups == 1 and zeros is None and n % UNIT == 0 and k % UNIT == 0
        return HostPacked(codes, scales[:, 0].contiguous()) if fits else None
    if codes.dtype != torch.uint8 or n % UNIT or k // groups not in INT4_GROUPS or scales.dtype == torch.float32:
        return None  # scales in fp32 are more accurate than the operator's
    added = torch.zeros_like(scales) if zeros is None else -zeros * scales.float()
    grid = torch.stack([scales.T, added.T], -1).to(torch.bfloat16).contiguous()
    return HostPacked(torch._convert_weight_to_int4pack_for_cpu((values + 8).int(), 1), grid, k // groups)


def linear(x: Tensor, weight: HostPacked) -> Tensor:
    """(..., K) to (..., N) in bf16, for x in bf16 on a CPU."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    n = weight.scales.shape[1] if weight.group else len(weight.scales)
    if weight.group:
        out = torch._weight_int4pack_mm_for_cpu(rows, weight.codes, weight.group, weight.scales)
    elif len(rows) > INT8_ROWS:
        out = F.linear(rows, weight.codes.to(x.dtype)).mul_(weight.scales)
    elif weight.scales.dtype == x.dtype:
        out = torch._weight_int8pack_mm(rows, weight.codes, weight.scales)
    else:
        out = torch._weight_int8pack_mm(rows, weight.codes, torch.ones_like(weight.scales, dtype=x.dtype)).mul_(weight.scales)
    return out.view(*x.shape[:-1], n)
