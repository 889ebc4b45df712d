"""Ranks for tests: processes that start once and then run one function after another as gloo groups of any size."""

import gc
import importlib
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
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

from comms import GlooCommunicator
from comms.interface import check_faults
from tests import ROOT
from tests.support import quick_start
from tp import World

# What most functions import on a rank. torch's optimizers import torch._dynamo.
IMPORTS = ("numpy", "pytest", "checkpoints.weights", "engine.llm", "training.loop", "torch._dynamo")
PROGRAM = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.ranks import fork_ranks; fork_ranks()"
MOST_RANKS = 64
GRACE = 5.0  # seconds that the other ranks get to finish after one has failed; they may be waiting for it in a collective


class RankError(Exception):
    """A rank raised an exception, died or took too long. The message contains the traceback of each failed rank."""


class Ranks:
    """`count` processes, started on first use.

    Imports take seconds, so one process imports everything and the ranks are forked from it. Joining a group takes
    milliseconds. Each run makes its own process group over the loopback interface, with a file as the store. After a failure
    all ranks are killed, and the next run forks new ones.
    """

    def __init__(self, count: int = 4, environ: dict[str, str] | None = None) -> None:
        """environ: environment variables of the processes."""
        self.count, self.environ = count, environ or {}
        self.origin: subprocess.Popen[bytes] | None = None
        self.connections: list[Connection] = []
        # of the stores, one for each run; a rank that leaves its group later still opens its store
        self.folder, self.runs = tempfile.TemporaryDirectory(), 0

    def run(self, n: int, function: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
        """`[function(world, *args) for each of n ranks]`, in rank order. `function` must be importable, and its arguments and
        results must be picklable. Raises RankError."""
        assert 1 <= n <= self.count, f"{n} ranks asked of {self.count}"
        if not self.connections:
            self._start()
        self.runs += 1
        job = pickle.dumps((function, args, n, str(Path(self.folder.name) / f"store {self.runs}"), timeout))
        try:
            for connection in self.connections[:n]:
                connection.send_bytes(job)
            results = self._gather(n, timeout)
            for connection in self.connections[:n]:  # no rank leaves the group while another may communicate with it
                connection.send_bytes(b"leave")
        except BaseException:
            self.end()
            raise
        return results

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = 600.0) -> Any:
        """`function(*args)` in one of the processes."""
        (result,) = self.run(1, _without_world, function, *args, timeout=timeout)
        return result

    def _start(self) -> None:
        if self.origin is None:
            self.control, theirs = socket.socketpair()
            with theirs:  # Triton reads its variables when kernels are defined
                environ = {**os.environ, **self.environ}
                self.origin = quick_start.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environ, stdin=theirs)
        pipes = [multiprocessing.Pipe() for _ in range(self.count)]
        self._replace([end for _, end in pipes])
        self.connections = [ours for ours, _ in pipes]

    def _replace(self, ends: list[Connection]) -> None:
        """Kill the ranks and fork one for each of `ends`. Waits for the imports: they do not count towards a run's timeout."""
        socket.send_fds(self.control, [b"."], [end.fileno() for end in ends])
        for end in ends:
            end.close()
        if not self.control.recv(1):
            raise EOFError("the process from which ranks are forked has ended")

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

    def end(self) -> None:
        """End the ranks; the next run forks new ones."""
        self._replace([])
        for connection in self.connections:
            connection.close()
        self.connections = []

    def close(self) -> None:
        """End the processes."""
        if self.origin is not None:
            self.end()
            self.control.close()
            self.origin.wait()
            self.origin = None
        self.folder.cleanup()


