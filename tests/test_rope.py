"""RoPE scaling of every type against transformers: whole and chunked prompts, decoding past the original context, one and two
ranks, the CPU's and the GPU's runner."""

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from decimal import Decimal, localcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from checkpoints import weights
from checkpoints.export import save_checkpoint
from checkpoints.hf_config import config_from_hf, config_to_hf
from checkpoints.presets import model_config
from config import FAMILIES as KNOWN
from config import ModelConfig, YarnScaling, limit_context, validate
from engine.core import Engine
from engine.limits import EngineLimits
from engine.protocol import SamplingParams, Submit
from errors import UserError
from kernels import determinism
from layers.attention import Causal, Heads
from layers.rope import rope_frequencies
from tests.engine.test_engine import serve
from tests.engine.test_runner import as_on_a_gpu
from tests.support.models import ALONE, CPU
from tests.support.paged import CachedSequences
from tests.test_model import save_hf
from tp import World

TOLERANCE = 1e-4  # of fp32 logits of size about 1; a vector that is nearly zero before a norm magnifies rounding
ORIGINAL, HEAD_DIM = 32, 8
SHORT, LONG = [1.0, 1.1, 1.3, 2.0], [1.5, 2.5, 4.0, 7.0]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 4.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},  # as Qwen2.5's README gives it
    "yarn-deepseek": {
        "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": ORIGINAL, "beta_fast": 16, "beta_slow": 2.0,
        "mscale": 0.707, "mscale_all_dim": 1.4, "truncate": False,
    },
    "yarn-given": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.4},
    "longrope": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": ORIGINAL,
    },
    "yarn-slow": {  # the slowest frequency turns more than beta_slow times, so all are blended up to the bound of the ramp
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 * ORIGINAL, "beta_fast": 40.0, "beta_slow": 0.01,
    },
    "longrope-factor": {
        "type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": ORIGINAL, "factor": 9.0,
    },
    "yarn-growing": {  # of Ministral 3
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.7,
    },
    "longrope-given": {
        "type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": ORIGINAL, "factor": 9.0,
        "attention_factor": 0.8,
    },
}  # fmt: skip
FAMILIES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "smollm3": partial(transformers.SmolLM3Config, no_rope_layer_interval=2),
}


def hf_config(name: str, family: str, **more: Any) -> Any:
    """The config of a tiny model. `max_position_embeddings` is the original context for linear, dynamic and yarn, and the
    extended one for longrope."""
    make = transformers.Ministral3Config if "llama_4_scaling_beta" in SCALINGS[name] else FAMILIES[family]
    return make(
        vocab_size=97,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        intermediate_size=40,
        max_position_embeddings=128 if "longrope" in name else ORIGINAL,
        rope_theta=100.0,
        rope_scaling=dict(SCALINGS[name]),
        sliding_window=None,
        attn_implementation="eager",
        **more,
    )


