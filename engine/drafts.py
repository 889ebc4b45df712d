"""Drafts: guesses of a sequence's next tokens, which one step verifies together (speculative decoding).

A drafted token is right if it is the one that the model draws there, greedy or sampled. A draw depends on the tokens before it, the
seed and the position only, so an answer has the same tokens with drafts as without, as far as the logits have the same bits.

A draft has one of two sources. One is text: what followed the longest suffix of prompt and answer that occurred before, in the
prompt, in the answer, or in a text that the request predicts (`SamplingParams.prediction`); if there is none, perhaps what followed
the last tokens in prompts of other requests (`prompt_index.py`). The other is a model
(`draft_models.py`), if the engine has one. Each sequence takes the source that promises to save more time. Drafts are a function of
tokens that all ranks know, and of times that were measured once for all ranks, so ranks agree on them without a message.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from engine.prompt_index import PromptIndex
from engine.protocol import Drafted
from engine.sequence import Chunk, Sequence
from engine.suffix_automaton import SuffixAutomaton

if TYPE_CHECKING:
    import torch

    from engine.runner import InFlightStep, Runner

MOST_INDEXED = 1 << 16  # tokens of a request and its prediction; a longer one gets no more drafts from text
MOST_INDEXED_TOGETHER = 1 << 19  # tokens of all running requests; an automaton takes up to 0.7 KB for each, on each rank
MOST_WITH_GRAMMAR = 2  # drafted tokens: each takes a mask, which the host computes
INDEXED_A_STEP = 512  # tokens of all requests: a long prompt must not hold up a step; about 1 ms
LEAST_MATCH = 2, 3  # tokens, if the sequence's last draft was right and otherwise; what follows fewer is hardly ever the same
TAIL = 8  # tokens of the prompt that are put before a prediction, so that the first tokens of the answer find it
END = -1  # stands behind a prediction; no token's id
LEAST_PRICE = 0.1  # tokens; a drafted row also takes time on the host
LEAST_GAIN = 0.05  # tokens of each sequence of a step with drafts: the work of the host that `Costs` does not contain
FIRST_RIGHT = 2.0  # accepted tokens of a draft, before there is one
WEIGHT = 0.25  # of the newest draft in a request's averages, and of the newest request in those of requests
WEIGHT_OF_ALL = 0.02  # of the newest draft in the averages of all requests
SHARE = 0.005  # of a request's tokens, and of the time of all steps, that may be lost to find out whether drafts pay
GRANT = 8  # steps of one row: what a model's drafts may lose besides, before they have brought anything
TEXT_GRANT = 2  # the same for drafts from text, whose prompts cost little
PROMPTS = "prompts"  # of other requests
NGRAM, PREDICTION = "ngram", "prediction"
TEXTS = NGRAM, PREDICTION, PROMPTS  # sources of drafts from text


class Costs:
    """How long it takes to compute steps and drafts, in seconds, by rows or by chains. More of them never take more time than
    measured for a larger number: if so, the clock was disturbed."""

    def __init__(
        self,
        steps: Mapping[int, float],
        links: Mapping[int, float] | None = None,
        prompts: Mapping[int, float] | None = None,
        host_seconds: float = 0.0,
        indexing: float = 0.0,
        apart: float = 0.0,
    ) -> None:
        """Each of at least two numbers, which are in ascending order. Others are on the lines through these points.

        steps: by rows. links: a token of a model's chains, by their number. prompts: what the model takes to see a prompt, by its
        tokens. None if no model drafts. host_seconds: what a step takes longer if it is not launched while the one before runs.
        indexing: a token of a text. apart: what a step takes longer if only some of its sequences have drafts."""
        self._steps, self._links, self._prompts = map(_points, (steps, links, prompts))
        self.host_seconds, self.indexing, self.apart = host_seconds, indexing, apart

    def seconds(self, rows: int) -> float:
        return _on_lines(self._steps, rows)

    def prompt(self, tokens: int) -> float:
        most, seconds = self._prompts[-1]  # the last two may be equal, and a prompt is far longer than they
        return max(_on_lines(self._prompts, tokens), seconds * tokens / most if tokens > most else 0.0)

    def token(self, rows: int) -> float:
        """What a token is worth in a step of so many rows: the time in which one is computed without drafts. It is the unit of the
        prices."""
        return self.seconds(rows) / rows

    def price(self, rows: int) -> float:
        """How many tokens a drafted row must bring in a step of so many other rows: the time that it adds, if each of the others
        has two drafted ones."""
        return max(LEAST_PRICE, (self.seconds(3 * rows) / self.seconds(rows) - 1) / 2)

    def link_price(self, rows: int, chains: int) -> float:
        """How many tokens another link of so many chains must bring in a step of so many other rows."""
        return _on_lines(self._links, chains) / self.token(rows)

    def fixed_price(self, rows: int) -> float:
        """How many tokens drafts must bring to a step of so many other rows, because it is not launched ahead, mostly not all of its
        sequences have one, and for the host's work."""
        seconds = self.host_seconds + (self.apart if rows > 1 else 0.0)
        return seconds / self.token(rows) + LEAST_GAIN * rows


