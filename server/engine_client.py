"""The frontend's side of the protocol: send requests and adapters to the engine, and queue the tokens that come back.

One task reads the socket and never waits for clients, so that a slow reader delays neither other requests nor the engine.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import zmq
import zmq.asyncio

from engine.protocol import (
    Abort,
    AdapterDone,
    Attach,
    FromEngine,
    LoadAdapter,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Starting,
    Stats,
    Submit,
    ToEngine,
    TokenOutput,
    UnloadAdapter,
    decode_from_engine,
    encode,
    joined,
)
from server.errors import NO_RETRY, ApiError, internal_error
from server.logs import log
from server.metrics import Metrics, SequenceTimes
from server.recovery import GOT_ON, Recovery, Watchdog
from server.started import Started

OUTPUT_BYTES = 400  # that an output takes in memory
LOGPROB_BYTES = 100  # and each log-probability of it
COUNTED_BYTES = 65536  # changes of a queue's size below this are not reported
MOST_LOST = 256  # adapters that are named as lost
ANSWER_SECONDS = 150.0  # until the ranks must have answered: longer than they read at most
SLICE_BYTES = (
    16384  # of outputs that `next` returns at once, and the last one: a backlog is converted to text only as its client reads
)


class OutputQueue:
    """The outputs of one HTTP request's sequences, and what other ranks need to go on with them. Made by
    `EngineClient.generate`."""

    def __init__(self, client: "EngineClient", submits: Sequence[Submit], name: str) -> None:
        self._client, self.name = client, name
        self._submits = list(submits)  # as they were sent last
        self._index = {submit.request_id: i for i, submit in enumerate(submits)}  # of the ids that the ranks know
        self._generated: list[list[int]] = [[] for _ in submits]
        self._arrived: deque[tuple[int, TokenOutput]] = deque()
        self._is_backlog = False  # whether the last slice has left some
        self._error: ApiError | None = None  # raised once `_arrived` is empty
        self._waiter: asyncio.Future[None] | None = None  # what `next` waits for
        self.count_unread: Callable[[int], None] | None = None  # gets changes of how many bytes `_arrived` takes
        self._bytes = self._reported = 0  # of `_arrived`
        # the unfinished ones
        self._times = {i: SequenceTimes(client.metrics, len(s.prompt_ids)) for i, s in enumerate(submits)}
        self.sent = False  # whether the present ranks have it
        self.attempts = 0  # how often it was sent
        self.stuck = self.alone = self.tokens_since_sent = 0  # see `recovery.Request`
        self._before = [0] * len(submits)  # tokens of each sequence when it was sent

    async def next(self) -> list[tuple[int, TokenOutput]]:
        """Wait for outputs and return the oldest, those of SLICE_BYTES, each with its sequence's index in `submits`; [] after `wake`.

        Outputs that arrived before their sequence was stopped are included. Raises ApiError once none is left after an error.
        """
        if not self._arrived and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._arrived and self._error is not None:
            raise self._error
        if self._is_backlog:
            await asyncio.sleep(0)  # let other requests run between the slices of a backlog
        found, size = [], 0
        while self._arrived and size < SLICE_BYTES:
            found.append(self._arrived.popleft())
            size += bytes_of(found[-1][1])
        self._is_backlog = bool(self._arrived)
        if self.count_unread:
            self._count(-size)
        return found

    def stop(self, index: int, used: int) -> None:
        """End the sequence at `index`, as when a stop string was found after `used` tokens. No effect if it has ended already."""
        if index in self._times:
            self._abort(index, "stop", used)

    def close(self, reason: str) -> None:
        """Abort the unfinished sequences. `reason`: for the metrics."""
        for index in list(self._times):
            self._abort(index, reason)

    def on_output(self, output: TokenOutput, now: float) -> int:
        """Queue what the engine sent; `now` is time.monotonic().

        Returns the number of tokens.
        """
        index = self._index[output.request_id]
        times, count = self._times[index], len(output.token_ids)
        times.on_tokens(now, count, output.queue_seconds, output.prefill_seconds)
        self._generated[index] += output.token_ids
        since = GOT_ON if output.finish_reason else len(self._generated[index]) - self._before[index]
        self.tokens_since_sent = max(self.tokens_since_sent, since)
        if output.finish_reason:
            self._end(index, output.finish_reason)
        self._arrived.append((index, output))
        if self.count_unread:
            self._count(bytes_of(output))
        self.wake()
        return count

    def _count(self, size: int) -> None:
        self._bytes += size
        if self.count_unread and abs(change := self._bytes - self._reported) >= COUNTED_BYTES:
            self._reported = self._bytes
            self.count_unread(change)

    def on_error(self, error: ApiError) -> None:
        """Fail the request after the outputs that have arrived. The first error counts. The ranks compute nothing more for it,
        however late its client reads the error."""
        self._error = self._error or error
        self.close("error")
        self.wake()

    def renew(self) -> list[Submit]:
        """The unfinished sequences, as ranks have to compute them that know nothing of them.

        Their ids are new, so that what ended ranks have sent and what is still on its way counts for none of them.
        """
        self.attempts += 1
        self.tokens_since_sent, self._before = 0, list(map(len, self._generated))
        for i in self._times if self.attempts > 1 else ():
            first = self._submits[i].request_id.partition("+")[0]
            again = dict(request_id=f"{first}+{self.attempts}", generated=self._generated[i])
            self._submits[i] = msgspec.structs.replace(self._submits[i], **again)
        submits = [self._submits[i] for i in self._times]
        self._index = {self._submits[i].request_id: i for i in self._times}
        return submits

    @property
    def ids(self) -> list[str]:
        """What the ranks call its unfinished sequences."""
        return [self._submits[i].request_id for i in self._times]

    @property
    def tokens(self) -> int:
        """The tokens of its unfinished sequences: of the prompts, and of the answers so far."""
        return sum(times.prompt_tokens + times.tokens for times in self._times.values())

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _abort(self, index: int, reason: str, used: int | None = None) -> None:
        self._client.abort(self._submits[index].request_id, used)  # before what waited for its end is sent
        self._end(index, reason)

    def _end(self, index: int, reason: str) -> None:
        self._times.pop(index).on_end(reason)
        if not self._times:  # its client may read the answer long after, and no ranks have a part in that
            self._client.recovery.remove(self)


def bytes_of(output: TokenOutput) -> int:
    """About how many bytes an output takes in memory."""
    lists = (*(output.logprobs or ()), *(output.prompt_logprobs or ()))
    return OUTPUT_BYTES + LOGPROB_BYTES * sum(1 + len(one.top) for one in lists if one) if lists else OUTPUT_BYTES


class ServedAdapters:
    """The adapters that the ranks serve, as the frontend knows them, and the requests that load and unload them.

    paths: the adapters' folders, by name. lost: folder and error of those that could not be loaded again after a recovery.
    """

    def __init__(self, send: Callable[[LoadAdapter | UnloadAdapter], None]) -> None:
        self.paths: dict[str, str] = {}
        self.lost: dict[str, tuple[str, str]] = {}
        self._send, self._known = send, False
        self._waiting: dict[str, asyncio.Future[str]] = {}

    async def load(self, name: str, path: str) -> None:
        """Raises ApiError."""
        await self._answer(LoadAdapter(uuid.uuid4().hex, name, path))

    async def unload(self, name: str) -> None:
        """Raises ApiError. One that was lost is forgotten."""
        if self.lost.pop(name, None) is None:
            await self._answer(UnloadAdapter(uuid.uuid4().hex, name))

    async def _answer(self, message: LoadAdapter | UnloadAdapter) -> None:
        future = self._waiting[message.request_id] = asyncio.get_running_loop().create_future()
        self._send(message)
        try:
            error = await asyncio.wait_for(future, ANSWER_SECONDS)
        except TimeoutError:
            raise ApiError(503, f"the ranks have not answered within {ANSWER_SECONDS:g} s", None, "timeout") from None
        finally:
            self._waiting.pop(message.request_id, None)
        if error:
            raise ApiError(400, error, None, "adapter_refused")

    def on_done(self, done: AdapterDone) -> None:
        again = not done.request_id  # what `on_ready` asked for
        if done.path is not None and not done.error:
            self.paths[done.name] = done.path
            self.lost.pop(done.name, None)
        elif again == bool(done.error):
            self.paths.pop(done.name, None)
        if again and done.error:
            log.error("after the ranks have started again, the adapter %s is not served any more: %s", done.name, done.error)
            if done.path is not None:
                self.lost = dict([*self.lost.items(), (done.name, (done.path, done.error))][-MOST_LOST:])
        if (future := self._waiting.pop(done.request_id, None)) is not None and not future.done():
            future.set_result(done.error)

    def on_ready(self, ready: Ready) -> None:
        """Learn what the first ranks have. Let later ranks load and unload what differs from those before them."""
        wanted, found = self.paths if self._known else ready.adapters, ready.adapters
        self._known, self.paths = True, dict(wanted)
        for name in [name for name, path in found.items() if wanted.get(name) != path]:
            self._send(UnloadAdapter("", name))
        for name in [name for name, path in wanted.items() if found.get(name) != path]:
            self._send(LoadAdapter("", name, wanted[name]))
        self.fail("the ranks have started again meanwhile; send the request again")

    def fail(self, message: str) -> None:
        """Nobody answers what was sent so far."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ApiError(503, message, None, "engine_failed"))
        self._waiting.clear()


