"""make bench-linear-quantized: its cases, what it calls, and the table of a raw file. Its times need a GPU."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoints.presets import model_config
from comm import NoCommunication
from config import ModelConfig
from errors import UserError
from model import Transformer
from quantized.scheme import on_load
from scripts.bench.kernels import linear, linear_quantized
from scripts.bench.kernels.linear_quantized import LAYERS, QUANTIZE, Place, build, measured, parse_args, places
from scripts.report import linear_quantized as report
from scripts.report import performance


def test_all_cases_are_the_default() -> None:
    args = parse_args([])
    assert args.rows == [1, 2, 4, 8, 16, 64] and args.out == Path("linear-quantized.json")
    found = places(args)
    assert {(place.model, place.ranks) for place in found} == {("llama-3-8b", 1), ("llama-3-70b", 1), ("llama-3-70b", 2)}
    assert len(found) == len(set(found)) == 3 * 4
    heads = [place.quantize for place in found if "head" in place.layers]
    assert heads == ["bfloat16", "int8"] * 3  # with fp8 and int4 it is that of bfloat16
    assert all(place.layers[:4] == ["qkv", "o", "gate_up-swiglu", "down"] for place in found)


def test_some_cases_can_be_chosen() -> None:
    args = parse_args(["--models", "llama-3-70b", "--ranks", "2", "--quantize", "int4", "--rows", "3", "64", "--seconds", "9"])
    assert places(args) == [Place("llama-3-70b", 2, "int4")] and args.rows == [3, 64] and args.seconds == 9
    with pytest.raises(UserError, match="llama-3-8b on 1"):
        places(parse_args(["--models", "llama-3-8b", "--ranks", "2"]))
    for wrong in (["--quantize", "int2"], ["--rows", "0"], ["--rows", "129"], ["--models", "llama-2-7b"]):
        with pytest.raises(UserError):
            parse_args(wrong)


def test_shapes_are_those_of_the_16_bit_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_quantized, "BLOCKS", 2)
    known = {model.name: model for model in linear.MODELS}
    for place in places(parse_args([])):
        model = Transformer(place.config, NoCommunication(0, place.ranks), torch.device("meta"), torch.bfloat16)
        for name, shape in known[place.model.replace("-3", "")].shapes(place.ranks).items():
            layers = LAYERS[name](model)
            assert {(layer.out_features, layer.in_features, layer.gated) for layer in layers} == {
                (shape.n, shape.k, shape.swiglu)
            }
            assert all(layer.is_quantized == (place.quantize != "bfloat16") for layer in layers if name in place.layers)
            assert len(layers) == (1 if name == "head" else 2)


def small_config(name: str, variant: None, ranks: int, flag: str | None) -> ModelConfig:
    """As `model_config`, but of 3 small blocks."""
    small = replace(model_config("llama-3-8b:3", None, 1), hidden_size=256, n_heads=4, n_kv_heads=2, head_dim=64)
    return replace(small, intermediate_size=384, vocab_size=100, quantization=on_load(flag) if flag else None)


def test_layers_are_called_as_the_model_calls_them(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """On a CPU: chains of the model's own layers, inputs of their widths, and the bytes of weights and scales."""
    chains: list[tuple[list[Any], torch.Size]] = []

    def seconds(call: Any, chain: Sequence[Any]) -> float:
        chains.append(([*chain], call(chain[0]).shape))
        return 2e-6

    monkeypatch.setattr(linear_quantized, "seconds_per_layer", seconds)
    sizes = {"qkv": (512, 256), "o": (256, 256), "gate_up-swiglu": (768, 256), "down": (256, 384), "head": (100, 256)}
    scales = {
        "bfloat16": lambda n, k: 0,
        "fp8": lambda n, k: 4 * n,
        "int8": lambda n, k: 2 * n,
        "int4": lambda n, k: n * k // 64,
    }
    width = {"bfloat16": 16, "fp8": 8, "int8": 8, "int4": 4}
    monkeypatch.setattr(linear_quantized, "model_config", small_config)
    for quantize in QUANTIZE:
        place = Place("llama-3-8b", 1, quantize)
        model = build(place, torch.device("cpu"))
        chains.clear()
        found = list(measured(place, model, [1, 5], deadline=float("inf")))
        assert [(row["layer"], row["rows"]) for row in found] == [(name, rows) for name in place.layers for rows in (1, 5)]
        for row, (chain, shape) in zip(found, chains, strict=True):
            n, k = sizes[row["layer"]]
            size = n * k * width[quantize] // 8 + scales[quantize](n, k)
            assert (row["n"], row["k"], row["bytes"], row["us"]) == (n, k, size, 2)
            assert row["tb_per_s"] == round(size / 2e-6 / 1e12, 3)
            assert shape == (row["rows"], n // 2 if row["layer"] == "gate_up-swiglu" else n)
            assert len(chain) == linear_quantized.CHAIN and len(set(map(id, chain))) == (1 if row["layer"] == "head" else 3)
        assert list(measured(place, model, [1], deadline=0)) == []


def test_all_measured_cases_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU, where there is nothing to tune. Without time, a file and a message, too."""
    monkeypatch.setattr(linear_quantized, "seconds_per_layer", lambda call, chain: 2e-6)
    monkeypatch.setattr(linear_quantized, "model_config", small_config)
    args = parse_args(["--out", str(tmp_path / "linear-quantized.json"), "--models", "llama-3-70b", "--rows", "1", "2"])
    linear_quantized.bench(args, torch.device("cpu"), lambda: 3e12)
    found = json.loads(args.out.read_text())
    assert len(found["rows"]) == 2 * 2 * (4 * 4 + 2) and found["read_bytes_per_second"] == 3e12 and found["unmeasured"] == 0
    assert report.table(tmp_path) is not None
    printed = capsys.readouterr().out
    assert "reads at 3.000 TB/s" in printed and "out of time" not in printed
    assert len([line for line in printed.splitlines() if line.startswith("llama-3-70b tp")]) == 2 * (4 * 4 + 2)
    args.seconds = -1
    linear_quantized.bench(args, torch.device("cpu"), lambda: 3e12)
    assert "out of time: 0 of 72 cases measured" in capsys.readouterr().out
    assert json.loads(args.out.read_text())["rows"] == [] and report.table(tmp_path) is None


def test_codes_are_the_input_only_behind_kernels_that_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_quantized, "quantize_rows", lambda x: ("codes", x.shape))
    weight = torch.zeros(1)
    layer: Any = SimpleNamespace(in_features=64, parameters=lambda: iter([weight]), reads_codes=lambda x: len(x) > 8)
    assert {name for name in LAYERS if isinstance(linear_quantized.input_of(name, layer, 9), tuple)} == {
        "qkv", "gate_up-swiglu", "down"
    }  # fmt: skip
    assert all(linear_quantized.input_of(name, layer, 8).shape == (8, 64) for name in LAYERS)


def test_the_table_of_a_raw_file(tmp_path: Path, seed: int) -> None:
    """A line for each layer and kind of weight. The table of layers in 16 bits leaves the file out."""
    where = {"gpus": "1 x X", "torch": "2.11", "cores": 8, "cpu": "Y"}
    us = {(quantize, rows): random.uniform(10, 90) for quantize in ("bfloat16", "int4") for rows in (1, 64)}
    rows = [
        {**Place("llama-3-8b", 1, quantize)._asdict(), "layer": "o", "n": 4096, "k": 2048, "rows": count, "bytes": size}
        | {"us": us[quantize, count], "tb_per_s": size / us[quantize, count] / 1e6}
        for quantize, size in (("bfloat16", 16_777_216), ("int4", 4_325_376))
        for count in (1, 64)
    ]
    content = {"machine": where, "read_bytes_per_second": 4e12, "unmeasured": 0, "rows": rows[:-1]}
    linear_quantized.write(content, path := tmp_path / "linear-quantized-8b.json")
    assert json.loads(path.read_text()) == content
    text = report.table(tmp_path)
    assert text is not None and performance.TABLES["linear-quantized"][0](tmp_path) == text
    head, _, *lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert head[-3:] == ["at the ceiling, µs", "1 row, µs (TB/s)", "64 rows, µs (TB/s)"]
    cell = {key: f"{time:.1f} ({(16.777216 if key[0] == 'bfloat16' else 4.325376) / time:.2f})" for key, time in us.items()}
    first, second = lines
    layer = ["llama-3-8b", "1", "o", "4096 x 2048"]
    assert first == [*layer, "bfloat16", "16.8", "4.2", cell["bfloat16", 1], cell["bfloat16", 64]]
    assert second[:8] == [*layer, "int4", "4.3", "1.1", cell["int4", 1]]
    assert not second[8:] or second[8] == ""  # not measured
    assert "at 4.00 TB/s" in text and "1 x X" in text and "tuned" not in text
    linear_quantized.write(content | {"unmeasured": 3}, path)
    assert "3 cases, some of them of prompts, were not tuned" in str(report.table(tmp_path))
    assert performance.linear(tmp_path) is None
