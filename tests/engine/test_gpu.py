"""The engine on GPUs: CUDA graphs, our kernels and every communicator give the same results as the reference on the CPU.
Skipped without a GPU."""

import json
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from msgspec import structs

import comms
from checkpoints.presets import PRESETS, model_config
from checkpoints.weights import load_model
from comms.interface import SCHEDULES
from comms.process_group import may_share_gpus
from config import with_variant
from engine import LLM, SamplingParams
from engine.core import Engine
from engine.draft_costs import Costs
from engine.limits import EngineLimits, cache_memory
from engine.protocol import Submit
from engine.sequence import Chunk
from engine.tuning import quantized_shapes, shapes, tune
from kernels import linear_config, paged_attention
from kernels.linear import linear, linear_swiglu
from kernels.linear_config import Shape
from layers.attention import Causal
from layers.linear import ShardedLinear
from model import Transformer
from options import OVERLAPS
from quantized.scheme import on_load
from quantized.weight import quantize
from tests import MODELS
from tests.engine import gpu_drafts_rank
from tests.engine.gpu_drafts_rank import DRAFTS
from tests.engine.gpu_rank import COMMUNICATORS as ON_GPUS
from tests.engine.gpu_rank import EMBEDDED, NEW_TOKENS, PROMPT
from tests.engine.gpu_schedules_rank import COMMUNICATORS, MODELS_WITH_LADDERS, ROWS
from tests.engine.test_drafts import accepted, bent_submits, check_drafts_of_head, predicting, random_head
from tests.engine.test_embeddings import check, embeddings, wanted
from tests.engine.test_engine import (
    PLAIN,
    Answer,
    assert_same,
    assert_scores,
    config_of,
    plain_logits,
    random_model,
    random_params,
    random_submits,
    serve,
    tiny_tokenizer,
)
from tests.engine.test_runner import LINES
from tests.support.gpus import most_ranks, needs_hopper, torchrun
from text.tokenizer_files import load_tokenizer
from tp import Shard, World

GPUS = most_ranks()
CUDA = torch.device("cuda")
ALONE, CPU = World(0, 1, CUDA, comms.Local()), torch.device("cpu")
ON_CPU = World(0, 1, torch.device("cpu"), comms.Local())
ROUNDING = 1e-4  # rounding error of logits of size 1 that are summed in another order

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


def on_gpu(model: Transformer) -> Transformer:
    copy = Transformer(model.config, comms.Local(), CUDA, torch.float32).eval().requires_grad_(False)
    copy.load_state_dict(model.state_dict())
    return copy


@pytest.mark.parametrize("name", [*PLAIN, "mistral", "qwen3-some-layers", "qwen3-yarn", "biased", "gemma3", "sinks"])
def test_requests_of_every_kind_get_what_the_cpu_gives(name: str, seed: int) -> None:
    head_dim = {"gemma3": 256, "sinks": 64}.get(name, 16)
    model = random_model(replace(config_of(name), head_dim=head_dim))
    twin = on_gpu(model)
    submits = random_submits(6)
    size = 16 * 2 * twin.attention_slots * twin.n_kv_heads * head_dim * 4  # bytes of a block
    for limits, at_once in (
        (EngineLimits(), 1000),
        (EngineLimits(max_batch_tokens=24, max_num_seqs=5, kv_memory=8.5 * size), 2),
    ):
        engine = Engine(twin, None, limits, ALONE)
        for order in (submits, submits[::-1]):  # the second time, prompts are in the cache
            answers = serve(engine, order, at_once)
            for submit in submits:
                assert_same(model, submit, answers[submit.request_id].tokens, ROUNDING)


