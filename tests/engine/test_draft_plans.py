"""When there are drafts, and how long they are: the suffix automaton and the index of prompts against their definitions, and what
plans of text and of draft models gain and cost."""

import random
from typing import Any

import pytest

from engine.draft_costs import FIRST_ACCEPTED, LEAST_PRICE, NO_DRAFT, SHARE, Acceptance, Budget, Costs
from engine.protocol import SamplingParams, Submit, joined
from engine.runner import InFlightStep
from engine.sequence import Chunk, Sequence, common_prefix
from engine.speculation import GRANT, TEXT_GRANT, Speculation
from engine.text_drafter import END, GAP, GRAM, MOST_INDEXED, MOST_WITH_GRAMMAR, PromptIndex, SuffixAutomaton, TextDrafter
from tests.engine.test_engine import assert_same, config_of, engine_of, random_model, random_params, serve

CHEAP = 0.15  # price of a drafted row


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


@pytest.mark.parametrize(("salt", "of_other"), [("x", None), (None, "x"), ("x", "y"), ("x", "x")])
def test_a_prompt_with_a_salt_gives_and_takes_no_drafts(salt: str | None, of_other: str | None, seed: int) -> None:
    """What a draft speeds up tells what another's prompt has."""
    model = random_model(config_of("standard"))
    varied = random_params(max_tokens=40, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, cache_salt=salt)
    asked = Submit("a", random.sample(range(101), 6), varied)
    tokens = serve(engine_of(model), [asked])["a"].tokens
    engine = engine_of(model, draft_tokens=4, ngram_prompts=200)
    serve(engine, [Submit("b", tokens, random_params(max_tokens=3, cache_salt=of_other))])
    assert_same(model, asked, serve(engine, [asked])["a"].tokens)
    assert not engine.speculation.total["prompts"].tokens


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
    late = SamplingParams(max_tokens=100, grammar="any", late_grammar=True)  # mostly takes no mask
    assert TextDrafter(Sequence("a", [1, 2] * 5, 10, late), 8).most == 8


def test_what_drafts_have_brought_is_no_credit_for_trials() -> None:
    acceptance = Acceptance()
    for _ in range(5):
        acceptance.learn(saved=4, drafted=4, cost=0.4)
    acceptance.learn(saved=0, drafted=4, cost=3.0)
    assert acceptance.lost == 3.0 and acceptance.trial(0.9, 0.0, 100) == NO_DRAFT


def test_a_budget_saves_no_more_than_a_request_has_lacked() -> None:
    budget, params = Budget(), SamplingParams()
    budget.add(1000.0)
    first, second, third = (Sequence(name, [1], 1, params) for name in "abc")
    assert not budget.take(first, 5.0, grant=2.0)
    budget.add(1000.0)
    assert budget.take(second, 5.0, grant=2.0) and not budget.take(third, 5.0, grant=2.0)


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
    for _ in range(2):
        for _ in range(80):  # a share of their time pays for what the last drafts have lost
            seconds, _ = answer_by_text(speculation, prompt, long, long)
        assert seconds - costs.seconds(40) < 0.7 * len(long), "drafts pay"
        answers = [answer_by_text(speculation, prompt, short, short, used) for _ in range(400)]
        time, most = sum(seconds for seconds, _ in answers), costs.seconds(8) - 1 + ahead
        assert time - 400 * (costs.seconds(40) + 1) <= TEXT_GRANT + most + SHARE * time
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
    cached = Sequence("cached", [*range(1000), -1], 1000, SamplingParams(max_tokens=90), computed=1000, cached_tokens=990)
    other = Speculation(3, lambda: costs, FakeDrafter())  # type: ignore[arg-type]
    other.model_drafter.longest = 10_000  # type: ignore[union-attr]
    other.plan([cached])
    assert other.model_drafter.longest_draft(cached), "only what is not cached costs something"  # type: ignore[union-attr]


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
