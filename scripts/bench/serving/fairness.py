"""How long a client waits for its first token while another one has many requests in the server.

    python -m scripts.bench.serving.fairness --model models/tiny-hybrid            # 1,000 requests of the other client
    python -m scripts.bench.serving.fairness --model llama-3-8b --ranks 1 --fairness off

A client sends one request after another, first to an idle server, then once another client has all its requests there. It is a
process of its own. For each number of places in the batch prints the medians of the times to the first token, as the client and as
the server's log have them, of the engine's step, and their ratios. Writes JSON with the largest values, too, and the table."""

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from cli import Parser, run
from errors import UserError
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.results import add_write_option, check_output, results_folder, write_text
from scripts.lib.servers import rung_server

MEASURED, OTHER = "192.0.2.1", "192.0.2.2"  # the clients' addresses
STATS_SECONDS = 0.25  # between the engine's reports


Stats = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Load:
    """`samples`: requests of the measured client, `requests`: of the other one. The others: tokens."""

    samples: int
    requests: int
    prompt_length: int
    new_tokens: int
    other_tokens: int


async def first_token(http: httpx.AsyncClient, client: str, prompt: int, answer: int) -> float:
    """Send a request as the client at an address and read its whole answer. Returns seconds until the first token."""
    body = {"prompt": [5 + time.monotonic_ns() % 500] * prompt, "max_tokens": answer, "ignore_eos": True, "stream": True}
    start, first = time.monotonic(), 0.0
    async with http.stream("POST", "/v1/completions", json=body, headers={"x-forwarded-for": client}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line and not first:
                first = time.monotonic() - start
    return first


def polite(url: str, load: Load) -> list[float]:
    """The measured client: one request after another. Returns the seconds until the first token of each."""

    async def ask() -> list[float]:
        async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http:
            return [await first_token(http, MEASURED, load.prompt_length, load.new_tokens) for _ in range(load.samples)]

    return asyncio.run(ask())


async def measure(url: str, load: Load) -> dict[str, Any]:
    """The measured client's seconds alone and in the crowd, those of steps meanwhile, and how many requests of the other one were
    left."""
    loop, limits = asyncio.get_running_loop(), httpx.Limits(max_connections=None)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as http:

            async def stats() -> dict[str, Any]:
                found: dict[str, Any] = (await http.get("/stats")).json()
                return found

            async def measured() -> tuple[list[float], list[float]]:
                return await with_steps(loop.run_in_executor(pool, polite, url, load), stats)

            await measured()  # warm-up
            alone = await measured()
            others = [
                asyncio.create_task(first_token(http, OTHER, load.prompt_length, load.other_tokens))
                for _ in range(load.requests)
            ]
            await until_there(stats, load.requests, lambda: sum(task.done() for task in others))
            crowded = await measured()
            left = sum(not task.done() for task in others)
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
    return {"alone": alone, "crowded": crowded, "unfinished_requests": left}


async def until_there(stats: Stats, requests: int, ended: Callable[[], int]) -> None:
    """Wait until so many requests run or wait in the server, apart from those that have ended. Raises UserError if most have."""
    while (there := await stats())["running"] + there["waiting"] + ended() < requests:
        if ended() > requests // 2:
            raise UserError("half of the other client's requests ended before all were sent; give more --other-tokens")
        await asyncio.sleep(STATS_SECONDS)


async def with_steps(work: Awaitable[list[float]], stats: Stats) -> tuple[list[float], list[float]]:
    """The result of `work`, and the mean seconds of a step in each of the engine's reports meanwhile."""
    steps, task = list[float](), asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait([task], timeout=STATS_SECONDS)
        steps.append((await stats())["step_seconds"])
    return await task, steps


def logged(log: str) -> list[float]:
    """The measured client's seconds until the first token, as the lines of the server's access log have them."""
    return [float(found[1]) for line in log.splitlines() if MEASURED in line and (found := re.search(r"\bttft=(\S+)", line))]


def row(places: int, found: dict[str, Any], log: str, samples: int) -> dict[str, Any]:
    """The figures of a server with so many places in the batch, in ms. The log begins with the warm-up."""
    (alone, alone_steps), (crowded, crowded_steps) = found["alone"], found["crowded"]
    server = logged(log)[samples:]
    pairs = {
        "client": (alone, crowded),
        "server": (server[:samples], server[samples:]),
        "step": (alone_steps, crowded_steps),
    }
    values = {name: {"alone": spread(a), "crowded": spread(b), "ratio": ratio(a, b)} for name, (a, b) in pairs.items()}
    return {"max_num_seqs": places, **values, "unfinished_requests": found["unfinished_requests"]}


def ratio(alone: list[float], crowded: list[float]) -> float:
    return round(median(crowded) / median(alone), 2)


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median": round(median(seconds) * 1e3, 2), "largest": round(max(seconds) * 1e3, 2)}


def table(rows: list[dict[str, Any]], caption: str) -> str:
    names = {"first token": "client", "by the server's log": "server", "step": "step"}
    heads = [
        "places in the batch",
        *(f"{name}{part}" for name in names for part in (" alone, ms", " in the crowd, ms", ", ratio")),
    ]
    cells = [[one["max_num_seqs"], *(cell for name in names.values() for cell in _cells(one[name]))] for one in rows]
    return captioned(heads, cells, caption)


def _cells(one: dict[str, Any]) -> list[str]:
    return [f"{one['alone']['median']:.1f}", f"{one['crowded']['median']:.1f}", f"{one['ratio']:.2f}"]


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", default="models/tiny-hybrid", help="a checkpoint or a preset (default: models/tiny-hybrid)")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--requests", type=int, default=1000, help="of the other client (default: 1000)")
    parser.add_argument("--samples", type=int, default=40, help="requests of the client that is measured (default: 40)")
    parser.add_argument("--prompt-length", type=int, default=64, help="tokens (default: 64)")
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens of the measured client's answers (default: 8)")
    parser.add_argument("--other-tokens", type=int, default=384, help="tokens of the other client's answers (default: 384)")
    parser.add_argument(
        "--max-num-seqs", type=int, nargs="+", default=[8, 16, 64], metavar="N", help="places in the batch (default: 8 16 64)"
    )
    parser.add_argument("--fairness", choices=("clients", "off"), default="clients", help="as the server's (default: clients)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON file to write, and beside it a table (default: out/fairness.json)"
    )
    add_write_option(parser)
    args = parser.parse_args()
    out = check_output(args.out or results_folder(args) / "fairness.json")
    load = Load(args.samples, args.requests, args.prompt_length, args.new_tokens, args.other_tokens)
    rows = []
    for places in args.max_num_seqs:
        flags = ["--model", args.model, "--fairness", args.fairness, "--trusted-proxy", "127.0.0.1"]
        flags += ["--max-num-seqs", str(places), "--max-queue", str(2 * args.requests)]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "server.log"
            with rung_server(args.ranks, flags, log) as server:
                found = asyncio.run(measure(server.url, load))
            rows.append(row(places, found, log.read_text(errors="replace"), args.samples))
        settings = {name: value for name, value in vars(args).items() if name not in ("out", "write")}
        here = machine()
        out.write_text(json.dumps({"machine": here, "settings": settings, "rows": rows}, indent=1) + "\n")
        caption = f"Medians. {Path(args.model).name}, tensor-parallel size {args.ranks}, {args.requests:,} requests. Made on {describe(here)}."
        write_text(out.with_suffix(".md"), table(rows, caption), out)
    print(table(rows, caption), end="")


if __name__ == "__main__":
    run(main)
