"""A server as users start it: in its own processes, on a free loopback port. Failing tests show its output."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from tests import ROOT
from tests.support import quick_start
from tests.support.command_line import environment
from tests.support.ports import free_port

# Each rank fills its KV cache with zeros when it starts. This one has 16,384 tokens of a tiny model on one rank.
SMALL_CACHE = ("--kv-memory", "256M")
START_SECONDS = 300.0  # importing torch is slow on a busy machine


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
    """The process name that ps and top show; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def rank_pids(launcher: int) -> list[int]:
    """The processes of a launcher's ranks, rank 0 first."""
    by_name = {process_name(pid): pid for pid in children(launcher)}
    return [by_name[name] for name in sorted(by_name) if name.startswith("rung-rank-")]


def runs(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class ServerProcess:
    """A running server, and a context manager that ends it.

    ranks: tensor-parallel ranks; 0 leaves the flag out. torchrun: start the ranks by torchrun, not by our launcher. program: what
    to run instead of `-m server`. forked: fork the server from a process that has imported what it needs; see
    tests/support/quick_start.py.
    """

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
        command = [sys.executable, *start, "--device", "cpu", *SMALL_CACHE, "--port", str(self.port), *map(str, flags)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        popen = quick_start.Popen if forked else subprocess.Popen
        self.process = popen(command, cwd=ROOT, env=environment(**(environ or {})), stdout=self._log, stderr=subprocess.STDOUT)
        self.ranks = ranks
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self._seen: dict[int, str] = {}  # command lines of the server's processes, by process id

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> "ServerProcess":
        """Wait until the server can run requests."""
        wait_until(lambda: self.health() == 200, START_SECONDS, f"a healthy server\n{self.log}")
        self._note_processes()
        return self

    def health(self) -> int | None:
        """The HTTP status of /health; None while nothing listens on the port. Fails if the server has ended."""
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
        """Samples by name and labels, for example `rung:request_success_total{finished_reason="stop"}`. The label model_name is
        left out."""
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
        return rank_pids(self.process.pid) or [self.process.pid]

    def frontend_pids(self) -> list[int]:
        starters = {self.process.pid, *self.rank_pids()[:1]}  # torchrun starts no frontend: rank 0 does
        return [pid for starter in starters for pid in children(starter) if process_name(pid) == "rung-frontend"]

    def wait(self, seconds: float) -> int:
        """Wait for the end of the server and return its exit code. Fails after `seconds`."""
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
        for pid, command in self._seen.items():  # end orphans; another command line means that the process id was reused
            if command and command_line(pid) == command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._log.close()
