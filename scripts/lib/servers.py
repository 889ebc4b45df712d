"""Start an HTTP server, wait until it is healthy, and stop it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from cli import note
from errors import UserError
from ranks.ports import free_port
from scripts.lib.process_tree import end
from scripts.lib.results import ROOT

READY_SECONDS = 600.0  # time limit for a server to load a large model
STOP_SECONDS = 20.0  # time limit for it to end
LOG_LINES = 80  # of a server that was not ready, shown to the user


@dataclass(frozen=True)
class Server:
    url: str
    pid: int


@contextmanager
def rung_server(ranks: int, flags: Sequence[str], log: Path, **environ: str) -> Iterator[Server]:
    """Run this project's server with these flags on a free loopback port, see `running`."""
    port = free_port()
    command = [sys.executable, "-m", "server", "--tp", str(ranks), "--port", str(port), "--drain-timeout", "1", *flags]
    with running(command, port, log, **environ) as server:
        yield server


@contextmanager
def running(command: Sequence[str], port: int, log: Path, **environ: str) -> Iterator[Server]:
    """Start a server by `command`, yield it when it is ready, and stop it at the end. Its output goes to `log`.

    Raises UserError if it ends before it is ready.
    """
    with log.open("wb") as output:
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | environ
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        if not is_healthy(url, READY_SECONDS, lambda: process.poll() is None):
            note("\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]))
            raise UserError(f"the server was not ready within {READY_SECONDS:g} s, or ended; the end of {log} stands above")
        yield Server(url, process.pid)
    finally:
        end(process, seconds=STOP_SECONDS)


def is_healthy(url: str, seconds: float, alive: Callable[[], bool] = lambda: True) -> bool:
    """Wait until the server answers /health. False if it does not within `seconds`, or if `alive()` is False before."""
    end = time.monotonic() + seconds
    with httpx.Client(base_url=url, trust_env=False) as client:
        while alive() and time.monotonic() < end:
            with suppress(httpx.TransportError):
                if client.get("/health").status_code == 200:
                    return True
            time.sleep(0.02)
    return False
