"""The engine: a request gets the same tokens as alone if it is in a mixed batch, cut into chunks, preempted, on a cached
prefix, or on several ranks."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llguidance
import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

import comms
from checkpoints import weights
from checkpoints.eagle import EagleHead
from checkpoints.export import save_checkpoint
from checkpoints.presets import model_config
from config import ModelConfig, YarnScaling, with_variant
from engine.core import Engine, Meter
from engine.draft_costs import Costs
from engine.grammars import Grammars
from engine.head_model import HeadModel
from engine.limits import EngineLimits
from engine.paged_cache import PagedCache, Rows, _Reader
from engine.protocol import Abort, Refused, SamplingParams, Submit, ThinkingBudget, TokenLogprobs, TokenOutput
from engine.sampler import SamplingBatch, sample
from layers.attention import Causal
from model import Transformer
from tests import MODELS
from tests.support.blocks import check_blocks
from tests.support.masks import allowed
from tests.support.models import custom_desync
from tests.support.ranks import Ranks
from text.tokenizer_files import load_tokenizer
from tp import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU, comms.Local())
TOLERANCE = 1e-4  # of log-probabilities
PLENTY = 4096  # KV-cache blocks
TINY = MODELS / "tiny-hybrid"
PLAIN = [
    "standard",
    "parallel",
    "ladder",
    "hybrid:2",
    "hybrid-list",
    "desync-2x:4",
    "desync-4x:4",
    "desync-custom",
    "upper-bound",
]
WINDOWS = ["mistral", "qwen3-some-layers", "desync-2x:4-mistral"]
# Models of the same code, whose numbers differ. A test of the engine takes one of each kind, another one in the next run.
KINDS = [
    ("standard", "upper-bound"),
    ("parallel", "qwen3-some-layers"),
    ("ladder", "hybrid:2", "hybrid-list"),
    ("desync-2x:4", "desync-4x:4", "desync-custom"),
    ("mistral", "desync-2x:4-mistral"),
]
assert sorted(PLAIN + WINDOWS) == sorted(name for kind in KINDS for name in kind)


# --- models --------------------------------------------------------------------------------------------------------------


def config_of(name: str) -> ModelConfig:
    shape = dict(
        vocab_size=101,
        hidden_size=32,
        n_layers=4,
        n_heads=8,
        n_kv_heads=random.choice([2, 4, 8]),
        head_dim=4,
        intermediate_size=48,
        max_seq_len=80,
    )
    if name == "qwen3-some-layers":
        return ModelConfig(**shape, family="qwen3", qk_norm=True, windows=(None, 6, None, 6))
    if name == "qwen3-yarn":  # requests are longer than the original context
        scaling = YarnScaling(4.0, 20, attention_factor=1.14)
        return ModelConfig(**shape | {"n_heads": 4, "n_kv_heads": 2}, family="qwen3", qk_norm=True, rope_scaling=scaling)
    if name == "gemma3":  # with its GEGLU
        return ModelConfig(**shape, family="gemma3_text", qk_norm=True, tie_embeddings=True, windows=(6, None, 6, None))
    config = ModelConfig(**shape)
    if name == "sinks":  # gpt-oss's attention, without its experts
        return replace(config, family="gpt_oss", qkv_bias=True, o_bias=True, windows=(6, None, 6, None))
    if name == "biased":
        return replace(config, qkv_bias=True, o_bias=True, mlp_bias=True)
    if "mistral" in name:
        config = replace(config, family="mistral", windows=(random.randint(2, 9),) * 4)
        name = name.removesuffix("mistral").removesuffix("-") or "standard"
    if name == "hybrid-list":
        return replace(config, variant="ladder", ladder_layers=(0, 2))
    if name == "desync-custom":
        return custom_desync(config)
    return with_variant(config, name)


@torch.no_grad()
def random_model(config: ModelConfig) -> Transformer:
    """A model in which every weight and norm changes the output. Logits are about 1 in size."""
    model = Transformer(config, comms.Local(), CPU, torch.float32).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


def load(world: World, directory: Path) -> Transformer:
    config = model_config(str(directory), None, world.world_size)
    return weights.load_model(str(directory), config, world, torch.float32)


@cache
def tiny() -> Transformer:
    return load(ALONE, TINY)


def cheap() -> Transformer:
    """A random model with the vocabulary of `tiny_tokenizer`, for tests to which the text does not matter."""
    return random_model(replace(config_of("hybrid:2"), vocab_size=1024, max_seq_len=1024))


@cache
def tiny_tokenizer() -> Any:
    return load_tokenizer(TINY)


def engine_of(
    model: Transformer,
    n_blocks: int | None = None,
    tokenizer: Any = None,
    world: World = ALONE,
    draft: Transformer | EagleHead | None = None,
    **more: Any,
) -> Engine:
    """An engine with KV-cache blocks of 4 tokens by default, exactly `n_blocks` of them if given. Else it has enough for all requests
    of a test, and not more, because `step` looks at each block."""
    limits = EngineLimits(**dict(block_size=4) | more)
    if n_blocks is not None or limits.kv_memory is None:
        models = [model, HeadModel(draft, model, 1) if isinstance(draft, EagleHead) else draft]
        size = sum(
            PagedCache.bytes_per_block(m.attention_slots, limits.block_size, m.n_kv_heads, m.config.head_dim, torch.float32)
            for m in models
            if m is not None
        )
        limits = replace(limits, kv_memory=(n_blocks or PLENTY) * size + random.randrange(size))
    engine = Engine(model, tokenizer, limits, world, draft)
    engine.speculation.costs = Costs({1: 1.0, 2: 1.0})  # what steps take must not decide what is tested
    assert n_blocks is None or engine.scheduler.blocks.n_blocks == n_blocks
    return engine


# --- serving ---------------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0

    def take(self, output: TokenOutput) -> None:
        assert self.finish_reason is None, "output behind the end"
        if self.tokens:
            assert output.prompt_logprobs is None, "the prompt's log-probabilities come once"
        else:
            self.prompt_logprobs, self.cached_tokens = output.prompt_logprobs, output.cached_tokens
            assert output.queue_seconds >= 0 and output.prefill_seconds > 0
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or []
        self.finish_reason = output.finish_reason


def step(engine: Engine, answers: dict[str, Answer]) -> None:
    for output in engine.step():
        answers[output.request_id].take(output)
    scheduler = engine.scheduler
    check_blocks(scheduler.blocks, [s.blocks for s in scheduler.running])


def serve(
    engine: Engine, submits: list[Submit], at_once: int = 1000, aborts: dict[int, str] | None = None
) -> dict[str, Answer]:
    """Run all requests to their end. Returns the answers by request id.

    at_once: requests that arrive before each step. aborts: the id of the request to abort, by the number of the step.
    """
    answers = {s.request_id: Answer() for s in submits}
    coming = iter(submits)
    number, last = 0, False
    while engine.has_work() or engine.compiling or not last:
        for _ in range(at_once):
            arrived = next(coming, None)
            if arrived is None:
                last = True
                break
            assert engine.submit(arrived) is None
        if aborts and number in aborts:
            engine.abort(Abort(aborts[number]))
        engine.admit()
        if engine.has_work():
            step(engine, answers)
        elif engine.compiling:
            time.sleep(0.001)
        number += 1
        assert number < 5000, "the engine does not come to an end"
    assert engine.scheduler.blocks.used == 0
    return answers


# what a bias for 3 makes likely, and single tokens
BANNED = [[3, 3], [3, 7, 3], [7], *([i, i + 1] for i in range(20, 90, 2)), *([3, i] for i in range(8, 60))]


def random_params(**fixed: Any) -> SamplingParams:
    wanted: dict[str, Any] = dict(max_tokens=random.randint(1, 16), seed=random.randrange(-(2**63), 2**63))
    if random.random() < 0.4:
        wanted |= dict(temperature=0.0)
    else:
        wanted |= dict(
            temperature=random.uniform(0.3, 1.5),
            top_k=random.choice([0, 0, 5, 40]),
            top_p=random.choice([1.0, 0.9]),
            min_p=random.choice([0.0, 0.05]),
        )
    return SamplingParams(**wanted | fixed)


def random_submits(count: int, vocab_size: int = 101, longest: int = 30, **fixed: Any) -> list[Submit]:
    """Requests with prompts of all lengths; half begin like an earlier one. The first two fill 16 blocks of 4 tokens."""

    def prompt_of(length: int) -> list[int]:
        return [random.randrange(vocab_size) for _ in range(length)]

    submits = [Submit(name, prompt_of(8), random_params(**fixed | dict(max_tokens=24))) for name in ("long 0", "long 1")]
    for i in range(count):
        prompt = prompt_of(random.choice([1, 2, random.randint(3, longest)]))
        if random.random() < 0.5:
            earlier = random.choice(submits).prompt_ids
            prompt = (earlier[: random.randint(1, len(earlier))] + prompt)[:longest]
        submits.append(Submit(f"r{i}", prompt, random_params(**fixed)))
    return [*submits, Submit("twin", submits[-1].prompt_ids, random_params(**fixed))]


# --- references ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def plain_logits(model: Transformer, tokens: list[int]) -> Tensor:
    """Logits (T, V) from one forward pass without a cache."""
    return model(torch.tensor([tokens]), Causal(len(tokens), CPU))[0]


def bent(logits: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    """One row of logits (V,) after penalties, biases and min_tokens, applied id by id, and without the end of a banned sequence."""
    raw, logits = logits, logits.clone()
    for i in set(prompt + output):
        logits[i] = logits[i] / params.repetition_penalty if logits[i] > 0 else logits[i] * params.repetition_penalty
    for i in set(output):
        logits[i] -= output.count(i) * params.frequency_penalty + params.presence_penalty
    for i, bias in params.logit_bias.items():
        logits[i] += bias
    if len(output) < params.min_tokens:
        for i in params.stop_token_ids:
            logits[i] = -torch.inf
    for *before, last in params.banned:
        if not before or output[-len(before) :] == before:
            logits[last] = -torch.inf
    if params.thinking is not None and (end := end_of_thinking(output, params.thinking)) is not None:
        logits = torch.full_like(raw, -torch.inf)
        logits[end] = raw[end]
    return logits


def end_of_thinking(output: list[int], budget: ThinkingBudget) -> int | None:
    """The token of the reasoning's end that must follow these generated ones: the whole text is searched anew."""

    def text(ids: list[int]) -> bytes:
        return b"".join(map(tiny_tokenizer().token_bytes, ids))

    begins = [n for n in range(len(output) + 1) if text(output[:n]).lstrip().startswith(budget.start.encode())]
    if not begins or len(output) - begins[0] < budget.tokens:
        return None
    if budget.end.encode() in text(output).lstrip()[len(budget.start.encode()) :]:
        return None
    thought, ends = output[begins[0] :], budget.end_ids
    return next(ends[k] for k in reversed(range(len(ends))) if k <= len(thought) and thought[len(thought) - k :] == ends[:k])


