"""The frontend's worker processes, for what a request can make expensive: chat templates, long texts, schemas, large bodies.

A thread could not be stopped and would hold the GIL. A worker is a process with a memory limit, and a time limit for each
job. If a job exceeds a limit, the worker is killed and replaced. Workers end when the frontend ends.

How to add a job: write a function at the top level of a module that does not import torch, and call it by

    result = await service.workers.run(function, *arguments, slow=True)

Function, arguments and result are pickled. In the worker, `worker_tokenizer()` returns the server's
tokenizer. An ApiError or a UserError that the function raises reaches the caller unchanged. Set `slow` if a request can make
the job long, as with a schema, a template or a long text from a client. Leave it out for jobs of a few milliseconds. If there
are two or more workers, slow jobs never occupy all of them. Set `share` if requests are likely to need equal jobs.

Process pools of libraries, such as pebble's, are not used: they hand jobs over in threads, and with a busy event loop these
threads wait for the GIL.
"""

import asyncio
import contextlib
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from errors import UserError, first_line, is_panic
from ranks.bounded import MEMORY, limit_memory
from ranks.processes import die_with_parent
from server.errors import ApiError
from server.limits import Full, HeldBytes, current_client
from server.logs import log
from text.tokenizer import Tokenizer
from text.tokenizer_files import tokenizer_of

T = TypeVar("T")

START_SECONDS = 120.0  # time for a worker to import its modules and read the tokenizer while the machine loads weights
JOBS_BYTES = 1 << 30  # of jobs without a result; one client may have a quarter
LAST_RESORT_SECONDS = 5.0  # a worker ends itself this long after its job's limit: the frontend, which should kill it, has gone
GRACE_SECONDS = 0.25  # a job whose client has left may still end: waiting for it costs less than a new worker
NICENESS = 10  # of the workers for slow jobs, so that the ranks have precedence
QUICK_BYTES = 65536  # larger replies are unpickled in a thread: many objects take long, but leave the GIL to others meanwhile
FREE_BYTES = 65536  # of each job, which do not count
HEADER = 8  # bytes of a message's length, which precedes the message, most often a pickle
RESULT_LIMIT = 32 << 20  # bytes
ONE_THREAD = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")


class _Job:
    def __init__(self, data: bytes, function: str) -> None:
        self.data, self.function = data, function
        self.callers = dict[_Caller, None]()  # that wait for the result, the oldest first
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()  # cancelled when the last caller leaves
        self.began = False


class _Caller:
    def __init__(self, client: str, job: _Job) -> None:
        self.client, self.job = client, job
        # done when another caller needs its place
        self.dropped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def waits(self) -> bool:
        """Whether it has a place in the queue, rather than a worker."""
        return not (self.job.began and next(iter(self.job.callers)) is self)


