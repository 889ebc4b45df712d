"""Chooses what the next step computes: continuous batching with chunked prefill, admission by free blocks, preemption.

The scheduler is deterministic: every rank runs its own copy on the same events and gets the same steps, so only new
requests and aborts have to be sent.

A step can be scheduled while the one before is in flight, before its tokens are known: a sequence that draws a token is expected
to go on, unless it reaches its max_tokens. If it ends with that token after all, its chunk in the next step is useless.

A step can also verify a draft (see speculation.py), a guess of a sequence's next tokens: its chunk then ends with the draft, and it
draws the token after each row of it. The drawn tokens are new up to the first one that differs from the draft.

States of a sequence: waiting -> running (its prompt is computed in chunks, then one token a step) -> finished. When
there are no free blocks, a sequence of the lowest priority is preempted: of the client that has the most others for its
weight, the one admitted last. Its blocks are released, it moves to the front of its client's waiting ones, and its keys and
values are computed again later.

Clients have equal shares, or shares by weight, of the places in the batch and of a step's tokens, as far as they ask for them. A
client that waits with less than its share need not wait until others end: they yield places and tokens (`_make_room`). A step for
which others yielded places computes only the new ones, so that their first token does not wait for a whole batch, but not two such
steps in a row.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from engine.sequence import BlockManager, Chunk, Sequence
from errors import UserError

# --- the order in which waiting sequences start ------------------------------------------------------------------------------


@dataclass
class _Line:
    """The sequences of one client and priority."""

    started: float  # virtual time: grows by 1 / weight with each sequence that starts
    sequences: deque[Sequence] = field(default_factory=deque)


@dataclass
class _Level:
    """The sequences of one priority."""

    lines: dict[str, _Line] = field(default_factory=dict)  # by client; none is empty
    now: float = 0.0  # the virtual time of the last start


class WaitingQueue:
    """The waiting sequences. Iterates over them by priority, in no further order.

    They start by priority, then fair between clients. Of the clients that wait, the one is next that has the fewest running sequences
    for its weight. Among equals it is the one that started the fewest for its weight lately: weighted round robin, with virtual start
    times as in start-time fair queueing (P. Goyal, H. M. Vin, H. Cheng, 1996, section 2). A client's own sequences keep their order of
    arrival. The order depends on nothing but what was added and removed, so that all ranks agree on it.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}  # by priority; none is empty

    def __len__(self) -> int:
        return sum([len(line.sequences) for level in self._levels.values() for line in level.lines.values()])

    def __bool__(self) -> bool:
        return bool(self._levels)

    def __iter__(self) -> Iterator[Sequence]:
        for _, level in sorted(self._levels.items()):
            for line in level.lines.values():
                yield from line.sequences

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that has just arrived."""
        self._line(sequence).sequences.append(sequence)

    def add_again(self, sequence: Sequence) -> None:
        """Add a sequence that was preempted: it starts before all others of its client and priority."""
        line = self._line(sequence)
        line.sequences.appendleft(sequence)
        line.started -= 1 / sequence.turn.weight

    def _line(self, sequence: Sequence) -> _Line:
        level = self._levels.setdefault(sequence.priority, _Level())
        return level.lines.setdefault(sequence.client, _Line(level.now))

    def first(self, running: Iterable[Sequence]) -> Sequence | None:
        """The sequence that starts next."""
        if not self._levels:
            return None
        lines = self._levels[min(self._levels)].lines
        counts = Counter(s.client for s in running) if len(lines) > 1 else Counter[str]()

        def precedence(line: _Line) -> tuple[float, float]:
            turn = line.sequences[0].turn
            return counts[turn.client] / turn.weight, line.started

        return min(lines.values(), key=precedence).sequences[0]

    def start(self, sequence: Sequence) -> None:
        """Remove a sequence, because it starts."""
        level = self._levels[sequence.priority]
        line = level.lines[sequence.client]
        level.now = max(level.now, line.started)
        line.started += 1 / sequence.turn.weight
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, perhaps without a start."""
        level = self._levels[sequence.priority]
        line = level.lines[sequence.client]
        line.sequences.remove(sequence)
        if not line.sequences:
            del level.lines[sequence.client]
        if not level.lines:
            del self._levels[sequence.priority]