def draws(
    logits: Tensor, positions: list[int], params: SamplingParams, masks: list[Tensor] = (), raw: Tensor | None = None
) -> list[int]:
    """One token from each row of logits (B, V), drawn with this request's parameters. positions: of the drawn tokens. masks: what
    a late grammar allows there. raw: logits (B, V) before any rule, which count if the rules leave nothing that it allows."""
    batch = SamplingBatch.of([params] * len(logits), CPU)
    drawn: list[int] = sample(logits, batch, torch.tensor(positions)[:, None]).tolist()
    for i, mask in enumerate(masks):
        if not mask[drawn[i]]:
            left = logits[i : i + 1].masked_fill(~mask, -torch.inf)
            if raw is not None and left.isneginf().all():
                left = raw[i : i + 1].masked_fill(~mask, -torch.inf)
            [drawn[i]] = draws(left, positions[i : i + 1], params)
    return drawn


@cache
def late_grammar(text: str) -> Any:
    return Grammars(tiny_tokenizer(), 1024).compile(text)


def late_masks(tokens: list[int], params: SamplingParams) -> list[Tensor]:
    """What the request's late grammar allows in the place of each token; empty if it has none."""
    if not params.late_grammar:
        return []
    matcher, masks = late_grammar(params.grammar or "").deep_copy(), []
    for token in tokens:
        masks.append(allowed(matcher, 1024))
        if matcher.is_accepting():
            masks[-1][params.stop_token_ids] = True
        matcher.consume_token(token)
    return masks


