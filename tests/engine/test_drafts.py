"""Speculation: the suffix automaton against its definition, and answers with drafts against those without."""

import json
import random
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import llguidance
import msgspec
import numpy as np
import pytest
import torch

from attention import Causal
from comm import Local
from eagle import EagleConfig, EagleHead
from engine import LLM, draft_models
from engine.core import Engine
from engine.draft_costs import LEAST_GAIN, LEAST_PRICE, Costs
from engine.draft_gains import FIRST_ACCEPTED, NO_DRAFT, SHARE, Acceptance, Budget, DraftPlan
from engine.head_drafter import HeadDrafter
from engine.prompt_index import GAP, GRAM, PromptIndex
from engine.protocol import Abort, SamplingParams, Submit, joined
from engine.sequence import Chunk, Sequence, common_prefix
from engine.speculation import GRANT, TEXT_GRANT, Speculation
from engine.step import InFlightStep
from engine.suffix_automaton import SuffixAutomaton
from engine.text_drafter import END, MOST_INDEXED, MOST_WITH_GRAMMAR, TextDrafter
from errors import UserError
from kernels.sampling import exponential_noise
from model import Transformer
from presets import model_config
from tests import MODELS
from tests.engine.test_engine import (
    ALONE,
    CPU,
    LIMITS,
    TINY,
    Answer,
    assert_logprobs,
    assert_same,
    cheap,
    config_of,
    engine_of,
    load,
    plain_logits,
    random_model,
    random_params,
    random_submits,
    serve,
    tiny_tokenizer,
)
from tests.engine.test_sampler import chi_square_is_plausible
from tests.support.ranks import Ranks
from tp import World
from training.export import save_checkpoint

CHEAP = 0.15  # price of a drafted row

# --- drafts ----------------------------------------------------------------------------------------------------------------


def ends_of(tokens: list[int], part: list[int]) -> list[int]:
    return [end for end in range(len(part), len(tokens) + 1) if tokens[end - len(part) : end] == part]


def longest_repeated_suffix(tokens: list[int]) -> int:
    return max(n for n in range(len(tokens)) if n == 0 or len(ends_of(tokens, tokens[-n:])) > 1)


def test_the_automaton_finds_the_longest_suffix_that_occurred_before(seed: int) -> None:
    for _ in range(12):
        automaton, tokens = SuffixAutomaton(), list[int]()
        vocab = random.choice([1, 2, 3, 10])
        for _ in range(random.randint(1, 40)):
            copied = random.random() < 0.4 and len(tokens) > 3
            at = random.randrange(len(tokens)) if copied else 0
            for token in tokens[at : at + 9] if copied else [random.randrange(vocab)]:
                automaton.append(token)
                tokens.append(token)
                length, end = automaton.match
                assert length == longest_repeated_suffix(tokens)
                assert end < len(tokens) and end in ends_of(tokens, tokens[len(tokens) - length :])
                period, after = tokens[end:], automaton.after_match(12)
                assert after == [period[i % len(period)] for i in range(12)]
        assert len(automaton._next) <= 2 * len(tokens), "more states than the theory allows"


def test_prompts_are_found_while_they_are_among_the_newest_tokens(seed: int) -> None:
    """Against a plain search: the last occurrence counts, if its last token is among them."""
    for _ in range(10):
        capacity, vocab, seen = random.randint(8, 60), random.choice([1, 2, 3]), list[int]()
        index = PromptIndex(capacity)
        for _ in range(30):
            prompt = [random.randrange(vocab) for _ in range(random.randint(1, 20))]
            index.add(prompt)
            seen += [*prompt[-(capacity - 1) :], GAP]
            while index._waiting:
                index.index(random.randint(1, 9))
            for _ in range(5):
                asked, count = [random.randrange(vocab) for _ in range(random.randint(1, 8))], random.randint(1, 6)
                ends = [end for end in ends_of(seen, asked[-GRAM:]) if len(asked) >= GRAM and end > len(seen) - capacity]
                expected = seen[ends[-1] : ends[-1] + count] if ends else []
                assert index.after(asked, count) == (expected[: expected.index(GAP)] if GAP in expected else expected)
        assert len(index._places) <= capacity and len(index._ring) == capacity


def test_other_prompts_help_and_change_no_token(seed: int) -> None:
    """The answer of one request stands in the prompt of another."""
    model = random_model(config_of("standard"))
    varied = random_params(max_tokens=40, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0)  # a draft that repeats it is wrong
    asked = Submit("a", random.sample(range(101), 6), varied)
    tokens = serve(engine_of(model), [asked])["a"].tokens
    other = Submit("b", [*random.sample(range(101), 3), *tokens], random_params(max_tokens=3))
    for kept in (0, 200):
        engine = engine_of(model, draft_tokens=4, ngram_prompts=kept)
        serve(engine, [other])
        answers = serve(engine, [asked, other])
        assert_same(model, asked, answers["a"].tokens)
        total = engine.speculation.total
        assert ("prompts" in total) == bool(kept)
        assert not kept or total["prompts"].accepted > 8


def test_the_choices_of_a_request_add_their_prompt_once() -> None:
    """Many of them would displace the other prompts."""
    engine = engine_of(random_model(config_of("standard")), draft_tokens=4, ngram_prompts=200)
    prompts = [random.sample(range(101), 20) for _ in range(2)]
    params = random_params(max_tokens=3)
    serve(engine, [Submit("a", prompts[0], params)])
    joint = joined([Submit(f"b{i}", prompts[1], params) for i in range(16)])
    assert engine.submit(joint) is None
    while engine.has_work():
        engine.step()
    index = engine.speculation._prompts
    assert index is not None and index._count == 42
    assert index.after(prompts[0][:5], 2) == prompts[0][5:7]


def drafter_of(prompt: list[int], output: list[int], most: int = 8, prediction: list[int] | None = None) -> TextDrafter:
    params = SamplingParams(max_tokens=1000, prediction=prediction or [])
    drafter = TextDrafter(Sequence("a", prompt + output, len(prompt), params), most)
    while drafter.index(random.randint(1, 30)):
        pass
    return drafter


def draft_of(drafter: TextDrafter, price: float = CHEAP) -> list[int]:
    return drafter.draft(drafter.plan(price).length)


def test_a_draft_continues_the_prompt_or_the_prediction() -> None:
    drafter = drafter_of([1, 2, 3, 4, 5, 6, 7, 8, 9], [2, 3, 4])
    assert (draft_of(drafter), drafter.source) == ([5, 6, 7, 8], "ngram")
    drafter = drafter_of([1, 2, 3, 4], [7], prediction=[7, 8, 9])
    assert (draft_of(drafter), drafter.source) == ([8, 9], "prediction")  # and not what reads the prediction in the index
    assert draft_of(drafter_of([1, 2, 3, 4], [7, 8, 9], prediction=[7, 8, 9])) == []
    assert draft_of(drafter_of([1, 2, 3, 4], [9], prediction=[7, 8, 9])) == []
    assert draft_of(drafter_of([5, 6, 5, 6, 5], [6], most=3)) == [5, 6, 5]
    assert draft_of(drafter_of([1, 2, 3], [4])) == []
    assert END not in draft_of(drafter_of([1, 2], [3], prediction=[1, 2, 3]))


def test_two_tokens_are_enough_while_drafts_are_right() -> None:
    drafter = drafter_of([1, 2, 3, 4, 5, 6], [2, 3])
    assert draft_of(drafter) == []
    drafter.learn("ngram", 1, 2)
    assert draft_of(drafter) == [4, 5, 6, 2]
    drafter.learn("ngram", 0, 4)
    assert draft_of(drafter) == []


