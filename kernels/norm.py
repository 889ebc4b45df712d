"""RMSNorm (Zhang & Sennrich, arXiv:1910.07467): alone, after the residual addition, then also as 8-bit codes, and its gradients.

The functions ending in `_reference` define the arithmetic. On a GPU without autograd, one Triton kernel does it in one pass.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import determinism, exact
from kernels.dispatch import as_rows, on_gpu, pdl_options, tl, triton
from kernels.row_codes import RowCodes, empty_codes, store_codes

MAX_SIZE = 65536
WARPS_PER_SM = 16  # of all programs of the backward pass: enough loads in flight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim, computed in fp32 and rounded once: x (..., C) and weight (C,) to (..., C).

    The kernel raises ValueError if C exceeds MAX_SIZE."""
    if not on_gpu(x):
        return rms_norm_reference(x, weight, eps)
    rows, out = as_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        options = _options(rows.shape[1]) | pdl_options(x.device)
        _rms_norm[(len(rows),)](rows, None, weight.contiguous(), None, out, None, rows.stride(0), None, eps, **options)
    return out


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float, early: bool = True) -> tuple[Tensor, Tensor]:
    """(x + update, rms_norm(x + update)), both (..., C) in x's dtype; neither input is overwritten.

    The sum is rounded to x's dtype before the norm, as by two separate operations. early: whether the kernel may start before
    the previous one has finished; False after a join with another stream (see `dispatch.rejoin`)."""
    if not on_gpu(x):
        return add_rms_norm_reference(x, update, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _add_norm(x, update, weight, eps, early, out, None), out


def add_rms_norm_codes(x: Tensor, update: Tensor, weight: Tensor, eps: float, early: bool = True) -> tuple[Tensor, RowCodes]:
    """`add_rms_norm` with the norm in 8 bits, for C a multiple of 16, on CUDA without autograd."""
    out = empty_codes(x.shape, x)
    return _add_norm(x, update, weight, eps, early, out.codes, out.scales), out


def _add_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float, early: bool, out: Tensor, scales: Tensor | None) -> Tensor:
    """The sum; its norm is stored in `out`, as codes if there are scales."""
    rows, updates, total = as_rows(x), as_rows(update.expand_as(x)), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        strides, pdl = (rows.stride(0), updates.stride(0)), pdl_options(x.device)
        options = _options(rows.shape[1]) | pdl | {"launch_pdl": pdl["PDL"] and early}
        _rms_norm[(len(rows),)](rows, updates, weight.contiguous(), total, out, scales, *strides, eps, **options)
    return total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    def plain(x: Tensor, weight: Tensor) -> Tensor:
        if weight.dtype != x.dtype:
            return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)

    if determinism.enabled():  # on a GPU the kernel's bits, also with autograd
        return exact.differentiable(partial(rms_norm if x.is_cuda else exact.rms_norm, eps=eps), plain, x, weight)
    trained = x.is_cuda and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if trained and x.shape[-1] <= MAX_SIZE and x.dtype != torch.float64:
        return TrainedRMSNorm.apply(x, weight, eps)
    return plain(x, weight)


def add_rms_norm_reference(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + update
    return total, rms_norm_reference(total, weight, eps)


@triton.jit
def _rms_norm(
    x, update, weight, total, out, scales, x_stride, update_stride, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each row, which it holds in registers. A row whose squares overflow becomes NaN: zeros would look like a
    result. If update is not None, total = x + update is normalized. If scales is
    not None, out gets codes."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < C
    # loaded before the wait for the previous kernel, because no kernel writes weights
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if update is not None:
        values += tl.load(update + row * update_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * C + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    square = tl.sum(values * values, axis=0) / C
    normed = values * (tl.rsqrt(square + eps) + square * 0.0) * scale
    if scales is None:
        tl.store(out + row * C + column, normed.to(out.dtype.element_ty), mask=inside)
    else:
        store_codes(normed.to(x.dtype.element_ty).to(tl.float32), out, scales, row, C, BLOCK)


def _options(size: int) -> dict[str, Any]:
    if size > MAX_SIZE:
        raise ValueError(f"RMSNorm of rows of {size} values; the kernel supports at most {MAX_SIZE}")
    return {"C": size, "BLOCK": triton.next_power_of_2(size), "num_warps": row_warps(size)}


def row_warps(size: int) -> int:
    """Warps of a program that normalizes a row of `size` values; with others, the squares are added in another order."""
    # 16 values a thread, two 16-byte loads of bf16: enough loads in flight for one row, and two programs fit on an SM
    return min(max(triton.next_power_of_2(size) // 512, 1), 16)


# --- training --------------------------------------------------------------------------------------------------------------


class TrainedRMSNorm(torch.autograd.Function):
    """For training on a GPU: PyTorch's forward, and a backward pass in one kernel. `apply(x, weight, eps)`: x (..., C), weight (C,).

    PyTorch's own backward reads the rows twice, and its kernel for the weight's gradient takes most of the time where rows are short.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return *rms_norm_backward(x, weight, gradient, ctx.eps), None


def rms_norm_backward(x: Tensor, weight: Tensor, gradient: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight, in their dtypes, from that of the norm: x and gradient (..., C), weight (C,). All sums are fp32."""
    rows, gradients = as_rows(x), as_rows(gradient)
    count, size = rows.shape
    block = triton.next_power_of_2(size)
    warps = min(max(block // 256, 1), 16)
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    programs = max(1, min(count, sms * WARPS_PER_SM // warps))
    x_gradient = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    _rms_norm_backward[(programs,)](
        rows, gradients, weight.contiguous(), x_gradient, parts, count, rows.stride(0), gradients.stride(0), eps,
        C=size, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return x_gradient, parts.sum(0).to(weight.dtype)


@triton.jit
def _rms_norm_backward(
    x, gradient, weight, x_gradient, parts, rows, x_stride, gradient_stride, eps, C: tl.constexpr, BLOCK: tl.constexpr
):
    """With n = x / rms(x): dweight = sum of gradient * n over the rows, of which each program adds up some, and
    dx = (gradient * weight - n * mean(gradient * weight * n)) / rms(x)."""
    program, programs, column = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, BLOCK)
    inside = column < C
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, programs):
        values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(values * values, axis=0) / C + eps)
        normed = values * inverse
        part += slope * normed
        slope *= scale
        slope = (slope - normed * (tl.sum(slope * normed, axis=0) / C)) * inverse
        tl.store(x_gradient + row * C + column, slope.to(x_gradient.dtype.element_ty), mask=inside)
    tl.store(parts + program * C + column, part, mask=inside)
