"""Send requests to a server at random times, at given rates, and measure their latency: an open-loop load generator.

    python -m scripts.bench.serving.load --model models/tiny-hybrid --ranks 2 --rates 1 2 4 --requests 64 --offline
    python -m scripts.bench.serving.load --model llama-3-70b --ranks 4 --rates 4 16 32 64 --prompt-length 1024 --new-tokens 256 --seconds 10 --drain 5
    python -m scripts.bench.serving.load --url http://127.0.0.1:8000 --vocab-size 32000 --rates 8 --ttft-limit 200 --itl-limit 20

Arrivals are a Poisson process drawn in advance from --seed, so a slow server does not delay the next request. All times count
from the moment at which a request should have been sent. For every rate it prints percentiles of the time to the first token
(TTFT), between tokens (ITL) and to the end, and the goodput: requests a second that met both limits. Without --url it starts
its own server for --model, a checkpoint or a preset with random weights. --seconds and --drain bound the time per rate. With
--offline it also runs `engine.bench` on the same lengths, all requests at once and without HTTP. That throughput is an upper
bound for every rate. Prompts are random token ids, and answers continue past EOS.
"""

import argparse
import asyncio
import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from tqdm import tqdm

from checkpoint import model_config
from cli import Parser, note, run
from config import config_to_hf, has_random_weights
from errors import UserError
from processes import on_ranks
from scripts.bench.serving.soak import free_port, processes, until_healthy
from scripts.lib.results import ROOT, check_output, machine, write_text
from scripts.lib.sse_client import ConnectionEnded, StreamClient, in_event_loop, parse_url

READY_SECONDS = 600.0  # time limit for our own server to load a large model
STOP_SECONDS = 20.0  # time limit for it to end
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
    rate: float, count: int, prompt: Range, new_tokens: Range, vocab_size: int, seed: int, seconds: float = math.inf
) -> list[Request]:
    """The first `count` requests of a Poisson process with `rate` arrivals a second, or fewer if `seconds` end before.

    Lengths are uniform in their ranges. With one seed, all rates have the same lengths and the same gaps, scaled by the rate.
    The prompts differ between rates, so that the server's prefix cache never holds the prompts of another rate.
    """
    rng, words, now, requests = random.Random(seed), random.Random(f"{seed} {rate}"), 0.0, []
    for _ in range(count):
        now += rng.expovariate(1.0) / rate
        if now > seconds:
            break
        length, limit = rng.randint(*prompt), rng.randint(*new_tokens)
        requests.append(Request(now, [words.randrange(vocab_size) for _ in range(length)], limit))
    return requests


def parse_range(text: str) -> Range:
    """Parse a number of tokens (`64`) or a range (`16-128`). Raises UserError."""
    low, dash, high = text.partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()) or not 1 <= int(low) <= int(high or low):
        raise UserError(f"{text!r} is no length; give a number of tokens, or a range such as 16-128")
    return int(low), int(high or low)


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


def table(result: dict[str, Any]) -> str:
    """A Markdown table with one line per rate. Cells with three figures hold p50, p90 and p99."""
    limits = f"goodput, TTFT ≤ {result['settings']['ttft_limit']:g} ms, ITL ≤ {result['settings']['itl_limit']:g} ms"
    spreads = " | ".join(f"{name}, ms: p50 / p90 / p99" for name in ("TTFT", "ITL", "end to end"))
    head = f"| offered, requests/s | served, requests/s | tokens/s | {spreads} | {limits} | failed |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for one in result["rates"]:
        s = one["summary"]
        spread = [" / ".join(f"{ms:.1f}" for ms in (s[name] or {}).values()) for name in ("ttft_ms", "itl_ms", "end_to_end_ms")]
        figures = [f"{one['rate']:g}", f"{s['requests_per_second']:.2f}", f"{s['tokens_per_second']:.1f}", *spread]
        lines.append(f"| {' | '.join(figures)} | {s['goodput']:.2f} | {sum(s['failed'].values())} of {s['requests']} |")
    return "\n".join(lines)


# --- the server, and the engine without it -------------------------------------------------------------------------------


def shared_flags(args: argparse.Namespace) -> list[str]:
    """The flags that the server and `engine.bench` both take."""
    chosen = {"--variant": args.variant, "--device": args.device, "--dtype": args.dtype, "--comm": args.comm}
    chosen |= {"--simulate-link": args.simulate_link, "--max-num-seqs": args.max_num_seqs}
    return [str(part) for flag, value in chosen.items() if value is not None for part in (flag, value)]


