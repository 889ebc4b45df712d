"""Kill and stop the ranks of a server again and again, and compare every answer with the undisturbed one.

    python -m scripts.bench.serving.chaos                       # 2 gloo ranks, 1,000 kills
    python -m scripts.bench.serving.chaos --kills 10 --seed 5 --no-frontend

Starts its own server on a free loopback port. Clients send the same requests over and over, with all kinds of parameters,
streamed and whole. A random rank or the frontend gets SIGKILL or SIGSTOP, while it computes or while it starts. Every answer must
have the text, ids, log-probabilities and usage that the same request got before the first kill. Only while the frontend is
gone, connections may break. With --journal all processes are killed together, too, and the server is started again with the same
journal; now and then its disk is full. An answer whose connection broke must then be among the results, unless the client had got
nothing of it and had sent the request less than 5 s before the signal: the server may not have written it yet. After each kill
nothing of the dead may be left: processes, ports, files in /dev/shm, folders in the temporary one, GPU memory. Prints how long
clients waited for the first token after a kill, and for what, also after a failure and after Ctrl-C.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from tqdm import tqdm

from cli import Parser, note, run
from errors import UserError
from ranks.processes import RANK_NAME
from scripts.bench.serving.leftovers import Watch, gpu_memory, name_of
from scripts.lib.machine import machine
from scripts.lib.markdown import table_lines
from scripts.lib.process_tree import kill, process_tree
from scripts.lib.results import add_write_option, check_output, results_folder, write_text
from scripts.lib.servers import Server, rung_server
from server.journal import ENDS_OF_SERVERS
from server.recovery import REFUSED

TOLERANCE = 1e-3  # of log-probabilities: prefill and decode add in another order
RECOVERY_SECONDS = 300.0  # limit; then the server is taken for dead
STOPPED = 0.2  # share of signals that are SIGSTOP
FRONTEND, FRONTEND_NAME = 0.2, "rung-frontend"  # share that the frontend gets
AT_START = 0.2  # share that comes while the ranks start
ALL, FULL = 0.3, 0.2  # with --journal, share of kills of everything, and of full disks
FULL_SECONDS = 2.0
WRITTEN_SECONDS = 5.0  # after which a request is in the journal: a frontend that runs writes it within 0.3 s
FULL_BYTES = 4096  # of a file that may be written then
PHASES = {  # what ends each phase of a recovery: a part of a line of the log
    "noticed": "the ranks have ended",
    "processes and imports": "start-up: import",
    "process group": "start-up: process group",
    "weights": "start-up: weights",
    "tuning": "start-up: tuning",
    "cache": "start-up: cache",
    "graphs": "start-up: graphs",
    "engine": "start-up: engine",
    "requests sent again": "requests go on",
    "new frontend": "the ranks serve a new frontend",
}
LAST = {"requests sent again", "new frontend"}  # a recovery ends with one of these
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    "required": ["name", "old", "n"],
    "additionalProperties": False,
}


def requests(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Path and body of requests whose answers are functions of the request."""
    prompts = ["Once upon a time", "The fox", "A little girl had a", "One day a boy named", "In a small house by the sea"]
    variants: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9, "n": 3},
        {"temperature": 0.7, "frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.1},
        {"temperature": 0.8, "logprobs": 3},
        {"temperature": 1.0, "top_k": 20, "stop": [" the", "zzz"], "min_tokens": 15},
        {"temperature": 0.8, "logit_bias": {"20": 2.0, "30": -50.0}, "stop_token_ids": [40, 41], "logprobs": 0, "n": 2},
        {"temperature": 0.6, "prompt": prompts[:3], "min_p": 0.02},
        {"temperature": 0.9, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ]
    found = []
    for i, variant in enumerate(variants * 2):
        shared = {"max_tokens": rng.randrange(20, 70), "seed": rng.randrange(1 << 30), "stream": i < len(variants)}
        body = {
            "prompt": rng.choice(prompts),
            **shared,
            "ignore_eos": "response_format" not in variant,
            "return_token_ids": True,
            **variant,
        }
        only = {"stream_options": {"include_usage": True}} if body["stream"] else {"prompt_logprobs": 1}
        found.append(("/v1/completions", body | only))
    chat = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 60, "seed": 7}
    return [*found, ("/v1/chat/completions", {**chat, "stream": True, "logprobs": True, "top_logprobs": 2})]


