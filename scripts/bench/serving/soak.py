"""Stress the server on this machine and look for leaks: a minute of streaming clients, then clients that drop connections.

    python -m scripts.bench.serving.soak                                  # 2 ranks, 64 clients for 60 s, 1,000 dropped connections
    python -m scripts.bench.serving.soak --clients 8 --seconds 5 --drops 50

Starts its own server on a free loopback port. At the end the server must be idle, with no KV-cache block in use, no more file
descriptors than before, and no more memory than before plus --memory-mb. No client may see an error. Also measures the
throughput of 32 clients relative to one. Writes soak.json and .md into out (with --write into docs/results).
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from cli import Parser, run
from errors import UserError
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.process_tree import process_tree
from scripts.lib.results import add_write_option, results_folder, write_table
from scripts.lib.servers import Server, rung_server

LIMITS = ("--max-num-seqs", "64", "--max-queue", "256")  # of the server
PROMPTS = ("Once upon a time", "The fox", "A little girl had a", "One day a boy named", "In a small house by the sea")


def footprint(root: int) -> dict[str, int]:
    """Total file descriptors and resident memory (MB) of all the server's processes."""
    fds = memory = 0
    for pid in process_tree(root):
        fds += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return {"file_descriptors": fds, "memory_mb": memory}


@dataclass
class Tally:
    tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)


