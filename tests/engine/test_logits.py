"""The effects of a request's parameters on its logits: penalties, biases, allowed ids, grammars. Also log-probabilities."""

import random
import re
from functools import cache
from typing import Any

import llguidance
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MinNewTokensLengthLogitsProcessor, NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from engine.grammars import Grammars
from engine.protocol import SamplingParams, ThinkingBudget
from engine.sampler import advance, check_ids, new_state, process, score_prompts, sibling, token_logprobs
from engine.sequence import Chunk, Draw, Sequence
from errors import UserError
from tests import MODELS
from tests.engine.test_engine import end_of_thinking
from tests.support.masks import allowed
from text.tokenizer import Tokenizer
from text.tokenizer_files import load_tokenizer

CPU = torch.device("cpu")
TINY = MODELS / "tiny-hybrid"
VOCAB = 37
MODEL_VOCAB = 1030  # a model's vocabulary may be padded beyond the tokenizer's 1024


def sequence_of(prompt: list[int], output: list[int], vocab: int = VOCAB, **params: Any) -> Sequence:
    wanted = SamplingParams(max_tokens=100, **params)
    sequence = Sequence("a", [*prompt, *output], len(prompt), wanted)
    check_ids(prompt, vocab)
    sequence.state = new_state(wanted, vocab, CPU, grammars().tokenizer if wanted.thinking else None)
    return sequence


def next_draw(sequence: Sequence) -> Draw:
    """The draw of the sequence's next token. Some of its last generated tokens become a draft, which changes nothing."""
    drafted = random.randint(0, sequence.generated - sequence.state.counted)
    whole, kept = sequence.tokens, len(sequence.tokens) - drafted
    sequence.tokens = whole[:kept]
    return Draw(sequence, len(whole), whole[kept:])


def draw_of(prompt: list[int], output: list[int], vocab: int = VOCAB, **params: Any) -> Draw:
    return next_draw(sequence_of(prompt, output, vocab, **params))


def random_ids(longest: int, vocab: int = VOCAB) -> list[int]:
    """Token ids with repetitions."""
    few = [random.randrange(vocab) for _ in range(6)]
    return [random.choice(few) for _ in range(random.randint(0, longest))]


def random_logits(rows: int, vocab: int = VOCAB) -> Tensor:
    """Logits (rows, vocab). Two in a row differ by at least 1e-3, because the order of equal ones is arbitrary."""
    logits = torch.randn(rows, vocab) * 3
    return logits + logits.argsort(-1).argsort(-1) * 1e-3


# --- penalties -----------------------------------------------------------------------------------------------------------