def alone(model: Transformer, prompt: list[int], params: SamplingParams) -> list[int]:
    """The tokens of a request alone, without a cache: the whole text is recomputed for each token."""
    output: list[int] = []
    while len(output) < expected_length(output, params):
        logits = bent(plain_logits(model, prompt + output)[-1], prompt, output, params)
        output += draws(logits[None], [len(prompt) + len(output)], params)
    return output


def expected_length(tokens: list[int], params: SamplingParams) -> int:
    """How many tokens an answer has that begins with `tokens`: up to the first stop token after min_tokens, or max_tokens."""
    ends = [i for i, token in enumerate(tokens, 1) if token in params.stop_token_ids and i > params.min_tokens]
    return min([*ends, params.max_tokens])


def score(model: Transformer, prompt: list[int]) -> list[float | None]:
    """The log-probability of each token given those before it, None for the first."""
    logprobs = plain_logits(model, prompt).double().log_softmax(-1)
    return [None, *(float(row[token]) for row, token in zip(logprobs, prompt[1:], strict=False))]


def assert_same(model: Transformer, submit: Submit, tokens: list[int], rounding: float = 1e-5, aborted: bool = False) -> None:
    """Check that the tokens are those that the request gets alone: each is the one which the plain model, without a cache, draws
    after those before it. Only at a near-tie may it be another one. aborted: the last tokens may be missing."""
    prompt, params = submit.prompt_ids, submit.params
    expected = expected_length(tokens, params)
    assert len(tokens) == expected or (aborted and len(tokens) < expected), f"{len(tokens)} tokens instead of {expected}"
    if not tokens:
        return
    rows = plain_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
    logits = torch.stack([bent(row, prompt, tokens[:i], params) for i, row in enumerate(rows)])
    masks = late_masks(tokens, params)
    drawn = draws(logits, list(range(len(prompt), len(prompt) + len(tokens))), params, masks, rows)
    for i in (i for i, (a, b) in enumerate(zip(tokens, drawn, strict=True)) if a != b):
        raw = rows[i] + rounding * torch.randn(300, rows.shape[-1])
        near = torch.stack([bent(row, prompt, tokens[:i], params) for row in raw])
        assert tokens[i] in draws(near, [len(prompt) + i] * len(near), params, masks[i : i + 1] * len(near), raw), (
            f"token {i} of {submit} is {tokens[i]} instead of {drawn[i]}"
        )


