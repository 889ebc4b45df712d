"""The frontend of ranks that torchrun starts again (`--max-restarts N`). It lives as long as torchrun's agent. Its folder is named
after the agent, so each new rank 0 finds it there."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from cli import USER_ERROR, leave, note
from ranks.processes import (
    LAUNCHER,
    folder_name,
    hold,
    kill_ranks,
    make_and_hold,
    name_process,
    ranks_of,
    remove_abandoned,
    start_ticks,
)
from server.process import JOIN_SECONDS, Restarts, report_end
from server.settings import load_settings
from server.started import Started, addresses, read_started

PID = "frontend-pid"  # file in the folder
WRONG_INPUT = "wrong-input"  # file in the folder, once a frontend has said what is wrong with the input
SHUTDOWN_SECONDS = 1.0  # after the frontend's end, wait so long for its Shutdown before taking it for killed


def restarting_agent_pid(environ: Mapping[str, str]) -> int | None:
    """The process id of torchrun's agent, if it started this rank, all ranks are on this host, and it may start them again. None on
    systems other than Linux, where requests do not outlive the ranks."""
    one_host = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in environ or LAUNCHER in environ or not one_host or sys.platform != "linux":
        return None
    return os.getppid() if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" else None


def is_first_start(environ: Mapping[str, str]) -> bool:
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def all_ranks_run(agent: int) -> bool:
    """Whether all ranks of this host run. If a rank is missing, a SIGTERM comes from the agent, which is about to restart all
    ranks."""
    return len(ranks_of(agent)) >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def folder_of(agent: int) -> Path:
    """The folder of the agent's server. Its name differs from that of any other agent, in another container or an earlier one with
    the same process id, too."""
    return Path(tempfile.gettempdir(), folder_name(f"{agent} {start_ticks(agent)}"))


def leave_after_wrong_input(agent: int) -> None:
    """Exit this rank, which the agent has started again, if the frontend ended with USER_ERROR: the next one would, too."""
    if (folder_of(agent) / WRONG_INPUT).exists():
        leave(USER_ERROR)


class TorchrunFrontend:
    """Rank 0's handle of the frontend, with the methods of `process.Frontend`. It starts a frontend that was killed again."""

    def __init__(self, agent: int, restarts: int) -> None:
        """restarts: how often this rank 0 may start the frontend again in `process.WINDOW`."""
        is_first = is_first_start(os.environ)
        if is_first:
            remove_abandoned()
        self.folder = folder_of(agent)
        self._lock = make_and_hold(self.folder)
        self.addresses, self._agent, self._restarts = addresses(self.folder), agent, Restarts(restarts)
        self._process: subprocess.Popen[bytes] | None = None  # None if an earlier rank 0 started it
        self._ended_at: float | None = None  # time.monotonic() when its end was seen
        self._signalled = False
        if is_first or not self._find():
            self._start(attach=not is_first)

    def _start(self, attach: bool) -> None:
        program = "from server.torchrun import main; main()"
        before = " ".join(map(str, read_started(self.folder))) if attach else ""
        command = [sys.executable, "-c", program, str(self.folder), str(self._agent), before, *sys.argv[1:]]
        self._process = subprocess.Popen(command, start_new_session=True)
        try:
            (self.folder / PID).write_text(str(self._process.pid))
        except OSError as e:
            note(
                f"warning: {self.folder} cannot be written ({e.strerror}), so that ranks that start again cannot find the frontend"
            )
        self._open(self._process.pid)
        if self._signalled:  # meanwhile
            self.forward()

    def _find(self) -> bool:
        """Open the process that an earlier rank 0 started. False if it has ended; another process may have its id."""
        try:
            pid = int((self.folder / PID).read_text())
            self._open(pid)
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return False
        return os.fsencode(self.folder) in arguments

    def _open(self, pid: int) -> None:
        self._descriptor, self._ended_at = os.pidfd_open(pid), None
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def is_alive(self) -> bool:
        """Whether there is a frontend, or soon will be again."""
        if self._ended_at is None and self._poll.poll(0):
            self._ended_at = time.monotonic()
        if self._ended_at is None or time.monotonic() - self._ended_at < SHUTDOWN_SECONDS:
            return True
        code = self._process.poll() if self._process else None  # of an earlier rank 0's child: unknown
        ended_by_itself = code is not None and code >= 0
        if ended_by_itself or self._signalled or not self._restarts.take("the frontend was killed", "it"):
            return False
        os.close(self._descriptor)
        self._start(attach=True)
        return True

    def forward(self) -> None:
        """Send SIGTERM. A frontend that ends is not started again."""
        self._signalled = True
        self._send(signal.SIGTERM)

    def close(self) -> int:
        """Wait for the end of the frontend after that of the engine. Returns its exit code, 0 if an earlier rank 0 started it, or
        if a signal ended it before it handled signals."""
        if not self._poll.poll(JOIN_SECONDS * 1000):
            self._send(signal.SIGKILL)
        code = self._process.wait() if self._process else 0
        if code == USER_ERROR:
            (self.folder / WRONG_INPUT).touch()  # for the next rank 0; the next server removes the folder
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        return 0 if self._signalled and code == -signal.SIGTERM else code

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):  # it has ended
            signal.pidfd_send_signal(self._descriptor, number)


def main() -> None:
    """The frontend process. Arguments: its folder, the agent's process id, `before` of `Recovery`, and the server's
    command line."""
    folder, agent, fields = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split()
    name_process("rung-frontend")
    hold(folder)
    poll = select.poll()
    poll.register(os.pidfd_open(agent), select.POLLIN)

    def end_with_agent() -> None:
        poll.poll()
        report_end(addresses(folder)[1])

    threading.Thread(target=end_with_agent, daemon=True, name="agent").start()
    from server.frontend import run_frontend

    before = Started(float(fields[0]), int(fields[1])) if fields else None
    run_frontend(load_settings(sys.argv[4:]), *addresses(folder), partial(kill_ranks, agent), before)
