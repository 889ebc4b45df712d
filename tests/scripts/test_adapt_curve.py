"""The curve of recovered accuracy: rates are chosen by the search alone, rows are shared by workers, and it runs from end to end."""

import argparse
import json
import math
import random
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from errors import UserError
from scripts.corpus.tokens import write_enough
from scripts.lib.rows import locked, write_row
from scripts.quality import adapt_curve, seeds
from scripts.quality.adapt_curve import Cell
from scripts.quality.heldout import TASKS
from scripts.report import redraw
from tests import MODELS
from training.batches import GlobalBatches
from training.step import Trainer

SMALL = ["--sequence-length", "32", "--batch", "2", "--training-tokens", "2000", "--shares", "0.1", "--layers", "4"]


def arguments(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["adapt_curve", *SMALL, "--out", str(out), *more])
    return adapt_curve.parse_args()


def evaluation(loss: float, right: float) -> dict[str, Any]:
    """Stories of this loss, and 40 prompts a task of which the share `right` is answered."""
    answers = {task: random.sample([1] * round(40 * right) + [0] * round(40 - 40 * right), 40) for task in TASKS}
    return {"stories": [(-loss * 10, 10)] * 3, "answers": answers}


def put(
    args: argparse.Namespace, cell: Cell, heldout: tuple[float, float] | None, search: float = 1.0, code: str = "this"
) -> None:
    """The row of a model with these losses and this share of right answers, or of one that diverged."""
    row: dict[str, Any] = asdict(cell) | {"code": code, "heldout": None, "search": None}
    if heldout:
        row |= {"heldout": evaluation(*heldout), "search": evaluation(search, 0.5)}
    write_row(adapt_curve.file_of(args, cell), row | {"training_seconds": 8.0, "evaluation_seconds": 3.0})


def test_a_row_of_the_results_has_the_same_figures_in_few_characters(seed: int) -> None:
    random.seed(seed)
    row = asdict(Cell(4)) | {"heldout": evaluation(0.5, 0.7), "search": {"stories": [(-1.5, 3), (-2.25, 4)]}}
    kept = adapt_curve.brief(row)
    assert seeds.nats(kept["heldout"]) == pytest.approx(0.5) and kept["search"] == {"stories": [[-3.75, 7]]}
    assert {task: [int(c) for c in given] for task, given in kept["heldout"]["answers"].items()} == row["heldout"]["answers"]
    diverged = asdict(Cell(4)) | {"heldout": None, "search": None}
    assert adapt_curve.brief(diverged) == diverged


def test_the_grid_is_searched_with_one_seed_and_measured_with_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    args = arguments(monkeypatch, tmp_path, "--distill", "0.5", "--rates", "1e-3", "2e-3", "--seeds", "1", "2", "3")
    assert adapt_curve.tokens_of(args) == [192]  # whole steps of 64
    first = adapt_curve.searched(args)
    trained = [Cell(4, 192, 0.5, rate, 1) for rate in (1e-3, 2e-3)]
    assert first == [Cell(0), Cell(4), *trained] and adapt_curve.total(args) == 6
    assert adapt_curve.chosen(args) == [] and adapt_curve.seconds_left(args, []) is None
    put(args, Cell(0), (0.3, 0.9))
    put(args, Cell(4), (0.5, 0.5))
    put(args, trained[0], (0.31, 0.8), search=0.40)  # better where the figures are measured, which must not count
    assert adapt_curve.chosen(args) == []
    put(args, trained[1], (0.32, 0.7), search=0.39)
    assert adapt_curve.chosen(args) == [Cell(4, 192, 0.5, 2e-3, number) for number in (1, 2, 3)]
    assert adapt_curve.seconds_left(args, adapt_curve.rows_of(args)) == pytest.approx(2 * (8 + 3) / args.workers)
    put(args, Cell(4, 192, 0.5, 2e-3, 2), (0.34, 0.8))
    original, converted, retrained = adapt_curve.summary(args)
    assert retrained["rate"] == 2e-3 and retrained["seeds"] == 2
    assert retrained["mean"][:2] == pytest.approx((0.75, 0.05)) and converted["recovered"][0] == 0
    assert retrained["recovered"] == pytest.approx(((0.75 - 0.5) / (0.9 - 0.5), 0.05 / (0.9 - 0.5)))
    assert retrained["difference"][0] == pytest.approx(-0.15)
    assert retrained["perplexity_change"][0] == pytest.approx((math.exp(0.02) + math.exp(0.04)) / 2 - 1)
    assert "recovered" not in original
    text = adapt_curve.table([original, converted, retrained], args, seeds.machine())
    assert "| 4 | 0.000192 | 50% | 0.002 (edge) | 2 |" in text and "| 62 ± 1" in text  # 62.5 ± 12.5
    assert "did not stay finite" not in text
    args.batch += 1
    assert adapt_curve.rows_of(args) == []  # other settings have other rows
    args.batch -= 1
    assert adapt_curve.rows_of(args)
    assert "versions of the code" not in text
    put(args, Cell(4, 192, 0.5, 2e-3, 3), (0.34, 0.8), code="other")
    assert "by 2 versions of the code" in adapt_curve.table(adapt_curve.summary(args), args, seeds.machine())


