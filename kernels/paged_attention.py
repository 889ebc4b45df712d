"""Attention over a paged KV cache: one query a sequence (decode), and spans of queries of several sequences (prefill).

Shapes: a cache of N blocks of P tokens, K key-value heads, H query heads, D head_dim; B or S sequences, whose blocks a table of
width W lists in order. A query at position i sees the keys at positions 0 … i, or the last `window` of them. Scores are scaled by
1 / sqrt(D); the softmax is computed in fp32.
"""

import math

import torch
from torch import Tensor

from kernels.dispatch import on_gpu


def paged_decode(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, window: int | None, max_length: int
) -> Tensor:
    """Attention of one query a sequence, at position lengths[b] - 1, whose key and value are in the cache already.

    q (B, H, D); keys and values (N, P, K, D), P a power of two; tables (B, W) int32; lengths (B,) int32, 0 for padding, whose
    output is zero. Returns (B, H, D) in q's dtype. `max_length` bounds the lengths and decides how finely the GPU splits a
    sequence; shorter ones are not slowed by it."""
    arguments = q, keys, values, tables, lengths, window, max_length
    if not on_gpu(q):
        return paged_decode_reference(*arguments)
    from kernels import paged_attention_triton

    return paged_attention_triton.paged_decode(*arguments)


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
    """Causal attention of S spans of queries that lie one behind the other in q.

    q (T, H, D); keys and values (N, P, K, D), P a power of two; tables (S, W) int32; starts (S + 1,) int32: span s is rows
    starts[s] … starts[s + 1] - 1, may be empty, and the rows from starts[S] on are padding, whose output is zero; lengths (S,)
    int32: the tokens that a span's last row sees, itself among them. Returns (T, H, D) in q's dtype. `max_span` is at least the
    longest span's number of rows."""
    arguments = q, keys, values, tables, starts, lengths, window, max_span
    if not on_gpu(q):
        return paged_prefill_reference(*arguments)
    from kernels import paged_attention_triton

    return paged_attention_triton.paged_prefill(*arguments)


def paged_decode_reference(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, window: int | None, max_length: int
) -> Tensor:
    out = torch.zeros_like(q)
    for b, length in enumerate(lengths.tolist()):
        if length:
            out[b] = _attend(q[b : b + 1], keys, values, tables[b], length, window)[0]
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
) -> Tensor:
    out = torch.zeros_like(q)
    bounds = starts.tolist()
    for s, length in enumerate(lengths.tolist()):
        first, last = bounds[s : s + 2]
        if last > first:
            out[first:last] = _attend(q[first:last], keys, values, tables[s], length, window)
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: int, window: int | None) -> Tensor:
    """q (n, H, D), the last n of `length` positions of the sequence in `table` (W,), to (n, H, D)."""
    n, _, head_dim = q.shape
    blocks = table[: -(-length // keys.shape[1])].long()
    k, v = (x[blocks].flatten(0, 1)[:length].float() for x in (keys, values))  # (L, K, D)
    grouped = q.float().unflatten(1, (k.shape[1], -1))  # (n, K, H / K, D)
    scores = torch.einsum("nkgd,lkd->kgnl", grouped, k) / math.sqrt(head_dim)
    ages = torch.arange(length - n, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    seen = ages >= 0 if window is None else (ages >= 0) & (ages < window)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("kgnl,lkd->nkgd", weights, v).flatten(1, 2).to(q.dtype)
