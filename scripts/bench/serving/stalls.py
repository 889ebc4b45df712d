"""How long one client's stream stops while another client sends a single costly request, or one costly kind of connection.

    python -m scripts.bench.serving.stalls                                 # all
    python -m scripts.bench.serving.stalls --only penalties "half bodies"

The stream is read by a process of its own, from another address. For each case prints the largest gap between two pieces of the
stream, and the most CPU seconds that the main threads of the frontend and of rank 0 spent in one gap: these depend less on what else
the machine does. Writes JSON and the table. A step of many tokens is a gap, too: compare with the plain requests beside."""

import argparse
import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from cli import Parser, note, run
from errors import UserError
from ranks.processes import RANK_NAME
from scripts.bench.serving.leftovers import name_of
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import Columns, table
from scripts.lib.process_tree import process_tree
from scripts.lib.results import add_write_option, results_folder, write_table
from scripts.lib.servers import rung_server
from scripts.lib.sse_client import StreamClient

OTHER = "127.0.0.2"  # the address of the other client
SETTLE = 0.5  # seconds for a stream to get going, and for what a request leaves to be done
MOST_SECONDS = 60.0  # of one case
COLUMNS: Columns = {
    "the other client sends": "{case}",
    "largest gap, s": "{gap:.2f}",
    "the frontend's CPU in a gap, s": "{frontend_cpu:.2f}",
    "rank 0's CPU in a gap, s": "{rank_cpu:.2f}",
}
AMBIGUOUS = """start: a
a: a a | "a" | "b" | "c" | WORD
WORD: /[a-z ]+/
"""
# a piece for each token, also for those without text
STREAM = {"prompt": [7] * 8, "max_tokens": 900, "ignore_eos": True, "stream": True, "seed": 1, "return_token_ids": True}


# --- the stream that is watched -----------------------------------------------------------------------------------------------


class Watched:
    """The pieces of one stream, as `StreamClient` passes them on. pids: of the processes whose CPU time is measured."""

    def __init__(self, pids: list[int]) -> None:
        self.files = [Path(f"/proc/{pid}/schedstat") for pid in pids]
        self.piece = asyncio.Event()
        self.begin()

    def begin(self) -> None:
        self.gap, self.cpu = 0.0, [0.0] * len(self.files)
        self.last = time.perf_counter(), self.now()

    def now(self) -> list[float]:
        """Seconds of each process's main thread on a CPU; 0 if it has ended, because ranks may be killed and started again."""
        return [int(file.read_text().split()[0]) / 1e9 if file.exists() else 0.0 for file in self.files]

    def on_status(self, status: int) -> None:
        if status != 200:
            raise UserError(f"the stream was answered with {status}")

    def on_body(self, data: bytes, now: float) -> None:
        cpu = self.now()
        self.gap = max(self.gap, now - self.last[0])
        self.cpu = [max(most, a - b) for most, a, b in zip(self.cpu, cpu, self.last[1], strict=True)]
        self.last = now, cpu
        self.piece.set()


def watch(url: str, commands: Connection) -> None:
    """Process of the stream: for process ids from `commands` begin one, and at the next message send its largest gap and these
    processes' CPU seconds."""

    async def serve() -> None:
        async with StreamClient(url, MOST_SECONDS) as client:
            while True:
                watched = Watched(await asyncio.to_thread(commands.recv))

                async def stream(watched: Watched = watched) -> None:
                    while True:
                        await client.post("/v1/completions", json.dumps(STREAM).encode(), watched)
                        watched.last = float("inf"), watched.now()  # the time to the next stream's first token is no gap

                task = asyncio.create_task(stream())
                await watched.piece.wait()
                await asyncio.sleep(SETTLE)
                watched.begin()
                commands.send(None)
                await asyncio.to_thread(commands.recv)
                watched.piece.clear()
                await asyncio.wait_for(watched.piece.wait(), MOST_SECONDS)  # it may have stopped until now
                commands.send((watched.gap, watched.cpu))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(serve())


# --- the other client ---------------------------------------------------------------------------------------------------------

Attack = Callable[[str], Coroutine[Any, Any, Any]]  # gets the server's URL


