"""What one HTTP connection may do: uvicorn's protocol with limits of time and size for what comes before a request's body."""

import asyncio
import contextlib
import http
import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.problems import ApiError
from server.sse import PIECE, to_json

MAX_HEAD = 65536  # bytes of a request line and headers, or of trailers; what one read brings may be more


class Pipelined(Exception):
    """Another request arrived before the answer to the one before it began."""


class Connection(HttpToolsProtocol):
    """Closes a connection whose request line and headers do not arrive in time, or are too large; uvicorn limits only the time
    between requests.

    Pipelined requests are not answered: the connection closes behind the first answer, and the client sends the others again
    (RFC 9112, section 9.3.2). To keep them, uvicorn stops reading, and would not notice that the client has left.
    """

    idle_timeout = 30.0
    _header_timer: asyncio.TimerHandle | None = None
    _head = 0  # bytes that brought neither a whole head nor a part of a body
    _deaf = False  # what comes now is not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit_unsent(transport.get_extra_info("socket"))
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._head += len(data)
        super().data_received(data)
        if self._head > MAX_HEAD and not self._deaf:
            self._refuse(ApiError(431, f"the request line and headers are larger than {MAX_HEAD} bytes"))

    def on_message_begin(self) -> None:
        # a client that has all of an answer may be faster than the count of it as complete: then uvicorn keeps the next request
        if self._answering and not self.cycle.response_started:
            raise Pipelined
        super().on_message_begin()
        if self._header_timer is None:  # a later request of a connection that was kept alive
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._head = 0
        self._stop_timer()
        super().on_headers_complete()
        self.cycle.scope["state"]["send"] = self.cycle.send  # past all layers: they look at the start of a response only

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "the request is not valid HTTP/1.1"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Read nothing more. The client is told why unless that would land in an answer that is under way."""
        self._deaf = True
        if self._answering and not self.cycle.more_body:
            self.cycle.keep_alive = False  # the connection closes behind it
            return
        if not (self._answering and self.cycle.response_started):
            body = to_json(error.body)
            head = (
                f"HTTP/1.1 {error.status_code} {http.HTTPStatus(error.status_code).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.idle_timeout, self.transport.close)

    def _stop_timer(self) -> None:
        if self._header_timer:
            self._header_timer.cancel()
            self._header_timer = None


def limit_unsent(connection: socket.socket | None) -> None:
    """Let the kernel hold little that the client has no room for yet. Otherwise it holds megabytes and asks for more only when a
    third of them has been read, which for a slow reader takes longer than the time after which it counts as stalled."""
    if connection is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux, macOS
        with contextlib.suppress(OSError):  # not a TCP connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, PIECE)
