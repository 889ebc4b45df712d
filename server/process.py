"""The frontend process: start it, forward signals to it, and end it with the process that started it.

Imports no model: the new process imports this module, and must answer /health while the model is still loading.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from cli import USER_ERROR, note
from engine.protocol import Fatal, encode
from ranks.processes import kill_ranks, name_process, parent_pid, when_ended
from server.settings import Settings
from server.started import FAILED, SIGNALLED, TICK, Started, addresses, read_started

WINDOW = 600.0  # seconds for which a restart counts
JOIN_SECONDS = 10.0  # time for the frontend to end after the engine
HANG_SECONDS = 30.0  # for which the frontend's event loop may not run until the frontend is taken for hanging
START_SECONDS = 120.0  # the same while the frontend starts
ORPHAN_SECONDS = 5.0  # time for the frontend to send errors to its clients after the engine has ended


class Frontend:
    """The frontend process, and the addresses of the two sockets between it and the engine, which are in `folder`."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings, self.folder, self.addresses = settings, folder, addresses(folder)
        self.start(attach=False)

    def start(self, attach: bool) -> None:
        """Start the process, or a new one after it has ended. attach: whether the ranks may have requests of the one before."""
        context = multiprocessing.get_context("spawn")
        self._beats = context.Value("L", 0, lock=False)  # a process that is stopped may hold a lock
        arguments = (self._settings, *self.addresses, read_started(self.folder) if attach else None, self._beats)
        self.process = context.Process(target=frontend_main, args=arguments, name="rung-frontend")
        self.process.start()

    def wait(self) -> int:
        """Wait for the process to end, and kill it if it hangs: if it does not count for too long. Returns its exit code."""
        given = self._settings.hang_seconds
        limit = HANG_SECONDS if given is None else given or float("inf")
        beats, silence = 0, 0.0
        while self.process.is_alive():
            self.process.join(TICK)
            silence, beats = (silence + TICK, beats) if self._beats.value == beats else (0.0, self._beats.value)
            if silence > (limit if beats else max(limit, START_SECONDS)):
                self.process.kill()  # before the note: while stderr is blocked, the process may go on
                note(f"the frontend has not answered for {silence:g} s and is killed")
                silence = 0.0
        return self.process.exitcode or 0

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def forward(self) -> None:
        """Send SIGTERM."""
        if self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGTERM)

    def close(self) -> int:
        """Wait for the process to end, and kill it after JOIN_SECONDS. Returns its exit code."""
        self.process.join(JOIN_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self.process.exitcode or 0


class Restarts:
    """Limits how often processes are started again: `limit` times in WINDOW (--max-restarts)."""

    def __init__(self, limit: int) -> None:
        self._limit, self._times = limit, deque[float]()  # of the last restarts

    def take(self, what: str, which: str) -> bool:
        """Whether a process may be started again. Prints what happened to it and, if not, that this was too often."""
        now = time.monotonic()
        while self._times and self._times[0] < now - WINDOW:
            self._times.popleft()
        if len(self._times) >= self._limit:
            if self._limit:
                many = f"this is the end number {self._limit + 1} in {WINDOW / 60:g} minutes (--max-restarts {self._limit})"
                note(f"error: {what}; {many}")
            return False
        self._times.append(now)
        note(f"{what}; starting {which} again")
        return True


def describe_end(code: int) -> int:
    """The server's exit code for the frontend's, as `Process.exitcode` has it. Says why if it is not 0."""
    if code > SIGNALLED:
        note("ended at a second signal, before the running requests were answered")
        return code
    if code == USER_ERROR:
        return code  # it has said what is wrong
    if code:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        note(f"error: the HTTP frontend {how}")
        return FAILED
    return 0


def frontend_main(settings: Settings, to_engine: str, from_engine: str, before: Started | None, beats: Any) -> None:
    """Run the frontend process, in a session of its own, so that signals from the terminal do not reach it.

    It ends soon after the process that started it. beats: a counter that its event loop increases.
    """
    name_process("rung-frontend")
    os.setsid()
    when_ended(parent_pid(), lambda: report_end(from_engine))
    from server.frontend import run_frontend

    sys.exit(run_frontend(settings, to_engine, from_engine, partial(kill_ranks, parent_pid()), before, beats))


def report_end(from_engine: str) -> None:
    """Tell the frontend that the process which started it has ended, so that it sends errors to its clients and exits.

    Exit the process here if it has not ended after ORPHAN_SECONDS.
    """
    tell(from_engine, Fatal("the process that started the frontend ended"))
    time.sleep(ORPHAN_SECONDS)
    os._exit(FAILED)


def tell(from_engine: str, message: Fatal) -> None:
    """Send the frontend a message in the engine's name."""
    push: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    push.connect(from_engine)
    push.send(encode(message))
    push.close(linger=1000)
