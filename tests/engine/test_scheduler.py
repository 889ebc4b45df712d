"""Scheduler and block manager without a model: random arrivals, aborts and memory shortage, checked after every step.

The cache is simulated: for each position of each block, the test records the text prefix from which it was computed. A drawn
token is a hash of all tokens before it, so the output of a request served alone is known.
"""

import random
import zlib
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_manager import BlockManager
from engine.protocol import SamplingParams
from engine.scheduler import Chunk, Scheduler, Sequence
from errors import UserError

VOCAB = 5  # few ids, so that unrelated texts share prefixes


def draw(tokens: List[int]) -> int:
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
        self.max_num_seqs, self.budget, self.max_drafted = max_num_seqs, max_batch_tokens, random.randint(1, 12)
        self.manager = BlockManager(n_blocks, block_size)
        self.scheduler = Scheduler(self.manager, max_num_seqs, max_batch_tokens, max_model_len, max_drafted=self.max_drafted)
        self.requests: dict[str, Served] = {}
        self.alive: dict[str, Served] = {}
        self.texts: dict[tuple[int, int], int] = {}  # (number of a prefix, next token) to the number of the longer prefix
        self.holds: dict[int, int] = {}  # cache position to the number of the prefix that ends with the token computed there
        self.steps = 0
        self.ahead_share = 0.0  # how often a step is scheduled before the tokens of the step before are recorded
        self.ahead: list[Chunk] | None = None
        self.draft_share = 0.0  # how often a sequence has a draft
        self.accepted = self.rejected = 0  # drafted tokens
        self.in_flight: dict[str, list[int]] = {}  # by request: tokens that were drawn and not recorded, after a draft, if any

    def text(self, sequence: Sequence) -> list[int]:
        """The sequence's tokens, with those in flight."""
        return sequence.tokens + self.in_flight.get(sequence.request_id, [])

    def beginnings(self, tokens: List[int]) -> list[int]:
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
        before = list(self.scheduler.waiting), list(self.scheduler.running), set(self.scheduler.by_id), self.manager.used
        if longest > self.max_model_len or longest > self.n_blocks * self.size:
            with pytest.raises(UserError) as error:
                self.scheduler.add(sequence)
            assert str(longest) in str(error.value) or str(params.max_tokens) in str(error.value)
            after = list(self.scheduler.waiting), list(self.scheduler.running), set(self.scheduler.by_id), self.manager.used
            assert before == after, "a refused request left something behind"
            return False
        self.scheduler.add(sequence)
        deadline = self.steps + self.work(sequence) + sum(self.work(r.sequence) for r in self.alive.values())
        self.requests[name] = self.alive[name] = Served(sequence, list(prompt), len(self.requests), deadline)
        self.check()
        return True

    def abort(self, name: str) -> None:
        request = self.alive.pop(name, None)
        used = len({b for s in self.scheduler.running if s.request_id != name for b in s.blocks})
        self.scheduler.abort(name)
        assert self.manager.used == used, "the blocks of an aborted request are not free at once"
        if request:
            assert request.sequence.finish_reason == "abort"
            request.ends.append("abort")
        self.check()

    def step(self) -> list[Chunk]:
        """Record a step's tokens, often after the next step has been launched. Returns its chunks."""
        if not self.scheduler.has_work():  # nobody reads the step that was launched ahead
            self.ahead = None
            self.in_flight.clear()
        chunks, self.ahead = self.ahead or self.launch(), None
        if random.random() < self.ahead_share and not any(c.draft for c in chunks):
            self.ahead = self.launch(in_flight=True)
        sampling = [c for c in chunks if c.samples]
        random.shuffle(sampling)
        for chunk in sampling:
            self.land(chunk)
        self.check()
        return chunks

    def land(self, chunk: Chunk) -> None:
        """Record the tokens that a chunk has drawn."""
        sequence, request = chunk.sequence, self.requests[chunk.sequence.request_id]
        tokens = [self.in_flight[sequence.request_id].pop(0) for _ in range(len(chunk.draft) + 1)]
        if sequence.finish_reason is not None:
            return
        if chunk.draft:
            drawn = [draw(sequence.tokens + tokens[:i]) for i in range(len(tokens))]
            right = next((i for i, token in enumerate(chunk.draft) if token != drawn[i]), len(chunk.draft))
            tokens = drawn[: right + 1]
            self.accepted, self.rejected = self.accepted + right, self.rejected + len(chunk.draft) - right
            self.scheduler.reject(sequence, len(chunk.draft) - right)
            assert len(sequence.blocks) <= max(-(-len(sequence.tokens + tokens) // self.size), 1), (
                "it keeps places of wrong tokens"
            )
        for token in tokens:
            request.output.append(token)
            self.scheduler.record(sequence, token)
            if sequence.finish_reason:
                self.end(request)
                break

    def drafts(self) -> dict[Sequence, list[int]]:
        """Drafts for some of the sequences that may have one; some tokens are wrong."""
        drafts = {}
        for sequence in self.scheduler.running:
            if sequence.generated and sequence.length - sequence.computed == 1 and random.random() < self.draft_share:
                text = list(sequence.tokens)
                for _ in range(random.randint(1, 9)):
                    text.append(draw(text) if random.random() < 0.8 else random.randrange(VOCAB))
                drafts[sequence] = text[len(sequence.tokens) :]
        room = self.scheduler.make_room({sequence: len(draft) for sequence, draft in drafts.items()})
        assert sum(room.values()) <= self.max_drafted and all(0 < n <= len(drafts[s]) for s, n in room.items())
        return {sequence: drafts[sequence][:count] for sequence, count in room.items()}

    def launch(self, in_flight: bool = False) -> list[Chunk]:
        preemptions = self.scheduler.preemptions
        chunks = self.scheduler.schedule(in_flight, {} if in_flight else self.drafts())
        assert not any(c.draft for c in chunks) or self.scheduler.preemptions == preemptions, "a draft took another's place"
        if in_flight and not chunks:
            self.check_that_nothing_could_be_scheduled()
            return []
        self.steps += 1
        self.check_chunks(chunks, in_flight)
        for chunk in chunks:
            if chunk.draft:
                self.in_flight[chunk.sequence.request_id] = [*chunk.draft, draw([*chunk.sequence.tokens, *chunk.draft])]
        for chunk in chunks:
            numbers = self.beginnings(self.text(chunk.sequence)[: chunk.stop])
            for position in range(chunk.start, chunk.stop):
                self.holds[self.place(chunk.sequence, position)] = numbers[position]
        for chunk in chunks:  # a step may compute its chunks in any order
            self.check_cache(chunk.sequence, chunk.stop)  # no other chunk wrote to its positions
        for chunk in chunks:
            if chunk.samples and not chunk.draft:
                drawn = draw(self.text(chunk.sequence))
                self.in_flight.setdefault(chunk.sequence.request_id, []).append(drawn)
        self.scheduler.launched(chunks)
        self.check()
        return chunks

    def check_that_nothing_could_be_scheduled(self) -> None:
        going = [s for s in self.scheduler.running if len(self.text(s)) < s.prompt_length + s.params.max_tokens]
        missing = sum(max(0, -(-len(self.text(s)) // self.size) - len(s.blocks)) for s in going)
        assert not going or missing > len(self.manager.free)

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
        assert held == self.beginnings(self.text(sequence)[:length])

    def check_chunks(self, chunks: list[Chunk], in_flight: bool) -> None:
        assert chunks or in_flight or not self.scheduler.has_work(), "there is work, but none was scheduled"
        assert sum(c.count for c in chunks) <= self.budget
        assert len(chunks) <= self.max_num_seqs
        assert sum(len(c.draft) for c in chunks) <= self.max_drafted
        assert len({c.sequence.request_id for c in chunks}) == len(chunks), "a sequence is twice in a step"
        for chunk in chunks:
            sequence, stop, text = chunk.sequence, chunk.stop, [*self.text(chunk.sequence), *chunk.draft]
            assert chunk.samples or not chunk.draft
            assert sequence in self.scheduler.running
            assert chunk.count >= 1
            assert stop == sequence.computed <= len(text) < sequence.prompt_length + sequence.params.max_tokens
            assert chunk.samples == (stop == len(text))
            assert chunk.is_known == (self.text(sequence) == sequence.tokens) or not chunk.samples
            assert chunk.tokens == text[chunk.start : stop] if chunk.is_known else chunk.count == 1
            assert [d.position for d in chunk.draws] == list(range(stop - len(chunk.draft), stop + 1))[
                : None if chunk.samples else 0
            ]
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
        ending = [s for s in running if s.unknown and s.length == s.prompt_length + s.params.max_tokens]
        assert len(running) - len(ending) <= self.max_num_seqs
        assert all(s.unknown == len(self.in_flight.get(s.request_id, [])) for s in running)
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


# --- random events -------------------------------------------------------------------------------------------------------

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 30),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2),
    prompt_logprobs=st.sampled_from([None, None, None, 1]),
)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
blocks_of = st.integers(1, 5)


class Life(RuleBasedStateMachine):
    """Requests arrive, share prefixes, are aborted, and run out of cache blocks."""

    @initialize(
        n_blocks=st.integers(2, 24),
        block_size=blocks_of,
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 20),
        max_model_len=st.integers(10, 60),
        shares=st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])),
    )
    def begin(
        self,
        n_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        max_model_len: int,
        shares: tuple[float, float],
    ) -> None:
        self.simulation = Simulation(n_blocks, block_size, max_num_seqs, budget, max_model_len)
        self.simulation.ahead_share, self.simulation.draft_share = shares

    @rule(prompt=prompts, params=params)
    def submit(self, prompt: list[int], params: SamplingParams) -> None:
        self.simulation.submit(prompt, params)

    @precondition(lambda self: self.simulation.requests)
    @rule(which=st.integers(0), keep=st.integers(1, 40), more=prompts | st.just([]), params=params)
    def submit_a_known_beginning(self, which: int, keep: int, more: list[int], params: SamplingParams) -> None:
        """A prefix of another request's text, including its answer, as in a continued chat or a repeated prompt."""
        texts = [r.sequence.tokens for r in self.simulation.requests.values()]
        self.simulation.submit(texts[which % len(texts)][:keep] + more, params)

    @precondition(lambda self: self.simulation.requests)
    @rule(which=st.integers(0))
    def abort(self, which: int) -> None:
        names = list(self.simulation.requests)  # ended requests, too: a client's abort may arrive late
        self.simulation.abort(names[which % len(names)])

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.simulation.step()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.run()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def random_request(texts: list[list[int]]) -> tuple[list[int], SamplingParams]:
    prompt = [random.randrange(VOCAB) for _ in range(random.randint(1, 25))]
    if texts and random.random() < 0.6:
        shared = random.choice(texts)
        prompt = shared[: random.randint(1, len(shared))] + prompt[: random.randint(0, 8)]
    return prompt, SamplingParams(
        max_tokens=random.randint(1, 25),
        min_tokens=random.choice([0, 0, 3]),
        stop_token_ids=random.sample(range(VOCAB), random.choice([0, 0, 1])),
        prompt_logprobs=random.choice([None] * 7 + [0]),
    )


