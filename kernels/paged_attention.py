"""Attention over a paged KV cache: one query for each sequence (decode), or spans of queries of several sequences (prefill).

Shapes: a cache of N blocks of P tokens, K key-value heads, H query heads, D head_dim; B or S sequences. A block table of width W
lists the blocks of each sequence in order. The cache holds keys and values in the dtype of the queries, or codes (e4m3) with a
scale for each token and head (2, N, K, P), fp32. A query at position i attends to the keys at positions 0 … i, or the last `window`
of them. Scores are scaled by 1 / sqrt(D); the softmax is computed in fp32.

The functions ending in `_reference` define the results. The Triton kernels compute an online softmax, with a running maximum
and sum (FlashAttention, Dao et al., arXiv:2205.14135). The G query heads that share a key-value head are the rows of one
matrix, so that keys and values are read once for all of them.

On Hopper, prefill has a kernel of its own for common shapes (`kernels/prefill_attention_hopper.py`). With --deterministic, both are
computed by `kernels/paged_attention_segments.py`.

Decode splits a sequence over several programs, so that small batches use all SMs (flash-decoding, Dao et al. 2023). Split s of
S has every S-th tile of keys from tile s on: its first tile does not depend on the length, so the lookup in the block table
need not wait for the length. A second kernel combines the splits in a fixed order, so the bits are the same each time.
"""

import math
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import determinism
from kernels.dispatch import on_gpu, pdl_options, tl, triton
from kernels.prefill_schedule import prefill_schedule


class DecodeConfig(NamedTuple):
    """Launch parameters of decode. The result is correct with all of them."""

    block_n: int  # keys of a tile; fewer if they would not fit in registers or shared memory
    warps: int
    stages: int  # of the pipeline: stages - 1 tiles are loaded ahead
    programs: int  # on an SM, at most
    max_splits: int  # of a pair; combining more takes longer than reading a sequence faster saves


# (largest number of pairs of a sequence and a key-value head, config): the first that is large enough is used. An SM runs three
# programs at a time. Few pairs are split until all programs run at once. One or two whole pairs for an SM need more loads in
# flight; with three to five, halves leave less work to the last programs
DECODE_CONFIGS: tuple[tuple[float, DecodeConfig], ...] = (
    (16, DecodeConfig(block_n=64, warps=4, stages=3, programs=3, max_splits=256)),
    (192, DecodeConfig(block_n=64, warps=4, stages=3, programs=3, max_splits=32)),
    (384, DecodeConfig(block_n=64, warps=4, stages=4, programs=2, max_splits=1)),
    (640, DecodeConfig(block_n=64, warps=4, stages=3, programs=9, max_splits=2)),
    (math.inf, DecodeConfig(block_n=64, warps=4, stages=3, programs=3, max_splits=1)),
)
# the same for a cache of codes. Tiles of more keys have as many bytes, and fewer instructions for each. Where whole pairs fill
# the SMs, smaller programs leave less work to the last ones
CODE_CONFIGS: tuple[tuple[float, DecodeConfig], ...] = (
    (16, DecodeConfig(block_n=128, warps=4, stages=3, programs=4, max_splits=256)),
    (192, DecodeConfig(block_n=128, warps=4, stages=3, programs=3, max_splits=32)),
    (384, DecodeConfig(block_n=128, warps=4, stages=3, programs=3, max_splits=1)),
    (math.inf, DecodeConfig(block_n=64, warps=2, stages=4, programs=3, max_splits=1)),
)


class PrefillConfig(NamedTuple):
    """Launch parameters of prefill. The result is correct with all of them. Rows and keys are reduced if they would not fit."""

    block_m: int  # rows of a program: tokens times query heads of a key-value head
    block_n: int  # keys of a tile
    warps: int
    stages: int


