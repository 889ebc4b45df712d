"""How many sequences may be in the server, in all and of one client. Who exceeds that gets a 429.

A refused request is told when to come again: each when another place becomes free, else all would come for the same. No place is kept
for it, because it may not come.
"""

import heapq
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from server.problems import ApiError, bad

WINDOW = 30.0  # seconds over which ends are counted
MOST_ENDS = 4096
LONGEST_RETRY = 120  # seconds
FORECAST_SECONDS = 1.0  # for which a forecast is used: it reads all sequences


@dataclass(frozen=True)
class Progress:
    """Of a sequence in the engine. seconds: in which all tokens but the first one came. left: the most that may still come."""

    client: str
    tokens: int
    seconds: float
    left: int


def forecast(sequences: Iterable[Progress]) -> list[tuple[float, str]]:
    """In how many seconds each sequence ends at the latest, the first one first, and whose it is. Empty if no token tells the speed.

    Those that wait are taken to begin in their order, each at the end of another one."""
    begun, waiting = list[tuple[float, str]](), list[Progress]()
    tokens, seconds = 0, 0.0
    for one in sequences:
        if not one.tokens:
            waiting.append(one)
            continue
        begun.append((one.left, one.client))
        tokens, seconds = tokens + one.tokens - 1, seconds + one.seconds
    if not tokens:
        return []
    heapq.heapify(begun)
    ends = [heapq.heapreplace(begun, (begun[0][0] + one.left, one.client)) for one in waiting]
    return [(left * seconds / tokens, client) for left, client in ends + sorted(begun)]


class Admission:
    """Bounds how many sequences are in the server, in all and of one client."""

    def __init__(
        self,
        capacity: int,
        per_client: int,
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[], Iterable[Progress]] = tuple,
    ) -> None:
        """capacity: sequences in all. per_client: of one client. clock: as time.monotonic. progress: returns the sequences in
        the engine."""
        self.capacity, self.per_client, self._clock, self._progress = capacity, per_client, clock, progress
        self._held = Counter[str]()  # places by client
        self._told: list[float] = []  # when refused requests were told to come, each for a place
        self._told_of = defaultdict[str, list[float]](list)  # the same by client, of those that hold places
        self._ends: deque[tuple[float, str]] = deque(maxlen=MOST_ENDS)  # when places became free, and whose
        self._since = 0.0  # when the server began to be busy
        self._forecast: tuple[float, list[tuple[float, str]]] = (-math.inf, [])  # until when it is used

    @contextmanager
    def hold(self, client: str, sequences: int, active: int) -> Iterator[Callable[[], None]]:
        """Take places for a client's sequences until the end of the `with` block. Yields a function that gives one back earlier.

        `active`: the sequences in the engine. Raises a 429 if there is no room now, and a 400 if there never is."""
        most = min(self.capacity, self.per_client)
        if sequences > most:
            message = (
                f"the request asks for {sequences} answers, but the server's queue holds {most}; send fewer prompts at once"
            )
            raise bad(None, message, "too_many_choices")
        if (missing := active + sequences - self.capacity) > 0:
            raise self._refusal(f"the queue has {active} sequences, and holds {self.capacity}", missing, sequences, None)
        held = self._held[client]
        if (missing := held + sequences - self.per_client) > 0:
            message = f"the queue has {held} sequences of this client, and holds {self.per_client}"
            raise self._refusal(message, missing, sequences, client)
        if not self._held:
            self._since = self._clock()
        self._held[client] += sequences
        left = sequences

        def leave() -> None:
            nonlocal left
            left -= 1
            self._leave(client)

        try:
            yield leave
        finally:
            while left:
                leave()

    def _refusal(self, message: str, missing: int, sequences: int, client: str | None) -> ApiError:
        """The 429 of a request that lacks so many places for its sequences, of one client if given."""
        now, told = self._clock(), self._told if client is None else self._told_of[client]
        told[:] = [due for due in told if due > now]
        seconds = self.retry_after(missing + len(told), client)
        told += [now + seconds] * min(sequences, self.capacity - len(told))
        return ApiError(429, f"{message}; try again in {seconds} s", None, "queue_full", {"retry-after": str(seconds)})

    def retry_after(self, place: int, client: str | None = None) -> int:
        """Seconds until so many places will have become free, of one client if given: the longest that so many lately took. If none
        lately became free, as the answers' speed and largest lengths say."""
        now = self._clock()
        begin = max(self._since, now - WINDOW)
        if len(self._ends) == MOST_ENDS:  # older ones are not known
            begin = max(begin, self._ends[0][0])
        times = [begin, *(at for at, name in self._ends if at >= begin and client in (None, name)), now]
        coming = [at - now for at, name in self._coming(now) if client in (None, name)] if len(times) == 2 else []
        if coming:
            seconds = coming[min(place, len(coming)) - 1]
        elif place <= len(times) - 2:  # as many have become free
            seconds = max(after - at for at, after in zip(times, times[place:], strict=False))
        else:
            seconds = place * (now - begin) / max(len(times) - 2, 1)
        return min(LONGEST_RETRY, max(1, math.ceil(seconds)))

    def _coming(self, now: float) -> list[tuple[float, str]]:
        """When sequences will end, and whose they are."""
        until, ends = self._forecast
        if now >= until:
            ends = [(now + seconds, client) for seconds, client in forecast(self._progress())]
            self._forecast = now + FORECAST_SECONDS, ends
        return ends

    def _leave(self, client: str) -> None:
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
            self._told_of.pop(client, None)
        self._ends.append((self._clock(), client))
