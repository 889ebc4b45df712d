"""Answers on the wire: JSON, server-sent events, and a request that ends when its client has gone."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

_encoder = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client closed its connection; nobody reads an answer."""


def to_json(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:  # a lone surrogate, which a model can write as an escape in JSON
        return json.dumps(value).encode()


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client disconnects; then raises ClientGone."""
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


class EventStream(Response):
    """Server-sent events from a generator of objects, `[DONE]` always last.

    The status waits for the first object, so that a request which fails at once gets a plain error response; an error after
    that becomes an event.
    """

    def __init__(self, events: AsyncGenerator[Any, None], write_timeout: float):
        self.events, self.write_timeout = events, write_timeout
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream")
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # One task runs the generator from start to end: its timeouts belong to the task that entered them.
        await unless_gone(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        from server.problems import ApiError  # the one cycle: an error is also an event

        async with aclosing(self.events):
            try:
                first = await anext(self.events)
            except ApiError as e:
                await e.response()(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._write(event(first), send)
            async for data in _guarded(self.events):
                await self._write(data, send)
            await self._write(DONE, send)
            await send({"type": "http.response.body", "body": b""})

    async def _write(self, data: bytes, send: Send) -> None:
        """Waits while the client's buffers are full: a reader that has stalled for good must not hold its blocks."""
        try:
            async with asyncio.timeout(self.write_timeout):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError as e:
            raise ClientGone from e


async def _guarded(events: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    """The events, and in place of an exception an error event: the status line is already sent."""
    from server.logs import log
    from server.problems import ApiError

    try:
        async for value in events:
            yield event(value)
    except ApiError as e:
        yield event(e.body)
    except Exception:
        log.exception("a stream failed")
        yield event(ApiError(500, "internal error; the server's log has the details").body)
