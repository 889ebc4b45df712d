"""scripts/report/check_docs.py accepts figures that are in a results file, and reports all others."""

import json
import re
from pathlib import Path

import pytest

from errors import UserError
from scripts.lib import results
from scripts.report import budgets, check_docs
from scripts.report.check_docs import ROOT, check_page

RAW = {"found": {"nccl": 253.05, "int8": 136.51}, "step_ms": [1.0, 4.0, 7.5], "ranks": 2, "right": True}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "raw.json").write_text(json.dumps(RAW))
    return tmp_path / "page.md"


def problems(page: Path, text: str, *claims: str) -> list[str]:
    page.write_text(f"# Times\n\n{text}\n")
    figures = page.parent / "figures.txt"
    figures.write_text("\n".join(["page.md: Times", *claims, "", "other.md: Times", "stated 7: nothing"]) + "\n")
    entries = check_docs.read_entries(figures) if claims else {}
    return [problem.rpartition("page.md:1: ")[2] for problem in check_page(page, entries)]


def test_the_documentation_s_figures_are_those_of_its_files() -> None:
    entries, pages = check_docs.read_entries(check_docs.FIGURES), [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert [problem for page in pages for problem in check_page(page, entries)] == []


def test_figures_of_the_file_pass_however_they_are_rounded(page: Path) -> None:
    text = "64 MiB take 253 µs by NCCL, 253.1 with a decimal and `int8` 136.5; the median step 4.0 ms."
    assert problems(page, text, "from raw.json") == []


@pytest.mark.parametrize("figure", ["254 µs", "253.2 µs", "137.5 µs", "2.5 ms"])
def test_another_figure_is_named(page: Path, figure: str) -> None:
    assert problems(page, f"NCCL takes {figure}.", "from raw.json") == [figure.split()[0]]


def test_a_figure_with_a_measured_unit_needs_a_source(page: Path) -> None:
    assert problems(page, "NCCL takes 253 µs.") == ["'253 µs' has no source: add an entry to figures.txt"]
    hidden = "It takes `253 µs`, runs on 2 GPUs and reads 64 MiB.\n\n    a command that takes 253 µs\n\n```\n1.5 ms\n```"
    quoted = "<!-- docs/results/x.md -->\n| 7.5 ms |\n<!-- end -->"
    assert problems(page, f"{hidden}\n\n{quoted}") == []
    assert problems(page, f"{hidden}\n\nThen 3.5.\n\n{quoted}", "from raw.json") == ["3.5"]


def test_what_follows_from_the_file_is_worked_out(page: Path) -> None:
    text = "`int8` is 1.85 times as fast."
    assert problems(page, text, "from raw.json", "1.85 = 253.05 / 136.51") == []
    (wrong,) = problems(page, "`int8` is 1.95 times as fast.", "from raw.json", "1.95 = 253.05 / 136.51")
    assert wrong.startswith("1.95, but 253.05 / 136.51 = 1.853")
    twice = problems(page, text, "from raw.json", "1.85 = 253.05 / 136.51", "1.85 = 136.51 / 253.05")
    assert [problem.partition(",")[0] for problem in twice] == ["1.85"]
    (unknown,) = problems(page, text, "from raw.json", "1.85 = 300.5 / 162.4")
    assert "300.5" in unknown
    assert problems(page, text, "stated 300.5, 162.4: elsewhere", "1.85 = 300.5 / 162.4") == []
    (forbidden,) = problems(page, text, "from raw.json", "1.85 = abs(253.05)")
    assert "more than sums and products" in forbidden


def test_an_entry_that_speaks_of_no_figure_or_section_is_named(page: Path) -> None:
    found = problems(page, "NCCL takes 253 µs.", "from raw.json", "stated 12: the paper", "9 = 7.5 - 4.0")
    assert [problem.partition(":")[0] for problem in found] == ["12", "9", "9, but 7.5 - 4.0 = 3.5"]
    page.write_text("# Time\n")
    (gone,) = check_page(page, {("page.md", "Times"): check_docs.Claims()})
    assert gone.endswith("page.md: has no section 'Times', of which figures.txt speaks")


def test_each_section_has_figures_of_its_own(page: Path) -> None:
    page.write_text("# Times\n\nNCCL takes 253 µs.\n\n## Later\n\nNCCL takes 253 µs, then 12.\n")
    times, later = check_docs.Claims([253.05]), check_docs.Claims(stated={"12"})
    found = check_page(page, {("page.md", "Times"): times, ("page.md", "Later"): later})
    assert [problem.rpartition("page.md:")[2] for problem in found] == ["5: 253"]


@pytest.mark.parametrize("line", ["from nowhere.json", "about 253", "", "page.md Times"])
def test_a_file_of_figures_that_cannot_be_read_is_one_error(page: Path, line: str) -> None:
    said = {"": "'stated 1: x'"}.get(line, line.removeprefix("from "))
    with pytest.raises(UserError, match=said):
        problems(page, "NCCL takes 253 µs.", "from raw.json", line, "stated 1: x")


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


def test_parts_that_are_larger_than_their_budgets_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("docs/results/gpu", "server/routes", "comms", "tests"):
        (tmp_path / name).mkdir(parents=True)
    files = {"README.md": "one\ntwo\n", "docs/page.md": "| three | four |", "docs/results/gpu/x.json": "12345"}
    files |= {"model.py": "a\nb\n", "cli.py": "c\n", "server/routes/a.py": "d\ne\n", "comms/b.py": "f\n", "tests/c.py": "g\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = {
        "lines of server/": 2,
        "lines of comms/": 1,
        "lines of tests/": 1,
        "lines of inference": 6,
        "Python files in the root": 2,
        "words of README.md and docs": 7,
        "bytes of docs/results": 5,
        "bytes of README.md": 8,
        "lines of README.md": 2,
    }
    names = ("INFERENCE_LINES", "ROOT_FILES", "PAGES_WORDS", "RESULTS_BYTES", "README_BYTES", "README_LINES")
    for less in (0, 1):
        sizes = [size - less for size in found.values()]
        monkeypatch.setattr(budgets, "LINES", dict(zip(("server", "comms", "tests"), sizes, strict=False)))
        for name, most in zip(names, sizes[3:], strict=True):
            monkeypatch.setattr(budgets, name, most)
        lines = [f"{size} {what}, but at most {size - 1} are allowed" for what, size in found.items()]
        assert budgets.over_budget(tmp_path) == lines * less


def test_each_module_of_the_server_is_in_the_table_once() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("### The modules of server/\n")[2].partition("\n#")[0]
    modules = [path.name for path in (ROOT / "server").glob("*.py") if path.name != "__init__.py"]
    folders = {f"{path.parent.name}/" for path in (ROOT / "server").glob("[!_]*/[!_]*")}
    named, inner = re.findall(r"`(\w+(?:\.py|/))`", table), {path.name for path in (ROOT / "server").glob("*/*.py")}
    assert len(named) == len(set(named))
    assert {*modules, *folders} <= set(named) <= {*modules, *folders, *inner}
