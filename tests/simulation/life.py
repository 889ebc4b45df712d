"""One simulated life of a server: everything that happens in it follows from a seed.

The frontend's `EngineClient` and its queues, the messages in their encoding, and `Engine` with its scheduler, block manager and
drafts are the real ones. The model, grammars, sockets and the clock are not: time is counted in steps. Requests arrive, are read
slowly, stop, are aborted and refused; messages are late; ranks are lost, in the middle of a step or while they load, the frontend
notices it late, and what they had sent may come later still. The frontend stops for a while, or is lost alone, and the next one
attaches. The whole server is lost, too, and the next one finishes the requests of its journal, whose disk is slow and sometimes full. Some requests are
themselves what ends the ranks, at one of their tokens or in each decode step. After each step all invariants are checked.
"""

import contextlib
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from engine.core import Engine
from engine.limits import EngineLimits
from engine.protocol import (
    Abort,
    Attach,
    FromEngine,
    Outputs,
    Ready,
    Refused,
    SamplingParams,
    Starting,
    Submit,
    SubmitAll,
    TokenOutput,
    Turn,
    decode_from_engine,
    encode,
    joined,
)
from engine.sequence import Chunk
from engine.worker import apply, ready_now
from server.engine_client import EngineClient, OutputQueue
from server.errors import ApiError
from server.journal import Promise
from server.metrics import Metrics
from server.recovery import GOT_ON, REFUSED, SUSPECT
from server.started import Started
from tests.simulation.fakes import ADAPTERS, VOCAB, FakeGrammar, alone, fake_engine
from tests.simulation.journal import MemoryFile, SteppedJournal
from tests.support.blocks import check_blocks

CLIENTS = ("a", "b", "c", "d")
NEVER = 1 << 60
DECODES = -1  # in place of a position: each decode step
# in a row by a request that ends the ranks in each decode step, until it is refused: one after a sequence of it has ended, SUSPECT
# until it is suspect, one among more suspects than the ranks compute at once, and three alone. The first of these may come before
# a token has shown that the suspects tried before it have left.
MOST_ENDS = 1 + SUSPECT + 1 + 3
READY = Ready("", "", "", 1, "cpu", "", 1, VOCAB, 1, 1)
STEPS = 1500  # of a life, before its last requests end
OFTEN = 10  # times as often ranks are lost that have just started: their first messages are still on the way
PAUSE = 60  # most steps for which the frontend stops
MAX_QUEUE = 40  # sequences in the server, beyond which it refuses requests


