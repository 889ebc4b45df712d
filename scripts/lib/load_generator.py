"""Load generators: requests to a server and their latencies.

`offer` is an open loop. Arrivals are a Poisson process drawn in advance, so a slow server does not delay the next request. All
times count from the moment at which a request should have been sent. `keep_busy` is a closed loop: each of some clients sends its
next request when it has the last answer, and times count from when it is sent.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from scripts.lib.sse_client import ConnectionEnded, StreamClient

TIMER_SECONDS = 0.001  # resolution of an event loop's timers
PERCENTILES = (50, 90, 99)
Range = tuple[int, int]  # both ends included

# --- planning the requests -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One planned request. arrival: seconds after the start of its rate's measurement."""

    arrival: float
    prompt: list[int]
    new_tokens: int


def plan(
    rate: float,
    count: int,
    prompt: Range,
    new_tokens: Range,
    vocab_size: int,
    seed: int,
    words: random.Random,
    seconds: float = math.inf,
) -> list[Request]:
    """The first `count` requests of a Poisson process with `rate` arrivals a second, or fewer if `seconds` end before.

    Lengths are uniform in their ranges. With one seed, all rates have the same lengths and the same gaps, scaled by the rate.
    The prompts are drawn from `words`. All plans for one server take theirs from one generator, whose seed no other run has, so that
    its prefix cache holds none of them.
    """
    rng, now, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(1.0) / rate
        if now > seconds:
            break
        length, limit = rng.randint(*prompt), rng.randint(*new_tokens)
        requests.append(Request(now, [words.randrange(vocab_size) for _ in range(length)], limit))
    return requests


# --- sending them --------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """The result of one request. Times are in seconds; `first` and `end` count from the planned arrival."""

    arrival: float
    late: float = 0.0  # how much later than planned it was sent
    first: float | None = None  # the first token
    gaps: list[float] = field(default_factory=list)  # between tokens; 0 between tokens of one event
    end: float | None = None
    tokens: int = 0
    outcome: str = "cut off"

    @property
    def complete(self) -> bool:
        return self.outcome == "complete"


class Chunk(msgspec.Struct):
    """The fields of a streamed event that are decoded; msgspec skips the others."""

    choices: list["Part"] = []
    error: Any = None


class Part(msgspec.Struct):
    token_ids: list[int] = []


_chunk = msgspec.json.Decoder(Chunk)


class Reader:
    """Reads one streamed completion into an `Answer`. planned: `time.perf_counter()` at which it should be sent."""

    def __init__(self, request: Request, planned: float) -> None:
        self.answer = Answer(request.arrival, late=time.perf_counter() - planned)
        self.wanted, self.planned = request.new_tokens, planned
        self._last, self._rest = planned, b""
        self._ended = False

    def on_status(self, status: int) -> None:
        if status != 200:
            self._end(f"status {status}")

    def on_body(self, data: bytes, now: float) -> None:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if not self._ended and event.startswith(b"data: "):
                self._on_event(event[6:], now)

    def _on_event(self, data: bytes, now: float) -> None:
        answer = self.answer
        if data == b"[DONE]":
            answer.end = now - self.planned
            self._end("complete" if answer.tokens == self.wanted else "too few tokens")
            return
        chunk = _chunk.decode(data)
        if chunk.error is not None:
            self._end("error event")
        elif count := sum(len(part.token_ids) for part in chunk.choices):
            if answer.first is None:
                answer.first = now - self.planned
            else:
                answer.gaps.append(now - self._last)
            answer.gaps += [0.0] * (count - 1)
            self._last, answer.tokens = now, answer.tokens + count

    def _end(self, outcome: str) -> None:
        self.answer.outcome, self._ended = outcome, True


async def send(client: StreamClient, request: Request, planned: float, more: dict[str, Any]) -> Answer:
    """Stream one completion. planned: `time.perf_counter()` at which it should be sent; more: additional fields of the body."""
    reader = Reader(request, planned)
    body = {"prompt": request.prompt, "max_tokens": request.new_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True} | more
    try:
        await client.post("/v1/completions", msgspec.json.encode(body), reader)
    except (ConnectionEnded, OSError, TimeoutError) as e:
        reader.answer.outcome = type(e).__name__
    except asyncio.CancelledError:
        pass  # cut off by `offer`; the connection is closed already, so the server frees the request's memory
    return reader.answer


