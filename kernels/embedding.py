"""Lookup in this rank's shard of a vocabulary-parallel embedding: zeros for other ranks' ids, so the sum is the embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import on_gpu, pdl_options, tl, triton

BLOCK = 2048  # values of one program


def embedding_shard(tokens: Tensor, weight: Tensor, first_id: int) -> Tensor:
    """Rows (..., C) of weight (V, C), which has ids first_id … first_id + V - 1, by tokens (...) int64; zeros for other ids."""
    if not on_gpu(weight):
        return embedding_shard_reference(tokens, weight, first_id)
    rows, size = weight.shape
    out = torch.empty(*tokens.shape, size, dtype=weight.dtype, device=weight.device)
    if out.numel():
        grid = (tokens.numel(), triton.cdiv(size, BLOCK))
        _embedding_shard[grid](
            tokens.contiguous(), weight, out, first_id, size, rows, BLOCK=BLOCK, num_warps=4, **pdl_options(weight.device)
        )
    return out


def embedding_shard_reference(tokens: Tensor, weight: Tensor, first_id: int) -> Tensor:
    local = tokens - first_id
    outside = (local < 0) | (local >= len(weight))
    return F.embedding(local.masked_fill(outside, 0), weight).masked_fill(outside[..., None], 0.0)


@triton.jit
def _embedding_shard(tokens, weight, out, first_id, size, rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    local = tl.load(tokens + row) - first_id
    is_local = (local >= 0) & (local < rows)
    values = tl.load(weight + local * size + column, mask=(column < size) & is_local, other=0.0)
    tl.store(out + row * size + column, values, mask=column < size)
