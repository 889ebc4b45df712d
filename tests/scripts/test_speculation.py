"""make speculation: rows with and without drafts, kept and shown; what changes a figure is measured again."""

import json
import sys
from pathlib import Path

import pytest

from scripts.bench.serving import speculation
from scripts.bench.serving.speculation import quartiles
from scripts.lib import results
from tests.support.command_line import MODELS


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where results go."""
    monkeypatch.setattr(speculation, "OUT", tmp_path)
    monkeypatch.setattr(results, "OUT", tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    short = ("--models", MODELS / "tiny-ladder", "--requests", 2, "--repeats", 2, "--new-tokens", 3)
    monkeypatch.setattr(sys, "argv", ["speculation", *map(str, (*short, *words))])
    speculation.main()


def test_quartiles() -> None:
    assert quartiles([0.5]) == (0.5, 0.5) and quartiles([2.0, 1.0]) == (1.25, 1.75)
    assert quartiles([7, 1, 9, 3, 5]) == (3, 7)


def test_rows_are_measured_once_and_shown(
    monkeypatch: pytest.MonkeyPatch, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ("--tasks", "question", "counting", "--clients", 1, 2)
    run(monkeypatch, *grid)
    made, shown = json.loads((out / "speculation.json").read_text()), capsys.readouterr().out
    sources = ("ngram", "prediction", "head draft")
    assert [(row["task"], row["clients"], row["source"]) for row in made["rows"]] == [
        (task, clients, source) for task in ("question", "counting") for clients in (1, 2) for source in sources
    ]
    for row in made["rows"]:
        assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1] and row["other_answers"] == 0
        assert row["with"] > 0 and row["without"] > 0 and row["tokens_per_step"] >= 1
    assert max(row["accepted_length"] or 0 for row in made["rows"] if row["source"] == "prediction") > 0
    assert (out / "speculation.md").read_text() == shown and f"of {len(made['rows'])} ratios are below 0.97" in shown
    monkeypatch.setattr(speculation, "load", None)  # nothing is left to measure
    run(monkeypatch, *grid)
    assert json.loads((out / "speculation.json").read_text()) == made
