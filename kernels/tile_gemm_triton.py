"""Triton kernels that multiply matrices tile by tile and exchange rows with other GPUs over NVLink meanwhile: no multicast.

Both are persistent: program p does tiles p, p + programs, … TMA loads operands through descriptors that the host makes; tensor
cores add in fp32. The order of tiles follows the rank (Flux, arXiv:2406.06858, section 4.1: tile coordinate swizzling).

Memory order, reduce-scatter. A tile is stored by ordinary stores, not by TMA: TMA stores belong to the async proxy, and nothing
that Triton emits makes their completion at another GPU come before a flag. The barrier after the stores, the tile's count
(acquire and release at system scope) and the flag's exchange (release at system scope) form a chain: a GPU that has seen the
flag sees the tiles of all programs.

Memory order, all-gather. The rows that TMA loads, in the async proxy, were stored in the generic proxy by other GPUs or by a
copy engine. After the polls that acquired the flag all threads pass a barrier, and then a fence between the proxies. So both
precede the load, whichever thread issues it. TMA does not read through L1, and stores over NVLink arrive in L2.

Import this module only where Triton is needed; it also runs in Triton's interpreter (TRITON_INTERPRET=1), without the fences.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.dispatch import pdl_options
from kernels.tile_gemm import BLOCK, COUNTERS, Tiling, row_tiles

_BLOCK = tl.constexpr(BLOCK)


# --- tiles --------------------------------------------------------------------------------------------------------------------


@triton.jit
def _grouped(tile, rows, columns, GROUP: tl.constexpr):
    """The place of a tile among rows x columns of them: down groups of GROUP rows, then to the next column."""
    width = GROUP * columns
    first = tile // width * GROUP
    height = tl.minimum(rows - first, GROUP)
    return first + tile % width % height, tile % width // height


@triton.jit
def _tile_rows(turn, row_tile, first_owner, step, share, N: tl.constexpr, BLOCK_M: tl.constexpr, SPAN: tl.constexpr):
    """The rows, from and to, of a tile.

    The tile is number `row_tile` of the rows of the owner whose turn it is, first_owner, first_owner + step, …; with SPAN a
    tile has rows of several owners, there is one turn, and the tiles begin with that of first_owner's rows.
    """
    if SPAN:
        tiles = tl.cdiv(N * share, BLOCK_M)
        row = (first_owner * share // BLOCK_M + row_tile) % tiles * BLOCK_M
        end = tl.minimum(row + BLOCK_M, N * share)
    else:
        owner = (first_owner + turn * step) % N
        row = owner * share + row_tile * BLOCK_M
        end = tl.minimum(row + BLOCK_M, (owner + 1) * share)
    return row, end


@triton.jit
def place_of(tile, first_owner, step, share, columns,
    N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """First row, row after the last, and column, in tiles, of a tile; the order of the owners is that of `_tile_rows`."""
    rows = tl.cdiv(N * share, BLOCK_M) if SPAN else tl.cdiv(share, BLOCK_M)
    turn = tile // (rows * columns)
    row_tile, column_tile = _grouped(tile % (rows * columns), rows, columns, GROUP)
    row, end = _tile_rows(turn, row_tile, first_owner, step, share, N, BLOCK_M, SPAN)
    return row, end, column_tile


@triton.jit
def _product(
    x, weight, row, column, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr
):
    """x[row : row + BLOCK_M] @ weight[column : column + BLOCK_N].T in fp32, of matrices given by descriptors."""
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        a = x.load([row, step * BLOCK_K])
        b = weight.load([column, step * BLOCK_K])
        sums = tl.dot(a, b.T, sums, input_precision="ieee")
    return sums


@triton.jit
def select(values, index, N: tl.constexpr):
    """values[index] of a tuple of N int64, for an index or a tensor of them."""
    chosen = (index * 0).to(tl.int64)
    for i in tl.static_range(N):
        chosen = tl.where(index == i, values[i], chosen)
    return chosen


# --- blocks of rows and their flags -------------------------------------------------------------------------------------------


@triton.jit
def _blocks(row, end, share, N: tl.constexpr, LANES: tl.constexpr):
    """For each owner (LANES,): which block of its rows the tile's rows, row to end, belong to, and whether any do."""
    owner = tl.arange(0, LANES)
    touched = (owner < N) & (owner * share < end) & ((owner + 1) * share > row)
    return owner, tl.maximum(row - owner * share, 0) // _BLOCK, touched


