"""Low-rank adapters of a linear layer (Hu et al., LoRA, arXiv:2106.09685), several in one batch: y += B (A x) for each row with the
adapter of its sequence. As in Punica (Chen et al., arXiv:2310.18547), rows are grouped by adapter, and one kernel computes all
products with A, a second one those with B.

A row without an adapter is in no group, so it costs nothing. Sums are in fp32. The products with A are rounded to the weights' type
before they are multiplied with B, as in two linear layers.
"""

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import on_gpu, pdl_options, tl, triton

DECODE_TILE, PREFILL_TILE = 16, 64  # rows of a tile on a GPU; tl.dot takes at least 16
BLOCK_K = 64  # input features that a program of `_shrink` multiplies at once
SPLIT_K = 256  # input features of such a program, at least
MOST_SPLITS = {DECODE_TILE: 16, PREFILL_TILE: 4}
PROGRAMS = 264  # of `_shrink`, about: two for each SM
COLUMNS = {DECODE_TILE: 64, PREFILL_TILE: 128}  # output features of a program of `_expand` in 16 bits, by the rows of its tile
MOST_PARTS = 5  # of a layer: those of a parallel block
BLOCK_R = 64  # most columns of a product with A that a program holds


class Groups(NamedTuple):
    """The rows of a step that have an adapter, by adapter.

    order: (R,) int32, their indices; those of a group follow one another. tiles: (T, 3) int32, for each tile the slot of its
    adapter, its first place in `order`, and its number of rows, 0 for padding. tile: the most rows of a tile."""

    order: Tensor
    tiles: Tensor
    tile: int


class LowRank(NamedTuple):
    """The adapters of one layer, of which each has a slot.

    a: (S, P, R, K), for each of the layer's P fused parts; b: (S, N, R), with the factor alpha / rank. R, the same for all, is a power
    of two from 16 on; lower ranks are filled with zeros. sizes: the output features of each part, N in all."""

    a: Tensor
    b: Tensor
    sizes: tuple[int, ...]


def padded_rank(rank: int) -> int:
    """The R of `LowRank` for adapters of at most this rank."""
    return max(16, 1 << (rank - 1).bit_length())


