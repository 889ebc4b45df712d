"""The evaluation of embedded models: each row is kept, and a command that was stopped measures only what is missing."""

import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.quality import accuracy
from tests.support.command_line import MODELS


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
