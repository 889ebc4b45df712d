"""What all routes need: JSON bodies, and an end to the work for clients that have disconnected."""

import asyncio
import json
from collections.abc import Coroutine, Iterable
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
                await unless_gone(receive, send_pieces(self, scope, send, [bytes(self.body)]))


async def send_pieces(response: Response, scope: Scope, send: Send, pieces: Iterable[bytes]) -> None:
    """Send `pieces` as the body, no faster than the client reads them. Raises ClientGone if it stops reading."""
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    async with writing(send, scope["state"]["write_timeout"]) as writer:
        for piece in pieces:
            await writer.write(piece)
            await asyncio.sleep(0)  # let other requests run: making a piece takes about 1 ms
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
