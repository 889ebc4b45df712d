"""Attention over a paged KV cache whose bits depend only on the query, its keys and their positions: not on the batch, on how a
prompt is cut, or on whether a query is computed alone, in a prompt, or among drafts.

The keys are cut at fixed positions into segments of SEGMENT tokens. Each segment has an online softmax of its own, over tiles of
TILE keys from its first position on (FlashAttention, Dao et al., arXiv:2205.14135). Segments are merged in order. A tile or a
segment that a query does not see changes nothing. The kernels multiply tiles of the same shape, with the same instructions, and
merge by one function without fused multiply-adds that a compiler chose, so their results are the same to the bit:

    spans    a program has 64 or 128 rows, tokens times the G query heads of a key-value head, and merges all segments as it goes
    pieces   few sequences of one query: programs share a sequence, and store the result of each segment
    merge    merges the pieces

Shapes and names are those of `kernels/paged_attention.py`. This module requires Triton. It also runs in Triton's interpreter.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dispatch import pdl_options
from kernels.paged_attention import NO_WINDOW, blocks_of, find_tile, head_offsets, normalized, shape_of, sm_count

SEGMENT = 256
TILE = 64
ROWS = 64  # of a program of spans
MANY_ROWS = 256  # of a step; with more, most are prompts, and programs have twice as many rows, which share the keys they load
PROGRAMS = 3  # for an SM, at most, when programs share few sequences
_SEGMENT = tl.constexpr(SEGMENT)
_TILE = tl.constexpr(TILE)
_SUMS = tl.constexpr(16)  # columns of sums: the fewest of a dot


def decode(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, window: int | None, max_length: int,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`kernels.paged_attention.paged_decode` on a GPU."""
    return decode_with(q, keys, values, tables, lengths, window, max_length, scales, None)


