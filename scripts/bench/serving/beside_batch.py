"""How fast streams are beside a batch of /v1/batches: the gaps between their tokens alone, beside the batch, and beside as many further
streams as the batch has lines in a step, whose rows cost the same.

    python -m scripts.bench.serving.beside_batch                         # a minute on 2 CPU cores
    python -m scripts.bench.serving.beside_batch --model llama-3-8b --ranks 1 --streams 32

Starts its own server with a journal. The three cases alternate. Writes beside-batch.json and .md into out (with --write into docs/results).
"""

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from checkpoints.presets import model_config
from cli import Parser, run
from errors import UserError
from options import whole_number
from scripts.lib.load_generator import Answer, Request, keep_busy, percentiles
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import Columns, table
from scripts.lib.results import add_write_option, results_folder, write_table
from scripts.lib.servers import rung_server
from scripts.lib.sse_client import StreamClient

PROMPT, TOKENS = 32, 64  # tokens of each prompt and answer
REQUESTS = 4  # of each stream in a round
LINES = 2000  # of a batch, which is cancelled at the end of its round
SECONDS = 120.0  # for a batch to begin, for it to end, and between two tokens
CASES = ("nothing", "a batch", "as many streams")
COLUMNS: Columns = {
    "beside": "{case}",
    "median gap, ms": "{gap:.2f}",
    "ratio": "{ratio:.2f}",
    "99th percentile, ms": "{slow:.2f}",
    "first token, ms": "{first:.2f}",
}


def prompt(vocab_size: int) -> list[int]:
    return random.choices(range(vocab_size), k=PROMPT)


async def stream(url: str, clients: int, vocab_size: int) -> list[Answer]:
    """The answers to clients that send their next request when they have the last answer. Raises UserError if one fails."""
    async with StreamClient(url, SECONDS) as client:
        requests = [Request(0.0, prompt(vocab_size), TOKENS) for _ in range(clients * REQUESTS)]
        answers = await keep_busy(client, requests, clients, f"{clients} streams")
    if failed := [answer.outcome for answer in answers if not answer.complete]:
        raise UserError(f"{len(failed)} requests failed: {failed[0]}")
    return answers


@contextmanager
def batch(url: str, vocab_size: int) -> Iterator[None]:
    """A batch that runs meanwhile. Raises UserError."""
    body = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    line = {"method": "POST", "url": "/v1/completions"}
    lines = [{**line, "custom_id": f"{i}", "body": {"prompt": prompt(vocab_size), **body}} for i in range(LINES)]
    with httpx.Client(base_url=f"{url}/v1", timeout=SECONDS, trust_env=False) as http:

        def reach(*statuses: str) -> None:
            end = time.monotonic() + SECONDS
            while (now := http.get(f"/batches/{id}").json())["status"] not in statuses or not now["request_counts"][
                "completed"
            ]:
                if time.monotonic() > end or now["status"] in ("failed", "completed"):
                    raise UserError(f"the batch is {now['status']} and not {' or '.join(statuses)}: {now['errors']}")
                time.sleep(0.05)

        data = "\n".join(map(json.dumps, lines))
        file = http.post("/files", data={"purpose": "batch"}, files={"file": ("lines", data)}).json()["id"]
        asked = {"input_file_id": file, "endpoint": line["url"], "completion_window": "24h"}
        id = http.post("/batches", json=asked).json()["id"]
        reach("in_progress")
        yield
        reach("in_progress")  # else the streams were alone at the end
        http.post(f"/batches/{id}/cancel")
        reach("cancelled")


def measure(url: str, streams: int, rounds: int, vocab_size: int) -> list[dict[str, Any]]:
    """A row for each case, of medians over the rounds."""
    found: dict[str, list[tuple[float, float, float]]] = {case: [] for case in CASES}
    for case in CASES * rounds:
        with batch(url, vocab_size) if case == "a batch" else nullcontext():
            answers = asyncio.run(stream(url, streams * (1 + (case == "as many streams")), vocab_size))
        gaps = percentiles([gap for answer in answers for gap in answer.gaps]) or {}
        found[case].append((gaps["p50"], gaps["p99"], median(answer.first * 1e3 for answer in answers if answer.first)))
    rows = [dict(zip(("gap", "slow", "first"), map(median, zip(*found[case], strict=True)), strict=True)) for case in CASES]
    return [{"case": case, "ratio": row["gap"] / rows[0]["gap"], **row} for case, row in zip(CASES, rows, strict=True)]


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", default="models/tiny-hybrid", help="directory or preset (default: models/tiny-hybrid)")
    parser.add_argument("--ranks", type=whole_number(1), default=1, help="tensor-parallel size (default: 1)")
    parser.add_argument("--streams", type=whole_number(1), default=4, help="and as many lines of a batch (default: 4)")
    parser.add_argument("--rounds", type=whole_number(1), default=5, help="of all cases; the medians count (default: 5)")
    add_write_option(parser)
    args = parser.parse_args()
    folder, vocab_size = results_folder(args), model_config(args.model, None, args.ranks).vocab_size
    with tempfile.TemporaryDirectory() as path:
        flags = ["--model", args.model, "--journal", f"{path}/journal", "--max-num-seqs", str(2 * args.streams)]
        with rung_server(args.ranks, flags, Path(path) / "log") as server:
            rows = measure(server.url, args.streams, args.rounds, vocab_size)
    caption = (
        f"{args.streams} streams, {Path(args.model).name}, tensor-parallel size {args.ranks}. Made on {describe(machine())}."
    )
    write_table("beside-batch", {"machine": machine(), "rows": rows}, text := table(COLUMNS, rows, caption), folder)
    print(text, end="")


if __name__ == "__main__":
    run(main)
