"""Chooses what the next step computes: continuous batching with chunked prefill, admission by free blocks, preemption.

The scheduler is deterministic: every rank runs its own copy on the same events and gets the same steps, so only new
requests and aborts have to be sent.

States of a sequence: waiting -> running (its prompt is computed in chunks, then one token a step) -> finished. When
there are no free blocks, the most recently admitted sequence is preempted: its blocks are released, it moves to the
front of the waiting queue, and its keys and values are computed again later.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.block_manager import BlockManager
from engine.protocol import SamplingParams
from errors import UserError


@dataclass(eq=False)
class Sequence:
    """One request in the engine."""

    request_id: str
    tokens: list[int]  # the prompt, then the generated tokens
    prompt_length: int
    params: SamplingParams
    arrival: float = 0.0  # seconds, on the clock of rank 0; for statistics only
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # how many of its tokens have their keys and values in the cache
    admitted: bool = False  # has run; after a preemption it may be waiting again
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    first_scheduled: float | None = None
    finish_reason: str | None = None
    state: Any = None  # a SamplingState (see logits.py)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def longest(self) -> int:
        """The most tokens that it may have, prompt included."""
        return self.prompt_length + self.params.max_tokens


@dataclass(frozen=True)
class Chunk:
    """The part of a sequence that a step computes: tokens[start : start + count]."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's end, so that its logits give the next token."""
        return self.start + self.count == len(self.sequence.tokens)


class Scheduler:
    def __init__(
        self, blocks: BlockManager, max_num_seqs: int, max_batch_tokens: int, max_model_len: int, whole_sequences: bool = False
    ) -> None:
        """whole_sequences: see `EngineLimits`."""
        self.blocks, self.whole_sequences = blocks, whole_sequences
        self.max_num_seqs, self.max_batch_tokens, self.max_model_len = max_num_seqs, max_batch_tokens, max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.by_id: dict[str, Sequence] = {}
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

    def check(self, sequence: Sequence) -> None:
        """Raises UserError if the sequence can never run, however long it waits."""
        longest = sequence.longest
        if longest > self.max_model_len:
            raise UserError(
                f"the prompt's {sequence.prompt_length} tokens and max_tokens {sequence.params.max_tokens} exceed the model's "
                f"context of {self.max_model_len}"
            )
        needed = self.blocks.blocks_for(longest)
        if needed > self.blocks.n_blocks:
            raise UserError(
                f"{longest} tokens need {needed} KV-cache blocks, but there are only {self.blocks.n_blocks}; shorten the prompt, "
                "lower max_tokens, or start the server with more --kv-memory"
            )

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting queue. Raises UserError if it can never run, however long it waits."""
        self.check(sequence)
        self.by_id[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Remove a request, if it has not finished, and free its blocks."""
        sequence = self.by_id.get(request_id)
        if sequence is not None:
            self.finish(sequence, "abort")

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> list[Chunk]:
        """The next step: running sequences first, then as many waiting ones as tokens, sequences and blocks allow."""
        chunks: list[Chunk] = []
        budget = self.max_batch_tokens
        for sequence in list(self.running):
            if budget == 0:
                break
            if sequence in self.running:  # an older sequence may have preempted it
                count = min(len(sequence.tokens) - sequence.computed, budget)
                if self._grow(sequence, sequence.computed + count):
                    chunks.append(Chunk(sequence, sequence.computed, count))
                    budget -= count
        while budget and self.waiting and len(self.running) < self.max_num_seqs and self._admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            count = min(len(sequence.tokens) - sequence.computed, budget)
            chunks.append(Chunk(sequence, sequence.computed, count))
            budget -= count
        return chunks

    def look_ahead(self, chunks: list[Chunk]) -> list[Chunk] | None:
        """The step after one in which each of `chunks` gives a token, before these tokens are known: one more token of
        the same sequences. None if that step would depend on the tokens, on waiting requests or on a preemption.

        If the unknown token ends its sequence, the sequence's chunk in that step is useless; it must not be passed to
        `update`.
        """
        could_admit = self.waiting and len(self.running) < self.max_num_seqs
        if could_admit or len(chunks) != len(self.running) or len(chunks) > self.max_batch_tokens:
            return None
        ahead = [Chunk(c.sequence, c.start + c.count, 1) for c in chunks]
        if any(c.sequence.finish_reason or c.start + 1 >= c.sequence.longest for c in ahead):
            return None
        missing = [self.blocks.blocks_for(c.start + 1) - len(c.sequence.blocks) for c in ahead]
        if sum(max(0, n) for n in missing) > len(self.blocks.free):
            return None
        for chunk in ahead:
            self._grow(chunk.sequence, chunk.start + 1)
        return ahead

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence blocks for all its tokens, cached ones first; False if there are not enough."""
        # prompt_logprobs need the logits of all prompt tokens; those are not cached
        reuse = not self.whole_sequences and sequence.params.prompt_logprobs is None
        cached = self.blocks.match(sequence.tokens) if reuse else []
        tokens = sequence.longest if self.whole_sequences else len(sequence.tokens) + 1
        fresh = self.blocks.blocks_for(tokens) - len(cached)
        if not self.blocks.can_take(cached, fresh):
            return False
        self.blocks.acquire(cached)
        # sorted: a CPU reads consecutive blocks without copying them
        sequence.blocks = cached + sorted(self.blocks.allocate() for _ in range(fresh))
        sequence.computed = len(cached) * self.blocks.block_size
        if not sequence.admitted:
            sequence.admitted = True
            self.prefix_queries += sequence.prompt_length
            self.prefix_hits += sequence.computed
            sequence.cached_tokens = sequence.computed
        return True

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Give `sequence` blocks for `length` tokens. While none are free, preempt the most recently admitted sequence;
        False if that is `sequence` itself."""
        while len(sequence.blocks) < self.blocks.blocks_for(length):
            if self.blocks.free:
                sequence.blocks.append(self.blocks.allocate())
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def update(self, chunks: list[Chunk], tokens: list[int]) -> Iterator[tuple[Sequence, int]]:
        """Record a step's results. tokens: one for each chunk that samples, in order. Yields (sequence, token)."""
        drawn = iter(tokens)
        size = self.blocks.block_size
        for chunk in chunks:
            sequence = chunk.sequence
            before, sequence.computed = sequence.computed, chunk.start + chunk.count
            if not self.whole_sequences:
                self.blocks.publish(sequence.blocks, sequence.tokens, before // size, sequence.computed // size)
            if chunk.samples:
                token = next(drawn)
                sequence.tokens.append(token)
                reason = self._finish_reason(sequence, token)
                if reason:
                    self.finish(sequence, reason)
                yield sequence, token

    def _finish_reason(self, sequence: Sequence, token: int) -> str | None:
        if token in sequence.params.stop_token_ids and sequence.generated > sequence.params.min_tokens:
            return "stop"
        return "length" if sequence.generated >= sequence.params.max_tokens else None

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a running or waiting sequence and free its blocks."""
        sequence.finish_reason = reason
        del self.by_id[sequence.request_id]
        if sequence in self.running:
            self.running.remove(sequence)
            self.blocks.release(sequence.blocks)
            sequence.blocks = []
        else:
            self.waiting.remove(sequence)
