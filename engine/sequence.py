"""A request in the engine (`Sequence`), the part of it that a step computes (`Chunk`), the tokens that this part draws (`Draw`), and who
owns the KV-cache blocks (`BlockManager`): allocation, prefix reuse, eviction. Host-side bookkeeping, the same on every rank.

A block holds the keys and values of `block_size` consecutive tokens. A full block is identified by its tokens and the block
before it, and sequences with the same prefix share it. The root of a chain of blocks is -1, or another negative number if an adapter
has computed them, or such a number and a salt, for requests that share blocks with those of the same salt alone. A block without owners stays cached until its space is needed; the least recently used block is evicted first.
"""

from collections import OrderedDict, abc
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.protocol import SamplingParams, Turn

# (identity of the block before, or the root; this block's tokens): not a hash, so no collisions
Root = int | tuple[int, str]
Key = tuple[Root, tuple[int, ...]]


class BlockManager:
    """Which sequence owns which of `n_blocks` blocks of `block_size` tokens."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.n_blocks, self.block_size = n_blocks, block_size
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))  # least recently used first
        self.owners = [0] * n_blocks
        self.keys: list[Key | None] = [None] * n_blocks  # of blocks that `match` can find
        self.identities = [-1] * n_blocks  # of a block's contents: new with each allocation; blocks with equal keys share one
        self.known: dict[Key, int] = {}
        self._next_identity = 0

    @property
    def used(self) -> int:
        return self.n_blocks - len(self.free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, tokens: abc.Sequence[int], root: Root = -1) -> list[int]:
        """The cached blocks that `tokens` begins with, without the last token: its logits must be computed."""
        found: list[int] = []
        parent = root
        for first in range(0, len(tokens) - self.block_size, self.block_size):
            block = self.known.get((parent, tuple(tokens[first : first + self.block_size])))
            if block is None:
                break
            found.append(block)
            parent = self.identities[block]
        return found

    def forget(self, blocks: abc.Sequence[int]) -> None:
        """Let `match` find none of these blocks."""
        for block in blocks:
            if (key := self.keys[block]) is not None:
                del self.known[key]
                self.keys[block] = None

    def can_take(self, cached: abc.Sequence[int], fresh: int) -> bool:
        """Whether there is room for `acquire(cached)` and then `fresh` calls of `allocate`."""
        return fresh + self.unowned(cached) <= len(self.free)

    def unowned(self, cached: abc.Sequence[int]) -> int:
        """How many cached blocks no sequence has."""
        return sum(self.owners[b] == 0 for b in cached)

    def owned_alone(self, blocks: abc.Sequence[int], cached: abc.Sequence[int]) -> int:
        """How many of a sequence's blocks would be free without it, except for some cached ones."""
        return sum(self.owners[b] == 1 and b not in cached for b in blocks)

    def acquire(self, cached: abc.Sequence[int]) -> None:
        """Add an owner to cached blocks."""
        for block in cached:
            if self.owners[block] == 0:
                del self.free[block]
            self.owners[block] += 1

    def allocate(self) -> int:
        """A block with one owner; its cached contents are evicted. The caller must have checked `can_take`."""
        block, _ = self.free.popitem(last=False)
        self.forget([block])
        self.identities[block] = self._next_identity
        self._next_identity += 1
        self.owners[block] = 1
        return block

    def publish(self, blocks: abc.Sequence[int], tokens: abc.Sequence[int], first: int, last: int, root: Root = -1) -> None:
        """Let `match` find blocks first … last-1 of a sequence: they are full, with all keys and values in the cache."""
        for i in range(first, last):
            block = blocks[i]
            if self.keys[block] is None:
                parent = self.identities[blocks[i - 1]] if i else root
                key = (parent, tuple(tokens[i * self.block_size : (i + 1) * self.block_size]))
                if key in self.known:  # an equal block is published: share its identity, so that successors of both are found
                    self.identities[block] = self.identities[self.known[key]]
                else:
                    self.keys[block], self.known[key] = key, block

    def release(self, blocks: abc.Sequence[int]) -> None:
        """Remove one owner from each block. The last blocks of a sequence are evicted before its first ones."""
        for block in reversed(blocks):
            self.owners[block] -= 1
            if self.owners[block] == 0:
                self.free[block] = None

    def give_back(self, blocks: list[int], keep: int) -> None:
        """Take the blocks after the first `keep` from a sequence, which owns them alone. They hold nothing of value, so they are
        allocated next, in the same order."""
        while len(blocks) > keep:
            block = blocks.pop()
            self.owners[block] = 0
            self.free[block] = None
            self.free.move_to_end(block, last=False)


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
