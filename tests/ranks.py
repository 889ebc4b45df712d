"""Ranks to test on: processes that start once, and then run one function after another as a gloo group of any size."""

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from comm import GlooCommunicator
from tp import World

GRACE = 5.0  # seconds that the other ranks get to finish once one has failed; they may wait for it in a collective


class RankError(Exception):
    """A rank raised an exception, died or took too long. The message holds each failed rank's traceback."""


class Ranks:
    """`count` processes, started on first use. Importing torch takes seconds, so one process does it for all of them, which are
    forked off it; joining a group takes milliseconds.

    Each run is a process group of its own over the loopback interface, met through a file. After a failure the processes
    are ended, and the next run starts fresh ones.
    """

    def __init__(self, count: int = 4, environ: dict[str, str] | None = None) -> None:
        """environ: variables of the processes, set before they import anything but this module."""
        self.count, self.environ = count, environ or {}
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.connections: list[Connection] = []

    def run(self, n: int, function: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
        """`[function(world, *args) for each of n ranks]`, in rank order. `function` must be importable, and what it takes
        and returns must be picklable. Raises RankError."""
        assert 1 <= n <= self.count, f"{n} ranks asked of {self.count}"
        if not self.processes:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            job = pickle.dumps((function, args, n, str(Path(folder) / "store"), timeout))
            try:
                for connection in self.connections[:n]:
                    connection.send_bytes(job)
                results = self._gather(n, timeout)
                for connection in self.connections[:n]:  # no rank leaves the group while another may be talking to it
                    connection.send_bytes(b"leave")
            except BaseException:
                self.close()
                raise
        return results

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = 600.0) -> Any:
        """`function(*args)` in one of the processes."""
        (result,) = self.run(1, _without_world, function, *args, timeout=timeout)
        return result

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.environ), daemon=True, name=f"rank {rank}")
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def _gather(self, n: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < n:
            waiting = {self.connections[r]: r for r in range(n) if r not in results and r not in failures}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if not failures:
                    raise RankError(f"ranks {sorted(waiting.values())} of {n} did not finish within {timeout:.0f} s")
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    ok, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    ok, value = False, "the process died\n"
                (results if ok else failures)[rank] = value
                if not ok:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            raise RankError("\n".join(f"rank {r} of {n}: {text}" for r, text in sorted(failures.items())))
        return [results[rank] for rank in range(n)]

    def close(self) -> None:
        """End the processes."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()
        self.processes, self.connections = [], []


def _let_the_interpreter_loop() -> None:
    """Triton 3.6's interpreter holds scalars as arrays of one element, which NumPy from 2.4 on no longer takes as loop bounds."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


def _without_world(_: World, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _serve(connection: Connection, rank: int, environ: dict[str, str]) -> None:
    """A rank's life: until the other end closes, join a group, run a function, answer, leave the group."""
    torch.set_num_threads(1)
    os.environ.update(environ, GLOO_SOCKET_IFNAME="lo")
    if "TRITON_INTERPRET" in environ:
        _let_the_interpreter_loop()
    with suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            try:
                function, args, n, store, timeout = pickle.loads(message)
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store, n),
                    rank=rank,
                    world_size=n,
                    timeout=timedelta(seconds=timeout),
                )
                world = World(rank, n, torch.device("cpu"), GlooCommunicator())
                # plain pickle: a tensor travels by value, not as shared memory that must outlive this process
                answer = pickle.dumps((True, function(world, *args)))
            except Exception:
                answer = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)
            connection.recv_bytes()
            dist.destroy_process_group()
            gc.collect()  # groups that a cycle of references still holds keep their threads
