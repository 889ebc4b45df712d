"""Send a response as server-sent events, or in pieces, no faster than the client reads them."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError, internal_error
from server.http import send_pieces, to_json, unless_gone, writing
from server.logs import log

DONE = b"data: [DONE]\n\n"


Event = tuple[str, dict[str, Any]]  # its type, and its other fields


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def named_event(event: Event) -> bytes:
    """An event whose name is the `type` of its data."""
    kind, fields = event
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
        self,
        events: AsyncGenerator[bytes, None],
        write_error: Callable[[ApiError], bytes] = error_event,
        end: bytes = DONE,
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
                await e.response(scope)(scope, receive, send)
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


class PacedResponse(Response):
    """A response of JSON in pieces, which are made while it is sent. See `send_pieces`."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces = pieces
        super().__init__(media_type="application/json")
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, send_pieces(self, scope, send, self.pieces))


def _error_of(e: Exception) -> ApiError:
    if isinstance(e, ApiError):
        return e
    log.error("a stream failed", exc_info=e)
    return internal_error()
