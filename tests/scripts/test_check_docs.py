"""scripts/report/check_docs.py accepts figures that are in a results file, and reports all others."""

import json
import re
from pathlib import Path

import pytest

from scripts.lib import results
from scripts.report import check_docs
from scripts.report.check_docs import ROOT, check_page

RAW = {"found": {"nccl": 253.05, "int8": 136.51}, "step_ms": [1.0, 4.0, 7.5], "ranks": 2, "right": True}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "raw.json").write_text(json.dumps(RAW))
    return tmp_path / "page.md"


def problems(page: Path, text: str, comment: str = "") -> list[str]:
    page.write_text(text + (f"\n<!-- figures\n{comment}\n-->\n" if comment else "\n"))
    return [problem.rpartition("page.md:1: ")[2] for problem in check_page(page)]


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name)
def test_the_documentation_s_figures_are_those_of_its_files(path: Path) -> None:
    assert check_page(path) == []


def test_figures_of_the_file_pass_however_they_are_rounded(page: Path) -> None:
    text = "64 MiB take 253 µs by NCCL, 253.1 with a decimal and `int8` 136.5; the median step 4.0 ms."
    assert problems(page, text, "from raw.json") == []


@pytest.mark.parametrize("figure", ["254 µs", "253.2 µs", "137.5 µs", "2.5 ms"])
def test_another_figure_is_named(page: Path, figure: str) -> None:
    assert problems(page, f"NCCL takes {figure}.", "from raw.json") == [figure.split()[0]]


def test_a_figure_with_a_measured_unit_needs_a_source(page: Path) -> None:
    assert problems(page, "NCCL takes 253 µs.") == ["'253 µs' has no source: add a comment `<!-- figures`"]
    assert problems(page, "It takes `253 µs`, runs on 2 GPUs and reads 64 MiB.") == []


def test_what_follows_from_the_file_is_worked_out(page: Path) -> None:
    text = "`int8` is 1.85 times as fast."
    assert problems(page, text, "from raw.json\n1.85 = 253.05 / 136.51") == []
    (wrong,) = problems(page, "`int8` is 1.95 times as fast.", "from raw.json\n1.95 = 253.05 / 136.51")
    assert wrong.startswith("1.95, but 253.05 / 136.51 = 1.853")
    (unknown,) = problems(page, text, "from raw.json\n1.85 = 300.5 / 162.4")
    assert "300.5" in unknown
    (forbidden,) = problems(page, text, "from raw.json\n1.85 = abs(253.05)")
    assert "more than sums and products" in forbidden


def test_a_comment_that_speaks_of_no_figure_is_named(page: Path) -> None:
    (left,) = problems(page, "NCCL takes 253 µs.", "from raw.json\nstated 12: the paper")
    assert left.startswith("12: the comment speaks of it")


@pytest.mark.parametrize("comment", ["from nowhere.json", "about 253"])
def test_a_comment_that_cannot_be_read_is_one_error(page: Path, comment: str) -> None:
    with pytest.raises(check_docs.UserError, match=r"nowhere\.json|about 253"):
        problems(page, "NCCL takes 253 µs.", comment)


def test_tables_and_plots_that_are_not_their_raw_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    raw, plot, table = tmp_path / "raw.json", tmp_path / "plot.png", tmp_path / "table.md"
    for path in (raw, plot, table):
        path.write_text(path.name)
    results.made(plot, raw)
    assert list(results.stale(tmp_path)) == ["table.md: nothing says what it was made from"]
    results.made(table, raw)
    assert list(results.stale(tmp_path)) == []
    table.write_text("by hand")
    assert list(results.stale(tmp_path)) == ["table.md: was changed by hand, or its writer did not note it"]
    results.made(table, raw)
    raw.write_text("measured again")
    assert [line.partition(":")[0] for line in results.stale(tmp_path)] == ["plot.png", "table.md"]
    plot.unlink()
    assert "plot.png: made-from.json names it, but it is gone" in results.stale(tmp_path)


def test_a_table_that_the_results_do_not_list_is_named(tmp_path: Path) -> None:
    page, tables = tmp_path / "results.md", tmp_path / "results"
    tables.mkdir()
    page.write_text("[one](results/one.md), and phone.md")
    for name in ("one.md", "phone.md", "plot.png"):
        (tables / name).touch()
    assert check_docs.unlisted(page, tables) == ["results.md: has no link to phone.md"]


def test_more_words_or_bytes_than_the_budget_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs" / "results" / "gpu").mkdir(parents=True)
    (tmp_path / "README.md").write_text("one two\n<!-- figures\nfrom x.json\n-->\n")
    (tmp_path / "docs" / "page.md").write_text("| three | four |")
    (tmp_path / "docs" / "results" / "gpu" / "x.json").write_text("12345")
    found = (7, 5, len((tmp_path / "README.md").read_text()), 4)
    for most in (found, [figure - 1 for figure in found]):
        monkeypatch.setattr(check_docs, "MOST", dict(zip(check_docs.MOST, most, strict=True)))
        lines = [
            f"{figure} {what}, but at most {figure - 1} are allowed"
            for what, figure in zip(check_docs.MOST, found, strict=True)
        ]
        assert check_docs.over_budget(tmp_path) == ([] if most is found else lines)


def test_each_module_of_the_server_is_in_the_table_once() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("### The modules of server/\n")[2].partition("\n#")[0]
    modules = [path.name for path in (ROOT / "server").glob("*.py") if path.name != "__init__.py"]
    folders = {f"{path.parent.name}/" for path in (ROOT / "server").glob("[!_]*/[!_]*")}
    assert sorted(re.findall(r"`(\w+(?:\.py|/))`", table)) == sorted([*modules, *folders])
