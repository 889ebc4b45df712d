"""Tuning of linear layers: which cases are measured, by which rank, for how long, and what is kept. Without a GPU the measuring
itself is replaced; `test_gpu.py` tunes a model on a GPU."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.eagle import EagleHead
from checkpoints.presets import model_config
from checkpoints.weights import load_model
from comms.table import Times
from engine import tuning
from engine.tuning import FAILED, name_of, names_of, problem_of, quantized_shapes, tune
from kernels import linear_config
from kernels.linear_config import (
    PROMPT_ROWS,
    Config,
    Format,
    Gemv,
    Mma,
    QuantizedGemv,
    QuantizedStream,
    QuantizedTiles,
    Shape,
    Stream,
    candidates,
    shipped,
)
from kernels.linear_tuning import (
    GEMV_IN_A_MODEL,
    KEPT_MARGIN,
    LIKELY_TILES,
    ROWS,
    TIE,
    USUAL_MARGIN,
    Problem,
    QuantizedProblem,
    QuantizedShape,
    winner,
)
from layers.linear import ShardedLinear
from model import Transformer
from scripts.bench.kernels import linear as bench_linear
from server.launch import log_tuning
from tests.engine.test_drafts import draft_for
from tests.engine.test_engine import ALONE, config_of, random_model
from tests.support.ranks import Ranks
from tp import World

KEY = {"gpu": "a GPU without a table"}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Pretend that this CPU is a GPU: the cases that are measured, in order, with times that do not change."""
    seen: list[str] = []
    pretend(monkeypatch, tmp_path, seen)
    yield seen
    linear_config.use({})


def pretend(monkeypatch: pytest.MonkeyPatch, cache: Path, seen: list[str]) -> None:
    def measure(problem: Problem) -> tuple[dict[Config | None, float], list[str]]:
        seen.append(problem.key)
        dice = random.Random(problem.key)
        return {config: dice.uniform(5e-6, 9e-6) for config in (None, *problem.candidates())}, []

    monkeypatch.setenv("RUNG_CACHE", str(cache))
    monkeypatch.setattr(tuning, "supported", lambda model, world: True)
    monkeypatch.setattr(tuning, "machine_key", lambda *args: KEY)
    monkeypatch.setattr(tuning, "compile_kernels", lambda *args: None)
    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(linear_config, "_tuned", {})


def all_cases(model: Transformer | EagleHead, rows: int) -> set[str]:
    """The keys of all layers, written as the tables have them."""
    weights = [(module.weight, module.gated) for module in model.modules() if isinstance(module, ShardedLinear)]
    if isinstance(model, EagleHead):
        weights.append((model.fc, False))
    elif not model.config.tie_embeddings:
        weights = [(weight, gated) for weight, gated in weights if weight is not model.embedding.weight]
    sizes = [m for m in (1, 2, 4, 8, 16, 32, 64, 128, 256) if m < 2 * rows]
    return {f"{m},{len(weight)},{weight.shape[1]}" + ",swiglu" * gated for weight, gated in weights for m in sizes}


@pytest.mark.parametrize("name", ["standard", "parallel", "hybrid:2", "desync-4x:2"])
@pytest.mark.parametrize("tied", [False, True])
def test_each_layer_of_a_model_is_measured_once(name: str, tied: bool, measured: list[str], seed: int) -> None:
    model, rows = random_model(replace(config_of(name), tie_embeddings=tied)), random.choice([1, 3, 16, 64])
    done = tune(model, ALONE, rows, 60)
    assert sorted(measured) == sorted(all_cases(model, rows)) == sorted(done.found)
    assert done.missing == len(measured) and not done.messages
    again = tune(model, ALONE, rows, 60)
    assert again.missing == 0 and len(measured) == done.missing
    assert tune(model, ALONE, rows, 60, rebuild=True).missing == done.missing


