"""What all routes need: responses of JSON and of server-sent events, written no faster than the client reads them, and an end
to the work of one that has disconnected."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError, ClientGone, internal_error, is_messages, messages_error_body, with_retry
from server.logs import log

T = TypeVar("T")
Event = tuple[str, dict[str, Any]]  # of a stream: its type, and its other fields

DONE = b"data: [DONE]\n\n"
PIECE = 65536  # bytes passed to the connection at once; the next ones wait until most of its buffer has been read
CHECKS = 4  # in the time that a piece may wait

_encoder = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:  # a lone surrogate: a model can generate one as a JSON escape
        return json.dumps(value, default=lambda raw: json.loads(bytes(raw))).encode()  # msgspec.Raw


class JsonResponse(Response):
    """A response of a value, or of bytes that are JSON already. A long one is written in pieces.

    Raises ClientGone if the client leaves or stops reading.
    """

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else to_json(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= PIECE:
            await super().__call__(scope, receive, send)
        else:
            with scope["state"]["backlog"]() as count:
                count(len(self.body))
                await unless_gone(receive, send_pieces(self, scope, send, [bytes(self.body)]))


def error_response(error: ApiError, scope: Scope) -> JsonResponse:
    """The response to the request of `scope`, in the format of its path."""
    headers = with_retry(error.status_code, error.headers)
    if error.status_code == 401:
        headers["www-authenticate"] = "Bearer"
    body = error.body
    if is_messages(scope["path"]):
        body = messages_error_body(error.status_code, error.message, scope["state"]["request_id"])
    return JsonResponse(body, error.status_code, headers)


class Writer:
    """Writes pieces of at most PIECE bytes. A write waits while the client's buffers are full, for about `timeout` seconds at
    most.

    A client that has stopped reading must not keep its KV-cache blocks, so the time of each piece is limited. The total time is
    not, so a slow client may read for any time.

    One timer checks CHECKS times in `timeout` seconds whether the same piece still waits, and then ends `limit`, which
    surrounds all writes. A timeout for each piece would cost more than the write. Checks are counted, not seconds, because a
    busy event loop sends nothing: its delay must not count against the client.
    """

    def __init__(self, send: Send, timeout: float, limit: asyncio.Timeout) -> None:
        self.send, self.limit = send, limit
        self._loop, self._interval = asyncio.get_running_loop(), timeout / CHECKS
        self._waits: int | None = None  # checks that found the current piece unsent
        self.timer = self._loop.call_later(self._interval, self._check)

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), PIECE):
            self._waits = 0
            await self.send({"type": "http.response.body", "body": data[at : at + PIECE], "more_body": True})
        self._waits = None

    async def end(self) -> None:
        self._waits = 0
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        self._waits = None

    def _check(self) -> None:
        if self._waits is not None:
            self._waits += 1
            if self._waits > CHECKS:  # the first check may come at once
                self.limit.reschedule(self._loop.time())
                return
        self.timer = self._loop.call_later(self._interval, self._check)


@asynccontextmanager
async def writing(send: Send, timeout: float) -> AsyncGenerator[Writer, None]:
    """A writer for the `async with` block. Raises ClientGone if the client leaves a piece unread for `timeout` seconds."""
    try:
        async with asyncio.timeout(None) as limit:
            writer = Writer(send, timeout, limit)
            try:
                yield writer
            finally:
                writer.timer.cancel()
    except TimeoutError as e:
        raise ClientGone from e


async def send_pieces(response: Response, scope: Scope, send: Send, pieces: Iterable[bytes]) -> None:
    """Send `pieces` as the body, no faster than the client reads them. Raises ClientGone if it stops reading."""
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    async with writing(send, scope["state"]["write_timeout"]) as writer:
        for piece in pieces:
            await writer.write(piece)
            await asyncio.sleep(0)  # let other requests run: making a piece takes about 1 ms
        await writer.end()


class PacedResponse(Response):
    """A response in pieces, which are made while it is sent. See `send_pieces`."""

    def __init__(self, pieces: Iterator[bytes], media_type: str = "application/json") -> None:
        self.pieces = pieces
        super().__init__(media_type=media_type)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, send_pieces(self, scope, send, self.pieces))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Wait for the result of `work`. If the client disconnects first, cancel `work` and raise ClientGone."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --- server-sent events ----------------------------------------------------------------------------------------------


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def named_event(kind: str, fields: dict[str, Any]) -> bytes:
    """An event whose name is the `type` of its data."""
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **fields}) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return event(error.body)


class EventStream(Response):
    """A response of server-sent events.

    `events` yields bytes of one event or several. Events that are yielded together are written together, up to PIECE bytes.
    The status is sent with the first event, so that a request that fails at once gets a plain error response. A later error
    becomes an event, which `write_error` encodes. The stream always ends with `end`. Raises ClientGone if the client
    disconnects, or reads too slowly.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], write_error: Callable[[ApiError], bytes] = error_event, end: bytes = DONE
    ) -> None:
        self.events, self.write_error, self.end = events, write_error, end
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream")
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # One task runs the generator from start to end: its timeouts belong to the task that entered them.
        await unless_gone(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.events):
            try:
                first = await anext(self.events)
            except ApiError as e:
                await error_response(e, scope)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # The middleware looks at the start of a response only, so the events bypass it.
            async with writing(scope["state"]["send"], scope["state"]["write_timeout"]) as writer:
                await writer.write(first)
                while True:
                    try:
                        data = await anext(self.events)
                    except StopAsyncIteration:
                        break
                    except Exception as e:  # the status line is already sent
                        data = self.write_error(_error_of(e))
                    await writer.write(data)
                await writer.write(self.end)
                await writer.end()


def _error_of(e: Exception) -> ApiError:
    if isinstance(e, ApiError):
        return e
    log.error("a stream failed", exc_info=e)
    return internal_error()
