"""Reading quantized checkpoints: each format against the dequantized weights on 1, 2 and 4 ranks, and against transformers."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.memory import weight_bytes
from checkpoints.presets import model_config
from checkpoints.weights import load_model
from config import Experts, ModelConfig, with_variant
from errors import UserError
from kernels import determinism
from layers.attention import Causal
from layers.linear import ShardedLinear
from model import Transformer
from quantized import formats
from quantized.formats import Slice, Tensors
from quantized.scheme import ON_LOAD, SCHEMES
from quantized.weight import dequantize, quantize
from tests.quantized.writers import FORMATS, FP8, write
from tests.support.models import ALONE, CPU, load, logits_of
from tests.support.ranks import Ranks
from tp import World, checkpoint_name

SHAPE = ModelConfig(  # o_proj's groups of 128 end at the boundary of 2 ranks, and 4 ranks cut those of o_proj and down_proj
    vocab_size=101, hidden_size=128, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=32, intermediate_size=384, max_seq_len=64
)
# relative errors
EXACT = 1e-5  # of a layer in fp32
NEAR = 2e-4  # of fp32 logits
COARSE = 0.1  # of logits with rounded activations


@pytest.mark.parametrize("columns", [range(96), range(96, 192)])
def test_rounding_at_load_with_the_deterministic_mode_is_that_of_whole_rows(
    columns: range, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the groups of 128 do not divide a row, which then has smaller ones."""
    monkeypatch.setattr(determinism, "enabled", lambda: True)
    weight, scheme = torch.randn(6, 192), SCHEMES["int4"]
    part = Slice("layer", (6, 192), range(2, 6), columns, scheme)
    read = lambda name, dim, start, stop: weight.narrow(dim, start, stop - start)  # noqa: E731
    found = formats.FORMATS[ON_LOAD].read(Tensors(part, read, {"layer.weight": (6, 192)}, CPU))
    whole = dequantize(quantize(weight, scheme, "layer"))
    assert torch.equal(dequantize(found), whole[2:, columns.start : columns.stop])


def rounded(x: Tensor, how: str, is_float: bool, scale: Tensor | None) -> Tensor:
    """x (..., K) in fp64 as a format's activations round it. IEEE 754 defines each step in fp32 to the bit, so there is one right
    code, also for a value in the middle of two."""
    if how == "none":
        return x.double()
    if how != "static":
        pieces = x.unflatten(-1, (-1, math.gcd(128, x.shape[-1]) if how == "group" else x.shape[-1]))
        scale = (pieces.abs().amax(-1, keepdim=True) / (448 if is_float else 127.5)).expand_as(pieces).reshape(x.shape)
    assert scale is not None
    codes = (x / scale).clamp(-448, 448).to(FP8) if is_float else (x / scale).round().clamp(-128, 127)
    return codes.double() * scale


def sharded(model: Transformer) -> list[ShardedLinear]:
    return [module for module in model.modules() if isinstance(module, ShardedLinear)]


@torch.no_grad()
def errors(world: World, names: list[str], folders: list[Path], seed: int) -> list[tuple[float, float]]:
    """For each format the largest error of a layer of this rank, and that of the logits, compared with the fp32 weights."""
    torch.manual_seed(seed)
    found = []
    for name, folder in zip(names, folders, strict=True):
        format, tensors = FORMATS[name], load_file(folder / "model.safetensors")
        model, plain = load(world, folder), load(world, folder / "plain")
        is_float = not any(tensor.dtype == torch.int8 for tensor in tensors.values())
        largest = 0.0
        for ours, theirs in zip(sharded(model), sharded(plain), strict=True):
            if ours.layer is not None:
                x, out = torch.randn(5, theirs.weight.shape[1]), []
                for piece, weight in theirs.pieces():
                    layer = checkpoint_name(ours.layer, piece.split(".")[0])
                    how = "none" if any(kept in layer for kept in format.kept) else format.activations
                    scale = tensors.get(f"{layer}.input_scale", tensors.get(f"{layer}.activation_scale"))
                    inputs = rounded(x, how, is_float, scale)
                    out.append(inputs @ weight.double().T)
                largest = max(largest, error(ours(x), theirs.finish(torch.cat(out, -1).float())))
        tokens = torch.arange(18).view(2, 9)  # the weights are random
        context = Causal(tokens.shape[1], CPU)
        found.append((largest, error(model(tokens, context), plain(tokens, context))))
    return found