class Workers:
    """`count` worker processes with the tokenizer of `model`. To be used from one event loop.

    `seconds`: time limit of each job. `max_queue`: most callers that wait for quick jobs, and most that wait for slow ones, also where
    many wait for one. `patience`: longest time of a job in the queue, in seconds, without that in which its workers start. `largest`: bytes of a job that a client may always
    have, see `HeldBytes`. `modules`: names of the modules that jobs need, which a worker imports when it starts. If there are two
    or more workers, the first one takes only quick jobs. The first worker starts in `start`, each other one with the first slow job
    that it can take.

    Clients take turns: the next job is of the one that has waited longest since a job of its own began. A full queue drops the
    newest caller of the client that has most, if the new one's has fewer.
    """

    def __init__(
        self,
        model: str,
        count: int = 2,
        seconds: float = 10.0,
        max_queue: int = 1024,
        patience: float = 600.0,
        largest: int = 0,
        modules: Sequence[str] = (),
    ) -> None:
        self._model, self._modules, self._count, self._seconds = model, modules, count, seconds
        self._max_queue, self._patience = max_queue, patience
        self._quick, self._slow = deque[_Job](), deque[_Job]()
        self._bytes = HeldBytes(JOBS_BYTES, largest, FREE_BYTES)
        self._callers = {id(self._quick): dict[_Caller, None](), id(self._slow): dict[_Caller, None]()}  # the oldest first
        self._shared: dict[bytes, _Job] = {}  # by their data
        self._closed = False
        self._turns: dict[str, int] = {}  # when the last job of a client that has more began
        self._begun = 0  # jobs
        self._idle: dict[int, asyncio.Future[None]] = {}  # worker: the future with which it waits for a job
        # whether a worker of a queue has started
        self._served = {id(self._quick): asyncio.Event(), id(self._slow): asyncio.Event()}
        self._tasks: list[asyncio.Task[None]] = []
        self.pids: dict[int, int] = {}  # worker: process id

    def start(self) -> None:
        """Start the first worker now, instead of with the first job."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._work(index)) for index in range(self._count)]

    async def close(self) -> None:
        """Kill all workers. Running, queued and later jobs fail."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for job in (*self._quick, *self._slow):
            _fail(job, _ending())

    async def run(
        self,
        function: Callable[..., T],
        *arguments: Any,
        slow: bool = False,
        share: bool = False,
        wait_seconds: float | None = None,
    ) -> T:
        """Run `function(*arguments)` in a worker and return its result. If the caller is cancelled, the job ends soon.
        share: take part in an equal job that has no result yet, if there is one; it ends when all its callers are cancelled. Its
        arguments must be short, because they are pickled here. wait_seconds: the longest time in the queue, also while workers start; None:
        `patience`.

        Raises an ApiError or a UserError that the function raises, and a RuntimeError for its other exceptions; a 400 if the
        job exceeds the limit of time or memory; a 429 if too many jobs wait, or they are too large; a 503 if this one waits too
        long.
        """
        self.start()
        queue = self._slow if slow and self._count > 1 else self._quick
        client = current_client.get()
        self._place(queue, client)  # pickling may take long
        work = (function, arguments), pickle.HIGHEST_PROTOCOL
        data = await asyncio.to_thread(pickle.dumps, *work) if slow and not share else pickle.dumps(*work)
        with self._bytes.hold(client) as take:
            try:
                take(len(data))
            except Full:
                message = "requests that wait to be prepared have too much text; try again soon"
                raise ApiError(429, message, None, "bodies_full") from None
            if drop := self._place(queue, client):
                self._leave(drop, queue)
                drop.dropped.set_result(None)
            job = self._shared.get(data) if share else None
            if job is None:
                job = _Job(data, function.__name__)
                queue.append(job)
                if share:
                    self._shared[data] = job
            caller = _Caller(client, job)
            job.callers[caller] = self._callers[id(queue)][caller] = None
            self._wake(queue)
            try:
                if wait_seconds is None:
                    await _first(caller.job.result, caller.dropped, event=self._served[id(queue)], seconds=START_SECONDS)
                result: T = await _result(caller, self._patience if wait_seconds is None else wait_seconds)
                return result
            finally:
                self._leave(caller, queue)

    def _place(self, queue: deque[_Job], client: str) -> _Caller | None:
        """Who has to leave the queue for a new caller of `client`. Raises a 429 if the queue is full of those that may stay, and a 503
        if the workers are closed."""
        if self._closed:
            raise _ending()
        waiting = [caller for caller in self._callers[id(queue)] if caller.waits]
        if len(waiting) < self._max_queue:
            return None
        count = Counter(caller.client for caller in waiting)
        most = max(count, key=count.__getitem__)
        if count[most] <= count[client] + 1:
            raise _full()
        return next(caller for caller in reversed(waiting) if caller.client == most)

    def _leave(self, caller: _Caller, queue: deque[_Job]) -> None:
        """Forget a caller, and its job if it was the last one."""
        job = caller.job
        job.callers.pop(caller, None)
        self._callers[id(queue)].pop(caller, None)
        if job.callers:
            return
        job.result.cancel()
        if self._shared.get(job.data) is job:
            del self._shared[job.data]
        with contextlib.suppress(ValueError):
            queue.remove(job)

    def _take(self, queue: deque[_Job]) -> _Job:
        """Remove the next job from a queue that is not empty."""
        job = min(queue, key=lambda job: min(self._turns.get(caller.client, 0) for caller in job.callers))
        queue.remove(job)
        self._begun += 1
        self._turns |= {caller.client: self._begun for caller in job.callers}
        waiting = {caller.client for queue in (self._quick, self._slow) for job in queue for caller in job.callers}
        self._turns = {client: turn for client, turn in self._turns.items() if client in waiting}
        return job

    def _queues(self, index: int, started: bool) -> tuple[deque[_Job], ...]:
        """The queues from which a worker may take jobs, slow ones first.

        The first worker takes only quick jobs. Another one takes none before it has started, because that would delay them.
        """
        if index == 0:
            return (self._quick,)
        return (self._slow, self._quick) if started else (self._slow,)

    def _wake(self, queue: deque[_Job]) -> None:
        for index in sorted(self._idle):
            if any(one is queue for one in self._queues(index, index in self.pids)):
                self._idle.pop(index).set_result(None)
                return

    async def _next(self, index: int) -> _Job:
        while True:
            for queue in self._queues(index, index in self.pids):
                while queue:
                    job = self._take(queue)
                    if not job.result.done():
                        job.began = True
                        return job
            self._idle[index] = asyncio.get_running_loop().create_future()
            try:
                await self._idle[index]
            finally:
                self._idle.pop(index, None)

    async def _work(self, index: int) -> None:
        """Run worker `index` as long as the frontend runs, and replace its process when that ends."""
        process: _Process | None = None
        job: _Job | None = None
        eager = index == 0  # start a process before there is a job: the first one, and all that replace a killed one
        try:
            while True:
                job = None if eager and process is None else await self._next(index)
                if process is not None and not process.alive:
                    process.kill()
                    self._note(index, None)
                    process = None
                if process is None:
                    try:
                        niceness = NICENESS * (index > 0)
                        process = await _Process.start(self._model, self._modules, self._seconds, niceness)
                    except Exception as e:
                        log.error("a worker process does not start: %s", e)
                        _fail(job, _busy("the server cannot prepare requests now"))
                        await asyncio.sleep(1)
                        continue
                    self._note(index, process.pid)
                if job is not None and not await self._do(process, job):
                    process.kill()
                    self._note(index, None)
                    process, eager = None, True
        finally:
            _fail(job, _ending())  # a job that was taken while its worker started
            if process is not None:
                process.kill()

    def _note(self, index: int, pid: int | None) -> None:
        """Note that a worker's process has started, or that it has ended."""
        if pid is None:
            self.pids.pop(index)
        else:
            self.pids[index] = pid
        for queue in (self._quick, self._slow):
            served = any(one is queue for other in self.pids for one in self._queues(other, started=True))
            (self._served[id(queue)].set if served else self._served[id(queue)].clear)()

    async def _do(self, process: "_Process", job: _Job) -> bool:
        """Run a job and set its result or exception. Returns whether the worker can take another job."""
        if job.result.done():
            return True
        exchange = asyncio.ensure_future(process.exchange(job.data))
        try:
            await asyncio.wait((exchange, job.result), timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            if not exchange.done() and job.result.done():
                await asyncio.wait((exchange,), timeout=GRACE_SECONDS)
            if not exchange.done():
                log.warning("a job of a worker was ended: %s, %d bytes", job.function, len(job.data))
                _fail(job, ApiError(400, f"the request takes longer than {self._seconds:g} s to prepare", None, "too_complex"))
                return False
            good, value, usable = exchange.result()
        except (EOFError, OSError):
            log.warning("a worker ended in a job: %s, %d bytes", job.function, len(job.data))
            _fail(job, needs_memory())
            return False
        except asyncio.CancelledError:
            _fail(job, _ending())
            raise
        finally:
            exchange.cancel()
        if not good:
            _fail(job, value)
        elif not job.result.done():
            job.result.set_result(value)
        return bool(usable)


async def _first(*ends: asyncio.Future[Any], event: asyncio.Event, seconds: float) -> None:
    """Wait for the first of these, which go on, or so many seconds."""
    happens = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((*ends, happens), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        happens.cancel()


async def _result(caller: _Caller, patience: float) -> Any:
    """The result of its job, which goes on if only this caller is cancelled. Raises a 503 after `patience` seconds in the queue, and a
    429 if it is dropped."""
    job, ends = caller.job, (caller.job.result, caller.dropped)
    await asyncio.wait(ends, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
    if job.began:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if caller.dropped.done():
        raise _full()
    if not job.result.done():
        raise _busy(f"the request waited longer than {patience:g} s to be prepared")
    return job.result.result()


def _fail(job: _Job | None, error: Exception) -> None:
    if job is not None and not job.result.done():
        job.result.set_exception(error)


def _busy(message: str) -> ApiError:
    return ApiError(503, f"{message}; try again later", None, "overloaded")


def _full() -> ApiError:
    return ApiError(429, "too many requests wait to be prepared; try again soon", None, "queue_full")


def _ending() -> ApiError:
    return ApiError(503, "the server is shutting down", None, "draining")


class _Process:
    """One worker process and the socket to it. A message is a length of HEADER bytes, little-endian, and a pickle."""

    def __init__(self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.pid = process.pid

    @classmethod
    async def start(cls, model: str, modules: Sequence[str], seconds: float, niceness: int) -> "_Process":
        ours, theirs = socket.socketpair()
        program = "import sys; from server.workers import work; work(*sys.argv[1:])"
        numbers = (theirs.fileno(), os.getpid(), round(seconds + LAST_RESORT_SECONDS), niceness)
        command = [sys.executable, "-c", program, *map(str, numbers), model, *modules]
        variables = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"} | dict.fromkeys(ONE_THREAD, "1")
        folder = str(Path(__file__).parent.parent)
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, variables.get("PYTHONPATH"))))
        try:
            with theirs:
                process = subprocess.Popen(
                    command, env=variables, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
                )
            try:
                streams = await asyncio.open_unix_connection(sock=ours)
            except BaseException:
                process.kill()
                process.wait()
                raise
        except BaseException:
            ours.close()
            raise
        self = cls(process, *streams)
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._receive()
        except BaseException:
            self.kill()
            raise
        self._reap(1.0)
        return self

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def exchange(self, data: bytes) -> Any:
        self._writer.write(len(data).to_bytes(HEADER, "little"))
        self._writer.write(data)
        await self._writer.drain()
        reply = await self._receive()
        return pickle.loads(reply) if len(reply) <= QUICK_BYTES else await asyncio.to_thread(pickle.loads, reply)

    async def _receive(self) -> bytes:
        length = int.from_bytes(await self._reader.readexactly(HEADER), "little")
        return await self._reader.readexactly(length)

    def kill(self) -> None:
        self._process.kill()
        self._writer.transport.abort()
        self._reap(0.05)

    def _reap(self, seconds: float) -> None:
        """Ask every `seconds` whether the process has ended: one that somebody else killed must not stay a zombie, and after `kill` the
        kernel may need a while to free its memory."""
        if self._process.poll() is None:
            with contextlib.suppress(RuntimeError):  # the event loop is closing
                asyncio.get_running_loop().call_later(seconds, self._reap, seconds)


# --- in the worker ---------------------------------------------------------------------------------------------------

_tokenizer: Tokenizer | None = None


def worker_tokenizer() -> Tokenizer:
    """The server's tokenizer, in a worker process."""
    assert _tokenizer is not None, "this runs in a worker process only"
    return _tokenizer


def work(descriptor: str, parent: str, seconds: str, niceness: str, model: str, *modules: str) -> None:
    """The program of a worker: run jobs, one after another, until the frontend closes the socket.

    `descriptor`: of the socket. `parent`: the frontend's process id. `seconds`: this process ends itself if a job takes longer.
    `modules`: to be imported now, so that the first jobs need not wait for them.
    """
    global _tokenizer
    die_with_parent(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM):  # the frontend ends this process
        signal.signal(number, signal.SIG_IGN)
    for name in modules:
        importlib.import_module(name)
    _tokenizer = tokenizer_of(model)
    limit_memory()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries print why they fail, which the answer says
    os.nice(int(niceness))
    with socket.socket(fileno=int(descriptor)) as connection:
        files = connection.makefile("rb"), connection.makefile("wb")
        _send(files[1], b"")
        while header := files[0].read(HEADER):
            data = files[0].read(int.from_bytes(header, "little"))
            signal.alarm(int(seconds))  # without a handler it ends the process, even inside a library's code
            _send(files[1], _do(data))
            signal.alarm(0)


def _send(file: Any, data: bytes) -> None:
    file.write(len(data).to_bytes(HEADER, "little"))
    file.write(data)
    file.flush()


def _do(data: bytes) -> bytes:
    """Run a pickled job. Returns, pickled: (success, result or exception, whether this process can take another job)."""
    try:
        function, arguments = pickle.loads(data)
        reply = pickle.dumps((True, function(*arguments), True), pickle.HIGHEST_PROTOCOL)
        if len(reply) <= RESULT_LIMIT:
            return reply
        found: tuple[Exception, bool] = (needs_memory(), True)
    except (ApiError, UserError) as e:
        found = (e.with_traceback(None), True)
    except MemoryError:
        found = (needs_memory(), False)
    except RecursionError:
        found = (ApiError(400, "the request is nested too deeply", None, "too_complex"), True)
    except BaseException as e:
        if is_panic(e):
            message = f"a library failed while the request was prepared ({first_line(e)}); send another text"
            found = (ApiError(400, message, None, "too_complex"), True)
        elif not isinstance(e, Exception):
            raise
        else:
            found = (RuntimeError(f"in a worker:\n{traceback.format_exc()}"), True)
    return pickle.dumps((False, *found), pickle.HIGHEST_PROTOCOL)


def needs_memory() -> ApiError:
    return ApiError(400, f"the request needs more than {MEMORY >> 20} MiB to prepare", None, "too_complex")
