"""The idle share of a trace, and the flags of engine.bench."""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.bench as bench
from engine.profiling import IDLE, KINDS, OTHER, Event, gpu_time, kernel_idle_share, kind_of
from errors import UserError
from tests import ROOT


def kernel(begin: int, end: int, **more: Any) -> Event:
    return {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": begin, "dur": end - begin} | more


def test_the_idle_share_is_the_time_without_a_kernel_on_any_stream(seed: int) -> None:
    """Compared with a count of the microseconds in which a kernel runs."""
    for _ in range(100):
        starts = [random.randrange(1000) for _ in range(random.randint(1, 30))]
        spans = [(begin, begin + random.randint(1, 60)) for begin in starts]
        busy = {time for begin, end in spans for time in range(begin, end)}
        events = [kernel(begin, end, tid=random.choice([7, 20])) for begin, end in spans]
        others = [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {}},
            kernel(0, 5000, cat="cuda_runtime"),
            kernel(0, 5000, cat="gpu_user_annotation"),
            kernel(0, 5000, cat="gpu_memcpy"),
        ]
        whole = max(busy) + 1 - min(busy)
        share = kernel_idle_share(random.sample(events + others, len(events) + len(others)))
        assert share == pytest.approx(1 - len(busy) / whole)


def test_a_trace_without_kernels_has_no_idle_share() -> None:
    assert kernel_idle_share([kernel(0, 1, cat="cpu_op")]) is None


def test_the_traced_steps_and_what_the_engine_measured_in_them(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [kernel(0, 30), kernel(20, 60), kernel(90, 100)]}))
    for count in (random.randint(bench.TRACED.start + 5, bench.TRACED.stop), bench.TRACED.stop + 50):
        steps, waits = ([random.random() for _ in range(count)] for _ in range(2))
        idle = [sum(waits[:i]) for i in range(count)]
        found = bench.traced_shares(path, idle, steps)
        inner = slice(bench.TRACED.start + 3, min(count, bench.TRACED.stop) - 1)
        assert found == {
            "traced_steps": min(count, bench.TRACED.stop) - bench.TRACED.start,
            "traced_kernel_idle_share": 0.3,
            "traced_idle_share": pytest.approx(sum(waits[inner]) / sum(steps[inner]), abs=1e-4),
            "traced_shares": {"attention": 0, "GEMM": 0, "norm and all-reduce": 0, "other": 0.7, "idle": 0.3},
        }


def test_each_moment_of_a_step_counts_for_the_kernel_that_began_first(seed: int) -> None:
    """Kernels of all kinds on several streams, some of which cross the borders of steps, against every µs on its own."""
    names = ["_gemv", "_paged_decode", "_rms_norm", "copy"]
    begins = random.sample(range(300), 40)
    events = [kernel(b, b + random.randint(1, 25), name=random.choice(names), tid=random.randrange(3)) for b in begins]
    events[0]["cat"] = "gpu_memcpy"
    borders = sorted(random.sample(range(330), 6))
    windows = [(float(a), float(b)) for a, b in zip(borders[::2], borders[1::2], strict=True)]
    own, launches = dict.fromkeys([*names, IDLE], 0), dict.fromkeys(names, 0)
    for begin, end in windows:
        for moment in range(int(begin), int(end)):
            running = [e for e in events if e["ts"] <= moment < e["ts"] + e["dur"]]
            own[min(running, key=lambda e: e["ts"])["name"] if running else IDLE] += 1
        for event in events:
            launches[event["name"]] += begin <= event["ts"] < end
    time = gpu_time([*events, kernel(0, 300, cat="cpu_op")], windows)
    assert time is not None and time.step_us == pytest.approx(sum(b - a for a, b in windows) / 3)
    for name in names:
        found = next((k for k in time.kernels if k.name == name), None)
        assert (found.own_us, found.launches) == pytest.approx((own[name] / 3, launches[name] / 3)) if found else not own[name]
    by_kind = {"GEMM": "_gemv", "attention": "_paged_decode", "norm and all-reduce": "_rms_norm", OTHER: "copy", IDLE: IDLE}
    assert time.by_kind == pytest.approx({kind: own[name] / 3 for kind, name in by_kind.items()})
    assert sum(time.by_kind.values()) == pytest.approx(time.step_us)
    assert gpu_time([kernel(0, 1, cat="cpu_op")]) is None


def test_every_kernel_of_this_project_has_its_kind() -> None:
    """A kernel that is launched and not named here or in `KINDS` counts as other: say what it is."""
    launched = {
        name for path in (ROOT / "kernels").glob("*.py") for name in re.findall(r"\b(_\w+)\[[(a-z].*\]\(", path.read_text())
    }
    others = {"_swiglu", "_swiglu_codes", "_embedding_shard", "_quantize_rows", "_local_best", "_combine_best", "_gumbel_noise"}
    others |= {"_router", "_slot_gate_up", "_slot_down", "_tile_gate_up", "_tile_down", "_sum"}  # of sparse models
    assert {name for name in launched if kind_of(name) == OTHER} == others
    assert {"_gemv", "_mma_push", "_stream", "_paged_prefill", "_rope_store", "_rms_norm", "_one_shot"} <= launched


def test_kinds_of_libraries_kernels() -> None:
    kinds = {
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT": "GEMM",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>": "GEMM",
        "void cublasLt::splitKreduce_kernel<32, 16, int>": "GEMM",
        "_gemm_reduce_scatter": "GEMM",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>": "attention",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "norm and all-reduce",
        "Memcpy PtoP (Device -> Device)": "norm and all-reduce",
        "Memcpy HtoD (Pinned -> Device)": OTHER,
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel": OTHER,
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": OTHER,
    }
    assert {name: kind_of(name) for name in kinds} == kinds and set(kinds.values()) == {*KINDS, OTHER}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace", "trace.json"], "needs a GPU"),
        (["--trace", "trace.json", "--host"], "does not go with --host"),
        (["--trace", "nowhere/trace.json"], "the folder nowhere does not exist"),
        (["--host", "--requests", "2", "--prompt-length", "4000"], "context of 1024"),
        (["--host", "--requests", "4", "--max-num-seqs", "2"], "no step decoded all 4 requests"),
        (["--requests", "0"], "--requests: 0 is not at least 1"),
        (["--max-num-seqs", "0"], "--max-num-seqs: 0 is not at least 1"),
    ],
)
def test_a_benchmark_without_a_result(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", "--model", "tiny", "--device", "cpu", "--new-tokens", "3", *flags])
    with pytest.raises(UserError, match=message):
        bench.main()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_trace_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    flags = ["--requests", "4", "--new-tokens", "60", "--max-num-seqs", "4", "--max-batch-tokens", "64"]
    monkeypatch.setattr(sys, "argv", ["bench", "--model", "tiny", "--trace", str(path), *flags])
    bench.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["traced_steps"] > 30 and 0 < result["traced_kernel_idle_share"] < 1
    assert 0 <= result["traced_idle_share"] <= 1
    assert sum(result["traced_shares"].values()) == pytest.approx(1, abs=1e-3) and result["traced_shares"]["GEMM"] > 0