def parameter_bytes(world: World, quantize: str) -> int:
    model = load_model("tiny:2", model_config("tiny:2", None, world.world_size, quantize), world, torch.float32)
    return sum(parameter.nbytes for parameter in model.parameters())


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, session_seed: int) -> dict[str, Path]:
    """A checkpoint in each format."""
    torch.manual_seed(session_seed)
    random.seed(session_seed)
    folders = {name: tmp_path_factory.mktemp("format") for name in FORMATS}
    for name, folder in folders.items():
        write(SHAPE, FORMATS[name], folder, folder / "plain")
    return folders


def test_layers_and_logits_equal_those_of_the_dequantized_weights(
    ranks: Ranks, written: dict[str, Path], in_turn: Callable[..., Any], seed: int
) -> None:
    count, names = in_turn((1, 2, 4), 0), in_turn((list(written)[::2], list(written)[1::2]), 0)
    for found in ranks.run(count, errors, names, [written[name] for name in names], seed):
        for name, (of_layers, of_logits) in zip(names, found, strict=True):
            assert of_layers < EXACT, name
            assert of_logits < NEAR or FORMATS[name].activations != "none", name


@pytest.mark.parametrize("variant", ["parallel", "ladder", "hybrid:1", "desync-2x:4"])
def test_variants_read_quantized_checkpoints(variant: str, ranks: Ranks, tmp_path: Path, seed: int) -> None:
    name = random.choice([name for name in FORMATS if FORMATS[name].activations == "none"])
    write(with_variant(SHAPE, variant), FORMATS[name], tmp_path, tmp_path / "plain")
    tokens = torch.randint(0, SHAPE.vocab_size, (1, 7))
    expected = logits_of(ALONE, tmp_path / "plain", tokens)
    for count in (1, 2, 4):
        for found in ranks.run(count, logits_of, tmp_path, tokens):
            assert error(found, expected) < NEAR, name


def test_experts_are_read_in_each_format(ranks: Ranks, in_turn: Callable[..., Any], tmp_path: Path, seed: int) -> None:
    """Where activations are rounded, too, only the reading is looked at."""
    shape = replace(SHAPE, family="mixtral", experts=Experts(3, 2, True))
    names = in_turn([list(FORMATS)[i::6] for i in range(6)], 0)
    for name in names:
        write(shape, FORMATS[name], tmp_path / name, tmp_path / "plain" / name)
        tokens = torch.randint(0, shape.vocab_size, (1, 7))
        expected = logits_of(ALONE, tmp_path / "plain" / name, tokens)
        for found in ranks.run(in_turn((1, 2), 0), logits_of, tmp_path / name, tokens):
            assert error(found, expected) < (NEAR if FORMATS[name].activations == "none" else 1), name


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("W4A16 group 32 asymmetric", 24),  # 3 words of 8 zero points, and each of 4 ranks has 6 of the rows
        ("int8 by tensor, weights only", 5),  # the last rank has no row
    ],
)
def test_a_head_of_few_rows(name: str, rows: int, ranks: Ranks, tmp_path: Path, seed: int) -> None:
    shape, format = replace(SHAPE, vocab_size=rows), FORMATS[name]
    write(shape, replace(format, quantization=format.quantization | {"ignore": []}), tmp_path, plain := tmp_path / "plain")
    head, weight = format.write(shape.vocab_size, shape.hidden_size)
    head = {suffix: tensor.squeeze() if tensor.shape == (1,) else tensor for suffix, tensor in head.items()}
    for folder, tensors in ((tmp_path, head), (plain, {"weight": weight})):
        others = load_file(folder / "model.safetensors")
        del others["lm_head.weight"]
        found = others | {f"lm_head.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
        save_file(found, folder / "model.safetensors")
    tokens = torch.randint(0, shape.vocab_size, (1, 7))
    expected = logits_of(ALONE, plain, tokens)
    for found in ranks.run(4, logits_of, tmp_path, tokens):
        assert error(found, expected) < NEAR


# transformers 5.23 with compressed-tensors 0.20 reads no packed zero points, no act-order, and no bytes without rounded inputs
UNREAD = ("asymmetric", "act-order", "int8 by tensor")
COMPRESSED = [name for name, format in FORMATS.items() if format.quantization.get("quant_method") == "compressed-tensors"]
READ = [name for name in COMPRESSED if not any(part in name for part in UNREAD)]


@pytest.mark.parametrize("name", READ)
def test_transformers_computes_the_same(name: str, written: dict[str, Path], seed: int) -> None:
    pytest.importorskip("compressed_tensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(written[name], dtype=torch.float32)
    tokens = torch.randint(0, SHAPE.vocab_size, (2, 9))
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert error(logits_of(ALONE, written[name], tokens), expected) < (NEAR if FORMATS[name].activations == "none" else COARSE)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("HF ")])
def test_transformers_dequantizes_the_same(name: str, written: dict[str, Path], seed: int) -> None:
    """Without a GPU it multiplies by the dequantized weights, and so do we if inputs are not rounded."""
    pytest.importorskip("accelerate")
    dequantize = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        written[name], dtype=torch.float32, quantization_config=dequantize
    )
    tokens = torch.randint(0, SHAPE.vocab_size, (2, 9))
    with torch.no_grad(), mock.patch("quantized.weight.quantized_input", lambda x, *_: x):
        assert error(logits_of(ALONE, written[name], tokens), theirs(tokens).logits) < NEAR