@pytest.mark.parametrize(("place", "pool"), list(enumerate(["scarce", "ample"])))
def test_thousands_of_arrivals(place: int, pool: str, in_turn: Callable[..., tuple[float, float]], seed: int) -> None:
    """1500 requests to one server, some of them aborted."""
    simulation = Simulation(
        n_blocks=random.randint(20, 30) if pool == "scarce" else 300,
        block_size=random.randint(2, 4),
        max_num_seqs=random.randint(4, 12),
        max_batch_tokens=random.randint(15, 40),
        max_model_len=45,
    )
    ahead_share, draft_share = in_turn([(0.0, 0.0), (0.7, 0.0), (1.0, 0.0), (0.5, 0.6), (0.0, 1.0)], place)
    simulation.ahead_share, simulation.draft_share = ahead_share, draft_share
    taken = refused = aborted = 0
    texts: list[list[int]] = []
    while taken < 1500:
        for _ in range(random.choice([0, 0, 0, 1, 1, 2])):
            if simulation.submit(*random_request(texts[-20:])):
                taken += 1
                texts.append(list(simulation.requests.values())[-1].sequence.tokens)
            else:
                refused += 1
        if simulation.alive and random.random() < 0.05:
            simulation.abort(random.choice(list(simulation.alive)))
            aborted += 1
        simulation.step()
    simulation.run()
    scheduler = simulation.scheduler
    assert refused > 0 and aborted > 50
    assert 0 < scheduler.prefix_hits < scheduler.prefix_queries
    assert scheduler.preemptions > 0 if pool == "scarce" else scheduler.preemptions <= 10
    assert (min(simulation.accepted, simulation.rejected) > 100) == (draft_share > 0)


