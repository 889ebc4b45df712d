"""make divergence: where answers part, and its table."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.quality import divergence
from scripts.quality.divergence import Answers
from tests import ROOT


def test_where_answers_part() -> None:
    assert divergence.parted([1, 2, 3], [1, 2, 3]) is None
    assert divergence.parted([1, 2, 3], [1, 5, 3]) == 1


def test_ranks_run_on_the_named_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And the files of GPUs do not replace those of CPUs."""
    commands: list[list[str]] = []

    def ranks(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        sizes = command[command.index("--sizes") + 1 : command.index("--sizes") + (3 if "64" in command else 2)]
        Path(command[command.index("--answers") + 1]).write_text(json.dumps({size: Answers([[1]], 0) for size in sizes}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(divergence.subprocess, "run", ranks)
    monkeypatch.setattr(divergence, "ROOT", tmp_path)
    monkeypatch.setattr(divergence, "results_folder", lambda args: tmp_path)
    monkeypatch.setattr("sys.argv", ["divergence", "--tokens", "1", "--device", "cuda", "--items", "1"])
    divergence.main()
    assert len(commands) == 8 and all(c[c.index("--device") + 1] == "cuda" for c in commands)
    drafting = [(c[c.index("--speculate") + 1], "--deterministic" in c) for c in commands if "--speculate" in c]
    assert drafting == [("ngram", False), ("auto", False), ("ngram", True), ("auto", True)]
    assert sorted(path.suffix for path in tmp_path.glob("divergence-gpu.*")) == [".json", ".md"]


def test_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fast mode's answers depend on ranks and batch, those of the other do not."""

    def answers(args: object, ranks: int, mode: str, sizes: list[int], speculate: str | None = None) -> list[Answers]:
        last = 5 if speculate == "auto" else 1
        return [
            Answers([[7, 8, 9], [7, 8, 9 if mode == "deterministic" else ranks * size * last]], 3 if speculate else 0)
            for size in sizes
        ]

    monkeypatch.setattr(divergence, "answers", answers)
    monkeypatch.setattr(divergence, "ROOT", tmp_path)
    monkeypatch.setattr(divergence, "results_folder", lambda args: tmp_path)
    monkeypatch.setattr("sys.argv", ["divergence", "--tokens", "3", "--tp", "4"])
    divergence.main()
    text = capsys.readouterr().out
    assert "| tp 1 and tp 4 | fast | 1 of 2 | 2 | 2 |  |" in text
    assert "| no drafts and ngram | fast | 0 of 2 |  |  | 50% |" in text
    assert "| no drafts and own head | fast | 1 of 2 | 2 | 2 | 50% |" in text
    assert "| batch 1 and 64 | deterministic | 0 of 2 |  |  |  |" in text
    rows = json.loads((tmp_path / "divergence.json").read_text())["rows"]
    assert [row["parted"] for row in rows] == [[None, 2], [None, 2], [None, None], [None, 2], *[[None, None]] * 4]
    assert [row.get("drafted") for row in rows] == [None, None, 3, 3] * 2


def test_an_answer_of_the_deterministic_mode_that_differs_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    differs: list[tuple[str, int | str]] = [("deterministic", 64)]

    def answers(args: object, ranks: int, mode: str, sizes: list[int], speculate: str | None = None) -> list[Answers]:
        return [Answers([[7, size if (mode, speculate or size) in differs else 8]]) for size in sizes]

    monkeypatch.setattr(divergence, "answers", answers)
    monkeypatch.setattr("sys.argv", ["divergence", "--tokens", "2", "--items", "1", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        divergence.main()
    assert ended.value.code == 1 and capsys.readouterr().err == "1 answers differ with --deterministic\n"
    differs[:] = [("fast", 64), ("fast", "auto")]
    divergence.main()
    differs[:] = [("deterministic", "ngram")]
    with pytest.raises(SystemExit):
        divergence.main()


@pytest.mark.parametrize(
    ("compare", "name"), [("drafts", "divergence-drafts-gpu"), ("batch ranks", "divergence-ranks-batch-gpu")]
)
def test_some_comparisons_do_not_replace_all(
    compare: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def answers(args: object, ranks: int, mode: str, sizes: list[int], speculate: str | None = None) -> list[Answers]:
        seen.append((ranks, sizes, speculate))
        return [Answers([[7]])] * len(sizes)

    monkeypatch.setattr(divergence, "answers", answers)
    monkeypatch.setattr(divergence, "ROOT", tmp_path)
    monkeypatch.setattr(divergence, "results_folder", lambda args: tmp_path)
    command = ["divergence", "--tokens", "1", "--device", "cuda", "--model", "models/tiny-parallel", "--compare"]
    monkeypatch.setattr("sys.argv", [*command, *compare.split()])
    divergence.main()
    assert {path.stem for path in tmp_path.iterdir()} == {name}
    expected = {"drafts": [(1, [1], None), (1, [1], "ngram")], "batch ranks": [(1, [1, 64], None), (2, [1], None)]}
    assert seen == 2 * expected[compare]  # this model has no head
    capsys.readouterr()


def test_the_tracked_results_still_have_their_table() -> None:
    results = ROOT / "docs" / "results"
    found = json.loads((results / "divergence-gpu.json").read_text())
    args = argparse.Namespace(tokens=found["tokens"], device=found["device"], model="models/tiny-hybrid", dtype="bfloat16")
    assert divergence.table(found["rows"], args, found["machine"]) == (results / "divergence-gpu.md").read_text()
    without = [row for row in found["rows"] if "drafted" not in row]
    assert "drafts" not in divergence.table(without, args, found["machine"])


@pytest.mark.usefixtures("forked_commands")
def test_drafts_do_not_change_answers_of_the_deterministic_mode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small measurement on a CPU, with the model's own head. Its exit code would be 1."""
    monkeypatch.setattr("sys.argv", ["divergence", "--items", "2", "--tokens", "24", "--compare", "drafts", "--dry-run"])
    monkeypatch.setattr(divergence, "MODES", {"deterministic": True})
    monkeypatch.setattr(divergence, "drafts", lambda model: {"own head": "auto"})
    divergence.main()
    (line,) = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if "deterministic" in line)
    assert line[:3] == ["no drafts and own head", "deterministic", "0 of 2"]
    assert int(line[-1].removesuffix("%")) > 0  # some tokens were drafted
