"""Split a fused QKV projection, apply QK norm and RoPE, and write keys and values to the KV cache, in one kernel.

RoPE is Su et al., arXiv:2104.09864, in the layout of Hugging Face weights: feature i is paired with feature i + D / 2.
Shapes: T tokens, H query heads, K key-value heads, D head_dim; a cache of N blocks of P tokens has N * P rows.

A cache of codes (e4m3) has a scale for each token and head: the largest of its D values is 448 times the scale. So a token's
codes depend on nothing but the token.
"""

import torch
from torch import Tensor

from kernels import determinism
from kernels.dispatch import as_rows, on_gpu, pdl_options, tl, triton
from kernels.norm import rms_norm_reference

LARGEST_CODE = 448.0  # of e4m3
SMALLEST = 1e-12  # a head whose values are all smaller gets the scale of this value


def rope_store(
    qkv: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    cache_rows: Tensor,
    keys: Tensor,
    values: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scales: Tensor | None = None,
) -> Tensor:
    """Write the keys and values of T tokens to the cache and return their queries, (T, H, D) in qkv's dtype.

    qkv (T, (H + 2K) * D); positions (T,) int64; frequencies (D / 2,) fp32, radians a token; cache_rows (T,) int64, the cache row of
    each token, negative for padding, which is not stored; keys and values (N * P, K, D), written in place. q_norm and k_norm:
    (D,) weights of an RMSNorm over each head before RoPE, with epsilon `eps`, or both None. Angles are fp32. scales (2, N, K, P)
    fp32: of keys and values, written in place, if the cache holds codes. The kernel raises ValueError if a row of the cache is not contiguous."""
    if not on_gpu(qkv):
        return rope_store_reference(qkv, positions, frequencies, cache_rows, keys, values, q_norm, k_norm, eps, scales)
    rows, (n_kv_heads, head_dim) = as_rows(qkv), keys.shape[1:]
    tokens, n_heads = rows.shape[0], rows.shape[1] // head_dim - 2 * n_kv_heads
    if keys[0].stride() != (head_dim, 1) or values[0].stride() != (head_dim, 1):
        raise ValueError("a row of the cache must be contiguous")
    queries = torch.empty(tokens, n_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return queries
    half, all_heads = triton.next_power_of_2(head_dim // 2), n_heads + 2 * n_kv_heads
    # Few tokens: small programs, to use all SMs. Many: larger programs, so that their launch overhead is small. The order of a norm's
    # sum depends on the size, so with norms --deterministic has one.
    small = tokens <= 64 or (q_norm is not None and determinism.enabled())
    block_h = min(4 if small else 16, triton.next_power_of_2(all_heads))
    _rope_store[(tokens, triton.cdiv(all_heads, block_h))](
        rows, positions, frequencies, cache_rows, keys, values, *((None, None) if scales is None else scales), q_norm, k_norm, queries,
        rows.stride(0), keys.stride(0), values.stride(0), eps,
        H=n_heads, K=n_kv_heads, D=head_dim, P=1 if scales is None else scales.shape[3], HALF=half, BLOCK_H=block_h,
        LARGEST_CODE=LARGEST_CODE, SMALLEST=SMALLEST,
        num_warps=min(max(block_h * half // 128, 1), 4), **pdl_options(qkv.device),
    )  # fmt: skip
    return queries


def rope_store_reference(
    qkv: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    cache_rows: Tensor,
    keys: Tensor,
    values: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scales: Tensor | None = None,
) -> Tensor:
    n_kv_heads, head_dim = keys.shape[1:]
    heads = qkv.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * n_kv_heads, n_kv_heads, n_kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)
    angles = positions[:, None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    stored = cache_rows >= 0
    for cache, x, scale in zip(
        (keys, values), (_apply_rope(k, cos, sin), v), (None, None) if scales is None else scales, strict=True
    ):
        store(cache, scale, cache_rows[stored], x[stored])
    return _apply_rope(q, cos, sin)


def store(cache: Tensor, scales: Tensor | None, cache_rows: Tensor, x: Tensor) -> None:
    """Write x (T, K, D) to rows (T,) of a cache (N * P, K, D), with PyTorch. scales (N, K, P): if the cache holds codes."""
    if scales is None:
        cache.index_copy_(0, cache_rows, x.to(cache.dtype))
        return
    scale = x.float().abs().amax(2).clamp(min=SMALLEST) / LARGEST_CODE
    codes = (x.float() / scale[..., None]).to(cache.dtype)
    cache.view(torch.uint8).index_copy_(0, cache_rows, codes.view(torch.uint8))  # CPUs cannot index fp8
    scales[cache_rows // scales.shape[2], :, cache_rows % scales.shape[2]] = scale


def _apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


@triton.jit
def _rope_store(
    qkv, positions, frequencies, cache_rows, keys, values,
    key_scales, value_scales,  # of a cache of codes, else None
    q_norm, k_norm,  # both None without norms
    queries, qkv_stride, keys_stride, values_stride, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    HALF: tl.constexpr,  # D / 2, rounded up to a power of two
    BLOCK_H: tl.constexpr,  # heads of one program
    LARGEST_CODE: tl.constexpr, SMALLEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program handles BLOCK_H heads of one token. Heads are ordered: queries, keys, values."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, HALF)
    is_query, is_key = head < H, (head >= H) & (head < H + K)
    is_value = (head >= H + K) & (head < H + 2 * K)
    inside = column < D // 2
    frequency = tl.load(frequencies + column, mask=inside, other=0.0)
    if q_norm is not None:
        first_weight = _norm_weight(q_norm, k_norm, column, is_query, inside)
        second_weight = _norm_weight(q_norm, k_norm, column + D // 2, is_query, inside)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    mask = (head < H + 2 * K)[:, None] & inside[None, :]
    source = qkv + token * qkv_stride + head[:, None] * D + column[None, :]
    first_raw = tl.load(source, mask=mask, other=0.0)
    second_raw = tl.load(source + D // 2, mask=mask, other=0.0)
    position, cache_row = tl.load(positions + token), tl.load(cache_rows + token)
    a, b = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if q_norm is not None:
        square = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D
        inverse = (tl.rsqrt(square + eps) + square * 0.0)[:, None]  # NaN if the squares overflow, see `norm.py`
        a = (a * inverse * first_weight).to(first_raw.dtype).to(tl.float32)  # rounded as by a separate norm
        b = (b * inverse * second_weight).to(first_raw.dtype).to(tl.float32)
    angle = position.to(tl.float32) * frequency
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    first, second = (a * cos - b * sin).to(first_raw.dtype), (b * cos + a * sin).to(first_raw.dtype)

    out = queries + (token * H + head[:, None]) * D + column[None, :]
    out_mask = is_query[:, None] & inside[None, :]
    tl.store(out, first, mask=out_mask)
    tl.store(out + D // 2, second, mask=out_mask)
    is_stored = cache_row >= 0
    if key_scales is not None:
        largest = _largest(tl.where(is_key[:, None], first, first_raw), tl.where(is_key[:, None], second, second_raw))
        scale = tl.maximum(largest, SMALLEST) / LARGEST_CODE
        slot = (cache_row // P * K + head) * P + cache_row % P
        tl.store(key_scales + slot - H * P, scale, mask=is_key & is_stored)
        tl.store(value_scales + slot - (H + K) * P, scale, mask=is_value & is_stored)
        first, second = first / scale[:, None], second / scale[:, None]
        first_raw, second_raw = first_raw / scale[:, None], second_raw / scale[:, None]
    key = keys + cache_row * keys_stride + (head - H)[:, None] * D + column[None, :]
    key_mask = (is_key & is_stored)[:, None] & inside[None, :]
    tl.store(key, first.to(keys.dtype.element_ty), mask=key_mask)
    tl.store(key + D // 2, second.to(keys.dtype.element_ty), mask=key_mask)
    value = values + cache_row * values_stride + (head - H - K)[:, None] * D + column[None, :]
    value_mask = (is_value & is_stored)[:, None] & inside[None, :]
    tl.store(value, first_raw.to(values.dtype.element_ty), mask=value_mask)
    tl.store(value + D // 2, second_raw.to(values.dtype.element_ty), mask=value_mask)


@triton.jit
def _largest(a, b):
    """The largest absolute value of each row of a and b (R, C), in fp32."""
    return tl.max(tl.maximum(tl.abs(a.to(tl.float32)), tl.abs(b.to(tl.float32))), axis=1)


@triton.jit
def _norm_weight(q_norm, k_norm, column, is_query, inside):
    """(BLOCK_H, HALF) fp32: the norm weights of the features `column`, for each head."""
    of_query = tl.load(q_norm + column, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(k_norm + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
