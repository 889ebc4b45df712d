"""Measure what the HTTP frontend and the load generator cost per token. A process that only emits tokens replaces the engine.

    python -m scripts.bench.serving.frontend --streams 64 --step 4
    python -m scripts.bench.serving.frontend --streams 256 --step 8 --new-tokens 512

The stand-in uses the engine's protocol with the real frontend process. It emits a request's first token at once, and then one
token for every request each --step ms. The client is that of `make throughput`. The output holds the streamed tokens per second;
the CPU time per token of frontend and client (the client's includes its busy wait of 2 ms before each arrival); the time to the
first token, which frontend and client cause alone; and the time between tokens, which includes --step.
"""

import argparse
import gc
import json
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from cli import Parser, run
from engine.protocol import Abort, Outputs, Ready, Shutdown, Submit, SubmitAll, TokenOutput, decode_to_engine
from engine.worker import FrontendLink
from errors import UserError
from ranks.ports import free_port
from ranks.processes import run_folder
from scripts.lib.load_generator import offer, plan, summary
from scripts.lib.results import ROOT
from scripts.lib.servers import STOP_SECONDS, is_healthy
from scripts.lib.sse_client import StreamClient
from server.process import Frontend
from server.settings import load_settings

MODEL = ROOT / "models" / "tiny-hybrid"
VOCABULARY = 1024  # of MODEL
FIRST_ID = 300  # a token id that decodes to whole characters
READY_SECONDS = 120.0  # time limit for the frontend to answer
SPIN_SECONDS = 0.001  # ZeroMQ waits in whole ms


class StandIn:
    """Emits tokens for every submitted request. step: seconds between tokens."""

    def __init__(self, link: FrontendLink, step: float) -> None:
        self.link, self.step = link, step
        self.left: dict[str, int] = {}  # remaining tokens by request
        self.tick = 0.0  # `time.perf_counter()` at which every request gets its next token

    def serve(self) -> None:
        """Emit tokens until the frontend sends Shutdown."""
        while self._take(max(0.0, self.tick - time.perf_counter()) if self.left else 0.1):
            now = time.perf_counter()
            if self.left and now >= self.tick:
                self.tick = max(self.tick + self.step, now)
                self._emit(list(self.left))

    def _take(self, timeout: float) -> bool:
        if timeout < SPIN_SECONDS:
            time.sleep(timeout)
        new, idle = [], not self.left
        for message in map(decode_to_engine, self.link.receive(timeout)):
            if isinstance(message, Shutdown):
                return False
            if isinstance(message, Abort):
                self.left.pop(message.request_id, None)
                continue
            if not isinstance(message, Submit | SubmitAll):
                continue  # this frontend is not replaced, and has no adapters
            for submit in [message] if isinstance(message, Submit) else message.submits():
                self.left[submit.request_id] = submit.params.max_tokens
                new.append(submit.request_id)
        if new:
            if idle:
                self.tick = time.perf_counter() + self.step
            self._emit(new)
        return True

    def _emit(self, request_ids: list[str]) -> None:
        outputs = []
        for request_id in request_ids:
            self.left[request_id] -= 1
            ends = not self.left[request_id]
            outputs.append(TokenOutput(request_id, [FIRST_ID], finish_reason="length" if ends else None))
            if ends:
                del self.left[request_id]
        self.link.send(Outputs(outputs))


def serve_tokens(connection: Connection, port: int, step: float) -> None:
    """Main function of the stand-in's process. Sends the frontend's process id over `connection`."""
    settings = load_settings(["--model", str(MODEL), "--port", str(port), "--log-level", "warning", "--max-num-seqs", "4096"])
    with run_folder() as folder:
        frontend = Frontend(settings, folder)
        connection.send(frontend.process.pid)
        link = FrontendLink(*frontend.addresses)
        link.send(Ready("stand-in", "none", "none", 1, "cpu", "none", 1 << 20, VOCABULARY, 1 << 20, 16))
        StandIn(link, step).serve()
        link.close()
        frontend.close()


def cpu_seconds(pid: int) -> float:
    """User plus system CPU time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(url: str, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run of `args.streams` requests that arrive at `args.rate` a second, after a few warm-up requests."""
    shape = ((args.prompt_length,) * 2, (args.new_tokens,) * 2, VOCABULARY)
    words = random.Random(0)
    requests = plan(args.rate, args.streams, *shape, 0, words)
    async with StreamClient(url, 600) as client:
        await offer(client, plan(100, 8, shape[0], (8, 8), VOCABULARY, 1, words), "warm-up")
        gc.collect()
        gc.freeze()
        before = cpu_seconds(pid), time.process_time()
        answers = await offer(client, requests, "streams")
        spent = cpu_seconds(pid) - before[0], time.process_time() - before[1]
    found = summary(answers, 1e9, 1e9)
    tokens = sum(a.tokens for a in answers)
    found["cpu_us_per_token"] = {
        side: round(s / tokens * 1e6, 2) for side, s in zip(("frontend", "client"), spent, strict=True)
    }
    return found


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="number of requests (default: 64)")
    parser.add_argument("--rate", type=float, default=200.0, metavar="R", help="requests that arrive per second (default: 200)")
    parser.add_argument(
        "--step", type=float, default=5.0, metavar="MS", help="milliseconds between the tokens of a request (default: 5)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=256, metavar="N", help="tokens generated for each request (default: 256)"
    )
    parser.add_argument("--prompt-length", type=int, default=1024, metavar="N", help="token ids of each prompt (default: 1024)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    context, port = multiprocessing.get_context("spawn"), free_port()
    here, there = context.Pipe()
    process = context.Process(target=serve_tokens, args=(there, port, args.step / 1e3))
    process.start()
    there.close()
    pid = None
    try:
        pid = here.recv()
        url = f"http://127.0.0.1:{port}"
        if not is_healthy(url, READY_SECONDS, process.is_alive):
            raise UserError(f"the frontend was not ready within {READY_SECONDS:g} s, or ended")
        found = uvloop.run(measure(url, pid, args))
    finally:
        if pid is not None:
            os.kill(pid, signal.SIGTERM)  # the frontend then sends Shutdown to the stand-in and ends
        process.join(STOP_SECONDS)
        process.kill()
    print(json.dumps({"settings": vars(args), **found}))


if __name__ == "__main__":
    run(main)