def test_a_draft_waits_until_the_whole_text_is_indexed() -> None:
    sequence = Sequence("a", [1, 2, 3, 4] * 5, 4, SamplingParams(max_tokens=100))
    drafter = TextDrafter(sequence, 4)
    assert drafter.index(19) == 19
    assert drafter.plan(CHEAP).length == 4 and draft_of(drafter) == []
    assert (drafter.index(19), drafter.index(19)) == (1, 0)
    assert draft_of(drafter) == [1, 2, 3, 4]
    sequence.tokens += [1] * (MOST_INDEXED - 19)
    while drafter.index(100_000):
        pass
    assert draft_of(drafter) == [], "a longer text than the limit is not drafted"


def test_a_grammar_shortens_drafts() -> None:
    params = SamplingParams(max_tokens=100, grammar="any")
    assert TextDrafter(Sequence("a", [1, 2] * 5, 10, params), 8).most == MOST_WITH_GRAMMAR < 8


def test_the_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step indexes few tokens, and all requests together have a limit."""
    monkeypatch.setattr("engine.speculation.INDEXED_A_STEP", 10)
    monkeypatch.setattr("engine.speculation.MOST_INDEXED_TOGETHER", 50)
    params = SamplingParams(max_tokens=100)
    running = [Sequence(str(i), [1, 2] * 20, 20, params, computed=39) for i in range(2)]
    speculation = Speculation(4, lambda: Costs({1: 1.0, 2: 1.0}))
    for step in range(1, 8):
        found = {s: draft for s, draft in speculation.drafts(speculation.plan(running)).items() if draft}
        assert sum(s.drafter.indexed for s in running) == min(10 * step, 50)
        assert list(found) == ([running[0]] if step >= 4 else [])
    longer = [running[0], Sequence("new", [1, 2] * 3, 6, params, computed=5)]
    monkeypatch.setattr("engine.speculation.MOST_INDEXED_TOGETHER", 100)
    running[0].tokens += [1, 2] * 500
    speculation.expects(longer)
    assert longer[1].drafter.missing == 0, "a long text holds up a short one"
    assert running[0].drafter.plan(CHEAP) == NO_DRAFT, "there is no draft before all is indexed"
    assert Speculation(0, lambda: Costs({})).plan(running) == {}


def test_the_length_adapts_to_what_was_right_and_to_the_price(seed: int) -> None:
    drafter = drafter_of([1] * 20, [1], most=16)
    rate = FIRST_ACCEPTED / (FIRST_ACCEPTED + 1)
    for price in (0.05, 0.1, 0.3, 0.5, 0.59):
        plan = drafter.plan(price)
        gains = [rate**i - price for i in range(1, 17)]  # of each token of a draft
        assert plan.length == sum(gain >= 0 for gain in gains)
        assert plan.gain == pytest.approx(sum(gain for gain in gains if gain >= 0))
    lengths = []
    for _ in range(8):
        lengths.append(len(draft_of(drafter)))
        drafter.learn("ngram", lengths[-1], lengths[-1])
    assert lengths == sorted(lengths) and lengths[-1] == 16
    assert len(draft_of(drafter, 0.99)) < 16 and draft_of(drafter, 1.0) == []


def test_trials_cost_a_small_share_of_the_tokens(seed: int) -> None:
    """But there are some, and after drafts that were right there are drafts again."""
    price, fixed = random.choice([0.1, 0.4, 0.9]), random.choice([0.0, 1.0])
    drafter, lost = drafter_of([1] * 20, [1], most=16), 0.0
    for _ in range(20):
        drafter.learn("ngram", 0, 1, 0.0)
    for tokens in range(1, 10_000):
        trial, hoped = drafter.trial(price, fixed), drafter.acceptance["ngram"].rate
        if trial.length:
            assert trial == DraftPlan(1, 0.0, price, fixed)
            drafter.learn("ngram", 0, 1, price + fixed)
            lost += price + fixed
            assert lost - hoped <= SHARE * tokens
        drafter.sequence.tokens.append(1)
        drafter.index(1)
    assert lost + price + fixed >= SHARE * 9_999
    drafter.learn("ngram", 1, 1, 0.5)
    assert drafter.acceptance["ngram"].lost == pytest.approx(lost - 0.5), "a token brings back what it is worth, and no more"
    for _ in range(100):
        drafter.learn("ngram", 1, 1, price)
    assert drafter.plan(price).length >= 1


@pytest.mark.parametrize(
    ("row", "ahead", "chance"), [(0.1, 0.5, 0.2), (0.3, 0.3, 0.15), (0.5, 0.0, 0.2), (0.55, 0.0, 0.2), (0.55, 0.2, 0.4)]
)
@pytest.mark.parametrize("by_model", [False, True])
def test_drafts_that_are_sometimes_right_lose_little_and_return(
    row: float, ahead: float, chance: float, by_model: bool, seed: int
) -> None:
    """Tokens of a text or a model, right with a chance at which they do not pay, take little more than SHARE of the time. When all
    are right, they save time again, whatever the costs."""
    draft_step = 0.1 if by_model else 0.0
    steps = {1: 1.0, 4: 1 + 3 * row, 64: 1 + 63 * row}
    costs, model_drafter = Costs(steps, {1: draft_step, 2: draft_step}, {1: 0.0, 2: 0.0}, ahead), OnDemand()
    model_drafter.longest = 100_000
    speculation = Speculation(7, lambda: costs, model_drafter if by_model else None)  # type: ignore[arg-type]
    speculation.prepare()
    text = list(range(20)) if by_model else [1, 2, 3] * 15
    sequence = Sequence("a", [*text, -1 if by_model else 1], len(text), SamplingParams(max_tokens=10**6), computed=len(text))

    def seconds(count: int, chance: float) -> float:
        """The time of `count` tokens more."""
        stop, time = sequence.generated + count, 0.0
        while sequence.generated < stop:
            drafted = speculation.plan([sequence]).get(sequence, 0)
            chunk = Chunk(sequence, sequence.length - 1, 1 + drafted, True, True, [7] * drafted)
            right = next((i for i in range(drafted) if random.random() >= chance), drafted)
            time += costs.seconds(1 + drafted) + draft_step * drafted + (ahead if drafted else 0.0)
            if by_model:
                speculation.observe(InFlightStep([chunk], [chunk], None, bool(drafted)), True)  # type: ignore[arg-type]
            if drafted:
                speculation.learn(chunk, right, right)
            for _ in range(1 + right):
                sequence.tokens.append(-sequence.length if by_model else sequence.length % 3 + 1)
            sequence.computed = sequence.length - 1
        return time

    assert seconds(3000, chance) <= (1 + SHARE) * 3000 + 20
    seconds(600, 1.0)
    assert seconds(1000, 1.0) < 900


LAST = -2  # ends an answer
Rows = list[tuple[int, int]]  # tokens of each draft and how many of them were right


def answer_by_text(
    speculation: Speculation, prompt: list[int], answer: list[int], prediction: list[int] | None = None, used: int | None = None
) -> tuple[float, Rows]:
    """The seconds of all steps, and the drafts. used: tokens of the answer before a stop string, which is found as soon as it is
    there."""
    params = SamplingParams(max_tokens=1000, prediction=prediction or [])
    sequence, costs, drafted = Sequence("a", list(prompt), len(prompt), params), speculation.measure(), Rows()
    chunk, seconds = Chunk(sequence, 0, len(prompt), True, True), costs.seconds(len(prompt))
    while sequence.finish_reason is None:
        done = sequence.generated
        draft = speculation.drafts(speculation.plan([sequence])).get(sequence, [])
        if done:
            chunk = Chunk(sequence, sequence.length - 1, 1 + len(draft), True, True, draft)
            seconds += costs.seconds(1 + len(draft)) + (costs.host_seconds if draft else 0.0)
        right = common_prefix(draft, answer[done:])
        sequence.tokens += answer[done : done + right + 1]
        sequence.computed = sequence.length - 1
        drafter = sequence.drafter
        if done + right >= len(answer) - 1:
            sequence.finish_reason, sequence.drafter = "stop", None
        if draft:
            drafted.append((len(draft), right))
            speculation.learn(chunk, right, sequence.generated - done - 1)
        if used is not None and sequence.generated >= used:
            sequence.drafter = drafter
            speculation.discard(sequence, sequence.generated - used)
            sequence.finish_reason, sequence.drafter = "stop", None
        speculation.observe(InFlightStep([chunk], [chunk], None, bool(draft)), True)  # type: ignore[arg-type]
    return seconds, drafted


@pytest.mark.parametrize(("row", "ahead"), [(0.1, 0.0), (0.3, 0.1), (0.1, 0.4)])
@pytest.mark.parametrize("behind_a_stop", [False, True])
def test_text_stops_to_draft_where_it_saves_nothing(row: float, ahead: float, behind_a_stop: bool) -> None:
    """Of answers of two tokens, a draft can save no step, though it is always right. The loss is bounded, also after long answers
    where drafts paid, and these get drafts again."""
    costs = Costs({1: 1.0, 8: 1 + 7 * row}, host_seconds=ahead)
    speculation = Speculation(7, lambda: costs)
    long, short = [*range(40), LAST], [5, *range(6, 20), LAST] if behind_a_stop else [5, LAST]
    prompt, used = list(range(100, 140)), 2 if behind_a_stop else None
    for _ in range(3):
        for _ in range(80):  # a share of their time pays for what the last drafts have lost
            seconds, _ = answer_by_text(speculation, prompt, long, long)
        assert seconds - costs.seconds(40) < 0.7 * len(long), "drafts pay"
        answers = [answer_by_text(speculation, prompt, short, short, used) for _ in range(1000)]
        time, most = sum(seconds for seconds, _ in answers), costs.seconds(8) - 1 + ahead
        assert time - 1000 * (costs.seconds(40) + 1) <= TEXT_GRANT + most + SHARE * time
        assert all(right == count for _, rows in answers for count, right in rows)
    assert speculation.total["ngram"].drafts == 0


def test_text_drafts_long_copies_at_full_length() -> None:
    """The ends of answers do not discourage it."""
    speculation = Speculation(7, lambda: Costs({1: 1.0, 8: 2.4}))
    prompt = [1, 2, 3, *range(10, 70), LAST, 1, 2, 3]
    for request in range(300):
        _, drafted = answer_by_text(speculation, prompt, [*range(10, 70), LAST])
        assert request < 3 or ({count for count, _ in drafted} == {7} and len(drafted) <= 9)


def test_a_row_costs_what_it_adds_to_a_step() -> None:
    assert Costs({1: 5.0, 4: 5.0, 16: 5.0}).row_price(8) == LEAST_PRICE
    for rows in (1, 3, 7, 20):
        assert Costs({1: 2.0, 4: 8.0, 16: 32.0}).row_price(rows) == pytest.approx(1.0)  # a token takes as long as a row
        assert Costs({1: 12.0, 4: 15.0, 16: 27.0}).row_price(rows) == pytest.approx(max(LEAST_PRICE, rows / (11 + rows)))
    assert Costs({1: 12.0, 4: 10.0, 16: 40.0}).seconds(1) == 10.0, "a disturbance takes time, and never gives it back"
    bent = Costs({1: 10.0, 4: 10.0, 16: 40.0})
    assert [bent.seconds(rows) for rows in (1, 2, 4, 8, 16, 32)] == [10.0, 10.0, 10.0, 20.0, 40.0, 80.0]


def test_a_step_in_which_only_some_sequences_have_drafts_costs_more(seed: int) -> None:
    """On a CPU. Then a draft of one sequence must bring that, too; for a single sequence it is free."""
    params = SamplingParams(max_tokens=100)
    for mixed, expected in ((0.0, 1), (10.0, 0)):
        speculation = Speculation(4, lambda mixed=mixed: Costs({1: 1.0, 8: 1.2}, mixed=mixed))  # type: ignore[misc]
        copying = Sequence("copying", [1, 2, 3] * 7, 18, params, computed=20)
        others = [Sequence(str(i), random.sample(range(10, 1000), 21), 18, params, computed=20) for i in range(3)]
        assert len(speculation.plan([copying, *others])) == expected
        assert list(speculation.plan([copying])) == [copying]


def test_a_text_is_indexed_if_the_budget_pays_for_its_tokens() -> None:
    params = SamplingParams(max_tokens=10)
    for indexing, expected in ((1e-3, 100), (1.0, 0)):
        speculation = Speculation(4, lambda: Costs({1: 1.0, 2: 1.0}))
        speculation.costs = Costs({1: 1.0, 2: 1.0}, indexing=indexing)
        sequence = Sequence("a", list(range(100)), 100, params)
        speculation.expects([sequence])
        assert sequence.drafter.indexed == expected


def test_costs_are_measured(seed: int) -> None:
    """Of an engine on a CPU: all are above 0, but for what only a GPU's host adds."""
    engine = engine_of(random_model(config_of("standard")), draft_tokens=4, max_num_seqs=4)
    costs = engine.speculation.measure()
    assert costs.seconds(1) > 0 and costs.indexing > 0 and costs.mixed >= 0 and costs.host_seconds == 0.0
    alone = engine_of(random_model(config_of("standard")), draft_tokens=4, max_num_seqs=1)
    assert alone.speculation.measure().mixed == 0.0
    engine.runner.seconds = lambda rows, sequences=20: rows + 5.0 * (rows > sequences)  # type: ignore[method-assign]
    costs = engine.speculation.measure()
    assert (costs.seconds(1), costs.seconds(16), costs.mixed) == (1.0, 16.0, 6.0)


