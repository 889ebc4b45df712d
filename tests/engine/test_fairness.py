"""The order of waiting sequences and the shares of clients: what one client sends must not make another wait. Time is counted in
steps."""

import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import SamplingParams, Turn
from engine.scheduler import Scheduler, WaitingQueue, fair_shares
from engine.sequence import BlockManager, Sequence


class Server:
    """A scheduler whose steps draw token 0."""

    def __init__(self, n_blocks: int, places: int, budget: int, ahead: bool = False) -> None:
        self.scheduler = Scheduler(BlockManager(n_blocks, 4), places, budget, 10_000)
        self.steps, self.names, self.ahead = 0, count(), ahead
        self.first_token: dict[Sequence, int] = {}  # the step that drew it
        self._next: list = []

    def send(self, client: str, prompt: int, answer: int, weight: int = 1, priority: int = 0) -> Sequence:
        number = next(self.names)
        tokens = [number] * prompt  # no two have a prefix in common
        params = SamplingParams(max_tokens=answer)
        sequence = Sequence(str(number), tokens, prompt, params, Turn(client, weight, priority))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        self.steps += 1
        chunks, self._next = self._next or self.scheduler.schedule(), []
        self.scheduler.launched(chunks)
        if self.ahead:
            self._next = self.scheduler.schedule(in_flight=True)
        for chunk in chunks:
            if chunk.samples and chunk.sequence.finish_reason is None:
                self.first_token.setdefault(chunk.sequence, self.steps)
                self.scheduler.record(chunk.sequence, 0)

    def wait_for(self, sequence: Sequence) -> int:
        """Steps until it has its first token."""
        before = self.steps
        while sequence not in self.first_token:
            self.step()
        return self.first_token[sequence] - before


@pytest.mark.parametrize("limit", ["places", "tokens", "blocks"])
def test_a_thousand_requests_of_one_client_do_not_delay_another(limit: str, seed: int) -> None:
    """Another client's time to the first token is at most twice what it is on an idle server, whatever the server lacks."""
    places, budget = random.randint(4, 40), 2 * random.randint(25, 100)  # which two clients can halve
    n_blocks = 600 if limit == "blocks" else 20_000
    ahead = random.random() < 0.5
    server, idle = (Server(n_blocks, places, budget, ahead) for _ in range(2))
    for _ in range(1000):
        prompt = {"places": 10, "tokens": 8 * budget, "blocks": 300}[limit]
        server.send("greedy", random.randint(1, prompt), random.randint(20, 200))
    for _ in range(4):
        for _ in range(random.randint(30, 60)):  # it has no other request then
            idle.step()
            server.step()
        prompt = random.randint(1, 3 * budget)
        answer = random.randint(1, 30)
        alone, crowded = (one.wait_for(one.send("polite", prompt, answer)) for one in (idle, server))
        # one step more if the next one is scheduled already
        assert crowded <= 2 * alone + ahead
    running = Counter(s.client for s in server.scheduler.running)
    assert len(server.scheduler.waiting) > 500 and running["greedy"] >= min(places, 4) - 2, "the others go on"


