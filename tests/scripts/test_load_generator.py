"""The open-loop load generator: arrival times, requests, measured times and figures. One test uses the real server."""

import asyncio
import gc
import json
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvloop

from engine.protocol import Stats
from errors import UserError
from scripts.bench.serving import load
from scripts.bench.serving.load import table
from scripts.lib.load_generator import Answer, Request, keep_busy, keeps, offer, plan, summary
from scripts.lib.sse_client import StreamClient
from server.metrics import Metrics
from tests import MODELS
from tests.support import quick_start
from tests.support.command_line import environment
from tests.support.ports import free_port
from tests.support.server_process import ServerProcess

# --- the plan ------------------------------------------------------------------------------------------------------------


def test_arrivals_are_poisson(seed: int) -> None:
    """Gaps of a Poisson process have mean and standard deviation 1 / rate, and exceed t with probability exp(-rate t)."""
    rate, count = 5.0, 20_000
    arrivals = np.array([r.arrival for r in plan(rate, count, (1, 1), (1, 1), 10, seed, random.Random(seed))])
    gaps = np.diff(arrivals, prepend=0.0) * rate
    assert gaps.min() >= 0
    assert abs(gaps.mean() - 1) < 6 / count**0.5
    assert abs(gaps.std() - 1) < 6 * 2**0.5 / count**0.5
    for t in (0.5, 1.0, 2.0):
        share = np.exp(-t)
        assert abs((gaps > t).mean() - share) < 6 * (share * (1 - share) / count) ** 0.5


def test_a_plan_repeats_and_rates_share_its_shape(seed: int) -> None:
    words, same = random.Random(seed), random.Random(seed)
    one, again = (plan(4.0, 50, (3, 9), (2, 5), 100, seed, words) for words in (words, same))
    assert one == again != plan(4.0, 50, (3, 9), (2, 5), 100, seed + 1, random.Random(seed))
    faster = plan(8.0, 50, (3, 9), (2, 5), 100, seed, words)
    assert [r.arrival for r in one] == pytest.approx([2 * r.arrival for r in faster])
    assert [(len(r.prompt), r.new_tokens) for r in one] == [(len(r.prompt), r.new_tokens) for r in faster]
    assert all(a.prompt != b.prompt for a, b in zip(one, faster, strict=True) if len(a.prompt) > 5)
    assert {len(r.prompt) for r in one} <= set(range(3, 10)) and {r.new_tokens for r in one} <= {2, 3, 4, 5}
    assert all(0 <= i < 100 for r in one for i in r.prompt)