def body(rng: random.Random, model: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": rng.choice(PROMPTS),
        "max_tokens": max_tokens,
        "temperature": rng.choice([0, 0.8]),
        "seed": rng.randrange(1 << 30),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def stream(client: httpx.AsyncClient, request: dict[str, Any], tally: Tally, give_up: float | None = None) -> None:
    """One streamed completion. With `give_up`, the connection is dropped after that many seconds."""
    try:
        async with asyncio.timeout(give_up), client.stream("POST", "/v1/completions", json=request) as response:
            if response.status_code != 200:
                tally.outcomes[f"status {response.status_code}"] += 1
                return
            last = ""
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    last = line[6:]
                    if last != "[DONE]" and (usage := json.loads(last).get("usage")):
                        tally.tokens += usage["completion_tokens"]
            tally.outcomes["complete" if last == "[DONE]" else "cut off"] += 1
    except TimeoutError:
        tally.outcomes["dropped by us"] += 1
    except httpx.TransportError as e:
        tally.outcomes[type(e).__name__] += 1


async def load(client: httpx.AsyncClient, model: str, clients: int, seconds: float, rng: random.Random) -> Tally:
    """Run `clients` clients; each sends one request after another for `seconds`."""
    tally, end = Tally(), time.monotonic() + seconds
    with tqdm(desc=f"{clients} clients for {seconds:g} s", unit="request") as bar:

        async def one() -> None:
            while time.monotonic() < end:
                await stream(client, body(rng, model, rng.randrange(20, 120)), tally)
                bar.update()

        await asyncio.gather(*(one() for _ in range(clients)))
    return tally


async def drop(client: httpx.AsyncClient, model: str, count: int, rng: random.Random) -> Tally:
    """Open `count` connections, at most 50 at a time, and drop each after a random time."""
    tally, places = Tally(), asyncio.Semaphore(50)
    bar = tqdm(total=count, desc="dropping", unit="connection")

    async def one() -> None:
        async with places:
            await stream(client, body(rng, model, 400), tally, give_up=rng.uniform(0.0, 0.6))
            bar.update()

    await asyncio.gather(*(one() for _ in range(count)))
    bar.close()
    return tally


async def until_idle(client: httpx.AsyncClient) -> dict[str, Any]:
    for _ in range(60):
        stats: dict[str, Any] = (await client.get("/stats")).json()
        if not stats["running"] and not stats["waiting"] and not stats["kv_blocks_used"]:
            break
        await asyncio.sleep(0.5)
    return stats


async def rate(client: httpx.AsyncClient, model: str, clients: int, rng: random.Random) -> float:
    """Generated tokens a second with this number of clients."""
    start = time.monotonic()
    tally = await load(client, model, clients, 8.0, rng)
    return tally.tokens / (time.monotonic() - start)


async def soak(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    rng = random.Random(args.seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await load(client, model, args.clients, 3, rng)  # warm-up: allocations at first use are not leaks
        before = footprint(server.pid)
        speeds = {n: await rate(client, model, n, rng) for n in (1, 32)}
        loaded = await load(client, model, args.clients, args.seconds, rng)
        dropped = await drop(client, model, args.drops, rng)
        idle = await until_idle(client)
    await asyncio.sleep(1)
    return {
        "before": before,
        "after": footprint(server.pid),
        "load": {"tokens_per_second": loaded.tokens / args.seconds, "outcomes": dict(loaded.outcomes)},
        "dropped": dict(dropped.outcomes),
        "idle": {k: idle[k] for k in ("running", "waiting", "kv_blocks_used", "preemptions")},
        "tokens_per_second": speeds,
        "speed_32_over_1": speeds[32] / speeds[1],
    }


def table(result: dict[str, Any], args: argparse.Namespace, where: str) -> str:
    """The results as a Markdown table."""
    before, after, speeds = result["before"], result["after"], result["tokens_per_second"]
    rows = {
        "tokens/s, 1 client": f"{speeds[1]:.0f}",
        "tokens/s, 32 clients": f"{speeds[32]:.0f} ({result['speed_32_over_1']:.1f} times one client's)",
        f"tokens/s, {args.clients} streaming clients for {args.seconds:g} s": f"{result['load']['tokens_per_second']:.0f}",
        "their requests": ", ".join(f"{n} {kind}" for kind, n in result["load"]["outcomes"].items()),
        "connections opened and dropped": ", ".join(f"{n} {kind}" for kind, n in result["dropped"].items()),
        "KV-cache blocks in use afterwards": str(result["idle"]["kv_blocks_used"]),
        "file descriptors before and after": f"{before['file_descriptors']}, {after['file_descriptors']}",
        "resident memory of all processes, before and after": f"{before['memory_mb']} MB, {after['memory_mb']} MB",
    }
    caption = f"{Path(args.model).name} on {args.ranks} ranks, clients on the same machine. Made on {where}."
    return captioned(["what", "seen"], rows.items(), caption)


def verdict(result: dict[str, Any], memory_mb: int) -> list[str]:
    """The problems found, one sentence each."""
    wrong = []
    if any(result["idle"][k] for k in ("running", "waiting", "kv_blocks_used")):
        wrong.append(f"the idle server still holds {result['idle']}")
    if set(result["load"]["outcomes"]) != {"complete"}:
        wrong.append(f"clients saw {result['load']['outcomes']}")
    if not set(result["dropped"]) <= {"dropped by us", "complete"}:
        wrong.append(f"dropped connections ended as {result['dropped']}")
    before, after = result["before"], result["after"]
    if after["file_descriptors"] > before["file_descriptors"] + 4:
        wrong.append(f"file descriptors grew from {before['file_descriptors']} to {after['file_descriptors']}")
    if after["memory_mb"] > before["memory_mb"] + memory_mb:
        wrong.append(f"memory grew from {before['memory_mb']} to {after['memory_mb']} MB")
    return wrong


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", default="models/tiny-hybrid", help="a checkpoint (default: models/tiny-hybrid)")
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks (default: 2)")
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients (default: 64)")
    parser.add_argument("--seconds", type=float, default=60, help="seconds of load (default: 60)")
    parser.add_argument("--drops", type=int, default=1000, help="connections opened and dropped (default: 1000)")
    parser.add_argument(
        "--memory-mb",
        type=int,
        default=100,
        help="growth of all processes together that is not taken for a leak (default: 100)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of prompts and times (default: 0)")
    add_write_option(parser)
    args = parser.parse_args()
    folder = results_folder(args)
    flags = ["--model", args.model, *LIMITS]
    with tempfile.TemporaryDirectory() as logs, rung_server(args.ranks, flags, Path(logs) / "server.log") as server:
        result = asyncio.run(soak(args, server))
    where = machine()
    settings = {key: value for key, value in vars(args).items() if key != "write"}
    text = table(result, args, describe(where, "cpu"))
    print(text)
    write_table("soak", {"machine": where, "settings": settings, **result}, text, folder)
    if wrong := verdict(result, args.memory_mb):
        raise UserError("; ".join(wrong))


if __name__ == "__main__":
    run(main)