# (largest number of tokens of the longest span, config): the first that is large enough is used. An SM holds two programs of
# 64 rows, which overlap their starts, ends and softmax, or one of 128, which reads keys and values half as often
PREFILL_CONFIGS: tuple[tuple[float, PrefillConfig], ...] = (
    (4096, PrefillConfig(block_m=64, block_n=64, warps=4, stages=3)),
    (math.inf, PrefillConfig(block_m=128, block_n=64, warps=8, stages=3)),
)
COMBINED_VALUES = 1024  # fp32 values of a warp that combines splits: 32 for each thread
COMBINED_FEATURES = 32  # at least, of a program that combines splits: a line of the cache
NO_WINDOW = 2**30
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    window: int | None,
    max_length: int,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one query for each sequence, at position lengths[b] - 1. Its key and value must be in the cache.

    q (B, H, D); keys and values (N, P, K, D), P a power of two; tables (B, W) int32; lengths (B,) int32, 0 for padding, whose
    output is zero. Returns (B, H, D) in q's dtype. max_length: an upper bound of the lengths, which determines the number of
    splits. Shorter sequences are not slower because of it. scales: as of `dequantized`. sinks (H,): of
    each head, a logit that joins the softmax without a value (gpt-oss). The kernel raises ValueError as `shape_of`."""
    if not on_gpu(q):
        return paged_decode_reference(q, keys, values, tables, lengths, window, max_length, scales, sinks)
    if determinism.enabled():
        assert sinks is None, "--deterministic refuses such models"
        return _segments().decode(q, keys, values, tables, lengths, window, max_length, scales)
    batch, n_heads, head_dim = q.shape
    shape, cache = shape_of(q, keys, values, scales), _pointers(keys, values, scales)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    pairs, longest = batch * shape["K"], min(max_length, window or max_length)
    config = decode_config(pairs, scales is not None)
    launch = decode_launch(q.dtype, shape["G"], head_dim, config) | pdl_options(q.device)
    splits = decode_splits(config, pairs, longest, launch["BLOCK_N"], sm_count(q.device))
    pieces = _partials(pairs * splits if splits > 1 else 0, shape["G"], head_dim, q.device)
    _paged_decode[(pairs, splits)](
        q.contiguous(), *cache, sinks, tables, lengths, out, *pieces, splits, tables.stride(0), tables.shape[1],
        window or NO_WINDOW, math.log2(math.e) / math.sqrt(head_dim), SINGLE_SPLIT=splits == 1, WINDOWED=window is not None,
        **shape, **launch,
    )  # fmt: skip
    if splits > 1:
        combine = combine_launch(splits, head_dim)
        _combine_splits[(batch * n_heads, triton.cdiv(head_dim, combine["BLOCK_D"]))](
            *pieces, sinks, lengths, out, splits, window or NO_WINDOW, K=shape["K"], G=shape["G"], D=head_dim,
            BLOCK_N=launch["BLOCK_N"], **combine, **pdl_options(q.device),
        )  # fmt: skip
    return out


def paged_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    window: int | None,
    max_span: int,
    schedules: dict[int, Tensor] | None = None,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of S consecutive spans of queries in q, one of each sequence.

    q (T, H, D); keys and values (N, P, K, D), P a power of two; tables (S, W) int32; starts (S + 1,) int32: span s is rows
    starts[s] … starts[s + 1] - 1 and may be empty; rows from starts[S] on are padding, whose output is zero; lengths (S,)
    int32: tokens of the sequence up to and with the span's last row. Returns (T, H, D) in q's dtype. max_span: an upper bound
    of the rows of a span. schedules: an empty dict that the caller keeps for calls with the same starts, lengths and T, which then
    share what it gets. scales, sinks: as of `paged_decode`. The kernel raises ValueError as `shape_of`."""
    if not on_gpu(q):
        return paged_prefill_reference(q, keys, values, tables, starts, lengths, window, max_span, scales=scales, sinks=sinks)
    if determinism.enabled():
        assert sinks is None, "--deterministic refuses such models"
        return _segments().prefill(q, keys, values, tables, starts, lengths, window, scales)
    (rows, _, head_dim), spans = q.shape, len(lengths)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    shape, cache = shape_of(q, keys, values, scales), _pointers(keys, values, scales)
    scale = math.log2(math.e) / math.sqrt(head_dim)
    if sinks is None and specialized(q, keys, window):
        hopper = import_module("kernels.prefill_attention_hopper")  # Triton may lack Gluon elsewhere
        tokens, schedules = hopper.tokens_of_tile(shape["G"]), {} if schedules is None else schedules
        if tokens not in schedules:
            schedules[tokens] = prefill_schedule(starts, lengths, rows, tokens)
        hopper.prefill(q.contiguous(), keys, values, tables, schedules[tokens], out, scale, sm_count(q.device))
        return out
    launch = prefill_launch(q.dtype, shape["G"], head_dim, min(max_span, rows), scales is not None)
    tiles = rows // launch["TOKENS"] + spans + 1  # each span, and the padding, may end with a partial tile
    _paged_prefill[(shape["K"], tiles)](
        q.contiguous(), *cache, sinks, tables, starts, lengths, out, rows, spans, tables.stride(0), tables.shape[1],
        window or NO_WINDOW, scale, SPANS=triton.next_power_of_2(spans + 1),
        WINDOWED=window is not None, **shape, **launch, **pdl_options(q.device),
    )  # fmt: skip
    return out


