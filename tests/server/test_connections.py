"""Connections without a complete request, or with several: endless headers, trailers, pipelining, data that is not HTTP."""

import asyncio
import contextlib
import gc
import gzip
import http.client
import json
import random
import resource
import socket
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from server import frontend
from server.connections import MAX_HEAD, MOST_PARTS, SMALL_PART, Connection, Turns
from server.limits import MOST_DESCRIPTORS, Connections, raise_descriptor_limit
from tests.support.server_thread import Site, raw_request, wait_for

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
FAILING = b"GET /stats HTTP/1.1\r\nHost: x\r\n\r\n"  # in a test that lets it
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


def read_one(raw: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the JSON body of the next answer."""
    answer = http.client.HTTPResponse(raw)
    answer.begin()
    return answer.status, json.loads(answer.read())


@pytest.fixture
def send_in_pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[socket.socket, bytes], None]:
    """Sends data in up to four pieces. The server reads each one before the next one is sent."""
    parse, got = Connection.data_received, list[int]()

    def data_received(self: Connection, data: bytes) -> None:
        parse(self, data)
        got.append(len(data))

    def send(raw: socket.socket, data: bytes) -> None:
        ends = sorted(random.choices(range(1, len(data)), k=random.randrange(4)))
        for start, end in zip([0, *ends], [*ends, len(data)], strict=True):
            before = sum(got)
            raw.sendall(data[start:end])
            wait_for(lambda wanted=before + end - start: sum(got) == wanted)

    monkeypatch.setattr(Connection, "data_received", data_received)
    return send


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


@pytest.mark.parametrize(
    "head", [b"GET /health?%s HTTP/1.1\r\nHost: x\r\n\r\n", GET + b"X-A: %s\r\n\r\n", GET + b"%s: a\r\n\r\n"]
)
def test_a_head_has_at_most_so_many_bytes(site: Site, head: bytes, seed: int) -> None:
    for size in (MAX_HEAD, MAX_HEAD + 1, random.randrange(MAX_HEAD + 2, 2 * MAX_HEAD)):
        with connect(site) as raw:
            raw.sendall(head % (b"a" * (size - len(head % b""))))
            if size == MAX_HEAD:
                assert read_one(raw) == (200, {"status": "ready"})
            else:  # empty if the connection was reset before the answer was read
                assert (read_all(raw) or b"HTTP/1.1 431 ").startswith(b"HTTP/1.1 431 ")


def with_fields(request: bytes, *fields: bytes) -> bytes:
    return request.replace(b"\r\n", b"".join(b"\r\n" + field for field in fields) + b"\r\n", 1)


def in_chunks(request: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    cut = random.randrange(1, len(body))
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:], b""))
    return head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: Chunked") + b"\r\n\r\n" + chunks


UPGRADES = (
    (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"),
    (b"upgrade: websocket, foo/1", b"Upgrade: bar", b"connection:keep-alive,upgrade", b"Sec-WebSocket-Version: 13"),
)


@pytest.mark.parametrize("upgrade", UPGRADES, ids=["Java", "WebSocket"])
@pytest.mark.parametrize("frame", [bytes, in_chunks], ids=["length", "chunks"])
def test_a_request_for_another_protocol_is_answered_as_usual(
    site: Site, send_in_pieces: Callable[..., None], upgrade: tuple[bytes, ...], frame: Callable[[bytes], bytes], seed: int
) -> None:
    """Java's client asks for HTTP/2 in each request without TLS."""
    asked = len(site.engine.submits)
    text = site.complete()["choices"][0]["text"]
    with connect(site) as raw:
        for _ in range(5):
            send_in_pieces(raw, with_fields(frame(raw_request({"prompt": "Hi", "max_tokens": 100})), *upgrade))
            status, answer = read_one(raw)
            assert status == 200 and answer["choices"][0]["text"] == text
        send_in_pieces(raw, with_fields(GET + b"\r\n", *upgrade))
        assert read_one(raw) == (200, {"status": "ready"})
    assert len(site.engine.submits) == asked + 6


@pytest.mark.parametrize(("version", "option"), [(b"1.1", b"close"), (b"1.0", b"TE")])
def test_the_last_request_of_a_connection_may_ask_for_another_protocol(
    site: Site, send_in_pieces: Callable[..., None], version: bytes, option: bytes, seed: int
) -> None:
    request = with_fields(raw_request({"prompt": "Hi"}), b"Connection: Upgrade, " + option, b"Upgrade: h2c")
    with connect(site) as raw:
        send_in_pieces(raw, request.replace(b"1.1", version, 1))
        assert read_all(raw).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("request_line", [b"POST /v1/completions", b"CONNECT /version", b"CONNECT x:80"])
def test_a_body_after_a_change_of_protocol_is_no_request(
    site: Site, send_in_pieces: Callable[..., None], request_line: bytes, seed: int
) -> None:
    body = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    fields = (b"Content-Type: application/json", b"Connection: Upgrade", b"Upgrade: foo", b"Content-Length: %d" % len(body))
    head = with_fields(request_line + b" HTTP/1.1\r\n\r\n", *fields)
    with connect(site) as raw:
        if request_line.startswith(b"POST"):
            send_in_pieces(raw, head)
            send_in_pieces(raw, body)
            status, answer = read_one(raw)
            assert status == 400 and answer["error"]["code"] == "invalid_json"
            raw.sendall(GET + b"Connection: close\r\n\r\n")
            last = read_all(raw)
            assert last.count(b"HTTP/1.1 ") == 1 and last.endswith(b'\r\n\r\n{"status":"ready"}')
        else:
            send_in_pieces(raw, head)
            assert read_one(raw)[0] == 501 and read_all(raw) == b""


@pytest.mark.parametrize("version", [b"1.0", b"0.9"])
def test_an_old_client_gets_no_chunks(site: Site, version: bytes) -> None:
    def ask(path: str, body: Any) -> bytes:
        with connect(site) as raw:
            raw.sendall(with_fields(raw_request(body, path).replace(b"1.1", version, 1), b"Connection: keep-alive"))
            head, _, answer = read_all(raw).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head and b"transfer-encoding" not in head
        return answer

    body = {"prompt": "Hi", "max_tokens": 100}
    text = site.complete()["choices"][0]["text"]
    assert json.loads(ask("/v1/completions", body))["choices"][0]["text"] == text
    *events, done, end = ask("/v1/completions", body | {"stream": True}).split(b"\n\n")
    parts = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]
    assert "".join(parts) == text and (done, end) == (b"data: [DONE]", b"")
    inputs = {"input": ["a", "b"]}
    assert json.loads(ask("/v1/embeddings", inputs))["data"] == site.post("/v1/embeddings", inputs)["data"]


