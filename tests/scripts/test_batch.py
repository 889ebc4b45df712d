"""scripts.batch: a file of requests, answered by a server of its own."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from scripts import batch
from scripts.lib.process_tree import process_tree
from tests import ROOT
from tests.server.test_batches import BODIES, COMPLETIONS, jsonl, prompts, texts
from tests.support import quick_start
from tests.support.command_line import HYBRID, Here, environment
from tests.support.server_process import START_SECONDS, ServerProcess, runs, wait_until

FLAGS = ("--model", HYBRID, "--device", "cpu", "--kv-memory", "64M", "--deterministic")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capfd, batch.main, FLAGS)


def start(*words: object, **pipes: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "scripts.batch", *map(str, words), *FLAGS]
    env = environment(RUNG_PORT=1, RUNG_JOURNAL="/none", RUNG_MAX_NUM_SEQS=2)  # of which the last one counts
    return quick_start.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, **pipes)


def read(path: Path) -> dict[str, Any]:
    """The answers by their names, each of which is there once."""
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


@pytest.mark.long
def test_each_line_gets_the_answer_of_its_request(tmp_path: Path, seed: int) -> None:
    """Of all endpoints, on two ranks, through a pipe; errors by line. A kill repeats no line, and leaves no process."""
    given, out, wanted = tmp_path / "in", tmp_path / "out", prompts(24, max_tokens=10, seed=seed)
    lines = [jsonl({url: body}, url) for url, body in BODIES.items()]
    lines += [jsonl({"bad": {"prompt": "a", "model": "none"}}), b"\n", jsonl({"odd": {"prompt": "a", "oddity": 1}})]
    random.shuffle(lines)
    given.write_bytes(b"".join(lines).removesuffix(b"\n"))
    with ServerProcess("--model", HYBRID, "--deterministic") as server, given.open() as pipe:
        process = start("-", "-", "--tp", 2, stdin=pipe, stdout=(tmp_path / "piped").open("w"))
        direct = {url: server.ready().http.post(url, json=body).json() for url, body in BODIES.items()}
        said = process.communicate(timeout=START_SECONDS)[1]
        assert process.returncode == 0, said
        answers = read(tmp_path / "piped")
        bad, _ = answers.pop("bad")["response"], answers.pop("odd")
        assert answers.keys() == BODIES.keys() and all(one["error"] is None for one in answers.values())
        for url, one in answers.items():
            for name in ("choices", "data", "output_text"):
                assert texts(one["response"]["body"].get(name)) == texts(direct[url].get(name)), (url, name)
        assert bad["status_code"] == 404 and bad["body"]["error"]["code"] == "model_not_found"
        assert "errors with status 404: 1" in said and "unknown parameters: oddity: 1" in said and "6/6" in said
        given.write_bytes(jsonl(wanted))
        process = start(given, out)
        wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") > 5, START_SECONDS, "some answers")
        pids = process_tree(process.pid)
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(runs, pids)), 60, "the end of all processes")
        before = out.read_bytes()
        before = before[: before.rfind(b"\n") + 1]
        out.write_bytes(before + before[:20])  # written in part
        said = start(given, out).communicate(timeout=START_SECONDS)[1]
        assert out.read_bytes().startswith(before) and read(out).keys() == wanted.keys()
        assert f"24 requests, {len(before.splitlines())} of them answered before\n" in said
        expected = {name: server.http.post(COMPLETIONS, json=wanted[name]).json() for name in random.sample(sorted(wanted), 3)}
        for name, one in expected.items():
            assert read(out)[name]["response"]["body"]["choices"][0]["text"] == one["choices"][0]["text"]


def test_what_is_answered_starts_no_server(tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lines of the same model are known; others are refused, with nothing changed."""
    given, out = tmp_path / "in", tmp_path / "out"
    given.write_bytes(jsonl(prompts(3)))
    ids = [id for id, _ in batch.read_lines(given, HYBRID)]
    out.write_text("".join(f'{{"id":"{id}","custom_id":"x"}}\n' for id in ids))
    monkeypatch.setattr(batch, "own_server", None)
    before = out.read_bytes()
    assert "3 requests, 3 of them answered before" in here(given, out).err
    for words in ((given, out, "--model", "models/tiny-ladder"), (given, given)):
        assert "line 1 answers no line of this file by this model" in here.refuses(*words)
    given.write_bytes(jsonl(prompts(2, echo=True)) + jsonl({"line 2": prompts(3)["line 2"]}))
    assert "line 1 answers no line" in here.refuses(given, out)
    out.write_bytes(before * 2)
    given.write_bytes(jsonl(prompts(3)))
    assert "line 4 answers no line" in here.refuses(given, out)
    with out.open("a") as held:
        batch.fcntl.flock(held, batch.fcntl.LOCK_EX)
        assert "another process writes" in here.refuses(given, out)
    assert out.read_bytes() == before * 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "does not exist; name a file with a request in each line, or - for standard input"),
        (b"", "line 0 and all others are empty"),
        (b"\n{", "line 2 is no JSON object with custom_id, method POST, url and body"),
        (jsonl({"a": {}}) * 2, "line 2 has the custom_id of an earlier line"),
        (jsonl({"a": {}}, "/v1/images"), "line 1 has another url than"),
        (jsonl({"a": {"stream": True}}), "line 1 asks for stream"),
        (jsonl({"a": {"prompt": "x" * 2000}}), "--max-body-mb"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, here: Here, data: bytes | None, words: str) -> None:
    given = tmp_path / "in"
    if data is not None:
        given.write_bytes(data)
    assert words in here.refuses(given, tmp_path / "out", "--max-body-mb", "0.001")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("forked_commands")
