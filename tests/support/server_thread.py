"""The HTTP frontend in a thread of the test process, on a real port, with a fake engine behind it."""

import asyncio
import contextlib
import json
import queue
import socket
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest
import zmq

from engine.protocol import (
    Abort,
    FromEngine,
    Logprob,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Starting,
    Submit,
    SubmitAll,
    TokenLogprobs,
    TokenOutput,
    decode_to_engine,
    encode,
)
from server import replies, workers
from server.frontend import FrontendServer, make_server
from server.settings import Settings
from tests import MODELS
from tests.support import quick_start
from tests.support.ports import free_port
from tests.support.worker_jobs import until_there
from text.tokenizer_files import load_tokenizer

# Each worker would import its modules for a second.
workers.subprocess = cast(Any, SimpleNamespace(Popen=quick_start.Popen, DEVNULL=subprocess.DEVNULL))

MODEL = MODELS / "tiny-hybrid"
TOKENIZER = load_tokenizer(MODEL)
EOS = TOKENIZER.eos_ids[0]
CONTEXT = 256
WIDTH = 6  # of embeddings
MARK = "mark"  # the request id of the Abort by which `Site.settle` sees that the engine has got all before it
STORY = "Once upon a time, Zoë saw a 🐉 über the café. It was kind. END of it"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class FakeEngine(threading.Thread):
    """An engine of the real protocol without a model. It answers each request with the tokens that `reply` returns.

    With `hold` it sends no tokens. It refuses prompts whose last token is 1000.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.to_engine, self.from_engine = f"ipc://{folder}/to", f"ipc://{folder}/from"
        self.reply: Callable[[Submit], list[int]] = lambda submit: TOKENIZER.encode(STORY, add_special_tokens=False)
        self.group = 1  # tokens of a sequence in one output
        self.drafted = self.accepted = 0  # tokens that it says were guessed for each output
        self.together = 1  # outputs in one message
        self.delay = 0.0  # seconds before each message
        self.hold = False
        self.submits: list[Submit] = []
        self.aborts: list[Abort] = []
        self.shutdowns = 0
        self.marked = threading.Event()
        self._own: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
        self._alive = True

    def send(self, message: FromEngine) -> None:
        """Send a message of the test. The engine's thread does it, because a ZeroMQ socket belongs to one thread."""
        self._own.put(message)

    def run(self) -> None:
        context = zmq.Context()
        inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        inbox.bind(self.to_engine)
        outbox.connect(self.from_engine)
        self._send: Callable[[FromEngine], None] = lambda message: outbox.send(encode(message))
        self._send(ready())
        work: dict[str, Iterator[TokenOutput]] = {}
        while self._alive:
            while inbox.poll(0 if work and not self.hold else 5):
                self._take(decode_to_engine(inbox.recv()), work)
            while not self._own.empty():
                message = self._own.get()
                if isinstance(message, Starting):  # these ranks know nothing
                    work.clear()
                self._send(message)
            for request_id, outputs in [] if self.hold else list(work.items()):
                time.sleep(self.delay)
                new = list(islice(outputs, self.together))
                self._send(Outputs(new))
                if new[-1].finish_reason:
                    del work[request_id]
        context.destroy(linger=0)

    def stop(self) -> None:
        self._alive = False
        self.join(60)

    def _take(self, message: Any, work: dict[str, Iterator[TokenOutput]]) -> None:
        if isinstance(message, SubmitAll):
            for submit in message.submits():
                self._take(submit, work)
        elif isinstance(message, Submit):
            self.submits.append(message)
            if message.prompt_ids[-1] == 1000:
                self._send(Refused(message.request_id, "this can never run"))
            else:
                work[message.request_id] = self._outputs(message)
        elif isinstance(message, Abort) and message.request_id == MARK:
            self.marked.set()
        elif isinstance(message, Abort):
            self.aborts.append(message)
            work.pop(message.request_id, None)
        elif isinstance(message, Shutdown):
            self.shutdowns += 1

    def _outputs(self, submit: Submit) -> Iterator[TokenOutput]:
        params = submit.params
        if params.pooling is not None:
            yield TokenOutput(submit.request_id, [], "stop", embedding=embedding(submit).tobytes())
            return
        ids = self.reply(submit)[: params.max_tokens]
        ended = [i for i, token in enumerate(ids) if token in params.stop_token_ids]
        ids, reason = (ids[: ended[0] + 1], "stop") if ended else (ids, "length")
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            k = params.prompt_logprobs
            prompt_logprobs = [None, *(entry(one, k) for one in submit.prompt_ids[1:])]
        group = self.group  # a test may set another one while an aborted request still runs
        for at in range(len(submit.generated), len(ids), group):
            new = ids[at : at + group]
            yield TokenOutput(
                request_id=submit.request_id,
                token_ids=new,
                finish_reason=reason if at + group >= len(ids) else None,
                logprobs=None if params.logprobs is None else [entry(one, params.logprobs) for one in new],
                prompt_logprobs=prompt_logprobs if at == 0 else None,
                drafted=self.drafted,
                accepted=self.accepted,
                cached_tokens=4 if at == 0 else 0,
                queue_seconds=0.001,
                prefill_seconds=0.002,
            )