class FakeDrafter:
    name, longest = "model", 100

    def __init__(self) -> None:
        self.lost: set[Sequence] = set()
        self.paused: set[Sequence] = set()

    def longest_draft(self, sequence: Sequence) -> int:
        return 0 if sequence in self.lost else self.longest - sequence.length

    def reads_each_step(self, sequence: Sequence) -> bool:
        return sequence not in self.lost | self.paused

    def give_up(self, sequence: Sequence) -> None:
        self.lost.add(sequence)

    def pause(self, sequence: Sequence) -> None:
        self.paused.add(sequence)

    def observe(self, step: Any) -> None:
        pass

    def draft(self, counts: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        self.paused -= counts.keys()
        return {s: [7] * count for s, count in counts.items()}


class OnDemand(FakeDrafter):
    def reads_each_step(self, sequence: Sequence) -> bool:
        return False


def test_a_model_drafts_as_long_as_it_pays_for_all_together() -> None:
    def plan(draft_steps: dict[int, float], count: int = 1, text: int = 0, length: int = 3) -> dict[Sequence, int]:
        """Counts of drafts for `count` sequences, of which the first `text` repeat themselves; steps take 1 s for any number of
        rows."""
        model_drafter = FakeDrafter()
        speculation = Speculation(7, lambda: Costs({1: 1.0, 2: 1.0}, draft_steps), model_drafter)  # type: ignore[arg-type]
        texts = [[5] * length if i < text else list(range(i, i + length)) for i in range(count)]
        running = [
            Sequence(str(i), tokens, length - 1, SamplingParams(max_tokens=90), computed=length - 1)
            for i, tokens in enumerate(texts)
        ]
        counts = speculation.plan(running)
        assert speculation.drafts(counts).keys() == counts.keys() == set(running) - model_drafter.paused
        return counts

    def lengths(*args: Any, **more: Any) -> list[int]:
        return list(plan(*args, **more).values())

    rate, price = FIRST_ACCEPTED / (FIRST_ACCEPTED + 1), LEAST_PRICE
    for draft_step in (0.0, 0.05, 0.1, 0.5):
        [length] = alone = lengths({1: draft_step, 2: draft_step})
        assert rate**length >= price + draft_step > rate ** (length + 1)
        assert lengths({1: draft_step, 4: draft_step}, count=4) == alone * 4, (
            "a draft step takes as long for 4 sequences, and brings 4 tokens"
        )
        assert lengths({1: draft_step / 4, 4: draft_step}, count=4) == alone * 4
    assert lengths({1: 0.9, 2: 0.9}) == [], "a draft step that costs as much as a step"
    assert lengths({1: 0.0, 2: 0.0}, length=99) == [1], "the draft model's context"
    assert lengths({1: 0.0, 2: 0.0}, count=2, text=1, length=20) == lengths({1: 0.0, 2: 0.0}) * 2


def test_drafts_of_a_model_lose_a_bounded_time(seed: int) -> None:
    """Whatever prompts, answers and steps cost: requests whose drafts do not bring the time of their prompts get none, but for a
    share of the time. Requests whose drafts do get them."""
    for pays in (True, False):
        step, draft_step, prompt = random.uniform(0.5, 20), random.uniform(0, 0.3), random.uniform(0.01, 0.1)
        costs = Costs(
            {1: step, 2: step}, {1: draft_step * step, 2: draft_step * step}, {1: prompt * step, 2: 2 * prompt * step}
        )
        model_drafter = FakeDrafter()
        model_drafter.longest = 10_000
        speculation = Speculation(3, lambda costs=costs: costs, model_drafter)  # type: ignore[arg-type,misc]
        time = lost = 0.0
        served: list[bool] = []
        for request in range(400):
            tokens = list(range(random.randint(30, 300)))
            sequence = Sequence(str(request), tokens, len(tokens), SamplingParams(max_tokens=100), computed=len(tokens))
            begun = False
            for _ in range(1 if pays is False else 40):
                sequence.tokens.append(-2 - len(sequence.tokens))
                drafted = speculation.plan([sequence]).get(sequence, 0)
                chunk = Chunk(sequence, len(sequence.tokens) - 1, 1 + drafted, True, True, [7] * drafted)
                begun |= bool(drafted)
                lost += (draft_step * step * drafted + LEAST_PRICE * step * drafted) if drafted else 0.0
                time += step
                speculation.observe(InFlightStep([chunk], [chunk], None, bool(drafted)), True)  # type: ignore[arg-type]
                if drafted:
                    right = drafted if pays else 0
                    lost -= right * step
                    speculation.learn(chunk, right, right)
                sequence.computed = len(sequence.tokens)
            lost += costs.prompt_seconds(len(tokens)) if begun else 0.0
            served.append(begun)
            sequence.finish_reason = "stop"
        assert lost <= (GRANT + 4) * step + SHARE * time
        if pays:  # each of the first ones brings a SHARE of 40 steps, until that is enough for the longest prompt, of 30 steps
            assert all(served[round((30 - GRANT) / (40 * SHARE)) :])
        else:
            assert sum(served) < 100


def serve_with(speculation: Speculation, prompt: int, steps: int = 300) -> bool:
    """Whether a request gets drafts of the model. All are right."""
    tokens, begun = list(range(prompt)), False
    sequence = Sequence("a", tokens, prompt, SamplingParams(max_tokens=1000), computed=prompt)
    for _ in range(steps):
        tokens.append(-2 - len(tokens))
        drafted = speculation.plan([sequence]).get(sequence, 0)
        chunk = Chunk(sequence, len(tokens) - 1, 1 + drafted, True, True, [7] * drafted)
        speculation.observe(InFlightStep([chunk], [chunk], None, bool(drafted)), True)  # type: ignore[arg-type]
        if drafted:
            speculation.learn(chunk, drafted, drafted)
        begun, sequence.computed = begun or bool(drafted), len(tokens)
    sequence.finish_reason = "stop"
    return begun


def test_a_long_prompt_waits_until_its_price_is_saved() -> None:
    """A prompt that costs more than the grant gets drafts after a while, and then so do all."""
    costs, model_drafter = Costs({1: 1.0, 2: 1.0}, {1: 0.1, 2: 0.1}, {1: 0.03, 2: 0.06}), FakeDrafter()
    model_drafter.longest = 10_000
    speculation = Speculation(3, lambda: costs, model_drafter)  # type: ignore[arg-type]
    begun = [serve_with(speculation, 1000) for _ in range(24)]
    assert costs.prompt_seconds(1000) > 3 * GRANT and not any(begun[:12]) and all(begun[18:])


def test_a_model_drafts_after_a_busy_start() -> None:
    """Requests that begin while drafts cannot pay get some as soon as they can. Until then their prompts cost nothing."""

    costs = Costs({1: 1.0, 4: 1.0, 16: 1.0, 64: 8.0, 256: 32.0}, {1: 0.05, 2: 0.05}, {1: 0.05, 2: 0.1})
    speculation = Speculation(3, lambda: costs, OnDemand())  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=90)
    running = [Sequence(str(i), [*range(20), -1], 20, params, computed=20) for i in range(64)]
    assert speculation.plan(running) == {}
    assert len(speculation.plan(running[:4])) == 4


