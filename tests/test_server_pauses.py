"""What must not hold up the frontend's event loop or an engine's step: heavy preparation and the garbage collector."""

import gc
import math
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from engine import worker
from engine.protocol import Shutdown, encode
from server import frontend, grammar
from server.completions import work_of
from server.frontend import run_frontend
from server.schemas import CompletionBody
from server.settings import Settings
from server.text import LONG_TEXT
from tests.server_thread import MODEL, Site, ready
from tp import World

SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("body", "inline"),
    [
        ({"prompt": "Hi"}, True),
        ({"prompt": [5] * 2000}, True),
        ({"prompt": ["Hi"] * 16, "response_format": {"type": "text"}}, True),
        ({"prompt": "Hi", "allowed_token_ids": [1, 2], "logit_bias": {"3": 1.0}, "stop_token_ids": [4]}, True),
        ({"prompt": "x" * 5000}, False),
        ({"prompt": [5] * 5000}, False),
        ({"prompt": [[5] * 50] * 100}, False),
        ({"prompt": ["Hi"] * 200}, False),
        ({"prompt": "Hi", "response_format": {"type": "json_object"}}, False),
        ({"prompt": "Hi", "response_format": SCHEMA}, False),
        ({"prompt": "Hi", "allowed_token_ids": [1] * 5000}, False),
        ({"prompt": ["Hi"] * 16, "allowed_token_ids": [1] * 300}, False),
        ({"prompt": ["Hi"] * 16, "stop_token_ids": [1] * 300}, False),
        ({"prompt": ["Hi"] * 16, "logit_bias": {str(i): 1.0 for i in range(300)}}, False),
    ],
)
def test_only_light_preparation_stays_on_the_event_loop(body: dict[str, Any], inline: bool) -> None:
    work = work_of(CompletionBody(**body))
    assert (work <= LONG_TEXT) == inline, work
    assert (work == math.inf) == (body.get("response_format", {}).get("type", "text") != "text")


def test_a_schema_that_takes_long_holds_up_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release = threading.Event(), threading.Event()
    compile_schema = grammar.compile_schema

    def slow(schema: dict[str, Any], param: str) -> str:
        begun.set()
        assert release.wait(200)
        return compile_schema(schema, param)

    monkeypatch.setattr(grammar, "compile_schema", slow)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(site.complete(response_format=SCHEMA)))
    asking.start()
    try:
        assert begun.wait(60)
        assert httpx.get(site.url + "/version", timeout=60).status_code == 200
        assert not answers
    finally:
        release.set()
        asking.join(60)
    assert answers[0]["choices"][0]["text"]


class _Ring:
    """Garbage that only the collector finds."""

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
    engine: Any = SimpleNamespace(has_work=lambda: False)
    local: Any = None
    garbage = left_garbage()
    worker.serve(engine, World(0, 1, torch.device("cpu"), local), link, ready(), lambda: True)
    assert garbage() is None and gc.get_freeze_count() > 0


@pytest.mark.usefixtures("thawed")
def test_the_frontend_freezes_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    server = SimpleNamespace(run=lambda: found.append((garbage(), gc.get_freeze_count())), exit_code=0, started=True)
    monkeypatch.setattr(frontend, "make_server", lambda *args: server)
    monkeypatch.setattr(frontend, "os", SimpleNamespace(_exit=lambda code: found.append(code)))
    monkeypatch.setattr(frontend.logs, "configure", lambda *args: None)
    garbage = left_garbage()
    run_frontend(Settings(model=str(MODEL)), "", "")
    (alive, frozen), code = found
    assert alive is None and frozen > 0 and code == 0
