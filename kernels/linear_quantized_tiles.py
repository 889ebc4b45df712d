"""Quantized linear layers of many rows on Hopper, in Gluon: codes of 8 or 4 bits become operands of wgmma in registers.

One warp loads codes, scales and input as in `kernels/linear_quantized_stream.py`, whose packing and shares of the steps this kernel
has. Two warpgroups multiply, each with half of a tile's rows of the weight: sums^T (features, ROWS) += weight @ x^T. Scales of groups
multiply the converted codes, rather than sums, so that all registers are left for one set of sums. A warpgroup converts a piece of
the weight while the tensor cores multiply the previous one, and waits for no other warpgroup, so one of them multiplies while the
other stores its sums.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.dispatch import pdl_options
from kernels.linear_config import LOADER_REGISTERS, QuantizedTiles
from kernels.linear_quantized import Packed, exact_scales
from kernels.linear_quantized_stream import allocate_ring, load, scale_rows, unpack_asm, weight_piece, zero_offset
from kernels.linear_stream import add_pieces, descriptor, program_share, share_counts, share_tile, store_piece, store_tile

_LOADER_REGISTERS = gl.constexpr(LOADER_REGISTERS)
_REGISTERS = gl.constexpr(232)  # of a thread of the second warpgroup, and what is left for the first one


@gluon.jit
def _multiply(
    ring, row_scales, bias, out, partials, counters, rows, features, share,
    UNPACK: gl.constexpr, GROUP: gl.constexpr, SWIGLU: gl.constexpr, HALF: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warpgroup: for each tile, the products of this program's steps with half of the weight's rows, then the result or the sums
    of its piece. `sums` are those of the gate and `up` are those of the up projection, or of other rows without SWIGLU."""
    a, _s, _z, b, full, free = ring
    STAGES: gl.constexpr = full.type.shape[0]
    BLOCK: gl.constexpr = a.type.shape[1] // (2 if SWIGLU else 4)
    ROWS: gl.constexpr = b.type.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    _row_tiles, row_tile, _nth, _sharers, steps, _whole, _total = share
    tiles, _steps = share_counts(share)
    partials += HALF * 2 * gl.num_programs(0) * (2 * BLOCK * ROWS)  # each warpgroup has its own pieces and counters
    counters += HALF * 2 * gl.num_programs(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    nth = 0
    for i in range(tiles):
        tile, shared, first, last = share_tile(share, i)
        sums = gl.zeros((BLOCK, ROWS), gl.float32, LAYOUT)
        up = gl.zeros((BLOCK, ROWS), gl.float32, LAYOUT)
        for _ in range(first, last):
            slot = nth % STAGES
            mbarrier.wait(full.index(slot), nth // STAGES & 1)
            sums, up = _step(ring, slot, sums, up, UNPACK, GROUP, SWIGLU, HALF)
            mbarrier.arrive(free.index(slot))
            nth += 1
        complete = last - first == steps
        if not complete:
            complete = store_piece(sums, up, partials, counters, share, shared, True)
            if complete:
                sums, up = add_pieces(sums, up, partials, counters, share, shared, True)
        if complete:
            row, column = row_tile * ROWS, (tile * (2 if SWIGLU else 4) + HALF * (1 if SWIGLU else 2)) * BLOCK
            second = features if SWIGLU else BLOCK  # rows of the weight from those of `sums` to those of `up`
            if row_scales is not None:
                sums *= scale_rows(row_scales, column, features, sums)
                up *= scale_rows(row_scales + second, column, features if SWIGLU else features - BLOCK, up)
            store_tile(sums, up, bias, out, row, column, rows, features, SWIGLU)
            if not SWIGLU:
                store_tile(up, up, bias, out, row, column + BLOCK, rows, features, False)


@gluon.jit
def _step(ring, slot, sums, up, UNPACK: gl.constexpr, GROUP: gl.constexpr, SWIGLU: gl.constexpr, HALF: gl.constexpr):
    """Add a step's products. While the tensor cores multiply a piece of the weight, the next one is converted."""
    _a, _s, _z, b, full, _free = ring
    PIECES: gl.constexpr = b.type.shape[0] // full.type.shape[0]
    PARTS: gl.constexpr = 2 if SWIGLU else 1
    FIRST: gl.constexpr = HALF * (3 - PARTS)
    like = sums  # has a layout, unlike the sums of wgmmas under way
    w_up = 0
    for piece in gl.static_range(PIECES):
        x = b.index(slot * PIECES + piece).permute((1, 0))
        w = weight_piece(ring, PARTS * slot, FIRST, piece, PIECES, UNPACK, GROUP, like)
        sums = warpgroup_mma(w, x, sums, is_async=True)
        if piece > 0:
            up, w_up = warpgroup_mma_wait(1, (up, w_up))
        w_up = weight_piece(ring, PARTS * slot + PARTS - 1, FIRST + 2 - PARTS, piece, PIECES, UNPACK, GROUP, like)
        up = warpgroup_mma(w_up, x, up, is_async=True)
        sums, w = warpgroup_mma_wait(1, (sums, w))
    up, w_up = warpgroup_mma_wait(0, (up, w_up))
    return sums, up


@gluon.jit(do_not_specialize=["rows"])
def _tiles(
    x,  # descriptor of (rows, K)
    codes,  # descriptor of (N, K * bits / 16)
    scales,  # descriptor of (groups, N), or None
    zeros,  # descriptor of (groups, N), or None
    row_scales,  # (N,), or None
    bias,  # (N,) or None
    out,  # (rows, features)
    partials,  # for each program and warpgroup, the fp32 sums of two tiles
    counters,  # for each warpgroup, one for each shared tile, fewer than two for each program; zero before and after
    rows,
    features,  # N, or N / 2 with SWIGLU
    K,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    UNPACK: gl.constexpr,  # (PTX, codes in two bytes, offset of zero points or None, whether scales multiply the codes)
    GROUP: gl.constexpr,  # input features that share a scale, 0 for all of them
    SWIGLU: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    ring = allocate_ring(x, codes, scales, zeros, BLOCK_K, STAGES, 2 if SWIGLU else 1, 2)
    share = program_share(rows, features, K, x.block_type.shape[0], codes.block_type.shape[0], BLOCK_K)
    gl.warp_specialize(
        [
            (
                _multiply,
                (ring, row_scales, bias, out, partials, counters, rows, features, share, UNPACK, GROUP, SWIGLU, 0, PDL),
            ),
            (
                _multiply,
                (ring, row_scales, bias, out, partials, counters, rows, features, share, UNPACK, GROUP, SWIGLU, 1, PDL),
            ),
            (load, (x, codes, scales, zeros, ring, share, features, SWIGLU, PDL)),
        ],
        [4, 1],
        [_REGISTERS, _LOADER_REGISTERS],
    )


def tiles(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    out: Tensor,
    counters: Tensor,
    chosen: QuantizedTiles,
    swiglu: bool,
) -> None:
    """`kernels.linear_quantized.linear_with` into out (rows, features), for x (rows, K), bf16 or fp16. Raises ValueError if the
    config does not support them."""
    fmt, n, k = packed.format, packed.n, packed.k
    if not chosen.fits(n, k, fmt) or not exact_scales(packed, x.dtype):
        raise ValueError(f"{chosen} cannot multiply {len(x)} rows with a weight {(n, k)} of {fmt}, swiglu={swiglu}")
    for part, result in zip(x.split(chosen.most_rows), out.split(chosen.most_rows), strict=True):
        _launch(part, packed, bias, result, counters, chosen, swiglu)


def _launch(
    x: Tensor, packed: Packed, bias: Tensor | None, out: Tensor, counters: Tensor, chosen: QuantizedTiles, swiglu: bool
) -> None:
    fmt, features, grouped = packed.format, out.shape[-1], packed.format.group > 0
    block = chosen.block_n * features // packed.n
    steps = -(-features // block) * -(-packed.k // chosen.block_k)
    programs = -(-len(x) // chosen.rows) * min(chosen.sharers(len(x)), steps)
    partials = torch.empty(2 * programs * chosen.block_n * chosen.rows, dtype=torch.float32, device=x.device)
    scale_block = (chosen.block_k // fmt.group, block) if grouped else (0, 0)
    _tiles[(programs,)](
        descriptor(x, (chosen.rows, fmt.piece)),
        descriptor(packed.codes, (block, chosen.block_k * fmt.bits // 16)),
        descriptor(packed.scales, scale_block, swizzled=False) if grouped else None,
        descriptor(packed.zeros, scale_block, swizzled=False) if packed.zeros is not None else None,
        None if grouped else packed.scales,
        *(bias, out, partials, counters, len(x), features, packed.k),
        BLOCK_K=chosen.block_k,
        STAGES=chosen.stages,
        UNPACK=(unpack_asm(fmt, x.dtype, grouped), 16 // fmt.bits, zero_offset(fmt, x.dtype), grouped),
        GROUP=fmt.group,
        SWIGLU=swiglu,
        num_warps=4,
        maxnreg=168,
        **pdl_options(x.device),
    )
