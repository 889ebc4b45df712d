"""Starts Python commands without the seconds that their imports take: `Popen` and `run`, as in `subprocess`.

One process, the `Origin`, imports what commands need. Each command is forked from it and becomes a child of the process that
called `Popen`. A command that starts others, as the launcher starts its ranks, forks them from itself. Arguments, environment,
working directory, standard streams, signal handlers and exit code are those of a new process. Only the modules are already
imported. A server's workers, which get a descriptor and need no torch, are forked from a second, smaller Origin.

A command that needs a different interpreter (other PYTHON…, TRITON_INTERPRET or locale variables, a `preexec_fn`) is started by
`subprocess`. Tests of how processes start and end use `subprocess` directly.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import logging
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from tests import ROOT

IMPORTS = (
    "torch._dynamo",
    "torch.distributed.run",
    "generate",
    "launch",
    "server.launch",
    "server.frontend",
    "engine.bench",
    "training.loop",
    "matplotlib.figure",
)
WORKER_IMPORTS = [f"server.{name}" for name in ("workers", "bounds", "messages.bodies", "responses.convert")]
WORKER_IMPORTS.append("engine.constrain.demand")
# prefixes of variables that are read only at start
INTERPRETER = ("PYTHON", "TRITON_INTERPRET", "TORCH_LOGS", "LC_", "LANG", "LD_")
PATH = "PYTHONPATH"  # may differ nevertheless: `become` applies it
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
FILES = 3  # standard input, output, error
LENGTH = 8  # bytes of an integer between processes


@dataclass(frozen=True)
class Start:
    """A Python command: the words after the interpreter and its options, and the arguments of `Popen` that apply to it."""

    words: tuple[str, ...]
    unbuffered: bool
    folder: str
    environ: dict[str, str]
    new_session: bool = False
    kept: tuple[int, ...] = ()  # file descriptors that stay open, or that an Origin passes on


class Popen(subprocess.Popen):
    """A `subprocess.Popen` that forks Python commands."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        # rest: startupinfo, creationflags, shell, six ends of pipes, restore_signals, gid, gids, uid, umask, start_new_session
        pipes, usual = rest[3:9], executable or preexec_fn
        start = None if usual else python_start(args, cwd, env, new_session=rest[14])
        if start is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        ends = zip((pipes[0], pipes[3], pipes[5]), range(FILES), strict=True)
        self.pid = fork(replace(start, kept=tuple(pass_fds)), [own if end == -1 else end for end, own in ends])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(*args: Any, **more: Any) -> "subprocess.CompletedProcess[Any]":
    """`subprocess.run` with this module's `Popen`. Not for several threads at a time."""
    with mock.patch.object(subprocess, "Popen", Popen):
        return subprocess.run(*args, **more)


def python_start(args: Any, cwd: Any, env: Any, new_session: bool) -> Start | None:
    """The command that `args` start, or None if it is not a Python command or needs a new interpreter."""
    words = [os.fspath(arg) for arg in args] if isinstance(args, list | tuple) else []
    environ = dict(os.environ if env is None else env)
    if len(words) < 2 or words[0] != sys.executable or _steering(environ) != _interpreter:
        return None
    unbuffered = words[1] == "-u"
    words = words[2 if unbuffered else 1 :]
    if words[0].startswith("-") and words[0] not in ("-m", "-c"):
        return None
    return Start(tuple(words), unbuffered, os.fspath(cwd or os.getcwd()), environ, new_session)


def _steering(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(INTERPRETER) and name != PATH}


_interpreter = _steering(os.environ)  # as of the import of this module, before any test changes them


class Origin:
    """The process from which commands are forked. It ends when the process that started it ends."""

    def __init__(self, imports: Sequence[str]) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # commands become children of this process: see `serve`
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.quick_start import serve; serve({theirs.fileno()}, {imports})"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(INTERPRETER)} | _interpreter
        self._process = Popen.__mro__[1](  # the usual one: `run` replaces the name
            [sys.executable, "-c", program], env=environ | {"OMP_NUM_THREADS": "1"}, pass_fds=[theirs.fileno()]
        )
        theirs.close()

    def fork(self, start: Start, files: Sequence[int]) -> int:
        with self._lock:
            message = pickle.dumps(start)
            socket.send_fds(self._socket, [len(message).to_bytes(LENGTH, "big")], [*files, *start.kept])
            self._socket.sendall(message)
            return int.from_bytes(_receive(self._socket, LENGTH), "big")


_origins: dict[bool, Origin] = {}  # by whether it is that of workers
_is_command = False  # True in a forked command, which forks further commands from itself


