"""`LLM(tp=N)` in a plain program: it computes what one process computes, and its ranks end with it, however it ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from errors import UserError
from tests import MODELS, ROOT
from tests.support import quick_start
from tests.support.command_line import environment
from tests.support.server_process import START_SECONDS, children, command_line, runs, wait_until

MODEL = MODELS / "tiny-hybrid"
HEAD = f"""
import asyncio, json, os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from engine import LLM, SamplingParams
from errors import UserError
GREEDY = SamplingParams(max_tokens=12, temperature=0)
def told(call):
    try: return call()
    except (UserError, RuntimeError, KeyboardInterrupt, asyncio.CancelledError) as e: return f"{{type(e).__name__}}: {{e}}"
"""
ALL = """
async def first(llm):
    texts = [delta.text async for deltas in llm.astream("One day", GREEDY) for delta in deltas]
    return "".join(texts)
async def leave(llm):
    left = asyncio.ensure_future(anext(llm.astream(["Once upon a time", "One day"], GREEDY)))
    await asyncio.sleep(0.001)
    left.cancel()
    await left
def use(llm):
    told(lambda: asyncio.run(leave(llm)))
    half = llm.stream(["Once upon a time", "One day"], GREEDY)
    next(half)
    busy = [told(lambda: llm.generate("x")), told(lambda: llm.embed("x"))]
    half.close()
    vectors = llm.embed(["a cat", "a dog"])
    wrong = told(lambda: llm.generate(["One day", "x" * 5000]))
    chat = llm.chat([{"role": "user", "content": "What is 17 plus 25?"}], GREEDY)
    return {"texts": [one.text for one in llm.generate(["Once upon a time", "One day"], GREEDY)], "wrong": wrong, "busy": busy,
            "chat": [one.text for one in chat], "stream": asyncio.run(first(llm)), "argmax": llm.score("The cat sat.").argmax,
            "logprobs": llm.score("The cat sat.").logprobs[1:], "vectors": vectors}
if __name__ == "__main__":
    found = []
    for tp in map(int, sys.argv[2:]):
        llm = LLM(sys.argv[1], tp=tp)
        found.append(use(llm))
        again = told(lambda: LLM(sys.argv[1], tp=2)) if tp > 1 else ""
        llm.close()
        found[-1]["after"] = told(lambda: llm.generate("x")) if tp > 1 else ""
        found[-1]["again"] = again
    print(json.dumps(found))
"""
WAIT = """
from engine.core import Engine
llm, how = LLM(sys.argv[1], tp=2), sys.argv[2]
calls = {"generate": lambda: llm.generate("Once", GREEDY), "score": lambda: llm.score("Once"), "embed": lambda: llm.embed("Once")}
def interrupted(step):
    return lambda *given: (os.kill(os.getpid(), signal.SIGINT), step(*given))[1]
if how in calls:  # amid what the ranks compute together
    Engine.step, llm.model.hidden = interrupted(Engine.step), interrupted(llm.model.hidden)
def go():
    print(llm._followers.processes[0].pid, flush=True)
    while True:
        calls.get(how, calls["generate"])()
print(told(go), flush=True)
print(told(calls["generate"]), flush=True)
"""


def test_it_computes_what_one_process_computes(in_turn: Callable[..., Any], tmp_path: Path) -> None:
    """And once more after it was closed."""
    program = tmp_path / "program.py"
    program.write_text(HEAD + ALL)
    ranks = in_turn([2, 4], 0)
    command = [sys.executable, str(program), str(MODEL), "1", str(ranks), "2"]
    done = quick_start.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    alone, *others = json.loads(done.stdout)
    assert alone["texts"][1] == alone["stream"] and "42" in alone["chat"][0]
    for found in others:
        assert [found[key] for key in ("texts", "chat", "stream", "argmax", "wrong", "busy")] == [
            alone[key] for key in ("texts", "chat", "stream", "argmax", "wrong", "busy")
        ]
        torch.testing.assert_close(found["logprobs"], alone["logprobs"], atol=1e-4, rtol=0)
        torch.testing.assert_close(found["vectors"], alone["vectors"], atol=1e-4, rtol=0)
        assert found["after"] == "UserError: this LLM is closed; make a new one"
        assert "close the first LLM" in found["again"] or "the ranks are connected already" in found["again"]
    assert "exceed the model's context" in alone["wrong"] and all("has not ended" in one for one in alone["busy"])
    assert "Traceback" not in done.stderr


@contextmanager
def running(
    how: str = "", folder: str | Path = "/", popen: type["subprocess.Popen[str]"] = quick_start.Popen
) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A program amid a call on two ranks, and the process of its other rank. how: the call that gets SIGINT, if any."""
    command = [sys.executable, "-c", HEAD + WAIT, str(MODEL), how]
    program = popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True, stderr=subprocess.STDOUT)
    try:
        other = int(program.stdout.readline()) if program.stdout else 0
        yield program, other
        wait_until(lambda: not runs(other), START_SECONDS, "the other rank ends")
    finally:
        program.kill()
        program.wait()


def test_a_killed_program_leaves_no_rank(tmp_path: Path) -> None:
    """Also in a folder with modules of the names of ours, which new processes must not import."""
    for name in ("engine", "model", "errors"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    with running(folder=tmp_path, popen=subprocess.Popen) as (program, _):
        program.kill()


@pytest.mark.parametrize("ended", ["interrupted", "by a killed rank"])
def test_what_ends_a_call_ends_the_ranks(ended: str, in_turn: Callable[..., Any]) -> None:
    with running(in_turn(["generate", "score", "embed"], 0) if ended == "interrupted" else "") as (program, other):
        if ended == "by a killed rank":
            os.kill(other, signal.SIGKILL)
        said = program.communicate(timeout=START_SECONDS)[0].splitlines()
    assert said[-1] == "UserError: this LLM is closed; make a new one", said
    assert said[0].startswith(("KeyboardInterrupt",) if ended == "interrupted" else ("RuntimeError", "UserError: the other")), (
        said
    )
    assert program.returncode == 0 and not any("Traceback" in line for line in said)


def test_tp_goes_with_a_name_alone() -> None:
    for wrong in (lambda: LLM(MODEL, tp=0), lambda: LLM(MODEL, LLM(MODEL).tokenizer, tp=2)):
        with pytest.raises(UserError, match="tp is a number of ranks from 1, and goes with the name of a model"):
            wrong()
    with pytest.raises(UserError, match="models/nowhere"):
        LLM("models/nowhere", tp=2)
    assert "RANK" not in os.environ and not [pid for pid in children(os.getpid()) if "engine.followers" in command_line(pid)]
    assert LLM(MODEL).generate("Once", SamplingParams(max_tokens=1))