def test_a_head_comes_back_after_a_burst() -> None:
    """Drafts that do not pay beside many requests do again when these have ended. Meanwhile the head sees no steps."""
    costs = Costs({1: 1.0, 4: 1.0, 16: 1.0, 64: 8.0, 256: 32.0}, {1: 0.05, 2: 0.05}, {1: 0.0, 2: 0.0})
    model_drafter = FakeDrafter()
    speculation = Speculation(3, lambda: costs, model_drafter)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=90)
    running = [Sequence(str(i), [*range(20), -1], 20, params, computed=20) for i in range(64)]
    for _ in range(2):
        counts = speculation.plan(running[:2])
        speculation.drafts(counts)
        assert set(counts) == set(running[:2]) and all(map(model_drafter.reads_each_step, running[:2]))
        counts = speculation.plan(running)
        speculation.drafts(counts)
        assert not counts and not any(map(model_drafter.reads_each_step, running[:2]))


def test_text_pays_for_a_head_that_reads_each_step() -> None:
    """Where a head reads each step, text drafts only what pays for that, too; else the head pauses, and text drafts next."""
    text = [5] * 30
    for draft_step, reads in ((0.2, True), (0.95, False)):
        model_drafter = FakeDrafter()
        speculation = Speculation(
            2, lambda draft_step=draft_step: Costs({1: 1.0, 2: 1.0}, {1: draft_step, 2: draft_step}), model_drafter
        )  # type: ignore[arg-type,misc]
        sequence = Sequence("a", text, 29, SamplingParams(max_tokens=90), computed=29)
        planned = [speculation.plan([sequence]) for _ in range(2)]
        gain = sum(Acceptance().rate ** i - LEAST_PRICE for i in (1, 2))
        assert (gain > draft_step) == reads == model_drafter.reads_each_step(sequence)
        assert planned == [{sequence: 2} if reads else {}, {sequence: 2}]
        assert speculation._planned[sequence][0] == "ngram"


def test_the_price_of_a_long_prompt_is_never_that_of_a_short_one() -> None:
    costs = Costs({1: 1.0, 2: 1.0}, prompts={1: 1.0, 64: 2.0, 256: 2.0})
    assert [costs.prompt_seconds(tokens) for tokens in (64, 256, 2560)] == [2.0, 2.0, 20.0]


# --- answers with drafts -----------------------------------------------------------------------------------------------------


WHOLE = Submit("whole", [5], SamplingParams(max_tokens=24))  # where text drafts for it, tokens of its prediction are accepted


def mistaken(tokens: list[int], vocab_size: int) -> list[int]:
    """The tokens with some changed, left out or added."""
    found = list[int]()
    for token in tokens:
        chance = random.random()
        found += (
            [token]
            if chance > 0.15
            else [random.randrange(vocab_size)]
            if chance > 0.1
            else [token] * 2
            if chance > 0.05
            else []
        )
    return found


