"""Hostile requests must not harm other clients. Each is sent to a server of two ranks while another client streams.

The tests measure the longest time between two tokens of the other client, the memory that frontend and ranks use beyond the
request's body, and the processes that are left running. Time in which the server is ready to run but has no core is not
counted, because the machine may run other tests. `-s` prints the numbers. To add a request, add a line to HOSTILE, or to
HOSTILE_GRAMMARS if it has a schema.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.support.quiet_clock import quiet_seconds
from tests.support.server_process import ServerProcess, children, runs, wait_until
from tests.support.server_thread import MODEL

GAP_SECONDS = 1.0  # 0.3 on a machine with idle cores
MEMORY = 64 << 20  # bytes beyond the body, in the frontend or in a rank
NOISE = 32 << 20  # bytes that allocators keep after any request
ANSWER_SECONDS = 300.0
WORKER_SECONDS = 5

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "Hi"}


HOSTILE: dict[str, tuple[str, str]] = {
    "8 million messages": (CHAT, '{"messages":[' + "0," * 7_900_000 + "0]}"),
    "3 million nulls": (COMPLETIONS, '{"prompt":[' + "null," * 3_000_000 + "null]}"),
    "5 million lists": (COMPLETIONS, '{"prompt":[' + "[]," * 5_000_000 + "[]]}"),
    "a megabyte of nulls": (COMPLETIONS, '{"prompt":[' + "null," * 200_000 + "null]}"),
    "a million unknown names": (COMPLETIONS, "{" + ",".join(f'"k{i}":1' for i in range(1_000_000)) + "}"),
    "16,000 messages": (CHAT, '{"messages":[' + ",".join(['{"role":"user","content":"x"}'] * 16_000) + "]}"),
    "260,000 token ids": (COMPLETIONS, '{"prompt":[' + "5," * 260_000 + "5]}"),
    "4 MB prompt": (COMPLETIONS, json.dumps({"prompt": "word " * 800_000})),
    "4 MB prompt, truncated": (
        COMPLETIONS,
        json.dumps({"prompt": "word " * 800_000, "truncate_prompt_tokens": 8, "max_tokens": 1}),
    ),
    "15 MB message": (CHAT, json.dumps({"messages": [{"role": "user", "content": "word " * 3_000_000}]})),
    "15 MB to tokenize": ("/tokenize", json.dumps({"prompt": "word " * 3_000_000, "return_token_strs": True})),
    "control tokens": (CHAT, json.dumps({"messages": [{"role": "user", "content": "<|end|>" * 200_000}]})),
}


def schema(value: object, **more: object) -> tuple[str, str]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}
    return CHAT, json.dumps({"messages": [USER], "response_format": form, "max_tokens": 20, **more})


def objects(count: int) -> dict[str, object]:
    """A schema of `count` alternative objects, each with three words."""
    words = [{"type": "string", "pattern": f"^[a-z]{{{length},9}}$"} for length in (1, 2, 3)]
    names = [{f"p{i} {j}": word for j, word in enumerate(words)} for i in range(count)]
    return {"anyOf": [{"type": "object", "properties": one, "required": list(one)} for one in names]}


def many(**more: object) -> tuple[str, str]:
    """A request for about as many answers as the queue holds, all with the same parameters."""
    return COMPLETIONS, json.dumps({"prompt": ["a"] * 8, "n": 128, "max_tokens": 1, **more})


MANY: dict[str, tuple[str, str]] = {
    "16,384 ids, 1,024 answers": many(allowed_token_ids=[5] * 16384),
    "0.3 MB of grammar, 1,024 answers": many(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "words", "schema": {"enum": [f"v{i:07}" + "x" * 40 for i in range(6000)]}},
        }
    ),
}

KEPT_LOGPROBS: dict[str, tuple[str, str]] = {
    "131,000 log-probabilities": (
        COMPLETIONS,
        json.dumps({"prompt": ["a"] * 48, "max_tokens": 130, "logprobs": 20, "ignore_eos": True}),
    ),
    "131,000 log-probabilities of prompts": (
        COMPLETIONS,
        json.dumps({"prompt": [[5] * 390] * 16, "max_tokens": 1, "logprobs": 20, "prompt_logprobs": 20, "echo": True}),
    ),
}

LISTS = [{"type": "array", "items": {"type": "string", "pattern": f"^a*{i}$"}, "minItems": 1} for i in range(500)]
HOSTILE_GRAMMARS: dict[str, tuple[str, str]] = {
    "3,000 objects, n 16": schema(objects(3000), n=16),
    "900 objects, n 16": schema(objects(900), n=16),
    "300 patterns at once": schema({"type": "string", "allOf": [{"pattern": f"^.*{i}.*$"} for i in range(300)]}),
    "a mask too complex, n 16": schema(
        {"type": "array", "prefixItems": [{"const": "some words"}], "items": {"anyOf": LISTS}, "minItems": 2}, n=16
    ),
    "16 automata that grow": schema({"type": "string", "pattern": "^([a-z]*[0-9]){1,500}([a-f]*x){1,200}$"}, n=16),
}


@dataclass
class Other:
    """Another client, which streams one answer after another and notes the gaps between tokens in seconds."""

    url: str
    pids: list[int]  # the server's processes
    gaps: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self.url, timeout=300) as http:
            while not self.stop.is_set():
                with http.stream("POST", COMPLETIONS, json=body) as answer:
                    if answer.status_code != 200:
                        self.failures.append(f"status {answer.status_code}")
                    last = None
                    for _ in answer.iter_lines():
                        now = quiet_seconds(os.getpid(), *self.pids)
                        if last is not None:
                            self.gaps.append(now - last)
                        last = now
                        if self.stop.is_set():
                            break


def memory(pid: int, name: str) -> int:
    """The entry `name` of /proc/PID/status in bytes, for example VmRSS or VmHWM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--model", MODEL, "--worker-seconds", WORKER_SECONDS, ranks=2) as started:
        started.ready()
        started.http.post("/tokenize", json={"prompt": "Hi"})
        started.http.post("/tokenize", json={"prompt": "word " * 20_000})  # starts the second worker
        yield started


