"""The other ranks of an `LLM(tp=N)` that a plain Python program, a REPL or a notebook makes.

The program's process is rank 0. The others run this module: each makes the same `LLM`, and then the same calls, step by step, as rank 0
tells them over a pipe. They end with that process, however it ends, and once the pipe is closed.

The pipe is a pair of sockets without a name, so no other process can reach it.
"""

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch.distributed as dist

from errors import OverflowedError, UserError
from ranks.hosts import forget_groups
from ranks.processes import LAUNCHER, LOST_RANK, MEETING, join_launcher, listen_on_loopback, lost_connection, run_folder

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from engine.followers import main; main(int(sys.argv[2]), __import__('engine').LLM)"


class Followers:
    """Ranks 1 to count - 1, of which this process becomes rank 0. Raises UserError if it has ranks already."""

    def __init__(self, count: int, arguments: Mapping[str, Any]) -> None:
        if "RANK" in os.environ:
            raise UserError(
                "tp is for a program without ranks, and this process is one: close the first LLM, or leave tp out under launch.py"
            )
        self._pipes, self.processes = list[Connection](), list[subprocess.Popen[bytes]]()
        forget_groups()
        listen_on_loopback()
        with ExitStack() as stack:
            folder = str(stack.enter_context(run_folder()))
            for name, value in (("WORLD_SIZE", str(count)), ("LOCAL_WORLD_SIZE", str(count)), (MEETING, folder)):
                os.environ[name] = value
                stack.callback(os.environ.pop, name)
            stack.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
            for rank in range(1, count):
                self._start(rank, stack)
            for name in ("RANK", "LOCAL_RANK"):
                os.environ[name] = "0"
                stack.callback(os.environ.pop, name)
            self._ends = stack.pop_all()
        atexit.register(self.close)
        self.tell("LLM", dict(arguments))

    def _start(self, rank: int, stack: ExitStack) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-c", PROGRAM, str(ROOT), str(theirs.fileno())]
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), LAUNCHER: str(os.getpid())}
        env = {"OMP_NUM_THREADS": "1"} | os.environ | own
        process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.kill)  # it may be amid a collective, and keeps nothing
        theirs.close()
        self.processes.append(process)
        self._pipes.append(ours)

    def tell(self, call: str, arguments: Any = None) -> None:
        """Let the ranks make a call. Raises UserError if they have ended."""
        try:
            for pipe in self._pipes:
                pipe.send((call, arguments))
        except OSError:
            codes = [process.poll() for process in self.processes]
            self.close()
            raise UserError(f"the other ranks of this LLM have ended (exit codes {codes}); make a new one") from None
        if not self._pipes:
            raise UserError("this LLM is closed; make a new one")

    def close(self) -> None:
        """End the ranks and leave their group."""
        atexit.unregister(self.close)
        self._pipes = []
        self._ends.close()


def follow(pipe: Connection, make: Callable[..., Any]) -> None:
    """Make the calls that come, until the pipe is closed. make: `LLM`."""
    llm: Any = None
    steps: Any = None
    while True:
        try:
            call, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # whatever threads and collectives go on
        with suppress(UserError, OverflowedError, StopIteration):  # rank 0 raises the same
            if call == "LLM":
                llm = make(**arguments)
            elif call == "stream":
                steps = llm.stream(*arguments)
            elif call == "step":
                next(steps)
            elif call == "close":
                steps.close()
            else:
                getattr(llm, call)(*arguments)


def main(descriptor: int, make: Callable[..., Any]) -> None:
    """Run a rank, whose pipe has this number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; rank 0 decides
    join_launcher()
    try:
        follow(Connection(descriptor), make)
    except RuntimeError as e:
        if not lost_connection(str(e)):
            raise
        os._exit(LOST_RANK)  # rank 0 says so
