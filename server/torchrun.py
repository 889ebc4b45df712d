"""The frontend of ranks that torchrun starts again (`--max-restarts N`): it lives as long as torchrun's agent, and each new rank 0
finds it by the agent's process id."""

import fcntl
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

from cli import note
from errors import UserError
from processes import LAUNCHER, PREFIX, kill_ranks, name_process, ranks_of
from server.process import JOIN_SECONDS, addresses, longest_start, report_end
from server.settings import load_settings

PID = "frontend-pid"  # file in the folder
LAST_WORDS = 1.0  # seconds for which a Shutdown may be on its way from a frontend that has ended


def restarting_agent(environ: Mapping[str, str]) -> int | None:
    """The process id of torchrun's agent, if it started this rank, all ranks are on this host, and it may start them again."""
    one_host = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in environ or LAUNCHER in environ or not one_host:
        return None
    return os.getppid() if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" else None


def is_first_start(environ: Mapping[str, str]) -> bool:
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def group_is_whole(agent: int) -> bool:
    """Whether all ranks of this host run. If not, a SIGTERM is the agent's, which ends the others before it starts all again."""
    return len(ranks_of(agent)) >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class LastingFrontend:
    """What rank 0 has of the frontend, as `process.Frontend`. Starts one that has died again."""

    def __init__(self, agent: int, restarts: int) -> None:
        """restarts: of the frontend, by this rank 0."""
        self.folder = Path(tempfile.gettempdir(), f"{PREFIX}{agent:08d}")
        is_first = is_first_start(os.environ)
        if is_first:
            shutil.rmtree(self.folder, ignore_errors=True)  # an earlier process had the agent's id
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.folder.is_symlink() or self.folder.lstat().st_uid != os.getuid():
            raise UserError(f"{self.folder} is another user's; remove it, or set TMPDIR to another folder")
        self._lock = hold(self.folder)
        self.addresses, self._agent, self._left = addresses(self.folder), agent, restarts
        self._process: subprocess.Popen[bytes] | None = None
        self._died: float | None = None  # time.monotonic() when its end was seen
        if is_first or not self._find():
            self._start(attach=not is_first)

    def _start(self, attach: bool) -> None:
        program = "from server.torchrun import main; main()"
        longest = str(longest_start(self.folder)) if attach else "none"
        command = [sys.executable, "-c", program, str(self.folder), str(self._agent), longest, *sys.argv[1:]]
        self._process = subprocess.Popen(command, start_new_session=True)
        (self.folder / PID).write_text(str(self._process.pid))
        self._find()

    def _find(self) -> bool:
        """Open the process. False if it has ended."""
        try:
            self._descriptor = os.pidfd_open(int((self.folder / PID).read_text()))
        except (OSError, ValueError):
            return False
        self._poll, self._died = select.poll(), None
        self._poll.register(self._descriptor, select.POLLIN)
        return not self._poll.poll(0)

    def is_alive(self) -> bool:
        """Whether there is a frontend, or soon will be again."""
        if self._died is None and self._poll.poll(0):
            self._died = time.monotonic()
        if self._died is None or time.monotonic() - self._died < LAST_WORDS:
            return True
        if self._left == 0:
            return False
        self._left -= 1
        note("the frontend was killed; starting it again")
        os.close(self._descriptor)
        self._start(attach=True)
        return True

    def forward(self) -> None:
        """Send SIGTERM."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)

    def close(self) -> int:
        """Wait for the end of the frontend after that of the engine. Returns its exit code, 0 if an earlier rank 0 started it."""
        if not self._poll.poll(JOIN_SECONDS * 1000):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        return self._process.wait() if self._process else 0


def hold(folder: Path) -> int:
    """Keep other processes from removing the folder as long as this one runs. See `processes.remove_abandoned`."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def main() -> None:
    """The frontend process. Arguments: its folder, the agent's process id, `attach` of `Recovery`, and the server's command line."""
    folder, agent, longest = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    name_process("rung-frontend")
    hold(folder)
    poll = select.poll()
    poll.register(os.pidfd_open(agent), select.POLLIN)

    def end_with_agent() -> None:
        poll.poll()
        report_end(addresses(folder)[1])

    threading.Thread(target=end_with_agent, daemon=True, name="agent").start()
    from server.frontend import run_frontend

    attach = None if longest == "none" else float(longest)
    run_frontend(load_settings(sys.argv[4:]), *addresses(folder), partial(kill_ranks, agent), attach)
