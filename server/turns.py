"""Lets what arrives from clients begin in turn: of a burst of thousands, the event loop begins a part at a time, and streams go on
between the parts."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

SECONDS = 0.02  # which a part may take; after a longer one fewer begin at once
MOST = 16  # that begin at once


class Turns:
    """Of one event loop, which calls everything that is ready before it looks for more: what begins together delays all streams.

    At least one begins in each part. How many do follows from how long the last part took, with the tasks that it started."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """now: seconds."""
        self._now = now
        self._most, self._begun, self._since = MOST, 0, 0.0
        self._waiting: deque[Callable[[], None]] = deque()

    def call(self, begin: Callable[[], None]) -> None:
        """Call `begin` now, or in its turn: the order stays that of the calls."""
        if self._waiting or self._begun == self._most:
            self._waiting.append(begin)
        else:
            self._begin(begin)

    def _begin(self, begin: Callable[[], None]) -> None:
        if not self._begun:
            self._since, loop = self._now(), asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._next)  # behind the tasks that begin now
        self._begun += 1
        begin()

    def _next(self) -> None:
        long = self._now() - self._since > SECONDS
        self._most, self._begun = max(1, self._most // 2) if long else min(self._most + 1, MOST), 0
        while self._waiting and self._begun < self._most:
            self._begin(self._waiting.popleft())