def assert_scores(model: Transformer, submit: Submit, answer: Answer) -> None:
    """Check the log-probabilities of an answer and its prompt, and that there are none that were not asked for."""
    prompt, params = submit.prompt_ids, submit.params
    rows = plain_logits(model, prompt + answer.tokens)
    assert (answer.prompt_logprobs is None) == (params.prompt_logprobs is None)
    if answer.prompt_logprobs is not None:
        first, *rest = answer.prompt_logprobs
        assert first is None
        for entry, row, token in zip(rest, rows[: len(prompt) - 1], prompt[1:], strict=True):
            assert_logprobs(entry, row, token, params.prompt_logprobs)
    scored = rows[len(prompt) - 1 : -1] if params.logprobs is not None else ()
    for entry, row, token in zip(answer.logprobs, scored, answer.tokens[: len(scored)], strict=True):
        assert_logprobs(entry, row, token, params.logprobs)


def assert_logprobs(entry: TokenLogprobs, logits: Tensor, token: int, k: int) -> None:
    """Check the entry of one position against the logits (V,) of the plain model."""
    exact = logits.double().log_softmax(-1)
    assert entry.chosen.token_id == token
    assert abs(entry.chosen.logprob - exact[token]) < TOLERANCE
    above = [int((exact > exact[token] + slack).sum()) + 1 for slack in (TOLERANCE, -TOLERANCE)]
    assert above[0] <= entry.chosen.rank <= above[1]
    assert len({t.token_id for t in entry.top}) == len(entry.top) == k
    assert [t.rank for t in entry.top] == list(range(1, k + 1))
    for found, best in zip(entry.top, exact.sort(descending=True).values, strict=False):
        assert abs(found.logprob - exact[found.token_id]) < TOLERANCE
        assert abs(found.logprob - best) < TOLERANCE


# --- a request in a batch and alone ------------------------------------------------------------------------------------------


# By name: engine limits, and the number of requests that arrive before each step.
LIMITS: dict[str, tuple[dict[str, Any], int]] = {
    "room for all": ({}, 1000),
    "short chunks": (dict(max_batch_tokens=7, max_num_seqs=5), 2),
    "little memory": (dict(n_blocks=15, max_batch_tokens=32), 3),
    "one at a time": (dict(max_num_seqs=1, block_size=3), 1),
    "single tokens": (dict(max_batch_tokens=1, block_size=1), 4),
}


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_mixed_batch_equals_alone(kind: int, in_turn: Callable[..., Any], seed: int) -> None:
    model = random_model(config_of(in_turn(KINDS[kind], 0)))
    submits = random_submits(5)
    setting = in_turn(LIMITS, kind)
    limits, at_once = LIMITS[setting]
    engine = engine_of(model, **limits)
    answers = serve(engine, submits, at_once)
    for submit in submits:
        answer = answers[submit.request_id]
        assert_same(model, submit, answer.tokens)
        assert answer.finish_reason == "length"
    if setting == "little memory":
        assert engine.scheduler.preemptions > 0
    again = serve(engine, submits[::-1], at_once)  # now some of the prompts are in the cache
    for submit in submits:
        assert_same(model, submit, again[submit.request_id].tokens)
    assert engine.scheduler.prefix_hits > 0 or "n_blocks" in limits or limits.get("max_num_seqs") == 1, setting


