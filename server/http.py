"""What all routes need: JSON bodies, written no faster than the client reads them, and an end to the work of one that has disconnected."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ClientGone

T = TypeVar("T")

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


class Writer:
    """Writes pieces of at most PIECE bytes. A write waits while the client's buffers are full, for about `timeout` seconds at most.

    A client that has stopped reading must not keep its KV-cache blocks, so the time of each piece is limited. The total time is
    not, so a slow client may read for any time.

    One timer checks CHECKS times in `timeout` seconds whether the same piece still waits, and then ends `limit`, which surrounds
    all writes. A timeout for each piece would cost more than the write. Checks are counted, not seconds, because a busy event loop
    sends nothing: its delay must not count against the client.
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
