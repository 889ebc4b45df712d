"""--deterministic: the same bits alone, in a batch, in chunks, after a preemption, with drafts, on 1, 2 and 4 ranks, and in training."""

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import generate
from checkpoints import weights
from checkpoints.export import save_checkpoint
from checkpoints.presets import model_config
from comms import Local, TreeCommunicator
from comms.registry import choose
from engine.core import Engine
from engine.draft_costs import Costs
from engine.limits import EngineLimits
from engine.llm import LLM
from engine.paged_cache import PagedCache
from engine.protocol import SamplingParams, Submit
from engine.sampler import token_logprobs
from errors import UserError
from kernels import determinism, exact
from kernels.sampling import exponential_noise, gumbel_noise
from layers.attention import Causal, causal_mask
from layers.linear import ShardedLinear
from model import Transformer
from server.settings import load_settings
from tests.engine.test_engine import ALONE, CPU, Answer, config_of, draws, plain_logits, random_model, random_submits, serve
from tests.support.gpus import most_ranks, needs_gpu, torchrun
from tests.support.ranks import Ranks
from tp import Shard, World, init_world, stream_shards
from training import adapt, train
from training.batches import IGNORED, Batch
from training.executor import Execution, Executor
from training.losses import cross_entropy
from training.sharding import Mesh, Sharding

# A run takes one of each kind.
VARIANTS = [
    ("standard", "biased"),
    ("parallel", "qwen3-some-layers"),
    ("ladder", "hybrid-list"),
    ("desync-2x:4", "desync-custom"),
]


@contextmanager
def deterministic() -> Iterator[None]:
    determinism.enable()
    try:
        yield
    finally:
        determinism.enable(False)


# --- the same bits whatever runs beside ------------------------------------------------------------------------------------


def answers_of(
    world: World, directory: Path, submits: list[Submit], dtype: torch.dtype, quantize: str | None, seed: int
) -> list[list[Answer]]:
    """All requests in small chunks, random arrivals and with little memory, first without drafts, then with drafts of right and of
    wrong tokens."""
    random.seed(seed)
    with deterministic():
        world = replace(world, comm=TreeCommunicator() if world.world_size > 1 else Local())
        config = model_config(str(directory), None, world.world_size, quantize)
        model = weights.load_model(str(directory), config, world, dtype)
        size = PagedCache.bytes_per_block(model.attention_slots, 4, model.n_kv_heads, config.head_dim, dtype)
        limits = EngineLimits(block_size=4, max_batch_tokens=random.randint(8, 30), kv_memory=size * 12)
        engine = Engine(model, None, limits, world)
        plain = list(serve(engine, submits, random.randint(2, 5)).values())
        assert engine.scheduler.preemptions
        for one, answer in zip(submits, plain, strict=True):
            one.params.prediction.extend(answer.tokens)
        engine = Engine(model, None, replace(limits, draft_tokens=3), world)
        engine.speculation.costs = Costs({1: 1.0, 2: 1.0})
        drafted = list(serve(engine, submits, random.randint(2, 5)).values())
        assert sum(one.accepted for one in engine.speculation.total.values())
        return [plain, drafted]


