"""The sums of `kernels/linear_tree.py` of many rows on Hopper, with warp specialization, in Gluon.

One warp loads operands by TMA, also those of the next part and of the next tile, while eight warps multiply and add the tree, as in
`kernels/tile_gemm_hopper.py`. A thread adds pairs of 16-bit values as words. A tile has 128 fp32 sums in each thread; of the tree's
open sums, that of one leaf stays in registers, too. Those of two and of four leaves wait in memory, where each thread reads what it
wrote itself. Triton's interpreter cannot run this.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.linear import aligned
from kernels.tile_gemm import GemmTiling
from kernels.tile_gemm_hopper import REGISTERS, descriptor, load, make_ring, multiply, nth_tile, tile_count, zero_sums
from kernels.tile_gemm_triton import grid, grouped

TILING = GemmTiling(128, 256, stages=4, specialized=True)
LEAST_TILES = 96  # fewer leave so many of the 132 SMs idle that smaller tiles are faster


def preferred(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> bool:
    """Whether `linear` is to be used for x (R, K) and weight (N, K): on a Hopper GPU, without a bias, if TMA can load them."""
    if bias is not None or x.dtype == torch.float32 or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    tiles = triton.cdiv(len(x), TILING.block_m) * triton.cdiv(len(weight), TILING.block_n)
    whole = x.shape[1] % (parts * TILING.block_k) == 0 and len(weight) % 2 == 0
    return whole and tiles >= LEAST_TILES and all(one.is_contiguous() and aligned(one) for one in (x, weight))


def linear(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """`kernels.linear_tree.linear` of x (R, K) and weight (N, K) of which it is `preferred`."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    programs, words = grid(x, weight, 1, TILING)[0], TILING.block_m * TILING.block_n // 2
    nodes = torch.empty(programs * 2 * words if parts > 2 else 0, dtype=torch.int32, device=x.device)
    _linear_tree[(programs,)](
        descriptor(x, tuple(x.shape), (TILING.block_m, TILING.block_k)),
        descriptor(weight, tuple(weight.shape), (TILING.block_n, TILING.block_k)),
        *(out, nodes, len(x), len(weight), x.shape[1] // (parts * TILING.block_k)),
        PARTS=parts, STAGES=TILING.stages, GROUP=TILING.group, num_warps=TILING.warps, maxnreg=REGISTERS, launch_pdl=True,
    )  # fmt: skip
    return out


@gluon.jit
def _rounded(sums, DTYPE: gl.constexpr):
    """(M, N) fp32 values in a 16-bit dtype: (M, N / 2) words of two neighbours."""
    PAIR: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == DTYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
    first, second = gl.split(sums.reshape([sums.shape[0], sums.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(PAIR, "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _add(a, b, DTYPE: gl.constexpr):
    """Sums of the values in words, rounded once. An addition in fp32 that is rounded after it gives the same: where fp32 itself
    rounds, the smaller value is far below half a unit in the last place of the larger one."""
    PAIR: gl.constexpr = "add.rn.bf16x2 $0, $1, $2;" if gl.bfloat16 == DTYPE else "add.rn.f16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(PAIR, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _row_and_word(words):
    """The row (M, 1) and the column (1, W) of words (M, W)."""
    LAYOUT: gl.constexpr = words.type.layout
    row = gl.arange(0, words.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    return row, gl.arange(0, words.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _places(words):
    """Where words (M, W) wait in memory: so that what a warp writes at a time, 8 rows of 4 words, is contiguous."""
    row, word = _row_and_word(words)
    return (word // 4 * words.shape[0] + row) * 4 + word % 4


@gluon.jit
def _multiply_tree(ring, out, nodes, rows, features, row_tiles, columns, steps, PARTS: gl.constexpr, GROUP: gl.constexpr):
    BLOCK_M: gl.constexpr = ring[0].type.shape[1]
    BLOCK_N: gl.constexpr = ring[1].type.shape[1]
    DTYPE: gl.constexpr = out.dtype.element_ty
    twos = nodes + gl.program_id(0) * (BLOCK_M * BLOCK_N)
    fours = twos + BLOCK_M * BLOCK_N // 2
    sums = zero_sums(ring)
    step = 0
    for nth in range(tile_count(row_tiles * columns)):
        row_tile, column_tile = grouped(nth_tile(nth), row_tiles, columns, GROUP)
        one = _rounded(sums, DTYPE)  # no part's: so that it has a type
        for part in gl.static_range(PARTS):
            sums, step = multiply(ring, sums, step, steps)
            node = _rounded(sums, DTYPE)
            if part % 2 == 1:
                node = _add(one, node, DTYPE)
            if part % 4 == 3:
                node = _add(gl.load(twos + _places(node)), node, DTYPE)
            if part % 8 == 7:
                node = _add(gl.load(fours + _places(node)), node, DTYPE)
            if part + 1 < PARTS:
                if part % 2 == 0:
                    one = node
                elif part % 4 == 1:
                    gl.store(twos + _places(node), node)
                else:
                    gl.store(fours + _places(node), node)
        row, word = _row_and_word(node)
        row, word = row_tile * BLOCK_M + row, column_tile * (BLOCK_N // 2) + word
        places = out.to(gl.pointer_type(gl.int32)) + row.to(gl.int64) * (features // 2) + word
        gl.store(places, node, mask=(row < rows) & (word < features // 2))


@gluon.jit
def _load_tiles(x, weight, ring, row_tiles, columns, steps, GROUP: gl.constexpr):
    step = 0
    for nth in range(tile_count(row_tiles * columns)):
        row_tile, column_tile = grouped(nth_tile(nth), row_tiles, columns, GROUP)
        row, column = row_tile * x.block_type.shape[0], column_tile * weight.block_type.shape[0]
        step = load(x, weight, ring, row, column, step, steps)


@gluon.jit(do_not_specialize=["rows"])
def _linear_tree(
    x,  # descriptor of (rows, K)
    weight,  # descriptor of (features, K)
    out,  # (rows, features)
    nodes,  # words: two tiles of each program
    rows,
    features,
    steps,  # of a part
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    ring = make_ring(x, weight, STAGES)
    tl.extra.cuda.gdc_wait()
    row_tiles, columns = gl.cdiv(rows, x.block_type.shape[0]), gl.cdiv(features, weight.block_type.shape[0])
    gl.warp_specialize(
        [
            (_multiply_tree, (ring, out, nodes, rows, features, row_tiles, columns, steps, PARTS, GROUP)),
            (_load_tiles, (x, weight, ring, row_tiles, columns, PARTS * steps, GROUP)),
        ],
        [1],
        [40],
    )
    tl.extra.cuda.gdc_launch_dependents()
