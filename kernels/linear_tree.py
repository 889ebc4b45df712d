"""Linear layers whose bits do not depend on the number of rows, the tiles, or the GPUs: sums in a fixed binary tree.

The in_features are cut into equal parts, a power of two of them. Tensor cores add the products of a part in order, in fp32, and
the sum is rounded to the dtype. Then neighbours are added in fp32, and rounded, until one sum is left:
((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). So GPUs that hold parts of the in_features hold whole subtrees, and what they exchange
has the dtype of the model (Zhang et al., *Deterministic inference across tensor parallel sizes*, arXiv:2511.17826).

Few rows: programs share a tile; each computes a subtree, and the last one to finish adds them. Many rows: one program computes
all parts of a tile and holds the tree's open sums, at most one for each level (on Hopper by `kernels/linear_tree_hopper.py`). Every config gives the same bits: the columns are
added in order, 16 at a time, and on Hopper a step's sum depends neither on the tile, nor on the instruction (wgmma or mma), nor on
which operand comes first. The GPU tests show it.

This module requires Triton. It also runs in Triton's interpreter.
"""

import math
from dataclasses import dataclass, replace
from importlib import import_module

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.activation import swiglu as activate
from kernels.dispatch import as_rows, pdl_options
from kernels.linear import PREFETCH_BYTES, aligned, counters, prefetch
from kernels.linear_config import MAX_TILES, SHARED_BYTES, SMS
from kernels.tile_gemm_triton import grouped

MAX_PARTS = 8
MANY_ROWS = 256  # with more, layers of several parts are faster with `linear_tree_hopper`


@dataclass(frozen=True)
class Tile:
    """Launch parameters. `split` programs, at most one for each part, share a tile of block_m rows by block_n features (with
    SwiGLU, of gate and of up). They load block_k columns at a time, `stages` - 1 times ahead."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int = 4
    split: int = 1


FLOAT32 = Tile(64, 32, 32, 2)
# The most rows: tiles of layers whose in_features are one part, several parts, and of SwiGLU. Up to 64 rows, memory is the bound:
# programs load 128 columns at once, and an SM has 100 to 205 KB underway, of one program or two. More rows use the largest tile
# whose sums and nodes stay in registers.
TILES: dict[float, tuple[Tile, Tile, Tile]] = {
    16: (Tile(16, 64, 128, 5), Tile(16, 64, 128, 5), Tile(16, 64, 128, 5)),
    32: (Tile(32, 64, 128, 4), Tile(32, 64, 128, 4), Tile(32, 64, 128, 5)),
    64: (Tile(64, 64, 128, 3), Tile(64, 64, 128, 6), Tile(64, 64, 128, 4, 8)),
    256: (Tile(128, 64, 128, 4), Tile(128, 128, 64, 4, 8), Tile(128, 64, 64, 3)),
    math.inf: (Tile(256, 128, 64, 4, 8), Tile(128, 128, 128, 3, 8), Tile(128, 128, 64, 4, 8)),
}
HALF = Tile(128, 128, 64, 4, 8)  # of the largest, where the last of those would leave many SMs without a tile
HALF_RATE = 0.82  # the speed of its multiplications over that of the largest


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, parts: int = 1, swiglu: bool = False) -> Tensor:
    """x @ weight.T + bias, summed in the tree of `parts` parts of K (1, 2, 4 or 8), each with 1 / parts of the bias. With `swiglu`,
    `kernels.activation.swiglu` of that.

    x (..., K), weight (N, K) and bias (N,) or None, of one dtype, fp32, bf16 or fp16, on one GPU. Returns (..., N), or (..., N / 2)
    with swiglu. Layers of one device must run one after another, because they share counters; the first call for a device must
    be outside a CUDA graph's capture. Raises ValueError if the parts are not equal."""
    if parts not in (1, 2, 4, MAX_PARTS) or weight.shape[1] % parts:
        raise ValueError(
            f"{weight.shape[1]} in_features cannot be summed in {parts} equal parts; use 1, 2, 4 or 8 that divide them"
        )
    if swiglu and parts > 1:
        return activate(linear(x, weight, bias, parts))
    rows = x.numel() // x.shape[-1]
    if parts > 1 and rows > MANY_ROWS and x.is_cuda:  # of one part, the larger tiles below are as fast
        hopper, flat = import_module("kernels.linear_tree_hopper"), as_rows(x)
        if hopper.preferred(flat, weight, bias, parts):
            product: Tensor = hopper.linear(flat, weight, parts)
            return product.view(*x.shape[:-1], len(weight))
    return linear_with(x, weight, bias, parts, swiglu, config(rows, len(weight), x.dtype, parts, swiglu))


