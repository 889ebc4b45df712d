"""Drafts by a smaller model, the draft model: its own tokens, each of which it computes from the one before.

The model has a KV cache of its own with the same block tables as the target: the same blocks, other tensors. So a token has a place
in it as soon as it has one in the target's, and nobody else keeps accounts. The tokens that it lacks, such as a prompt, are computed
when a sequence is to get a draft; while drafts do not pay, it costs nothing. It draws as the target does, with the same noise,
temperature and filters, which makes its draws as likely as can be those of the target.

A draft step draws one more token of each draft. The steps of a draft run without the host: on a GPU each is one replay of a decode
graph, which leaves its tokens to the next.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from checkpoints.eagle import STREAMS
from engine.head_model import HeadModel
from engine.protocol import SamplingParams
from engine.runner import InFlightStep, Runner
from engine.sampler import SamplingState
from engine.sequence import BlockManager, Chunk, Sequence, common_prefix
from engine.step_inputs import to_device

MEASURED_TOKENS = 3  # of the drafts that `ModelDrafter.seconds` measures
NO_IDENTITY = -2  # the identity of no contents


@dataclass
class Shadow:
    """A sequence as the draft model sees it. done: how many of its tokens are in the model's cache for good. marked: how many of
    its blocks are marked as held. guess: the tokens of its last draft, where they began, and the identities of the blocks from there
    on."""

    sequence: Sequence
    done: int
    marked: int
    guess: list[int] = field(default_factory=list)
    begin: int = 0
    places: list[int] = field(default_factory=list)


class ModelDrafter:
    """The draft model of an engine, which drafts for all its sequences."""

    name = "model"

    def __init__(self, runner: Runner, blocks: BlockManager, longest: int) -> None:
        """runner: of the draft model. blocks: of the target, for which the runner's cache has the same places. longest: the draft
        model's context; behind it there are no drafts."""
        self.runner, self.blocks, self.longest = runner, blocks, longest
        self.ready: torch.cuda.Event | None = None  # when the device had the last drafts, if `draft` made any
        # by block: the identity of the contents that the draft model has computed, too
        self._held = [NO_IDENTITY] * blocks.n_blocks
        self._shadows: WeakKeyDictionary[Sequence, Shadow] = WeakKeyDictionary()
        self._lost: WeakSet[Sequence] = WeakSet()  # sequences for which it does not draft any more

    def longest_draft(self, sequence: Sequence) -> int:
        """The most tokens that it can draft for the sequence now."""
        return 0 if sequence in self._lost else max(0, self.longest - sequence.length)

    def reads_each_step(self, sequence: Sequence) -> bool:
        """Whether it reads the hidden states of each step of the target, as a draft head does."""
        return False

    def observe(self, step: InFlightStep) -> None:
        """Note a step that was collected, with no other launched behind it."""

    def give_up(self, sequence: Sequence) -> None:
        """Draft no more for the sequence."""
        self._lost.add(sequence)

    def pause(self, sequence: Sequence) -> None:
        """See no more steps of the sequence until it is to get a draft."""

    def draft(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Draft so many tokens for each sequence, which has blocks for them; none if it still lacks too many tokens. All tokens of
        the sequences must be known. The same on all ranks."""
        self.ready = None
        self.runner.decode.forget()  # the last drafts' tokens
        shadows, chunks = self._catch_up(counts)
        if not chunks:
            return {}
        flights = [self.runner.launch(chunks)]
        originals = {id(shadow.sequence): s for s, shadow in shadows.items() if s in counts}
        ready = [s for chunk in flights[0].sampling if (s := originals.get(id(chunk.sequence)))]
        for step in range(1, max((counts[s] for s in ready), default=1)):
            # by falling length, so these are the first rows of the step before, and the device has them without the host
            going = [shadows[s].sequence for s in ready if counts[s] > step]
            self.runner.decode.keep(len(going))
            flights.append(self._draft_step(going, step, flights[-1]))
        if not ready:
            return {}
        self.runner.collect(flights[-1])
        self.ready = flights[-1].ready
        tokens: dict[int, list[int]] = {}
        for flight in flights:
            assert flight.tokens is not None
            for chunk, token in zip(flight.sampling, flight.tokens.tolist(), strict=True):
                tokens.setdefault(id(chunk.sequence), []).append(max(token, 0))  # where its numbers overflow, any guess
        for shadow in (shadows[s] for s in ready):
            shadow.guess, shadow.begin = tokens[id(shadow.sequence)], len(shadow.sequence.tokens)
            shadow.places = self._identities(shadow)
        return {s: shadows[s].guess for s in ready}

    def _draft_step(self, going: list[Sequence], step: int, after: InFlightStep) -> InFlightStep:
        """Draw another token of each draft. step: how many they have. after: what drew the last ones."""
        chunks = [Chunk(s, len(s.tokens) + step - 1, 1, samples=True, is_known=False) for s in going]
        return self.runner.launch(chunks, after=after)

    def _shadow(self, sequence: Sequence) -> Shadow:
        """The sequence's shadow, up to date."""
        shadow = self._shadows.get(sequence)
        if shadow is None or shadow.sequence.blocks is not sequence.blocks:  # new, or preempted since
            held = self._count_held(sequence)
            copy = Sequence(sequence.request_id, self._tokens(sequence), 0, sequence.params.of_draft(), blocks=sequence.blocks)
            copy.state = SamplingState(bias=sequence.state.bias)  # no rule that reads tokens, which the host does not know
            shadow = self._shadows[sequence] = Shadow(copy, held * self.blocks.block_size, held)
        return shadow

    def _tokens(self, sequence: Sequence) -> list[int]:
        """The tokens that the model reads; the list grows with the sequence's."""
        return sequence.tokens

    def _count_held(self, sequence: Sequence) -> int:
        """How many of the sequence's first blocks the draft model has computed, for this or for another sequence."""
        full = sequence.blocks[: sequence.computed // self.blocks.block_size]
        return next((i for i, b in enumerate(full) if self._held[b] != self.blocks.identities[b]), len(full))

    def _catch_up(self, counts: Mapping[Sequence, int]) -> tuple[dict[Sequence, Shadow], list[Chunk]]:
        """The shadows, and chunks of the tokens that the draft model lacks, as many as a step takes, by falling length of the
        drafts. Of the last draft, the accepted tokens need not be computed again."""
        ordered = sorted(counts, key=lambda s: -counts[s])
        shadows, chunks, budget = {s: self._shadow(s) for s in ordered}, [], self.runner.capacity.tokens
        for shadow in shadows.values():
            tokens = shadow.sequence.tokens
            if shadow.guess:
                shadow.done = min(shadow.begin + common_prefix(shadow.guess[:-1], tokens[shadow.begin :]), self._kept(shadow))
                shadow.guess = []
            shadow.done = min(shadow.done, len(tokens) - 1)
            if count := min(len(tokens) - shadow.done, budget):
                chunks.append(self._chunk(shadow, count))
                budget -= count
        return shadows, chunks

    def _kept(self, shadow: Shadow) -> int:
        """How many tokens lie where the last draft left them. A step without room for the draft gave its blocks back, and then another
        sequence may have got them."""
        size = self.blocks.block_size
        same = common_prefix(shadow.places, self._identities(shadow))
        return (shadow.begin // size + same) * size

    def _identities(self, shadow: Shadow) -> list[int]:
        """Of the blocks from the begin of the last draft on."""
        return [self.blocks.identities[b] for b in shadow.sequence.blocks[shadow.begin // self.blocks.block_size :]]

    def _chunk(self, shadow: Shadow, count: int) -> Chunk:
        """The next `count` tokens, which count as done from now on."""
        sequence, start, size = shadow.sequence, shadow.done, self.blocks.block_size
        shadow.done += count
        for block in sequence.blocks[shadow.marked : shadow.done // size]:
            self._held[block] = self.blocks.identities[block]
        shadow.marked = max(shadow.marked, shadow.done // size)
        return Chunk(sequence, start, count, shadow.done == len(sequence.tokens), is_known=True)

    def seconds(self, sequences: int, tokens: int = MEASURED_TOKENS, seen: int = 1) -> float:
        """The time of a draft step, in drafts of so many tokens for so many sequences, of which it must first compute `seen` tokens. To be
        called before the first draft. Collective."""
        tokens = max(1, min(tokens, self.longest - 2, self.runner.max_length - 2))
        blocks = [i % self.blocks.n_blocks for i in range(self.blocks.blocks_for(seen + tokens + 1))]
        invented = [
            Sequence("", [0] * (seen + 1), 0, SamplingParams(), blocks=blocks, computed=seen, state=SamplingState())
            for _ in range(sequences)
        ]
        self.observe(self._invented_step(invented))
        start = time.perf_counter()
        self.draft(dict.fromkeys(invented, tokens))
        seconds = time.perf_counter() - start
        self._held = [NO_IDENTITY] * self.blocks.n_blocks
        self.runner.rest()
        return seconds / tokens

    def _invented_step(self, sequences: list[Sequence]) -> InFlightStep:
        """A step that has computed all tokens of each sequence but the last."""
        chunks = [Chunk(s, 0, s.computed, samples=True, is_known=True) for s in sequences]
        return InFlightStep(chunks, chunks, torch.empty(0), has_drafts=False)


# --- drafts by an EAGLE-3 draft head -----------------------------------------------------------------------------------------
#
# Drafts by an EAGLE-3 draft head (`checkpoints/eagle.py`), which reads the target model's hidden states.
#
# A head's row of token t + 1 has the target's features of t. It lies at position t of the head's cache, so the head's sequence is the
# target's without its first token, and it draws the token after the next. The features exist only until the next step, so a head
# reads each step: between two steps it computes the rows of the first one, with the tokens that this has drawn. These rows are exact; those
# of a draft, whose features are the head's own output, are overwritten by them.
#
# While drafts do not pay, a head sees no steps. When it comes back, or if a prompt was in the prefix cache without it, it lacks the
# features of the tokens that it missed. It computes their rows with zeros instead, from the tokens alone. Drafts may then be worse,
# which their acceptance rate shows, and no other sequence gets these rows.


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
