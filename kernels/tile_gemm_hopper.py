"""The GEMMs of `kernels/tile_gemm_triton.py` for Hopper, with warp specialization, in Gluon.

One warp loads operands by TMA into a ring of buffers, as far ahead as there are free buffers, also for the next tiles. Eight
warps multiply (wgmma). In the reduce-scatter, one more warp stores results by TMA and sets their flags, so that neither the
link nor the fences delay the tensor cores. A rank must have at least block_m rows. Triton's interpreter cannot run these.

Memory order. All-gather: the loading warp acquires a block's flag and passes a fence from the generic to the async proxy before
it starts the TMA loads. Reduce-scatter: the thread that issued a tile's stores waits for their completion, not only for the
reads from shared memory, and passes a fence between the proxies. It then counts the tile and sets the block's flag as
`tile_gemm_triton` does, at system scope.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.tile_gemm import BLOCK, MAX_SPECIALIZED, GemmTiling
from kernels.tile_gemm_triton import counters, grid, select, tile_position

REGISTERS = 168  # of a thread at launch, when 12 warps share an SM's equally; then they are redistributed
_BLOCK = gl.constexpr(BLOCK)


@gluon.jit
def make_ring(x, weight, STAGES: gl.constexpr):
    """(a, b, full, free): buffers for STAGES steps of both operands, and the barriers of full and of free buffers."""
    a = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_type.shape[0], x.block_type.shape[1]], x.layout)
    b = gl.allocate_shared_memory(weight.dtype, [STAGES, weight.block_type.shape[0], weight.block_type.shape[1]], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    return a, b, full, free


@gluon.jit
def tile_count(tiles):
    """The number of tiles of this program, of `tiles` in all."""
    return gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def nth_tile(nth):
    """The number of this program's nth tile."""
    return gl.program_id(0) + nth * gl.num_programs(0)


@gluon.jit
def load(x, weight, ring, row, column, step, steps):
    """Start the TMA loads of a tile's operands, when buffers are free. `step` counts the steps of all tiles; returns the next."""
    a, b, full, free = ring
    STAGES: gl.constexpr = a.type.shape[0]
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    for k in range(steps):
        slot = step % STAGES
        mbarrier.wait(free.index(slot), (step // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(slot), x.block_type.nbytes + weight.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [row, k * BLOCK_K], full.index(slot), a.index(slot))
        tma.async_copy_global_to_shared(weight, [column, k * BLOCK_K], full.index(slot), b.index(slot))
        step += 1
    return step


@gluon.jit
def zero_sums(ring):
    """fp32 sums of a tile. All tiles of a program use the same registers, because ptxas spills them otherwise."""
    BLOCK_M: gl.constexpr = ring[0].type.shape[1]
    BLOCK_N: gl.constexpr = ring[1].type.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    return gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)


@gluon.jit
def multiply(ring, sums, step, steps):
    """(the products' sums in fp32, next step); what `sums` were is not added. The wgmma of one step overlaps with the issue of the
    next."""
    a, b, full, free = ring
    STAGES: gl.constexpr = a.type.shape[0]
    for k in range(steps):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        sums = warpgroup_mma(a.index(slot), b.index(slot).permute((1, 0)), sums, use_acc=k > 0, is_async=True)
        sums = warpgroup_mma_wait(1, (sums,))
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=k > 0)  # the previous step has been multiplied
        step += 1
    sums = warpgroup_mma_wait(0, (sums,))
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
    return sums, step


# --- reduce-scatter -----------------------------------------------------------------------------------------------------------


@gluon.jit
def _scatter_load(x, weight, ring, rank, rank_rows, tiles, columns, steps, N: gl.constexpr, GROUP: gl.constexpr):
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    BLOCK_N: gl.constexpr = weight.block_type.shape[0]
    step = 0
    for nth in range(tile_count(tiles)):
        row, _end, column_tile = tile_position(nth_tile(nth), (rank + 1) % N, 1, rank_rows, columns, N, BLOCK_M, GROUP, False)
        step = load(x, weight, ring, row, column_tile * BLOCK_N, step, steps)


@gluon.jit
def _scatter_multiply(ring, result, ready, taken, tiles, steps):
    sums = zero_sums(ring)
    step = 0
    for nth in range(tile_count(tiles)):
        sums, step = multiply(ring, sums, step, steps)
        mbarrier.wait(taken, (nth & 1) ^ 1)
        result.store(sums.to(result.dtype))
        fence_async_shared()
        mbarrier.arrive(ready)


