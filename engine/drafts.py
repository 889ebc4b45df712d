"""Drafts: guesses of a sequence's next tokens, which one step verifies together (speculative decoding).

A drafted token is right if it is the one that the model draws there, greedy or sampled. A draw depends on the tokens before it, the
seed and the position only, so an answer has the same tokens with drafts as without, as far as the logits have the same bits.

A draft has one of two sources. One is text: what followed the longest suffix of prompt and answer that occurred before, in the
prompt, in the answer, or in a text that the request predicts (`SamplingParams.prediction`). The other is a model
(`draft_models.py`), if the engine has one; text, which costs nothing, goes first where it promises as many right tokens. Drafts are
a function of tokens that all ranks know, so ranks agree on them without a message.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from engine.protocol import Drafted
from engine.scheduler import Chunk, Sequence
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
# Drafts must promise so many tokens a step for each running sequence: such a step is not launched ahead on a GPU, and attends to
# several rows of a sequence on a CPU.
WORTH = 0.25
LEAST_PRICE = 0.2  # tokens; a drafted row also takes time on the host
FIRST_RIGHT = 1.5  # accepted tokens of a draft, before there is one
WEIGHT = 0.25  # of the newest draft in a request's averages
WEIGHT_OF_ALL = 0.02  # the same, in the averages of all requests
TEXTS = "ngram", "prediction"  # sources of drafts from text
GIVE_UP = 256  # tokens of a pause after which a head, which would have to follow meanwhile, makes no more drafts for a request
PAUSES = 32, 512  # tokens between two drafts of a request whose drafts do not pay: at first, and at most


class Costs:
    """How long steps take by their rows, and tokens of a model's chains by the number of chains."""

    def __init__(self, steps: Mapping[int, float], links: Mapping[int, float] | None = None) -> None:
        """Seconds, each of at least two numbers, which are in ascending order. Others are on the lines through these points. More
        rows never take less time: where they seem to, the clock was disturbed. links: of the chains; None if there are none."""
        self._steps, self._links = (
            list(zip(seconds, accumulate(seconds.values(), max), strict=True)) for seconds in (steps, links or {1: 0.0, 2: 0.0})
        )

    def seconds(self, rows: int) -> float:
        return _on_lines(self._steps, rows)

    def price(self, rows: int) -> float:
        """How many tokens a drafted row must bring in a step of so many other rows: the time that it adds over that of a token, if
        each of the others has two drafted ones."""
        return max(LEAST_PRICE, (self.seconds(3 * rows) / self.seconds(rows) - 1) / 2)

    def link_price(self, rows: int, chains: int) -> float:
        """How many tokens another link of so many chains must bring for each of `rows` sequences in the step: its time over the
        step's."""
        return _on_lines(self._links, chains) / self.seconds(rows)


def _on_lines(points: List[tuple[int, float]], x: int) -> float:
    last = len(points) - 1
    i = next((i for i in range(1, last) if x <= points[i][0]), last)
    (first, before), (second, after) = points[i - 1], points[i]
    return before + (after - before) * (x - first) / (second - first)


def count_equal(draft: List[int], drawn: List[int]) -> int:
    """How many tokens of a draft are right: the first ones, as long as they are those that were drawn."""
    return next(
        (i for i, (one, other) in enumerate(zip(draft, drawn, strict=False)) if one != other), min(len(draft), len(drawn))
    )


@dataclass(frozen=True, slots=True)
class Promise:
    """How many tokens a draft may have, and how many of them will probably be right."""

    count: int
    right: float
    is_trial: bool = False


NOTHING = Promise(0, 0.0)


@dataclass
class Record:
    """What became of a request's last drafts from one source: averages of the tokens that were right, and of whether one was
    not."""

    right: float = FIRST_RIGHT
    wrong: float = 1.0
    resume: int = 0  # generated tokens before the next draft, while drafts do not pay
    pause: int = PAUSES[0]  # tokens from then to the one after

    @property
    def rate(self) -> float:
        """The chance of a token whose predecessors are right."""
        return self.right / (self.right + self.wrong)

    def promise(self, price: float, most: int, generated: int) -> Promise:
        """What pays at this price, up to `most` tokens, after so many generated ones. A token is right if all before it are, and it
        is, too."""
        count, right, rate = 0, 0.0, self.rate
        chance = rate
        while count < most and chance >= price:
            count, right, chance = count + 1, right + chance, chance * rate
        if not count and most and generated >= self.resume:
            return Promise(1, 2 * WORTH, is_trial=True)  # few other sequences have to wait for it
        return Promise(count, right)

    def cut(self, count: int) -> Promise:
        """What `count` tokens promise."""
        return Promise(count, sum([self.rate**i for i in range(1, count + 1)]))

    def learn(self, accepted: int, drafted: int, generated: int, weight: float = WEIGHT) -> None:
        """Note that `accepted` tokens of a draft were right."""
        self.right += weight * (accepted - self.right)
        self.wrong += weight * ((accepted < drafted) - self.wrong)
        if accepted:
            self.resume, self.pause = 0, PAUSES[0]
        else:
            self.resume = generated + self.pause
            self.pause = min(2 * self.pause, PAUSES[1])