def test_a_compressed_body_is_refused(site: Site) -> None:
    body = b'{"prompt": "Hi"}'
    for coding, content, status in (("gzip", gzip.compress(body), 415), ("Identity", body, 200)):
        headers = {"content-encoding": coding, "content-type": "application/json"}
        answer = site.http.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == status
        if status == 415:
            assert "Content-Encoding" in answer.json()["error"]["message"] and answer.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip", b"identity"])
def test_a_body_in_an_unknown_transfer_coding_is_refused(site: Site, coding: bytes) -> None:
    with connect(site) as raw:
        raw.sendall(CHUNKED.replace(b"chunked", coding))
        assert read_one(raw)[0] == 501 and read_all(raw) == b""


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


@pytest.mark.parametrize(
    "again", [GET + b"\r\n", raw_request({"prompt": "Hi"}), raw_request({"prompt": "Hi", "stream": True}), FAILING]
)
def test_a_client_that_leaves_its_previous_answer_unread_is_left(make_site: Callable[..., Site], again: bytes) -> None:
    """The answer to its next request cannot even begin."""
    site = make_site(idle_timeout=300.0)
    site.server.service.snapshot = lambda: {}["no such field"]  # type: ignore[method-assign]
    with site.slow_reader() as raw:
        raw.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
        assert raw.recv(12) == b"HTTP/1.1 200"
        wait_for(lambda: site.server.service.open_requests == 0)
        site.server.service.settings = replace(site.server.service.settings, idle_timeout=0.5)  # of the next request only
        raw.sendall(again)
        wait_for(lambda: site.server.service.open_requests == 1)
        site.http.close()
        wait_for(lambda: not site.server.service.open_requests and not site.server.server_state.connections)
    assert site.server.client.active == 0