@pytest.mark.parametrize(("name", "quantization"), [("gemma3", None), ("sinks", None), ("gemma3", "fp8"), ("gemma3", "int4")])
def test_families_in_bf16_stay_near_fp32(name: str, quantization: str | None, seed: int) -> None:
    """A gated layer whose kernels know no GEGLU, and logits: with few rows, and with many."""
    config = replace(config_of(name), hidden_size=256, intermediate_size=512, head_dim=64)
    model = random_model(config)
    if quantization is None:
        twin = on_gpu(model).bfloat16()
        for tokens in (torch.randint(101, (1, count), device="cuda") for count in (1, 5, 70)):
            with torch.inference_mode():
                exact, usual = (m(tokens.cpu(), Causal(tokens.shape[1], CPU)) for m in (model, deepcopy(model).bfloat16()))
                got = twin(tokens, Causal(tokens.shape[1], CUDA)).cpu()
                assert twin.norm.scale is twin.norm.scale  # which no kernel of a step writes
            assert (got - exact).norm() <= 2 * (usual - exact).norm() + 1e-3, tokens.shape
        with torch.no_grad():
            twin.norm.weight.add_(1)  # as an optimizer's step does
        with torch.inference_mode():
            assert twin.norm.scale.float().equal(twin.norm.weight.float() + twin.norm.centered)
        return
    whole = replace(config, quantization=on_load(quantization))
    layer = ShardedLinear(whole, Shard(0, 1), ("gate_proj", "up_proj"), 0, gated=True, device=CUDA, dtype=torch.bfloat16)
    for _, part in layer.quantized_parts():
        part.fill(quantize(torch.randn(part.n, part.k, device="cuda").bfloat16() / 16, part.scheme, "layer"))
    layer.pack(torch.bfloat16)
    for count in (1, 5, 70):
        x = torch.randn(count, 256, device="cuda", dtype=torch.bfloat16)
        with torch.inference_mode():
            got, (gate, up) = layer(x), layer._product(x).float().chunk(2, -1)
        expected = F.gelu(gate, approximate="tanh") * up
        assert (got - expected).norm() < 0.01 * expected.norm(), count


@pytest.mark.parametrize("name", PLAIN)
def test_drafts_give_what_the_cpu_gives(name: str, seed: int) -> None:
    """Steps with drafts are replays of decode or span graphs, beside steps that are launched ahead."""
    model = random_model(replace(config_of(name), head_dim=16))
    submits = bent_submits(10)
    submits = predicting(submits, serve(Engine(model, None, EngineLimits(kv_memory=1e7), ON_CPU), submits))
    engine = Engine(on_gpu(model), None, EngineLimits(draft_tokens=7, max_num_seqs=5, max_batch_tokens=70), ALONE)
    engine.speculation.prepare()
    engine.speculation.costs = Costs({1: 1.0, 2: 1.0})
    for order in (submits, submits[::-1]):
        answers = serve(engine, order, 3)
        for submit in submits:
            assert_same(model, submit, answers[submit.request_id].tokens, ROUNDING)
    assert accepted(engine) > 20


@pytest.mark.parametrize("name", [*PLAIN, "mistral"])
def test_a_model_that_drafts_for_itself_gives_what_the_cpu_gives(name: str, seed: int) -> None:
    """Draft steps are replays of the draft runner's decode graphs. Almost all of their tokens are right, also behind steps that are
    launched ahead and prompts in the cache."""
    model = random_model(replace(config_of(name), head_dim=16))
    twin, submits = on_gpu(model), random_submits(8, max_tokens=20)
    engine = Engine(twin, None, EngineLimits(draft_tokens=5, max_num_seqs=5, max_batch_tokens=70), ALONE, twin)
    engine.capture()
    assert engine.speculation.costs is not None and engine.speculation.costs.draft_step_price(1, 1) > 0
    engine.speculation.costs = Costs({1: 1.0, 2: 1.0})
    for order in (submits, submits[::-1]):
        answers = serve(engine, order, 3)
        for submit in submits:
            assert_same(model, submit, answers[submit.request_id].tokens, ROUNDING)
    total = engine.speculation.total["model"]
    assert total.tokens > 50 and total.accepted >= 0.9 * total.tokens


@pytest.mark.parametrize("name", ["standard", "hybrid:2", "parallel", "desync-2x:4"])
@torch.inference_mode()
def test_a_head_drafts_what_the_cpu_drafts(name: str, seed: int) -> None:
    model = random_model(replace(config_of(name), head_dim=16))
    head = random_head(model)
    engine = Engine(
        on_gpu(model), None, EngineLimits(draft_tokens=4, max_num_seqs=5, max_batch_tokens=70), ALONE, deepcopy(head).to(CUDA)
    )
    engine.capture()
    engine.speculation.costs = Costs({1: 1.0, 2: 1.0})
    submits = random_submits(8, max_tokens=20, top_k=0, top_p=1.0, min_p=0.0)
    answers = check_drafts_of_head(engine, model, head, submits, 3)
    for submit in submits:
        assert_same(model, submit, answers[submit.request_id].tokens, ROUNDING)