@pytest.mark.parametrize("source", ["head", "parallel"])
def test_the_layers_of_what_drafts_are_measured_too(source: str, measured: list[str], seed: int) -> None:
    model = random_model(config_of("standard"))
    draft = draft_for(model, source)
    assert draft is not None
    cases = all_cases(model, 7) | all_cases(draft, 7)
    assert len(cases) > len(all_cases(model, 7))
    assert sorted(tune(model, ALONE, 7, 60, draft=draft).found) == sorted(measured) == sorted(cases)


def test_measured_configs_are_used_and_kept(measured: list[str], seed: int) -> None:
    model = random_model(config_of("standard"))
    found = tune(model, ALONE, 8, 60).found
    expected = {}
    for case, measured_times in found.items():
        slower = 1 if case.startswith("1,") else GEMV_IN_A_MODEL
        times = {name: time * (slower if '"gemv"' in name else 1) for name, time in measured_times.items()}
        fastest = min(times.values())
        equal = [json.loads(name) for name, time in times.items() if name != "null" and time <= TIE * fastest]
        early = [fields for fields in equal if fields["prefetch" if fields["kind"] == "gemv" else "early"]] or equal
        first = min(early, key=lambda fields: times[json.dumps(fields)], default=None)
        expected[case] = linear_config.parse_config(first) if fastest < KEPT_MARGIN * times["null"] else None
    assert linear_config._tuned == expected
    weight = model.layers[0].mlp.w_down.weight
    assert linear_config.config(7, *weight.shape, torch.bfloat16) == expected[f"8,{len(weight)},{weight.shape[1]}"]
    linear_config._tuned.clear()
    assert tune(model, ALONE, 8, 0).found == {}  # only reads the file
    assert linear_config._tuned == expected