def prefill(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor, window: int | None,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`kernels.paged_attention.paged_prefill` on a GPU."""
    (rows, _, head_dim), spans = q.shape, len(lengths)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    shape = shape_of(q, keys, values, scales)
    launch = _launch(q, shape["G"], ROWS if rows <= MANY_ROWS else 2 * ROWS)
    tokens = launch["BLOCK_M"] // shape["G"]
    tiles = rows // tokens + spans + 1  # each span, and the padding, may end with a partial tile
    _spans[(shape["K"], tiles)](
        q.contiguous(), keys, values, *_scales(scales), tables, starts, lengths, out, rows, spans, tables.stride(0), tables.shape[1],
        window or NO_WINDOW, math.log2(math.e) / math.sqrt(head_dim), TOKENS=tokens, SPANS=triton.next_power_of_2(spans + 1),
        WINDOWED=window is not None, **shape, **launch,
    )  # fmt: skip
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The same for whole sequences without a cache: q (B, H, T, D), k and v (B, K, T, D) to (B, H, T, D)."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    batch, length = q.shape[:2]
    size = length & -length  # of a block, the largest that divides the length
    keys, values = (x.view(-1, size, *x.shape[2:]) for x in (k, v))
    tables = torch.arange(batch * length // size, dtype=torch.int32, device=q.device).view(batch, -1)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
    lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    return prefill(q.flatten(0, 1), keys, values, tables, starts, lengths, window).view(q.shape).transpose(1, 2)


def decode_with(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, window: int | None, max_length: int,
    scales: Tensor | None, splits: int | None,
) -> Tensor:  # fmt: skip
    """`decode` with this number of programs for each sequence and key-value head."""
    batch, _, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    shape = shape_of(q, keys, values, scales)
    pairs, longest = batch * shape["K"], min(max_length, (window or max_length) + SEGMENT)
    segments = triton.cdiv(longest, SEGMENT)
    splits = splits or min(max(PROGRAMS * sm_count(q.device) // pairs, 1), segments)
    held = pairs * segments if splits > 1 else 0
    pieces = torch.empty(held, shape["G"], head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(held, 2, shape["G"], dtype=torch.float32, device=q.device)
    _pieces[(pairs, splits)](
        q.contiguous(), keys, values, *_scales(scales), tables, lengths, out, pieces, sums, splits, segments, tables.stride(0),
        tables.shape[1], window or NO_WINDOW, math.log2(math.e) / math.sqrt(head_dim), SINGLE=splits == 1,
        WINDOWED=window is not None, **shape, **_launch(q, shape["G"], 16, scales is not None),
    )  # fmt: skip
    if splits > 1:
        block_d = max(triton.next_power_of_2(head_dim), 16)
        _merge_pieces[(pairs * shape["G"],)](
            pieces, sums, lengths, out, segments, window or NO_WINDOW, K=shape["K"], G=shape["G"], D=head_dim, BLOCK_D=block_d,
            num_warps=1 if block_d <= 64 else 2, enable_fp_fusion=False, **pdl_options(q.device),
        )  # fmt: skip
    return out


def _launch(q: Tensor, group: int, rows: int, codes: bool = False) -> dict[str, Any]:
    """Launch options of a program of so many rows, or more if a token has more."""
    wide = q.dtype == torch.float32 or q.shape[2] > 128
    rows = max(triton.next_power_of_2(group), min(rows, ROWS) if wide else rows)
    return {
        "BLOCK_M": rows,
        "BLOCK_D": max(triton.next_power_of_2(q.shape[2]), 16),
        "num_warps": 8 if wide or codes or rows > 64 else 4,  # fewer would spill registers
        "num_stages": 2 if wide else 3,
        "enable_fp_fusion": False,
        **pdl_options(q.device),
    }


def _scales(scales: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None, None) if scales is None else tuple(scales)


# --- the softmax of a segment, and merging ------------------------------------------------------------------------------------


@triton.jit
def _load_tile(cache, scales, block, token, end, head, dtype: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys or values (N, BLOCK_D) of tokens (N,) in these blocks, for M queries; zeros from token `end` on. Codes are multiplied by
    their scales, and rounded."""
    feature = tl.arange(0, BLOCK_D)
    offsets = (block.to(tl.int64) * P + token % P)[:, None] * (K * D) + head * D + feature[None, :]
    values = tl.load(cache + offsets, mask=(token < end)[:, None] & (feature < D)[None, :], other=0.0)
    if scales is not None:
        factor = tl.load(scales + block * (K * P) + head * P + token % P, mask=token < end, other=0.0)
        values = values.to(tl.float32) * factor[:, None]
        if (
            M < 64
        ):  # Triton would permute the columns of an mma whose operand it can trace to 8 bits; it traces no further than a sum
            values = tl.sum(values[None], axis=0)
        values = values.to(dtype)
    return values


@triton.jit
def _merge(acc, row_max, row_sum, next_acc, next_max, next_sum):
    """Merge two results of different keys: acc (M, D) and row_sum (M, _SUMS), of equal columns, relative to 2^row_max (M,)."""
    new_max = tl.maximum(row_max, next_max)
    factor, next_factor = tl.exp2(row_max - new_max)[:, None], tl.exp2(next_max - new_max)[:, None]
    return acc * factor + next_acc * next_factor, new_max, row_sum * factor + next_sum * next_factor


@triton.jit
def _empty(M: tl.constexpr, BLOCK_D: tl.constexpr):
    """What `_merge` takes, of rows that have seen nothing."""
    return tl.zeros((M, BLOCK_D), tl.float32), tl.full((M,), -1e30, tl.float32), tl.zeros((M, _SUMS), tl.float32)


@triton.jit
def _attend_tile(
    queries, acc, row_max, row_sum, keys, values, key_scales, value_scales, head, block, start, end, position, unmasked, window, scale,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """A step of the online softmax: of queries (M, BLOCK_D) over TILE keys from token `start` on. position (M,): the last token
    that a row sees. unmasked: a token up to which, without a window, all rows see all.

    The weights' sums are a product with ones, because its order does not depend on how a program's threads share a tile."""
    token = start + tl.arange(0, _TILE)
    k = _load_tile(keys, key_scales, block, token, end, head, queries.dtype, K, D, P, queries.shape[0], queries.shape[1])
    v = _load_tile(values, value_scales, block, token, end, head, queries.dtype, K, D, P, queries.shape[0], queries.shape[1])
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
    if WINDOWED or start + _TILE > unmasked + 1:
        visible = token[None, :] <= position[:, None]
        if WINDOWED:
            visible = visible & (token[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, tl.zeros_like(scores) - new_max[:, None])).to(queries.dtype)
    factor = tl.exp2(row_max - new_max)[:, None]
    acc = tl.dot(weights, v, acc * factor, input_precision="ieee")
    row_sum = tl.dot(weights, tl.full((_TILE, _SUMS), 1.0, queries.dtype), row_sum * factor, input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def _attend(
    queries, keys, values, key_scales, value_scales, head, table, width, begin, end, position, unmasked, window, scale,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """All segments of the keys from token `begin`, a multiple of TILE, to `end`, merged."""
    total, total_max, total_sum = _empty(queries.shape[0], queries.shape[1])
    acc, row_max, row_sum = _empty(queries.shape[0], queries.shape[1])
    tile = tl.arange(0, _TILE)
    block = blocks_of(table, begin + tile, width, P)
    for start in range(begin, end, _TILE):
        later = blocks_of(table, start + _TILE + tile, width, P)  # the next tile's, loaded while this one is used
        acc, row_max, row_sum = _attend_tile(
            queries, acc, row_max, row_sum, keys, values, key_scales, value_scales, head, block, start, end, position, unmasked, window,
            scale, K, D, P, WINDOWED,
        )  # fmt: skip
        block = later
        if ((start + _TILE) % _SEGMENT == 0) | (start + _TILE >= end):
            total, total_max, total_sum = _merge(total, total_max, total_sum, acc, row_max, row_sum)
            acc, row_max, row_sum = _empty(queries.shape[0], queries.shape[1])
    return total, tl.max(total_sum, axis=1)


# --- kernels ------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "spans", "width", "window"])
def _spans(
    q, keys, values, key_scales, value_scales, tables, starts, lengths, out, rows, spans, table_stride, width, window, scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,  # of a tile; each has G of the BLOCK_M rows
    SPANS: tl.constexpr,  # a power of two above the number of spans
    WINDOWED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
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
    offsets = ((first_row + token).to(tl.int64) * K + head) * G + row % G
    offsets = offsets[:, None] * D + feature[None, :]
    queries = tl.load(q + offsets, mask=inside, other=0.0)
    first_position = length - count + first_token
    end = tl.minimum(first_position + TOKENS, length)  # 0 or less for padding, whose positions are negative
    begin = end * 0
    if WINDOWED:
        begin = tl.maximum(first_position - window + 1, 0) // _TILE * _TILE
    acc, row_sum = _attend(
        queries, keys, values, key_scales, value_scales, head, table, width, begin, end, length - count + token, first_position, window,
        scale, K, D, P, WINDOWED,
    )  # fmt: skip
    tl.store(out + offsets, normalized(acc, row_sum).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits", "segments", "width", "window"])
def _pieces(
    q, keys, values, key_scales, value_scales, tables, lengths, out,
    pieces,  # (B * K, segments, G, D) fp32
    sums,  # (B * K, segments, 2, G) fp32: maxima and sums
    splits,
    segments,  # of a sequence, at most
    table_stride, width, window, scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    SINGLE: tl.constexpr,  # one split, which stores the result
    WINDOWED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query of each sequence: a program has some consecutive segments of a pair of a sequence and a key-value head."""
    pair, split = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # after the wait: `_merge_pieces` reads the lengths before its own wait
    length = tl.load(lengths + pair // K)
    table = tables + (pair // K).to(tl.int64) * table_stride
    offsets, inside = head_offsets(G, D, BLOCK_M, BLOCK_D)
    queries = tl.load(q + pair.to(tl.int64) * (G * D) + offsets, mask=inside, other=0.0)
    position = tl.zeros((BLOCK_M,), tl.int32) + length - 1
    first = length * 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    if SINGLE:
        acc, row_sum = _attend(
            queries, keys, values, key_scales, value_scales, pair % K, table, width, first // _TILE * _TILE, length, position,
            length - 1, window, scale, K, D, P, WINDOWED,
        )  # fmt: skip
        tl.store(out + pair.to(tl.int64) * (G * D) + offsets, normalized(acc, row_sum).to(out.dtype.element_ty), mask=inside)
    else:
        count = tl.cdiv(length, _SEGMENT) - first // _SEGMENT
        own = tl.cdiv(count, splits)
        slot = pair.to(tl.int64) * segments + split * own
        begin = (first // _SEGMENT + split * own) * _SEGMENT
        end = tl.minimum(begin + own * _SEGMENT, length)
        row, tile = tl.arange(0, BLOCK_M), tl.arange(0, _TILE)
        acc, row_max, row_sum = _empty(BLOCK_M, BLOCK_D)
        block = blocks_of(table, begin + tile, width, P)
        for start in range(begin, end, _TILE):
            later = blocks_of(table, start + _TILE + tile, width, P)
            acc, row_max, row_sum = _attend_tile(
                queries, acc, row_max, row_sum, keys, values, key_scales, value_scales, pair % K, block, start, end, position,
                length - 1, window, scale, K, D, P, WINDOWED,
            )  # fmt: skip
            block = later
            if ((start + _TILE) % _SEGMENT == 0) | (start + _TILE >= end):
                tl.store(pieces + slot * (G * D) + offsets, acc, mask=inside)
                tl.store(sums + slot * (2 * G) + row, row_max, mask=row < G)
                tl.store(sums + slot * (2 * G) + G + row, tl.max(row_sum, axis=1), mask=row < G)
                acc, row_max, row_sum = _empty(BLOCK_M, BLOCK_D)
                slot += 1


@triton.jit(do_not_specialize=["segments", "window"])
def _merge_pieces(
    pieces, sums, lengths, out, segments, window,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of a query head. The result is zero for a sequence without tokens."""
    pair, head = tl.program_id(0) // G, tl.program_id(0) % G
    feature = tl.arange(0, BLOCK_D)
    length = tl.load(lengths + pair // K, cache_modifier=".cg")  # written before `_pieces` began
    count = tl.cdiv(length, _SEGMENT) - tl.maximum(length - window, 0) // _SEGMENT
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = pair.to(tl.int64) * segments
    acc, row_max, row_sum = tl.zeros((1, BLOCK_D), tl.float32), tl.full((1,), -1e30, tl.float32), tl.zeros((1, 1), tl.float32)
    for i in tl.range(0, count, loop_unroll_factor=8):  # so that eight pieces are loaded at once
        own = slot + i
        part = tl.load(
            pieces + (own * G + head) * D + feature[None, :], mask=(feature < D)[None, :], other=0.0, cache_modifier=".cg"
        )
        place = sums + own * (2 * G) + head + tl.arange(0, 1)
        next_max, next_sum = tl.load(place, cache_modifier=".cg"), tl.load(place + G, cache_modifier=".cg")
        acc, row_max, row_sum = _merge(acc, row_max, row_sum, part, next_max, next_sum[:, None])
    offsets = tl.program_id(0).to(tl.int64) * D + feature
    mean = normalized(acc, tl.max(row_sum, axis=1))
    tl.store(out + offsets[None, :], mean.to(out.dtype.element_ty), mask=(feature < D)[None, :])
