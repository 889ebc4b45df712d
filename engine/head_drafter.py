"""Drafts by an EAGLE-3 draft head (`checkpoints/eagle.py`), which reads the target model's hidden states.

A head's row of token t + 1 has the target's features of t. It lies at position t of the head's cache, so the head's sequence is the
target's without its first token, and it draws the token after the next. The features exist only until the next step, so a head
reads each step: between two steps it computes the rows of the first one, with the tokens that this has drawn. These rows are exact; those
of a draft, whose features are the head's own output, are overwritten by them.

While drafts do not pay, a head sees no steps. When it comes back, or if a prompt was in the prefix cache without it, it lacks the
features of the tokens that it missed. It computes their rows with zeros instead, from the tokens alone. Drafts may then be worse,
which their acceptance rate shows, and no other sequence gets these rows.
"""

from collections.abc import Mapping
from itertools import accumulate
from weakref import WeakSet

import torch
from torch import Tensor

from checkpoints.eagle import STREAMS
from engine.block_manager import BlockManager
from engine.head_model import HeadModel
from engine.model_drafter import ModelDrafter, Shadow
from engine.runner import Runner
from engine.sequence import Chunk, Sequence
from engine.step import InFlightStep
from engine.transfers import to_device

MISSED = -1  # instead of a row of the last step: a token whose features are lost


class HeadDrafter(ModelDrafter):
    """The draft head of an engine."""

    name = "head"

    def __init__(self, runner: Runner, blocks: BlockManager, longest: int, model: HeadModel) -> None:
        super().__init__(runner, blocks, longest)
        self.model = model
        self._last: InFlightStep | None = None  # the step whose rows are to be computed
        self._paused: WeakSet[Sequence] = WeakSet()

    def reads_each_step(self, sequence: Sequence) -> bool:
        return sequence not in self._lost and sequence not in self._paused

    def pause(self, sequence: Sequence) -> None:
        self._paused.add(sequence)

    def observe(self, step: InFlightStep) -> None:
        self._last = step

    def _tokens(self, sequence: Sequence) -> list[int]:
        """A copy, which `_rows_of` extends."""
        return sequence.tokens[1:]

    @torch.inference_mode()
    def _catch_up(self, counts: Mapping[Sequence, int]) -> tuple[dict[Sequence, Shadow], list[Chunk]]:
        """The shadows of the sequences of the last step, and chunks of its rows but for rejected ones, by falling length of the
        drafts."""
        last, self._last = self._last, None
        self._paused -= counts.keys()
        if last is None:
            return {}, []
        shadows, chunks, rows = dict[Sequence, Shadow](), list[Chunk](), list[int]()  # see `_rows_of`
        spare = self.runner.capacity.tokens - sum([chunk.count for chunk in last.chunks])
        firsts = accumulate([chunk.count for chunk in last.chunks], initial=0)
        for chunk, first in sorted(zip(last.chunks, firsts, strict=False), key=lambda one: -counts.get(one[0].sequence, 0)):
            sequence = chunk.sequence
            if sequence.finish_reason is not None or not sequence.blocks or not self.reads_each_step(sequence):
                continue
            if sequence.computed == chunk.start:  # its token is to be drawn again
                continue
            shadow = self._shadow(sequence)
            if own := self._rows_of(shadow, chunk, first, spare):
                spare -= own.count(MISSED)
                chunks.append(self._chunk(shadow, len(own)))
                rows += own
                shadows[sequence] = shadow
        if rows:
            self._write_features(last, rows)
        return shadows, chunks

    def _rows_of(self, shadow: Shadow, chunk: Chunk, first: int, spare: int) -> list[int]:
        """Bring the shadow up to date. Returns the step's rows of a chunk, which begin at row `first`, without those that were rejected,
        and before them MISSED for each token that the head has missed. If these are more than `spare`, so many alone; the rest comes in
        the next steps."""
        sequence, known = chunk.sequence, shadow.sequence.tokens
        known += sequence.tokens[len(known) + 1 :]
        shadow.done = min(shadow.done, chunk.start)
        missed = chunk.start - shadow.done
        if missed:
            shadow.marked = len(sequence.blocks)  # no other sequence gets rows without features
        if missed > spare:
            return [MISSED] * spare
        return [MISSED] * missed + list(range(first, first + sequence.computed - chunk.start))

    def _write_features(self, last: InFlightStep, rows: list[int]) -> None:
        """Write the features of these rows of the last step, and zeros for each MISSED."""
        features, seen = self.model.features[: len(rows)], [row for row in rows if row != MISSED]
        if len(seen) < len(rows):
            features.zero_()
        if not seen:
            return
        fused = self.model.draft_head.fuse([_rows(stream, seen) for stream in last.streams])
        if len(seen) == len(rows):
            features.copy_(fused)
        else:
            places = [place for place, row in enumerate(rows) if row != MISSED]
            features.index_copy_(0, to_device(places, torch.int64, features.device), fused)

    @torch.inference_mode()
    def _draft_step(self, going: list[Sequence], step: int, after: InFlightStep) -> InFlightStep:
        self.model.features[: len(going)] = after.hidden[: len(going)]
        return super()._draft_step(going, step, after)

    def _invented_step(self, sequences: list[Sequence]) -> InFlightStep:
        step, features = super()._invented_step(sequences), self.model.features
        shape = sum([s.computed for s in sequences]), self.model.draft_head.config.base_hidden_size
        step.streams = [features.new_zeros(shape) for _ in range(STREAMS)]
        return step


def _rows(x: Tensor, rows: list[int]) -> Tensor:
    """These rows of x (T, C)."""
    return x[: len(rows)] if rows == list(range(len(rows))) else x[to_device(rows, torch.int64, x.device)]