async def until(moment: float) -> None:
    """Sleep until `time.perf_counter()` reaches `moment`. Event loops keep time in whole ms, so the end is a busy wait."""
    while (left := moment - time.perf_counter()) > 0:
        await asyncio.sleep(max(0.0, left - 2 * TIMER_SECONDS))


async def offer(
    client: StreamClient,
    requests: Sequence[Request],
    label: str,
    drain: float | None = None,
    more: dict[str, Any] | None = None,
) -> list[Answer]:
    """Send every request at its planned time, independent of the others' results, and wait for all answers.

    drain: answers that are incomplete this many seconds after the last arrival are cut off; None: no limit.
    """
    start = time.perf_counter()
    with tqdm(total=len(requests), desc=label, unit="request") as bar:
        tasks = []
        for request in requests:
            planned = start + request.arrival
            await until(planned)
            task = asyncio.create_task(send(client, request, planned, more or {}))
            task.add_done_callback(lambda _: bar.update())
            tasks.append(task)
        if drain is not None and tasks:
            for task in (await asyncio.wait(tasks, timeout=drain))[1]:
                task.cancel()
        return await asyncio.gather(*tasks)


async def keep_busy(client: StreamClient, requests: Sequence[Request], clients: int, label: str) -> list[Answer]:
    """Send the requests in order, as soon as fewer than `clients` are unanswered; their planned arrivals do not count."""
    start, answers = time.perf_counter(), list[Answer]()
    with tqdm(total=len(requests), desc=label, unit="request") as bar:
        coming = iter(requests)

        async def one_client() -> None:
            for request in coming:
                now = time.perf_counter()
                answers.append(await send(client, replace(request, arrival=now - start), now, {}))
                bar.update()

        await asyncio.gather(*(one_client() for _ in range(clients)))
    return answers


# --- the results ---------------------------------------------------------------------------------------------------------


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """`PERCENTILES` in ms, linearly interpolated. None without values."""
    if not seconds:
        return None
    return {f"p{p}": round(float(ms), 3) for p, ms in zip(PERCENTILES, np.percentile(seconds, PERCENTILES) * 1e3, strict=True)}


def keeps(answer: Answer, ttft_limit: float, itl_limit: float) -> bool:
    """Whether an answer is complete, and its TTFT and its mean time between tokens are within the limits (ms).

    These are the criteria of DistServe (Zhong et al., arXiv:2401.09670, section 2).
    """
    if not answer.complete or answer.first is None:
        return False
    mean = sum(answer.gaps) / len(answer.gaps) if answer.gaps else 0.0
    return answer.first * 1e3 <= ttft_limit and mean * 1e3 <= itl_limit


def summary(answers: Sequence[Answer], ttft_limit: float, itl_limit: float) -> dict[str, Any]:
    """The figures of one rate. Latencies are of complete answers. Per-second figures divide by the time from the start of the
    measurement to the end of the last complete answer."""
    done = [a for a in answers if a.complete]
    seconds = max((a.arrival + a.end for a in done if a.end is not None), default=0.0)

    def per_second(count: int) -> float:
        return round(count / seconds, 4) if seconds else 0.0

    return {
        "requests": len(answers),
        "failed": dict(Counter(a.outcome for a in answers if not a.complete)),
        "seconds": round(seconds, 3),
        "ttft_ms": percentiles([a.first for a in done if a.first is not None]),
        "itl_ms": percentiles([gap for a in done for gap in a.gaps]),
        "end_to_end_ms": percentiles([a.end for a in done if a.end is not None]),
        "requests_per_second": per_second(len(done)),
        "tokens_per_second": per_second(sum(a.tokens for a in done)),
        "goodput": per_second(sum(keeps(a, ttft_limit, itl_limit) for a in done)),
        "latest_sending_ms": round(max((a.late for a in answers), default=0.0) * 1e3, 3),
    }