def bounded(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, most: int, **settings: Any) -> Site:
    """A server of at most so many connections, which has none yet."""
    connections = Connections(most)
    monkeypatch.setattr(frontend, "Connections", lambda: connections)
    site = make_site(**settings)
    site.http.close()
    wait_for(lambda: not connections._open)
    return site


@pytest.mark.parametrize("what", [b"", GET, CHUNKED + b"1\r\n{\r\n"], ids=["idle", "half a head", "half a body"])
def test_connections_that_wait_keep_nobody_out(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, what: bytes
) -> None:
    """A new one takes the place of the oldest one of the client that has most. Requests that run go on."""
    connections = Connections(most=8)
    monkeypatch.setattr(frontend, "Connections", lambda: connections)
    site = make_site(idle_timeout=300.0)
    site.engine.hold = True

    def other(data: bytes) -> socket.socket:
        raw = stack.enter_context(socket.create_connection(("127.0.0.1", site.port), 60, ("127.0.0.2", 0)))
        raw.sendall(data)
        return raw

    with contextlib.ExitStack() as stack:
        running = [other(raw_request({"prompt": "Hi"})), stack.enter_context(connect(site))]
        running[1].sendall(raw_request({"prompt": "Hi"}))
        wait_for(lambda: site.server.client.active == 2)
        others = [other(what) for _ in range(20)]
        wait_for(lambda: {name: len(own) for name, own in connections._open.items()} == {"127.0.0.1": 2, "127.0.0.2": 6})
        for _ in range(3):
            assert site.http.get("/health").status_code == 200  # its kept connection is not closed either
        assert read_all(others[0]) == read_all(others[14]) == b""
        site.engine.hold = False
        assert [raw.recv(12) for raw in running] == [b"HTTP/1.1 200"] * 2
    site.http.close()
    wait_for(lambda: not connections._open and not connections._waiting)


# without a key, it is answered before its body
EARLY = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"


@pytest.mark.parametrize("rest", [b"{", b"{}"])
def test_the_rest_of_a_body_keeps_no_connection_after_the_answer(make_site: Callable[..., Site], rest: bytes) -> None:
    site = make_site(idle_timeout=1.0, api_key=("k",))
    with connect(site) as raw:
        raw.sendall(EARLY)
        assert raw.recv(12) == b"HTTP/1.1 401"
        raw.sendall(rest)
        assert error_of(read_all(raw))["code"] == "invalid_api_key"