@pytest.mark.parametrize("place", range(2))
def test_ranks_give_the_bits_of_one_forward_pass(
    place: int, in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    """Of a process that computes each request's whole text at once, without a cache."""
    name = in_turn(sum(zip(*VARIANTS, strict=True), ()), place)
    n = in_turn([1, 2, 4], place)
    dtype = random.choice([torch.float32, torch.bfloat16])
    quantize = in_turn([None, "int8", None, "fp8", "int4"], place)
    config = config_of(name)
    if quantize:  # large enough for groups
        config = replace(config, head_dim=16, intermediate_size=320)
    save_checkpoint(random_model(config), tmp_path, torch.float32)
    submits = [with_logprobs(one, random.choice([None, 1])) for one in random_submits(2, longest=24)]
    results = ranks.run(n, answers_of, tmp_path, submits, dtype, quantize, seed)
    with deterministic():
        model = weights.load_model(str(tmp_path), model_config(str(tmp_path), None, 1, quantize), ALONE, dtype)
        expected = [logprobs_of(model, one, answer.tokens) for one, answer in zip(submits, results[0][0], strict=True)]
    for rank, runs in enumerate(results):
        for answers in runs:
            found = [(one.tokens, one.logprobs, one.prompt_logprobs) for one in answers]
            assert found == expected, f"rank {rank} of {n}, {dtype}, {quantize}"


def logprobs_of(model: Transformer, submit: Submit, tokens: list[int]) -> tuple[Any, ...]:
    """What is drawn after the prompt and each of `tokens`, and the log-probabilities."""
    prompt, params = submit.prompt_ids, submit.params
    logits = plain_logits(model, prompt + tokens)
    first, rows = len(prompt), logits[len(prompt) - 1 : -1]
    drawn = draws(rows, list(range(first, first + len(tokens))), params)
    scored: list[Any] | None = None if params.prompt_logprobs is None else [None]
    if scored and first > 1:
        scored += token_logprobs(logits[: first - 1], prompt[1:], [1] * (first - 1)).read()
    return drawn, token_logprobs(rows, drawn, [2] * len(drawn)).read(), scored


def with_logprobs(one: Submit, prompt_logprobs: int | None) -> Submit:
    params = msgspec.structs.replace(one.params, logprobs=2, prompt_logprobs=prompt_logprobs, prediction=[])
    return msgspec.structs.replace(one, params=params)


def sums_of(world: World, partials: Tensor) -> Tensor:
    with deterministic():
        return TreeCommunicator().all_reduce(partials[world.rank].clone())


@pytest.mark.parametrize("values", [7, 50_001])
def test_the_all_reduce_is_the_tree_of_the_definition(
    values: int, in_turn: Callable[..., Any], ranks: Ranks, seed: int
) -> None:
    n, dtype = in_turn([2, 4, 8], values), in_turn([torch.float32, torch.bfloat16], values // 2)
    partials = torch.randn(n, values).to(dtype)
    for found in ranks.run(n, sums_of, partials):
        assert torch.equal(found, tree_of(list(partials)))


def tree_of(nodes: list[Tensor]) -> Tensor:
    """The definition of the tree over ranks."""
    while len(nodes) > 1:
        nodes = [(x.double() + y.double()).to(x.dtype) for x, y in zip(nodes[::2], nodes[1::2], strict=True)]
    return nodes[0]


@needs_gpu
@pytest.mark.parametrize("name", ["biased", "qwen3-some-layers", "hybrid-list"])
def test_answers_on_a_gpu_have_the_bits_of_a_score(name: str, in_turn: Callable[..., Any], tmp_path: Path, seed: int) -> None:
    """Alone, and together in small chunks; the score has no cache."""
    save_checkpoint(random_model(replace(config_of(name), head_dim=16, intermediate_size=320)), tmp_path, torch.float32)
    quantize = in_turn([None, "int8", "fp8", "int4"], len(name))
    alone = World(0, 1, torch.device("cuda"), Local())
    with deterministic():
        model = weights.load_model(str(tmp_path), model_config(str(tmp_path), None, 1, quantize), alone, torch.bfloat16)
        limits = EngineLimits(max_model_len=80, max_num_seqs=8, kv_memory=1e8)
        one, many = LLM(model, None, alone, limits=limits), LLM(model, None, alone, limits=replace(limits, max_batch_tokens=11))
        prompts = [[random.randrange(101) for _ in range(random.randint(1, 60))] for _ in range(12)]
        params = SamplingParams(max_tokens=10, temperature=1.0, seed=seed, logprobs=0, ignore_eos=True)
        together = many.generate(prompts, params)
        for i, (prompt, answer) in enumerate(zip(prompts, together, strict=True)):
            (single,) = one.generate([prompt], msgspec.structs.replace(params, seed=seed + i))
            assert (single.token_ids, single.logprobs) == (answer.token_ids, answer.logprobs), (quantize, seed)
            found = one.score(prompt + answer.token_ids).logprobs[len(prompt) :]
            assert found == [position.chosen.logprob for position in answer.logprobs], (quantize, seed)


@pytest.mark.parametrize(
    "n", [pytest.param(n, marks=pytest.mark.skipif(most_ranks() < n, reason=f"needs {n} GPUs")) for n in (1, 2, 4)]
)
def test_gpus_give_the_bits_of_one_gpu(n: int, tmp_path: Path, seed: int) -> None:
    """The all-reduces follow their definition, answers are those of one GPU, also with quantized weights, and training computes the
    forward pass of inference."""
    names = {"standard": "", "parallel": "fp8", "hybrid-list": "", "ladder": "int8", "desync-2x:4": "", "biased": "int4"}
    expected, checkpoints = {}, []
    for name, width in names.items():
        config = replace(config_of(name), head_dim=16, intermediate_size=320)
        save_checkpoint(random_model(config), tmp_path / name, torch.float32)
        expected[name] = answers_alone(tmp_path / name, width or None, seed)
        checkpoints.append(f"{tmp_path / name},{width}")
    printed = torchrun(n, "-m", "tests.gpu_deterministic_rank", str(seed), *checkpoints, timeout=280)
    found = json.loads(printed.splitlines()[-1])
    assert found["wrong"] == [], found["communicators"]
    for name in names:
        assert found["answers"][name] == expected[name], (name, found["communicators"])
    if n == 2 and found["communicators"]["one-shot"] != "SymmetricCommunicator":
        pytest.skip("these GPUs have no peer access, so only NCCL was tried")


def answers_alone(path: Path, quantize: str | None, seed: int) -> list[Any]:
    """The tokens and log-probabilities of `requests` on this GPU, one after the other."""
    alone = World(0, 1, torch.device("cuda"), Local())
    with deterministic():
        model = weights.load_model(str(path), model_config(str(path), None, 1, quantize), alone, torch.bfloat16)
        llm = LLM(model, None, alone, limits=EngineLimits(max_model_len=80, max_num_seqs=8, kv_memory=1e8))
        found = [llm.generate([prompt], one)[0] for prompt, one in zip(*requests(seed), strict=True)]
    return [[one.token_ids, [position.chosen.logprob for position in one.logprobs]] for one in found]


def requests(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with beginnings in common, greedy and sampled, with log-probabilities and without."""
    draw = random.Random(seed)
    common = [draw.randrange(101) for _ in range(40)]
    prompts = [common[: draw.randint(1, 40)] + [draw.randrange(101) for _ in range(draw.randint(1, 20))] for _ in range(8)]
    params = [
        SamplingParams(
            max_tokens=10, temperature=i % 2, seed=draw.randrange(2**62), logprobs=None if i > 5 else 0, ignore_eos=True
        )
        for i in range(len(prompts))
    ]
    return prompts, params


NEIGHBOURS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"top_p": 0.7},
    {"top_k": 9, "min_p": 0.01},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.3, "min_tokens": 5},
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_neighbours_of_every_kind_change_no_drawn_token(device: str, tmp_path: Path, seed: int) -> None:
    """On a GPU a graph draws the tokens of plain requests alone, and PyTorch draws those of a step with others."""
    save_checkpoint(random_model(replace(config_of("hybrid-list"), head_dim=16)), tmp_path, torch.float32)
    alone = World(0, 1, torch.device(device), Local())
    with deterministic():
        model = weights.load_model(str(tmp_path), model_config(str(tmp_path), None, 1), alone, torch.bfloat16)
        llm = LLM(model, None, alone, limits=EngineLimits(max_model_len=80, max_num_seqs=8, kv_memory=1e7))
        prompts = [[random.randrange(101) for _ in range(random.randint(1, 20))] for _ in range(4)]
        kinds = [{}, {}, *random.sample(NEIGHBOURS, 2)]  # the first two are plain
        params = [
            SamplingParams(max_tokens=30, temperature=2.0, seed=random.randrange(2**62), ignore_eos=True, **kind)
            for kind in kinds
        ]
        together = [answer.token_ids for answer in llm.generate(prompts, params)]
        assert together == [llm.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)], kinds
        assert together[:2] == [answer.token_ids for answer in llm.generate(prompts[:2], params[:2])]


# --- training ----------------------------------------------------------------------------------------------------------------


def trained(
    world: World, model: Transformer, batch: Batch, chunk: int, recompute: bool, mode: bool
) -> tuple[Tensor, list[Tensor]]:
    """The loss of a batch, and this rank's part of the gradients."""
    determinism.enable(mode)
    try:
        model.requires_grad_(True)
        mesh = Mesh(world.world_size, 1)
        parameters = dict(model.named_parameters())
        executor = Executor(
            model, parameters.__getitem__, world.rank, Sharding(mesh, mesh, mesh), mesh, Execution(recompute=recompute)
        )
        loss = cross_entropy(model, executor.forward(batch.inputs), batch, chunk)
        executor.backward(loss, last=True)
        gradients = [gradient.clone() for gradient in executor.take_gradients().values()]
        executor.close()
        return loss.detach(), gradients
    finally:
        determinism.enable(False)


@pytest.mark.parametrize(("place", "name"), list(enumerate(["standard", "parallel", "hybrid-list", "desync-2x:4"])))
def test_the_training_forward_has_the_bits_of_inference(
    place: int, name: str, in_turn: Callable[..., Any], ranks: Ranks, seed: int
) -> None:
    """One rank, and two that cut each weight. The gradients are those of training without the mode."""
    model, tokens = random_model(config_of(name)), torch.randint(101, (2, 13))
    targets, row, column = torch.full_like(tokens, IGNORED), random.randrange(2), random.randrange(13)
    targets[row, column] = random.randrange(101)
    with deterministic(), torch.inference_mode():
        logits = model(tokens[row : row + 1, : column + 1], Causal(column + 1, CPU))[0, -1:]
        expected = -exact.log_softmax(logits)[0, targets[row, column]]
    arguments = model, Batch(tokens, targets), random.choice([1, 5, 100]), random.random() < 0.5
    n = in_turn([1, 2], place)
    plain, found = (ranks.run(n, trained, *arguments, mode) for mode in (False, True))
    for (loss, gradients), (plain_loss, plain_gradients) in zip(found, plain, strict=True):
        assert torch.equal(loss, expected)
        assert torch.isclose(loss, plain_loss, atol=1e-4)
        for a, b in zip(gradients, plain_gradients, strict=True):
            assert (a - b).norm() < 1e-3 * b.norm() + 1e-4


# --- the arithmetic ------------------------------------------------------------------------------------------------------------


def wide(*shape: int) -> Tensor:
    """Values of very different sizes."""
    return torch.randn(shape) * 10 ** torch.empty(shape).uniform_(-4, 1)


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).abs().max() / right.abs().max())


def test_the_arithmetic_is_as_accurate_as_fp32(seed: int) -> None:
    size = random.choice([8, 520, 4096, 8 * random.randint(600, 700)])
    x, weight, bias = wide(5, size), wide(37, size), wide(37)
    assert (
        error(exact.linear(x, weight, bias, random.choice([1, 2, 8])), F.linear(*(t.double() for t in (x, weight, bias))))
        < 1e-5
    )
    assert error(exact.rms_norm(x, weight[0], 1e-5), F.rms_norm(x.double(), (size,), weight[0].double(), 1e-5)) < 1e-6
    gate, up = x.double().chunk(2, -1)
    assert error(exact.swiglu(x), F.silu(gate) * up) < 1e-6
    logits = wide(3, 5000) * 10
    assert (exact.log_softmax(logits) - logits.double().log_softmax(-1)).abs().max() < 1e-4
    assert error(exact.softmax(logits), logits.double().softmax(-1)) < 1e-6
    q, k, v = torch.randn(2, 8, 6, 16), torch.randn(2, 2, 700, 16), wide(2, 2, 700, 16)
    mask = causal_mask(torch.arange(694, 700), 700, random.choice([None, 9, 600]))
    right = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), attn_mask=mask, enable_gqa=True)
    assert error(exact.attention(q, k, v, mask), right) < 1e-5
    y = torch.empty(1000, dtype=torch.float64).uniform_(-80, 80)
    assert (exact.exp(y) / y.exp() - 1).abs().max() < 1e-9
    assert (exact.log(y.exp()) - y).abs().max() < 1e-9


