"""The real server on 2 ranks with LoRA adapters: those of its start and those that clients load, in one batch with the base."""

import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from errors import UserError
from server.settings import load_settings
from tests import MODELS
from tests.support.adapters import PARTS, merged, write_adapter
from tests.support.server_process import ServerProcess, wait_until

BASE = MODELS / "tiny-standard"
TOLERANCE = 2e-3  # of log-probabilities in fp32


def scores(server: ServerProcess, model: str, prompt: list[int]) -> list[float]:
    """The log-probabilities of the prompt's tokens but the first."""
    body = {"model": model, "prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 1, "temperature": 0}
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: list[float] = reply.json()["choices"][0]["logprobs"]["token_logprobs"][1 : len(prompt)]
    return found


def names(server: ServerProcess) -> dict[str, Any]:
    return {card["id"]: (card["root"], card["parent"]) for card in server.http.get("/v1/models").json()["data"]}


def change(server: ServerProcess, what: str, status: int = 200, **body: object) -> str:
    reply = server.http.post(f"/v1/{what}_lora_adapter", json=body)
    assert reply.status_code == status, reply.text
    return reply.text


def test_a_server_with_adapters(tmp_path: Path, seed: int) -> None:
    """Base and adapters answer together as merged checkpoints do alone; adapters come, go and come back under another's name, and
    are there again after ranks were killed."""
    root = tmp_path / "root"
    folders = {name: write_adapter(root / name, BASE, None if name == "b" else PARTS, size=0.5) for name in "abc"}
    prompt = [0, *random.choices(range(300, 900), k=40)]
    llms = {name: LLM(merged(tmp_path / name, BASE, folder)) for name, folder in folders.items()} | {"tiny-standard": LLM(BASE)}
    wanted = {name: llm.score(prompt).logprobs[1:] for name, llm in llms.items()}

    def check(*models: str, **aliases: str) -> None:
        """Ask all at once, and then again, when the prefix is cached."""
        asked = [*models, *aliases] * 2
        with ThreadPoolExecutor(len(asked)) as pool:
            for name, found in zip(asked, pool.map(lambda name: scores(server, name, prompt), asked), strict=True):
                expected = wanted[aliases.get(name, name)]
                assert max(abs(x - y) for x, y in zip(found, expected, strict=True) if y is not None) < TOLERANCE, name

    def answer(model: str) -> tuple[str, list[float]]:
        """A text and the log-probabilities of its tokens."""
        body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        (choice,) = server.http.post("/v1/completions", json=body).json()["choices"]
        return choice["text"], choice["logprobs"]["token_logprobs"]

    flags = ("--model", BASE, "--lora", f"a={folders['a']}", "--allow-lora-updates", "--lora-root", root, "--max-loras", 2)
    with ServerProcess(*flags, "--speculate", "ngram", ranks=2) as server:
        server.ready()
        check("tiny-standard", "a")
        assert names(server) == {"tiny-standard": (str(BASE), None), "a": (str(folders["a"]), "tiny-standard")}
        change(server, "load", lora_name="b", lora_path=str(folders["b"]))
        check("tiny-standard", "a", "b")
        first, values = answer("b")

        assert "--max-loras" in change(server, "load", 400, lora_name="c", lora_path=str(folders["c"]))
        assert "loaded already" in change(server, "load", 400, lora_name="b", lora_path=str(folders["c"]))
        assert "the base's name" in change(server, "load", 400, lora_name="tiny-standard", lora_path=str(folders["c"]))
        change(server, "unload", 404, lora_name="c")
        change(server, "unload", lora_name="b")
        assert server.http.post("/v1/completions", json={"model": "b", "prompt": prompt}).status_code == 404
        assert "--lora-root" in change(server, "load", 400, lora_name="b", lora_path=str(tmp_path))
        change(server, "load", lora_name="b", lora_path=str(folders["c"]))  # blocks of the old b must not be found
        check("tiny-standard", "a", b="c")
        other, others = answer("b")  # often the same text, as it repeats itself, but never with these probabilities
        assert other != first or max(abs(x - y) for x, y in zip(values, others, strict=True)) > 3 * TOLERANCE

        (killed, _) = server.rank_pids()
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: server.stats()["status"] == "recovering", 60, "a recovery")
        check("tiny-standard", "a", b="c")  # requests wait for the ranks, and for their adapter

        shutil.rmtree(folders["c"])
        (killed, _) = server.rank_pids()
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: "b" in server.log and "is not served any more" in server.log, 60, "a line in the log")
        cards = {card["id"]: card["error"] for card in server.http.get("/v1/models").json()["data"]}
        assert cards.pop("b").endswith("as PEFT saves them") and set(cards.values()) == {None}
        reply = server.http.post("/v1/completions", json={"model": "b", "prompt": prompt})
        assert reply.status_code == 404 and "lost in a recovery" in reply.json()["error"]["message"]
        change(server, "unload", lora_name="b")
        assert server.http.get("/v1/models/b").status_code == 404
        for name in ("", "..", ".b", "b\n", "b c", "a/b", "b\u202e", "b\x1b[1m", "é", "b?", "b#", "b%", "b" * 201):
            assert "lora_name" in change(server, "load", 400, lora_name=name, lora_path=str(folders["b"]))
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora", "x"], "is not NAME=DIR"),
        (["--lora", "a\nb=/a"], r"'a\\nb'.*begins with"),
        (["--lora", "../b=/a"], "begins with"),
        (["--lora", "m=/a", "--lora", "m=/b"], "two models are called m"),
        (["--lora", "a=/a", "--lora", "b=/b", "--max-loras", "1"], "--max-loras is 1"),
        (["--allow-lora-updates"], "needs --lora-root"),
        (["--lora", "a=/a", "--deterministic"], "--deterministic does not compute adapters"),
    ],
)
def test_flags_that_contradict_each_other(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_settings(["--model", str(BASE), *flags], {})
