"""Runs a function in a child process, within limits of time and memory.

It is for what the files of a checkpoint can make endless or enormous: chat templates, normalizers and decoders. A thread could not be
stopped, and would hold the GIL. The server has workers for that (server/workers.py), which have the same limit of memory.

The wall time is bounded, too: a lock that another thread held at the fork is never released in the child.
"""

import os
import pickle
import resource
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from errors import UserError

T = TypeVar("T")

# one thread forks at a time: filters of warnings are global, and a child must not inherit another's pipe
_FORK = threading.Lock()

SECONDS = 5  # of processor time, which passes more slowly on a busy machine
PATIENCE = 60  # seconds that the caller waits in any case
BUSY = 10  # more of them for each second of processor time that is allowed
MEMORY = 1 << 30  # bytes of address space, added to those that the process has
RESULT = 1 << 28  # most bytes of a pickled result
REPLY = 8  # more of them for each character
SPEED = 100_000  # characters of a text that are worth a second more
BYTES = 1000  # of memory more for each character
ADVICE = "mend the checkpoint's tokenizer or chat template, or shorten the text"


def bounded(what: str, function: Callable[..., T], *arguments: Any, characters: int = 0, times: int = 1, **options: Any) -> T:
    """The result of `function`, which a fork of this process computes. It must not need torch, another thread, or an open file.

    what: for an error, such as "the prompt". characters: of the text that it works on, whose length raises the limits. times: how
    often it reads that text, which raises the limit of time.
    Raises UserError if it exceeds a limit, and what it raises itself: a UserError as it is, another one as a RuntimeError.
    """
    seconds, memory = SECONDS + characters * times // SPEED, MEMORY + BYTES * characters
    patience = PATIENCE + BUSY * seconds
    with _FORK, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, whose locks the function does not need
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _compute(writer, seconds, memory, lambda: function(*arguments, **options))
        os.close(writer)
    try:
        reply = _receive(reader, patience, RESULT + characters * REPLY)
    finally:
        os.kill(child, signal.SIGKILL)  # if this process was interrupted
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        raise UserError(f"{what} takes more than {seconds} s of processor time to prepare; {ADVICE}")
    if reply is None:
        raise UserError(f"{what} is not prepared after {patience:g} s, as on a busy machine; try again, or {ADVICE}")
    if not reply:
        raise _needs_memory(what, memory)
    good, value = pickle.loads(reply)
    if not good:
        raise _needs_memory(what, memory) if isinstance(value, MemoryError) else value
    result: T = value
    return result


def _receive(reader: int, seconds: float, most: int) -> bytes | None:
    """What the child writes until it closes its end; empty if that is more than `most` bytes, None if it takes more than `seconds`."""
    reply, deadline = bytearray(), time.monotonic() + seconds
    readable = select.poll()
    readable.register(reader, select.POLLIN)
    with open(reader, "rb", buffering=0) as pipe:
        while readable.poll(max(0, deadline - time.monotonic()) * 1000):
            block = pipe.read(1 << 20)
            if not block:
                return bytes(reply)
            reply += block
            if len(reply) > most:
                return b""
    return None


def _compute(writer: int, seconds: int, memory: int, function: Callable[[], Any]) -> NoReturn:
    """Write the pickled result, or the exception, to the descriptor `writer`, and end this process."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
        for number in (signal.SIGTERM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # a library may print why it fails, which the exception says
        os.closerange(3, writer)  # otherwise sockets of a killed parent stay open
        os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
        _lower(resource.RLIMIT_CPU, seconds)
        limit_memory(memory)
        try:
            reply = pickle.dumps((True, function()), pickle.HIGHEST_PROTOCOL)
        except (UserError, MemoryError) as e:
            reply = pickle.dumps((False, e.with_traceback(None)))
        except BaseException:
            reply = pickle.dumps((False, RuntimeError(f"in a child process:\n{traceback.format_exc()}")))
        with open(writer, "wb") as file:
            file.write(reply)
    finally:
        os._exit(0)


def limit_memory(more: int = MEMORY) -> None:
    """Limit the address space of this process to what it has now and `more` bytes."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + more)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(kind: int, limit: int) -> None:
    """Set a limit of this process. One that the user has set before stays if it is lower."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _needs_memory(what: str, memory: int) -> UserError:
    return UserError(f"{what} needs more than {memory >> 20} MiB to prepare; {ADVICE}")
