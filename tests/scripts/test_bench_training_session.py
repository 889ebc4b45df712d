"""Several configurations in one launch of the training benchmark's ranks, and pretraining that leaves metrics alone."""

import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from errors import UserError
from scripts.bench.training import __main__ as bench_training
from scripts.bench.training import launches
from scripts.corpus.encode import encode_corpus
from scripts.lib.machine import machine
from scripts.lib.results import ROOT
from scripts.lib.rows import read_row, write_row
from scripts.quality import pretrain_variants
from tests.support import quick_start
from tests.support.server_thread import wait_for
from tp import init_world
from training.metrics import read_metrics
from training.snapshot_folder import MANIFEST
from training.step import Trainer
from training.token_file import open_tokens, write_tokens

pytestmark = pytest.mark.usefixtures("forked_commands")


def sweep(out: Path, *more: object) -> list[dict[str, Any]]:
    fixed = ("--device", "cpu", "--models", "tiny:1", "--ranks", 2, "--steps", 2, "--sequence-length", 8, "--one-launch")
    return launches.measure_all(bench_training.parse_args([str(word) for word in (*fixed, "--out", out, *more)]), {})


def test_one_launch_measures_all_configurations_and_goes_on_behind_errors(tmp_path: Path) -> None:
    systems = ("--systems", "planner", "zero-3", "fsdp2")
    whole = sweep(tmp_path, *systems, "--", "--sharding", "2,2,2")
    assert [row["sharding"] for row in whole] == ["P 2x1, G 2x1, OS 2x1"] * 2 + ["2"]
    assert [len(row["step_ms"]) for row in whole] == [2, 2, 2]
    rows = sweep(tmp_path, *systems, "--", "--sharding", "2,1,2")
    assert "P must lie inside G" in rows[0]["error"]
    assert all("error" not in row for row in rows[1:])
    assert len(list(tmp_path.glob("launch-*.log"))) == 2
    again = sweep(tmp_path, *systems, "--", "--sharding", "2,2,2")
    assert again == whole
    assert len(list(tmp_path.glob("launch-*.log"))) == 2  # nothing was left to launch


def test_a_crash_costs_one_row_and_the_rest_has_another_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    def launch(line: list[str], timeout: float, log: Path | None = None) -> str | None:
        """Ranks that die at the second configuration of the first launch."""
        listed = json.loads(Path(next(word for word in line if word.endswith(".json"))).read_text())
        rows = tmp_path / "rows.jsonl"
        launched.append([wanted["row"]["settings"]["system"] for wanted in listed])
        for wanted in listed[: 1 if len(launched) == 1 else None]:
            launches.append(rows, wanted["row"] | {"step_ms": [float(len(launched))]})
        return "torch.OutOfMemoryError: broken" if len(launched) == 1 else None

    monkeypatch.setattr(launches, "launch", launch)
    rows = sweep(tmp_path, "--traced", 0, "--systems", "zero-1", "zero-2", "zero-3", "mics")
    assert launched == [["zero-1", "zero-2", "zero-3", "mics"], ["zero-3", "mics"]]
    assert [row.get("error", row.get("step_ms")) for row in rows] == [[1.0], "torch.OutOfMemoryError: broken", [2.0], [2.0]]


def test_what_the_timeout_leaves_no_time_for_says_so(tmp_path: Path) -> None:
    rows = sweep(tmp_path, "--systems", "zero-1", "zero-3", "--steps", 1_000_000, "--timeout", 2)
    assert all("--timeout" in row["error"] for row in rows)


