"""Dense families that differ from Llama in more than biases and norms: the logits of transformers on every number of ranks, and export."""

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from checkpoints.export import save_checkpoint
from checkpoints.hf_config import config_from_hf, config_to_hf, unread_keys
from checkpoints.lora import open_adapter
from checkpoints.presets import model_config
from checkpoints.sources import open_source
from checkpoints.weights import build_model
from comms.interface import Done
from config import LongRopeScaling, ModelConfig, validate, with_variant
from engine.runner import Runner
from engine.tuning import shapes
from errors import UserError
from kernels import determinism
from kernels.sampling import gumbel_noise
from layers.attention import Causal, Heads, _split_as_stored
from layers.rope import rope_frequencies
from model import RMSNorm
from quantized.scheme import SCHEMES
from scripts.quantize import Calibration, Job, quantize_model
from tests.support.adapters import write_adapter
from tests.support.models import ALONE, CPU, load, logits_of, multipliers, randomize, save_random
from tests.support.ranks import Ranks
from tests.test_checkpoint import fails
from tests.test_deterministic import trained
from tests.test_model import assert_model_equals
from tests.test_tensor_parallel import assert_ranks_compute, base_config, variant_of
from tp import stream_shards
from training.batches import Batch
from training.draft import head_config
from training.initialize import empty_model, materializer
from training.losses import head_logits

SHAPE = dict(vocab_size=101, hidden_size=64, num_hidden_layers=3, intermediate_size=48, rms_norm_eps=1e-3)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
SPECIAL = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)


def longrope(rotated: float) -> dict[str, Any]:
    """RoPE of that part of the features of heads of 16, scaled."""
    short, long = ([random.uniform(1, 4) for _ in range(int(rotated * 8))] for _ in range(2))
    return dict(
        rope_type="longrope", rope_theta=100.0, short_factor=short, long_factor=long, partial_rotary_factor=rotated,
        original_max_position_embeddings=4,
    )  # fmt: skip


def heads() -> dict[str, int]:
    return dict(num_attention_heads=4, num_key_value_heads=random.choice([1, 2, 4]))


MODELS: dict[str, Callable[[], Any]] = {
    "granite": lambda: transformers.GraniteConfig(
        **SHAPE, **heads(), **multipliers(), attention_bias=random.random() < 0.5, tie_word_embeddings=random.random() < 0.5
    ),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **SHAPE | {"hidden_size": 72}, **heads(), head_dim=16, query_pre_attn_scalar=random.randint(5, 50), sliding_window=random.randint(2, 6),
        layer_types=random.choice([None, ["full_attention", "sliding_attention", "full_attention"]]),
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SHAPE, **heads(), eos_token_id=2, tie_word_embeddings=random.random() < 0.5),
    "olmo3": lambda: transformers.Olmo3Config(
        **SHAPE, **heads(), eos_token_id=2, sliding_window=random.randint(2, 6), max_position_embeddings=4096,
        layer_types=random.choice([None, ["full_attention", "sliding_attention", "full_attention"]]),
        rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}},
    ),
    "phi3": lambda: transformers.Phi3Config(**SHAPE, **SPECIAL, **heads(), sliding_window=random.choice([None, 4])),
    "phi4_mini": lambda: transformers.Phi3Config(
        **SHAPE, **SPECIAL, **heads(), rope_parameters=longrope(0.75), original_max_position_embeddings=4,
        max_position_embeddings=32, tie_word_embeddings=True,
    ),
}  # fmt: skip


def save_theirs(family: str, folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(MODELS[family](), attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_transformers(family: str, ranks: Ranks, tmp_path: Path, seed: int) -> None:
    """On 1, 2 and 4 ranks, of their checkpoint; and theirs of ours, which has the same bits. All keys of their config.json are used."""
    theirs = save_theirs(family, tmp_path)
    tokens = torch.randint(101, (3, random.randint(9, 14)))
    with torch.inference_mode():
        expected = theirs(tokens).logits
    for n in (1, 2, 4):
        for logits in ranks.run(n, logits_of, tmp_path, tokens):
            assert (logits - expected).abs().max() < 1e-4 * expected.abs().max().clamp(1)
        quantized = ranks.run(n, logits_of, tmp_path, tokens, "int8")[0]
        assert 1e-5 < (quantized - expected).norm() / expected.norm() < 0.2
    assert unread_keys(tmp_path / "config.json") == []
    model = load(ALONE, tmp_path)
    assert_model_equals(model, tokens, expected)
    save_checkpoint(model, tmp_path / "ours", torch.float32)
    ours, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "ours", tmp_path))
    assert ours.keys() == before.keys() and all(torch.equal(ours[name], before[name]) for name in before)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.inference_mode():
        assert torch.equal(again(tokens).logits, expected)
    assert load(ALONE, tmp_path / "ours").config == model.config


