"""The gateway of `deploy.ray_serve`: takes clients' requests, has replicas answer them, and asks again where that saves one."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deploy.routing import Call, prefix_keys
from server.errors import CLIENT_GONE, CLOSE, NO_RETRY, ApiError, ClientGone, is_messages, messages_error_type, with_retry
from server.limits import Full, HeldBytes, read_body, sender
from server.logs import HEALTH_PATHS

MOST_LOSSES = 5  # replicas that may end with a request before it counts as the reason
ELSEWHERE = {"loading", "draining", "engine_failed"}  # codes of a 503 that another replica may not have
UNKNOWN = {"response_not_found", "previous_response_not_found", "result_not_found"}  # codes of a 404: another may know it
HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host", "content-length"}
SHUTTING_DOWN = "the server is shutting down; send the request to another one"
EVENT_END = b"\n\n"


class ServerLost(Exception):
    """The connection to a replica's server broke."""


@dataclass
class Reply:
    """An answer of which at least the first piece is here: all of it if `rest` is None."""

    status: int
    headers: dict[str, str]
    replica: str
    body: bytes
    rest: Any = None

    @property
    def code(self) -> str:
        """The code of an error, for those that another replica might not have."""
        try:
            return str(json.loads(self.body)["error"]["code"]) if self.status in (404, 503) else ""
        except (ValueError, TypeError, KeyError):
            return ""


class Gateway:
    """Takes the HTTP requests of clients."""

    def __init__(
        self, replicas: Any, request_timeout: float, max_body_mb: int, idle_timeout: float, max_bodies_mb: int
    ) -> None:
        """request_timeout: see `ray_serve.Options`. idle_timeout: seconds that a body may stop arriving. max_bodies_mb: MiB of all
        bodies at once."""
        self._replicas, self._timeout, self._idle = replicas, request_timeout, idle_timeout
        self._most = max_body_mb << 20
        self.bodies = HeldBytes(max_bodies_mb << 20, self._most)
        self._forward = replicas.options(stream=True, method_name="forward")
        self._draining = self._ending = False
        self._open: dict[asyncio.Task[Any], Callable[[], object]] = {}  # tasks of requests in flight, and what ends each

    async def __call__(self, request: Request) -> Response:
        path, client = request.url.path, sender({"state": {}, "client": request.client}).name
        if self._draining and (request.method != "GET" or path in HEALTH_PATHS):
            return refusal(path)
        self._note_request()
        with self.bodies.hold(client) as take:
            try:
                length = request.headers.get("content-length", "")
                body = await read_body(request.receive, length, self._most, self._idle, take)
            except ApiError as e:
                return failure(path, 408 if e.code == "timeout" else e.status_code, e.message, e.code or "", CLOSE)
            except Full as e:
                return failure(path, 503, str(e), "bodies_full", CLOSE)
            except ClientGone:
                return Response(status_code=CLIENT_GONE)
            return await self._within_time(path, call_of(request, body))

    async def _within_time(self, path: str, call: Call) -> Response:
        try:
            async with asyncio.timeout(self._timeout):
                if path in HEALTH_PATHS:
                    return await self._health(path, call)
                return await (self._metrics(call) if path == "/metrics" else self._answer(path, call))
        except asyncio.CancelledError:
            if not self._ending:  # the client has left
                raise
            return refusal(path)
        except TimeoutError:
            return failure(path, 503, "no replica answered in time", "timeout", NO_RETRY)
        except BackPressureError:
            return failure(path, 429, "too many requests wait; try again soon", "queue_full")
        except DeploymentUnavailableError:
            return failure(path, 503, "no replica could be started; Ray's log says why", "engine_failed")

    def _note_request(self) -> None:
        """Count the current task, in which Ray also sends the response, as a request in flight."""
        if task := asyncio.current_task():
            self._open[task] = task.cancel
            task.add_done_callback(lambda task: self._open.pop(task, None))

    async def drain(self) -> int:
        """Refuse new requests from now on. Returns how many are in flight."""
        self._draining = True
        return len(self._open)

    async def end(self) -> None:
        """End the requests in flight: with a 503, or with an error event if their stream has begun."""
        self._ending = True
        for end in self._open.values():
            end()

    async def _answer(self, path: str, call: Call) -> Response:
        """Ask replicas until one answers, or MOST_LOSSES of them ended."""
        losses = 0
        while True:
            try:
                reply = await self._ask(call)
            except (BackPressureError, DeploymentUnavailableError):
                raise
            except (RayError, RayServeException, ServerLost):
                losses += 1
                if losses == MOST_LOSSES:
                    message = f"{losses} replicas ended while they computed this request"
                    return failure(path, 500, message, "poisoned", NO_RETRY)
                await asyncio.sleep(0.1 * losses)
                continue
            again = reply.code in UNKNOWN and reply.replica not in call.avoid
            if not again and reply.code not in ELSEWHERE:
                return self._relayed(path, reply)
            call = replace(call, avoid=call.avoid | {reply.replica})
            if reply.code in ELSEWHERE:
                await asyncio.sleep(0.2)

    def _relayed(self, path: str, reply: Reply) -> Response:
        if reply.rest is None:
            return Response(reply.body, reply.status, reply.headers)
        stream = Stream(path, reply)
        if task := asyncio.current_task():
            self._open[task] = stream.end
        return stream

    async def _ask(self, call: Call) -> Reply:
        """An answer with its first event, or all of it if it is no stream: until then another replica can be asked."""
        stream = self._forward.remote(call)
        try:
            if (head := await anext(stream, None)) is None:
                raise ServerLost("the replica ended without an answer")
            status, headers, name = head
            if headers.get("content-type", "").startswith("text/event-stream"):
                return Reply(status, headers, name, await anext(stream, b""), stream)
            return Reply(status, headers, name, b"".join([piece async for piece in stream]))
        except BaseException:
            stream.cancel()
            raise

    async def _of_all(self, path: str, call: Call) -> list[tuple[str, int, str]]:
        """The name, status and text of each replica's answer to a GET. Does not wait in a queue."""
        answers = await self._replicas.broadcast("get", path, call.headers).results_async(return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, Exception)]  # those have just ended

    async def _health(self, path: str, call: Call) -> Response:
        """That of a replica that is ready, or else of one that is not."""
        try:
            answers = await self._of_all(path, call)
        except DeploymentUnavailableError:
            answers = []
        loading = "", 503, json.dumps({"status": "loading"})  # no replica has started yet
        name, status, text = min(answers, key=lambda answer: answer[1], default=loading)
        return Response(text, status, {"x-rung-replica": name} if name else None, "application/json")

    async def _metrics(self, call: Call) -> Response:
        """All replicas' metrics, with the label `replica`. Samples of one name stand together, as the format wants them."""
        families: dict[str, dict[str, None]] = {}
        for name, status, text in await self._of_all("/metrics", call):
            if status != 200:
                return Response(text, status, media_type="application/json")
            family: dict[str, None] = {}
            for line in text.splitlines():
                if line.startswith("# HELP"):
                    family = families.setdefault(line.split()[2], {})
                family[line if line.startswith("#") else line.replace("{", f'{{replica="{name}",', 1)] = None
        lines = [line for family in families.values() for line in family]
        return Response("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4; charset=utf-8")


