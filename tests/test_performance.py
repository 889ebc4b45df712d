"""Tables of GPU measurements: the committed ones are what the raw files say; a trace's kernels are counted by step."""

from pathlib import Path

import pytest

from scripts import performance, trace
from scripts.sweep_rows import finished, read_rows

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


@pytest.mark.parametrize("folder", ["gpu-2", "gpu-4"])
@pytest.mark.parametrize("name", performance.TABLES)
def test_the_committed_tables_are_those_of_the_raw_files(name: str, folder: str) -> None:
    text, path = performance.TABLES[name](RESULTS / folder), RESULTS / f"{folder}-{name}.md"
    assert text == (path.read_text() if path.exists() else None)


@pytest.mark.parametrize("name", performance.TABLES)
def test_a_folder_without_measurements_gives_no_tables(name: str, tmp_path: Path) -> None:
    assert performance.TABLES[name](tmp_path) is None


def test_the_grid_has_a_bar_for_every_measurement(tmp_path: Path) -> None:
    plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed; make setup-dev")
    rows = [r for r in finished(read_rows(RESULTS / "gpu-2" / "sweep-grid.jsonl")) if r.setting.interconnect == "default"]
    figure, panel = plt.subplots()
    performance.bars(panel, rows, "prefill_ms")
    heights = sorted(bar.get_height() for bar in panel.patches)
    plt.close(figure)
    assert heights == sorted(row.median("prefill_ms") for row in rows) and len(heights) > 4
    performance.plot_grid(RESULTS / "gpu-2", tmp_path / "grid.png")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_kernels_are_counted_by_decode_step() -> None:
    steps = [
        {"ph": "X", "name": name, "ts": at, "dur": 100} for name, at in (("prefill", 0), ("decode 1", 200), ("decode 2", 400))
    ]
    spans = [("gemv", 10, 50), ("gemv", 210, 30), ("norm", 250, 2), ("gemv", 410, 40), ("norm", 460, 4), ("norm", 480, 6)]
    kernels = [{"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": dur} for name, at, dur in spans]
    table = trace.kernels(kernels, trace.timeline([*steps, *kernels]))
    assert table is not None
    assert table.splitlines()[2:] == ["| `gemv` | 1.0 | 35.00 | 35.0 |", "| `norm` | 1.5 | 4.00 | 6.0 |"]


def test_a_trace_without_gpu_kernels_has_no_such_table() -> None:
    events = [
        {"ph": "X", "name": "decode 1", "ts": 0, "dur": 9, "tid": 1},
        {"ph": "X", "name": "aten::mm", "ts": 1, "dur": 2, "tid": 1},
    ]
    assert trace.kernels(events, trace.timeline(events)) is None
