"""RMSNorm for training on a GPU: PyTorch's forward, and a backward pass in one kernel.

PyTorch's own backward reads the rows twice, and its kernel for the weight's gradient takes most of the time where rows are short.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.dispatch import as_rows
from kernels.optional_triton import tl, triton

WARPS_PER_SM = 16  # of all programs: enough loads in flight


class TrainedRMSNorm(torch.autograd.Function):
    """`apply(x, weight, eps)`: x (..., C), weight (C,), on CUDA."""

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
