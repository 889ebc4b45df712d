"""Starts the ranks and the frontend, and starts each of them again if it dies. Runs in the launcher, the process that the user
started. torch's elastic agent starts and watches the ranks (launch.py)."""

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from cli import USER_ERROR, note
from engine.protocol import Fatal
from launch import Ranks, start_ranks
from ranks.processes import run_folder
from server.process import JOIN_SECONDS, Frontend, Restarts, describe_end, tell
from server.settings import Settings
from server.started import FRONTEND, SIGNALLED, STARTED

STOP_SECONDS = 30.0  # time for all processes to end, added to --drain-timeout
GRACE_SECONDS = 5.0  # time for ranks to end by themselves after the frontend


def run_server(settings: Settings, arguments: Sequence[str]) -> int:
    """Serve until a signal or a failure. Returns the exit code. arguments: of the command line that started the server."""
    with run_folder() as folder:
        os.environ[FRONTEND] = str(folder)
        supervisor = Supervisor(settings, folder)
        patience = settings.drain_timeout + STOP_SECONDS
        code = start_ranks(settings.tp or 1, ["-m", "server", *arguments], patience, supervisor)
        return supervisor.end(code)


class Supervisor:
    """A `launch.Keeper`."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._restarts = Restarts(settings.max_restarts)
        self._started = folder / STARTED
        self._frontend = Frontend(settings, folder)
        self._code: int | None = None  # of the frontend, once it has ended for good
        self._signalled, self._ranks_ended = False, threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="frontend")

    def begin(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._watcher.start()

    def may_restart(self, failures: Sequence[ProcessFailure]) -> bool:
        """Whether ranks that failed are started again: neither after wrong input, nor before they were ready once."""
        if self._code is not None or not self._started.exists() or any(f.exitcode == USER_ERROR for f in failures):
            return False
        first = failures[0]
        end = f"was killed by {signal.Signals(-first.exitcode).name}" if first.exitcode < 0 else "failed"
        return self._restarts.take(f"rank {first.local_rank} {end}", "the ranks")

    def pass_on(self, number: int) -> None:
        self._signalled = True
        if number == signal.SIGKILL:
            self._code = SIGNALLED + signal.SIGKILL
            self._ranks.signal(number)
            self._frontend.process.kill()  # fails if it is just about to start
        else:
            self._frontend.forward()

    def end(self, code: int) -> int:
        """End the frontend after the ranks. code: the ranks'. Returns the server's: that of what ended first."""
        frontend_first = self._code is not None
        self._ranks_ended.set()
        if code == USER_ERROR and not self._started.exists():
            self._frontend.process.kill()  # it has nothing to finish, and the ranks have said what is wrong
        elif code:
            tell(self._frontend.addresses[1], Fatal("the ranks have ended and are not started again"))
        self._watcher.join(JOIN_SECONDS)
        if self._watcher.is_alive():
            self._frontend.process.kill()
            self._watcher.join()
        return describe_end(self._code or 0) if frontend_first or not code else code

    def _watch(self) -> None:
        """Start the frontend again when it dies. Once it has ended by itself, the ranks end, too."""
        while True:
            code = self._frontend.wait()
            if code >= 0 or self._ranks_ended.is_set() or self._code is not None:
                break
            if self._signalled:
                code = 0 if code == -signal.SIGTERM else code  # 0: it had not yet begun to handle signals
                break
            if not self._restarts.take(f"the frontend was killed by {signal.Signals(-code).name}", "it"):
                break
            try:
                self._frontend.start(attach=True)
            except OSError as e:
                note(f"error: the frontend cannot be started again ({e.strerror})")
                break
            if self._signalled:  # meanwhile
                self._frontend.forward()
        self._code = self._code or code
        patience = 0.0 if self._code == USER_ERROR else GRACE_SECONDS  # ranks would say again what is wrong
        while not self._ranks_ended.wait(patience):
            self._ranks.signal(signal.SIGTERM)
            patience = GRACE_SECONDS
