"""A server as users start it: processes of its own, on a free loopback port, with all its output kept for a failing test."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from tests import quick_start
from tests.command_line import ROOT, environment

START_SECONDS = 300.0  # a busy machine takes its time to import torch


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of `condition()`; fails if there is none within `seconds`."""
    end = time.monotonic() + seconds
    while True:
        if value := condition():
            return value
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def process_name(pid: int) -> str:
    """What ps and top call it; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def runs(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class ServerProcess:
    """`ranks` 0: one process. `torchrun`: it starts the ranks, not our launcher. `program`: what to run instead of `-m server`.
    `forked`: off a process that has imported what a server needs, see tests/quick_start.py. A context manager."""

    def __init__(
        self,
        *flags: object,
        ranks: int = 0,
        torchrun: bool = False,
        program: Sequence[str] = ("-m", "server"),
        environ: dict[str, object] | None = None,
        forked: bool = True,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        start = [*program, "--tp", str(ranks)] if ranks and not torchrun else [*program]
        if torchrun:
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *program]
        command = [sys.executable, *start, "--device", "cpu", "--port", str(self.port), *map(str, flags)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        popen = quick_start.Popen if forked else subprocess.Popen
        self.process = popen(command, cwd=ROOT, env=environment(**(environ or {})), stdout=self._log, stderr=subprocess.STDOUT)
        self.ranks = ranks
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self._seen: dict[int, str] = {}  # the server's processes and their command lines

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> "ServerProcess":
        """Wait until requests can run."""
        wait_until(lambda: self.health() == 200, START_SECONDS, f"a healthy server\n{self.log}")
        self._note_processes()
        return self

    def health(self) -> int | None:
        """The status of /health; None while nobody listens. Fails if the server has ended."""
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
        try:
            return self.http.get("/health").status_code
        except httpx.TransportError:
            return None

    @property
    def log(self) -> str:
        self._log.flush()
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=options.pop("max_retries", 0), **options)

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/stats").json()
        return found

    def metrics(self) -> dict[str, float]:
        """Samples by name with labels but model_name, such as `rung:request_success_total{finished_reason="stop"}`."""
        found = {}
        for line in self.http.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                stem, _, labels = name.partition("{")
                kept = [one for one in labels.rstrip("}").split(",") if one and not one.startswith("model_name=")]
                found[stem + (f"{{{','.join(kept)}}}" if kept else "")] = float(value)
        return found

    def rank_pids(self) -> list[int]:
        """The ranks' processes, rank 0 first."""
        if not self.ranks:
            return [self.process.pid]
        by_name = {process_name(pid): pid for pid in children(self.process.pid)}
        names = (f"rung-rank-{rank}" for rank in range(self.ranks))
        return [by_name[name] for name in names if name in by_name]

    def frontend_pids(self) -> list[int]:
        return [pid for rank in self.rank_pids()[:1] for pid in children(rank) if process_name(pid) == "rung-frontend"]

    def wait(self, seconds: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end within {seconds:g} s:\n{self.log}") from None

    def _note_processes(self) -> None:
        self._seen |= {pid: command_line(pid) for pid in self.rank_pids() + self.frontend_pids()}

    def close(self) -> None:
        self._note_processes()
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid, command in self._seen.items():  # what outlived its parent; another process may have its number by now
            if command and command_line(pid) == command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._log.close()
