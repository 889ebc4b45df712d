"""An HTTP client for many concurrent streams with a low cost per event. Connections are reused, and no task wakes up before an
answer ends.

httpx takes about 100 us of one core for each server-sent event. A load generator that reads 16,000 events a second would then
measure itself. Here the event loop passes the bytes of a socket to the C parser of httptools, which calls the caller's `Sink`.
"""

import asyncio
import ssl
import time
from contextlib import suppress
from typing import Protocol, cast
from urllib.parse import SplitResult, urlsplit

import httptools

from errors import UserError

KEEP_SECONDS = 5.0  # a connection that was idle for longer is not reused, because the server may be about to close it


class ConnectionEnded(Exception):
    """The server closed a connection before the end of its answer, or its answer could not be parsed."""


class Sink(Protocol):
    """Receives an answer as it arrives. now: `time.perf_counter()` when the bytes were read."""

    def on_status(self, status: int) -> None: ...

    def on_body(self, data: bytes, now: float) -> None: ...


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    transport: asyncio.Transport

    def __init__(self, client: "StreamClient") -> None:
        self._client = client
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self.now = 0.0  # `time.perf_counter()` of the last bytes, or of the request
        self.open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def begin(self, request: bytes, sink: Sink) -> "asyncio.Future[None]":
        """Send a request. The future is done at the end of the answer, or has the exception ConnectionEnded."""
        self._parser = httptools.HttpResponseParser(self)
        self._sink, self.now = sink, time.perf_counter()
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._done

    def abort(self) -> None:
        self._sink = None
        if self._done is not None:
            self._done.cancel()  # no task waits for it any more
        self.transport.abort()

    # --- called by the event loop ---------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.now = time.perf_counter()
        if self._sink is None:
            self.transport.abort()  # data without a request
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(f"no HTTP: {e}")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._client.forget(self)
        self._fail("closed")

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionEnded(why))

    # --- called by httptools --------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        assert self._sink is not None
        self._sink.on_status(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(data, self.now)

    def on_message_complete(self) -> None:
        self._sink = None
        if not self._parser.should_keep_alive():
            self.open = False
            self.transport.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def parse_url(url: str) -> SplitResult:
    """The parts of a server's URL. Raises UserError if it is not an HTTP(S) URL, or contains a user."""
    parts = urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # raised for a bad port
        good = False
    if not good or parts.username is not None:
        raise UserError(f"{url!r} is no URL of a server; give one such as http://127.0.0.1:8000")
    return parts


class StreamClient:
    """A pool of connections to one server, as a context manager.

    url: `http://host:port` or https, optionally with a path that is put before the API's paths. timeout: a request fails after
    this many seconds without a byte. Raises UserError for an invalid URL.
    """

    def __init__(self, url: str, timeout: float) -> None:
        parts = parse_url(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        self._prefix, self._name, self._timeout = parts.path.rstrip("/"), parts.netloc, timeout
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> "StreamClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in list(self._idle):
            connection.transport.close()
        await asyncio.sleep(0)  # lets the event loop close the sockets

    async def post(self, path: str, body: bytes, sink: Sink) -> None:
        """POST JSON, pass the answer to `sink`, and return at its end. If the caller is cancelled, the connection is closed.

        Raises ConnectionEnded, OSError if no connection can be opened, and TimeoutError.
        """
        head = f"POST {self._prefix}{path} HTTP/1.1\r\nHost: {self._name}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        connection = self._take() or await self._connect()
        done = connection.begin(request, sink)
        try:
            await self._end_of(done, connection)
        except BaseException:
            connection.abort()
            raise
        if connection.open:
            self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        with suppress(ValueError):
            self._idle.remove(connection)

    async def _end_of(self, done: "asyncio.Future[None]", connection: _Connection) -> None:
        left = self._timeout
        while not (await asyncio.wait((done,), timeout=left))[0]:
            left = connection.now + self._timeout - time.perf_counter()
            if left <= 0:
                raise TimeoutError
        done.result()

    def _take(self) -> _Connection | None:
        """The most recently used idle connection, or None. Closes connections that are too old."""
        oldest = time.perf_counter() - KEEP_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.now >= oldest:
                return connection
            connection.transport.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = (await loop.create_connection(lambda: _Connection(self), self._host, self._port, ssl=self._tls))[1]
        connection.now = time.perf_counter()
        return connection