def test_a_full_batch_of_bent_requests_under_preemption(seed: int) -> None:
    """Penalties, biases and min_tokens still count all earlier output after a preempted request is recomputed."""
    model = random_model(config_of("hybrid:2"))
    submits = []
    for submit in random_submits(9, longest=20):
        long, stops = submit.params.max_tokens == 24, submit.request_id == "r0"  # surely, as soon as it may
        params = msgspec.structs.replace(
            submit.params,
            max_tokens=24 if long else random.randint(12, 20),
            presence_penalty=random.choice([0.0, 1.5]),
            frequency_penalty=random.choice([0.0, 0.7, -0.5]),
            repetition_penalty=random.choice([1.0, 1.3, 0.8]),
            logit_bias={3: 1000.0} if stops else random.choice([{}, {3: 4.0, 50: -100.0}]),
            min_tokens=random.choice([0, 6]),
            banned=[] if stops else random.choice([[], BANNED]),
            stop_token_ids=[] if long else [3] if stops else random.sample(range(101), 12),
        )
        submits.append(msgspec.structs.replace(submit, params=params))
    engine = engine_of(model, n_blocks=14)
    answers = serve(engine, submits)
    assert engine.scheduler.preemptions > 0
    reasons = set()
    for submit in submits:
        answer, params = answers[submit.request_id], submit.params
        assert_same(model, submit, answer.tokens)
        stopped = answer.tokens[-1] in params.stop_token_ids
        assert answer.finish_reason == ("stop" if stopped and len(answer.tokens) > params.min_tokens else "length")
        assert not set(answer.tokens[: params.min_tokens]) & set(params.stop_token_ids)
        assert not set(answer.tokens[:-1]) & set(params.stop_token_ids), "it went on behind a stop token"
        reasons.add(answer.finish_reason)
    assert reasons == {"stop", "length"}


def test_an_id_may_come_again_with_other_parameters(seed: int) -> None:
    model = random_model(config_of("standard"))
    engine, prompt = engine_of(model), [1, 2, 3]
    for params in (random_params(max_tokens=9, temperature=t, seed=s) for t, s in ((1.4, 1), (1.4, 2), (0.0, 2))):
        submit = Submit("same", prompt, params)
        assert_same(model, submit, serve(engine, [submit])["same"].tokens)


def test_ids_without_text_are_never_drawn(seed: int) -> None:
    """The tokenizer has 40 ids, and the model's vocabulary is padded to 101."""
    model = random_model(config_of("standard"))
    engine = engine_of(model, tokenizer=SimpleNamespace(vocab_size=40))
    # request 1 has a bias, so its logits are processed; those of the others are not
    submits = [
        Submit(
            str(i),
            [i],
            SamplingParams(max_tokens=20, temperature=5.0 * (i % 3), seed=i, logit_bias={50: 100.0} if i == 1 else {}),
        )
        for i in range(9)
    ]
    drawn = {t for a in serve(engine, submits).values() for t in a.tokens}
    assert len(drawn) > 30
    assert max(drawn) < 40


def test_blocks_are_read_where_they_are(seed: int) -> None:
    """Whether they are consecutive, alike in each row, scattered, or scattered between the first and the last one of a view."""
    size, heads, features = 2, 3, 4
    for _ in range(200):
        batch, width = random.choice([(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1), (2, 3), (3, 4)])
        distance = random.choice([0, 1, width, width + 1])
        tables = np.arange(batch)[:, None] * distance + np.arange(width) + random.randrange(3)
        if random.random() < 0.7:
            places = random.sample(range(batch * width), random.randint(0, min(2, batch * width)))
            tables.flat[places] = [random.randrange(30) for _ in places]
        length = width * size - random.randrange(size)
        held = torch.randn(30 * size, heads, features)
        first = random.randrange(length)
        found = _Reader(tables, length, size)(Rows(held, None), torch.float32, first)
        rows = torch.from_numpy(tables[:, :, None] * size + np.arange(size)).flatten(1)[:, first:length]
        assert torch.equal(found, held[rows].transpose(1, 2)), tables


# --- log-probabilities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(2))
def test_logprobs(place: int, in_turn: Callable[..., str], seed: int) -> None:
    """Log-probabilities of prompts and answers, with prompts computed at once, in chunks, and interrupted by a preemption."""
    model = random_model(config_of(in_turn(("ladder", "desync-2x:4", "mistral"), place)))
    submits = []
    for submit in random_submits(4):
        wanted = dict(prompt_logprobs=random.choice([None, 0, 1, 5]), logprobs=random.choice([None, 0, 3]))
        submits.append(msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, **wanted)))
    some = random.choice([{}, dict(max_batch_tokens=7), dict(max_batch_tokens=1)])
    for limits in (some, dict(n_blocks=13, max_batch_tokens=9)):
        engine = engine_of(model, **limits)
        answers = serve(engine, submits, 4)
        assert engine.scheduler.preemptions > 0 or "n_blocks" not in limits
        for submit in submits:
            assert_scores(model, submit, answers[submit.request_id])


# --- aborts, stops, refusals, figures ----------------------------------------------------------------------------------------


