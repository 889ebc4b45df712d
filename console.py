"""Lines that a person types, on every rank: rank 0 reads them, and tells the others what was read and when to stop.

At a terminal prompt_toolkit edits the line and remembers earlier ones. The terminal is in raw mode for the whole session, so
that Ctrl-C is a key like others and no signal: it would end torchrun, and all ranks with it. Without a terminal, lines are
read as they come.
"""

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch
import torch.distributed as dist
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output

from cli import note
from tp import World

PATIENCE = timedelta(days=30)  # that ranks wait for a person
HISTORY_BYTES = 1 << 18  # a larger file loses its older half when a session begins
HISTORY_LINE = 10_000  # characters; a longer prompt is not remembered


class Console:
    """Rank 0's lines and its Ctrl-C, on all ranks. All of them must call `line` and `stopped` at the same places."""

    def __init__(self, world: World, remember: bool = True) -> None:
        self.world, self.keyboard = world, None
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if world.world_size > 1 else None
        if world.rank == 0 and sys.stdin.isatty():
            self.keyboard = Keyboard(open_history() if remember else InMemoryHistory())
        self.at_terminal = bool(self._from_first(self.keyboard is not None))

    def __enter__(self) -> Self:
        if self.keyboard:
            self.keyboard.__enter__()
        elif self.at_terminal:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 has the keyboard, and says when to end
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.keyboard:
            self.keyboard.__exit__(kind, error, trace)

    def line(self) -> str | None:
        """The next line; None at the end."""
        line = None
        if self.world.rank == 0:
            line = self.keyboard.line() if self.keyboard else read_line()
        if self.group:
            lines = [line]
            dist.broadcast_object_list(lines, src=0, group=self.group)
            line = lines[0]
        return line

    def stopped(self) -> bool:
        """Whether Ctrl-C was pressed since the last line. With several ranks one byte for each call, if at a terminal."""
        return self.at_terminal and self._from_first(self.keyboard is not None and self.keyboard.interrupted())

    def _from_first(self, value: bool) -> bool:
        """Rank 0's value."""
        if self.group is None:
            return value
        shared = torch.tensor([value], dtype=torch.uint8)
        dist.broadcast(shared, src=0, group=self.group)
        return bool(shared)


def read_line() -> str | None:
    line = sys.stdin.buffer.readline()
    return line.decode("utf-8", "replace").rstrip("\r\n") if line else None


class CtrlC(Exception):
    """The key; a signal is a KeyboardInterrupt."""


class Keyboard:
    """The terminal of one process."""

    def __init__(self, history: History) -> None:
        self.input = create_input(sys.stdin)
        output = create_output(sys.stderr)  # stdout carries answers alone
        if isinstance(output, Vt100_Output):
            output.enable_cpr = False  # not every terminal tells where its cursor is, and nothing here needs to know
        self.session: PromptSession[str] = PromptSession(
            history=history, input=self.input, output=output, interrupt_exception=CtrlC, enable_open_in_editor=False
        )
        self.leaving, self.told = False, False  # told: how to leave
        self.open = ExitStack()

    def __enter__(self) -> Self:
        before = signal.signal(signal.SIGTERM, _end)  # torchrun ends a rank by it; the terminal must be mended even then
        self.open.callback(signal.signal, signal.SIGTERM, before)
        self.open.enter_context(self.input.raw_mode())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.open.close()

    def line(self) -> str | None:
        """The next line; None after Ctrl-D, and after Ctrl-C twice."""
        self.leaving = False
        while True:
            try:
                line = self.session.prompt("> ", handle_sigint=False)
                return line.encode("utf-8", "replace").decode()  # what was typed need not be UTF-8
            except EOFError:
                return None
            except CtrlC:
                if self.leaving:
                    return None
            self.leaving = True
            if not self.told:
                note("Ctrl-C again, or Ctrl-D, ends.")
            self.told = True

    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed. Other keys wait for the next line, unless Ctrl-C is among them."""
        keys = self.input.read_keys() + self.input.flush_keys()
        if any(key.key == Keys.ControlC for key in keys):
            return True
        store_typeahead(self.input, keys)
        return False


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# --- history -------------------------------------------------------------------------------------------------------------


def history_path() -> Path:
    """Where the XDG base directory specification puts what a program remembers."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rung" / "history"


def open_history() -> History:
    """Of earlier sessions, in a file that only its owner reads; of this one alone, where there can be no such file."""
    with suppress(OSError, RuntimeError):  # RuntimeError: no home
        path = history_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        _shorten(path)
        return BoundedHistory(str(path))
    return InMemoryHistory()


def _shorten(path: Path) -> None:
    """Drop the older half of a long file, from the beginning of an entry on."""
    if path.stat().st_size <= HISTORY_BYTES:
        return
    with path.open("rb") as file:
        file.seek(-HISTORY_BYTES // 2, os.SEEK_END)
        rest = file.read()
    shorter = path.with_name(f"{path.name}.{os.getpid()}")
    shorter.touch(mode=0o600)
    shorter.write_bytes(rest[max(0, rest.find(b"\n# ")) :])
    shorter.replace(path)


class BoundedHistory(FileHistory):
    def load_history_strings(self) -> Iterable[str]:
        try:
            return super().load_history_strings()
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        if len(string) <= HISTORY_LINE:
            with suppress(OSError):  # a full disk ends no conversation
                super().store_string(string)
