"""Scheduler and block manager without a model. Random arrivals, aborts and memory shortage, and what lies in the blocks, are in
tests/simulation."""

import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import BlockManager, Chunk, Sequence
from errors import UserError
from tests.support.blocks import check_blocks

VOCAB = 5  # few ids, so that unrelated texts share prefixes


def draw(tokens: list[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCAB


class Simulation:
    """A scheduler whose steps draw a hash of all tokens before. Its blocks are checked after each step."""

    def __init__(self, n_blocks: int, block_size: int, max_num_seqs: int, max_batch_tokens: int, max_model_len: int) -> None:
        self.manager = BlockManager(n_blocks, block_size)
        self.scheduler = Scheduler(self.manager, max_num_seqs, max_batch_tokens, max_model_len)
        self.sequences: list[Sequence] = []

    def submit(self, prompt: list[int], params: SamplingParams) -> bool:
        """Whether the request was accepted."""
        sequence = Sequence(f"request {len(self.sequences)}", list(prompt), len(prompt), params)
        try:
            self.scheduler.check(sequence)
        except UserError:
            return False
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return True

    def step(self) -> list[Chunk]:
        """Compute a step and record its tokens. Returns its chunks."""
        chunks = self.scheduler.schedule()
        assert chunks, "there is work, but none was scheduled"
        self.scheduler.launched(chunks)
        for chunk in chunks:
            if chunk.samples:
                self.scheduler.record(chunk.sequence, draw(chunk.sequence.tokens))
        check_blocks(self.manager, [s.blocks for s in self.scheduler.running])
        return chunks

    def run(self) -> None:
        """Step until there is no work."""
        while self.scheduler.has_work():
            self.step()
        assert self.manager.used == 0 and all(s.finish_reason for s in self.sequences)


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
        assert len(simulation.sequences) == 2


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
    check_blocks(scheduler.blocks, [s.blocks for s in running])


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
            for sequence in simulation.sequences:
                length = len(sequence.tokens) - 1 if sequence.finish_reason else sequence.computed
                seen |= {tuple(sequence.tokens[:n]) for n in range(size, length + 1, size)}
        texts += [sequence.tokens for sequence in simulation.sequences]
    simulation.run()


def test_a_preempted_prompt_is_counted_once() -> None:
    """Its own blocks, which it reuses when it is admitted again, do not count as hits."""
    simulation = Simulation(n_blocks=7, block_size=2, max_num_seqs=2, max_batch_tokens=2, max_model_len=20)
    assert simulation.submit([0], SamplingParams(max_tokens=8))
    assert simulation.submit([1, 2, 3, 4] * 2, SamplingParams(max_tokens=1))
    first, second = simulation.sequences
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
    check_blocks(manager, [])
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
    check_blocks(manager, [taken])


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
    check_blocks(manager, [second, successor])


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
        check_blocks(manager, tables)
        assert manager.used == n_blocks - len(unused_since)


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