def openai(logits: np.ndarray, output: list[int], presence: float, frequency: float) -> np.ndarray:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, where c counts the tokens sampled before."""
    counts = np.bincount(np.array(output, dtype=np.int64), minlength=len(logits))
    return logits - counts * frequency - (counts > 0) * presence


def test_a_batch_is_its_rows(seed: int) -> None:
    """All penalties together, those of transformers and OpenAI, with different parameters in each row. Rows without parameters keep every bit, and the input
    tensor is not changed."""
    for _ in range(20):
        draws, expected = [], []
        logits = random_logits(random.randint(2, 8))
        for row in logits:
            prompt, output = [2, *random_ids(9)], random_ids(9)
            if random.random() < 0.3:
                draws.append(draw_of(prompt, output))
                expected.append(row.double().numpy())
                continue
            repetition = random.choice([1.0, 0.5, 1.4, 2.0])
            presence, frequency = (random.choice([0.0, random.uniform(-2, 2)]) for _ in range(2))
            bias = random.choice([{}, {3: 2.5, 30: -100.0}])
            draws.append(
                draw_of(
                    prompt,
                    output,
                    repetition_penalty=repetition,
                    presence_penalty=presence,
                    frequency_penalty=frequency,
                    logit_bias=bias,
                )
            )
            wanted = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + output]), row[None].clone())
            wanted = openai(wanted[0].double().numpy(), output, presence, frequency)
            for i, value in bias.items():
                wanted[i] += value
            expected.append(wanted)
        before = logits.clone()
        found = process(logits, draws)
        assert torch.equal(logits, before)
        np.testing.assert_allclose(found.numpy(), np.stack(expected), atol=1e-5)
        for row, draw, same in zip(found, draws, logits, strict=True):
            if draw.sequence.params == SamplingParams(max_tokens=100):
                assert torch.equal(row, same)


def test_nothing_asked_nothing_copied() -> None:
    logits = random_logits(3)
    assert process(logits, [draw_of([1], [2, 3]) for _ in range(3)]) is logits


def test_counts_follow_the_output(seed: int) -> None:
    """One or several tokens may be new. None is counted twice if a sequence is processed again with the same tokens, as after a
    preemption."""
    for _ in range(20):
        prompt = [1, 2, 3]
        sequence = sequence_of(prompt, [], frequency_penalty=1.0)
        output: list[int] = []
        for _ in range(15):
            output += [random.randrange(5) for _ in range(random.choice([0, 0, 1, 1, 3]))]  # 0: as after a preemption
            sequence.tokens = prompt + output
            logits = random_logits(1)
            draw = next_draw(sequence)
            found = process(logits, [draw])
            np.testing.assert_allclose(found[0].numpy(), openai(logits[0].numpy(), output, 0.0, 1.0), atol=1e-5)
            assert sequence.state.counts.tolist() == [output[: draw.sequence.generated].count(i) for i in range(VOCAB)]


# --- biases and masks ------------------------------------------------------------------------------------------------------


def test_logit_bias_and_allowed_ids(seed: int) -> None:
    for _ in range(30):
        bias = {i: random.uniform(-100, 100) for i in random.sample(range(VOCAB), random.choice([0, 1, 5]))}
        ids = random.choice([None, random.sample(range(VOCAB), random.randint(1, 6))])
        logits = random_logits(1)
        found = process(logits, [draw_of([1], [2], logit_bias=bias, allowed_token_ids=ids)])[0]
        for i in range(VOCAB):
            if ids is not None and i not in ids:
                assert found[i] == -torch.inf
            else:
                assert found[i].item() == pytest.approx(logits[0, i].item() + bias.get(i, 0.0), abs=1e-4)


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "banned", "stop_token_ids", "prompt"])
def test_ids_outside_the_vocabulary_are_refused(field: str, seed: int) -> None:
    for outside in (VOCAB, VOCAB + 1000, -1):
        params: dict[str, Any] = {"logit_bias": {outside: 1.0}} if field == "logit_bias" else {field: [0, outside]}
        params = {field: [[1], [0, outside]]} if field == "banned" else params
        prompt = params.pop("prompt", [1])
        with pytest.raises(
            UserError, match=f"^token id {outside} is outside the model's vocabulary of {VOCAB}; use ids 0 to {VOCAB - 1}$"
        ):
            sequence_of(prompt, [], **params)
    edges = [0, VOCAB - 1]
    sequence_of(edges, [], logit_bias=dict.fromkeys(edges, 1.0), allowed_token_ids=edges, stop_token_ids=edges)


def test_min_tokens_masks_stops_as_transformers_does(seed: int) -> None:
    for _ in range(30):
        stops, minimum = random.sample(range(VOCAB), random.randint(1, 4)), random.randint(1, 6)
        prompt, output = [1, *random_ids(5)], random_ids(9)
        logits = random_logits(1)
        reference = MinNewTokensLengthLogitsProcessor(len(prompt), minimum, stops, device="cpu")
        expected = reference(torch.tensor([prompt + output]), logits.clone())
        found = process(logits, [draw_of(prompt, output, stop_token_ids=stops, min_tokens=minimum)])
        assert torch.equal(found, expected)
        assert torch.isinf(found).any() == (len(output) < minimum)


def test_banned_sequences_are_those_of_transformers(seed: int) -> None:
    """Of generated tokens, in a batch with rows of other parameters. Theirs reads the whole input, so it gets the output alone."""
    changed = 0
    for _ in range(40):
        rows = []
        for _ in range(random.randint(1, 5)):
            output = random_ids(9)
            ends = [output[random.randint(0, 9) :] for _ in range(random.choice([0, 1, 5]))]
            banned = [[*random.choice([[], [0]]), *(end or random_ids(2)), random.randrange(VOCAB)] for end in ends]
            rows.append(([1, *random_ids(5)], output, banned))
        logits = random_logits(len(rows))
        found = process(logits, [draw_of(prompt, output, banned=banned) for prompt, output, banned in rows])
        for row, given, (_, output, banned) in zip(found, logits, rows, strict=True):
            ids = torch.tensor([output], dtype=torch.int64)
            expected = NoBadWordsLogitsProcessor(banned)(ids, given[None].clone())[0] if banned else given
            assert torch.equal(row, expected)
            changed += any(len(one) > 1 and row[one[-1]] == -torch.inf and [one[-1]] not in banned for one in banned)
    assert changed > 10


def test_a_grammar_wins_where_all_that_it_allows_is_banned(seed: int) -> None:
    tokenizer = grammars().tokenizer
    assert tokenizer is not None
    [one, two] = [next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == text) for text in (b"1", b"2")]
    pairs = [[one, one], [two, two]]
    for banned, expected in (([[one]], "222"), (pairs, "(12)*1|(12)*|(21)*2?"), ([*pairs, [one, two], [two, one]], "[12]*")):
        text, complete = generate("start: /[12]{3}/", 1.0, allowed_token_ids=[one, two, *tokenizer.eos_ids], banned=banned)
        assert complete and re.fullmatch(expected, text) and len(text) == 3
    assert generate("start: /1{3}/", 1.0, banned=[[one, one]]) == ("111", True)


def test_reasoning_ends_after_its_budget(seed: int) -> None:
    """The tokens of answers that may begin and end reasoning, with and without special tokens, whole or in other tokens."""
    forced, vocab = 0, 1030
    tokenizer = grammars().tokenizer
    assert tokenizer is not None
    for _ in range(150):
        start, end = random.choice([("<|user|>", "<|assistant|>"), ("<think>", "</think>"), ("", "</think>")])
        budget = ThinkingBudget(random.choice([0, 1, 2, 4, 30]), start, end, tokenizer.encode(end, False))
        texts = [start, end, end[:5], end[5:], "<", ">", "\n", " a", "bc"]
        output = tokenizer.encode(random.choice([start, start, "\n" + start, random.choice(texts)]), False)
        sequence = sequence_of([1], [], vocab, thinking=budget)
        for _ in range(8):
            sequence.tokens = [1, *output]
            logits = random_logits(1, vocab)
            first = sequence.state.thinking.seen if sequence.state.thinking else 0
            kept = random.randint(min(first, len(output)), len(output))
            draw = Draw(sequence, 1 + len(output), output[kept:])
            sequence.tokens = [1, *output[:kept]]
            expected, found = end_of_thinking(output, budget), process(logits, [draw])[0]
            assert (found.isneginf().sum() == vocab - 1) == (expected is not None)
            if expected is not None:
                assert found[expected] == logits[0, expected]
                forced += 1
            output = [*output, expected] if expected is not None else output + tokenizer.encode(random.choice(texts), False)
    assert forced > 100


# --- grammars ----------------------------------------------------------------------------------------------------------------


@cache
def grammars() -> Grammars:
    return Grammars(load_tokenizer(TINY), MODEL_VOCAB)


def generate(grammar: str, temperature: float, limit: int = 4000, **params: Any) -> tuple[str, bool]:
    """The text that random logits give under a grammar, and whether the grammar ended it."""
    tokenizer = grammars().tokenizer
    assert tokenizer is not None
    wanted = SamplingParams(max_tokens=limit, grammar=grammar, **params)
    sequence = Sequence("a", [5], 1, wanted)
    sequence.state = new_state(wanted, MODEL_VOCAB, CPU)
    sequence.state.matcher = grammars().compile(grammar)
    draft: list[int] = []  # tokens that the grammar's matcher has not seen
    while sequence.generated < limit:
        draw = Draw(sequence, len(sequence.tokens) + len(draft), draft)
        logits = process(torch.randn(1, MODEL_VOCAB) / temperature, [draw])
        token = int((logits[0] - torch.empty(MODEL_VOCAB).exponential_().log()).argmax())
        assert logits[0, token] > -torch.inf, "the grammar allows no token at all"
        draft = [*draft, token]
        while draft and (len(draft) > 3 or random.random() < 0.7):
            assert advance(sequence, draft[0])
            sequence.tokens.append(draft.pop(0))
            if sequence.state.matcher.is_stopped():
                return tokenizer.decode(sequence.tokens[1:]), True
    return tokenizer.decode(sequence.tokens[1:]), False


def test_the_rows_of_a_step_have_masks_of_their_own(seed: int) -> None:
    """Free rows, grammars at different places, stop tokens of a late grammar, and other rules that leave nothing of a grammar."""
    texts = ["start: /[0-9]{6}/", 'start: "a" ("b" | "c")?', "start: /(.|\\n)*/"]
    for _ in range(10):
        draws, expected = [], random_logits(12, MODEL_VOCAB)
        logits = expected.clone()
        for row in range(12):
            late, text = random.random() < 0.3, random.choice([None, *texts])
            ids = random.choice([None, random.sample(range(MODEL_VOCAB), 500), [1029]])
            stops = random.sample(range(MODEL_VOCAB), 3)
            sequence = sequence_of([5], [], MODEL_VOCAB, late_grammar=late, stop_token_ids=stops, allowed_token_ids=ids)
            draws.append(Draw(sequence, 1, ()))
            sequence.state.again = 1 if late else -1
            ruled = torch.zeros(MODEL_VOCAB, dtype=torch.bool)
            if ids is not None:
                ruled = torch.tensor([i not in ids for i in range(MODEL_VOCAB)])
            banned = ruled
            if text is not None:
                sequence.state.matcher = matcher = grammars().compile(text)
                mask = allowed(matcher, MODEL_VOCAB)
                if late and matcher.is_accepting():
                    mask[stops] = True
                banned = ruled | ~mask if (mask & ~ruled).any() else ~mask
            expected[row, banned] = -torch.inf
        assert torch.equal(process(logits, draws), expected)


def test_the_mask_is_what_the_grammar_allows(seed: int) -> None:
    """The mask allows exactly the ids whose bytes the grammar allows next, EOS where the text may end, and no padding id."""
    tokenizer = grammars().tokenizer
    assert tokenizer is not None
    pieces = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids}
    matcher = grammars().compile('start: "a" ("b" | "c")?')

    def ids() -> set[int]:
        sequence = sequence_of([5], [], MODEL_VOCAB)
        sequence.state.matcher = matcher
        masked = process(torch.randn(1, MODEL_VOCAB), [Draw(sequence, 1, ())])[0]
        return set(masked.isfinite().nonzero()[:, 0].tolist())

    assert ids() == {i for i, piece in pieces.items() if piece in (b"a", b"ab", b"ac")}
    assert matcher.consume_token(next(i for i, piece in pieces.items() if piece == b"a"))
    assert ids() == {i for i, piece in pieces.items() if piece in (b"b", b"c")} | set(tokenizer.eos_ids)
    assert not matcher.is_stopped()


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "{",
        "junk",
        "start: missing",
        "start: /(/",
        "%%%",
        "\x00",
        '{"grammars": []}',
        '{"grammars": 5}',
        '{"type": "object"}',
        llguidance.LLMatcher.grammar_from_json_schema('{"type": "nope"}'),
        llguidance.LLMatcher.grammar_from_json_schema('{"$ref": "#/nowhere"}'),
        llguidance.LLMatcher.grammar_from_json_schema('{"type": "integer", "minimum": 5, "maximum": 1}'),
    ],
)
def test_a_bad_grammar_is_refused_in_one_line(grammar: str) -> None:
    with pytest.raises(UserError, match=r"^the grammar or JSON schema cannot be used: .") as error:
        grammars().compile(grammar)
    assert "\n" not in str(error.value)
    generate("start: /[0-9]{2}/", 1.0)  # the next grammar still works


def test_a_model_that_cannot_follow_a_grammar_says_so() -> None:
    class Endless:
        eos_ids, no_grammars = (), Tokenizer.no_grammars

    for tokenizer, why in ((None, "no tokenizer"), (Endless(), "no end-of-text token")):
        with pytest.raises(UserError, match=why):
            Grammars(tokenizer, VOCAB).check('start: "a"')  # type: ignore[arg-type]


# --- log-probabilities -------------------------------------------------------------------------------------------------------


def test_token_logprobs_equal_float64(seed: int) -> None:
    for _ in range(30):
        rows = random.randint(1, 6)
        logits = random_logits(rows)
        if random.random() < 0.3:
            logits = logits * 20  # nearly one-hot
        chosen = [random.randrange(VOCAB) for _ in range(rows)]
        tops = [random.choice([0, 1, 5, 20, VOCAB, VOCAB + 5]) for _ in range(rows)]
        exact = logits.double().log_softmax(-1)
        for i, entry in enumerate(token_logprobs(logits, chosen, tops).read()):
            k = min(tops[i], VOCAB)
            best = exact[i].topk(k)
            assert entry.chosen.token_id == chosen[i]
            assert entry.chosen.logprob == pytest.approx(exact[i, chosen[i]].item(), rel=1e-5, abs=1e-5)
            assert entry.chosen.rank == int((logits[i] > logits[i, chosen[i]]).sum()) + 1
            assert [t.token_id for t in entry.top] == best.indices.tolist()
            assert [t.logprob for t in entry.top] == pytest.approx(best.values.tolist(), rel=1e-5, abs=1e-5)
            assert [t.rank for t in entry.top] == list(range(1, k + 1))


def test_a_prompt_is_scored_from_the_rows_before_its_tokens(seed: int) -> None:
    """In chunks beside other ones, and from its first token on again after a preemption, with other chunks."""
    for _ in range(30):
        prompt = [random.randrange(VOCAB) for _ in range(random.randint(2, 30))]
        logits, sequence = random_logits(len(prompt) + 1), sequence_of(prompt, [], prompt_logprobs=0)
        start, preemptions, ends = 0, 2, len(prompt) + random.randint(0, 1)  # the last token may be a drawn one
        sequence.tokens = [*prompt, 0][:ends]
        while start < ends:
            count, others = random.randint(1, ends - start), [random.randint(1, 4) for _ in range(2)]
            chunks = [Chunk(sequence_of([1] * n, []), 0, n, True, True) for n in others]
            chunks.insert(1, Chunk(sequence, start, count, start + count == ends, True))
            hidden = torch.cat([random_logits(others[0]), logits[start : start + count], random_logits(others[1])])
            score_prompts(lambda rows: rows, chunks, hidden)
            start += count
            if preemptions and random.random() < 0.5:
                start, preemptions = 0, preemptions - 1
        exact = logits.double().log_softmax(-1)
        first, *found = sequence.state.prompt_logprobs
        assert first is None and len(found) == len(prompt) - 1
        for i, (entry, token) in enumerate(zip(found, prompt[1:], strict=True)):
            assert (entry.chosen.token_id, entry.chosen.logprob) == (
                token,
                pytest.approx(exact[i, token].item(), rel=1e-5, abs=1e-5),
            )


def test_a_number_that_is_not_finite_anywhere_in_a_prompt_is_noted(seed: int) -> None:
    """Also if later parts of it are finite."""
    for bad in (None, *range(4)):
        sequence, logits = sequence_of([1] * 9, [], prompt_logprobs=0), random_logits(8)
        if bad is not None:
            logits[2 * bad, random.randrange(VOCAB)] = random.choice([torch.nan, torch.inf])
        for start in range(0, 8, 2):
            score_prompts(lambda rows: rows, [Chunk(sequence, start, 2, False, True)], logits[start : start + 2])
        assert sequence.state.overflowed == (bad is not None)


def test_answers_of_a_request_share_no_counts(seed: int) -> None:
    first = sequence_of([1, 2], [3, 3], presence_penalty=1.0, frequency_penalty=0.5, logit_bias={5: 2.0})
    second = sequence_of([1, 2], [4], presence_penalty=1.0, frequency_penalty=0.5, logit_bias={5: 2.0})
    shared = new_state(first.params, VOCAB, CPU)
    for _ in range(2):  # the second time with the counts of the first
        first.state, second.state = sibling(shared), sibling(shared)
        logits = random_logits(2)
        together = process(logits, [Draw(one, len(one.tokens), ()) for one in (first, second)])
        shared = first.state
    for i, (row, counts) in enumerate(zip(logits, ({3: 2}, {4: 1}), strict=True)):
        for token, count in counts.items():
            row[token] -= 1.0 + 0.5 * count
        row[5] += 2.0
        torch.testing.assert_close(together[i], row)
