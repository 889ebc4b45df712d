"""The garbage collector must not delay the frontend's event loop or an engine's step."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import worker
from engine.pace import Pace
from engine.protocol import Shutdown, encode
from server import frontend
from server.frontend import run_frontend
from server.settings import Settings
from tests.support.server_thread import MODEL, ready
from tp import World


class _Ring:
    """A reference cycle, which only the garbage collector frees."""

    def __init__(self) -> None:
        self.me = self


def left_garbage() -> weakref.ref[_Ring]:
    gc.disable()
    return weakref.ref(_Ring())


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_the_worker_freezes_no_garbage() -> None:
    link: Any = SimpleNamespace(receive=lambda timeout: [encode(Shutdown())], send=lambda message: None, close=lambda: None)
    grammars = SimpleNamespace(warm_up=lambda: None)
    engine: Any = SimpleNamespace(
        has_work=lambda: False, preparing=False, refused=[], grammars=grammars, adapters=None, pace=Pace()
    )
    local: Any = None
    garbage = left_garbage()
    worker.serve(engine, World(0, 1, torch.device("cpu"), local), link, ready(), lambda: True)
    assert garbage() is None and gc.get_freeze_count() > 0


@pytest.mark.usefixtures("thawed")
def test_events_are_received_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def receive(timeout: float) -> list[bytes]:
        done.append("receive")
        return [] if done.count("receive") == 1 else [encode(Shutdown())]  # the first call looks for an early one

    link: Any = SimpleNamespace(receive=receive, send=lambda message: None)
    engine: Any = SimpleNamespace(
        has_work=lambda: True,
        preparing=False,
        grammars=SimpleNamespace(warm_up=lambda: None),
        adapters=None,
        pace=SimpleNamespace(pause=lambda: 0.004),
    )
    local: Any = None
    monkeypatch.setattr(worker.time, "sleep", done.append)
    worker.serve(engine, World(0, 1, torch.device("cpu"), local), link, ready(), lambda: True)
    assert done == ["receive", 0.004, "receive"]


@pytest.mark.usefixtures("thawed")
def test_the_frontend_freezes_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    async def serve() -> None:
        found.append((garbage(), gc.get_freeze_count()))

    class Left(Exception):
        """Raised where the process would exit."""

    def leave(code: int) -> None:
        found.append(code)
        raise Left

    config = SimpleNamespace(get_loop_factory=lambda: asyncio.new_event_loop)
    server = SimpleNamespace(serve=serve, config=config, exit_code=0, started=True)
    monkeypatch.setattr(frontend, "make_server", lambda *args: server)
    monkeypatch.setattr(frontend, "os", SimpleNamespace(_exit=leave))
    monkeypatch.setattr(frontend.logs, "configure", lambda *args: None)
    garbage = left_garbage()
    with pytest.raises(Left):
        run_frontend(Settings(model=str(MODEL)), "", "")
    (alive, frozen), code = found
    assert alive is None and frozen > 0 and code == 0
