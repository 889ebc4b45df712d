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

from comms import Communicator
from config import ModelConfig, YarnScaling
from kernels import determinism, exact
from kernels.lora import Groups
from kernels.rope_cache import rope_store
from layers.rope import query_scale, rotate
from tp import Shard

SCORES = 1 << 24  # of `attend_with_sinks` at once


class Heads(nn.Module):
    """The part of an attention module between its two projections: split into heads, QK norm, RoPE, attention.

    slot: the module's number on this rank; each has its own keys and values. window: a query sees only the last `window` tokens.
    causal: whether it sees only tokens before it and its own.
    rope: the layer's row of the frequencies. rope_factor: queries and keys are multiplied by it where they are rotated. sinks: see `attend_with_sinks`.
    """

    def __init__(self, config: ModelConfig, layer: int, slot: int, own: range, n_kv_heads: int) -> None:
        """own: which of the layer's query heads this rank has. n_kv_heads: how many key-value heads."""
        super().__init__()
        self.slot, self.window, self.head_dim = slot, config.window(layer), config.head_dim
        self.rope, self.rope_factor, self.causal = config.rope(layer), config.rope_factor(layer), config.causal
        self.growth: tuple[float, int] | None = None  # of `query_scale`
        if config.query_growth is not None and isinstance(config.rope_scaling, YarnScaling):
            self.growth = config.query_growth, config.rope_scaling.original_max_position_embeddings
        self.config, self.layer, self.own = config, layer, own
        self.n_heads, self.n_kv_heads = len(own), n_kv_heads
        self.q_norm: Any = None  # an RMSNorm of single heads; both or none
        self.k_norm: Any = None
        self.sinks: nn.Parameter | None = None  # (H,)
        self.norm: HeadsNorm | None = None

    def split(self, qkv: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, (H + 2K) * D) to q (B, T, H, D), k and v (B, T, K, D), rotated by cosines and sines (T, 1, D / 2)."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        qk, v = heads.split((self.n_heads + self.n_kv_heads, self.n_kv_heads), dim=-2)
        if self.q_norm is not None:
            q, k = qk.split((self.n_heads, self.n_kv_heads), dim=-2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-2)
        q, k = rotate(qk, *rope).split((self.n_heads, self.n_kv_heads), dim=-2)
        return q, k, v

    def factor(self, frequencies: Tensor) -> float | Tensor:
        """`rope_factor`, or (D / 2,) with 1 for the features that are not rotated."""
        if self.rope_factor == 1 or self.config.rotary_dim == self.head_dim:
            return self.rope_factor
        return torch.where(frequencies == 0, 1.0, self.rope_factor)

    def scaled(self, q: Tensor, frequencies: Tensor) -> Tensor:
        """Queries (..., D) times the factor of queries and that of keys, for keys that were stored without it."""
        factor = self.factor(frequencies)
        if isinstance(factor, Tensor):
            return (q * factor.repeat(2) ** 2).to(q.dtype)
        return q if factor == 1 else q * factor**2

    def forward(self, qkv: Tensor, frequencies: Tensor, context: "AttentionContext") -> Tensor:
        """(B, T, (H + 2K) * D) to (B, T, H * D). frequencies: those of `rope_frequencies`."""
        if self.growth is not None:  # before the rotation, which does not change lengths
            q, others = qkv.split((self.n_heads * self.head_dim, 2 * self.n_kv_heads * self.head_dim), -1)
            qkv = torch.cat((q * query_scale(context.positions, *self.growth)[:, None].to(q.dtype), others), -1)
        return context.attend(self, qkv if self.norm is None else self.norm(qkv), frequencies[self.rope])


class HeadsNorm(nn.Module):
    """RMS norms of q and of k over all heads of the layer (OLMo 2, arXiv:2501.00656, section 3.2). Each shard has its heads' entries of
    the weights; the sums of squares are added over the ranks exactly, whatever adds the partial sums of other layers.

    comm: gathers the ranks' sums; `Transformer` sets it."""

    comm: Communicator

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.layer, self.shard = config, layer, shard
        self.q_norm, self.k_norm = (
            nn.Parameter(torch.ones(len(shard.range(config, axis)), device=device, dtype=dtype))
            for axis in ("heads", "kv_heads")
        )

    def forward(self, qkv: Tensor) -> Tensor:
        """(B, T, (H + 2K) * D), q and k of it normed."""
        config, size = self.config, len(self.q_norm)
        parts = qkv.split((size, len(self.k_norm), len(self.k_norm)), -1)
        sums = torch.stack([part.float().square().sum(-1) for part in parts[:2]], -1)
        if self.comm.world_size > 1:
            sums = self.comm.all_gather(sums).unflatten(-1, (-1, 2)).sum(-2)
        heads = config.n_heads, max(config.n_kv_heads, self.shard.count)  # with copies of KV heads
        scales = [(sums[..., i, None] / (count * config.head_dim) + config.norm_eps).rsqrt() for i, count in enumerate(heads)]
        normed = [(part.float() * scale).to(qkv.dtype) for part, scale in zip(parts, scales, strict=False)]
        return torch.cat((self.q_norm * normed[0], self.k_norm * normed[1], parts[2]), -1)


