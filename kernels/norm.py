"""RMSNorm, alone and behind the residual addition that feeds it (Zhang & Sennrich, arXiv:1910.07467).

The functions ending in `_reference` define the arithmetic; on a GPU without autograd a Triton kernel does the same in one pass.
"""

import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import on_gpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim, statistics in fp32, rounded once: x (..., C) and weight (C,) to (..., C).

    The kernel raises ValueError where C exceeds 65,536."""
    if not on_gpu(x):
        return rms_norm_reference(x, weight, eps)
    from kernels import norm_triton

    return norm_triton.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float, early: bool = True) -> tuple[Tensor, Tensor]:
    """(x + update, rms_norm(x + update)), both (..., C) in x's dtype; neither input is overwritten.

    The sum is rounded to x's dtype before its norm is taken, as if the two had been computed one after the other. early: the
    kernel may start while the one before it drains; False behind a wait for another stream (see `dispatch.rejoin`)."""
    if not on_gpu(x):
        return add_rms_norm_reference(x, update, weight, eps)
    from kernels import norm_triton

    return norm_triton.add_rms_norm(x, update, weight, eps, early)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_reference(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + update
    return total, rms_norm_reference(total, weight, eps)