def test_aborts_free_blocks_at_once_and_leave_the_others_alone(seed: int) -> None:
    model = random_model(config_of("hybrid:2"))
    submits = random_submits(9)
    engine = engine_of(model, n_blocks=25, max_batch_tokens=16, max_num_seqs=4)
    scheduler, answers, gone = engine.scheduler, {s.request_id: Answer() for s in submits}, {}
    for submit in submits:
        assert engine.submit(submit) is None
    number = 0
    while engine.has_work():
        number += 1
        step(engine, answers)
        groups = {1: scheduler.running, 4: list(scheduler.waiting), 6: scheduler.running}
        if groups.get(number):
            victim = random.choice(groups[number])
            others = {b for s in scheduler.running if s is not victim for b in s.blocks}
            engine.abort(Abort(victim.request_id))
            engine.abort(Abort(victim.request_id))  # a second abort, and one of an unknown request, have no effect
            engine.abort(Abort("nobody"))
            assert scheduler.blocks.used == len(others)
            check_blocks(scheduler.blocks, [s.blocks for s in scheduler.running])
            gone[victim.request_id] = list(answers[victim.request_id].tokens)
    assert len(gone) == 3
    assert scheduler.blocks.used == 0
    for submit in submits:
        answer = answers[submit.request_id]
        if submit.request_id in gone:
            assert answer.finish_reason is None
            assert answer.tokens == gone[submit.request_id], "output behind an abort"
        else:
            assert_same(model, submit, answer.tokens)
    again = serve(engine, submits)  # with the blocks that aborted requests left in the cache
    for submit in submits:
        assert_same(model, submit, again[submit.request_id].tokens)


def test_refusals(seed: int) -> None:
    model = random_model(config_of("standard"))
    engine = engine_of(model, n_blocks=10)
    ok = SamplingParams(max_tokens=4)

    def with_(**more: Any) -> SamplingParams:
        return msgspec.structs.replace(ok, **more)

    outside = random.choice([101, 102, 10**6, -1, -101])
    cases = [
        ([], ok, "the prompt is empty"),
        ([1, outside, 2], ok, f"token id {outside} is outside the model's vocabulary of 101"),
        ([1], with_(logit_bias={outside: 1.0}), f"token id {outside} is outside"),
        ([1], with_(allowed_token_ids=[3, outside]), f"token id {outside} is outside"),
        ([1], with_(stop_token_ids=[outside]), f"token id {outside} is outside"),
        ([1] * 77, ok, "exceed the model's context of 80"),
        ([1] * 37, ok, "41 tokens need 11 KV-cache blocks, but there are only 10"),
        ([1], with_(grammar='start: "a"'), "no tokenizer"),
    ]
    for prompt, params, message in cases:
        refused = engine.submit(Submit("bad", prompt, params))
        assert isinstance(refused, Refused)
        assert refused.request_id == "bad"
        assert message in refused.message
        assert "\n" not in refused.message
        assert not engine.has_work()
    assert engine.stats().prompt_tokens == 0
    submit = Submit("good", [1] * 36, ok)
    assert_same(model, submit, serve(engine, [submit])["good"].tokens)


def test_stats(seed: int) -> None:
    model = random_model(config_of("parallel"))
    engine = engine_of(model, n_blocks=150)
    submits = random_submits(5)
    for submit in submits:
        assert engine.submit(submit) is None
    before = engine.stats()
    assert (before.running, before.waiting, before.kv_blocks_used, before.kv_blocks_total) == (0, 8, 0, 150)
    answers = {s.request_id: Answer() for s in submits}
    step(engine, answers)
    during = engine.stats()
    assert during.running + during.waiting == len(engine.scheduler.by_id) > 0
    assert during.kv_blocks_used == len({b for s in engine.scheduler.running for b in s.blocks}) > 0
    assert during.steps == 1 and during.step_seconds > 0
    assert len(during.batch_tokens) == 1
    computed = during.batch_tokens[0]
    while engine.has_work():
        step(engine, answers)
    after = engine.stats()
    assert (after.running, after.waiting, after.kv_blocks_used) == (0, 0, 0)
    assert after.prompt_tokens == sum(len(s.prompt_ids) for s in submits)
    assert after.generation_tokens == sum(s.params.max_tokens for s in submits) == sum(len(a.tokens) for a in answers.values())
    assert len(after.batch_tokens) == after.steps - 1
    assert after.preemptions == 0
    needed = sum(len(s.prompt_ids) + s.params.max_tokens - 1 for s in submits)  # the last token is never an input
    assert computed + sum(after.batch_tokens) == needed - after.prefix_hits
    assert engine.stats().batch_tokens == []