def test_time_is_limited_and_the_next_start_goes_on(measured: list[str], monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    model, now = random_model(config_of("standard")), 0.0
    usual = tuning.measure

    def slow(problem: Problem) -> tuple[dict[Config | None, float], list[str]]:
        nonlocal now
        now += 1.0
        return usual(problem)

    monkeypatch.setattr(tuning, "measure", slow)
    monkeypatch.setattr(tuning.time, "monotonic", lambda: now)
    first = tune(model, ALONE, 64, 9.5)
    assert len(first.found) == len(measured) == 10 < first.missing
    second = tune(model, ALONE, 64, 1000)
    assert second.missing == first.missing - 10
    assert set(measured) == all_cases(model, 64)


def test_a_file_that_cannot_be_written_is_said(measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RUNG_CACHE", str(tmp_path / "file" / "folder"))
    (message,) = tune(random_model(config_of("standard")), ALONE, 1, 60).messages
    assert "cannot be written" in message
    assert linear_config._tuned


def test_a_cpu_measures_nothing(seed: int) -> None:
    assert tune(random_model(config_of("standard")), ALONE, 64, 60).missing == 0


def test_failed_configs_are_neither_chosen_nor_tried_again(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    model = random_model(config_of("standard"))
    monkeypatch.setattr(tuning, "measure", lambda problem: ({None: 1e-5}, [f"{problem.key} failed"]))
    done = tune(model, ALONE, 4, 60)
    assert done.messages == [f"{case} failed" for case in done.found]
    assert set(linear_config._tuned.values()) == {None}
    assert tune(model, ALONE, 4, 60).missing == 0


def rank_tunes(world: World, cache: Path) -> tuple[list[str], set[str], dict[str, Config | None]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen: list[str] = []
        pretend(monkeypatch, cache, seen)
        torch.manual_seed(0)
        random.seed(0)
        model = Transformer(config_of("standard"), world.comm, torch.device("cpu"), torch.float32)
        done = tune(model, world, 16, 60)
        assert tune(model, world, 16, 60).missing == 0
        return seen, set(done.found), dict(linear_config._tuned)


def test_ranks_share_the_work(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(2, rank_tunes, tmp_path)
    (mine, found, used), (others, *same) = results
    assert [found, used] == same
    assert not set(mine) & set(others) and set(mine) | set(others) == found
    assert abs(len(mine) - len(others)) <= 1


def test_names_of_a_table(seed: int) -> None:
    shape = Shape(8 * random.randint(1, 4000), 8 * random.randint(1, 2000), random.random() < 0.5)
    for rows in ROWS:
        problem = Problem(rows, shape, [])
        expected = [None, *candidates(rows, shape)]
        assert names_of(problem.key) == {name_of(config) for config in expected}
        assert [linear_config.parse_config(json.loads(name_of(config))) for config in expected] == expected
    for wrong in ("3,8,8", "1,8", "1,8,8,gelu", "x"):
        with pytest.raises(ValueError):  # noqa: PT011
            names_of(wrong)


def test_the_best_of_a_case() -> None:
    fast, slow = Gemv(2, 256, 1), Gemv(4, 256, 1)
    times: dict[Config | None, float] = {None: 10.0, fast: 9.0, slow: FAILED}
    assert winner(1, times) == fast
    assert winner(1, times | {fast: 9.9}) is None  # no faster than cuBLAS, within the noise
    late = replace(fast, prefetch=False)
    assert winner(1, times | {late: 8.95}) == fast  # as fast, and reads weights before its input is ready
    assert winner(1, times | {late: 8.8}) == late
    tensor_cores = Mma(64, 128, 1, 3)
    assert winner(1, times | {tensor_cores: 9.3}) == fast
    assert winner(2, times | {tensor_cores: 9.3}) == tensor_cores  # several rows are slower in a model
    assert winner(2, times | {fast: 8.0, tensor_cores: 9.3}) == fast
    assert winner(1, times | {late: 8.8}, usual=fast) == fast  # another one has to be clearly faster than the usual one
    assert winner(1, times | {late: 8.6}, usual=fast) == late
    assert winner(1, times | {fast: 9.9}, usual=fast) is None


QUANTIZED = {  # the formats of a tiny model's layers, with the numbers of rows; `codes` have no SwiGLU
    "fp8": {"fp8-0": (1, 2, 4, 8), "codes": (16, 32, 64)},
    "int8": {"int8-0": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)},
    "int4": {"int4-64": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)},
}


@pytest.mark.parametrize("weights", QUANTIZED)
def test_quantized_layers_are_measured_and_their_configs_used(
    weights: str, measured: list[str], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("layers.linear.packs_on_gpu", lambda device, dtype: True)
    model = load_model("tiny:2", model_config("tiny:2", None, 1, weights), ALONE, torch.bfloat16)
    layers = {(512, 192): "", (192, 256): "", (640, 192): ",swiglu", (192, 320): ""}
    expected = {
        f"{rows},{n},{k}{gated if kind != 'codes' else ''},{kind if k != 256 else kind.replace('-64', '-128')}"
        for (n, k), gated in layers.items()
        for kind, counts in QUANTIZED[weights].items()
        for rows in counts
    }
    done = tune(model, ALONE, 256, 60)
    assert not done.messages
    assert set(done.found) == set(measured) == {*expected, *(f"{rows},1024,192" for rows in ROWS)}  # the head stays in 16 bits
    assert set(linear_config._tuned) == set(done.found)
    assert {len(found) for found in quantized_shapes(model).values()} == {2}
    fmt = next(shape.format for shape in quantized_shapes(model) if shape.swiglu)
    for rows, bucket in (1, 1), (7, 8), (8, 8), *([] if weights == "fp8" else [(129, 256), (5000, 2048)]):
        chosen = linear_config.quantized_config(rows, 640, 192, fmt, True)
        assert chosen in equal_to(done.found, f"{bucket},640,192,swiglu,{fmt.name}")
    if weights == "fp8":
        assert linear_config.code_config(33, 192, 320) in equal_to(done.found, "64,192,320,codes")
    assert tune(model, ALONE, 256, 60).missing == 0


def equal_to(found: Times, key: str) -> list[Any]:
    """The configs that may win with these times: of equal ones any, but not another one than the usual, which is the first."""
    configs = [None, *problem_of(key).candidates()]
    times = {config: found[key][name_of(config)] for config in configs}
    least = min(times.values())
    if least >= KEPT_MARGIN * times[None]:
        return [None]
    usual = configs[1]
    return [usual] if times[usual] <= USUAL_MARGIN * least else [one for one in configs[1:] if times[one] <= TIE * least]


def test_keys_of_quantized_layers(seed: int) -> None:
    """They say what a weight is, and nothing else is a key."""
    for fmt in (
        Format("fp8"),
        Format("fp8", 128, wide_scales=True),
        Format("int8", 16),
        Format("int4", 64, True),
        Format("int4"),
    ):
        rows = random.choice((*ROWS, *PROMPT_ROWS))
        n = 16 * random.randint(1, 999)
        k = 128 * random.randint(1, 99)
        gated = random.random() < 0.5
        shape = QuantizedShape(n, k, gated, format=fmt, scaled=fmt == Format("fp8"))
        problem = QuantizedProblem(rows, shape, [])
        assert {type(config) for config in problem.candidates()} <= {QuantizedGemv, QuantizedStream, QuantizedTiles, Stream}
        assert names_of(problem.key) == {name_of(config) for config in (None, *problem.candidates())}
        assert problem.of_codes == problem.key.endswith(",codes")
        if not problem.of_codes and rows <= 128:
            assert (
                problem.candidates()[:1]
                == [linear_config.quantized_config(rows, n, k, fmt, gated)][: len(problem.candidates())]
            )
    of_llama = QuantizedProblem(8, QuantizedShape(28672, 4096, True, format=Format("int4", 128)), []).candidates()
    tiles = {(config.block_n, config.block_k, config.warps, config.on_an_sm) for config in of_llama}
    assert tiles >= {tile for tile in LIKELY_TILES if tile[0] == 128}, "the likeliest are measured"
    for wrong in (
        "1,8,8,fp8",
        "1,8,8,fp8-7",
        "1,8,8,int5-0",
        "1,8,8,codes",
        "16,8,8,swiglu,codes",
        "3,8,8,int8-0",
        "1,8,8,int8-0,x",
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            names_of(wrong)


def test_shipped_tables_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.linear_tuning.has_stream", lambda: True)  # they are of GPUs that have it
    tables = sorted(linear_config.CONFIGS.glob("*.json"))
    assert tables
    for path in tables:
        configs = shipped(path.stem.replace("-", " "))
        assert configs
        for case in configs:
            names_of(case)  # raises for a key that is none


def test_shipped_tables_have_every_shape_of_the_benchmark() -> None:
    for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        table = json.loads((linear_config.CONFIGS / f"{gpu.replace(' ', '-')}.json").read_text())["configs"]
        keys = {linear_config.table_key(rows, s.n, s.k, s.swiglu) for s in bench_linear.shapes().values() for rows in ROWS}
        assert keys <= table.keys(), f"{gpu}: {sorted(keys - table.keys())[:3]} are missing"


def test_a_server_logs_what_it_measured(caplog: pytest.LogCaptureFixture) -> None:
    found = {"1,64,64": {"cublas": 1.0}, "2,64,64": {"cublas": 1.0}}
    with caplog.at_level("INFO"):
        log_tuning(tuning.Tuning(3, found, ["a config failed"], 29.96), 30)
        log_tuning(tuning.Tuning(0, {}, [], 0.0), 30)  # all shapes were known
        log_tuning(tuning.Tuning(3, {}, [], 0.0), 0)  # --tune-seconds 0
    assert [record.getMessage() for record in caplog.records] == [
        "a config failed",
        "linear layers: measured the fastest kernels of 2 of 3 cases in 30.0 s; the next start measures the others",
        "start-up: tuning",
    ]
