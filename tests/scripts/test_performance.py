"""Tables and plots of GPU measurements: committed tables match the raw files; a trace's kernels are counted per step."""

import json
import sys
from pathlib import Path

import pytest

from scripts import trace
from scripts.report import performance
from tests import ROOT

RESULTS = ROOT / "docs" / "results"
FOLDERS = sorted(path for path in RESULTS.iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_committed_tables_are_those_of_the_raw_files(folder: Path, tmp_path: Path) -> None:
    performance.show(folder, tmp_path)
    kept = {path.name: path.read_text() for name in performance.TABLES for path in RESULTS.glob(f"{folder.name}-{name}.md")}
    assert {path.name: path.read_text() for path in tmp_path.glob("*.md")} == kept
    assert list(tmp_path.glob("*.png")) == [tmp_path / path.name for path in RESULTS.glob(f"{folder.name}-*.png")]


def test_a_load_of_a_server_elsewhere_is_shown_but_not_compared(tmp_path: Path) -> None:
    found = json.loads((RESULTS / "h100-1" / "load-llama-3-8b-standard.json").read_text())
    found["settings"] |= {"model": None, "url": "http://127.0.0.1:8000"}
    (tmp_path / "load.json").write_text(json.dumps(found))
    text = performance.TABLES["load"][0](tmp_path)
    assert text is not None and "\n\nhttp://127.0.0.1:8000, Poisson arrivals of 1024" in text
    assert performance.TABLES["compare"][0](tmp_path) is None


def test_kernels_are_counted_by_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        {"ph": "X", "name": name, "ts": at, "dur": 100} for name, at in (("prefill", 0), ("decode 1", 200), ("decode 2", 400))
    ]
    spans = [
        ("gemv", 10, 50),
        ("gemv", 210, 30),
        ("_rms_norm", 230, 22),
        ("gemv", 410, 40),
        ("_rms_norm", 460, 4),
        ("copy", 480, 6),
    ]
    kernels = [{"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": dur} for name, at, dur in spans]
    (path := tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*steps, *kernels]}))
    monkeypatch.setattr(sys, "argv", ["trace", "--read", str(path)])
    trace.main()
    tables = [table.splitlines()[2:] for table in capsys.readouterr().out.split("\n\n")[1:]]
    assert tables == [
        [
            "| prefill | 0.100 | 0.000 (0%) | 0.050 (50%) | 0.000 (0%) | 0.000 (0%) | 0.050 (50%) |",
            "| decode | 0.100 | 0.000 (0%) | 0.035 (35%) | 0.008 (8%) | 0.003 (3%) | 0.054 (54%) |",
        ],
        ["| `gemv` | GEMM | 1.0 | 50.00 | 50.0 |"],
        [
            "| `gemv` | GEMM | 1.0 | 35.00 | 35.0 |",
            "| `_rms_norm` | norm and all-reduce | 1.0 | 13.00 | 8.0 |",
            "| `copy` | other | 0.5 | 6.00 | 3.0 |",
        ],
    ]
    events = json.loads(path.read_text())["traceEvents"]
    found = trace.gpu_record(trace.gpu_times(events, trace.timeline(events))["decode"])
    assert found["by_kind_us"]["idle"] == 54
    assert found["kernels"][1] == {
        "name": "_rms_norm", "kind": "norm and all-reduce", "launches": 1.0, "span_us": 13.0, "own_us": 8.0
    }  # fmt: skip
