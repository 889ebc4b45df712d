"""Linear layers of few input rows, as in decoding, where reading the weight takes most of the time.

PyTorch defines the layers. On a GPU, inputs of up to MAX_ROWS rows use Triton kernels where these are expected to be faster
than cuBLAS (`kernels/linear_config.py`). There are three kernels. All accumulate in fp32 and add in a fixed order, so that a
replay gives the same bits:

    gemv    each program reads a few whole rows of the weight and adds products in registers (1 to 4 input rows)
    mma     tensor cores, with the weight as the M operand, because the input has too few rows for it:
            out^T (BLOCK_N, ROWS) = weight (BLOCK_N, BLOCK_K) @ x^T (BLOCK_K, ROWS). K may be split over programs. The last
            program of a tile to finish adds the partial sums (split-K of Osama et al., *Stream-K*, arXiv:2301.03598)
    stream  on Hopper, `kernels/linear_stream.py`: tensor cores, and every SM has as many loads in flight as it can

SwiGLU is an epilogue: a program computes the gate and the up projection of its features. `kernels/linear_push.py` also uses the
functions without an underscore.

With programmatic dependent launch, a program starts before the previous kernel has finished. It loads or prefetches weights,
which no kernel writes, before it waits for that kernel.
"""

from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import determinism, exact
from kernels.activation import swiglu
from kernels.dispatch import on_gpu, pdl_options, tl, triton
from kernels.linear_config import DTYPES, MAX_TILES, Config, Gemv, Mma, Stream, config

