"""The frontend's side of the protocol: send requests to the engine, and queue the tokens that come back for each request.

One task reads the socket and never waits for clients, so that a slow reader delays neither other requests nor the engine.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import zmq
import zmq.asyncio

from engine.protocol import (
    Abort,
    FromEngine,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Stats,
    Submit,
    ToEngine,
    TokenOutput,
    decode_from_engine,
    encode,
    joined,
)
from server.logs import log
from server.metrics import Metrics, SequenceTimes
from server.problems import ApiError

SLICE = 64  # most outputs that `next` returns at once: the backlog of a slow reader is converted to text only as it reads


class OutputQueue:
    """The outputs of one HTTP request's sequences. Made by `EngineClient.generate`."""

    def __init__(self, client: "EngineClient", submits: Sequence[Submit]) -> None:
        self._client = client
        self._index = {submit.request_id: i for i, submit in enumerate(submits)}
        self._submits = submits
        self._arrived: deque[TokenOutput] = deque()
        self._error: ApiError | None = None  # raised once `_arrived` is empty
        self._waiter: asyncio.Future[None] | None = None  # what `next` waits for
        self._times = {s.request_id: SequenceTimes(client.metrics, len(s.prompt_ids)) for s in submits}

    async def next(self) -> list[tuple[int, TokenOutput]]:
        """Wait for outputs and return the oldest, at least one and at most SLICE, each with its sequence's index in `submits`.

        Outputs that arrived before their sequence was stopped are included. Raises ApiError once none is left after an error.
        """
        if not self._arrived and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._arrived:
            assert self._error is not None
            raise self._error
        if len(self._arrived) > SLICE:
            await asyncio.sleep(0)  # let other requests run between the slices of a backlog
        oldest = [self._arrived.popleft() for _ in range(min(len(self._arrived), SLICE))]
        return [(self._index[output.request_id], output) for output in oldest]

    def stop(self, index: int) -> None:
        """End the sequence at `index`, as when a stop string was found. No effect if it has ended already."""
        request_id = self._submits[index].request_id
        if request_id in self._times:
            self._abort(request_id, "stop")

    def close(self, reason: str) -> None:
        """Abort the unfinished sequences. `reason`: for the metrics."""
        for request_id in list(self._times):
            self._abort(request_id, reason)

    def on_output(self, output: TokenOutput, now: float) -> int:
        """Queue what the engine sent; `now` is time.monotonic().

        Returns the number of tokens to count, 0 if the sequence has ended or the request has failed.
        """
        times = self._times.get(output.request_id)
        if times is None or self._error is not None:
            return 0
        count = len(output.token_ids)
        times.on_tokens(now, count, output.queue_seconds, output.prefill_seconds)
        if output.finish_reason:
            self._end(output.request_id, output.finish_reason)
        self._arrived.append(output)
        self._wake()
        return count

    def on_error(self, error: ApiError) -> None:
        """Fail the request after the outputs that have arrived. Later outputs are dropped. The first error counts."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _abort(self, request_id: str, reason: str) -> None:
        self._end(request_id, reason)
        self._client.abort(request_id)

    def _end(self, request_id: str, reason: str) -> None:
        if times := self._times.pop(request_id, None):
            times.on_end(reason)


class EngineClient:
    """`to_engine`: address at which the engine binds its PULL socket. `from_engine`: where this side binds its own."""

    def __init__(self, to_engine: str, from_engine: str, metrics: Metrics) -> None:
        self.metrics = metrics
        self.ready: Ready | None = None
        self.fatal: str | None = None
        self.on_ready: Callable[[Ready], None] = lambda ready: None
        self.on_fatal: Callable[[str], None] = lambda message: None
        self._active: dict[str, OutputQueue] = {}
        self._addresses = to_engine, from_engine
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Open the sockets in the running event loop. Their queues have no limit, so that a send never waits."""
        to_engine, from_engine = self._addresses
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._pull = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        for socket in (self._push, self._pull):
            socket.set_hwm(0)
            socket.linger = 1000  # ms; how long `close` may wait until a Shutdown is sent
        self._pull.bind(from_engine)
        self._push.connect(to_engine)
        self._task = asyncio.create_task(self._receive())

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._pull.close()
            self._push.close()
            self._context.term()  # waits until a Shutdown is sent, because the process may exit right after

    @property
    def active(self) -> int:
        """The number of sequences that the engine has not finished."""
        return len(self._active)

    @contextmanager
    def generate(self, submits: Sequence[Submit]) -> Iterator[OutputQueue]:
        """Run one HTTP request's sequences. At the end of the `with` block, unfinished ones are aborted."""
        if self.fatal:
            raise broken()
        queue = OutputQueue(self, submits)
        self._active |= {submit.request_id: queue for submit in submits}
        self._send(submits[0] if len(submits) == 1 else joined(submits))
        reason = "abort"
        try:
            yield queue
        except ApiError:
            reason = "error"
            raise
        finally:
            queue.close(reason)

    def abort(self, request_id: str) -> None:
        if self._active.pop(request_id, None) and not self.fatal:
            self._send(Abort(request_id))

    def shutdown(self) -> None:
        self._send(Shutdown())

    def fail_all(self, error: ApiError) -> None:
        """End every request with `error`: a response, or an event in a stream that has started."""
        for queue in set(self._active.values()):
            queue.on_error(error)
        self._active.clear()

    def die(self, message: str) -> None:
        """Fail all requests, because the engine failed. Reported by the engine or by `process.report_engine_death`."""
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

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        now, tokens = time.monotonic(), 0
        for output in outputs:
            if queue := self._active.get(output.request_id):
                if output.finish_reason:
                    del self._active[output.request_id]
                tokens += queue.on_output(output, now)
        if tokens:
            self.metrics.on_tokens(now, tokens)

    def _dispatch(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._deliver(message.outputs)
        elif isinstance(message, Refused):
            if queue := self._active.pop(message.request_id, None):
                status = 429 if message.code == "grammars_busy" else 400
                queue.on_error(ApiError(status, message.message, None, message.code))
        elif isinstance(message, Stats):
            self.metrics.on_stats(message)
        elif isinstance(message, Ready):
            self.ready = message
            self.on_ready(message)
        else:
            self.die(message.message)


def broken() -> ApiError:
    return ApiError(503, "the engine has failed and the server is shutting down; try again later", None, "engine_failed")
