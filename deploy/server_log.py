"""Passes on what a server prints, whatever becomes of the log that it goes to. Standard library only."""

import sys
import threading
from collections.abc import Iterable
from contextlib import suppress


class ServerLog:
    """A thread that writes each of `lines`, the output of a process, to stderr, and keeps the last one."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.last = ""
        self._lines = lines
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        for line in self._lines:
            self.last = line.strip() or self.last
            with suppress(OSError):  # a full disk loses the line; a thread that ended would block the server at a full pipe
                sys.stderr.write(line)
