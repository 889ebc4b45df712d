"""Write a response in pieces, no faster than the client reads them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.types import Send

PIECE = 65536  # bytes passed to the connection at once; the next ones wait until most of its buffer has been read
CHECKS = 4  # in the time that a piece may wait


class ClientGone(Exception):
    """The client closed its connection, or reads no more, so that no response can be sent."""


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
