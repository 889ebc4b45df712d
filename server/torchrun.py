"""The frontend of ranks that torchrun starts again (`--max-restarts`): it lives as long as torchrun's agent, and each new rank 0
finds it."""

import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from errors import UserError
from processes import LAUNCHER, PREFIX, kill_ranks, name_process, ranks_of
from server.process import FAILED, addresses, report_end
from server.settings import load_settings

PID = "frontend-pid"  # file in the folder


def restarting_agent(environ: Mapping[str, str]) -> int | None:
    """The process id of torchrun's agent, if it started this rank and may start it again."""
    if "TORCHELASTIC_RUN_ID" not in environ or LAUNCHER in environ or environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    return os.getppid()


def group_is_whole(agent: int) -> bool:
    """Whether all ranks of this host run. If not, a SIGTERM is the agent's, which ends the others before it starts all again."""
    return len(ranks_of(agent)) >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class LastingFrontend:
    """What rank 0 has of the frontend, as `process.Frontend`."""

    def __init__(self, agent: int) -> None:
        folder = Path(tempfile.gettempdir(), f"{PREFIX}{agent:08d}")
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
            raise UserError(f"{folder} is another user's; remove it")
        self._lock = hold(folder)
        self.folder, self.addresses, self._died = folder, addresses(folder), False
        if not (folder / PID).exists() or not self._watch():
            program = "from server.torchrun import main; main()"
            process = subprocess.Popen(
                [sys.executable, "-c", program, str(folder), str(agent), *sys.argv[1:]], start_new_session=True
            )
            (folder / PID).write_text(str(process.pid))
            self._watch()

    def _watch(self) -> bool:
        """Open the process. Returns False if it has ended."""
        self._pid = int((self.folder / PID).read_text())
        try:
            self._descriptor = os.pidfd_open(self._pid)
        except OSError:
            return False
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        return self.is_alive()

    def is_alive(self) -> bool:
        self._died = bool(self._poll.poll(0))
        return not self._died

    def forward(self) -> None:
        """Send SIGTERM."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)

    def close(self) -> int:
        """The exit code that rank 0 should have: FAILED if the frontend has ended without a Shutdown, so that all start again."""
        return FAILED if self._died else 0


def hold(folder: Path) -> int:
    """Keep other processes from removing the folder as long as this one runs. See `processes.remove_abandoned`."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def main() -> None:
    """The frontend process. Arguments: its folder, the agent's process id, and the server's command line."""
    folder, agent = Path(sys.argv[1]), int(sys.argv[2])
    name_process("rung-frontend")
    hold(folder)
    descriptor = os.pidfd_open(agent)

    def end_with_agent() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        report_end(addresses(folder)[1])

    threading.Thread(target=end_with_agent, daemon=True, name="agent").start()
    from server.frontend import run_frontend

    run_frontend(load_settings(sys.argv[3:]), *addresses(folder), partial(kill_ranks, agent))