def test_commands_that_are_refused(tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    given, out = tmp_path / "in", tmp_path / "out"
    given.write_bytes(jsonl(prompts(1)))
    os.mkfifo(tmp_path / "pipe")
    for words, says in (
        ((given,), "OUT"),
        ((given, out, "--port", 1), "--port"),
        ((given, out, "--drain-timeout", 1), "--drain-timeout"),
        ((given, "-o", out), "python -m scripts.batch IN OUT"),
        ((tmp_path / "pipe", out), "is a pipe"),
        ((given, tmp_path / "pipe"), "is a pipe"),
        ((given, "/proc/none/out"), "cannot be written"),
        ((given, out, "--max-loras", 2), "--max-loras has no effect"),
        ((given, out, "--tp", 3), "3"),
    ):
        assert says in here.refuses(*words), words
    monkeypatch.setenv("RANK", "0")
    assert "--tp N starts the ranks" in here.refuses(given, out)


class Ending(batch.Server):
    """A server that ends while it is asked."""

    def __init__(self, tmp_path: Path, script: str) -> None:
        self.process = subprocess.Popen(["bash", "-c", f"exec >{tmp_path}/log; {script}"], start_new_session=True)
        self.address, self.log = tmp_path / "socket", tmp_path / "log"


@pytest.mark.parametrize(("script", "says"), [("echo oh; kill -9 $$", "exit code -9"), ("echo error: no; exit 2", "^no$")])
def test_a_server_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], script: str, says: str
) -> None:
    server = Ending(tmp_path, script)
    given, asked = tmp_path / "in", list[str]()
    given.write_bytes(jsonl(prompts(9)))
    lines: Callable[[], Any] = lambda: batch.read_lines(given, "")  # noqa: E731
    monkeypatch.setattr(batch.time, "sleep", lambda seconds: asked.append("again"))
    with pytest.raises(batch.UserError, match=says), batch.tqdm(disable=True) as bar, (tmp_path / "out").open("wb") as out:
        batch.answer_all(server, lines(), 3, out, bar)
    assert ("oh" in capfd.readouterr().err) == ("oh" in script)


def test_lines_fill_the_server(tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many again wait, so that none of its places is empty."""
    (tmp_path / "in").write_bytes(jsonl(prompts(3)))
    asked = list[int]()
    monkeypatch.setattr(batch, "own_server", lambda flags: nullcontext())
    monkeypatch.setattr(batch, "answer_all", lambda server, lines, at_once, *more: asked.append(at_once) or {})
    for count in (5, 4000):
        here(tmp_path / "in", tmp_path / "out", "--max-num-seqs", count)
    assert asked == [10, 4512]


def test_what_may_be_accepted_later_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a 429, and while a frontend starts again."""
    server = Ending(tmp_path, "sleep 100")
    replies: list[Any] = [(429, b"{}", []), OSError(), (503, b'{"error": {"code": "loading"}}', []), (200, b'{"a": 1}', ["x"])]
    replies, written = [*replies, replies[-1]], list[int]()

    def ask(*given: Any) -> Any:
        written.append((tmp_path / "out").stat().st_size)
        if isinstance(reply := replies.pop(0), OSError):
            raise reply
        return reply

    monkeypatch.setattr(batch, "AGAIN_SECONDS", 0)
    monkeypatch.setattr(server, "ask", ask)
    (tmp_path / "in").write_bytes(jsonl(prompts(2)))
    with batch.tqdm(disable=True) as bar, (tmp_path / "out").open("wb") as out:
        counts = batch.answer_all(server, batch.read_lines(tmp_path / "in", ""), 1, out, bar)
    assert counts == {"x": 2} and written[-1] > written[-2] == 0  # an answer is in the file before the next line is asked
    assert read(tmp_path / "out")["line 0"]["response"]["body"] == {"a": 1}
    assert server.process.wait(60) == -signal.SIGTERM