def test_late_grammars_in_graphs(seed: int) -> None:
    """Tokens that a grammar forbids are drawn again in a graph's place, launched ahead and with drafts."""
    model = random_model(replace(config_of("hybrid:2"), head_dim=16, vocab_size=1024, max_seq_len=1024))
    stops = list(range(1, 1000, 40))
    params = [
        random_params(grammar=LINES, late_grammar=True, stop_token_ids=stops, max_tokens=40, temperature=t)
        for t in (0.0, 0.7, 1.0, 1.3) * 2
    ]
    submits = [Submit(str(i), [3, *random.sample(range(3, 300), 5)], p) for i, p in enumerate(params)]
    for draft_tokens in (0, 4):
        limits = EngineLimits(max_num_seqs=6, draft_tokens=draft_tokens)
        engine = Engine(on_gpu(model), tiny_tokenizer(), limits, ALONE)
        with mock.patch.object(engine.scheduler, "draw_again", wraps=engine.scheduler.draw_again) as again:
            answers = serve(engine, submits, 3)
        assert again.call_count > 10 and engine.runner.graphs is not None
        for submit in submits:
            assert_same(model, submit, answers[submit.request_id].tokens, ROUNDING)
        submits = [
            structs.replace(s, params=structs.replace(s.params, prediction=answers[s.request_id].tokens)) for s in submits
        ]


def test_log_probabilities(seed: int) -> None:
    model, submits = random_model(config_of("hybrid:2")), random_submits(4, logprobs=3, prompt_logprobs=2)
    answers = serve(Engine(on_gpu(model), None, EngineLimits(), ALONE), submits)
    for submit in submits:
        assert_scores(model, submit, answers[submit.request_id])


@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prompts_with_the_kernel_for_hopper(head_dim: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several chunks beside decode, also with prefixes in the cache. In bf16, so the log-probabilities differ from those in
    fp32; with the kernel for any GPU they differ as much."""
    from kernels import prefill_attention_hopper

    config = replace(config_of(random.choice(["standard", "hybrid:2"])), hidden_size=256, head_dim=head_dim, max_seq_len=1100)
    model = random_model(config)
    twin = Transformer(config, comms.Local(), CUDA, torch.bfloat16).eval().requires_grad_(False)
    twin.load_state_dict(model.state_dict())
    model.load_state_dict(twin.state_dict())  # the same weights
    submits = [
        structs.replace(submit, params=structs.replace(submit.params, prompt_logprobs=random.choice([None, 1])))
        for submit in random_submits(20, longest=1000, logprobs=1)
    ]
    launches = mock.Mock(side_effect=prefill_attention_hopper.prefill)
    monkeypatch.setattr(prefill_attention_hopper, "prefill", launches)
    errors: list[torch.Tensor] = []
    for hopper in (True, False):
        if not hopper:
            monkeypatch.setattr(paged_attention, "specialized", lambda *_: False)
        engine = Engine(twin, None, EngineLimits(max_num_seqs=6, max_batch_tokens=400, kv_memory=1e9), ALONE)
        before = launches.call_count
        answers = [serve(engine, order, 2) for order in (submits, submits[::-1])]
        errors.append(torch.cat([logprob_errors(model, submits, each) for each in answers]))
        assert (launches.call_count > before) == hopper
    assert errors[0].abs().max() < 20 * errors[1].std()  # without one block of keys it is 50 times the deviation and more


def logprob_errors(model: Transformer, submits: list[Submit], answers: dict[str, Answer]) -> torch.Tensor:
    """The log-probabilities of answers' tokens, and of prompts' where they were asked for, minus those of `model`."""
    errors = []
    for submit in submits:
        answer, tokens = answers[submit.request_id], submit.prompt_ids + answers[submit.request_id].tokens
        exact = plain_logits(model, tokens[:-1]).log_softmax(-1)
        entries = [*(answer.prompt_logprobs or [])[1:], *answer.logprobs]
        found = torch.tensor([entry.chosen.logprob for entry in entries if entry is not None])
        errors.append(found - exact[range(len(exact)), tokens[1:]][-len(found) :])
    return torch.cat(errors)


@pytest.mark.parametrize("name", ["hybrid:2", "parallel", "desync-2x:4"])
def test_embeddings_are_those_of_the_cpu(name: str, seed: int) -> None:
    """Beside answers, in steps with and without a graph, also longer than the largest graph."""
    model = random_model(replace(config_of(name), head_dim=16, max_seq_len=3000))
    answered, submits = random_submits(6), wanted(12)
    submits += [Submit(p, [random.randrange(101) for _ in range(2500)], SamplingParams(pooling=p)) for p in ("mean", "last")]
    engine = Engine(on_gpu(model), None, EngineLimits(max_num_seqs=6, max_batch_tokens=2600, draft_tokens=3), ALONE)
    engine.capture()
    engine.speculation.costs = Costs({1: 1.0, 2: 1.0})
    found, tokens = embeddings(engine, random.sample(submits + answered, len(submits + answered)))
    check(found, model, submits, 2 * ROUNDING)
    for submit in answered:
        assert_same(model, submit, tokens[submit.request_id], ROUNDING)


def test_no_step_compiles_a_kernel(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request would wait for it: steps longer than the largest graph, of any number of chunks, and such as score prompts."""
    from triton import knobs

    compiled: list[str] = []
    model = random_model(replace(config_of("hybrid:2"), head_dim=16, max_seq_len=3000))
    engine = Engine(on_gpu(model), None, EngineLimits(max_num_seqs=12, max_batch_tokens=4096), ALONE)
    engine.capture()
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **found: compiled.append(str(found["repr"])))
    lengths = [[2501], [1201, 1203, 407], [403] * 7, [511] * 8 + [3], [60, 5]]
    for scored in (None, 1):
        for counts in lengths:
            params = SamplingParams(max_tokens=2, prompt_logprobs=scored)
            serve(engine, [Submit(str(i), [random.randrange(101) for _ in range(n)], params) for i, n in enumerate(counts)])
    assert compiled == []