def test_a_step_for_which_others_yielded_computes_only_the_new_request(seed: int) -> None:
    """Its first token does not wait for a whole batch. The others go on at least in every second step, however many clients come."""
    places, steps = random.randint(4, 20), list[set[str]]()
    server = Server(20_000, places, 200)
    for _ in range(3 * places):
        server.send("greedy", 10, 1000)
    server.step()
    scheduler = server.scheduler
    for i in range(places // 2 - 1):
        server.send(f"polite {i}", random.randint(1, 50), 1000)
        chunks = scheduler.schedule()
        steps.append({chunk.sequence.client for chunk in chunks})
        assert scheduler.preemptions > i
        scheduler.launched(chunks)
        for chunk in chunks:
            scheduler.record(chunk.sequence, 0)
    for i, clients in enumerate(steps):
        if i % 2 == 0:
            assert clients == {f"polite {i}"}
        else:
            assert clients == {"greedy", *(f"polite {j}" for j in range(i + 1))}
    assert {chunk.sequence.client for chunk in scheduler.schedule()} >= {"greedy"}, "nobody yields, so all are computed"


def test_clients_that_all_have_enough_to_do_get_places_and_tokens_by_weight() -> None:
    weights = {"a": 1, "b": 3, "c": 4}
    server = Server(1000, 16, 64)
    for _ in range(400):
        for client, weight in weights.items():
            server.send(client, 20, 5, weight)
    for _ in range(100):
        server.step()
    before = Counter(s.client for s in server.first_token)
    for _ in range(100):
        server.step()
    served = Counter(s.client for s in server.first_token)
    served.subtract(before)
    for client, weight in weights.items():
        assert served[client] == pytest.approx(sum(served.values()) * weight / 8, rel=0.15)


def test_in_one_place_clients_take_turns_by_weight() -> None:
    server = Server(1000, 1, 100)
    sequences = [server.send(client, 3, 1, weight) for client, weight in (("a", 1), ("b", 2)) for _ in range(30)]
    while server.scheduler.has_work():
        server.step()
    order = "".join(s.client for s in sorted(sequences, key=server.first_token.__getitem__))
    assert all(Counter(order[i : i + 3]) == {"a": 1, "b": 2} for i in range(0, 45, 3))
    for client in "ab":
        own = [server.first_token[s] for s in sequences if s.client == client]
        assert own == sorted(own), "a client's own requests start in the order of their arrival"


def test_priorities() -> None:
    """The lowest number starts first, whoever sent it, and is preempted last. A place that is taken is not given up for it."""
    server = Server(1000, 1, 100)
    busy = server.send("a", 3, 10, priority=5)
    server.step()
    sequences = [server.send(random.choice("abc"), 3, 2, priority=priority) for priority in (0, 7, -3, 0, 7, -3)]
    while server.scheduler.has_work():
        server.step()
    order = sorted(sequences, key=server.first_token.__getitem__)
    assert [s.priority for s in order] == [-3, -3, 0, 0, 7, 7]
    assert min(map(server.first_token.__getitem__, sequences)) == server.first_token[busy] + 10

    server = Server(10, 3, 100)  # of 40 tokens
    low, high, middle = (server.send("a", 9, 20, priority=priority) for priority in (9, -9, 0))
    server.step()
    assert server.scheduler.running == [high, middle, low]
    while not server.scheduler.preemptions:
        server.step()
    assert server.scheduler.running == [high, middle] and list(server.scheduler.waiting) == [low]
    ends = list[Sequence]()
    while server.scheduler.has_work():
        server.step()
        ends += [s for s in (low, high, middle) if s.finish_reason and s not in ends]
    assert ends == [high, middle, low]


@pytest.mark.parametrize(
    ("clients", "victim"),
    [  # by client: the weights, and whose sequences run
        ({"a": 4, "b": 1}, ("ababa", "b")),  # 2 others for a weight of 4, and 1 for a weight of 1
        ({"a": 1, "b": 4}, ("babab", "a")),
        ({"a": 1, "b": 3}, ("abb", "b")),  # none, and 1 for a weight of 3
        ({"a": 1, "b": 1}, ("aab", "a")),
        ({"a": 1, "b": 1}, ("abab", "b")),  # of equals, the one that began last
    ],
)
def test_the_client_that_has_most_for_its_weight_is_preempted(clients: dict[str, int], victim: tuple[str, str]) -> None:
    order, client = victim
    server = Server(2 * len(order), len(order), 100)
    # the first one needs a block
    sequences = [server.send(name, 3 + (i == 0), 40, clients[name]) for i, name in enumerate(order)]
    server.step()
    running = server.scheduler.running
    assert set(running) == set(sequences)
    while not server.scheduler.waiting:
        server.step()
    [preempted] = server.scheduler.waiting
    assert preempted.client == client and preempted is [s for s in sequences if s.client == client][-1]


def test_a_preempted_sequence_counts_as_one_that_never_started() -> None:
    queue, weights = WaitingQueue(), {"a": 1, "b": 3}
    own = {client: [queued(queue, client, weight) for _ in range(4)] for client, weight in weights.items()}
    for client in "aabb":  # however often it comes back
        queue.start(own[client][0])
        queue.add_again(own[client][0])
    order = []
    while sequence := queue.first([]):
        queue.start(sequence)
        order.append(sequence.client)
    assert "".join(order) == "abbbabaa" and len(queue) == 0


def test_a_new_client_begins_where_the_others_are() -> None:
    """Also behind a start of one that had waited long."""
    queue = WaitingQueue()
    first, second = ([queued(queue, client, 1) for _ in range(5)] for client in "ab")
    for one in (*first[:3], second[0]):
        queue.start(one)
    new = queued(queue, "c", 1)
    order = []
    for _ in range(3):
        order.append(queue.first([]))
        queue.start(order[-1])
    assert order == [second[1], second[2], new]


def queued(queue: WaitingQueue, client: str, weight: int) -> Sequence:
    sequence = Sequence("", [0], 1, SamplingParams(), Turn(client, weight))
    queue.add(sequence)
    return sequence


def test_no_client_yields_what_has_a_higher_priority() -> None:
    """Another client's share of the blocks is more than is free without a sequence of higher priority."""
    server = Server(10, 8, 100)
    sequences = [server.send("a", prompt, 3, priority=priority) for prompt, priority in ((12, -9), (12, -9), (2, 9))]
    server.step()
    assert all(s in server.scheduler.running for s in sequences) and len(server.scheduler.blocks.free) == 1
    waiting = server.send("b", 20, 3, priority=9)
    server.step()
    assert server.scheduler.preemptions == 0 and server.scheduler.waiting.first([]) is waiting


def test_nobody_yields_while_a_higher_priority_takes_all_tokens() -> None:
    server = Server(1000, 3, 10)
    for _ in range(2):
        server.send("a", 3, 100, priority=9)
    server.step()
    server.send("a", 60, 100, priority=-9)
    server.step()
    server.send("b", 3, 100, priority=9)
    server.step()
    assert server.scheduler.preemptions == 0
    for _ in range(10):
        server.step()
    assert server.scheduler.preemptions == 1, "then its client has less than its share"


def test_an_exchange_of_places_is_not_undone() -> None:
    """With all clients at their shares nobody is preempted."""
    server = Server(1000, 6, 100)
    for client in "aabbcc":
        server.send(client, 10, 50)
    for _ in range(3):
        server.step()
    for client in "abc":
        server.send(client, 10, 50)
    for _ in range(40):
        server.step()
    assert server.scheduler.preemptions == 0
    newcomer = server.send("d", 10, 5)
    server.step()
    assert server.scheduler.preemptions == 1 and newcomer.generated == 1
    assert sorted(Counter(s.client for s in server.scheduler.running).values()) == [1, 1, 2, 2]


@given(st.data(), st.integers(0, 60))
@settings(deadline=None)
def test_fair_shares(data: st.DataObject, total: int) -> None:
    wanted = data.draw(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 40), min_size=1))
    weights = {name: data.draw(st.integers(1, 9)) for name in wanted}
    shares = fair_shares(wanted, weights, total)
    assert sum(shares.values()) == min(total, sum(wanted.values()))
    assert all(0 <= shares[name] <= wanted[name] for name in wanted)
    assert shares[next(iter(wanted))] >= min(1, total), "the oldest goes on"
    for name in wanted:
        assert shares[name] >= min(wanted[name], total * weights[name] // sum(weights.values())) - len(wanted)