def test_a_product_of_whole_numbers_is_the_tree_of_the_definition(seed: int) -> None:
    """Where nothing is rounded but the tree's nodes: sums of 8 parts, in bf16, with a share of the bias each."""
    x, weight = (torch.randint(-8, 9, (n, 48)).bfloat16() for n in (3, 5))
    bias = torch.randint(-8, 9, (5,)).bfloat16()
    nodes = [F.linear(*(t[:, 6 * i : 6 * i + 6].double() for t in (x, weight)), bias.double() / 8).bfloat16() for i in range(8)]
    while len(nodes) > 1:
        nodes = [(a.double() + b.double()).bfloat16() for a, b in zip(nodes[::2], nodes[1::2], strict=True)]
    assert torch.equal(exact.linear(x, weight, bias, 8), nodes[0])


@torch.no_grad()
def test_shards_of_a_layer_add_up_to_its_bits(seed: int) -> None:
    """Also with a small bias in fp16, of which a share has fewer bits."""
    config = config_of("biased")
    with deterministic():
        whole, *cut = (
            [ShardedLinear(config, Shard(i, count), ("down_proj",), 0, dtype=torch.float16) for i in range(count)]
            for count in (1, 2, 4, 8)
        )
        weight, bias, x = torch.randn(32, 48).half(), (torch.randn(32) * 1e-4).half(), torch.randn(9, 48).half() * 1e-4
        for layers in (whole, *cut):
            for layer, columns in zip(layers, weight.chunk(len(layers), 1), strict=True):
                layer.weight.copy_(columns)
                layer.bias.copy_(bias)  # type: ignore[union-attr]
            sums = [layer(part) for layer, part in zip(layers, x.chunk(len(layers), 1), strict=True)]
            assert torch.equal(determinism.tree_sum(sums), whole[0](x))


