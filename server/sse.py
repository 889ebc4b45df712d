"""Send a response as server-sent events, or in pieces, no faster than the client reads them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.http import ClientGone, to_json, unless_gone
from server.logs import log
from server.problems import ApiError, internal_error

DONE = b"data: [DONE]\n\n"
PIECE = 65536  # bytes passed to the connection at once; the next ones wait until most of its buffer has been read


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return event(error.body)


class EventStream(Response):
    """A response of server-sent events.

    `events` yields bytes of one event or several. Events that are yielded together are written together, up to PIECE bytes.
    The status is sent with the first event, so that a request that fails at once gets a plain error response. A later error
    becomes an event, which `write_error` encodes. The stream always ends with `end`. Raises ClientGone if the client
    disconnects, or reads too slowly: `write_timeout` is in seconds.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        write_timeout: float,
        write_error: Callable[[ApiError], bytes] = error_event,
        end: bytes = DONE,
    ) -> None:
        self.events, self.write_timeout, self.write_error, self.end = events, write_timeout, write_error, end
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
                await e.response(scope)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # The middleware looks at the start of a response only, so the events bypass it.
            async with _writing(scope["state"]["send"], self.write_timeout) as writer:
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


class PacedResponse(Response):
    """A response of JSON in pieces, which are made while it is sent, no faster than the client reads them.

    Raises ClientGone as an EventStream does.
    """

    def __init__(self, pieces: Iterator[bytes], write_timeout: float) -> None:
        self.pieces, self.write_timeout = pieces, write_timeout
        super().__init__(media_type="application/json")
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with _writing(send, self.write_timeout) as writer:
            for piece in self.pieces:
                await writer.write(piece)
                await asyncio.sleep(0)  # let other requests run: making a piece takes about 1 ms
            await writer.end()


class _Writer:
    """Writes pieces of at most PIECE bytes. A write waits while the client's buffers are full, for at most `timeout` seconds.

    A client that has stopped reading must not keep its KV-cache blocks, so the time of each piece is limited. The total time is
    not, so a slow client may read for any time.

    One timer checks now and then whether a piece takes too long, and ends `limit`, which surrounds all writes. A timeout for each
    piece would cost more than the write.
    """

    def __init__(self, send: Send, timeout: float, limit: asyncio.Timeout) -> None:
        self.send, self.timeout, self.limit = send, timeout, limit
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the current write began
        self.timer = self._loop.call_later(timeout, self._check_time)

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), PIECE):
            self._since = self._loop.time()
            await self.send({"type": "http.response.body", "body": data[at : at + PIECE], "more_body": True})
        self._since = None

    async def end(self) -> None:
        self._since = self._loop.time()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        self._since = None

    def _check_time(self) -> None:
        now = self._loop.time()
        if self._since is not None and now - self._since >= self.timeout:
            self.limit.reschedule(now)
        else:
            self.timer = self._loop.call_at((self._since or now) + self.timeout, self._check_time)


@asynccontextmanager
async def _writing(send: Send, timeout: float) -> AsyncGenerator[_Writer, None]:
    """A writer for the `async with` block. Raises ClientGone if the client takes longer than `timeout` seconds for a piece."""
    try:
        async with asyncio.timeout(None) as limit:
            writer = _Writer(send, timeout, limit)
            try:
                yield writer
            finally:
                writer.timer.cancel()
    except TimeoutError as e:
        raise ClientGone from e


def _error_of(e: Exception) -> ApiError:
    if isinstance(e, ApiError):
        return e
    log.error("a stream failed", exc_info=e)
    return internal_error()
