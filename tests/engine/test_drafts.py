"""Answers with drafts against those without, by text, draft models and heads."""

import gc
import json
import random
import shutil
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import llguidance
import msgspec
import pytest
import torch

from checkpoints.eagle import EagleConfig, EagleHead
from checkpoints.export import save_checkpoint
from checkpoints.presets import model_config
from comms import Local
from engine import LLM, draft_models
from engine.core import Engine
from engine.draft_costs import LEAST_GAIN, LEAST_PRICE, SHARE, Acceptance, Costs
from engine.model_drafter import HeadDrafter
from engine.protocol import Abort, SamplingParams, Submit
from engine.sequence import Chunk, Sequence
from engine.speculation import GRANT
from errors import UserError
from kernels.sampling import exponential_noise
from layers.attention import Causal
from model import Transformer
from tests import MODELS
from tests.engine.test_engine import (
    ALONE,
    BANNED,
    CPU,
    LIMITS,
    TINY,
    Answer,
    assert_same,
    assert_scores,
    cheap,
    config_of,
    engine_of,
    load,
    random_model,
    random_params,
    random_submits,
    serve,
    tiny_tokenizer,
)
from tests.support.ranks import Ranks
from tp import World

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
            banned=random.choice([[], BANNED]),
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
        assert_scores(model, submit, answer)


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
    for order in (submits, submits[::-1]):
        answers = serve(engine, order, at_once)
        for submit in submits:
            assert_same(model, submit, answers[submit.request_id].tokens)
    total = engine.speculation.total["model"]
    if limits.get("max_batch_tokens") != 1:  # which leaves no room for drafts
        assert total.tokens > 50 and total.accepted >= 0.95 * total.tokens  # they may differ at a near-tie
    if setting == "room for all":
        assert engine.meter.steps < (45 if engine.speculation.draft_tokens > 1 else 70)


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
    drafter, ends = engine.speculation.model_drafter, list[int]()
    assert drafter is not None
    draft = drafter.draft
    drafter.draft = lambda counts: ends.extend(s.length + n for s, n in counts.items()) or draft(counts)  # type: ignore[func-returns-value,method-assign]
    assert_same(model, submit, serve(engine, [submit])["a"].tokens)
    assert 10 < engine.speculation.total["model"].accepted <= 27 and max(ends) <= 30


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


@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_an_ended_request_is_freed_without_the_garbage_collector(draft_tokens: int, seed: int) -> None:
    """Its drafts, and without drafts the sequence itself, which budgets keep until the next request."""
    engine = engine_of(random_model(config_of("standard")), draft_tokens=draft_tokens)
    for name, most in {"length": 4, "abort": 60}.items():
        assert engine.submit(Submit(name, [1, 2, 3], SamplingParams(max_tokens=most, ignore_eos=True))) is None
    for _ in range(2):
        engine.step()
    kept = [weakref.ref(s.drafter if draft_tokens else s) for s in engine.scheduler.by_id.values()]
    gc.disable()
    try:
        engine.abort(Abort("abort"))
        while engine.has_work():
            engine.step()
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


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
    for length in range(2, 14, 2):
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
    assert compared > 3 and most > 1


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


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_a_rate_stands_in_for_agreement(rate: float, seed: int) -> None:
    """Each token of a draft whose predecessors are right is right at this rate, of a head that never agrees. Text drafts nothing."""
    model = random_model(config_of("standard"))
    engine = engine_of(model, draft=random_head(model), draft_tokens=3, max_num_seqs=8, accept_rate=rate)
    submits = [Submit(str(i), [1, 2, 3] * 4, SamplingParams(max_tokens=60, seed=i)) for i in range(16)]
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
    assert total["head"].tokens > 400 and total["ngram"].tokens == 0
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