@dataclass(frozen=True)
class World:
    """The settings of a life."""

    ranks: int
    n_blocks: int
    limits: EngineLimits
    look_ahead: bool
    arrivals: float  # requests a step
    aborts: float  # probability of each request and step
    restarts: float  # probability of each step
    loading: int  # most steps that ranks load
    frontends: float  # probability of each step that the frontend is lost alone
    pauses: float  # the same that it stops for a while
    crashes: float  # the same of the whole server
    commits: float  # probability that the journal is written in a step
    full: float  # probability that its disk is full then
    delay: int  # most steps that a message takes
    reading: float  # probability that a client reads what has arrived in a step
    weights: dict[str, int]
    priorities: tuple[int, ...]
    grammars: float  # share of the requests
    deadly: float  # the same of those that end the ranks which compute them

    @classmethod
    def random(cls, rng: random.Random) -> "World":
        size, context, sequences = rng.randint(1, 5), rng.randint(12, 60), rng.randint(1, 8)
        most = sequences * -(-context // size)
        limits = EngineLimits(
            max_model_len=context,
            max_num_seqs=sequences,
            max_batch_tokens=rng.randint(2, 30),
            block_size=size,
            draft_tokens=rng.choice([0, 0, 3, 8]),
        )
        return cls(
            ranks=rng.choice([1, 1, 1, 2, 3]),
            n_blocks=min(most, max(2, rng.choice([most, -(-context // size) + rng.randint(-2, 8), most // 3]))),
            limits=limits,
            look_ahead=rng.random() < 0.5,
            arrivals=rng.choice([0.05, 0.2, 0.4]),
            aborts=rng.choice([0.0, 0.002, 0.02]),
            restarts=rng.choice([0.0, 0.002, 0.01]),
            loading=rng.choice([1, 20, 100]),
            frontends=rng.choice([0.0, 0.0, 0.002]),
            pauses=rng.choice([0.0, 0.01]),
            crashes=rng.choice([0.0, 0.002, 0.01]),
            commits=rng.choice([1.0, 0.3]),
            full=rng.choice([0.0, 0.0, 0.3]),
            delay=rng.choice([0, 1, 6]),
            reading=rng.choice([1.0, 0.5, 0.05]),
            weights={client: rng.choice([1, 1, 2, 5]) for client in CLIENTS[: rng.randint(1, len(CLIENTS))]},
            priorities=rng.choice([(0,), (0,), (0, 1), (-3, 0, 7)]),
            grammars=rng.choice([0.0, 0.0, 0.2]),
            deadly=rng.choice([0.0, 0.0, 0.03]),
        )


class Link:
    """A one-way queue that keeps the order of its messages and delays each by up to `delay` steps."""

    def __init__(self, rng: random.Random, delay: int) -> None:
        self._rng, self._delay = rng, delay
        self._messages: deque[tuple[int, bytes]] = deque()  # (when it arrives, message)

    def put(self, now: int, data: bytes) -> None:
        due = now + self._rng.randint(0, self._delay)
        if self._messages:
            due = max(due, self._messages[-1][0])
        self._messages.append((due, data))

    def take(self, now: int) -> list[bytes]:
        taken = []
        while self._messages and self._messages[0][0] <= now:
            taken.append(self._messages.popleft()[1])
        return taken

    def clear(self) -> None:
        self._messages.clear()

    def __len__(self) -> int:
        return len(self._messages)


@dataclass
class Sent:
    """A sequence, and what the frontend got for it."""

    submit: Submit
    expected: tuple[list[int], str]
    work: int  # steps that it needs at most once it is the oldest
    deadline: int = 0  # the step of the engine by which it must have started
    overtakers: dict[str, int] = field(default_factory=dict)  # later sequences of other clients that may start before it
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    scheduled: bool = False


@dataclass
class Reader:
    """A client's HTTP request. `stops`: after how many tokens of a sequence a stop string is found."""

    queue: OutputQueue
    sequences: list[Sent]
    stops: dict[int, int]
    generate: Any  # the context manager of `queue`
    promise: Promise
    given: Any  # its context manager
    resumed: bool  # whether it has no client
    read: list[list[int]] = field(default_factory=list)

    @property
    def is_written(self) -> bool:
        """Whether the client may get something."""
        return self.promise._future is None or self.promise._future.done()

    @property
    def is_promised(self) -> bool:
        return self.is_written and (self.promise._future is None or self.promise._future.result())


class Deaths:
    """What ranks had when they ended, as the messages to and from them say: which requests may be refused for it."""

    def __init__(self) -> None:
        self._there: dict[str, set[str]] = {}  # the ids of the sequences that the present ranks have, by request
        self._tokens = Counter[str]()  # that they have sent, by sequence
        self._ends = Counter[str]()  # of ranks in a row that had the request, and hardly got on with it
        self._alone = Counter[str]()  # of these, the last ones in a row that had nothing else
        self._sends = list[str]()  # what the present ranks got
        self._lone = ""  # what has had no other beside it
        self.guilty = set[str]()

    def on_sent(self, message: Any) -> None:
        if isinstance(message, Abort):
            self._remove(message.request_id)
        for submit in [message] if isinstance(message, Submit) else message.submits() if isinstance(message, SubmitAll) else ():
            name = name_of(submit.request_id)
            if name not in self._there:
                self._lone = "" if self._there else name
                self._sends.append(name)
            self._there.setdefault(name, set()).add(submit.request_id)
            self._ends[name], self._alone[name] = max(0, self._ends[name]), max(0, self._alone[name])
            self._tokens[name] = 0

    def on_output(self, output: TokenOutput) -> None:
        name = name_of(output.request_id)
        self._tokens[output.request_id] += len(output.token_ids)
        self._tokens[name] += len(output.token_ids)
        if output.finish_reason or self._tokens[output.request_id] >= GOT_ON:
            self._ends[name], self._alone[name] = -1, -1  # also for the next end
        if output.finish_reason:
            self._remove(output.request_id)

    def on_refused(self, message: Refused) -> None:
        self._remove(message.request_id)

    def _remove(self, request_id: str) -> None:
        left = self._there.get(name_of(request_id), set())
        left.discard(request_id)
        if not left:
            self._there.pop(name_of(request_id), None)

    def on_end(self) -> None:
        for name in self._there:
            self._ends[name] += 1
            was_alone = name == self._lone and (len(self._sends) == 1 or self._tokens[name])
            self._alone[name] = self._alone[name] + 1 if was_alone else 0
            if self._ends[name] >= REFUSED and self._alone[name] >= (2 if self._tokens[name] else 1):
                self.guilty.add(name)
        for noted in (self._there, self._tokens, self._sends):
            noted.clear()
        self._lone = ""


class Frontend(EngineClient):
    """The real client without sockets and process ids. It also keeps the tokens of unfinished sequences. attach: whether there are
    ranks already."""

    def __init__(self, life: "Life", attach: bool = False) -> None:
        super().__init__("", "", Metrics("simulated"), before=Started(1.0) if attach else None)
        self._life = life
        self.on_ready = life.on_first_ready
        self.recovery._descriptor_of = lambda pid: -1 if pid == life.pid else None  # type: ignore[method-assign]
        self._end_of_ranks = self.recovery.on_end
        self.recovery.on_end = self.on_end  # type: ignore[method-assign]
        if attach:
            self._send(Attach())

    def on_end(self) -> None:
        if self.recovery.state == "serving":
            self._life.on_noticed()
        self._end_of_ranks()

    def _send(self, message: Any) -> None:
        self._life.deaths.on_sent(message)
        self._life.to_engine.put(self._life.now, encode(message))

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:  # one after the other: an earlier one may send the request of a later one again
            if output.request_id in self._active:
                self._life.deaths.on_output(output)
                self._life.on_output(msgspec.structs.replace(output, request_id=output.request_id.partition("+")[0]))
            super()._deliver([output])


class Life:
    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.world = World.random(self.rng)
        self.now = self.engine_steps = 0
        self.to_engine, self.from_engine = (Link(self.rng, self.world.delay) for _ in range(2))
        self.old: list[Link] = []  # what ended ranks have sent
        self.pid = 1  # of rank 0
        self.noticed_at = 0  # when the frontend can see that ranks have ended
        self.starts_at = self.ready_at = 0  # when new ones have started, and are ready
        self.noticed = 0  # the newest rank 0 whose end the frontend has seen
        self.goes_on_at = 0  # until when the frontend is stopped
        self.deaths = Deaths()
        self.frontend = Frontend(self)
        self.sent: dict[str, Sent] = {}  # unfinished sequences
        self.refused: dict[str, str] = {}  # codes of the ranks' refusals, by request
        self.deadly: dict[str, int] = {}  # requests that end the ranks, and at which of their places, or DECODES
        self.kills = Counter[str]()  # how often those that do so in decode steps have, and nothing else has
        self.doomed = set[str]()  # the deadly requests of this step
        self.readers: list[Reader] = []
        self.file = MemoryFile()
        self.journal = SteppedJournal(self.file)
        self.results: dict[int, bytes] = {}  # that requests must have, by their numbers in the journal
        self.answered = set[int]()  # those that were promised and have a result
        self.orphans: list[int] = []  # numbers of requests that go on without clients
        self.journal.on_orphan = lambda number, owner: self.orphans.append(number)
        self.lost: list[Reader] = []  # kept, because their context managers would end requests of a server that is no more
        self.texts: deque[list[int]] = deque(maxlen=20)
        self.counts = Counter[str]()
        self.steps: list[list[Any]] = [[] for _ in range(self.world.ranks)]  # what each rank computes in this step
        self.engines: list[Engine] = []  # none while the ranks load

    def _start_engines(self) -> None:
        self.engines = [
            fake_engine(self.world.limits, self.world.n_blocks, self.world.look_ahead, lambda: self.now, self._checker(rank))
            for rank in range(self.world.ranks)
        ]

    def _end_engines(self) -> None:
        for engine in self.engines[:1]:
            scheduler, total = engine.scheduler, engine.speculation.total["ngram"]
            self.counts += Counter(preempted=scheduler.preemptions, prefix_hits=scheduler.prefix_hits)
            self.counts += Counter(drafted=total.tokens, right_drafts=total.accepted)
        self.engines = []

    # --- what happens in a step ---------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Live for `steps` steps, and then until all requests have ended."""
        for _ in range(steps):
            if self.rng.random() < self.world.arrivals and self.now >= self.goes_on_at:
                for _ in range(self.rng.choice([1, 1, 1, 2, 8])):
                    self._arrive()
            if self.rng.random() < self.world.frontends:
                self._lose_frontend()
            if self.rng.random() < self.world.crashes:
                self._crash()
            self._step(may_end=True)
        idle = 0
        while self.readers or self.orphans or not self.engines or any(map(len, (self.to_engine, self.from_engine, *self.old))):
            self._step()
            idle = 0 if not self.engines or self.engines[0].has_work() or self.engines[0].compiling else idle + 1
            assert idle < 50 / self.world.reading + 1000, "requests that never end"
        self._step()
        for engine in self.engines:
            assert not engine.has_work() and not engine.compiling and not engine.scheduler.by_id
            assert engine.scheduler.blocks.used == 0, "blocks are left"
        assert not self.sent and not self.frontend.active
        self.file.full = False
        self.journal.step()
        assert self.file.begin()[0] == [], "requests in the journal that nobody finishes"
        for number, result in self.results.items():
            row = self.file.read(number)
            assert row is not None or number not in self.answered, f"result {number} is lost"
            assert row is None or row.status != 200 or row.data == result, f"result {number}"
        self._end_engines()
        self.counts["steps"] += self.now

    def _step(self, may_end: bool = False) -> None:
        self.now += 1
        if not self.engines:
            self._load()
        else:
            self._compute()
        has_just_started = 0 <= self.now - self.starts_at <= self.world.delay
        chance = self.world.restarts * (OFTEN if has_just_started else 1)
        if (may_end and self.rng.random() < chance) or self.doomed:
            self._lose_ranks()
        if may_end and self.rng.random() < self.world.pauses:
            self.goes_on_at = self.now + self.rng.randint(1, PAUSE)
        if self.now >= self.goes_on_at:
            self._run_frontend()
        self._check()

    def _run_frontend(self) -> None:
        work: list[Any] = [partial(self._receive_all, link) for link in (*self.old, self.from_engine)]
        work.insert(self.rng.randint(0, len(work)), self._notice)
        for one in work:
            one()
        self.old = [link for link in self.old if len(link)]
        if self.rng.random() < self.world.commits:
            self.file.full = self.rng.random() < self.world.full
            self.journal.step()
            orphans = list(self.orphans) if self.frontend.ready else []
            del self.orphans[: len(orphans)]
            for number in orphans:
                self._resume(number)
        self._read()

    def _receive_all(self, link: Link) -> None:
        for data in link.take(self.now):
            self._receive(data)

    def _notice(self) -> None:
        """The frontend sees the end of the ranks that it watches."""
        watched = self.frontend.recovery.pid
        if self.now >= self.noticed_at and self.noticed < watched < self.pid:
            self.noticed = watched
            self.frontend.on_end()

    def _load(self) -> None:
        """What happens to the ranks in a step in which they load."""
        if self.now == self.starts_at:
            self.from_engine.put(self.now, encode(Starting(self.pid)))
        if self.now >= self.ready_at:
            self.to_engine.take(self.now)  # ranks drop what came before they were ready
            self._start_engines()
            self.from_engine.put(self.now, encode(ready_now(self.engines[0], self._ready())))
            for sent in self.sent.values():
                sent.scheduled, sent.deadline = False, max(sent.deadline, self._all_done())

    def _ready(self) -> Ready:
        return msgspec.structs.replace(READY, pid=self.pid, max_num_seqs=self.world.limits.max_num_seqs)

    def _compute(self) -> None:
        events = self.to_engine.take(self.now)
        answers = []
        for steps in self.steps:
            steps.clear()
        for engine in self.engines:
            told: list[FromEngine] = []
            assert apply(engine, events, told.append, self._ready())
            engine.admit()
            if engine.has_work():
                told.append(Outputs(engine.step()))
            told += engine.refused
            engine.refused.clear()
            answers.append(told)
        self.engine_steps += bool(self.steps[0])
        self._check_ranks(answers)
        for message in [] if self.doomed else answers[0]:
            if not isinstance(message, Outputs) or message.outputs:
                self.from_engine.put(self.now, encode(message))

    def _receive(self, data: bytes) -> None:
        message = decode_from_engine(data)
        if isinstance(message, Refused) and message.request_id in self.frontend._active:
            self.deaths.on_refused(message)
            self._on_refused(self.sent[message.request_id.partition("+")[0]], message)
        self.frontend._dispatch(message)

    def _lose_ranks(self) -> None:
        """All ranks are lost. Of their messages on the way to the frontend, the first have left, of the last step perhaps one of two.
        They may come after those of the next ranks."""
        self.counts["restarts" if self.engines else "restarts while loading"] += 1
        if not self.doomed:
            self.kills.clear()  # one that accuses others, too
        for name in self.doomed:
            self.kills[name] += self.deadly[name] == DECODES
            assert self.kills[name] <= MOST_ENDS, f"{name} ends the ranks again and again"
        late, left = Link(self.rng, self.world.delay + self.world.loading), self.from_engine.take(NEVER)
        for data in left[: self.rng.randint(0, len(left))]:
            late.put(self.now, data)
        self.old.append(late)
        self._end_engines()
        self._start_ranks()

    def _start_ranks(self) -> None:
        rng, delay = self.rng, self.world.delay
        self.from_engine, self.doomed = Link(rng, delay), set()
        self.pid += 1
        self.noticed_at, self.starts_at = self.now + rng.randint(1, 3), self.now + rng.randint(1, 4)
        # what was sent to the ranks before comes while they load
        self.ready_at = self.starts_at + delay + rng.randint(1, self.world.loading)

    def on_noticed(self) -> None:
        """The frontend learns that ranks have ended which served it."""
        self.deaths.on_end()
        self._forget(self.deaths.guilty)

    def on_first_ready(self, ready: Ready) -> None:
        """A new frontend may go on with what the one before has left in the journal."""
        for number, _ in self.journal.unfinished:
            self._resume(number)

    def _lose_frontend(self) -> None:
        """The frontend is lost, and its clients with it. The ranks drop all requests once the next one attaches."""
        self.counts["frontends"] += 1
        self._leave(attach=True)

    def _crash(self) -> None:
        """All processes of the server are lost. The next one goes on with what the journal has."""
        self.counts["crashes"] += 1
        self.to_engine, self.old = Link(self.rng, self.world.delay), []
        self._end_engines()
        self._start_ranks()
        self._leave(attach=False)

    def _leave(self, attach: bool) -> None:
        """A new frontend takes the place of one that is lost, with all that was not yet written."""
        promised = {r.promise._number for r in self.readers if r.is_promised}
        self.lost += self.readers
        self.readers, self.sent, self.orphans, self.file.full = [], {}, [], False
        self.deaths, self.journal = Deaths(), SteppedJournal(self.file)
        self.frontend, self.goes_on_at = Frontend(self, attach), 0
        self.journal.on_orphan = lambda number, owner: self.orphans.append(number)
        assert promised <= {number for number, _ in self.journal.unfinished}, "an accepted request is lost"

    def _resume(self, number: int) -> None:
        row = self.file.read(number)
        if row is not None and not row.status:  # else it was never written
            self.counts["resumed"] += 1
            written = msgspec.msgpack.decode(row.data, type=SubmitAll).submits()
            names = [f"again{self.counts['resumed']}-{i}" for i in range(len(written))]
            submits = [msgspec.structs.replace(s, request_id=name) for s, name in zip(written, names, strict=True)]
            self._begin(submits, Promise(self.journal, number), {}, resumed=True)

    # --- clients ------------------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        rng, world = self.rng, self.world
        if self.frontend.active > MAX_QUEUE or not self.frontend.ready:
            return
        prompts = [self._prompt() for _ in range(rng.choice([1, 1, 1, 1, 2, 3]))]
        choices, params = rng.choice([1, 1, 1, 2]), self._params()
        if rng.random() < world.deadly:
            context = world.limits.max_model_len or 0
            place = self.deadly[str(self.counts["requests"])] = rng.choice([rng.randrange(context), DECODES])
            if place == DECODES:
                params = msgspec.structs.replace(params, max_tokens=max(1, context // 2))
        client = rng.choice(list(world.weights))
        turn = Turn(client, world.weights[client], rng.choice(world.priorities))
        submits, adapter = [], rng.choice(["", *ADAPTERS])
        for prompt in prompts:
            for i in range(choices):
                name = f"{self.counts['requests']}-{len(submits)}"
                fields = {f: getattr(params, f) for f in params.__struct_fields__} | {"seed": params.seed + i}
                submits.append(Submit(name, prompt, SamplingParams(**fields), turn=turn, adapter=adapter))
        self.counts["requests"] += 1
        stops = {i: rng.randint(1, 20) for i in range(len(submits)) if rng.random() < 0.1}
        promise = self.journal.promise("owner", "answer", "request", encode(joined(submits)), rng.random() < 0.2)
        self.results[promise._number] = encode_tokens([alone(submit)[0] for submit in submits])
        self._begin(submits, promise, stops, resumed=False)

    def _begin(self, submits: list[Submit], promise: Promise, stops: dict[int, int], resumed: bool) -> None:
        for submit in submits:
            self._add(submit)
        sequences = [self.sent[s.request_id] for s in submits]
        generate, given = self.frontend.generate(submits), promise.given()
        queue = generate.__enter__()
        given.__enter__()
        self.readers.append(Reader(queue, sequences, stops, generate, promise, given, resumed, [[] for _ in submits]))

    def _prompt(self) -> list[int]:
        rng = self.rng
        context = self.world.limits.max_model_len or 0
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, max(1, context // 2)))]
        if self.texts and rng.random() < 0.5:
            shared = rng.choice(self.texts)
            prompt = shared[: rng.randint(1, min(len(shared), context - 2))] + prompt[: rng.randint(0, 8)]
        if rng.random() < 0.01:
            prompt[-1] = VOCAB  # refused
        return prompt

    def _params(self) -> SamplingParams:
        rng = self.rng
        grammar = None
        if rng.random() < self.world.grammars:
            grammar = f"{rng.randint(0, 9)} {rng.choice([0, 5, 12])} {rng.choice([-1, -1, 7])}"
        return SamplingParams(
            max_tokens=rng.choice([1, 2, rng.randint(1, max(1, (self.world.limits.max_model_len or 0) // 2))]),
            min_tokens=rng.choice([0, 0, 3]),
            seed=rng.randrange(4),
            cache_salt=rng.choice([None, None, "a"]),
            stop_token_ids=rng.sample(range(VOCAB), rng.choice([0, 0, 1])),
            prompt_logprobs=rng.choice([None] * 7 + [0]),
            grammar=grammar,
            late_grammar=grammar is not None and rng.random() < 0.5,
        )

    def _read(self) -> None:
        for reader in list(self.readers):
            unread = bool(reader.queue._arrived or reader.queue._error) and reader.is_written
            if not reader.resumed and self.rng.random() < self.world.aborts:
                self._close(reader, "abort", GeneratorExit())
            elif unread and self.rng.random() < self.world.reading:
                try:
                    self._take(reader, completed(reader.queue.next()))
                except ApiError as e:
                    self._check_refusal(reader, e)
                    self._close(reader, e.code or "", e)
                    if reader.resumed and e.status_code == 429:
                        self.orphans.append(reader.promise._number)

    def _take(self, reader: Reader, arrived: list[tuple[int, TokenOutput]]) -> None:
        """Read outputs, as `Run.next` does."""
        for index, output in arrived:
            read, sent = reader.read[index], reader.sequences[index]
            read += output.token_ids
            assert read == sent.expected[0][: len(read)]
            if index in reader.stops and len(read) >= reader.stops[index]:
                reader.queue.stop(index, reader.stops[index])
                self.sent.pop(sent.submit.request_id, None)
                sent.finish_reason = sent.finish_reason or "stopped"
        if all(s.finish_reason for s in reader.sequences) and not reader.queue._arrived:
            for read, sent in zip(reader.read, reader.sequences, strict=True):
                assert read == sent.expected[0] or sent.finish_reason == "stopped"
                self.texts.append([*sent.submit.prompt_ids, *read])
            # a client's stop strings are not part of what is submitted
            reader.promise.finish(206 if reader.stops else 200, encode_tokens(reader.read))
            if reader.is_promised:
                self.answered.add(reader.promise._number)
            self._close(reader, "finished")

    def _close(self, reader: Reader, why: str, error: BaseException | None = None) -> None:
        self.counts[why] += 1
        with contextlib.suppress(GeneratorExit, ApiError):
            reader.given.__exit__(error and type(error), error, None)
        reader.generate.__exit__(None, None, None)
        for sent in reader.sequences:
            self.sent.pop(sent.submit.request_id, None)
        self.readers.remove(reader)

    # --- invariants -----------------------------------------------------------------------------------------------------------

    def on_output(self, output: TokenOutput) -> None:
        """Check what the frontend receives: the next tokens of the sequence, and its end where it must be."""
        sent = self.sent[output.request_id]
        expected, reason = sent.expected
        done = len(sent.tokens)
        sent.tokens += output.token_ids
        assert output.token_ids == expected[done : len(sent.tokens)], (
            f"{output.request_id}: {output.token_ids} after {done} tokens"
        )
        assert (output.finish_reason is not None) == (len(sent.tokens) == len(expected) and reason != "error")
        if output.finish_reason:
            assert output.finish_reason == reason
            sent.finish_reason = reason
            self.kills[name_of(output.request_id)] = 0
            del self.sent[output.request_id]

    def _on_refused(self, sent: Sent, message: Refused) -> None:
        """Check that the request had to be refused, and with it all its sequences."""
        limits, name = self.world.limits, name_of(sent.submit.request_id)
        together = self._forget({name})
        self.refused[name] = message.code
        longest = max(len(s.submit.prompt_ids) + s.submit.params.max_tokens for s in together)
        too_long = longest > min(limits.max_model_len or 0, self.world.n_blocks * limits.block_size)
        if message.code == "invalid_schema":
            assert sent.expected[1] == "error" or not FakeGrammar.of(sent.submit.params.grammar or "").ends
        elif message.code == "refused":
            assert too_long or any(VOCAB in s.submit.prompt_ids for s in together), message.message

    def _forget(self, requests: set[str]) -> list[Sent]:
        """The sequences of requests that are refused."""
        return [self.sent.pop(request_id) for request_id in list(self.sent) if name_of(request_id) in requests]

    def _check_refusal(self, reader: Reader, error: ApiError) -> None:
        """Check that the ranks refused the request, or had it alone when they ended once too often."""
        name = name_of(reader.sequences[0].submit.request_id)
        if error.code == "poisoned":
            assert error.status_code == 500 and name in self.deaths.guilty, (
                f"{name} is refused, but may not be what ends the ranks"
            )
            assert name in self.deadly or self.world.restarts, f"{name} is refused, but nothing else ends the ranks"
            self.counts["poisoned and innocent"] += name not in self.deadly
        else:
            assert error.code == self.refused.get(name), f"{name} is refused: {error.message}"

    def _checker(self, rank: int) -> Any:
        limits = self.world.limits

        def check(chunks: list[Chunk]) -> None:
            scheduler = self.engines[rank].scheduler
            assert chunks or not scheduler.has_work(), "there is work, but none was scheduled"
            assert sum(c.count for c in chunks) <= limits.max_batch_tokens
            assert len(chunks) <= limits.max_num_seqs
            assert sum(len(c.draft) for c in chunks) <= limits.drafted
            self.steps[rank].append([(c.sequence.request_id, c.start, c.count, *c.sequence.blocks) for c in chunks])
            assert len({c[0] for c in self.steps[rank][-1]}) == len(chunks), "a sequence is twice in a step"
            for chunk in chunks:
                sequence = chunk.sequence
                assert chunk.count >= 1 and sequence.finish_reason is None
                assert sequence.params.prompt_logprobs is None or sequence.cached_tokens == 0
                if rank == 0 and (sent := self.sent.get(sequence.request_id.partition("+")[0])):
                    sent.scheduled = True
                place = self.deadly.get(name := name_of(sequence.request_id), NEVER)
                is_decode = chunk.start >= sequence.prompt_length and chunk.first_drawn == chunk.start + 1
                if is_decode if place == DECODES else chunk.stop > place:
                    self.doomed.add(name)  # no output of this step leaves

        return check

    def _check_ranks(self, answers: list[list[FromEngine]]) -> None:
        for steps, told in zip(self.steps[1:], answers[1:], strict=True):
            assert steps == self.steps[0], "ranks compute different steps"
            assert list(map(plain, told)) == list(map(plain, answers[0])), "ranks have different outputs"

    def _check(self) -> None:
        names = {name_of(request_id) for request_id in self.frontend._active}
        assert not self.deaths.guilty & names, "a request that ends the ranks is sent again"
        if not self.engines:
            return
        scheduler = self.engines[0].scheduler
        check_blocks(scheduler.blocks, [s.blocks for s in scheduler.running])
        waiting = list(scheduler.waiting)
        assert len(waiting) == len(scheduler.waiting)
        assert all(not s.blocks and not s.computed for s in waiting)
        assert {s.request_id for s in [*scheduler.running, *waiting]} == set(scheduler.by_id)
        assert len(scheduler.by_id) == len(scheduler.running) + len(waiting)
        for sent in self.sent.values():
            assert sent.scheduled or self.engine_steps <= sent.deadline, f"{sent.submit.request_id} starves"
        is_idle = self.now >= self.goes_on_at and not (
            len(self.to_engine) or len(self.from_engine) or scheduler.has_work() or self.engines[0].compiling
        )
        if self.frontend.recovery.state == "serving" and not len(self.to_engine):
            assert scheduler.by_id.keys() <= self.frontend._active.keys(), "the ranks compute what nobody waits for"
        if is_idle:
            assert self.frontend.recovery.state == "serving", "the frontend waits for ranks that are ready"
            assert not self.sent, f"nobody has {', '.join(self.sent)}"

    # --- nobody starves ---------------------------------------------------------------------------------------------------------

    def _add(self, submit: Submit) -> None:
        """Note a new sequence, and the step by which it must have started: those that are here may have to end before, those of a
        lower priority number that arrive later, too, and of other clients' later ones about as many as the client has itself."""
        new = Sent(submit, alone(submit), self._work(submit))
        turn, work = submit.turn, new.work
        for sent in self.sent.values():
            if sent.scheduled:
                continue
            other = sent.submit.turn
            if turn.priority < other.priority:
                sent.deadline += work
            elif turn.client != other.client and turn.priority == other.priority and sent.overtakers[turn.client] > 0:
                sent.overtakers[turn.client] -= 1
                sent.deadline += work
        self.sent[submit.request_id] = new
        own = sum(s.submit.turn.client == turn.client and s.submit.turn.priority <= turn.priority for s in self.sent.values())
        new.overtakers = {c: own * -(-w // turn.weight) + w for c, w in self.world.weights.items() if c != turn.client}
        new.deadline = self._all_done() if submit.params.grammar is None else NEVER  # it waits until the grammar is compiled

    def _all_done(self) -> int:
        """The step by which all sequences would have ended if no other arrived."""
        return self.engine_steps + 20 + self.world.delay + sum([sent.work for sent in self.sent.values()])

    def _work(self, submit: Submit) -> int:
        """The most steps that a sequence needs once it is the oldest, if all its tokens are computed again."""
        weights, limits = self.world.weights, self.world.limits
        share = max(1, limits.max_batch_tokens * submit.turn.weight // sum(weights.values()))
        return -(-(len(submit.prompt_ids) + submit.params.max_tokens) // share) + submit.params.max_tokens + 1


def name_of(request_id: str) -> str:
    """The request to which a sequence belongs."""
    return request_id.partition("-")[0]


def encode_tokens(texts: list[list[int]]) -> bytes:
    return msgspec.msgpack.encode(texts)


def plain(message: FromEngine) -> Any:
    """A message without the times that differ between ranks."""
    if isinstance(message, Outputs):
        return [(o.request_id, o.token_ids, o.finish_reason, o.drafted, o.accepted, o.cached_tokens) for o in message.outputs]
    return message


def completed(work: Any) -> Any:
    """The result of a coroutine that waits for nothing but other tasks."""
    try:
        while True:
            work.send(None)
    except StopIteration as e:
        return e.value


def live(seed: int, steps: int = STEPS) -> Counter[str]:
    """What happened in a life, by number. Raises AssertionError with the command that repeats it."""
    life = Life(seed)
    try:
        life.run(steps)
    except Exception as e:
        where = f"step {life.now} of a life with {life.world}"
        raise AssertionError(f"{type(e).__name__}: {e}; to repeat it: make simulate SEED={seed} STEPS=1\n{where}") from e
    return life.counts
