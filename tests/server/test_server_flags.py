"""Servers with other flags than those of `test_server`: a small KV cache, a key and short queues, other models. And how they end."""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.support.command_line import HYBRID, MODELS
from tests.support.ports import free_port
from tests.support.real_server import LONG, NAME, PROMPT, STORY, Reference, ids_of
from tests.support.server_process import ServerProcess, runs, wait_until
from tests.support.server_thread import Asked, raw_request

PATIENT = ("--drain-timeout", 200)  # on a busy machine a stream may take longer than the default of 30 s
GONE_SECONDS = 60.0  # clients learn within this time that a rank was lost

# --- a KV cache that holds less than the context ----------------------------------------------------------------------------


def test_the_cache_limits_the_length(in_turn: Callable[..., Any]) -> None:
    """All say the length that requests can have, and the longest request runs to its end."""
    ranks, memory, drafts = in_turn([(1, "1M", ()), (2, "512K", ("--speculate", "ngram"))], 0)
    length, free = 128, {"temperature": 0, "ignore_eos": True}
    with ServerProcess("--model", HYBRID, "--kv-memory", memory, *drafts, ranks=ranks) as server:
        server.ready()
        assert f"warning the KV cache holds {length} tokens" in server.log and "--kv-memory" in server.log
        assert f"context {length} tokens, KV cache {length} tokens" in server.log
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == length
        assert server.http.post("/tokenize", json={"prompt": PROMPT}).json()["max_model_len"] == length
        assert server.http.get("/tokenizer_info").json()["model_max_length"] == length
        assert server.stats()["max_model_len"] == length

        ids, most = [5, 6, 7], length - 3
        whole = server.http.post("/v1/completions", json={"prompt": ids, "max_tokens": most, **free}).json()
        assert (whole["usage"]["completion_tokens"], whole["choices"][0]["finish_reason"]) == (most, "length")
        error = server.http.post("/v1/completions", json={"prompt": ids, "max_tokens": most + 1}).json()["error"]
        assert error["code"] == "context_length_exceeded" and f"maximum context length is {length} tokens" in error["message"]

        chat = server.http.post("/v1/chat/completions", json={"messages": STORY, **free}).json()
        assert (chat["usage"]["total_tokens"], chat["choices"][0]["finish_reason"]) == (length, "length")
        response = server.http.post("/v1/responses", json={"input": "Hi"})
        assert response.status_code == 200, response.text
        response = server.http.post("/v1/messages", json={"model": NAME, "messages": STORY, "max_tokens": 1000})
        assert response.status_code == 200, response.text


# --- one process with a key and a short queue -----------------------------------------------------------------------------