def test_a_rate_that_diverges_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int) -> None:
    args = arguments(monkeypatch, tmp_path, "--distill", "0", "--rates", "1e-3", "2e-3", "1e30", "--seeds", "1")
    original, converted, *trained = adapt_curve.searched(args)
    put(args, original, (0.3, 0.9))
    put(args, converted, (0.5, 0.5))
    order = random.sample(range(3), 3)
    for i in order:
        put(args, trained[i], None if i == 2 else (0.3, 0.8), search=0.4 - 0.1 * i)
    assert adapt_curve.chosen(args) == [trained[1]]
    text = adapt_curve.table(adapt_curve.summary(args), args, seeds.machine())
    assert "| 0.002 | 1 |" in text and f"did not stay finite: {trained[2].name}." in text


def test_shares_that_round_to_the_same_steps_are_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = arguments(monkeypatch, tmp_path, "--distill", "0", "--rates", "1e-3", "--seeds", "1", "--shares", "0.03", "0.04")
    assert adapt_curve.tokens_of(args) == [64]
    for cell in adapt_curve.searched(args):
        put(args, cell, (0.3, 0.9))
    assert adapt_curve.total(args) == len(adapt_curve.rows_of(args)) == 3
    adapt_curve.work(args)  # returns


@pytest.mark.parametrize(
    "error", [UserError("no room"), RuntimeError("an index is out of range"), ZeroDivisionError()], ids=repr
)
def test_workers_go_on_behind_a_model_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception) -> None:
    args = arguments(monkeypatch, tmp_path, "--distill", "0", "--rates", "1e-3", "2e-3", "--seeds", "1")
    (tmp_path / "rows").mkdir()
    broken, *others = adapt_curve.searched(args)
    tried = list[Cell]()

    def measured(_: argparse.Namespace, cell: Cell) -> dict[str, Any]:
        tried.append(cell)
        if cell == broken:
            raise error
        return asdict(cell) | {"code": "this", "heldout": evaluation(0.3, 0.9), "search": evaluation(0.4, 0.5)}

    monkeypatch.setattr(adapt_curve, "measure", measured)
    for _ in range(2):
        adapt_curve.work(args)
    assert tried == [broken, *others]  # the second worker did nothing
    assert [row["layers"] for row in adapt_curve.rows_of(args)] == [cell.layers for cell in others]
    reason = str(error) or "ZeroDivisionError()"
    monkeypatch.setattr(adapt_curve.Workers, "start", lambda *_: adapt_curve.work(args))
    assert adapt_curve.command(args, 0) == [f"; {broken.name} failed ({reason})"]
    assert tried[-1] == broken and len(tried) == len(others) + 2  # a later command tries it again