@pytest.mark.parametrize("batch", [1, 5])
def test_ten_thousand_replays_give_the_same_tokens(batch: int, seed: int) -> None:
    """The decode graph is replayed with the same inputs."""
    config = replace(with_variant(PRESETS["tiny"], "hybrid:4"), max_seq_len=64)
    model = load_model("tiny", config, ALONE, torch.bfloat16, seed)
    engine = Engine(model, None, EngineLimits(max_num_seqs=8, kv_memory=1e8), ALONE)
    engine.look_ahead = False
    for submit in random_submits(batch - 2, vocab_size=config.vocab_size, max_tokens=30, top_k=0, top_p=1.0, min_p=0.0)[
        -batch:
    ]:
        assert engine.submit(submit) is None
    engine.step()
    chunks = [Chunk(s, s.computed, 1, samples=True, is_known=True) for s in engine.scheduler.running]
    first = engine.runner.collect(engine.runner.launch(chunks)).tokens
    drawn = torch.empty(10_000, len(chunks), dtype=torch.int64, device=CUDA)
    for i in range(len(drawn)):
        engine.runner.decode.forget()  # type: ignore[attr-defined]
        drawn[i] = engine.runner.launch(chunks).drawn  # type: ignore[attr-defined]
    assert (drawn == torch.tensor(first, device=CUDA)).all()


