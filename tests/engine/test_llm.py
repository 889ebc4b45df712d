"""`LLM`: prompts of any lengths in one call, texts, stops, log-probabilities, scores, on one process and on ranks."""

import gc
import itertools
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from pydantic import ValidationError

import comms.fused
import engine.llm
import engine.runner
import engine.speculation
from engine import LLM, SamplingParams
from engine.limits import EngineLimits
from engine.llm import Completion, Timing
from engine.protocol import Abort, Submit
from engine.runner import InFlightStep
from engine.sequence import Chunk
from errors import UserError
from server.schemas import CompletionBody
from tests import MODELS
from tests.engine.test_engine import (
    ALONE,
    KINDS,
    PLAIN,
    TOLERANCE,
    alone,
    assert_logprobs,
    assert_same,
    config_of,
    plain_logits,
    random_model,
    random_submits,
    score,
)
from tests.support.ranks import Ranks
from tp import World

TINY = MODELS / "tiny-hybrid"


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_every_prompt_gets_what_it_gets_alone(
    kind: int, in_turn: Callable[..., Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(config_of(in_turn(KINDS[kind], 1)))
    tokens, most, sizes = in_turn([1, 20, 1000], kind), random.choice([1, 3, 100]), list[int]()
    monkeypatch.setattr(engine.llm, "PREFILL_TOKENS", tokens)
    monkeypatch.setattr(engine.llm, "MAX_SEQUENCES", most)
    launch = engine.runner.Runner.launch

    def counted(runner: engine.runner.Runner, chunks: list[Chunk], *more: Any) -> InFlightStep:
        sizes.append(sum(chunk.count for chunk in chunks))
        return launch(runner, chunks, *more)

    monkeypatch.setattr(engine.runner.Runner, "launch", counted)
    llm, submits = LLM(model, world=ALONE), random_submits(3)
    for chosen in (submits, submits[:1], [submits[0]] * 3):
        sizes.clear()
        answers = llm.generate([s.prompt_ids for s in chosen], [s.params for s in chosen])
        prompts = [len(s.prompt_ids) for s in chosen]
        # no more than wanted, unless all decode at once; and no fewer while there are prompts
        assert max(sizes) <= max(tokens, min(len(chosen), most))
        assert sizes[0] >= min(tokens, sum(prompts[:most]))
        for submit, answer in zip(chosen, answers, strict=True):
            assert answer.prompt_ids == submit.prompt_ids
            assert_same(model, submit, answer.token_ids)
            assert (answer.finish_reason, answer.text) == ("length", "")


def test_texts_and_stops(seed: int) -> None:
    llm = LLM(str(TINY), world=ALONE)
    assert llm.tokenizer is not None
    greedy = SamplingParams(max_tokens=60, temperature=0)
    free, other = llm.generate(["Once upon a time", "One day"], greedy)
    ids = llm.tokenizer.encode("Once upon a time")
    assert free.token_ids == alone(llm.model, ids, greedy) and free.text.startswith(" ")
    assert free.prompt_ids == ids and len(other.token_ids) <= 60
    word = free.text.split()[6]
    before = free.text[: free.text.index(word)]
    for include in (False, True):
        stopped = llm.generate(
            ["Once upon a time"], msgspec.structs.replace(greedy, stop=["never", word], include_stop=include)
        )[0]
        assert stopped.text == before + word * include
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
        assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert llm.engine is not None
    with patch.object(llm.engine, "abort", wraps=llm.engine.abort) as abort:
        assert llm.generate(["Once upon a time"], msgspec.structs.replace(greedy, stop=[word]))[0].finish_reason == "stop"
    assert abort.call_args.args == (Abort("0", used=len(stopped.token_ids)),)
    end = free.token_ids[9]
    first = free.token_ids.index(end) + 1
    stopped = llm.generate([ids], msgspec.structs.replace(greedy, stop_token_ids=[end]))[0]
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (free.token_ids[:first], "stop", end)


def test_a_text_alone_is_one_prompt_and_the_seed_is_not_random(seed: int) -> None:
    llm = LLM(str(TINY), world=ALONE)
    (alone,) = llm.generate("Once upon a time")
    assert llm.generate("Once upon a time") == [alone]
    texts = [delta.text for updates in llm.stream("Once upon a time") for delta in updates]
    assert "".join(texts) == alone.text
    others = llm.generate(["Once upon a time"] * 4, [SamplingParams(seed=i) for i in range(4)])
    assert others[0] == alone and len({one.text for one in others}) > 1
    assert llm.generate(["Once upon a time"] * 4) == others


def test_eos_ends_unless_ignored(seed: int) -> None:
    llm = LLM(str(TINY), world=ALONE)
    (eos, *_) = llm.eos_ids
    sure = SamplingParams(max_tokens=5, allowed_token_ids=[eos])
    assert llm.generate([[5]], sure)[0].token_ids == [eos]
    assert llm.generate([[5]], msgspec.structs.replace(sure, ignore_eos=True))[0].token_ids == [eos] * 5


def test_bad_words_do_not_occur(seed: int) -> None:
    """As tokens that follow each other: of a text and of its words, at the start and behind a space."""
    llm = LLM(str(TINY), world=ALONE)
    assert llm.tokenizer is not None
    free = SamplingParams(max_tokens=40, temperature=0)
    [answer] = llm.generate(["Once upon a time"], free)
    words = sorted({word.strip(".,!\"'") for word in answer.text.split()} - {""})
    bad = random.sample(words, min(4, len(words)))
    [other] = llm.generate(["Once upon a time"], msgspec.structs.replace(free, bad_words=bad))
    assert other.text != answer.text
    for word in bad:
        for text in (word, " " + word):
            ids = llm.tokenizer.encode(text, add_special_tokens=False)
            found = [other.token_ids[i : i + len(ids)] for i in range(len(other.token_ids))]
            assert ids not in found
    with pytest.raises(UserError, match=r"^this model has no tokenizer, so bad_words"):
        LLM(random_model(config_of("standard")), world=ALONE).generate([[1]], SamplingParams(bad_words=["a"]))
    with pytest.raises(UserError, match=r"^banned must have lists of token ids"):
        llm.generate([[1]], SamplingParams(banned=[["a"]]))  # type: ignore[list-item]


def test_a_budget_of_reasoning(seed: int) -> None:
    """The prompt tells where the answer begins: inside the reasoning, before it, or behind it."""
    llm = LLM(str(TINY), world=ALONE)
    assert llm.tokenizer is not None
    params = SamplingParams(max_tokens=20, temperature=0, thinking_token_budget=3, ignore_eos=True)
    with pytest.raises(UserError, match=r"^thinking_token_budget has no effect, because the chat template marks no reasoning"):
        llm.generate(["Once"], params)
    llm.tokenizer.chat_templates = {"default": "<think></think>"}
    free = llm.generate(["Once<think>", "Once<think>\n</think>\n", "<think>a</think>Once"], params)
    end = llm.tokenizer.encode("</think>", add_special_tokens=False)
    assert free[0].token_ids[3 : 3 + len(end)] == end
    assert "</think>" not in free[1].text + free[2].text
    forced = msgspec.structs.replace(params, grammar='start: "<think>" /(.|\n){60}/')
    [answer] = llm.generate(["Once"], forced)
    start = next(n for n in range(20) if llm.tokenizer.decode(answer.token_ids[:n]).startswith("<think>"))
    assert answer.token_ids[start + 3 : start + 3 + len(end)] == end


def test_log_probabilities_and_a_grammar(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.llm, "PREFILL_TOKENS", random.choice([1, 3, 1000]))  # the prompt takes several steps, or one
    llm = LLM(str(TINY), world=ALONE)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("One day a fox")
    answer = llm.generate([ids], SamplingParams(max_tokens=4, seed=seed, logprobs=2, prompt_logprobs=1))[0]
    logits = plain_logits(llm.model, ids + answer.token_ids)
    for entry, row, token in zip(answer.logprobs, logits[len(ids) - 1 : -1], answer.token_ids, strict=True):
        assert_logprobs(entry, row, token, 2)
    assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None
    for entry, row, token in zip(answer.prompt_logprobs[1:], logits, ids[1:], strict=False):
        assert entry is not None
        assert_logprobs(entry, row, token, 1)
    digits = llm.generate(["The number"] * 2, SamplingParams(max_tokens=20, grammar="start: /[0-9]{3}/", seed=seed))
    assert all(len(one.text) == 3 and one.text.isdigit() for one in digits)
    with pytest.raises(UserError, match="cannot be used"):
        llm.generate(["The number"], SamplingParams(grammar="start: ("))
    assert llm.generate([ids], SamplingParams(max_tokens=4, seed=seed))[0].token_ids == answer.token_ids


def test_scores(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(config_of(random.choice(PLAIN)))
    monkeypatch.setattr(engine.llm, "SCORE_CHUNK", random.choice([1, 7, 512]))
    prompt = [random.randrange(101) for _ in range(30)]
    scores, logits = LLM(model, world=ALONE).score(prompt), plain_logits(model, prompt)
    found = logits.gather(-1, torch.tensor(scores.argmax)[:, None])
    assert (logits.max(-1, keepdim=True).values - found).max() < TOLERANCE  # another id may be as likely but for rounding
    assert scores.logprobs[0] is None
    assert scores.logprobs[1:] == pytest.approx(score(model, prompt)[1:], abs=TOLERANCE)


def test_scores_do_not_pass_over_an_fp8_cache(seed: int) -> None:
    model = random_model(config_of(random.choice(PLAIN)))
    for llm in (LLM(model, world=ALONE, kv_dtype="fp8"), LLM(model, world=ALONE, limits=EngineLimits(kv_dtype="fp8"))):
        with pytest.raises(UserError, match=r"without the KV cache.*kv_dtype='fp8'"):
            llm.score([1, 2, 3])


def test_streams_end_when_the_caller_stops(seed: int) -> None:
    """The updates of a stream add up to its answers, and an engine that a caller has left serves the next call."""
    llm, params = LLM(str(TINY), world=ALONE), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = [[5, 6, 7], [8] * 20]
    whole = llm.generate(prompts, params)
    texts, ids, timing = ["", ""], [list[int](), list[int]()], Timing()
    for updates in llm.stream(prompts, params, timing=timing):
        for update in updates:
            texts[update.index] += update.text
            ids[update.index] += update.token_ids
    assert [(one.text, one.token_ids) for one in whole] == list(zip(texts, ids, strict=True))
    assert timing.prefill > 0 and len(timing.steps) == 11
    answers = [Completion(prompt) for prompt in prompts]
    steps = llm.stream(prompts, params, answers=answers)
    for _ in range(4):
        next(steps)
    steps.close()
    assert [one.finish_reason for one in answers] == [None, None]
    assert [one.token_ids for one in answers] == [one.token_ids[:4] for one in whole]
    assert llm.generate(prompts, params) == whole


def rank_refuses(world: World, limits: EngineLimits | None) -> tuple[list[Any], list[float | None]]:
    """What calls answer after one whose second prompt is refused, and after one beside which another was begun; and scores."""
    llm, prompts = LLM(str(TINY), world=world, dtype="float32", limits=limits), [[5, 6, 7], [8] * 20]
    good = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with pytest.raises(UserError, match="token id 5000"):
        llm.generate(prompts, [good, msgspec.structs.replace(good, stop_token_ids=[5000])])
    after_refused = llm.generate(prompts, good)
    answers = [Completion(prompt) for prompt in prompts]
    steps = llm.stream(prompts, good, answers=answers)
    next(steps)
    for other in (prompts, [[9]]):  # the second needs another engine if there are no limits
        with pytest.raises(UserError, match="iterate over it to its end or close it"):
            llm.generate(other, good)
    for _ in steps:
        pass
    return [after_refused, answers, llm.generate(prompts, good)], llm.score(prompts[1]).logprobs


@pytest.mark.parametrize("limits", [None, EngineLimits(kv_memory=1e7)], ids=["", "limits"])
def test_a_refused_call_changes_no_other(limits: EngineLimits | None, ranks: Ranks, seed: int) -> None:
    (first, *others), scores = rank_refuses(ALONE, limits)
    assert [len(one.token_ids) for one in first] == [12, 12]
    assert others == [first, first]
    tokens = [one.token_ids for one in first]
    for found, scored in ranks.run(2, rank_refuses, limits):
        assert [[one.token_ids for one in answers] for answers in found] == [tokens] * 3
        assert scored[1:] == pytest.approx(scores[1:], abs=1e-4)


@pytest.mark.parametrize("speculate", [None, "ngram"])
def test_an_engine_is_freed_at_once(speculate: str | None, seed: int) -> None:
    """Before the next one takes as much memory, and not by the garbage collector, which could run while a graph is captured."""
    llm, params = LLM(random_model(config_of("standard")), world=ALONE, speculate=speculate), SamplingParams(max_tokens=9)
    gc.collect()
    gc.disable()
    try:
        llm.generate([[5, 5, 5]], params)
        first = weakref.ref(llm._engine[1])  # type: ignore[index]
        llm.generate([[5, 5, 5]] * 3, params)
        assert first() is None
    finally:
        gc.enable()


def test_speculation_gives_the_same_answers_in_fewer_steps(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(engine.speculation, "fastest_seconds", lambda cases, world: [{1: 1.0, 2: 1.0} for _ in cases])
    model = random_model(config_of("standard"))
    plain, fast = LLM(model, world=ALONE), LLM(model, world=ALONE, speculate="ngram", draft_tokens=5)
    one = SamplingParams(max_tokens=40, temperature=0, logit_bias={7: 1000.0})  # a text that repeats itself for sure
    steps = {}
    for llm in (plain, fast):
        timing = Timing()
        assert [token for [delta] in llm.stream([[1, 2, 3, 4]], one, timing=timing) for token in delta.token_ids] == [7] * 40
        assert timing.tokens == 39
        steps[llm] = len(timing.steps)
    assert steps[plain] == 39 and steps[fast] < 20
    for wrong, said in (({"speculate": "magic"}, "magic is neither"), ({"speculate": "ngram", "draft_tokens": 0}, "from 1 to")):
        with pytest.raises(UserError, match=said):
            LLM(model, world=ALONE, **wrong)


def test_an_engine_is_kept_while_calls_need_the_same(seed: int) -> None:
    llm, params = LLM(str(TINY), world=ALONE), SamplingParams(max_tokens=4)
    engines = []
    for prompts in ([[5, 6]], [[7, 8]], [[7, 8], [9]]):
        llm.generate(prompts, params)
        engines.append(llm._engine)
    assert engines[0] is engines[1] is not engines[2]
    fixed = LLM(llm.model, llm.tokenizer, ALONE, limits=EngineLimits(max_num_seqs=2))
    fixed.generate([[5, 6]], params)
    kept = fixed._engine
    fixed.generate([[5] * 50, [6], [7]], params)
    assert fixed._engine is kept


def test_steps_of_several_ranks_are_as_large_as_all_reduces_are_measured_for() -> None:
    """And for a model of 8,192 features in 16 bits as large as they can be fused. Those of more than two ranks have a graph."""
    assert engine.runner.LARGEST_MEASURED == comms.fused.CAPACITY // (8192 * 2)
    model, prompts = random_model(config_of("standard")), [[1] * 5000] * 20
    assert [LLM(model, None, replace(ALONE, world_size=n)).step_tokens(prompts) for n in (1, 2, 4, 8)] == [
        1 << 16,
        engine.runner.LARGEST_MEASURED,
        engine.runner.largest_graph(4),
        engine.runner.LARGEST_MEASURED,
    ]


def test_a_step_that_fails_leaves_nothing_for_later_calls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's blocks were to be computed by the step that failed, so they are not in the prefix cache."""
    model, prompt = random_model(config_of("standard")), [random.randrange(101) for _ in range(37)]
    llm = LLM(model, None, ALONE, limits=EngineLimits(block_size=4, kv_memory=1e6))
    params = SamplingParams(max_tokens=6, seed=seed % 1000)

    def fail(*_: Any) -> None:
        raise MemoryError("no memory for this step")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.Runner, "launch", fail)
        with pytest.raises(MemoryError):
            llm.generate([prompt], params)
    (answer,) = llm.generate([prompt], params)
    assert_same(model, Submit("one", prompt, params), answer.token_ids)


def test_what_cannot_run_is_refused(seed: int) -> None:
    llm = LLM(random_model(config_of("standard")), world=ALONE)
    for prompts, params, message in (
        ([[]], None, "the prompt is empty"),
        ([[1, 101]], None, "token id 101 is outside"),
        ([[1] * 70], SamplingParams(max_tokens=11), "exceed the model's context of 80"),
        (["text"], None, "has no tokenizer"),
        (None, None, "prompts must be a text, or a list of .*, not None$"),
        ({"prompt": [1]}, None, "prompts must be a text, or a list of .*, not {'prompt'"),
        ([1, 2], None, "a text or a list of token ids, not 1$"),
        ([[1.5]], None, "a text or a list of token ids, not"),
        ([[1]], {"temperature": 0}, "params must be one SamplingParams"),
        ([[1]], [None], "params must be one SamplingParams"),
        ([[1]], SamplingParams(stop_token_ids=[1.5]), "stop_token_ids must have token ids"),
        ([[1]], SamplingParams(logit_bias={"5": 1.0}), "logit_bias must have token ids"),
        ([[1], [2]], [SamplingParams()], "1 sampling parameters for 2 prompts"),
    ):
        with pytest.raises(UserError, match=message):
            llm.generate(prompts, params)  # type: ignore[arg-type]
    for name, value in (("variant", "standard"), ("dtype", "float32"), ("quantize", "int8")):
        with pytest.raises(UserError, match=f"^{name} has no effect here: .* where the model is loaded"):
            LLM(llm.model, world=ALONE, **{name: value})
    with pytest.raises(UserError, match=r"^draft_tokens has no effect here: also give speculate"):
        LLM(llm.model, world=ALONE, draft_tokens=7)
    for name, argument in (("kv_dtype", "auto"), ("draft_tokens", 7), ("speculate", "ngram")):
        with pytest.raises(UserError, match=rf"^{name} has no effect here: with limits, .* EngineLimits"):
            LLM(llm.model, world=ALONE, limits=EngineLimits(max_num_seqs=2), **{name: argument})
    assert LLM(llm.model, world=ALONE, limits=EngineLimits(draft_tokens=3), speculate="ngram").generate([[1]])[0].token_ids
    assert llm.generate([], None) == []
    with pytest.raises(UserError, match="unknown dtype 'fp8'"):
        LLM(str(TINY), world=ALONE, dtype="fp8")


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (SamplingParams, {"temperature": "hot"}),
        (SamplingParams, {"max_tokens": 2.5}),
        (SamplingParams, {"max_tokens": True}),
        (SamplingParams, {"min_tokens": None}),
        (SamplingParams, {"seed": None}),
        (SamplingParams, {"logprobs": "2"}),
        (SamplingParams, {"logit_bias": [5]}),
        (SamplingParams, {"logit_bias": {5: "high"}}),
        (SamplingParams, {"stop": 3}),
        (SamplingParams, {"stop": "."}),
        (SamplingParams, {"stop": [3]}),
        (SamplingParams, {"stop_token_ids": 3}),
        (SamplingParams, {"grammar": 3}),
        (SamplingParams, {"pooling": 3}),
        (SamplingParams, {"ignore_eos": "yes"}),
        (EngineLimits, {"max_num_seqs": "4"}),
        (EngineLimits, {"kv_memory": "2G"}),
        (LLM, {"model": 3}),
        (LLM, {"model": TINY, "tokenizer": "gpt2"}),
        (LLM, {"model": TINY, "dtype": torch.float32}),
        (LLM, {"model": TINY, "seed": "1"}),
        (LLM, {"model": TINY, "limits": {"max_num_seqs": 4}}),
        (LLM, {"model": TINY, "speculate": True}),
        (LLM, {"model": TINY, "draft_tokens": "7"}),
        (LLM, {"model": TINY, "deterministic": 1}),
    ],
)
def test_an_argument_of_another_type_is_named(kind: Callable[..., Any], wrong: dict[str, Any]) -> None:
    name = list(wrong)[-1]
    with pytest.raises(UserError, match=rf"^{name} must be [^\n]*, not [^\n]*$"):
        kind(**wrong)


NAN, INFINITY = float("nan"), float("inf")
OUTSIDE: dict[str, list[Any]] = {
    "min_tokens": [-1],
    "temperature": [-0.1, NAN, INFINITY],
    "top_k": [-2],
    "top_p": [-0.1, 1.1, NAN],
    "min_p": [-0.1, 1.1, NAN],
    "seed": [2**63, -(2**63) - 1],
    "presence_penalty": [-2.1, 2.1, NAN, INFINITY],
    "frequency_penalty": [-2.1, 2.1, NAN, -INFINITY],
    "repetition_penalty": [0.0, -1.0, 5e-324, 101.0, NAN, INFINITY],
    "logit_bias": [{"5": NAN}, {"5": -INFINITY}],
    "allowed_token_ids": [[]],
    "stop": [[""], [3]],
    "bad_words": [[""], [3]],
    "thinking_token_budget": [-1],
    "cache_salt": [""],
    "logprobs": [-1],
    "prompt_logprobs": [-1],
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_http_refuses_python_refuses(name: str) -> None:
    for value in OUTSIDE[name]:
        with pytest.raises(ValidationError):
            CompletionBody.model_validate({"prompt": "Hi", name: value})
        own = {int(key): bias for key, bias in value.items()} if isinstance(value, dict) else value
        with pytest.raises(UserError, match=rf"^{name} must be [^\n]*, not [^\n]*$"):
            SamplingParams(**{name: own})


def test_some_allowed_token_is_left(seed: int) -> None:
    llm = LLM(random_model(config_of("standard")), world=ALONE)
    excluding: list[dict[str, Any]] = [
        {"min_tokens": 2, "stop_token_ids": [7, 5]},
        {"banned": [[5], [7]]},
        {"min_tokens": 1, "stop_token_ids": [7], "banned": [[5]]},
    ]
    for ids, others in itertools.product(([5], [5, 7]), excluding):
        with pytest.raises(UserError, match="allow another token"):
            SamplingParams(allowed_token_ids=ids, **others)
    SamplingParams(allowed_token_ids=[5], banned=[[5, 5]], stop_token_ids=[5])
    (answer,) = llm.generate([[1, 2]], SamplingParams(min_tokens=2, allowed_token_ids=[5, 6], stop_token_ids=[5]))
    assert answer.token_ids[:2] == [6, 6]


def test_numbers_of_numpy_and_other_sequences_are_taken() -> None:
    llm = LLM(random_model(config_of("standard")), world=ALONE)
    plain = SamplingParams(max_tokens=3, temperature=1, top_p=0.5, stop_token_ids=[5], prediction=[6])
    same = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float64(1),
        top_p=np.float32(0.5),
        stop_token_ids=(5,),  # type: ignore[arg-type]
        prediction=[np.int64(6)],
    )
    for prompt in ((7, 8), np.array([7, 8]), torch.tensor([7, 8])):
        assert llm.generate([prompt], same) == llm.generate([[7, 8]], plain)


def test_a_second_model_on_several_ranks_needs_the_world_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("tp.dist.is_initialized", lambda: True)
    with pytest.raises(UserError, match=r"world=first\.world"):
        LLM(str(TINY))
