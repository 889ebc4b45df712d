"""Where numbers overflow, the request fails, and no other one: not those beside it, of the same prefix, or in its blocks."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import engine.llm
from checkpoints.export import save_checkpoint
from engine import LLM, SamplingParams
from engine.core import Engine
from engine.llm import Completion
from engine.protocol import Submit
from errors import OverflowedError
from layers.attention import Causal
from model import Transformer
from tests.engine.test_drafts import replace_params
from tests.engine.test_embeddings import expected
from tests.engine.test_engine import (
    ALONE,
    KINDS,
    TOLERANCE,
    Answer,
    assert_same,
    config_of,
    engine_of,
    load,
    random_model,
    random_submits,
)
from tests.engine.test_runner import PARAMETERS as PARAMETERS_OF_ALL_KINDS
from tests.engine.test_runner import as_on_a_gpu
from tests.support.blocks import check_blocks
from tests.support.ranks import Ranks
from tp import World

POISON = 100  # the token whose embedding overflows
VALUES = [1e25, -3e38, torch.inf, torch.nan]  # the square of the first is too large for fp32
KINDS_OF_DRAWS = "greedy", "sampled", "filtered", "penalties"
PARAMETERS: dict[str, dict[str, Any]] = {kind: PARAMETERS_OF_ALL_KINDS[kind] for kind in KINDS_OF_DRAWS} | {
    "bias": dict(logit_bias={5: 4.0, 9: -100.0}, min_tokens=3, stop_token_ids=[7, 8]),
    "log-probabilities": dict(logprobs=3),
    "prompt log-probabilities": dict(prompt_logprobs=2),
    "mean": dict(pooling="mean"),
    "last": dict(pooling="last"),
}


def poisoned(model: Transformer, value: float) -> Transformer:
    """The model with an embedding of POISON that overflows."""
    with torch.no_grad():
        model.embedding.weight[POISON] = value
    return model


def engine_without_poison(model: Transformer, **options: Any) -> Engine:
    """An engine that never draws POISON."""
    made = engine_of(model, **options)
    made.runner.text_ids = POISON
    return made


def params_of(kind: str, **more: Any) -> SamplingParams:
    return SamplingParams(**dict(max_tokens=random.randint(1, 12), seed=random.randrange(2**40)) | PARAMETERS[kind] | more)


def mixed(**more: Any) -> tuple[list[Submit], list[Submit]]:
    """Requests without POISON, and some with it in their prompts, that begin like the others."""
    kinds = [*PARAMETERS, *PARAMETERS]
    good = [Submit(f"good {i}", s.prompt_ids, params_of(kinds[i], **more)) for i, s in enumerate(random_submits(9, POISON))]
    bad = []
    for i, kind in enumerate(PARAMETERS):
        after = random.choices(range(POISON), k=random.choice([0, 1, 3]))
        bad.append(Submit(f"bad {i}", [*random.choice(good).prompt_ids, POISON, *after], params_of(kind, **more)))
    return good, bad


def run(engine: Engine, submits: list[Submit], at_once: int) -> tuple[dict[str, Answer], dict[str, Tensor], set[str]]:
    """The answers, the embeddings, and the requests that failed."""
    answers, vectors, coming = {s.request_id: Answer() for s in submits}, dict[str, Tensor](), iter(submits)
    while (arrived := list(islice(coming, at_once))) or engine.has_work():
        for submit in arrived:
            assert engine.submit(submit) is None
        for output in engine.step() if engine.has_work() else ():
            if output.embedding is None:
                answers[output.request_id].take(output)
            else:
                vectors[output.request_id] = torch.frombuffer(bytearray(output.embedding), dtype=torch.float32)
        check_blocks(engine.scheduler.blocks, [s.blocks for s in engine.scheduler.running])
    assert {refused.code for refused in engine.refused} <= {"overflow"} and engine.scheduler.blocks.used == 0
    failed = [refused.request_id for refused in engine.refused]
    assert len(failed) == len(set(failed))
    engine.refused.clear()
    return answers, vectors, set(failed)


def check(model: Transformer, made: Engine, good: list[Submit], bad: list[Submit], at_once: int) -> None:
    """Run all together. The bad ones fail, and the others get what they get alone."""

    def plain(tokens: Tensor, context: Causal) -> Tensor:
        return model(tokens, context).index_fill(-1, torch.tensor(POISON), -torch.inf)

    answers, vectors, failed = run(made, random.sample(good + bad, len(good + bad)), at_once)
    assert failed == {s.request_id for s in bad}
    assert not any(answers[s.request_id].finish_reason or s.request_id in vectors for s in bad)
    for submit in good:
        if submit.params.pooling is None:
            assert_same(plain, submit, answers[submit.request_id].tokens)
        else:
            torch.testing.assert_close(vectors[submit.request_id], expected(model, submit), atol=TOLERANCE, rtol=1e-4)


LIMITS = [
    (dict(max_num_seqs=20, max_batch_tokens=300), 1000),
    (dict(max_num_seqs=5, max_batch_tokens=24), 2),
    (dict(max_num_seqs=7, max_batch_tokens=90, n_blocks=18), 3),
]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_request_that_overflows_fails_alone(kind: int, in_turn: Callable[..., Any], seed: int) -> None:
    ahead = in_turn((False, True), kind)
    model = poisoned(random_model(config_of(in_turn(KINDS[kind], 1))), random.choice(VALUES))
    limits, at_once = in_turn(LIMITS, kind)
    with as_on_a_gpu() if ahead else nullcontext():
        made = engine_without_poison(model, **limits)
        made.look_ahead = ahead
        for _ in range(2):  # the second time, in blocks that the first one used
            check(model, made, *mixed(), at_once)


def test_a_wrong_draft_that_overflows_costs_no_answer(seed: int) -> None:
    model = poisoned(random_model(config_of("hybrid:2")), random.choice(VALUES))
    made = engine_without_poison(model, draft_tokens=5)
    prompts = [s.prompt_ids for s in random_submits(9, POISON)]
    submits = [Submit(f"{i}", prompt, params_of("greedy", max_tokens=12)) for i, prompt in enumerate(prompts)]
    answers, _, _ = run(made, submits, 1000)
    for i, submit in enumerate(submits):
        tokens = answers[submit.request_id].tokens
        wrong = [*tokens[:4], POISON, *tokens[5:]] if i % 2 else tokens
        submits[i] = replace_params(submit, msgspec.structs.replace(submit.params, prediction=wrong))
    before = made.speculation.total["prediction"].accepted
    again, _, failed = run(made, submits, 1000)
    assert not failed and made.speculation.total["prediction"].accepted > before
    assert {name: answer.tokens for name, answer in again.items()} == {name: answer.tokens for name, answer in answers.items()}


def test_a_number_that_overflows_behind_a_mask_fails_with_log_probabilities(seed: int) -> None:
    """The token could be drawn, since the one that overflows is not allowed yet. Its log-probability would be no number."""
    model = random_model(config_of("standard"))
    model.head.weight[POISON] = torch.nan
    params = dict(max_tokens=3, min_tokens=3, stop_token_ids=[POISON])
    scored: dict[str, dict[str, int]] = {
        "none": {},
        "no other": {"logprobs": 0},
        "two": {"logprobs": 2},
        "prompt": {"prompt_logprobs": 0},
    }
    submits = [Submit(name, [1, 2], SamplingParams(**more, **params)) for name, more in scored.items()]
    answers, _, failed = run(engine_of(model), submits, 4)
    assert failed == scored.keys() - {"none"} and len(answers["none"].tokens) == 3


def test_a_row_without_an_allowed_token_fails(seed: int) -> None:
    """Not with token 0."""
    made = engine_without_poison(random_model(config_of("standard")))
    nothing = dict(allowed_token_ids=[POISON])
    submits = [Submit(kind, [1, 2], params_of(kind, **nothing)) for kind in KINDS_OF_DRAWS]
    fine = Submit("fine", [1, 2], params_of("greedy", max_tokens=5))
    answers, _, failed = run(made, [*submits, fine], 1000)
    assert failed == {s.request_id for s in submits} and len(answers["fine"].tokens) == 5


def rank_overflows(world: World, directory: Path, submits: list[Submit]) -> tuple[dict[str, list[int]], set[str]]:
    made = engine_without_poison(load(world, directory), world=world, max_num_seqs=20, max_batch_tokens=40)
    answers, _, failed = run(made, submits, 4)
    return {name: answer.tokens for name, answer in answers.items()}, failed


def test_ranks_decide_alike(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    model = poisoned(random_model(replace(config_of("standard"), n_kv_heads=4)), 1e25)
    save_checkpoint(model, tmp_path)
    good, bad = mixed()
    submits = random.sample(good + bad, len(good + bad))
    tokens, failed = rank_overflows(ALONE, tmp_path, submits)
    assert failed == {s.request_id for s in bad}
    for one in ranks.run(2, rank_overflows, tmp_path, submits):
        assert one[1] == failed and one[0].keys() == tokens.keys()


def test_python_raises_after_the_other_answers(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint whose last norm is too large for float16, in a feature that only POISON has."""
    model = random_model(config_of("hybrid:2"))
    with torch.no_grad():
        model.norm.weight[0] = 6e4
        model.embedding.weight[:, 0], model.embedding.weight[POISON, 0] = 0, 100
        model.head.weight[POISON] = 0  # it is never drawn
        for name, weight in model.layers.named_parameters():
            if name.endswith(("wo.weight", "w_down.weight")):
                weight[0] = 0
    save_checkpoint(model, tmp_path)
    llm, params = LLM(tmp_path, dtype="float16"), SamplingParams(max_tokens=5, temperature=0)
    answers = [Completion(prompt) for prompt in ([1, 2, 3], [4, POISON], [5])]
    with pytest.raises(OverflowedError, match=r"prompt 1: .*bfloat16"):
        for _ in llm.stream([answer.prompt_ids for answer in answers], params, answers=answers):
            pass
    assert [len(answer.token_ids) for answer in answers] == [5, 0, 5]
    with pytest.raises(RuntimeError, match="overflowed"):
        llm.score([3, POISON, 4])
    monkeypatch.setattr(engine.llm, "PREFILL_TOKENS", 3)  # several steps
    with pytest.raises(OverflowedError, match="overflowed"):
        llm.embed([[3, POISON], [1, 2], [4, 5]])
    assert len(llm.embed([[3, 4], [1, 2], [4, 5]])[2]) == model.config.hidden_size
    assert len(llm.generate([[1, 2, 3]], params)[0].token_ids) == 5
    assert len(LLM(tmp_path, dtype="float32").generate([[4, POISON]], params)[0].token_ids) == 5