def test_bits_depend_on_the_row_alone(seed: int) -> None:
    """Not on other rows, on where a row lies in memory, nor on what a mask hides."""
    rows, size = random.randint(2, 9), 8 * random.randint(1, 90)
    memory, i = wide(rows * size + 9), random.randrange(rows)
    x = memory[random.randrange(9) :][: rows * size].view(rows, size)
    weight = wide(random.randint(1, 70), size)
    one, some = x[i : i + 1].clone(), weight[: random.randint(1, len(weight))].clone()
    for function in (
        exact.log_softmax,
        exact.softmax,
        exact.swiglu,
        lambda x: exact.rms_norm(x, weight[0], 1e-5),
        lambda x: exact.linear(x, weight if x is not one else some, None, 8)[..., : len(some)],
    ):
        assert torch.equal(function(x)[i : i + 1], function(one))
    seeds, positions, ids = (torch.randint(2**60, (n, 1)) for n in (rows, rows, 300))
    with deterministic():
        for noise in (exponential_noise, gumbel_noise):
            all_of = noise(seeds, positions, ids[:, 0])
            first, last = sorted(random.sample(range(301), 2))
            assert torch.equal(all_of[i : i + 1, first:last], noise(seeds[i : i + 1], positions[i : i + 1], ids[first:last, 0]))
    q, k, v = torch.randn(1, 4, 9, 8), wide(1, 2, 900, 8), wide(1, 2, 900, 8)
    mask = causal_mask(torch.arange(891, 900), 900, random.choice([None, 3, 700]))
    length = 892 + (j := random.randrange(9))
    random.choice([k, v])[:, :, length:, random.randrange(8)] = random.choice([torch.nan, torch.inf, -torch.inf])
    whole = exact.attention(q, k, v, mask)
    assert whole[:, :, j + 1 :].isnan().all()
    part = exact.attention(q[:, :, j : j + 1], k[:, :, :length], v[:, :, :length], mask[j : j + 1, :length])
    assert torch.equal(whole[:, :, j : j + 1], part)


