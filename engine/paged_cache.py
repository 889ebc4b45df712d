"""The paged KV cache, and attention over it for one step of the engine.

Shapes: A attention modules (slots), N blocks of P tokens, K key-value heads, H query heads, D head_dim. A step has T rows: the
tokens of S spans, one span a sequence, one after the other.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import determinism, exact
from kernels.dispatch import on_gpu
from kernels.paged_attention import paged_decode, paged_prefill
from kernels.rope_cache import rope_store, store
from layers.attention import AttentionContext, Heads, attend_to_all, attend_with_sinks, causal_mask

CODES = torch.float8_e4m3fn
SCALES = torch.float32

SHORT = 16  # rows of a span up to which spans share a batch


class Rows(NamedTuple):
    """Keys or values of a slot, (N * P, K, D), and their scales (N, K, P), if they are codes."""

    held: Tensor
    scales: Tensor | None


class PagedCache:
    """Keys and values of all slots: (A, 2, N, P, K, D). If they are codes, scales (A, 2, N, K, P) fp32: one for each token and
    head, so that a token's codes do not depend on the step in which it is computed."""

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
        self.scales: Tensor | None = None
        if dtype == CODES:
            self.scales = torch.ones(slots, 2, n_blocks, n_kv_heads, block_size, device=device, dtype=SCALES)

    def rows(self, slot: int) -> tuple[Rows, Rows]:
        """Keys and values of a slot."""
        keys, values = self.keys_values[slot].flatten(1, 2)
        key_scales, value_scales = (None, None) if self.scales is None else self.scales[slot]
        return Rows(keys, key_scales), Rows(values, value_scales)

    def clear(self, index: Tensor) -> None:
        """Set the keys and values of these blocks to zero. index: int64, on the cache's device."""
        self.keys_values.view(torch.uint8).index_fill_(2, index, 0)
        if self.scales is not None:
            self.scales.index_fill_(2, index, 1.0)

    def invent(self) -> None:
        """Fill the cache with random keys and values."""
        generator = torch.Generator(self.keys_values.device).manual_seed(0)
        if self.scales is None:
            self.keys_values.normal_(generator=generator)
        else:
            self.keys_values.view(torch.uint8).random_(0, 0x78, generator=generator)  # positive codes up to 256
            self.scales.fill_(0.01)

    @staticmethod
    def bytes_per_block(slots: int, block_size: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return slots * 2 * block_size * n_kv_heads * (head_dim * dtype.itemsize + (SCALES.itemsize if dtype == CODES else 0))


class PagedContext(AttentionContext):
    """Attention of a step's spans to the cache, which first gets the step's own keys and values."""

    def __init__(
        self,
        cache: PagedCache,
        positions: Tensor,
        cache_rows: Tensor,
        tables: Tensor,
        lengths: Tensor,
        starts: Tensor | None,
        bound: int,
    ) -> None:
        """positions (T,) int64; cache_rows (T,) int64: each token's row of the cache (block * P + offset), -1 for padding; tables
        (S, W) int32: each sequence's blocks; lengths (S,) int32: the tokens that a span's last row sees, 0 for padding; starts
        (S + 1,) int32: the first row of each span, or None if each span is one row. bound: at least the longest length if
        `starts` is None, else at least the rows of the longest span."""
        self.cache, self.positions, self.cache_rows = cache, positions, cache_rows
        self.tables, self.lengths, self.starts, self.bound = tables, lengths, starts, bound
        self._schedules: dict[int, Tensor] = {}  # of prefill, the same for all layers
        self._bounds: list[int] | None = None  # `starts` on the host, for `_attend_to_all`
        self._on_cpu = None if on_gpu(positions) else _Spans(self)

    def attend(self, heads: Heads, qkv: Tensor, frequencies: Tensor) -> Tensor:
        """(1, T, (H + 2K) * D) to (1, T, H * D)."""
        if not heads.causal:
            return self._attend_to_all(heads, qkv, frequencies)
        if self._on_cpu is not None:
            return self._attend_on_cpu(self._on_cpu, heads, qkv, frequencies)
        keys, values = self.cache.keys_values[heads.slot]
        scales = None if self.cache.scales is None else self.cache.scales[heads.slot]
        q = self._store(heads, qkv[0], frequencies, keys, values, scales)
        if self.starts is None:
            out = paged_decode(q, keys, values, self.tables, self.lengths, heads.window, self.bound, scales, heads.sinks)
        else:
            spans = self.starts, self.lengths, heads.window, self.bound
            out = paged_prefill(q, keys, values, self.tables, *spans, self._schedules, scales, heads.sinks)
        return out.flatten(1)[None]

    def _attend_to_all(self, heads: Heads, qkv: Tensor, frequencies: Tensor) -> Tensor:
        """In both directions. Each span is a whole prompt, so that nothing has to be stored. Padding gets zeros."""
        if self._bounds is None:
            assert self.starts is not None, "a decode step has no whole prompts"
            self._bounds = self.starts.tolist()
        q, k, v = (x.transpose(1, 2) for x in self.split(heads, qkv, frequencies))
        out = torch.zeros_like(q)
        for start, stop in pairwise(self._bounds):
            if start < stop:
                out[:, :, start:stop] = attend_to_all(*(x[:, :, start:stop] for x in (q, k, v)))
        return out.transpose(1, 2).flatten(-2)

    def _store(
        self, heads: Heads, qkv: Tensor, frequencies: Tensor, keys: Tensor, values: Tensor, scales: Tensor | None
    ) -> Tensor:
        """Rotate qkv (T, (H + 2K) * D), write its keys and values into the cache, return its queries (T, H, D)."""
        q_norm, k_norm, eps = None, None, 0.0
        if heads.q_norm is not None:
            q_norm, k_norm, eps = heads.q_norm.scale, heads.k_norm.scale, heads.q_norm.eps
        rows = keys.flatten(0, 1), values.flatten(0, 1)
        q = rope_store(qkv.contiguous(), self.positions, frequencies, self.cache_rows, *rows, q_norm, k_norm, eps, scales)
        return heads.scaled(q, frequencies)

    def _attend_on_cpu(self, spans: "_Spans", heads: Heads, qkv: Tensor, frequencies: Tensor) -> Tensor:
        """The same with PyTorch. A step on a CPU has no padding."""
        q, k, v = self.split(heads, qkv, frequencies)
        keys, values = self.cache.rows(heads.slot)
        store(*keys, self.cache_rows, k[0])
        store(*values, self.cache_rows, v[0])
        return spans.attend(q[0], keys, values, heads.window, heads.sinks).flatten(1)[None]


class _Spans:
    """How a step's rows read the cache on a CPU; the same for all layers. Short spans (decode and drafts) of equally many rows are
    computed in one batch, longer ones (prefill) one by one."""

    def __init__(self, context: PagedContext) -> None:
        lengths, tables, size = context.lengths.tolist(), context.tables.numpy(), context.cache.block_size
        starts = range(len(lengths) + 1) if context.starts is None else context.starts.tolist()
        spans: dict[int, list[int]] = {}
        for s in range(len(lengths)):
            spans.setdefault(starts[s + 1] - starts[s], []).append(s)
        self.short = [
            _Short(
                count,
                [starts[s] for s in of],
                tables if len(of) == len(lengths) else tables[of],
                [lengths[s] for s in of],
                size,
            )
            for count, of in spans.items()
            if 0 < count <= SHORT
        ]
        self.long = [
            (slice(starts[s], starts[s + 1]), _Reader(tables[s : s + 1], lengths[s], size))
            for count, of in spans.items()
            for s in of
            if count > SHORT
        ]

    def attend(self, q: Tensor, keys: Rows, values: Rows, window: int | None, sinks: Tensor | None) -> Tensor:
        """q (T, H, D) to (T, H, D)."""
        if len(self.short) == 1 and not self.long:
            return self.short[0].attend(q, keys, values, window, sinks)
        out = torch.empty_like(q)
        for batch in self.short:
            out[batch.rows] = batch.attend(q[batch.rows], keys, values, window, sinks)
        for rows, read in self.long:
            out[rows] = self._prefill(q[rows], read(keys, q.dtype), read(values, q.dtype), window, sinks)
        return out

    @staticmethod
    def _prefill(q: Tensor, keys: Tensor, values: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
        """q (n, H, D), the last n of L positions; keys and values (1, K, L, D)."""
        n, length = len(q), keys.shape[2]
        q = q[None].transpose(1, 2)  # (1, H, n, D)
        if n == length and (window is None or window >= length) and sinks is None and not determinism.enabled():
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        else:
            mask = causal_mask(torch.arange(length - n, length), length, window)
            out = _masked(q, keys, values, mask, None if sinks is None else sinks[:, None])
        return out[0].transpose(0, 1)


class _Short:
    """A batch of B spans of n rows each."""

    def __init__(self, count: int, starts: list[int], tables: np.ndarray, lengths: list[int], size: int) -> None:
        """count: n. starts: their first rows. tables (B, W): their sequences' blocks of `size` tokens. lengths: of these."""
        self.count, self.read, self.lengths = count, _Reader(tables, max(lengths), size), lengths
        self.rows = [start + i for start in starts for i in range(count)]
        self._masks: dict[int | None, Tensor] = {}  # by window

    def attend(self, q: Tensor, keys: Rows, values: Rows, window: int | None, sinks: Tensor | None) -> Tensor:
        """q (B * n, H, D), the last rows of each sequence, to (B * n, H, D)."""
        read, n_kv_heads, head_dim = self.read, keys.held.shape[1], q.shape[-1]
        # a KV head's query heads in the place of tokens, (B, K, n * G, D)
        grouped = q.view(len(self.lengths), self.count, n_kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
        first, mask = 0, None
        alike = self.count == 1 and len(set(self.lengths)) == 1  # all see the same positions, so there is no mask
        if alike and not determinism.enabled():
            first = 0 if window is None else max(0, read.length - window)
        else:
            mask = self._mask(window, grouped.shape[2] // self.count)
        if sinks is not None:  # of the rows of `grouped`
            sinks = sinks.view(n_kv_heads, 1, -1).expand(-1, self.count, -1).flatten(1)
        out = _masked(grouped, read(keys, q.dtype, first), read(values, q.dtype, first), mask, sinks)
        return out.unflatten(2, (self.count, -1)).transpose(1, 2).reshape(q.shape)

    def _mask(self, window: int | None, heads: int) -> Tensor:
        """(B, 1, n * heads, L)"""
        if window not in self._masks:
            last = torch.tensor(self.lengths)[:, None] - torch.arange(self.count, 0, -1)
            seen = causal_mask(last.flatten(), self.read.length, window).view(len(self.lengths), 1, self.count, 1, -1)
            self._masks[window] = seen.expand(-1, -1, -1, heads, -1).flatten(2, 3)
        return self._masks[window]


def _masked(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
    if sinks is not None:
        return attend_with_sinks(q, keys, values, mask, sinks)
    if determinism.enabled():
        assert mask is not None
        return exact.attention(q, keys, values, mask)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


class _Reader:
    """Reads keys or values of B sequences: (N * P, K, D) to (B, K, L, D), of the positions first … length-1. Codes become `dtype`.

    Where each sequence's blocks are consecutive, and the sequences lie at equal distances, it is a view; else a copy."""

    def __init__(self, tables: np.ndarray, length: int, size: int) -> None:
        """tables (B, W): the sequences' blocks of `size` tokens."""
        self.length = length
        blocks = tables[:, : -(-length // size)]
        batch, width = blocks.shape
        begin, last = int(blocks[0, 0]), int(blocks[-1, -1])
        distance = int(blocks[1, 0]) - begin if batch > 1 else 0
        is_view = distance >= 0 and last == begin + (batch - 1) * distance + width - 1
        if is_view and batch * width > 2:  # with at most two blocks, the first and the last say it all
            is_view = bool((blocks == begin + distance * np.arange(batch)[:, None] + np.arange(width)).all())
        self.batch, self.size, self.begin, self.distance = batch, size, begin * size, distance * size  # the last two in rows
        self.is_view, self.blocks = is_view, torch.from_numpy(np.ascontiguousarray(blocks, dtype=np.int64))

    def __call__(self, rows: Rows, dtype: torch.dtype, first: int = 0) -> Tensor:
        held = self._held(rows.held, first)
        if rows.scales is None:
            return held
        scales = rows.scales[self.blocks].transpose(1, 2).flatten(2)[..., first : self.length]  # (B, K, L)
        return (held.float() * scales[..., None]).to(dtype)

    def _held(self, x: Tensor, first: int) -> Tensor:
        _, heads, head_dim = x.shape
        if not self.is_view:
            # a block at a time, not a row
            found = x.view(-1, self.size, heads, head_dim).index_select(0, self.blocks.flatten())
            return found.view(self.batch, -1, heads, head_dim)[:, first : self.length].transpose(1, 2)
        row = heads * head_dim
        shape = self.batch, heads, self.length - first, head_dim
        return x.as_strided(shape, (self.distance * row, head_dim, row, 1), x.storage_offset() + (self.begin + first) * row)
