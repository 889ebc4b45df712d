"""Rows of this rank's part of a vocabulary-parallel embedding, zero for the ids of other ranks."""

import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import on_gpu


def embedding_shard(tokens: Tensor, weight: Tensor, first_id: int) -> Tensor:
    """tokens (...) int64; weight (V, C), of the ids first_id … first_id + V - 1. (..., C), a partial sum over ranks."""
    if not on_gpu(weight):
        return embedding_shard_reference(tokens, weight, first_id)
    from kernels import embedding_triton

    return embedding_triton.embedding_shard(tokens, weight, first_id)


def embedding_shard_reference(tokens: Tensor, weight: Tensor, first_id: int) -> Tensor:
    local = tokens - first_id
    foreign = (local < 0) | (local >= len(weight))
    return F.embedding(local.masked_fill(foreign, 0), weight).masked_fill(foreign[..., None], 0.0)
