"""The program of a worker process: it runs the jobs that workers.py sends over a socket, within a limit of memory.

A message in either direction is a length of HEADER bytes, little-endian, and then so many bytes, most often a pickle.
"""

import importlib
import os
import pickle
import signal
import socket
import traceback
from typing import Any

from errors import UserError, first_line, is_panic
from ranks.bounded import MEMORY, limit_memory
from ranks.processes import die_with_parent
from server.errors import ApiError
from text.tokenizer import Tokenizer
from text.tokenizer_files import tokenizer_of

HEADER = 8  # bytes of a message's length, which precedes the message
RESULT_LIMIT = 32 << 20  # bytes

_tokenizer: Tokenizer | None = None


def worker_tokenizer() -> Tokenizer:
    """The server's tokenizer, in a worker process."""
    assert _tokenizer is not None, "this runs in a worker process only"
    return _tokenizer


def main(descriptor: str, parent: str, seconds: str, niceness: str, model: str, *modules: str) -> None:
    """Run jobs, one after another, until the frontend closes the socket.

    `descriptor`: of the socket. `parent`: the frontend's process id. `seconds`: this process ends itself if a job takes longer.
    `modules`: to be imported now, so that the first jobs need not wait for them.
    """
    global _tokenizer
    die_with_parent(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM):  # the frontend ends this process
        signal.signal(number, signal.SIG_IGN)
    for name in modules:
        importlib.import_module(name)
    _tokenizer = tokenizer_of(model)
    limit_memory()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries print why they fail, which the answer says
    os.nice(int(niceness))
    with socket.socket(fileno=int(descriptor)) as connection:
        files = connection.makefile("rb"), connection.makefile("wb")
        _send(files[1], b"")
        while header := files[0].read(HEADER):
            data = files[0].read(int.from_bytes(header, "little"))
            signal.alarm(int(seconds))  # without a handler it ends the process, even inside a library's code
            _send(files[1], _do(data))
            signal.alarm(0)


def _send(file: Any, data: bytes) -> None:
    file.write(len(data).to_bytes(HEADER, "little"))
    file.write(data)
    file.flush()


def _do(data: bytes) -> bytes:
    """Run a pickled job. Returns, pickled: (success, result or exception, whether this process can take another job)."""
    try:
        function, arguments = pickle.loads(data)
        reply = pickle.dumps((True, function(*arguments), True), pickle.HIGHEST_PROTOCOL)
        if len(reply) <= RESULT_LIMIT:
            return reply
        found: tuple[Exception, bool] = (needs_memory(), True)
    except (ApiError, UserError) as e:
        found = (e.with_traceback(None), True)
    except MemoryError:
        found = (needs_memory(), False)
    except RecursionError:
        found = (ApiError(400, "the request is nested too deeply", None, "too_complex"), True)
    except BaseException as e:
        if is_panic(e):
            message = f"a library failed while the request was prepared ({first_line(e)}); send another text"
            found = (ApiError(400, message, None, "too_complex"), True)
        elif not isinstance(e, Exception):
            raise
        else:
            found = (RuntimeError(f"in a worker:\n{traceback.format_exc()}"), True)
    return pickle.dumps((False, *found), pickle.HIGHEST_PROTOCOL)


def needs_memory() -> ApiError:
    return ApiError(400, f"the request needs more than {MEMORY >> 20} MiB to prepare", None, "too_complex")
