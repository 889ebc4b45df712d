"""What all routes need: JSON bodies, and an end to the work for clients that have disconnected."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive

T = TypeVar("T")

_encoder = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client closed its connection, so that no response can be sent."""


def to_json(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:  # a lone surrogate: a model can generate one as a JSON escape
        return json.dumps(value, default=lambda raw: json.loads(bytes(raw))).encode()  # msgspec.Raw


class JsonResponse(Response):
    """A response of a value, or of bytes that are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else to_json(content)


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