@contextmanager
def server_of(ranks: int, flags: Sequence[str], log: Path, **environ: str) -> Iterator[str]:
    """Start a server with these flags, yield its URL when it is ready, and stop it at the end. Its output goes to `log`.

    Raises UserError if it ends before it is ready.
    """
    port = free_port()
    command = [sys.executable, "-m", "server", "--tp", str(ranks), "--port", str(port), "--drain-timeout", "1", *flags]
    with running(command, port, log, **environ) as url:
        yield url


@contextmanager
def vllm_of(args: argparse.Namespace, log: Path) -> Iterator[str]:
    """As `server_of`, with vLLM's server and random weights."""
    port = free_port()
    lengths = args.prompt_length[1] + args.new_tokens[1]
    with tempfile.TemporaryDirectory() as folder:
        config = config_to_hf(model_config(args.model, None, args.ranks))
        (Path(folder) / "config.json").write_text(json.dumps(config))
        command = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        command += [
            "--model",
            folder,
            "--load-format",
            "dummy",
            "--skip-tokenizer-init",
            "--tensor-parallel-size",
            str(args.ranks),
        ]
        command += ["--dtype", args.dtype or "bfloat16", "--max-model-len", str(lengths), "--no-enable-prefix-caching"]
        command += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
        if args.max_num_seqs:
            command += ["--max-num-seqs", str(args.max_num_seqs)]
        with running(command, port, log) as url:
            yield url