def test_a_connection_that_was_answered_early_keeps_nobody_out(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = bounded(make_site, monkeypatch, 1, api_key=("k",))
    with connect(site) as first:
        first.sendall(EARLY)
        assert first.recv(12) == b"HTTP/1.1 401"
        first.sendall(b"{}")
        with connect(site) as second:
            second.sendall(GET + b"\r\n")
            assert second.recv(12) == b"HTTP/1.1 200"
        read_all(first)  # it is closed


def test_a_connection_beyond_the_bound_is_closed_if_all_are_answered(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = bounded(make_site, monkeypatch, 2)
    site.engine.hold = True
    with connect(site) as first, connect(site) as second:
        for raw in (first, second):
            raw.sendall(raw_request({"prompt": "Hi"}))
        wait_for(lambda: site.server.client.active == 2)
        with connect(site) as third:
            assert read_all(third) == b""
        site.engine.hold = False
        assert first.recv(12) == second.recv(12) == b"HTTP/1.1 200"


INF = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (1024, 4096, 4096),
        (1024, 10**6, MOST_DESCRIPTORS),
        (1024, INF, MOST_DESCRIPTORS),
        (10**6, 10**6, 10**6),
        (10**6, INF, 10**6),
        (INF, INF, INF),
    ],
)
def test_the_server_takes_the_descriptors_that_it_may_have(
    soft: int, hard: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    raise_descriptor_limit()
    assert limits == {resource.RLIMIT_NOFILE: (wanted, hard)}


def test_the_answers_of_a_client_keep_out_no_other_one(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """If all connections are being answered, the newest one of who has most makes room for a client that has fewer."""
    site = bounded(make_site, monkeypatch, 3)
    site.engine.hold = True
    with contextlib.ExitStack() as stack:
        many = list[socket.socket]()
        for i in range(3):
            many.append(stack.enter_context(socket.create_connection(("127.0.0.1", site.port), 60, ("127.0.0.2", 0))))
            many[i].sendall(raw_request({"prompt": "Hi"}))
            wait_for(lambda i=i: site.server.client.active == i + 1)
        raw = stack.enter_context(connect(site))
        raw.sendall(GET + b"\r\n")
        assert raw.recv(12) == b"HTTP/1.1 200" and read_all(many[2]) == b""
        site.engine.hold = False
        assert [one.recv(12) for one in many[:2]] == [b"HTTP/1.1 200"] * 2


def test_which_connection_makes_room(seed: int) -> None:
    """Compared with a plain list of all connections, in the order in which they came or began to wait."""
    rng = random.Random(seed)
    closed = list[Any]()
    connections, opened, waiting = Connections(6), list[Any](), list[Any]()
    for _ in range(600):
        if opened and rng.random() < 0.8:
            one = rng.choice(opened)
            waiting = [other for other in waiting if other is not one]
            connections.answer(one)
            if rng.random() < 0.1:
                connections.wait(one)
                waiting.append(one)
            continue
        new: Any = Mock(sender=rng.choice("abc"))
        new.transport.abort.side_effect = lambda new=new: closed.append(new)
        held = Counter(one.sender for one in opened)
        connections.add(new)
        opened.append(new)
        waiting.append(new)
        if len(opened) <= 6:
            assert not closed, seed
            continue
        (gone,) = closed
        closed.clear()
        if waiting[:-1]:
            assert gone is next(one for one in waiting if one.sender == gone.sender), seed
            assert held[gone.sender] == max(held[one.sender] for one in waiting[:-1]), seed
        elif held[new.sender] + 1 < max(held.values()):
            assert gone is [one for one in opened if one.sender == gone.sender][-1], seed
            assert held[gone.sender] == max(held.values()), seed
        else:
            assert gone is new, seed
        opened.remove(gone)
        waiting = [one for one in waiting if one is not gone]


def test_a_closed_connection_is_forgotten(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer that is still scheduled would keep it in memory for as long as a client may be idle."""
    made, connection_made = list[weakref.ref[Connection]](), Connection.connection_made

    def noted(self: Connection, transport: Any) -> None:
        made.append(weakref.ref(self))
        connection_made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", noted)
    site = make_site(idle_timeout=3600.0)
    for begun in (b"", GET):
        with connect(site) as raw:
            raw.sendall(begun)
            wait_for(lambda: made and made[-1]() is not None)
        wait_for(lambda: gc.collect() >= 0 and made[-1]() is None)


def test_connections_leave_descriptors_unless_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 768), (resource.RLIM_INFINITY, sys.maxsize // 4 * 3)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert Connections().most == most


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whatever arrives waits for its turn, which it gets when this function is called. Returns whether anything waited."""
    held = list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]]()
    monkeypatch.setattr(Turns, "call", lambda self, begin: held.append((asyncio.get_running_loop(), begin)))

    def call() -> bool:
        waited = bool(held)
        while held:
            loop, begin = held.pop(0)
            loop.call_soon_threadsafe(begin)
        return waited

    return call


@pytest.mark.parametrize("kind", ["head", "body", "chunks"])
def test_what_waits_for_its_turn_is_read_in_order(site: Site, release: Callable[[], bool], kind: str, seed: int) -> None:
    long = raw_request({"prompt": "Hi" * 2000, "truncate_prompt_tokens": 5})
    request = {"head": GET + b"X-A: b\r\n" * 200 + b"\r\n", "body": long, "chunks": in_chunks(long)}[kind]
    pieces, answer = [request[at : at + 500] for at in range(0, len(request), 500)], b""
    with connect(site) as raw:
        raw.setblocking(False)

        def step() -> bool:
            nonlocal answer
            if pieces:
                raw.sendall(pieces.pop(0))
            if random.random() < 0.5:
                release()
            with contextlib.suppress(BlockingIOError):
                answer += raw.recv(65536)
            return answer.endswith(b"}") and b"\r\n\r\n{" in answer

        wait_for(step)
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    wait_for(lambda: not release() and not site.server.service.open_requests)


def test_nothing_more_is_read_from_who_waits_for_its_turn(site: Site, release: Callable[[], bool]) -> None:
    with connect(site) as raw:
        raw.sendall(GET)
        opened: Any = site.server.server_state.connections
        wait_for(lambda: any(one._arrived and one.flow.read_paused for one in list(opened)))
        release()
        raw.sendall(b"\r\n")
        wait_for(release)
        assert read_one(raw) == (200, {"status": "ready"})


@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_leaves_is_noticed_in_its_turn(
    site: Site, release: Callable[[], bool], begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then nothing is written to its closed connection."""
    site.engine.delay, site.engine.reply, aborted = 0.001, lambda submit: [300] * 200, len(site.engine.aborts)
    with connect(site) as raw:
        raw.sendall(raw_request({"prompt": "Hi", "stream": True, "max_tokens": 200, "n": 5}))
        wait_for(lambda: release() or site.server.service.open_requests)
        if begun:
            wait_for(lambda: raw.recv(12) == b"HTTP/1.1 200")
    wait_for(lambda: not release() and not site.server.service.open_requests)
    wait_for(lambda: len(site.engine.aborts) > aborted or not begun)
    assert "Traceback" not in caplog.text


def test_a_head_that_waits_for_its_turn_is_in_time(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    looked, end = list[bytes](), Connection._end

    def noted(self: Connection) -> None:
        looked.extend(self._arrived)
        end(self)

    monkeypatch.setattr(Connection, "_end", noted)
    site = make_site(idle_timeout=0.2)
    release = request.getfixturevalue("release")  # not earlier: the site is asked whether it is ready
    with connect(site) as raw:
        raw.sendall(GET + b"\r\n")
        wait_for(lambda: len(looked) > 2)
        release()
        assert read_one(raw) == (200, {"status": "ready"})


def test_a_body_of_tiny_parts_is_refused(site: Site) -> None:
    """The parser takes about a microsecond for each."""

    def sent(data: bytes, size: int) -> bytes:
        with connect(site) as raw:
            chunks = b"".join(
                b"%x\r\n%s\r\n" % (len(data[i : i + size]), data[i : i + size]) for i in range(0, len(data), size)
            )
            raw.sendall(CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Type: application/json\r\n\r\n") + chunks + b"0\r\n\r\n")
            return raw.recv(12)

    short, long = (
        json.dumps({"prompt": "Hi", "truncate_prompt_tokens": 5}).encode().ljust(size) for size in (MOST_PARTS, 10**5)
    )
    assert sent(short, 1) == sent(long, SMALL_PART + 1) == b"HTTP/1.1 200"
    assert sent(short + b" ", 1) == sent(long, SMALL_PART - 1) == b"HTTP/1.1 400"
