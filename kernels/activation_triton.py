"""The Triton kernel of `kernels/activation.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dispatch import pdl_supported
from kernels.norm_triton import as_rows

BLOCK = 1024  # values of one program: one 16-byte load of bf16 a thread from each half


@triton.jit
def _swiglu(gate_up, out, row_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = gate_up + row * row_stride + column
    gate = tl.load(place, mask=column < size, other=0.0).to(tl.float32)
    up = tl.load(place + size, mask=column < size, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * size + column, product.to(out.dtype.element_ty), mask=column < size)


def swiglu(gate_up: Tensor) -> Tensor:
    rows, size = as_rows(gate_up), gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        pdl = pdl_supported(gate_up.device)
        grid = (rows.shape[0], triton.cdiv(size, BLOCK))
        _swiglu[grid](rows, out, rows.stride(0), size, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl)
    return out
