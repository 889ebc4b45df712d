"""The gateway of replicas, with replicas that are generators here. Where Ray is missing, its exceptions are plain ones."""

import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any

import pytest
from starlette.applications import Starlette
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