def embedding(submit: Submit) -> "array[float]":
    """A vector that depends on the prompt and the pooling."""
    scale = 1 if submit.params.pooling == "mean" else -2
    return array("f", [scale * (sum(submit.prompt_ids) * (i + 1) % 97 + 0.5) for i in range(WIDTH)])


def entry(token: int, k: int) -> TokenLogprobs:
    """`token` and the `k` best tokens. `token` is not among the best, so every response layout must add it."""
    others = [Logprob((token + 1 + i) % 1024, -0.25 * (i + 1), i + 1) for i in range(k)]
    return TokenLogprobs(Logprob(token, -0.1 * (token % 7), 1), others)


def ready() -> Ready:
    return Ready("tiny", "hybrid", "gloo", 2, "cpu", "float32", CONTEXT, TOKENIZER.vocab_size, 100, 16, hidden_size=WIDTH)


class Site:
    """A frontend in a thread, on a free port, and its fake engine."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.engine = FakeEngine(folder)
        self.port = free_port()
        usual = {"model": str(MODEL), "port": self.port, "idle_timeout": 60.0, "worker_seconds": 300.0}  # on a busy machine
        self.settings = Settings(**(usual | settings))
        self.server: FrontendServer = make_server(self.settings, TOKENIZER, self.engine.to_engine, self.engine.from_engine)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self.openai = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    def start(self, engine: bool = True) -> "Site":
        self.thread.start()
        if engine:
            self.engine.start()
        wait_for(lambda: self.server.started and (not engine or self.health() == "ready"))
        return self

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(120)
        if self.engine.is_alive():
            self.engine.stop()
        assert not self.thread.is_alive()

    def settle(self) -> None:
        """Wait until nothing of a test's requests is left: in the frontend, on the way to the engine, or in the engine."""
        wait_for(self._is_settled)

    def _is_settled(self) -> bool:
        async def mark() -> bool:
            client = self.server.client
            client._send(Abort(MARK))
            return self.server.service.open_requests == client.active == 0

        self.engine.marked.clear()
        idle = asyncio.run_coroutine_threadsafe(mark(), self.server._loop).result(60)
        return self.engine.marked.wait(60) and idle

    def occupy_worker(self, gate: Path) -> Future[None]:
        """Let the worker of slow jobs do nothing else until the file `gate` exists."""
        workers = self.server.service.workers
        job = asyncio.run_coroutine_threadsafe(workers.run(until_there, str(gate), slow=True), self.server._loop)
        wait_for(lambda: 1 in workers.pids and not workers._slow)
        return job

    @contextmanager
    def job_seconds(self, seconds: float) -> Iterator[None]:
        """During the `with` block, a worker's job that takes longer is ended. All others have their usual time."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.server.service.workers, "_seconds", seconds)
            yield

    def ask(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> "Asked":
        """Post a request in a thread."""
        return Asked(self.url + path, {"prompt": "Hi", "max_tokens": 100, **body}, headers)

    def says(self, text: str, end: bool = True) -> None:
        """Let the engine answer with this text, and end it with EOS."""
        ids = TOKENIZER.encode(text, add_special_tokens=False) + [EOS] * end
        self.engine.reply = lambda submit: ids

    def health(self) -> str:
        return str(self.http.get("/health").json()["status"])

    def complete(self, **body: Any) -> dict[str, Any]:
        return self.post("/v1/completions", {"prompt": "Hi", "max_tokens": 100, **body})

    def chat(self, **body: Any) -> dict[str, Any]:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **body})

    def post(self, path: str, body: Any) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        content: dict[str, Any] = response.json()
        return content

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = replies.ErrorReply.model_validate(response.json()).error.model_dump()
        return error

    def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream without the last one, which must be [DONE]."""
        response = self.http.post(path, json={**body, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def last(self) -> Submit:
        return self.engine.submits[-1]

    def slow_reader(self) -> socket.socket:
        """A connection that holds little of an answer before it is read."""
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", self.port))
        return raw


class Asked:
    """A request that a thread sends over a connection of its own, and its answer as far as it has come."""

    def __init__(self, url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.status, self.text, self.begun, self.ended = 0, "", threading.Event(), 0.0
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(url, body, headers), daemon=True)
        self._thread.start()

    def _run(self, url: str, body: dict[str, Any], headers: dict[str, str] | None) -> None:
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=300) as reply:
                self.status = reply.status_code
                for part in reply.iter_text():
                    self.text += part
                    self.begun.set()
        except Exception as e:
            self.failure = e
        self.ended = time.monotonic()

    def join(self) -> "Asked":
        """Wait for the end. Raises what the thread has raised."""
        self._thread.join(300)
        assert self.ended, f"it has not come to its end: {self.text}"
        if self.failure:
            raise self.failure
        return self

    def json(self) -> Any:
        return json.loads(self.join().text)


def wait_for(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait until the condition is true. Fails after `seconds`, which are only there to end a test that hangs."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def raw_request(body: Any, path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data
