"""The split of a traced step, the figures of a sweep's rows, and the tables of them."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import profiling
from errors import UserError
from scripts import trace
from scripts.lib import markdown
from scripts.sweep import tables
from scripts.sweep.rows import Interconnect, Row, Setting, baseline, finished, interconnect, ratio, read_rows, row_line

MACHINE = {"cpu": "a CPU", "cores": 2, "gpus": "8 x a GPU", "torch": "2.13", "python": "3.12"}
PARTS = ("compute", "hidden", "exposed", "idle")


def event(name: str, begin: float, end: float, cat: str, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "pid": 0, "tid": tid, "ts": begin, "dur": end - begin}


# --- spans and traces ----------------------------------------------------------------------------------------------------


def random_spans(rng: random.Random) -> list[profiling.Span]:
    return [(float(a), float(a + rng.randrange(0, 40))) for a in (rng.randrange(0, 400) for _ in range(rng.randrange(0, 25)))]


def painted(spans: list[profiling.Span]) -> np.ndarray:
    """Whether each unit of time lies in a span: (500,) bool."""
    line = np.zeros(500, dtype=bool)
    for begin, end in spans:
        line[int(begin) : int(end)] = True
    return line


def test_spans_are_sets_of_moments(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        a, b = random_spans(rng), random_spans(rng)
        one, other = profiling.union(a), profiling.union(b)
        assert all(x[1] < y[0] for x, y in pairwise(one))
        for found, expected in (
            (one, painted(a)),
            (profiling.intersection(one, other), painted(a) & painted(b)),
            (profiling.difference(one, other), painted(a) & ~painted(b)),
        ):
            assert (painted(found) == expected).all()
            assert profiling.length(found) == expected.sum()


def gpu_events() -> list[dict[str, Any]]:
    """Two decode steps of 100 µs. First: compute 0-40, an all-reduce 30-60 (10 hidden, 20 exposed), compute 60-90. Second: two
    overlapping kernels that hide an all-reduce, then a peer copy and a two-shot all-reduce without compute."""
    kernels = [
        event("gemm_bf16", 0, 40, "kernel", 7),
        event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 30, 60, "kernel", 13),
        event("rms_norm_kernel", 60, 90, "kernel", 7),
        event("gemm_bf16", 100, 170, "kernel", 7),
        event("flash_fwd", 120, 180, "kernel", 9),
        event("void one_shot_all_reduce_kernel<float>", 130, 150, "kernel", 13),
        event("Memcpy PtoP (Device -> Device)", 180, 184, "gpu_memcpy", 13),
        event("two_shot_all_reduce", 190, 196, "kernel", 13),
    ]
    host = [event("decode 1", 0, 100, "user_annotation"), event("decode 2", 100, 200, "user_annotation")]
    shadows = [event("decode 1", 1, 89, "gpu_user_annotation", 7), event("nccl:all_reduce", 25, 61, "user_annotation")]
    return kernels + host + shadows + [event("aten::mm", 0, 100, "cpu_op"), {"ph": "M", "name": "process_name", "pid": 0}]


def test_split_of_a_gpu_trace() -> None:
    line = trace.timeline(gpu_events())
    first, second = (trace.split(line, window) for _, window in line.steps)
    assert [name for name, _ in line.steps] == ["decode 1", "decode 2"]
    assert [getattr(first, part) * 1e3 for part in PARTS] == pytest.approx([60, 10, 20, 10])
    assert [getattr(second, part) * 1e3 for part in PARTS] == pytest.approx([60, 20, 10, 10])
    mean = trace.by_phase(line)
    assert list(mean) == ["decode"]
    assert [getattr(mean["decode"], part) * 1e3 for part in PARTS] == pytest.approx([60, 15, 15, 10])
    assert mean["decode"].step == pytest.approx(0.1)
    assert "50%" in trace.table(mean)


def test_split_of_a_cpu_trace() -> None:
    events = [
        event("prefill", 0, 100, "user_annotation"),
        event("layer 0", 0, 100, "user_annotation"),  # a whole block includes its waits, so it is not compute
        event("layer 0 attention", 10, 40, "user_annotation"),
        event("aten::mm", 12, 30, "cpu_op"),
        event("aten::add", 80, 85, "cpu_op"),
        event("aten::add_", 45, 70, "cpu_op", tid=2),  # another thread's arithmetic is not the model's
        event("gloo:all_reduce", 35, 75, "user_annotation", tid=3),
    ]
    (found,) = trace.by_phase(trace.timeline(events)).values()
    assert [getattr(found, part) * 1e3 for part in PARTS] == pytest.approx([30, 5, 35, 30])


def test_a_trace_without_steps_is_one_window() -> None:
    events = [e for e in gpu_events() if not e["name"].startswith("decode")]
    ((name, found),) = trace.by_phase(trace.timeline(events)).items()
    assert name == "whole trace"
    assert found.exposed * 1e3 == pytest.approx(30)


def test_marks_add_up_and_are_not_read_again() -> None:
    events = gpu_events()
    line = trace.timeline(events)
    marked = trace.marked(events, line)
    for name, expected in (("hidden", 30), ("exposed", 30)):
        assert sum(e["dur"] for e in marked if e.get("cat") == "overlap" and e["name"] == name) == pytest.approx(expected)
    assert trace.timeline(marked) == line
    assert trace.marked(marked, line) == marked
    assert len({e["tid"] for e in marked if e.get("name") == "thread_name"}) == 3


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    for content in ("", "[]", '{"traceEvents": 3}'):
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(UserError, match="no profiler trace"):
            profiling.read_trace(tmp_path / "t.json")
    with pytest.raises(UserError, match="neither GPU kernels nor torch operators"):
        trace.timeline([event("prefill", 0, 1, "user_annotation")])


# --- rows ----------------------------------------------------------------------------------------------------------------


def row(prefill: list[float], steps: list[list[float]], **setting: Any) -> Row:
    base = dict(model="llama-3-70b", variant="standard", tp=8, batch=1, prompt_length=1024, new_tokens=512, device="cuda")
    samples = [
        {
            "prefill_ms": p,
            "step_ms": s,
            "decode_ms_per_token": float(np.median(s)),
            "weight_gb_per_second": 1.0,
            "peak_memory_gb": 2.0,
            "exposed_ms": None,
        }
        for p, s in zip(prefill, steps, strict=True)
    ]
    found = Setting(**{**base, **setting})
    split = {"compute": 1.0, "hidden": 0.5, "exposed": 0.25, "idle": 0.25, "source": "profiler"}
    return Row(found, MACHINE, {"rung": "abc"}, found.variant, "nccl", samples, split)


def steady(prefill: float, step: float, **setting: Any) -> Row:
    return row([prefill] * 3, [[step] * 511] * 3, **setting)


def test_figures_of_a_row() -> None:
    one = row([10, 30, 20], [[1, 2, 3], [4, 4, 4], [2, 2, 20]], batch=2, new_tokens=4)
    assert one.values("completion_ms") == [16, 42, 44]
    assert one.median("throughput") == pytest.approx(2 * 4 / 0.042)
    assert one.median("decode_ms_per_token") == 2
    assert one.values("exposed_ms") == [] and one.median("exposed_ms") is None


def test_rows_survive_their_file_and_the_last_of_equals_counts(tmp_path: Path) -> None:
    first, failed = steady(5, 1), replace(steady(5, 1, tp=2), samples=[], split=None, error="out of memory")
    again = steady(6, 2)
    path = tmp_path / "rows.jsonl"
    path.write_text(row_line(first) + row_line(failed) + row_line(again))
    assert read_rows(path) == [failed, again]
    assert finished(read_rows(path)) == [again]
    path.write_text("{}\n")
    with pytest.raises(UserError, match="line 1 is no row"):
        read_rows(path)


def test_a_ratio_needs_the_same_configuration() -> None:
    standard, ladder = steady(100, 10), steady(100, 8, variant="ladder")
    assert baseline(ladder, [ladder, standard]) == standard
    assert ratio(ladder, [ladder, standard], "decode_ms_per_token") == pytest.approx(0.8)
    for other in (dict(tp=4), dict(batch=2), dict(interconnect="no-p2p"), dict(comm="int8"), dict(compile=True)):
        there = steady(100, 8, variant="ladder", **other)
        assert ratio(ladder, [ladder, steady(100, 10, **other)], "throughput") is None
        assert ratio(there, [there, standard], "throughput") is None
        assert ratio(there, [there, standard, steady(100, 10, **other)], "throughput") is not None


def test_interconnects() -> None:
    assert interconnect("default") == Interconnect()
    assert interconnect("no-p2p") == Interconnect({"NCCL_P2P_DISABLE": "1"})
    assert interconnect("two-hosts") == Interconnect(hosts=2)
    assert interconnect("NCCL_ALGO=Ring;NCCL_PROTO=LL") == Interconnect({"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"})
    assert interconnect("10us,100GB/s") == Interconnect(link="10us,100GB/s")
    for bad in ("fast", "=1", "10us,fast", "A B=1"):
        with pytest.raises(UserError):
            interconnect(bad)


# --- tables -------------------------------------------------------------------------------------------------


def test_bytes_have_binary_units() -> None:
    assert [markdown.size_text(n) for n in (512, 4096, 98304, 3 << 19, 128 << 20)] == [
        "512 B",
        "4 KiB",
        "96 KiB",
        "1.5 MiB",
        "128 MiB",
    ]


def test_tables_name_every_variant_once() -> None:
    rows = [steady(10, ms, variant=v) for v, ms in (("ladder", 2), ("standard", 3))]
    text = tables.latency_table(rows)
    assert text is not None
    head, _, line = text.splitlines()
    assert head.endswith("| standard | ladder |")
    assert line.endswith("| 3.00 (3.00 to 3.00) | 2.00 (2.00 to 2.00) |")
    assert tables.latency_table([steady(1, 1, batch=2)]) is None
    assert tables.table(rows).count("\n") == 3
