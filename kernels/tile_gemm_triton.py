"""Triton GEMM kernels that exchange rows with other GPUs over NVLink tile by tile, without multicast.

Both are persistent: program p computes tiles p, p + programs, … TMA loads operands through descriptors made on the host; tensor
cores add in fp32. The order of tiles depends on the rank (Flux, arXiv:2406.06858, section 4.1: tile coordinate swizzling).

Memory order, reduce-scatter. A tile is stored by ordinary stores, not by TMA: TMA stores belong to the async proxy, and nothing
that Triton emits orders their completion at another GPU before a flag. The barrier after the stores, the increment of the
counter (acquire and release at system scope) and the store of the flag (release at system scope) form a chain: a GPU that has
acquired the flag sees the tiles of all programs.

Memory order, all-gather. TMA loads rows in the async proxy. Other GPUs or a copy engine stored them in the generic proxy. After
the polls that acquired the flag, all threads pass a barrier and then a fence between the proxies. So both precede the load,
whichever thread issues it. TMA does not read through L1, and stores over NVLink arrive in L2.

This module requires Triton. It also runs in Triton's interpreter (TRITON_INTERPRET=1), without the fences.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.dispatch import pdl_options
from kernels.tile_gemm import BLOCK, COUNTERS, GemmTiling, row_tiles

_BLOCK = tl.constexpr(BLOCK)


# --- tiles --------------------------------------------------------------------------------------------------------------------


@triton.jit
def grouped(tile, rows, columns, GROUP: tl.constexpr):
    """(row, column) of a tile in rows x columns tiles. GROUP rows of one column are followed by the same rows of the next."""
    width = GROUP * columns
    first = tile // width * GROUP
    height = tl.minimum(rows - first, GROUP)
    return first + tile % width % height, tile % width // height


@triton.jit
def _tile_rows(nth, row_tile, first_owner, step, rank_rows, N: tl.constexpr, BLOCK_M: tl.constexpr, MIXED: tl.constexpr):
    """(first row, end) of a tile.

    It is tile number `row_tile` of owner first_owner + nth * step, modulo N. With MIXED, tiles have rows of several owners and
    nth is 0: the tiles of all rows are numbered from that of first_owner's first row on.
    """
    if MIXED:
        tiles = tl.cdiv(N * rank_rows, BLOCK_M)
        row = (first_owner * rank_rows // BLOCK_M + row_tile) % tiles * BLOCK_M
        end = tl.minimum(row + BLOCK_M, N * rank_rows)
    else:
        owner = (first_owner + nth * step) % N
        row = owner * rank_rows + row_tile * BLOCK_M
        end = tl.minimum(row + BLOCK_M, (owner + 1) * rank_rows)
    return row, end


@triton.jit
def tile_position(tile, first_owner, step, rank_rows, columns,
    N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """(first row, end, column in tiles) of tile number `tile`. The order of the owners is that of `_tile_rows`."""
    rows = tl.cdiv(N * rank_rows, BLOCK_M) if MIXED else tl.cdiv(rank_rows, BLOCK_M)
    nth = tile // (rows * columns)
    row_tile, column_tile = grouped(tile % (rows * columns), rows, columns, GROUP)
    row, end = _tile_rows(nth, row_tile, first_owner, step, rank_rows, N, BLOCK_M, MIXED)
    return row, end, column_tile


@triton.jit
def _product(
    x, weight, row, column, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr
):
    """x[row : row + BLOCK_M] @ weight[column : column + BLOCK_N].T in fp32. x and weight are TMA descriptors."""
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        a = x.load([row, step * BLOCK_K])
        b = weight.load([column, step * BLOCK_K])
        sums = tl.dot(a, b.T, sums, input_precision="ieee")
    return sums


@triton.jit
def select(values, index, N: tl.constexpr):
    """values[index] of a tuple of N int64. index: a scalar or a tensor."""
    chosen = (index * 0).to(tl.int64)
    for i in tl.static_range(N):
        chosen = tl.where(index == i, values[i], chosen)
    return chosen


# --- blocks of rows and their flags -------------------------------------------------------------------------------------------


@triton.jit
def _blocks(row, end, rank_rows, N: tl.constexpr, PADDED_N: tl.constexpr):
    """(owners, blocks, touched), each (PADDED_N,): the first block of each owner that rows `row` to `end` of a tile touch, and
    whether there is one."""
    owner = tl.arange(0, PADDED_N)
    touched = (owner < N) & (owner * rank_rows < end) & ((owner + 1) * rank_rows > row)
    return owner, tl.maximum(row - owner * rank_rows, 0) // _BLOCK, touched


@triton.jit
def _row_tiles_of(owner, block, rank_rows, BLOCK_M: tl.constexpr, MIXED: tl.constexpr):
    """The number of row tiles that have rows of a block of an owner."""
    first = block * _BLOCK
    last = tl.minimum(first + _BLOCK, rank_rows) - 1
    if MIXED:
        tiles = (owner * rank_rows + last) // BLOCK_M - (owner * rank_rows + first) // BLOCK_M + 1
    else:
        tiles = last // BLOCK_M - first // BLOCK_M + 1
    return tiles


@triton.jit
def _count_tile(counters, flags, epoch, row, end, rank_rows, columns,
    N: tl.constexpr, PADDED_N: tl.constexpr, BLOCK_M: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Count a stored tile in the counters of its blocks. The program that counts a block's last tile resets the counter for the
    next launch and sets the flag at the block's owner."""
    owner, block, touched = _blocks(row, end, rank_rows, N, PADDED_N)
    tiles = _row_tiles_of(owner, block, rank_rows, BLOCK_M, MIXED) * columns
    counter = counters + owner * tl.cdiv(rank_rows, _BLOCK) + block
    tl.debug_barrier()  # all warps have stored before one counts
    before = tl.atomic_add(counter, 1, mask=touched, sem="acq_rel", scope="sys")
    complete = touched & (before == tiles - 1)
    tl.store(counter, tl.zeros([PADDED_N], tl.int32), mask=complete)
    flag = select(flags, owner, N).to(tl.pointer_type(tl.int64)) + block
    tl.atomic_xchg(flag, tl.zeros([PADDED_N], tl.int64) + epoch, mask=complete, sem="release", scope="sys")


