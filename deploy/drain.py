"""How `deploy.ray_serve` ends: its gateways refuse new requests, and those in flight have some time. No Ray."""

import queue
import signal
import time
from typing import Protocol

from cli import note
from server.started import SIGNALLED

TICK = 0.2  # seconds between two looks at the requests in flight
FLUSH_SECONDS = 1.0  # for Ray's HTTP proxy to send the ends of answers that it has from the gateways
ONE_CAUSE = 1.0  # seconds within which signals count as one: a terminal and a supervisor may both send one


class Signals:
    """SIGINT and SIGTERM of this process, from now until `restore`."""

    def __init__(self) -> None:
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._last = float("-inf")
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore(self) -> None:
        """Have them do what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        if time.monotonic() - self._last > ONE_CAUSE:
            self._last = time.monotonic()
            self._numbers.put(number)

    def wait(self, seconds: float | None = None) -> int:
        """The number of the next signal, or 0 if none comes in that time."""
        try:
            return self._numbers.get(timeout=seconds)
        except queue.Empty:
            return 0


class Gateways(Protocol):
    """What takes the requests of clients."""

    def drain(self) -> int:
        """Refuse new requests from now on. Returns how many are in flight."""

    def end(self) -> None:
        """End the requests in flight."""


def drain(gateways: Gateways, seconds: float, signals: Signals) -> int:
    """Have the gateways refuse new requests, and finish those in flight for at most `seconds` or until a signal comes.

    Returns the exit code: 0, or 128 + the number of that signal.
    """
    end = time.monotonic() + seconds
    left, second = gateways.drain(), 0
    note(f"draining: {left} requests have up to {seconds:g} s; a second signal ends at once")
    while left and not second and time.monotonic() < end:
        second = signals.wait(TICK)
        left = gateways.drain()
    if left:
        note(f"{'a second signal came' if second else 'the drain timeout is over'}; ending {left} requests")
        gateways.end()
    time.sleep(FLUSH_SECONDS)
    return SIGNALLED + second if second else 0