@triton.jit
def _row_tiles_of(owner, block, share, BLOCK_M: tl.constexpr, SPAN: tl.constexpr):
    """How many tiles of rows a block of an owner's rows is stored in."""
    first = block * _BLOCK
    last = tl.minimum(first + _BLOCK, share) - 1
    if SPAN:
        tiles = (owner * share + last) // BLOCK_M - (owner * share + first) // BLOCK_M + 1
    else:
        tiles = last // BLOCK_M - first // BLOCK_M + 1
    return tiles


@triton.jit
def _arrive(counters, flags, epoch, row, end, share, columns,
    N: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Count a stored tile. The program that counts a block's last tile zeroes the counter for the next launch and sets the flag
    of the block's owner."""
    owner, block, touched = _blocks(row, end, share, N, LANES)
    tiles = _row_tiles_of(owner, block, share, BLOCK_M, SPAN) * columns
    counter = counters + owner * tl.cdiv(share, _BLOCK) + block
    tl.debug_barrier()  # all warps have stored before one counts
    before = tl.atomic_add(counter, 1, mask=touched, sem="acq_rel", scope="sys")
    complete = touched & (before == tiles - 1)
    tl.store(counter, tl.zeros([LANES], tl.int32), mask=complete)
    flag = select(flags, owner, N).to(tl.pointer_type(tl.int64)) + block
    tl.atomic_xchg(flag, tl.zeros([LANES], tl.int64) + epoch, mask=complete, sem="release", scope="sys")


@triton.jit
def _await(
    flags, stride, epoch, patience, fault, row, end, share, rank, N: tl.constexpr, LANES: tl.constexpr, FENCE: tl.constexpr
):
    """Wait for the blocks of other ranks' rows that a tile's rows belong to."""
    source, block, touched = _blocks(row, end, share, N, LANES)
    needed = touched & (source != rank)
    missing = tl.max(needed.to(tl.int32), axis=0)
    if missing != 0:
        polls = 0
        while (missing != 0) & (polls < patience):
            seen = tl.atomic_add(
                flags + source * stride + block, tl.zeros([LANES], tl.int64), mask=needed, sem="acquire", scope="sys"
            )
            missing = tl.max((needed & (seen < epoch)).to(tl.int32), axis=0)
            polls += 1
        if missing != 0:
            tl.store(fault, 5)
        tl.debug_barrier()  # all threads come after the acquire
        if FENCE:
            tl.inline_asm_elementwise(
                "fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [missing], dtype=tl.int32, is_pure=False, pack=1
            )


# --- kernels ------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["share", "rank"])
def _gemm_reduce_scatter(
    x,  # descriptor of (N * share, K)
    weight,  # descriptor of (C, K)
    destinations,  # N addresses of (share, C)
    flags,  # N addresses of int64, one for each block
    epoch,
    counters,  # zero before and after
    share,
    C,
    K,
    rank,
    DTYPE: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    now = tl.load(epoch)
    columns = tl.cdiv(C, BLOCK_N)
    tiles = (tl.cdiv(N * share, BLOCK_M) if SPAN else N * tl.cdiv(share, BLOCK_M)) * columns
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, end, column_tile = place_of(tile, (rank + 1) % N, 1, share, columns, N, BLOCK_M, GROUP, SPAN)
        sums = _product(x, weight, row, column_tile * BLOCK_N, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
        m = row + tl.arange(0, BLOCK_M)[:, None]
        n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        owner = m // share if SPAN else row // share
        there = select(destinations, owner, N).to(tl.pointer_type(DTYPE))
        there = tl.multiple_of(there, [16, 16] if SPAN else 16)
        place = (m - owner * share).to(tl.int64) * C + n
        tl.store(there + place, sums.to(DTYPE), mask=(m < end) & (n < C))
        _arrive(counters, flags, now, row, end, share, columns, N, LANES, BLOCK_M, SPAN)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["share", "rank", "stride", "patience"])
def _all_gather_gemm(
    x,  # descriptor of (N * share, K)
    weight,  # descriptor of (C, K)
    out,  # (N * share, C)
    flags,  # (N, stride) int64
    epoch,
    fault,
    stride,
    share,
    C,
    K,
    rank,
    patience,
    N: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    now = tl.load(epoch)
    columns = tl.cdiv(C, BLOCK_N)
    tiles = (tl.cdiv(N * share, BLOCK_M) if SPAN else N * tl.cdiv(share, BLOCK_M)) * columns
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, end, column_tile = place_of(tile, rank, N - 1, share, columns, N, BLOCK_M, GROUP, SPAN)
        _await(flags, stride, now, patience, fault, row, end, share, rank, N, LANES, PDL)
        sums = _product(x, weight, row, column_tile * BLOCK_N, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
        m = row + tl.arange(0, BLOCK_M)[:, None]
        n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(out + m.to(tl.int64) * C + n, sums.to(out.dtype.element_ty), mask=(m < end) & (n < C))
    if PDL:  # not before all waits are over: a kernel that starts early may take the place of one that transfers rows
        tl.extra.cuda.gdc_launch_dependents()


# --- launches -----------------------------------------------------------------------------------------------------------------


@cache
def counters(device: torch.device) -> Tensor:
    """Counters of stored tiles of a device, all zero between two kernels.

    Products of one device share them, and so must not run at the same time. Raises RuntimeError while a CUDA graph is captured:
    the zeros would be written by that graph only.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a first product with a reduce-scatter on {device} inside a CUDA graph; run it once before the capture"
        )
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def gemm_reduce_scatter(
    x: Tensor, weight: Tensor, destinations: tuple[int, ...], flags: tuple[int, ...], epoch: Tensor, rank: int, tiling: Tiling
) -> None:
    """`kernels.gemm_reduce_scatter.gemm_reduce_scatter` of operands that were checked."""
    share = len(x) // len(destinations)
    _gemm_reduce_scatter[grid(x, weight, len(destinations), tiling)](
        *_descriptors(x, weight, tiling),
        *(destinations, flags, epoch, counters(x.device), share, len(weight), x.shape[1], rank),
        DTYPE={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[x.dtype],
        **_constants(share, len(destinations), tiling, x.device),
    )


def all_gather_gemm(
    rows: Tensor, weight: Tensor, flags: Tensor, epoch: Tensor, rank: int, fault: Tensor, tiling: Tiling, patience: int
) -> Tensor:
    """`kernels.all_gather_gemm.all_gather_gemm` of operands that were checked."""
    share = len(rows) // len(flags)
    out = torch.empty(len(rows), len(weight), dtype=rows.dtype, device=rows.device)
    _all_gather_gemm[grid(rows, weight, len(flags), tiling)](
        *_descriptors(rows, weight, tiling),
        *(out, flags, epoch, fault, flags.stride(0), share, len(weight), rows.shape[1], rank, patience),
        **_constants(share, len(flags), tiling, rows.device),
    )
    return out


def _descriptors(x: Tensor, weight: Tensor, tiling: Tiling) -> tuple[TensorDescriptor, TensorDescriptor]:
    return (
        TensorDescriptor.from_tensor(x, [tiling.block_m, tiling.block_k]),
        TensorDescriptor.from_tensor(weight, [tiling.block_n, tiling.block_k]),
    )


def grid(x: Tensor, weight: Tensor, world_size: int, tiling: Tiling) -> tuple[int]:
    tiles = row_tiles(len(x) // world_size, world_size, tiling.block_m) * triton.cdiv(len(weight), tiling.block_n)
    return (min(tiles, max(1, _sms(x.device) - tiling.spare) * tiling.programs_per_sm()),)


@cache
def _sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; for Triton's interpreter a few programs are enough."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _constants(share: int, world_size: int, tiling: Tiling, device: torch.device) -> dict[str, int | bool]:
    return {
        "N": world_size,
        "LANES": triton.next_power_of_2(world_size),
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "STAGES": tiling.stages,
        "GROUP": tiling.group,
        "SPAN": share < tiling.block_m,
        "num_warps": tiling.warps,
        **pdl_options(device),
    }
