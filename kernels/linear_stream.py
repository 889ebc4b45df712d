"""Linear layers of 1 to 256 rows on Hopper: the `stream` kernel of `kernels/linear.py`, in Gluon.

The time of such a layer is that of reading its weight, if enough loads are in flight all the time. One warp loads weight and
input by TMA into a ring of buffers that takes most of an SM's shared memory. One or two warpgroups multiply (wgmma), with the
weight as the M operand, because the input may have only 8 rows: sums^T (BLOCK_N, ROWS) += weight (BLOCK_N, BLOCK_K) @ x^T.

Every program gets an equal, contiguous share of the steps of all tiles, so that all SMs finish together (stream-K, Osama et al.,
arXiv:2301.03598). The pieces of a tile that several programs share are added in fp32 by the program that finishes its piece
last, in the order of the programs, so that a replay gives the same bits. No program ever waits for another one: another
stream's kernel may hold the SM that it would need.

With programmatic dependent launch, the ring is filled with weights, which no kernel writes, before the previous kernel has
finished. Everything else, the counters included, comes after the wait for that kernel. Triton's interpreter cannot run this;
`tests/support/gluon.py` can.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.dispatch import pdl_options
from kernels.linear_config import Stream, padded_rows

_LOADER_REGISTERS = gl.constexpr(40)  # of a thread of the warp that loads

# --- shares -------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _begin(program, total):
    """The first of a program's steps. Steps 0 to `total` are those of all tiles, tile after tile."""
    return program * total // gl.num_programs(0)


@gluon.jit
def _owner(step, total):
    """The program that has this step."""
    return ((step + 1) * gl.num_programs(0) - 1) // total


