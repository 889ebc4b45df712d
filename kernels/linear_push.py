"""A row-parallel linear layer of few rows and the sum over ranks that follows it, without the partial sum's way through memory.

`linear_push` multiplies as `kernels/linear.py` does, and each program, once it has a tile of the result, pushes it to every
rank as words of the one-shot protocol (`kernels/all_reduce.py`); with K split over programs it is the last to arrive that does.
`receive` or `receive_add_norm`, which must follow on the same stream, polls for all ranks' words and sums them. So the link's
latency passes while other programs still read weights. Results are bit for bit those of the layer followed by `one_shot` or
`one_shot_add_norm`, given the same config.

**Launch numbers.** A push and the receiver behind it are one launch of the workspace, which one-shot sums may share. The push reads
the number behind its `gdc_wait`, and with it the receiver's of the launch before is complete; the receiver advances the counters
behind its own, when every push program has read them. All push programs let the receiver start (`gdc_launch_dependents`) only
behind their wait: so when it starts, all that came before the push is complete, the counters and the residual stream among it. It
reads both past L1, and polls, before it waits for the push; it stores nothing that others may still read before it has waited.

**Slots.** Launch e uses slot e mod 2. A rank pushes launch e only when its receiver of e - 1 is complete. That one had words from
every rank, each of which pushed them behind the completion of its receiver of e - 2, and with it of all reading of the slot that e
is written to. `_sweep` zeroes the other slot before this program's words are pushed: a rank that pushed e + 1 there has received
all words of e, of which each was pushed when its tile's programs had swept.

**No starvation.** The receiver's programs spin, and hold their places on the SMs. But the GPU starts none before each program of
the push has started, or ended: those have their places. Other ranks' words wait for nothing of this rank but its earlier launches.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.all_reduce import (
    MAX_PROGRAMS,
    ONE_SHOT,
    ONE_SHOT_NORM,
    Exchange,
    Tiling,
    _at,
    _check_programs,
    _common,
    _count,
    _first,
    _flag_of,
    _normalized,
    _pack,
    _push,
    _receive_sum,
    _second,
    _sweep,
    fits_norm,
    norm_programs,
)
from kernels.linear import aligned, arrive, gemv_begin, gemv_launch, gemv_sums, mma_begin, mma_launch, mma_sums, total
from kernels.linear_config import SMS, Config, Gemv, Mma, config, pipeline_stages
from kernels.norm import add_rms_norm

MAX_ROWS = 16  # more are more bytes than one-shot sums are good for
DTYPES = (torch.bfloat16, torch.float16)  # two values a word

_SWEEP_BLOCK = tl.constexpr(128)  # registers that the multiplication would lack


# --- push -----------------------------------------------------------------------------------------------------------------------


@triton.jit
def _push_tile(sums, rows, C, peers, epoch, rank, N: tl.constexpr, CAPACITY: tl.constexpr, DTYPE: tl.constexpr):
    """Push this program's (BLOCK_N, ROWS) sums of a (rows, C) message, rounded, two neighbours of a row in a word."""
    PAIRS: tl.constexpr = sums.shape[0] // 2
    ROWS: tl.constexpr = sums.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(sums, (PAIRS, 2, ROWS)), (0, 2, 1)))
    words = _pack(first, second, DTYPE).to(tl.uint32, bitcast=True).to(tl.int64) | _flag_of(epoch)
    column = (tl.program_id(0) * PAIRS + tl.arange(0, PAIRS))[:, None]
    m = tl.arange(0, ROWS)[None, :]
    slot = (epoch & 1) * (N * CAPACITY)
    inside = (m < rows) & (column < C // 2)
    _push(peers, slot + rank * CAPACITY + m * (C // 2) + column, words, inside, N)


@triton.jit(do_not_specialize=["rows", "prefetch", "rank"])
def _gemv_push(
    x, weight, rows, C, K, x_stride, prefetch, peers, epochs, squares, fault, rank,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, WARPS: tl.constexpr,
    N: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x (rows, K) times weight (C, K), transposed."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    w, w_pointers, x_pointers = gemv_begin(x, weight, C, K, x_stride, prefetch, ROWS, BLOCK_N, BLOCK_K, EVEN, False, PDL, WARPS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # not before: the receiver relies on what is complete by now
    epoch = tl.load(epochs, volatile=True) + 1
    sums = gemv_sums(w, w_pointers, x_pointers, rows, K, DTYPE, ROWS, BLOCK_N, BLOCK_K, EVEN)
    _sweep(
        peers[N - 1], None, squares, fault, epoch, 0, N * CAPACITY, tl.program_id(0), tl.num_programs(0), N * CAPACITY,
        _SWEEP_BLOCK,
    )  # fmt: skip
    _push_tile(sums, rows, C, peers, epoch, rank, N, CAPACITY, DTYPE)


@triton.jit(do_not_specialize=["rows", "rank"])
def _mma_push(
    x, weight, partials, counters, rows, C, K, x_stride, peers, epochs, squares, fault, rank,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x (rows, K) times weight (C, K), transposed; partials (SPLIT, rows, C) fp32 and counters as in `linear.py`."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    early, w_pointers, x_pointers = mma_begin(x, weight, C, K, x_stride, ROWS, BLOCK_N, BLOCK_K, SPLIT, EARLY, EVEN, False)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # not before: the receiver relies on what is complete by now
    epoch = tl.load(epochs, volatile=True) + 1
    sums = mma_sums(early, w_pointers, x_pointers, rows, K, ROWS, BLOCK_N, BLOCK_K, SPLIT, STAGES, EARLY, EVEN, PDL)
    _sweep(
        peers[N - 1], None, squares, fault, epoch, 0, N * CAPACITY, tl.program_id(0), tl.num_programs(0), N * CAPACITY,
        _SWEEP_BLOCK,
    )  # fmt: skip
    if SPLIT == 1:
        _push_tile(sums, rows, C, peers, epoch, rank, N, CAPACITY, DTYPE)
    else:
        if arrive(sums, partials, counters, rows, C, SPLIT):
            _push_tile(total(sums, partials, counters, rows, C, SPLIT), rows, C, peers, epoch, rank, N, CAPACITY, DTYPE)


# --- receive --------------------------------------------------------------------------------------------------------------------


@triton.jit
def _receiver_epoch(epochs):
    """This launch's number, read past L1: this kernel has not waited for the one before."""
    return tl.load(epochs + tl.program_id(0), volatile=True) + 1


@triton.jit
def _await_word(place, flag, patience, N: tl.constexpr, CAPACITY: tl.constexpr):
    """Poll one word of each rank, or give up: while the push still reads weights, to poll them all would take its bandwidth."""
    missing = 1
    polls = 0
    while (missing != 0) & (polls < patience):
        missing = 0
        for rank in tl.static_range(N):
            word = tl.load(place + rank * CAPACITY, volatile=True)
            missing |= (((word ^ flag) >> 32) != 0).to(tl.int32)
        polls += 1


@triton.jit
def _receive(
    out, peers, epochs, fault, words, patience,
    N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    begin = tl.program_id(0) * BLOCK
    offset = begin + tl.arange(0, BLOCK)
    inside = offset < words
    epoch = _receiver_epoch(epochs)
    flag, slot = _flag_of(epoch), (epoch & 1) * (N * CAPACITY)
    mine = _at(peers[N - 1], tl.int64) + slot
    _await_word(mine + tl.minimum(begin + BLOCK, words) - 1, flag, patience, N, CAPACITY)
    first, second = _receive_sum(peers[N - 1], None, 0, slot + offset, inside, flag, patience, fault, N, CAPACITY, BLOCK, DTYPE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    _count(epochs, epoch)
    tl.store(out.to(tl.pointer_type(tl.int32)) + offset, _pack(first, second, DTYPE), mask=inside)


@triton.jit
def _receive_norm(
    x, weight, total, normed, peers, epochs, squares, fault, patience, eps,
    ROW: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
    N: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """total = x + sum, normed = rms_norm(total) * weight, for rows of ROW words that PARTS programs share."""
    DTYPE: tl.constexpr = total.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    begin = tl.program_id(0) % PARTS * BLOCK
    column = begin + tl.arange(0, BLOCK)
    row = tl.program_id(0) // PARTS * ROW
    offset = row + column
    inside = column < ROW
    scale = tl.load(weight.to(tl.pointer_type(tl.int32)) + column, mask=inside, other=0)
    before = tl.load(x.to(tl.pointer_type(tl.int32)) + offset, mask=inside, other=0, cache_modifier=".cg")
    epoch = _receiver_epoch(epochs)
    flag, slot = _flag_of(epoch), (epoch & 1) * (N * CAPACITY)
    mine = _at(peers[N - 1], tl.int64) + slot
    _await_word(mine + row + tl.minimum(begin + BLOCK, ROW) - 1, flag, patience, N, CAPACITY)
    first, second = _receive_sum(peers[N - 1], None, 0, slot + offset, inside, flag, patience, fault, N, CAPACITY, BLOCK, DTYPE)
    after = _pack(_first(before, DTYPE) + first, _second(before, DTYPE) + second, DTYPE)
    after_norm = _normalized(after, scale, inside, squares, epoch, flag, patience, fault, eps, ROW, PARTS, LANES, DTYPE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    _count(epochs, epoch)
    tl.store(total.to(tl.pointer_type(tl.int32)) + offset, after, mask=inside)
    tl.store(normed.to(tl.pointer_type(tl.int32)) + offset, after_norm, mask=inside)


# --- launches -------------------------------------------------------------------------------------------------------------------


@cache
def push_config(rows: int, n: int, k: int, dtype: torch.dtype) -> Config | None:
    """The config of a layer whose programs push pairs of neighbours; None where there is no kernel.

    Where `kernels.linear_config.config` prefers cuBLAS it is by a percent or two (docs/performance.md), less than a push may save.
    """
    if not 0 < rows <= MAX_ROWS or dtype not in DTYPES or n % 2:
        return None
    chosen = config(rows, n, k, dtype)
    if isinstance(chosen, Gemv) and chosen.block_n == 1:
        return Gemv(4, max(chosen.block_k // 4, 128 * chosen.warps), chosen.warps, prefetch=False)
    return chosen or _default_mma(rows, n, k)


def _default_mma(rows: int, n: int, k: int) -> Mma:
    """Narrow tiles: many programs without a split of K, of which the last would come late."""
    block_n, block_k = 32, min(128, max(16, triton.next_power_of_2(k)))
    split = max(1, min(round(2 * SMS / triton.cdiv(n, block_n)), triton.cdiv(k, block_k) // 2, 16))
    return Mma(block_n, block_k, split, pipeline_stages(rows, block_n, block_k))


def _places(exchange: Exchange) -> tuple[Any, ...]:
    return exchange.peers, exchange.epochs, exchange.squares, exchange.fault


def fits(x: Tensor, weight: Tensor, exchange: Exchange) -> bool:
    """Whether `linear_push` takes x (..., K) and weight (C, K): of one 16-bit dtype, rows at multiples of 16 bytes, the weight
    contiguous, C even, 1 to MAX_ROWS rows, and a message that the workspace, in the GPUs' memory, and the receiver's counters have
    room for."""
    n, k = weight.shape
    rows = x.numel() // max(1, k)
    if exchange.inbox is not None or x.dtype != weight.dtype or x.device != weight.device or x.shape[-1] != k:
        return False
    if not (weight.is_contiguous() and aligned(x) and aligned(weight)):
        return False
    size = rows * n * x.element_size()
    if size > min(exchange.capacity, 4 * ONE_SHOT.block * MAX_PROGRAMS):
        return False
    return push_config(rows, n, k, x.dtype) is not None


def linear_push(x: Tensor, weight: Tensor, exchange: Exchange, chosen: Config | None = None, pdl: bool = True) -> None:
    """Push x @ weight.T, this rank's partial sum rounded to x's dtype, to all ranks: x (..., K), weight (C, K).

    chosen: the config, with a block_n of at least 2; None takes `push_config`'s. A `receive` or `receive_add_norm` must follow on
    the same stream before anything else on this workspace. The first call for a device must be outside a CUDA graph's capture.
    Raises ValueError unless it `fits`.
    """
    if not fits(x, weight, exchange):
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} have no kernel that pushes their product "
            f"to a workspace of {exchange.capacity} bytes"
        )
    x = x.reshape(-1, x.shape[-1])
    chosen = chosen or push_config(len(x), *weight.shape, x.dtype)
    more: dict[str, Any] = {"CAPACITY": exchange.capacity // 4, **_common(exchange, x, pdl)}
    if isinstance(chosen, Gemv):
        grid, sizes, constants = gemv_launch(x, weight, chosen)
        _gemv_push[grid](x, weight, *sizes, *_places(exchange), exchange.rank, **(constants | more))
    else:
        assert chosen is not None
        grid, buffers, sizes, constants = mma_launch(x, weight, chosen)
        _mma_push[grid](x, weight, *buffers, *sizes, *_places(exchange), exchange.rank, **(constants | more))


def receive(
    shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange, tiling: Tiling = ONE_SHOT, pdl: bool = True
) -> Tensor:
    """The sum over ranks of what `linear_push` has sent, of this shape (..., C) and dtype.

    Raises ValueError if there are more blocks of the tiling than counters."""
    out = torch.empty(shape, dtype=dtype, device=exchange.epochs.device)
    words = out.nbytes // 4
    grid = (triton.cdiv(words, tiling.block),)
    _check_programs(grid[0])
    _receive[grid](
        out, exchange.peers, exchange.epochs, exchange.fault, words, exchange.patience, CAPACITY=exchange.capacity // 4,
        BLOCK=tiling.block, num_warps=tiling.warps, **_common(exchange, out, pdl),
    )  # fmt: skip
    return out


def receive_add_norm(
    x: Tensor, weight: Tensor, eps: float, exchange: Exchange, tiling: Tiling = ONE_SHOT_NORM, pdl: bool = True
) -> tuple[Tensor, Tensor]:
    """(x + sum of what `linear_push` has sent, its RMSNorm times weight), both in x's dtype: x (..., C), weight (C,).

    x, of the pushed message's shape and dtype, must have been computed before the push: the kernel reads it without a wait for
    what comes between. Rounds as `one_shot_add_norm` does, or, where that has no kernel, as `receive` and `add_rms_norm` do.
    """
    if not fits_norm(x, x, weight) or norm_programs(x, tiling) > MAX_PROGRAMS:
        return add_rms_norm(x, receive(tuple(x.shape), x.dtype, exchange, pdl=pdl), weight, eps)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    row = x.shape[-1] * x.element_size() // 4
    parts = triton.cdiv(row, tiling.block)
    _receive_norm[(norm_programs(x, tiling),)](
        x, weight, total, normed, *_places(exchange), exchange.patience, eps, ROW=row, PARTS=parts,
        LANES=triton.next_power_of_2(parts), BLOCK=tiling.block, num_warps=tiling.warps, CAPACITY=exchange.capacity // 4,
        **_common(exchange, x, pdl),
    )  # fmt: skip
    return total, normed