def test_a_worker_whose_gpu_is_unusable_ends_and_leaves_the_rest_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = arguments(monkeypatch, tmp_path, "--distill", "0", "--rates", "1e-3", "--seeds", "1")
    (tmp_path / "rows").mkdir()

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nMore")

    with monkeypatch.context() as patch:
        patch.setattr(adapt_curve, "measure", broken)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "synchronize", broken)
        with pytest.raises(RuntimeError, match="illegal"):
            adapt_curve.work(args)
    measured = {"code": "this", "heldout": evaluation(0.3, 0.9), "search": evaluation(0.4, 0.5)}
    monkeypatch.setattr(adapt_curve, "measure", lambda _, cell: asdict(cell) | measured)
    adapt_curve.work(args)
    assert len(adapt_curve.rows_of(args)) == adapt_curve.total(args) - 1 and len(adapt_curve.failures(args)) == 1


def test_a_model_goes_on_from_its_last_snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    more = ["--distill", "0", "--rates", "1e-3", "--seeds", "1", "--stories", "2", "--items", "2", "--", "--device", "cpu"]
    args = arguments(monkeypatch, tmp_path, *more)
    monkeypatch.setattr(adapt_curve, "SAVE_EVERY", 2)
    write_enough(adapt_curve.data_of(args, 192), args.model, adapt_curve.DATA_SEED, 193)
    cell = adapt_curve.searched(args)[-1]
    left = Trainer.train_step

    def killed(self: Trainer) -> Any:
        if self.step == 2:
            raise KeyboardInterrupt
        return left(self)

    monkeypatch.setattr(Trainer, "train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        adapt_curve.measure(args, cell)
    steps: list[int] = []
    monkeypatch.setattr(Trainer, "train_step", lambda self: (steps.append(self.step), left(self))[1])
    row = adapt_curve.measure(args, cell)
    assert steps == [2] and row["search"]
    args.rates = [1e30]
    cell = adapt_curve.searched(args)[-1]
    row = adapt_curve.measure(args, cell)
    assert row["heldout"] is row["search"] is None
    json.dumps(row, allow_nan=False)


def test_each_epoch_has_all_windows_of_the_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    more = ["--distill", "0", "--rates", "1e-3", "--seeds", "1", "--stories", "2", "--items", "2", "--", "--device", "cpu"]
    once, twice = arguments(monkeypatch, tmp_path, *more), arguments(monkeypatch, tmp_path, "--epochs", "2", *more)
    cell = adapt_curve.searched(twice)[-1]
    assert adapt_curve.file_of(once, cell) != adapt_curve.file_of(twice, cell)
    write_enough(adapt_curve.data_of(twice, 192), twice.model, adapt_curve.DATA_SEED, 193)
    seen: list[list[int]] = []
    chosen = GlobalBatches.chosen
    monkeypatch.setattr(GlobalBatches, "chosen", lambda self, step: (seen.append(found := chosen(self, step)), found)[1])
    adapt_curve.measure(twice, cell)
    assert len(seen) == 6  # steps of 2 windows
    for epoch in (seen[:3], seen[3:]):
        assert sorted(int(window) for windows in epoch for window in windows) == list(range(6))


def test_rows_of_other_weights_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int) -> None:
    model = shutil.copytree(MODELS / "tiny-standard", tmp_path / "model")
    args = arguments(monkeypatch, tmp_path / "out", "--model", str(model))
    before = adapt_curve.file_of(args, Cell(0))
    (model / "model.safetensors").write_bytes(random.randbytes(100))
    adapt_curve.checksum.cache_clear()
    assert adapt_curve.file_of(args, Cell(0)) != before


