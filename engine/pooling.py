"""Embeddings: the last hidden states of a prompt's tokens, after the final norm, pooled to one vector.

A mean is accumulated over the chunks of the prompt. The sum is in fixed point, whose additions are exact: it has the same bits
however the prompt is cut into chunks and whatever else is in a step. A last column counts the rows that have no such sum, because a
number is not finite or too large.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.sequence import Chunk, Sequence
from engine.transfers import to_device, to_host

ONE = 2.0**32  # in fixed point: an error of 2^-33 a token, and sums of up to 2^31
LARGEST = 2.0**12  # of a value, so that the sum of 2^19 tokens is exact
Norm = Callable[[Tensor], Tensor]
PIECE = 512  # rows that are converted at once; those of a whole step would take too much memory


class Pooled(NamedTuple):
    """vectors: (S, C) fp32 in host memory, of the sequences whose prompts end in a step, valid as `to_host` says."""

    sequences: list[Sequence]
    vectors: Tensor


def reads_all_rows(chunk: Chunk) -> bool:
    """Whether the hidden states of all the chunk's tokens are needed."""
    return chunk.sequence.params.pooling == "mean"


def pool(norm: Norm, chunks: list[Chunk], last: Tensor, hidden: Tensor | None) -> Pooled | None:
    """Pool a step's hidden states, for the sequences that ask for it. None if no such sequence ends.

    norm: the model's final one. last: (W, C), the W rows that draw. hidden: (T, C), all rows, if any chunk `reads_all_rows`.
    """
    if any(map(reads_all_rows, chunks)):
        assert hidden is not None
        _add_up(norm, chunks, hidden)
    ended, rows, row = list[Chunk](), list[int](), 0
    for chunk in chunks:
        if chunk.samples and chunk.sequence.params.pooling is not None:
            ended.append(chunk)
            rows.append(row)
        row += (1 + len(chunk.draft)) * chunk.samples
    if not ended:
        return None
    vectors = norm(last[to_device(rows, torch.int64, last.device)]).float()
    for i, chunk in enumerate(ended):
        if reads_all_rows(chunk):
            *sums, overflowed = chunk.sequence.state.pooled.split([vectors.shape[-1], 1])
            vectors[i] = (sums[0] / (ONE * chunk.stop)).masked_fill(overflowed > 0, torch.nan)
            chunk.sequence.state.pooled = None
    return Pooled([chunk.sequence for chunk in ended], to_host(vectors))


def _add_up(norm: Norm, chunks: list[Chunk], hidden: Tensor) -> None:
    """Add the rows of chunks to the sums of their sequences. A sequence's first chunk begins a new sum, also after a preemption."""
    places = [place for place, chunk in enumerate(chunks) for _ in range(chunk.count)]
    segments = to_device(places, torch.int64, hidden.device)
    sums = torch.zeros(len(chunks), hidden.shape[-1] + 1, dtype=torch.int64, device=hidden.device)
    for first in range(0, len(places), PIECE):
        part = segments[first : first + PIECE]
        normed = norm(hidden[first : first + len(part)])
        fits = (normed.abs() < LARGEST).all(-1, keepdim=True)  # false for NaN
        fixed = (normed.double() * ONE).round_().masked_fill_(~fits, 0).long()
        sums.index_add_(0, part, torch.cat([fixed, (~fits).long()], dim=-1))
    for chunk, own in zip(chunks, sums, strict=True):
        if reads_all_rows(chunk):
            state = chunk.sequence.state
            state.pooled = own if chunk.start == 0 else state.pooled + own
