"""Triton kernels of `kernels/norm.py`: one program a row, the whole row in registers.

Weights are constant, so they are loaded before the kernel waits for the one before it (programmatic dependent launch).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dispatch import pdl_supported

MAX_SIZE = 65536


@triton.jit
def _normalize(x, weight, eps, C: tl.constexpr):
    """x (BLOCK,) fp32, zero beyond C."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / C + eps) * weight


@triton.jit
def _rms_norm(x, weight, out, row_stride, eps, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < C
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    normed = _normalize(values, scale, eps, C)
    tl.store(out + row * C + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(
    x,
    update,
    weight,
    total,
    out,
    row_stride,
    update_stride,
    eps,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < C
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    a = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(update + row * update_stride + column, mask=inside, other=0.0).to(tl.float32)
    rounded = (a + b).to(total.dtype.element_ty)
    tl.store(total + row * C + column, rounded, mask=inside)
    normed = _normalize(rounded.to(tl.float32), scale, eps, C)
    tl.store(out + row * C + column, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, out = as_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        pdl = pdl_supported(x.device)
        _rms_norm[(rows.shape[0],)](
            rows, weight.contiguous(), out, rows.stride(0), eps, PDL=pdl, launch_pdl=pdl, **_launch(rows.shape[1])
        )
    return out


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float, early: bool = True) -> tuple[Tensor, Tensor]:
    rows, updates = as_rows(x), as_rows(update.expand_as(x))
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if rows.shape[0]:
        pdl = pdl_supported(x.device)
        strides = rows.stride(0), updates.stride(0)
        launch = _launch(rows.shape[1]) | {"launch_pdl": pdl and early}
        _add_rms_norm[(rows.shape[0],)](rows, updates, weight.contiguous(), total, out, *strides, eps, PDL=pdl, **launch)
    return total, out


def as_rows(x: Tensor) -> Tensor:
    """(..., n) as (R, n) with consecutive columns; rows may lie apart. A copy only where no view will do."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(size: int) -> dict[str, int]:
    if size > MAX_SIZE:
        raise ValueError(f"a row of {size} values does not fit a program of {MAX_SIZE}")
    block = triton.next_power_of_2(size)
    # Two 16-byte loads of bf16 a thread: enough in flight for a lone row, and registers for two programs on an SM.
    return {"C": size, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
