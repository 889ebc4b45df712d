"""Linear layers on Hopper: the `stream` kernel of `kernels/linear.py`, in Gluon.

The time of such a layer is that of reading its weight, if enough loads are in flight all the time. One warp loads weight and
input by TMA into a ring of buffers that takes most of an SM's shared memory. One or two warpgroups multiply (wgmma), with the
weight as the M operand, because the input may have only 8 rows: sums^T (BLOCK, ROWS) += weight (BLOCK, BLOCK_K) @ x^T.

Programs first compute whole tiles, as long as each has at least two, and then equal, contiguous shares of the steps of the
other tiles, so that all SMs finish together (stream-K, Osama et al., arXiv:2301.03598). The pieces of a shared tile are added
in fp32 by the program that finishes its piece last, in the order of the programs, so that a replay gives the same bits. No
program ever waits for another one: another stream's kernel may hold the SM that it would need.

With programmatic dependent launch, the ring is filled with weights, which no kernel writes, before the previous kernel has
finished. Everything else, the counters included, comes after the wait for that kernel. Triton's interpreter cannot run this;
`tests/support/gluon.py` can.

Weight and input may both be fp8 codes with a scale for each row, which multiplies the sums. A config's columns are then pairs of
codes, so it serves a 16-bit layer of as many bytes as well.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.dispatch import pdl_options
from kernels.linear_config import LOADER_REGISTERS, Stream

_LOADER_REGISTERS = gl.constexpr(LOADER_REGISTERS)

# --- shares -------------------------------------------------------------------------------------------------------------------


@gluon.jit
def program_share(rows, features, K, ROWS: gl.constexpr, BLOCK: gl.constexpr, BLOCK_K: gl.constexpr):
    """What this program computes, for the functions below.

    Every program has one tile of rows: programs that run at the same time read the same weights, all but one of them from L2.
    The `sharers` programs of a tile of rows, of which this is the `nth`, have `whole` tiles of features each. They share the
    others, which have `total` steps.
    """
    row_tiles = gl.cdiv(rows, ROWS)
    row_tile, nth, sharers = gl.program_id(0) % row_tiles, gl.program_id(0) // row_tiles, gl.num_programs(0) // row_tiles
    steps, columns = gl.cdiv(K, BLOCK_K), gl.cdiv(features, BLOCK)
    whole = gl.maximum(columns // sharers - 1, 0)
    return row_tiles, row_tile, nth, sharers, steps, whole, (columns - whole * sharers) * steps


@gluon.jit
def _begin(share, nth):
    """The first step of the nth sharer. The shared tiles have steps 0 to `total`, tile after tile."""
    _row_tiles, _row_tile, _nth, sharers, _steps, _whole, total = share
    return nth * total // sharers


@gluon.jit
def _owner(share, step):
    """The sharer that has this step."""
    _row_tiles, _row_tile, _nth, sharers, _steps, _whole, total = share
    return ((step + 1) * sharers - 1) // total


@gluon.jit
def share_counts(share):
    """The numbers of tiles and of steps of this program."""
    _row_tiles, _row_tile, nth, _sharers, steps, whole, _total = share
    begin, end = _begin(share, nth), _begin(share, nth + 1)
    return whole + gl.cdiv(end, steps) - begin // steps, whole * steps + end - begin


@gluon.jit
def share_tile(share, i):
    """This program's i-th tile: (tile of features, number among the shared ones, this program's first step, end of its steps)."""
    _row_tiles, _row_tile, nth, sharers, steps, whole, _total = share
    begin, end = _begin(share, nth), _begin(share, nth + 1)
    shared = begin // steps + i - whole
    tile = gl.where(i < whole, nth + i * sharers, whole * sharers + shared)
    first = gl.where(i < whole, 0, gl.maximum(begin - shared * steps, 0))
    last = gl.where(i < whole, steps, gl.minimum(end - shared * steps, steps))
    return tile, shared, first, last


# --- loads --------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _load_weight(weight, ring, slot, feature, column, SWIGLU: gl.constexpr):
    """Start to load a step's weight. The buffer's barrier then expects these bytes and those of the input."""
    a, b, full, _free = ring
    X_BYTES: gl.constexpr = weight.block_type.nbytes // weight.block_type.shape[0] * b.type.shape[1]
    ready = full.index(slot)
    if SWIGLU:  # as many rows of the gate as of the up projection
        mbarrier.expect(ready, 2 * weight.block_type.nbytes + X_BYTES)
        tma.async_copy_global_to_shared(weight, [feature, column], ready, a.index(2 * slot))
        tma.async_copy_global_to_shared(weight, [weight.shape[0] // 2 + feature, column], ready, a.index(2 * slot + 1))
    else:
        mbarrier.expect(ready, weight.block_type.nbytes + X_BYTES)
        tma.async_copy_global_to_shared(weight, [feature, column], ready, a.index(slot))


@gluon.jit
def _load_steps(x, weight, ring, share, start, stop, SWIGLU: gl.constexpr, WEIGHT: gl.constexpr, INPUT: gl.constexpr):
    """Start to load the weight, the input or both of this program's steps `start` to `stop`."""
    _a, b, full, free = ring
    STAGES: gl.constexpr = b.type.shape[0]
    BLOCK_K: gl.constexpr = b.type.shape[2]
    row = share[1] * b.type.shape[1]
    tiles, _steps = share_counts(share)
    begin = 0  # of the tile's steps
    for i in range(tiles):
        tile, _shared, first, last = share_tile(share, i)
        feature = tile * weight.block_type.shape[0]
        for nth in range(gl.maximum(start, begin), gl.minimum(stop, begin + last - first)):
            slot = nth % STAGES
            column = (first + nth - begin) * BLOCK_K
            if WEIGHT and INPUT:  # the buffer has been used before
                mbarrier.wait(free.index(slot), (nth // STAGES & 1) ^ 1)
            if WEIGHT:
                _load_weight(weight, ring, slot, feature, column, SWIGLU)
            if INPUT:
                tma.async_copy_global_to_shared(x, [row, column], full.index(slot), b.index(slot))
        begin += last - first


@gluon.jit
def _load(x, weight, ring, share, SWIGLU: gl.constexpr, PDL: gl.constexpr):
    """The loading warp: weights as far ahead as there are buffers, the input only after the previous kernel."""
    _tiles, steps = share_counts(share)
    ahead = gl.minimum(ring[1].type.shape[0], steps)
    _load_steps(x, weight, ring, share, 0, ahead, SWIGLU, True, False)
    if PDL:
        tl.extra.cuda.gdc_wait()
    _load_steps(x, weight, ring, share, 0, ahead, SWIGLU, False, True)
    _load_steps(x, weight, ring, share, ahead, steps, SWIGLU, True, True)


# --- products -----------------------------------------------------------------------------------------------------------------


@gluon.jit
def _multiply(
    ring, scales, bias, out, partials, counters, rows, features, share, SWIGLU: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """The multiplying warps: for each tile, the products of this program's steps, then the tile's result or its piece's sums.

    With SWIGLU, `sums` are those of the gate and `up` are those of the up projection.
    """
    a, b, full, free = ring
    STAGES: gl.constexpr = b.type.shape[0]
    PARTS: gl.constexpr = 2 if SWIGLU else 1  # wgmmas in a step
    BLOCK: gl.constexpr = a.type.shape[1]
    ROWS: gl.constexpr = b.type.shape[1]
    x_scales, row_scales = scales
    COLUMNS: gl.constexpr = 16 if x_scales is None else 32  # of a wgmma's operands
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, COLUMNS])
    _row_tiles, row_tile, _nth, _sharers, steps, _whole, _total = share
    tiles, _steps = share_counts(share)
    if PDL:
        tl.extra.cuda.gdc_wait()
    nth = 0
    for i in range(tiles):
        tile, shared, first, last = share_tile(share, i)
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
            complete = store_piece(sums, up, partials, counters, share, shared, SWIGLU)
            if complete:
                sums, up = add_pieces(sums, up, partials, counters, share, shared, SWIGLU)
        if complete:
            if x_scales is not None:
                sums *= _scales(row_scales, tile * BLOCK, features, 1, sums)[:, None]
                sums *= _scales(x_scales, row_tile * ROWS, rows, 0, sums)[None, :]
            store_tile(sums, up, bias, out, row_tile * ROWS, tile * BLOCK, rows, features, SWIGLU)


@gluon.jit
def _scales(pointer, first, count, DIM: gl.constexpr, sums):
    """Scales of the sums' rows (DIM 1) or columns (DIM 0), which begin with the `first` of `count`."""
    SIZE: gl.constexpr = sums.shape[1 - DIM]
    place = first + gl.arange(0, SIZE, gl.SliceLayout(DIM, sums.type.layout))
    return gl.load(pointer + place, mask=place < count, other=0)


@gluon.jit
def _offsets(sums):
    """Offsets of (BLOCK, ROWS) values in row-major order."""
    LAYOUT: gl.constexpr = sums.type.layout
    n = gl.arange(0, sums.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    return n * sums.shape[1] + gl.arange(0, sums.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _sharers(share, shared):
    """The first and the last sharer of a shared tile."""
    steps = share[4]
    return _owner(share, shared * steps), _owner(share, (shared + 1) * steps - 1)


@gluon.jit
def _counter(counters, share, shared):
    """A shared tile's counter. A tile of rows has fewer than two shared tiles for each sharer."""
    _row_tiles, row_tile, _nth, sharers, _steps, _whole, _total = share
    return counters + row_tile * 2 * sharers + shared


@gluon.jit
def _piece(partials, share, nth, shared, SIZE: gl.constexpr):
    """Where a sharer stores the sums of its piece of a tile. It may have two: of its first tile, and of its last one."""
    row_tiles, row_tile, _nth, _sharers, steps, _whole, _total = share
    second = (_begin(share, nth) < shared * steps).to(gl.int32)
    return partials + (2 * (nth * row_tiles + row_tile) + second) * SIZE


@gluon.jit
def store_piece(sums, up, partials, counters, share, shared, SWIGLU: gl.constexpr):
    """Store a piece's sums. Returns whether all other pieces of the tile are stored."""
    BLOCK_SIZE: gl.constexpr = sums.shape[0] * sums.shape[1]
    pointers = _piece(partials, share, share[2], shared, 2 * BLOCK_SIZE if SWIGLU else BLOCK_SIZE) + _offsets(sums)
    gl.store(pointers, sums)
    if SWIGLU:
        gl.store(pointers + BLOCK_SIZE, up)
    gl.thread_barrier()  # all threads have stored before one of them counts
    first, last = _sharers(share, shared)
    return gl.atomic_add(_counter(counters, share, shared), 1, sem="acq_rel", scope="gpu") == last - first


@gluon.jit
def add_pieces(sums, up, partials, counters, share, shared, SWIGLU: gl.constexpr):
    """The sums of all pieces of a tile, added in the order of the programs. Resets the tile's counter.

    Several pieces of few values are loaded at a time, because each load takes most of a microsecond."""
    BLOCK_SIZE: gl.constexpr = sums.shape[0] * sums.shape[1]
    SIZE: gl.constexpr = 2 * BLOCK_SIZE if SWIGLU else BLOCK_SIZE
    VALUES: gl.constexpr = SIZE // (32 * gl.num_warps())  # of a thread
    AT_ONCE: gl.constexpr = 8 if VALUES <= 4 else 4 if VALUES <= 8 else 2 if VALUES <= 16 else 1
    gl.store(_counter(counters, share, shared), 0)
    sums = gl.zeros_like(sums)
    up = gl.zeros_like(up)
    offsets = _offsets(sums)
    first, last = _sharers(share, shared)
    for begin in range(first, last + 1, AT_ONCE):
        pieces = ()
        for i in gl.static_range(AT_ONCE):
            pointers = _piece(partials, share, begin + i, shared, SIZE) + offsets
            found = gl.load(pointers, mask=begin + i <= last, other=0, cache_modifier=".cg")  # from L2: other SMs wrote them
            found_up = found
            if SWIGLU:
                found_up = gl.load(pointers + BLOCK_SIZE, mask=begin + i <= last, other=0, cache_modifier=".cg")
            pieces += ((found, found_up),)  # type: ignore[assignment]
        for i in gl.static_range(AT_ONCE):
            sums += pieces[i][0]
            if SWIGLU:
                up += pieces[i][1]
    return sums, up


@gluon.jit
def store_tile(sums, up, bias, out, row, column, rows, features, SWIGLU: gl.constexpr):
    """Store a tile's sums plus bias, or silu(gate) * up, in out (rows, features), from this row and column on."""
    BLOCK: gl.constexpr = sums.shape[0]
    ROWS: gl.constexpr = sums.shape[1]
    SUMS: gl.constexpr = sums.type.layout
    if bias is not None:
        feature = column + gl.arange(0, BLOCK, gl.SliceLayout(1, SUMS))
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
    feature = column + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))[:, None]
    m = row + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(out + m.to(gl.int64) * features + feature, result, mask=(m < rows) & (feature < features))


# --- the kernel ---------------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["rows"])
def _stream(
    x,  # descriptor of (rows, K)
    weight,  # descriptor of (N, K)
    x_scales,  # of codes: those of the rows of x (rows,), else None
    row_scales,  # and of the weight (N,)
    bias,  # (N,) or None
    out,  # (rows, features)
    partials,  # for each program, the fp32 sums of two tiles
    counters,  # one for each shared tile, fewer than two for each program; zero before and after
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
    share = program_share(rows, features, K, b.type.shape[1], BLOCK, BLOCK_K)
    gl.warp_specialize(
        [
            (_multiply, (ring, (x_scales, row_scales), bias, out, partials, counters, rows, features, share, SWIGLU, PDL)),
            (_load, (x, weight, ring, share, SWIGLU, PDL)),
        ],
        [1],
        [_LOADER_REGISTERS],
    )


# --- launch -------------------------------------------------------------------------------------------------------------------


def stream(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    counters: Tensor,
    chosen: Stream,
    swiglu: bool,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """`kernels.linear.linear_with` into out (rows, features), for x (rows, K) and weight (N, K), bf16 or fp16; or fp8 with the
    scales of their rows in fp32, without swiglu. Raises ValueError if the config does not support them."""
    words = x.shape[1] * x.itemsize // 2
    if not chosen.supports(len(x), len(weight), words, swiglu) or (scales and swiglu):
        raise ValueError(f"{chosen} cannot multiply {len(x)} rows with a weight {tuple(weight.shape)}, swiglu={swiglu}")
    features, block_k = out.shape[-1], chosen.block_k * 2 // x.itemsize
    tile_rows, block = chosen.tile_rows(len(x)), chosen.block_n * features // len(weight)
    steps = -(-features // block) * -(-words // chosen.block_k)
    programs = -(-len(x) // tile_rows) * min(chosen.sharers(len(x)), steps)
    partials = torch.empty(2 * programs * chosen.block_n * tile_rows, dtype=torch.float32, device=x.device)
    _stream[(programs,)](
        descriptor(x, (tile_rows, block_k)),
        descriptor(weight, (block, block_k)),
        *(scales or (None, None)),
        *(bias, out, partials, counters, len(x), features, x.shape[1]),
        STAGES=chosen.stages,
        SWIGLU=swiglu,
        num_warps=chosen.warps,
        maxnreg=chosen.registers(len(x)),
        **pdl_options(x.device),
    )


ELEMENTS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.int16: gl.int16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def descriptor(matrix: Tensor, block: tuple[int, int], swizzled: bool = True) -> TensorDescriptor:
    """A TMA descriptor, which a CUDA graph keeps as a parameter of the kernel. Values beyond the matrix are loaded as zeros.

    swizzled: whether a block has the order that wgmma reads, rather than that of its rows."""
    element = ELEMENTS[matrix.dtype]
    if swizzled:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), element)
    else:
        layout = gl.NVMMASharedLayout(0, 8 * matrix.itemsize, 2)
    stride = max(matrix.stride(0), matrix.shape[1])  # the stride of a single row may be anything
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], list(block), layout)