def fair_shares(wanted: Mapping[str, int], weights: Mapping[str, int], total: int) -> dict[str, int]:
    """Divide `total` tokens between clients by weight. What one does not want goes to the others. The first client gets a token
    if there is one, so that the oldest sequence never stops."""
    shares, left, weight = dict[str, int](), total, sum(weights[name] for name in wanted)
    for name, most in wanted.items():
        shares[name] = min(most, -(-left * weights[name] // weight))
        left -= shares[name]
        weight -= weights[name]
    for name, most in wanted.items():
        more = min(left, most - shares[name])
        shares[name] += more
        left -= more
    return shares


class Scheduler:
    """The waiting and running sequences of one engine, and the choice of each step."""

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_model_len: int,
        whole_sequences: bool = False,
        max_drafted: int = 0,
        whole_prompts: bool = False,
    ) -> None:
        """whole_sequences: see `EngineLimits`. max_drafted: the most drafted tokens of a step. whole_prompts: a prompt is computed in
        one step, because its tokens attend in both directions."""
        self.whole_prompts = whole_prompts
        self.blocks, self.whole_sequences, self.max_drafted = blocks, whole_sequences, max_drafted
        self.max_num_seqs, self.max_batch_tokens, self.max_model_len = max_num_seqs, max_batch_tokens, max_model_len
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # by priority, and then in the order of admission
        self.by_id: dict[str, Sequence] = {}
        self.preemptions = self.prefix_queries = self.prefix_hits = 0
        self._last_step_was_only = False  # whether the last step computed only sequences for which others yielded

    @property
    def longest(self) -> int:
        """The most tokens of a sequence, prompt included: those of the context, or those that the cache holds if they are fewer."""
        return min(self.max_model_len, self.blocks.n_blocks * self.blocks.block_size)

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
        """Add a sequence, which `check` has accepted, to the waiting queue."""
        self.by_id[sequence.request_id] = sequence
        self.waiting.add(sequence)

    def abort(self, request_id: str) -> None:
        """Remove a request, if it has not finished, and free its blocks."""
        sequence = self.by_id.get(request_id)
        if sequence is not None:
            self.finish(sequence, "abort")

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # --- the next step -------------------------------------------------------------------------------------------------------

    def schedule(self, in_flight: bool = False, drafts: Mapping[Sequence, list[int]] | None = None) -> list[Chunk]:
        """Advance running sequences by one step, and admit as many waiting ones as tokens, sequences and blocks allow. Returns
        the step's chunks.

        in_flight: the tokens of the step before are not recorded yet. Then there is no step ([]) if a sequence would have to be
        preempted, because it might be one whose token is in flight. drafts: of running sequences whose tokens are all known but
        for the next one, cut to the room that there is. `draft_room` has given them blocks; those that remain empty return.
        """
        continuing = self._continuing()
        ending = len(self.running) - len(continuing)  # their last token is in flight, unless a late grammar forbids it
        if ending:
            ending = sum([not s.params.late_grammar for s in set(self.running).difference(continuing)])
        places = self.max_num_seqs + ending
        if in_flight and self._reserved(continuing) > len(self.blocks.free):
            return []
        only: list[Sequence] = []  # those that others yielded to: the step computes nothing else, but not twice in a row
        if self.waiting and not self.whole_prompts:
            if (preferred := self._make_room(places, in_flight)) is None:
                return []
            only, continuing = [] if self._last_step_was_only else preferred, self._continuing()
        self._last_step_was_only = bool(only)
        chunks: list[Chunk] = []
        budget, preemptions = self.max_batch_tokens, self.preemptions
        for sequence, count in self._portions(only or continuing):
            # one without blocks was preempted for another
            if count and sequence.blocks and self._grow(sequence, sequence.computed + count):
                chunks.append(self._chunk(sequence, count))
                budget -= count
        while not only and budget and len(self.running) < places:
            first = self.waiting.first(self.running)
            if not first or (self.whole_prompts and first.wanted > budget) or not self._admit(first):
                break
            chunks.append(self._chunk(first, min(first.wanted, budget)))
            budget -= chunks[-1].count
        # a preempted sequence needs the blocks more than drafts do
        if drafts and budget and not only and self.preemptions == preemptions:
            self._add_drafts(chunks, drafts, budget)
        if drafts and not self.whole_sequences:
            for sequence in drafts:  # a draft may be shorter than its room
                self.blocks.give_back(sequence.blocks, self.blocks.blocks_for(sequence.computed))
        return chunks

    def _continuing(self) -> list[Sequence]:
        """The running sequences that go on, whatever the tokens in flight are."""
        return [s for s in self.running if not s.unknown or s.length < s.longest]

    def _portions(self, continuing: list[Sequence]) -> list[tuple[Sequence, int]]:
        """How many tokens of each running sequence to compute: all that it has, or by priority and then the shares of clients."""
        left, portions = self.max_batch_tokens, [(s, s.wanted) for s in continuing]
        if sum([count for _, count in portions]) <= left:
            return portions  # the usual case
        portions = []
        for _, equals in groupby(continuing, lambda s: s.priority):
            group = list(equals)
            shares = fair_shares(self._wanted(group), {s.client: s.turn.weight for s in group}, left)
            for sequence in group:
                count = min(sequence.wanted, shares[sequence.client])
                portions.append((sequence, count))
                shares[sequence.client] -= count
                left -= count
        return portions

    def _wanted(self, sequences: list[Sequence]) -> Counter[str]:
        """The tokens that each client's sequences want to compute."""
        wanted = Counter[str]()
        for sequence in sequences:
            wanted[sequence.client] += sequence.wanted
        return wanted

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        """The next `count` tokens of the sequence, which count as computed from now on."""
        stop, known = sequence.computed + count, len(sequence.tokens)
        chunk = Chunk(sequence, sequence.computed, count, stop == known + sequence.unknown, stop <= known)
        sequence.computed = stop
        sequence.unknown += chunk.samples
        return chunk

    # --- room for clients that have less than their share --------------------------------------------------------------------

    def _make_room(self, most: int, in_flight: bool) -> list[Sequence] | None:
        """Admit waiting sequences of clients that have less than their share, before running ones of others take the tokens. If
        there are no places or blocks, clients that have more than their share yield some. most: running sequences. Returns the
        sequences for which others yielded; None if one would have to yield while a step is in flight."""
        found: list[Sequence] = []
        while (first := self.waiting.first(self.running)) and self._is_due(first):
            victims = self._victims(first, most)
            if victims is None:
                break
            if victims and in_flight:
                return None
            for victim in victims:
                self._preempt(victim)
            if not self._admit(first, self._reserved(self._continuing())):
                break
            if victims:
                found.append(first)
        return found

    def _is_due(self, sequence: Sequence) -> bool:
        """Whether the client of a waiting sequence gets less than its share of this step's tokens."""
        if all(s.client == sequence.client for s in self.running):
            return False  # the usual case
        continuing, left = self._continuing(), self.max_batch_tokens
        left -= sum(s.wanted for s in continuing if s.priority < sequence.priority)
        rivals = [s for s in continuing if s.priority >= sequence.priority]
        weights = {s.client: s.turn.weight for s in rivals} | {sequence.client: sequence.turn.weight}
        own = self._wanted([s for s in rivals if s.client == sequence.client])[sequence.client]
        return len(weights) > 1 and own * sum(weights.values()) < left * sequence.turn.weight

    def _victims(self, first: Sequence, most: int) -> list[Sequence] | None:
        """The sequences that have to yield for a waiting one; None if that would not be enough. Clients yield while they have
        more for their weight than the other one, even after the exchange, so that no exchange is undone."""
        cached = self._cached(first)
        missing = self._fresh(first, cached) + self.blocks.unowned(cached)
        missing += self._reserved(self._continuing()) - len(self.blocks.free)
        places = most - len(self.running)
        counts, weight = Counter(s.client for s in self.running), first.turn.weight
        victims: list[Sequence] = []
        for victim in reversed(self.running):
            if places > 0 and missing <= 0:
                break
            client = victim.client
            # sequences for each unit of weight after the exchange, multiplied by both weights
            theirs, ours = (counts[client] - 1) * weight, (counts[first.client] + 1) * victim.turn.weight
            if client != first.client and victim.priority >= first.priority and theirs >= ours:
                victims.append(victim)
                counts[client] -= 1
                places += 1
                missing -= self._missing_blocks(victim) + self.blocks.owned_alone(victim.blocks, cached)
        return victims if places > 0 and missing <= 0 else None

    # --- room for drafts -----------------------------------------------------------------------------------------------------

    def draft_room(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Give running sequences blocks for so many drafted tokens, or for fewer. Returns how many have room, of each that has any.

        No step may be in flight. What the sequences' next tokens need, or the first waiting one to start, comes before drafts."""
        if not wanted:
            return {}
        spare = len(self.blocks.free) - sum(map(self._missing_blocks, self.running)) - self._blocks_of_next_start()
        found, left = dict[Sequence, int](), self.max_drafted
        for sequence, count in wanted.items() if spare >= 0 else ():
            held = max(len(sequence.blocks), self.blocks.blocks_for(sequence.length))
            places = (held + spare) * self.blocks.block_size - sequence.length
            room = min(count, left, places, sequence.longest - sequence.length - 1)
            if room > 0:
                spare -= max(0, self.blocks.blocks_for(sequence.length + room) - held)
                self._grow(sequence, sequence.length + room)
                found[sequence], left = room, left - room
        return found

    def _blocks_of_next_start(self) -> int:
        """Blocks that the first waiting sequence may take in the next step."""
        first = self.waiting.first(self.running) if len(self.running) < self.max_num_seqs else None
        needed = self._fresh(first, []) if first else 0
        return needed if needed <= len(self.blocks.free) else 0

    def _add_drafts(self, chunks: list[Chunk], drafts: Mapping[Sequence, list[int]], budget: int) -> None:
        """Let chunks of running sequences verify drafts, cut to `budget` tokens and to the sequences' blocks. These count as
        computed, too."""
        left = min(self.max_drafted, budget)
        for chunk in chunks:
            sequence = chunk.sequence
            room = min(left, len(sequence.blocks) * self.blocks.block_size - chunk.stop, sequence.longest - chunk.stop - 1)
            draft = drafts.get(sequence, ())[: max(0, room)]
            if draft:
                chunk.draft, chunk.count = draft, chunk.count + len(draft)
                sequence.computed += len(draft)
                sequence.unknown += len(draft)
                left -= len(draft)

    # --- blocks --------------------------------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence, reserved: int = 0) -> bool:
        """Start a waiting sequence with blocks for all its tokens, cached ones first; False if there are not enough, besides the
        `reserved` ones."""
        cached = self._cached(sequence)
        fresh = self._fresh(sequence, cached)
        if not self.blocks.can_take(cached, fresh + reserved):
            return False
        self.blocks.acquire(cached)
        # sorted: a CPU reads consecutive blocks without copying them
        sequence.blocks = cached + sorted(self.blocks.allocate() for _ in range(fresh))
        sequence.computed, sequence.published = len(cached) * self.blocks.block_size, len(cached)
        if not sequence.admitted:
            sequence.admitted = True
            self.prefix_queries += sequence.prompt_length
            self.prefix_hits += sequence.computed
            sequence.cached_tokens = sequence.computed
        self.waiting.start(sequence)
        insort(self.running, sequence, key=lambda s: s.priority)
        return True

    def _cached(self, sequence: Sequence) -> list[int]:
        """The blocks of a waiting sequence that are in the prefix cache."""
        # prompt_logprobs and means need the hidden states of all prompt tokens; those are not cached
        params = sequence.params
        reads_all = params.prompt_logprobs is not None or params.pooling == "mean"
        reuse = not (self.whole_sequences or reads_all or sequence.alone)
        return self.blocks.match(sequence.tokens, sequence.root) if reuse else []

    def _fresh(self, sequence: Sequence, cached: list[int]) -> int:
        """How many other blocks it needs to start."""
        tokens = sequence.longest if self.whole_sequences else min(len(sequence.tokens) + 1, sequence.longest)
        return self.blocks.blocks_for(tokens) - len(cached)

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Give `sequence` blocks for `length` tokens. While none are free, preempt another one; False if `sequence` itself had to
        be preempted."""
        while len(sequence.blocks) * self.blocks.block_size < length:
            if self.blocks.free:
                sequence.blocks.append(self.blocks.allocate())
                continue
            victim = self._preempted_for(sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempted_for(self, sequence: Sequence) -> Sequence:
        """Of `sequence` and those that have no chunk in this step yet: the most recently admitted one of the lowest priority and
        of the client that has the most others for its weight. So the oldest sequence never stops."""
        rest = self.running[self.running.index(sequence) :]
        counts = Counter(s.client for s in self.running)
        equals = [s for s in reversed(rest) if s.priority == rest[-1].priority]
        return max(equals, key=lambda s: (counts[s.client] - 1) / s.turn.weight)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks and place; what it has computed must be computed again."""
        self.running.remove(sequence)
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.computed, sequence.published = [], 0, 0
        self.waiting.add_again(sequence)
        self.preemptions += 1

    def _missing_blocks(self, sequence: Sequence) -> int:
        """Blocks that a running sequence needs for its tokens, at most, beyond those that it has."""
        return max(0, self.blocks.blocks_for(sequence.length) - len(sequence.blocks))

    def _reserved(self, continuing: list[Sequence]) -> int:
        """Blocks that these running sequences need for their next step."""
        return sum(map(self._missing_blocks, continuing))

    def _publish(self, sequence: Sequence) -> None:
        """Let other sequences find its full blocks. A step in flight may still write them, but it ends before the next one."""
        if sequence.computed // self.blocks.block_size <= sequence.published:
            return  # the usual case
        full = min(sequence.computed, len(sequence.tokens)) // self.blocks.block_size
        if not self.whole_sequences and full > sequence.published:
            self.blocks.publish(sequence.blocks, sequence.tokens, sequence.published, full, sequence.root)
            sequence.published = full

    # --- what a step brings --------------------------------------------------------------------------------------------------

    def launched(self, chunks: list[Chunk]) -> None:
        """Note that the step of `chunks` was launched: what it computes is in the cache for every later step."""
        for chunk in chunks:
            self._publish(chunk.sequence)

    def record(self, sequence: Sequence, token: int) -> None:
        """Append the oldest token that a step drew for a running sequence, and finish the sequence if it ends there."""
        sequence.unknown -= 1
        sequence.tokens.append(token)
        self._publish(sequence)
        reason = self._finish_reason(sequence, token)
        if reason:
            self.finish(sequence, reason)

    def _finish_reason(self, sequence: Sequence, token: int) -> str | None:
        params = sequence.params
        if token in params.stop_token_ids and sequence.generated > params.min_tokens:
            return "stop"
        return "length" if sequence.generated >= params.max_tokens else None

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a running or waiting sequence and free its blocks."""
        sequence.finish_reason = reason
        sequence.drafter = None  # it refers to the sequence, and would keep much memory until garbage is collected
        del self.by_id[sequence.request_id]
        if sequence in self.running:
            self.running.remove(sequence)
            self.blocks.release(sequence.blocks)
            sequence.blocks = []
        else:
            self.waiting.remove(sequence)

    def reject(self, sequence: Sequence, count: int) -> None:
        """Take back the last `count` tokens of a draft, before the tokens that take their place are recorded."""
        sequence.unknown -= count
        sequence.computed -= count
        if not self.whole_sequences:
            self.blocks.give_back(sequence.blocks, self.blocks.blocks_for(sequence.length))

    def draw_again(self, sequence: Sequence) -> None:
        """Compute the newest token of a running sequence once more, because what was drawn behind it is not allowed. What steps in
        flight draw for the sequence has no meaning either."""
        sequence.unknown, sequence.computed = 0, len(sequence.tokens) - 1
        if not self.whole_sequences:
            self.blocks.give_back(sequence.blocks, self.blocks.blocks_for(sequence.length))
