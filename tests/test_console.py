"""generate.py --interactive at a real pty: keys, history and Ctrl-C, in one process and on ranks."""

import os
import pty
import re
import signal
import stat
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from pexpect.fdpexpect import fdspawn

from tests import ROOT
from tests.support import quick_start
from tests.support.command_line import HYBRID, command, environment
from text import console

PATIENCE = 300.0  # timeout in seconds for any output; ranks start slowly on a busy machine
STORY = "Tell me a story about a fox and a lantern."


class Terminal(fdspawn):
    """A Python command at a pty of 40 rows and 100 columns, forked from a process that has imported what it needs."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(ours, (40, 100))
        files = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = quick_start.Popen(words, cwd=ROOT, env=env, start_new_session=True, **files)
        os.close(theirs)
        super().__init__(ours, encoding="utf-8", timeout=PATIENCE)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.close()


class Session:
    """The command at a terminal."""

    def __init__(self, state: Path, *args: object, ranks: int = 0) -> None:
        words = command(["--model", HYBRID, "--interactive", "--chat", "--temperature", 0, *args], ranks)
        self.child = Terminal(words, environment(XDG_STATE_HOME=state, TERM="xterm", CUDA_VISIBLE_DEVICES=""))
        self.before = termios.tcgetattr(self.child.child_fd)

    def sees(self, pattern: str) -> str:
        """Wait for output that matches `pattern`. Returns the output before it, without escape sequences."""
        self.child.expect(pattern)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.child.before)

    def prompt(self) -> None:
        """Wait for the prompt sign. Each prompt begins by switching on bracketed paste, which is off outside of prompts."""
        self.sees(r"\x1b\[\?2004h.*?>")

    def ends(self) -> int:
        self.rest = self.sees(pexpect.EOF)
        return self.child.process.wait(PATIENCE)


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[list[Session]]:
    made: list[Session] = []
    yield made
    for session in made:
        session.child.end()


@pytest.mark.parametrize("ranks", [0, 2])
def test_ctrl_c_stops_the_answer_and_not_the_session(ranks: int, tmp_path: Path, sessions: list[Session]) -> None:
    slow = ("--simulate-link", "2ms,1GB/s") if ranks else ()
    session = Session(tmp_path, "--ignore-eos", "--max-new-tokens", 900, *slow, ranks=ranks)
    sessions.append(session)
    session.prompt()
    session.child.send(f"{STORY}\r")
    session.sees(r"\. [A-Z]")  # the end of its first sentence
    session.child.send("\x03")
    rest = session.sees(r"\[stopped\]")
    assert len(rest) < 2000, "an answer of 900 tokens has about 3,500 characters"
    session.prompt()
    session.child.send("/reset\r")  # the ranks must still agree on the next request
    session.sees("starts anew")
    session.prompt()
    session.child.send("What is 2 + 3?\r")
    session.sees(r"\x1b\[\?2004l5")  # 5 is the answer; with the sequence before it, as other sequences contain digits, too
    session.child.send("\x03")
    session.sees(r"\[stopped\]")
    session.prompt()

    session.child.send("half a line\x03")
    session.sees("Ctrl-C again, or Ctrl-D, ends")
    session.prompt()
    session.child.send("\x03")
    assert session.ends() == 0, session.rest
    assert "Traceback" not in session.rest and "Error" not in session.rest


def test_a_conversation_with_history_and_commands(tmp_path: Path, sessions: list[Session]) -> None:
    first = Session(tmp_path)
    sessions.append(first)
    first.sees("it knows nothing else.")  # this and the question below are from examples.json
    first.sees("Try: What is 17 plus 25[?]")
    first.prompt()
    first.child.send("What is 2 + 3?\rWhat is 10 + 10?\r")  # the second question is sent before the first is answered
    first.sees(r"5\r\n")
    first.sees(r"20\r\n")
    first.prompt()
    first.child.send("What is 7 + 4\x1b[D\x1b[D\x1b[D\x1b[D\x7f1\x05?\r")  # move the cursor back to the 7 and replace it
    first.sees(r"5\r\n")
    first.prompt()
    first.child.send("/help\r")
    first.sees("Enter sends")
    first.prompt()
    first.child.send("\x03")
    first.sees("Ctrl-C again")
    first.prompt()
    first.child.send("\x1b[A\x1b[A\r")  # up, up: the question before /help
    first.sees(r"5\r\n")
    first.prompt()
    first.child.send("\x04")
    assert first.ends() == 0

    file = tmp_path / "rung" / "history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "+What is 1 + 4?" in file.read_text().splitlines()
    second = Session(tmp_path)
    sessions.append(second)
    second.prompt()
    second.child.send("\x1b[A\r")
    second.sees(r"5\r\n")
    second.prompt()
    second.child.send("/exit\r")
    assert second.ends() == 0


def test_sigterm_leaves_the_terminal_as_it_was(tmp_path: Path, sessions: list[Session]) -> None:
    session = Session(tmp_path, "--no-history")
    sessions.append(session)
    session.prompt()
    fd = os.dup(session.child.child_fd)
    try:
        assert not termios.tcgetattr(fd)[3] & termios.ISIG, "Ctrl-C is a key"
        session.child.process.send_signal(signal.SIGTERM)
        assert session.ends() == 130
        assert termios.tcgetattr(fd)[3] == session.before[3]
    finally:
        os.close(fd)
    assert "Traceback" not in session.rest
    assert not (tmp_path / "rung").exists()


# A program that gets SIGTERM at a moment of a prompt.
TERMINATED = """
import os, signal
import cli
from text import console
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.shortcuts import PromptSession

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)