@pytest.mark.parametrize("several", ["--rates 500 500", "--clients 2 2"])
def test_no_prompt_is_sent_twice_to_a_server(several: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the warm-up, nor at equal rates, nor by another run with the same or the next seed: it may be in the prefix cache."""

    async def chunks(_: dict[str, Any]) -> AsyncIterator[Any]:
        yield [1, 2]
        yield b"[DONE]"

    server = FakeServer(chunks)

    async def measure(argv: str) -> None:
        listening = await asyncio.start_server(server._serve, "127.0.0.1", 0)
        async with listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            monkeypatch.setattr(sys, "argv", ["load", "--url", url, *argv.split()])
            args = load.parse_args()
            await load.measure(args, url, args.vocab_size)

    monkeypatch.setattr(load, "STATS_SECONDS", 0)
    monkeypatch.setattr(load, "step_seconds", lambda _: None)
    monkeypatch.setattr(load, "drafted", lambda _: (0, 0))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    for run in (seed, seed, seed + 1):
        asyncio.run(measure(f"{several} --requests 5 --prompt-length 16 --new-tokens 2 --vocab-size 50000 --seed {run}"))
    prompts = [tuple(body["prompt"][:4]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts) >= 3 * (4 + 2 * 5)


# --- sending -------------------------------------------------------------------------------------------------------------


class FakeServer:
    """Answers every completion with the chunks that `chunks(body)` yields: lists of token ids, or any object or bytes as is.

    `write` sends the bytes of an event. Subclasses may override it.
    """

    def __init__(self, chunks: Callable[[dict[str, Any]], AsyncIterator[Any]], status: int = 200) -> None:
        self.chunks, self.status = chunks, status
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0

    async def write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)

    async def offered(self, requests: Sequence[Request], drain: float | None = None) -> list[Answer]:
        """Send `requests` to this server with the load generator, and return the answers."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server, StreamClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 60) as client:
            return await offer(client, requests, "test", drain)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                writer.write(b"HTTP/1.1 %d So\r\nTransfer-Encoding: chunked\r\n\r\n" % self.status)
                async for chunk in self.chunks(self.bodies[-1]):
                    value = {"choices": [{"text": "x", "token_ids": chunk}]} if isinstance(chunk, list) else chunk
                    event = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
                    await self.write(writer, b"%x\r\n%s\r\n" % (len(event), event))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
        writer.close()


def offered(server: FakeServer, requests: list[Request]) -> list[Answer]:
    return asyncio.run(server.offered(requests))


def test_slow_answers_delay_no_arrival(seed: int) -> None:
    """The server answers only when all requests have arrived. A client that waited for answers before it sends would hang."""
    requests = plan(200.0, 40, (1, 4), (2, 2), 50, seed, random.Random(seed))
    everyone = asyncio.Event()

    async def chunks(_: dict[str, Any]) -> AsyncIterator[Any]:
        if len(server.bodies) == len(requests):
            everyone.set()
        await asyncio.wait_for(everyone.wait(), 200)
        yield [1]
        yield [2]
        yield b"[DONE]"

    server = FakeServer(chunks)
    answers = offered(server, requests)
    assert [a.outcome for a in answers] == ["complete"] * 40
    assert [b["prompt"] for b in server.bodies] == [r.prompt for r in requests]
    assert all(b["stream"] and b["ignore_eos"] and b["max_tokens"] == 2 for b in server.bodies)
    assert [a.arrival for a in answers] == [r.arrival for r in requests]
    last = requests[-1].arrival  # times count from the planned arrival, and all requests waited for the last one
    assert all(a.first is not None and a.first >= last - a.arrival - 1e-3 for a in answers)


def test_clients_send_when_they_have_an_answer(seed: int) -> None:
    """So many requests are always unanswered, until none are left."""
    requests, clients = plan(1.0, 23, (1, 4), (2, 2), 50, seed, random.Random(seed)), random.randint(2, 6)
    now = most = 0

    async def chunks(_: dict[str, Any]) -> AsyncIterator[Any]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        yield [1]
        for _ in range(200):  # until all clients have sent theirs
            if now == clients or len(server.bodies) > len(requests) - clients:
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError(f"only {now} of {clients} clients are waiting")
        now -= 1
        yield [2]
        yield b"[DONE]"

    server = FakeServer(chunks)

    async def run() -> list[Answer]:
        listening = await asyncio.start_server(server._serve, "127.0.0.1", 0)
        async with listening, StreamClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", 60) as client:
            return await keep_busy(client, requests, clients, "test")

    answers = asyncio.run(run())
    assert most == clients and [a.outcome for a in answers] == ["complete"] * 23
    assert sorted(body["prompt"] for body in server.bodies) == sorted(r.prompt for r in requests)
    assert all(a.late < 1 and a.first is not None and a.end is not None and a.first <= a.end for a in answers)
    found = summary(answers, 1e9, 1e9)
    assert found["tokens_per_second"] == pytest.approx(46 / max(a.arrival + (a.end or 0) for a in answers), rel=1e-3)
    one = {"clients": clients, "summary": found, "drafts": 10, "accepted": 25}
    settings = {"accept_rate": 0.5}
    lines = table({"settings": settings, "clients": [one]}).splitlines()
    assert lines[2].startswith(f"| {clients} |") and lines[2].endswith("| 2.50 | 0 of 23 |")
    assert "0.5: agreement is not real" in lines[-1]


def test_tokens_of_one_chunk_come_together() -> None:
    pause, least = 0.3, 0.1  # seconds; a busy machine may give the first chunk to the client late

    async def chunks(_: dict[str, Any]) -> AsyncIterator[Any]:
        yield [1, 2]
        await asyncio.sleep(pause)
        yield []  # a chunk without tokens
        yield [3, 4, 5]
        yield [6]
        yield b"[DONE]"

    (answer,) = offered(FakeServer(chunks), [Request(0.0, [1], 6)])
    assert answer.tokens == 6 and len(answer.gaps) == 5
    assert [gap > least for gap in answer.gaps] == [False, True, False, False, answer.gaps[4] > least]
    assert answer.gaps[0] == answer.gaps[2] == answer.gaps[3] == 0
    assert answer.first is not None and answer.end is not None
    assert answer.first + sum(answer.gaps) <= answer.end


async def _nothing() -> None: ...


async def _break() -> None:
    raise ConnectionError("gone")


@pytest.mark.parametrize(
    ("ending", "after", "status", "outcome"),
    [
        (b"[DONE]", _nothing, 200, "too few tokens"),
        ({"error": {"message": "no"}}, _nothing, 200, "error event"),
        ([9], _nothing, 200, "cut off"),
        ([9], _break, 200, "ConnectionEnded"),
        (b"[DONE]", _nothing, 503, "status 503"),
    ],
)
def test_failures_have_names(ending: Any, after: Callable[[], Awaitable[None]], status: int, outcome: str) -> None:
    async def chunks(_: dict[str, Any]) -> AsyncIterator[Any]:
        yield [1]
        yield ending
        await after()

    (answer,) = offered(FakeServer(chunks, status), [Request(0.0, [1], 3)])
    assert answer.outcome == outcome
    assert summary([answer], 1e9, 1e9)["failed"] == {outcome: 1}
    assert summary([answer], 1e9, 1e9)["goodput"] == 0


def test_events_arrive_in_any_pieces(seed: int) -> None:
    """The token counts do not depend on how the network splits and joins the bytes of events, and no byte is lost."""
    rng = random.Random(seed)

    class Torn(FakeServer):
        async def write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
            while data:
                cut = rng.randint(1, len(data))
                writer.write(data[:cut])
                data = data[cut:]
                if rng.random() < 0.7:
                    await writer.drain()
                    await asyncio.sleep(0)

    sizes = {i: [rng.randint(0, 3) for _ in range(rng.randint(1, 30))] for i in range(12)}

    async def chunks(body: dict[str, Any]) -> AsyncIterator[Any]:
        for size in sizes[body["prompt"][0]]:
            yield [1] * size
        yield b"[DONE]"

    requests = [Request(0.002 * i, [i], sum(sizes[i])) for i in sizes]
    answers = offered(Torn(chunks), requests)
    assert [a.tokens for a in answers] == [r.new_tokens for r in requests], seed
    assert [a.outcome for a in answers] == ["complete"] * len(requests), seed
    assert all(len(a.gaps) == max(a.tokens - 1, 0) for a in answers), seed


def test_no_server_and_no_url() -> None:
    async def run() -> list[Answer]:
        async with StreamClient(f"http://127.0.0.1:{free_port()}", 5) as client:
            return await offer(client, [Request(0.0, [1], 2)], "test")

    (answer,) = asyncio.run(run())
    assert answer.outcome == "ConnectionRefusedError"
    for url in ("127.0.0.1:8000", "ftp://here", "http://"):
        with pytest.raises(UserError, match="is no URL"):
            StreamClient(url, 5)


# --- counting ------------------------------------------------------------------------------------------------------------


def test_figures_of_known_answers(seed: int) -> None:
    rng = random.Random(seed)
    answers = []
    for i in range(101):  # first tokens after 0, 1, … 100 ms
        gaps = [rng.uniform(0.001, 0.003) for _ in range(4)]
        answers.append(Answer(i / 10, 0.0, i / 1e3, gaps, i / 1e3 + sum(gaps), 5, "complete"))
    rng.shuffle(answers)
    answers.append(Answer(11.0, outcome="status 503"))
    found = summary(answers, ttft_limit=40, itl_limit=1e9)
    seconds = max(a.arrival + a.end for a in answers if a.end is not None)
    assert found["ttft_ms"] == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert found["requests"] == 102 and found["failed"] == {"status 503": 1}
    assert found["requests_per_second"] == pytest.approx(101 / seconds, abs=1e-3)
    assert found["tokens_per_second"] == pytest.approx(505 / seconds, abs=1e-3)
    assert found["goodput"] == pytest.approx(41 / seconds, abs=1e-3)
    gaps = sorted(gap * 1e3 for a in answers for gap in a.gaps)
    assert found["itl_ms"]["p50"] == pytest.approx((gaps[201] + gaps[202]) / 2, abs=1e-3)
    assert summary([], 1, 1)["ttft_ms"] is None


def test_the_idle_share_between_two_looks_at_the_metrics(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's reports have shares of different numbers of steps; ranks that start again count from 0."""
    metrics, steps, total, idle = Metrics("a"), 0, 0.0, 0.0
    monkeypatch.setattr(load.httpx, "get", lambda *_, **__: SimpleNamespace(text=metrics.render().decode()))
    assert load.step_seconds("") is None and load.idle_share(None, None) is None  # of a server without a GPU
    for i in range(9):
        count, mean, share = random.randint(1, 50), random.uniform(0.001, 0.1), random.random()
        if i == 5:
            metrics.on_recovery(1.0)
            steps = 0
        if i == 3:
            before, total, idle = load.step_seconds(""), 0.0, 0.0
        steps, total, idle = steps + count, total + count * mean, idle + count * mean * share
        metrics.on_stats(Stats(steps=steps, step_seconds=mean, batch_tokens=[1] * count, idle_share=share))
    assert load.idle_share(before, load.step_seconds("")) == pytest.approx(idle / total, abs=1e-4)
    assert load.idle_share(before, before) is None


def test_goodput_needs_both_limits_and_the_mean_gap() -> None:
    answer = Answer(0.0, 0.0, 0.1, [0.01, 0.05], 0.16, 3, "complete")
    assert keeps(answer, 100, 30.001)
    assert not keeps(answer, 99, 1000)
    assert not keeps(answer, 1000, 29)
    assert not keeps(Answer(0.0, 0.0, 0.1, [], None, 1, "cut off"), 1000, 1000)


def test_against_the_server(seed: int) -> None:
    """The real server answers every request completely."""
    requests = plan(20.0, 6, (3, 20), (2, 6), 512, seed, random.Random(seed))

    async def run(url: str) -> list[Answer]:
        async with StreamClient(url, 60) as client:
            return await offer(client, requests, "test")

    with ServerProcess("--model", MODELS / "tiny-ladder") as server:
        server.ready()
        answers = uvloop.run(run(server.url))
    assert [a.outcome for a in answers] == ["complete"] * 6
    assert [a.tokens for a in answers] == [r.new_tokens for r in requests]
    assert all(len(a.gaps) == a.tokens - 1 and a.first and a.end and a.first <= a.end for a in answers)
    one = {"rate": 20.0, "summary": summary(answers, 1e9, 1e9)}
    lines = table({"settings": {"ttft_limit": 1e9, "itl_limit": 1e9}, "rates": [one]}).splitlines()
    assert len(lines) == 3 and lines[2].endswith("| 0 of 6 |")
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")


def test_what_the_frontend_costs() -> None:
    """All tokens of the stand-in engine pass through the real frontend, no faster than its steps. Every figure is present."""
    command = [sys.executable, "-m", "scripts.bench.serving.frontend", "--streams", "6", "--rate", "50", "--step", "20"]
    command += ["--new-tokens", "50", "--prompt-length", "40"]  # CPU time is counted in 10 ms, which few tokens may not take
    done = quick_start.run(command, cwd=MODELS.parent, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["requests"] == 6 and not found["failed"]
    # On a busy machine tokens arrive in groups, so the median says little. The pause before a group lasts at least one step.
    assert found["itl_ms"]["p99"] > 10 and found["ttft_ms"]["p50"] > 0
    assert 0 < found["tokens_per_second"] <= 6 * 50 and min(found["cpu_us_per_token"].values()) > 0
