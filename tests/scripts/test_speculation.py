"""make speculation: runs fill their time; jobs have cores of their own; pairs are kept, and merged into one table."""

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from errors import UserError
from scripts.bench.serving import speculation
from scripts.lib import results, workers
from scripts.lib.rows import write_row
from scripts.lib.statistics import median_error, quartiles
from tests.support.command_line import MODELS

SHOW = "import os, torch; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], torch.get_num_threads())"


def row(**more: Any) -> dict[str, Any]:
    """A row of a pair."""
    given = {"model": "m", "task": "story", "source": "ngram", "clients": 1, "without": 200.0, "with": 300.0, "ratio": 1.5}
    given |= {"quartiles": [1.4, 1.6], "error": 0.03, "repeats": 4, "tokens_per_step": 1.2, "accepted_length": None}
    return given | {"other_answers": 0} | more


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where results go."""
    monkeypatch.setattr(speculation, "ROOT", tmp_path)
    monkeypatch.setattr(speculation, "OUT", tmp_path / "out")
    monkeypatch.setattr(results, "OUT", tmp_path / "out")
    return tmp_path / "out"


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["speculation", *map(str, words)])


def test_quartiles(seed: int) -> None:
    values = [random.random() for _ in range(9)]
    low, high = quartiles(values)
    assert (low, high) == (sorted(values)[2], sorted(values)[6])
    assert quartiles([0.5]) == (0.5, 0.5) and quartiles([1.0, 2.0]) == (1.25, 1.75)
    assert math.isnan(median_error([1.0]))


@pytest.mark.parametrize("count", [3, 4, 5, 9, 25])
def test_the_error_of_a_median_is_right_on_average(count: int) -> None:
    draw = random.Random(count)  # always the same, so that chance fails nothing
    samples = [[draw.gauss(1, 0.1) for _ in range(count)] for _ in range(10_000)]
    errors, medians = map(median_error, samples), map(statistics.median, samples)
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(medians), rel=0.05)


def test_a_load_is_repeated_until_its_time_is_over() -> None:
    args = argparse.Namespace(repeats=3, pair_seconds=None, clients=[1, 16])
    assert [speculation.another(done, 1e9, args) for done in (0, 2, 3)] == [True, True, False]
    args.pair_seconds = 20  # 10 s for each number of clients
    assert speculation.another(2, 100, args), "at least 3 times"
    assert speculation.another(4, 8, args) and not speculation.another(4, 8.1, args), "the fifth ends after 10 s"


def test_each_client_has_a_request_and_long_answers_are_fewer() -> None:
    args = argparse.Namespace(requests=12, long_requests=None)
    assert [speculation.requests_of("story", clients, args) for clients in (1, 16)] == [12, 16]
    args.long_requests = 3
    assert [speculation.requests_of("story", clients, args) for clients in (1, 16)] == [3, 16]
    assert speculation.requests_of("question", 1, args) == 12


def test_processes_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: {0, 2, 3, 5, 7})
    assert workers.core_sets(2, 2) == [{7, 5}, {3, 2}]
    with pytest.raises(UserError, match="3 processes with 2 cores each need 6 cores, and 5 may be used"):
        workers.core_sets(3, 2)
    monkeypatch.undo()
    before = os.sched_getaffinity(0)
    [own] = workers.core_sets(1, 1)
    found = workers.Workers([], [own])
    found.start("a", [sys.executable, "-c", SHOW], tmp_path / "a")
    assert os.sched_getaffinity(0) == before
    with pytest.raises(StopIteration):
        found.start("b", [sys.executable, "-c", SHOW], tmp_path / "b")
    while not (codes := found.ended()):
        time.sleep(0.05)
    assert codes == {"a": 0} and (tmp_path / "a").read_text().split("\n")[0] == f"[{max(before)}] 1 1"
    found.start("b", [sys.executable, "-c", SHOW], tmp_path / "b")  # the cores of a process that has ended
    found.stop()


@pytest.mark.usefixtures("forked_commands")
def test_jobs_measure_and_their_rows_are_kept(
    monkeypatch: pytest.MonkeyPatch, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two real pairs in processes. A second command starts none, and one process alone has the same rows but for times."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["--models", MODELS / "tiny-ladder", "--tasks", "question", "counting", "--clients", 1, 2, "--requests", 2]
    words += ["--repeats", 2, "--new-tokens", 3, "--drafts", "--device", "cpu"]
    command(monkeypatch, *words, "--jobs", 1, "--cores", 1)
    speculation.main()
    shown, made = capsys.readouterr(), json.loads((out / "speculation.json").read_text())
    assert "2/2" in shown.err and (out / "speculation.md").read_text() in shown.out
    assert "Each model and task had 1 core(s) of the machine, and at most 1 ran at once." in shown.out
    assert [(one["task"], one["clients"]) for one in made["rows"]] == [
        (task, clients) for task in ("question", "counting") for clients in (1, 2) for _ in range(2)
    ]
    assert (made["settings"]["jobs"], made["settings"]["cores"], made["settings"]["communicator"]) == (1, 1, "local")
    before = {path: path.stat().st_mtime_ns for path in (out / "speculation").iterdir()}
    assert len(before) == 4  # with their logs
    speculation.main()
    assert before == {path: path.stat().st_mtime_ns for path in (out / "speculation").iterdir()}
    assert json.loads((out / "speculation.json").read_text()) == made
    command(monkeypatch, *words)
    with torch.inference_mode():
        speculation.main()
    alone = json.loads((out / "speculation.json").read_text())["rows"]
    same = ("model", "task", "source", "clients", "repeats", "other_answers")
    assert [[one[key] for key in same] for one in alone] == [[one[key] for key in same] for one in made["rows"]]


class Started:
    """Workers that end at once: they write rows, fail, or do not end. what: by the task."""

    what: dict[str, str] = {}
    begun: list[str] = []
    at_once = 0

    def __init__(self, gpus: Sequence[str], cores: Sequence[frozenset[int]]) -> None:
        self.running: dict[str, tuple[str, Path]] = {}
        self.cores = cores

    def start(self, name: str, words: Sequence[str], log: Path) -> None:
        assert len(self.running) < len(self.cores)
        task = words[len(words) - 1 - words[::-1].index("--tasks") + 1]
        self.running[name] = task, Path(words[-1])
        self.begun.append(task)
        Started.at_once = max(self.at_once, len(self.running))

    def ended(self) -> dict[str, int]:
        done = {name: pair for name, pair in self.running.items() if self.what.get(pair[0]) != "hangs"}
        for name, (task, path) in done.items():
            del self.running[name]
            if task not in self.what:
                write_row(path, {"communicator": "local", "rows": [row(task=task), row(task=task, ratio=0.9, clients=16)]})
        return {name: task in self.what for name, (task, _) in done.items()}

    def stop(self) -> None:
        self.running.clear()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, out: Path) -> type[Started]:
    monkeypatch.setattr(speculation, "Workers", Started)
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: set(range(8)))
    Started.what, Started.begun, Started.at_once = {}, [], 0
    return Started


def test_a_stopped_command_goes_on(monkeypatch: pytest.MonkeyPatch, started: type[Started], out: Path) -> None:
    words = ["--models", MODELS / "tiny-ladder", "--tasks", "copying", "story", "sorting", "request", "--jobs", 3]
    clock = iter(range(10**6))  # of seconds, one at each look
    monkeypatch.setattr(speculation, "time", SimpleNamespace(monotonic=lambda: next(clock) / 10, sleep=lambda _: None))
    started.what = {"copying": "hangs", "sorting": "fails"}
    command(monkeypatch, *words, "--seconds", 2)
    with pytest.raises(UserError, match=r"jobs failed; see tiny-ladder-sorting-\w+.log in "):
        speculation.main()
    assert sorted(started.begun) == ["copying", "request", "sorting", "story"] and started.at_once == 3
    assert set(started.begun[:2]) == {"request", "story"}, "long answers come first"
    started.what, started.begun = {"copying": "hangs"}, []
    with pytest.raises(UserError, match="3 of 4 pairs are measured; the same command goes on"):
        speculation.main()
    assert sorted(started.begun) == ["copying", "sorting"] and not (out / "speculation.md").exists()
    started.what, started.begun = {}, []
    command(monkeypatch, *words, "--seconds", 100)  # which changes no figure
    speculation.main()
    assert started.begun == ["copying"]
    made = json.loads((out / "speculation.json").read_text())
    tasks = [one["task"] for one in made["rows"]]
    assert tasks == [task for task in ("copying", "story", "sorting", "request") for _ in range(2)], (
        "in the order of the command"
    )
    text = (out / "speculation.md").read_text()
    assert "| m | sorting | ngram | 16 | – | 1.20 | 200 | 300 | 0.90 | 1.40 – 1.60 | 4 |" in text
    assert (
        "4 of 8 ratios are below 0.97. A ratio's standard error, from its quartiles, is 2.7% in the median row and at most 3.3%."
        in text
    )
    assert "Each model and task had 2 core(s) of the machine, and at most 3 ran at once." in text


def test_what_changes_a_figure_is_measured_again(monkeypatch: pytest.MonkeyPatch, started: type[Started]) -> None:
    words = ["--models", MODELS / "tiny-ladder", "--tasks", "copying", "--jobs", 2]
    for more in ((), ("--requests", 4), ("--cores", 1), ("--pair-seconds", 9), ("--drafts",)):
        started.begun = []
        command(monkeypatch, *words, *more)
        speculation.main()
        speculation.main()
        assert started.begun == ["copying"], more
    for name, other in (("digest", lambda patterns: "other"), ("machine", lambda: {"cpu": "x", "cores": 3, "torch": "y"})):
        monkeypatch.setattr(speculation, name, other)
        speculation.main()
    assert len(started.begun) == 3


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--jobs", 5), "5 processes with 2 cores each need 10 cores, and 8 may be used"),
        (("--jobs", 1, "--device", "cuda"), "--jobs is for models on a single CPU rank"),
        (("--seconds", 5), "--seconds bounds jobs"),
    ],
)
def test_bad_options(monkeypatch: pytest.MonkeyPatch, started: type[Started], words: tuple[object, ...], error: str) -> None:
    command(monkeypatch, *words)
    with pytest.raises(UserError, match=error):
        speculation.main()


def test_ranks_start_no_jobs_and_do_not_stop_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for words in (("--jobs", 2), ("--pair-seconds", 5)):
        command(monkeypatch, *words)
        with pytest.raises(UserError, match="rank"):
            speculation.parse_args()