# --- loads --------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _load_weight(weight, ring, step, slot, steps, BLOCK_N: gl.constexpr, SWIGLU: gl.constexpr):
    """Start to load the weight of `step`. The buffer's barrier then expects these bytes and those of the input."""
    a, b, full, _free = ring
    BLOCK_K: gl.constexpr = weight.block_type.shape[1]
    X_BYTES: gl.constexpr = b.type.shape[1] * BLOCK_K * 2
    row, column = step // steps * BLOCK_N, step % steps * BLOCK_K
    ready = full.index(slot)
    if SWIGLU:  # as many rows of the gate as of the up projection
        mbarrier.expect(ready, 2 * weight.block_type.nbytes + X_BYTES)
        tma.async_copy_global_to_shared(weight, [row // 2, column], ready, a.index(2 * slot))
        tma.async_copy_global_to_shared(weight, [weight.shape[0] // 2 + row // 2, column], ready, a.index(2 * slot + 1))
    else:
        mbarrier.expect(ready, weight.block_type.nbytes + X_BYTES)
        tma.async_copy_global_to_shared(weight, [row, column], ready, a.index(slot))


@gluon.jit
def _load_input(x, ring, step, slot, steps):
    _a, b, full, _free = ring
    tma.async_copy_global_to_shared(x, [0, step % steps * x.block_type.shape[1]], full.index(slot), b.index(slot))


@gluon.jit
def _load(x, weight, ring, begin, end, steps, BLOCK_N: gl.constexpr, SWIGLU: gl.constexpr, PDL: gl.constexpr):
    """The loading warp: weights as far ahead as there are buffers, the input only after the previous kernel."""
    _a, b, _full, free = ring
    STAGES: gl.constexpr = b.type.shape[0]
    ahead = gl.minimum(STAGES, end - begin)
    for nth in range(ahead):
        _load_weight(weight, ring, begin + nth, nth, steps, BLOCK_N, SWIGLU)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for nth in range(ahead):
        _load_input(x, ring, begin + nth, nth, steps)
    for nth in range(ahead, end - begin):
        slot = nth % STAGES
        mbarrier.wait(free.index(slot), (nth // STAGES & 1) ^ 1)
        _load_weight(weight, ring, begin + nth, slot, steps, BLOCK_N, SWIGLU)
        _load_input(x, ring, begin + nth, slot, steps)


# --- products -----------------------------------------------------------------------------------------------------------------


@gluon.jit
def _multiply(
    ring, bias, out, partials, counters, rows, features, begin, end, steps, total, SWIGLU: gl.constexpr, PDL: gl.constexpr
):
    """The multiplying warps: for each tile in the share, the products of its steps, then the tile's result or its piece's sums.

    With SWIGLU, `sums` are those of the gate and `up` are those of the up projection.
    """
    a, b, full, free = ring
    STAGES: gl.constexpr = b.type.shape[0]
    PARTS: gl.constexpr = 2 if SWIGLU else 1  # wgmmas in a step
    BLOCK: gl.constexpr = a.type.shape[1]
    ROWS: gl.constexpr = b.type.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    if PDL:
        tl.extra.cuda.gdc_wait()
    nth = 0
    for tile in range(begin // steps, gl.cdiv(end, steps)):
        first, last = gl.maximum(begin, tile * steps), gl.minimum(end, (tile + 1) * steps)
        sums = gl.zeros((BLOCK, ROWS), gl.float32, LAYOUT)
        up = gl.zeros((BLOCK, ROWS), gl.float32, LAYOUT)
        for step in range(first, last):
            slot = nth % STAGES
            mbarrier.wait(full.index(slot), nth // STAGES & 1)
            x = b.index(slot).permute((1, 0))
            if SWIGLU:
                sums = warpgroup_mma(a.index(2 * slot), x, sums, is_async=True)
                up = warpgroup_mma(a.index(2 * slot + 1), x, up, is_async=True)
                sums, up = warpgroup_mma_wait(PARTS, (sums, up))
            else:
                sums = warpgroup_mma(a.index(slot), x, sums, is_async=True)
                sums = warpgroup_mma_wait(PARTS, (sums,))
            mbarrier.arrive(free.index((nth + STAGES - 1) % STAGES), pred=step > first)  # the previous step has been multiplied
            nth += 1
        sums, up = warpgroup_mma_wait(0, (sums, up))
        mbarrier.arrive(free.index((nth + STAGES - 1) % STAGES))
        complete = last - first == steps
        if not complete:
            complete = _arrive(sums, up, partials, counters, tile, steps, total, SWIGLU)
            if complete:
                sums, up = _add_pieces(sums, up, partials, counters, tile, steps, total, SWIGLU)
        if complete:
            _store(sums, up, bias, out, tile, rows, features, SWIGLU)


@gluon.jit
def _offsets(sums):
    """Offsets of (BLOCK, ROWS) values in row-major order."""
    LAYOUT: gl.constexpr = sums.type.layout
    n = gl.arange(0, sums.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    return n * sums.shape[1] + gl.arange(0, sums.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _piece(partials, program, tile, steps, total, SIZE: gl.constexpr):
    """Where a program stores the sums of its piece of a tile. It may have two: of its first tile, and of its last one."""
    return partials + (2 * program + (_begin(program, total) < tile * steps).to(gl.int32)) * SIZE


@gluon.jit
def _arrive(sums, up, partials, counters, tile, steps, total, SWIGLU: gl.constexpr):
    """Store a piece's sums. Returns whether all other pieces of the tile are stored."""
    BLOCK_SIZE: gl.constexpr = sums.shape[0] * sums.shape[1]
    SIZE: gl.constexpr = 2 * BLOCK_SIZE if SWIGLU else BLOCK_SIZE
    pointers = _piece(partials, gl.program_id(0), tile, steps, total, SIZE) + _offsets(sums)
    gl.store(pointers, sums)
    if SWIGLU:
        gl.store(pointers + BLOCK_SIZE, up)
    gl.thread_barrier()  # all threads have stored before one of them counts
    others = _owner((tile + 1) * steps - 1, total) - _owner(tile * steps, total)
    return gl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == others


@gluon.jit
def _add_pieces(sums, up, partials, counters, tile, steps, total, SWIGLU: gl.constexpr):
    """The sums of all pieces of a tile, added in the order of the programs. Resets the tile's counter."""
    BLOCK_SIZE: gl.constexpr = sums.shape[0] * sums.shape[1]
    SIZE: gl.constexpr = 2 * BLOCK_SIZE if SWIGLU else BLOCK_SIZE
    gl.store(counters + tile, 0)
    sums = gl.zeros_like(sums)
    up = gl.zeros_like(up)
    for program in range(_owner(tile * steps, total), _owner((tile + 1) * steps - 1, total) + 1):
        pointers = _piece(partials, program, tile, steps, total, SIZE) + _offsets(sums)
        sums += gl.load(pointers, cache_modifier=".cg")  # from L2, because other SMs wrote them
        if SWIGLU:
            up += gl.load(pointers + BLOCK_SIZE, cache_modifier=".cg")
    return sums, up


@gluon.jit
def _store(sums, up, bias, out, tile, rows, features, SWIGLU: gl.constexpr):
    """Store a tile's sums plus bias, or silu(gate) * up, as part of out (rows, features)."""
    BLOCK: gl.constexpr = sums.shape[0]
    ROWS: gl.constexpr = sums.shape[1]
    SUMS: gl.constexpr = sums.type.layout
    if bias is not None:
        feature = tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, SUMS))
        sums += gl.load(bias + feature, mask=feature < features, other=0).to(gl.float32)[:, None]
        if SWIGLU:
            up += gl.load(bias + features + feature, mask=feature < features, other=0).to(gl.float32)[:, None]
    if SWIGLU:
        sums = sums / (1.0 + gl.exp(-sums)) * up
    result = sums.to(out.dtype.element_ty)
    if ROWS > 16:  # a thread then stores 16 bytes of a row
        LANES: gl.constexpr = BLOCK // 8 if BLOCK < 256 else 32
        result = gl.convert_layout(result, gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, gl.num_warps()], [0, 1]))
    LAYOUT: gl.constexpr = result.type.layout
    feature = tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))[:, None]
    m = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(out + m * features + feature, result, mask=(m < rows) & (feature < features))


# --- the kernel ---------------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["rows"])
def _stream(
    x,  # descriptor of (rows, K)
    weight,  # descriptor of (N, K)
    bias,  # (N,) or None
    out,  # (rows, features)
    partials,  # for each program, the fp32 sums of two tiles
    counters,  # one for each tile, zero before and after
    rows,
    features,  # N, or N / 2 with SWIGLU
    K,
    STAGES: gl.constexpr,
    SWIGLU: gl.constexpr,
    PDL: gl.constexpr,
):
    PARTS: gl.constexpr = 2 if SWIGLU else 1
    BLOCK: gl.constexpr = weight.block_type.shape[0]
    BLOCK_K: gl.constexpr = weight.block_type.shape[1]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    a = gl.allocate_shared_memory(weight.dtype, [STAGES * PARTS, BLOCK, BLOCK_K], weight.layout)
    b = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_type.shape[0], BLOCK_K], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    ring = (a, b, full, free)
    steps = gl.cdiv(K, BLOCK_K)
    total = steps * gl.cdiv(features, BLOCK)
    begin, end = _begin(gl.program_id(0), total), _begin(gl.program_id(0) + 1, total)
    gl.warp_specialize(
        [
            (_multiply, (ring, bias, out, partials, counters, rows, features, begin, end, steps, total, SWIGLU, PDL)),
            (_load, (x, weight, ring, begin, end, steps, BLOCK * PARTS, SWIGLU, PDL)),
        ],
        [1],
        [_LOADER_REGISTERS],
    )


# --- launch -------------------------------------------------------------------------------------------------------------------


def stream(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, counters: Tensor, chosen: Stream, swiglu: bool) -> None:
    """`kernels.linear.linear_with` into out (rows, features), for x (rows, K) and weight (N, K)."""
    padded, block, features = padded_rows(len(x)), chosen.block_n // (2 if swiglu else 1), out.shape[-1]
    steps = -(-features // block) * -(-x.shape[1] // chosen.block_k)
    programs = min(chosen.programs, steps)
    partials = torch.empty(2 * programs * chosen.block_n * padded, dtype=torch.float32, device=x.device)
    _stream[(programs,)](
        _descriptor(x, (padded, chosen.block_k)),
        _descriptor(weight, (block, chosen.block_k)),
        *(bias, out, partials, counters, len(x), features, x.shape[1]),
        STAGES=chosen.stages,
        SWIGLU=swiglu,
        num_warps=chosen.warps,
        maxnreg=chosen.registers(len(x)),
        **pdl_options(x.device),
    )


def _descriptor(matrix: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """A TMA descriptor, which a CUDA graph keeps as a parameter of the kernel. Values beyond the matrix are loaded as zeros."""
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[matrix.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(list(block), element)
    stride = max(matrix.stride(0), matrix.shape[1])  # the stride of a single row may be anything
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], list(block), layout)