# --- what is refused -----------------------------------------------------------------------------------------------------------


def test_what_the_mode_cannot_do_is_refused_by_name() -> None:
    standard = config_of("standard")
    with deterministic():
        for name in ("int8", "int4:64", "fp8"):
            with pytest.raises(UserError, match=f"--comm {name} quantizes all-reduces"):
                choose("cpu", name)
        with pytest.raises(UserError, match="--comm-error-budget quantizes"):
            choose("cuda", "auto", error_budget=0.01)
        with pytest.raises(UserError, match="1, 2, 4 or 8 shards, not over 16 ranks"):
            stream_shards(replace(standard, n_heads=16, n_kv_heads=16), 0, 16)
        with pytest.raises(UserError, match="not over 3 desync streams"):
            stream_shards(replace(standard, n_heads=12, n_kv_heads=12, variant="desync", desync_streams=3), 0, 1)
        with pytest.raises(UserError, match="upper-bound adds nothing"):
            stream_shards(config_of("upper-bound"), 0, 2)
        with pytest.raises(UserError, match="--compile"):
            random_model(standard).compile_modules()


@pytest.mark.parametrize("parse", [generate.parse_args, load_settings, train.parse_args, adapt.parse_args])
def test_flags_are_refused_before_a_model_is_read(parse: Callable[[list[str]], Any]) -> None:
    """Which need not exist."""
    flags = ["--model", "missing", "--deterministic"]
    if parse in (train.parse_args, adapt.parse_args):
        flags += ["--data", "missing", "--steps", "1", "--out", "missing"]
    if parse is adapt.parse_args:
        flags += ["--ladder-layers", "2"]
    with pytest.raises(UserError, match="--compile chooses the order"):
        parse([*flags, "--compile"])
    if parse in (generate.parse_args, load_settings):
        with pytest.raises(UserError, match="does not compute adapters"):
            parse([*flags, "--lora", "a=missing"])


