"""Reading and writing `config.json`, against transformers and published checkpoints."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.hf_config import HARMLESS, NEUTRAL, Recorded, config_from_hf, config_to_hf, read_config, unread_keys
from checkpoints.presets import PRESETS, preset
from config import (
    FAMILIES,
    MULTIPLIERS,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    Reduces,
    RopeScaling,
    YarnScaling,
    validate,
    with_variant,
)
from errors import UserError
from tests.test_checkpoint import fails
from tests.test_presets import transformers_config

DENSE = [name for name, family in FAMILIES.items() if not family.expert_size]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PHI_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 12,
    "long_factor": [2.0] * 12,
    "partial_rotary_factor": 0.75,
}
# the `config.json` of the published hybrid ladder: Llama-3.1-8B with ladder residuals in the upper half of its layers
HYBRID_LADDER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "ladder_layers": 16,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llamaLadder",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.2",
    "use_cache": True,
    "vocab_size": 128256,
}


# --- config.json -----------------------------------------------------------------------------------------------------------


def written(config: Any) -> dict[str, Any]:
    """The content of the `config.json` that transformers writes."""
    return json.loads(config.to_json_string())


def random_shape(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    heads, kv_heads = rng.choice([(8, 2), (4, 4), (6, 3)])
    return dict(
        vocab_size=rng.randrange(100, 1000),
        hidden_size=heads * rng.choice([16, 32]),
        num_hidden_layers=rng.randrange(2, 6),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=rng.randrange(10, 500),
        max_position_embeddings=rng.randrange(100, 5000),
        rms_norm_eps=rng.choice([1e-5, 1e-6]),
        tie_word_embeddings=rng.random() < 0.5,
        bos_token_id=rng.randrange(100),
        eos_token_id=rng.choice([7, [3, 5, 8]]),
    )


def agree(ours: ModelConfig, theirs: Any) -> None:
    """Check that every number of our config is equal to the one in transformers' config."""
    assert ours.family == theirs.model_type
    for our_name, their_name in {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "intermediate_size": "intermediate_size",
        "max_seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
        "bos_token_id": "bos_token_id",
    }.items():
        assert getattr(ours, our_name) == getattr(theirs, their_name), our_name
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    eos = theirs.eos_token_id
    assert list(ours.eos_token_ids) == ([] if eos is None else eos if isinstance(eos, list) else [eos])
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert ours.rope_theta == rope["rope_theta"]
    if rope["rope_type"] == "default":
        assert ours.rope_scaling is None
    else:
        assert ours.rope_scaling is not None and len(vars(ours.rope_scaling)) >= 4 - 2 * (rope["rope_type"] == "linear")
        for key in vars(ours.rope_scaling).keys() & rope.keys():
            value = getattr(ours.rope_scaling, key)
            assert (list(value) if isinstance(value, tuple) else value) == rope[key]
    assert ours.partial_rotary_factor == rope.get("partial_rotary_factor", 1.0)
    if ours.family == "ministral3":
        assert ours.query_growth == rope["llama_4_scaling_beta"]
    if ours.family == "gemma3_text":
        assert ours.attention_multiplier == theirs.query_pre_attn_scalar**-0.5
        assert ours.embedding_multiplier == math.sqrt(theirs.hidden_size) and theirs.hidden_activation == "gelu_pytorch_tanh"
    for key in MULTIPLIERS if ours.family == "granite" else ():
        assert getattr(ours, key) == getattr(theirs, key)
    if ours.family in DENSE and not FAMILIES[ours.family].qkv_bias:
        attention = getattr(theirs, "attention_bias", False)
        assert (ours.qkv_bias, ours.o_bias) == (attention, getattr(theirs, "attention_out_bias", attention))
        assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    rotated = getattr(theirs, "no_rope_layers", [1] * ours.n_layers)
    assert [int(layer not in ours.no_rope_layers) for layer in range(ours.n_layers)] == rotated
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.n_layers
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [ours.window(layer) for layer in range(ours.n_layers)] == expected
    local = theirs.rope_parameters.get("sliding_attention", {})
    assert ours.local_theta == (local["rope_theta"] if local and any(expected) else None)


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (transformers.LlamaConfig, {}),
        (transformers.LlamaConfig, {"head_dim": 24}),
        (transformers.LlamaConfig, {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}),
        (transformers.MistralConfig, {}),  # its default is a window of 4096
        (transformers.MistralConfig, {"sliding_window": 17}),
        (transformers.MistralConfig, {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        (transformers.Qwen2Config, {}),
        (transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        (transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": 9}),
        (transformers.Phi3Config, {"sliding_window": 9}),
        (
            transformers.Phi3Config,
            {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": PHI_ROPE},
        ),
        (transformers.GraniteConfig, {}),
        (transformers.GraniteConfig, {"embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 16.0}),
        (transformers.SeedOssConfig, {}),
        (transformers.SeedOssConfig, {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "head_dim": 24}),
        (transformers.Ministral3Config, {"max_position_embeddings": 262144}),  # the context that its default scaling is for
        (transformers.SmolLM3Config, {}),
        (transformers.SmolLM3Config, {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9}),
        (transformers.Gemma3TextConfig, {}),
        (transformers.Gemma3TextConfig, {"query_pre_attn_scalar": 168, "sliding_window": 9, "sliding_window_pattern": 2}),
        (transformers.Olmo2Config, {}),
        (transformers.Olmo3Config, {}),
        (transformers.Olmo3Config, {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}),
        (transformers.Qwen3Config, {}),
        (transformers.Qwen3Config, {"head_dim": 64, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 1e6}}),
    ],
)
def test_configs_that_transformers_writes(make: Any, more: dict[str, Any], seed: int) -> None:
    theirs = make(**{**random_shape(seed), **more})
    ours = config_from_hf(written(theirs))
    agree(ours, theirs)
    assert ours.variant == "standard"
    assert ours.qkv_bias or theirs.model_type != "qwen2"
    assert ours.qk_norm == (theirs.model_type in ("qwen3", "gemma3_text"))


def test_the_older_spelling_of_rope(seed: int) -> None:
    raw = written(transformers.LlamaConfig(**random_shape(seed)))
    del raw["rope_parameters"]
    assert config_from_hf(raw).rope_theta == 10000.0
    ours = config_from_hf(raw | {"rope_theta": 500000, "rope_scaling": LLAMA3_ROPE})
    assert ours.rope_theta == 5e5 and ours.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    agree(ours, transformers_config(raw | {"rope_theta": 500000, "rope_scaling": LLAMA3_ROPE}))
    assert config_from_hf(raw | {"rope_theta": 5e5, "rope_scaling": None}).rope_scaling is None
    for keys in (  # two sources
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}},
    ):
        theirs = transformers.LlamaConfig(**raw | json.loads(json.dumps(keys))).rope_parameters
        ours_of_both, scaled = config_from_hf(raw | keys), theirs["rope_type"] == "linear"
        assert ours_of_both.rope_theta == theirs["rope_theta"]
        assert isinstance(ours_of_both.rope_scaling, LinearScaling if scaled else type(None))
    oldest = {"type" if k == "rope_type" else k: v for k, v in LLAMA3_ROPE.items()}
    assert config_from_hf(raw | {"rope_theta": 5e5, "rope_scaling": oldest}) == ours


@pytest.mark.parametrize("family", DENSE)
def test_keys_that_may_be_absent_mean_what_they_mean_to_transformers(family: str, seed: int) -> None:
    raw = {k: v for k, v in random_shape(seed).items() if k not in ("tie_word_embeddings", "rms_norm_eps", "eos_token_id")}
    raw |= {"model_type": family, "use_sliding_window": True, "eos_token_id": None}
    if FAMILIES[family].scaled:
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000, "llama_4_scaling_beta": 0.3}
        raw |= {"rope_parameters": yarn, "max_position_embeddings": 4000}
    agree(config_from_hf(raw), transformers_config(raw))
    windows = {"sliding_window": 9, "no_rope_layer_interval": 2} if family == "smollm3" else {"sliding_window": None}
    if FAMILIES[family].local_theta is None:
        agree(config_from_hf(raw | windows), transformers_config(raw | windows))
    else:  # such a model's other layers with a window would have the wrong RoPE
        with pytest.raises(UserError, match="sliding_window is null"):
            config_from_hf(raw | windows)


def test_the_published_hybrid_ladder() -> None:
    config = config_from_hf(HYBRID_LADDER)
    assert config.variant == "ladder" and config.ladder_layers == tuple(range(16, 32)) and config.is_hybrid
    assert config.description == "hybrid ladder (layers 16-31 of 32)"
    rope = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    base = replace(preset("llama-3-8b"), rope_scaling=rope, max_seq_len=131072, bos_token_id=128000)
    assert with_variant(config, "standard") == replace(base, eos_token_ids=(128001, 128008, 128009))
    assert config_from_hf(config_to_hf(config)) == config
    assert config_from_hf(HYBRID_LADDER | {"ladder_layers": list(range(16, 32))}) == config
    assert config_from_hf(HYBRID_LADDER | {"ladder_layers": [30, 2]}).ladder_layers == (2, 30)
    assert config_from_hf(HYBRID_LADDER | {"ladder_layers": 32}) == with_variant(config, "ladder")
    for none in (None, 0, []):
        assert config_from_hf(HYBRID_LADDER | {"ladder_layers": none}) == with_variant(config, "standard")


VARIANTS = ["standard", "parallel", "ladder", "hybrid", "desync-2x:4", "desync-4x:2", "desync-4x", "upper-bound"]


def longropes(frequencies: int) -> st.SearchStrategy[RopeScaling]:
    numbers = st.floats(1e-8, 1e8)
    each = st.lists(numbers, min_size=frequencies, max_size=frequencies).map(tuple)
    return st.builds(LongRopeScaling, each, each, st.integers(2, 10**5), numbers)


def scalings(frequencies: int) -> st.SearchStrategy[RopeScaling]:
    """Any RoPE scaling of a model with that many frequencies."""
    lengths, factors, numbers = st.integers(2, 10**5), st.floats(1, 100), st.floats(1e-8, 1e8)
    return st.one_of(
        st.builds(Llama3Scaling, numbers, numbers, numbers, lengths),
        st.builds(LinearScaling, factors, lengths),
        st.builds(DynamicScaling, factors, lengths),
        st.builds(YarnScaling, factors, lengths, numbers, st.floats(2, 100), st.floats(0.01, 2), st.booleans()),
        longropes(frequencies),
    )


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any valid config of any family and variant."""
    family = draw(st.sampled_from(DENSE))
    known = FAMILIES[family]
    layers, kv_heads = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    positive = st.integers(1, 10**6)
    floats = st.floats(1e-8, 1e8)
    head_dim, length = 2 * draw(st.integers(2, 100)), draw(positive)
    parts = [part for part in (1.0, 0.75, 0.5) if family == "phi3" and head_dim * part % 2 == 0]
    partial = draw(st.sampled_from(parts or [1.0]))
    yarn = st.builds(YarnScaling, st.floats(1, 100), st.integers(2, 10**5), floats)
    any_kind = st.none() | (longropes if family == "phi3" else scalings)(int(head_dim * partial) // 2)
    scaling = draw(yarn if known.growing else any_kind)
    if isinstance(scaling, LinearScaling | DynamicScaling):
        linear = isinstance(scaling, LinearScaling)
        length = scaling.trained if known.extended and linear else round(scaling.trained * scaling.factor)
    elif isinstance(scaling, YarnScaling):
        length = round(scaling.original_max_position_embeddings * scaling.factor)
    attention_bias = known.attention_bias and not known.qkv_bias and draw(st.booleans())
    vocab, hidden = draw(positive), draw(positive)
    config = ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        n_layers=layers,
        n_heads=kv_heads * draw(st.integers(1, 4)),
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=draw(positive),
        max_seq_len=length,
        family=family,
        norm_eps=draw(floats),
        rope_theta=draw(st.floats(1.001, 1e8)),
        rope_scaling=scaling,
        partial_rotary_factor=partial,
        tie_embeddings=draw(st.booleans()),
        qkv_bias=attention_bias or known.qkv_bias,
        o_bias=draw(st.booleans()) if known.out_bias else attention_bias,
        mlp_bias=known.mlp_bias and draw(st.booleans()),
        no_rope_layers=tuple(sorted(draw(st.sets(st.integers(0, layers - 1))))) if known.bare else (),
        qk_norm=known.qk_norm,
        query_growth=draw(floats) if known.growing else None,
        **{key: draw(floats) for key in (MULTIPLIERS if known.multipliers else ())},
        **({"embedding_multiplier": math.sqrt(hidden)} if known.scaled_embeddings else {}),
        **({"attention_multiplier": draw(st.integers(1, 10**4)) ** -0.5} if known.query_scalar else {}),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, vocab - 1), max_size=3))),
        bos_token_id=draw(st.none() | positive),
    )
    if known.windows != "none" and draw(st.booleans()):
        windowed = draw(st.lists(st.booleans(), min_size=layers, max_size=layers).filter(any))
        size = draw(positive)
        local = draw(floats) if known.local_theta is not None else None
        config = replace(config, windows=tuple(size if w else None for w in windowed), local_theta=local)
    variants = [*VARIANTS] if not known.norms[1] else [name for name in VARIANTS if not name.startswith(("parallel", "desync"))]
    config = with_variant(config, draw(st.sampled_from(variants)))
    if config.variant == "ladder" and draw(st.booleans()):
        config = replace(config, ladder_layers=tuple(sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1)))))
    if config.variant == "desync" and draw(st.booleans()):
        free = draw(st.lists(st.builds(Reduces, st.booleans(), st.booleans()), min_size=layers - 1, max_size=layers - 1))
        config = replace(config, desync_pattern=(*free, Reduces(draw(st.booleans()), True)))
    return config


@settings(max_examples=300, deadline=None)
@given(configs())
def test_writing_and_reading_a_config_changes_nothing(config: ModelConfig) -> None:
    validate(config)
    raw = config_to_hf(config)
    assert config_from_hf(json.loads(json.dumps(raw))) == config
    if config.variant != "standard":  # no other library may mistake it for a standard model of the same shape
        assert raw["model_type"] in ("llamaLadder", "rung") and raw["model_type"] not in transformers.CONFIG_MAPPING


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_means_the_same_to_transformers(name: str) -> None:
    agree(preset(name), transformers_config(config_to_hf(preset(name))))


@pytest.mark.parametrize(
    "make", [transformers.MistralConfig, transformers.Qwen2Config, transformers.Qwen3Config, transformers.SmolLM3Config]
)
@pytest.mark.parametrize("windowed", [False, True])
def test_transformers_reads_what_we_write_of_its_own_families(make: Any, windowed: bool, tmp_path: Path, seed: int) -> None:
    more = dict(sliding_window=33, use_sliding_window=True, max_window_layers=1) if windowed else dict(sliding_window=None)
    more |= dict(no_rope_layer_interval=2) if make is transformers.SmolLM3Config else {}  # windows are where RoPE is not
    config = config_from_hf(written(make(**random_shape(seed), **more)))
    assert any(config.windows) == windowed
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
    agree(config, transformers.AutoConfig.from_pretrained(tmp_path))


# --- configs that cannot be served -------------------------------------------------------------------------------------------


ABSENT: Any = object()
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 4096}


def changed(raw: dict[str, Any], **change: Any) -> dict[str, Any]:
    return {key: value for key, value in (raw | change).items() if value is not ABSENT}


BAD_VALUES: dict[str, list[Any]] = {  # the message names the key
    "hidden_act": ["gelu"],
    "attention_bias": ["true"],
    "mlp_bias": [1],
    "quantization_config": [{"quant_method": "hqq"}],
    "partial_rotary_factor": [0.5],
    "model_type": ["gemma2", "qwen2_moe", ["llama"]],
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": ["128256", 0, ABSENT],
    "hidden_size": [4096.5, "4096", ABSENT],
    "num_hidden_layers": [True, -1, [32], ABSENT],
    "num_attention_heads": [0, ABSENT],
    "num_key_value_heads": ["8"],
    "head_dim": [3, {}],
    "intermediate_size": [1e4, ABSENT],
    "max_position_embeddings": ["long"],
    "rms_norm_eps": ["1e-5"],
    "rope_theta": [[1], 0],
    "rope_scaling": ["llama3"],
    "tie_word_embeddings": ["false"],
    "eos_token_id": ["</s>", [1, "2"], [1, 10**9], [1, 128256], -1],
    "bos_token_id": [1.5],
    "is_causal": ["no"],
    "ladder_layers": [33, -1, True, "all", [0, 32], [-1], [3, 3], [1.5]],
}
BAD_SCALINGS: list[tuple[dict[str, Any], str]] = [
    *((changed(LLAMA3_ROPE, **{key: ABSENT}), key) for key in LLAMA3_ROPE if key != "rope_type"),
    (LLAMA3_ROPE | {"factor": "eight"}, "factor"),
    ({"type": "linear"}, "factor"),
    ({"type": "linear", "factor": 0.5}, "factor"),
    ({"type": "linear", "factor": float("nan")}, "factor"),
    ({"type": "linear", "factor": 1e9}, "factor"),
    ({"type": "dynamic", "factor": -2.0}, "factor"),
    ({"type": "dynamic", "factor": True}, "factor"),
    (YARN | {"factor": "4"}, "factor"),
    (YARN | {"attention_factor": 0}, "attention_factor"),
    (YARN | {"beta_fast": -1}, "beta_fast"),
    (YARN | {"beta_fast": 1, "beta_slow": 2}, "beta_fast"),
    (YARN | {"mscale": -1000, "mscale_all_dim": 1}, "mscale"),
    (YARN | {"truncate": "no"}, "truncate"),
    (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    (LONGROPE | {"short_factor": [1.0] * 63}, "short_factor"),
    (LONGROPE | {"long_factor": [1.0] * 63 + [0]}, "long_factor"),
    (LONGROPE | {"long_factor": [1.0] * 63 + [None]}, "long_factor"),
    (LONGROPE | {"long_factor": 2.0}, "long_factor"),
    (LONGROPE | {"original_max_position_embeddings": 1}, "original_max_position_embeddings"),
    ({"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}, "full_attention"),
    *(({"rope_type": kind, "factor": 4.0}, "rope_type") for kind in ("proportional", "su", "mrope", "ntk", 3, ["yarn"])),
    ({"rope_type": {"a": 1}}, "support"),
    ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
]
DESYNC = config_to_hf(with_variant(preset("tiny"), "desync-2x:4"))
WINDOWED = config_to_hf(replace(preset("tiny:3"), family="mistral", windows=(9,) * 3))
SMOL = config_to_hf(replace(preset("tiny:3"), family="smollm3", no_rope_layers=(2,)))
PHI = config_to_hf(preset("phi-4-mini"))
GROWN = config_to_hf(preset("ministral-3-8b"))
GEMMA = {  # as google/gemma-3-4b-it has it
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def test_a_published_gemma_leaves_out_what_transformers_knows(tmp_path: Path) -> None:
    ours, theirs = config_from_hf(GEMMA), transformers_config(GEMMA).text_config
    theirs.eos_token_id = [1, 106]
    agree(ours, theirs)
    assert ours.max_seq_len == 131072 and ours.n_heads == 8 and ours.parameter_count() == pytest.approx(3.88e9, rel=0.001)
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    assert unread_keys(tmp_path / "config.json") == []


MULTIMODAL = {"model_type": "mistral3", "text_config": WINDOWED}
OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (HYBRID_LADDER, {"rms_norm_eps": float("nan")}, "norm_eps"),
    (HYBRID_LADDER, {"residual_variant": "sideways"}, "sideways"),
    (DESYNC, {"desync_streams": "4"}, "desync_streams"),
    (DESYNC, {"desync_streams": 0}, "desync_streams"),
    (DESYNC, {"desync_pattern": ABSENT}, "desync_pattern"),
    (DESYNC, {"desync_pattern": 2}, "desync_pattern"),
    (DESYNC, {"desync_pattern": [True, True]}, "desync_pattern"),
    (DESYNC, {"desync_pattern": [{"attention": True, "mlp": True}]}, "desync_pattern"),
    (DESYNC, {"desync_pattern": [{"mlp": True}] * 8}, "'attention'"),
    (DESYNC, {"desync_pattern": [{"attention": False, "mlp": 1}] * 8}, "mlp"),
    (DESYNC, {"desync_pattern": [{"attention": True, "mlp": False}] * 8}, "last"),
    (DESYNC, {"base_model_type": "gemma"}, "gemma"),
    (PHI, {"partial_rotary_factor": 0.9, "rope_scaling": None, "rope_parameters": {}}, "partial_rotary_factor"),
    (PHI, {"partial_rotary_factor": 1.5, "rope_scaling": None, "rope_parameters": {}}, "partial_rotary_factor"),
    (PHI, {"model_type": "mistral"}, "partial_rotary_factor"),
    (PHI, {"rope_scaling": YARN}, "longrope only"),
    (PHI, {"original_max_position_embeddings": ABSENT}, "original_max_position_embeddings"),
    (PHI, {"quantization_config": {"quant_method": "fp8"}}, "quantized phi3"),
    (PHI, {"attention_bias": True}, "attention_bias"),
    (WINDOWED, {"model_type": "llama"}, "sliding_window"),
    (WINDOWED, {"model_type": "llama", "sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "sliding_window"),
    *(
        (WINDOWED | dict(model_type=kind, sliding_window=None), {"layer_types": bad}, "layer_types")
        for kind in ("llama", "olmo2")
        for bad in (3, "full_attention")
    ),
    (PHI, {"partial_rotary_factor": 1e308, "rope_scaling": None, "rope_parameters": {}}, "partial_rotary_factor"),
    (WINDOWED, {"sliding_window": "4096"}, "sliding_window"),
    (WINDOWED, {"sliding_window": 0}, "sliding_window"),
    (WINDOWED, {"layer_types": ["sliding_attention"]}, "windows"),
    (WINDOWED, {"layer_types": ["full_attention"]}, "windows"),
    (WINDOWED, {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    (WINDOWED, {"use_sliding_window": "yes", "model_type": "qwen2"}, "use_sliding_window"),
    (WINDOWED, {"is_causal": False}, "sliding window"),
    (WINDOWED, {"attention_bias": True}, "attention_bias"),
    *((SMOL, {"no_rope_layers": bad}, "no_rope_layers") for bad in ([1], [1, 0, 2], [True] * 3, "100", [])),
    (SMOL, {"no_rope_layer_interval": 0, "no_rope_layers": None}, "no_rope_layer_interval"),
    (WINDOWED, {"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
    (GROWN, {"rope_scaling": None, "rope_parameters": None}, "rope_scaling"),
    (GROWN, {"rope_scaling": GROWN["rope_scaling"] | {"llama_4_scaling_beta": None}}, "llama_4_scaling_beta"),
    (GROWN, {"rope_scaling": GROWN["rope_scaling"] | {"rope_type": "linear"}}, "yarn"),
    (GROWN, {"model_type": "mistral"}, "llama_4_scaling_beta"),
    (MULTIMODAL, {"text_config": None}, "text_config"),
    (MULTIMODAL, {"text_config": {"model_type": "qwen2"}}, "qwen2"),
    (MULTIMODAL, {"text_config": {"model_type": ["mistral"]}}, "mistral"),
    (MULTIMODAL, {"model_type": "llama"}, "text_config"),
    (MULTIMODAL, {"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
    (WINDOWED, {"attention_out_bias": True}, "attention_out_bias"),
    (WINDOWED, {"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
    (WINDOWED, {"model_type": "qwen2", "mlp_bias": True}, "mlp_bias"),
    (WINDOWED, {"model_type": "qwen3", "mlp_bias": True}, "mlp_bias"),
]


@pytest.mark.parametrize(
    ("raw", "change", "named"),
    [
        *((HYBRID_LADDER, {key: value}, key) for key, values in BAD_VALUES.items() for value in values),
        *((HYBRID_LADDER, {"rope_scaling": rope}, named) for rope, named in BAD_SCALINGS),
        *((HYBRID_LADDER, {"rope_scaling": None, "rope_parameters": rope}, named) for rope, named in BAD_SCALINGS),
        *OTHERS,
    ],
)
def test_a_bad_config_is_refused_by_its_key(raw: dict[str, Any], change: dict[str, Any], named: str) -> None:
    config_from_hf(raw)
    fails(lambda: config_from_hf(changed(raw, **change)), named)


@pytest.mark.parametrize("key", NEUTRAL)
def test_a_key_of_another_computation_is_refused(key: str) -> None:
    for value in (True, False, 0, 0.5, 1, 2, [0], {"0": 1}, "other"):
        if value in NEUTRAL[key]:
            assert config_from_hf(HYBRID_LADDER | {key: value}) == config_from_hf(HYBRID_LADDER)
        else:
            fails(lambda value=value: config_from_hf(HYBRID_LADDER | {key: value}), key, "not supported")
    assert config_from_hf(HYBRID_LADDER | {key: None}) == config_from_hf(HYBRID_LADDER)


def test_both_directions_are_read_and_written() -> None:
    config = config_from_hf(HYBRID_LADDER | {"is_causal": False})
    assert not config.causal and config_from_hf(HYBRID_LADDER).causal
    assert config_from_hf(config_to_hf(config)) == config and config_to_hf(config)["is_causal"] is False


# what transformers reads of any config to run a model: how to compute, how to split, what to return, other kinds of models
INFRASTRUCTURE = {
    "base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan", "decoder", "encoder", "generator",
    "sub_configs", "vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy",
}  # fmt: skip


@pytest.mark.parametrize("model", ["Llama", "Mistral", "Qwen2", "Qwen3", "Granite", "Phi3", "SmolLM3", "SeedOss"])
def test_every_key_that_transformers_reads_is_read_here_or_known_to_change_nothing(model: str, seed: int) -> None:
    raw = random_shape(seed) | dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, pad_token_id=0)
    config = getattr(transformers, f"{model}Config")(**raw)
    cls, seen = type(config), set(written(config))

    class Watched(cls):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    config.__class__ = Watched
    theirs, prompt = getattr(transformers, f"{model}ForCausalLM")(config).eval(), torch.randint(0, 99, (1, 5))
    theirs(prompt)
    theirs.generate(prompt, max_new_tokens=2, do_sample=False)
    keys = {name for name in seen if not name.startswith("_") and not callable(getattr(cls, name, None))}
    ours = Recorded(written(config) | {"use_sliding_window": True})
    config_from_hf(ours)
    sampling = transformers.GenerationConfig().to_dict().keys()
    assert keys > {"is_causal", "layer_types", "rms_norm_eps", "vocab_size"}
    unknown = keys - ours.read - NEUTRAL.keys() - HARMLESS - sampling - INFRASTRUCTURE
    assert not unknown


def test_keys_without_effect_are_named(tmp_path: Path) -> None:
    (path := tmp_path / "config.json").write_text(json.dumps(HYBRID_LADDER))
    assert unread_keys(path) == []
    plain = {key: value for key, value in HYBRID_LADDER.items() if key != "ladder_layers"} | {"model_type": "llama"}
    path.write_text(json.dumps(plain | {"some_new_factor": 3, "auto_map": {"AutoModel": "x.Y"}, "z_loss": None}))
    assert unread_keys(path) == [f"{path}: keys without effect here: 'some_new_factor'"]
    path.write_text(json.dumps(HYBRID_LADDER | {"model_type": "llama", "architectures": ["Qwen2ForCausalLM"]}))
    [remark] = unread_keys(path)
    assert "Qwen2ForCausalLM" in remark and "model_type llama counts" in remark


def test_the_context_that_a_scaling_is_meant_for() -> None:
    """The values are from published files: the READMEs of Qwen2.5 and Qwen3 on long texts, Yarn-Llama-2-7b-128k,
    vicuna-7b-v1.5-16k, and longrope as in Phi models."""
    qwen = {k: v for k, v in HYBRID_LADDER.items() if k not in ("ladder_layers", "rope_scaling")} | {"model_type": "qwen2"}
    contexts = [
        (YARN, 32768, 131072),
        (YARN | {"rope_type": "yarn"}, 40960, 131072),
        ({"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "finetuned": True}, 131072, 131072),
        ({"type": "linear", "factor": 4.0}, 4096, 16384),
        ({"type": "dynamic", "factor": 2.0}, 4096, 8192),
        (LONGROPE, 131072, 131072),
        (LLAMA3_ROPE, 131072, 131072),
    ]
    for rope, stated, meant in contexts:
        config = config_from_hf(qwen | {"rope_scaling": rope, "max_position_embeddings": stated})
        assert config.max_seq_len == meant, rope
        in_two_places = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": rope}
        assert config_from_hf(qwen | in_two_places | {"max_position_embeddings": stated}) == config
        newer = {"rope_parameters": rope | {"rope_theta": 5e5}, "max_position_embeddings": stated}
        assert config_from_hf({k: v for k, v in qwen.items() if k != "rope_theta"} | newer) == config


@pytest.mark.parametrize("name", ["MistralForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel", None, 7])
def test_architectures_of_another_family_without_a_model_type(name: Any) -> None:
    raw = {k: v for k, v in HYBRID_LADDER.items() if k != "model_type"}
    assert config_from_hf(raw) == config_from_hf(HYBRID_LADDER)
    fails(lambda: config_from_hf(raw | {"architectures": [name]}), "model_type", str(name))
    fails(lambda: config_from_hf(raw | {"architectures": ["LlamaForCausalLM", name]}), "model_type")


def test_configs_that_cannot_be_written_are_not_valid() -> None:
    tiny = preset("tiny:2")
    fails(lambda: validate(replace(tiny, windows=(4, None))), "sliding_window")
    fails(lambda: validate(replace(tiny, no_rope_layers=(1,))), "no_rope_layers", "llama")
    fails(lambda: validate(replace(tiny, family="mistral", windows=(4, 8))), "sliding_window")
    fails(lambda: validate(replace(tiny, variant="ladder")), "ladder_layers")
    fails(lambda: validate(replace(tiny, variant="ladder", ladder_layers=(1, 0))), "ladder_layers")
    fails(lambda: validate(replace(tiny, n_heads=6, n_kv_heads=4)), "6", "4")
    fails(lambda: validate(replace(tiny, family="gpt2")), "gpt2")


@pytest.mark.parametrize("text", ["", "{", '{"vocab_size": 1', "[]", "null", "\xff\x00", "[" * 100_000])
def test_a_config_file_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    fails(lambda: read_config(path), str(path), "again")


def test_a_config_file_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fails(lambda: read_config(path), str(path), "missing")
    path.write_text(json.dumps(HYBRID_LADDER))
    assert read_config(path) == config_from_hf(HYBRID_LADDER)
    path.write_text(json.dumps({k: v for k, v in HYBRID_LADDER.items() if k != "hidden_size"}))
    fails(lambda: read_config(path), str(path), "hidden_size")
