"""scripts/bench/training: FSDP2 trains the same as the executor, spans and figures by their definition, rows that survive."""

import argparse
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from checkpoints.presets import preset
from config import with_variant
from errors import UserError
from scripts.bench.training import __main__ as bench_training
from scripts.bench.training import launches, tables
from scripts.bench.training.fsdp2 import Fsdp2Trainer, prefetch, shard
from scripts.bench.training.rank import copies, covered, planned, separate_hosts
from scripts.bench.training.rank import parse_args as parse_rank_args
from tests.support.ranks import Ranks
from tp import World
from training.batches import GlobalBatches
from training.executor import Execution, Executor
from training.initialize import empty_model, materializer
from training.losses import cross_entropy
from training.optimizer import AdamSettings, Optimizer, Schedule
from training.planner.search import alternatives, choose
from training.sharding import Mesh, Sharding
from training.sharding_choice import choice, workload_of
from training.step import Trainer
from training.token_file import open_tokens, write_tokens

pytestmark = pytest.mark.usefixtures("forked_commands")

LENGTH, WINDOWS, STEPS, VOCABULARY = 12, 8, 4, 50
SCHEDULE, SETTINGS = Schedule(1e-3, STEPS, 2), AdamSettings(eps=1e-6, clip=0.5)


# --- FSDP2 against the executor -------------------------------------------------------------------------------------------


def both(world: World, data: Path, case: dict[str, Any]) -> tuple[list[list[float]], list[list[float]]]:
    """Losses and gradient norms of some steps on FSDP2, and on the executor with everything whole but the optimizer states."""
    config = replace(
        preset("tiny"),
        hidden_size=32,
        n_layers=3,
        n_heads=4,
        n_kv_heads=4,
        head_dim=8,
        intermediate_size=36,
        vocab_size=VOCABULARY,
    )
    config = replace(with_variant(config, case["variant"]), tie_embeddings=case["tie"])
    batches = GlobalBatches(open_tokens(data, VOCABULARY), LENGTH, WINDOWS, seed=1)
    names = ("copies", "shards")[-len(case["mesh"]) :]
    mesh = init_device_mesh("cpu", case["mesh"], mesh_dim_names=names)
    micro_batch = WINDOWS // world.world_size // 2  # two micro-batches a step
    whole = shard(config, world.device, mesh, torch.float32, case["recompute"], False, seed=3)
    prefetch(whole, case["prefetch"])
    fsdp2 = Fsdp2Trainer(whole, SETTINGS, SCHEDULE, batches, world, micro_batch, case["late"])
    model, one, all_ranks = empty_model(config, world.device, torch.float32), Mesh(), Mesh(world.world_size)
    fill, placed = materializer(model, None, 3), Sharding(one, one, all_ranks)
    executor = Executor(model, fill, world.rank, placed, all_ranks, Execution())
    optimizer = Optimizer(executor.weights, executor.vectors, executor.groups.copy, SETTINGS)
    rank, size = world.rank, world.world_size
    ours = Trainer(executor, optimizer, SCHEDULE, batches, cross_entropy, rank, size, micro_batch, world.device)

    def steps(trainer: Trainer | Fsdp2Trainer) -> list[list[float]]:
        results = [trainer.train_step() for _ in range(STEPS)]
        return [[world.comm.all_reduce(share).item(), norm.item()] for share, norm in results]

    return steps(fsdp2), steps(ours)


@pytest.mark.parametrize(
    ("n", "case"),
    [
        (2, dict(variant="standard", mesh=(2,), tie=False, recompute=True, prefetch=1, late=True)),
        (2, dict(variant="parallel", mesh=(2,), tie=True, recompute=False, prefetch=0, late=False)),
        (4, dict(variant="standard", mesh=(2, 2), tie=True, recompute=False, prefetch=2, late=False)),
    ],
    ids=["late", "tied", "hsdp"],
)
def test_fsdp2_trains_as_the_executor_does(ranks: Ranks, n: int, case: dict[str, Any], tmp_path: Path, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, 2 * WINDOWS * LENGTH + 1)
    write_tokens(tmp_path / "random.bin", ids, VOCABULARY, "none")
    for theirs, ours in ranks.run(n, both, tmp_path / "random.bin", case):
        torch.testing.assert_close(torch.tensor(theirs), torch.tensor(ours), rtol=2e-5, atol=0)
        assert len({loss for loss, _ in theirs}) == STEPS


