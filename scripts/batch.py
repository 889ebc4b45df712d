"""Answer a file of requests in OpenAI's batch format: a line of OUT for each line of IN, with its answer or its error.

    python -m scripts.batch in.jsonl out.jsonl --model Qwen/Qwen3-8B --tp 2
    python -m scripts.batch - - --model models/tiny-hybrid < in.jsonl > out.jsonl

A line of IN is an object with custom_id, method POST, url (/v1/chat/completions, /v1/completions, /v1/embeddings, /v1/responses) and
body. A server that only this command reaches computes them, so a body means what it means there. Answers come in the order in which
they end. The same command goes on after a kill: what has an answer in OUT is not computed again. - is standard input or output. The
exit code is 0 once each line has its answer or error.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec
from tqdm import tqdm

from cli import USER_ERROR, Parser, end_bars, note, run
from errors import UserError
from files import check_regular, writing
from options import add_options
from ranks.processes import LAUNCHER, is_rank, run_folder
from scripts.lib.process_tree import end
from scripts.lib.results import check_output
from server.batches import AGAIN_SECONDS, DONE, Line, check, is_for_later
from server.errors import ApiError
from server.http import to_json
from server.schemas import BatchBody
from server.settings import ENV_PREFIX, GROUPS, Settings, load_settings, with_files

UNUSED = [GROUPS[name] for name in ("HTTP", "faults", "stored responses", "logs and traces")]  # of a server that others reach
CLIENTS = ("max_queue", "max_queue_per_client", "fairness", "idle_timeout", "drain_timeout", "allow_lora_updates", "lora_root")
FIXED = ["--log-level", "warning", "--request-timeout", "100000000", "--drain-timeout", "0.1"]  # before the user's flags
ENDPOINTS = get_args(BatchBody.model_fields["endpoint"].annotation)
MOST_WAITING = 512  # lines that wait in the engine while others are computed
MOST_LINES = 100_000_000
STOP_SECONDS = 10.0  # time for the server to end
POLL_SECONDS = 0.1
LOG_LINES = 80  # of a server that has failed, shown to the user
Reply = tuple[int, bytes, list[str]]  # the status, the body, and what of the request had no effect
REMARKS = {"x-rung-ignored": "unknown parameters", "x-rung-not-enforced": "keywords of schemas that are not enforced"}


class Server:
    """A server that runs."""

    def __init__(self, process: "subprocess.Popen[bytes]", address: Path, log: Path) -> None:
        self.process, self.address, self.log = process, address, log

    def ask(self, method: str, url: str, body: bytes | None = None, id: str = "") -> Reply:
        """Raises OSError and HTTPException."""
        connection = HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.connect(str(self.address))
            headers = {"content-type": "application/json", "x-request-id": id, "connection": "close"}
            connection.request(method, url, body, headers)
            reply = connection.getresponse()
            remarks = [f"{what}: {one}" for name, what in REMARKS.items() if (one := reply.getheader(name))]
            return reply.status, reply.read(), remarks
        finally:
            connection.close()

    def is_ready(self) -> bool:
        with suppress(OSError, HTTPException):
            return self.ask("GET", "/health")[0] == 200
        return False

    def answer(self, id: str, line: Line) -> Reply:
        """The answer to a line, whatever ranks or frontends fail meanwhile. Raises what `ask` does once the server has ended."""
        while True:
            try:
                reply = self.ask("POST", line.url, to_json(line.body), id)
                if not is_for_later(*reply[:2]):
                    return reply
            except (OSError, HTTPException):
                if self.process.poll() is not None:
                    raise
            time.sleep(AGAIN_SECONDS)

    def check(self) -> None:
        """Raises UserError if the server has ended."""
        if (code := self.process.poll()) is None:
            return
        lines = self.log.read_text(errors="replace").splitlines()
        if code == USER_ERROR and lines and lines[-1].startswith("error: "):
            raise UserError(lines[-1].removeprefix("error: "))
        end_bars()
        note("\n".join(lines[-LOG_LINES:]))
        raise UserError(
            f"the server ended with exit code {code}; its last lines are above. The same command goes on where it was"
        )


@contextmanager
def own_server(flags: Sequence[str]) -> Iterator[Server]:
    """A server with these flags, once it is ready, on a socket in a private folder. It ends with this process, however that ends.
    Raises UserError."""
    unused = {ENV_PREFIX + one.name.upper() for kind in UNUSED for one in fields(kind)} | {ENV_PREFIX + "CONFIG"}
    environment = {name: value for name, value in os.environ.items() if name not in unused} | {LAUNCHER: str(os.getpid())}
    with run_folder() as folder:
        address, log = folder / "socket", folder / "log"
        command = [sys.executable, "-m", "server", *FIXED, *flags, "--uds", str(address)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        server = Server(process, address, log)
        try:
            while not server.is_ready():
                server.check()
                time.sleep(POLL_SECONDS)
            if said := log.read_text(errors="replace").partition("\nServing ")[0].strip():
                note(said)
            yield server
        finally:
            end(process, seconds=STOP_SECONDS)


def read_lines(path: Path, model: str) -> Iterator[tuple[str, Line]]:
    """The requests of a file that `check` has read, each with the id of its answer: of its number, its text and the model."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                digest = hashlib.sha256(f"{model}\n".encode() + raw.strip()).hexdigest()[:16]
                yield f"batch_req_{digest}_{number}", msgspec.json.decode(raw, type=Line)