def config(rows: int, n: int, dtype: torch.dtype, parts: int, swiglu: bool) -> Tile:
    """Launch parameters for this shape. The result is the same with all of them."""
    if dtype == torch.float32:
        return _shared(FLOAT32, rows, n, parts, 4)
    most = next(most for most in TILES if rows <= most)
    column, row, gated = TILES[most]
    if swiglu:
        return gated
    if parts > 1:
        return _shared(row, rows, n, parts, 2)
    if most == math.inf and _waves(rows, n, HALF) / 2 / HALF_RATE < _waves(rows, n, column):
        return HALF
    alone = rows <= 64 and n <= SMS * column.block_n  # a program has an SM for itself
    return replace(column, stages=2 * column.stages) if alone else column


def _tiles(rows: int, n: int, tile: Tile) -> int:
    return triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n)


def _waves(rows: int, n: int, tile: Tile) -> int:
    """The most tiles that an SM computes."""
    return triton.cdiv(_tiles(rows, n, tile), SMS)


def _shared(tile: Tile, rows: int, n: int, parts: int, itemsize: int) -> Tile:
    """With as many programs for a tile as the SMs hold at once: programs that would wait for others gain nothing."""
    at_once = SMS * (SHARED_BYTES // (tile.stages * (tile.block_m + tile.block_n) * tile.block_k * itemsize))
    most = max(1, at_once // _tiles(rows, n, tile))
    return replace(tile, split=min(parts, 1 << most.bit_length() - 1))


def linear_with(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, swiglu: bool, tile: Tile) -> Tensor:
    """`linear` with these launch parameters; with swiglu, one part."""
    n, k = weight.shape
    features = n // 2 if swiglu else n
    out = torch.empty(*x.shape[:-1], features, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x, weight = as_rows(x), weight.contiguous()
    rows, part = len(x), k // parts
    block_k = tile.block_k if parts == 1 else min(tile.block_k, part & -part)  # TMA must not load from the next part, too
    described = block_k >= 16 and aligned(x) and aligned(weight)
    block_k = block_k if described else min(tile.block_k, max(16, triton.next_power_of_2(part)))
    tiles = _tiles(rows, features, tile)
    split = min(tile.split, parts) if tiles <= MAX_TILES else 1
    swapped = tile.block_m <= 64  # fewer rows would waste the first operand of wgmma, which has 64
    w_blocks = TensorDescriptor.from_tensor(weight, [tile.block_n, block_k]) if described else None
    whole = described and rows >= tile.block_m  # TMA is slow where rows do not exist
    x_blocks = TensorDescriptor.from_tensor(x, [tile.block_m, block_k]) if whole else None
    nodes = torch.empty(split * rows * n if split > 1 else 0, dtype=x.dtype, device=x.device)
    prefetched = max(256, PREFETCH_BYTES // weight.itemsize // n) // split // 8 * 8 if swapped and described else 0
    _linear_tree[(tiles, split)](
        x, weight, x_blocks, w_blocks, bias, out, nodes, counters(x.device), rows, n, k, x.stride(0), prefetched,
        PARTS=parts // split, SPLIT=split, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=block_k, STAGES=tile.stages,
        SWAPPED=swapped, SWIGLU=swiglu, WARPS=tile.warps, num_warps=tile.warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


# --- the kernel ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _load(matrix, blocks, row, column, end, rows, stride, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """(BLOCK_M, BLOCK_K) values of a matrix, from this row and column on. Beyond its rows and columns there are zeros; without a
    descriptor also from column `end` on."""
    if blocks is not None:
        values = blocks.load([row, column])
    else:
        m, k = row + tl.arange(0, BLOCK_M)[:, None], column + tl.arange(0, BLOCK_K)[None, :]
        values = tl.load(matrix + m.to(tl.int64) * stride + k, mask=(m < rows) & (k < end), other=0.0)
    return values


@triton.jit
def _pack(values):
    """(M, N) values; pairs of 16-bit ones as (M, N / 2) words, because Triton holds each value in a register of its own."""
    if values.dtype == tl.float32:
        words = values
    else:
        first, second = tl.split(values.reshape(values.shape[0], values.shape[1] // 2, 2))
        first, second = first.to(tl.int16, bitcast=True).to(tl.int32), second.to(tl.int16, bitcast=True).to(tl.int32)
        words = (first & 0xFFFF) | (second << 16)
    return words


@triton.jit
def _unpack(words, dtype: tl.constexpr):
    if dtype == tl.float32:
        values = words
    else:
        first, second = words.to(tl.int16).to(dtype, bitcast=True), (words >> 16).to(tl.int16).to(dtype, bitcast=True)
        values = tl.join(first, second).reshape(words.shape[0], words.shape[1] * 2)
    return values


@triton.jit
def _add(a, b):
    return (a.to(tl.float32) + b.to(tl.float32)).to(b.dtype)


@triton.jit
def _push(one, two, four, node, i):
    """Add leaf number i to a tree. Returns its open sums, packed: of one, of two, and of four leaves or, at the end, of eight."""
    if i % 2 == 0:
        one = _pack(node)
    else:
        node = _add(_unpack(one, node.dtype), node)
        if i % 4 == 1:
            two = _pack(node)
        else:
            node = _add(_unpack(two, node.dtype), node)
            if i % 8 == 7:
                node = _add(_unpack(four, node.dtype), node)
            four = _pack(node)
    return one, two, four


@triton.jit
def _leaf(sums, bias, n, count, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """A part's sums with its share of the bias of features n, of which `count` exist, rounded."""
    if bias is not None:
        sums += tl.load(bias + n, mask=n < count, other=0.0).to(tl.float32) * (1 / PARTS)
    return sums.to(DTYPE)


@triton.jit
def _dot(a, w, sums, SWAPPED: tl.constexpr):
    return tl.dot(w, a.T, sums, input_precision="ieee") if SWAPPED else tl.dot(a, w.T, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["rows", "prefetched"])
def _linear_tree(
    x,  # (rows, K)
    weight,  # (N, K)
    x_blocks, w_blocks,  # their descriptors, or None
    bias,  # (N,) or None
    out,  # (rows, N), or (rows, N / 2) with SWIGLU
    nodes,  # (SPLIT, rows, N)
    counters,  # one for each tile, zero before and after
    rows, N, K, x_stride,
    prefetched,  # columns of each part of the weight to prefetch before the input is ready
    PARTS: tl.constexpr,  # of each of the SPLIT programs of a tile
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SWAPPED: tl.constexpr,  # the weight is the first operand, as there are too few rows for it: tiles are transposed
    SWIGLU: tl.constexpr, PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    features = N // 2 if SWIGLU else N
    row_tile, column_tile = grouped(tile, tl.cdiv(rows, BLOCK_M), tl.cdiv(features, BLOCK_N), 8)
    row, feature, part = row_tile * BLOCK_M, column_tile * BLOCK_N, K // (SPLIT * PARTS)
    m, n = row + tl.arange(0, BLOCK_M), feature + tl.arange(0, BLOCK_N)
    m, n = (m[None, :], n[:, None]) if SWAPPED else (m[:, None], n[None, :])
    DTYPE: tl.constexpr = out.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if prefetched > 0:
            prefetch(weight, K, feature, features - feature, split * PARTS * part, prefetched, BLOCK_N, WARPS)
            if SWIGLU:
                prefetch(weight, K, features + feature, features - feature, 0, prefetched, BLOCK_N, WARPS)
        tl.extra.cuda.gdc_wait()
    steps = tl.cdiv(part, BLOCK_K)
    sums = tl.zeros((m * n).shape, tl.float32)
    up, one = sums, _pack(sums.to(DTYPE))
    two, four = one, one
    for step in tl.range(0, PARTS * steps, num_stages=STAGES):  # one loop, so that loads run ahead into the next part
        begin = (split * PARTS + step // steps) * part
        start, end = begin + step % steps * BLOCK_K, begin + part
        a = _load(x, x_blocks, row, start, end, rows, x_stride, BLOCK_M, BLOCK_K)
        sums = _dot(a, _load(weight, w_blocks, feature, start, end, N, K, BLOCK_N, BLOCK_K), sums, SWAPPED)
        if SWIGLU:
            up = _dot(a, _load(weight, w_blocks, features + feature, start, end, N, K, BLOCK_N, BLOCK_K), up, SWAPPED)
        if PARTS > 1:  # noqa: SIM102 (one is known when it is compiled)
            if (step + 1) % steps == 0:
                leaf = _leaf(sums, bias, n, features, SPLIT * PARTS, DTYPE)
                one, two, four = _push(one, two, four, leaf, step // steps)
                sums = tl.zeros_like(sums)
    if PARTS == 1:
        node = _leaf(sums, bias, n, features, SPLIT, DTYPE)
        if SWIGLU:
            gate = node.to(tl.float32)
            up = _leaf(up, None if bias is None else bias + features, n, features, 1, DTYPE)
            node = (gate * tl.sigmoid(gate) * up.to(tl.float32)).to(DTYPE)
    else:
        node = _unpack(two if PARTS == 2 else four, DTYPE)

    offsets, inside = m.to(tl.int64) * features + n, (m < rows) & (n < features)
    if SPLIT == 1:
        tl.store(out + offsets, node, mask=inside)
    else:
        size = rows.to(tl.int64) * N
        tl.store(nodes + split * size + offsets, node, mask=inside)
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            tl.store(counters + tile, 0)
            for i in range(SPLIT):  # from L2, because other programs wrote them
                node = tl.load(nodes + i * size + offsets, mask=inside, other=0.0, cache_modifier=".cg")
                one, two, four = _push(one, two, four, node, i)
            tl.store(out + offsets, _unpack(two if SPLIT == 2 else four, DTYPE), mask=inside)
