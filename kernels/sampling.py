"""Sampling without gathering logits: each rank of a vocabulary-parallel head finds its best ids, and the best of all is chosen.

With the Gumbel-max trick, sampling is an argmax, and the argmax of all logits is the best of the ranks' argmaxes. So the ranks
exchange a few 8-byte keys instead of the logits. The noise is a hash of (seed, position, token id), the same on every rank.

A key is an int64 that sorts by score and then by lowest id: the upper half has the score's fp32 bits, changed so that they sort
as a signed integer, and the lower half the complement of the id, which must be below 2^32.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import exact
from kernels.dispatch import as_rows, on_gpu, pdl_options, tl, triton

SLICE = 1024  # consecutive ids with one key
NEVER = -(2**63)  # below every key of an id
INFINITY = 0x7F800000  # the upper half of its key; that of minus infinity is its complement
NO_TOKEN = -1  # drawn from a row whose best score is not a finite number


def local_best(logits: Tensor, temperature: Tensor, seed: Tensor, positions: Tensor, first_id: int, limit: int) -> Tensor:
    """The best key of each `SLICE` ids of a rank's part of the vocabulary: (B, ceil(V / SLICE)) int64.

    logits (B, V) of any float dtype, of the ids first_id … first_id + V - 1; temperature (B,) fp32, 0 for greedy; seed and
    positions (B,) int64. The score is the logit where temperature is 0, otherwise logit / temperature - log(noise), in fp32.
    Ids from `limit` on score -inf: they are the padding of the vocabulary."""
    if not on_gpu(logits):
        return local_best_reference(logits, temperature, seed, positions, first_id, limit)
    rows, slices = as_rows(logits), triton.cdiv(logits.shape[-1], SLICE)
    keys = torch.empty(rows.shape[0], slices, dtype=torch.int64, device=logits.device)
    if keys.numel():
        per_row = (x.contiguous() for x in (temperature, seed, positions))
        numbers = rows.stride(0), rows.shape[1], first_id, limit, slices
        options = _noise_options(logits)
        _local_best[(rows.shape[0], slices)](rows, *per_row, keys, *numbers, SLICE=SLICE, **options)
    return keys


def combine_best(keys: Tensor) -> Tensor:
    """The sampled tokens (B,) int64, from the concatenated keys of all ranks (B, n) int64. NO_TOKEN where a score is NaN or infinite, or
    all are minus infinity."""
    if not on_gpu(keys):
        return combine_best_reference(keys)
    rows = as_rows(keys)
    tokens = torch.empty(rows.shape[0], dtype=torch.int64, device=keys.device)
    if tokens.numel():
        block = triton.next_power_of_2(rows.shape[1])
        warps = min(max(block // 128, 1), 8)
        _combine_best[(rows.shape[0],)](
            rows, tokens, rows.stride(0), rows.shape[1], BLOCK=block, num_warps=warps, **pdl_options(keys.device)
        )
    return tokens


def local_best_reference(
    logits: Tensor, temperature: Tensor, seed: Tensor, positions: Tensor, first_id: int, limit: int
) -> Tensor:
    ids = torch.arange(first_id, first_id + logits.shape[-1], device=logits.device)
    scores, per_row = logits.float(), temperature[:, None]
    drawn = scores / per_row.clamp(min=1e-6) + gumbel_noise(seed[:, None], positions[:, None], ids)
    scores = torch.where(per_row == 0, scores, drawn).masked_fill(ids >= limit, -torch.inf)
    keys = pack(scores, ids)
    keys = F.pad(keys, (0, -keys.shape[-1] % SLICE), value=NEVER)
    return keys.unflatten(-1, (-1, SLICE)).amax(-1)


def combine_best_reference(keys: Tensor) -> Tensor:
    best = keys.amax(-1)
    upper = best >> 32
    return torch.where((upper < INFINITY) & (upper > ~INFINITY), ~best & 0xFFFFFFFF, NO_TOKEN)


def pack(scores: Tensor, ids: Tensor) -> Tensor:
    """Keys of fp32 scores and int64 ids. 0 and -0 are equal, and so are all NaNs, which are the largest, as in torch.argmax."""
    scores = torch.where(scores == 0, 0.0, torch.where(scores.isnan(), torch.nan, scores))
    bits = scores.view(torch.int32).long()
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | (~ids & 0xFFFFFFFF)


def gumbel_noise(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """-log of `exponential_noise`, (B, V) fp32. On a GPU it has the bits of the noise in `local_best`, so that it does not matter which
    of the two draws a token."""
    if not on_gpu(seed):
        return gumbel_noise_reference(seed, positions, ids)
    noise = torch.empty(len(seed), len(ids), device=seed.device)
    if noise.numel():
        grid, inputs = (len(seed), triton.cdiv(len(ids), SLICE)), (x.contiguous() for x in (seed, positions, ids))
        _gumbel_noise[grid](*inputs, noise, len(ids), SLICE=SLICE, **_noise_options(noise))
    return noise


def gumbel_noise_reference(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    noise = exponential_noise(seed, positions, ids)
    return -(exact.log(noise.double()).float() if exact.used(noise) else noise.log())


def exponential_noise(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """(B, V) fp32, Exp(1) distributed, a hash of seed (B, 1), position (B, 1) and token id (V,). In PyTorch, also on a GPU."""
    mixed = hash64(hash64(hash64(seed) ^ positions) ^ ids)
    uniform = _shift_right(mixed, 32).float() * 2.0**-32 + 2.0**-33  # small values keep their relative precision
    uniform = uniform.clamp(max=1 - 2.0**-24)  # so that the noise is finite
    return -(exact.log(1 - uniform.double()).float() if exact.used(uniform) else torch.log1p(-uniform))


def softmax(logits: Tensor) -> Tensor:
    """Over the last dim, fp32."""
    return exact.softmax(logits) if exact.used(logits) else _even(logits).softmax(-1)[..., : logits.shape[-1]]


def log_softmax(logits: Tensor) -> Tensor:
    """Over the last dim, of fp32 logits, with a gradient."""
    plain = partial(F.log_softmax, dim=-1)
    if exact.used(logits):
        return exact.differentiable(exact.log_softmax, plain, logits)
    return plain(_even(logits))[..., : logits.shape[-1]]


def _even(logits: Tensor) -> Tensor:
    """Padded so that each row begins at a multiple of 16 bytes. From elsewhere PyTorch adds in another order, so a row alone would
    differ from the same row in a batch."""
    padding = -logits.shape[-1] % 4
    return F.pad(logits, (0, padding), value=-torch.inf) if padding else logits


def hash64(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64, with overflow (Steele, Lea & Flood, *Fast Splittable PRNGs*, 2014)."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift; torch's int64 shift is arithmetic


# --- kernels ------------------------------------------------------------------------------------------------------------------


def _noise_options(x: Tensor) -> dict[str, Any]:
    """Launch options of the kernels with noise. No fused multiply-adds, because a compiler would fuse others in each kernel."""
    return {"num_warps": 4, "enable_fp_fusion": False, **pdl_options(x.device)}


@triton.jit(do_not_specialize=["first_id", "limit", "slices"])
def _local_best(
    logits, temperatures, seeds, positions, keys, row_stride, size, first_id, limit, slices,
    SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program handles one slice of a row's vocabulary."""
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
        divisor = tl.maximum(temperature, 1e-6) + tl.zeros_like(scores)
        scores = tl.math.div_rn(scores, divisor) + _gumbel(seed, position, ids)
    scores = tl.where(ids < limit, scores, -float("inf"))
    best = tl.where(column < size, _pack(scores, ids), -0x7FFFFFFFFFFFFFFF - 1)
    tl.store(keys + row * slices + tl.program_id(1), tl.max(best, axis=0))


