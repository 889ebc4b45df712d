"""Worker processes of a measurement: where they run, and how long they still need."""

import os
import random
import sys
import time
from pathlib import Path

import pytest

from scripts.lib.workers import Workers, time_left


def test_the_time_left_is_that_of_the_last_worker(seed: int) -> None:
    assert time_left([5.0, 1.0], [3.0, 4.0], 2) == 8.0  # one worker: 1 + 3 + 4, the other: 5
    assert time_left([], [2.0, 2.0, 2.0], 2) == 4.0
    assert time_left([7.0], [], 4) == 7.0
    jobs = [random.uniform(1, 9) for _ in range(20)]
    assert time_left([], jobs, 1) == pytest.approx(sum(jobs))
    assert max(max(jobs), sum(jobs) / 3) <= time_left([], jobs, 3) <= sum(jobs) / 3 + max(jobs)


def test_processes_are_spread_over_the_gpus(tmp_path: Path) -> None:
    workers = Workers(["3", "5"])
    words = [sys.executable, "-c", "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES']); sys.exit(4)"]
    for name in "abcd":
        workers.start(name, words, tmp_path / name)
    codes: dict[str, int] = {}
    while len(codes) < 4:
        codes |= workers.ended()
    assert codes == dict.fromkeys("abcd", 4)
    assert [(tmp_path / name).read_text().strip() for name in "abcd"] == ["3", "5", "3", "5"]
    workers.start("e", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "e")
    workers.stop()
    assert not workers.running


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"])
@pytest.mark.parametrize(("count", "given", "expected"), [(3, None, "2"), (9, None, "1"), (3, "5", "5")])
def test_processes_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, count: int, given: str | None, expected: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    workers = Workers([], count=count)
    workers.start("a", ["sh", "-c", f"echo ${name}"], tmp_path / "a")
    while not workers.ended():
        time.sleep(0.01)
    assert (tmp_path / "a").read_text().strip() == expected
