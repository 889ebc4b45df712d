"""Sparse models: the logits of transformers, on every number of ranks and in every variant, what is refused, and what one serves."""

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoints.export import save_checkpoint
from checkpoints.hf_config import config_from_hf, config_to_hf, unread_keys
from checkpoints.memory import weight_bytes
from checkpoints.presets import model_config, preset
from comms import NoCommunication
from config import Experts, ModelConfig, YarnScaling, validate, with_variant
from engine import LLM, SamplingParams, tuning
from engine.limits import EngineLimits
from errors import UserError
from layers.attention import Causal
from layers.experts import SparseMLP
from model import Transformer
from quantized.scheme import Scheme, on_load
from quantized.weight import dequantize, quantize
from tests.support.adapters import merged, write_adapter
from tests.support.gpus import most_ranks, torchrun
from tests.support.models import ALONE, CPU, load, logits_of, save_random
from tests.support.ranks import Ranks
from tests.test_tensor_parallel import VARIANTS, assert_ranks_compute, base_config, variant_of
from tp import Shard, World

SHAPE = dict(
    vocab_size=101, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2
)
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=random.randint(1, 8), head_dim=16,
        norm_topk_prob=random.random() < 0.5,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SHAPE, intermediate_size=40, num_local_experts=4, num_experts_per_tok=random.randint(1, 4),
        sliding_window=random.choice([None, 4]),
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **SHAPE, intermediate_size=24, num_experts=8, num_experts_per_tok=random.randint(1, 8),
        norm_topk_prob=random.random() < 0.5, eos_token_id=2,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SHAPE, intermediate_size=64, num_local_experts=6, num_experts_per_tok=random.randint(1, 6), head_dim=16,
        sliding_window=random.randint(2, 6), swiglu_limit=0.5, max_position_embeddings=4096,
    ),
}  # fmt: skip