@triton.jit(do_not_specialize=["size"])
def _gumbel_noise(seeds, positions, ids, noise, size, SLICE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    values = _gumbel(seed, position, tl.load(ids + column, mask=column < size, other=0))
    tl.store(noise + row * size + column, values, mask=column < size)


@triton.jit(do_not_specialize=["count"])
def _combine_best(keys, tokens, row_stride, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    found = tl.load(keys + row * row_stride + column, mask=column < count, other=-0x7FFFFFFFFFFFFFFF - 1)
    best = tl.max(found, axis=0)
    upper = best >> 32
    tl.store(tokens + row, tl.where((upper < 0x7F800000) & (upper > ~0x7F800000), ~best & 0xFFFFFFFF, -1))


@triton.jit
def _gumbel(seed, position, ids):
    """`gumbel_noise` of int64 ids, for a uint64 seed and position."""
    mixed = _hash64(_hash64(_hash64(seed) ^ position) ^ ids.to(tl.uint64, bitcast=True))
    return -tl.log(_exponential(mixed))


@triton.jit
def _hash64(x):
    """SplitMix64's finalizer on uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _exponential(mixed):
    """Exp(1) noise of uint64 hashes: -log1p(-u), with log1p(x) = log(w) * x / (w - 1) for the rounded w = 1 + x, which is
    accurate for small x (Kahan)."""
    uniform = (mixed >> 32).to(tl.uint32).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    complement = 1.0 - uniform
    is_one = complement == 1.0
    return tl.where(is_one, uniform, -tl.log(complement) * tl.math.div_rn(uniform, tl.where(is_one, 1.0, 1.0 - complement)))


@triton.jit
def _pack(scores, ids):
    """Keys of fp32 scores and int64 ids."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = tl.where(scores != scores, 0x7FC00000, scores.to(tl.int32, bitcast=True))
    upper = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32
    return upper | (~ids & 0xFFFFFFFF)