class EngineClient:
    """Sends requests to rank 0 and queues its outputs by request."""

    def __init__(
        self,
        to_engine: str,
        from_engine: str,
        metrics: Metrics,
        watchdog: Watchdog | None = None,
        before: Started | None = None,
    ) -> None:
        """to_engine: address at which the engine binds its PULL socket. from_engine: where this side binds its own. watchdog:
        says when the ranks hang. before: see `Recovery`."""
        self.metrics = metrics
        self.ready: Ready | None = None  # of the newest ranks that were ready
        self.fatal: str | None = None
        self.on_ready: Callable[[Ready], None] = lambda ready: None  # called once
        self.on_fatal: Callable[[str], None] = lambda message: None
        self.later = ""  # the end of messages to accepted requests that the server does not finish
        self.recovery = Recovery(self._submit, self._recall, metrics, watchdog or Watchdog(), before)
        self.adapters = ServedAdapters(self._send)
        self._active: dict[str, OutputQueue] = {}
        self._addresses = (to_engine, from_engine)
        self.attach = before is not None  # to ranks that may have served another frontend
        self._tasks: list[asyncio.Task[None]] = []

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
        if self.attach:
            self._send(Attach())
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self.recovery.watch())]

    async def close(self) -> None:
        if self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._pull.close()
            self._push.close()
            self._context.term()  # waits until a Shutdown is sent, because the process may exit right after

    @property
    def active(self) -> int:
        """The number of sequences that the engine has not finished."""
        return len(self._active)

    @property
    def active_tokens(self) -> int:
        """The tokens of these sequences' prompts, and of their answers so far."""
        return sum(queue.tokens for queue in set(self._active.values()))

    @contextmanager
    def generate(self, submits: Sequence[Submit], name: str = "") -> Iterator[OutputQueue]:
        """Run one HTTP request's sequences. At the end of the `with` block, unfinished ones are aborted. name: by which its client
        knows it, for messages."""
        if self.fatal:
            raise broken()
        queue = OutputQueue(self, submits, name)
        self._active |= {submit.request_id: queue for submit in submits}
        self.recovery.add(queue)
        reason = "abort"
        try:
            yield queue
        except ApiError:
            reason = "error"
            raise
        finally:
            queue.close(reason)

    def abort(self, request_id: str, used: int | None = None) -> None:
        if self._active.pop(request_id, None) and not self.fatal:
            self._send(Abort(request_id, used))

    def shutdown(self) -> None:
        self._send(Shutdown())

    def fail_all(self, error: ApiError) -> None:
        """End every request with `error`: a response, or an event in a stream that has started."""
        for queue in set(self._active.values()):
            queue.on_error(error)
        self._active.clear()

    def die(self, message: str) -> None:
        """Fail all requests, because the ranks have ended for good. Reported by the process that started them."""
        if self.fatal is None:
            self.fatal = message
            log.error("the engine failed: %s", message)
            self.recovery.give_up()
            self.fail_all(broken(self.later))
            self.adapters.fail(broken().message)
            self.on_fatal(message)

    def _submit(self, queue: OutputQueue) -> None:
        """Send a request's unfinished sequences."""
        for request_id in queue.ids:
            self._active.pop(request_id, None)
        submits = queue.renew()
        if queue.attempts > 1:
            self.metrics.replayed_tokens.inc(sum(len(s.prompt_ids) + len(s.generated) for s in submits))
        self._active |= {submit.request_id: queue for submit in submits}
        self._send(submits[0] if len(submits) == 1 else joined(submits))

    def _recall(self, queue: OutputQueue) -> None:
        """End a request's sequences in the engine only. Tokens that are on their way still count."""
        for request_id in queue.ids:
            self._send(Abort(request_id))

    def _send(self, message: ToEngine) -> None:
        # requests that outlast the server's end, such as those in the background, have nobody to tell
        if not self._push.closed:
            self._push.send(encode(message), zmq.NOBLOCK)

    async def _receive(self) -> None:
        while True:
            await asyncio.sleep(0)  # `recv` does not let others run while messages are waiting
            data = await self._pull.recv()
            try:
                message = decode_from_engine(data)
            except ValueError:
                log.exception("an unreadable message from the engine")
                continue
            try:
                self._dispatch(message)
            except Exception:  # the messages of other requests still count
                log.exception("a message from the engine was not understood: %s", type(message).__name__)

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        now, tokens = time.monotonic(), 0
        for output in outputs:
            if not (queue := self._active.get(output.request_id)):
                continue
            try:
                if output.finish_reason:
                    del self._active[output.request_id]
                tokens += queue.on_output(output, now)
                if queue.stuck:
                    self.recovery.went_on(queue)
            except Exception:  # its answer would lack tokens; those of other requests must not
                log.exception("an output of request %s was not understood", output.request_id)
                queue.on_error(internal_error())
        if tokens:
            self.metrics.on_tokens(now, tokens)

    def _refuse(self, refused: Refused) -> None:
        queue = self._active.get(refused.request_id)
        if queue is None:
            return
        if refused.code == "grammars_busy" and queue.attempts > 1:  # it was accepted
            self.recovery.postpone(queue)
            return
        del self._active[refused.request_id]
        if refused.code == "overflow":
            self.metrics.overflowed.inc()
            log.error("request %s: %s", queue.name, refused.message)
            queue.on_error(ApiError(500, refused.message, None, refused.code, NO_RETRY))
            return
        # new ranks may have less memory than those that accepted a request, so that it is no fault of the client's
        status = 429 if refused.code == "grammars_busy" else 400 if queue.attempts == 1 else 503
        queue.on_error(ApiError(status, refused.message, None, refused.code))

    def _dispatch(self, message: FromEngine) -> None:
        self.recovery.heard()
        if isinstance(message, Outputs):
            self._deliver(message.outputs)
        elif isinstance(message, Refused):
            self._refuse(message)
        elif isinstance(message, AdapterDone):
            self.adapters.on_done(message)
        elif isinstance(message, Stats):
            if message.pid == self.recovery.pid:  # else it is of ranks that have ended, and came late
                self.metrics.on_stats(message)
        elif isinstance(message, Starting):
            self.recovery.on_starting(message.pid)
        elif isinstance(message, Ready):
            first, self.ready = self.ready is None, message
            self.adapters.on_ready(message)  # before requests that need them
            if first:
                self.on_ready(message)
            self.recovery.on_ready(message.pid, message.max_batch_tokens, message.longest_start, message.max_num_seqs)
        else:
            self.die(message.message)


def broken(later: str = "") -> ApiError:
    """The ranks have ended for good. later: what becomes of the request."""
    message = f"the engine has failed and the server is shutting down{later or '; try again later'}"
    return ApiError(503, message, None, "engine_failed")
