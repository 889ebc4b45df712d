"""make bench-one-row: its cases, the choice of kernels, and the file it writes. Its times need a GPU."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from errors import UserError
from kernels import linear_config
from kernels.linear_config import VERSION, Config, Gemv, Mma, Stream, format_config, read_table
from kernels.linear_tuning import Shape
from scripts.bench.kernels import linear, one_row
from scripts.bench.kernels.one_row import LAYERS, NAMES, Chain, Kernels, agreed, cases, choices, parse_args, run_chain

READ, TILES, STREAM = Gemv(2, 2048, 4), Mma(64, 128, 3, 3), Stream(128, 128, 6)
SHAPES = {
    "qkv": Shape(6, 4),
    "o": Shape(4, 2),
    "gate_up-swiglu": Shape(16, 4, swiglu=True),
    "down": Shape(4, 8),
    "head": Shape(9, 4),
}
ONE = ("1,6,4", "1,4,2", "1,16,4,swiglu", "1,4,8")
TWO = {"2,6,4": STREAM, "2,4,2": TILES, "2,16,4,swiglu": STREAM, "2,4,8": None}


def test_cases_are_the_models_on_ranks_that_fit_them() -> None:
    found = dict(cases([]))
    assert len(found) == sum(model.fits(ranks) for model in linear.MODELS for ranks in (1, 2, 4, 8))
    assert "llama-70b-tp1" not in found  # 140 GB are not enough
    assert found["llama-70b-tp4"]["gate_up-swiglu"] == Shape(14336, 8192, swiglu=True)
    assert [name for name, _ in cases(["70b-tp4", "llama-8b"])] == ["llama-70b-tp4", *(f"llama-8b-tp{n}" for n in (1, 2, 4, 8))]
    args = parse_args(["--models", "llama-8b", "qwen3"])
    assert args.models == ["llama-8b", "qwen3"] and args.out == Path("one-row.json") and args.device == 0


def test_choices_are_the_table_s_kernel_and_the_stream_kernel_of_two_rows() -> None:
    known: dict[str, Config | None] = {**dict.fromkeys(ONE, READ), **TWO}
    both = [(READ, READ, READ, READ), (READ, READ, STREAM, READ), (STREAM, READ, READ, READ), (STREAM, READ, STREAM, READ)]
    assert choices(known, SHAPES) == both
    known["1,6,4"] = Stream(64, 128, 12)  # streamed already: stays
    assert choices(known, SHAPES) == [(known["1,6,4"], READ, READ, READ), (known["1,6,4"], READ, STREAM, READ)]
    known["1,4,8"] = None  # cuBLAS
    assert {kernels[3] for kernels in choices(known, SHAPES)} == {None}
    del known["1,4,2"]
    assert choices(known, SHAPES) == []


def chain(keys: str, **seconds: float) -> Chain:
    """Of four keys, one letter each. seconds: of the combinations, by the streamed keys; `table` for none."""
    by_kernels: dict[Kernels, float] = {
        tuple(STREAM if key in streamed and streamed != "table" else READ for key in keys): time
        for streamed, time in seconds.items()
    }
    return Chain(tuple(keys), by_kernels)


def test_best_is_the_table_s_unless_another_is_faster_by_the_margin() -> None:
    assert chain("QOGD", table=100, Q=99.6, G=99.51).best() == (READ,) * 4
    found = chain("QOGD", table=100, Q=99.4, G=99.3, QG=99.45)
    assert found.best() == (READ, READ, STREAM, READ) and found.changed(found.best()) == ["gate_up-swiglu"]
    assert found.kernels({"Q": STREAM, "X": STREAM}) == (STREAM, READ, READ, READ)


def test_a_choice_that_makes_another_model_slower_is_dropped() -> None:
    gains = chain("QOGD", table=100, Q=98, G=97, QG=95)
    assert agreed([gains]) == {"Q": STREAM, "G": STREAM}
    for seconds, dropped in ((100.6, True), (100.4, False)):
        loses = chain("XQYZ", table=100, Q=seconds)
        for chains in ([gains, loses], [loses, gains]):
            assert agreed(chains) == ({} if dropped else {"Q": STREAM, "G": STREAM})
    # what two choices cost together counts, too: the first model decides
    third = chain("GABX", table=100, G=100.3, X=90, GX=99), chain("XQYZ", table=100, X=100.3, Q=100.3, XQ=100.7)
    assert agreed([gains, *third]) == {"Q": STREAM, "G": STREAM}
    assert agreed([third[0], gains, third[1]]) == {"X": STREAM}


def test_a_chain_has_all_layers_in_turns(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    sizes = [(SHAPES[name].n, SHAPES[name].k) for name in NAMES]
    layers = [[torch.randn(n, k) for n, k in sizes] for _ in range(5)]
    used: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []

    def noted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        used.append(weight)
        inputs.append(x)
        return x @ weight.T if weight.shape[0] != 16 else x @ weight[:8].T  # of gate and up half as many features

    monkeypatch.setattr(one_row, "linear", noted)
    monkeypatch.setattr(one_row, "linear_swiglu", noted)
    attended, x = torch.randn(1, 2), torch.randn(1, 4)
    out = run_chain(layers, attended, x)
    expected = [weight for i in range(LAYERS) for weight in layers[i % 5]]
    assert len(used) == 4 * LAYERS and all(one is other for one, other in zip(used, expected, strict=True))
    assert inputs[0] is x and all(one is attended for one in inputs[1::4])
    o, gate_up, down = layers[(LAYERS - 1) % 5][1:]
    torch.testing.assert_close(out, attended @ o.T @ gate_up[:8].T @ down.T)


def test_the_file_can_be_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, Config | None] = {**dict.fromkeys(ONE, READ), **TWO, "1,9,9": None}
    table = {key: format_config(kernel) for key, kernel in sorted(known.items())}
    older = {"1,5,5": format_config(TILES)}
    (tmp_path / "A-GPU.json").write_text(json.dumps({"machine": {}, "version": VERSION, "older": older, "configs": table}))
    gain = 0.9

    def measured(shapes: Mapping[str, Shape], combinations: Sequence[Kernels]) -> dict[Kernels, float]:
        return {kernels: 24e-6 * (gain if kernels == (STREAM, READ, READ, READ) else 1) for kernels in combinations}

    monkeypatch.setattr(one_row, "measured", measured)
    monkeypatch.setattr(one_row, "cases", lambda words: iter([("a-tp1", SHAPES)] if not words else []))
    monkeypatch.setattr(linear_config, "measured", lambda: known)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(linear, "CONFIGS", tmp_path)
    one_row.bench([], tmp_path / "one-row.json")
    assert "a-tp1:    1.00 us a layer, 10.0 % less with qkv streamed" in capsys.readouterr().out
    content = json.loads((tmp_path / "one-row.json").read_text())
    assert content["times"][:2] == [
        {"model": "a-tp1", "streamed": [], "us": 1.0},
        {"model": "a-tp1", "streamed": ["gate_up-swiglu"], "us": 1.0},
    ]
    assert content["configs"] == {"1,6,4": format_config(STREAM)}
    linear.merge([tmp_path / "one-row.json"])
    assert read_table(tmp_path / "A-GPU.json") == (older, table | {"1,6,4": format_config(STREAM)})
    gain = 1  # nothing to replace
    one_row.bench([], tmp_path / "none.json")
    linear.merge([tmp_path / "none.json"])
    assert read_table(tmp_path / "A-GPU.json") == (older, table | {"1,6,4": format_config(STREAM)})
    with pytest.raises(UserError, match="no such model"):
        one_row.bench(["b"], tmp_path / "none.json")
