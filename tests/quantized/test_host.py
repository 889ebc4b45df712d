"""Quantized layers on CPUs: PyTorch's operators against the definition in fp64, and where they are used."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import checkpoints.weights
from checkpoints.export import save_checkpoint
from checkpoints.presets import model_config
from checkpoints.weights import LARGE, chosen_dtype, load_model
from config import ModelConfig
from kernels import determinism, linear_host
from layers.attention import Causal
from model import Transformer
from quantized.scheme import ON_LOAD, SCHEMES, Scheme
from quantized.weight import Quantized, QuantizedWeight, dequantize, quantize
from tests.support.models import ALONE, CPU
from tp import World

BF16 = torch.bfloat16
ROWS = (0, 1, 2, 3, 7, 8, 9, 33)


def made(scheme: Scheme, n: int, k: int, scales: torch.dtype) -> Quantized:
    """A random layer, of the scheme's kind, with scales of this data type."""
    found = quantize(torch.randn(n, k) * torch.rand(n, 1), scheme, "layer")
    return found._replace(scales=found.scales.to(scales))


def errors(weight: QuantizedWeight, tensors: Quantized, x: Tensor) -> tuple[float, float]:
    """How far the layer's product, and that of the dequantized weight in bf16, are from the one in fp64, relative to its norm."""
    exact = x.double() @ dequantize(tensors).double().T
    defined = torch.nn.functional.linear(x, dequantize(tensors, x.dtype))
    return tuple(((found.double() - exact).norm() / exact.norm()).item() for found in (weight(x), defined))  # type: ignore[return-value]


@pytest.mark.parametrize("scales", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["int8", "int4", "int4 asymmetric"])
def test_the_operators_are_as_accurate_as_the_definition(name: str, scales: torch.dtype, seed: int) -> None:
    kind, _, asymmetric = name.partition(" ")
    scheme = replace(SCHEMES[kind], symmetric=not asymmetric, group=random.choice((32, 64, 128)) if kind == "int4" else None)
    n, k = 16 * random.randint(1, 20), 128 * random.randint(1, 8)
    tensors, weight = made(scheme, n, k, scales), QuantizedWeight(scheme, n, k, None)
    weight.fill(tensors)
    weight.pack()
    assert (weight.host is None) == (kind == "int4" and scales == torch.float32)  # whose scales the operator would round
    for rows in ROWS:
        x = torch.randn(rows, 1, k, dtype=BF16)
        if not rows:
            assert weight(x).shape == (0, 1, n)
            continue
        assert weight(x).dtype == BF16 and weight(x).shape == (rows, 1, n)
        found, defined = errors(weight, tensors, x)
        assert found < 2 * defined + 2**-9, (rows, found, defined)  # a result is rounded twice to bf16, a scale once


@pytest.mark.parametrize(
    ("scheme", "n", "k"),
    [
        (SCHEMES["int8"], 24, 64),
        (SCHEMES["int8"], 32, 40),
        (SCHEMES["int4"], 24, 128),
        (Scheme(ON_LOAD, 4, group=16), 32, 64),
        (Scheme(ON_LOAD, 8, group=32), 32, 64),
        (Scheme(ON_LOAD, 8, symmetric=False), 32, 64),
        (Scheme(ON_LOAD, 8, activations="token"), 32, 64),
        (SCHEMES["fp8"], 32, 64),
        (replace(SCHEMES["int4"], group=32), 32, 128),  # with columns out of order
    ],
)
def test_what_the_operators_cannot_read_is_computed_as_defined(scheme: Scheme, n: int, k: int, seed: int) -> None:
    tensors, weight = made(scheme, n, k, torch.float32 if scheme.is_float else BF16), QuantizedWeight(scheme, n, k, None)
    groups = torch.arange(128, dtype=torch.int32).view(32, 4).T.flatten() // 32
    weight.fill(tensors._replace(groups=groups) if scheme.group == 32 and scheme.bits == 4 else tensors)
    x = torch.randn(3, k, dtype=BF16)
    before = weight(x)
    weight.pack()
    assert weight.host is None and torch.equal(weight(x), before)


# --- which models use them --------------------------------------------------------------------------------------------------

SHAPE = ModelConfig(
    vocab_size=96, hidden_size=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, intermediate_size=128, max_seq_len=64
)