def _mend_the_interpreter() -> None:
    """Change Triton 3.6's interpreter where it fails or is slow.

    - It holds scalars as arrays of one element, which NumPy from 2.4 on rejects as loop bounds: `__index__` converts them.
    - At each call of a kernel, or of a function in one, it replaces all of `triton.language` by its own functions. That takes
      longer than the call itself. Here it does so once for each module with kernels and never restores the originals.
    - Kernels poll what another rank writes, and there are more ranks than cores: volatile loads and atomics yield the core.
    - It computes each sum and product of integers again in 64 bits, for an assertion that is compiled only with `debug`.
    - It creates the type of every block again: see `_remember_types`.
    - It takes addresses below 2^31 for 32-bit integers, and fails to make pointers of them. The heap of a Python that is no
      position-independent executable, as Debian's, is there.
    """
    from triton.language import int64
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _remember_types()

    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    builder = interpreter.InterpreterBuilder
    load, update = builder.create_masked_load, builder.create_atomic_rmw
    patched: set[str] = set()

    def patch_and_mend(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_once(function: Callable[..., Any]) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch_language(function)
        return interpreter._LangPatchScope()  # an empty scope, which restores nothing

    def load_politely(
        self: Any, ptrs: Any, mask: Any, other: Any, cache_modifier: Any, eviction_policy: Any, is_volatile: bool
    ) -> Any:
        if is_volatile:
            os.sched_yield()
        return load(self, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile)

    def update_politely(self: Any, *args: Any, **more: Any) -> Any:
        os.sched_yield()
        return update(self, *args, **more)

    def to_pointer(self: Any, address: Any, type: Any) -> Any:
        return self.create_bitcast(interpreter.TensorHandle(address.data.astype("int64"), int64), type)

    interpreter._patch_lang_tensor, interpreter._patch_lang = patch_and_mend, patch_once
    builder.create_int_to_ptr = to_pointer
    builder.create_masked_load, builder.create_atomic_rmw = load_politely, update_politely


def _remember_types() -> None:
    """Cache each block type, the attributes that tensors take from it, and the NumPy dtype of each type. They never change."""
    from triton.language import core
    from triton.runtime import interpreter

    make_block, numpy_dtype = core.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}
    scalar = core.constexpr(1), core.tuple([])

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(int(size) for size in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.of_tensor = core.constexpr(self.numel), core.tuple([core.constexpr(size) for size in self.shape])
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else scalar

    def remembered(tt_dtype: Any) -> Any:
        if (name := tt_dtype.scalar.name) not in dtypes:
            dtypes[name] = numpy_dtype(tt_dtype)
        return dtypes[name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block, tensor, remembered


def _without_world(_: World, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def fork_ranks() -> None:
    """Import what ranks need. Then, for each message on the socket that is standard input, kill the ranks and fork one for each
    connection in the message, until the other end is closed."""
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if "TRITON_INTERPRET" in os.environ:
        _mend_the_interpreter()
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # without it, each rank's garbage collections would traverse, and so copy, everything that was imported
    context = multiprocessing.get_context("fork")
    processes: list[multiprocessing.context.ForkProcess] = []
    while True:
        message, files, _, _ = socket.recv_fds(control, 1, MOST_RANKS)
        for process in processes:
            process.kill()
            process.join()
        if not message:
            return
        connections = [Connection(number) for number in files]
        processes = [context.Process(target=_serve, args=(connections, rank), daemon=True) for rank in range(len(files))]
        for process in processes:
            process.start()
        for connection in connections:
            connection.close()
        control.sendall(b".")


def _serve(connections: list[Connection], rank: int) -> None:
    """The loop of a rank: join a group, run a function, send its result, leave the group. Ends when the connection closes."""
    for other, connection in enumerate(connections):
        if other != rank:
            connection.close()  # an open copy here would hide from the parent that the other rank has died
    connection = connections[rank]
    with suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            try:
                function, args, n, store, timeout = pickle.loads(message)
                dist.init_process_group(
                    "gloo", store=dist.FileStore(store, n), rank=rank, world_size=n, timeout=timedelta(seconds=timeout)
                )
                with suppress(RuntimeError):  # an earlier function may have let a wait give up on purpose
                    check_faults()
                world = World(rank, n, torch.device("cpu"), GlooCommunicator())
                # plain pickle sends a tensor by value; shared memory would have to outlive this process
                answer = pickle.dumps((True, function(world, *args)))
            except Exception:
                answer = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)
            connection.recv_bytes()
            dist.destroy_process_group()
            gc.collect()  # a group in a reference cycle keeps its threads until it is collected