def save_theirs(family: str, folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(MODELS[family](), attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):  # of which transformers makes zeros
            torch.nn.init.normal_(parameter, 0.0, 0.5)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):  # and of these ones
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_transformers(
    family: str, in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    """On 1 and more ranks, of their checkpoint; and theirs of ours. No key of their config.json is without effect."""
    theirs = save_theirs(family, tmp_path)
    tokens = torch.randint(101, (2, random.randint(5, 12)))
    with torch.inference_mode():
        expected = theirs(tokens).logits
    for n in (1, in_turn([2, 4], list(MODELS).index(family))):
        for logits in ranks.run(n, logits_of, tmp_path, tokens):
            assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert unread_keys(tmp_path / "config.json") == []
    save_checkpoint(load(ALONE, tmp_path), tmp_path / "ours", torch.float32)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.inference_mode():
        assert torch.equal(again(tokens).logits, expected)
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == load_file(tmp_path / "model.safetensors").keys()


def sparse(**more: Any) -> ModelConfig:
    count = random.randint(2, 9)
    experts = Experts(count, random.randint(1, count), random.random() < 0.5)
    return base_config(family="qwen3_moe", qk_norm=True, experts=experts, **more)


def olmoe(**more: Any) -> ModelConfig:
    return replace(sparse(**more), family="olmoe", qk_norm=False)


def gpt_oss(**more: Any) -> ModelConfig:
    count = random.randint(2, 9)
    experts = Experts(count, random.randint(1, count), True, random.choice([0.5, 7.0]))
    scaling = YarnScaling(4.0, more.get("max_seq_len", 64) // 4, 1.1, truncate=False)
    biases = dict(qkv_bias=True, o_bias=True, mlp_bias=True)
    windows = (random.randint(2, 5), None) * 2
    return base_config(family="gpt_oss", experts=experts, rope_scaling=scaling, windows=windows, **biases, **more)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_compute_what_one_process_computes(
    variant: str, in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    place = VARIANTS.index(variant)
    families = [sparse, gpt_oss] if variant.startswith("desync") else [sparse, gpt_oss, olmoe]
    config = variant_of(in_turn(families, place)(), variant)
    n = in_turn([2, 4, 2], place)
    assert_ranks_compute(ranks, n, save_random(config, tmp_path), config.vocab_size)


def definition(mlp: SparseMLP, x: Tensor) -> Tensor:
    """Of each token, its likeliest experts one after another, in fp64."""
    experts, router = mlp.router.experts, mlp.router.weight.double()
    bias = 0.0 if mlp.router.bias is None else mlp.router.bias.double()
    matrices = {name: tensor.double() for name, tensor in [*mlp.w_gate_up.pieces(), *mlp.w_down.pieces()]}
    out = torch.zeros_like(x, dtype=torch.float64)
    for place in torch.cartesian_prod(*map(torch.arange, x.shape[:-1])).view(-1, x.dim() - 1).tolist():
        row = x[tuple(place)].double()
        shares = (router @ row + bias).softmax(0)
        best = sorted(range(experts.count), key=lambda e: -shares[e])[: experts.chosen]
        whole = sum(shares[e] for e in best) if experts.normalized else 1.0
        for e in best:
            gate, up, down = (
                (matrices[f"experts.{e}.{part}_proj.weight"], matrices.get(f"experts.{e}.{part}_proj.bias"))
                for part in ("gate", "up", "down")
            )
            hidden = activation(linear(row, *gate), linear(row, *up), experts.limit)
            out[tuple(place)] += shares[e] / whole * linear(hidden, *down)
    return out


def activation(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """SwiGLU, or gpt-oss's (its model card, section 2.2)."""
    if limit is None:
        return silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (1 + (-1.702 * gate).exp()).reciprocal() * (up + 1)


@pytest.mark.parametrize("variant", ["standard", "parallel", "hybrid:2", "desync-2x:1"])
def test_every_variant_s_mlp_is_the_definition_s(variant: str, in_turn: Callable[..., Any], tmp_path: Path, seed: int) -> None:
    """The model's logits do not change when its sparse MLPs are replaced by their definition."""
    config = in_turn([sparse, gpt_oss], len(variant))()
    model = load(ALONE, save_random(with_variant(config, variant), tmp_path))
    tokens = torch.randint(101, (2, 5))
    with torch.inference_mode():
        found = model(tokens, Causal(5, CPU))
        for module in model.modules():
            if isinstance(module, SparseMLP):
                module.forward = lambda x, own=module: definition(own, x).float()  # type: ignore[method-assign]
        assert (model(tokens, Causal(5, CPU)) - found).abs().max() < 1e-4


MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_experts_in_mxfp4_are_those_of_their_definition(n: int, ranks: Ranks, tmp_path: Path, seed: int) -> None:
    """As transformers dequantizes them. Four ranks cut groups of 32 values that share a scale."""
    save_random(gpt_oss(hidden_size=64, intermediate_size=64), tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, columns = tensors[name].shape
        blocks = torch.randint(256, (experts, columns, k // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, (experts, columns, k // 32), dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del packed[name]
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | MXFP4))
    save_file(packed, tmp_path / "model.safetensors")
    tokens = torch.randint(101, (2, 9))
    expected = logits_of(ALONE, tmp_path / "plain", tokens)
    for logits in ranks.run(n, logits_of, tmp_path, tokens):
        assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_random_experts_in_mxfp4_are_the_nearest(seed: int) -> None:
    """Of all codes, with the scale that the specification chooses. Also of values in the middle of two codes."""
    scheme = Scheme("mxfp4", 4, is_float=True, group=32)
    weight = torch.cat([torch.randn(3, 64), torch.randint(-24, 25, (3, 64)) / 4.0])
    weight[0, :32] = 0
    found = dequantize(quantize(weight, scheme, "a layer"))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for row, group in product(range(6), range(2)):
        own = weight[row, 32 * group :][:32]
        scale = 2.0 ** (math.floor(math.log2(own.abs().max())) - 2) if own.any() else 1.0
        for value, rounded in zip(own.tolist(), found[row, 32 * group :][:32].tolist(), strict=True):
            distance = (values * scale - abs(value)).abs()
            nearest = [i for i in range(8) if distance[i] == distance.min()]
            code = next((i for i in nearest if i % 2 == 0), nearest[0])
            assert rounded == math.copysign(values[code].item() * scale, value)


@pytest.mark.parametrize(("width", "allowed"), [("int8", 1e-5), ("int4", 1e-5), ("fp8", 0.1)])  # fp8: activations, too
def test_experts_are_quantized_as_they_are_loaded(width: str, allowed: float, tmp_path: Path, seed: int) -> None:
    save_random(sparse(hidden_size=128, intermediate_size=256), tmp_path)
    mlp = next(module for module in load(ALONE, tmp_path, width).modules() if isinstance(module, SparseMLP))
    plain = next(module for module in load(ALONE, tmp_path).modules() if isinstance(module, SparseMLP))
    x = torch.randn(7, 128)
    with torch.inference_mode():
        found, exact = mlp(x), plain(x)
        for layer, rounded in ((plain.w_gate_up, mlp.w_gate_up), (plain.w_down, mlp.w_down)):
            assert rounded.is_quantized and mlp.router.weight.equal(plain.router.weight)
            layer.weight.copy_(torch.cat([dequantize(part.tensors) for _, part in rounded.quantized_parts()]))
        assert (found - definition(plain, x)).norm() < allowed * found.norm()
        assert (found - exact).norm() > 1e-4 * exact.norm()


@pytest.mark.parametrize("family", [sparse, gpt_oss, olmoe])
def test_an_engine_s_answers_do_not_depend_on_chunks_or_the_cache(
    family: Callable[[], ModelConfig], tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layers.attention.SCORES", random.choice([100, 1 << 24]))
    config = replace(family(), max_seq_len=128)
    save_random(config, tmp_path)
    shared = torch.randint(101, (40,)).tolist()
    prompts = [shared + torch.randint(101, (random.randint(1, 9),)).tolist() for _ in range(4)]
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    model = load(ALONE, tmp_path)
    chunked = EngineLimits(max_model_len=128, max_num_seqs=3, max_batch_tokens=17, kv_memory=1e6)
    answers = LLM(model, limits=chunked).generate([*prompts, *prompts], greedy)
    alone = [LLM(model).generate([prompt], greedy)[0].token_ids for prompt in prompts]
    assert [answer.token_ids for answer in answers] == [*alone, *alone]


def test_adapters_change_attention_and_are_refused_for_experts(tmp_path: Path, seed: int) -> None:
    base = save_random(replace(sparse(), max_seq_len=64), tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, ("q_proj", "k_proj", "v_proj", "o_proj"))
    prompt, greedy = torch.randint(101, (9,)).tolist(), SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=0)
    found, expected = (
        LLM(load(ALONE, folder), **lora).generate([prompt], greedy)[0]
        for folder, lora in ((base, {"lora": str(adapter)}), (merged(tmp_path / "merged", base, adapter), {}))
    )
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert abs(ours.chosen.logprob - theirs.chosen.logprob) < 1e-3
    with pytest.raises(UserError, match=r"experts or their router.*merge"):
        LLM(load(ALONE, base), lora=str(write_adapter(tmp_path / "of-experts", base, ("q_proj", "up_proj"))))


def test_experts_are_not_tuned_as_other_layers(tmp_path: Path, seed: int) -> None:
    layers = tuning.layers(load(ALONE, save_random(sparse(), tmp_path)))
    assert len(layers) == 2 * 4 + 1 and not any(layer.is_mixed for layer in layers)


@pytest.mark.parametrize(
    "n", [pytest.param(n, marks=pytest.mark.skipif(most_ranks() < n, reason=f"needs {n} GPUs")) for n in (1, 2)]
)
@pytest.mark.parametrize(
    ("family", "variant"),
    [(sparse, "standard"), (sparse, "parallel"), (sparse, "ladder"), (gpt_oss, "standard"), (gpt_oss, "ladder")],
)
def test_gpus_choose_the_tokens_that_a_cpu_finds_likeliest(
    family: Callable[..., ModelConfig], variant: str, n: int, tmp_path: Path, seed: int
) -> None:
    """Steps of 3 and of 40 sequences, and chunks of up to 160 tokens: each way of reading experts. Where two experts are about equally
    likely, rounding decides, so 1 and 2 answers may differ."""
    config = family(head_dim=16, intermediate_size=96, hidden_size=64, max_seq_len=512)
    save_random(variant_of(config, variant), tmp_path)
    model = load(ALONE, tmp_path)
    for count, longest, may_differ in ((3, 200, 1), (40, 20, 2)):
        prompts = [torch.randint(101, (random.randint(1, longest),)).tolist() for _ in range(count)]
        answers = json.loads(torchrun(n, "-m", "tests.gpu_sparse_rank", str(tmp_path), json.dumps(prompts), timeout=200))
        differ = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = torch.tensor([prompt + answer[:-1]])
            with torch.inference_mode():
                logits = model(tokens, Causal(tokens.shape[1], CPU))[0, len(prompt) - 1 :]
            chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            differ += (logits.amax(1) - chosen).max().item() > 1e-2
        assert differ <= may_differ, f"{differ} of {count} answers"


# --- what is refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but a layer has 8 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be at least 1"),
        ({"num_experts": 4}, "one number of experts"),
        ({"num_experts": None, "num_local_experts": None}, "one number of experts"),
        ({"mlp_only_layers": [1]}, "some dense layers"),
        ({"decoder_sparse_step": 2}, "some dense layers"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"n_routed_experts": 4}, "n_routed_experts"),
        ({"model_type": "qwen3"}, "num_(local_)?experts = 8 is not supported"),
    ],
)
def test_a_config_that_is_no_sparse_model_s(change: dict[str, Any], words: str) -> None:
    raw = config_to_hf(replace(base_config(family="qwen3_moe", qk_norm=True, experts=Experts(8, 2, True))))
    assert config_from_hf(raw).experts == Experts(8, 2, True)
    with pytest.raises(UserError, match=words):
        config_from_hf(raw | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": None}, "rope_scaling is missing"),
        ({"experts_per_token": 3}, "experts_per_token = 3, but num_experts_per_tok = 4"),
        ({"swiglu_limit": 0.0}, "swiglu_limit must be a positive number"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5 is not supported"),
    ],
)
def test_a_published_config_of_gpt_oss(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    """As openai/gpt-oss-20b has it: what the preset says, and no key without effect."""
    kinds = ["sliding_attention", "full_attention"]
    scaling = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    raw: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": kinds * 12, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {"modules_to_not_convert": kept, "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
        "rope_scaling": {"rope_type": "yarn", **scaling}, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
    }  # fmt: skip
    found, ours = config_from_hf(raw), preset("gpt-oss-20b")
    assert found.quantization is not None and ours.quantization is not None
    assert replace(found, eos_token_ids=(), quantization=ours.quantization) == ours
    assert found.quantization.rules == ours.quantization.rules
    names = {
        name: found.quantization.scheme(f"model.layers.3.{name}") for name in ("mlp.experts.7.up_proj", "self_attn.q_proj")
    }
    assert [scheme and scheme.name for scheme in names.values()] == ["fp4, group 32", None]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert unread_keys(tmp_path / "config.json") == []
    with pytest.raises(UserError, match=words):
        config_from_hf(raw | change)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.sinks"), r"lacks model\.layers\.1\.self_attn\.sinks"),
        (lambda t: t.pop("model.layers.0.mlp.router.bias"), r"lacks model\.layers\.0\.mlp\.gate\.bias"),
        (
            lambda t: t.pop("model.layers.2.mlp.experts.down_proj"),
            r"lacks model\.layers\.2\.mlp\.experts\.0\.down_proj\.weight",
        ),
        (
            lambda t: t.update(
                {
                    "model.layers.0.mlp.experts.gate_up_proj_bias": t["model.layers.0.mlp.experts.gate_up_proj_bias"][
                        :, :7
                    ].clone()
                }
            ),
            r"gate_proj\.bias has shape \(3,\)",
        ),
        (lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(5)}), "unknown tensors|lacks"),
    ],
)
def test_a_gpt_oss_checkpoint_without_its_tensors(
    spoil: Callable[[dict[str, Tensor]], Any], words: str, tmp_path: Path, seed: int
) -> None:
    file = save_random(gpt_oss(), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    spoil(tensors)
    save_file(tensors, file)
    assert re.search(words, failure(ALONE, tmp_path))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.1.up_proj.weight"), r"lacks model\.layers\.1\.mlp\.experts\.1\.up_proj"),
        (lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.zeros(3, 40)}), r"mlp\.gate\.weight has shape \(3, 40\)"),
        (lambda t: t.update({"model.layers.0.mlp.experts.2.up_proj.weight": torch.zeros(48, 40)}), "unknown tensors"),
    ],
)
def test_a_checkpoint_without_its_experts(
    spoil: Callable[[dict[str, Tensor]], Any], words: str, ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    config = base_config(family="qwen3_moe", qk_norm=True, experts=Experts(2, 1, True))
    file = save_random(config, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    spoil(tensors)
    save_file(tensors, file)
    errors = ranks.run(2, failure, tmp_path)
    assert re.search(words, errors[0]) and len(set(errors)) == 1


def test_gpus_refuse_what_has_no_kernels_yet() -> None:
    """Before they allocate anything, so that no GPU is needed here."""
    gpu, shard = torch.device("cuda"), Shard(0, 2)
    with pytest.raises(UserError, match="experts in 8 or 4 bits have no GPU kernels yet"):
        SparseMLP(replace(sparse(), quantization=on_load("int8")), 0, shard, gpu, torch.bfloat16)
    for config in (olmoe(), base_config(family="olmo2", qk_norm=True), base_config(family="gemma3_text", qk_norm=True)):
        with pytest.raises(UserError, match=f"{config.family} models run on one GPU only"):
            Transformer(config, NoCommunication(0, 2), gpu, torch.bfloat16)
    with pytest.raises(UserError, match="norm over all heads would join the streams"):
        validate(with_variant(olmoe(), "desync-2x:2"))


def failure(world: World, folder: Path) -> str:
    with pytest.raises(UserError) as found:
        load(world, folder)
    return str(found.value)


def test_memory_counts_all_experts_and_speed_those_that_are_read() -> None:
    config = preset("qwen3-30b-a3b:2")
    layer = 2 * 2048 * 128 * (32 + 4) + 128 * 3 * 2048 * 768 + 128 * 2048
    assert config.parameter_count() == 2 * layer + 2 * 151936 * 2048
    assert config.parameter_count(active=True) == config.parameter_count() - 2 * 120 * 3 * 2048 * 768
    assert weight_bytes(config, 1, torch.bfloat16) == 2 * (config.parameter_count() - 2 * 128 * 2048)


def test_the_config_is_read_back(tmp_path: Path, seed: int) -> None:
    for family in MODELS:
        raw = json.loads(MODELS[family]().to_json_string())
        config = config_from_hf(raw)
        assert config_from_hf(config_to_hf(config)) == config and config.family == family
        ladder = with_variant(config, "hybrid:1")
        assert config_from_hf(config_to_hf(ladder)) == ladder
    raw = transformers.MixtralConfig().to_dict()
    bare = {
        key: value
        for key, value in raw.items()
        if key not in ("rms_norm_eps", "rope_parameters", "rope_theta", "sliding_window")
    }
    config, theirs = config_from_hf(bare), transformers.MixtralConfig(**bare)
    assert (config.norm_eps, config.rope_theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])
    assert config.windows == () and theirs.sliding_window is None
    assert model_config("mixtral-8x7b", None, 1).experts == Experts(8, 2, True)
