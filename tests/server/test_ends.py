"""How requests, connections and the frontend itself begin and end: loading, disconnects, draining, failures, signals."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from engine.protocol import Fatal
from server import frontend
from tests import ROOT
from tests.support import quick_start
from tests.support.server_thread import STORY, TOKENIZER, Site, raw_request, wait_for

HI = [{"role": "user", "content": "Hi"}]


def test_loading_then_ready(make_site: Callable[..., Site]) -> None:
    site = make_site(engine=False)
    assert site.http.get("/health").status_code == 503 and site.health() == "loading"
    response = site.http.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503 and response.headers["retry-after"]
    site.engine.start()
    wait_for(lambda: site.health() == "ready")
    assert site.complete()["choices"][0]["text"] == STORY


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_aborts(site: Site, stream: bool) -> None:
    site.engine.delay = 0.05
    before = len(site.engine.aborts)
    with socket.create_connection(("127.0.0.1", site.port)) as raw:
        raw.sendall(raw_request({"prompt": "Hi", "max_tokens": 60, "n": 2, "stream": stream}))
        wait_for(lambda: site.server.client.active == 2)
        if stream:
            assert raw.recv(10)
    wait_for(lambda: len(site.engine.aborts) == before + 2)
    wait_for(lambda: site.server.service.open_requests == 0)


def test_many_connections_opened_and_dropped(site: Site) -> None:
    site.engine.delay = 0.002

    async def one(client: httpx.AsyncClient, i: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02 * (i % 10)):
                await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 30, "stream": i % 2 == 0})

    async def storm() -> None:
        async with httpx.AsyncClient(base_url=site.url, timeout=20) as client:
            await asyncio.gather(*(one(client, i) for i in range(60)))

    asyncio.run(storm())
    wait_for(lambda: site.server.client.active == 0 and site.server.service.open_requests == 0)


def test_idle_connections_are_closed(make_site: Callable[..., Site]) -> None:
    site = make_site(idle_timeout=1.0)
    for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"):
        with socket.create_connection(("127.0.0.1", site.port), timeout=60) as raw, contextlib.suppress(ConnectionError):
            raw.sendall(sent)  # an error if this thread was late and the connection is closed already
            assert raw.recv(10) == b""


def test_drain(make_site: Callable[..., Site]) -> None:
    site = make_site(drain_timeout=100)
    site.engine.hold = True
    asked = site.ask(max_tokens=30)
    wait_for(lambda: site.server.client.active)
    site.server._loop.call_soon_threadsafe(site.server.drain)
    wait_for(lambda: site.http.get("/health").json() == {"status": "draining"})
    assert site.http.post("/v1/completions", json={"prompt": "x"}).json()["error"]["code"] == "draining"
    site.engine.hold = False
    wanted = len(TOKENIZER.encode(STORY, add_special_tokens=False))
    assert asked.json()["usage"]["completion_tokens"] == wanted, "a running request ends as usual"
    site.thread.join(60)
    assert not site.thread.is_alive() and site.server.exit_code == 0
    wait_for(lambda: site.engine.shutdowns == 1)


@pytest.mark.parametrize("end", [lambda site: site.server.drain(), lambda site: site.server._on_fatal("lost")])
def test_what_waits_for_a_worker_is_answered_at_the_end(
    make_site: Callable[..., Site], end: Callable[[Site], None], tmp_path: Path
) -> None:
    site = make_site(drain_timeout=0.2)
    workers = site.server.service.workers
    site.occupy_worker(tmp_path / "go")
    asked = site.ask(metadata="x" * 100_000)  # large bodies are checked by the same worker
    wait_for(lambda: len(workers._callers[id(workers._slow)]) == 2)
    site.server._loop.call_soon_threadsafe(end, site)
    assert (asked.json()["error"]["code"], asked.status) == ("draining", 503)
    site.thread.join(60)
    assert not site.thread.is_alive()


@pytest.mark.parametrize(
    ("path", "body", "kind", "done"),
    [
        ("completions", {"prompt": "Hi"}, '"code":"draining"', True),
        ("chat/completions", {"messages": HI}, '"code":"draining"', True),
        ("messages", {"model": "x", "messages": HI}, "overloaded_error", False),
        ("responses", {"input": "Hi"}, "response.failed", False),
    ],
)
def test_drain_timeout_ends_what_is_left_with_one_error(
    make_site: Callable[..., Site], path: str, body: dict[str, Any], kind: str, done: bool
) -> None:
    site = make_site(drain_timeout=0.2, served_model_name=("x",))
    site.engine.delay, site.engine.reply = 0.1, lambda submit: [300] * 200
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    whole = site.ask(max_tokens=200)
    with site.http.stream("POST", f"/v1/{path}", json={**body, limit: 200, "stream": True}) as answer:
        parts = answer.iter_text()
        text = next(parts)
        wait_for(lambda: site.server.client.active == 2)
        site.server._loop.call_soon_threadsafe(site.server.drain)
        events = (text + "".join(parts)).removesuffix("\n\n").split("\n\n")
    assert (answer.status_code, whole.join().status) == (200, 503)
    assert not done or events.pop() == "data: [DONE]"
    assert kind in events[-1] and not any(kind in event for event in events[:-1])
    site.thread.join(60)
    assert not site.thread.is_alive() and site.server.exit_code == 0


def test_engine_failure_reaches_waiting_clients(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.engine.delay, site.engine.reply = 0.1, lambda submit: [300] * 200  # neither answer ends before `hold` is set
    stream, whole = (site.ask(max_tokens=200, stream=streamed) for streamed in (True, False))
    wait_for(lambda: site.server.client.active == 2)
    assert stream.begun.wait(60)
    site.engine.hold = True
    site.engine.send(Fatal("rank 1 was lost"))
    assert whole.join().status == 503
    lines = stream.join().text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]" and "engine_failed" in lines[-2]
    site.thread.join(60)
    assert not site.thread.is_alive() and site.server.exit_code == 1


def test_signals_within_a_second_count_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when systemd and each process that gets its signal send the frontend one."""
    server, called, now = Site(tmp_path).server, list[Any](), [100.0]
    server._loop = cast(Any, SimpleNamespace(call_soon_threadsafe=called.append))
    monkeypatch.setattr(frontend, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for now[0], calls in ((100.0, 1), (100.0, 1), (100.9, 1), (101.5, 2), (102.0, 2)):
        server.handle_exit(signal.SIGTERM, None)
        assert len(called) == calls
    assert server.exit_code == 128 + signal.SIGTERM


@pytest.mark.parametrize(("signals", "stream", "code"), [(1, False, 0), (2, True, 128 + signal.SIGTERM)])
def test_signals_end_the_process(tmp_path: Path, signals: int, stream: bool, code: int) -> None:
    """The first signal lets requests complete. A second one ends them at once, each with an error that its client can read."""
    site = Site(tmp_path, drain_timeout=100)
    addresses = site.engine.to_engine, site.engine.from_engine
    program = f"from server.frontend import run_frontend, Settings; run_frontend({site.settings}, *{addresses})"
    process = quick_start.Popen([sys.executable, "-c", program], cwd=ROOT)
    site.engine.start()
    wait_for(lambda: site.health() == "ready")
    site.engine.hold, site.engine.delay = not stream, 2.0 * stream
    asked = site.ask(stream=stream)
    wait_for(lambda: asked.begun.is_set() if stream else site.engine.submits)
    site.engine.hold = True  # no answer completes before `hold` is reset
    os.kill(process.pid, signal.SIGTERM)
    wait_for(lambda: site.health() == "draining")
    if signals == 2:
        time.sleep(1.1)  # signals within a second count as one
        os.kill(process.pid, signal.SIGTERM)
    else:
        site.engine.hold = False
    asked.join()
    assert process.wait(120) == code
    assert asked.status == (503 if signals == 2 and not stream else 200)
    if stream:
        *_, last, done = asked.text.strip().split("\n\n")
        assert done == "data: [DONE]" and ('"code":"draining"' in last.replace(" ", "")) == (signals == 2), asked.text
    wait_for(lambda: site.engine.shutdowns == 1)
    site.engine.stop()
