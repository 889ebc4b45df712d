"""The paged KV cache and attention over it, for a step with both prompt chunks and single new tokens.

Shapes: S attention slots, N blocks of P tokens, K key-value heads, H query heads, D head_dim. A step has T tokens of
several sequences in one row; B of them are the single new tokens (decode) of B sequences.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import SplitContext, causal_mask
from engine.scheduler import Chunk


class PagedCache:
    """Keys and values of all slots: (S, 2, N, P, K, D)."""

    def __init__(
        self,
        slots: int,
        n_blocks: int,
        block_size: int,
        n_kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.block_size = block_size
        self.keys_values = torch.zeros(slots, 2, n_blocks, block_size, n_kv_heads, head_dim, device=device, dtype=dtype)

    @staticmethod
    def bytes_per_block(slots: int, block_size: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return slots * 2 * block_size * n_kv_heads * head_dim * dtype.itemsize

    def step(self, chunks: List[Chunk], fed: List[int] | None = None) -> "PagedStep":
        """Lay out one step: decode chunks first, then prompt chunks (see `PagedStep.order`).

        fed: one token for each chunk, if the sequences do not have them yet.
        """
        return PagedStep(self, chunks, fed)


@dataclass(frozen=True)
class Span:
    """One prompt chunk: tokens first … last-1 of the step. Its last position in the sequence is stop-1."""

    first: int
    last: int
    stop: int
    blocks: Tensor  # (blocks,), those of the sequence up to `stop`


class PagedStep(SplitContext):
    """The inputs and the attention context of one forward pass.

    `order` has the chunks in the order of the step. `tokens` (1, T) and `positions` (T,) have the same order.
    """

    def __init__(self, cache: PagedCache, chunks: List[Chunk], fed: List[int] | None = None) -> None:
        self.cache, size = cache, cache.block_size
        device = cache.keys_values.device
        self.order = [c for c in chunks if c.count == 1] + [c for c in chunks if c.count > 1]
        self.n_decode = sum(c.count == 1 for c in chunks)
        tokens: list[int] = []
        positions: list[int] = []
        places: list[int] = []  # each token's index in the flattened cache
        self.spans: list[Span] = []
        for chunk in self.order:
            stop, blocks = chunk.start + chunk.count, chunk.sequence.blocks
            if chunk.count > 1:
                table = torch.tensor(blocks[: -(-stop // size)], device=device)
                self.spans.append(Span(len(tokens), len(tokens) + chunk.count, stop, table))
            tokens += chunk.sequence.tokens[chunk.start : stop]  # empty if the token is in `fed`
            positions += range(chunk.start, stop)
            places += [blocks[i // size] * size + i % size for i in range(chunk.start, stop)]
        self.tokens = torch.tensor([tokens if fed is None else fed], device=device)
        self.positions = torch.tensor(positions, device=device)
        self.places = torch.tensor(places, device=device)
        self._lay_out_decode(size, device)

    def _lay_out_decode(self, size: int, device: torch.device) -> None:
        """Block tables of the decode chunks, padded to the longest: (B, blocks). Padding is masked."""
        tables = [c.sequence.blocks[: c.start // size + 1] for c in self.order[: self.n_decode]]
        width = max(map(len, tables), default=0)
        self.tables = torch.tensor([t + [0] * (width - len(t)) for t in tables], device=device, dtype=torch.int64)
        self.masks: dict[int | None, Tensor] = {}  # by window: all layers with the same window share one

    def attend_split(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q (1, T, H, D), k and v (1, T, K, D), to (1, T, H, D)."""
        keys, values = self.cache.keys_values[slot]
        keys.view(-1, *k.shape[2:]).index_copy_(0, self.places, k[0])
        values.view(-1, *v.shape[2:]).index_copy_(0, self.places, v[0])
        out = torch.empty_like(q)
        if self.n_decode:
            out[0, : self.n_decode] = self._decode(q[0, : self.n_decode], keys, values, window)
        for span in self.spans:
            out[0, span.first : span.last] = self._prefill(q[0, span.first : span.last], keys, values, span, window)
        return out

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        batch, n_heads, head_dim = q.shape
        k, v = (self._gather(x, self.tables).transpose(1, 2) for x in (keys, values))  # (B, K, L, D)
        if window not in self.masks:
            self.masks[window] = causal_mask(self.positions[:batch], k.shape[2], window)[:, None, None]  # (B, 1, 1, L)
        grouped = q.view(batch, k.shape[1], -1, head_dim)  # a KV head's query heads in the place of tokens
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=self.masks[window]).reshape(batch, n_heads, head_dim)

    def _gather(self, x: Tensor, tables: Tensor) -> Tensor:
        """(N, P, K, D) and block tables (B, n) to (B, n * P, K, D)."""
        return x.index_select(0, tables.flatten()).view(len(tables), -1, *x.shape[2:])

    def _prefill(self, q: Tensor, keys: Tensor, values: Tensor, span: Span, window: int | None) -> Tensor:
        k, v = (self._gather(x, span.blocks[None])[:, : span.stop].transpose(1, 2) for x in (keys, values))
        q = q[None].transpose(1, 2)  # (1, H, T, D)
        if span.stop == q.shape[2] and (window is None or window >= span.stop):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mask = causal_mask(self.positions[span.first : span.last], span.stop, window)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)
