"""The gateway of replicas, with replicas that are generators here. Where Ray is missing, its exceptions are plain ones."""

import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any
from unittest.mock import ANY

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.testclient import TestClient

if not importlib.util.find_spec("ray"):
    for name, exceptions in {
        "ray": (),
        "ray.exceptions": ("RayError",),
        "ray.serve": (),
        "ray.serve.exceptions": ("BackPressureError", "DeploymentUnavailableError", "RayServeException"),
    }.items():
        sys.modules[name] = ModuleType(name)
        for each in exceptions:
            setattr(sys.modules[name], each, type(each, (Exception,), {}))

from deploy.gateway import MOST_LOSSES, Gateway

JSON, EVENTS = {"content-type": "application/json"}, {"content-type": "text/event-stream"}
Replica = Callable[[], AsyncIterator[Any]]


class Stream:
    """What Ray's handle returns for a generator: it ends the generator when it is cancelled."""

    def __init__(self, pieces: AsyncIterator[Any]) -> None:
        self._pieces, self.cancelled = pieces, False

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        return await anext(self._pieces)

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """A handle whose calls are answered by `replicas`, one after the other."""

    def __init__(self, *replicas: Replica) -> None:
        self.left, self.streams = list(replicas), list[Stream]()

    def options(self, **_: object) -> Any:
        return self

    @property
    def forward(self) -> Any:
        return self

    def remote(self, call: Any) -> Stream:
        self.streams.append(Stream(self.left.pop(0)()))
        return self.streams[-1]


def client(replicas: Replicas, timeout: float = 60.0) -> TestClient:
    gateway = Gateway(replicas, timeout, 1)
    app = Starlette()
    app.add_route("/{path:path}", gateway.__call__, methods=["POST"])
    return TestClient(app)


async def nothing() -> AsyncIterator[Any]:
    return
    yield


def answer(headers: dict[str, str], *pieces: bytes, seconds: float = 0.0) -> Replica:
    """A replica that waits `seconds` before each piece but the first."""

    async def forward() -> AsyncIterator[Any]:
        yield 200, headers, "name"
        for number, piece in enumerate(pieces):
            await asyncio.sleep(seconds if number else 0)
            yield piece

    return forward


async def ask(gateway: Gateway, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer. The response is sent in the task of the request, as in Ray."""
    messages: list[Any] = []
    received = [{"type": "http.request"}]

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Future()  # the client stays

    async def send(message: Any) -> None:
        messages.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": [], "client": None, "server": None}
    response = await gateway(Request(scope, receive))
    await response(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    return messages[0]["status"], headers, b"".join(one["body"] for one in messages[1:])


def test_a_replica_that_ends_without_a_word_is_replaced_by_another_one() -> None:
    replicas = Replicas(nothing, nothing, answer(JSON, b'{"a":', b" 1}"))
    assert client(replicas).post("/v1/completions", json={}).json() == {"a": 1}
    assert [one.cancelled for one in replicas.streams] == [True, True, False]

    refused = client(Replicas(*[nothing] * MOST_LOSSES)).post("/v1/completions", json={})
    assert refused.status_code == 500 and refused.json()["error"]["code"] == "poisoned"


def test_the_time_limit_is_for_whole_answers_and_for_the_first_event_of_streams() -> None:
    late = client(Replicas(answer(JSON, b"{", b"}", seconds=30)), timeout=0.5).post("/v1/completions", json={})
    assert (late.status_code, late.json()["error"]["code"]) == (503, "timeout")
    events = [f"data: {json.dumps(i)}\n\n".encode() for i in range(3)]
    stream = client(Replicas(answer(EVENTS, *events, seconds=0.4)), timeout=0.5).post("/v1/completions", json={})
    assert (stream.status_code, stream.content) == (200, b"".join(events))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
def test_an_empty_stream_of_events_is_an_answer(path: str) -> None:
    assert client(Replicas(answer(EVENTS))).post(path, json={}).status_code == 200


def test_a_drain_refuses_new_requests_and_finishes_those_in_flight() -> None:
    async def main() -> None:
        events = [b"data: 1\n\n", b"data: 2\n\n"]
        gateway = Gateway(Replicas(answer(JSON, b"{", b"}", seconds=0.5), answer(EVENTS, *events, seconds=0.5)), 60, 1)
        in_flight = [asyncio.create_task(ask(gateway, "POST", "/v1/completions")) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert await gateway.drain() == 2
        for path, code in (("/v1/completions", '"draining"'), ("/v1/messages", "server_error"), ("/ping", "draining")):
            status, headers, body = await ask(gateway, "POST", path)
            assert (status, headers["retry-after"]) == (503, "1") and code in body.decode()
        assert await ask(gateway, "GET", "/health") == (503, ANY, b'{"status":"draining"}')
        assert [body for _, _, body in await asyncio.gather(*in_flight)] == [b"{}", b"".join(events)]
        assert await gateway.drain() == 0

    asyncio.run(main())


def test_the_end_of_a_drain_ends_requests() -> None:
    async def main() -> None:
        gateway = Gateway(Replicas(answer(JSON, b"{", b"}", seconds=60)), 60, 1)
        in_flight = asyncio.create_task(ask(gateway, "POST", "/v1/completions"))
        await asyncio.sleep(0.1)
        assert await gateway.drain() == 1
        await gateway.end()
        status, _, body = await in_flight
        assert status == 503 and json.loads(body)["error"]["code"] == "draining"

    asyncio.run(main())
