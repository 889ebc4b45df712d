"""Tables and plots of GPU measurements: committed tables match the raw files; a trace's kernels are counted per step."""

import json
import random
import sys
from itertools import product
from pathlib import Path

import pytest

from figures import new_figure, plain_log_axis
from scripts import trace
from scripts.bench.kernels import linear
from scripts.report import performance
from scripts.sweep.rows import Row, Setting, row_line
from tests import ROOT

RESULTS = ROOT / "docs" / "results"
FOLDERS = sorted(path for path in RESULTS.iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", performance.TABLES)
def test_the_committed_tables_are_those_of_the_raw_files(name: str, folder: Path) -> None:
    text, path = performance.TABLES[name][0](folder), RESULTS / f"{folder.name}-{name}.md"
    assert text == (path.read_text() if path.exists() else None)


@pytest.mark.parametrize("name", performance.TABLES)
def test_a_folder_without_measurements_gives_no_tables(name: str, tmp_path: Path) -> None:
    assert performance.TABLES[name][0](tmp_path) is None


def test_linear_layers_are_read_where_the_ranks_wrote_them(tmp_path: Path, seed: int) -> None:
    ranks, shape = random.choice((1, 2, 8)), {"n": 1280, "k": 8192}
    for rank in range(ranks):
        times = [{"shape": f"llama-70b-tp{rank + 1}-o", "rows": 1, **shape, "config": c, "us": 9.0} for c in (None, {})]
        content = {
            "machine": {"gpus": "1 x X", "torch": "2.11", "cores": 8, "cpu": "Y"},
            "times": times,
            "configs": {"key": None},
        }
        linear.write(content, linear.file_of(tmp_path / "linear.json", rank, ranks))
    text = performance.linear(tmp_path)
    assert text is not None and all(f"| 70b-tp{rank + 1}-o |" in text for rank in range(ranks))


def test_widths_are_compared_with_standard_in_the_same_line(tmp_path: Path, seed: int) -> None:
    times = {}
    with (tmp_path / "widths.jsonl").open("w") as file:
        for link, weights, comm, variant in product(
            ("default", "no-p2p"), (None, "fp8", "int4"), ("auto", "int8"), ("ladder", "standard", "hybrid:8")
        ):
            setting = Setting("llama-3-70b:16", variant, 2, 4, 1024, 32, comm, link, "cuda", "bfloat16", quantize=weights)
            ms = times[link, weights or "bfloat16", comm, variant] = random.uniform(1, 9), random.uniform(20, 90)
            samples = [{"decode_ms_per_token": ms[0] * f, "prefill_ms": ms[1] * f, "step_ms": []} for f in (0.9, 1.0, 1.2)]
            file.write(
                row_line(Row(setting, {"gpus": "2 x X", "torch": "2.11", "cores": 8, "cpu": "Y"}, {}, variant, comm, samples))
            )
    text = performance.widths(tmp_path)
    assert text is not None
    head, _, *lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert head[2:] == ["interconnect", "batch", "weights", "all-reduce", "standard", "ladder", "hybrid:8"]
    assert len(lines) == 12
    for _, _, link, _, weights, comm, *cells in lines:
        standard = times[link, weights, comm, "standard"]
        for variant, cell in zip(head[6:], cells, strict=True):
            ms = times[link, weights, comm, variant]
            ratios = ["" if variant == "standard" else f" ({base / own:.2f}x)" for base, own in zip(standard, ms, strict=True)]
            assert cell == f"{ms[0]:.2f}{ratios[0]} / {ms[1]:.2f}{ratios[1]}"


def test_a_load_of_a_server_elsewhere_is_shown_but_not_compared(tmp_path: Path) -> None:
    found = json.loads((RESULTS / "h100-1" / "load-llama-3-8b-standard.json").read_text())
    found["settings"] |= {"model": None, "url": "http://127.0.0.1:8000"}
    (tmp_path / "load.json").write_text(json.dumps(found))
    text = performance.TABLES["load"][0](tmp_path)
    assert text is not None and "\n\nhttp://127.0.0.1:8000, Poisson arrivals of 1024" in text
    assert performance.TABLES["compare"][0](tmp_path) is None


def test_drafts_are_compared_with_none_by_clients(tmp_path: Path, seed: int) -> None:
    counts = sorted(random.sample(range(1, 99), 3))
    rates = {name: [random.uniform(10, 2000) for _ in counts] for name in performance.CLIENTS}
    drafts = [random.randint(1, 500) for _ in counts]
    accepted = [random.randint(0, 7 * n) for n in drafts]
    for name in performance.CLIENTS:
        settings = {"model": "m", "ranks": 2, "requests": 3, "accept_rate": 0.5, "prompt_length": [7, 7], "new_tokens": [8, 9]}
        found = [
            {"clients": n, "drafts": d, "accepted": a, "summary": {"tokens_per_second": r, "end_to_end_ms": {"p50": 1e6 / r}}}
            for n, d, a, r in zip(counts, drafts, accepted, rates[name], strict=True)
        ]
        machine = {"gpus": "2 x X", "torch": "2.11", "cores": 8, "cpu": "Y"}
        (tmp_path / name).write_text(json.dumps({"settings": settings, "clients": found, "machine": machine}))
    text = performance.clients(tmp_path)
    assert text is not None and "m through" in text and "0.5" in text and "2 x X" in text
    _, _, *lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    for cells, n, d, a, without, with_ in zip(lines, counts, drafts, accepted, *rates.values(), strict=True):
        expected = [str(n), f"{without:,.1f}", f"{with_:,.1f}", f"{with_ / without:.2f}", f"{a / d:.2f}"]
        assert cells == [*expected, f"{1e6 / without:,.0f}", f"{1e6 / with_:,.0f}"]
    (tmp_path / performance.CLIENTS[1]).unlink()
    assert performance.clients(tmp_path) is None


def test_profiled_runs_are_shown_by_phase_and_kind(tmp_path: Path, seed: int) -> None:
    us = {phase: [random.uniform(1e3, 1e5) for _ in range(3)] for phase in ("prefill", "decode")}
    gpu = {
        phase: {
            "step_us": sum(times),
            "by_kind_us": dict(zip(("attention", "GEMM", "idle"), times, strict=True)),
            "kernels": [{"name": "void a|b(int)", "kind": "GEMM", "launches": 64.0, "span_us": 1.0, "own_us": times[1]}],
        }
        for phase, times in us.items()
    }
    settings = [Setting("llama-3-8b", "standard", 1, batch, 1024, 48, None, "default", "cuda", "bfloat16") for batch in (1, 4)]
    splits = [{"compute": 1.0, "source": "profiler", "gpu": gpu}, None]  # the second one was not profiled
    where = {"gpus": "1 x X", "torch": "2.11", "cores": 8, "cpu": "Y"}
    sample = {"decode_ms_per_token": 1.0, "prefill_ms": 1.0, "step_ms": []}
    rows = [Row(s, where, {}, "standard", "local", [sample], split) for s, split in zip(settings, splits, strict=True)]
    (tmp_path / "profile-8b.jsonl").write_text("".join(map(row_line, rows)))
    text = performance.TABLES["profile"][0](tmp_path)
    assert text is not None
    _, _, *lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert [line[3:6] for line in lines] == [["1", "1024 + 48", "prefill"], ["1", "1024 + 48", "decode"]]
    for line, times in zip(lines, us.values(), strict=True):
        assert line[6:10] == [f"{value / 1e3:.3f}" for value in (sum(times), *times)]
        assert line[10] == f"`a b(int)` {times[1] / 1e3:.3f} in 64"


def test_a_panel_has_six_lines_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks every line plot of the tracked results. Message sizes are labelled in KiB and MiB."""
    figure = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed; make setup-dev")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    for path in sorted(RESULTS.glob("h200-4/*.json")):
        raw = performance.read_row(path)
        if raw and "µs nccl" in raw.get("found", {}):
            performance.plot_comm([raw], tmp_path / "comm.png")
    comms = len(drawn)
    assert comms >= 2
    for one in drawn:
        for panel in one.axes:
            assert 1 <= sum(not line.get_label().startswith("_") for line in panel.lines) <= 6
    for one in drawn[:comms]:
        for panel in one.axes:
            shown = [panel.xaxis.get_major_formatter()(size, 0) for size in (4096, 1 << 20)]
            assert shown == ["4 KiB", "1 MiB"]


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


def test_a_trace_without_gpu_kernels_has_no_such_table() -> None:
    events = [
        {"ph": "X", "name": "decode 1", "ts": 0, "dur": 9, "tid": 1},
        {"ph": "X", "name": "aten::mm", "ts": 1, "dur": 2, "tid": 1},
    ]
    assert trace.gpu_times(events, trace.timeline(events)) == {}


def test_a_logarithmic_axis_has_several_ticks(seed: int) -> None:
    """Over any range of half an octave to four decades."""
    draws = random.Random(seed)
    for _ in range(200):
        low, ratio = 10 ** draws.uniform(-3, 4), 10 ** draws.uniform(0.18, 4)
        axes = new_figure(4, 3).subplots()
        axes.plot([0, 1], [low, low * ratio])
        plain_log_axis(axes.yaxis)
        bottom, top = axes.yaxis.get_view_interval()
        assert sum(bottom <= tick <= top for tick in axes.yaxis.get_majorticklocs()) >= 2, (bottom, top)