class Stream(StreamingResponse):
    """The rest of a stream. Ends the request if the client leaves, and with an error event if the replica or the gateway ends."""

    def __init__(self, path: str, reply: Reply) -> None:
        self._path, self._reply = path, reply
        self._reading: asyncio.Future[bytes | None] | None = None
        self._ended = False
        super().__init__(self._pieces(), reply.status, reply.headers)

    def end(self) -> None:
        """Let an error event be the next one, and the last."""
        self._ended = True
        if self._reading:
            self._reading.cancel()

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Whole events: an error event must not follow a part of one."""
        held, unsearched = bytearray(self._reply.body), 0
        try:
            while True:
                if (at := held.rfind(EVENT_END, unsearched)) >= 0:
                    yield bytes(held[: at + len(EVENT_END)])
                    del held[: at + len(EVENT_END)]
                if self._ended:
                    break
                self._reading = asyncio.ensure_future(anext(self._reply.rest, None))  # a task that `end` can cancel
                if (piece := await self._reading) is None:
                    yield bytes(held)
                    return
                unsearched = max(0, len(held) - 1)  # the end of an event may come in two pieces
                held += piece
        except asyncio.CancelledError:
            if not self._ended:  # the client has left
                raise
        except (RayError, RayServeException, ServerLost):
            yield error_event(self._path, "the replica ended; send the request again", "engine_failed")
            return
        yield error_event(self._path, SHUTTING_DOWN, "draining")

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self._reply.rest.cancel()


def error_event(path: str, message: str, code: str) -> bytes:
    """The last event of a stream that cannot go on, in the layout of the path's API."""
    if path.startswith("/v1/responses"):
        data = json.dumps({"type": "error", "code": code, "message": message, "param": None}).encode()
    else:
        data = bytes(failure(path, 503, message, code).body)
    named = path.startswith(("/v1/responses", "/v1/messages"))
    return b"event: error\ndata: " + data + b"\n\n" if named else b"data: " + data + b"\n\ndata: [DONE]\n\n"


def kept(headers: Iterable[tuple[str, str]], but: Set[str] = frozenset()) -> dict[str, str]:
    return {name.lower(): value for name, value in headers if name.lower() not in HOP | but}


def call_of(request: Request, body: bytes) -> Call:
    headers = kept(request.headers.items())
    if request.client:  # whom the server's log names, and among whom it is fair
        headers["x-forwarded-for"] = ", ".join(filter(None, (headers.get("x-forwarded-for"), request.client.host)))
    query = f"?{request.url.query}" if request.url.query else ""
    target = quote(request.url.path, safe="/:@!$&'()*+,;=~") + query
    return Call(request.method, target, list(headers.items()), body, prefix_keys(body))


def refusal(path: str) -> Response:
    """The answer of a server that drains."""
    response = (
        JSONResponse({"status": "draining"}, 503) if path in HEALTH_PATHS else failure(path, 503, SHUTTING_DOWN, "draining")
    )
    response.headers["retry-after"] = "1"
    return response


def failure(path: str, status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error in the layout of the path's API, with the types and the Retry-After of the server's own errors."""
    headers = with_retry(status, headers)
    if is_messages(path):
        return JSONResponse(
            {"type": "error", "error": {"type": messages_error_type(status), "message": message}}, status, headers
        )
    return JSONResponse(ApiError(status, message, None, code).body, status, headers)
