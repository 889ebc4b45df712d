"""`python -m training.train` from its command line to its result: resuming, kills, the saved model, and refused input."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints.hf_config import read_config
from checkpoints.presets import preset
from checkpoints.weights import load_model
from config import with_variant
from errors import RankError, UserError
from layers.attention import Causal
from ranks.processes import on_ranks
from tests import ROOT
from tests.support import quick_start
from tests.support.clock import Clock
from tests.support.command_line import Here, environment
from tests.support.models import ALONE, save_random
from tests.support.ranks import Ranks
from tp import World
from training import metrics
from training import train as command
from training.executor import Executor
from training.loop import prepare, train
from training.snapshot_folder import MANIFEST, checksum, read_manifest
from training.step import Trainer
from training.token_file import write_tokens

STEPS, LENGTH = 12, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a few thousand parameters."""
    sizes: Any = dict(hidden_size=32, n_layers=3, n_heads=4, n_kv_heads=4, head_dim=8, intermediate_size=36, vocab_size=50)
    return save_random(with_variant(replace(preset("tiny"), **sizes), "hybrid:2"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory, session_seed: int) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "random.bin"
    write_tokens(path, np.random.default_rng(session_seed).integers(0, 8, 2000), 50, "none")
    return path


def arguments(model: Path, tokens: Path, out: Path, *more: object) -> list[str]:
    fixed = ["--device", "cpu", "--model", model, "--data", tokens, "--out", out, "--steps", STEPS, "--warmup", 2]
    sizes = ["--sequence-length", LENGTH, "--global-batch", 8, "--log-every", 1, "--save-every", 4, "--seed", 5]
    return [str(a) for a in (*fixed, *sizes, *more)]


def run(world: World, argv: Sequence[str]) -> list[dict[str, Any]]:
    """Train on these ranks; return the lines of metrics.jsonl."""
    args = command.parse_args(argv)
    found = command.setup(args)
    trainer, snapshots = prepare(args, world, found)
    train(args, world, trainer, snapshots, found)
    return [json.loads(line) for line in (args.out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(model: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The losses of a run on one rank."""
    return losses(run(ALONE, arguments(model, tokens, tmp_path_factory.mktemp("whole"))))


def losses(lines: Sequence[dict[str, Any]]) -> torch.Tensor:
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return torch.tensor([line["loss"] for line in lines])


def test_a_run_writes_a_model_that_is_read_again(model: Path, tokens: Path, tmp_path: Path) -> None:
    lines = run(ALONE, arguments(model, tokens, tmp_path / "out", "--learning-rate", 1e-2))
    assert losses(lines)[-1] < losses(lines)[0] - 0.5  # the model learns that only 8 of 50 tokens occur
    assert {"tokens_per_second", "tokens_per_gpu_second", "mfu", "exposed_ms", "learning_rate"} <= lines[0].keys()
    assert (tmp_path / "out" / "loss.png").stat().st_size > 1000
    assert sorted(p.name for p in (tmp_path / "out" / "snapshots").iterdir()) == ["step-00000008", "step-00000012"]
    directory = tmp_path / "out" / "model"
    config = read_config(directory / "config.json")
    assert config.variant == "ladder"
    trained = load_model(str(directory), config, ALONE, torch.float32)
    before = load_model(str(model), config, ALONE, torch.float32)
    ids = torch.randint(0, 50, (2, 9))
    context = Causal(9, torch.device("cpu"))
    assert not torch.allclose(trained(ids, context), before(ids, context), atol=1e-3)
    master = read_manifest(tmp_path / "out" / "snapshots" / "step-00000012")
    assert master["step"] == STEPS


def test_a_rank_without_memory_says_so_itself(
    model: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks do not know of it."""

    def full(_: Trainer) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 56.00 MiB.\nMore")

    monkeypatch.setattr(Trainer, "train_step", full)
    with pytest.raises(RankError, match=r"rank 0 is out of GPU memory \(CUDA .* 56\.00 MiB\.\); use --recompute"):
        run(ALONE, arguments(model, tokens, tmp_path))


RESUMED = [  # ranks, --sharding and --gpus-per-node of a run, and of the one that resumes it
    ((4, "2,2,2x2", 2), (1, "1,1,1", 1)),
    ((1, "1,1,1", 1), (4, "1,1,2x2", 2)),
    ((2, "1,1,2", 2), (4, "2x2,2x2,2x2", 2)),
]


def test_resuming_on_other_ranks_and_plans_gives_the_same_losses(
    ranks: Ranks, model: Path, tokens: Path, undisturbed: torch.Tensor, tmp_path: Path, in_turn: Callable[..., Any]
) -> None:
    out, (then, now) = tmp_path / "cut", in_turn(RESUMED, 0)
    for (count, sharding, per_node), more in ((then, ["--stop-after", 7]), (now, ["--resume"])):
        layout = ["--sharding", sharding, "--gpus-per-node", per_node]
        intra = ["--intra-tensor"] if more == ["--resume"] else []
        result = ranks.run(count, run, arguments(model, tokens, out, *layout, *more, *intra))
    assert [line["step"] for line in result[0]] == list(range(1, STEPS + 1))  # the steps after the snapshot were written again
    torch.testing.assert_close(losses(result[0]), undisturbed, rtol=1e-5, atol=0)


def start(argv: Sequence[str], ranks: int) -> quick_start.Popen:
    line = [*(on_ranks(ranks) if ranks else [sys.executable]), "-m", "training.train", *argv]
    return quick_start.Popen(
        line, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def test_a_killed_run_resumes_to_the_same_losses(model: Path, tokens: Path, tmp_path: Path, seed: int) -> None:
    """The whole job gets SIGKILL at a random time after its first snapshot, perhaps while it saves."""
    out = tmp_path / "killed"
    long = ["--steps", 2000, "--save-every", 2, "--log-every", 1]
    job = start(arguments(model, tokens, out, *long), ranks=0)
    try:
        wait_for(lambda: any((out / "snapshots").glob("step-????????/manifest.json")), job)
        time.sleep(random.Random(seed).uniform(0, 0.5))
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
    reached = int(max(p.name for p in (out / "snapshots").glob("step-????????")).removeprefix("step-"))
    short = ["--steps", 2000, "--stop-after", reached + 3]
    resumed = run(ALONE, arguments(model, tokens, out, *short, "--resume"))
    whole = run(ALONE, arguments(model, tokens, tmp_path / "whole", *short))
    assert [line["step"] for line in resumed] == [line["step"] for line in whole] == list(range(1, reached + 4))
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]
    assert not list((out / "snapshots").glob("*.partial"))


def wait_for(condition: Any, job: quick_start.Popen, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline, "no snapshot in time"
        time.sleep(0.02)


# --- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--deterministic", "--compile"], "leave it or --deterministic out"),
        (["--global-batch", 0], "--global-batch must be above 0"),
        (["--learning-rate", "nan"], "--learning-rate must be above 0"),
        (["--sharding", "2,1,2"], "does not divide"),
        (["--sharding", "1,1,4"], "does not divide that of the cluster"),
        (["--sharding", "8"], "is not a sharding"),
        (["--gpus-per-node", 2], "do not fill whole nodes"),
        (["--global-batch", 9, "--micro-batch", 2], "give a multiple of 2, such as"),
        (["--data", "nothing.bin"], "nothing.json is missing"),
        (["--model", "nothing/here"], "nothing/here"),
        (["--variant", "upper-bound"], "cannot be trained"),
        (["--model", "tiny", "--variant", "desync-2x:8"], "keeps copies"),
        (["--sequence-length", 100000], "beyond the model's"),
        (["--global-batch", 1000], "fewer than a batch"),
        (["--cluster", "atlantis"], "no cluster 'atlantis'"),
        (["--tokenizer", "nowhere"], "is no directory"),
        (["--out", "/proc/x"], "cannot be written"),
        (["--no-overlap", "everything"], "invalid choice"),
    ],
    ids=str,
)
def test_bad_settings_get_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    model: Path,
    tokens: Path,
    tmp_path: Path,
    more: Any,
    part: str,
) -> None:
    assert part in Here(monkeypatch, capfd, command.main, ()).refuses(*arguments(model, tokens, tmp_path / "out", *more))


def test_a_foreign_or_forgotten_run_is_not_overwritten(model: Path, tokens: Path, tmp_path: Path) -> None:
    base = arguments(model, tokens, tmp_path / "out")
    run(ALONE, base)
    with pytest.raises(UserError, match="go on with --resume"):
        run(ALONE, base)
    ids, other = np.fromfile(tokens, "<u2"), tmp_path / "other.bin"
    ids[len(ids) // 2] ^= 1
    write_tokens(other, ids, 50, "none")
    for more, part in (
        (["--seed", 6], "another seed"),
        (["--global-batch", 4], "another global batch"),
        (["--variant", "standard"], "another model"),
        (["--dtype", "bfloat16"], "another dtype .float32, now bfloat16"),
        (["--deterministic"], "another deterministic"),
        (["--data", other], "another data"),
        (["--learning-rate", 2e-4], "another learning rate.*--other-recipe"),
        (["--steps", STEPS + 1], f"another steps .{STEPS}, now {STEPS + 1}"),
        (["--warmup", 3], "another warmup"),
        (["--seed", 6, "--other-recipe"], "another seed"),
    ):
        with pytest.raises(UserError, match=part):
            run(ALONE, [*base, "--resume", *map(str, more)])


def test_a_snapshot_of_an_earlier_version_is_refused(model: Path, tokens: Path, tmp_path: Path) -> None:
    base = arguments(model, tokens, tmp_path / "out")
    run(ALONE, base)
    path = tmp_path / "out" / "snapshots" / "step-00000012" / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["crc32"], manifest["meta"]["dtype"]
    path.write_text(json.dumps({"crc32": checksum(manifest)} | manifest))
    for more in ([], ["--other-recipe"], ["--steps", "20"]):
        with pytest.raises(UserError, match=r"earlier version of Rung, which did not note the run's dtype; .* another --out$"):
            run(ALONE, [*base, "--resume", *more])


def test_a_save_is_not_counted_as_a_step(model: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    monkeypatch.setattr(Trainer, "train_step", clock.taking(1, Trainer.train_step))
    monkeypatch.setattr(Trainer, "save", clock.taking(50, Trainer.save))
    lines = run(ALONE, arguments(model, tokens, tmp_path / "out", "--log-every", 3))
    assert [(line["step"], line["step_ms"], line["save_ms"]) for line in lines] == [
        (3, 1000, 0),
        (4, 1000, 0),
        (7, 1000, 50_000),
        (8, 1000, 0),
        (11, 1000, 50_000),
        (12, 1000, 0),
    ]
    assert {line["tokens_per_second"] for line in lines} == {8 * LENGTH}


def test_a_run_that_stops_says_what_was_saved(
    model: Path, tokens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it closes the executor, whose hooks would keep the model in memory."""
    closed = []
    close = Executor.close
    monkeypatch.setattr(Executor, "close", lambda executor: closed.append(close(executor)))
    for folder, more, said in (
        ("metrics", ["--metrics-only"], "stopped after step 2; nothing was saved"),
        ("whole", [], "stopped after step 2; go on with --resume"),
    ):
        run(ALONE, arguments(model, tokens, tmp_path / folder, "--stop-after", 2, *more))
        assert said in capfd.readouterr().err
    assert len(closed) == 2


def test_another_recipe_goes_on_only_if_told_to(model: Path, tokens: Path, tmp_path: Path) -> None:
    base = arguments(model, tokens, tmp_path / "out")
    short = run(ALONE, base)
    lines = run(ALONE, [*base, "--resume", "--other-recipe", "--steps", str(STEPS + 2), "--final-rate", "1"])
    assert lines[:STEPS] == short and [line["step"] for line in lines[STEPS:]] == [STEPS + 1, STEPS + 2]
    assert lines[-1]["learning_rate"] > short[-1]["learning_rate"]


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(model: Path, tokens: Path, tmp_path: Path) -> None:
    base = arguments(model, tokens, tmp_path / "out", "--learning-rate", "1e30", "--warmup", 0)
    with pytest.raises(UserError, match="lower --learning-rate"):
        run(ALONE, base)
    assert not list((tmp_path / "out" / "snapshots").glob("step-????????"))


def test_the_planner_chooses_and_its_prediction_is_printed(
    model: Path, tokens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(ALONE, arguments(model, tokens, tmp_path / "out", "--cluster", "h200", "--gpus-per-node", 1))
    said = capfd.readouterr().err
    assert "auto: the planner's choice" in said
    assert "predicted step time" in said