GATED = """
import os, sys, time
from cli import run
from server import launch
load, gate = launch.load_model, os.environ["TEST_GATE"]
def load_later(*args, **options):
    while not os.path.exists(gate):
        time.sleep(0.02)
    return load(*args, **options)
launch.load_model = load_later
run(launch.main)
"""
KEY = "sk-rung-test"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose model loads only after the requests that test_loading checks."""
    gate = tmp_path_factory.mktemp("gate") / "open"
    flags = ["--model", HYBRID, "--max-num-seqs", 1, "--max-queue", 1]
    with ServerProcess(*flags, program=("-c", GATED), environ={"TEST_GATE": gate, "RUNG_API_KEY": KEY}) as server:
        wait_until(lambda: server.health(), 300, "an answer from /health")
        server.while_loading = [  # type: ignore[attr-defined]
            server.http.get("/health"),
            server.http.post("/v1/completions", json={"prompt": PROMPT}, headers={"authorization": f"Bearer {KEY}"}),
            server.http.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}),
        ]
        gate.touch()
        yield server.ready()


def test_loading(narrow: ServerProcess) -> None:
    health, completion, models = narrow.while_loading  # type: ignore[attr-defined]
    assert (health.status_code, health.json()) == (503, {"status": "loading"})
    assert completion.status_code == 503 and completion.json()["error"]["code"] == "loading"
    assert int(completion.headers["retry-after"]) >= 1
    assert models.status_code == 200
    assert narrow.http.get("/health").status_code == 200


def test_a_wrong_key(narrow: ServerProcess) -> None:
    assert narrow.client(KEY).models.list().data[0].id == NAME
    for key in ("wrong", KEY + "x", KEY[:-1]):
        with pytest.raises(openai.AuthenticationError) as caught:
            narrow.client(key).completions.create(model=NAME, prompt=PROMPT)
        assert caught.value.code == "invalid_api_key"
    assert narrow.http.get("/v1/models").status_code == 401
    assert [narrow.http.get(path).status_code for path in ("/health", "/metrics", "/stats", "/docs", "/")] == [200] * 5
    assert KEY not in narrow.log


def test_a_full_queue(narrow: ServerProcess) -> None:
    client = narrow.client(KEY)
    stream = client.completions.create(model=NAME, prompt=PROMPT, n=2, stream=True, **LONG)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model=NAME, prompt=PROMPT)
    assert caught.value.code == "queue_full" and int(caught.value.response.headers["retry-after"]) >= 1
    with ThreadPoolExecutor(1) as pool:  # succeeds by the client's own retries
        patient = pool.submit(narrow.client(KEY, max_retries=8).completions.create, model=NAME, prompt=PROMPT, max_tokens=2)
        time.sleep(0.2)
        stream.close()
        assert patient.result(120).usage.completion_tokens == 2
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=NAME, prompt=PROMPT, n=3)


def test_a_second_signal_ends_at_once(narrow: ServerProcess) -> None:
    """Must be the last test of this server, because it ends it."""
    stream = narrow.client(KEY).completions.create(model=NAME, prompt=PROMPT, n=2, stream=True, **LONG)
    next(iter(stream))
    narrow.process.send_signal(signal.SIGTERM)
    wait_until(lambda: narrow.http.get("/health").json() == {"status": "draining"}, 60, "draining")
    time.sleep(1.1)  # signals within a second count as one
    narrow.process.send_signal(signal.SIGTERM)
    assert narrow.wait(60) != 0
    with pytest.raises((openai.APIError, httpx.TransportError)):
        for _ in stream:
            pass


# --- another variant; draining -------------------------------------------------------------------------------------------


def ask(server: ServerProcess, stream: bool, **params: Any) -> Asked:
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": stream} | params
    return Asked(server.url + "/v1/completions", body)


def events_of(stream: Asked) -> list[Any]:
    """The stream's events without the last one, which must be [DONE]."""
    text = stream.join().text
    *events, end = [part for part in text.removesuffix("\n\n").split("\n\n") if part[0] != ":"]  # comments
    assert end == "data: [DONE]", text[-300:]
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_desync_and_a_drain() -> None:
    """A 4-stream checkpoint gives the same text on 2 ranks as on one. After SIGTERM a stream still completes, and all
    ranks exit with 0."""
    path = str(MODELS / "tiny-desync-4x")
    with ServerProcess("--model", path, "--served-model-name", "desync", *PATIENT, ranks=2) as server:
        alone = Reference(path)
        ids = alone.encode(PROMPT)
        wanted = alone.generate(ids, 30)
        server.ready()
        reply = server.client().completions.create(
            model="desync", prompt=PROMPT, temperature=0, max_tokens=30, extra_body={"return_token_ids": True}
        )
        assert ids_of(reply) == wanted
        assert reply.choices[0].text == alone.tokenizer.decode(ids + wanted)[len(PROMPT) :]

        with socket.create_connection(("127.0.0.1", server.port)) as unfinished:
            unfinished.sendall(raw_request({"prompt": PROMPT})[:-1])  # the drain lasts until this client leaves
            stream = ask(server, True, max_tokens=30)
            assert stream.begun.wait(120)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.health() == 503, 60, "a /health that says no")
            assert server.http.get("/health").json() == {"status": "draining"}
            refused = server.http.post("/v1/completions", json={"prompt": PROMPT})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        events = events_of(stream)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait(120) == 0, "the launcher ends with 0 only if all ranks do"
        assert "Traceback" not in server.log


def test_ranks_that_all_get_the_signal() -> None:
    """Every rank gets the signal, as from torchrun or a terminal. The ranks run without torchrun, to check their exit codes. They
    serve a model in 4 bits, whose text is that of one rank."""
    path = str(MODELS / "tiny-hybrid-int4")
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(ServerProcess("--model", path, *PATIENT, environ={**rendezvous, "RANK": r, "LOCAL_RANK": r}))
            for r in (0, 1)
        )
        first.ready()
        stream = ask(first, True, max_tokens=30)
        assert stream.begun.wait(120)
        for rank in (first, second):
            rank.process.send_signal(signal.SIGTERM)
        choices = [event["choices"][0] for event in events_of(stream)]
        assert choices[-1]["finish_reason"] == "length"
        alone = Reference(path)
        wanted = alone.generate(alone.encode(PROMPT), 30)
        assert PROMPT + "".join(choice["text"] for choice in choices) == alone.tokenizer.decode(alone.encode(PROMPT) + wanted)
        assert [first.wait(120), second.wait(120)] == [0, 0], (first.log, second.log)


# --- lost ranks ----------------------------------------------------------------------------------------------------------


def test_a_lost_rank_ends_the_job_if_it_may_not_start_again(in_turn: Callable[..., int]) -> None:
    with ServerProcess("--model", HYBRID, "--max-restarts", 0, ranks=2) as server:
        server.ready()
        waiting = [ask(server, stream, max_tokens=900, n=4) for stream in (True, False)]
        assert waiting[0].begun.wait(120)
        wait_until(lambda: server.stats()["running"] + server.stats()["waiting"] == 8, 60, "both requests in the engine")
        (frontend,) = server.frontend_pids()
        killed = time.monotonic()
        os.kill(server.rank_pids()[in_turn([0, 1], 0)], signal.SIGKILL)
        stream, whole = (one.join() for one in waiting)
        assert max(stream.ended, whole.ended) - killed < GONE_SECONDS
        assert stream.status == 200
        assert events_of(stream)[-1]["error"]["type"] == "service_unavailable_error"
        assert whole.status == 503 and whole.json()["error"]["code"] == "engine_failed"
        assert server.wait(120) != 0
        wait_until(lambda: not runs(frontend), 60, "the end of the frontend's process")
