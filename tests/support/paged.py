"""Sequences that are computed part by part through a paged cache, as the engine does."""

import random

import torch
from torch import Tensor

from engine.paged_cache import PagedCache, PagedContext
from model import Transformer

CPU = torch.device("cpu")


class CachedSequences:
    """`batch` sequences of equal lengths on a CPU. Their blocks lie one after the other in the cache, or in any order."""

    def __init__(self, model: Transformer, batch: int, length: int) -> None:
        """length: the most tokens of a sequence."""
        size = random.choice([1, 4, 16])
        width = -(-length // size)
        blocks = list(range(batch * width + 2))
        if random.random() < 0.5:
            random.shuffle(blocks)
        dtype = model.norm.weight.dtype
        head_dim = model.config.head_dim
        self.cache = PagedCache(model.attention_slots, len(blocks), size, model.n_kv_heads, head_dim, CPU, dtype)
        self.model, self.tables = model, torch.tensor(blocks[1 : 1 + batch * width]).view(batch, width)
        self.length = 0

    def context(self, count: int) -> PagedContext:
        """For the next `count` tokens of each sequence, all in one row."""
        batch, size = len(self.tables), self.cache.block_size
        own = torch.arange(self.length, self.length + count)
        self.length += count
        cache_rows = (self.tables[:, own // size] * size + own % size).flatten()
        lengths = torch.full((batch,), self.length, dtype=torch.int32)
        starts = torch.arange(0, batch * count + 1, count, dtype=torch.int32)
        if count == 1 and random.random() < 0.5:
            return PagedContext(self.cache, own.repeat(batch), cache_rows, self.tables.int(), lengths, None, self.length)
        return PagedContext(self.cache, own.repeat(batch), cache_rows, self.tables.int(), lengths, starts, count)

    def logits(self, tokens: Tensor) -> Tensor:
        """(B, T) next tokens of each sequence to (B, T, V)."""
        return self.model(tokens.reshape(1, -1), self.context(tokens.shape[1])).view(*tokens.shape, -1)