@contextmanager
def running(command: Sequence[str], port: int, log: Path, **environ: str) -> Iterator[str]:
    """Start a server by `command`, yield its URL when it is ready, and stop it at the end. Its output goes to `log`.

    Raises UserError if it ends before it is ready.
    """
    with log.open("wb") as output:
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | environ
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, url, log)
        yield url
    finally:
        stop(process)


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    with httpx.Client(base_url=url, trust_env=False) as client:
        while process.poll() is None and time.monotonic() < end:
            with suppress(httpx.TransportError):
                if client.get("/health").status_code == 200:
                    return
            time.sleep(0.02)
    note("\n".join(log.read_text(errors="replace").splitlines()[-80:]))
    raise UserError(f"the server was not ready within {READY_SECONDS:g} s, or ended; the end of {log} stands above")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a server. If it does not end within `STOP_SECONDS`, kill all its processes one by one: they share no group."""
    if process.poll() is not None:
        return
    all_of_them = processes(process.pid)
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        for pid in all_of_them:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[str]:
    """Yield the URL of a server: that of --url, or that of our own server, which is stopped at the end."""
    if args.url:
        yield args.url
        return
    if args.vllm_python:
        with vllm_of(args, args.out.with_suffix(".log")) as url:
            yield url
        return
    flags = ["--model", args.model, *shared_flags(args), "--max-queue", str(args.requests)]
    with server_of(args.ranks, flags, args.out.with_suffix(".log")) as url:
        yield url


def offline(args: argparse.Namespace) -> dict[str, Any]:
    """The result of `engine.bench` with the same number of requests, all of the mean lengths. Raises UserError."""
    lengths = [sum(bounds) // 2 for bounds in (args.prompt_length, args.new_tokens)]
    command = [*on_ranks(args.ranks), "-m", "engine.bench", "--model", args.model, "--requests", str(args.requests)]
    command += ["--prompt-length", str(lengths[0]), "--new-tokens", str(lengths[1]), *shared_flags(args)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError("engine.bench failed; what it said stands above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def recorded(answer: Answer) -> dict[str, Any]:
    """An answer as it is written to the file: times in seconds, rounded to 1 µs, and gaps in whole µs."""
    fields = asdict(answer)
    fields["gaps_us"] = [round(gap * 1e6) for gap in fields.pop("gaps")]
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}


async def offer_all(args: argparse.Namespace, url: str, vocab_size: int) -> list[dict[str, Any]]:
    """Measure every rate in turn, after a few warm-up requests."""
    rates: list[dict[str, Any]] = []
    more = {"detokenize": False} if args.vllm_python else {}  # `vllm_of` starts the server without a tokenizer
    parse_url(url)
    async with httpx.AsyncClient(base_url=url) as client:
        await until_healthy(client)
    async with StreamClient(url, args.timeout) as client:
        shape = (args.prompt_length, args.new_tokens, vocab_size)
        await offer(client, plan(args.rates[0], min(4, args.requests), *shape, args.seed + 1), "warm-up", more=more)
        gc.collect()
        gc.freeze()  # the garbage collector then skips the imported modules, so that it adds no delay between tokens
        for rate in args.rates:
            requests = plan(rate, args.requests, *shape, args.seed, args.seconds)
            answers = await offer(client, requests, f"{rate:g} requests/s", args.drain, more)
            found = summary(answers, args.ttft_limit, args.itl_limit)
            rates.append({"rate": rate, "summary": found, "answers": [recorded(a) for a in answers]})
    return rates


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("the server")
    what.add_argument("--url", help="of one that runs already; else one is started")
    what.add_argument("--vocab-size", type=int, metavar="N", help="with --url: prompts are of ids below N")
    what.add_argument("--model", metavar="DIR|PRESET", help="the checkpoint to serve, or a preset with random weights")
    what.add_argument(
        "--vllm-python", metavar="PYTHON", help="serve MODEL by vLLM instead, of this Python's environment, with random weights"
    )
    what.add_argument("--ranks", type=int, default=2, help="default: 2")
    what.add_argument("--variant", help="another residual variant than the checkpoint's")
    what.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA if there is any")
    what.add_argument("--dtype", help="default: bfloat16 on CUDA, float32 on CPU")
    what.add_argument("--comm", metavar="NAME", help="how ranks sum")
    what.add_argument("--simulate-link", metavar="LATENCY,BANDWIDTH", help="on CPU: 10ms,100MB/s")
    what.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences in a step")
    load = parser.add_argument_group("the load")
    load.add_argument(
        "--rates", nargs="+", type=float, default=[1.0, 2.0, 4.0], metavar="R", help="requests/s (default: 1 2 4)"
    )
    load.add_argument(
        "--requests", type=int, metavar="N", help="at each rate, at most (default: 64; with --seconds, what arrives in them)"
    )
    load.add_argument(
        "--seconds", type=float, default=math.inf, metavar="S", help="of arrivals at each rate, at most (default: no limit)"
    )
    load.add_argument(
        "--drain",
        type=float,
        metavar="S",
        help="cut off what still runs so long behind the last arrival (default: wait for all)",
    )
    load.add_argument("--prompt-length", default="64", metavar="N|A-B", help="tokens, one number or a range (default: 64)")
    load.add_argument("--new-tokens", default="32", metavar="N|A-B", help="tokens, one number or a range (default: 32)")
    load.add_argument("--seed", type=int, default=0, help="of arrivals, prompts and lengths (default: 0)")
    load.add_argument("--timeout", type=float, default=600, help="seconds without a byte that fail a request (default: 600)")
    out = parser.add_argument_group("what to report")
    out.add_argument("--ttft-limit", type=float, default=1000, metavar="MS", help="for goodput: first token (default: 1000)")
    out.add_argument(
        "--itl-limit", type=float, default=100, metavar="MS", help="for goodput: mean time between tokens (default: 100)"
    )
    out.add_argument("--offline", action="store_true", help="run engine.bench first, on the same lengths")
    out.add_argument("--out", type=Path, default=ROOT / "out" / "load.json", help="default: out/load.json")
    args = parser.parse_args()
    args.prompt_length, args.new_tokens = parse_range(args.prompt_length), parse_range(args.new_tokens)
    if (args.url is None) == (args.model is None):
        raise UserError("give --model to start a server, or --url of one that runs")
    if args.url and (args.vocab_size is None or args.offline):
        raise UserError("--url needs --vocab-size, and goes without --offline")
    if args.vllm_python and (args.url or args.variant or args.comm or args.offline or not has_random_weights(args.model)):
        raise UserError(
            "--vllm-python serves a --model with random weights, and goes without --url, --variant, --comm and --offline"
        )
    if args.offline and args.requests is None and args.seconds < math.inf:
        raise UserError("--offline needs --requests beside --seconds: it sends all of them at once")
    if min(args.rates) <= 0 or args.seconds <= 0 or (args.drain is not None and args.drain < 0):
        raise UserError("--rates and --seconds must be above 0, and --drain not below")
    if args.requests is None:
        args.requests = 64 if args.seconds == math.inf else math.ceil(2 * max(args.rates) * args.seconds) + 16
    if min(args.requests, args.ranks) < 1:
        raise UserError("--requests and --ranks must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    vocab_size = args.vocab_size or model_config(args.model, args.variant, args.ranks).vocab_size
    check_output(args.out)
    settings = {k: None if v == math.inf else v for k, v in vars(args).items() if k not in ("out", "vllm_python")}
    settings["server"] = "vLLM" if args.vllm_python else "Rung"
    result: dict[str, Any] = {"settings": settings}
    if args.offline:
        result["offline"] = offline(args)
        note(f"all at once, without HTTP: {result['offline']['generated_tokens_per_second']:.1f} tokens/s")
    with serving(args) as url:
        result["rates"] = in_event_loop(offer_all(args, url, vocab_size))
    result["machine"] = machine()  # last: it initializes CUDA, and the server uses the GPUs' memory until it ends
    write_text(args.out, json.dumps(result, separators=(",", ":")) + "\n")
    print(table(result))
    note(f"wrote {args.out}")


if __name__ == "__main__":
    run(main)
