"""A request in the engine (`Sequence`), the part of it that a step computes (`Chunk`), and the tokens that this part draws (`Draw`)."""

from collections import abc
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.block_manager import Root
from engine.protocol import SamplingParams, Turn


@dataclass(eq=False)
class Sequence:
    """One request in the engine."""

    request_id: str
    tokens: list[int]  # the prompt, then the generated tokens
    prompt_length: int
    params: SamplingParams
    turn: Turn = field(default_factory=Turn)
    arrival: float = 0.0  # seconds, on the clock of rank 0; for statistics only
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # how many of its tokens have their keys and values in the cache, after all launched steps
    unknown: int = 0  # how many of its next tokens steps in flight draw, at most: 0 to 2, or those that verify a draft
    published: int = 0  # how many of its blocks `match` can find
    admitted: bool = False  # has run; after a preemption it may be waiting again
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    first_scheduled: float | None = None
    finish_reason: str | None = None
    adapter: Any = None  # an Adapter (see adapters.py)
    state: Any = None  # a SamplingState (see sampler.py)
    drafter: Any = None  # a TextDrafter (see text_drafter.py)
    repeats: bool = False  # the one before it in its request has the same prompt
    alone: bool = False  # it is computed again after an overflow, without drafts and the prefix cache

    @property
    def priority(self) -> int:
        return self.turn.priority

    @property
    def client(self) -> str:
        return self.turn.client

    @property
    def slot(self) -> int:
        """Of its adapter; -1 without one."""
        return -1 if self.adapter is None else self.adapter.slot

    @property
    def root(self) -> Root:
        """What its blocks follow in the prefix cache: -1, or a number of its adapter; with its salt if it has one."""
        number = -1 if self.adapter is None else -1 - self.adapter.number
        return number if self.params.cache_salt is None else (number, self.params.cache_salt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def length(self) -> int:
        """Its tokens, with those that steps in flight draw."""
        return len(self.tokens) + self.unknown

    @property
    def wanted(self) -> int:
        """How many tokens its next chunk may have."""
        return self.length - self.computed

    @property
    def longest(self) -> int:
        """The most tokens that it may have, prompt included."""
        return self.prompt_length + (self.params.max_tokens if self.params.pooling is None else 0)


class Draw(NamedTuple):
    """A token that a step draws. `draft`: the drafted tokens between the sequence's last one and this one."""

    sequence: Sequence
    position: int
    draft: abc.Sequence[int]

    @property
    def generated(self) -> int:
        """How many tokens the sequence has generated before this one."""
        return self.position - self.sequence.prompt_length


@dataclass(slots=True)  # not frozen: a step creates one for each sequence, and that would take three times as long
class Chunk:
    """The part of a sequence that a step computes: tokens[start : stop]. A token may be unknown if it is the only one.

    samples: whether the chunk reaches the sequence's end, so that its logits give the next token. is_known: whether the host
    knows its tokens when the step is launched, or guesses them. draft: its last tokens, if they are a guess."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    is_known: bool
    draft: abc.Sequence[int] = ()

    @property
    def stop(self) -> int:
        """The end, which is the position of the last token that a chunk draws."""
        return self.start + self.count

    @property
    def first_drawn(self) -> int:
        """The position of the first token that it draws."""
        return self.stop - len(self.draft)

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens[self.start : self.first_drawn], *self.draft]

    @property
    def draws(self) -> list[Draw]:
        if not self.draft:  # the usual case
            return [Draw(self.sequence, self.stop, ())] if self.samples else []
        return [Draw(self.sequence, self.first_drawn + i, self.draft[:i]) for i in range((len(self.draft) + 1) * self.samples)]


def drawn_by(chunks: list[Chunk], shift: int = 0) -> tuple[list[Sequence], list[int]]:
    """The sequence and the position of each token that the chunks draw, all of which sample. shift: of positions, without
    drafts."""
    if not any(c.draft for c in chunks):  # the usual case
        return [c.sequence for c in chunks], [c.stop + shift for c in chunks]
    draws = [draw for c in chunks for draw in c.draws]
    return [draw.sequence for draw in draws], [draw.position for draw in draws]


def common_prefix(one: abc.Sequence[int], other: abc.Sequence[int]) -> int:
    """How many leading items are equal. Of a draft and what was drawn, these are the accepted tokens."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
