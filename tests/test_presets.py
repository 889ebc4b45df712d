"""Models by name: presets, and the residual variants, whose registry agrees with the model and the documentation."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from checkpoints.hf_config import config_to_hf
from checkpoints.presets import PRESETS, preset
from config import KINDS, TRAINABLE, VARIANTS, desync_pattern, usage, validate, with_variant
from model import BLOCKS
from tests import ROOT
from tests.test_checkpoint import fails


def transformers_config(raw: dict[str, Any]) -> Any:
    """The config object of transformers for the content of a `config.json`."""
    return transformers.AutoConfig.for_model(**copy.deepcopy(raw))  # a copy, because it changes its arguments


# --- presets -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_and_splits_over_eight_ranks_or_four(name: str) -> None:
    config = validate(preset(name))
    ranks = 4 if name == "llama-30b" else 8  # llama-30b has 52 heads
    assert config.n_heads % ranks == config.intermediate_size % ranks == 0
    assert config.hidden_size == config.n_heads * config.head_dim or name.startswith(
        ("tiny", "qwen3-30b-a3b", "gpt-oss", "seed-oss", "gemma")
    )


@pytest.mark.parametrize(
    ("name", "billions", "tolerance"),
    [
        ("ladder-1b", 1.2, 0.03),
        ("ladder-3b", 3.5, 0.03),
        ("llama-3.2-1b", 1.236, 0.001),  # from here on the numbers of the model cards
        ("llama-3.2-3b", 3.213, 0.001),
        ("gpt-oss-20b", 20.9, 0.001),
        ("gpt-oss-120b", 116.8, 0.001),
        ("smollm3-3b", 3.075, 0.001),
        ("seed-oss-36b", 36.15, 0.001),
        ("ministral-3-8b", 8.4, 0.015),
        ("llama-3-8b", 8.030, 0.001),
        ("granite-3.3-8b", 8.171, 0.001),
        ("gemma-3-27b", 27.009, 0.001),
        ("olmo-3-7b", 7.298, 0.001),
        ("phi-4-mini", 3.836, 0.001),
        ("llama-7b", 6.738, 0.001),
        ("llama-13b", 13.016, 0.001),
        ("llama-30b", 32.529, 0.001),
        ("llama-34b", 33.74, 0.001),
        ("llama-3-70b", 70.55, 0.001),
        ("llama-3.1-405b", 405.85, 0.001),
        ("bloom-176b", 176.2, 0.01),
        ("qwen3-30b-a3b", 30.53, 0.001),
        ("mixtral-8x7b", 46.7, 0.001),
    ],
)
def test_a_preset_has_as_many_parameters_as_its_name_says(name: str, billions: float, tolerance: float) -> None:
    assert preset(name).parameter_count() / 1e9 == pytest.approx(billions, rel=tolerance)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3-8b:2", "granite-3.3-8b:2", "phi-4-mini:2", "tiny"])
def test_parameters_are_counted_as_transformers_allocates_them(name: str) -> None:
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers_config(config_to_hf(preset(name))))
    assert preset(name).parameter_count() == sum(p.numel() for p in theirs.parameters() if p.dim() == 2)


def test_a_preset_can_be_cut_to_its_first_layers() -> None:
    assert preset("llama-3-70b:16") == replace(preset("llama-3-70b"), n_layers=16)
    assert preset("tiny:1").n_layers == 1
    assert preset("tiny:8") == preset("tiny")
    assert all(validate(preset(f"{name}:1")).n_layers == 1 for name in PRESETS)
    assert preset("smollm3-3b:8").no_rope_layers == (3, 7)


@pytest.mark.parametrize("name", ["", "llama", "TINY", "tinyx:2", ":2"])
def test_an_unknown_preset_is_refused(name: str) -> None:
    fails(lambda: preset(name), "no preset", "llama-3-70b")


@pytest.mark.parametrize("layers", ["", "0", "9", "-1", "x", "2.0", " 2", "2:3"])
def test_a_bad_number_of_layers_is_refused(layers: str) -> None:
    fails(lambda: preset(f"tiny:{layers}"), "from 1 to 8")


# --- variants ------------------------------------------------------------------------------------------------------------


def test_variants_by_name() -> None:
    tiny = preset("tiny:7")
    for name in ("standard", "parallel", "upper-bound"):
        assert with_variant(tiny, name).variant == with_variant(tiny, name).description == name
    assert with_variant(tiny, "ladder").ladder_layers == (0, 1, 2, 3, 4, 5, 6)
    assert with_variant(tiny, "ladder").description == "ladder"
    assert with_variant(tiny, "hybrid").ladder_layers == (3, 4, 5, 6)
    assert with_variant(tiny, "hybrid:2").ladder_layers == (5, 6)
    assert with_variant(tiny, "hybrid:2").description == "hybrid ladder (layers 5-6 of 7)"
    assert with_variant(tiny, "hybrid:7") == with_variant(tiny, "ladder")
    assert replace(with_variant(tiny, "ladder"), ladder_layers=(1, 4)).description == "hybrid ladder (layers [1, 4] of 7)"
    desync = with_variant(tiny, "desync-2x:4")
    assert desync.variant == "desync" and desync.desync_streams == 4 and desync.desync_pattern == desync_pattern(7, 2)
    assert desync.description == "desync-2x (S = 4)"
    assert [one.variant_name for one in (desync, with_variant(tiny, "hybrid:2"), tiny)] == ["desync-2x", "hybrid", "standard"]
    # A desync checkpoint was trained with its number of streams, so another pattern keeps that number.
    assert with_variant(desync, "desync-4x").desync_streams == 4
    assert with_variant(desync, "desync-4x").description == "desync-4x (S = 4)"
    assert with_variant(tiny, "desync-4x").desync_streams == 1
    assert with_variant(desync, "hybrid") == with_variant(tiny, "hybrid")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Ladder",
        "desync",
        "desync-3x",
        "ladder:2",
        "standard:",
        "hybrid:",
        "hybrid:0",
        "hybrid:9",
        "hybrid:x",
        "desync-2x:-1",
    ],
)
def test_an_unknown_variant_is_refused(name: str) -> None:
    fails(lambda: with_variant(preset("tiny"), name), repr(name), "variant")


def test_every_variant_is_known_everywhere() -> None:
    assert BLOCKS.keys() == KINDS.keys() == {variant.kind for variant in VARIANTS.values()}
    page = (ROOT / "docs" / "variants.md").read_text()
    assert all(f"`{name}" in page for name in VARIANTS)
    assert usage() == f"{usage(TRAINABLE)}, upper-bound"
