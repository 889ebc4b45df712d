"""Rank 0's frontend process: start it, forward signals to it, and detect when either side ends.

Imports nothing heavy: the new process imports this module, and must answer /health while the model is still loading.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from types import FrameType

import zmq

from engine.protocol import Fatal, encode
from processes import name_process, parent_pid, run_folder, when_ended
from server.settings import Settings

JOIN_SECONDS = 10.0  # time for the frontend to end after the engine
ORPHAN_SECONDS = 5.0  # time for the frontend to send errors to its clients after the engine has ended


class Frontend:
    """Rank 0's frontend process, and the addresses of the two sockets between it and the engine."""

    def __init__(self, settings: Settings) -> None:
        self._cleanup = contextlib.ExitStack()
        folder = self._cleanup.enter_context(run_folder())
        to_engine, from_engine = (f"ipc://{folder}/{name}" for name in ("to-engine", "from-engine"))
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=frontend_main, args=(settings, to_engine, from_engine), name="rung-frontend")
        self.process.start()
        self.addresses = to_engine, from_engine
        self._last_signal = 0.0

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal as SIGTERM. Signals within one second count once.

        A terminal and torchrun may both send a signal for the same Ctrl-C.
        """
        if time.monotonic() - self._last_signal > 1 and self.process.is_alive():
            self._last_signal = time.monotonic()
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGTERM)

    def close(self) -> int:
        """Wait for the process to end, and kill it after JOIN_SECONDS. Returns its exit code."""
        self.process.join(JOIN_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._cleanup.close()
        return self.process.exitcode or 0


def frontend_main(settings: Settings, to_engine: str, from_engine: str) -> None:
    """Run the frontend process, in a session of its own, so that signals from the terminal do not reach it.

    It ends soon after the engine's process has ended.
    """
    name_process("rung-frontend")
    os.setsid()
    when_ended(parent_pid(), lambda: report_engine_death(from_engine))
    from server.frontend import run_frontend

    sys.exit(run_frontend(settings, to_engine, from_engine))


def report_engine_death(from_engine: str) -> None:
    """Tell the frontend that the engine has ended, so that it sends errors to its clients and exits.

    Exit the process here if it has not ended after ORPHAN_SECONDS.
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(from_engine)
    socket.send(encode(Fatal("the engine process ended")))
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)