def test_pretraining_the_variants_writes_their_losses_and_no_models(tmp_path: Path) -> None:
    flags = "--model tiny:1 --ranks 2 --steps 7 --dry-run --sequence-length 16 --global-batch 4 --streams 2 --seeds 3 4"
    line = [sys.executable, "-m", "scripts.quality.pretrain_variants", *flags.split(), "--out", str(tmp_path)]
    line += ["--variants", "standard", "hybrid", "desync-2x"]
    done = quick_start.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    labels = {"standard": "standard", "hybrid": "hybrid", "desync-2x": "desync-2x", "standard, seed 4": "standard-seed-4"}
    for label, folder in labels.items():
        assert [line["step"] for line in read_metrics(tmp_path / folder / "metrics.jsonl")] == [5, 7]
        assert not (tmp_path / folder / "model").exists() and not (tmp_path / folder / "snapshots").exists()
        assert f"| {read_row(tmp_path / folder / 'heldout.json')['loss']:.4f} |" in done.stdout
        assert f"| {label} | 7 |" in done.stdout
    assert not list(tmp_path.rglob("*.safetensors"))
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    again = quick_start.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert again.stdout == done.stdout and times == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert "versions of the code" not in again.stdout
    kept = read_row(note := tmp_path / "hybrid" / "settings.json")
    write_row(note, kept | {"codes": ["other"]})
    ended = read_row(result := tmp_path / "hybrid" / "heldout.json")
    write_row(result, ended | {"machine": "8 x B200"})
    again = quick_start.run([*line, "--save-every", "3"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert "by 2 versions of the code" in again.stdout and again.returncode == 0
    assert f"Made on {ended['machine']} (standard; standard, seed 4; desync-2x), 8 x B200 (hybrid)" in again.stdout
    refused = quick_start.run([*line, "--learning-rate", "2e-4"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert refused.returncode == 2 and "has a model of other settings; name another --out" in refused.stderr
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}


def test_pretraining_goes_on_behind_a_model_that_fails(tmp_path: Path) -> None:
    """Of a desync model with more streams than KV heads, as of one for which there is no memory."""
    flags = "--model tiny:1 --ranks 2 --steps 2 --dry-run --sequence-length 16 --global-batch 4 --streams 8 --seeds 3"
    line = [sys.executable, "-m", "scripts.quality.pretrain_variants", *flags.split(), "--out", str(tmp_path)]
    line += ["--variants", "desync-2x", "ladder"]
    done = quick_start.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "Failed: desync-2x. The same command goes on" in done.stderr
    assert f"| {read_row(tmp_path / 'ladder' / 'heldout.json')['loss']:.4f} |" in done.stdout
    assert "Not ready, because its training failed or was stopped: desync-2x." in done.stdout
    assert done.stderr.count("8 streams, 4 KV heads") == 1


def test_the_noise_is_known_before_the_other_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain", "--seeds", "5", "6"])
    labels = list(pretrain_variants.models(pretrain_variants.parse_args()))
    assert labels[:2] == ["standard", "standard, seed 6"] and labels[-2:] == ["desync-2x", "desync-4x"]


@pytest.mark.parametrize(
    ("more", "part"), [("--steps 0", "--steps must be above 0"), ("-- --compiled", "unknown flag --compiled")]
)
def test_options_that_no_model_can_have_start_no_ranks(more: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_variants", "--model", "tiny", *more.split()])
    with pytest.raises(UserError, match=part):
        pretrain_variants.parse_args()


@pytest.mark.parametrize("more", ["--metrics-only", "--stop-after=2", "--steps"])
def test_options_without_a_last_snapshot_are_refused(more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_variants", "--model", "tiny", "--out", str(tmp_path), "--", more])
    with pytest.raises(UserError, match=f"{more} after --"):
        pretrain_variants.parse_args()


def lines_until(step: int, loss: Callable[[int], float]) -> list[dict[str, Any]]:
    return [
        {"step": i, "loss": loss(i), "step_ms": 1.0, "tokens_per_gpu_second": 2.0}
        for i in range(pretrain_variants.LOG_EVERY, step + 1, pretrain_variants.LOG_EVERY)
    ]


def test_variants_are_compared_at_the_last_step_that_all_have() -> None:
    """A model that was stopped at step 40 is compared with what the others had then."""
    found = {
        "standard": lines_until(60, lambda i: 2 - i / 100),
        "ladder": lines_until(40, lambda i: 2.5 - i / 100),
        "standard, seed 4": lines_until(60, lambda i: 2.03 - i / 100),
    }
    assert pretrain_variants.common_step(found) == 40
    assert pretrain_variants.loss_at(found["ladder"], 40) == pytest.approx(2.5 - 0.325)


@pytest.mark.parametrize("seeds", [2, 3])
def test_differences_of_heldout_losses_have_the_noise_of_the_seeds(
    seeds: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["pretrain", "--seeds", *map(str, range(1, seeds + 1)), "--variants", "standard", "ladder"]
    )
    args = pretrain_variants.parse_args()
    losses = {label: random.uniform(1, 2) for label in pretrain_variants.models(args)}
    lost, noise = pretrain_variants.differences(losses)
    assert lost == {label: loss - losses["standard"] for label, loss in losses.items() if label != "standard"}
    assert noise == pytest.approx(math.sqrt(2) * statistics.stdev(loss for label, loss in losses.items() if label != "ladder"))
    text = pretrain_variants.table(args, {label: lines_until(20, lambda _: 1.0) for label in losses}, losses, machine())
    assert f"| {losses['ladder']:.4f} | {lost['ladder']:+.4f} |" in text
    assert f"deviation of {noise:.4f}, estimated from {seeds} seeds" in text
    assert math.isnan(pretrain_variants.differences({"standard": 1.0, "ladder": 2.0})[1])
    assert pretrain_variants.differences({"ladder": 1.0})[0] == {}


def test_a_stopped_variant_goes_on_from_its_snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = [
        "pretrain",
        "--model",
        "tiny:1",
        "--steps",
        "6",
        "--sequence-length",
        "16",
        "--global-batch",
        "2",
        "--save-every",
        "2",
    ]
    step, world, losses = Trainer.train_step, init_world("cpu"), []
    steps = list[int]()

    def stopped(self: Trainer) -> Any:
        if self.step == 5 and len(steps) == 5:
            raise UserError("stopped")
        steps.append(self.step)
        return step(self)

    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(sys, "argv", [*line, "--out", str(tmp_path / name), "--", "--device", "cpu"])
        args = pretrain_variants.parse_args()
        data, heldout = pretrain_variants.corpus(args), pretrain_variants.corpus(args, "heldout")
        assert pretrain_variants.seconds_left(args) is None
        if name == "stopped":
            monkeypatch.setattr(Trainer, "train_step", stopped)
            with pytest.raises(UserError, match="stopped"):
                pretrain_variants.train(world, pretrain_variants.begin(args, "ladder", data), heldout)
            wait_for((args.out / "ladder" / "snapshots" / "step-00000004" / MANIFEST).exists)
            each = pretrain_variants.metrics(args, "ladder")[-1]["step_ms"]
            count = len(pretrain_variants.models(args)) * 6 - 4
            assert pretrain_variants.seconds_left(args) == pytest.approx(count * each / 1e3)
        pretrain_variants.train(world, pretrain_variants.begin(args, "ladder", data), heldout)
        losses.append(pretrain_variants.heldout(args, "ladder"))
    assert steps == [0, 1, 2, 3, 4, 4, 5] and losses[0] == losses[1]
    monkeypatch.setattr(pretrain_variants, "code_digest", lambda: "other")
    assert pretrain_variants.heldout(args, "ladder") == losses[1], "of other code, which the table says"
    ids = encode_corpus(pretrain_variants.TOKENIZER, 1, 20, 1, "heldout")
    assert np.array_equal(open_tokens(heldout, 1024).tokens, ids[: 4 * 2 * 17])  # of four steps of two windows


def test_the_heldout_loss_is_of_the_model_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No snapshot is read for it, and no model written."""
    line = ["pretrain", "--model", "tiny:1", "--steps", "2", "--sequence-length", "16", "--global-batch", "2"]
    monkeypatch.setattr(sys, "argv", [*line, "--out", str(tmp_path), "--", "--device", "cpu"])
    args = pretrain_variants.parse_args()
    data, heldout = pretrain_variants.corpus(args), pretrain_variants.corpus(args, "heldout")
    for name in ("restore", "export"):
        monkeypatch.setattr(Trainer, name, lambda *_: pytest.fail("a file of gigabytes"))
    pretrain_variants.train(init_world("cpu"), pretrain_variants.begin(args, "ladder", data), heldout)
    loss = pretrain_variants.heldout(args, "ladder")
    assert loss is not None and 0 < loss < 9 and not (tmp_path / "ladder" / "snapshots").exists()


def test_models_of_other_settings_and_short_corpora_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = ["pretrain", "--model", "tiny:1", "--steps", "5", "--sequence-length", "16", "--global-batch", "4"]
    monkeypatch.setattr(sys, "argv", [*line, "--out", str(tmp_path)])
    args = pretrain_variants.parse_args()
    data = pretrain_variants.corpus(args)
    pretrain_variants.begin(args, "ladder", data)
    args.save_every += 1
    pretrain_variants.check_settings(args, "ladder", data)
    args.learning_rate *= 2
    pretrain_variants.check_settings(args, "standard", data)
    with pytest.raises(UserError, match="ladder has a model of other settings"):
        pretrain_variants.check_settings(args, "ladder", data)
    write_tokens(data, np.zeros(5 * 4 * 16, dtype=np.int64), 50, "none")
    with pytest.raises(UserError, match="would repeat"):
        pretrain_variants.corpus(args)