def predicting(submits: list[Submit], answers: dict[str, Answer], vocab_size: int = 101) -> list[Submit]:
    """The requests with predictions of their answers, which are wrong in places. Only that of WHOLE is right."""
    replace, tokens = msgspec.structs.replace, {name: answer.tokens for name, answer in answers.items()}
    guesses = {name: own if name == WHOLE.request_id else mistaken(own, vocab_size) for name, own in tokens.items()}
    return [replace(s, params=replace(s.params, prediction=guesses[s.request_id])) for s in submits]


def bent_submits(count: int, **fixed: Any) -> list[Submit]:
    """Requests with random parameters of all kinds; half of the prompts repeat themselves."""
    submits = []
    for i in range(count):
        prompt = [random.randrange(101) for _ in range(random.randint(1, 12))] * random.choice([1, 2])
        params = dict(
            max_tokens=random.randint(1, 24),
            presence_penalty=random.choice([0.0, 0.0, 1.5]),
            frequency_penalty=random.choice([0.0, 0.0, 0.7, -0.5]),
            repetition_penalty=random.choice([1.0, 1.0, 1.3, 0.8]),
            logit_bias=random.choice([{}, {}, {3: 4.0, 50: -100.0}]),
            min_tokens=random.choice([0, 0, 6]),
            stop_token_ids=random.sample(range(101), random.choice([0, 0, 8])),
            logprobs=random.choice([None, None, 2]),
            prompt_logprobs=random.choice([None, None, 1]),
        )
        submits.append(Submit(f"r{i}", prompt, random_params(**params | fixed)))
    return submits


def assert_answers(model: Transformer, submits: list[Submit], answers: dict[str, Answer]) -> None:
    for submit in submits:
        answer, params = answers[submit.request_id], submit.params
        assert_same(model, submit, answer.tokens)
        stopped = answer.tokens[-1] in params.stop_token_ids and len(answer.tokens) > params.min_tokens
        assert answer.finish_reason == ("stop" if stopped else "length")
        if params.logprobs is not None:
            rows = plain_logits(model, submit.prompt_ids + answer.tokens)[len(submit.prompt_ids) - 1 : -1]
            for entry, row, token in zip(answer.logprobs, rows, answer.tokens, strict=True):
                assert_logprobs(entry, row, token, 2)


def accepted(engine: Engine) -> int:
    assert all(0 <= d.accepted <= d.tokens and d.drafts <= d.tokens for d in engine.speculation.total.values())
    return sum(d.accepted for d in engine.speculation.total.values())