def test_a_model_is_measured_by_one_worker(tmp_path: Path) -> None:
    path = tmp_path / "row.json"
    with adapt_curve.claimed(path) as mine, adapt_curve.claimed(path) as other:
        assert (mine, other) == (True, False)
        write_row(path, {})
    with adapt_curve.claimed(path) as late:
        assert not late


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--layers", "9"], "give 1 to 8"),
        (["--distill", "1.5"], "--distill from 0 to 1"),
        (["--shares", "0"], "--shares must be above 0"),
        (["--", "--compile", "--seed", "4"], "--seed after --"),
        (["--", "--learn=1e-3"], "--learn=1e-3 after --"),
    ],
    ids=str,
)
def test_bad_settings_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: list[str], part: str) -> None:
    with pytest.raises(UserError, match=part):
        arguments(monkeypatch, tmp_path, *more)


@pytest.mark.usefixtures("forked_commands")
def test_a_small_curve_from_training_to_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(adapt_curve.results, "OUT", tmp_path / "results")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    more = ["--distill", "0.5", "--rates", "1e-4", "--epochs", "2", "--seeds", "1", "2", "--stories", "2", "--items", "2"]
    args = arguments(monkeypatch, tmp_path / "curve", *more, "--training-tokens", "20000", "--", "--device", "cpu")
    adapt_curve.main()
    found = json.loads((tmp_path / "results" / "adapt-curve-2-epochs.json").read_text())
    assert [(e["layers"], e["tokens"], e.get("seeds")) for e in found["summary"]] == [(0, 0, 1), (4, 0, 1), (4, 1984, 2)]
    losses = [seeds.nats(row["heldout"]) for row in found["rows"]]
    assert losses[0] < losses[2] < losses[1] and losses[2] != losses[3]  # retraining gives a little back
    assert [bool(row["search"]) for row in found["rows"]] == [False, False, True, False]  # the rate is known for later seeds
    assert (tmp_path / "results" / "adapt-curve-2-epochs.png").stat().st_size > 10_000
    redraw.FIGURES["adapt-curve*"](found, again := tmp_path / "again.png")
    assert again.read_bytes() == (tmp_path / "results" / "adapt-curve-2-epochs.png").read_bytes()
    assert not list((args.out / "work").iterdir())
    monkeypatch.setattr(adapt_curve.Workers, "start", lambda *_: pytest.fail("nothing is left to do"))
    adapt_curve.main()


@pytest.mark.usefixtures("forked_commands")
def test_a_worker_that_fails_leaves_the_others_alone_and_the_table_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(adapt_curve.results, "OUT", tmp_path / "results")
    more = ["--distill", "0", "--rates", "1e-3", "--seeds", "1", "--workers", "2"]
    args = arguments(monkeypatch, tmp_path / "curve", *more)
    put(args, Cell(0), (0.3, 0.9))
    write_row(tmp_path / "late.json", asdict(Cell(4)) | {"code": "this", "heldout": evaluation(0.5, 0.5), "search": None})
    late = f"import os, time; time.sleep(2); os.rename({str(tmp_path / 'late.json')!r}, {str(adapt_curve.file_of(args, Cell(4)))!r})"
    scripts = {"worker-0": "raise SystemExit(9)", "worker-1": late}
    start, started = adapt_curve.Workers.start, list[str]()

    def start_script(self: adapt_curve.Workers, name: str, _: list[str], log: Path) -> None:
        started.append(name)
        start(self, name, [sys.executable, "-c", scripts[name]], log)

    monkeypatch.setattr(adapt_curve.Workers, "start", start_script)
    with pytest.raises(UserError, match="2 of 3 models are ready; the same command goes on; worker-0 failed with exit code 9"):
        adapt_curve.main()
    assert "| 4 | 0 |" in (tmp_path / "results" / "adapt-curve.md").read_text()
    assert sorted(started) == ["worker-0"] * 3 + ["worker-1"]  # started again as often as there are workers


def test_two_commands_do_not_share_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments(monkeypatch, tmp_path)
    with locked(tmp_path / "command.lock"), pytest.raises(UserError, match="another command works in"):
        adapt_curve.main()
