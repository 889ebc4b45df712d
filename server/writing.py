"""Write a response in pieces, no faster than the client reads them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.types import Send

PIECE = 65536  # bytes passed to the connection at once; the next ones wait until most of its buffer has been read


class ClientGone(Exception):
    """The client closed its connection, or reads no more, so that no response can be sent."""


class Writer:
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
async def writing(send: Send, timeout: float) -> AsyncGenerator[Writer, None]:
    """A writer for the `async with` block. Raises ClientGone if the client takes longer than `timeout` seconds for a piece."""
    try:
        async with asyncio.timeout(None) as limit:
            writer = Writer(send, timeout, limit)
            try:
                yield writer
            finally:
                writer.timer.cancel()
    except TimeoutError as e:
        raise ClientGone from e