@pytest.fixture
def folder(tmp_path: Path, seed: int) -> Path:
    """A checkpoint in bf16."""
    model = Transformer(SHAPE, ALONE.comm, ALONE.device, BF16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    save_checkpoint(model, tmp_path)
    return tmp_path


def hosts(model: Transformer) -> list[Any]:
    return [module.host for module in model.modules() if isinstance(module, QuantizedWeight)]


@pytest.mark.parametrize("width", ["int8", "int4"])
def test_a_loaded_model_uses_them_in_bf16_only(folder: Path, width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(dtype: torch.dtype = BF16) -> list[Any]:
        return hosts(load_model(str(folder), model_config(str(folder), None, 1, width), ALONE, dtype))

    assert len(loaded()) == 8 and all(loaded())  # q, k and v are one weight, and gate and up
    assert len(loaded(torch.float32)) == 14 and not any(loaded(torch.float32))
    with monkeypatch.context() as patch:
        patch.setattr(linear_host, "NAMES", (*linear_host.NAMES, "no_such_operator"))
        assert not any(loaded())
    determinism.enable()
    try:
        assert not any(loaded())
    finally:
        determinism.enable(False)


@pytest.mark.parametrize("width", ["int8", "int4"])
def test_logits_are_those_without_the_operators(folder: Path, width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(96, (1, random.choice((3, 20))))

    def logits(dtype: torch.dtype = BF16) -> Tensor:
        model = load_model(str(folder), model_config(str(folder), None, 1, width), ALONE, dtype)
        with torch.inference_mode():
            return model(tokens, Causal(tokens.shape[1], CPU)).double()

    found, exact = logits(), logits(torch.float32)
    monkeypatch.setattr(linear_host, "NAMES", ("no_such_operator",))
    assert (found - exact).norm() < 3 * (logits() - exact).norm()


def test_int4_by_rounding_says_what_costs_less_accuracy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for width, said in (("int4", True), ("int8", False), (None, False)):
        load_model(str(folder), model_config(str(folder), None, 1, width), ALONE, BF16)
        assert ("int4 by GPTQ" in capsys.readouterr().err) == said


# --- the default data type --------------------------------------------------------------------------------------------------


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models count as large, and this processor as one that multiplies bf16."""
    monkeypatch.setattr(checkpoints.weights, "LARGE", 1)
    monkeypatch.setattr(checkpoints.weights, "multiplies_bf16", lambda: True)


def chosen(folder: Path, world: World = ALONE, dtype: str | None = None) -> str:
    return chosen_dtype(dtype, str(folder), SHAPE, world)


def declare(folder: Path, **keys: str | None) -> None:
    path = folder / "config.json"
    raw = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("dtype", "torch_dtype")}
    path.write_text(json.dumps(raw | keys))


def test_a_large_checkpoint_in_bf16_stays_so(folder: Path, large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(folder) == chosen(folder / "model.safetensors") == "bfloat16"
    assert chosen(folder, dtype="float32") == "float32" and chosen(folder, dtype="float16") == "float16"
    for key, value in (("dtype", "bfloat16"), ("torch_dtype", "torch.bfloat16")):
        declare(folder, **{key: value})
        assert chosen(folder) == "bfloat16"
    for value in ("float32", "float16", None):
        declare(folder, dtype=value)
        assert chosen(folder) == "float32"
    declare(folder)
    assert chosen(folder) == "float32"


def test_small_models_random_ones_and_older_processors_compute_in_fp32(
    folder: Path, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen_dtype(None, "tiny", model_config("tiny", None, 1), ALONE) == "float32"
    determinism.enable()
    try:
        assert chosen(folder) == "float32"
    finally:
        determinism.enable(False)
    monkeypatch.setattr(checkpoints.weights, "multiplies_bf16", lambda: False)
    assert chosen(folder) == "float32"
    monkeypatch.setattr(checkpoints.weights, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(checkpoints.weights, "LARGE", LARGE)
    assert chosen(folder) == "float32"


def test_all_hosts_have_the_same_default(folder: Path, large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "smallest", lambda self, values: [0 for _ in values])  # another host's processor is older
    assert chosen(folder) == "float32"


def test_older_pytorch_without_the_questions_about_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert not linear_host.multiplies_bf16()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    assert linear_host.multiplies_bf16()