class Drafter:
    """The drafts of one sequence, from text. Their length adapts to how many of their tokens were right lately, and to what a row
    costs."""

    def __init__(self, sequence: Sequence, ceiling: int, chains: Record | None = None) -> None:
        """chains: of the drafts of a model in general."""
        self.sequence = sequence
        self.ceiling = ceiling if sequence.params.grammar is None else min(ceiling, MOST_WITH_GRAMMAR)
        prediction = (sequence.params.prediction or [])[: MOST_INDEXED // 2]
        tail = sequence.tokens[: sequence.prompt_length][-TAIL:]
        self._head = [*tail, *prediction, END] if prediction else []  # comes before the sequence's tokens
        self._text = SuffixAutomaton()
        self.texts, self.chains = Record(), Record() if chains is None else replace(chains, resume=0, pause=PAUSES[0])
        self._least_match = LEAST_MATCH[1]

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
    def source(self) -> str:
        return "prediction" if self._text.match[1] < len(self._head) else "ngram"

    def promise(self, price: float) -> Promise:
        """What pays at this price, if the next token finds a draft at all. The newest token may still be on the device."""
        if self.missing > 1 or self._text.match[0] < self._least_match:
            return NOTHING
        return self.texts.promise(price, self.ceiling, self.sequence.generated)

    def draft(self, count: int) -> list[int]:
        """The next tokens, perhaps fewer than `count`. All tokens of the sequence must be known."""
        found = [] if self.missing or not count else self._text.after_match(count)
        return found[: found.index(END)] if END in found else found

    def learn(self, source: str, accepted: int, drafted: int) -> None:
        """How many tokens of the last draft were right, and how many it had."""
        if source in TEXTS:
            self._least_match = LEAST_MATCH[0 if accepted else 1]
        record = self.texts if source in TEXTS else self.chains
        record.learn(accepted, drafted, self.sequence.generated)


class Chains(Protocol):
    """Drafts of a model (`draft_models.py`)."""

    name: str
    runner: "Runner"
    ready: "torch.cuda.Event | None"

    def reach(self, sequence: Sequence) -> int: ...
    def follows(self, sequence: Sequence) -> bool: ...
    def observe(self, step: "InFlightStep") -> None: ...
    def give_up(self, sequence: Sequence) -> None: ...
    def seconds(self, rows: int, tokens: int = ...) -> float: ...
    def draft(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]: ...


class Speculation:
    """The drafts of an engine's sequences, and how many of their tokens were right."""

    def __init__(
        self,
        ceiling: int,
        measure: Callable[[], tuple[Mapping[int, float], Mapping[int, float] | None]],
        chains: Chains | None = None,
    ) -> None:
        """ceiling: most tokens of a draft; 0 makes none. measure: the seconds of steps, and of a token of the chains, see `Costs`;
        the same on all ranks. chains: None: text alone."""
        self.ceiling, self.measure, self.chains = ceiling, measure, chains
        self.costs: Costs | None = None
        self.total = {source: Drafted() for source in (*TEXTS, *([chains.name] if chains else []))}
        self._follow = False  # whether the chains have to see all steps
        self._record = Record()  # of the chains of all requests
        self._sources: dict[Sequence, str] = {}  # of the drafts that `plan` promises

    def prepare(self) -> None:
        """Measure what steps cost, unless it is known. No step may be in flight. Collective."""
        if self.ceiling and self.costs is None:
            self.costs = Costs(*self.measure())

    def plan(self, running: List[Sequence]) -> dict[Sequence, int]:
        """How many tokens to draft for sequences in the next step. No step may be in flight."""
        if self.chains is not None:
            self.prepare()  # before they have anything to follow
        if not self.expects(running):
            return {}
        self.prepare()
        texts, chained = self._promises(running)
        if not self._are_worth_it(texts | chained, running):
            return {}
        name = self.chains.name if self.chains else ""
        self._sources = {s: s.drafter.source for s in texts} | dict.fromkeys(chained, name)
        found = (texts | chained).items()
        return {s: promise.count for s, promise in found if s.generated and s.length - s.computed == 1}

    def drafts(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Drafts of at most so many tokens, for sequences of the last `plan` that have room for them."""
        chained = {s: count for s, count in counts.items() if self._sources[s] not in TEXTS}
        found = {s: s.drafter.draft(count) for s, count in counts.items() if s not in chained}
        if self.chains is not None and (chained or self._follow):
            found |= self.chains.draft(chained)
        return {s: draft for s, draft in found.items() if draft}

    def expects(self, running: List[Sequence]) -> bool:
        """Whether the next step will probably have drafts that are worth it, or the chains have to see its tokens before."""
        if not self.ceiling or not running:
            return False
        for sequence in running:
            sequence.drafter = sequence.drafter or Drafter(sequence, self.ceiling, self._record)
        left = min(INDEXED_A_STEP, MOST_INDEXED_TOGETHER - sum([s.drafter.indexed for s in running]))
        for drafter in sorted([s.drafter for s in running], key=lambda drafter: drafter.missing):  # long texts make none wait
            left -= drafter.follow(max(left, 0))
        chains = self.chains
        self._follow = chains is not None and self._chains_may_pay(running) and any(map(chains.follows, running))
        if self._follow:
            return True  # `plan` asks what they promise
        texts, chained = self._promises(running)
        return self._are_worth_it(texts | chained, running)

    def observe(self, step: "InFlightStep") -> None:
        """Note a step that was collected, with no other launched behind it."""
        if self.chains is not None:
            self.chains.observe(step)

    def learn(self, chunk: Chunk, accepted: int) -> None:
        """Note that `accepted` tokens of the chunk's draft were right."""
        source, drafted = self._sources.pop(chunk.sequence), len(chunk.draft)
        total = self.total[source]
        self.total[source] = Drafted(total.drafts + 1, total.tokens + drafted, total.accepted + accepted)
        if source not in TEXTS:
            self._record.learn(accepted, drafted, 0, WEIGHT_OF_ALL)
        if chunk.sequence.drafter is not None:  # it has not ended
            chunk.sequence.drafter.learn(source, accepted, drafted)
            if self.chains is not None and chunk.sequence.drafter.chains.pause >= GIVE_UP:
                self.chains.give_up(chunk.sequence)

    def _promises(self, running: List[Sequence]) -> tuple[dict[Sequence, Promise], dict[Sequence, Promise]]:
        """What drafts from text and chains promise, for each sequence from the one that promises more."""
        price = self._price(running)
        texts = {s: promise for s in running if (promise := s.drafter.promise(price)).count}
        if self.chains is None:
            return texts, {}
        chained = self._promises_of_chains(running, price)
        chained = {s: p for s, p in chained.items() if s not in texts or p.right > texts[s].right}
        return {s: p for s, p in texts.items() if s not in chained}, chained

    def _are_worth_it(self, promises: Mapping[Sequence, Promise], running: List[Sequence]) -> bool:
        return sum([promise.right for promise in promises.values()]) > WORTH * len(running)

    def _promises_of_chains(self, running: List[Sequence], price: float) -> dict[Sequence, Promise]:
        """price: of a row. A link takes time for all sequences, so chains have links as long as these pay for all together."""
        if self.chains is None or not self._chains_may_pay(running):
            return {}
        alone, found = price + self._link_price(running, len(running)), dict[Sequence, Promise]()
        for s in running:
            most = min(s.drafter.ceiling, self.chains.reach(s))
            if (promise := s.drafter.chains.promise(alone, most, s.generated)).count:
                found[s] = promise
        links = 0
        while going := [s for s, promise in found.items() if promise.count > links]:
            gain = sum([(1.0 if found[s].is_trial else s.drafter.chains.rate ** (links + 1)) - price for s in going])
            if gain < self._link_price(running, len(going)) * len(running):
                break
            links += 1
        return {s: p if p.count <= links else s.drafter.chains.cut(links) for s, p in found.items()} if links else {}

    def _chains_may_pay(self, running: List[Sequence]) -> bool:
        """Whether chains would be worth it if they were always right."""
        return self._price(running) + self._link_price(running, len(running)) < 1

    def _link_price(self, running: List[Sequence], chains: int) -> float:
        return 0.0 if self.costs is None else self.costs.link_price(len(running), chains)

    def _price(self, running: List[Sequence]) -> float:
        return LEAST_PRICE if self.costs is None else self.costs.price(len(running))
