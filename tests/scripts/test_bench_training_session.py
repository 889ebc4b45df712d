"""Several configurations in one launch of the training benchmark's ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.training import __main__ as bench_training
from scripts.bench.training import launches

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
