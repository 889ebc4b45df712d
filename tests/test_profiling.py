"""The idle share of a trace, and the flag of engine.bench that records one."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.bench as bench
from errors import UserError
from profiling import Event, kernel_idle_share


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
        found = bench.traced_idle_shares(path, idle, steps)
        inner = slice(bench.TRACED.start + 3, min(count, bench.TRACED.stop) - 1)
        assert found == {
            "traced_steps": min(count, bench.TRACED.stop) - bench.TRACED.start,
            "traced_kernel_idle_share": 0.3,
            "traced_idle_share": pytest.approx(sum(waits[inner]) / sum(steps[inner]), abs=1e-4),
        }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "needs a GPU"),
        (["--host"], "does not go with --host"),
        (["--trace", "nowhere/trace.json"], "the folder nowhere does not exist"),
    ],
)
def test_a_trace_that_cannot_be_recorded(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    argv = ["bench", "--model", "tiny", "--device", "cpu", "--trace", str(tmp_path / "trace.json"), *flags]
    monkeypatch.setattr(sys, "argv", argv)
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
