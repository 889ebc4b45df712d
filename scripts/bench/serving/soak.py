"""Stress the server on this machine and look for leaks: a minute of streaming clients, then clients that drop connections.

    python -m scripts.bench.serving.soak                                  # 2 ranks, 64 clients for 60 s, 1,000 dropped connections
    python -m scripts.bench.serving.soak --clients 8 --seconds 5 --drops 50

Starts its own server on a free loopback port. At the end the server must be idle, with no KV-cache block in use, no more file
descriptors than before, and no more memory than before plus --memory-mb. No client may see an error. Also measures the
throughput of 32 clients relative to one. Writes soak.json and .md into out (with --write into docs/results).
"""

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from cli import Parser, run
from errors import UserError
from scripts.lib.load_generator import Answer, Request, send
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.process_tree import process_tree
from scripts.lib.results import add_write_option, results_folder, write_table
from scripts.lib.servers import Server, rung_server
from scripts.lib.sse_client import StreamClient

LIMITS = ("--max-num-seqs", "64", "--max-queue", "256")  # of the server
IDS = range(10, 500)  # of prompts
FEW = 32  # clients whose throughput is compared with one's
RATE_SECONDS, WARM_SECONDS, CLOSE_SECONDS = 8.0, 3.0, 1.0  # of a throughput, of a warm-up, for the server to close connections


def footprint(root: int) -> dict[str, int]:
    """Total file descriptors and resident memory (MB) of all the server's processes."""
    fds = memory = 0
    for pid in process_tree(root):
        fds += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return {"file_descriptors": fds, "memory_mb": memory}


async def ask(client: StreamClient, rng: random.Random, new_tokens: int) -> Answer:
    """One streamed completion, greedy or sampled."""
    request = Request(0.0, rng.choices(IDS, k=rng.randrange(2, 12)), new_tokens)
    more = {"temperature": rng.choice([0, 0.8]), "seed": rng.randrange(1 << 30)}
    return await send(client, request, time.perf_counter(), more)


async def load(url: str, clients: int, seconds: float, rng: random.Random) -> list[Answer]:
    """Run `clients` clients; each sends one request after another for `seconds`. Their connections are closed at the end."""
    answers, end = list[Answer](), time.monotonic() + seconds
    async with StreamClient(url, 120) as client:
        with tqdm(desc=f"{clients} clients for {seconds:g} s", unit="request") as bar:

            async def one() -> None:
                while time.monotonic() < end:
                    answers.append(await ask(client, rng, rng.randrange(20, 120)))
                    bar.update()

            await asyncio.gather(*(one() for _ in range(clients)))
    return answers


async def drop(url: str, count: int, rng: random.Random) -> list[Answer]:
    """Open `count` connections, at most 50 at a time, and drop each after a random time."""
    places = asyncio.Semaphore(50)
    async with StreamClient(url, 120) as client:
        with tqdm(total=count, desc="dropping", unit="connection") as bar:

            async def one() -> Answer:
                async with places:
                    task = asyncio.create_task(ask(client, rng, 400))
                    await asyncio.wait([task], timeout=rng.uniform(0.0, 0.6))
                    task.cancel()  # `send` then closes the connection
                    bar.update()
                    return await task

            return await asyncio.gather(*(one() for _ in range(count)))


async def until_idle(url: str) -> dict[str, Any]:
    """What /stats says when nothing runs, waits or holds a block, or after half a minute."""
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        for _ in range(60):
            stats: dict[str, Any] = (await client.get("/stats")).json()
            if not stats["running"] and not stats["waiting"] and not stats["kv_blocks_used"]:
                break
            await asyncio.sleep(0.5)
    return {name: stats[name] for name in ("running", "waiting", "kv_blocks_used", "preemptions")}


def outcomes(answers: list[Answer]) -> dict[str, int]:
    return dict(Counter(answer.outcome for answer in answers))


async def soak(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    rng = random.Random(args.seed)

    async def rate(clients: int, seconds: float) -> tuple[float, list[Answer]]:
        """Generated tokens a second, and the answers."""
        start = time.monotonic()
        answers = await load(server.url, clients, seconds, rng)
        return sum(answer.tokens for answer in answers) / (time.monotonic() - start), answers

    await load(server.url, args.clients, WARM_SECONDS, rng)  # allocations at first use are not leaks
    await asyncio.sleep(CLOSE_SECONDS)
    before = footprint(server.pid)
    speeds = {n: (await rate(n, RATE_SECONDS))[0] for n in (1, FEW)}
    speed, loaded = await rate(args.clients, args.seconds)
    dropped = await drop(server.url, args.drops, rng)
    idle = await until_idle(server.url)
    await asyncio.sleep(CLOSE_SECONDS)
    return {
        "before": before,
        "after": footprint(server.pid),
        "load": {"tokens_per_second": speed, "outcomes": outcomes(loaded)},
        "dropped": outcomes(dropped),
        "idle": idle,
        "tokens_per_second": speeds,
        "speed_32_over_1": speeds[FEW] / speeds[1],
    }


def table(result: dict[str, Any], args: argparse.Namespace, where: str) -> str:
    """The results as a Markdown table."""
    before, after, speeds = result["before"], result["after"], result["tokens_per_second"]
    rows = {
        "tokens/s, 1 client": f"{speeds[1]:.0f}",
        "tokens/s, 32 clients": f"{speeds[FEW]:.0f} ({result['speed_32_over_1']:.1f} times one client's)",
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
    if not set(result["dropped"]) <= {"cut off", "complete"}:
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
    parser.add_argument("--memory-mb", type=int, default=100, help="growth of all processes that is no leak (default: 100)")
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
