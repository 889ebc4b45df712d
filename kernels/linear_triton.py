"""Triton kernels of linear layers with few input rows, which read the weight once at near memory bandwidth.

Two designs, both with fp32 accumulation and a fixed order of additions, so that a replay gives the same bits:

    gemv    each program holds a few whole rows of the weight and adds products in registers (1 to 4 input rows)
    mma     tensor cores with the weight as the M side, since the input has too few rows for it:
            out^T (BLOCK_N, ROWS) = weight (BLOCK_N, BLOCK_K) @ x^T (BLOCK_K, ROWS); K may be split over programs, of which
            the last to arrive adds the partial sums (split-K of Osama et al., *Stream-K*, arXiv:2301.03598)

With programmatic dependent launch a program starts while the kernel before drains, and asks for its weights, which no kernel
writes, before it waits for that kernel. Import this module only where Triton is needed; it also runs in Triton's
interpreter (TRITON_INTERPRET=1).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dispatch import pdl_supported
from kernels.linear import Gemv, Mma

TILES = 16384  # of one layer, that may split K: arrival counters of a device
PREFETCHED = 24 << 20  # bytes of a weight, of 60 MB of L2, that are asked for before the input is there


@triton.jit
def _prefetch(weight, K, place, rows_left, first, count, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Ask L2 for columns first to first + count of the BLOCK_N rows at `place`, of which rows_left exist.

    The row pitch K, first and count must be multiples of 16 bytes. The instruction takes its operands from uniform registers, so
    that lanes of a warp issue it in turn: the pieces are dealt to the warps, each as few and as large as can be.
    """
    PER_WARP: tl.constexpr = BLOCK_N // WARPS if BLOCK_N > WARPS else 1
    PIECES: tl.constexpr = WARPS // BLOCK_N if WARPS > BLOCK_N else 1
    SIZE: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    size = tl.minimum(count, K - first) * SIZE // PIECES // 16 * 16
    address = (weight + place.to(tl.int64) * K + first).to(tl.int64)
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


@triton.jit
def _weights(pointers, k, K, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=k < K, other=0, eviction_policy="evict_first")


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
def _silu_mul(gate, up, dtype: tl.constexpr):
    """silu(gate) * up in fp32, rounded to dtype once; in fp32 again."""
    return (gate / (1.0 + tl.exp(-gate)) * up).to(dtype).to(tl.float32)


