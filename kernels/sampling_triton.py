"""Triton kernels of `kernels/sampling.py`: a program a slice of the vocabulary, and a program a row to find the best of all."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dispatch import pdl_supported
from kernels.norm_triton import as_rows
from kernels.sampling import SLICE


@triton.jit
def _hash64(x):
    """SplitMix64's finalizer on uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _exponential(mixed):
    """Exp(1) noise of hashes, uint64: -log1p(-u), where log1p(x) = log(w) * x / (w - 1) with w = 1 + x rounded loses nothing
    (Kahan)."""
    uniform = (mixed >> 32).to(tl.uint32).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    rest = 1.0 - uniform
    nothing = rest == 1.0
    return tl.where(nothing, uniform, -tl.log(rest) * tl.math.div_rn(uniform, tl.where(nothing, 1.0, 1.0 - rest)))


@triton.jit
def _pack(scores, ids):
    """Keys of fp32 scores and int64 ids."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = tl.where(scores != scores, 0x7FC00000, scores.to(tl.int32, bitcast=True))
    upper = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32
    return upper | (~ids & 0xFFFFFFFF)


@triton.jit(do_not_specialize=["first_id", "limit", "slices"])
def _local_best(
    logits,
    temperatures,
    seeds,
    positions,
    keys,
    row_stride,
    size,
    first_id,
    limit,
    slices,
    SLICE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    scores = tl.load(logits + row * row_stride + column, mask=column < size, other=0.0).to(tl.float32)
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    ids = column.to(tl.int64) + first_id
    if temperature != 0:
        mixed = _hash64(_hash64(_hash64(seed) ^ position) ^ ids.to(tl.uint64, bitcast=True))
        divisor = tl.maximum(temperature, 1e-6) + tl.zeros_like(scores)
        scores = tl.math.div_rn(scores, divisor) - tl.log(_exponential(mixed))
    scores = tl.where(ids < limit, scores, -float("inf"))
    best = tl.where(column < size, _pack(scores, ids), -0x7FFFFFFFFFFFFFFF - 1)
    tl.store(keys + row * slices + tl.program_id(1), tl.max(best, axis=0))


@triton.jit(do_not_specialize=["count"])
def _combine_best(keys, tokens, row_stride, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    found = tl.load(keys + row * row_stride + column, mask=column < count, other=-0x7FFFFFFFFFFFFFFF - 1)
    tl.store(tokens + row, ~tl.max(found, axis=0) & 0xFFFFFFFF)


def local_best(logits: Tensor, temperature: Tensor, seed: Tensor, positions: Tensor, first_id: int, limit: int) -> Tensor:
    rows, slices = as_rows(logits), triton.cdiv(logits.shape[-1], SLICE)
    keys = torch.empty(rows.shape[0], slices, dtype=torch.int64, device=logits.device)
    if keys.numel():
        pdl = pdl_supported(logits.device)
        per_row = (x.contiguous() for x in (temperature, seed, positions))
        numbers = rows.stride(0), rows.shape[1], first_id, limit, slices
        _local_best[(rows.shape[0], slices)](rows, *per_row, keys, *numbers, SLICE=SLICE, PDL=pdl, num_warps=4, launch_pdl=pdl)
    return keys


def combine_best(keys: Tensor) -> Tensor:
    rows = as_rows(keys)
    tokens = torch.empty(rows.shape[0], dtype=torch.int64, device=keys.device)
    if tokens.numel():
        pdl, block = pdl_supported(keys.device), triton.next_power_of_2(rows.shape[1])
        warps = min(max(block // 128, 1), 8)
        _combine_best[(rows.shape[0],)](
            rows, tokens, rows.stride(0), rows.shape[1], BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl
        )
    return tokens
