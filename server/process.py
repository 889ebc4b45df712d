"""Rank 0's frontend process: check its address, start it, forward signals to it, and detect when either side ends.

Imports nothing heavy: the new process imports this module, and must answer /health while the model is still loading.
"""

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import sys
import time
from types import FrameType

import zmq

from engine.protocol import Fatal, encode
from errors import UserError
from processes import name_process, parent_pid, run_folder, when_ended
from server.settings import Settings

JOIN_SECONDS = 10.0  # time for the frontend to end after the engine
ORPHAN_SECONDS = 5.0  # time for the frontend to send errors to its clients after the engine has ended


def check_port(settings: Settings) -> None:
    """Raises UserError if `settings.host` and `settings.port` cannot be bound now. The frontend binds them later."""
    where = f"port {settings.port} of {settings.host}"
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise UserError(f"--host {settings.host} is no address ({e.strerror}); give one of this machine's") from None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the frontend does
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as e:
                if e.errno == errno.EADDRINUSE:
                    raise UserError(
                        f"{where} is taken by another program; end that, or choose another one with --port"
                    ) from None
                reason = os.strerror(e.errno or 0)
                raise UserError(f"cannot listen on {where} ({reason}); choose others with --host and --port") from None


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
    push: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    push.connect(from_engine)
    push.send(encode(Fatal("the engine process ended")))
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)
