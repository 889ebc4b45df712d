"""How the launcher ends and restarts the frontend, with one that stands for it. The real server: test_chaos.py."""

import contextlib
import errno
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cli import USER_ERROR
from server import process, supervisor
from server.started import FAILED, FRONTEND
from server.supervisor import Supervisor
from tests.support.server_thread import wait_for


class Frontend:
    """It is killed once. Signals reach it while it runs, and end it."""

    def __init__(self, settings: Any, folder: Path) -> None:
        self.addresses = "", ""
        self.killed, self.ended = False, threading.Event()
        self.runs = True
        self.before_start: Callable[[], None] = lambda: None

    def start(self, attach: bool) -> None:
        self.before_start()
        self.runs = True

    def wait(self) -> int:
        if not self.killed:
            self.killed, self.runs = True, False
            return -signal.SIGKILL
        self.ended.wait()
        return 0

    def forward(self) -> None:
        if self.runs:
            self.ended.set()


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Supervisor:
    monkeypatch.setattr(supervisor, "Frontend", Frontend)
    return Supervisor(cast(Any, SimpleNamespace(max_restarts=5)), tmp_path)


def test_a_signal_while_the_frontend_starts_again_is_not_lost(keeper: Supervisor) -> None:
    frontend = cast(Any, keeper)._frontend
    frontend.before_start = lambda: keeper.pass_on(signal.SIGTERM)
    keeper.begin(cast(Any, SimpleNamespace(signal=lambda number: None)))
    wait_for(frontend.ended.is_set)
    assert keeper.end(0) == 0


def test_ranks_end_if_the_frontend_cannot_be_started_again(
    keeper: Supervisor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As if there were no memory left."""

    def fail() -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.01)
    cast(Any, keeper)._frontend.before_start, sent = fail, list[int]()
    keeper.begin(cast(Any, SimpleNamespace(signal=sent.append)))
    wait_for(lambda: signal.SIGTERM in sent)
    assert keeper.end(0) == FAILED and "Cannot allocate memory" in capfd.readouterr().err


def test_ranks_are_killed_although_the_frontend_has_not_started(keeper: Supervisor) -> None:
    sent = list[int]()
    cast(Any, keeper)._frontend.process = multiprocessing.Process()
    cast(Any, keeper)._frontend.ended.set()
    keeper.begin(cast(Any, SimpleNamespace(signal=sent.append)))
    with contextlib.suppress(AttributeError):
        keeper.pass_on(signal.SIGKILL)
    assert signal.SIGKILL in sent
    keeper.end(0)


def test_which_ranks_are_started_again(keeper: Supervisor, capfd: pytest.CaptureFixture[str]) -> None:
    """Those that served once and were not given wrong input, as long as the frontend runs."""

    def again(*codes: int) -> bool:
        return keeper.may_restart([cast(Any, SimpleNamespace(exitcode=code, local_rank=i)) for i, code in enumerate(codes)])

    assert not again(-signal.SIGKILL), "they were never ready"
    keeper._started.touch()
    assert again(-signal.SIGKILL) and again(1, -signal.SIGTERM) and not again(1, USER_ERROR)
    said = capfd.readouterr().err
    assert "rank 0 was killed by SIGKILL" in said and "rank 0 failed" in said
    keeper._code = 0
    assert not again(-signal.SIGKILL)


@pytest.mark.parametrize(("frontend_first", "ranks", "code"), [(True, 1, 0), (True, 0, 0), (False, 3, 3), (False, 0, 0)])
def test_the_code_is_that_of_what_ended_first(
    frontend_first: bool, ranks: int, code: int, keeper: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[Any]()
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "tell", lambda address, message: told.append(message) or frontend.ended.set())
    frontend = cast(Any, keeper)._frontend
    frontend.killed = True
    keeper.begin(cast(Any, SimpleNamespace(signal=lambda number: None)))
    if frontend_first or not ranks:
        frontend.ended.set()
    if frontend_first:
        wait_for(lambda: keeper._code is not None)
    assert keeper.end(ranks) == code and len(told) == (ranks > 0)


def test_processes_have_the_time_of_a_drain_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[Any]()
    monkeypatch.setenv(FRONTEND, "")  # and back
    monkeypatch.setattr(supervisor, "Supervisor", lambda settings, folder: SimpleNamespace(end=lambda code: code))
    monkeypatch.setattr(supervisor, "start_ranks", lambda *given: found.append(given) or 7)
    assert supervisor.run_server(cast(Any, SimpleNamespace(tp=2, drain_timeout=1000.0)), ["--flag"]) == 7
    assert found[0][:3] == (2, ["-m", "server", "--flag"], 1000.0 + supervisor.STOP_SECONDS)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, FAILED), (signal.SIGSEGV, FAILED)])
def test_a_frontend_that_dies_in_a_drain_is_a_failure(
    number: signal.Signals, code: int, keeper: Supervisor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unless SIGTERM ends it, before it handles signals. Else requests are lost, which the message and the exit code say."""
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.01)
    frontend, sent = cast(Any, keeper)._frontend, list[int]()
    frontend.wait = lambda: -number
    keeper.pass_on(signal.SIGTERM)
    keeper.begin(cast(Any, SimpleNamespace(signal=sent.append)))
    wait_for(lambda: signal.SIGTERM in sent)
    assert keeper.end(0) == code
    assert (f"error: the HTTP frontend was killed by {number.name}" in capfd.readouterr().err) == (code == FAILED)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-signal.SIGKILL, "error: the HTTP frontend was killed by SIGKILL\n"),
        (3, "error: the HTTP frontend ended with exit code 3\n"),
    ],
)
def test_the_end_of_a_frontend_is_explained(code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert process.describe_end(code) == FAILED
    assert capsys.readouterr().err == said


class Frozen:
    """A process that never counts, until it is killed."""

    exitcode: int | None = None

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, seconds: float) -> None:
        pass

    def kill(self) -> None:
        self.events.append("killed")
        self.exitcode = -signal.SIGKILL


def test_a_frozen_frontend_is_killed_before_the_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """The note waits while nobody reads stderr."""
    events: list[str] = []
    monkeypatch.setattr(process, "note", lambda text: events.append("note"))
    frontend = SimpleNamespace(
        _settings=SimpleNamespace(hang_seconds=1.0), _beats=SimpleNamespace(value=1), process=Frozen(events)
    )
    assert process.Frontend.wait(cast(Any, frontend)) == -signal.SIGKILL
    assert events == ["killed", "note"]


def test_restarts_count_for_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now))
    restarts = process.Restarts(2)
    assert [restarts.take("x", "it") for _ in range(3)] == [True, True, False]
    now += process.WINDOW + 1
    assert restarts.take("x", "it")