@torch.no_grad()
def random_head(model: Transformer) -> EagleHead:
    """A head with another number of KV heads, that knows some of the model's ids."""
    c = model.config
    known, own = random.choice([c.vocab_size, c.vocab_size // 2]), random.random() < 0.5
    shape = dict(n_layers=1, vocab_size=c.vocab_size, hidden_size=c.hidden_size, head_dim=c.head_dim, max_seq_len=c.max_seq_len)
    layer = replace(config_of("standard"), **shape, qk_norm=own)
    config = EagleConfig(layer, c.hidden_size, known, (0, 2, c.n_layers), norm_before_residual=random.random() < 0.5)
    head = EagleHead(config, Local(), model.norm.weight.device, torch.float32, own).eval().requires_grad_(False)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    head.targets.copy_(torch.randperm(c.vocab_size)[:known].sort().values)
    return head


def draft_for(model: Transformer, source: str) -> Transformer | EagleHead | None:
    """What drafts beside the text: nothing, the model itself, another one, or a head."""
    if source == "head":
        return random_head(model)
    if source == "itself":
        return model
    return random_model(config_of(source)) if source != "text" else None


@pytest.mark.parametrize("place", range(3))
def test_the_same_tokens_with_drafts(place: int, in_turn: Callable[..., str], seed: int) -> None:
    name = in_turn(("standard", "parallel", "hybrid:2", "desync-2x:4", "mistral"), place)
    model = random_model(config_of(name))
    draft = draft_for(model, in_turn(("text", "itself", "head", "parallel", "desync-4x:4"), place))
    submits = [WHOLE, *bent_submits(6)]
    submits = predicting(submits, serve(engine_of(model), submits))
    total = predicted = 0
    settings = (
        (dict(), 1000),
        (dict(max_batch_tokens=random.randint(5, 40), max_num_seqs=4), 2),
        (dict(n_blocks=14, max_batch_tokens=32), 3),
        (dict(max_num_seqs=1), 1),
    )
    for limits, at_once in random.sample(settings, 2):
        engine = engine_of(model, draft=draft, draft_tokens=random.choice([1, 3, 7]), **limits)
        for order in (submits, submits[::-1]):  # the second time, prompts are in the cache
            assert_answers(model, submits, serve(engine, order, at_once))
        total += accepted(engine)
        predicted += engine.speculation.total["prediction"].accepted
    assert total > 0 and (predicted > 0 or draft is model)  # whose drafts, always right, may take the place of all predictions


@pytest.mark.parametrize("place", range(2))
def test_a_model_that_drafts_for_itself_is_always_right(place: int, in_turn: Callable[..., Any], seed: int) -> None:
    """Whatever happens to a sequence, the draft model has seen its tokens, and draws with its noise."""
    model = random_model(config_of(in_turn(("standard", "ladder", "desync-2x:4", "mistral"), place)))
    setting = in_turn(LIMITS, place)
    limits, at_once = LIMITS[setting]
    submits = random_submits(4, max_tokens=20)
    engine = engine_of(model, draft=model, draft_tokens=random.choice([1, 3, 5]), **limits)
    with checked_caches(engine):
        for order in (submits, submits[::-1]):
            answers = serve(engine, order, at_once)
            for submit in submits:
                assert_same(model, submit, answers[submit.request_id].tokens)
    total = engine.speculation.total["model"]
    if limits.get("max_batch_tokens") != 1:  # which leaves no room for drafts
        assert total.tokens > 50 and total.accepted >= 0.95 * total.tokens  # they may differ at a near-tie
    if setting == "room for all":
        assert engine.meter.steps < (45 if engine.speculation.draft_tokens > 1 else 70)


@contextmanager
def checked_caches(engine: Engine) -> Iterator[None]:
    """After each draft, check the cache of an engine whose model drafts for itself: what counts as computed is what the target has."""
    drafter = engine.speculation.model_drafter
    assert drafter is not None
    made, size = drafter.draft, drafter.blocks.block_size
    target, own = (runner.cache.keys_values.flatten(2, 3) for runner in (engine.runner, drafter.runner))

    def checking(counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        drafts = made(counts)
        for sequence in counts:
            done = min(drafter._shadows[sequence].done, sequence.computed)
            rows = torch.tensor([sequence.blocks[i // size] * size + i % size for i in range(done)], dtype=torch.int64)
            torch.testing.assert_close(own[:, :, rows], target[:, :, rows], atol=1e-4, rtol=1e-4)
        return drafts

    with patch.object(drafter, "draft", checking):
        yield


def head_draft(
    model: Transformer,
    head: EagleHead,
    tokens: list[int],
    params: SamplingParams,
    draft: list[int],
    missed: Collection[int] = (),
) -> list[float]:
    """By how much each token of `draft` is worse for the head than its best one, after `tokens` and the tokens before, without a
    cache. missed: positions whose features it lacks."""
    streams = model.hidden_and_streams(torch.tensor([tokens[:-1]]), Causal(len(tokens) - 1, CPU), head.config.stream_layers)[1]
    features, inputs, worse = head.fuse(streams), tokens[1:], []
    features[:, list(missed)] = 0
    for i, token in enumerate(draft):
        hidden = head(head.embed(torch.tensor([inputs]), model), features, Causal(len(inputs), CPU))
        row = torch.full((model.config.vocab_size,), -torch.inf)
        row[head.targets] = head.logits(hidden[0, -1])
        if params.temperature:
            position = torch.tensor([[len(tokens) + i]])
            noise = exponential_noise(torch.tensor([[params.seed]]), position, torch.arange(len(row)))[0]
            row = row / params.temperature - noise.log()
        worse.append(float(row.max() - row[token]))
        features, inputs = torch.cat((features, hidden[:, -1:]), 1), [*inputs, token]
    return worse


def check_drafts_of_head(
    engine: Engine, model: Transformer, head: EagleHead, submits: list[Submit], at_once: int
) -> dict[str, Answer]:
    """Serve the requests, and check each draft of the engine's head against `head` and `model`, which have its weights on the
    CPU."""
    model_drafter, checked = engine.speculation.model_drafter, 0
    assert model_drafter is not None
    made = model_drafter.draft

    def checking(counts: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        nonlocal checked
        found = made(counts)
        for sequence, draft in found.items():
            assert len(draft) == counts[sequence]
            if (
                not sequence.cached_tokens and not engine.scheduler.preemptions
            ):  # else a row at the end of a block may be another one
                checked += 1
                assert max(head_draft(model, head, sequence.tokens, sequence.params, draft)) < 1e-3
        return found

    with patch.object(model_drafter, "draft", checking), patch.object(Acceptance, "learn"):
        answers = serve(engine, submits, at_once)
    assert checked > 0 and engine.speculation.total["head"].tokens > 0
    return answers


@torch.inference_mode()
def test_a_head_that_missed_steps_reads_their_tokens_alone(in_turn: Callable[..., Any], seed: int) -> None:
    """At random times it pauses. Its drafts are then those of its definition with features of zeros where it saw no step."""
    model = random_model(config_of(in_turn(("standard", "hybrid:2", "parallel"), 0)))
    head = random_head(model)
    engine = engine_of(model, draft=head, draft_tokens=4, max_batch_tokens=random.choice([13, 100]), max_num_seqs=4)
    model_drafter = engine.speculation.model_drafter
    planned = engine.speculation._plans
    missed = dict[Sequence, set[int]]()
    came_back = 0
    assert isinstance(model_drafter, HeadDrafter)
    made = model_drafter.draft

    def plans(running: list[Sequence]) -> Any:
        return {s: plan for s, plan in planned(running).items() if plan[0] == "head" and s.generated % 10 < 5}

    def checking(counts: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        nonlocal came_back
        computed = [
            (c.sequence, c.start, c.sequence.computed) for c in (model_drafter._last.chunks if model_drafter._last else ())
        ]
        found = made(counts)
        for s, start, stop in computed:
            if (
                s not in model_drafter._shadows or model_drafter._shadows[s].done < stop
            ):  # it pauses, or still fills what it missed
                missed.setdefault(s, set()).update(range(start, stop))
        for s, draft in found.items():
            came_back += s in missed
            assert max(head_draft(model, head, s.tokens, s.params, draft, missed.get(s, ()))) < 1e-3
        return found

    submits = [
        Submit(str(i), random.sample(range(101), 9), random_params(max_tokens=30, top_k=0, top_p=1.0, min_p=0.0))
        for i in range(6)
    ]
    with (
        patch.object(engine.speculation, "_plans", plans),
        patch.object(model_drafter, "draft", checking),
        patch.object(Acceptance, "learn"),
    ):
        answers = serve(engine, submits, 2)
    assert came_back > 6 and not engine.scheduler.preemptions
    for submit in submits:
        assert_same(model, submit, answers[submit.request_id].tokens)


@pytest.mark.parametrize("place", range(2))
@torch.inference_mode()
def test_a_head_drafts_what_its_definition_says(place: int, in_turn: Callable[..., Any], seed: int) -> None:
    """In chunks, in a batch, after preemptions: each draft is the one that the head makes without a cache."""
    model = random_model(config_of(in_turn(("standard", "hybrid:2", "parallel", "desync-2x:4"), place)))
    head = random_head(model)
    limits, at_once = LIMITS[in_turn([name for name in LIMITS if name != "single tokens"], place)]
    engine = engine_of(model, draft=head, draft_tokens=4, **limits)
    submits = random_submits(4, max_tokens=16, top_k=0, top_p=1.0, min_p=0.0)
    answers = check_drafts_of_head(engine, model, head, submits, at_once)
    for submit in submits:
        assert_same(model, submit, answers[submit.request_id].tokens)


def test_the_device_waits_from_the_last_draft_only_after_a_draft(seed: int) -> None:
    """Not from one of an earlier step: the time since then was no waiting."""
    model = random_model(config_of("standard"))
    engine = engine_of(model, draft=model, draft_tokens=4)
    model_drafter = engine.speculation.model_drafter
    assert model_drafter is not None
    submit = Submit("a", [5], SamplingParams(max_tokens=30, temperature=0, logit_bias={7: 1000.0}))
    stale: Any = object()
    model_drafter.ready = stale
    with patch.object(model_drafter, "longest_draft", return_value=0), patch.object(engine.runner, "wait_from") as wait:
        serve(engine, [submit])
    assert engine.speculation.total["ngram"].tokens > 0
    assert all(call.args[0] is not stale for call in wait.call_args_list)


def test_a_draft_model_with_a_short_context_stops_there(seed: int) -> None:
    model = random_model(config_of("standard"))
    twin = random_model(replace(config_of("standard"), n_kv_heads=model.config.n_kv_heads, max_seq_len=30))
    twin.load_state_dict(model.state_dict())
    submit = Submit("a", [1, 2, 3], random_params(max_tokens=60))
    engine = engine_of(model, draft=twin, draft_tokens=4)
    assert_same(model, submit, serve(engine, [submit])["a"].tokens)
    assert 10 < engine.speculation.total["model"].accepted <= 27


def test_a_prediction_saves_steps(seed: int) -> None:
    """A right prediction of a long answer takes a step for at least three tokens on average, and the text that it repeats itself
    is found without one."""
    model = random_model(config_of("hybrid:2"))
    submit = Submit("a", [5], random_params(max_tokens=60))
    tokens = serve(engine_of(model), [submit])["a"].tokens
    params = msgspec.structs.replace(submit.params, prediction=tokens)
    engine = engine_of(model, draft_tokens=7)
    answer = serve(engine, [Submit("a", [5], params)])["a"]
    assert_same(model, submit, answer.tokens)
    assert engine.meter.steps <= 20 or answer.tokens != tokens
    biased = Submit("a", [5], SamplingParams(max_tokens=60, temperature=0, logit_bias={7: 1000.0}))
    engine = engine_of(model, draft_tokens=7)
    assert serve(engine, [biased])["a"].tokens == [7] * 60
    assert engine.speculation.total["ngram"].accepted >= 40 and engine.meter.steps <= 20


def test_what_was_drafted_and_accepted_is_reported(seed: int) -> None:
    model = random_model(config_of("standard"))
    submits = bent_submits(6, stop_token_ids=[], min_tokens=0)
    submits = predicting(submits, serve(engine_of(model), submits))
    engine = engine_of(model, draft_tokens=4)
    for submit in submits:
        assert engine.submit(submit) is None
    drafted = right = 0
    while engine.has_work():
        for output in engine.step():
            assert output.accepted == len(output.token_ids) - 1 <= output.drafted <= 4
            assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
            drafted, right = drafted + output.drafted, right + output.accepted
    totals = engine.stats().drafted
    assert (sum(t.tokens for t in totals.values()), sum(t.accepted for t in totals.values())) == (drafted, right)
    assert engine.stats().generation_tokens == sum(s.params.max_tokens for s in submits)


WORD = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 20}}, "required": ["word"]}
JSON = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(WORD | {"additionalProperties": False}))


def scores(model: Transformer, prompt: list[int], output: list[int], params: SamplingParams) -> torch.Tensor:
    """What sampling without filters compares, (V,)."""
    row = plain_logits(model, prompt + output)[-1]
    if not params.temperature:
        return row
    position = torch.tensor([[len(prompt) + len(output)]])
    noise = exponential_noise(torch.tensor([[params.seed]]), position, torch.arange(len(row)))[0]
    return row / params.temperature - noise.log()


def test_grammars(seed: int) -> None:
    """Answers under a grammar are the same with drafts. Predictions go on behind the end of the grammar."""
    model, tokenizer = cheap(), tiny_tokenizer()
    total = 0
    for _ in range(3):
        params = SamplingParams(max_tokens=40, grammar=JSON, seed=random.getrandbits(60), temperature=random.choice([0.0, 0.8]))
        submit = Submit("a", [random.randrange(3, 300) for _ in range(5)], params)
        plain = serve(engine_of(model, tokenizer=tokenizer), [submit])["a"]
        guess = mistaken(plain.tokens, 1024) if random.random() < 0.5 else plain.tokens
        predicted = msgspec.structs.replace(params, prediction=[*guess, *plain.tokens[:3]])
        engine = engine_of(model, tokenizer=tokenizer, draft_tokens=5)
        answer = serve(engine, [replace_params(submit, predicted)])["a"]
        total += accepted(engine)
        same = common_prefix(answer.tokens, plain.tokens)
        if answer.tokens != plain.tokens:  # only at a near-tie
            row = scores(model, submit.prompt_ids, plain.tokens[:same], params)
            assert abs(row[plain.tokens[same]] - row[answer.tokens[same]]) < 1e-3
        elif plain.finish_reason == "stop":
            assert json.loads(tokenizer.decode(answer.tokens)).keys() == {"word"}
    assert total > 0


def replace_params(submit: Submit, params: SamplingParams) -> Submit:
    return msgspec.structs.replace(submit, params=params)


def steps_saved(engine: Engine, submit: Submit) -> tuple[list[int], int, int]:
    """The answer's tokens, the steps that it took, and those that its drafts have saved, as `learn` is told."""
    learn, total = engine.speculation.learn, 0

    def counting(chunk: Chunk, accepted: int, saved: int) -> None:
        nonlocal total
        total += saved
        learn(chunk, accepted, saved)

    with patch.object(engine.speculation, "learn", counting):
        answer = serve(engine, [submit])[submit.request_id]
    return answer.tokens, engine.meter.steps, total


ENDS: dict[str, dict[str, Any]] = {
    "most tokens": dict(),
    "stop token": dict(),
    "grammar": dict(grammar=JSON, max_tokens=40),
    "late grammar": dict(grammar=JSON, max_tokens=40, late_grammar=True),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_draft_saves_the_steps_that_an_answer_takes_without_it(end: str, seed: int) -> None:
    """Wherever in a draft the answer ends, and if a token is drawn again."""
    model, tokenizer, compared, most = cheap(), tiny_tokenizer(), 0, 0
    for length in range(2, 14):
        params = SamplingParams(**dict(max_tokens=length, temperature=0.8, seed=random.getrandbits(60)) | ENDS[end])
        submit = Submit("a", random.sample(range(3, 300), 6), params)
        tokens, steps, _ = steps_saved(engine_of(model, tokenizer=tokenizer), submit)
        more = dict(prediction=[*tokens, *random.sample(range(3, 300), 9)])
        if end == "stop token":
            more |= dict(max_tokens=60, stop_token_ids=tokens[-1:])
            steps = tokens.index(tokens[-1]) + 1
            tokens = tokens[:steps]
        engine = engine_of(model, tokenizer=tokenizer, draft_tokens=random.choice([1, 3, 7]))
        found, fewer, saved = steps_saved(engine, replace_params(submit, msgspec.structs.replace(params, **more)))
        if found == tokens:  # else there was a near-tie
            assert fewer + saved == steps
            compared, most = compared + 1, max(most, saved)
    assert compared > 6 and most > 1


def test_a_right_guess_of_the_end_of_short_answers_pays_for_no_prompt(seed: int) -> None:
    """The model always guesses the second of two tokens, which ends the answer. That saves no step."""
    model, plain = random_model(config_of("standard")), SamplingParams(max_tokens=2, temperature=0)
    engine, draft_step = engine_of(model, draft=model, draft_tokens=1), 0.5
    engine.speculation.costs = Costs({1: 1.0, 2: 1.0}, {1: draft_step, 2: draft_step}, {1: 0.01, 2: 0.02})
    for i in range(60):
        prompt = random.sample(range(101), 6)
        first, second = serve(engine_of(model), [Submit("a", prompt, plain)])["a"].tokens
        if first != second:
            serve(engine, [Submit(str(i), prompt, msgspec.structs.replace(plain, max_tokens=9, stop_token_ids=[second]))])
    total = engine.speculation.total["model"]
    assert total.accepted == total.tokens == total.drafts > 5
    cost = draft_step + LEAST_PRICE + LEAST_GAIN + engine.speculation.costs.prompt_seconds(7)
    assert total.drafts * cost <= GRANT + cost + SHARE * engine.meter.steps


def test_tokens_behind_a_stop_string_pay_for_no_prompt(seed: int) -> None:
    """The model guesses all tokens. A stop string ends each answer after its second one, which a step draws without a draft, too."""
    engine, draft_step = engine_of(model := random_model(config_of("standard")), draft=model, draft_tokens=3), 0.1
    engine.speculation.costs = Costs({1: 1.0, 2: 1.0}, {1: draft_step, 2: draft_step}, {1: 0.01, 2: 0.02})
    for i in range(60):
        assert engine.submit(Submit(str(i), random.sample(range(101), 6), SamplingParams(max_tokens=60, temperature=0))) is None
        sent = 0
        while sent < 2:
            sent += sum(len(output.token_ids) for output in engine.step())
        engine.abort(Abort(str(i), used=2))
    total = engine.speculation.total["model"]
    assert total.drafts > 5 and total.tokens == 3 * total.drafts
    cost = 3 * (draft_step + LEAST_PRICE) + LEAST_GAIN + engine.speculation.costs.prompt_seconds(7)
    assert total.drafts * cost <= GRANT + cost + SHARE * engine.meter.steps


def test_sampled_tokens_follow_the_distribution(seed: int) -> None:
    """The second token after each first one. The draft is the likeliest token, which is right as often as the model draws it."""
    model = random_model(replace(config_of("standard"), vocab_size=12))
    prompt = [1, 2, 3]
    exact = [plain_logits(model, [*prompt, first])[-1].double().softmax(-1).numpy() for first in range(12)]
    prediction = [token for first in range(12) for token in (2, 3, first, int(exact[first].argmax()))]
    engine = engine_of(model, draft_tokens=1, max_num_seqs=12)
    submits = [
        Submit(str(i), prompt, SamplingParams(max_tokens=3, seed=seed * 10_000 + i, prediction=prediction)) for i in range(2000)
    ]
    counts = np.zeros((12, 12))
    with patch.object(Acceptance, "learn"), patch.object(Budget, "take"):  # drafts go on, although many are wrong
        answers = serve(engine, submits, 12)
    for answer in answers.values():
        counts[answer.tokens[0], answer.tokens[1]] += 1
    total = engine.speculation.total["prediction"]
    assert total.accepted > 100 and total.tokens > total.accepted + 100
    for row, probabilities in zip(counts, exact, strict=True):
        assert row.sum() < 100 or chi_square_is_plausible(row, probabilities)


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_a_rate_stands_in_for_agreement(rate: float, seed: int) -> None:
    """Each token of a draft whose predecessors are right is right at this rate, of a head that never agrees. Text drafts nothing."""
    model = random_model(config_of("standard"))
    engine = engine_of(model, draft=random_head(model), draft_tokens=3, max_num_seqs=8, accept_rate=rate)
    submits = [Submit(str(i), [1, 2, 3] * 4, SamplingParams(max_tokens=60, seed=i)) for i in range(40)]
    right, wrong = 0, 0
    learn = engine.speculation.learn

    def counting(chunk: Chunk, accepted: int, saved: int) -> None:
        nonlocal right, wrong
        right, wrong = right + accepted, wrong + (accepted < len(chunk.draft) and chunk.sequence.finish_reason is None)
        learn(chunk, accepted, saved)

    with patch.object(engine.speculation, "learn", counting), patch.object(Acceptance, "learn"):
        answers = serve(engine, submits, 8)
    assert all(len(answer.tokens) == 60 for answer in answers.values())
    total = engine.speculation.total
    assert total["head"].tokens > 1000 and total["ngram"].tokens == 0
    assert abs(right / (right + wrong) - rate) <= 5 * (rate * (1 - rate) / (right + wrong)) ** 0.5


def test_auto_is_the_head_in_the_folder_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.pth").touch()
    models = [str(tmp_path), str(tmp_path / "model.pth")]
    assert [draft_models.resolved("auto", model) for model in models] == ["ngram", "ngram"]
    (tmp_path / "draft").mkdir()
    assert [draft_models.resolved("auto", model) for model in models] == [str(tmp_path / "draft")] * 2


def test_a_stand_in_for_agreement_is_only_for_random_weights(tmp_path: Path) -> None:
    base = model_config("tiny", None, 1)
    head = draft_models.find_draft("random-head", "tiny", base, None, 1)
    assert head is not None and isinstance(head.load(ALONE, torch.float32), EagleHead)
    draft_models.check_accept_rate(0.5, head, "tiny")
    trained = str(MODELS / "tiny-hybrid")
    for rate, draft, model, words in (
        (1.5, head, "tiny", "from 0 to 1"),
        (0.5, head, trained, "has trained ones"),
        (0.5, None, "tiny", "needs drafts of a model or head"),
    ):
        with pytest.raises(UserError, match=words):
            draft_models.check_accept_rate(rate, draft, model)
    with pytest.raises(UserError, match="presets, which have random weights"):
        draft_models.find_draft("random-head", trained, base, None, 1)
    with pytest.raises(UserError, match="3 different layers of the model, which has 2"):
        draft_models.find_draft("random-head", "tiny:2", model_config("tiny:2", None, 1), None, 1)


# --- ranks -------------------------------------------------------------------------------------------------------------------


def rank_speculates(
    world: World, directory: Path, source: str, submits: list[Submit], random_seed: int
) -> tuple[list[Answer], int, list[float], float]:
    random.seed(random_seed)
    torch.manual_seed(random_seed)
    model = load(world, directory)
    draft: Transformer | EagleHead | None = random_head(model) if source == "head" else None
    if source in ("whole", "split"):
        with patch.object(draft_models, "REPLICATED", 0 if source == "split" else 1 << 30):
            found = draft_models.find_draft(str(directory), None, model.config, None, world.world_size)
            assert found is not None
            draft = found.load(world, torch.float32)
        assert isinstance(draft, Transformer) and draft.comm.world_size == (world.world_size if source == "split" else 1)
    engine = engine_of(model, world=world, draft=draft, max_batch_tokens=30, draft_tokens=5)
    served = list(serve(engine, submits, 3).values()), accepted(engine)
    costs = engine.speculation.measure()
    assert costs.seconds(1) > 0
    assert source == "text" or min(costs.draft_step_price(1, 1), costs.prompt_seconds(1)) > 0
    return *served, [costs.seconds(rows) for rows in (1, 20)], costs.prompt_seconds(9)


def test_ranks_agree_and_give_the_same_tokens(ranks: Ranks, tmp_path: Path, in_turn: Callable[..., str], seed: int) -> None:
    n = random.choice([2, 4])
    name = in_turn(("standard", "parallel", "hybrid:2", "desync-2x:4"), n // 2)
    save_checkpoint(random_model(config_of(name)), tmp_path, torch.float32)
    model = load(ALONE, tmp_path)
    submits = [WHOLE, *bent_submits(7 if n == 2 else 3)]  # each step of more ranks than cores is slow
    submits = predicting(submits, serve(engine_of(model), submits))
    results = ranks.run(n, rank_speculates, tmp_path, in_turn(("text", "whole", "split", "head"), n // 2), submits, seed)
    assert all(other == results[0] for other in results), "the ranks disagree"
    answers, right, *_ = results[0]
    assert right > 0
    assert_answers(model, submits, {s.request_id: a for s, a in zip(submits, answers, strict=True)})


def test_steps_are_measured_when_the_first_draft_needs_it(seed: int) -> None:
    submit = Submit("a", [5], SamplingParams(max_tokens=30, temperature=0, logit_bias={7: 1000.0}))
    for limits in (dict(), dict(max_batch_tokens=1), dict(max_num_seqs=1)):
        engine = engine_of(random_model(config_of("mistral")), draft_tokens=3, **limits)
        engine.speculation.costs = None
        assert serve(engine, [submit])["a"].tokens == [7] * 30
        assert engine.speculation.costs is not None and engine.speculation.costs.row_price(1) >= LEAST_PRICE


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_measured_step_is_a_real_one_and_changes_no_cache(kv_dtype: str, seed: int) -> None:
    """On a CPU, with the host's work and drafts where there are more rows than sequences."""
    engine = engine_of(random_model(config_of("hybrid:2")), draft_tokens=5, max_num_seqs=3, kv_dtype=kv_dtype)
    runner, cache = engine.runner, engine.runner.cache
    cache.invent()
    held = [x.view(torch.uint8).clone() for x in (cache.keys_values, cache.scales) if x is not None]
    with patch.object(runner, "launch", wraps=runner.launch) as launch:
        for rows in range(1, 19):
            assert runner.seconds(rows) > 0
            chunks = launch.call_args.args[0]
            assert sum(len(c.draws) for c in chunks) == sum(c.count for c in chunks) == rows and len(chunks) == min(rows, 3)
    assert all(torch.equal(x.view(torch.uint8), y) for x, y in zip((cache.keys_values, cache.scales), held, strict=False))


def test_a_draft_model_that_does_not_fit_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    save_checkpoint(random_model(config_of("standard")), tmp_path, torch.float32)
    copy = Path(shutil.copytree(MODELS / "tiny-parallel", tmp_path / "renamed"))
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["Ġand"], vocab["Ġthe"] = vocab["Ġthe"], vocab["Ġand"]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    config = json.loads((MODELS / "tiny-standard" / "config.json").read_text()) | {
        "num_hidden_layers": 1,
        "target_hidden_size": 64,
    }
    (narrow / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLMEagle3"]}))
    for speculate, words in (
        ("magic", "magic is neither ngram, auto nor a model"),
        (narrow, "hidden states of width 64, but the model's have 192"),
        (tmp_path, "101 tokens, the model's 1024"),
        (copy, "its tokenizer has other tokens"),
    ):
        with patch("engine.llm.load_model", side_effect=AssertionError), pytest.raises(UserError, match=words) as error:
            LLM(TINY, world=ALONE, speculate=str(speculate))
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="draft_tokens"):
        LLM(TINY, world=ALONE, speculate="ngram", draft_tokens=0)


def test_a_prediction_with_an_unknown_id_is_refused() -> None:
    engine = engine_of(random_model(config_of("standard")), draft_tokens=3)
    refused = engine.submit(Submit("a", [1], SamplingParams(prediction=[3, 101])))
    assert refused is not None and "101" in refused.message
