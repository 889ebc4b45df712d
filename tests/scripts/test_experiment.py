"""The rows of a measurement: each is kept, those that are there are not measured again, and a table shows them by its columns."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from errors import UserError
from scripts.lib.experiment import Experiment
from scripts.lib.markdown import table

GRID = [{"model": model, "clients": clients} for model in "ab" for clients in (1, 16)]


def measured(path: Path, about: str, ends_after: int = 99) -> tuple[list[Any], list[Any]]:
    """What is measured, and the rows. ends_after: so many measurements the command is killed."""
    done = list[Any]()

    def measure(setting: Mapping[str, Any]) -> dict[str, Any]:
        if len(done) == ends_after:
            raise KeyboardInterrupt
        done.append(setting)
        return {"ms": [len(done), setting["clients"]]}

    try:
        return done, list(Experiment(path, {"code": about}).measure(GRID, measure))
    except KeyboardInterrupt:
        return done, []


def test_a_stopped_command_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    assert measured(path, "x", ends_after=3)[0] == GRID[:3]
    with path.open("a") as file:
        file.write('{"setting": {"mod')  # as a kill leaves it
    done, rows = measured(path, "x")
    assert done == GRID[3:]
    assert [(row["setting"], row["ms"]) for row in rows] == list(zip(GRID, [[1, 1], [2, 16], [3, 1], [1, 16]], strict=True))
    assert measured(path, "x") == ([], rows)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=str(tmp_path)):
        Experiment(tmp_path / "file" / "rows.jsonl", {})


def test_a_table_has_a_line_for_each_row_and_a_cell_for_each_column() -> None:
    columns = {"who": "{name}", "p50": "{ms[0]:.1f}", "twice": lambda row: 2 * row["ms"][1]}
    rows = [{"name": "a", "ms": [1.25, 3]}, {"name": "b", "ms": [0.5, 4]}]
    lines = "| who | p50 | twice |\n|---|---|---|\n| a | 1.2 | 6 |\n| b | 0.5 | 8 |\n"
    assert table(columns, rows) == lines
    assert table(columns, rows, "Made here.") == lines + "\nMade here.\n"