def test_fsdp2_refuses_blocks_that_hand_over_more_than_a_tensor() -> None:
    with pytest.raises(UserError, match="standard and the parallel"):
        shard(with_variant(preset("tiny"), "ladder"), torch.device("cpu"), None, torch.float32, False, False, 0)  # type: ignore[arg-type]


# --- what a rank does -----------------------------------------------------------------------------------------------------


def rank_arguments(system: str, *more: str) -> argparse.Namespace:
    fixed = ["--model", "llama-7b", "--data", "x.bin", "--system", system, "--result", "x.json", "--steps", "9"]
    fixed += ["--unmeasured", "2", "--global-batch", "16", "--gpus-per-node", "4", "--dtype", "bfloat16"]
    return parse_rank_args([*fixed, *more])


def test_systems_are_what_their_names_say() -> None:
    config, mesh, cpu = preset("llama-7b"), Mesh(4, 2), torch.device("cpu")
    definitions = {"zero-1": "1,1,4x2", "zero-2": "1,4x2,4x2", "zero-3": "4x2,4x2,4x2"}
    for system, meshes in definitions.items():
        how = planned(rank_arguments(system), config, mesh, cpu)
        assert how.sharding == Sharding.parse(meshes)
        assert how.step_seconds is None  # nobody knows this CPU's figures
    workload = workload_of(rank_arguments("mics", "--cluster", "a800"), config, mesh, cpu)
    assert workload is not None
    memory = workload.cluster.memory_gb * 1e9
    mics = next(a for a in alternatives(workload, memory, "communication") if a.name == "MiCS").plan
    papers = choose(workload, memory, "communication")[0]
    for system, plan in (("mics", mics), ("planner-paper", papers), ("planner", choice(workload, memory))):
        how = planned(rank_arguments(system, "--cluster", "a800"), config, mesh, cpu)
        assert (how.sharding, how.step_seconds) == (plan.sharding, plan.step_seconds)
        assert how.step_seconds >= choice(workload, memory).step_seconds / 1.01
    assert copies("fsdp2", mesh) == (8,)
    assert copies("fsdp2-hsdp", mesh) == (2, 4)
    assert copies("fsdp2-hsdp", Mesh(8)) == (2, 4)


