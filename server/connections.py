"""uvicorn's HTTP protocol, with limits on the time and size of a request line and headers. What arrives in a burst begins in
turn."""

import asyncio
import contextlib
import http
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError
from server.http import PIECE, to_json
from server.limits import Connections, sender

MAX_HEAD = 65536  # bytes of a request line and headers, or of trailers
MOST_PARTS, SMALL_PART = 4096, 16  # of a body; more parts than these may not have fewer bytes on average
TURN_SECONDS = 0.02  # which a part of a burst may take; after a longer one fewer begin at once
MOST_AT_ONCE = 16  # that begin together


class Turns:
    """Lets what arrives in a burst begin a part at a time, so that streams go on between the parts.

    An event loop calls everything that is ready before it looks for more: what begins together delays all streams. At least one
    begins in each part. How many do follows from how long the last part took, with the tasks that it started.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """now: seconds."""
        self._now = now
        self._most, self._begun, self._since = MOST_AT_ONCE, 0, 0.0
        self._waiting: deque[Callable[[], None]] = deque()

    def call(self, begin: Callable[[], None]) -> None:
        """Call `begin` now, or in its turn: the order stays that of the calls."""
        if self._waiting or self._begun == self._most:
            self._waiting.append(begin)
        else:
            self._begin(begin)

    def _begin(self, begin: Callable[[], None]) -> None:
        if not self._begun:
            self._since, loop = self._now(), asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._next)  # behind the tasks that begin now
        self._begun += 1
        begin()

    def _next(self) -> None:
        long = self._now() - self._since > TURN_SECONDS
        self._most, self._begun = max(1, self._most // 2) if long else min(self._most + 1, MOST_AT_ONCE), 0
        while self._waiting and self._begun < self._most:
            self._begin(self._waiting.popleft())


class Pipelined(Exception):
    """A request arrived before the response to the previous request started."""


class Connection(HttpToolsProtocol):
    """Closes a connection whose request line and headers do not arrive in time or are too large.

    uvicorn itself limits only the time between requests.

    A request to change to another protocol is answered like any other (RFC 9110, section 7.8). httptools would take its body
    for data of that protocol, and uvicorn would drop it or read it as the next request. So the parser gets such a head a
    second time, without the field Upgrade.

    Pipelined requests are not answered: the connection closes after the first response, and the client sends the others again
    (RFC 9112, section 9.3.2). uvicorn would queue them, but then it stops reading and does not notice when the client leaves.
    """

    def __init__(self, *args: Any, idle_timeout: float, all_connections: Connections, turns: Turns, **options: Any) -> None:
        """`idle_timeout`: seconds for a request line and headers to arrive. turns: of all connections. The others are
        uvicorn's."""
        super().__init__(*args, **options)
        self.idle_timeout, self._all, self._turns = idle_timeout, all_connections, turns
        self._arrived: list[bytes] = []  # waits for its turn
        self._parts = self._body_bytes = 0  # of the body so far
        self.sender = "-"  # whose connection it is; behind a proxy that of the proxy
        self._header_timer: asyncio.TimerHandle | None = None
        self._head = 0  # bytes received since the last complete head or part of a body
        self._refused = False  # further data is ignored

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client = self.client or ("127.0.0.1", 0)  # a Unix socket has no address, but is on this machine
        limit_unsent(transport.get_extra_info("socket"))
        self.sender = sender({"client": self.client, "state": {}}).name
        self._all.add(self)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._arrived.append(data)
        self._turns.call(self._read)
        if self._arrived:
            self.flow.pause_reading()

    def _read(self) -> None:
        rest = memoryview(b"".join(self._arrived))
        self._arrived.clear()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        while rest and not self._refused:
            self._head += len(piece := rest[: MAX_HEAD - self._head])
            rest = rest[self._parse(piece) :]
            if self._head == MAX_HEAD and not self._refused:
                self._refuse(ApiError(431, f"the request line and headers are larger than {MAX_HEAD} bytes"))

    def _parse(self, data: bytes | memoryview) -> int:
        """How many bytes were parsed: all, or those before the body of a request to change to another protocol."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            self.parser = httptools.HttpRequestParser(self)  # the old one skips what follows the last request of a connection
            fields = [b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade"]
            self._parse(b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, b"".join(fields)))
            return int(e.args[0])
        except httptools.HttpParserError as e:
            self.logger.warning("Invalid HTTP request received.")  # as uvicorn does
            error = e.__context__  # what a method below raised
            self._refuse(error if isinstance(error, ApiError) else ApiError(400, "the request is not valid HTTP/1.1"))
        return len(data)

    def on_message_begin(self) -> None:
        # A client that has the whole response may send its next request before uvicorn marks the response as complete. uvicorn
        # queues that request, so only a response that has not started is a sign of pipelining.
        if self._answering and not self.cycle.response_started:
            raise Pipelined
        super().on_message_begin()
        if self._header_timer is None:  # a later request on a keep-alive connection
            self._start_timer()

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise ApiError(501, "this server is no proxy: it does not support CONNECT")
        if any(name == b"transfer-encoding" and value.strip().lower() != b"chunked" for name, value in self.headers):
            raise ApiError(501, "the only supported Transfer-Encoding is chunked")
        if self.parser.should_upgrade():  # it will be called again for this head
            return
        self._head = self._parts = self._body_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if self.parser.get_http_version() != "1.1":
            _send_without_chunks(self.cycle)
        state = self.cycle.scope["state"]
        state["send"] = self.cycle.send  # for EventStream: lets its events bypass the middleware
        state["abandon"] = self._abandon

    def on_body(self, body: bytes) -> None:
        self._head = 0
        self._parts += 1
        self._body_bytes += len(body)
        if self._parts > MOST_PARTS and self._body_bytes < self._parts * SMALL_PART:
            raise ApiError(
                400, f"the body comes in more than {MOST_PARTS} parts of fewer than {SMALL_PART} bytes; send larger ones"
            )
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._head = 0
        if self._answering:
            self._all.answer(self)
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._all.remove(self)
        if self._answering:  # the end takes as long as the beginning
            self.cycle.disconnected = True  # now: nothing can be written any more
            self._turns.call(partial(super().connection_lost, exc))
        else:
            super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not (self._answering and not self.cycle.more_body):  # it has no next request yet
            self._all.wait(self)
            if self.cycle.more_body and not self._answering:  # the rest of its body would stop uvicorn's timer
                self._start_timer()
        if self.transport.is_closing():  # it waits for the client to read the rest
            self.loop.call_later(self.idle_timeout, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        self._end()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Stop reading, and close the connection. Send `error` unless it would be mixed into a response in progress."""
        self._refused = True
        if self._answering and not self.cycle.more_body:
            self.cycle.keep_alive = False  # the connection closes after that response
            return
        if not (self._answering and self.cycle.response_started):
            body = to_json(error.body)
            head = (
                f"HTTP/1.1 {error.status_code} {http.HTTPStatus(error.status_code).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _abandon(self) -> None:
        """End the connection of a client that has left or reads no more. Closing it would wait until it has read what is
        buffered."""
        self.cycle.disconnected = True
        self.transport.abort()

    def _end(self) -> None:
        """Close the connection. A client that has left the last answer unread until now gets no more of it."""
        if self._arrived:  # what was missing waits for its turn
            self._start_timer()
            return
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.idle_timeout, self._end)

    def _stop_timer(self) -> None:
        if self._header_timer:
            self._header_timer.cancel()
            self._header_timer = None


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Older versions have no chunks (RFC 9112, section 6.1): a body without a length ends with the connection."""
    send = cycle.send
    cycle.keep_alive = cycle.chunked_encoding = False

    async def send_as_it_is(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":  # without chunks, uvicorn sends no more than it expects
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_as_it_is  # type: ignore[method-assign]


def limit_unsent(connection: socket.socket | None) -> None:
    """Let the kernel buffer at most PIECE bytes that are not yet sent.

    By default it buffers megabytes, and the socket becomes writable again only after a third of them has been read. With a slow
    reader this takes longer than the time after which a client counts as stalled.
    """
    if connection is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux, macOS
        with contextlib.suppress(OSError):  # not a TCP connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, PIECE)