@pytest.mark.parametrize("name", [name for name in COMPRESSED if "asymmetric" in name])
def test_zero_points_are_those_of_compressed_tensors(name: str, seed: int) -> None:
    """What the tests' writer packs, its own package unpacks."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    group = FORMATS[name].quantization["config_groups"]["group_0"]
    tensors, weight = FORMATS[name].write(64, 128)
    scheme = quantization.QuantizationScheme(**group)
    unpacked = compressors.BaseCompressor.get_value_from_registry("pack-quantized").decompress(tensors, scheme)
    torch.testing.assert_close(unpacked["weight"], weight)


@pytest.mark.parametrize(("quantize", "count"), [("fp8", 2), ("int8", 1), ("int4", 2)])
def test_a_preset_quantized_at_load_needs_the_memory_that_is_counted(quantize: str, count: int, ranks: Ranks) -> None:
    config = model_config("tiny:2", None, count, quantize)
    for held in ranks.run(count, parameter_bytes, quantize):
        assert weight_bytes(config, count, torch.float32) == pytest.approx(held, rel=0.05)


CACHE_SCALES = (
    *("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "attn.k_scale", "k_proj.k_scale", "v_proj.v_scale"),
    *("prob_output_scale", "q_proj.output_scale", "k_proj.output_scale", "v_proj.output_scale"),
)


def test_scales_of_a_cache_in_8_bits_and_empty_biases_are_passed_over(tmp_path: Path, seed: int) -> None:
    write(SHAPE, FORMATS["GPTQ 4 bits"], tmp_path, tmp_path / "plain")
    tokens = torch.randint(0, SHAPE.vocab_size, (1, 5))
    before = logits_of(ALONE, tmp_path, tokens)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in CACHE_SCALES}
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(256)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(before, logits_of(ALONE, tmp_path, tokens))
    for other in (torch.eye(256)[random.randrange(256)], torch.zeros(256, 1), torch.zeros(())):
        save_file(tensors | {"model.layers.1.self_attn.q_proj.bias": other}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=r"unknown tensors model\.layers\.1\.self_attn\.q_proj\.bias"):
            logits_of(ALONE, tmp_path, tokens)


@pytest.mark.parametrize(
    "quantization",
    [
        {"producer": {}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": [], "kv_cache_scheme": {}},
    ],
)
def test_a_model_of_which_only_the_cache_is_quantized(quantization: dict[str, Any], tmp_path: Path, seed: int) -> None:
    write(SHAPE, replace(FORMATS["AWQ"], quantization=quantization), tmp_path, plain := tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in CACHE_SCALES}
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = torch.randint(0, SHAPE.vocab_size, (1, 5))
    assert torch.equal(logits_of(ALONE, tmp_path, tokens), logits_of(ALONE, plain, tokens))
    assert model_config(str(tmp_path), None, 1).quantization is None