class Terminating(InMemoryHistory):
    def load_history_strings(self):  # called in a task of the prompt's event loop
        if MOMENT == "in a callback":
            terminate()
        return []

class Late(PromptSession):
    def prompt(self, *args, **more):
        if MOMENT == "before it runs":
            terminate()
        return super().prompt(*args, **more)

def main():
    console.PromptSession = Late
    with console.Keyboard(Terminating()) as keyboard:
        print("line", keyboard.line())

cli.run(main)
"""


@pytest.mark.parametrize("moment", ["before it runs", "in a callback"])
def test_sigterm_ends_a_prompt_at_any_moment(moment: str) -> None:
    program = TERMINATED.replace("MOMENT", repr(moment))
    child = Terminal([sys.executable, "-c", program], environment(TERM="xterm"))
    try:
        child.expect(pexpect.EOF)
        assert child.process.wait(PATIENCE) == 130
    finally:
        child.end()
    assert "Traceback" not in child.before and "line" not in child.before, child.before


# --- the history file ----------------------------------------------------------------------------------------------------


def test_the_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history = console.open_history()
    for number in range(6000):
        history.store_string(f"prompt {number}\nof two lines, and long enough that the file grows")
    history.store_string("x" * (console.HISTORY_LINE + 1))
    file = tmp_path / "rung" / "history"
    assert file.stat().st_size > console.HISTORY_BYTES
    again = list(console.open_history().load_history_strings())
    assert file.stat().st_size <= console.HISTORY_BYTES // 2
    assert again[0].startswith("prompt 5999\nof two lines"), "the newest is first"
    assert [text.split("\n")[0] for text in again] == [f"prompt {n}" for n in range(5999, 5999 - len(again), -1)]
    assert len(again) > 1000


def test_no_history_where_there_can_be_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rung").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history = console.open_history()
    history.append_string("a prompt")
    assert history.get_strings() == ["a prompt"]


def test_a_line_that_is_no_utf8_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"caf\xe9\r\nlast")
    with (tmp_path / "lines").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert [console.read_line() for _ in range(3)] == ["caf\ufffd", "last", None]