def test_memory_of_an_earlier_cache_counts_as_free() -> None:
    whole = EngineLimits(kv_memory=1.0)
    free = cache_memory(whole, CUDA)
    earlier = torch.empty(int(free) // 2, device=CUDA, dtype=torch.uint8)
    assert cache_memory(whole, CUDA) < 0.7 * free
    del earlier
    assert cache_memory(whole, CUDA) > 0.9 * free


@torch.inference_mode()
def test_tuned_layers_are_as_exact_as_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every shape and number of rows is measured, nothing fails, and the error against fp64 is at most twice PyTorch's."""
    monkeypatch.setenv("RUNG_CACHE", str(tmp_path))
    monkeypatch.setattr(linear_config, "_tuned", {})
    model = load_model("llama-3.2-1b:1", model_config("llama-3.2-1b:1", None, 1), ALONE, torch.bfloat16, seed)
    done = tune(model, ALONE, 64, 300, rebuild=True)
    assert (len(done.found), done.messages) == (done.missing, [])
    assert tune(model, ALONE, 64, 0).missing == 0
    for shape, weights in shapes(model).items():
        weight = weights[0]
        for rows in (1, 2, 3, 7, 16, 33, 64):
            x = torch.randn(rows, shape.k, device=CUDA, dtype=torch.bfloat16)
            layer = linear_swiglu if shape.swiglu else linear
            exact, plain, got = (f(x, weight) for f in (in_fp64(shape), in_pytorch(shape), layer))
            error, allowed = ((y.double() - exact).norm() for y in (got, plain))
            assert error <= 2 * allowed, (rows, shape)
    linear_config.config.cache_clear()


@needs_hopper
@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_quantized_layers_are_tuned(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every config of every quantized layer runs, and is as exact as PyTorch's product (`linear_tuning.is_right`)."""
    monkeypatch.setenv("RUNG_CACHE", str(tmp_path))
    monkeypatch.setattr(linear_config, "_tuned", {})
    config = model_config("llama-3.2-1b:1", None, 1, weights)
    model = load_model("llama-3.2-1b:1", config, ALONE, torch.bfloat16, seed)
    done = tune(model, ALONE, 64, 300)
    assert (len(done.found), done.messages) == (done.missing, [])
    assert len(quantized_shapes(model)) == 4 and set(linear_config._tuned) <= set(done.found)
    x = torch.randn(3, 2048, device=CUDA, dtype=torch.bfloat16)
    layer = model.layers[0].attention.wqkv
    before = layer(x)
    monkeypatch.setattr(linear_config, "_tuned", {})
    linear_config.use({})
    assert (layer(x).double() - before.double()).norm() <= 0.01 * before.double().norm()


def in_pytorch(shape: Shape) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, weight)
        return F.silu(y[:, : shape.n // 2]) * y[:, shape.n // 2 :] if shape.swiglu else y

    return layer


def in_fp64(shape: Shape) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda x, weight: in_pytorch(shape)(x.double(), weight.double())


@pytest.mark.parametrize("n", [2, 4])
def test_every_variant_and_communicator_gives_the_cpu_s_greedy_tokens(n: int) -> None:
    """The embedded models write the same story with every communicator. They run in fp32, where near-ties are rare."""
    if n > GPUS:
        pytest.skip(f"needs {n} GPUs")
    # auto measures for minutes where ranks share a GPU
    names = [name for name in ON_GPUS if name != "auto" or not may_share_gpus()]
    printed = torchrun(n, "-m", "tests.engine.gpu_rank", *names, timeout=280)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(found) == len(names) * len(EMBEDDED)
    for name in EMBEDDED:
        expected = cpu_tokens(name)
        for line in found:
            if line["model"] == name:
                assert line["tokens"] == expected, line


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_drafts_with_every_communicator_give_the_cpu_s_greedy_tokens() -> None:
    """By heads and models that each rank holds whole, and by split ones."""
    names = [name for name in ON_GPUS if name != "auto" or not may_share_gpus()]
    printed = torchrun(2, "-m", "tests.engine.gpu_drafts_rank", *names, timeout=580)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(found) == len(names) * 2 * sum(map(len, DRAFTS.values()))
    gpu_drafts_rank.check(found, ROUNDING)


def cpu_tokens(name: str) -> list[int]:
    """The greedy answer of an embedded model."""
    cpu = World(0, 1, torch.device("cpu"), comms.Local())
    path = str(MODELS / f"tiny-{name}")
    model = load_model(path, model_config(path, None, 1), cpu, torch.float32)
    prompt = load_tokenizer(Path(path)).encode(PROMPT)
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    return LLM(model, world=cpu).generate([prompt], greedy)[0].token_ids


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_every_schedule_of_a_ladder_gives_the_cpu_s_greedy_tokens(tmp_path: Path) -> None:
    """After thousands of all-reduces of another graph. Both ranks make the same choices."""
    torchrun(2, "-m", "tests.engine.gpu_schedules_rank", str(tmp_path / "rank"), timeout=280)
    first, second = ([json.loads(line) for line in (tmp_path / f"rank{rank}").read_text().splitlines()] for rank in range(2))
    assert first == second and len(first) == len(COMMUNICATORS) * len(MODELS_WITH_LADDERS) * len(OVERLAPS)
    expected = {name: cpu_tokens(name) for name in MODELS_WITH_LADDERS}
    for line in first:
        assert line["tokens"] == expected[line["model"]], line
        assert {"decode 1", f"decode {ROWS}"} <= set(line["chosen"])
        possible = SCHEDULES if line["overlap"] == "auto" else (line["overlap"],)
        assert set(line["chosen"].values()) <= set(possible), line
