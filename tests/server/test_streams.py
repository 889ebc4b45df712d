"""How a stream is written: many outputs in one message, slow and stalled readers, and failures."""

import asyncio
import contextlib
import json
import random
import selectors
import socket
import time
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Send

from engine.protocol import Logprob, Outputs, SamplingParams, Submit, TokenLogprobs, TokenOutput
from engine.text import TextStream
from server.endpoint import Chunks
from server.engine_client import COUNTED_BYTES, LOGPROB_BYTES, OUTPUT_BYTES, SLICE_BYTES, EngineClient
from server.errors import ApiError
from server.generation import Usage
from server.http import PIECE, ClientGone, EventStream, event, to_json
from server.limits import Backlog
from server.metrics import Metrics
from tests.support.server_thread import STORY, TOKENIZER, WIDTH, Site, raw_request, ready, wait_for


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_tokens_that_arrive_together_stay_chunks(site: Site, path: str, seed: int) -> None:
    """The number of outputs in one message of the engine changes nothing in the stream except its times."""
    body: dict[str, Any] = {"max_tokens": 40, "n": 3, "seed": seed, "return_token_ids": True, "logprobs": path.endswith("chat")}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stop": ["END"]}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi", "logprobs": 2}

    def by_choice() -> dict[int | None, list[Any]]:
        found: dict[int | None, list[Any]] = {}
        for one in site.events(path, body):
            for choice in one["choices"] or [{"index": None, "usage": one["usage"]}]:
                found.setdefault(choice["index"], []).append(choice)
        return found

    alone = by_choice()
    assert len(alone) == 4 and len(alone[0]) > 10
    for site.engine.together in (2, 7, 1000):
        assert by_choice() == alone, (site.engine.together, seed)


def test_usage_counts_up_within_a_message(site: Site) -> None:
    site.engine.together = 1000
    body = {"prompt": "Hi", "max_tokens": 20, "return_token_ids": True}
    options = {"continuous_usage_stats": True}
    *events, _ = site.events("/v1/completions", body | {"stream_options": options | {"include_usage": True}})
    assert [e["usage"]["completion_tokens"] for e in events] == [*range(1, len(events)), len(events) - 1]
    assert not any("usage" in e for e in site.events("/v1/completions", body | {"stream_options": options}))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("continuous", [False, True])
