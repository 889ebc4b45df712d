"""The evaluation of embedded models: what it computes, each row is kept, and a command that was stopped measures only what is missing."""

import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from scripts.lib.results import ROOT
from scripts.lib.rows import CODE
from scripts.quality import accuracy, heldout
from tests.support.command_line import MODELS
from text.tokenizer_files import load_tokenizer


def test_the_perplexity_is_that_of_all_tokens_but_each_story_s_first(seed: int) -> None:
    path = MODELS / random.choice(("tiny-hybrid", "tiny-desync-4x", "tiny-standard"))
    tokenizer = load_tokenizer(path)
    llm, count = LLM(path, tokenizer, dtype="float32"), random.randint(2, 5)
    stories = heldout.held_out_stories(tokenizer, count)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    scored = [answer.prompt_logprobs or [] for answer in llm.generate(stories, params)]
    assert [len(found) for found in scored] == [len(story) for story in stories]
    logprobs = [token.chosen.logprob for found in scored for token in found if token is not None]
    assert len(logprobs) == sum(map(len, stories)) - count
    assert heldout.perplexity(llm, tokenizer, count) == pytest.approx(math.exp(-sum(logprobs) / len(logprobs)), rel=1e-5)


def test_answers_match_if_they_equal_the_document_s_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    path = MODELS / "tiny-hybrid"
    llm, tokenizer = LLM(path), load_tokenizer(path)
    asked = heldout.held_out("copying", 6)
    right = heldout.matches(llm, tokenizer, "copying", 6)
    assert sum(right) >= 4
    others = [
        replace(document, messages=(*document.prompt_messages, {"role": "assistant", "content": f"{document.answer}."}))
        for document in asked
    ]
    monkeypatch.setattr(heldout, "held_out", lambda kind, count: [*asked[:3], *others[3:]])
    assert heldout.matches(llm, tokenizer, "copying", 6) == [*right[:3], False, False, False]


def test_rows_know_all_code_that_decides_about_quality() -> None:
    """All modules of this repository that the command imports, but those that only keep and show what is found."""
    code = "import sys, scripts.quality.accuracy; print(*(getattr(m, '__file__', None) for m in list(sys.modules.values())))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = {file.removeprefix(f"{ROOT}/") for file in done.stdout.split() if file.startswith(f"{ROOT}/")}
    shows = "__init__.py", *(name for name in ours if name.startswith((".venv/", "scripts/lib/", "scripts/sweep/")))
    needed = {name for name in ours if not name.endswith(shows)}
    assert "engine/llm.py" in needed and needed <= {str(path.relative_to(ROOT)) for one in CODE for path in ROOT.glob(one)}


@pytest.mark.usefixtures("forked_commands")
def test_a_stopped_command_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the evaluations that have no row; and with all if the number of items or the code is another."""
    flags = "--tp 1 --dry-run --items 1"
    line = ["accuracy", *flags.split(), "--rows", str(tmp_path / "rows.jsonl"), "--models", str(MODELS / "tiny-ladder")]
    monkeypatch.setattr(sys, "argv", line)
    accuracy.main()
    shown = capfd.readouterr()
    assert "| `tiny-ladder` | ladder |" in shown.out
    launched: list[list[str]] = []

    def refuse(words: list[str], **_: Any) -> Any:
        launched.append(words[words.index("--models") + 1 :])
        raise KeyboardInterrupt

    monkeypatch.setattr(accuracy.subprocess, "run", refuse)
    accuracy.main()
    again = capfd.readouterr()
    assert again.out == shown.out and not launched
    for more, missing in (([str(MODELS / "tiny-hybrid")], ["tiny-hybrid"]), (["--items", "2"], ["tiny-ladder"])):
        monkeypatch.setattr(sys, "argv", [*line, *more])
        with pytest.raises(KeyboardInterrupt):
            accuracy.main()
        assert [Path(path).name for path in launched.pop()] == missing
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setattr(accuracy, "code_digest", lambda: "other")
    with pytest.raises(KeyboardInterrupt):
        accuracy.main()
    assert [Path(path).name for path in launched.pop()] == ["tiny-ladder"]