@triton.jit
def _wait_rows(flags, stride, epoch, max_polls, fault, row, end, rank_rows, rank,
    N: tl.constexpr, PADDED_N: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    """Wait for the blocks of other ranks that have rows of this tile."""
    source, block, touched = _blocks(row, end, rank_rows, N, PADDED_N)
    needed = touched & (source != rank)
    missing = tl.max(needed.to(tl.int32), axis=0)
    if missing != 0:
        polls = 0
        while (missing != 0) & (polls < max_polls):
            seen = tl.atomic_add(
                flags + source * stride + block, tl.zeros([PADDED_N], tl.int64), mask=needed, sem="acquire", scope="sys"
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


@triton.jit(do_not_specialize=["rank_rows", "rank"])
def _gemm_reduce_scatter(
    x,  # descriptor of (N * rank_rows, K)
    weight,  # descriptor of (C, K)
    destinations,  # N addresses of (rank_rows, C)
    flags,  # N addresses of int64, one for each block
    epoch,
    counters,  # zero before and after
    rank_rows,
    C,
    K,
    rank,
    DTYPE: tl.constexpr,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    MIXED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    target = tl.load(epoch)
    columns = tl.cdiv(C, BLOCK_N)
    tiles = (tl.cdiv(N * rank_rows, BLOCK_M) if MIXED else N * tl.cdiv(rank_rows, BLOCK_M)) * columns
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, end, column_tile = tile_position(tile, (rank + 1) % N, 1, rank_rows, columns, N, BLOCK_M, GROUP, MIXED)
        sums = _product(x, weight, row, column_tile * BLOCK_N, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
        m = row + tl.arange(0, BLOCK_M)[:, None]
        n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        owner = m // rank_rows if MIXED else row // rank_rows
        destination = select(destinations, owner, N).to(tl.pointer_type(DTYPE))
        destination = tl.multiple_of(destination, [16, 16] if MIXED else 16)
        offset = (m - owner * rank_rows).to(tl.int64) * C + n
        tl.store(destination + offset, sums.to(DTYPE), mask=(m < end) & (n < C))
        _count_tile(counters, flags, target, row, end, rank_rows, columns, N, PADDED_N, BLOCK_M, MIXED)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["rank_rows", "rank", "stride", "max_polls"])
def _all_gather_gemm(
    x,  # descriptor of (N * rank_rows, K)
    weight,  # descriptor of (C, K)
    out,  # (N * rank_rows, C)
    flags,  # (N, stride) int64
    epoch,
    fault,
    stride,
    rank_rows,
    C,
    K,
    rank,
    max_polls,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    MIXED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    target = tl.load(epoch)
    columns = tl.cdiv(C, BLOCK_N)
    tiles = (tl.cdiv(N * rank_rows, BLOCK_M) if MIXED else N * tl.cdiv(rank_rows, BLOCK_M)) * columns
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, end, column_tile = tile_position(tile, rank, N - 1, rank_rows, columns, N, BLOCK_M, GROUP, MIXED)
        _wait_rows(flags, stride, target, max_polls, fault, row, end, rank_rows, rank, N, PADDED_N, PDL)
        sums = _product(x, weight, row, column_tile * BLOCK_N, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
        m = row + tl.arange(0, BLOCK_M)[:, None]
        n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(out + m.to(tl.int64) * C + n, sums.to(out.dtype.element_ty), mask=(m < end) & (n < C))
    if PDL:  # after all waits: a kernel that starts early may occupy the SM that a kernel that transfers rows needs
        tl.extra.cuda.gdc_launch_dependents()


# --- launches -----------------------------------------------------------------------------------------------------------------


@cache
def counters(device: torch.device) -> Tensor:
    """Counters of stored tiles by block, for all calls on a device. All are zero between two kernels.

    Calls on one device share them, so they must not run at the same time. Raises RuntimeError while a CUDA graph is captured,
    because only that graph would write the zeros.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the first GEMM + reduce-scatter on {device} is inside a CUDA graph; run it once before the capture"
        )
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    destinations: tuple[int, ...],
    flags: tuple[int, ...],
    epoch: Tensor,
    rank: int,
    tiling: GemmTiling,
) -> None:
    """`kernels.tile_gemm.gemm_reduce_scatter` with checked operands."""
    rank_rows = len(x) // len(destinations)
    _gemm_reduce_scatter[grid(x, weight, len(destinations), tiling)](
        *_descriptors(x, weight, tiling),
        *(destinations, flags, epoch, counters(x.device), rank_rows, len(weight), x.shape[1], rank),
        DTYPE={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[x.dtype],
        **_constants(rank_rows, len(destinations), tiling, x.device),
    )


def all_gather_gemm(
    rows: Tensor, weight: Tensor, flags: Tensor, epoch: Tensor, rank: int, fault: Tensor, tiling: GemmTiling, max_polls: int
) -> Tensor:
    """`kernels.tile_gemm.all_gather_gemm` with checked operands."""
    rank_rows = len(rows) // len(flags)
    out = torch.empty(len(rows), len(weight), dtype=rows.dtype, device=rows.device)
    _all_gather_gemm[grid(rows, weight, len(flags), tiling)](
        *_descriptors(rows, weight, tiling),
        *(out, flags, epoch, fault, flags.stride(0), rank_rows, len(weight), rows.shape[1], rank, max_polls),
        **_constants(rank_rows, len(flags), tiling, rows.device),
    )
    return out


def _descriptors(x: Tensor, weight: Tensor, tiling: GemmTiling) -> tuple[TensorDescriptor, TensorDescriptor]:
    return (
        TensorDescriptor.from_tensor(x, [tiling.block_m, tiling.block_k]),
        TensorDescriptor.from_tensor(weight, [tiling.block_n, tiling.block_k]),
    )


def grid(x: Tensor, weight: Tensor, world_size: int, tiling: GemmTiling) -> tuple[int]:
    tiles = row_tiles(len(x) // world_size, world_size, tiling.block_m) * triton.cdiv(len(weight), tiling.block_n)
    return (min(tiles, max(1, _sms(x.device) - tiling.free_sms) * tiling.programs_per_sm()),)


@cache
def _sms(device: torch.device) -> int:
    """SMs of a GPU; 3 for Triton's interpreter, where a few programs are enough."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _constants(rank_rows: int, world_size: int, tiling: GemmTiling, device: torch.device) -> dict[str, int | bool]:
    return {
        "N": world_size,
        "PADDED_N": triton.next_power_of_2(world_size),
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "STAGES": tiling.stages,
        "GROUP": tiling.group,
        "MIXED": rank_rows < tiling.block_m,
        "num_warps": tiling.warps,
        **pdl_options(device),
    }
