"""A row-parallel linear layer of few rows, fused with the one-shot all-reduce that follows it.

`linear_push` multiplies as `kernels/linear.py` does. When a program has a tile of the result, it stores the tile to every rank
as words of the one-shot protocol (`kernels/all_reduce.py`). If K is split over programs, the last program of a tile does this.
`receive` or `receive_add_norm`, which must follow on the same stream, polls for all ranks' words and adds them. So the link's
latency is hidden while other programs still read weights. Results are bitwise those of the layer followed by `one_shot` or
`one_shot_add_norm`, with the same config. The kernels of quantized layers of few rows do the same
(`push_tile` in `kernels/linear_quantized_stream.py`).

**Epochs.** A push and the receiver after it are one launch of the workspace. One-shot all-reduces may use the same workspace.
The push reads the epoch after its `gdc_wait`. By then the previous launch's receiver, which advanced the counters, is complete.
This receiver advances the counters after its own wait, when every push program has read them. Push programs allow the receiver
to start (`gdc_launch_dependents`) only after their wait. So when the receiver starts, everything before the push is complete,
including the counters and the residual stream. The receiver reads both, bypassing L1, and polls, before it waits for the push.
Before that wait, it stores nothing that other kernels may still read.

**Slots.** Launch e uses slot e mod 2. A rank pushes launch e after its receiver of e - 1 has completed, and so has received
words from every rank. Each rank pushed these words after its receiver of e - 2 had completed, and so after its last read of the
slot that launch e writes. `zero_other_slot` runs before this program pushes: a rank that pushes e + 1 to that slot has received
all words of e, and each of them was pushed after all programs of its tile had zeroed their part. Every tile sends words to
every rank.

**No deadlock.** The receiver's programs spin and occupy SMs. But the GPU starts them only after every program of the push has
started, so the push cannot be blocked. Other ranks' words depend only on this rank's earlier launches.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.all_reduce import (
    ONE_SHOT,
    ONE_SHOT_NORM,
    Exchange,
    Tiling,
    check_programs,
    fits_norm,
    norm_programs,
    one_shot_options,
)
from kernels.device import (
    MAX_PROGRAMS,
    advance_epoch,
    first_value,
    flag_differs,
    flag_of,
    normalize_words,
    pack,
    pointer_to,
    push_pairs,
    receive_sum,
    second_value,
    zero_other_slot,
)
from kernels.linear import aligned, arrive, gemv_begin, gemv_launch, gemv_sums, mma_begin, mma_launch, mma_sums, reduce_partials
from kernels.linear_config import (
    SMS,
    Config,
    Gemv,
    Mma,
    QuantizedConfig,
    QuantizedGemv,
    QuantizedStream,
    config,
    pipeline_stages,
    quantized_config,
)
from kernels.linear_quantized import Packed, is_exact, launch
from kernels.norm import add_rms_norm

MAX_ROWS = 16  # with more, one-shot all-reduces are not the fastest
DTYPES = (torch.bfloat16, torch.float16)  # two values a word

_ZERO_BLOCK = tl.constexpr(128)  # small: a larger block would take registers from the multiplication


# --- push ---------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "prefetch", "rank"])
def _gemv_push(
    x, weight, rows, C, K, x_stride, prefetch, state, rank,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, WARPS: tl.constexpr,
    N: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x (rows, K) times weight (C, K), transposed."""
    w, w_pointers, x_pointers = gemv_begin(
        x, weight, C, K, x_stride, prefetch, ROWS, BLOCK_N, BLOCK_K, EVEN, False, PDL, WARPS
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # not earlier: the receiver relies on what the wait has completed
    epoch = tl.load(state.epochs, volatile=True) + 1
    sums = gemv_sums(w, w_pointers, x_pointers, rows, K, x.dtype.element_ty, ROWS, BLOCK_N, BLOCK_K, EVEN)
    zero_other_slot(state, epoch, N, CAPACITY, _ZERO_BLOCK)
    _push_tile(sums, rows, C, state.peers, epoch, rank, N, CAPACITY, x.dtype.element_ty)


@triton.jit(do_not_specialize=["rows", "rank"])
def _mma_push(
    x, weight, partials, counters, rows, C, K, x_stride, state, rank,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x (rows, K) times weight (C, K), transposed; partials (SPLIT, rows, C) fp32 and counters as in `linear.py`."""
    early, w_pointers, x_pointers = mma_begin(x, weight, C, K, x_stride, ROWS, BLOCK_N, BLOCK_K, SPLIT, EARLY, EVEN, False)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # not earlier: the receiver relies on what the wait has completed
    epoch = tl.load(state.epochs, volatile=True) + 1
    sums = mma_sums(early, w_pointers, x_pointers, rows, K, ROWS, BLOCK_N, BLOCK_K, SPLIT, STAGES, EARLY, EVEN, PDL)
    zero_other_slot(state, epoch, N, CAPACITY, _ZERO_BLOCK)
    if SPLIT == 1:
        _push_tile(sums, rows, C, state.peers, epoch, rank, N, CAPACITY, x.dtype.element_ty)
    else:
        if arrive(sums, partials, counters, rows, C, SPLIT):
            complete = reduce_partials(sums, partials, counters, rows, C, SPLIT)
            _push_tile(complete, rows, C, state.peers, epoch, rank, N, CAPACITY, x.dtype.element_ty)


@triton.jit
def _push_tile(sums, rows, C, peers, epoch, rank, N: tl.constexpr, CAPACITY: tl.constexpr, DTYPE: tl.constexpr):
    """Push this program's (BLOCK_N, ROWS) sums of a (rows, C) message, rounded: two adjacent values of a row in each word."""
    PAIRS: tl.constexpr = sums.shape[0] // 2
    ROWS: tl.constexpr = sums.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(sums, (PAIRS, 2, ROWS)), (0, 2, 1)))
    pair = (tl.program_id(0) * PAIRS + tl.arange(0, PAIRS))[:, None]
    m = tl.arange(0, ROWS)[None, :]
    push_pairs(first.to(DTYPE), second.to(DTYPE), m, pair, rows, C // 2, peers, epoch, rank, N, CAPACITY)


# --- receive ------------------------------------------------------------------------------------------------------------------


@triton.jit
def _receive(
    x, weight, out, normed, state,
    words,  # of the message; None with x
    eps,
    ROW: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
    N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = sum. If x is not None: out = x + sum and normed = rms_norm(out) * weight, for rows of ROW words that PARTS
    programs share. Reads of the counters and x bypass L1, because this kernel has not waited for the kernels before it."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if x is None:
        begin = tl.program_id(0) * BLOCK
        offset = begin + tl.arange(0, BLOCK)
        inside = offset < words
    else:
        begin = tl.program_id(0) % PARTS * BLOCK
        column = begin + tl.arange(0, BLOCK)
        row = tl.program_id(0) // PARTS * ROW
        offset = row + column
        inside = column < ROW
        scale = tl.load(weight.to(tl.pointer_type(tl.int32)) + column, mask=inside, other=0)
        before = tl.load(x.to(tl.pointer_type(tl.int32)) + offset, mask=inside, other=0, cache_modifier=".cg")
    epoch = tl.load(state.epochs + tl.program_id(0), volatile=True) + 1
    flag, slot = flag_of(epoch), (epoch & 1) * (N * CAPACITY)
    received = pointer_to(state.peers[N - 1], tl.int64) + slot
    if x is None:
        last = received + tl.minimum(begin + BLOCK, words) - 1
    else:
        last = received + row + tl.minimum(begin + BLOCK, ROW) - 1
    _wait_word(last, flag, state.max_polls, N, CAPACITY)
    first, second = receive_sum(state, 0, slot + offset, inside, flag, N, CAPACITY, BLOCK, DTYPE)
    if x is not None:
        first, second = first_value(before, DTYPE) + first, second_value(before, DTYPE) + second
    result = pack(first, second, DTYPE)
    if x is not None:
        after_norm = normalize_words(result, scale, inside, state, epoch, flag, eps, ROW, PARTS, PADDED_PARTS, DTYPE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    advance_epoch(state.epochs, epoch)
    tl.store(out.to(tl.pointer_type(tl.int32)) + offset, result, mask=inside)
    if x is not None:
        tl.store(normed.to(tl.pointer_type(tl.int32)) + offset, after_norm, mask=inside)


@triton.jit
def _wait_word(pointer, flag, max_polls, N: tl.constexpr, CAPACITY: tl.constexpr):
    """Poll one word of each rank, rank 0's at `pointer`; gives up after `max_polls` polls. While the push still reads weights,
    polling all words would take its bandwidth."""
    missing = 1
    polls = 0
    while (missing != 0) & (polls < max_polls):
        missing = 0
        for rank in tl.static_range(N):
            missing |= flag_differs(tl.load(pointer + rank * CAPACITY, volatile=True), flag)
        polls += 1


# --- launches -----------------------------------------------------------------------------------------------------------------


@cache
def push_config(rows: int, n: int, k: int, dtype: torch.dtype) -> Gemv | Mma | None:
    """The config of a layer that pushes its result. Each program has pairs of adjacent features. None if no kernel supports it.

    Where `kernels.linear_config.config` prefers cuBLAS or the stream kernel, the difference is a few percent
    (docs/results/h200-1-linear.md): less than a push may save.
    """
    if not 0 < rows <= MAX_ROWS or dtype not in DTYPES or n % 2:
        return None
    chosen = config(rows, n, k, dtype)
    if isinstance(chosen, Gemv) and chosen.block_n == 1:
        return Gemv(4, max(chosen.block_k // 4, 128 * chosen.warps), chosen.warps, prefetch=False)
    return chosen if isinstance(chosen, Gemv | Mma) else _default_mma(rows, n, k)


def _default_mma(rows: int, n: int, k: int) -> Mma:
    """Narrow tiles, so that there are many programs without a split of K: the last program of a split pushes late."""
    block_n, block_k = 32, min(128, max(16, triton.next_power_of_2(k)))
    split = max(1, min(round(2 * SMS / triton.cdiv(n, block_n)), triton.cdiv(k, block_k) // 2, 16))
    return Mma(block_n, block_k, split, pipeline_stages(rows, block_n, block_k))


def quantized_push_config(rows: int, weight: Packed, dtype: torch.dtype) -> QuantizedGemv | QuantizedStream | None:
    """The config of a quantized layer by itself, if its kernel keeps the input's 16 bits and pushes its result, too; else None."""
    if not 0 < rows <= MAX_ROWS or dtype not in DTYPES or weight.n % 2 or not is_exact(weight, rows, dtype):
        return None
    chosen = quantized_config(rows, weight.n, weight.k, weight.format, False)
    return chosen if isinstance(chosen, QuantizedGemv | QuantizedStream) else None


def shape_of(weight: Tensor | Packed) -> tuple[int, int]:
    """(C, K) of a weight."""
    return (weight.n, weight.k) if isinstance(weight, Packed) else (weight.shape[0], weight.shape[1])


def fits(x: Tensor, weight: Tensor | Packed, exchange: Exchange) -> bool:
    """Whether `linear_push` supports x (..., K) and weight (C, K): x of a 16-bit dtype, the weight of the same one, contiguous, or
    quantized, rows at multiples of 16 bytes, C even, 1 to MAX_ROWS rows, a workspace in the GPUs' memory, and a message that fits
    the workspace and the receiver's counters."""
    n, k = shape_of(weight)
    rows = x.numel() // max(1, k)
    if exchange.host_buffer is not None or x.shape[-1] != k or not aligned(x):
        return False
    if rows * n * x.element_size() > min(exchange.capacity, 4 * ONE_SHOT.block * MAX_PROGRAMS):
        return False
    if isinstance(weight, Packed):
        return x.device == weight.codes.device and quantized_push_config(rows, weight, x.dtype) is not None
    same = x.dtype == weight.dtype and x.device == weight.device
    return same and weight.is_contiguous() and aligned(weight) and push_config(rows, n, k, x.dtype) is not None


def linear_push(x: Tensor, weight: Tensor | Packed, exchange: Exchange, chosen: Config | QuantizedConfig | None = None) -> None:
    """Push x @ weight.T, this rank's partial sum rounded to x's dtype, to all ranks: x (..., K), weight (C, K).

    chosen: a gemv or mma config with a block_n of at least 2, or a gemv or stream config of a quantized weight; None takes that of
    `push_config` or `quantized_push_config`. `receive` or `receive_add_norm` must be the next launch on this workspace, on the same
    stream. The first call for a device must be outside a CUDA graph's capture. Raises ValueError unless it `fits`.
    """
    if not fits(x, weight, exchange):
        stored = weight.format if isinstance(weight, Packed) else weight.dtype
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and weight {shape_of(weight)} {stored} have no kernel that pushes their product "
            f"to a workspace of {exchange.capacity} bytes"
        )
    x = x.reshape(-1, x.shape[-1])
    if isinstance(weight, Packed):
        chosen = chosen or quantized_push_config(len(x), weight, x.dtype)
        assert isinstance(chosen, QuantizedGemv | QuantizedStream), chosen
        x = x if weight.columns is None else x.index_select(-1, weight.columns)
        launch(x, weight, None, None, chosen, exchange=exchange)
        return
    chosen = chosen or push_config(len(x), *weight.shape, x.dtype)
    more: dict[str, Any] = {"N": exchange.world_size, "CAPACITY": exchange.capacity // 4}
    if isinstance(chosen, Gemv):
        grid, sizes, constants = gemv_launch(x, weight, chosen)
        _gemv_push[grid](x, weight, *sizes, exchange.state, exchange.rank, **(constants | more))
    else:
        assert isinstance(chosen, Mma), chosen
        grid, buffers, sizes, constants = mma_launch(x, weight, chosen)
        _mma_push[grid](x, weight, *buffers, *sizes, exchange.state, exchange.rank, **(constants | more))


def receive(
    shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange, tiling: Tiling = ONE_SHOT, pdl: bool = True
) -> Tensor:
    """The sum over ranks of what `linear_push` has sent, of this shape (..., C) and dtype.

    Raises ValueError if there are more blocks of the tiling than counters."""
    out = torch.empty(shape, dtype=dtype, device=exchange.epochs.device)
    words = out.nbytes // 4
    grid = (triton.cdiv(words, tiling.block),)
    check_programs(grid[0])
    _receive[grid](
        None, None, out, None, exchange.state, words, None, ROW=0, PARTS=0, PADDED_PARTS=0,
        **one_shot_options(exchange, out, tiling, pdl),
    )  # fmt: skip
    return out


def receive_add_norm(
    x: Tensor, weight: Tensor, eps: float, exchange: Exchange, tiling: Tiling = ONE_SHOT_NORM, pdl: bool = True
) -> tuple[Tensor, Tensor]:
    """(x + sum of what `linear_push` has sent, its RMSNorm times weight), both in x's dtype: x (..., C), weight (C,).

    x has the shape and dtype of the pushed message. It must have been computed before the push, because the kernel reads it
    without waiting for later launches. Rounds as `one_shot_add_norm`, or as `receive` and `add_rms_norm` if that has no kernel.
    """
    if not fits_norm(x, x, weight) or norm_programs(x, tiling) > MAX_PROGRAMS:
        return add_rms_norm(x, receive(tuple(x.shape), x.dtype, exchange, pdl=pdl), weight, eps)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    row = x.shape[-1] * x.element_size() // 4
    parts = triton.cdiv(row, tiling.block)
    _receive[(norm_programs(x, tiling),)](
        x, weight, total, normed, exchange.state, None, eps, ROW=row, PARTS=parts, PADDED_PARTS=triton.next_power_of_2(parts),
        **one_shot_options(exchange, x, tiling, pdl),
    )  # fmt: skip
    return total, normed
