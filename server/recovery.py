"""What becomes of accepted requests while the ranks end and start again: a state machine in the frontend.

    loading ── Ready ──▶ serving ── rank 0 has ended ──▶ recovering ── Ready ──▶ serving

The frontend has the prompt, the parameters and the seed of each accepted request, and every token that it received. A token is a
function of these and of its position, so new ranks that get all of them go on where the others ended, and nobody can see it in
the text.

A request may itself be what ends the ranks. One that they had at two ends in a row and hardly got on with is suspect. One
token is not enough: ranks that compute a prompt again send one, though the next step may end them. The next ranks compute the
suspects one at a time and nothing beside them, until each has got on and waits for the others to be tried, too. If the ranks end
meanwhile, they had only this one, and it is refused: at once if they sent no token of it, else when this happens again.

Of many suspects most have only waited in the ranks' queue. If there are more than the ranks compute at once, the next ranks get so
many of them at a time, beside what got on. At the next end there are few who hardly got on once more, and these are tried alone.

If the ranks hang, they are killed, and whoever started them starts them again.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from ranks.processes import is_running
from server.errors import NO_RETRY, ApiError
from server.logs import log
from server.metrics import Metrics
from server.started import Started

SUSPECT, REFUSED = 2, 3  # ends in a row of ranks that had a request and hardly got on with it
GOT_ON = 8  # tokens of one of its sequences since it was sent with which ranks get on with a request, or the end of a sequence
TICK = 1.0  # seconds between checks of the ranks; they report at least as often
HEARTBEAT_SECONDS = 5.0  # between comments in the streams, while there are no ranks
BUSY_SECONDS = 0.5  # before a request is sent again that had to wait for a grammar
LEAST_HANG = 30.0  # seconds without a report until ranks hang
UNKNOWN_HANG = 600.0  # the same before their first step
LEAST_START = 60.0  # seconds without a report until ranks that start hang; three times their longest start if that is more
SLACK = 10  # how many times as long as estimated a step may take


class Request(Protocol):
    """What an `OutputQueue` has for this module."""

    name: str  # by which its client knows it
    sent: bool
    attempts: int
    stuck: int  # ends in a row of ranks that had it and hardly got on with it
    alone: int  # of these, the last ones in a row at which they had no other
    tokens_since_sent: int  # of the sequence that has got most; GOT_ON at the end of one

    def wake(self) -> None: ...
    def on_error(self, error: ApiError) -> None: ...


@dataclass
class Watchdog:
    """When ranks hang, and how to kill them. seconds: without a report; None: as measured steps say; 0: never."""

    kill: Callable[[], None] = lambda: None
    seconds: float | None = 0.0
    max_batch_tokens: int = 0  # of a step, as the ranks say

    def limit(self, token_seconds: float | None) -> float:
        """Seconds without a report. token_seconds: of the step that took least for each of its tokens.

        So long takes each token of no larger step, apart from attention to long texts.
        """
        if self.seconds is not None:
            return self.seconds or float("inf")
        if token_seconds is None:
            return UNKNOWN_HANG
        return max(LEAST_HANG, SLACK * token_seconds * self.max_batch_tokens)


class Recovery:
    def __init__(
        self,
        send: Callable[..., None],
        recall: Callable[..., None],
        metrics: Metrics,
        watchdog: Watchdog,
        before: Started | None = None,
    ) -> None:
        """send: sends a request's unfinished sequences to the ranks. recall: takes them back.

        before: None in a server's first frontend. In one that takes the place of another, what is known of the ranks; `Started()` if
        they were not ready yet, so that there are no requests to wait for them.
        """
        self.state: Literal["loading", "serving", "recovering"] = "recovering" if before and before.longest else "loading"
        self._attaching = before is not None  # whether the ranks may be as the frontend before this one left them
        self._before = before or Started()
        self._send, self._recall, self._metrics, self._watchdog = send, recall, metrics, watchdog
        self._open: dict[Request, None] = {}  # accepted, with sequences that have not ended, in the order of their arrival
        self._places = 1  # sequences that the ranks compute at once
        self._tried_alone = SUSPECT  # `stuck` of the requests that the present ranks get one at a time, at least
        self._sends = 0  # requests that they have got
        self._lone: Request | None = None  # what they have had with no other since it was sent
        self.pid, self._descriptor = 0, -1  # of rank 0; -1: it is not watched
        self._since = time.monotonic()  # when the state began
        self._longest_start = self._before.longest  # seconds
        self._silence = 0.0  # seconds without a report, as far as this process has run meanwhile
        self._token_seconds: float | None = None  # of the newest ranks that computed a step; see `Watchdog.limit`

    # --- requests ------------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Accept a request. It is sent once there are ranks for it."""
        self._open[request] = None
        self._send_waiting()

    def remove(self, request: Request) -> None:
        """Forget a request whose sequences have ended. Its client may not have read all of its answer."""
        self._open.pop(request, None)
        if request.stuck:
            self._send_waiting()

    def went_on(self, request: Request) -> None:
        """Note the progress of a request that earlier ranks had when they ended."""
        if request.tokens_since_sent < GOT_ON:
            return
        request.stuck = request.alone = 0
        if request.sent and request not in self._allowed():
            request.sent = False
            self._recall(request)
        self._send_waiting()

    def postpone(self, request: Request) -> None:
        """Send a request again soon, because the ranks cannot take it now."""
        request.sent = False
        asyncio.get_running_loop().call_later(BUSY_SECONDS, self._send_waiting)

    def _send_waiting(self) -> None:
        if self.state != "serving":
            return
        there = sum(request.sent for request in self._open)
        for request in self._allowed():
            if not request.sent:
                self._lone = None if there else request
                there += 1
                self._sends += 1
                request.sent = True
                self._send(request)

    def _allowed(self) -> list[Request]:
        """The requests that the ranks may have now: one suspect alone, or some suspects beside what was sent before, or all."""
        suspects = [r for r in self._open if r.stuck >= SUSPECT]
        if alone := [r for r in suspects if r.stuck >= self._tried_alone]:
            return [max(reversed(alone), key=lambda r: r.stuck)]  # the newest: without it the ranks did not end
        if suspects:
            return suspects[: self._places] + [r for r in self._open if r.stuck < SUSPECT and r.attempts]
        return list(self._open)

    # --- ranks ---------------------------------------------------------------------------------------------------------------

    def on_starting(self, pid: int) -> None:
        """New ranks load the model. pid: of rank 0."""
        if (descriptor := self._descriptor_of(pid)) is None:
            return
        self.on_end()
        self._attaching = False
        self._watch_process(pid, descriptor)
        log.debug("rank 0 has process id %d", pid)

    def on_ready(self, pid: int, max_batch_tokens: int, longest_start: float = 0.0, places: int = 1) -> None:
        """The ranks can compute requests. longest_start: seconds of the longest of all starts so far. places: sequences that they
        compute at once."""
        self._watchdog.max_batch_tokens, self._places = max_batch_tokens, places
        if self.state == "serving" and pid == self.pid:
            return  # the answer to Attach
        if (descriptor := self._descriptor_of(pid)) is None:
            return
        self._watch_process(pid, descriptor)
        seconds, recovered = time.monotonic() - self._since, self.state == "recovering"
        self._longest_start = longest_start
        self._enter("serving")
        if self._attaching:
            self._attaching = False
            log.warning("the ranks serve a new frontend; only requests of a --journal go on")
        elif recovered:
            replayed = sum(request.attempts > 0 for request in self._open)
            log.warning("the ranks have started again, %.1f s after they ended; %d requests go on", seconds, replayed)
            self._metrics.on_recovery(seconds)
        self._send_waiting()

    def on_end(self) -> None:
        """Rank 0 has ended, and all others with it."""
        self._unwatch()
        if self.state != "serving":
            return
        self._enter("recovering")
        log.error("the ranks have ended; %d requests wait until they have started again", len(self._open))
        for request in [r for r in self._open if r.sent]:
            request.sent = False
            self._recall(request)  # after a stop of this process, the next ranks may have got it already
            if request.tokens_since_sent < GOT_ON:
                request.stuck += 1
                request.alone = request.alone + 1 if self._was_alone(request) else 0
                if self._must_be_refused(request):
                    self._refuse(request)
        self._sends, self._lone = 0, None
        counts = sorted((r.stuck for r in self._open if r.stuck >= SUSPECT), reverse=True)
        self._tried_alone = counts[self._places] + 1 if len(counts) > self._places else SUSPECT

    def give_up(self) -> None:
        """No ranks will start again. Nothing waits for them, so their end is no news."""
        self._unwatch()

    def _was_alone(self, request: Request) -> bool:
        """Whether the ranks had nothing else when they ended. If they had something before, a token of this request shows that they
        have dropped it: they were told so first."""
        return request is self._lone and (self._sends == 1 or request.tokens_since_sent > 0)

    def _must_be_refused(self, request: Request) -> bool:
        """Whether the request is taken to be what ends the ranks. Other causes seldom do so often, and just when they have this one
        alone."""
        return request.stuck >= REFUSED and request.alone >= (2 if request.tokens_since_sent else 1)

    def _refuse(self, request: Request) -> None:
        reason = f"refused: the ranks ended {request.stuck} times while they had it, the last time with no other beside it"
        log.error("", extra={"fields": {"request_id": request.name, "message": reason}})
        del self._open[request]
        request.on_error(ApiError(500, f"request {request.name} is {reason}", None, "poisoned", NO_RETRY))

    def _enter(self, state: Literal["serving", "recovering"]) -> None:
        self.state, self._since, self._silence = state, time.monotonic(), 0.0

    def _descriptor_of(self, pid: int) -> int | None:
        """A descriptor of rank 0's process. -1: of one that is not to be watched, on a system without pidfd, or if clients have all
        descriptors; None: it has ended, and what it sent came late."""
        if not pid or not hasattr(os, "pidfd_open"):
            return -1
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        except OSError:
            return -1

    def _watch_process(self, pid: int, descriptor: int) -> None:
        """Call `on_end` once rank 0 has ended. Without a descriptor, that is known only when new ranks start."""
        self._unwatch()
        self.pid, self._descriptor = pid, descriptor
        if descriptor >= 0:
            asyncio.get_running_loop().add_reader(descriptor, self.on_end)

    def _unwatch(self) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    # --- time ----------------------------------------------------------------------------------------------------------------

    def heard(self) -> None:
        """Note a report of the ranks."""
        self._silence = 0.0

    def limit(self) -> float:
        """Seconds without a report after which the ranks hang, in the present state."""
        if self.state == "loading":
            return float("inf")
        self._token_seconds = self._metrics.stats.token_seconds or self._token_seconds
        limit = self._watchdog.limit(self._token_seconds)
        if self.state == "serving" or (self._attaching and is_running(self._before.pid)):  # these are to answer Attach
            return limit
        return max(limit, LEAST_START, 3 * self._longest_start)

    async def watch(self) -> None:
        """Kill ranks that hang, and wake the streams now and then while there are none. Runs until it is cancelled."""
        beat = 0.0
        while True:
            await asyncio.sleep(TICK)
            self._silence += TICK  # not the clock: this process may have been stopped itself
            beat += TICK
            if self.state == "recovering" and beat >= HEARTBEAT_SECONDS:
                beat = 0.0
                for request in self._open:
                    request.wake()
            if self._silence > self.limit():
                log.error("the ranks have not reported for %g s and are killed", self._silence)
                self._silence = 0.0
                with contextlib.suppress(OSError):
                    self._watchdog.kill()