@pytest.mark.parametrize("family", MODELS)
def test_training_has_the_gradients_of_transformers(family: str, tmp_path: Path, seed: int) -> None:
    theirs, tokens, targets = save_theirs(family, tmp_path), *(torch.randint(3, 101, (2, 7)) for _ in range(2))  # no padding
    expected = cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected.backward()
    loss, found = trained(ALONE, load(ALONE, tmp_path), Batch(tokens, targets), 100, random.random() < 0.5, False)
    assert torch.isclose(loss, expected.detach(), rtol=1e-4)
    size = torch.stack([gradient.norm() for gradient in found]).norm()
    wanted = torch.stack([parameter.grad.norm() for parameter in theirs.parameters()]).norm()
    assert torch.isclose(size, wanted, rtol=1e-3)


@pytest.mark.parametrize("variant", ["standard", "ladder", "hybrid-list"])
def test_norms_behind_modules_on_ranks_and_with_a_cache(
    variant: str, in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    config = variant_of(replace(base_config(windows=(3, None, 3, None)), family="olmo3", local_theta=99.0), variant)
    place = ["standard", "ladder", "hybrid-list"].index(variant)
    assert_ranks_compute(ranks, in_turn([2, 4], place), save_random(config, tmp_path), config.vocab_size)


@pytest.mark.parametrize("family", ["olmo2", "gemma3_text"])
def test_what_norms_behind_modules_do_not_define(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(base_config(), family=family)
    for variant in ("parallel", "desync-2x:4"):
        with pytest.raises(UserError, match=f"a {family} model has norms behind its modules, which {variant[:6]}"):
            validate(with_variant(config, variant))
        with pytest.raises(UserError, match="has norms behind its modules"):
            model_config("olmo-3-7b:2", variant, 1)
    monkeypatch.setattr(determinism, "enabled", lambda: True)
    with pytest.raises(UserError, match=f"--deterministic does not support {family} models"):
        stream_shards(config, 0, 1)


def test_a_phi_s_fused_layers_are_refused_where_nothing_reads_them(tmp_path: Path, seed: int) -> None:
    save_theirs("phi4_mini", tmp_path / "base")
    model = load(ALONE, tmp_path / "base")
    for part in ("qkv_proj", "gate_up_proj"):
        adapter = write_adapter(tmp_path / part, tmp_path / "base", (part, "o_proj"))
        fails(lambda adapter=adapter: open_adapter(adapter, model.config), f"it changes {part}", "merge_and_unload")
    assert len(open_adapter(write_adapter(tmp_path / "o", tmp_path / "base", ("o_proj",)), model.config).names) == 6
    cut = write_adapter(tmp_path / "cut", tmp_path / "base", ("o_proj",), target_modules=["q_proj"])
    found = load_file(cut / "adapter_model.safetensors")
    save_file({name.replace("o_proj", "q_proj"): t for name, t in found.items()}, cut / "adapter_model.safetensors")
    fails(lambda: open_adapter(cut, model.config), "q_proj", "this model has o_proj, down_proj")
    plain = replace(model.config, family="llama", partial_rotary_factor=1.0, rope_scaling=None)
    assert "model.layers.0.self_attn.qkv_proj.weight" in open_source(str(tmp_path / "base"), plain).shapes()
    fails(lambda: quantize_model(str(tmp_path / "base"), tmp_path / "out", "int8", "rtn", None, 1, 1), "phi3")
    layers = {"layers.0.attention.wqkv.weight": torch.zeros(64, 64), "tok_embeddings.weight": torch.zeros(101, 64)}
    torch.save(layers, tmp_path / "base" / "model.pth")
    fails(lambda: open_source(str(tmp_path / "base" / "model.pth"), model.config), "partial_rotary_factor")
    shape = head_config(SimpleNamespace(streams=[0, 1, 2]), model.config, 50).layer  # type: ignore[arg-type]
    assert rope_frequencies(shape).shape == (3, 8) and shape.rope_scaling is None


def test_queries_alone_are_scaled_as_queries_and_keys_are(seed: int) -> None:
    """Where a kernel writes the keys, which has no factor: the scores are the same, with features that are not rotated, and bf16 stays."""
    scaling = LongRopeScaling((1.0,) * 3, (2.0,) * 3, 8, random.uniform(1.1, 2))
    shape = ModelConfig(11, 16, 1, 2, 1, 8, 8, 99, family="phi3", partial_rotary_factor=0.75, rope_scaling=scaling)
    heads, qkv, context = Heads(shape, 0, 0, range(2), 1), torch.randn(1, 9, 32), Causal(9, CPU)
    frequencies = rope_frequencies(shape)[heads.rope]
    (q, k, v), (one, other, same) = (
        context.split(heads, qkv, frequencies),
        _split_as_stored(heads, qkv, context.positions, frequencies),
    )
    torch.testing.assert_close(one @ other.mT, q @ k.mT, atol=1e-5, rtol=1e-5)
    assert torch.equal(v, same) and heads.scaled(q.bfloat16(), frequencies).dtype == torch.bfloat16
    assert not torch.allclose(other, k)


def test_gemma_rounds_as_transformers_does(tmp_path: Path, seed: int) -> None:
    """Norms by 1 + weight, and embeddings, in bf16; GEGLU is not fused with its product. Another activation is refused."""
    theirs = save_theirs("gemma3_text", tmp_path).bfloat16()
    config = load(ALONE, tmp_path).config
    ours = build_model(str(tmp_path), config, ALONE, torch.bfloat16)
    tokens, x = torch.randint(101, (1, 9)), torch.randn(5, 72, dtype=torch.bfloat16)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch's norm of mixed data types is slow
        assert torch.equal(ours.embed(tokens), theirs.model.embed_tokens(tokens))
        assert torch.equal(ours.norm(x), theirs.model.norm(x))
        total, normed = Done(x).add_norm(x, ours.norm.scale, ours.norm.eps)
        assert torch.equal(total, x + x) and torch.equal(normed, theirs.model.norm(x + x))
        layer, x = ours.layers[0].mlp.w_gate_up, x[None]
        with mock.patch("layers.linear.on_gpu", return_value=True):  # whose kernels know SwiGLU only
            gate, up = layer._product(x).chunk(2, -1)
            assert torch.equal(layer(x), theirs.model.layers[0].mlp.act_fn(gate) * up)
    assert not any(shape.swiglu for shape in shapes(ours))
    with pytest.raises(UserError, match="hidden_activation = 'silu' is not supported"):
        config_from_hf(config_to_hf(config) | {"hidden_activation": "silu"})
    fresh = empty_model(config, CPU, torch.float32)
    fill = materializer(fresh, None, seed)
    for name, _ in list(fresh.named_parameters()):
        fill(name)
    for norm in (fresh.norm, RMSNorm(config, "norm", None, {"device": CPU, "dtype": torch.float32})):
        assert torch.equal(norm.scale, torch.ones(72))


def test_what_reads_embeddings_streams_and_logits_of_a_granite_scales_them(tmp_path: Path, seed: int) -> None:
    """Draft heads read the streams of transformers. GPTQ begins with the model's embeddings. Training and draws on GPUs have its logits."""
    theirs, tokens = save_theirs("granite", tmp_path), torch.randint(101, (1, 7))
    model = load(ALONE, tmp_path)
    with torch.inference_mode():
        expected = theirs(tokens, output_hidden_states=True)
        hidden, streams = model.hidden_and_streams(tokens, Causal(7, CPU), (0, 1, 2))
        job = Job(model.config, open_source(str(tmp_path), model.config), SCHEMES["int4"], tmp_path, CPU, torch.float32)
        assert torch.equal(Calibration(job, tokens).streams[0].x, model.embed(tokens))
    for stream, other in zip(streams, expected.hidden_states, strict=False):
        torch.testing.assert_close(stream, other, atol=1e-4, rtol=1e-4)
    logits = expected.logits[0]
    torch.testing.assert_close(head_logits(model, model.norm(hidden[0]), model.head.weight), logits, atol=1e-4, rtol=1e-4)
    temperature, seeds, positions = torch.full((7,), 0.9), torch.arange(7), torch.arange(7)
    runner: Any = SimpleNamespace(model=model, text_ids=101)
    drawn = Runner._drawn(runner, hidden[0], temperature, seeds, positions)
    scores = logits / 0.9 + gumbel_noise(seeds[:, None], positions[:, None], torch.arange(101))
    best = scores.topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > 1e-3
    assert torch.equal(drawn[clear], best.indices[clear, 0])