def test_covered_time_is_that_of_the_definition(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        spans, by = ([(a, a + dice.randrange(5)) for a in (dice.randrange(30) for _ in range(dice.randrange(6)))] for _ in "ab")
        ticks = [{t for a, b in some for t in range(a, b)} for some in (spans, by)]
        assert covered(spans, by) == len(ticks[0] & ticks[1]), (spans, by)


def hosts(_: World, rank: int) -> str:
    separate_hosts(rank, 4)
    return os.environ["NCCL_HOSTID"]


def test_two_nodes_have_two_host_ids(ranks: Ranks) -> None:
    found = [ranks.run(1, hosts, rank)[0] for rank in range(8)]
    assert len(set(found[:4])) == len(set(found[4:])) == 1
    assert found[0] != found[4]


# --- the sweep ------------------------------------------------------------------------------------------------------------


def arguments(out: Path, *more: object) -> list[str]:
    return [str(word) for word in ("--device", "cpu", "--models", "tiny", "--ranks", 2, "--steps", 3, "--out", out, *more)]


def measured(step_ms: list[float], **more: Any) -> dict[str, Any]:
    fixed = {"precision": "float32", "sharding": "P 1x1", "predicted_ms": None, "waited_ms": 1.5, "traced_exposed_ms": None}
    fixed |= {"peak_memory_gb": None, "tokens_per_step": 1000, "flops_per_step": 4e9, "peak_flops": None}
    return fixed | {"step_ms": step_ms} | more


def sweep(argv: list[str], monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[dict[str, Any]]:
    """The sweep's rows with `answer(settings)` in place of launches."""
    monkeypatch.setattr(launches, "measure", lambda settings, *_: answer(settings))
    return launches.measure_all(bench_training.parse_args(argv), {"gpus": "none", "cores": 2, "cpu": "some", "torch": "2"})


def test_a_sweep_goes_on_after_failures_and_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv, launched = arguments(tmp_path, "--systems", "zero-1", "zero-3", "fsdp2"), []

    def first(settings: dict[str, Any]) -> dict[str, Any]:
        launched.append(settings["system"])
        if settings["system"] == "fsdp2":
            raise KeyboardInterrupt
        return {"error": "out of memory"} if settings["system"] == "zero-1" else measured([1.0])

    with pytest.raises(KeyboardInterrupt):
        sweep(argv, monkeypatch, first)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"settings": {"mod')  # as a kill leaves it

    def second(settings: dict[str, Any]) -> dict[str, Any]:
        launched.append(settings["system"])
        return measured([2.0])

    rows = sweep(argv, monkeypatch, second)
    assert launched == ["zero-1", "zero-3", "fsdp2", "fsdp2"]
    assert [row.get("error", row.get("step_ms")) for row in rows] == ["out of memory", [1.0], [2.0]]
    again = sweep([*argv, "--retry"], monkeypatch, second)
    assert launched[4:] == ["zero-1"]
    assert again[0]["step_ms"] == [2.0]
    sweep(arguments(tmp_path, "--systems", "zero-3", "--sequence-length", 32), monkeypatch, second)
    assert launched[5:] == ["zero-3"]  # other settings are another row


def test_the_table_shows_medians_ratios_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [50.0, 10.0, 20.0, 40.0, 30.0]  # quartiles 20, 30, 40
    answers = {
        "zero-1": measured(steps, predicted_ms=15.0, peak_flops=1e12, peak_memory_gb=12.34),
        "zero-3": {"error": "torch.OutOfMemoryError: CUDA out of memory | of 140 GB"},
    }
    argv = arguments(tmp_path, "--systems", *answers)
    rows = sweep(argv, monkeypatch, lambda settings: answers[settings["system"]])
    lines = tables.table(rows, bench_training.parse_args(argv)).splitlines()
    cells = [cell.strip() for cell in lines[2].split("|")][1:-1]
    # 1000 tokens / 2 ranks / 30 ms; 4e9 FLOP / 2 / 1e12 / 30 ms; 15 / 30 ms
    expected = ["tiny", "ZeRO-1", "2", "P 1x1", "16,667", "6.7%", "30.0", "20.0 to 40.0", "12.3", "1.5", "", "15.0", "0.50"]
    assert cells == expected
    assert "CUDA out of memory" in lines[3]
    assert {line.count("|") for line in lines[:4]} == {len(expected) + 1}


def test_the_ablation_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = arguments(tmp_path, "--ablation", "--micro-batches", 1, 2)
    rows = sweep(argv, monkeypatch, lambda settings: measured([10.0 + len(settings["no_overlap"])] * 3))
    switched_off = [tuple(row["settings"]["no_overlap"]) for row in rows[:4]]
    assert switched_off == [(), ("updates",), ("gradients", "updates"), ("parameters", "gradients", "updates")]
    assert [row["settings"]["micro_batches"] for row in rows] == [1] * 4 + [2] * 4
    monkeypatch.setattr(bench_training, "RESULTS", tmp_path)
    monkeypatch.setattr("scripts.lib.results.RESULTS", tmp_path)
    args = bench_training.parse_args(argv)
    bench_training.write(rows, args, rows[0]["machine"], tables.table(rows, args))
    assert json.loads((tmp_path / "training-2-ablation.json").read_text())["rows"] == rows
    assert "nothing overlapped" in (tmp_path / "training-2-ablation.md").read_text()


def test_a_launch_end_to_end(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "--sequence-length", 8, "--two-nodes", "--systems", "fsdp2-hsdp", "--models", "tiny:1")
    (row,) = launches.measure_all(bench_training.parse_args(argv), {})
    assert "error" not in row, row
    assert len(row["step_ms"]) == 3
    assert row["sharding"] == "2 x 1"


def test_a_launch_that_fails_or_hangs_says_so() -> None:
    def launch(code: str, timeout: float = 60.0) -> str | None:
        return launches.launch([sys.executable, "-c", code], timeout)

    assert launch("pass") is None
    assert launch("raise RuntimeError('broken')") == "RuntimeError: broken"
    assert "--timeout" in str(launch("import time; time.sleep(60)", 0.2))


@pytest.mark.parametrize(
    ("more", "mends"),
    [
        (("--models", "llama-8x"), "presets:"),
        (("--ranks", 3, "--two-nodes"), "even number"),
        (("--ranks", 1), "at least 2"),
        (("--steps", 0), "--steps must be at least 1"),
        (("--ablation", "--systems", "fsdp2"), "leave FSDP2 out"),
        (("--links", "nowhere.json"), "make profile-collectives"),
        (("--device", "cuda", "--ranks", 4096), "--device cpu"),
    ],
)
def test_bad_input_says_what_to_do(tmp_path: Path, more: tuple[object, ...], mends: str) -> None:
    with pytest.raises(UserError, match=mends):
        bench_training.parse_args(arguments(tmp_path, *more))
