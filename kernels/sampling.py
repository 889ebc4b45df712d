"""Drawing tokens without gathering logits: each rank of a vocabulary-parallel head finds its best ids, the best of all wins.

By the Gumbel-max trick a draw is an argmax, and an argmax of parts is the argmax of the whole, so the ranks exchange a few
8-byte keys instead of the logits. The noise of a token is a hash of (seed, position, token id): every rank draws the same.

A key is an int64 that sorts like (score, lowest id first): the score's fp32 bits, turned so that they sort as a signed integer,
in the upper half, and the complement of the id in the lower one. Ids are exact below 2^32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import on_gpu

SLICE = 1024  # consecutive ids that share a key
NEVER = -(2**63)  # the key of no id at all


def local_best(logits: Tensor, temperature: Tensor, seed: Tensor, positions: Tensor, first_id: int, limit: int) -> Tensor:
    """The best key of each `SLICE` ids of a rank's part of the vocabulary: (B, ceil(V / SLICE)) int64.

    logits (B, V) of any float dtype, of the ids first_id … first_id + V - 1; temperature (B,) fp32, 0 for greedy; seed and
    positions (B,) int64. The score is the logit where temperature is 0, otherwise logit / temperature - log(noise), in fp32.
    Ids from `limit` on score -inf: they are the padding of the vocabulary."""
    arguments = logits, temperature, seed, positions, first_id, limit
    if not on_gpu(logits):
        return local_best_reference(*arguments)
    from kernels import sampling_triton

    return sampling_triton.local_best(*arguments)


def combine_best(keys: Tensor) -> Tensor:
    """The drawn tokens, (B,) int64, of the ranks' keys side by side, (B, n) int64."""
    if not on_gpu(keys):
        return combine_best_reference(keys)
    from kernels import sampling_triton

    return sampling_triton.combine_best(keys)


def local_best_reference(
    logits: Tensor, temperature: Tensor, seed: Tensor, positions: Tensor, first_id: int, limit: int
) -> Tensor:
    ids = torch.arange(first_id, first_id + logits.shape[-1], device=logits.device)
    scores, warmth = logits.float(), temperature[:, None]
    drawn = scores / warmth.clamp(min=1e-6) - exponential_noise(seed[:, None], positions[:, None], ids).log()
    scores = torch.where(warmth == 0, scores, drawn).masked_fill(ids >= limit, -torch.inf)
    keys = pack(scores, ids)
    keys = F.pad(keys, (0, -keys.shape[-1] % SLICE), value=NEVER)
    return keys.unflatten(-1, (-1, SLICE)).amax(-1)


def combine_best_reference(keys: Tensor) -> Tensor:
    return ~keys.amax(-1) & 0xFFFFFFFF


def pack(scores: Tensor, ids: Tensor) -> Tensor:
    """Keys of fp32 scores and int64 ids. Both zeros are one score, and so are all NaNs: the largest, as for torch.argmax."""
    scores = torch.where(scores == 0, 0.0, torch.where(scores.isnan(), torch.nan, scores))
    bits = scores.view(torch.int32).long()
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | (~ids & 0xFFFFFFFF)


def exponential_noise(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """(B, V) fp32, Exp(1) distributed, a function of seed (B, 1), position (B, 1) and token id (V,) alone."""
    mixed = hash64(hash64(hash64(seed) ^ positions) ^ ids)
    uniform = _shift_right(mixed, 32).float() * 2.0**-32 + 2.0**-33  # small values keep their relative precision
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))  # finite, so that no token's score is infinite by its noise


def hash64(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64 (Steele, Lea & Flood 2014); products wrap around."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical: torch's int64 shift copies the sign