def _points(seconds: Mapping[int, float] | None) -> list[tuple[int, float]]:
    """Measured points, of which none is above a later one."""
    found = seconds or {1: 0.0, 2: 0.0}
    return list(zip(found, list(accumulate([*found.values()][::-1], min))[::-1], strict=True))


def _on_lines(points: list[tuple[int, float]], x: int) -> float:
    last = len(points) - 1
    i = next((i for i in range(1, last) if x <= points[i][0]), last)
    (first, before), (second, after) = points[i - 1], points[i]
    return before + (after - before) * (x - first) / (second - first)


FREE = Costs({1: 1.0, 2: 1.0})  # of steps, before they are measured


@dataclass(frozen=True, slots=True)
class Promise:
    """How many tokens a draft may have, and how many it will probably bring beyond those that its own time costs."""

    count: int
    gain: float
    price: float = 0.0  # tokens that each of its tokens costs
    fixed: float = 0.0  # tokens that it costs besides

    def charged(self, cost: float) -> "Promise":
        """The same if it also costs so many tokens besides, NOTHING if it does not bring them."""
        return replace(self, gain=self.gain - cost, fixed=self.fixed + cost) if self.gain > cost else NOTHING


NOTHING = Promise(0, 0.0)


@dataclass
class Record:
    """What became of the last drafts from one source: averages of the tokens that saved a step, and of whether one did not, because
    it was wrong or ended the answer."""

    right: float = FIRST_RIGHT
    wrong: float = 1.0
    lost: float = 0.0  # tokens that drafts have cost a request and not brought back

    @property
    def rate(self) -> float:
        """The chance that a token saves a step if its predecessors do."""
        return self.right / (self.right + self.wrong)

    def promise(self, price: float, most: int) -> Promise:
        """What pays at this price of a token, up to `most` tokens."""
        count, rate = 0, self.rate
        while count < most and rate ** (count + 1) >= price:
            count += 1
        return self.cut(count, price)

    def cut(self, count: int, price: float) -> Promise:
        """What `count` tokens promise. A token saves a step if all before it do, and it does, too."""
        return Promise(count, sum([self.rate**i - price for i in range(1, count + 1)]), price)

    def trial(self, price: float, fixed: float, generated: int) -> Promise:
        """A draft of one token where drafts do not pay, to find out whether they do again. There is one now and then: after so many
        generated tokens, no more than a SHARE of them may be lost."""
        if price < 1 and self.lost + price + fixed - self.rate <= SHARE * generated:
            return Promise(1, 0.0, price, fixed)
        return NOTHING

    def learn(self, saved: int, drafted: int, cost: float = 0.0, weight: float = WEIGHT) -> None:
        """Note that `saved` tokens of a draft saved a step each, which has cost the time of so many."""
        self.right += weight * (saved - self.right)
        self.wrong += weight * ((saved < drafted) - self.wrong)
        self.lost = max(0.0, self.lost + cost - saved)


NO_HOPE = Record(right=0.0)  # makes trials alone