ALL = {**HOSTILE, **HOSTILE_GRAMMARS, **MANY, **KEPT_LOGPROBS}
OF = 8  # a run tries one of so many neighbours, because each keeps the server busy for seconds


@pytest.mark.parametrize("place", range(-(-len(ALL) // OF)))
def test_a_hostile_request_harms_nobody_else(server: ServerProcess, in_turn: Callable[..., str], place: int) -> None:
    name = in_turn(list(ALL)[place * OF : (place + 1) * OF], place)
    path, body = ALL[name]
    pids = [*server.rank_pids(), *server.frontend_pids()]
    other = Other(server.url, pids)
    thread = threading.Thread(target=other.run)
    thread.start()
    try:
        wait_until(lambda: len(other.gaps) > 20, 300, "the other client's tokens")
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak VmHWM
        before = {pid: memory(pid, "VmRSS") for pid in pids}
        other.gaps.clear()
        began = time.monotonic()
        answer = server.http.post(path, content=body, headers={"content-type": "application/json"}, timeout=ANSWER_SECONDS)
        seconds = time.monotonic() - began
        wait_until(lambda: len(other.gaps) > 5, 300, "the other client's tokens")
        grown = max(memory(pid, "VmHWM") - before[pid] for pid in pids) - len(body)
    finally:
        other.stop.set()
        thread.join()
    message = str(answer.json().get("error", {}).get("message", "no error"))
    print(
        f"\n{name:32} {len(body) / 1e6:6.1f} MB  {answer.status_code}  {seconds:6.2f} s  gap {max(other.gaps):5.2f} s  {max(0, grown) >> 20:4} MiB  {message[:60]}"
    )
    assert answer.status_code in (200, 400) and len(message) < 1000
    assert not other.failures
    assert max(other.gaps) < GAP_SECONDS
    assert grown < MEMORY + NOISE


def test_nothing_is_left_of_clients_that_leave(server: ServerProcess) -> None:
    """Jobs of clients that have disconnected are ended, and the next client is served."""
    path, body = HOSTILE["15 MB to tokenize"]
    workers = [pid for frontend in server.frontend_pids() for pid in children(frontend)]
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(
                path, content=body, headers={"content-type": "application/json"}, timeout=httpx.Timeout(60, read=0.2)
            )
    # On a busy machine several attempts may exceed the worker's time limit, because workers have a lower priority.
    long = {"prompt": "word " * 20_000}
    wait_until(lambda: server.http.post("/tokenize", json=long).status_code == 200, 120, "the tokens of a long text")
    assert server.http.post(CHAT, json={"messages": [USER], "max_tokens": 1}).status_code == 200
    wait_until(
        lambda: len([p for f in server.frontend_pids() for p in children(f) if runs(p)]) <= len(workers), 120, "few workers"
    )


def test_workers_end_with_the_server(server: ServerProcess) -> None:
    workers = [pid for frontend in server.frontend_pids() for pid in children(frontend)]
    assert workers
    server.close()
    wait_until(lambda: not any(map(runs, workers)), 120, "the end of the workers")