def test_shares_are_those_since_the_last_report() -> None:
    """And the time of a token is the least so far."""
    comm, graphs = SimpleNamespace(waited=1.0), {}
    runner: Any = SimpleNamespace(model=SimpleNamespace(comm=comm), graphs=graphs, idle_seconds=0.0)
    meter, found = Meter(comm.waited), []
    for seconds, tokens, waited, idle in ((2.0, 10, 0.5, 1.0), (1.0, 20, 0.25, 0.0), (4.0, 8, 1.0, 3.0)):
        meter.count(tokens, 1, seconds)
        comm.waited += waited
        runner.idle_seconds += idle
        stats = meter.stats(runner)
        found.append((stats.all_reduce_share, stats.idle_share, stats.token_seconds, stats.step_seconds, stats.batch_tokens))
    assert found == [(0.25, 0.5, 0.2, 2.0, [10]), (0.25, 0.0, 0.05, 1.0, [20]), (0.25, 0.75, 0.05, 4.0, [8])]
    nothing = meter.stats(runner)
    assert (nothing.all_reduce_share, nothing.idle_share, nothing.step_seconds) == (None, None, 0.0)


def test_a_chat_goes_on_from_the_cache(seed: int) -> None:
    """The prompt of the next turn contains the last answer. Its full blocks of computed tokens come from the cache."""
    model = random_model(config_of("standard"))
    engine, prompt = engine_of(model), [random.randrange(101) for _ in range(9)]
    for turn in range(3):
        known = 0 if turn == 0 else (len(prompt) - 4) // 4 * 4  # 3 tokens are new, and the last drawn one was never an input
        submit = Submit(str(turn), prompt, random_params(max_tokens=8))
        answer = serve(engine, [submit])[str(turn)]
        assert answer.cached_tokens == known
        assert_same(model, submit, answer.tokens)
        prompt = prompt + answer.tokens + [random.randrange(101) for _ in range(3)]


@pytest.mark.parametrize("name", ["special", "text"])
def test_the_end_of_reasoning_is_forced_in_any_batch(name: str, seed: int) -> None:
    """With drafts and preemptions, with marks that are special tokens of the tokenizer, and with an end of several tokens."""
    model, end = random_model(replace(config_of("standard"), vocab_size=1024)), tiny_tokenizer().encode("</think>", False)
    submits = []
    for i in range(5):
        tokens = random.choice([0, 1, 3, 6])
        if name == "special":  # each answer repeats the beginning
            more = dict(thinking=ThinkingBudget(tokens, "<|user|>", "<|assistant|>", [3]), logit_bias={2: 1000.0})
        else:
            more = dict(thinking=ThinkingBudget(tokens, "", "</think>", end))
        params = random_params(max_tokens=20, banned=random.choice([[], [[end[-1]]]]), **more)
        submits.append(Submit(str(i), [random.randrange(1024) for _ in range(9)], params))
    submits += random_submits(2, vocab_size=1024)
    engine = engine_of(model, n_blocks=16, tokenizer=tiny_tokenizer(), draft_tokens=random.choice([0, 3]))
    answers = serve(engine, submits)
    assert engine.scheduler.preemptions > 0
    for submit in submits:
        answer, budget = answers[submit.request_id].tokens, submit.params.thinking
        assert_same(model, submit, answer)
        if budget is not None:
            place = budget.tokens + (name == "special")
            assert answer[place : place + len(budget.end_ids)] == budget.end_ids


def test_a_salt_shares_blocks_with_the_same_salt_alone(seed: int) -> None:
    """The prompts are prefixes of one text, so without salts each would find all whole blocks that those before it had."""
    model = random_model(config_of("standard"))
    engine, text = engine_of(model), [random.randrange(101) for _ in range(40)]
    computed: dict[str | None, int] = {}  # tokens, by salt
    for i in range(12):
        salt, length = random.choice([None, "a", "b", "a" * 1000]), random.randint(5, 40)
        submit = Submit(str(i), text[:length], random_params(max_tokens=1, cache_salt=salt))
        answer = serve(engine, [submit])[str(i)]
        assert answer.cached_tokens == min(computed.get(salt, 0), length - 1) // 4 * 4
        computed[salt] = max(computed.get(salt, 0), length)
        assert_same(model, submit, answer.tokens)


# --- grammars ----------------------------------------------------------------------------------------------------------------


