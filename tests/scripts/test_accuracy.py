"""The evaluation of embedded models: what it computes, each row is kept, and a command that was stopped measures only what is missing."""

import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.core import Engine
from scripts.quality import accuracy, heldout
from tests.support.command_line import MODELS
from text.tokenizer_files import load_tokenizer


def test_likelihoods_are_those_of_each_story_alone_and_give_the_perplexity(seed: int) -> None:
    path = MODELS / random.choice(("tiny-hybrid", "tiny-desync-4x", "tiny-standard"))
    tokenizer = load_tokenizer(path)
    llm, count = LLM(path, tokenizer, dtype="float32"), random.randint(2, 5)
    found = heldout.likelihoods(llm, stories := heldout.held_out_stories(tokenizer, count))
    for story, likelihoods in zip(stories, found, strict=True):
        assert [None, *likelihoods] == pytest.approx(llm.score(story).logprobs, abs=1e-4)
    expected = math.exp(-sum(map(sum, found)) / sum(map(len, found)))
    assert heldout.perplexity(llm, tokenizer, count) == pytest.approx(expected, rel=1e-5)
    assert heldout.held_out_stories(tokenizer, count, seed=heldout.SEED + 1) != stories


def test_an_evaluation_has_one_engine(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Prompts and stories are computed by the same engine, and answered as by engines of their own."""
    path, made = MODELS / random.choice(("tiny-ladder", "tiny-desync-2x")), list[Engine]()
    stories, items = random.randint(2, 4), random.randint(3, 6)
    start = Engine.__init__
    monkeypatch.setattr(Engine, "__init__", lambda self, *args: made.append(self) or start(self, *args))
    found = heldout.evaluate(heldout.opened(path), stories, items)
    assert len(made) == 1
    llm, tokenizer = LLM(path), load_tokenizer(path)
    told = heldout.likelihoods(llm, heldout.held_out_stories(tokenizer, stories))
    assert [value for value, _ in found["stories"]] == pytest.approx([sum(one) for one in told], abs=1e-3)
    assert [length for _, length in found["stories"]] == [len(one) for one in told]
    assert found["answers"] == {task: heldout.matches(llm, tokenizer, task, items) for task in heldout.TASKS}


@pytest.mark.usefixtures("forked_commands")
def test_a_stopped_command_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the evaluations that have no row; and with all if the number of items or the code is another."""
    flags = "--tp 1 --dry-run --items 1"
    line = ["accuracy", *flags.split(), "--rows", str(tmp_path), "--models", str(MODELS / "tiny-ladder")]
    monkeypatch.setattr(sys, "argv", line)
    accuracy.main()
    shown = capfd.readouterr()
    assert "| `tiny-ladder` | ladder |" in shown.out and "about " in shown.err
    launched: list[list[str]] = []

    def refuse(words: list[str], **_: Any) -> Any:
        launched.append(words[words.index("--models") + 1 :])
        raise KeyboardInterrupt

    monkeypatch.setattr(accuracy.subprocess, "run", refuse)
    accuracy.main()
    again = capfd.readouterr()
    assert again.out == shown.out and "about 0.0 min" in again.err and not launched
    monkeypatch.setattr(accuracy, "duration", lambda runs, args: 0.0)
    for more, missing in (
        ([str(MODELS / "tiny-hybrid")], ["tiny-hybrid"]),
        (["--items", "2"], ["tiny-ladder"]),
    ):
        monkeypatch.setattr(sys, "argv", [*line, *more])
        with pytest.raises(KeyboardInterrupt):
            accuracy.main()
        assert [Path(path).name for path in launched.pop()] == missing
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setattr(accuracy, "code_digest", lambda: "other")
    with pytest.raises(KeyboardInterrupt):
        accuracy.main()
    assert [Path(path).name for path in launched.pop()] == ["tiny-ladder"]
