"""Scheduler and block manager without a model, checked after every step. Random arrivals, aborts and memory shortage are in
tests/simulation.

The cache is simulated: for each position of each block, the test records the text prefix from which it was computed. A drawn
token is a hash of all tokens before it, so the output of a request served alone is known.
"""

import random
import zlib
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_manager import BlockManager
from engine.protocol import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Chunk, Sequence
from errors import UserError

VOCAB = 5  # few ids, so that unrelated texts share prefixes


def draw(tokens: list[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCAB


def alone(prompt: list[int], params: SamplingParams) -> tuple[list[int], str]:
    """The output and the finish reason of a request that is served alone."""
    tokens = list(prompt)
    while True:
        tokens.append(draw(tokens))
        count = len(tokens) - len(prompt)
        if tokens[-1] in params.stop_token_ids and count > params.min_tokens:
            return tokens[len(prompt) :], "stop"
        if count == params.max_tokens:
            return tokens[len(prompt) :], "length"


@dataclass
class Served:
    """A request and what happened to it."""

    sequence: Sequence
    prompt: list[int]
    number: int  # in order of arrival
    deadline: int  # the step by which it must have ended
    scored: int = 0  # how many of its first tokens were computed for it and not taken from the cache
    output: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


class Simulation:
    """A server without a model. Every method checks all invariants."""

    def __init__(self, n_blocks: int, block_size: int, max_num_seqs: int, max_batch_tokens: int, max_model_len: int) -> None:
        self.n_blocks, self.size, self.max_model_len = n_blocks, block_size, max_model_len
        self.max_num_seqs, self.budget = max_num_seqs, max_batch_tokens
        self.manager = BlockManager(n_blocks, block_size)
        self.scheduler = Scheduler(self.manager, max_num_seqs, max_batch_tokens, max_model_len)
        self.requests: dict[str, Served] = {}
        self.alive: dict[str, Served] = {}
        self.texts: dict[tuple[int, int], int] = {}  # (number of a prefix, next token) to the number of the longer prefix
        self.holds: dict[int, int] = {}  # cache position to the number of the prefix that ends with the token computed there
        self.steps = 0

    def beginnings(self, tokens: list[int]) -> list[int]:
        """A number for each prefix of `tokens`. Only equal prefixes have the same number."""
        numbers, last = [], 0
        for token in tokens:
            last = self.texts.setdefault((last, token), len(self.texts) + 1)
            numbers.append(last)
        return numbers

    def work(self, sequence: Sequence) -> int:
        """The most steps that a request needs once it is the oldest, if all its tokens are computed again."""
        longest = sequence.prompt_length + sequence.params.max_tokens
        return -(-longest // self.budget) + sequence.params.max_tokens + 1  # and a useless one after its end

    def submit(self, prompt: list[int], params: SamplingParams) -> bool:
        """Whether the request was accepted."""
        name = f"request {len(self.requests)}"
        sequence = Sequence(name, list(prompt), len(prompt), params)
        longest = len(prompt) + params.max_tokens
        if longest > self.max_model_len or longest > self.n_blocks * self.size:
            with pytest.raises(UserError) as error:
                self.scheduler.check(sequence)
            assert str(longest) in str(error.value) or str(params.max_tokens) in str(error.value)
            return False
        self.scheduler.check(sequence)
        self.scheduler.add(sequence)
        deadline = self.steps + self.work(sequence) + sum(self.work(r.sequence) for r in self.alive.values())
        self.requests[name] = self.alive[name] = Served(sequence, list(prompt), len(self.requests), deadline)
        self.check()
        return True

    def step(self) -> list[Chunk]:
        """Compute a step and record its tokens. Returns its chunks."""
        chunks = self.launch()
        sampling = [c for c in chunks if c.samples]
        random.shuffle(sampling)
        for chunk in sampling:
            self.land(chunk)
        self.check()
        return chunks

    def land(self, chunk: Chunk) -> None:
        """Record the token that a chunk has drawn."""
        sequence, request = chunk.sequence, self.requests[chunk.sequence.request_id]
        token = draw(sequence.tokens)
        request.output.append(token)
        self.scheduler.record(sequence, token)
        if sequence.finish_reason:
            self.end(request)

    def launch(self) -> list[Chunk]:
        chunks = self.scheduler.schedule()
        self.steps += 1
        self.check_chunks(chunks)
        for chunk in chunks:
            numbers = self.beginnings(chunk.sequence.tokens[: chunk.stop])
            for position in range(chunk.start, chunk.stop):
                self.holds[self.place(chunk.sequence, position)] = numbers[position]
        for chunk in chunks:  # a step may compute its chunks in any order
            self.check_cache(chunk.sequence, chunk.stop)  # no other chunk wrote to its positions
        self.scheduler.launched(chunks)
        self.check()
        return chunks

    def end(self, request: Served) -> None:
        sequence = request.sequence
        request.ends.append(sequence.finish_reason or "")
        assert (request.output, sequence.finish_reason) == alone(request.prompt, sequence.params)
        assert sequence.tokens == request.prompt + request.output
        assert not sequence.blocks
        del self.alive[sequence.request_id]

    def run(self) -> None:
        """Step until there is no work. Every request must have ended exactly once."""
        while self.scheduler.has_work():
            self.step()
        assert not self.alive
        assert self.manager.used == 0
        assert len(self.manager.free) == self.n_blocks
        for request in self.requests.values():
            assert len(request.ends) == 1, f"{request.sequence.request_id} ended {len(request.ends)} times"

    def place(self, sequence: Sequence, position: int) -> int:
        return sequence.blocks[position // self.size] * self.size + position % self.size

    def check_cache(self, sequence: Sequence, length: int) -> None:
        """Check that positions 0 … length-1 in the sequence's blocks were computed from exactly its tokens."""
        held = [self.holds.get(self.place(sequence, p)) for p in range(length)]
        assert held == self.beginnings(sequence.tokens[:length])

    def check_chunks(self, chunks: list[Chunk]) -> None:
        assert chunks or not self.scheduler.has_work(), "there is work, but none was scheduled"
        assert sum(c.count for c in chunks) <= self.budget
        assert len(chunks) <= self.max_num_seqs
        assert len({c.sequence.request_id for c in chunks}) == len(chunks), "a sequence is twice in a step"
        for chunk in chunks:
            sequence, stop = chunk.sequence, chunk.stop
            assert sequence in self.scheduler.running and chunk.is_known
            assert 1 <= chunk.count == stop - chunk.start and stop == sequence.computed <= len(sequence.tokens)
            assert chunk.samples == (stop == len(sequence.tokens))
            assert chunk.tokens == sequence.tokens[chunk.start : stop]
            assert [d.position for d in chunk.draws] == [stop][: chunk.samples]
            assert stop <= len(sequence.blocks) * self.size, "no blocks to write to"
            self.check_cache(sequence, chunk.start)
            if sequence.params.prompt_logprobs is not None:
                request = self.requests[sequence.request_id]
                assert chunk.start <= request.scored, "the logits of cached tokens are not in the cache"
                assert sequence.cached_tokens == 0
                request.scored = max(request.scored, stop)

    def check(self) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        self.manager.check([s.blocks for s in running])
        assert len(running) <= self.max_num_seqs
        assert all(not s.blocks and s.computed == 0 for s in waiting)
        assert set(self.scheduler.by_id) == set(self.alive) == {s.request_id for s in running + waiting}
        assert len(running) + len(waiting) == len(self.alive)
        order = [self.requests[s.request_id].number for s in running + waiting]
        assert order == sorted(order), "a later request overtook an earlier one"
        for request in self.alive.values():
            assert request.sequence.finish_reason is None
            assert self.steps <= request.deadline, f"{request.sequence.request_id} starves"
        for sequence in running:
            self.check_cache(sequence, sequence.computed)


# --- requests that never fit ----------------------------------------------------------------------------------------------


def test_the_longest_request_that_fits_is_served_and_one_token_more_refused(seed: int) -> None:
    for _ in range(20):
        n_blocks, size = random.randint(2, 6), random.randint(2, 4)
        longest = n_blocks * size
        max_model_len = random.choice([longest, longest - 1, longest + 5])
        simulation = Simulation(n_blocks, size, 3, random.randint(1, 10), max_model_len)
        fits = min(longest, max_model_len)
        length = random.randint(1, fits - 1)
        prompt = [random.randrange(VOCAB) for _ in range(length)]
        assert simulation.submit(prompt, SamplingParams(max_tokens=fits - length))
        assert not simulation.submit(prompt, SamplingParams(max_tokens=fits - length + 1))
        assert not simulation.submit([*prompt, 0], SamplingParams(max_tokens=fits - length))
        assert simulation.submit(prompt, SamplingParams(max_tokens=1))
        simulation.run()
        assert len(simulation.requests) == 2


def test_a_refusal_says_which_limit_in_one_line() -> None:
    scheduler = Scheduler(BlockManager(4, 4), 2, 8, 100)
    with pytest.raises(UserError, match=r"17 tokens need 5 KV-cache blocks, but there are only 4.*--kv-memory") as error:
        scheduler.check(Sequence("a", [0] * 10, 10, SamplingParams(max_tokens=7)))
    assert "\n" not in str(error.value)
    scheduler = Scheduler(BlockManager(400, 4), 2, 8, 100)
    with pytest.raises(UserError, match=r"prompt's 90 tokens and max_tokens 11 exceed .* context of 100"):
        scheduler.check(Sequence("a", [0] * 90, 90, SamplingParams(max_tokens=11)))


@pytest.mark.parametrize("least", [0, 1, 3])
def test_a_stop_token_within_the_least_length_ends_nothing(least: int) -> None:
    """A grammar may demand one there."""
    scheduler = Scheduler(BlockManager(9, 4), 2, 8, 100)
    scheduler.add(sequence := Sequence("a", [1], 1, SamplingParams(max_tokens=9, min_tokens=least, stop_token_ids=[7])))
    while sequence.finish_reason is None:
        scheduler.schedule()
        scheduler.record(sequence, 7)
    assert (sequence.generated, sequence.finish_reason) == (least + 1, "stop")


# --- the order of admission and preemption ----------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    """5 blocks of 2 tokens for three prompts of 3 tokens: two sequences hold 2 blocks each, and the third must wait."""
    simulation = Simulation(n_blocks=5, block_size=2, max_num_seqs=3, max_batch_tokens=20, max_model_len=10)
    for first in range(3):
        assert simulation.submit([first, 4, 4], SamplingParams(max_tokens=7))
    simulation.step()
    names = [[s.request_id for s in group] for group in (simulation.scheduler.running, simulation.scheduler.waiting)]
    assert names == [["request 0", "request 1"], ["request 2"]]
    while not simulation.scheduler.preemptions:
        simulation.step()
    names = [[s.request_id for s in group] for group in (simulation.scheduler.running, simulation.scheduler.waiting)]
    assert names == [["request 0"], ["request 1", "request 2"]]
    simulation.run()


def test_running_sequences_go_before_waiting_ones_and_prompts_are_cut_to_the_budget() -> None:
    simulation = Simulation(n_blocks=40, block_size=4, max_num_seqs=3, max_batch_tokens=8, max_model_len=40)
    for length in (3, 20, 2, 1):
        assert simulation.submit([length] + [0] * (length - 1), SamplingParams(max_tokens=9))

    def layout() -> list[tuple[str, int, int]]:
        return sorted((c.sequence.request_id[-1], c.start, c.count) for c in simulation.step())

    assert layout() == [("0", 0, 3), ("1", 0, 5)]
    assert layout() == [("0", 3, 1), ("1", 5, 7)]
    assert layout() == [("0", 4, 1), ("1", 12, 7)]
    assert layout() == [("0", 5, 1), ("1", 19, 1), ("2", 0, 2)]  # at most three sequences run: the last one waits
    assert layout() == [("0", 6, 1), ("1", 20, 1), ("2", 2, 1)]
    simulation.run()


def test_drafts_leave_blocks_and_tokens_to_waiting_sequences() -> None:
    """A draft of 8 tokens would take the two free blocks, or the budget of 9, that a waiting prompt of 4 tokens needs."""
    for n_blocks, budget in ((5, 100), (100, 9)):
        scheduler = Scheduler(BlockManager(n_blocks, 4), 2, budget, 40, max_drafted=8)
        running = Sequence("running", [0] * 9, 9, SamplingParams(max_tokens=10))
        scheduler.add(running)
        scheduler.launched(scheduler.schedule())
        scheduler.record(running, 0)
        waiting = Sequence("waiting", [1] * 4, 4, SamplingParams(max_tokens=4))
        scheduler.add(waiting)
        room = scheduler.draft_room({running: 8})
        assert room == {running: 2 if n_blocks == 5 else 8}
        first, second = scheduler.schedule(drafts={running: [0] * room[running]})
        assert (second.sequence, second.count) == (waiting, 4)
        assert len(first.draft) == (2 if n_blocks == 5 else 4)


@pytest.mark.parametrize("budget", [100, 1])
def test_room_that_no_draft_takes_returns_at_once(budget: int, seed: int) -> None:
    scheduler = Scheduler(BlockManager(30, 4), 4, 100, 60, max_drafted=40)
    running = [Sequence(str(i), [i] * random.randint(5, 9), 5, SamplingParams(max_tokens=30)) for i in range(3)]
    for sequence in running:
        scheduler.add(sequence)
    scheduler.launched(scheduler.schedule())
    for sequence in running:
        scheduler.record(sequence, 0)
    scheduler.max_batch_tokens = budget  # 1: the other two sequences get no chunk
    room = scheduler.draft_room(dict.fromkeys(running, 10))
    assert room == dict.fromkeys(running, 10) and any(len(s.blocks) > -(-s.length // 4) for s in running)
    drafts = {running[0]: [0] * 7, running[1]: [], running[2]: []} if budget > 1 else {s: list[int]() for s in running}
    scheduler.schedule(drafts=drafts)
    assert [len(s.blocks) for s in running] == [-(-s.computed // 4) for s in running]
    scheduler.blocks.check([s.blocks for s in running])


def test_the_sequences_that_go_on_are_found_once_a_step(seed: int) -> None:
    """Without waiting ones, for whom others may have to yield."""
    scheduler = Scheduler(BlockManager(30, 4), 4, 100, 60)
    for i in range(3):
        scheduler.add(Sequence(str(i), [i] * 5, 5, SamplingParams(max_tokens=9)))
    scheduler.launched(scheduler.schedule())
    with patch.object(scheduler, "_going", wraps=scheduler._going) as going:
        assert len(scheduler.schedule(in_flight=True)) == 3
    assert going.call_count == 1


# --- prefix reuse -----------------------------------------------------------------------------------------------------------


def expected_hit(seen: set[tuple[int, ...]], tokens: list[int], size: int) -> int:
    """How many of the first `tokens` fill whole blocks that an earlier text also begins with. One token is always left."""
    return max((n for n in range(size, len(tokens), size) if tuple(tokens[:n]) in seen), default=0)


@given(st.data(), st.integers(1, 4), st.booleans())
@settings(deadline=None, max_examples=60)
def test_hits_are_all_that_was_computed_before(data: st.DataObject, size: int, at_once: bool) -> None:
    """With enough blocks, a prompt reuses the longest prefix computed so far, both when requests follow one another and while
    others with the same prefix are in flight."""
    simulation = Simulation(2000, size, 8, 16, 100)
    scheduler, seen = simulation.scheduler, set()
    admitted: set[str] = set()
    queries = hits = 0
    texts: list[list[int]] = [[0, 1, 2, 3, 4] * 4]
    for _ in range(data.draw(st.integers(2, 6))):
        for _ in range(data.draw(st.integers(1, 3)) if at_once else 1):
            base = data.draw(st.sampled_from(texts))
            prompt = base[: data.draw(st.integers(1, min(len(base), 60)))] + data.draw(st.lists(st.integers(0, 1), max_size=4))
            assert simulation.submit(prompt, SamplingParams(max_tokens=data.draw(st.integers(1, 12))))
        for _ in range(data.draw(st.integers(1, 20)) if at_once else 1000):
            if not scheduler.has_work():
                break
            for chunk in simulation.step():
                sequence = chunk.sequence
                if sequence.request_id not in admitted:
                    admitted.add(sequence.request_id)
                    prompt = sequence.tokens[: sequence.prompt_length]
                    hit = expected_hit(seen, prompt, size)
                    assert chunk.start == sequence.cached_tokens == hit
                    queries, hits = queries + len(prompt), hits + hit
            assert (scheduler.prefix_queries, scheduler.prefix_hits) == (queries, hits)
            # blocks that this step computed can be reused from the next step on
            for request in simulation.requests.values():
                sequence = request.sequence
                length = len(sequence.tokens) - 1 if sequence.finish_reason else sequence.computed
                seen |= {tuple(sequence.tokens[:n]) for n in range(size, length + 1, size)}
        texts += [r.sequence.tokens for r in simulation.requests.values()]
    simulation.run()


def test_a_preempted_prompt_is_counted_once() -> None:
    """Its own blocks, which it reuses when it is admitted again, do not count as hits."""
    simulation = Simulation(n_blocks=7, block_size=2, max_num_seqs=2, max_batch_tokens=2, max_model_len=20)
    assert simulation.submit([0], SamplingParams(max_tokens=8))
    assert simulation.submit([1, 2, 3, 4] * 2, SamplingParams(max_tokens=1))
    first, second = simulation.requests["request 0"].sequence, simulation.requests["request 1"].sequence
    while not simulation.scheduler.preemptions:
        simulation.step()
    assert second.generated == 0, "it was to be preempted while its prompt is computed"
    starts = []
    while simulation.scheduler.has_work():
        starts += [c.start for c in simulation.step() if c.sequence is second]
    assert starts[0] == 4
    assert first.cached_tokens == second.cached_tokens == 0
    assert (simulation.scheduler.prefix_queries, simulation.scheduler.prefix_hits) == (9, 0)


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    simulation = Simulation(50, 2, 4, 50, 50)
    prompt = [1, 2, 3, 4, 0, 1, 2]
    for wanted, start in ((None, 0), (1, 0), (0, 0), (None, 6)):
        assert simulation.submit(prompt, SamplingParams(max_tokens=2, prompt_logprobs=wanted))
        (chunk,) = simulation.step()
        assert (chunk.start, chunk.sequence.cached_tokens) == (start, start)
        simulation.run()


# --- the block manager alone ------------------------------------------------------------------------------------------------


def test_what_would_be_free_without_a_sequence() -> None:
    """Neither what another one has, nor what is wanted from the cache."""
    manager = BlockManager(4, 2)
    blocks = [manager.allocate() for _ in range(3)]
    manager.acquire(blocks[:1])
    assert [manager.owned_alone(blocks, cached) for cached in ([], blocks[1:2], blocks)] == [2, 1, 0]


def test_forgotten_blocks_are_not_found() -> None:
    """Nor their successors, but equal blocks that are computed later."""
    manager = BlockManager(8, 2)
    tokens = [1, 2, 3, 4, 5]
    first = [manager.allocate() for _ in range(2)]
    manager.publish(first, tokens, 0, 1)
    manager.forget(first)
    manager.publish(first, tokens, 1, 2)
    assert manager.match(tokens) == []
    second = [manager.allocate() for _ in range(2)]
    manager.publish(second, tokens, 0, 2)
    assert manager.match(tokens) == second
    manager.release(first)
    manager.release(second)
    manager.check([])
    assert sorted(manager.allocate() for _ in range(8)) == [*range(8)] and not manager.known


def test_eviction_takes_the_longest_unused_and_of_one_text_its_end_first() -> None:
    manager = BlockManager(6, 2)
    tables = {}
    for name, tokens in (("a", [1, 1, 2, 2]), ("b", [3, 3, 4, 4])):
        tables[name] = [manager.allocate() for _ in range(2)]
        manager.publish(tables[name], tokens, 0, 2)
    manager.release(tables["a"])
    manager.release(tables["b"])
    kept = manager.match([1, 1, 9])  # a's first block is used again: now the most recently used
    assert kept == tables["a"][:1]
    manager.acquire(kept)
    manager.release(kept)
    taken = [manager.allocate() for _ in range(6)]
    never_used = [b for b in range(6) if b not in tables["a"] + tables["b"]]
    assert taken == [*never_used, tables["a"][1], tables["b"][1], tables["b"][0], tables["a"][0]]
    assert manager.match([1, 1, 9]) == manager.match([3, 3, 4, 4, 9]) == []
    manager.check([taken])


def test_equal_blocks_go_on_alike_until_the_known_one_is_evicted() -> None:
    """Two sequences compute the same text at once. The block that follows the second copy is also found after the first copy,
    but not after the text that later takes the first copy's block."""
    manager = BlockManager(3, 1)
    first, second = [manager.allocate()], [manager.allocate(), manager.allocate()]
    manager.publish(first, [1], 0, 1)
    manager.publish(second, [1, 2], 0, 2)
    assert manager.match([1, 2, 0]) == [first[0], second[1]]
    manager.release(first)
    successor = [manager.allocate()]
    assert successor == first
    manager.publish(successor, [7], 0, 1)
    assert manager.match([7, 2, 0]) == successor
    assert manager.match([1, 2, 0]) == []
    manager.check([second, successor])


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "leave"]), st.integers(0)), max_size=60), st.integers(1, 12))
@settings(deadline=None)
def test_eviction_order_of_random_owners(actions: list[tuple[str, int]], n_blocks: int) -> None:
    """For any actions of the owners, the next block is the one that has been free for the longest time."""
    manager = BlockManager(n_blocks, 1)
    unused_since = {b: (0, b) for b in range(n_blocks)}  # (time of its release, order within that time)
    tables: list[list[int]] = []
    for now, (action, n) in enumerate(actions, start=1):
        if action == "take" and unused_since:
            table = []
            for _ in range(1 + n % min(3, len(unused_since))):
                oldest = min(unused_since, key=unused_since.__getitem__)
                assert manager.allocate() == oldest
                del unused_since[oldest]
                table.append(oldest)
            manager.publish(table, [now * 10 + i for i in range(3)], 0, len(table))
            tables.append(table)
        elif action == "share" and tables:
            tables.append(tables[n % len(tables)][: 1 + n % 2])
            manager.acquire(tables[-1])
        elif action == "leave" and tables:
            left = tables.pop(n % len(tables))
            manager.release(left)
            for i, block in enumerate(reversed(left)):
                if all(block not in t for t in tables):
                    unused_since[block] = (now, i)
        manager.check(tables)
        assert manager.used == n_blocks - len(unused_since)


@pytest.mark.parametrize("harm", ["owners", "lost", "twice", "known"])
def test_the_check_notices(harm: str) -> None:
    manager = BlockManager(4, 2)
    table = [manager.allocate(), manager.allocate()]
    manager.publish(table, [1, 2, 3, 4], 0, 2)
    manager.check([table])
    tables = [table]
    if harm == "owners":
        tables = [table, table[:1]]
    elif harm == "lost":
        manager.free.popitem()
    elif harm == "twice":
        tables = [table + table[:1]]
    else:
        manager.keys[table[0]] = None
    with pytest.raises(AssertionError):
        manager.check(tables)


def test_blocks_that_were_given_back_are_allocated_next_and_released_ones_last(seed: int) -> None:
    """Those of a draft hold nothing of value; what others may still find is evicted as late as possible."""
    manager = BlockManager(9, 2)
    held = [manager.allocate() for _ in range(5)]
    ended = [manager.allocate() for _ in range(2)]
    manager.release(ended)
    dropped = held[2:]
    manager.give_back(held, 2)
    rest = [7, 8]
    assert [manager.allocate() for _ in range(7)] == [*dropped, *rest, *ended[::-1]]