@torch.inference_mode()
def theirs(directory: Path, tokens: Tensor) -> Tensor:
    """transformers' logits. The model is loaded anew because `dynamic` scaling remembers the lengths of earlier prompts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model(tokens).logits


@torch.inference_mode()
def ours(world: World, directory: Path, prompts: list[tuple[Tensor, int | None]]) -> list[tuple[Tensor, Tensor]]:
    """For each (prompt (B, T), context length): logits of one forward pass, and of chunks and single tokens through a cache."""
    found = []
    for tokens, context in prompts:
        config = limit_context(model_config(str(directory), None, world.world_size), context)
        model = weights.load_model(str(directory), config, world, torch.float32)
        whole = model(tokens, Causal(tokens.shape[1], CPU))
        sequences = CachedSequences(model, len(tokens), 128)
        sizes = [7, 1, 13, 5] + [1] * 200
        parts, first = [], 0
        while first < tokens.shape[1]:
            chunk = tokens[:, first : first + sizes.pop(0)]
            parts.append(sequences.logits(chunk))
            first += chunk.shape[1]
        found.append((whole, torch.cat(parts, 1)))
    return found


def random_tokens(length: int) -> Tensor:
    return torch.randint(97, (2, length))


@pytest.mark.parametrize("name", SCALINGS)
def test_logits_are_those_of_transformers(name: str, in_turn: Callable[..., str], tmp_path: Path, seed: int) -> None:
    """Prompts shorter and longer than the original context. Where frequencies depend on a length, this is the context here and
    the prompt in transformers, so both are made equal."""
    save_hf(hf_config(name, in_turn(FAMILIES, [*SCALINGS].index(name))), tmp_path)
    by_length = "dynamic" in name or "longrope" in name
    prompts = [(random_tokens(n), n if by_length else None) for n in (20, ORIGINAL, ORIGINAL + 1, 57)]
    for (tokens, _), found in zip(prompts, ours(ALONE, tmp_path, prompts), strict=True):
        expected = theirs(tmp_path, tokens)
        assert expected.abs().max() > 0.5
        for logits in found:
            assert (logits - expected).abs().max() < TOLERANCE, tokens.shape
    unscaled = replace(model_config(str(tmp_path), None, 1), rope_scaling=None)
    plain = weights.load_model(str(tmp_path), unscaled, ALONE, torch.float32)
    with torch.inference_mode():
        assert (plain(tokens, Causal(57, CPU)) - expected).abs().max() > 1000 * TOLERANCE, "scaling makes no difference"


@pytest.mark.parametrize("name", SCALINGS)
def test_served_tokens_past_the_original_context(name: str, in_turn: Callable[..., Any], tmp_path: Path, seed: int) -> None:
    """Prompts are served together in chunks. One sequence passes the original context while it decodes. Frequencies depend on
    the server's context and not on a sequence's length, so the reference is padded to that context."""
    place = [*SCALINGS].index(name)
    devices = [("cpu", "llama"), ("gpu", "qwen3"), ("cpu", "smollm3"), ("gpu", "llama"), ("cpu", "qwen3"), ("gpu", "smollm3")]
    device, family = in_turn(devices, place)
    save_hf(hf_config(name, family), tmp_path)
    context = 60
    config = limit_context(model_config(str(tmp_path), None, 1), context)
    model = weights.load_model(str(tmp_path), config, ALONE, torch.float32)
    prompts = {"crosses": (20, 40), "short": (5, 10), "long": (50, 9)}
    submits = [
        Submit(name, random_tokens(length)[0].tolist(), SamplingParams(max_tokens=new, temperature=0.0))
        for name, (length, new) in prompts.items()
    ]
    with as_on_a_gpu() if device == "gpu" else nullcontext():
        engine = Engine(model, None, EngineLimits(block_size=8, max_batch_tokens=16, max_num_seqs=4), ALONE)
        answers = serve(engine, submits, 3)
    for submit in submits:
        tokens = [*submit.prompt_ids, *answers[submit.request_id].tokens]
        filled = torch.tensor([tokens + [0] * (context - len(tokens))])  # padding at the end changes no earlier logits
        logits = theirs(tmp_path, filled)[0, len(submit.prompt_ids) - 1 : len(tokens) - 1]
        chosen = logits.gather(-1, torch.tensor(tokens[len(submit.prompt_ids) :])[:, None])[:, 0]
        assert len(chosen) == prompts[submit.request_id][1]
        assert (logits.max(-1).values - chosen).max() < 1e-4, submit.request_id


@pytest.mark.parametrize("name", SCALINGS)
def test_a_saved_config_means_the_same_to_transformers(name: str, tmp_path: Path, seed: int) -> None:
    directory = tmp_path / "theirs"
    save_hf(hf_config(name, "llama"), directory)
    config = model_config(str(directory), None, 1)
    assert config_from_hf(config_to_hf(config)) == config
    save_checkpoint(weights.load_model(str(directory), config, ALONE, torch.float32), tmp_path / "ours", torch.float32)
    tokens = random_tokens(50)
    assert (theirs(directory, tokens) - theirs(tmp_path / "ours", tokens)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["yarn", "longrope"])
def test_an_original_context_beside_the_scaling_counts(name: str, tmp_path: Path, seed: int) -> None:
    """As Phi-3's files have it: transformers prefers the top-level key to that of the scaling."""
    save_hf(hf_config(name, "llama"), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["original_max_position_embeddings"] = 2 * ORIGINAL
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tokens = random_tokens(ORIGINAL + 9)
    expected = theirs(tmp_path, tokens)
    for logits in ours(ALONE, tmp_path, [(tokens, ORIGINAL + 9)])[0]:
        assert (logits - expected).abs().max() < TOLERANCE


PUBLISHED: list[dict[str, Any]] = [  # as in published checkpoints, and with one of two mscales
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 0.707},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.0, "mscale_all_dim": 0.707},
]  # fmt: skip


