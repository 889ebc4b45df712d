"""make divergence: where answers part, and its table and plot."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.quality import divergence


def test_where_answers_part() -> None:
    assert divergence.parted([1, 2, 3], [1, 2, 3]) is None
    assert divergence.parted([1, 2, 3], [1, 5, 3]) == 1


def test_ranks_run_on_the_named_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And the files of GPUs do not replace those of CPUs."""
    commands: list[list[str]] = []

    def ranks(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        sizes = command[command.index("--sizes") + 1 : command.index("--sizes") + (3 if "64" in command else 2)]
        Path(command[command.index("--answers") + 1]).write_text(json.dumps({size: [[1]] for size in sizes}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(divergence.subprocess, "run", ranks)
    monkeypatch.setattr(divergence, "ROOT", tmp_path)
    monkeypatch.setattr(divergence, "results_folder", lambda args: tmp_path)
    monkeypatch.setattr("sys.argv", ["divergence", "--tokens", "1", "--device", "cuda", "--items", "1"])
    divergence.main()
    assert len(commands) == 4 and all(c[c.index("--device") + 1] == "cuda" for c in commands)
    assert sorted(path.suffix for path in tmp_path.glob("divergence-gpu.*")) == [".json", ".md", ".png"]


def test_table_and_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fast mode's answers depend on ranks and batch, those of the other do not."""

    def answers(args: object, ranks: int, mode: str, sizes: list[int]) -> list[list[list[int]]]:
        return [[[7, 8, 9], [7, 8, 9 if mode == "deterministic" else ranks * size]] for size in sizes]

    monkeypatch.setattr(divergence, "answers", answers)
    monkeypatch.setattr(divergence, "ROOT", tmp_path)
    monkeypatch.setattr(divergence, "results_folder", lambda args: tmp_path)
    monkeypatch.setattr("sys.argv", ["divergence", "--tokens", "3", "--tp", "4"])
    divergence.main()
    text = capsys.readouterr().out
    assert "| tp 1 and tp 4 | fast | 1 of 2 | 2 | 2 |" in text
    assert "| batch 1 and 64 | deterministic | 0 of 2 |  |  |" in text
    rows = json.loads((tmp_path / "divergence.json").read_text())["rows"]
    assert [row["parted"] for row in rows] == [[None, 2], [None, 2], [None, None], [None, None]]
    assert (tmp_path / "divergence.png").stat().st_size > 1000


def test_an_answer_of_the_deterministic_mode_that_differs_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    differs = [("deterministic", 64)]

    def answers(args: object, ranks: int, mode: str, sizes: list[int]) -> list[list[list[int]]]:
        return [[[7, size if (mode, size) in differs else 8]] for size in sizes]

    monkeypatch.setattr(divergence, "answers", answers)
    monkeypatch.setattr("sys.argv", ["divergence", "--tokens", "2", "--items", "1", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        divergence.main()
    assert ended.value.code == 1 and capsys.readouterr().err == "1 answers differ with --deterministic\n"
    differs[:] = [("fast", 64)]
    divergence.main()