def fork(start: Start, files: Sequence[int]) -> int:
    """Start a command whose standard input, output and error are `files`, and return its process id."""
    if not _is_command:
        is_worker = bool(start.kept)
        if is_worker not in _origins:
            _origins[is_worker] = Origin(WORKER_IMPORTS if is_worker else IMPORTS)
        return _origins[is_worker].fork(start, files)
    before = _pipes()
    pid = os.fork()
    if pid == 0:
        # libuv, in torch, makes a new pipe in each forked child, and closes its numbers in that of the child, whosever they are then
        own = [number for number, pipe in _pipes().items() if number >= FILES and pipe not in before.values()]
        become(replace(start, kept=(*start.kept, *own)), files)
    return pid


def _pipes() -> dict[int, str]:
    """The pipes of this process by descriptor."""
    found = dict[int, str]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was that of the folder
            if (target := os.readlink(f"/proc/self/fd/{name}")).startswith("pipe:"):
                found[int(name)] = target
    return found


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError("the process from which commands are forked has ended")
        data += more
    return data


def serve(descriptor: int, imports: Sequence[str]) -> None:
    """Fork commands until the other end of the socket is closed."""
    connection = socket.socket(fileno=descriptor)
    gc.disable()  # importing makes millions of objects and hardly any garbage
    for name in imports:
        importlib.import_module(name)
    gc.collect()
    gc.enable()
    while True:
        header, files, _, _ = socket.recv_fds(connection, LENGTH, 2 * FILES)
        if not header:
            return
        start = pickle.loads(_receive(connection, int.from_bytes(header, "big")))
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:  # when this process has ended, its child becomes a child of the subreaper, which sent the request
            pid = os.fork()
            if pid:
                os.write(writing, pid.to_bytes(LENGTH, "big"))
                os._exit(0)
            while os.getppid() not in (1, _asker):
                time.sleep(0.001)
            high = [fcntl.fcntl(one, fcntl.F_DUPFD, max(*files, *start.kept) + 1) for one in files[FILES:]]
            for one, number in zip(high, start.kept, strict=True):
                os.dup2(one, number)
            become(start, files[:FILES])
        os.waitpid(between, 0)
        connection.sendall(os.read(reading, LENGTH))
        for number in (reading, writing, *files):
            os.close(number)


_asker = os.getppid()
_path = sys.path[1:]
_inherited: list[object] = []  # streams that must not be finalized: they would flush what the parent has buffered


def become(start: Start, files: Sequence[int]) -> NoReturn:
    """Run the command in this forked process, then exit with its exit code."""
    global _is_command
    _is_command = True
    Path("/proc/self/comm").write_text(Path(sys.executable).name)  # not the name of a frontend, whose worker it becomes
    _take_files(files, start.kept, start.unbuffered)
    gc.freeze()  # inherited objects hold descriptor numbers that were closed and may be reused: never finalize these objects
    gc.callbacks.clear()  # hypothesis' would swallow a KeyboardInterrupt that is raised in it
    if start.new_session:
        os.setsid()
        # As of a command that a terminal starts, unlike `subprocess`. A terminal belongs to one session: a launcher's, not a rank's.
        with contextlib.suppress(OSError):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environ)
    tempfile.tempdir = None  # read TMPDIR again
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    logging.disable(logging.NOTSET)
    subprocess.Popen = Popen
    multiprocessing.util.spawnv_passfds = _spawn
    if elastic := sys.modules.get("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"):
        elastic.Popen = Popen
    code = _run(start.words, [*filter(None, os.environ.get(PATH, "").split(os.pathsep)), *_path])
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


def _spawn(path: object, args: Sequence[str], kept: Sequence[int]) -> int:
    """Replaces `multiprocessing.util.spawnv_passfds`, which starts `python … -c code --multiprocessing-fork`."""
    words = tuple(map(os.fsdecode, args))
    start = Start(words[words.index("-c") :], False, os.getcwd(), dict(os.environ), kept=tuple(kept))
    return fork(start, range(FILES))


def _take_files(files: Sequence[int], kept: Sequence[int], unbuffered: bool) -> None:
    for target, number in enumerate(files):
        os.dup2(number, target)
    ends = [FILES - 1, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for before, after in pairwise(ends):
        os.closerange(before + 1, after)
    _inherited.extend((sys.stdin, sys.stdout, sys.stderr))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty(), write_through=unbuffered)
    sys.stderr.reconfigure(line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def _run(words: Sequence[str], path: Sequence[str]) -> int:
    """Run `-m module …`, `-c code …` or `script …` as Python does, and return the exit code."""
    try:
        if words[0] == "-m":
            sys.argv, sys.path[:] = list(words[1:]), [os.getcwd(), *path]
            for name in (words[1], f"{words[1]}.__main__"):
                if not hasattr(sys.modules.get(name), "__path__"):
                    sys.modules.pop(name, None)  # a new process would not have imported it
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv, sys.path[:] = ["-c", *words[2:]], ["", *path]
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.argv, sys.path[:] = list(words), [str(Path(words[0]).resolve().parent), *path]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as e:
        if e.code is not None and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
            return 1
        return e.code or 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