def test_a_chunk_is_one_json_object(include: bool, continuous: bool, seed: int) -> None:
    """A chunk is assembled from parts. It must be valid JSON for any characters in its texts."""
    rng = random.Random(seed)

    def text() -> str:
        return "".join(rng.choices('"\\{}[],:\n\0 é€\U0001f98a\ud83e', k=rng.randint(0, 20)))

    report = {"prompt_tokens": rng.randrange(100), "completion_tokens": rng.randrange(100)}
    usage: Any = SimpleNamespace(report=lambda: report)
    head, choice, more = {"id": text(), "model": text()}, {"index": rng.randrange(9), "text": text()}, {"more": [text()]}
    request: Any = SimpleNamespace(
        head=lambda kind: {**head, "object": kind}, usage=usage, include_usage=include, continuous_usage=continuous
    )
    chunks = Chunks(request, "kind")
    head["object"] = "kind"
    shown = {"usage": report} if continuous else {"usage": None} if include else {}

    def content(data: bytes) -> Any:
        assert data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n") == 2
        return json.loads(data[6:])

    assert content(chunks.event(choice)) == {**head, "choices": [choice], **shown}, seed
    assert content(chunks.event(choice, more)) == {**head, "choices": [choice], **more, **shown}, seed
    if include:
        assert content(chunks.last()) == {**head, "choices": [], "usage": report}, seed
    else:
        assert chunks.last() == b"", seed


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("where", ["push", "report"])
def test_what_came_before_a_failure_is_sent(
    site: Site, path: str, where: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """If a token's text or chunk cannot be made, the stream ends, but earlier tokens of the same message are sent."""
    site.engine.together = 1000
    good, calls = random.Random(seed).randint(2, 6), 0
    owner: Any = TextStream if where == "push" else Usage
    whole = getattr(owner, where)

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > good:
            raise RuntimeError("made to fail")
        return whole(*args)

    monkeypatch.setattr(owner, where, failing)
    body = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = site.events(path, {**body, "max_tokens": 20, "return_token_ids": True, "stream_options": options})
    *chunks, error = events
    assert error["error"]["type"] == "server_error", seed
    sent = [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", [])]
    # a chat's first delta makes two chunks, the role and the text
    tokens = good - 1 if where == "report" and "chat" in path else good
    assert sent == TOKENIZER.encode(STORY, add_special_tokens=False)[:tokens], seed


def lone_client() -> EngineClient:
    """A client without sockets. What it would send is dropped."""
    client = EngineClient("", "", Metrics("lone"))
    client._send = lambda message: None  # type: ignore[method-assign]
    client.ready = ready()
    return client


def test_a_backlog_comes_in_slices_in_order(seed: int) -> None:
    rng = random.Random(seed)
    submits = [Submit(f"r{i}", [1], SamplingParams(max_tokens=10**6)) for i in range(3)]
    client, most = lone_client(), -(-SLICE_BYTES // OUTPUT_BYTES)

    async def run() -> None:
        with client.generate(submits) as generation:
            sent = [(rng.randrange(3), rng.randrange(1000)) for _ in range(rng.randint(3 * most, 5 * most))]
            client._dispatch(Outputs([TokenOutput(f"r{i}", [token]) for i, token in sent]))
            generation.on_error(ApiError(503, "behind all of it"))
            slices, turns = [], 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            task = asyncio.create_task(other())
            while sum(map(len, slices)) < len(sent):
                slices.append([(i, output.token_ids[0]) for i, output in await generation.next()])
            with pytest.raises(ApiError, match="behind all of it"):
                await generation.next()
            task.cancel()
            assert [one for part in slices for one in part] == sent, seed
            assert {len(part) for part in slices[:-1]} == {most}, seed
            assert turns >= len(slices) - 1, seed

    asyncio.run(run())


def test_outputs_that_wait_for_a_reader_are_counted(seed: int) -> None:
    """Up to small changes, which are not reported."""
    rng = random.Random(seed)
    client, left, reported = lone_client(), list[TokenOutput](), list[int]()

    def output() -> TokenOutput:
        values = [TokenLogprobs(Logprob(1, 0.0, 1), [Logprob(2, 0.0, 1)] * rng.randrange(3)) for _ in range(rng.randrange(300))]
        return TokenOutput("r", [1], logprobs=rng.choice([values, None]), prompt_logprobs=rng.choice([[None, *values], None]))

    def size(output: TokenOutput) -> int:
        lists = [*(output.logprobs or []), *(output.prompt_logprobs or [])[1:]]
        return OUTPUT_BYTES + sum(LOGPROB_BYTES * len([one.chosen, *one.top]) for one in lists if one)

    async def run() -> None:
        with client.generate([Submit("r", [1], SamplingParams(max_tokens=10**6))]) as generation:
            generation.count_unread = reported.append
            for _ in range(50):
                new = [output() for _ in range(rng.randrange(10))]
                client._dispatch(Outputs(new))
                left.extend(new)
                if left and rng.random() < 0.7:
                    del left[: len(await generation.next())]
                assert abs(sum(reported) - sum(map(size, left))) < COUNTED_BYTES, seed

    asyncio.run(run())
    assert any(change < 0 for change in reported) and any(change > 0 for change in reported)


def test_what_is_there_at_once_is_written_at_once(seed: int) -> None:
    rng = random.Random(seed)
    groups = [[{"n": rng.random()} for _ in range(rng.randint(1, 4))] for _ in range(20)]
    written: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for group in groups:
            yield b"".join(map(event, group))

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            written.append(message["body"])

    async def run() -> None:
        await send_events(events(), send, 30)

    asyncio.run(run())
    wanted = [b"".join(b"data: " + to_json(one) + b"\n\n" for one in group) for group in groups]
    assert written == [*wanted, b"data: [DONE]\n\n", b""], seed


async def send_events(events: AsyncGenerator[bytes, None], send: Send, timeout: float) -> None:
    """Send them to a client that never disconnects, and may leave a piece unread for `timeout` seconds."""
    state = {"send": send, "write_timeout": timeout}
    await EventStream(events)({"type": "http", "state": state}, asyncio.Event().wait, send)  # type: ignore[arg-type]


class Clock(selectors.DefaultSelector):
    """Waits for nothing: its time, in seconds, advances by what an event loop would have waited for its next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += max(0.0, timeout or 0.0)
        return super().select(None if timeout is None else 0)


class InstantLoop(asyncio.SelectorEventLoop):
    """An event loop on a clock of its own, which a busy machine does not change."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


@pytest.mark.parametrize("stalls", [False, True])
def test_large_events_leave_in_pieces_with_a_time_limit_each(seed: int, stalls: bool) -> None:
    rng = random.Random(seed)
    group = [{"n": rng.random(), "text": "x" * rng.randint(0, 2 * PIECE)} for _ in range(8)]
    written: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"".join(map(event, group))

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(3600 if stalls and len(written) == 3 else rng.choice([0.2, 1.4]))
            written.append(message["body"])

    async def run() -> None:
        await send_events(events(), send, 1.5)

    def finish() -> None:
        with asyncio.Runner(loop_factory=InstantLoop) as runner:
            runner.run(run())

    wanted = b"".join(b"data: " + to_json(one) + b"\n\n" for one in group) + b"data: [DONE]\n\n"
    if stalls:
        with pytest.raises(ClientGone):
            finish()
        assert b"".join(written) == wanted[: 3 * PIECE], seed
    else:
        finish()
        assert b"".join(written) == wanted, seed
    assert max(map(len, written)) <= PIECE


def test_a_busy_server_is_not_a_stalled_reader(seed: int) -> None:
    """Whatever else takes longer than the time limit, a client that reads whenever it can gets everything."""
    rng = random.Random(seed)
    text, timeout = b"x" * rng.randint(PIECE, 20 * PIECE), 1.5
    written: list[bytes] = []
    loop = InstantLoop()

    async def events() -> AsyncGenerator[bytes, None]:
        yield text

    async def send(message: Any) -> None:
        loop.clock.now += rng.choice([0.0, timeout / 2, 10 * timeout])  # the event loop computes for another request
        await asyncio.sleep(0)  # the connection is ready again at once
        if message["type"] == "http.response.body":
            written.append(message["body"])

    async def run() -> None:
        await send_events(events(), send, timeout)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())
    assert b"".join(written) == text + b"data: [DONE]\n\n", seed


def test_slow_readers_do_not_slow_others(make_site: Callable[..., Site]) -> None:
    site = make_site(idle_timeout=100)  # no reader is cut off during the test
    long = TOKENIZER.encode("word " * 40, add_special_tokens=False)
    site.engine.reply = lambda submit: long
    with contextlib.ExitStack() as stack:
        for _ in range(5):  # open streams that nobody reads
            request = site.http.build_request(
                "POST", "/v1/completions", json={"prompt": "Hi", "max_tokens": 200, "stream": True}
            )
            stack.callback(site.http.send(request, stream=True).close)
        started = time.monotonic()
        assert site.complete()["choices"][0]["text"]
        assert time.monotonic() - started < 50


def test_a_reader_that_stalls_is_left(make_site: Callable[..., Site]) -> None:
    """Its buffers are full and stay full: its sequences are aborted, and other requests continue."""
    site = make_site(idle_timeout=2.0)
    site.engine.reply = lambda submit: [300] * 200
    body = {"prompt": "Hi", "max_tokens": 200, "n": 64, "stream": True, "logprobs": 20}
    with site.slow_reader() as raw:
        raw.sendall(raw_request(body))
        assert raw.recv(10)
        wait_for(lambda: site.server.service.open_requests == 0 and site.server.client.active == 0)
    metrics = site.http.get("/metrics").text
    assert 'path="/v1/completions",status="499"} 1.0' in metrics
    assert site.complete(max_tokens=3)["choices"][0]["text"]


def test_a_client_that_never_reads_is_dropped(make_site: Callable[..., Site], capfd: pytest.CaptureFixture[str]) -> None:
    """Also one that asked for a whole answer, with its connection. Meanwhile its vectors count."""
    site = make_site(idle_timeout=6.0)
    requests: dict[str, Any] = {"/tokenize": {"prompt": "word " * 100_000}, "/v1/embeddings": {"input": ["a"] * 2048}}
    service, state = site.server.service, site.server.server_state
    held = []
    with contextlib.ExitStack() as stack:
        for path, body in requests.items():
            raw = stack.enter_context(site.slow_reader())
            raw.sendall(raw_request(body, path))
            assert raw.recv(10) == b"HTTP/1.1 2"
            held.append(service.unread.held)
        site.http.close()
        wait_for(lambda: service.open_requests == 0 and not state.connections)
    assert held == [0, 2048 * 4 * WIDTH] and service.unread.held == 0
    with httpx.Client(base_url=site.url) as again:
        metrics = again.get("/metrics").text
    assert all(f'path="{path}",status="499"}} 1.0' in metrics for path in requests)
    assert "error" not in capfd.readouterr().err


INCLUDE = ["message.output_text.logprobs"]


def test_answers_that_nobody_reads_make_room() -> None:
    """Those that wait longest go: of a client beyond its share, or else of who has most."""
    backlog, closed = Backlog(most=800), list[str]()
    with contextlib.ExitStack() as stack:

        def hold(name: str) -> Callable[[int], None]:
            return stack.enter_context(backlog.hold(name[0], lambda: closed.append(name)))

        hold("a1")(250)  # its only one
        assert not closed
        hold("a2")(40)
        assert closed == ["a1"]
        streams = [hold("b1"), hold("b2")]
        for size in (90, -90, 90):
            streams[0](size)
            streams[1](100 * (size > 0 and not backlog._bytes["b"] > 100))
        streams[1](50)
        assert closed == ["a1", "b2"] and backlog.total == 130  # b1 was read meanwhile
        for client in "cdef":
            hold(client + "1")(200)
        assert closed == ["a1", "b2", "c1"] and backlog.total == 730
        streams[1](10**6)  # it is closed already
        assert backlog.total == 730
    assert not backlog.total and not backlog._bytes and not backlog._answers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "word " * 50_000}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 200, "n": 6, "logprobs": 20}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 200, "n": 6, "logprobs": 20, "stream": True}),
        ("/v1/responses", {"input": "Hi", "include": INCLUDE, "max_output_tokens": 200, "top_logprobs": 20, "stream": True}),
    ],
    ids=["text", "answer", "stream", "response"],
)
def test_what_waits_for_slow_readers_is_bounded(make_site: Callable[..., Site], path: str, body: dict[str, Any]) -> None:
    """The connections of a client that leaves answers unread are closed, the oldest first; another one gets its answer."""
    site = make_site(idle_timeout=300.0)
    service = site.server.service
    service.backlog = Backlog(most=2_000_000)
    site.engine.reply, site.engine.together = lambda submit: [300] * 200, 1000
    with contextlib.ExitStack() as stack:
        unread = list[socket.socket]()
        for _ in range(8):
            raw = stack.enter_context(site.slow_reader())
            raw.sendall(raw_request(body, path))
            assert raw.recv(10) == b"HTTP/1.1 2"
            unread.append(raw)
        wait_for(lambda: service.open_requests < len(unread) - 2)
        assert service.backlog.total <= 2_000_000
        assert site.complete(max_tokens=3)["choices"][0]["text"]
    wait_for(lambda: not service.open_requests and not service.backlog.total)


def test_a_slow_reader_that_goes_on_gets_all(make_site: Callable[..., Site]) -> None:
    """Megabytes are buffered for it, and it needs many times --idle-timeout to read them."""
    timeout = 2.0
    site = make_site(idle_timeout=timeout)
    site.engine.reply = lambda submit: [300] * 100
    site.engine.together = 1000
    with site.slow_reader() as raw:
        raw.settimeout(100)
        raw.sendall(raw_request({"prompt": "Hi", "max_tokens": 100, "n": 96, "stream": True, "logprobs": 20}))
        started, size, end = time.monotonic(), 0, b""
        while not end.endswith(b"0\r\n\r\n"):
            part = raw.recv(4096)
            assert part, f"cut off after {size} bytes and {time.monotonic() - started:.1f} s"
            size, end = size + len(part), (end + part)[-64:]
            if (ahead := started + size / 0.5e6 - time.monotonic()) > 0.01:  # reads 0.5 MB a second
                time.sleep(ahead)
    assert b"data: [DONE]" in end
    assert size > 4e6 and time.monotonic() - started > 4 * timeout