@gluon.jit
def _wait_stores():
    """Wait until this thread's TMA stores are complete, so that a GPU that acquires a flag set later sees them."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _scatter_store(peers, flags, epoch, counters, result, ready, taken, rank, rank_rows, tiles, columns,
    N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = result.type.shape[0]
    BLOCK_N: gl.constexpr = result.type.shape[1]
    target = gl.load(epoch)
    for nth in range(tile_count(tiles)):
        row, _end, column_tile = tile_position(nth_tile(nth), (rank + 1) % N, 1, rank_rows, columns, N, BLOCK_M, GROUP, False)
        owner = row // rank_rows
        mbarrier.wait(ready, nth & 1)
        for i in gl.static_range(N):
            if owner == i:
                tma.async_copy_shared_to_global(peers[i], [row - owner * rank_rows, column_tile * BLOCK_N], result)
        tma.store_wait(0)
        mbarrier.arrive(taken)
        _wait_stores()
        gl.thread_barrier()
        block = (row - owner * rank_rows) // _BLOCK
        last = gl.minimum((block + 1) * _BLOCK, rank_rows) - 1
        tiles_of_block = (last // BLOCK_M - block * _BLOCK // BLOCK_M + 1) * columns
        counter = counters + owner * gl.cdiv(rank_rows, _BLOCK) + block
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="sys") == tiles_of_block - 1:
            gl.store(counter, 0)
            flag = select(flags, owner, N).to(gl.pointer_type(gl.int64)) + block
            gl.atomic_xchg(flag, target, sem="release", scope="sys")


@gluon.jit(do_not_specialize=["rank_rows", "rank"])
def _gemm_reduce_scatter(
    x,  # descriptor of (N * rank_rows, K)
    weight,  # descriptor of (C, K)
    peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7,  # descriptors of (rank_rows, C), the first N of them
    flags,  # N addresses of int64, one for each block
    epoch,
    counters,  # zero before and after
    rank_rows,
    C,
    K,
    rank,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    BLOCK_N: gl.constexpr = weight.block_type.shape[0]
    ring = make_ring(x, weight, STAGES)
    result = gl.allocate_shared_memory(x.dtype, peer0.block_type.shape, peer0.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready, taken = barriers.index(0), barriers.index(1)
    mbarrier.init(ready, count=1)
    mbarrier.init(taken, count=1)
    tl.extra.cuda.gdc_wait()
    columns = gl.cdiv(C, BLOCK_N)
    tiles = N * gl.cdiv(rank_rows, BLOCK_M) * columns
    steps = gl.cdiv(K, x.block_type.shape[1])
    peers = (peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7)
    gl.warp_specialize(
        [
            (_scatter_multiply, (ring, result, ready, taken, tiles, steps)),
            (_scatter_load, (x, weight, ring, rank, rank_rows, tiles, columns, steps, N, GROUP)),
            (_scatter_store, (peers, flags, epoch, counters, result, ready, taken, rank, rank_rows, tiles, columns, N, GROUP)),
        ],
        [1, 1],
        [40, 40],
    )
    tl.extra.cuda.gdc_launch_dependents()


# --- all-gather ---------------------------------------------------------------------------------------------------------------


@gluon.jit
def _wait_flag(flag, target, max_polls, fault):
    """Poll a block's flag until it is at least `target`."""
    missing = gl.atomic_add(flag, 0, sem="acquire", scope="sys") < target
    polls = 1
    while missing & (polls < max_polls):
        missing = gl.atomic_add(flag, 0, sem="acquire", scope="sys") < target
        polls += 1
    if missing:
        gl.store(fault, 5)
    gl.thread_barrier()  # all threads come after the acquire
    gl.inline_asm_elementwise("fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _gather_load(x, weight, ring, flags, epoch, fault, stride, rank, max_polls, rank_rows, tiles, columns, steps,
    N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    BLOCK_N: gl.constexpr = weight.block_type.shape[0]
    target = gl.load(epoch)
    step = 0
    for nth in range(tile_count(tiles)):
        row, _end, column_tile = tile_position(nth_tile(nth), rank, N - 1, rank_rows, columns, N, BLOCK_M, GROUP, False)
        source = row // rank_rows
        if source != rank:
            _wait_flag(flags + source * stride + (row - source * rank_rows) // _BLOCK, target, max_polls, fault)
        step = load(x, weight, ring, row, column_tile * BLOCK_N, step, steps)


@gluon.jit
def _gather_multiply(ring, out, rank, rank_rows, tiles, columns, steps, C, N: gl.constexpr, GROUP: gl.constexpr):
    BLOCK_M: gl.constexpr = ring[0].type.shape[1]
    BLOCK_N: gl.constexpr = ring[1].type.shape[1]
    ROW_THREADS: gl.constexpr = BLOCK_N // 8 if BLOCK_N < 256 else 32  # a warp stores 16 bytes a thread, row after row
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ROW_THREADS, ROW_THREADS], [gl.num_warps(), 1], [1, 0])
    sums = zero_sums(ring)
    step = 0
    for nth in range(tile_count(tiles)):
        row, end, column_tile = tile_position(nth_tile(nth), rank, N - 1, rank_rows, columns, N, BLOCK_M, GROUP, False)
        sums, step = multiply(ring, sums, step, steps)
        result = gl.convert_layout(sums.to(out.dtype.element_ty), LAYOUT)
        m = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))[:, None]
        n = column_tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))[None, :]
        gl.store(out + m.to(gl.int64) * C + n, result, mask=(m < end) & (n < C))


