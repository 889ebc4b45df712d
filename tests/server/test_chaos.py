"""The real server on 2 ranks, whose processes are killed and stopped: every answer is that of an undisturbed server."""

import asyncio
import json
import os
import random
import signal
import threading
from pathlib import Path

import pytest

from scripts.bench.serving.chaos import Storm
from tests import MODELS
from tests.support.server_process import ServerProcess, wait_until

FLAGS = ("--model", MODELS / "tiny-hybrid", "--speculate", "ngram", "--max-restarts", 1000, "--hang-seconds", 5)

LOGPROBS = ("tokens", "token_logprobs", "top_logprobs")  # of a completion's log-probabilities


def log_of(server: ServerProcess) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{server._log.fileno()}")


def test_chaos(seed: int) -> None:
    """Kills of ranks lose and change no answer. After a kill of the frontend, the same ranks serve the next one, and nothing of
    the requests is left. A drain in the middle of a recovery finishes what was accepted."""
    with ServerProcess(*FLAGS, ranks=2) as server:
        server.ready()
        storm = Storm(server.url, server.process.pid, log_of(server), random.Random(seed))
        asyncio.run(storm.run(kills=2, clients=2))
        assert storm.wrong == []
        assert server.metrics()["rung:recoveries_total"] >= 2

        ranks, (frontend,) = server.rank_pids(), server.frontend_pids()
        body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "seed": 5}
        with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as broken:
            next(broken.iter_text())
            os.kill(frontend, signal.SIGKILL)
        wait_until(lambda: server.health() == 200, 120, "another frontend")
        assert server.rank_pids() == ranks and server.frontend_pids() != [frontend]
        wait_until(lambda: server.stats()["kv_blocks_used"] == server.stats()["running"] == 0, 60, "ranks with no request")

        body["max_tokens"] = 60
        wanted = server.http.post("/v1/completions", json=body).json()["choices"]
        answers: list[object] = []
        asking = threading.Thread(
            target=lambda: answers.append(server.http.post("/v1/completions", json=body).json()["choices"])
        )
        asking.start()
        wait_until(lambda: server.stats()["running"], 60, "a running request")
        os.kill(ranks[1], signal.SIGKILL)
        wait_until(lambda: server.stats()["status"] == "recovering", 60, "a recovery")
        server.process.send_signal(signal.SIGTERM)
        asking.join(120)
        assert answers == [wanted]
        assert server.wait(120) == 0
        assert "Traceback" not in server.log


def test_a_replay_has_the_same_bits_with_the_deterministic_mode(seed: int) -> None:
    """A rank is killed in the middle of an answer. The ranks that go on compute in one step what was generated one by one, and the text
    and all log-probabilities are those of an undisturbed answer."""
    flags = ("--model", MODELS / "tiny-hybrid", "--dtype", "bfloat16", "--deterministic", "--max-restarts", 1000)
    body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "seed": seed, "logprobs": 3}
    with ServerProcess(*flags, ranks=2) as server:
        server.ready()
        (wanted,) = server.http.post("/v1/completions", json=body).json()["choices"]
        text, logprobs, received = "", [], 0
        with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text, received = text + choice["text"], received + 1
                logprobs += zip(*(choice["logprobs"][name] for name in LOGPROBS), strict=True) if choice["logprobs"] else []
                if received == 20:
                    os.kill(random.choice(server.rank_pids()), signal.SIGKILL)
        assert server.metrics()["rung:recoveries_total"] == 1
        assert text == wanted["text"]
        assert logprobs == list(zip(*(wanted["logprobs"][name] for name in LOGPROBS), strict=True))
        assert len(logprobs) == 60


@pytest.mark.parametrize("when", ["before it was ready", "too often"])
def test_a_server_that_cannot_go_on_ends(when: str) -> None:
    limit = {"before it was ready": 5, "too often": 1}[when]
    with ServerProcess("--model", MODELS / "tiny-hybrid", "--max-restarts", limit, ranks=2) as server:
        if when == "too often":
            server.ready()
            (first, _) = server.rank_pids()
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: server.rank_pids() and server.rank_pids()[0] not in (first, server.process.pid), 60, "new ranks")
        wait_until(lambda: len(server.rank_pids()) == 2, 60, "ranks")
        os.kill(server.rank_pids()[0], signal.SIGKILL)
        assert server.wait(120) == 1
        assert "error: rank 0 was killed by SIGKILL" in server.log and "Traceback" not in server.log