class Drafter:
    """The drafts of one sequence, from text. Their length adapts to how many of their tokens were right lately, and to what a row
    costs."""

    def __init__(
        self,
        sequence: Sequence,
        ceiling: int,
        records: Mapping[str, Record] | None = None,
        others: PromptIndex | None = None,
    ) -> None:
        """records: of each source that may draft, what it begins with. others: the prompts of all requests."""
        self.sequence = sequence
        masked = sequence.params.grammar is not None and not sequence.params.late_grammar
        self.ceiling = min(ceiling, MOST_WITH_GRAMMAR) if masked else ceiling
        prediction = (sequence.params.prediction or [])[: MOST_INDEXED // 2]
        tail = sequence.tokens[: sequence.prompt_length][-TAIL:]
        self._head = [*tail, *prediction, END] if prediction else []  # comes before the sequence's tokens
        self._text = SuffixAutomaton()
        begun = dict.fromkeys(TEXTS, Record()) if records is None else records
        self.records, self._others = {source: replace(record) for source, record in begun.items()}, others
        self.chains: Record | None = None  # what became of a model's drafts; None before it was decided whether it makes some
        self._least_match = LEAST_MATCH[1]
        self.last: str | None = None  # source of the last draft

    def follow(self, most: int) -> int:
        """Index at most `most` of the tokens that are not indexed yet. Returns how many."""
        done = self.indexed
        stop = min(done + most, MOST_INDEXED)
        new = self._head[done:stop]
        first = done + len(new) - len(self._head)
        new += self.sequence.tokens[first : max(first, stop - len(self._head))]
        for token in new:
            self._text.append(token)
        return len(new)

    @property
    def indexed(self) -> int:
        """How many tokens the automaton holds."""
        return len(self._text.tokens)

    @property
    def missing(self) -> int:
        """How many tokens are not indexed."""
        return len(self._head) + len(self.sequence.tokens) - self.indexed

    @property
    def may_pay(self) -> bool:
        """Whether there can be a draft or a trial, at the least price. If not, nothing needs to be indexed yet."""
        least = LEAST_PRICE - SHARE * self.sequence.generated
        return any(record.rate >= least for record in self.records.values())

    @property
    def source(self) -> str:
        if not self._finds_own:
            return PROMPTS
        return PREDICTION if self._text.match[1] < len(self._head) else NGRAM

    @property
    def _finds_own(self) -> bool:
        """Whether the next token will probably find a draft in the request's own text. The newest one may still be on the device."""
        return self.missing <= 1 and self._text.match[0] >= self._least_match

    @property
    def finds(self) -> bool:
        """Whether the next token will probably find a draft."""
        return self._finds_own or (self._others is not None and self._others.finds(self.sequence.tokens))

    @property
    def _record(self) -> Record | None:
        """Of the source in which the next token will probably find a draft."""
        return self.records[self.source] if self.finds else None

    def promise(self, price: float) -> Promise:
        """What pays at this price, if the next token finds a draft at all."""
        return record.promise(price, self.ceiling) if (record := self._record) else NOTHING

    def trial(self, price: float, fixed: float) -> Promise:
        """The same where drafts do not pay."""
        return record.trial(price, fixed, self.sequence.generated) if (record := self._record) else NOTHING

    def draft(self, count: int) -> list[int]:
        """The next tokens, perhaps fewer than `count`. All tokens of the sequence must be known."""
        if not self._finds_own and self._others is not None:
            return self._others.after(self.sequence.tokens, count)
        found = [] if self.missing or not count else self._text.after_match(count)
        return found[: found.index(END)] if END in found else found

    def learn(self, source: str, accepted: int, drafted: int, cost: float = 0.0) -> None:
        """How many tokens of the last draft were right, how many it had, and what it has cost, in tokens."""
        record = self.records[source] if source in TEXTS else self.chains
        assert record is not None
        if source in (NGRAM, PREDICTION):
            self._least_match = LEAST_MATCH[0 if accepted else 1]
        record.learn(accepted, drafted, cost)
        self.last = source


class Chains(Protocol):
    """Drafts of a model (`draft_models.py`)."""

    name: str
    runner: "Runner"
    ready: "torch.cuda.Event | None"

    def reach(self, sequence: Sequence) -> int: ...
    def follows(self, sequence: Sequence) -> bool: ...
    def observe(self, step: "InFlightStep") -> None: ...
    def give_up(self, sequence: Sequence) -> None: ...
    def pause(self, sequence: Sequence) -> None: ...
    def seconds(self, chains: int, tokens: int = ..., seen: int = ...) -> float: ...
    def draft(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]: ...


class Budget:
    """For which requests a source drafts. It must first see the prompt, whose time the drafts may not bring back, and the drafts of
    short answers may save nothing.

    It does where drafts have brought other requests that time, on average, or where the budget allows to find that out. A request's
    drafts pay from the budget what they cost, and into it the steps that they save. SHARE of the time of all steps goes there, too,
    up to the most that a request lacked beyond the grant. So requests that begin lose no more than SHARE of the time, a grant, and
    what drafts have brought. The budget does not stop requests that have begun; there the `Record` of each says when drafts do not
    pay."""

    def __init__(self) -> None:
        self.brought = 0.0  # seconds that drafts bring to a request, on average; without its prompt
        self._saved = 0.0  # seconds, besides the grant; negative if that was used
        self._most = 0.0  # seconds that it may save
        self._by_request: dict[Sequence, float] = {}  # what drafts have brought

    def take(self, sequence: Sequence, seconds: float, grant: float) -> bool:
        """Pay for the sequence's prompt, if the budget covers what will probably be lost. grant: seconds that it holds at first."""
        lacking = seconds - self.brought - grant
        if lacking > self._saved:
            self._most = max(self._most, lacking)
            return False
        self._by_request[sequence] = 0.0
        self.add(-seconds)
        return True

    def add(self, seconds: float, sequence: Sequence | None = None) -> None:
        """sequence: whose drafts have brought them."""
        self._saved = min(self._most, self._saved + seconds)
        if sequence in self._by_request:
            self._by_request[sequence] += seconds

    def take_back(self, seconds: float, sequence: Sequence) -> None:
        """Drafts have brought so much less to the sequence than they seemed to."""
        if sequence in self._by_request:
            self.add(-seconds, sequence)

    def settle(self) -> None:
        """Note what drafts have brought to requests that have ended."""
        for sequence in [s for s in self._by_request if s.finish_reason is not None]:
            self.brought += WEIGHT * (self._by_request.pop(sequence) - self.brought)


class Speculation:
    """The drafts of an engine's sequences, and how many of their tokens were right."""

    def __init__(
        self,
        ceiling: int,
        measure: Callable[[], Costs],
        chains: Chains | None = None,
        accept_rate: float | None = None,
        others: PromptIndex | None = None,
    ) -> None:
        """ceiling: most tokens of a draft; 0 makes none. measure: gives the same on all ranks. chains: None: text alone. others: the
        prompts of all requests, which text may continue.

        accept_rate: stands in for the agreement of models with random weights, in benchmarks: a drafted token counts as right with
        this probability, whatever was drawn, and text makes no drafts. The answers are then not those of the model."""
        self.ceiling, self.measure, self.chains, self.accept_rate = ceiling, measure, chains, accept_rate
        self._others = others if accept_rate is None else None
        self.costs: Costs | None = None
        sources = [source for source in TEXTS if source != PROMPTS or self._others is not None]
        self._texts = len(sources)
        self.total = {source: Drafted() for source in (*sources, *([chains.name] if chains else []))}
        self._records, self._budgets = {s: Record() for s in self.total}, {s: Budget() for s in self.total}  # of all requests
        self._planned: dict[Sequence, tuple[str, Promise]] = {}  # the sources of drafts and what they promise
        self._token = 0.0  # seconds of one without drafts, when they were planned
        self._following: dict[Sequence, float] = {}  # the price of following then

    def prepare(self) -> None:
        """Measure what steps cost, unless it is known. No step may be in flight. Collective."""
        if self.ceiling and self.costs is None:
            self.costs = self.measure()

    def plan(self, running: list[Sequence]) -> dict[Sequence, int]:
        """How many tokens to draft for sequences in the next step. No step may be in flight."""
        if self.chains is not None:
            self.prepare()  # before they have anything to follow
        if not self.ceiling or not running:
            return {}
        answered = self._follow(running)
        found = self._promises(answered)
        if found and self.costs is None:
            self.prepare()
            found = self._promises(answered)
        if self.chains is not None:
            for sequence in running:
                if sequence not in found and self.chains.follows(sequence):
                    self.chains.pause(sequence)
        self._planned, self._token = found, self._known_costs.token(len(running))
        self._following = self._prices_of_following(running)
        return {s: promise.count for s, (_, promise) in found.items() if s.generated and s.length - s.computed == 1}

    def drafts(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Drafts of at most so many tokens, perhaps none, for sequences of the last `plan` that have room for them."""
        chained = {s: count for s, count in counts.items() if self._planned[s][0] not in TEXTS}
        found = {s: s.drafter.draft(count) for s, count in counts.items() if s not in chained}
        return found | (self.chains.draft(chained) if self.chains is not None else {})

    def expects(self, running: list[Sequence]) -> bool:
        """Whether the next step will probably have drafts that are worth it, or the chains have to see its tokens before."""
        if not self.ceiling or not running:
            return False
        return bool(self._promises(self._follow(running))) or (
            self.chains is not None and any(map(self.chains.follows, running))
        )

    def observe(self, step: "InFlightStep", is_last: bool) -> None:
        """Note a step that was collected. is_last: no other is launched behind it."""
        if not self.ceiling:
            return
        seconds = SHARE * self._known_costs.seconds(sum([c.count for c in step.chunks]))
        for source, budget in self._budgets.items():
            budget.add(seconds / (self._texts if source in TEXTS else 1))  # all texts together have one
            budget.settle()
        if self.chains is not None and is_last:
            self.chains.observe(step)

    def learn(self, chunk: Chunk, accepted: int, saved: int) -> None:
        """Note that `accepted` tokens of the chunk's draft were right, and how many steps it has saved: as many, but one fewer if the
        last of them ended the answer."""
        source, promise = self._planned[chunk.sequence]
        drafted, total = len(chunk.draft), self.total[source]
        self.total[source] = Drafted(total.drafts + 1, total.tokens + drafted, total.accepted + accepted)
        cost = drafted * promise.price + promise.fixed
        self._records[source].learn(saved, drafted, weight=WEIGHT_OF_ALL)
        self._budgets[source].add((saved - cost) * self._token, chunk.sequence)
        if self.chains is not None and source in TEXTS and chunk.sequence in self._following:
            self._budgets[self.chains.name].add(-self._following[chunk.sequence] * self._token, chunk.sequence)
        if chunk.sequence.drafter is not None:  # it has not ended
            chunk.sequence.drafter.learn(source, accepted, drafted, cost)

    def discard(self, sequence: Sequence, count: int) -> None:
        """Note that the last `count` tokens of a sequence lie behind a stop string, so that it was no use to have them earlier."""
        if sequence.drafter is not None and (source := sequence.drafter.last) is not None:
            self._budgets[source].take_back(count * self._token, sequence)

    def stand_in(self, chunk: Chunk, drawn: list[int], ids: int) -> list[int]:
        """What counts as drawn by a chunk: for its draft, if agreement has a rate, the drafted token, or one of the `ids` that differs.
        The same on all ranks."""
        if self.accept_rate is None:
            return drawn
        found = []
        for place, (guess, token) in enumerate(zip(chunk.draft, drawn, strict=False), chunk.first_drawn):
            digest = blake2b(f"{chunk.sequence.request_id} {place}".encode(), digest_size=4).digest()
            right = int.from_bytes(digest) < self.accept_rate * 2**32
            found.append(guess if right else token if token != guess else (guess + 1) % ids)
        return [*found, drawn[-1]]

    @property
    def _known_costs(self) -> Costs:
        return self.costs or FREE

    def _follow(self, running: list[Sequence]) -> list[Sequence]:
        """Index the texts of the sequences that are answered, and begin with those that are new. Returns these sequences."""
        running = [s for s in running if s.params.pooling is None]
        for sequence in running:
            if sequence.drafter is None:
                sequence.drafter = Drafter(sequence, self.ceiling, self._first_records(sequence), self._others)
                if self._others is not None and not sequence.repeats:
                    self._others.add(sequence.tokens[: sequence.prompt_length])
            if self.chains is not None and sequence.drafter.chains is None:
                self._begin(self.chains, sequence, len(running))
        if self.accept_rate is not None:
            return running
        left = min(INDEXED_A_STEP, MOST_INDEXED_TOGETHER - sum([s.drafter.indexed for s in running]))
        drafters = [s.drafter for s in running if s.drafter.may_pay]
        for drafter in sorted(drafters, key=lambda drafter: drafter.missing):  # long texts make none wait
            left -= drafter.follow(max(left, 0))
        if self._others is not None:
            self._others.follow(INDEXED_A_STEP)
        return running

    def _first_records(self, sequence: Sequence) -> dict[str, Record]:
        """With which texts begin to draft for a sequence: by trials alone if the budget of a source refuses it."""
        indexed, grant = {NGRAM: len(sequence.tokens)}, TEXT_GRANT * self._known_costs.seconds(1)
        if sequence.params.prediction:
            indexed[PREDICTION] = len(sequence.params.prediction)
        if self._others is not None:
            indexed[PROMPTS] = 0  # the index of all prompts grows anyway
        found = {}
        for source, count in indexed.items():
            granted = self._budgets[source].take(sequence, self._known_costs.indexing * min(count, MOST_INDEXED), grant)
            found[source] = max(self._records[source], Record(), key=lambda record: record.rate) if granted else NO_HOPE
        return found

    def _begin(self, chains: Chains, sequence: Sequence, rows: int) -> None:
        """Decide whether the chains draft for a sequence, as soon as that may pay in a step of so many rows."""
        costs = self._known_costs
        prompt = costs.prompt(len(sequence.tokens) - sequence.cached_tokens)
        budget = self._budgets[chains.name]
        record = replace(self._records[chains.name]) if budget.brought >= prompt else Record()  # else it has to find out
        if max(record.rate, Record().rate) < self._price_of_chains(rows):
            return
        sequence.drafter.chains = record
        if not budget.take(sequence, prompt, GRANT * costs.seconds(1)):
            chains.give_up(sequence)

    def _prices_of_following(self, running: list[Sequence]) -> dict[Sequence, float]:
        """What it costs, in tokens, that a head computes the rows of each step, even if the draft comes from text."""
        followed = [s for s in running if self.chains is not None and self.chains.follows(s)]
        price = self._known_costs.link_price(len(running), len(followed)) / len(followed) if followed else 0.0
        return dict.fromkeys(followed, price)

    def _price_of_chains(self, rows: int) -> float:
        """How many tokens a token of a chain must bring, if all of so many sequences have chains."""
        return self._known_costs.price(rows) + self._known_costs.link_price(rows, rows) / rows

    def _promises(self, running: list[Sequence]) -> dict[Sequence, tuple[str, Promise]]:
        """The source that promises most for a sequence, and what. If all together do not pay for a step with drafts, or a sequence
        has none that pays, there may be a trial."""
        if not running or (self.chains is None and not any(s.drafter.finds for s in running)):
            return {}
        rows, costs = len(running), self._known_costs
        price, fixed, following = costs.price(rows), costs.fixed_price(rows), self._prices_of_following(running)
        texts = {s: s.drafter.promise(price) for s in running}
        texts |= {s: texts[s].charged(cost) for s, cost in following.items()}
        found = self._best(texts, self._promises_of_chains(running, price))
        if sum([promise.gain for _, promise in found.values()]) > fixed:
            each = fixed / len(found)
            found = {s: (source, replace(promise, fixed=promise.fixed + each)) for s, (source, promise) in found.items()}
            fixed = 0.0  # is paid
        else:
            found = {}
        texts = {s: s.drafter.trial(price, fixed + following.get(s, 0.0)) for s in running}
        return self._best(texts, self._trials_of_chains(running, price, fixed)) | found

    def _best(
        self, texts: Mapping[Sequence, Promise], chains: Mapping[Sequence, Promise]
    ) -> dict[Sequence, tuple[str, Promise]]:
        """The source that promises more for each sequence, and what. texts: of all sequences."""
        found = dict[Sequence, tuple[str, Promise]]()
        for s, promise in texts.items():
            other = chains.get(s, NOTHING)
            if self.chains is not None and other.count and (not promise.count or other.gain > promise.gain):
                found[s] = self.chains.name, other
            elif promise.count:
                found[s] = s.drafter.source, promise
        return found

    def _promises_of_chains(self, running: list[Sequence], price: float) -> dict[Sequence, Promise]:
        """price: of a row. A link takes time for all sequences, so chains have links as long as these pay for all together."""
        costs, rows, found = self._known_costs, len(running), dict[Sequence, Promise]()
        records, alone = self._records_of_chains(running), self._price_of_chains(rows)
        for s, (record, most) in records.items():
            if (promise := record.promise(alone, most)).count:
                found[s] = promise
        links = 0
        while going := [s for s, promise in found.items() if promise.count > links]:
            gain = sum([records[s][0].rate ** (links + 1) - price for s in going])
            if gain < costs.link_price(rows, len(going)):
                break
            links += 1
        if not links:
            return {}
        alone = price + costs.link_price(rows, len(found)) / len(found)
        return {s: records[s][0].cut(min(promise.count, links), alone) for s, promise in found.items()}

    def _trials_of_chains(self, running: list[Sequence], price: float, fixed: float) -> dict[Sequence, Promise]:
        """price: of a row. Each pays for a link, as if it were the only one."""
        if self._price_of_chains(len(running)) >= 1:
            return {}
        fixed += self._known_costs.link_price(len(running), 1)
        return {s: record.trial(price, fixed, s.generated) for s, (record, _) in self._records_of_chains(running).items()}

    def _records_of_chains(self, running: list[Sequence]) -> dict[Sequence, tuple[Record, int]]:
        """What became of the drafts of the sequences for which the chains can draft, and the most tokens that they can."""
        if self.chains is None:
            return {}
        able = {s: min(s.drafter.ceiling, self.chains.reach(s)) for s in running if s.drafter.chains is not None}
        return {s: (s.drafter.chains, most) for s, most in able.items() if most}
