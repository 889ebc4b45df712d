"""What the server promises about accepted requests with `--journal`: they are finished even if the server ends before.

A thread writes to the file, so that nobody waits for a disk but the requests themselves. It commits all that has come meanwhile in
one transaction. A request is computed while it is written, and its client sees nothing of it before.

If nothing can be written, as on a full disk, requests are served without the promise.
"""

import asyncio
import contextlib
import sqlite3
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from server.errors import ApiError, internal_error
from server.http import to_json
from server.journal_file import MOST_ATTEMPTS, JournalBounds, JournalFile, Row, explained, open_journal
from server.logs import log
from server.metrics import Metrics

ENDS_OF_SERVERS = ("draining", "engine_failed")  # codes of errors after which a request is finished by the next server
BUSY = ("overloaded", "loading")  # codes of errors of requests that may be accepted later
COMMIT_SECONDS = 5.0  # a request waits for the disk at most so long
READ_SECONDS = 30.0  # the same for a result
CLOSE_SECONDS = 5.0  # time to write the rest when the server ends
RETRY_SECONDS = 1.0  # after a failed write
IDLE_SECONDS = 60.0  # between removals of old results
MOST_PENDING = 64 << 20  # bytes that wait for the disk before requests are no longer written, and that wait for another attempt
MOST_ENDS = 4 * MOST_PENDING  # bytes that wait for the disk before results are no longer written
JOB_BYTES = 1024  # that something to be done takes apart from its data