@dataclass
class Answer:
    """What must not change, by choice; `numbers` are log-probabilities."""

    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Any] = field(default_factory=dict)
    numbers: list[float] = field(default_factory=list)
    usage: Any = None
    begun: bool = False  # whether the client got anything

    def take(self, body: dict[str, Any]) -> None:
        """Add an event, or a whole answer."""
        self.begun = True
        if "error" in body:
            self.ends[-1] = body["error"]
        if body.get("usage"):
            self.usage = {k: v for k, v in body["usage"].items() if not k.endswith("_details")}  # caches start empty
        for choice in body.get("choices", ()):
            i, said = choice["index"], choice.get("delta") or choice.get("message") or choice
            self.texts[i] = self.texts.get(i, "") + (said.get("text") or said.get("content") or "")
            self.ids.setdefault(i, []).extend(choice.get("token_ids") or ())
            if choice.get("finish_reason"):
                self.ends[i] = choice["finish_reason"]
            self.numbers += _numbers([choice.get("logprobs"), choice.get("prompt_logprobs")])

    def difference(self, other: "Answer") -> str:
        """Where two answers differ; empty if they are the same."""
        for name in ("status", "ends", "ids", "texts", "usage"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)} instead of {getattr(other, name)}"
        mine, others = sorted(self.numbers), sorted(other.numbers)  # choices come in another order
        if len(mine) != len(others) or any(abs(a - b) > TOLERANCE for a, b in zip(mine, others, strict=True)):
            return f"log-probabilities: {len(mine)} and {len(others)} of them"
        return ""


def _numbers(value: Any) -> list[float]:
    """All log-probabilities in a layout of any endpoint."""
    if isinstance(value, dict):
        value = list(value.values())  # ranks, offsets and bytes are integers
    if isinstance(value, list):
        return [n for v in value for n in _numbers(v)]
    return [value] if isinstance(value, float) and math.isfinite(value) else []


