"""The Triton kernel of `kernels/rope_cache.py`: a program takes a few heads of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dispatch import pdl_supported
from kernels.norm_triton import as_rows


@triton.jit
def _norm_weight(q_norm, k_norm, column, is_query, inside):
    """(BLOCK_H, HALF) fp32: each head's weights of the features `column`."""
    of_query = tl.load(q_norm + column, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(k_norm + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], of_query[None, :], of_key[None, :])


@triton.jit
def _rope_store(
    qkv,
    positions,
    frequencies,
    places,
    keys,
    values,
    q_norm,
    k_norm,
    queries,
    qkv_stride,
    keys_stride,
    values_stride,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # D / 2, rounded up to a power of two
    BLOCK_H: tl.constexpr,  # heads of one program
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, HALF)
    is_query, is_key = head < H, (head >= H) & (head < H + K)
    is_value = (head >= H + K) & (head < H + 2 * K)
    inside = column < D // 2
    frequency = tl.load(frequencies + column, mask=inside, other=0.0)
    if NORM:
        first_weight = _norm_weight(q_norm, k_norm, column, is_query, inside)
        second_weight = _norm_weight(q_norm, k_norm, column + D // 2, is_query, inside)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    cells = (head < H + 2 * K)[:, None] & inside[None, :]
    source = qkv + token * qkv_stride + head[:, None] * D + column[None, :]
    first_raw = tl.load(source, mask=cells, other=0.0)
    second_raw = tl.load(source + D // 2, mask=cells, other=0.0)
    position, place = tl.load(positions + token), tl.load(places + token)
    a, b = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + eps)[:, None]
        a = (a * inverse * first_weight).to(first_raw.dtype).to(tl.float32)  # rounded, as a norm of its own would
        b = (b * inverse * second_weight).to(first_raw.dtype).to(tl.float32)
    angle = position.to(tl.float32) * frequency
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    first, second = (a * cos - b * sin).to(first_raw.dtype), (b * cos + a * sin).to(first_raw.dtype)

    out = queries + (token * H + head[:, None]) * D + column[None, :]
    out_mask = is_query[:, None] & inside[None, :]
    tl.store(out, first, mask=out_mask)
    tl.store(out + D // 2, second, mask=out_mask)
    kept = place >= 0
    key = keys + place * keys_stride + (head - H)[:, None] * D + column[None, :]
    key_mask = (is_key & kept)[:, None] & inside[None, :]
    tl.store(key, first.to(keys.dtype.element_ty), mask=key_mask)
    tl.store(key + D // 2, second.to(keys.dtype.element_ty), mask=key_mask)
    value = values + place * values_stride + (head - H - K)[:, None] * D + column[None, :]
    value_mask = (is_value & kept)[:, None] & inside[None, :]
    tl.store(value, first_raw.to(values.dtype.element_ty), mask=value_mask)
    tl.store(value + D // 2, second_raw.to(values.dtype.element_ty), mask=value_mask)


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
    rows, (n_kv_heads, head_dim) = as_rows(qkv), keys.shape[1:]
    tokens, n_heads = rows.shape[0], rows.shape[1] // head_dim - 2 * n_kv_heads
    if keys[0].stride() != (head_dim, 1) or values[0].stride() != (head_dim, 1):
        raise ValueError("a row of the cache must be contiguous")
    queries = torch.empty(tokens, n_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return queries
    pdl, norm = pdl_supported(qkv.device), q_norm is not None and k_norm is not None
    half, all_heads = triton.next_power_of_2(head_dim // 2), n_heads + 2 * n_kv_heads
    # Few tokens: spread over the SMs. Many: programs large enough that starting them does not count.
    block_h = min(4 if tokens <= 64 else 16, triton.next_power_of_2(all_heads))
    grid = (tokens, triton.cdiv(all_heads, block_h))
    _rope_store[grid](
        rows,
        positions,
        frequencies,
        places,
        keys,
        values,
        q_norm if norm else frequencies,
        k_norm if norm else frequencies,
        queries,
        rows.stride(0),
        keys.stride(0),
        values.stride(0),
        eps,
        H=n_heads,
        K=n_kv_heads,
        D=head_dim,
        HALF=half,
        BLOCK_H=block_h,
        NORM=norm,
        PDL=pdl,
        num_warps=min(max(block_h * half // 128, 1), 4),
        launch_pdl=pdl,
    )
    return queries