class Promise:
    """What becomes of an accepted request if the server ends. `row`: what to write; None: it is written. `lasting`: whether it is kept
    when the client leaves."""

    def __init__(self, journal: "Journal", number: int, row: Row | None = None, lasting: bool = True) -> None:
        self._journal, self._number, self._row, self._lasting = journal, number, row, lasting
        self._future: asyncio.Future[bool] | None = None

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Surrounds the work after the acceptance."""
        journal, number, row = self._journal, self._number, self._row
        if row is not None:
            self._future = journal.ask(lambda file: file.add(row), len(row.data))
        try:
            yield
        except ApiError as e:
            if is_for_later(e) and row is not None:  # it was not accepted
                journal.write(lambda file: file.forget(number))
            self.fail(e)
            raise
        except Exception as e:
            self.fail(e)
            raise
        except BaseException:  # the client is gone, or the server ends
            if not self._lasting and not journal.ending:
                journal.write(lambda file: file.forget(number))
            elif row is not None and not journal.ending:
                journal.on_orphan(number, row.owner)
            raise

    async def written(self) -> None:
        """Wait until the promise outlives the server."""
        if self._future is None:
            return
        try:
            async with asyncio.timeout(COMMIT_SECONDS):
                done = await asyncio.shield(self._future)
        except TimeoutError:
            done = False
        if not done:
            self._journal.metrics.unjournaled.inc()

    def finish(self, status: int, result: bytes) -> None:
        """Keep the result."""
        self._journal.finish(self._number, status, result)

    def fail(self, error: Exception) -> None:
        """Keep the error with which the request ended, unless it may still be answered. Only the first result is kept."""
        if not isinstance(error, ApiError):
            self.finish(500, to_json(internal_error().body))
        elif not is_for_later(error) and error.code not in ENDS_OF_SERVERS:
            self.finish(error.status_code, to_json(error.body))


def is_for_later(error: ApiError) -> bool:
    """Whether a request with this error may be accepted later."""
    return error.status_code == 429 or error.code in BUSY


@dataclass
class _Job:
    work: Callable[[JournalFile], Any]
    size: int = 0
    future: asyncio.Future[Any] | None = None
    reads: bool = False


class Journal:
    """The journal of a running server. Methods are called in the event loop."""

    def __init__(self, file: JournalFile, path: Path, metrics: Metrics) -> None:
        """path: for messages."""
        self.path, self.metrics, self._file = path, metrics, file
        self.unfinished, self._next = file.begin()
        self.ending = False  # the server ends: what is unfinished stays in the file
        self.on_orphan: Callable[[int, str], None] = lambda number, owner: None  # for requests that go on without their clients
        self._jobs: deque[_Job] = deque()
        self._pending = 0  # bytes of `_jobs`
        self._more, self._closed, self._failing = threading.Condition(), False, False
        self._crowded = False  # whether there was no room for a request
        self._thread = threading.Thread(target=self._run, daemon=True, name="journal")

    @classmethod
    def open(cls, path: Path, bounds: JournalBounds, metrics: Metrics) -> "Journal":
        """Raises UserError."""
        file, message = open_journal(path, bounds)
        if message:
            log.warning("%s", message)
        with explained(path):
            return cls(file, path, metrics)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Write what is left."""
        with self._more:
            self._closed = True
            self._more.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def promise(self, owner: str, answer_id: str, request_id: str, data: bytes, lasting: bool) -> Promise:
        """The promise of a new request, which `Promise.given` gives. data: all that is needed to answer it. lasting: whether it is
        finished if the client leaves."""
        number, self._next = self._next, self._next + 1
        return Promise(self, number, Row(number, time.time(), owner, answer_id, request_id, 0, data), lasting)

    async def load(self, number: int) -> tuple[bytes, Promise] | None:
        """The data of an unfinished request, and its promise. None if there is nothing to be finished."""
        row = await self._read(lambda file: file.read(number))
        if row is None or row.status:
            if row is None:
                log.error("request %d of the journal cannot be read, and is lost", number)
                self.write(lambda file: file.forget(number))
            return None
        kept = Promise(self, number)
        self.write(lambda file: file.note_attempt(number))
        if row.attempts >= MOST_ATTEMPTS:
            message = f"the request is refused: {MOST_ATTEMPTS} servers ended before they had finished it"
            kept.finish(500, to_json(ApiError(500, message, None, "poisoned").body))
            return None
        return row.data, kept

    async def find(self, owner: str, name: str) -> Row | None:
        """See `JournalFile.find`."""
        return await self._read(lambda file: file.find(owner, name))

    def finish(self, number: int, status: int, result: bytes) -> None:
        """See `JournalFile.finish`. If the disk is far too slow, an error takes the place of the result."""
        if self._pending + len(result) > MOST_ENDS:
            log.error("a result is not kept, because %d MiB wait for the disk of --journal %s", self._pending >> 20, self.path)
            status = 503
            result = to_json(ApiError(503, "the result could not be written in time", None, "journal_failed").body)
        self.write(lambda file: file.finish(number, status, result), len(result))

    def write(self, work: Callable[[JournalFile], Any], size: int = 0) -> None:
        """Write soon. If that fails, it is tried again a few times."""
        self._put(_Job(work, size))

    def ask(self, work: Callable[[JournalFile], bool], size: int) -> asyncio.Future[bool]:
        """Write soon. The result is False if that failed."""
        job = _Job(work, size, self._loop.create_future())
        if not self._put(job):
            self._tell([(job, False)])
        assert job.future is not None
        return job.future

    async def _read(self, work: Callable[[JournalFile], Row | None]) -> Row | None:
        job = _Job(work, 0, self._loop.create_future(), reads=True)
        self._put(job)
        assert job.future is not None
        try:
            async with asyncio.timeout(READ_SECONDS):
                row: Row | None = await job.future
        except TimeoutError:
            raise _unreadable() from None
        return row

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _put(self, job: _Job) -> bool:
        with self._more:
            if self._pending > MOST_PENDING and job.future and not job.reads:
                return False
            self._jobs.append(job)
            self._pending += job.size + JOB_BYTES
            self._more.notify()
        return True

    def _run(self) -> None:
        left: list[_Job] = []  # ends of requests that could not be written
        while not (self._closed and not self._jobs):
            with self._more:
                if not self._jobs and not self._closed:
                    self._more.wait(RETRY_SECONDS if left else IDLE_SECONDS)
                jobs, self._pending = list(self._jobs), 0
                self._jobs.clear()
            left = self._commit([*left, *(job for job in jobs if not job.reads)])
            self._tell([(job, self._result(job)) for job in jobs if job.reads])
        self._file.close()

    def _commit(self, jobs: list[_Job]) -> list[_Job]:
        """Write all in one transaction. Returns what is to be tried again."""
        before = self._file.changes
        try:
            with self._file.transaction():
                done = [(job, job.work(self._file)) for job in jobs]
                self._file.prune()
        except Exception as e:
            if not self._failing:
                effect = "requests are served, but do not outlive the server"
                log.error("--journal %s cannot be written (%s); until it can, %s", self.path, e, effect)
            self._failing = True
            self._tell([(job, False) for job in jobs])
            return _newest([job for job in jobs if job.future is None]) if isinstance(e, sqlite3.Error) else []
        if self._failing and self._file.changes > before:
            log.warning("--journal %s can be written again", self.path)
            self._failing = False
        refused = any(job.future is not None and not result for job, result in done)
        if refused and not self._crowded:
            what = "requests for which --journal %s has no room do not outlive the server; see unjournaled_requests"
            log.warning(what + ", --journal-mb and --journal-results", self.path)
        self._crowded = self._crowded or refused
        self._tell(done)
        return []

    def _result(self, job: _Job) -> Any:
        try:
            return job.work(self._file)
        except Exception as e:  # whatever it is, the thread goes on
            log.error("--journal %s cannot be read (%s)", self.path, e)
            return _unreadable()

    def _tell(self, results: list[tuple[_Job, Any]]) -> None:
        def tell() -> None:
            for job, result in results:
                if job.future is None or job.future.done():
                    continue
                if isinstance(result, ApiError):
                    job.future.set_exception(result)
                else:
                    job.future.set_result(result)

        if any(job.future for job, _ in results):
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(tell)


def _unreadable() -> ApiError:
    return ApiError(503, "the journal cannot be read; try again later", None, "journal_failed")


def _newest(jobs: list[_Job]) -> list[_Job]:
    """The last ones that have at most MOST_PENDING bytes. If the end of a request is not written, a later server repeats it."""
    sizes = list(accumulate(job.size + JOB_BYTES for job in reversed(jobs)))
    return jobs[len(jobs) - bisect_right(sizes, MOST_PENDING) :]