def _segments() -> ModuleType:
    """What computes both with --deterministic. It requires Triton."""
    return import_module("kernels.paged_attention_segments")


def paged_decode_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    window: int | None,
    max_length: int,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    out = torch.zeros_like(q)
    for b, length in enumerate(lengths.tolist()):
        if length:
            out[b] = _attend(q[b : b + 1], keys, values, tables[b], length, window, scales, sinks)[0]
    return out


def paged_prefill_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    window: int | None,
    max_span: int,
    schedules: dict[int, Tensor] | None = None,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    out = torch.zeros_like(q)
    bounds = starts.tolist()
    for s, length in enumerate(lengths.tolist()):
        first, last = bounds[s : s + 2]
        if last > first:
            out[first:last] = _attend(q[first:last], keys, values, tables[s], length, window, scales, sinks)
    return out


def dequantized(codes: Tensor, scales: Tensor | None) -> Tensor:
    """Keys or values (N, P, K, D), fp32. scales (N, K, P) fp32: of each token and head, if the cache holds codes; both have it
    as one tensor (2, N, K, P)."""
    return codes.float() if scales is None else codes.float() * scales.transpose(1, 2)[..., None]


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: int, window: int | None, scales: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of q (n, H, D), the last n of `length` positions of the sequence with block table `table` (W,): (n, H, D)."""
    n, _, head_dim = q.shape
    blocks = table[: -(-length // keys.shape[1])].long()
    both = zip((keys, values), (None, None) if scales is None else scales[:, blocks], strict=True)
    k, v = (dequantized(x[blocks], scale).flatten(0, 1)[:length] for x, scale in both)  # (L, K, D)
    grouped = q.float().unflatten(1, (k.shape[1], -1))  # (n, K, H / K, D)
    scores = torch.einsum("nkgd,lkd->kgnl", grouped, k) / math.sqrt(head_dim)
    distances = torch.arange(length - n, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    visible = distances >= 0 if window is None else (distances >= 0) & (distances < window)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(k.shape[1], -1, 1, 1).expand(-1, -1, n, -1)), -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("kgnl,lkd->nkgd", weights, v).flatten(1, 2).to(q.dtype)


# --- kernels ------------------------------------------------------------------------------------------------------------------


@triton.jit
def _attend_tiles(
    q, acc, row_max, row_sum, keys, values,
    key_scales, value_scales,  # of a cache of codes, else None
    head, table, width,
    block,  # (BLOCK_N,): the blocks of the first tile's tokens
    begin, end, position, window, scale,
    step,  # tokens from one tile of BLOCK_N to the next
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One online-softmax pass of q (M, BLOCK_D) over the tiles of keys from token `begin` to `end`. position (M,): the last
    token that a row attends to. keys and values: pointers to the first token.

    acc (M, BLOCK_D) and row_sum (M,) are relative to 2^row_max (M,). A row without keys yet has the maximum -1e30, so its sums
    for masked keys are rescaled to 0 at the first key that is not masked."""
    if key_scales is None:
        acc, row_max, row_sum = _attend_values(
            q, acc, row_max, row_sum, keys + head * D, values + head * D,
            table, width, block, begin, end, position, window, scale, step,
            K, D, P, BLOCK_N, MASKED, WINDOWED, PRECISION,
        )  # fmt: skip
    else:
        acc, row_max, row_sum = _attend_codes(
            q, acc, row_max, row_sum, keys + head * (D // 2), values + head * (D // 2), key_scales + head * P, value_scales + head * P,
            table, width, block, begin, end, position, window, scale, step,
            K, D, P, BLOCK_N, MASKED, WINDOWED, PRECISION,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def _attend_values(
    q, acc, row_max, row_sum, keys, values, table, width, block, begin, end, position, window, scale, step,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_attend_tiles` for a cache in the dtype of q."""
    feature = tl.arange(0, q.shape[1])
    for start in range(begin, end, step):
        token = start + tl.arange(0, BLOCK_N)
        offsets = (block.to(tl.int64) * P + token % P)[:, None] * (K * D) + feature[None, :]
        block = blocks_of(table, token + step, width, P)  # the next tile's, loaded while this one is used
        inside = (token < end)[:, None] & (feature < D)[None, :]
        k = tl.load(keys + offsets, mask=inside, other=0.0)
        v = tl.load(values + offsets, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            scores = _visible(scores, token, position, window, WINDOWED)
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def _visible(scores, token, position, window, WINDOWED: tl.constexpr):
    """scores (M, N), -1e30 for the tokens (N,) that a row at position (M,) does not attend to."""
    visible = token[None, :] <= position[:, None]
    if WINDOWED:
        visible = visible & (token[None, :] > position[:, None] - window)
    return tl.where(visible, scores, -1e30)


@triton.jit
def _attend_codes(
    q, acc, row_max, row_sum, keys, values, key_scales, value_scales, table, width, block, begin, end, position, window, scale, step,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_attend_tiles` for a cache of codes. keys and values: pointers to pairs of them, int16.

    A register of tensor cores holds the same feature of two keys, and memory two features of one. So features of even and of odd
    numbers are multiplied apart: a pair becomes two operands where it is, while single bytes would have to be moved one by one.

    Weights times scales are at most 2^15, so that they fit in fp16 and the small ones keep their bits."""
    q, scale = _operand(q, scale)
    q_even, q_odd = _split(q)
    even, odd = _split(acc)
    pair = tl.arange(0, q_even.shape[1])
    for start in range(begin, end, step):
        token = start + tl.arange(0, BLOCK_N)
        offsets = (block.to(tl.int64) * P + token % P)[:, None] * (K * D // 2) + pair[None, :]
        scale_offsets = block * (K * P) + token % P
        block = blocks_of(table, token + step, width, P)  # the next tile's, loaded while this one is used
        inside = (token < end)[:, None] & (pair < D // 2)[None, :]
        k_even, k_odd = _decoded(tl.load(keys + offsets, mask=inside, other=0), q.dtype)
        v_even, v_odd = _decoded(tl.load(values + offsets, mask=inside, other=0), q.dtype)
        key_scale = tl.load(key_scales + scale_offsets, mask=token < end, other=1.0)[None, :]
        value_scale = tl.load(value_scales + scale_offsets, mask=token < end, other=1.0)[None, :]
        scores = tl.dot(q_even, tl.trans(k_even), input_precision=PRECISION)
        scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision=PRECISION) * scale * key_scale
        if MASKED:
            scores = _visible(scores, token, position, window, WINDOWED)
        exponent = (value_scale.to(tl.int32, bitcast=True) >> 23) - 126  # at least log2 of the scale
        new_max = tl.maximum(row_max, tl.max(scores + exponent.to(tl.float32), axis=1) - 15)
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, axis=1)
        weights = (weights * value_scale).to(q.dtype)
        even = tl.dot(weights, v_even, even * rescale[:, None], input_precision=PRECISION)
        odd = tl.dot(weights, v_odd, odd * rescale[:, None], input_precision=PRECISION)
    return tl.join(even, odd).reshape(acc.shape), row_max, row_sum


@triton.jit
def _split(x):
    """x (M, D): its even and its odd columns."""
    return tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))


@triton.jit
def _decoded(pairs, dtype: tl.constexpr):
    """Values of the first and of the second code of each pair, int16. A register holds two pairs."""
    if INTERPRETED:
        first, second = pairs.to(tl.int8), (pairs >> 8).to(tl.int8)
        first, second = (
            first.to(tl.float8e4nv, bitcast=True).to(tl.float16),
            second.to(tl.float8e4nv, bitcast=True).to(tl.float16),
        )
    else:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 firsts, seconds;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {firsts, seconds}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, firsts;
            cvt.rn.f16x2.e4m3x2 $1, seconds;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first.to(dtype), second.to(dtype)


@triton.jit
def _operand(queries, scale):
    """Queries (M, D) for `_attend_codes`, and the factor of their scores, (M, 1).

    16-bit ones become fp16, because codes convert to it faster than to bf16. Divided by the largest of a row, they fit."""
    if queries.dtype != tl.float32:
        largest = tl.maximum(tl.max(tl.abs(queries.to(tl.float32)), axis=1), 1e-30)[:, None]
        queries, scale = (queries / largest).to(tl.float16), scale * largest
    return queries, scale


@triton.jit
def blocks_of(table, token, width, P: tl.constexpr):
    """The blocks, int32, of the tokens, from a table of `width` entries; 0 for tokens beyond the table."""
    entry = token // P
    return tl.load(table + entry, mask=entry < width, other=0)


@triton.jit
def _empty_softmax(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """acc, row_max and row_sum of `_attend_tiles` before the first key."""
    return tl.zeros((BLOCK_M, BLOCK_D), tl.float32), tl.full((BLOCK_M,), -1e30, tl.float32), tl.zeros((BLOCK_M,), tl.float32)


@triton.jit
def normalized(acc, row_sum):
    """acc divided by the sum of the softmax; zero for rows without keys."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]


@triton.jit
def with_sinks(row_sum, row_max, sinks, head):
    """The sum of the softmax, relative to 2^row_max, with the term of each row's head. A row without keys gets infinity."""
    if sinks is not None:
        row_sum += tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - row_max)
    return row_sum


@triton.jit
def _attend_pair(
    q, keys, values, key_scales, value_scales, tables, table_stride, width, pair, begin, end, step, scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of the query heads of a pair to its tiles of keys from token `begin` to `end`. Returns the means
    (BLOCK_M, BLOCK_D) and log2 of the sums of the exponentials (BLOCK_M,)."""
    table = tables + (pair // K).to(tl.int64) * table_stride
    block = blocks_of(table, begin + tl.arange(0, BLOCK_N), width, P)  # before the queries: the compiler waits for these
    offsets, inside = head_offsets(G, D, BLOCK_M, BLOCK_D)
    queries = tl.load(q + pair.to(tl.int64) * (G * D) + offsets, mask=inside, other=0.0)
    acc, row_max, row_sum = _empty_softmax(BLOCK_M, BLOCK_D)
    acc, row_max, row_sum = _attend_tiles(
        queries, acc, row_max, row_sum, keys, values, key_scales, value_scales, pair % K, table, width, block, begin, end,
        tl.zeros((BLOCK_M,), tl.int32) + end - 1, 0, scale, step, K, D, P, BLOCK_N, True, False, PRECISION,
    )  # fmt: skip
    return normalized(acc, row_sum), row_max + tl.log2(row_sum)


@triton.jit
def head_offsets(G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets (BLOCK_M, BLOCK_D) in (G, D), and a mask of those that exist."""
    head, feature = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_D)[None, :]
    return head * D + feature, (head < G) & (feature < D)


@triton.jit
def _store_piece(partials, weights, slot, mean, weight, G: tl.constexpr, D: tl.constexpr):
    """Store what `_attend_pair` returned for a part of a pair's keys as number `slot` of partials (…, G, D) and weights (…, G)."""
    offsets, inside = head_offsets(G, D, mean.shape[0], mean.shape[1])
    head = tl.arange(0, mean.shape[0])
    tl.store(partials + slot * (G * D) + offsets, mean, mask=inside)
    tl.store(weights + slot * G + head, weight, mask=head < G)


@triton.jit
def _store_output(out, pair, mean, G: tl.constexpr, D: tl.constexpr):
    offsets, inside = head_offsets(G, D, mean.shape[0], mean.shape[1])
    tl.store(out + pair.to(tl.int64) * (G * D) + offsets, mean.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits", "width", "window"])
def _paged_decode(
    q, keys, values,
    key_scales, value_scales,  # of a cache of codes, else None
    sinks,  # (H,) or None
    tables, lengths, out,
    partials,  # (B * K, splits, G, D) fp32: the splits' results
    weights,  # (B * K, splits, G) fp32: log2 of the sums of their exponentials
    splits, table_stride,
    width,  # of the tables
    window,
    scale,  # log2(e) / sqrt(D): the exponentials are powers of two
    K: tl.constexpr,
    G: tl.constexpr,  # query heads of a key-value head
    D: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr,  # G, rounded up to a power of two, at least 16
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr,  # one split: the result needs no combining
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair, split = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # after the wait: `_combine_splits` reads the lengths before its own wait
    length = tl.load(lengths + pair // K)
    begin = split * BLOCK_N
    if WINDOWED:
        begin += tl.maximum(length - window, 0)
    mean, weight = _attend_pair(
        q, keys, values, key_scales, value_scales, tables, table_stride, width, pair, begin, length, splits * BLOCK_N, scale,
        K, G, D, P, BLOCK_M, BLOCK_D, BLOCK_N, PRECISION,
    )  # fmt: skip
    if SINGLE_SPLIT:
        if sinks is not None:
            mean /= with_sinks(1.0, weight, sinks, pair % K * G + tl.arange(0, BLOCK_M) % G)[:, None]
        _store_output(out, pair, mean, G, D)
    elif begin < length:
        _store_piece(partials, weights, pair.to(tl.int64) * splits + split, mean, weight, G, D)


@triton.jit(do_not_specialize=["splits", "window"])
def _combine_splits(
    partials, weights, sinks, lengths, out, splits, window,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,  # `splits`, rounded up to a power of two
    PDL: tl.constexpr,
):  # fmt: skip
    """Combine the splits of `_paged_decode` for BLOCK_D features of a query head. The result is zero for a sequence without tokens.

    Loads bypass L1, because each value is read once."""
    pair, head = tl.program_id(0) // G, tl.program_id(0) % G
    split, feature = tl.arange(0, BLOCK_S), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    slot = (pair.to(tl.int64) * splits + split) * G + head
    tokens = tl.minimum(tl.load(lengths + pair // K, cache_modifier=".cg"), window)  # written before `_paged_decode` began
    used = (split < splits) & (split * BLOCK_N < tokens)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mask = used[:, None] & (feature < D)[None, :]
    part = tl.load(partials + slot[:, None] * D + feature[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    weight = tl.load(weights + slot, mask=used, other=-1e30, cache_modifier=".cg")
    most = tl.max(weight, axis=0)
    weight = tl.exp2(weight - most)
    mean = tl.sum(part * weight[:, None], axis=0) / with_sinks(tl.sum(weight, axis=0), most, sinks, pair % K * G + head)
    offsets = tl.program_id(0).to(tl.int64) * D + feature
    tl.store(out + offsets, mean.to(out.dtype.element_ty), mask=feature < D)


@triton.jit(do_not_specialize=["rows", "spans", "width", "window"])
def _paged_prefill(
    q, keys, values, key_scales, value_scales, sinks, tables, starts, lengths, out, rows, spans, table_stride, width, window, scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,  # of a tile; each has G of the BLOCK_M rows
    SPANS: tl.constexpr,  # a power of two above the number of spans
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    span, first_row, count, first_token = find_tile(starts, tl.program_id(1), spans, rows, TOKENS, SPANS)
    if span > spans:
        return
    length = tl.load(lengths + span, mask=span < spans, other=0)
    table = tables + tl.where(span < spans, span, 0).to(tl.int64) * table_stride

    row, feature = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = first_token + row // G
    inside = ((row < TOKENS * G) & (token < count))[:, None] & (feature < D)[None, :]
    offsets = ((first_row + token).to(tl.int64) * K + kv_head) * G + row % G
    offsets = offsets[:, None] * D + feature[None, :]
    queries = tl.load(q + offsets, mask=inside, other=0.0)
    acc, row_max, row_sum = _empty_softmax(BLOCK_M, BLOCK_D)

    first_position = length - count + first_token
    position = length - count + token
    stop = tl.minimum(first_position + TOKENS, length)  # 0 or less for padding, whose positions are negative
    if WINDOWED:
        diagonal = tl.maximum(first_position - window + 1, 0)
    else:
        diagonal = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N  # all rows attend to all keys before it
    tile = tl.arange(0, BLOCK_N)
    if not WINDOWED:
        acc, row_max, row_sum = _attend_tiles(
            queries, acc, row_max, row_sum, keys, values, key_scales, value_scales, kv_head, table, width, blocks_of(table, tile, width, P),
            0, diagonal, position, window, scale, BLOCK_N, K, D, P, BLOCK_N, False, False, PRECISION,
        )  # fmt: skip
    acc, row_max, row_sum = _attend_tiles(
        queries, acc, row_max, row_sum, keys, values, key_scales, value_scales, kv_head, table, width,
        blocks_of(table, diagonal + tile, width, P), diagonal, stop, position, window, scale, BLOCK_N, K, D, P, BLOCK_N, True, WINDOWED, PRECISION,
    )  # fmt: skip
    mean = normalized(acc, with_sinks(row_sum, row_max, sinks, kv_head * G + row % G))
    tl.store(out + offsets, mean.to(out.dtype.element_ty), mask=inside)


@triton.jit
def find_tile(starts, number, spans, rows, TOKENS: tl.constexpr, SPANS: tl.constexpr):
    """The tile with this number, of the tiles of TOKENS rows of all spans, counted from the last to the first. Returns its
    span, the span's first row and number of rows, and the tile's first row within the span. Span number `spans` is the padding.
    A larger span number means that there is no such tile."""
    span = tl.arange(0, SPANS)
    first = tl.load(starts + span, mask=span <= spans, other=rows)
    counts = tl.load(starts + span + 1, mask=span < spans, other=rows) - first
    tiles = tl.cdiv(counts, TOKENS)
    ends = tl.cumsum(tiles, axis=0)
    number = tl.sum(tiles, axis=0) - 1 - number
    found = tl.where(number < 0, spans + 1, tl.sum((ends <= number).to(tl.int32), axis=0))
    selected = span == found
    before = tl.sum(tl.where(selected, ends - tiles, 0), axis=0)
    return found, tl.sum(tl.where(selected, first, 0)), tl.sum(tl.where(selected, counts, 0)), (number - before) * TOKENS


# --- how they are launched ----------------------------------------------------------------------------------------------------


def _pointers(keys: Tensor, values: Tensor, scales: Tensor | None) -> tuple[Tensor | None, ...]:
    """What kernels take: keys and values, of codes in pairs, and their scales."""
    return (keys, values, None, None) if scales is None else (keys.view(torch.int16), values.view(torch.int16), *scales)


def shape_of(q: Tensor, keys: Tensor, values: Tensor, scales: Tensor | None) -> dict[str, int]:
    """K, G, D and P. Raises ValueError if P is no power of two, the cache is not contiguous, or its dtype is neither that of q nor,
    with scales, fp8."""
    block_size, n_kv_heads, head_dim = keys.shape[1:]
    if block_size & (block_size - 1):
        raise ValueError(f"the block size must be a power of two, not {block_size}")
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("keys and values must be contiguous")
    held = q.dtype if scales is None else torch.float8_e4m3fn
    if held != keys.dtype or held != values.dtype:
        raise ValueError(f"queries of {q.dtype} cannot attend to a cache of {keys.dtype} and {values.dtype}")
    return {"K": n_kv_heads, "G": q.shape[1] // n_kv_heads, "D": head_dim, "P": block_size}


def specialized(q: Tensor, keys: Tensor, window: int | None) -> bool:
    """Whether prefill uses the kernel for Hopper: 16 bits in the cache, too, its head dimensions, no window, blocks of at least 8 tokens (rows of
    TMA's pattern in shared memory), rows of the cache that TMA can count."""
    supported = (
        q.dtype == keys.dtype and q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] in (64, 128, 256) and window is None
    )
    fits = keys.shape[1] >= 8 and keys.shape[0] * keys.shape[1] <= 1 << 30
    return supported and fits and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"  # no effect on 16-bit inputs


def _block_n(dtype: torch.dtype, block_d: int, wanted: int) -> int:
    """Keys of a tile, at most `wanted`, that fit. In fp32 they are in registers."""
    if dtype == torch.float32:
        return min(wanted, 16)
    return wanted if block_d <= 128 else min(wanted, 32)


def decode_config(pairs: int, codes: bool = False) -> DecodeConfig:
    return next(config for most, config in (CODE_CONFIGS if codes else DECODE_CONFIGS) if pairs <= most)


def decode_splits(config: DecodeConfig, pairs: int, longest: int, block_n: int, sms: int) -> int:
    """Splits for each pair: all programs fit on the SMs at once, and each has at least one tile of the longest sequence."""
    return max(min(config.programs * sms // pairs, triton.cdiv(longest, block_n), config.max_splits), 1)


def _partials(pieces: int, group: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For results of parts of pairs that are combined later: partials (pieces, G, D) and weights (pieces, G), fp32."""
    partials = torch.empty(pieces, group, head_dim, dtype=torch.float32, device=device)
    return partials, torch.empty(pieces, group, dtype=torch.float32, device=device)


def decode_launch(dtype: torch.dtype, group: int, head_dim: int, config: DecodeConfig) -> dict[str, Any]:
    block_d = triton.next_power_of_2(head_dim)
    return {
        "BLOCK_M": max(triton.next_power_of_2(group), 16),
        "BLOCK_D": max(block_d, 32),  # of codes, features are multiplied in two halves, of 16 at least
        "BLOCK_N": _block_n(dtype, block_d, config.block_n),
        "PRECISION": _precision(dtype),
        "num_warps": config.warps if dtype.itemsize == 2 and group <= 16 else 8,  # fewer would spill registers
        "num_stages": config.stages,
    }


def combine_launch(splits: int, head_dim: int) -> dict[str, Any]:
    """A program of 8 warps takes all features of a head, or fewer if there are many splits: then more SMs combine them."""
    block_s, block_d = triton.next_power_of_2(splits), max(triton.next_power_of_2(head_dim), 16)
    block_d = min(block_d, max(8 * COMBINED_VALUES // block_s, COMBINED_FEATURES))
    return {"BLOCK_S": block_s, "BLOCK_D": block_d, "num_warps": min(max(block_s * block_d // COMBINED_VALUES, 1), 8)}


def prefill_launch(dtype: torch.dtype, group: int, head_dim: int, span: int, codes: bool = False) -> dict[str, Any]:
    """Launch options of `_paged_prefill`. span: tokens of the longest span. codes: more keys of a tile would spill registers."""
    config = next(config for most, config in PREFILL_CONFIGS if span <= most)
    block_d, smallest = triton.next_power_of_2(head_dim), max(triton.next_power_of_2(group), 16)
    small = dtype.itemsize == 2 and block_d <= 128  # whether rows and keys take little of registers and shared memory
    largest = config.block_m if small else 16 if dtype == torch.float32 else min(config.block_m, 64)
    block_m = max(min(triton.next_power_of_2(span * group), largest), smallest)
    return {
        "BLOCK_M": block_m,
        "BLOCK_D": max(block_d, 32),
        "BLOCK_N": _block_n(dtype, block_d, min(config.block_n, 32) if codes else config.block_n),
        "TOKENS": block_m // group,
        "PRECISION": _precision(dtype),
        "num_warps": config.warps if small and block_m <= config.block_m else 8,  # fewer would spill registers
        "num_stages": config.stages,
    }


@lru_cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
