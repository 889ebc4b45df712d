"""The gateway of replicas, with replicas that are generators here. Where Ray is missing, its exceptions are plain ones."""

import asyncio
import importlib.util
import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext, suppress
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

from ray.serve.exceptions import DeploymentUnavailableError

from deploy.gateway import MOST_LOSSES, Gateway, ServerLost
from server.limits import Full, HeldBytes

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
    """A handle whose calls are answered by `replicas`, one after the other, and those to all of them by `each`."""

    def __init__(self, *replicas: Replica, each: Sequence[object] = ()) -> None:
        self.left, self.streams, self.each = list(replicas), list[Stream](), each

    def options(self, **_: object) -> Any:
        return self

    @property
    def forward(self) -> Any:
        return self

    def remote(self, call: Any) -> Stream:
        self.streams.append(Stream(self.left.pop(0)()))
        return self.streams[-1]

    def broadcast(self, *_: object) -> Any:
        return self

    async def results_async(self, return_exceptions: bool) -> Sequence[object]:
        assert return_exceptions
        if not self.each:
            raise DeploymentUnavailableError("none")
        return self.each


def client(replicas: Replicas, timeout: float = 60.0) -> TestClient:
    gateway = Gateway(replicas, timeout, 1, idle_timeout=30.0, max_bodies_mb=4)
    app = Starlette()
    app.add_route("/{path:path}", gateway.__call__, methods=["GET", "POST"])
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


async def rest() -> None:
    """Let all tasks go on until they wait for time to pass."""
    for _ in range(100):
        await asyncio.sleep(0)


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
    assert refused.headers["x-should-retry"] == "false"


def test_what_no_replica_knows_is_not_there() -> None:
    """Another one is asked, until one is asked again."""

    async def unknown() -> AsyncIterator[Any]:
        yield 404, JSON, "name"
        yield b'{"error": {"code": "response_not_found"}}'

    replicas = Replicas(unknown, unknown)
    assert client(replicas).get("/v1/responses/x").status_code == 404 and not replicas.left
    known = client(Replicas(unknown, answer(JSON, b"{}"))).get("/v1/responses/x")
    assert (known.status_code, known.json()) == (200, {})


def test_metrics_of_all_replicas_stand_together() -> None:
    text = '# HELP a counts\n# TYPE a counter\na{path="/v1/{id}"} %d\n# HELP b is\n# TYPE b gauge\nb{x="y"} 2'
    found = client(Replicas(each=[("r1", 200, text % 1), ("r2", 200, text % 3), RuntimeError("it has ended")])).get("/metrics")
    assert found.text.splitlines() == [
        "# HELP a counts", "# TYPE a counter", 'a{replica="r1",path="/v1/{id}"} 1', 'a{replica="r2",path="/v1/{id}"} 3',
        "# HELP b is", "# TYPE b gauge", 'b{replica="r1",x="y"} 2', 'b{replica="r2",x="y"} 2',
    ]  # fmt: skip
    assert client(Replicas(each=[("r1", 503, "{}")])).get("/metrics").status_code == 503


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Timeout]:
    """The time limits that have begun. None ends before the test says so, so that they do not depend on the machine."""
    begun, limit = list[asyncio.Timeout](), asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda seconds: begun.append(limit(None if seconds > 0 else 0)) or begun[-1])
    return begun


def end(limits: list[asyncio.Timeout]) -> None:
    """Let the time of these limits be over, if what they are for has not ended."""
    for limit in limits:
        with suppress(RuntimeError):
            limit.reschedule(0)


def test_the_time_limit_is_for_whole_answers_and_for_the_first_event_of_streams(limits: list[asyncio.Timeout]) -> None:
    def late(headers: dict[str, str], *pieces: bytes) -> Replica:
        async def forward() -> AsyncIterator[Any]:
            yield 200, headers, "name"
            for piece in pieces:
                yield piece
                end(limits)
                await rest()

        return forward

    whole = client(Replicas(late(JSON, b"{", b"}"))).post("/v1/completions", json={})
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "timeout")
    assert whole.headers["x-should-retry"] == "false" and "retry-after" not in whole.headers
    events = [f"data: {json.dumps(i)}\n\n".encode() for i in range(3)]
    stream = client(Replicas(late(EVENTS, *events))).post("/v1/completions", json={})
    assert (stream.status_code, stream.content) == (200, b"".join(events))


class Upload:
    """A request whose body a client sends in parts. Without `end` it never ends, and the client stays."""

    def __init__(self, gateway: Gateway, host: str, parts: Iterable[bytes], pause: float = 0.0, end: bool = False) -> None:
        self.gateway, self.host, self.parts, self.pause, self.end = gateway, host, iter(parts), pause, end

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(self.pause)
        if (part := next(self.parts, None)) is not None:
            return {"type": "http.request", "body": part, "more_body": True}
        if not self.end:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def answer(self, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
        """The status and the error of the answer."""
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "client": (self.host, 1)}
        reply = await self.gateway(Request(scope, self.receive))
        return reply.status_code, json.loads(bytes(reply.body)).get("error")