def test_a_model_that_was_loaded_without_the_mode_is_refused() -> None:
    """Its RoPE frequencies may have other last bits."""
    with pytest.raises(UserError, match="deterministic=True to init_world, before"):
        LLM(random_model(config_of("standard")), deterministic=True)
    assert not determinism.enabled()


def test_adapters_are_refused_before_a_model_is_read() -> None:
    with deterministic(), pytest.raises(UserError, match="does not compute adapters"):
        LLM("missing", world=ALONE, lora="missing")


@pytest.mark.parametrize("capabilities", [[(9, 0), (9, 0)], [(9, 0), (8, 0)], [(10, 0), (9, 0)]])
def test_only_hopper_gpus_are_accepted(capabilities: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """By every rank of a host alike, whichever of its GPUs is another. Without the mode all are."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("tp.several_hosts", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {capabilities[index]}")
    assert init_world("cuda").device.type == "cuda"
    other = next((str(one) for one in capabilities if one != (9, 0)), None)
    try:
        if other is None:
            init_world("cuda", deterministic=True)
            return
        with pytest.raises(UserError, match=re.escape(f"on Hopper GPUs, not on GPU {other};")):
            init_world("cuda", deterministic=True)
        assert init_world("cpu", deterministic=True).device.type == "cpu"
    finally:
        determinism.enable(False)
