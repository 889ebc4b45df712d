"""The drain of all gateways, with signals that this process sends itself."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from deploy import drain as module
from deploy.drain import Signals, drain


class Gateways:
    """Gateways with `counts` requests, one look after the other; the last number stays."""

    def __init__(self, *counts: int) -> None:
        self.counts, self.looks, self.ended = list(counts), 0, False

    def drain(self) -> int:
        self.looks += 1
        return self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Signals]:
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(module, "TICK", 0.01)
    signals = Signals()
    yield signals
    signals.restore()


def test_a_drain_ends_with_the_last_request_or_its_time(signals: Signals, capsys: pytest.CaptureFixture[str]) -> None:
    gateways = Gateways(8, 8, 3, 0)
    assert drain(gateways, 60, signals) == 0 and gateways.looks == 4 and not gateways.ended
    assert capsys.readouterr().err == "draining: 8 requests have up to 60 s; a second signal ends at once\n"
    gateways = Gateways(2)
    assert drain(gateways, 0.1, signals) == 0 and gateways.ended
    assert "the drain timeout is over; ending 2 requests" in capsys.readouterr().err


def test_a_second_signal_ends_requests_at_once(
    signals: Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But one that follows the first within a second has the same cause."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.wait(10) == signal.SIGINT and not signals.wait(0.1)
    monkeypatch.setattr(module, "ONE_CAUSE", 0.0)
    gateways = Gateways(2)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    begin = time.monotonic()
    assert drain(gateways, 600, signals) == 128 + signal.SIGTERM and gateways.ended
    assert time.monotonic() - begin < 60 and "a second signal came; ending 2 requests" in capsys.readouterr().err
