"""A capture that fails: its error comes out, and the capture has ended."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.schedules import Graphs


class Recorded:
    """Stands for torch.cuda.CUDAGraph, which needs a GPU."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def capture_begin(self, **_: object) -> None:
        self.log.append("begin")

    def capture_end(self) -> None:
        self.log.append("end")
        if self.log.count("raise"):
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        self.log.append("replay")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Recorded(found))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return found


def graphs() -> Graphs:
    made: Any = Graphs(torch.device("cpu"))
    made._pool, made._stream = None, SimpleNamespace()
    return made


def test_a_capture_begins_after_the_first_call_and_ends(log: list[str]) -> None:
    captured = graphs().capture(lambda: log.append("step") or len(log))
    captured.replay()
    assert log == ["step", "begin", "step", "end", "replay"] and captured.output == 3


def test_a_capture_that_fails_ends_with_the_step_s_error(log: list[str]) -> None:
    def step() -> None:
        log.append("raise" if "begin" in log else "step")
        if log[-1] == "raise":
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        graphs().capture(step)
    assert log == ["step", "begin", "raise", "end"]
