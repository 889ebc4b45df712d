"""Interactive input on every rank: rank 0 reads lines and Ctrl-C, and broadcasts them to the other ranks.

At a terminal, prompt_toolkit edits lines and remembers earlier ones. The terminal is in raw mode for the whole session,
so that Ctrl-C is read as a key: as a signal it would end torchrun and all ranks with it. Without a terminal, lines are
read from stdin without editing.
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
from comms.private_gloo import PRIVATE_GLOO
from tp import World

PATIENCE = timedelta(days=30)  # how long ranks wait for a line
HISTORY_BYTES = 1 << 18  # at the start of a session, a larger file is cut to its last HISTORY_BYTES / 2
HISTORY_LINE = 10_000  # most characters of a prompt that is remembered


class Console:
    """Rank 0's lines and Ctrl-C, on all ranks. `line` and `stopped` are collective."""

    def __init__(self, world: World, remember: bool = True) -> None:
        self.world, self.keyboard = world, None
        self.group = dist.new_group(backend=PRIVATE_GLOO, timeout=PATIENCE) if world.world_size > 1 else None
        if world.rank == 0 and sys.stdin.isatty():
            self.keyboard = Keyboard(open_history() if remember else InMemoryHistory())
        self.at_terminal = bool(self._from_first(self.keyboard is not None))

    def __enter__(self) -> Self:
        if self.keyboard:
            self.keyboard.__enter__()
        elif self.at_terminal:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 reads the keyboard and broadcasts when to end
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.keyboard:
            self.keyboard.__exit__(kind, error, trace)

    def line(self) -> str | None:
        """The next line; None at the end of the input."""
        line = None
        if self.world.rank == 0:
            line = self.keyboard.line() if self.keyboard else read_line()
        if self.group:
            lines = [line]
            dist.broadcast_object_list(lines, src=0, group=self.group)
            line = lines[0]
        return line

    def stopped(self) -> bool:
        """Whether Ctrl-C was pressed since the last line. At a terminal, each call broadcasts one byte between ranks."""
        return self.at_terminal and self._from_first(self.keyboard is not None and self.keyboard.interrupted())

    def _from_first(self, value: bool) -> bool:
        """Broadcast rank 0's value."""
        if self.group is None:
            return value
        shared = torch.tensor([value], dtype=torch.uint8)
        dist.broadcast(shared, src=0, group=self.group)
        return bool(shared)


def read_line() -> str | None:
    line = sys.stdin.buffer.readline()
    return line.decode("utf-8", "replace").rstrip("\r\n") if line else None


class CtrlC(Exception):
    """The key Ctrl-C was pressed. (The signal SIGINT raises KeyboardInterrupt.)"""


class Keyboard:
    """The terminal of one process."""

    def __init__(self, history: History) -> None:
        self.input = create_input(sys.stdin)
        output = create_output(sys.stderr)  # stdout has only answers
        if isinstance(output, Vt100_Output):
            output.enable_cpr = False  # cursor position requests: some terminals do not answer, and they are not needed
        self.session: PromptSession[str] = PromptSession(
            history=history, input=self.input, output=output, interrupt_exception=CtrlC, enable_open_in_editor=False
        )
        self.leaving, self.told = False, False  # told: whether the user has been told how to leave
        self.prompting, self.terminated = False, False
        self.open = ExitStack()

    def __enter__(self) -> Self:
        before = signal.signal(signal.SIGTERM, self._terminate)  # from the launcher; the terminal must then leave raw mode, too
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
                line = self._prompt()
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

    def _prompt(self) -> str:
        """A line. Raises EOFError after Ctrl-D, CtrlC, and KeyboardInterrupt after SIGTERM."""
        self.prompting = True
        try:
            return self.session.prompt("> ", handle_sigint=False, pre_run=self._leave_prompt)
        finally:
            self.prompting = False
            if self.terminated:
                raise KeyboardInterrupt

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM. It does not raise within a prompt: the exception could come up in a callback of the prompt's
        event loop, which would report it and go on."""
        self.terminated = True
        if not self.prompting:
            raise KeyboardInterrupt
        if self.session.app.is_running and self.session.app.loop is not None:
            self.session.app.loop.call_soon_threadsafe(self._leave_prompt)

    def _leave_prompt(self) -> None:
        """End a prompt that runs, if SIGTERM has come. It may come before a prompt runs, too, and after its line is complete."""
        app = self.session.app
        if self.terminated and app.future is not None and not app.future.done():
            app.exit(exception=EOFError)

    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed. If not, other keys are kept for the next line."""
        keys = self.input.read_keys() + self.input.flush_keys()
        if any(key.key == Keys.ControlC for key in keys):
            return True
        store_typeahead(self.input, keys)
        return False


# --- history -------------------------------------------------------------------------------------------------------------


def open_history() -> History:
    """The history of earlier sessions, in a file that only its owner can read, in the state folder of the XDG base directory
    specification; in memory if no file can be created."""
    with suppress(OSError, RuntimeError):  # RuntimeError: no home
        path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rung" / "history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        _shorten(path)
        return BoundedHistory(str(path))
    return InMemoryHistory()


def _shorten(path: Path) -> None:
    """Cut a file of more than HISTORY_BYTES to its last HISTORY_BYTES / 2, starting with a whole entry."""
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
            with suppress(OSError):  # a full disk must not end the conversation
                super().store_string(string)