def state(status: str) -> tuple[str, int, str]:
    """A replica's name, and what its server says of its health."""
    return status, 200 if status == "ready" else 503, json.dumps({"status": status})


@pytest.mark.parametrize("path", ["/health", "/ping", "/health_generate"])
def test_health_is_that_of_the_best_replica(path: str) -> None:
    for replicas, code, expected in (
        ([state("draining"), state("ready"), RuntimeError("it has ended")], 200, "ready"),
        ([state("recovering"), RuntimeError("it has ended")], 503, "recovering"),
        ([RuntimeError("it has ended")], 503, "loading"),
        ([], 503, "loading"),
    ):
        reply = client(Replicas(each=replicas)).get(path)
        assert (reply.status_code, reply.json()) == (code, {"status": expected})


def test_health_does_not_wait_for_completions() -> None:
    """No completion is ever answered, and `Replicas` has no place in a queue for a health check."""

    async def silent() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    gateway = Gateway(Replicas(*[silent] * 500, each=[state("ready")]), 60.0, 1, idle_timeout=30.0, max_bodies_mb=4)

    async def run() -> int:
        flood = [asyncio.create_task(Upload(gateway, "127.0.0.2", [b"{}"], end=True).answer()) for _ in range(500)]
        await asyncio.sleep(0.1)
        status, _ = await asyncio.wait_for(Upload(gateway, "127.0.0.3", [], end=True).answer("/health"), 10)
        for one in flood:
            one.cancel()
        await asyncio.wait(flood)
        return status

    assert asyncio.run(run()) == 200


@pytest.mark.parametrize("trickle", [True, False])
def test_a_body_that_stops_or_arrives_too_slowly_is_refused(trickle: bool) -> None:
    gateway = Gateway(Replicas(), 60.0, 1, idle_timeout=0.3, max_bodies_mb=4)
    parts = itertools.repeat(b" ") if trickle else [b"{"]
    upload = Upload(gateway, "127.0.0.2", parts, pause=0.02)
    status, error = asyncio.run(asyncio.wait_for(upload.answer(), 30))
    assert status == 408 and error["code"] == "timeout" and "arrives too slowly" in error["message"]
    assert gateway.bodies.held == 0


def test_unfinished_bodies_take_no_more_than_their_bound(limits: list[asyncio.Timeout]) -> None:
    """Two clients leave 60 bodies of nearly the largest size unfinished. A third one's short request is answered meanwhile."""
    share, parts = 2 << 20, [bytes((1 << 18) - 1)] * 4
    gateway = Gateway(Replicas(answer(JSON, b"{}")), 60.0, 1, idle_timeout=2.0, max_bodies_mb=8)

    async def run() -> tuple[list[tuple[int, Any]], tuple[int, Any]]:
        tasks.extend(asyncio.create_task(Upload(gateway, f"127.0.0.{2 + i % 2}", parts).answer()) for i in range(60))
        await rest()
        assert 0 < gateway.bodies.held <= 2 * share
        short = await Upload(gateway, "127.0.0.4", [b"{}"], end=True).answer()
        end(limits)
        return await asyncio.gather(*tasks), short

    tasks = list[asyncio.Task[tuple[int, Any]]]()
    refused, short = asyncio.run(run())
    assert short == (200, None)
    counts = Counter((status, error["code"]) for status, error in refused)
    assert counts.keys() == {(503, "bodies_full"), (408, "timeout")}
    assert 2 <= counts[408, "timeout"] <= 4, "each client has room for two bodies"
    assert gateway.bodies.held == 0


def test_bodies_of_all_clients_have_a_bound_and_a_client_has_its_share(seed: int) -> None:
    rng = random.Random(seed)
    most, largest = rng.randrange(40, 100), rng.randrange(1, 30)
    bodies = HeldBytes(most, largest)
    with HeldBytes(most, 2 * most).hold("a") as take:
        take(2 * most)  # one of the largest always fits alone
    held = Counter[str]()
    for _ in range(200):
        with ExitStack() as stack:
            for _ in range(rng.randrange(20)):
                client, size = rng.choice("abcdef"), rng.randrange(1, largest + 1)
                fits = held[client] + size <= max(most // 4, largest) and held.total() + size <= most
                with nullcontext() if fits else pytest.raises(Full):
                    stack.enter_context(bodies.hold(client))(size)
                    held[client] += size
                assert bodies.held == held.total()
        held.clear()
        assert bodies.held == 0 and not bodies._held
    free = rng.randrange(10)
    short = HeldBytes(1000, 0, free)
    with short.hold("a") as take:
        for taken in range(1, 20):
            take(1)
            assert short.held == max(0, taken - free), "the first bytes of a request are free, not those of each piece"


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/completions", "invalid_request_error"), ("/v1/messages", "request_too_large")]
)
def test_errors_have_the_types_of_the_server(path: str, kind: str) -> None:
    refused = client(Replicas()).post(path, content=b" " * (1 << 20) + b"{")
    assert refused.status_code == 413 and refused.json()["error"]["type"] == kind
    assert refused.headers["connection"] == "close"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
