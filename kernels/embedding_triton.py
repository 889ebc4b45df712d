"""The Triton kernel of `kernels/embedding.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dispatch import pdl_supported

BLOCK = 2048  # values of one program


@triton.jit
def _embedding_shard(tokens, weight, out, first_id, size, rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    local = tl.load(tokens + row) - first_id
    mine = (local >= 0) & (local < rows)
    values = tl.load(weight + local * size + column, mask=(column < size) & mine, other=0.0)
    tl.store(out + row * size + column, values, mask=column < size)


def embedding_shard(tokens: Tensor, weight: Tensor, first_id: int) -> Tensor:
    rows, size = weight.shape
    out = torch.empty(*tokens.shape, size, dtype=weight.dtype, device=weight.device)
    if out.numel():
        pdl = pdl_supported(weight.device)
        grid = (tokens.numel(), triton.cdiv(size, BLOCK))
        _embedding_shard[grid](
            tokens.contiguous(), weight, out, first_id, size, rows, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return out
