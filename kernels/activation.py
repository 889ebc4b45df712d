"""SwiGLU (Shazeer, arXiv:2002.05202): silu(gate) * up of a fused projection."""

import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import on_gpu


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up (..., 2I), the gate's I features first, to silu(gate) * up (..., I) in the same dtype.

    The kernel computes in fp32 and rounds once; the reference rounds silu(gate), too."""
    if not on_gpu(gate_up):
        return swiglu_reference(gate_up)
    from kernels import activation_triton

    return activation_triton.swiglu(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