def post(path: str, body: Any, times: int = 1) -> Attack:
    """So many equal requests at once, and their answers read. body: JSON, or its bytes."""

    async def attack(url: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        transport = httpx.AsyncHTTPTransport(local_address=OTHER, limits=httpx.Limits(max_connections=None))
        async with httpx.AsyncClient(base_url=url, timeout=MOST_SECONDS, transport=transport) as http:
            headers = {"content-type": "application/json"}
            answers = await asyncio.gather(*[http.post(path, content=data, headers=headers) for _ in range(times)])
        if answers[0].status_code >= 500:
            note(f"  {answers[0].status_code}: {answers[0].text[:200]}")

    return attack


def connections(pieces: Iterable[bytes], count: int = 1, wait: float = 0.0) -> Attack:
    """So many connections at once that send the same pieces. They read nothing for `wait` seconds, and then close."""

    async def one(host: str, port: int) -> None:
        _, writer = await asyncio.open_connection(host, port, local_addr=(OTHER, 0), limit=1024)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        await asyncio.sleep(wait)
        writer.transport.abort()

    async def attack(url: str) -> None:
        parts = urlsplit(url)
        await asyncio.gather(*[one(parts.hostname or "", parts.port or 80) for _ in range(count)], return_exceptions=True)

    return attack


def head(length: str, path: str = "/v1/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n{length}\r\n\r\n".encode()


def whole(body: Any, path: str) -> bytes:
    data = json.dumps(body).encode()
    return head(f"content-length: {len(data)}", path) + data


def complete(**more: Any) -> Attack:
    return post("/v1/completions", {"prompt": [9] * 8, "max_tokens": 24, "ignore_eos": True, **more})


def answers(**more: Any) -> Attack:
    """64 answers to one prompt."""
    return complete(n=64, **more)


def chat(text: str = "Hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 16, **more}


def cases() -> dict[str, Attack]:
    """By name, what the other client does."""
    words = " ".join(random.Random(0).choices(["once", "upon", "a", "time", "there", "was"], k=40))
    long, ids = "a\n" * (5 << 20), list(range(2, 1000))
    bias, prompts = {str(i): 0.5 for i in ids}, [ids[i : i + 900] for i in range(6)]
    filters = {"top_p": 0.9, "top_k": 50, "min_p": 0.01}
    penalties = {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.1}
    all_of_it = {**penalties, **filters, "logit_bias": bias, "min_tokens": 20, "logprobs": 20}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(1000)]
    listed: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "max_tokens": 200, "ignore_eos": True}
    choice = [f"{i} {words}" for i in range(4000)]
    return {
        "nothing": post("/tokenize", {"prompt": "x"}),
        # what the ranks compute
        "64 plain answers": answers(),
        "64 answers with penalties": answers(**penalties),
        "64 answers with top_p, top_k and min_p": answers(**filters),
        "64 answers with 998 biases": answers(logit_bias=bias),
        "64 answers with 998 allowed ids": answers(allowed_token_ids=ids),
        "64 answers with 16 long stop strings": answers(stop=[chr(97 + i) * 1000 for i in range(16)]),
        "64 answers with log-probabilities": answers(logprobs=20),
        "64 answers with all of it": answers(**all_of_it),
        "7 x 128 answers to 900 tokens": complete(prompt=prompts[:1] * 7, n=128, max_tokens=1),
        "7 x 128 answers with 998 biases": complete(prompt=prompts[:1] * 7, n=128, max_tokens=1, logit_bias=bias),
        "900 prompts": complete(prompt=[[i] * 4 for i in ids[:900]], max_tokens=1),
        "6 prompts of 900 tokens": complete(prompt=prompts, max_tokens=1),
        "log-probabilities of 6 prompts of 900 tokens": complete(prompt=prompts, max_tokens=1, prompt_logprobs=20),
        "their echo": complete(prompt=prompts, max_tokens=0, echo=True, logprobs=20),
        "900 prompts of 40 words": complete(prompt=[f"{i} {words}" for i in ids[:900]], max_tokens=1),
        "4,096 embeddings of 40 words": post("/v1/embeddings", {"input": [words] * 4096}),
        # what the frontend reads and writes
        "200 slow readers of log-probabilities": connections(
            [whole(chat(stream=True, **listed), "/v1/chat/completions")], 200, 8.0
        ),
        "4,000 half-sent bodies": connections([head("content-length: 9000") + b'{"prompt": "' + b"a" * 4000], 4000, 2.0),
        "4,000 connections": connections([b""], 4000, 1.0),
        "16 MB in chunks of one byte": connections(
            [head("transfer-encoding: chunked"), *[b"1\r\na\r\n" * 10000] * 280], 1, 1.0
        ),
        "200 paths of 60 kB": connections([b"GET /" + b"%ff" * 20000 + b" HTTP/1.1\r\nhost: a\r\n\r\n"], 200, 0.5),
        "1,000 scrapes": connections([b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n"], 1000, 1.0),
        "a model's name of 15 MB": complete(model=long),
        "a field's name of 15 MB": post("/v1/chat/completions", {**chat(), long: 1}),
        "a tool's name of 15 MB": post("/v1/chat/completions", chat(tools=tools[:1], tool_choice=named(long))),
        "a prompt of 15 MB": complete(prompt=long),
        "15 MB to detokenize": post("/detokenize", {"tokens": [5] * 5_000_000}),
        "1,000 tools": post("/v1/chat/completions", chat(tools=tools)),
        "8,000 messages": post("/v1/chat/completions", {**chat(), "messages": chat()["messages"] * 8000}),
        "not JSON, 15 MB": post("/v1/completions", b"x" * (15 << 20)),
        # grammars
        "64 answers with an ambiguous grammar": answers(guided_grammar=AMBIGUOUS, ignore_eos=False),
        "a regex of a thousand million characters": answers(guided_regex="((a{1000}){1000}){1000}", ignore_eos=False),
        "a choice of 1 MB": answers(guided_choice=choice, ignore_eos=False),
    }


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


# --- measuring ----------------------------------------------------------------------------------------------------------------


async def measure(url: str, pids: list[int], attack: Attack, commands: Connection) -> tuple[float, list[float]]:
    """The largest gap of the stream while the attack runs, and the CPU seconds of the processes."""
    commands.send(pids)
    await asyncio.to_thread(commands.recv)
    try:
        async with asyncio.timeout(MOST_SECONDS):
            await attack(url)
    except (TimeoutError, httpx.HTTPError) as e:
        note(f"  ended: {type(e).__name__}")
    await asyncio.sleep(SETTLE)
    commands.send(None)
    found: tuple[float, list[float]] = await asyncio.to_thread(commands.recv)
    return found


def row(name: str, results: list[tuple[float, list[float]]]) -> dict[str, Any]:
    """The medians of several measurements, in seconds."""
    gap, frontend, rank = (sorted(values)[len(results) // 2] for values in zip(*[(g, *cpu) for g, cpu in results], strict=True))
    return {"case": name, "gap": round(gap, 3), "frontend_cpu": round(frontend, 3), "rank_cpu": round(rank, 3)}


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny-hybrid", help="directory or preset (default: models/tiny-hybrid)")
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel size (default: 2)")
    parser.add_argument("--repeats", type=int, default=1, help="measurements of a case; the median counts (default: 1)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cases whose names contain one of these texts")
    add_write_option(parser)
    args = parser.parse_args()
    folder, rows = results_folder(args), []
    chosen = {name: case for name, case in cases().items() if not args.only or any(text in name for text in args.only)}
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
        server = stack.enter_context(rung_server(args.ranks, ["--model", args.model], log))
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=watch, args=(server.url, there), daemon=True)
        process.start()
        stack.callback(process.kill)
        for name, attack in chosen.items():
            names = {name_of(pid): pid for pid in process_tree(server.pid)}
            pids = [names["rung-frontend"], names[RANK_NAME + "0"]]
            rows.append(row(name, [asyncio.run(measure(server.url, pids, attack, here)) for _ in range(args.repeats)]))
            note(json.dumps(rows[-1]))
    caption = f"{Path(args.model).name}, tensor-parallel size {args.ranks}. Made on {describe(machine())}."
    write_table("stalls", {"machine": machine(), "rows": rows}, text := table(COLUMNS, rows, caption), folder)
    print(text, end="")


if __name__ == "__main__":
    run(main)