@triton.jit
def _products(w, pointers, mask, words, dtype: tl.constexpr, SWIGLU: tl.constexpr):
    """(1, BLOCK_N, WORDS) times the input at the (ROWS, 1, WORDS) pointers, summed over the four words that one thread holds."""
    x = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_last")
    first = _first(x, dtype)
    if SWIGLU:
        up = tl.load(pointers + words, mask=mask, other=0, eviction_policy="evict_last")
        first = _silu_mul(first, _first(up, dtype), dtype)
    p = _first(w, dtype) * first
    if dtype != tl.float32:
        second = _second(x, dtype)
        if SWIGLU:
            second = _silu_mul(second, _second(up, dtype), dtype)
        p += _second(w, dtype) * second
    return tl.sum(tl.reshape(p, (p.shape[0], p.shape[1], p.shape[2] // 4, 4)), axis=3)


@triton.jit(do_not_specialize=["rows", "prefetch"])
def _gemv(
    x,  # (rows, K), or (rows, 2K) with SWIGLU
    weight,  # (N, K)
    bias,  # (N,) or None
    out,  # (rows, N)
    rows,
    N,
    K,
    x_stride,
    prefetch,  # columns to ask for behind the first tile
    ROWS: tl.constexpr,  # rows, rounded up to a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,  # BLOCK_K divides K
    SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Rows are read as 32-bit words: 16-bit values that wait in registers would be unpacked, twice as large, on arrival."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = x.dtype.element_ty
    PER_WORD: tl.constexpr = 32 // dtype.primitive_bitwidth
    WORDS: tl.constexpr = BLOCK_K // PER_WORD
    words = K // PER_WORD
    first_row = tl.program_id(0) * BLOCK_N
    place = first_row + tl.arange(0, BLOCK_N)
    row = tl.minimum(place, N - 1)
    # all tiles are 3D, though x has no rows of the weight: so they share one layout and nothing moves between threads
    k = tl.arange(0, WORDS)[None, None, :]
    m = tl.arange(0, ROWS)[:, None, None]
    w_pointers = _word(weight) + (row.to(tl.int64) * words)[None, :, None] + k
    x_pointers = _word(x) + m * (x_stride // PER_WORD) + k
    tile = _weights(w_pointers, k, words, EVEN)
    if PDL:
        if prefetch > 0:
            _prefetch(weight, K, first_row, N - first_row, BLOCK_K, prefetch, BLOCK_N, WARPS)
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((ROWS, BLOCK_N, WORDS // 4), tl.float32)
    for start in range(WORDS, words, WORDS):
        ahead = _weights(w_pointers + start, k + start, words, EVEN)  # in flight while the tile before is used
        sums += _products(tile, x_pointers + (start - WORDS), m < rows, words, dtype, SWIGLU)
        tile = ahead
    last = (tl.cdiv(words, WORDS) - 1) * WORDS
    sums += _products(tile, x_pointers + last, (m < rows) & (k + last < words), words, dtype, SWIGLU)
    total = tl.sum(sums, axis=2)
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    m = tl.arange(0, ROWS)[:, None]
    tl.store(out + m * N + place[None, :], total.to(out.dtype.element_ty), mask=(m < rows) & (place < N)[None, :])


@triton.jit(do_not_specialize=["rows", "prefetch", "steps"])
def _mma(
    x,  # (rows, K), or (rows, 2K) with SWIGLU
    weight,  # (N, K)
    bias,  # (N,) or None
    out,  # (rows, N)
    partials,  # (SPLIT, rows, N) fp32
    counters,  # one for each tile of N, zero before and after
    rows,
    N,
    K,
    x_stride,
    prefetch,  # columns to ask for
    steps,  # of BLOCK_K, for one program
    ROWS: tl.constexpr,  # rows, rounded up to 16, 32 or 64
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,  # BLOCK_K divides K
    SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
    WARPS: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(place, N - 1)
    first = split * steps
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, ROWS)[None, :]
    if PDL:
        if prefetch > 0:
            wanted = tl.minimum(prefetch, steps * BLOCK_K)
            _prefetch(weight, K, tile * BLOCK_N, N - tile * BLOCK_N, first * BLOCK_K, wanted, BLOCK_N, WARPS)
        tl.extra.cuda.gdc_wait()
    w_pointers = weight + row.to(tl.int64)[:, None] * K + k[None, :]
    x_pointers = x + m * x_stride + k[:, None]
    sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for step in tl.range(first, tl.minimum(first + steps, tl.cdiv(K, BLOCK_K)), num_stages=STAGES):
        start = step * BLOCK_K
        w = _weights(w_pointers + start, k[None, :] + start, K, EVEN)
        inside = m < rows if EVEN else (m < rows) & (k[:, None] + start < K)
        inputs = tl.load(x_pointers + start, mask=inside, other=0.0, eviction_policy="evict_last")
        if SWIGLU:
            up = tl.load(x_pointers + start + K, mask=inside, other=0.0, eviction_policy="evict_last")
            inputs = _silu_mul(inputs.to(tl.float32), up.to(tl.float32), w.dtype).to(w.dtype)
        sums = tl.dot(w, inputs, sums)
    where = m * N + place[:, None]
    inside = (m < rows) & (place < N)[:, None]
    if SPLIT == 1:
        _finish(sums, bias, row, out, where, inside)
    else:
        tl.store(partials + split * rows * N + where, sums, mask=inside)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            total = tl.zeros((BLOCK_N, ROWS), tl.float32)
            for part in tl.static_range(SPLIT):
                # from L2: the partial sums are other programs'
                total += tl.load(partials + part * rows * N + where, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
            _finish(total, bias, row, out, where, inside)


@triton.jit
def _finish(sums, bias, row, out, where, inside):
    if bias is not None:
        sums += tl.load(bias + row).to(tl.float32)[:, None]
    tl.store(out + where, sums.to(out.dtype.element_ty), mask=inside)


@cache
def _counters(device: torch.device) -> Tensor:
    """Arrival counters of the layers of a device, all zero between two kernels.

    Layers of one device share them, and so must not run at the same time. Raises RuntimeError while a CUDA graph is captured:
    the zeros would be written by that graph only.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"a first linear layer on {device} inside a CUDA graph; run it once before the capture")
    return torch.zeros(TILES, dtype=torch.int32, device=device)


def run(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Gemv | Mma, swiglu: bool) -> Tensor:
    """linear(x) or, with swiglu, linear(silu(gate) * up) as `kernels.linear` defines them.

    x: (M, K) or (M, 2K), its rows contiguous; weight (N, K), contiguous; bias (N,) or None. Every row must begin at a multiple of
    16 bytes. Returns (M, N) of x's dtype. Raises RuntimeError if the first call for a device is inside a CUDA graph's capture.
    """
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    counters = _counters(x.device)
    if isinstance(chosen, Gemv):
        _run_gemv(x, weight, bias, out, chosen, swiglu)
    else:
        _run_mma(x, weight, bias, out, counters, chosen, swiglu)
    return out


def _run_gemv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, chosen: Gemv, swiglu: bool) -> None:
    n, k = weight.shape
    _gemv[(triton.cdiv(n, chosen.block_n),)](
        *(x, weight, bias, out, len(x), n, k, x.stride(0), _prefetched(weight, chosen.prefetch)),
        ROWS=triton.next_power_of_2(len(x)),
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        EVEN=k % chosen.block_k == 0,
        SWIGLU=swiglu,
        **_launch(x.device, chosen.warps),
    )


def _run_mma(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, counters: Tensor, chosen: Mma, swiglu: bool) -> None:
    n, k = weight.shape
    tiles, all_steps = triton.cdiv(n, chosen.block_n), triton.cdiv(k, chosen.block_k)
    steps = triton.cdiv(all_steps, chosen.split)
    split = triton.cdiv(all_steps, steps) if tiles <= TILES else 1  # no program without a step
    steps = steps if split > 1 else all_steps
    partials = torch.empty(split * out.numel() if split > 1 else 0, dtype=torch.float32, device=x.device)
    _mma[(tiles, split)](
        *(x, weight, bias, out, partials, counters, len(x), n, k, x.stride(0)),
        *(_prefetched(weight, chosen.prefetch), steps),
        ROWS=max(16, triton.next_power_of_2(len(x))),
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        SPLIT=split,
        STAGES=chosen.stages,
        EVEN=k % chosen.block_k == 0,
        SWIGLU=swiglu,
        **_launch(x.device, chosen.warps),
    )


def _launch(device: torch.device, warps: int) -> dict[str, int | bool]:
    pdl = pdl_supported(device)
    return {"PDL": pdl, "WARPS": warps, "num_warps": warps, "launch_pdl": pdl}


def _prefetched(weight: Tensor, wanted: bool) -> int:
    """The columns of each row to ask for."""
    unit = 16 // weight.element_size()
    return max(256, PREFETCHED // weight.element_size() // len(weight)) // unit * unit if wanted else 0
