"""How the launcher ends and restarts the frontend, with one that stands for it. The real server: test_chaos.py."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server import supervisor
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


def test_a_signal_while_the_frontend_starts_again_is_not_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(supervisor, "Frontend", Frontend)
    keeper = Supervisor(cast(Any, SimpleNamespace(max_restarts=5)), tmp_path)
    frontend, sent = cast(Any, keeper)._frontend, list[int]()
    frontend.before_start = lambda: keeper.pass_on(signal.SIGTERM)
    keeper.begin(cast(Any, SimpleNamespace(signal=sent.append)))
    wait_for(frontend.ended.is_set)
    assert keeper.end(0) == 0