class AttentionContext(ABC):
    """What one forward pass needs to attend to the tokens before it: here, and with a cache in `engine/paged_cache.py`."""

    positions: Tensor  # (T,) int64, of this forward's tokens, the same for every sequence
    adapters: Groups | None = None  # which of this forward's rows have an adapter
    _rotations: dict[int, tuple[Tensor, Tensor]] | None = None  # the same for every layer with a row of the frequencies

    @abstractmethod
    def attend(self, heads: Heads, qkv: Tensor, frequencies: Tensor) -> Tensor:
        """Attention of the queries in qkv (B, T, (H + 2K) * D) to earlier keys and values and to those in qkv that `heads` may see.

        frequencies: (D / 2,) fp32, radians a token. Returns (B, T, H * D).
        """

    def split(self, heads: Heads, qkv: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`Heads.split` at this forward's positions, with PyTorch, or with the bits of a GPU's inference."""
        if determinism.enabled() and qkv.is_cuda:
            return _split_as_stored(heads, qkv, self.positions, frequencies)
        self._rotations = self._rotations or {}
        if heads.rope not in self._rotations:
            angles = self.positions[:, None, None].float() * frequencies
            cos, sin = angles.cos(), angles.sin()
            if exact.used(angles):  # PyTorch's last bit depends on the place in the tensor
                cos, sin = (angles.double().apply_(function).float() for function in (math.cos, math.sin))
            factor = heads.factor(frequencies)
            self._rotations[heads.rope] = cos * factor, sin * factor
        return heads.split(qkv, self._rotations[heads.rope])


def _split_as_stored(heads: Heads, qkv: Tensor, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`Heads.split` at `positions` (T,), with the kernel that writes keys and values to a cache."""
    sizes, eps = (heads.n_heads, heads.n_kv_heads, heads.n_kv_heads), 0.0 if heads.q_norm is None else heads.q_norm.eps

    def rotated(qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        """(B, T, (H + 2K) * D) to (B, T, H + 2K, D)."""
        rows = qkv.flatten(0, -2)
        keys, values = (rows.new_empty(len(rows), heads.n_kv_heads, heads.head_dim) for _ in range(2))
        places = torch.arange(len(rows), device=rows.device), keys, values
        q = rope_store(rows, positions.repeat(len(qkv)), frequencies, *places, q_norm, k_norm, eps)
        return torch.cat((heads.scaled(q, frequencies), keys, values), dim=1).view(*qkv.shape[:-1], -1, heads.head_dim)

    norms = (None, None) if heads.q_norm is None else (heads.q_norm.scale, heads.k_norm.scale)
    q, k, v = exact.differentiable(rotated, rotated, qkv, *norms).split(sizes, dim=-2)
    return q, k, v


def causal_mask(positions: Tensor, length: int, window: int | None) -> Tensor:
    """(T, length) bool: which of the keys 0 … length-1 the query at each position may attend to."""
    keys = torch.arange(length, device=positions.device)
    seen = keys <= positions[:, None]
    return seen if window is None else seen & (keys > positions[:, None] - window)


def attend_with_sinks(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor) -> Tensor:
    """Attention in which the softmax of each head has one more term, exp(sink), that belongs to no value (gpt-oss). In fp32.

    q (B, H, T, D); keys and values (B, K, L, D); mask (T, L) or (B, 1, T, L) bool: which keys a query sees; sinks (H, T) or (H, 1).
    Returns (B, H, T, D)."""
    groups, pieces = (keys.shape[1], -1), []
    queries, sinks = (
        q.float().unflatten(1, groups) * q.shape[-1] ** -0.5,
        sinks.float().expand(-1, q.shape[2]).unflatten(0, groups),
    )
    keys, values = keys.float()[:, :, None].mT, values.float()[:, :, None]
    mask = mask[:, :, None] if mask is not None and mask.dim() == 4 else mask
    size = max(1, SCORES // (q.shape[0] * q.shape[1] * keys.shape[-1]))
    for first in range(0, q.shape[2], size):
        rows = slice(first, first + size)
        scores, sink = queries[..., rows, :] @ keys, sinks[..., rows, None]
        if mask is not None:
            scores.masked_fill_(~mask[..., rows, :], -torch.inf)
        most = torch.maximum(scores.amax(-1, keepdim=True), sink)
        shares = (scores - most).exp_()
        pieces.append((shares @ values) / (shares.sum(-1, keepdim=True) + (sink - most).exp()))
    return torch.cat(pieces, -2).flatten(1, 2).to(q.dtype)


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
        elif heads.sinks is not None:
            mask = causal_mask(self.positions, len(self.positions), heads.window)
            out = attend_with_sinks(q, k, v, mask, heads.sinks[:, None])
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