@gluon.jit(do_not_specialize=["rank_rows", "rank", "stride", "max_polls"])
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
    N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    BLOCK_N: gl.constexpr = weight.block_type.shape[0]
    ring = make_ring(x, weight, STAGES)
    tl.extra.cuda.gdc_wait()
    columns = gl.cdiv(C, BLOCK_N)
    tiles = N * gl.cdiv(rank_rows, BLOCK_M) * columns
    steps = gl.cdiv(K, x.block_type.shape[1])
    gl.warp_specialize(
        [
            (_gather_multiply, (ring, out, rank, rank_rows, tiles, columns, steps, C, N, GROUP)),
            (
                _gather_load,
                (x, weight, ring, flags, epoch, fault, stride, rank, max_polls, rank_rows, tiles, columns, steps, N, GROUP),
            ),
        ],
        [1],
        [40],
    )
    tl.extra.cuda.gdc_launch_dependents()


# --- launches -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PeerTensor:
    """Memory of another GPU, with the attributes of a tensor that a descriptor needs."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    destinations: tuple[int, ...],
    flags: tuple[int, ...],
    epoch: Tensor,
    rank: int,
    tiling: GemmTiling,
) -> None:
    """`kernels.tile_gemm.gemm_reduce_scatter` with checked operands and at least block_m rows per rank."""
    rank_rows, features = len(x) // len(destinations), len(weight)
    unused = (destinations[0],) * (MAX_SPECIALIZED - len(destinations))
    peers = [
        descriptor(_PeerTensor(address, x.dtype), (rank_rows, features), (tiling.block_m, tiling.block_n))
        for address in destinations + unused
    ]
    _gemm_reduce_scatter[grid(x, weight, len(destinations), tiling)](
        *(*_operands(x, weight, tiling), *peers),
        *(flags, epoch, counters(x.device), rank_rows, features, x.shape[1], rank),
        **_constants(len(destinations), tiling, tiling.stages_with(tiling.result_bytes())),
    )


def all_gather_gemm(
    rows: Tensor, weight: Tensor, flags: Tensor, epoch: Tensor, rank: int, fault: Tensor, tiling: GemmTiling, max_polls: int
) -> Tensor:
    """`kernels.tile_gemm.all_gather_gemm` with checked operands and at least block_m rows per rank."""
    rank_rows, features = len(rows) // len(flags), len(weight)
    out = torch.empty(len(rows), features, dtype=rows.dtype, device=rows.device)
    _all_gather_gemm[grid(rows, weight, len(flags), tiling)](
        *_operands(rows, weight, tiling),
        *(out, flags, epoch, fault, flags.stride(0), rank_rows, features, rows.shape[1], rank, max_polls),
        **_constants(len(flags), tiling, tiling.stages_with(tiling.result_bytes() // 2)),  # converted by halves
    )
    return out


def _operands(x: Tensor, weight: Tensor, tiling: GemmTiling) -> tuple[TensorDescriptor, TensorDescriptor]:
    return (
        descriptor(x, tuple(x.shape), (tiling.block_m, tiling.block_k)),
        descriptor(weight, tuple(weight.shape), (tiling.block_n, tiling.block_k)),
    )


def descriptor(base: Tensor | _PeerTensor, shape: tuple[int, ...], block: tuple[int, int]) -> TensorDescriptor:
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[base.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(list(block), element)
    return TensorDescriptor(base, list(shape), [shape[1], 1], list(block), layout)


def _constants(world_size: int, tiling: GemmTiling, stages: int) -> dict[str, int | bool]:
    constants = {"N": world_size, "STAGES": stages, "GROUP": tiling.group}
    return {**constants, "num_warps": tiling.warps, "maxnreg": REGISTERS, "launch_pdl": True}