def most_tiles(rows: int, slots: int, tile: int) -> int:
    """The most tiles that so many rows need."""
    return min(rows, -(-rows // tile) + slots - 1)


def group_rows(slots: np.ndarray, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """The `order` and `tiles` of rows with these slots (T,), -1 without an adapter."""
    order = np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]
    found, first, counts = np.unique(slots[order], return_index=True, return_counts=True)
    tiles = [
        (slot, start + i, min(tile, count - i))
        for slot, start, count in zip(found.tolist(), first.tolist(), counts.tolist(), strict=True)
        for i in range(0, count, tile)
    ]
    return order.astype(np.int32), np.array(tiles, np.int32).reshape(-1, 3)


def add_low_rank(y: Tensor, x: Tensor, weights: LowRank, groups: Groups) -> Tensor:
    """Add the adapters' products of x (..., K) to y (..., N), in place if its rows are contiguous. Returns y. All in one data type."""
    out, rows = y.reshape(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
    if not len(groups.tiles):
        return y
    if on_gpu(x):
        _add_on_gpu(out, rows if rows.stride(1) == 1 else rows.contiguous(), weights, groups)
    else:
        add_reference(out, rows, weights, groups)
    return out.view(y.shape)


def add_reference(y: Tensor, x: Tensor, weights: LowRank, groups: Groups) -> None:
    """`add_low_rank` of rows, x (T, K) and y (T, N), with PyTorch."""
    a, b, sizes = weights
    for slot, first, count in groups.tiles.tolist():
        if count:
            rows = groups.order[first : first + count].long()
            hidden = (x[rows] @ a[slot].flatten(0, 1).T).unflatten(-1, a.shape[1:3]).unbind(1)
            parts = [h @ part.T for h, part in zip(hidden, b[slot].split(sizes), strict=True)]
            y.index_add_(0, rows, torch.cat(parts, -1))


def _add_on_gpu(y: Tensor, x: Tensor, weights: LowRank, groups: Groups) -> None:
    a, b, sizes = weights
    (_, parts, rank, size), tiles, tile = a.shape, len(groups.tiles), groups.tile
    block_r = min(rank, BLOCK_R)
    columns = parts * rank // block_r
    splits = min(-(-PROGRAMS // (tiles * columns)), -(-size // SPLIT_K), MOST_SPLITS[tile])
    per_split = -(-size // splits // BLOCK_K) * BLOCK_K
    splits = -(-size // per_split)
    hidden = torch.empty(splits, len(groups.order), parts * rank, dtype=torch.float32, device=x.device)
    pdl = pdl_options(x.device)
    _shrink[(tiles, columns, splits)](
        x, a, hidden, groups.order, groups.tiles, x.stride(0), size, per_split, len(groups.order),
        COLUMNS=parts * rank, TILE=tile, BLOCK_R=block_r, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3, **pdl,
    )  # fmt: skip
    block_n, ends = COLUMNS[tile] * 2 // x.element_size(), list(accumulate(sizes))
    ends += ends[-1:] * (MOST_PARTS - parts)
    _expand[(tiles, triton.cdiv(max(sizes), block_n), parts)](
        y, b, hidden, groups.order, groups.tiles, y.stride(0), len(groups.order), *ends,
        COLUMNS=parts * rank, RANK=rank, SPLITS=splits, TILE=tile, BLOCK_R=block_r, BLOCK_N=block_n, num_warps=4, **pdl,
    )  # fmt: skip


@triton.jit
def _shrink(
    x, a, hidden, order, tiles, x_stride, size, per_split, places,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden (splits, places, COLUMNS): the products of a tile's rows with BLOCK_R rows of A, over a part of the input features."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, split = tl.program_id(0), tl.program_id(2)
    slot, first, count = tl.load(tiles + 3 * tile).to(tl.int64), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    if count > 0:
        member, column = tl.arange(0, TILE), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        row = tl.load(order + first + member, mask=member < count, other=0).to(tl.int64)
        total = tl.zeros([TILE, BLOCK_R], tl.float32)
        start = split * per_split
        for k in range(start, tl.minimum(start + per_split, size), BLOCK_K):
            feature = k + tl.arange(0, BLOCK_K)
            inside = feature < size
            values = tl.load(
                x + row[:, None] * x_stride + feature[None, :], mask=(member < count)[:, None] & inside[None, :], other=0.0
            )
            weights = tl.load(a + (slot * COLUMNS + column[None, :]) * size + feature[:, None], mask=inside[:, None], other=0.0)
            total = tl.dot(values, weights, total, input_precision="ieee")
        place = (split * places + first + member).to(tl.int64)
        tl.store(hidden + place[:, None] * COLUMNS + column[None, :], total, mask=(member < count)[:, None])


@triton.jit
def _expand(
    y, b, hidden, order, tiles, y_stride, places, end0, end1, end2, end3, end4,
    COLUMNS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add to y the products of a tile's rows of `hidden`, summed over the splits, with BLOCK_N rows of one part's B. What no kernel
    of the step writes is loaded before the kernel before this one has ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile, part = tl.program_id(0), tl.program_id(2)
    begin = tl.where(part == 0, 0, tl.where(part == 1, end0, tl.where(part == 2, end1, tl.where(part == 3, end2, end3))))
    end = tl.where(part == 0, end0, tl.where(part == 1, end1, tl.where(part == 2, end2, tl.where(part == 3, end3, end4))))
    slot, first, count = tl.load(tiles + 3 * tile).to(tl.int64), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    member, feature = tl.arange(0, TILE), begin + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_feature = member < count, (feature < end) & (count > 0)
    row = tl.load(order + first + member, mask=is_row, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK_R)
    low_weights = b + (slot * end4 + feature[None, :]) * RANK + column[:, None]
    weights = tl.load(low_weights, mask=is_feature[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (count > 0) & (begin + tl.program_id(1) * BLOCK_N < end):
        total = tl.zeros([TILE, BLOCK_N], tl.float32)
        for r in tl.static_range(0, RANK, BLOCK_R):
            if r > 0:
                weights = tl.load(low_weights + r, mask=is_feature[None, :], other=0.0)
            low = tl.zeros([TILE, BLOCK_R], tl.float32)
            for split in tl.static_range(SPLITS):
                place = (split * places + first + member).to(tl.int64)
                own = hidden + place[:, None] * COLUMNS + part * RANK + r + column[None, :]
                low += tl.load(own, mask=is_row[:, None], other=0.0)
            total = tl.dot(low.to(b.dtype.element_ty), weights, total, input_precision="ieee")
        target, inside = y + row[:, None] * y_stride + feature[None, :], is_row[:, None] & is_feature[None, :]
        tl.store(target, (tl.load(target, mask=inside, other=0.0).to(tl.float32) + total).to(y.dtype.element_ty), mask=inside)