class Storm:
    """Clients and kills. `root`: the server's first process. `log`: the file with its output. `idle`: see `Watch`."""

    def __init__(
        self,
        url: str,
        root: int,
        log: Path,
        rng: random.Random,
        frontend: bool = False,
        restart: Callable[[], tuple[Server, Path]] | None = None,
        idle: Sequence[int] = (),
    ) -> None:
        """restart: starts the server again after all its processes were killed, with its journal, and returns its new log."""
        self.url, self.root, self.log, self.rng, self.frontend, self.restart = url, root, log, rng, frontend, restart
        self._watch = Watch(root, list(idle))
        self._disk_full_until = 0.0  # time.time() of the end of the last full disk
        self._frontend_back_at = 0.0  # time.time() when a killed frontend was last replaced; inf while there is none
        self._frontend_signalled_at = 0.0  # time.time() when the frontend last got a signal
        self.outcomes: Counter[str] = Counter()
        self.victims: Counter[str] = Counter()
        self.wrong: list[str] = []  # answers, and what dead processes have left
        self.waits: dict[str, list[float]] = {}  # seconds by phase
        self._tokens: list[float] = []  # time.time() of each since the last kill
        self._work = requests(rng)
        self._answers: list[int] = []  # of each client
        self._deaths = 0  # since all clients had an answer
        self._ended = False

    async def run(self, kills: int, clients: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=RECOVERY_SECONDS, limits=limits, trust_env=False) as client:
            expected = await asyncio.gather(*(self._ask(client, *one, Answer(), "") for one in self._work))
            kept = [i for i, e in enumerate(expected) if (e.ends.get(-1) or {}).get("code") != "invalid_schema"]
            if len(kept) < len(expected):  # a preset has no end-of-text token
                note("requests with a grammar are left out, because the model cannot follow one")
            self._work, self._expected = [self._work[i] for i in kept], [expected[i] for i in kept]
            if failed := [e for e in self._expected if e.status != 200]:
                raise UserError(f"a request fails without any kill: {failed[0]}")
            self._answers = [0] * clients
            tasks = [asyncio.create_task(self._repeat(client, i)) for i in range(clients)]
            try:
                for _ in tqdm(range(kills), desc="kills", unit="kill"):
                    await self._harm()
            finally:
                self._ended = True
            await asyncio.wait_for(asyncio.gather(*tasks), RECOVERY_SECONDS)

    async def _repeat(self, client: httpx.AsyncClient, number: int) -> None:
        at = number * len(self._work) // len(self._answers)  # so that some clients always stream
        while not self._ended:
            at = (at + 1) % len(self._work)
            answer, name, start = Answer(), uuid.uuid4().hex, time.time()
            try:
                await self._ask(client, *self._work[at], answer, name)
                if self.restart and (answer.ends.get(-1) or {}).get("code") in ENDS_OF_SERVERS:
                    raise httpx.RemoteProtocolError("the server ends")
            except httpx.HTTPError as e:
                self.outcomes["connection broken"] += 1
                if self.restart:
                    await self._fetch(client, at, name, self._is_promised(start, answer))
                    continue
                if start > self._frontend_back_at:
                    self.wrong.append(f"{self._work[at]}: {e!r}")
                await asyncio.sleep(0.2)
                continue
            if answer.status == 503 and start < self._frontend_back_at:
                self.outcomes["loading"] += 1
                await asyncio.sleep(0.2)
                continue
            self._answers[number] += 1
            difference = answer.difference(self._expected[at])
            self.outcomes["different" if difference else "the same"] += 1
            if difference:
                self.wrong.append(f"{self._work[at]}: {difference}")

    def _is_promised(self, start: float, answer: Answer) -> bool:
        """Whether the journal must have a request that was sent at `start` and whose connection broke."""
        written = answer.begun or start < self._frontend_signalled_at - WRITTEN_SECONDS
        return written and start > self._disk_full_until

    async def _fetch(self, client: httpx.AsyncClient, at: int, name: str, promised: bool) -> None:
        """Get the result of a request whose connection broke. promised: whether there must be one."""
        end = time.monotonic() + RECOVERY_SECONDS
        while time.monotonic() < end:
            await asyncio.sleep(0.2)
            try:
                response = await client.get(f"{self.url}/v1/results/{name}")
            except httpx.HTTPError:
                continue
            if response.status_code == 404 and not promised:
                self.outcomes["not accepted"] += 1
                return
            if response.status_code != 202:
                answer, expected = Answer(response.status_code), self._expected[at]
                answer.take(response.json())
                answer.usage = answer.usage if expected.usage else None
                difference = answer.difference(expected)
                self.outcomes["different result" if difference else "the same, as a result"] += 1
                if difference:
                    self.wrong.append(f"{self._work[at]}: {difference}")
                return
        self.wrong.append(f"{self._work[at]}: its result does not come")

    async def _ask(self, client: httpx.AsyncClient, path: str, body: dict[str, Any], answer: Answer, name: str) -> Answer:
        """Send a request with the X-Request-Id `name`, and read its answer into `answer`."""
        ended = False
        async with client.stream("POST", self.url + path, json=body, headers={"x-request-id": name}) as response:
            answer.status = response.status_code
            if not body["stream"] or answer.status != 200:
                answer.take(json.loads(await response.aread()))
                return answer
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    answer.take(json.loads(line[6:]))
                    self._tokens.append(time.time())
        if not ended:
            raise httpx.RemoteProtocolError("a stream without [DONE]")
        return answer

    async def _harm(self) -> None:
        kind = self.rng.random()
        if self.restart and kind < ALL:
            await self._kill_all()
        elif self.restart and kind < ALL + FULL:
            await self._fill_disk()
        else:
            await self._kill()

    async def _kill_all(self) -> None:
        """Kill all processes of the server, and start it again."""
        assert self.restart is not None
        await asyncio.sleep(self.rng.uniform(0, 1.5))
        self.victims["everything SIGKILL"] += 1
        self._watch.begin()
        self._frontend_signalled_at = time.time()
        kill(process_tree(self.root))
        starting = asyncio.create_task(asyncio.to_thread(self.restart))
        while not starting.done():
            await self._look()
        server, self.log = await starting
        self.url, self.root, self._deaths = server.url, server.pid, 0
        self._watch.root = server.pid
        await self._all_answered()
        await self._find_left("SIGKILL to everything")

    async def _look(self) -> None:
        await asyncio.to_thread(self._watch.look)
        await asyncio.sleep(0.01)

    async def _find_left(self, what: str) -> None:
        self.wrong += [f"{what}: {one}" for one in await asyncio.to_thread(self._watch.left)]

    async def _fill_disk(self) -> None:
        """For a while the frontend can write only the beginnings of files."""
        self.victims["full disk"] += 1
        pid = next(pid for pid in process_tree(self.root) if name_of(pid) == FRONTEND_NAME)
        unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, unlimited[1]))
        await asyncio.sleep(FULL_SECONDS)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
        self._disk_full_until = time.time()

    async def _kill(self) -> None:
        """Send a signal to a random process, perhaps another one while new ranks start, and wait for tokens again."""
        twice = self.rng.random() < AT_START
        if self._deaths + 1 + twice >= REFUSED:
            await self._all_answered()
        self._deaths += 1 + twice
        await asyncio.sleep(self.rng.uniform(0, 1.5))
        start = self.log.stat().st_size
        self._tokens.clear()
        self._watch.begin()
        name, number = self._signal()
        self.victims[f"{name} {number.name}"] += 1
        killed = time.time()
        what = f"{number.name} to {name}"
        if twice:
            again_at = time.monotonic() + self.rng.uniform(0, 3)
            while time.monotonic() < again_at:  # if the frontend dies next, the ranks go on
                await self._look()
            start = self.log.stat().st_size
            name, again = self._signal(only_kill=True)  # it takes a minute until stopped ranks that start are killed
            self.victims[f"{name} {again.name} while they start"] += 1
            killed = 0.0  # two times would be mixed
            what += f", then {again.name} to {name}"
        end = time.monotonic() + RECOVERY_SECONDS
        while not (recovered := self._recovered(start)) or not (first := self._first_token(max(recovered.values()))):
            if time.monotonic() > end:
                raise UserError(f"the server did not recover from {what}; its log: {self.log}")
            await self._look()
        self._frontend_back_at = min(self._frontend_back_at, time.time())
        if killed and number is signal.SIGKILL:
            times = [killed, *recovered.values(), first]
            kind = "frontend" if name == FRONTEND_NAME else "ranks"
            for phase, a, b in zip([*recovered, "first token"], times, times[1:], strict=False):
                self.waits.setdefault(f"{kind}: {phase}", []).append(b - a)
            self.waits.setdefault(f"{kind}: all", []).append(first - killed)
        await self._find_left(what)

    def _first_token(self, since: float) -> float:
        """When the first token since a time came; 0 if none did."""
        return next((at for at in self._tokens if at >= since), 0.0)

    async def _all_answered(self) -> None:
        """Wait until each client has another answer. Three kills in a row before a request's next token look like its fault."""
        before, end = list(self._answers), time.monotonic() + RECOVERY_SECONDS
        while any(a == b for a, b in zip(before, self._answers, strict=True)):
            if time.monotonic() > end:
                raise UserError(f"a client waited {RECOVERY_SECONDS:g} s for an answer; the server's log: {self.log}")
            await asyncio.sleep(0.01)
        self._deaths = 0

    def _signal(self, only_kill: bool = False) -> tuple[str, signal.Signals]:
        """Send SIGKILL or SIGSTOP to a random rank, or with `frontend` perhaps to the frontend. Returns its name and the signal."""
        end = time.monotonic() + RECOVERY_SECONDS
        while time.monotonic() < end:
            by_name = {name_of(pid): pid for pid in process_tree(self.root)}
            names = [n for n in sorted(by_name) if n.startswith(RANK_NAME)]
            if self.frontend and FRONTEND_NAME in by_name and self.rng.random() < FRONTEND:
                names = [FRONTEND_NAME]
            if names:
                name = self.rng.choice(names)
                number = signal.SIGSTOP if not only_kill and self.rng.random() < STOPPED else signal.SIGKILL
                if name == FRONTEND_NAME:
                    self._frontend_back_at, self._frontend_signalled_at = math.inf, time.time()
                try:
                    os.kill(by_name[name], number)
                except ProcessLookupError:
                    continue
                return name, number
            time.sleep(0.01)  # the ranks are just starting
        raise UserError("the server has no ranks any more")

    def _recovered(self, start: int) -> dict[str, float]:
        """When each phase of the newest recovery ended, if there is one in the log behind byte `start`."""
        with self.log.open("rb") as log:
            log.seek(start)
            lines = log.read().decode(errors="replace").splitlines()
        found = dict[str, float]()
        for line in lines:
            for phase, words in PHASES.items():
                if words in line and (stamp := re.match(r"\S+T\S+Z", line)):
                    found[phase] = datetime.fromisoformat(stamp[0]).timestamp()
        return {phase: found[phase] for phase in PHASES if phase in found} if LAST & found.keys() else {}

    def report(self) -> dict[str, Any]:
        """What was killed, what clients saw, and how long they waited."""
        seconds = {p: {"count": len(w), "median": median(w), "longest": max(w)} for p, w in self.waits.items()}
        return {"signals": self.victims, "answers": self.outcomes, "seconds": seconds, "wrong": self.wrong}


