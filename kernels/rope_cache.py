"""From a fused QKV projection to rotated queries and a filled KV cache: split, QK norm, RoPE, and the write, in one launch.

RoPE is Su et al., arXiv:2104.09864, in the layout of HF weights: feature i pairs with i + D / 2.
Shapes: T tokens, H query heads, K key-value heads, D head_dim; a cache of N blocks of P tokens has N * P rows.
"""

import torch
from torch import Tensor

from kernels.dispatch import on_gpu
from kernels.norm import rms_norm_reference


def rope_store(
    qkv: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Write the keys and values of T tokens into the cache and return their queries, (T, H, D) in qkv's dtype.

    qkv (T, (H + 2K) * D); positions (T,) int64; frequencies (D / 2,) fp32, radians a token; places (T,) int64, the cache row of
    each token, negative for padding, which is not stored; keys and values (N * P, K, D), written in place. q_norm and k_norm are
    the (D,) weights of an RMSNorm over each head before the rotation, with epsilon `eps`; or both None. Angles are fp32."""
    if not on_gpu(qkv):
        return rope_store_reference(qkv, positions, frequencies, places, keys, values, q_norm, k_norm, eps)
    from kernels import rope_cache_triton

    return rope_cache_triton.rope_store(qkv, positions, frequencies, places, keys, values, q_norm, k_norm, eps)


def rope_store_reference(
    qkv: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    n_kv_heads, head_dim = keys.shape[1:]
    heads = qkv.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * n_kv_heads, n_kv_heads, n_kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)
    angles = positions[:, None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    stored = places >= 0
    keys[places[stored]] = _rotate(k, cos, sin)[stored].to(keys.dtype)
    values[places[stored]] = v[stored].to(values.dtype)
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)
