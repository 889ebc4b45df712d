"""Attention without a cache and with a contiguous cache. `model.py` uses only the interface `AttentionContext`.

Shapes: B sequences, T tokens a sequence in this forward, L tokens cached, H query heads, K key-value heads, D head_dim.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UserError


class HeadNorm(Protocol):
    """An RMSNorm of single heads."""

    eps: float

    @property
    def weight(self) -> Tensor:
        """(D,)"""
        ...


class Heads(Protocol):
    """The part of an attention module that a context uses. `slot` is the module's number on this rank. `window` limits a query
    to the last `window` tokens. `rope_factor` multiplies queries and keys where they are rotated; a context may multiply the
    queries alone by its square instead."""

    slot: int
    window: int | None
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_factor: float

    @property
    def q_norm(self) -> "HeadNorm | None": ...

    @property
    def k_norm(self) -> "HeadNorm | None":
        """Set if `q_norm` is set, else None."""
        ...

    def split(self, qkv: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, (H + 2K) * D) to q (B, T, H, D), k and v (B, T, K, D), rotated by cosines and sines (T, 1, D / 2)."""
        ...


class AttentionContext(ABC):
    """What one forward pass needs to attend to the tokens before it."""

    @abstractmethod
    def attend(self, heads: Heads, qkv: Tensor, frequencies: Tensor) -> Tensor:
        """Causal attention of the queries in qkv (B, T, (H + 2K) * D) to the slot's cached keys and values and to those in qkv.

        frequencies: (D / 2,) fp32, radians a token. Returns (B, T, H * D).
        """


class SplitContext(AttentionContext):
    """A context that first splits and rotates the heads and then attends, both with PyTorch."""

    positions: Tensor  # (T,) int64, of this forward's tokens, the same for every sequence
    _rope: tuple[Tensor, Tensor] | None = None  # the same for every layer

    def rope(self, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Cosines and sines of this forward's positions, (T, 1, D / 2) fp32 each, times `factor`."""
        if self._rope is None:
            angles = self.positions[:, None, None].float() * frequencies
            self._rope = angles.cos() * factor, angles.sin() * factor
        return self._rope

    def attend(self, heads: Heads, qkv: Tensor, frequencies: Tensor) -> Tensor:
        q, k, v = heads.split(qkv, self.rope(frequencies, heads.rope_factor))
        return self.attend_split(heads.slot, q, k, v, heads.window).flatten(-2)

    @abstractmethod
    def attend_split(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """Attention of rotated q (B, T, H, D) and k (B, T, K, D), and v (B, T, K, D): (B, T, H, D)."""


def causal_mask(positions: Tensor, length: int, window: int | None) -> Tensor:
    """(T, length) bool: which of the keys 0 … length-1 the query at each position may attend to."""
    keys = torch.arange(length, device=positions.device)
    seen = keys <= positions[:, None]
    return seen if window is None else seen & (keys > positions[:, None] - window)


class Causal(SplitContext):
    """No cache: T tokens from position 0, for training and scoring."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.positions = torch.arange(length, device=device)

    def attend_split(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if window is None or window >= len(self.positions):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mask = causal_mask(self.positions, len(self.positions), window)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)


class ContiguousCache:
    """Keys and values of B sequences of equal length, in one tensor a slot: (B, K, max_len, D)."""

    def __init__(
        self,
        slots: int,
        batch: int,
        n_kv_heads: int,
        max_len: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (slots, 2, batch, n_kv_heads, max_len, head_dim)
        self.keys_values = torch.zeros(shape, device=device, dtype=dtype)
        self.max_len, self.length = max_len, 0

    def append(self, tokens: int) -> "CacheStep":
        """Reserve the next `tokens` positions for one forward pass."""
        if self.length + tokens > self.max_len:
            raise UserError(f"{self.length + tokens} tokens do not fit a KV cache of {self.max_len}; allow a longer context")
        start, self.length = self.length, self.length + tokens
        return CacheStep(self, start, self.length)


class CacheStep(SplitContext):
    """One forward pass over positions start … stop-1 of a `ContiguousCache`."""

    def __init__(self, cache: ContiguousCache, start: int, stop: int) -> None:
        self.cache, self.start, self.stop = cache, start, stop
        self.positions = torch.arange(start, stop, device=cache.keys_values.device)
        self._masks: dict[int | None, Tensor] = {}  # by window: all layers with the same window share one

    def attend_split(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        keys, values = self.cache.keys_values[slot]
        keys[:, :, self.start : self.stop] = k.transpose(1, 2)
        values[:, :, self.start : self.stop] = v.transpose(1, 2)
        if q.shape[1] == 1:
            return self._decode(q, keys, values, window)
        keys, values = keys[:, :, : self.stop], values[:, :, : self.stop]
        q = q.transpose(1, 2)
        if self.start == 0 and (window is None or window >= self.stop):
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        else:
            if window not in self._masks:
                self._masks[window] = causal_mask(self.positions, self.stop, window)
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self._masks[window], enable_gqa=True)
        return out.transpose(1, 2)

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Decode: one query a sequence. It attends to all cached keys of its window, so there is no mask."""
        first = 0 if window is None else max(0, self.stop - window)
        batch, _, n_heads, head_dim = q.shape
        grouped = q.view(batch, keys.shape[1], -1, head_dim)  # (B, K, H / K, D): a KV head's query heads in the place of tokens
        out = F.scaled_dot_product_attention(grouped, keys[:, :, first : self.stop], values[:, :, first : self.stop])
        return out.reshape(batch, 1, n_heads, head_dim)
