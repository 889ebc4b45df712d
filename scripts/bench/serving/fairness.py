"""How long a client waits for its first token while another one has many requests in the server.

    python -m scripts.bench.serving.fairness --model models/tiny-hybrid            # 1,000 requests of the other client
    python -m scripts.bench.serving.fairness --model llama-3-8b --ranks 1 --fairness off

A client sends one request after another, first to an idle server, then while another client has its requests there. Prints one
JSON line: the times to the first token in ms (median and largest), and the ratio of the medians."""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from cli import Parser, run
from scripts.lib.servers import rung_server


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


async def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:

        async def polite() -> list[float]:
            return [await first_token(http, "192.0.2.1", args.prompt_length, args.new_tokens) for _ in range(args.samples)]

        await polite()  # warm-up
        alone = await polite()
        greedy = [
            asyncio.create_task(first_token(http, "192.0.2.2", args.prompt_length, args.greedy_tokens))
            for _ in range(args.requests)
        ]
        while not (await http.get("/stats")).json()["waiting"] and not all(task.done() for task in greedy):
            await asyncio.sleep(0.1)
        crowded = await polite()
        left = sum(not task.done() for task in greedy)
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
    ratio = statistics.median(crowded) / statistics.median(alone)
    return {"alone_ms": spread(alone), "crowded_ms": spread(crowded), "ratio": round(ratio, 2), "unfinished_requests": left}


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds) * 1e3, 2), "largest": round(max(seconds) * 1e3, 2)}


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint or a preset")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--requests", type=int, default=1000, help="of the other client (default: 1000)")
    parser.add_argument("--samples", type=int, default=20, help="requests of the client that is measured (default: 20)")
    parser.add_argument("--prompt-length", type=int, default=64, help="tokens (default: 64)")
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens of the measured client's answers (default: 8)")
    parser.add_argument("--greedy-tokens", type=int, default=128, help="tokens of the other client's answers (default: 128)")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="places in the batch (default: 64)")
    parser.add_argument("--fairness", choices=("clients", "off"), default="clients", help="as the server's (default: clients)")
    args = parser.parse_args()
    flags = ["--model", args.model, "--fairness", args.fairness, "--trusted-proxy", "127.0.0.1", "--log-level", "warning"]
    flags += ["--max-num-seqs", str(args.max_num_seqs), "--max-queue", str(2 * args.requests)]
    with tempfile.TemporaryDirectory() as folder, rung_server(args.ranks, flags, Path(folder) / "server.log") as server:
        found = asyncio.run(measure(server.url, args))
    print(json.dumps({"settings": vars(args), **found}))


if __name__ == "__main__":
    run(main)
