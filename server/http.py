"""What all routes need: JSON bodies, and an end to the work for clients that have disconnected."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.writing import PIECE, ClientGone, writing

T = TypeVar("T")

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
                await unless_gone(receive, self._write(send, scope["state"]["write_timeout"]))

    async def _write(self, send: Send, timeout: float) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with writing(send, timeout) as writer:
            await writer.write(bytes(self.body))
            await writer.end()


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