@pytest.mark.parametrize("scaling", PUBLISHED)
def test_frequencies_of_large_heads_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    """With many turns of the fastest ones in the original context."""
    raw = transformers.LlamaConfig(head_dim=128, rope_theta=5e5, rope_scaling=dict(scaling), max_position_embeddings=131072)
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](raw, CPU)
    ours = config_from_hf(raw.to_dict())
    torch.testing.assert_close(rope_frequencies(ours)[0], theirs, rtol=1e-6, atol=0)
    assert ours.rope_factor(0) == pytest.approx(factor)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_the_context_decides_about_frequencies_and_not_a_sequence(name: str) -> None:
    config = config_from_hf(hf_config(name, "llama").to_dict())
    assert config.max_seq_len == 128
    short, long = (rope_frequencies(limit_context(config, n)) for n in (ORIGINAL, ORIGINAL + 40))
    assert torch.equal(rope_frequencies(limit_context(config, 3)), short)
    assert not torch.allclose(short, long)
    assert torch.equal(rope_frequencies(config), rope_frequencies(limit_context(config, 128)))
    with pytest.raises(UserError, match="--max-model-len 129 is above the model's context of 128"):
        limit_context(config, 129)


@pytest.mark.parametrize(("head_dim", "theta"), [(128, 1e6), (96, 1e4)])
def test_deterministic_frequencies_come_from_exact_powers(head_dim: int, theta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's vector code rounds one power of each of these otherwise than its scalar code."""
    monkeypatch.setattr(determinism, "_enabled", True)
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    with localcontext() as context:
        context.prec = 50
        exact = torch.tensor([float(Decimal(theta) ** Decimal(one)) for one in exponents.tolist()], dtype=torch.float64)
    config = replace(config_from_hf(hf_config("linear", "llama").to_dict()), head_dim=head_dim, rope_theta=theta)
    assert torch.equal(rope_frequencies(replace(config, rope_scaling=None))[0], 1.0 / exact.float())


# --- RoPE that differs between layers --------------------------------------------------------------------------------------


def test_layers_of_one_pass_have_their_own_rope(seed: int) -> None:
    """Scaled, local, and none, in any order and more than once, against fp64."""
    layers = random.sample(["scaled", "local", "none"] * 2, 6)
    windows = tuple(5 if kind == "local" else random.choice([None, 5]) if kind == "none" else None for kind in layers)
    bare = tuple(i for i, kind in enumerate(layers) if kind == "none")
    shape = dict(rope_theta=300.0, local_theta=70.0, rope_scaling=YarnScaling(4.0, 32, 1.3), no_rope_layers=bare)
    config = ModelConfig(11, 16, len(layers), 2, 1, HEAD_DIM, 8, 99, family="mistral", windows=windows, **shape)
    table, context = rope_frequencies(config), Causal(40, CPU)
    scaled = rope_frequencies(replace(config, local_theta=None, no_rope_layers=()))[0].double()
    local = 70.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    for layer, kind in enumerate(layers):
        heads, qkv = Heads(config, layer, layer, range(2), 1), torch.randn(1, 40, 4 * HEAD_DIM)
        frequencies = {"scaled": scaled, "local": local, "none": torch.zeros(HEAD_DIM // 2)}[kind]
        turned = torch.view_as_complex(qkv.double().view(40, 4, 2, -1).transpose(-1, -2).contiguous())[:, :3]
        turned = turned * torch.polar(torch.ones(1).double(), torch.arange(40)[:, None, None] * frequencies.double())
        expected = torch.view_as_real(turned).transpose(-1, -2).flatten(-2) * (1.3 if kind == "scaled" else 1)
        q, k, v = context.split(heads, qkv, table[heads.rope])
        torch.testing.assert_close(torch.cat((q, k), 2)[0].double(), expected, atol=2e-5, rtol=1e-5)
        assert torch.equal(v[0, :, 0], qkv[0, :, 3 * HEAD_DIM :])
        alone = replace(config, n_layers=1, windows=windows[layer : layer + 1], no_rope_layers=(0,) if kind == "none" else ())
        mine, same = Heads(alone, 0, 0, range(2), 1), Causal(40, CPU)
        with torch.inference_mode():  # through `forward`, which chooses the row
            assert torch.equal(heads(qkv, table, context), mine(qkv, rope_frequencies(alone), same))


@pytest.mark.parametrize("kind", ["Gemma3Text", "Olmo3"])
def test_windowed_layers_may_have_a_rope_of_their_own(kind: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Both spellings of config.json, against the tables of transformers."""
    default = 10000.0 if kind == "Gemma3Text" else 0.0
    monkeypatch.setitem(KNOWN, "mistral", replace(KNOWN["mistral"], local_theta=default))
    make, theta = getattr(transformers, f"{kind}Config"), random.uniform(2e4, 1e6)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    local = random.uniform(50, 5000) if kind == "Gemma3Text" else theta
    shape = dict(
        vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=HEAD_DIM,
        intermediate_size=40, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2, rms_norm_eps=1e-6,
    )  # fmt: skip
    nested = {
        "full_attention": yarn | {"rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    older = dict(rope_theta=theta, rope_scaling=yarn) | (dict(rope_local_base_freq=local) if default else {})
    config = None
    for spelling in (dict(rope_parameters=nested), older, dict(rope_parameters=nested, rope_theta=theta, rope_scaling=yarn)):
        raw = {"model_type": "mistral"} | shape | spelling
        found = config_from_hf(raw)
        assert config in (None, found) and found.local_theta == local and found.rope_theta == theta
        config = found
    assert config is not None and config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config
    written = {key: value for key, value in config_to_hf(config).items() if key not in ("model_type", "architectures")}
    model = getattr(transformers, kind.replace("Text", "") + "ForCausalLM" if default == 0 else "Gemma3ForCausalLM")
    for raw in (shape | dict(rope_parameters=nested), written):
        theirs = model(make(**json.loads(json.dumps(raw)))).model.rotary_emb
        found = rope_frequencies(config)
        torch.testing.assert_close(found[config.rope(1)], theirs.full_attention_inv_freq, rtol=1e-6, atol=0)
        torch.testing.assert_close(found[config.rope(0)], theirs.sliding_attention_inv_freq, rtol=1e-6, atol=0)
        assert theirs.full_attention_attention_scaling == pytest.approx(config.rope_factor(1))
        assert theirs.sliding_attention_attention_scaling == config.rope_factor(0) == 1
    no_keys = config_from_hf({"model_type": "mistral", **shape})
    assert no_keys.local_theta == (default or no_keys.rope_theta)
    assert config_from_hf({"model_type": "mistral"} | shape | {"layer_types": ["full_attention"] * 4}).local_theta is None
    refused: list[dict[str, Any]] = [{"rope_type": "linear", "factor": 2.0}, {"rope_theta": 0}, {"partial_rotary_factor": 0.5}]
    for sliding, named in zip(refused, ("linear", "rope_theta", "partial_rotary_factor"), strict=True):
        with pytest.raises(UserError, match=named):
            config_from_hf({"model_type": "mistral"} | shape | {"rope_parameters": nested | {"sliding_attention": sliding}})
    with pytest.raises(UserError, match="local_theta"):
        validate(replace(config, local_theta=None))
    with pytest.raises(UserError, match="local_theta"):
        validate(replace(config, local_theta=-1.0))
    with pytest.raises(UserError, match="no_rope_layers"):
        validate(replace(config, no_rope_layers=(4,)))
    monkeypatch.undo()
    with pytest.raises(UserError, match="full_attention"):
        config_from_hf({"model_type": "mistral"} | shape | {"rope_parameters": nested})
