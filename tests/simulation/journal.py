"""The real journal, whose file is in memory and whose thread writes when the simulation says so."""

import sqlite3
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server.journal import Journal
from server.journal_file import SCHEMA, JournalBounds, JournalFile
from server.metrics import Metrics


class MemoryFile(JournalFile):
    """A file that outlives its servers."""

    def __init__(self) -> None:
        super().__init__(sqlite3.connect(":memory:", isolation_level=None), JournalBounds())
        self._db.executescript(SCHEMA)
        self.full = False

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """If the disk is full, it fails at the end."""
        with super().transaction():
            yield
            if self.full:
                raise sqlite3.OperationalError("disk full")


class FakeLoop:
    create_future = Future[Any]

    def call_soon_threadsafe(self, work: Any) -> None:
        work()


class SteppedJournal(Journal):
    def __init__(self, file: MemoryFile) -> None:
        super().__init__(file, Path("journal"), Metrics("simulated"))
        self._loop: Any = FakeLoop()
        self._left: list[Any] = []

    def step(self) -> None:
        """What the thread does in a round."""
        jobs = list(self._jobs)
        self._jobs.clear()
        self._left = self._commit([*self._left, *jobs])
