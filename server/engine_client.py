"""The frontend's side of the protocol: requests go to the engine, each one's tokens come back on a queue of its own.

One task reads the socket and never waits for anyone else, so that a slow reader holds up neither other requests nor the engine.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import zmq
import zmq.asyncio

from engine.protocol import (
    Abort,
    Fatal,
    Ready,
    Refused,
    Shutdown,
    Stats,
    Submit,
    ToEngine,
    TokenOutput,
    decode_from_engine,
    encode,
)
from server.logs import log
from server.metrics import Metrics, SequenceTimes
from server.problems import ApiError


class Generation:
    """Sequences that one HTTP request waits for. A context manager: whatever is unfinished at its end is aborted."""

    def __init__(self, client: "EngineClient", submits: Sequence[Submit]) -> None:
        self._client = client
        self._index = {submit.request_id: i for i, submit in enumerate(submits)}
        self._submits = submits
        self._arrived: asyncio.Queue[TokenOutput | ApiError] = asyncio.Queue()
        self._times = {s.request_id: SequenceTimes(client.metrics, len(s.prompt_ids)) for s in submits}

    def __enter__(self) -> "Generation":
        for submit in self._submits:
            self._client.add(submit, self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        reason = "error" if isinstance(error, ApiError) else "abort"
        for request_id in list(self._times):
            self._end(request_id, reason)
            self._client.abort(request_id)

    async def next(self) -> tuple[int, TokenOutput]:
        """The next output of any of the sequences, with its sequence's place in `submits`. Raises ApiError."""
        while True:
            arrived = await self._arrived.get()
            if isinstance(arrived, ApiError):
                raise arrived
            if (index := self._index[arrived.request_id]) >= 0:
                return index, arrived

    def stop(self, index: int) -> None:
        """Enough of one sequence: a stop string was found."""
        request_id = self._submits[index].request_id
        if request_id in self._times:
            self._end(request_id, "stop")
            self._client.abort(request_id)
        self._index[request_id] = -1  # what is still in the queue is of no interest

    def on_output(self, output: TokenOutput) -> None:
        if (times := self._times.get(output.request_id)) is None:
            return
        times.on_tokens(len(output.token_ids), output.queue_seconds, output.prefill_seconds)
        if output.finish_reason:
            self._end(output.request_id, output.finish_reason)
        self._arrived.put_nowait(output)

    def on_error(self, error: ApiError) -> None:
        self._arrived.put_nowait(error)

    def _end(self, request_id: str, reason: str) -> None:
        if times := self._times.pop(request_id, None):
            times.on_end(reason)


class EngineClient:
    """`to_engine` is where the engine binds its PULL socket, `from_engine` where this side binds its own."""

    def __init__(self, to_engine: str, from_engine: str, metrics: Metrics) -> None:
        self.metrics = metrics
        self.ready: Ready | None = None
        self.fatal: str | None = None
        self.on_ready: Callable[[Ready], None] = lambda ready: None
        self.on_fatal: Callable[[str], None] = lambda message: None
        self.started = time.monotonic()
        self._active: dict[str, Generation] = {}
        self._addresses = to_engine, from_engine
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Open the sockets in the running event loop. Without limits on queued messages, no send ever waits."""
        to_engine, from_engine = self._addresses
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._pull = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        for socket in (self._push, self._pull):
            socket.set_hwm(0)
            socket.linger = 1000  # ms; so long a Shutdown may take to leave at exit
        self._pull.bind(from_engine)
        self._push.connect(to_engine)
        self._task = asyncio.create_task(self._receive())

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._pull.close()
            self._push.close()

    @property
    def active(self) -> int:
        """Sequences that the engine has not finished."""
        return len(self._active)

    def generate(self, submits: Sequence[Submit]) -> Generation:
        return Generation(self, submits)

    def add(self, submit: Submit, generation: Generation) -> None:
        if self.fatal:
            raise broken()
        self._active[submit.request_id] = generation
        self._send(submit)

    def abort(self, request_id: str) -> None:
        if self._active.pop(request_id, None) and not self.fatal:
            self._send(Abort(request_id))

    def shutdown(self) -> None:
        self._send(Shutdown())

    def fail_all(self, error: ApiError) -> None:
        """End every request with `error`, or an error event if it streams."""
        for generation in set(self._active.values()):
            generation.on_error(error)
        self._active.clear()

    def die(self, message: str) -> None:
        """The engine is gone: by its own word, or the launcher's."""
        if self.fatal is None:
            self.fatal = message
            log.error("the engine failed: %s", message)
            self.fail_all(broken())
            self.on_fatal(message)

    def _send(self, message: ToEngine) -> None:
        self._push.send(encode(message), zmq.NOBLOCK)

    async def _receive(self) -> None:
        while True:
            data = await self._pull.recv()
            try:
                message = decode_from_engine(data)
            except ValueError:
                log.exception("an unreadable message from the engine")
                continue
            self._dispatch(message)

    def _dispatch(self, message: Ready | TokenOutput | Refused | Stats | Fatal) -> None:
        if isinstance(message, TokenOutput):
            if generation := self._active.get(message.request_id):
                if message.finish_reason:
                    del self._active[message.request_id]
                generation.on_output(message)
        elif isinstance(message, Refused):
            if generation := self._active.pop(message.request_id, None):
                generation.on_error(ApiError(400, message.message, None, "refused"))
        elif isinstance(message, Stats):
            self.metrics.on_stats(message)
        elif isinstance(message, Ready):
            self.ready = message
            self.on_ready(message)
        else:
            self.die(message.message)


def broken() -> ApiError:
    return ApiError(503, "the engine has failed and the server is shutting down; try again later", None, "engine_failed")