def test_an_empty_stream_of_events_is_an_answer(path: str) -> None:
    assert client(Replicas(answer(EVENTS))).post(path, json={}).status_code == 200


def test_a_drain_refuses_new_requests_and_finishes_those_in_flight() -> None:
    async def main() -> None:
        events = [b"data: 1\n\n", b"data: 2\n\n"]
        gateway = Gateway(
            Replicas(answer(JSON, b"{", b"}", seconds=0.5), answer(EVENTS, *events, seconds=0.5)),
            60.0,
            1,
            idle_timeout=30.0,
            max_bodies_mb=4,
        )
        in_flight = [asyncio.create_task(ask(gateway, "POST", "/v1/completions")) for _ in range(2)]
        await rest()
        assert await gateway.drain() == 2
        for path, code in (("/v1/completions", '"draining"'), ("/v1/messages", "overloaded_error"), ("/ping", "draining")):
            status, headers, body = await ask(gateway, "POST", path)
            assert (status, headers["retry-after"]) == (503, "1") and code in body.decode()
        assert await ask(gateway, "GET", "/health") == (503, ANY, b'{"status":"draining"}')
        assert [body for _, _, body in await asyncio.gather(*in_flight)] == [b"{}", b"".join(events)]
        assert await gateway.drain() == 0

    asyncio.run(main())


PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"]


@pytest.mark.parametrize("path", PATHS)
def test_the_end_of_a_drain_ends_requests(path: str) -> None:
    """A stream ends with one error event, in the layout of the path's API."""

    async def main() -> None:
        replicas = Replicas(answer(JSON, b"{", b"}", seconds=60), answer(EVENTS, b"data: 1\n\n", b"data: 2\n\n", seconds=60))
        gateway = Gateway(replicas, 60.0, 1, idle_timeout=30.0, max_bodies_mb=4)
        in_flight = [asyncio.create_task(ask(gateway, "POST", path)) for _ in range(2)]
        await rest()
        assert await gateway.drain() == 2
        await gateway.end()
        (status, _, body), (begun, _, events) = await asyncio.wait_for(asyncio.gather(*in_flight), 30)
        assert status == 503 and b"is shutting down" in body and begun == 200
        assert await gateway.drain() == 0 and replicas.streams[1].cancelled
        assert_last_event(path, events, "draining")

    asyncio.run(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_replica_that_ends_within_an_event_leaves_no_part_of_it(path: str) -> None:
    async def forward() -> AsyncIterator[Any]:
        yield 200, EVENTS, "name"
        for piece in (b"data: 1", b"\n", b"\ndata: ", b"2"):
            yield piece
        raise ServerLost("it was killed")

    assert_last_event(path, client(Replicas(forward)).post(path, json={}).content, "engine_failed")


def test_events_pass_in_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    body = b"".join(b"data: %d\n\n" % rng.randrange(1000) for _ in range(20)) + rng.choice([b"", b"data: 1"])
    cuts = sorted(rng.randrange(len(body)) for _ in range(30))
    pieces = [body[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(body)])]
    assert client(Replicas(answer(EVENTS, *pieces))).post("/v1/completions", json={}).content == body


def assert_last_event(path: str, events: bytes, code: str) -> None:
    """After the event `1`, the stream has one of an error with this code, and `[DONE]` where the API ends streams with it."""
    first, error, *done = events.decode().removesuffix("\n\n").split("\n\n")
    assert first == "data: 1"
    data = json.loads(error[error.index("data: ") :].removeprefix("data: "))
    if path == "/v1/messages":
        assert error.startswith("event: error\n") and not done
        assert data == {"type": "error", "error": {"type": "overloaded_error", "message": ANY}}
    elif path == "/v1/responses":
        assert error.startswith("event: error\n") and not done
        assert data == {"type": "error", "code": code, "message": ANY, "param": None}
    else:
        assert error.startswith("data: ") and done == ["data: [DONE]"]
        assert data == {"error": {"message": ANY, "type": "service_unavailable_error", "param": None, "code": code}}


def test_the_gateway_needs_no_package_of_the_server() -> None:
    """Ray's environment brings starlette, fastapi and pydantic only."""
    missing = ("torch", "numpy", "msgspec", "zmq", "httptools", "prometheus_client", "jinja2", "tokenizers", "llguidance")
    ray = ("ray", "ray.exceptions", "ray.serve", "ray.serve.exceptions")
    fake = f"sys.modules |= dict.fromkeys({missing!r}) | dict.fromkeys({ray!r}, Mock())"
    subprocess.run(
        [sys.executable, "-c", f"import sys; from unittest.mock import Mock; {fake}; import deploy.gateway"], check=True
    )
