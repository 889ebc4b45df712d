"""Triton kernels of `kernels/paged_attention.py`.

Both keep a running maximum and sum of the softmax while they walk over the keys (Dao et al., arXiv:2205.14135), and put the G
query heads that share a key-value head into the rows of one matrix, so that keys and values are read once for all of them.

Decode splits a sequence over several programs, so that short batches use all SMs (flash-decoding, Dao et al. 2023). The program of a
sequence that arrives last adds the others' partial results, in the order of the splits: one launch, the same bits each time.
"""

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dispatch import pdl_supported

MAX_SPLITS = 32  # more would make the program that adds them the slow one
COMBINED_VALUES = 16384  # fp32 that it holds at a time
DECODE_WARPS = 8
NO_WINDOW = 2**30
ARRIVALS = 65536  # at most so many pairs of sequence and key-value head


@triton.jit
def _blocks(table, token, stop, P: tl.constexpr):
    """The blocks that hold the tokens below `stop`, int32."""
    return tl.load(table + token // P, mask=token < stop, other=0)


@triton.jit
def _walk(
    q,
    acc,
    peak,
    total,
    keys,
    values,
    table,
    begin,
    end,
    position,
    window,
    scale,
    P: tl.constexpr,
    STRIDE: tl.constexpr,  # from one token of a block to the next
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Let q (M, BLOCK_D) see the keys and values of the tokens from `begin` to `end`; position (M,) is the last that a row sees.

    acc (M, BLOCK_D) and total (M,) are sums relative to 2^peak (M,). A row that has seen nothing yet has the peak -1e30, so what
    it gathers from masked keys vanishes with its first key that is not."""
    feature = tl.arange(0, BLOCK_D)
    block = _blocks(table, begin + tl.arange(0, BLOCK_N), end, P)
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        place = (block.to(tl.int64) * P + token % P)[:, None] * STRIDE + feature[None, :]
        block = _blocks(table, token + BLOCK_N, end, P)  # the next ones, on their way while these are used
        inside = (token < end)[:, None] & (feature < D)[None, :]
        k = tl.load(keys + place, mask=inside, other=0.0)
        v = tl.load(values + place, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            seen = token[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (token[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, -1e30)
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        peak, total = new_peak, total * fade + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, peak, total


@triton.jit
def _combine(
    partials,
    stats,
    out,
    active,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add `active` splits' partial sums (SPLITS, G, D), with (SPLITS, 2, G) their peaks and totals, and store (G, D).

    They were written by other SMs, so they are read past this SM's cache."""
    split, head, feature = tl.arange(0, SPLITS), tl.arange(0, GROUP), tl.arange(0, BLOCK_D)
    known = (split < active)[:, None] & (head < G)[None, :]
    stat = stats + split[:, None] * (2 * G) + head[None, :]
    peaks = tl.load(stat, mask=known, other=-1e30, cache_modifier=".cg")
    totals = tl.load(stat + G, mask=known, other=0.0, cache_modifier=".cg")
    peak = tl.max(peaks, axis=0)
    total = tl.sum(totals * tl.exp2(peaks - peak[None, :]), axis=0)
    acc = tl.zeros((GROUP, BLOCK_D), tl.float32)
    place = head[:, None] * D + feature[None, :]
    inside = (head < G)[:, None] & (feature < D)[None, :]
    for first in range(0, active, TILE):
        part = first + tl.arange(0, TILE)
        held = (part < active)[:, None] & (head < G)[None, :]
        part_peak = tl.load(stats + part[:, None] * (2 * G) + head[None, :], mask=held, other=-1e30, cache_modifier=".cg")
        weight = tl.exp2(part_peak - peak[None, :])
        there = (part < active)[:, None, None] & inside[None, :, :]
        source = partials + part[:, None, None] * (G * D) + place[None, :, :]
        acc += tl.sum(tl.load(source, mask=there, other=0.0, cache_modifier=".cg") * weight[:, :, None], axis=0)
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + place, mean.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["window"])
def _paged_decode(
    q,
    keys,
    values,
    tables,
    lengths,
    out,
    partials,  # (B * K, SPLITS, G, D) fp32
    stats,  # (B * K, SPLITS, 2, G) fp32
    arrivals,  # (B * K,) int32, zero before and after
    table_stride,
    window,
    scale,  # of scores whose exponential is a power of two
    K: tl.constexpr,
    G: tl.constexpr,  # query heads of a key-value head
    D: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,  # G, rounded up to a power of two
    BLOCK_M: tl.constexpr,  # the same, but at least what a matrix product takes
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    pair, split = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    length = tl.load(lengths + pair // K)
    oldest = tl.maximum(length - window, 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(length - oldest, SPLITS), BLOCK_N), 1) * BLOCK_N
    active = tl.maximum(tl.cdiv(length - oldest, share), 1)
    if split >= active:
        return
    begin = oldest + split * share
    stop = tl.minimum(begin + share, length)

    head, feature = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    inside = (head < G)[:, None] & (feature < D)[None, :]
    place = head[:, None] * D + feature[None, :]
    first_query = pair.to(tl.int64) * (G * D)  # of (B, K, G, D)
    queries = tl.load(q + first_query + place, mask=inside, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    peak, total = tl.full((BLOCK_M,), -1e30, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    position = tl.zeros((BLOCK_M,), tl.int32) + stop - 1
    table = tables + (pair // K).to(tl.int64) * table_stride
    first_feature = (pair % K) * D
    acc, peak, total = _walk(
        queries,
        acc,
        peak,
        total,
        keys + first_feature,
        values + first_feature,
        table,
        begin,
        stop,
        position,
        window,
        scale,
        P,
        K * D,
        D,
        BLOCK_D,
        BLOCK_N,
        True,
        False,
        PRECISION,
    )
    if active == 1:
        mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + first_query + place, mean.to(out.dtype.element_ty), mask=inside)
        return
    slot = pair.to(tl.int64) * SPLITS
    tl.store(partials + (slot + split) * (G * D) + place, acc, mask=inside)
    stat = stats + (slot + split) * (2 * G) + head
    tl.store(stat, peak, mask=head < G)
    tl.store(stat + G, total, mask=head < G)
    tl.debug_barrier()  # all threads' stores come before the arrival
    if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == active - 1:
        first_partial, first_stat = partials + slot * (G * D), stats + slot * (2 * G)
        _combine(first_partial, first_stat, out + first_query, active, G, GROUP, D, BLOCK_D, SPLITS, TILE)
        tl.store(arrivals + pair, 0)


@triton.jit
def _find_tile(starts, number, spans, rows, TOKENS: tl.constexpr, SPANS: tl.constexpr):
    """Number the tiles of TOKENS rows of all spans, from the last to the first. Returns the span of tile `number`, its first row
    and number of rows, and the tile's first row within it. Span number `spans` is the padding; beyond it there is no tile."""
    span = tl.arange(0, SPANS)
    first = tl.load(starts + span, mask=span <= spans, other=rows)
    counts = tl.load(starts + span + 1, mask=span < spans, other=rows) - first
    tiles = tl.cdiv(counts, TOKENS)
    ends = tl.cumsum(tiles, axis=0)
    number = tl.sum(tiles, axis=0) - 1 - number
    found = tl.where(number < 0, spans + 1, tl.sum((ends <= number).to(tl.int32), axis=0))
    here = span == found
    before = tl.sum(tl.where(here, ends - tiles, 0), axis=0)
    return found, tl.sum(tl.where(here, first, 0)), tl.sum(tl.where(here, counts, 0)), (number - before) * TOKENS


@triton.jit(do_not_specialize=["rows", "spans", "window"])
def _paged_prefill(
    q,
    keys,
    values,
    tables,
    starts,
    lengths,
    out,
    rows,
    spans,
    table_stride,
    window,
    scale,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,  # of a tile: G rows of BLOCK_M each
    SPANS: tl.constexpr,  # a power of two above the number of spans
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    span, first_row, count, first_token = _find_tile(starts, tl.program_id(1), spans, rows, TOKENS, SPANS)
    if span > spans:
        return
    length = tl.load(lengths + span, mask=span < spans, other=0)
    table = tables + tl.where(span < spans, span, 0).to(tl.int64) * table_stride

    row, feature = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = first_token + row // G
    inside = ((row < TOKENS * G) & (token < count))[:, None] & (feature < D)[None, :]
    place = ((first_row + token).to(tl.int64) * K + kv_head) * G + row % G
    place = place[:, None] * D + feature[None, :]
    queries = tl.load(q + place, mask=inside, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    peak, total = tl.full((BLOCK_M,), -1e30, tl.float32), tl.zeros((BLOCK_M,), tl.float32)

    first_position = length - count + first_token
    position = length - count + token
    stop = tl.minimum(first_position + TOKENS, length)  # padding has none: it lies before position 0
    if WINDOWED:
        diagonal = tl.maximum(first_position - window + 1, 0)
    else:
        diagonal = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N  # all rows see all keys before it
    first_feature = kv_head * D
    if not WINDOWED:
        acc, peak, total = _walk(
            queries,
            acc,
            peak,
            total,
            keys + first_feature,
            values + first_feature,
            table,
            0,
            diagonal,
            position,
            window,
            scale,
            P,
            K * D,
            D,
            BLOCK_D,
            BLOCK_N,
            False,
            False,
            PRECISION,
        )
    acc, peak, total = _walk(
        queries,
        acc,
        peak,
        total,
        keys + first_feature,
        values + first_feature,
        table,
        diagonal,
        stop,
        position,
        window,
        scale,
        P,
        K * D,
        D,
        BLOCK_D,
        BLOCK_N,
        True,
        WINDOWED,
        PRECISION,
    )
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + place, mean.to(out.dtype.element_ty), mask=inside)


def paged_decode(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, window: int | None, max_length: int
) -> Tensor:
    batch, _, head_dim = q.shape
    shape = _shape(q, keys, values)
    pairs, group, device = batch * shape["K"], shape["G"], q.device
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    if not out.numel():
        return out
    launch = decode_launch(q.dtype, group, head_dim)
    splits = decode_splits(pairs, min(max_length, window or max_length), launch["BLOCK_N"], sm_count(device))
    partials = torch.empty(pairs * splits * group * head_dim, dtype=torch.float32, device=device)
    stats = torch.empty(pairs * splits * 2 * group, dtype=torch.float32, device=device)
    _paged_decode[(pairs, splits)](
        q.contiguous(),
        keys,
        values,
        tables,
        lengths,
        out,
        partials,
        stats,
        arrivals(device, pairs),
        tables.stride(0),
        window or NO_WINDOW,
        math.log2(math.e) / math.sqrt(head_dim),
        SPLITS=splits,
        **shape,
        **launch,
        **_pdl(device),
    )
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
) -> Tensor:
    rows, _, head_dim = q.shape
    spans = len(lengths)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    shape = _shape(q, keys, values)
    launch = prefill_launch(q.dtype, shape["G"], head_dim, min(max_span, rows), rows * q.shape[1], sm_count(q.device))
    tiles = rows // launch["TOKENS"] + spans + 1  # each span, and the padding, may leave a tile unfilled
    _paged_prefill[(shape["K"], tiles)](
        q.contiguous(),
        keys,
        values,
        tables,
        starts,
        lengths,
        out,
        rows,
        spans,
        tables.stride(0),
        window or NO_WINDOW,
        math.log2(math.e) / math.sqrt(head_dim),
        SPANS=triton.next_power_of_2(spans + 1),
        WINDOWED=window is not None,
        **shape,
        **launch,
        **_pdl(q.device),
    )
    return out


def _shape(q: Tensor, keys: Tensor, values: Tensor) -> dict[str, int]:
    """K, G, D and P. Raises ValueError for what the kernels cannot read."""
    block_size, n_kv_heads, head_dim = keys.shape[1:]
    if block_size & (block_size - 1):
        raise ValueError(f"a block must hold a power of two of tokens, not {block_size}")
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("keys and values must be contiguous")
    if q.dtype != keys.dtype or q.dtype != values.dtype:
        raise ValueError(f"queries of {q.dtype} cannot attend to a cache of {keys.dtype} and {values.dtype}")
    return {"K": n_kv_heads, "G": q.shape[1] // n_kv_heads, "D": head_dim, "P": block_size}


def _pdl(device: torch.device) -> dict[str, bool]:
    pdl = pdl_supported(device)
    return {"PDL": pdl, "launch_pdl": pdl}


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"  # of 16-bit inputs it says nothing


def _block_n(dtype: torch.dtype, block_d: int) -> int:
    """Keys of one step. Products of fp32 hold them in registers."""
    if dtype == torch.float32:
        return 16
    return 64 if block_d <= 128 else 32


def decode_splits(pairs: int, longest: int, block_n: int, sms: int) -> int:
    """A power of two of programs a sequence and key-value head: at most two an SM in all, and none with less than a block."""
    splits = min(2 * sms // pairs, triton.cdiv(longest, block_n), MAX_SPLITS)
    return 1 << max(splits, 1).bit_length() - 1


def decode_launch(dtype: torch.dtype, group: int, head_dim: int) -> dict[str, Any]:
    block_d, padded = triton.next_power_of_2(head_dim), triton.next_power_of_2(group)
    return {
        "GROUP": padded,
        "BLOCK_M": max(padded, 16),
        "BLOCK_D": max(block_d, 16),
        "BLOCK_N": _block_n(dtype, block_d),
        "TILE": max(COMBINED_VALUES // (padded * block_d), 1),
        "PRECISION": _precision(dtype),
        "num_warps": DECODE_WARPS,
        "num_stages": 3,
    }


def prefill_launch(dtype: torch.dtype, group: int, head_dim: int, span: int, rows: int, sms: int) -> dict[str, Any]:
    """span: tokens of the longest; rows: those of all tokens' query heads together."""
    block_d, smallest = triton.next_power_of_2(head_dim), max(triton.next_power_of_2(group), 16)
    largest = 16 if dtype == torch.float32 else 128 if rows >= 2 * 128 * sms and block_d <= 128 else 64
    block_m = max(min(triton.next_power_of_2(span * group), largest), smallest)
    return {
        "BLOCK_M": block_m,
        "BLOCK_D": max(block_d, 16),
        "BLOCK_N": _block_n(dtype, block_d),
        "TOKENS": block_m // group,
        "PRECISION": _precision(dtype),
        "num_warps": 8 if block_m >= 128 or block_d > 128 or dtype.itemsize > 2 else 4,  # fewer would spill registers
        "num_stages": 3,
    }


@lru_cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache
def _arrivals(device: torch.device) -> Tensor:
    return torch.zeros(ARRIVALS, dtype=torch.int32, device=device)


def arrivals(device: torch.device, pairs: int) -> Tensor:
    """Counters that each launch finds zero and leaves zero. They are allocated once, by the first call, which must come before
    any capture of a CUDA graph: in one, the zeros would be written only when it is replayed."""
    if pairs > ARRIVALS:
        raise ValueError(f"{pairs} pairs of sequence and key-value head; at most {ARRIVALS}")
    if not _arrivals.cache_info().currsize and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("call paged_decode once before capturing it in a CUDA graph")
    return _arrivals(device)
