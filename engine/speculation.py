"""Speculative decoding: which sequences get a draft in the next step, from which source, and how long
(Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318).

    target model      the model that is served
    draft             a guess of a sequence's next tokens; one step of the target verifies them all
    drafter           makes drafts: a `TextDrafter` from text, a `ModelDrafter` with a smaller draft model, a `HeadDrafter` with an EAGLE-3
                      draft head, which reads the target's hidden states
    draft step        a step of the draft model or head: one more token of each draft
    accepted          of a drafted token: the target draws the same there. The first one that it does not, and all behind it, are rejected
    acceptance rate   the chance that a drafted token saves a step, if those before it do

A token is accepted if it is equal to the one that the target draws, greedy or sampled, and not by rejection sampling: a draw depends
on the tokens before it, the seed and the position only. So an answer has the same tokens with drafts as without, as far as the logits
have the same bits.

Each sequence takes the source that will probably save more time. Drafts are a function of tokens that all ranks know, and of times
that were measured once for all ranks, so ranks agree on them without a message.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from engine.draft_costs import FREE, NO_DRAFT, SHARE, TRIALS_ALONE, WEIGHT_OF_ALL, Acceptance, Budget, Costs, DraftPlan
from engine.model_drafter import ModelDrafter
from engine.protocol import Drafted
from engine.runner import InFlightStep, Runner
from engine.sequence import Chunk, Sequence
from engine.text_drafter import MOST_INDEXED, NGRAM, PREDICTION, PROMPTS, TEXTS, PromptIndex, SuffixAutomaton, TextDrafter
from tp import World

MOST_INDEXED_TOGETHER = 1 << 19  # tokens of all running requests; an automaton takes up to 0.7 KB for each, on each rank
INDEXED_A_STEP = 512  # tokens of all requests: a long prompt must not hold up a step; about 1 ms
GRANT = 8  # steps of one row: what a model's drafts may lose besides, before they have brought anything
TEXT_GRANT = 2  # the same for drafts from text, whose prompts cost little

ModelAcceptance = tuple[Acceptance, int]  # what became of a draft model's drafts, and the most tokens of its next one
Plans = dict[Sequence, tuple[str, DraftPlan]]  # from which source, and how long


class Speculation:
    """The drafts of an engine's sequences, and how many of their tokens were accepted."""

    def __init__(
        self,
        draft_tokens: int,
        measure: Callable[[], Costs],
        model_drafter: ModelDrafter | None = None,
        accept_rate: float | None = None,
        prompts: PromptIndex | None = None,
    ) -> None:
        """draft_tokens: the most of a draft; 0 makes none. measure: gives the same on all ranks. model_drafter: None: text alone drafts.
        prompts: of all requests; None: drafts continue a request's own text alone.

        accept_rate: a simulated acceptance rate, for benchmarks of models with random weights: a drafted token counts as accepted with
        this probability, whatever was drawn, and text makes no drafts. The answers are then not those of the model."""
        self.draft_tokens, self.measure = draft_tokens, measure
        self.model_drafter, self.accept_rate = model_drafter, accept_rate
        self._prompts = prompts if accept_rate is None else None
        self.costs: Costs | None = None
        sources = [source for source in TEXTS if source != PROMPTS or self._prompts is not None]
        self._texts = len(sources)
        self.total = {source: Drafted() for source in (*sources, *([model_drafter.name] if model_drafter else []))}
        # by source, of all requests
        self._acceptance, self._budgets = {s: Acceptance() for s in self.total}, {s: Budget() for s in self.total}
        self._planned: Plans = {}  # of the next step
        self._token_seconds = 0.0  # of a step without drafts, when they were planned
        self._reading: dict[Sequence, float] = {}  # `_reading_prices` then

    def prepare(self) -> None:
        """Measure what steps cost, unless it is known. No step may be in flight. Collective."""
        if self.draft_tokens and self.costs is None:
            self.costs = self.measure()

    def plan(self, running: list[Sequence]) -> dict[Sequence, int]:
        """How many tokens to draft for sequences in the next step. No step may be in flight."""
        if self.model_drafter is not None:
            self.prepare()  # before a head has a step to read
        if not self.draft_tokens or not running:
            return {}
        answered = self._index(running)
        found = self._plans(answered)
        if found and self.costs is None:
            self.prepare()
            found = self._plans(answered)
        if self.model_drafter is not None:
            for sequence in running:
                if sequence not in found and self.model_drafter.reads_each_step(sequence):
                    self.model_drafter.pause(sequence)
        self._planned, self._token_seconds = found, self._known_costs.token_seconds(len(running))
        self._reading = self._reading_prices(running)
        return {s: plan.length for s, (_, plan) in found.items() if s.generated and s.length - s.computed == 1 and not s.alone}

    def drafts(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Drafts of at most so many tokens, perhaps none, for sequences of the last `plan` that have room for them."""
        by_model = {s: count for s, count in counts.items() if self._planned[s][0] not in TEXTS}
        found = {s: s.drafter.draft(count) for s, count in counts.items() if s not in by_model}
        return found | (self.model_drafter.draft(by_model) if self.model_drafter is not None else {})

    def expects(self, running: list[Sequence]) -> bool:
        """Whether the next step will probably have drafts that are worth it, or a head has to see its tokens before."""
        if not self.draft_tokens or not running:
            return False
        return bool(self._plans(self._index(running))) or (
            self.model_drafter is not None and any(map(self.model_drafter.reads_each_step, running))
        )

    def observe(self, step: InFlightStep, is_last: bool) -> None:
        """Note a step that was collected. is_last: no other is launched behind it."""
        if not self.draft_tokens:
            return
        seconds = SHARE * self._known_costs.seconds(sum([c.count for c in step.chunks]))
        for source, budget in self._budgets.items():
            budget.add(seconds / (self._texts if source in TEXTS else 1))  # all texts together have one
        if self.model_drafter is not None and is_last:
            self.model_drafter.observe(step)

    def learn(self, chunk: Chunk, accepted: int, saved: int) -> None:
        """Note how many tokens of the chunk's draft were accepted, and how many steps it has saved: as many, but one fewer if the last of
        them ended the answer."""
        source, plan = self._planned[chunk.sequence]
        drafted, total = len(chunk.draft), self.total[source]
        self.total[source] = Drafted(total.drafts + 1, total.tokens + drafted, total.accepted + accepted)
        cost = drafted * plan.price + plan.fixed
        self._acceptance[source].learn(saved, drafted, weight=WEIGHT_OF_ALL)
        self._budgets[source].add((saved - cost) * self._token_seconds, chunk.sequence)
        if self.model_drafter is not None and source in TEXTS and chunk.sequence in self._reading:
            self._budgets[self.model_drafter.name].add(-self._reading[chunk.sequence] * self._token_seconds, chunk.sequence)
        if chunk.sequence.drafter is not None:  # it has not ended
            chunk.sequence.drafter.learn(source, accepted, drafted, cost)

    def discard(self, sequence: Sequence, count: int) -> None:
        """Note that the last `count` tokens of a sequence lie behind a stop string, so that it was no use to have them earlier."""
        if sequence.drafter is not None and (source := sequence.drafter.last_source) is not None:
            self._budgets[source].take_back(count * self._token_seconds, sequence)

    def simulated(self, chunk: Chunk, drawn: list[int], ids: int) -> list[int]:
        """What counts as drawn by a chunk: with a simulated acceptance rate, in the places of its draft the drafted token, or one of the
        `ids` that differs. The same on all ranks."""
        if self.accept_rate is None:
            return drawn
        found = []
        for place, (guess, token) in enumerate(zip(chunk.draft, drawn, strict=False), chunk.first_drawn):
            digest = blake2b(f"{chunk.sequence.request_id} {place}".encode(), digest_size=4).digest()
            accept = int.from_bytes(digest) < self.accept_rate * 2**32
            found.append(guess if accept else token if token != guess else (guess + 1) % ids)
        return [*found, drawn[-1]]

    @property
    def _known_costs(self) -> Costs:
        return self.costs or FREE

    def _index(self, running: list[Sequence]) -> list[Sequence]:
        """Index the texts of the sequences that are answered, and begin with those that are new. Returns these sequences."""
        running = [s for s in running if s.params.pooling is None]
        for sequence in running:
            if sequence.drafter is None:
                # a prompt with a salt is no other request's business, nor is another's its own
                prompts = self._prompts if sequence.params.cache_salt is None else None
                sequence.drafter = TextDrafter(sequence, self.draft_tokens, self._first_acceptance(sequence), prompts)
                if prompts is not None and not sequence.repeats:
                    prompts.add(sequence.tokens[: sequence.prompt_length])
            if self.model_drafter is not None and sequence.drafter.of_model is None:
                self._begin(self.model_drafter, sequence, len(running))
        if self.accept_rate is not None:
            return running
        left = min(INDEXED_A_STEP, MOST_INDEXED_TOGETHER - sum([s.drafter.indexed for s in running]))
        drafters = [s.drafter for s in running if s.drafter.missing and s.drafter.may_pay]
        for drafter in sorted(drafters, key=lambda drafter: drafter.missing):  # long texts make none wait
            left -= drafter.index(max(left, 0))
        if self._prompts is not None:
            self._prompts.index(INDEXED_A_STEP)
        return running

    def _first_acceptance(self, sequence: Sequence) -> dict[str, Acceptance]:
        """With which texts begin to draft for a sequence: by trials alone if the budget of a source refuses it."""
        indexed, grant = {NGRAM: len(sequence.tokens)}, TEXT_GRANT * self._known_costs.seconds(1)
        if sequence.params.prediction:
            indexed[PREDICTION] = len(sequence.params.prediction)
        if self._prompts is not None:
            indexed[PROMPTS] = 0  # the index of all prompts grows anyway
        found = {}
        for source, count in indexed.items():
            granted = self._budgets[source].take(sequence, self._known_costs.indexing * min(count, MOST_INDEXED), grant)
            found[source] = max(self._acceptance[source], Acceptance(), key=lambda one: one.rate) if granted else TRIALS_ALONE
        return found

    def _begin(self, drafter: ModelDrafter, sequence: Sequence, rows: int) -> None:
        """Decide whether the draft model drafts for a sequence, as soon as that may pay in a step of so many rows."""
        costs = self._known_costs
        prompt = costs.prompt_seconds(len(sequence.tokens) - sequence.cached_tokens)
        budget = self._budgets[drafter.name]
        known = replace(self._acceptance[drafter.name]) if budget.brought >= prompt else Acceptance()  # else it has to find out
        if max(known.rate, Acceptance().rate) < self._draft_token_price(rows):
            return
        sequence.drafter.of_model = known
        if not budget.take(sequence, prompt, GRANT * costs.seconds(1)):
            drafter.give_up(sequence)

    def _reading_prices(self, running: list[Sequence]) -> dict[Sequence, float]:
        """What it costs, in tokens, that a head computes the rows of each step, even if the draft comes from text."""
        read = [s for s in running if self.model_drafter is not None and self.model_drafter.reads_each_step(s)]
        price = self._known_costs.draft_step_price(len(running), len(read)) / len(read) if read else 0.0
        return dict.fromkeys(read, price)

    def _draft_token_price(self, rows: int) -> float:
        """How many tokens a token of a draft model must bring, if it drafts for all of so many sequences."""
        return self._known_costs.row_price(rows) + self._known_costs.draft_step_price(rows, rows) / rows

    def _plans(self, running: list[Sequence]) -> Plans:
        """The draft that gains most for each sequence. If all together do not pay for a step with drafts, or a sequence
        has none that pays, there may be a trial."""
        if not running or (self.model_drafter is None and not any(s.drafter.finds for s in running)):
            return {}
        rows, costs = len(running), self._known_costs
        price, fixed, reading = costs.row_price(rows), costs.fixed_price(rows), self._reading_prices(running)
        texts = {s: s.drafter.plan(price) for s in running}
        texts |= {s: texts[s].charged(cost) for s, cost in reading.items()}
        acceptance = self._model_acceptance(running)
        found = self._best(texts, self._model_plans(acceptance, rows, price))
        if sum([plan.gain for _, plan in found.values()]) > fixed:
            each = fixed / len(found)
            found = {s: (source, replace(plan, fixed=plan.fixed + each)) for s, (source, plan) in found.items()}
            fixed = 0.0  # is paid
        else:
            found = {}
        texts = {s: s.drafter.trial(price, fixed + reading.get(s, 0.0)) for s in running}
        return self._best(texts, self._model_trials(acceptance, rows, price, fixed)) | found

    def _best(self, texts: Mapping[Sequence, DraftPlan], by_model: Mapping[Sequence, DraftPlan]) -> Plans:
        """The plan that gains more for each sequence. texts: of all sequences."""
        found = Plans()
        for s, plan in texts.items():
            other = by_model.get(s, NO_DRAFT)
            if self.model_drafter is not None and other.length and (not plan.length or other.gain > plan.gain):
                found[s] = self.model_drafter.name, other
            elif plan.length:
                found[s] = s.drafter.source, plan
        return found

    def _model_plans(
        self, acceptance: Mapping[Sequence, ModelAcceptance], rows: int, price: float
    ) -> dict[Sequence, DraftPlan]:
        """price: of a row. A draft step takes time for all sequences, so there are as many as pay for all together."""
        if not acceptance:
            return {}
        costs, alone = self._known_costs, self._draft_token_price(rows)
        plans = {s: own.plan(alone, most) for s, (own, most) in acceptance.items()}
        found, steps = {s: plan for s, plan in plans.items() if plan.length}, 0
        while going := [s for s, plan in found.items() if plan.length > steps]:
            gain = sum([acceptance[s][0].rate ** (steps + 1) - price for s in going])
            if gain < costs.draft_step_price(rows, len(going)):
                break
            steps += 1
        if not steps:
            return {}
        alone = price + costs.draft_step_price(rows, len(found)) / len(found)
        return {s: acceptance[s][0].plan_of(min(plan.length, steps), alone) for s, plan in found.items()}

    def _model_trials(
        self, acceptance: Mapping[Sequence, ModelAcceptance], rows: int, price: float, fixed: float
    ) -> dict[Sequence, DraftPlan]:
        """price: of a row. Each pays for a draft step, as if it were the only one."""
        if not acceptance or self._draft_token_price(rows) >= 1:
            return {}
        fixed += self._known_costs.draft_step_price(rows, 1)
        return {s: own.trial(price, fixed, s.generated) for s, (own, _) in acceptance.items()}

    def _model_acceptance(self, running: list[Sequence]) -> dict[Sequence, ModelAcceptance]:
        """Of each sequence that the draft model can draft for."""
        if self.model_drafter is None:
            return {}
        able = {s: min(s.drafter.most, self.model_drafter.longest_draft(s)) for s in running if s.drafter.of_model is not None}
        return {s: (s.drafter.of_model, most) for s, most in able.items() if most}


# --- what steps and drafts cost on this machine ------------------------------------------------------------------------------

Case = tuple[Callable[[int], float], int]  # a function of a number, and the largest number that it takes
MEASURED_ROWS = 1, 4, 16, 64, 256  # of steps
MEASURED_SECONDS = 0.5  # for which a table is measured, about; larger numbers are then extrapolated
ROUNDS = 3, 20  # of a measurement, at least and at most; the fastest counts
MEASURED_MIXED = 4  # sequences of a step, of which one has a draft
INDEXED = 256  # tokens of a text that is indexed to measure how long a token takes


def measure(runner: Runner, drafter: ModelDrafter | None, max_model_len: int, world: World) -> Costs:
    """Measure what steps and drafts cost. drafter: None if no model drafts. Collective."""
    capacity = runner.capacity
    cases: dict[str, Case] = {"steps": (runner.seconds, min(capacity.draws, capacity.tokens, max_model_len))}
    if drafter is not None:
        cases["draft steps"] = drafter.seconds, min(capacity.sequences, capacity.tokens)
        cases["prompts"] = partial(drafter.seconds, 1, 1), min(capacity.tokens - 1, max_model_len - 2)  # sees one more
    count = min(MEASURED_MIXED, capacity.sequences, capacity.tokens - 1)
    if runner.graphs is None and count > 1:  # a GPU's kernels compute all rows alike
        cases["mixed"] = lambda n: runner.seconds(count + n - 1, count), 2  # without a draft, and with one
    host, indexing = world.largest([min(cost() for _ in range(ROUNDS[0])) for cost in (runner.host_seconds, indexing_seconds)])
    found = dict(zip(cases, fastest_seconds([*cases.values()], world), strict=True))
    mixed = found["mixed"][2] - found["mixed"][1] if "mixed" in found else 0.0
    return Costs(found["steps"], found.get("draft steps"), found.get("prompts"), host, indexing, max(0.0, mixed))


def indexing_seconds() -> float:
    """How long it takes to index a token of a text."""
    draw, text = random.Random(0), SuffixAutomaton()
    tokens = [draw.randrange(INDEXED // 4) for _ in range(INDEXED)]
    start = time.perf_counter()
    for token in tokens:
        text.append(token)
    return (time.perf_counter() - start) / INDEXED


def fastest_seconds(cases: list[Case], world: World) -> list[dict[int, float]]:
    """The seconds of each case for some numbers, of the slowest rank. All are called in turn, again and again, so that a disturbance
    meets all alike. Collective."""
    found = [dict[int, float]() for _ in cases]
    for times, (seconds, most) in zip(found, cases, strict=True):
        for n in sorted({min(n, max(2, most)) for n in MEASURED_ROWS}):
            if len(times) > 1 and ROUNDS[0] * sum(times.values()) > MEASURED_SECONDS:
                break
            [times[n]] = world.largest([seconds(n)])
    total = sum([sum(times.values()) for times in found])
    calls = [(seconds, n) for times, (seconds, _) in zip(found, cases, strict=True) for n in times]
    count = min(max(int(len(cases) * MEASURED_SECONDS / total), ROUNDS[0]), ROUNDS[1])
    fastest = iter(world.largest(list(map(min, *([seconds(n) for seconds, n in calls] for _ in range(count))))))
    return [{n: next(fastest) for n in times} for times in found]
