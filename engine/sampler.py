"""Sampling tokens from logits: temperature, top-k, top-p, min-p, seeded per sequence, vectorized over the batch.

Filters apply to the distribution after temperature: top-k, then top-p, then min-p. Parameters are fp32 values. Top-p adds
probabilities as whole multiples of 2^-60, because the order in which a GPU adds fp32 values depends on the batch. min_p is
compared as a logarithm, log p_i >= log p_max + log(min_p), because the logarithm of any positive min_p can be represented: 1e-84
drops tokens more than 193.4 below the largest logit / temperature. A top_p that fp32 rounds to 1 filters nothing. A temperature
above 0 and below 1e-6 counts as 1e-6, or as 0 if fp32 rounds it to 0.

The noise is a hash of (seed, position, token id), not the state of a generator, so a sequence draws the same tokens
alone, in any batch, and on every rank. Sampling uses the Gumbel-max trick, which needs one number for each token id.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.protocol import SamplingParams
from engine.transfers import to_device
from kernels.sampling import NO_TOKEN, gumbel_noise, softmax


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of B sequences as tensors of shape (B, 1). The flags tell which computations can be skipped."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor  # -inf: no filter
    seed: Tensor
    all_greedy: bool
    any_filter: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> "SamplingBatch":
        def column(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return to_device([[value] for value in values], dtype, device)

        return cls(
            temperature=column(p.temperature for p in params),
            top_k=column((p.top_k for p in params), torch.int64),
            top_p=column(p.top_p for p in params),
            log_min_p=column(math.log(p.min_p) if p.min_p else -math.inf for p in params),
            seed=column((p.seed for p in params), torch.int64),
            all_greedy=all(p.temperature == 0 for p in params),
            any_filter=any(p.is_filtered for p in params),
        )


def sample(logits: Tensor, batch: SamplingBatch, positions: Tensor) -> Tensor:
    """Draw one token for each of B sequences: (B, V) fp32 logits and the tokens' positions (B, 1) int64, to (B,) int64. NO_TOKEN where
    the best score is not finite: a logit is NaN or infinite, or all are minus infinity."""
    best, tokens = logits.max(-1)
    if not batch.all_greedy:
        scaled = logits / batch.temperature.clamp(min=1e-6)
        if batch.any_filter:
            scaled = scaled.masked_fill(~keep(scaled, batch), -torch.inf)
        ids = torch.arange(logits.shape[-1], device=logits.device)
        best_drawn, drawn = (scaled + gumbel_noise(batch.seed, positions, ids)).max(-1)
        greedy = batch.temperature[:, 0] == 0
        best, tokens = torch.where(greedy, best, best_drawn), torch.where(greedy, tokens, drawn)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def keep(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """(B, V) bool: the tokens that pass top-k, then top-p over the rest, then min-p. The likeliest always passes."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    vocab = scaled.shape[-1]
    rank = torch.arange(vocab, device=scaled.device)
    passes = rank < torch.where(batch.top_k == 0, vocab, batch.top_k)
    probabilities = softmax(ordered.masked_fill(~passes, -torch.inf))
    whole = _whole(probabilities)
    before = whole.cumsum(-1) - whole  # the probability of all likelier tokens
    passes &= (before < _whole(batch.top_p)) | (batch.top_p == 1)  # rounding may make `before` 1 while tokens are left
    passes &= ordered - ordered[:, :1] >= batch.log_min_p  # logarithms, because probabilities and their products underflow
    passes[:, 0] = True
    return torch.zeros_like(passes).scatter_(-1, order, passes)


def _whole(probabilities: Tensor) -> Tensor:
    """fp32 as int64 multiples of 2^-60, whose sums are the same in every order."""
    return (probabilities.double() * 2.0**60).long()
