"""SwiGLU and GEGLU (Shazeer, arXiv:2002.05202): silu(gate) * up or gelu(gate) * up of a fused projection."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import determinism, exact
from kernels.dispatch import as_rows, on_gpu, pdl_options, tl, triton
from kernels.row_codes import RowCodes, empty_codes, row_warps, store_codes

BLOCK = 1024  # values of a program: each thread loads 16 bytes of bf16 from each half


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (..., I) of gate_up (..., 2I), in which the gate's I features are first, in the same dtype.

    The kernel computes in fp32 and rounds once; the reference also rounds silu(gate)."""
    return _launched(gate_up, False) if on_gpu(gate_up) else swiglu_reference(gate_up)


def _launched(gate_up: Tensor, gelu: bool) -> Tensor:
    """`swiglu` or `geglu` by the kernel."""
    rows, size = as_rows(gate_up), gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (rows.shape[0], triton.cdiv(size, BLOCK))
        _swiglu[grid](rows, out, rows.stride(0), size, GELU=gelu, BLOCK=BLOCK, num_warps=4, **pdl_options(rows.device))
    return out


def swiglu_codes(gate_up: Tensor, gelu: bool = False) -> RowCodes:
    """`swiglu`, or with gelu `geglu`, in 8 bits, for I a multiple of 16 of at most `row_codes.MAX_SIZE`, on CUDA without autograd."""
    rows, size = as_rows(gate_up), gate_up.shape[-1] // 2
    out = empty_codes(torch.Size((*gate_up.shape[:-1], size)), gate_up)
    options = {"BLOCK": triton.next_power_of_2(size), "num_warps": row_warps(size), "GELU": gelu} | pdl_options(rows.device)
    _swiglu_codes[(len(rows),)](rows, out.codes, out.scales, rows.stride(0), size, **options)
    return out


def swiglu_reference(gate_up: Tensor) -> Tensor:
    def plain(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    if determinism.enabled():  # on a GPU the kernel's bits, also with autograd
        return exact.differentiable(swiglu if gate_up.is_cuda else exact.swiglu, plain, gate_up)
    return plain(gate_up)


def geglu(gate_up: Tensor) -> Tensor:
    """The same with gelu(gate), which has the tanh of the GELU's paper."""
    return _launched(gate_up, True) if on_gpu(gate_up) else geglu_reference(gate_up)


def geglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """gpt-oss's activation of gate_up (..., 2I): gate * sigmoid(1.702 * gate) * (up + 1), of values between -limit and limit; the gate
    has no lower limit."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-limit, limit) + 1)


@triton.jit
def _swiglu(gate_up, out, row_stride, size, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    product = _product(gate_up, row * row_stride, column, size, GELU, PDL)
    tl.store(out + row * size + column, product.to(out.dtype.element_ty), mask=column < size)


@triton.jit
def _swiglu_codes(gate_up, codes, scales, row_stride, size, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program for each row, which it holds in registers."""
    row = tl.program_id(0).to(tl.int64)
    product = _product(gate_up, row * row_stride, tl.arange(0, BLOCK), size, GELU, PDL)
    store_codes(product.to(gate_up.dtype.element_ty).to(tl.float32), codes, scales, row, size, BLOCK)


@triton.jit
def _product(gate_up, start, column, size, GELU: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pointers = gate_up + start + column
    gate = tl.load(pointers, mask=column < size, other=0.0).to(tl.float32)
    up = tl.load(pointers + size, mask=column < size, other=0.0).to(tl.float32)
    if GELU:  # (1 + tanh(z)) / 2 = sigmoid(2z)
        return gate * tl.sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)) * up
    return gate * tl.sigmoid(gate) * up