def test_two_copies_take_the_same_steps(seed: int) -> None:
    """Every rank runs its own scheduler, so the same events must give the same steps and block tables."""
    copies = [Scheduler(BlockManager(15, 3), 5, 12, 45) for _ in range(2)]
    texts: list[list[int]] = []
    for number in range(300):
        prompt, wanted = random_request(texts[-10:])
        if len(prompt) + wanted.max_tokens <= 45:
            texts.append(prompt)
            for copy in copies:
                copy.add(Sequence(str(number), list(prompt), len(prompt), wanted))
        victim = str(random.randrange(number + 1))
        steps = []
        for copy in copies:
            if number % 9 == 0:
                copy.abort(victim)
            chunks = copy.schedule()
            steps.append([(c.sequence.request_id, c.start, c.count, tuple(c.sequence.blocks)) for c in chunks])
            copy.launched(chunks)
            for sequence in [c.sequence for c in chunks if c.samples]:
                copy.record(sequence, draw(sequence.tokens))
        assert steps[0] == steps[1]
        assert steps[0] or not copies[0].has_work()
    assert copies[0].preemptions == copies[1].preemptions > 0


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
        scheduler.add(Sequence("a", [0] * 10, 10, SamplingParams(max_tokens=7)))
    assert "\n" not in str(error.value)
    scheduler = Scheduler(BlockManager(400, 4), 2, 8, 100)
    with pytest.raises(UserError, match=r"prompt's 90 tokens and max_tokens 11 exceed .* context of 100"):
        scheduler.add(Sequence("a", [0] * 90, 90, SamplingParams(max_tokens=11)))
    assert not scheduler.has_work()


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


def test_drafts_leave_the_blocks_that_the_first_waiting_sequence_needs() -> None:
    """5 blocks of 4 tokens: a sequence of 7 tokens has 2, a waiting prompt of 8 needs 3."""
    for waits in (False, True):
        scheduler = Scheduler(BlockManager(5, 4), 4, 100, 40, max_drafted=20)
        running = Sequence("a", [1] * 6, 6, SamplingParams(max_tokens=12))
        scheduler.add(running)
        chunks = scheduler.schedule()
        scheduler.launched(chunks)
        scheduler.record(running, 1)
        if waits:
            scheduler.add(Sequence("b", [2] * 8, 8, SamplingParams(max_tokens=4)))
        room = scheduler.make_room({running: 12})
        assert room == {running: 1 if waits else 10}
        chunks = scheduler.schedule(drafts={running: [1] * room[running]})
        assert [c.sequence.request_id for c in chunks] == (["a", "b"] if waits else ["a"])
        assert len(chunks[0].draft) == room[running]
        scheduler.blocks.check([s.blocks for s in scheduler.running])
