"""Attention heads, and what one forward pass needs to attend to the tokens before it.

Shapes: B sequences, T tokens a sequence in this forward, H query heads, K key-value heads, D head_dim.
"""

import math
from abc import ABC, abstractmethod
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import ModelConfig
from kernels import determinism, exact
from kernels.lora import Groups
from kernels.rope_cache import rope_store
from layers.rope import rotate


class Heads(nn.Module):
    """The part of an attention module between its two projections: split into heads, QK norm, RoPE, attention.

    slot: the module's number on this rank; each has its own keys and values. window: a query sees only the last `window` tokens.
    causal: whether it sees only tokens before it and its own.
    rope_factor: queries and keys are multiplied by it where they are rotated.
    """

    def __init__(self, config: ModelConfig, layer: int, slot: int, n_heads: int, n_kv_heads: int) -> None:
        """n_heads, n_kv_heads: of this rank."""
        super().__init__()
        self.slot, self.window, self.head_dim = slot, config.window(layer), config.head_dim
        self.rope_factor, self.causal = config.rope_factor, config.causal
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.q_norm: Any = None  # an RMSNorm of single heads; both or none
        self.k_norm: Any = None

    def split(self, qkv: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, (H + 2K) * D) to q (B, T, H, D), k and v (B, T, K, D), rotated by cosines and sines (T, 1, D / 2)."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        qk, v = heads.split((self.n_heads + self.n_kv_heads, self.n_kv_heads), dim=-2)
        if self.q_norm is not None:
            q, k = qk.split((self.n_heads, self.n_kv_heads), dim=-2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-2)
        q, k = rotate(qk, *rope).split((self.n_heads, self.n_kv_heads), dim=-2)
        return q, k, v

    def forward(self, qkv: Tensor, frequencies: Tensor, context: "AttentionContext") -> Tensor:
        """(B, T, (H + 2K) * D) to (B, T, H * D). frequencies: (D / 2,) fp32, radians a token."""
        return context.attend(self, qkv, frequencies)


class AttentionContext(ABC):
    """What one forward pass needs to attend to the tokens before it: here, and with a cache in `engine/paged_cache.py`."""

    positions: Tensor  # (T,) int64, of this forward's tokens, the same for every sequence
    adapters: Groups | None = None  # which of this forward's rows have an adapter
    _rope: tuple[Tensor, Tensor] | None = None  # the same for every layer

    @abstractmethod
    def attend(self, heads: Heads, qkv: Tensor, frequencies: Tensor) -> Tensor:
        """Attention of the queries in qkv (B, T, (H + 2K) * D) to earlier keys and values and to those in qkv that `heads` may see.

        frequencies: (D / 2,) fp32, radians a token. Returns (B, T, H * D).
        """

    def split(self, heads: Heads, qkv: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`Heads.split` at this forward's positions, with PyTorch, or with the bits of a GPU's inference."""
        if determinism.enabled() and qkv.is_cuda:
            return _split_as_stored(heads, qkv, self.positions, frequencies)
        if self._rope is None:
            angles = self.positions[:, None, None].float() * frequencies
            cos, sin = angles.cos(), angles.sin()
            if exact.used(angles):  # PyTorch's last bit depends on the place in the tensor
                cos, sin = (angles.double().apply_(function).float() for function in (math.cos, math.sin))
            self._rope = cos * heads.rope_factor, sin * heads.rope_factor
        return heads.split(qkv, self._rope)


def _split_as_stored(heads: Heads, qkv: Tensor, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`Heads.split` at `positions` (T,), with the kernel that writes keys and values to a cache."""
    sizes, eps = (heads.n_heads, heads.n_kv_heads, heads.n_kv_heads), 0.0 if heads.q_norm is None else heads.q_norm.eps

    def rotated(qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        """(B, T, (H + 2K) * D) to (B, T, H + 2K, D)."""
        rows = qkv.flatten(0, -2)
        keys, values = (rows.new_empty(len(rows), heads.n_kv_heads, heads.head_dim) for _ in range(2))
        places = torch.arange(len(rows), device=rows.device), keys, values
        q = rope_store(rows, positions.repeat(len(qkv)), frequencies, *places, q_norm, k_norm, eps)
        q = q if heads.rope_factor == 1 else q * heads.rope_factor**2  # as with a cache
        return torch.cat((q, keys, values), dim=1).view(*qkv.shape[:-1], -1, heads.head_dim)

    norms = (None, None) if heads.q_norm is None else (heads.q_norm.weight, heads.k_norm.weight)
    q, k, v = exact.differentiable(rotated, rotated, qkv, *norms).split(sizes, dim=-2)
    return q, k, v


def causal_mask(positions: Tensor, length: int, window: int | None) -> Tensor:
    """(T, length) bool: which of the keys 0 … length-1 the query at each position may attend to."""
    keys = torch.arange(length, device=positions.device)
    seen = keys <= positions[:, None]
    return seen if window is None else seen & (keys > positions[:, None] - window)


def attend_to_all(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of each token to all tokens: q (B, H, T, D), keys and values (B, K, T, D). Returns (B, H, T, D)."""
    plain = partial(F.scaled_dot_product_attention, enable_gqa=True)
    if not determinism.enabled():
        return plain(q, keys, values)
    mask = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool, device=q.device)
    return exact.differentiable(partial(exact.attention, mask=mask), plain, q, keys, values)


class Causal(AttentionContext):
    """No cache: T tokens from position 0, for training and scoring."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.positions = torch.arange(length, device=device)

    def attend(self, heads: Heads, qkv: Tensor, frequencies: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in self.split(heads, qkv, frequencies))
        if not heads.causal:
            out = attend_to_all(q, k, v)
        elif determinism.enabled():
            mask = causal_mask(self.positions, len(self.positions), heads.window)
            plain = partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
            forward = partial(exact.attention, mask=mask)
            if q.is_cuda:
                forward = partial(import_module("kernels.paged_attention_segments").attend, window=heads.window)
            out = exact.differentiable(forward, plain, q, k, v)
        elif heads.window is None or heads.window >= len(self.positions):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mask = causal_mask(self.positions, len(self.positions), heads.window)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(-2)
