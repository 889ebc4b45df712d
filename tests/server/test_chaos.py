"""The real server on 2 ranks, whose processes are killed and stopped: every answer is that of an undisturbed server."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scripts.bench.serving import chaos, leftovers
from scripts.bench.serving.chaos import Answer, Storm
from scripts.lib.servers import Server
from tests import MODELS
from tests.support.server_process import ServerProcess, runs, wait_until
from tests.support.server_thread import Asked

FLAGS = ("--model", MODELS / "tiny-hybrid", "--speculate", "ngram", "--max-restarts", 1000, "--hang-seconds", 5)

LOGPROBS = ("tokens", "token_logprobs", "top_logprobs")  # of a completion's log-probabilities


# in a rank, it dies whenever it is about to decode a token of a request whose prompt begins with these tokens
DEADLY = [7, 9, 7]
DEADLY_SERVER = f"""
import os, signal, time
from cli import run
from engine.core import Engine
from server.__main__ import main
step = Engine.step

def step_or_die(self):
    if any(s.tokens[:3] == {DEADLY} and s.generated and s.wanted == 1 for s in self.scheduler.running):
        time.sleep(0.5)  # else the token before might not have left
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self)

Engine.step = step_or_die  # also in the ranks, which are forked from this process
run(main)
"""


def log_of(server: ServerProcess) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{server._log.fileno()}")


@pytest.mark.long
def test_chaos(seed: int) -> None:
    """Kills lose and change no answer, and leave nothing."""
    with ServerProcess(*FLAGS, ranks=2) as server:
        server.ready()
        storm = Storm(server.url, server.process.pid, log_of(server), random.Random(seed), frontend=True)
        asyncio.run(storm.run(kills=2, clients=2))
        assert storm.wrong == []
        assert sum(storm.victims.values()) >= 2 and storm.outcomes["the same"] >= 2
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
        assert "Traceback" not in server.log


@pytest.mark.long
def test_the_same_ranks_serve_another_frontend_and_a_drain_amid_a_recovery_finishes(
    in_turn: Callable[..., signal.Signals],
) -> None:
    """Nothing of the requests of a frontend that has ended is left, and what was accepted before a drain is answered."""
    number = in_turn([signal.SIGKILL, signal.SIGSTOP], 0)
    with ServerProcess(*FLAGS, "--drain-timeout", 300, ranks=2) as server:  # the ranks start again meanwhile
        server.ready()
        ranks, (frontend,) = server.rank_pids(), server.frontend_pids()
        body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "seed": 5}
        with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as broken:
            next(broken.iter_text())
            os.kill(frontend, number)
            wait_until(lambda: frontend not in server.frontend_pids(), 60, "the end of the frontend")
        wait_until(lambda: server.health() == 200, 120, "another frontend")
        assert server.rank_pids() == ranks
        wait_until(lambda: server.stats()["kv_blocks_used"] == server.stats()["running"] == 0, 60, "ranks with no request")

        body["max_tokens"] = 40
        (wanted,) = server.http.post("/v1/completions", json=body).json()["choices"]
        asked = Asked(server.url + "/v1/completions", body | {"stream": True})
        assert asked.begun.wait(60)
        os.kill(ranks[1], signal.SIGKILL)
        wait_until(lambda: server.stats()["status"] == "recovering", 60, "a recovery")
        server.process.send_signal(signal.SIGTERM)
        lines = [line for line in asked.join().text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        assert "".join(choice["text"] for choice in choices) == wanted["text"]
        assert choices[-1]["finish_reason"] == wanted["finish_reason"]
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
        wait_until(lambda: server.metrics()["rung:recoveries_total"] == 1, 60, "a recovery")  # if the answer ended before
        assert text == wanted["text"]
        assert logprobs == list(zip(*(wanted["logprobs"][name] for name in LOGPROBS), strict=True))
        assert len(logprobs) == 60


def test_torchrun_starts_the_whole_server_again(in_turn: Callable[..., int]) -> None:
    """Nothing of the first one holds the port."""
    with ServerProcess("--model", MODELS / "tiny-hybrid", ranks=2, torchrun=True, environ={"PET_MAX_RESTARTS": 9}) as server:
        server.ready()
        (frontend,), ranks = server.frontend_pids(), server.rank_pids()
        os.kill(ranks[in_turn([0, 1], 0)], signal.SIGKILL)
        wait_until(lambda: not runs(frontend), 60, "the end of the frontend")
        wait_until(lambda: server.health() == 200, 120, "another server")
        assert server.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2}).status_code == 200
        assert not {*server.rank_pids()} & {*ranks} and "requests are lost unless there is a --journal" in server.log


def test_a_server_whose_ranks_die_before_they_were_ready_ends() -> None:
    with ServerProcess("--model", MODELS / "tiny-hybrid", "--max-restarts", 5, ranks=2) as server:
        wait_until(lambda: len(server.rank_pids()) == 2, 60, "ranks")
        os.kill(server.rank_pids()[0], signal.SIGKILL)
        assert server.wait(120) == 1
        assert "error: rank 0 was killed by SIGKILL" in server.log and "Traceback" not in server.log


def test_a_request_that_ends_the_ranks_in_each_decode_step_is_refused() -> None:
    """It brings a token each time, because its prompt does no harm. It is found within --max-restarts, and those beside it are
    answered. So is one that comes later."""
    with ServerProcess("--model", MODELS / "tiny-hybrid", ranks=1, program=("-c", DEADLY_SERVER)) as server:
        server.ready()
        good = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "seed": 3}
        bad = {"prompt": [*DEADLY, 30, 31], "max_tokens": 100, "ignore_eos": True}
        wanted = server.http.post("/v1/completions", json=good).json()["choices"][0]["text"]
        url = server.url + "/v1/completions"
        beside, refused = [Asked(url, good) for _ in range(3)], Asked(url, bad)
        assert (refused.json()["error"]["code"], refused.status) == ("poisoned", 500)
        for asked in (*beside, Asked(url, good)):
            assert asked.json()["choices"][0]["text"] == wanted


def test_leftovers_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of a killed process, a file, a folder, a port and GPU memory: each is reported, and nothing is if all are gone."""
    memory = [100]
    monkeypatch.setattr(leftovers, "SHARED", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(leftovers, "gpu_memory", lambda _root: list(memory))
    (tmp_path / "rung-old").touch()
    (folder := tmp_path / "temporary" / "rung-run-12345678").mkdir(parents=True)
    (tmp_path / "temporary" / "rung-run-87654321").mkdir()  # another server's
    lock = "import fcntl, os, time; fcntl.flock(os.open('temporary/rung-run-12345678', 0), fcntl.LOCK_EX)"
    fork = "p = os.fork(); os.closerange(3, 9) if not p else open('started', 'w').write(f'{p}'); time.sleep(60)"
    child = f"{lock}; {fork}"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    command = [sys.executable, "-c", f"{parent}; input()"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE) as root:
        wait_until(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text(), 60, "a child of a child")
        watch = leftovers.Watch(root.pid, idle=[100])
        watch.begin()
        orphan = int((tmp_path / "started").read_text())
        killed = next(pid for pid in watch._processes if pid not in (root.pid, orphan))
        os.kill(killed, signal.SIGKILL)
        (tmp_path / "nccl-left").touch()
        (tmp_path / "of another program").touch()
        memory[0] += 1000
        watch.look()
        wait_until(lambda: not leftovers.name_of(killed), 60, "the end of the process")
        found = watch.left()
        os.kill(orphan, signal.SIGKILL)
        assert [line.split(" (")[0] for line in found[:1]] == [f"process {orphan}"]
        assert found[1].endswith(f": {tmp_path / 'nccl-left'}")
        assert found[2] == f"folders of nobody: {folder}"
        assert "1100 MiB" in found[3] and len(found) == 4
        (tmp_path / "nccl-left").unlink()
        folder.rmdir()
        memory[0] -= 1000
        watch.look()
        wait_until(lambda: watch.left() == [], 60, "nothing left")
        root.communicate(b"\n")
    before = leftovers.ports({os.getpid()})
    with socket.create_server(("127.0.0.1", 0)):
        assert leftovers.ports({os.getpid()}) == before + 1


class Dice(random.Random):
    """Always as high, in random() and between the bounds of uniform()."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value

    def uniform(self, a: float, b: float) -> float:
        return a + 0.02 * self.value * (b - a)


class Trial(Storm):
    """A storm without a server. `events`: what it does. Each look brings two tokens, 0.1 and 9 s after the ranks have recovered."""

    def __init__(self, folder: Path, value: float, **settings: Any) -> None:
        (folder / "log").touch()
        super().__init__("", os.getpid(), folder / "log", Dice(value), **settings)
        self.events, self.recovered_at = list[str](), time.time()
        self._watch = cast(Any, SimpleNamespace(begin=partial(self.note, "begin"), look=self.look, left=self.left, root=0))

    def note(self, what: str) -> None:
        self.events.append(what)

    def look(self) -> None:
        self.note("look")
        self._tokens += [self.recovered_at + 0.1, self.recovered_at + 9]

    def left(self) -> list[str]:
        self.note("left")
        return [f"something of {self._watch.root}"]

    def _signal(self, only_kill: bool = False) -> tuple[str, signal.Signals]:
        self.note("signal")
        return "rung-rank-0", signal.SIGKILL

    def _recovered(self, start: int) -> dict[str, float]:
        return {"requests sent again": self.recovered_at}


def test_log_probabilities_of_every_layout_are_compared() -> None:
    other = {"token": "b", "logprob": -1.5, "bytes": [98]}
    chat = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [other]}]}
    completion = {"token_logprobs": [None, -0.5], "text_offset": [0, 1], "top_logprobs": [None, {"b": -1.5}]}
    prompt = [None, {"1": {"logprob": -0.5, "rank": 2}}, {"2": {"logprob": -1.5, "rank": 1}}]
    for layout in (chat, completion, prompt):
        assert chaos._numbers(layout) == [-0.5, -1.5]


def test_the_first_token_counts_whenever_it_is_noticed(tmp_path: Path) -> None:
    storm = Trial(tmp_path, 0.9)
    asyncio.run(storm._kill())
    assert storm.waits["ranks: first token"] == [pytest.approx(0.1, abs=1e-3)]


def test_memory_is_looked_at_before_a_second_kill(tmp_path: Path) -> None:
    storm = Trial(tmp_path, 0.1)
    asyncio.run(storm._kill())
    assert storm.events[:3] == ["begin", "signal", "look"] and storm.events.count("signal") == 2
    assert storm.events[-1] == "left"


def test_the_end_of_everything_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at while the next server starts, whose first process then counts."""
    looked = threading.Event()
    monkeypatch.setattr(chaos, "process_tree", lambda root: [root])
    monkeypatch.setattr(chaos, "kill", lambda pids: storm.note(f"kill {len(pids)}"))

    def restart() -> tuple[Server, Path]:
        assert looked.wait(60)
        return Server("http://next", 7), tmp_path / "log"

    storm = Trial(tmp_path, 0.5, restart=restart)
    look = storm._watch.look
    monkeypatch.setattr(storm._watch, "look", lambda: (look(), looked.set()))
    asyncio.run(storm._kill_all())
    assert storm.events[:3] == ["begin", "kill 1", "look"] and storm.events[-1] == "left"
    assert storm.wrong == ["SIGKILL to everything: something of 7"] and storm.root == 7


@pytest.mark.parametrize(
    ("seconds_before", "begun", "full", "promised"),
    [
        (4.9, False, False, False),
        (5.1, False, False, True),
        (0.1, True, False, True),
        (9, True, True, False),
        (-1, False, False, False),
    ],
)
def test_what_the_journal_must_have(seconds_before: float, begun: bool, full: bool, promised: bool, tmp_path: Path) -> None:
    """A request that was sent so long before the signal, unless the disk was full."""
    storm = Trial(tmp_path, 0.5)
    storm._frontend_signalled_at = 1000.0
    storm._disk_full_until = 1000.0 if full else 0.0
    assert storm._is_promised(1000.0 - seconds_before, Answer(begun=begun)) == promised


def test_gpu_memory_of_other_programs_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f"""#!/bin/sh
case "$1" in
--query-gpu=*) printf 'GPU-a, 900\nGPU-b, 70\n' ;;
*) printf 'GPU-a, {os.getpid()}, 300\nGPU-a, 1, 500\n' ;;
esac
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert leftovers.gpu_memory(os.getpid()) == [400, 70]
    assert leftovers.gpu_memory() == [100, 70]