def test_a_grammar_holds_through_preemption(seed: int) -> None:
    """Requests with a JSON schema, batched with free text, with and without preemptions. The end of the JSON ends them."""
    model, tokenizer = tiny(), tiny_tokenizer()
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z ]{0,9}$"},
            "old": {"type": "boolean"},
            "n": {"enum": [1, 22, 333]},
        },
        "required": ["name", "old", "n"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    prompt = tokenizer.encode("Once upon a time")
    submits = [
        Submit(
            str(i),
            [*prompt, random.randrange(3, 1000)],
            random_params(
                max_tokens=80, grammar=None if i == 2 else grammar, stop_token_ids=list(tokenizer.eos_ids) if i != 2 else []
            ),
        )
        for i in range(5)
    ]
    texts = []
    for n_blocks in (200, 24):
        engine = engine_of(model, n_blocks, tokenizer)
        answers = serve(engine, submits)
        assert (engine.scheduler.preemptions > 0) == (n_blocks == 24)
        for i in (0, 1, 3, 4):
            assert answers[str(i)].finish_reason == "stop"
            value = json.loads(tokenizer.decode(answers[str(i)].tokens))
            assert set(value) == {"name", "old", "n"}
            assert len(value["name"]) <= 9 and type(value["old"]) is bool and value["n"] in (1, 22, 333)
        texts.append([answers[s.request_id].tokens for s in submits])
    assert_same(model, submits[2], texts[1][2])
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 4  # all five, unless rounding decides a tie


def ids_of(characters: str) -> list[int]:
    return [i for c in characters for i in tiny_tokenizer().encode(c, add_special_tokens=False)]


def late(grammar: str, bias: dict[int, float], **more: Any) -> tuple[list[int], str | None]:
    """The greedy answer of a model that follows the bias alone, with a late grammar."""
    model = cheap()
    model.head.weight.mul_(1e-4)
    params = SamplingParams(grammar=grammar, late_grammar=True, temperature=0.0, logit_bias=bias, **more)
    answer = serve(engine_of(model, tokenizer=tiny_tokenizer()), [Submit("a", [5, 6], params)])["a"]
    return answer.tokens, answer.finish_reason


def test_a_token_that_a_late_grammar_forbids_is_not_penalized(seed: int) -> None:
    """The best token is forbidden at first, and allowed behind it."""
    e, b, c = ids_of("ebc")
    expected, left = [b], {e: 10.0, c: 9.0, b: 6.5}
    for _ in range(6):
        expected.append(max(left, key=left.__getitem__))
        left[expected[-1]] -= 1.5
    tokens, _ = late('start: "b" /[a-z]*/', {e: 10.0, c: 9.0, b: 8.0}, max_tokens=7, frequency_penalty=1.5)
    assert tokens == expected


@pytest.mark.parametrize("accepts", [True, False])
def test_every_stop_token_ends_what_a_late_grammar_accepts(accepts: bool, seed: int) -> None:
    """Also where a token is drawn again, with the mask. The grammar itself knows the end of text alone."""
    b, c, stop = ids_of("bcz")
    grammar = 'start: "b" "c"?' if accepts else 'start: "b" "c"'
    found = late(grammar, {b: 10.0, stop: 9.0, c: 8.0}, max_tokens=5, stop_token_ids=[stop])
    assert found == ([b, stop if accepts else c], "stop")


# --- ranks -------------------------------------------------------------------------------------------------------------------


def rank_serves(world: World, directory: Path, submits: list[Submit], random_seed: int) -> tuple[list[Answer], int, int]:
    """Run one rank's engine. All ranks get the same requests and aborts; only their memory differs. Returns the answers, the
    number of blocks and the number of preemptions."""
    random.seed(random_seed + world.rank)
    model = load(world, directory)
    size = PagedCache.bytes_per_block(model.attention_slots, 4, model.n_kv_heads, model.config.head_dim, torch.float32)
    memory = size * (15 + (world.rank + 1) % world.world_size)  # the last rank has the least
    engine = Engine(model, None, EngineLimits(block_size=4, max_batch_tokens=19, kv_memory=memory), world)
    answers = serve(engine, submits, 3, aborts={3: "r1"})
    return list(answers.values()), engine.scheduler.blocks.n_blocks, engine.scheduler.preemptions


@pytest.mark.parametrize("place", range(2))
def test_ranks_give_the_same_tokens_as_one(
    place: int, in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    n, name = in_turn([2, 4, 2], place), in_turn(["standard", "parallel", "hybrid:2", "desync-2x:4"], place)
    save_checkpoint(random_model(config_of(name)), tmp_path, torch.float32)
    model = load(ALONE, tmp_path)
    submits = [
        msgspec.structs.replace(
            s, params=msgspec.structs.replace(s.params, logprobs=2, prompt_logprobs=random.choice([None, 1]))
        )
        for s in random_submits(7 if n == 2 else 4)  # each step of more ranks than cores is slow
    ]
    results = ranks.run(n, rank_serves, tmp_path, submits, seed)
    answers, blocks, preemptions = results[0]
    for other in results[1:]:
        assert other == results[0], "the ranks disagree"  # all bits of the log-probabilities are equal, too
    assert blocks == 15
    assert preemptions > 0
    for submit, answer in zip(submits, answers, strict=True):
        assert_same(model, submit, answer.tokens, aborted=submit.request_id == "r1")
        if submit.request_id != "r1":
            assert_scores(model, submit, answer)