def open_answers(path: Path, ids: set[str]) -> tuple[BinaryIO, set[str]]:
    """The file of answers, to be written behind those that it has, and their ids. ids: those that it may have. Removes one that was
    written in part. Raises UserError for other content, and if another process writes it."""
    done, size = set[str](), 0
    with suppress(FileNotFoundError):
        check_regular(path)
    file = check_output(path).open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process writes {path}; end it, or name another file") from None
    file.seek(0)
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        id = found[0][7:-1].decode() if (found := DONE.match(line)) else ""
        if id not in ids or id in done:
            raise UserError(
                f"{path}, line {number} answers no line of this file by this model; name another file for the answers"
            )
        done.add(id)
        size += len(line)
    file.truncate(size)
    return file, done


def answer_all(
    server: Server, lines: Iterator[tuple[str, Line]], at_once: int, out: BinaryIO, bar: "tqdm[Any]"
) -> Counter[str]:
    """Answer the lines into `out`, and end the server. Returns the numbers of remarks, and of errors by status. Raises UserError."""
    counts, running = Counter[str](), dict[Future[Reply], tuple[str, Line]]()
    with ThreadPoolExecutor(at_once) as pool, ExitStack() as stack:
        stack.callback(end, server.process, seconds=STOP_SECONDS)  # after an error, threads would wait for answers
        while True:
            while len(running) < at_once and (one := next(lines, None)):
                running[pool.submit(server.answer, *one)] = one
            if not running:
                return counts
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                id, line = running.pop(future)
                try:
                    status, body, remarks = future.result()
                except (OSError, HTTPException):
                    server.check()
                    raise
                response = {"status_code": status, "request_id": id, "body": msgspec.Raw(body)}
                with writing(Path(str(out.name))):
                    out.write(to_json({"id": id, "custom_id": line.custom_id, "response": response, "error": None}) + b"\n")
                    out.flush()
                counts.update(remarks if status == 200 else [*remarks, f"errors with status {status}"])
                bar.update()


def read_args() -> tuple[argparse.Namespace, Settings, list[str]]:
    """The files, the settings of the server, and its flags. Raises UserError."""
    usage = "%(prog)s [-h] [--model] ORG/NAME|DIR [--tp N] [other flags of the server] IN OUT"
    parser = Parser(None, True, usage=usage, description=__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("input", metavar="IN", help="a file with a request in each line, or - for standard input")
    parser.add_argument("output", metavar="OUT", help="the file for answers, or - for standard output")
    for title, kind in GROUPS.items():
        if kind not in UNUSED:
            add_options(parser, kind, title, without=CLIENTS)
    args = parser.parse_args()
    flags = sys.argv[1:]
    for word in (args.input, args.output):
        flags.remove(word)
    if is_rank():
        raise UserError("start this command without a launcher; --tp N starts the ranks")
    return args, load_settings(flags), flags


def main() -> None:
    args, settings, flags = read_args()
    with ExitStack() as stack:
        given = Path(args.input)
        if args.input == "-":
            given = stack.enter_context(run_folder()) / "in"
            with given.open("wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
        try:
            check_regular(given)
            check(given, ENDPOINTS, MOST_LINES, settings.max_body_bytes)
        except FileNotFoundError:
            raise UserError(
                f"{given} does not exist; name a file with a request in each line, or - for standard input"
            ) from None
        except ApiError as e:
            raise UserError(f"{args.input}: {e.message}") from None
        model = settings.model
        ids = {id for id, _ in read_lines(given, model)}
        out, done = (sys.stdout.buffer, set[str]()) if args.output == "-" else open_answers(Path(args.output), ids)
        counts = Counter[str]()
        if len(done) < len(ids):
            with_files(settings)  # fetches them, and shows how far that is
            server = stack.enter_context(own_server(flags))
            bar = stack.enter_context(tqdm(total=len(ids), initial=len(done), unit="request"))
            left = ((id, line) for id, line in read_lines(given, model) if id not in done)
            at_once = min(settings.max_num_seqs + MOST_WAITING, 2 * settings.max_num_seqs)
            counts = answer_all(server, left, at_once, out, bar)
    summary = "".join(f"; {what}: {count}" for what, count in counts.items())
    note(f"{len(ids)} requests, {len(done)} of them answered before{summary}")


if __name__ == "__main__":
    run(main)