def tables(report: dict[str, Any]) -> str:
    counts = report["signals"] | {f"answers: {k}": v for k, v in report["answers"].items()} | {"wrong": len(report["wrong"])}
    rows = [(p, one["count"], f"{one['median']:.2f}", f"{one['longest']:.2f}") for p, one in report["seconds"].items()]
    whats = table_lines(["signal or answer", "count"], counts.items())
    return "\n".join([*whats, "", *table_lines(["s after SIGKILL to one process", "kills", "median", "longest"], rows)])


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", default="models/tiny-hybrid", help="a checkpoint (default: models/tiny-hybrid)")
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks (default: 2)")
    parser.add_argument("--clients", type=int, default=8, help="concurrent clients (default: 8)")
    parser.add_argument("--kills", type=int, default=1000, help="signals, apart from those while ranks start (default: 1000)")
    parser.add_argument(
        "--frontend", action=argparse.BooleanOptionalAction, default=True, help="kill and stop the frontend, too (default: yes)"
    )
    parser.add_argument(
        "--journal", action="store_true", help="kill everything together, too, and fill the disk of the journal"
    )
    parser.add_argument("--seed", type=int, help="of requests, victims and times (default: random; printed)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON file to write, and beside it a table (default: out/chaos.json)"
    )
    add_write_option(parser)
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="further flags of the server")
    args = parser.parse_args()
    seed = random.randrange(1 << 30) if args.seed is None else args.seed
    note(f"seed {seed}")
    out = check_output(args.out or results_folder(args) / "chaos.json")
    for number in (signal.SIGTERM, signal.SIGINT):  # the latter is ignored in the background of a script
        signal.signal(number, signal.default_int_handler)
    flags = ["--model", args.model, "--max-restarts", str(100 * args.kills), "--hang-seconds", "5", *args.flags]
    folder = Path(tempfile.mkdtemp(prefix="rung-chaos-"))  # kept if something goes wrong: errors name the logs in it
    with ExitStack() as servers:
        if args.journal:
            flags += ["--journal", str(folder / "journal")]
        logs = (folder / f"server-{i}.log" for i in itertools.count())

        def start() -> tuple[Server, Path]:
            log = next(logs)
            return servers.enter_context(rung_server(args.ranks, flags, log)), log

        idle = gpu_memory()
        server, log = start()
        again = start if args.journal else None
        storm = Storm(server.url, server.pid, log, random.Random(seed), args.frontend, again, idle)
        began = time.monotonic()
        try:
            asyncio.run(storm.run(args.kills, args.clients))
        finally:
            settings = {
                name: getattr(args, name) for name in ("model", "ranks", "clients", "kills", "frontend", "journal", "flags")
            }
            report = {"settings": settings | {"seed": seed}, "minutes": (time.monotonic() - began) / 60, **storm.report()}
            out.write_text(json.dumps({"machine": machine(), **report}, indent=1) + "\n")
            print(tables(report))
            write_text(out.with_suffix(".md"), tables(report) + "\n", out)
    if storm.wrong:
        raise UserError(f"seed {seed}: {len(storm.wrong)} wrong answers, such as {storm.wrong[0]}; the server's logs: {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    run(main)