PREFETCH_BYTES = 24 << 20  # of a weight, at most, before the input is ready; L2 has 60 MB


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, parts: int = 1) -> Tensor:
    """x @ weight.T + bias with fp32 accumulation: (..., K), (N, K) and (N,) to (..., N). One dtype: bf16, fp16 or fp32. With
    --deterministic it is the `determinism.tree_sum` over `parts` equal parts of K, each with 1 / parts of the bias.

    With few rows on a GPU, layers of one device must run one after another, because they share counters. The first call for a
    device must be outside a CUDA graph's capture, or RuntimeError is raised.
    """
    if determinism.enabled():
        forward = import_module("kernels.linear_tree").linear if x.is_cuda else exact.linear
        return exact.differentiable(partial(forward, parts=parts), _plain, x, weight, bias)
    chosen = _chosen(x, weight, bias, swiglu=False)
    return F.linear(x, weight, bias) if chosen is None else linear_with(x, weight, bias, chosen, swiglu=False)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def linear_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up of (gate, up) = linear(x): (..., K), (2I, K), the gate's I rows first, and (2I,) to (..., I).

    If one kernel computes both, gate and up stay in fp32 and only the result is rounded (Shazeer, arXiv:2002.05202). Otherwise
    `linear` rounds them before `kernels.activation.swiglu`. The conditions are those of `linear`.
    """
    if determinism.enabled() and on_gpu(x):
        return import_module("kernels.linear_tree").linear(x, weight, bias, swiglu=True)
    chosen = _chosen(x, weight, bias, swiglu=True)
    return swiglu(linear(x, weight, bias)) if chosen is None else linear_with(x, weight, bias, chosen, swiglu=True)


def _chosen(x: Tensor, weight: Tensor, bias: Tensor | None, swiglu: bool) -> Config | None:
    """The config of this layer; None for F.linear, which also raises the errors for wrong shapes."""
    n, k = weight.shape
    if not on_gpu(x) or torch.compiler.is_compiling() or x.shape[-1] != k or not x.numel() or (swiglu and n % 2):
        return None
    same = x.dtype == weight.dtype and x.device == weight.device and (bias is None or bias.dtype == x.dtype)
    if not same or x.dtype not in DTYPES or not (weight.is_contiguous() and aligned(x) and aligned(weight)):
        return None
    return config(x.numel() // k, n, k, x.dtype, swiglu)


def aligned(x: Tensor) -> bool:
    """Whether each row is contiguous and begins at a multiple of 16 bytes."""
    unit = 16 // x.element_size()
    whole = x.shape[-1] % unit == 0 and all(stride % unit == 0 for stride in x.stride()[:-1])
    return whole and x.stride(-1) == 1 and x.data_ptr() % 16 == 0


# --- launches -----------------------------------------------------------------------------------------------------------------


def linear_with(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Config, swiglu: bool) -> Tensor:
    """`linear` or, with swiglu, `linear_swiglu`, with the kernel and config that `chosen` names.

    x (..., K) and weight (N, K), `aligned`, the weight contiguous; bias (N,) or None. Returns (..., N), or (..., N / 2) with
    swiglu, of x's dtype. Raises RuntimeError if the first call for a device is inside a CUDA graph's capture.
    """
    features = len(weight) // 2 if swiglu else len(weight)
    out = torch.empty(*x.shape[:-1], features, dtype=x.dtype, device=x.device)
    x = x.reshape(-1, x.shape[-1])
    counters(x.device)  # allocated even if this layer needs none, because later layers may be captured
    if isinstance(chosen, Gemv):
        grid, sizes, constants = gemv_launch(x, weight, chosen)
        _gemv[grid](x, weight, bias, out, *sizes, SWIGLU=swiglu, **constants)
    elif isinstance(chosen, Stream):
        import_module("kernels.linear_stream").stream(x, weight, bias, out, counters(x.device), chosen, swiglu)  # needs Gluon
    else:
        grid, buffers, sizes, constants = mma_launch(x, weight, chosen)
        _mma[grid](x, weight, bias, out, *buffers, *sizes, SWIGLU=swiglu, **constants)
    return out


def gemv_launch(x: Tensor, weight: Tensor, chosen: Gemv) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """(grid, (rows, N, K, x_stride, prefetch), constants) of a gemv launch."""
    n, k = weight.shape
    constants = {
        "ROWS": triton.next_power_of_2(len(x)),
        "BLOCK_N": chosen.block_n,
        "BLOCK_K": chosen.block_k,
        "EVEN": k % chosen.block_k == 0,
        "WARPS": chosen.warps,
        "num_warps": chosen.warps,
        **pdl_options(x.device),
    }
    prefetch = _prefetch_columns(weight, chosen.prefetch)
    return (triton.cdiv(n, chosen.block_n),), (len(x), n, k, x.stride(0), prefetch), constants


def mma_launch(
    x: Tensor, weight: Tensor, chosen: Mma
) -> tuple[tuple[int, ...], tuple[Tensor, Tensor], tuple[int, ...], dict[str, Any]]:
    """(grid, (partials, counters), (rows, N, K, x_stride), constants) of an mma launch. The grid is (tiles, parts of K)."""
    n, k = weight.shape
    tiles = triton.cdiv(n, chosen.block_n)
    # every program has at least one step of K, and a split needs counters
    split = min(chosen.split, triton.cdiv(k, chosen.block_k)) if tiles <= MAX_TILES else 1
    partials = torch.empty(split * len(x) * n if split > 1 else 0, dtype=torch.float32, device=x.device)
    constants = {
        "ROWS": max(16, triton.next_power_of_2(len(x))),
        "BLOCK_N": chosen.block_n,
        "BLOCK_K": chosen.block_k,
        "SPLIT": split,
        "STAGES": chosen.stages,
        "EARLY": chosen.early,
        "EVEN": k % chosen.block_k == 0,
        "num_warps": chosen.warps,
        **pdl_options(x.device),
    }
    return (tiles, split), (partials, counters(x.device)), (len(x), n, k, x.stride(0)), constants


@cache
def counters(device: torch.device) -> Tensor:
    """Counters of finished programs by tile, for all layers of a device. All are zero between two kernels.

    Layers of one device share them, so they must not run at the same time. Raises RuntimeError while a CUDA graph is captured,
    because only that graph would write the zeros.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"the first linear layer on {device} is inside a CUDA graph; run it once before the capture")
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def _prefetch_columns(weight: Tensor, wanted: bool) -> int:
    """Columns of each row of the weight to prefetch, at least 256; 0 unless wanted."""
    unit = 16 // weight.element_size()
    return max(256, PREFETCH_BYTES // weight.element_size() // len(weight)) // unit * unit if wanted else 0


# --- gemv ---------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "prefetch"])
def _gemv(
    x,  # (rows, K)
    weight,  # (N, K)
    bias,  # (N,) or None
    out,  # (rows, N), or (rows, N / 2) with SWIGLU
    rows, N, K, x_stride,
    prefetch,  # columns to prefetch after the first tile
    ROWS: tl.constexpr,  # rows, rounded up to a power of two
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,  # BLOCK_K divides K
    SWIGLU: tl.constexpr, PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w, w_pointers, x_pointers = gemv_begin(
        x, weight, N, K, x_stride, prefetch, ROWS, BLOCK_N, BLOCK_K, EVEN, SWIGLU, PDL, WARPS
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = gemv_sums(w, w_pointers, x_pointers, rows, K, x.dtype.element_ty, ROWS, BLOCK_N, BLOCK_K, EVEN)
    _epilogue(sums, bias, out, tl.program_id(0), rows, N, SWIGLU)


@triton.jit
def gemv_begin(
    x, weight, N, K, x_stride, prefetch,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, SWIGLU: tl.constexpr,
    PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The part before the input is ready: load the first tile of the weight, and prefetch. Returns the tile, as 32-bit words,
    and pointers to the first words of the weight and of the input.

    Rows are read as 32-bit words, because Triton would hold 16-bit values unpacked in registers of twice the size.
    """
    PER_WORD: tl.constexpr = 32 // x.dtype.element_ty.primitive_bitwidth
    words = K // PER_WORD
    tile = tl.program_id(0)
    row = _weight_rows(tile * BLOCK_N + tl.arange(0, BLOCK_N), N, SWIGLU)
    # all tiles are 3D, also those of x, so that they share one layout and no value moves between threads
    k = tl.arange(0, BLOCK_K // PER_WORD)[None, None, :]
    m = tl.arange(0, ROWS)[:, None, None]
    w_pointers = _word(weight) + (row.to(tl.int64) * words)[None, :, None] + k
    x_pointers = _word(x) + m * (x_stride // PER_WORD) + k
    w = _weights(w_pointers, k, words, EVEN)
    if PDL:
        _prefetch_tile(weight, N, K, tile, BLOCK_K, prefetch, BLOCK_N, SWIGLU, WARPS)
    return w, w_pointers, x_pointers


@triton.jit
def gemv_sums(
    w, w_pointers, x_pointers, rows, K, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The (BLOCK_N, ROWS) fp32 result of this program, from what `gemv_begin` returned."""
    PER_WORD: tl.constexpr = 32 // dtype.primitive_bitwidth
    WORDS: tl.constexpr = BLOCK_K // PER_WORD
    words = K // PER_WORD
    k = tl.arange(0, WORDS)[None, None, :]
    m = tl.arange(0, ROWS)[:, None, None]
    sums = tl.zeros((ROWS, BLOCK_N, WORDS // 4), tl.float32)
    for start in range(WORDS, words, WORDS):
        next_w = _weights(w_pointers + start, k + start, words, EVEN)  # in flight while the previous tile is used
        sums += _products(w, x_pointers + (start - WORDS), m < rows, dtype)
        w = next_w
    last = (tl.cdiv(words, WORDS) - 1) * WORDS
    sums += _products(w, x_pointers + last, (m < rows) & (k + last < words), dtype)
    return tl.trans(tl.sum(sums, axis=2))


@triton.jit
def _products(w, pointers, mask, dtype: tl.constexpr):
    """(1, BLOCK_N, WORDS) of the weight times the input at the (ROWS, 1, WORDS) pointers, added over the four words that one
    thread holds: (ROWS, BLOCK_N, WORDS / 4) fp32."""
    x = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_last")
    p = _first(w, dtype) * _first(x, dtype)
    if dtype != tl.float32:
        p += _second(w, dtype) * _second(x, dtype)
    return tl.sum(tl.reshape(p, (p.shape[0], p.shape[1], p.shape[2] // 4, 4)), axis=3)


@triton.jit
def _word(pointer):
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _first(word, dtype: tl.constexpr):
    """The only value of a 32-bit word, or the first of two, in fp32."""
    if dtype == tl.bfloat16:
        return (word << 16).to(tl.float32, bitcast=True)
    if dtype == tl.float16:
        return (word & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return word.to(tl.float32, bitcast=True)


@triton.jit
def _second(word, dtype: tl.constexpr):
    """The second value of a 32-bit word of two 16-bit values, in fp32."""
    if dtype == tl.bfloat16:
        return (word & -65536).to(tl.float32, bitcast=True)
    return ((word >> 16) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _prefetch_tile(weight, N, K, tile, first, count, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr, WARPS: tl.constexpr):
    """Prefetch columns first to first + count of all the program's rows of the weight into L2."""
    if count > 0:
        FUSED: tl.constexpr = 2 if SWIGLU else 1
        first_row, features = tile * (BLOCK_N // FUSED), N // FUSED
        for part in tl.static_range(FUSED):
            row = first_row + part * features
            prefetch(weight, K, row, features - first_row, first, count, BLOCK_N // FUSED, WARPS)


@triton.jit
def prefetch(weight, K, row, rows_left, first, count, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Prefetch columns first to first + count of the BLOCK_N rows from `row` on, of which rows_left exist, into L2.

    The row pitch K, first and count must be multiples of 16 bytes. The instruction takes its operands from uniform registers,
    so the threads of a warp issue it one after another: each warp gets few and large pieces.
    """
    PER_WARP: tl.constexpr = BLOCK_N // WARPS if BLOCK_N > WARPS else 1
    PIECES: tl.constexpr = WARPS // BLOCK_N if WARPS > BLOCK_N else 1
    SIZE: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    size = tl.minimum(count, K - first) * SIZE // PIECES // 16 * 16
    address = (weight + row.to(tl.int64) * K + first).to(tl.int64)
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 lane, piece, row;
        .reg .u64 from, part;
        mov.u32 lane, %tid.x;
        shr.u32 piece, lane, 5;
        and.b32 lane, lane, 31;
        mad.lo.u32 piece, piece, $4, lane;
        div.u32 row, piece, $5;
        rem.u32 piece, piece, $5;
        setp.lt.u32 p, lane, $4;
        setp.lt.and.u32 p, row, $6, p;
        setp.gt.and.s32 p, $3, 0, p;
        mad.wide.u32 from, row, $2, $1;
        mul.wide.u32 part, piece, $3;
        add.u64 from, from, part;
        @p cp.async.bulk.prefetch.L2.global [from], $3;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r,r,r,r",
        [address, K * SIZE, size, PER_WARP, PIECES, rows_left],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


# --- mma ----------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def _mma(
    x,  # (rows, K)
    weight,  # (N, K)
    bias,  # (N,) or None
    out,  # (rows, N), or (rows, N / 2) with SWIGLU
    partials,  # (SPLIT, rows, N) fp32
    counters,  # one for each tile of N, zero before and after
    rows, N, K, x_stride,
    ROWS: tl.constexpr,  # rows, rounded up to a power of two, at least 16
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    EVEN: tl.constexpr,  # BLOCK_K divides K
    SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    early, w_pointers, x_pointers = mma_begin(x, weight, N, K, x_stride, ROWS, BLOCK_N, BLOCK_K, SPLIT, EARLY, EVEN, SWIGLU)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = mma_sums(early, w_pointers, x_pointers, rows, K, ROWS, BLOCK_N, BLOCK_K, SPLIT, STAGES, EARLY, EVEN, PDL)
    tile = tl.program_id(0)
    if SPLIT == 1:
        _epilogue(sums, bias, out, tile, rows, N, SWIGLU)
    else:
        if arrive(sums, partials, counters, rows, N, SPLIT):
            _epilogue(reduce_partials(sums, partials, counters, rows, N, SPLIT), bias, out, tile, rows, N, SWIGLU)


@triton.jit
def mma_begin(
    x, weight, N, K, x_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
    EVEN: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """The part before the input is ready: with EARLY, load the last tile of this program's weights. Returns this tile, and
    pointers to the first values of the weight and of the input."""
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, ROWS)[None, :]
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_pointers = weight + _weight_rows(feature, N, SWIGLU).to(tl.int64)[:, None] * K + k[None, :]
    x_pointers = x + m * x_stride + k[:, None]
    if EARLY:
        last = (_steps_end(tl.program_id(1), K, BLOCK_K, SPLIT) - 1) * BLOCK_K
        early = _weights(w_pointers + last, k[None, :] + last, K, EVEN)
    else:
        early = tl.zeros((1, 1), weight.dtype.element_ty)
    return early, w_pointers, x_pointers


@triton.jit
def mma_sums(
    early, w_pointers, x_pointers, rows, K,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The (BLOCK_N, ROWS) fp32 sums over this program's part of K, from what `mma_begin` returned."""
    split = tl.program_id(1)
    first, end = _steps_end(split - 1, K, BLOCK_K, SPLIT), _steps_end(split, K, BLOCK_K, SPLIT)
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, ROWS)[None, :]
    if EARLY:
        end -= 1
        early_x = _inputs(x_pointers, end * BLOCK_K, m, k[:, None], rows, K, EVEN)
    sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for step in tl.range(first, end, num_stages=STAGES):
        start = step * BLOCK_K
        w = _weights(w_pointers + start, k[None, :] + start, K, EVEN)
        sums = tl.dot(w, _inputs(x_pointers, start, m, k[:, None], rows, K, EVEN), sums)
    if EARLY:  # used last, so that the loop loads its first tiles right after the wait
        if PDL:
            early, early_x = _load_late(early), _load_late(early_x)
        sums = tl.dot(early, early_x, sums)
    return sums


@triton.jit
def _steps_end(split, K, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):
    """The number of steps of BLOCK_K columns in parts 0 to `split` of K."""
    return (split + 1) * tl.cdiv(K, BLOCK_K) // SPLIT


@triton.jit
def _inputs(pointers, start, m, k, rows, K, EVEN: tl.constexpr):
    inside = m < rows if EVEN else (m < rows) & (k + start < K)
    return tl.load(pointers + start, mask=inside, other=0.0, eviction_policy="evict_last")


@triton.jit
def _load_late(values):
    """The same 16-bit values, not used before this call. Otherwise Triton stores a dot's operand in shared memory right after
    the load, and waits there for it."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2)


@triton.jit
def arrive(sums, partials, counters, rows, N, SPLIT: tl.constexpr):
    """Store this program's partial sums. Returns whether it is the last program of its tile to do so."""
    tile, split = tl.program_id(0), tl.program_id(1)
    offsets, inside = _tile_offsets(sums, rows, N)
    tl.store(partials + split * rows * N + offsets, sums, mask=inside)
    tl.debug_barrier()  # all threads have stored before one of them counts
    return tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1


@triton.jit
def reduce_partials(sums, partials, counters, rows, N, SPLIT: tl.constexpr):
    """In the last program of a tile: add all partial sums of the tile, in a fixed order, and reset the counter."""
    offsets, inside = _tile_offsets(sums, rows, N)
    total = tl.zeros_like(sums)
    for part in tl.static_range(SPLIT):
        # from L2, because other programs wrote the partial sums
        total += tl.load(partials + part * rows * N + offsets, mask=inside, other=0.0, cache_modifier=".cg")
    tl.store(counters + tl.program_id(0), 0)
    return total


@triton.jit
def _tile_offsets(sums, rows, N):
    """Offsets of a tile of (BLOCK_N, ROWS) sums in (rows, N), and a mask of those that exist."""
    feature = (tl.program_id(0) * sums.shape[0] + tl.arange(0, sums.shape[0]))[:, None]
    m = tl.arange(0, sums.shape[1])[None, :]
    return m * N + feature, (m < rows) & (feature < N)


# --- gemv and mma -------------------------------------------------------------------------------------------------------------


@triton.jit
def _weights(pointers, k, K, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=k < K, other=0, eviction_policy="evict_first")


@triton.jit
def _weight_rows(feature, N, SWIGLU: tl.constexpr):
    """The weight's row for each feature of a tile. With SWIGLU, rows of the gate and of the up projection alternate."""
    feature = tl.minimum(feature, N - 1)
    return feature // 2 + feature % 2 * (N // 2) if SWIGLU else feature


@triton.jit
def _epilogue(sums, bias, out, tile, rows, N, SWIGLU: tl.constexpr):
    """Store (BLOCK_N, ROWS) sums plus bias as out (rows, N), or, with SWIGLU, silu(gate) * up as (rows, N / 2)."""
    BLOCK_N: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[1]
    FUSED: tl.constexpr = 2 if SWIGLU else 1
    if bias is not None:
        row = _weight_rows(tile * BLOCK_N + tl.arange(0, BLOCK_N), N, SWIGLU)
        sums += tl.load(bias + row).to(tl.float32)[:, None]
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (BLOCK_N // 2, 2, ROWS)), (0, 2, 1)))
        sums = gate / (1.0 + tl.exp(-gate)) * up
    feature = (tile * (BLOCK_N // FUSED) + tl.arange(0, BLOCK_N // FUSED))[:, None]
    m = tl.arange(0, ROWS)[None, :]
    features = N // FUSED
    tl.store(out + m * features + feature, sums.to(out.dtype.element_ty), mask=(m < rows) & (feature < features))
