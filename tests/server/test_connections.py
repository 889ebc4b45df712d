"""Connections without a complete request, or with several: endless headers, trailers, pipelining, data that is not HTTP."""

import json
import random
import socket
from typing import Any

import pytest

from server.connections import MAX_HEAD
from tests.support.server_thread import Site, raw_request, wait_for

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
MOST = 100 * MAX_HEAD  # bytes that a hostile client tries to send; far more than the socket buffers hold


def connect(site: Site) -> socket.socket:
    return socket.create_connection(("127.0.0.1", site.port), timeout=60)


def read_all(raw: socket.socket) -> bytes:
    found = b""
    try:
        while data := raw.recv(65536):
            found += data
    except ConnectionResetError:  # the server does not read what was sent after an error
        pass
    return found


def error_of(answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return error


@pytest.mark.parametrize(
    ("head", "more"),
    [
        (GET, b"X-A: b\r\n" * 1000),
        (GET + b"X-A: ", b"b" * 8000),
        (b"GET /", b"a" * 8000),
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-A: b\r\n" * 1000),
        (CHUNKED, b"1;" + b"a" * 8000),
    ],
    ids=["lines", "one line", "path", "trailers", "chunk extension"],
)
def test_a_head_without_end_is_refused(site: Site, head: bytes, more: bytes) -> None:
    sent = 0
    with connect(site) as raw:
        raw.sendall(head)
        try:
            while sent < MOST:
                raw.sendall(more)
                sent += len(more)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = read_all(raw)
    assert sent < MOST
    if answer:  # empty if the connection was reset before the answer was read
        assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")) and error_of(answer)["type"] == "invalid_request_error"
    wait_for(lambda: site.server.service.open_requests == 0)


def test_a_large_head_passes(site: Site) -> None:
    assert site.http.get("/health", headers={"x-a": "b" * (MAX_HEAD - 1000)}).status_code == 200


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\0\r\n\r\n"])
def test_what_is_no_http_is_told_so(site: Site, garbage: bytes) -> None:
    with connect(site) as raw:
        raw.sendall(garbage)
        answer = read_all(raw)
    assert answer.startswith(b"HTTP/1.1 400 ") and "HTTP" in error_of(answer)["message"]


@pytest.mark.parametrize("more", [raw_request({"prompt": "Hi"}) * 3, b"no HTTP"], ids=["pipelined", "garbage"])
@pytest.mark.parametrize("stream", [True, False])
def test_what_comes_before_the_answer_is_complete_is_left(site: Site, stream: bool, more: bytes, seed: int) -> None:
    """The client gets one complete answer, then the connection is closed."""
    asked = len(site.engine.submits)
    site.engine.delay = 0.001
    data = raw_request({"prompt": "Hi", "stream": stream}) + more
    cut = random.randrange(len(data) - len(more) + 1, len(data))
    with connect(site) as raw:
        raw.sendall(data[:cut])
        raw.sendall(data[cut:])
        answer = read_all(raw)
    assert answer.count(b"HTTP/1.1 ") == 1 and answer.startswith(b"HTTP/1.1 200 ")
    assert b"data: [DONE]" in answer if stream else b'"finish_reason"' in answer
    assert len(site.engine.submits) == asked + 1


def test_a_client_that_pipelined_and_left_is_noticed(site: Site) -> None:
    site.engine.hold = True
    aborted = len(site.engine.aborts)
    with connect(site) as raw:
        raw.sendall(raw_request({"prompt": "Hi"}))
        wait_for(lambda: site.server.client.active == 1)
        raw.sendall(raw_request({"prompt": "Hi"}) * 2)
        raw.sendall(raw_request({"prompt": "Hi"}))
    wait_for(lambda: len(site.engine.aborts) == aborted + 1)
    assert site.server.client.active == 0
