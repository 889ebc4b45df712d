"""How many sequences and unread answers may be in the server, in all and of one client. Who exceeds that gets a 429."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from server.problems import ApiError, bad

WINDOW = 30.0  # seconds over which ends are counted
MOST_ENDS = 4096
LONGEST_RETRY = 120  # seconds
UNREAD_BYTES = 1 << 30  # of vectors that are computed, or wait for their clients to read them
UNREAD_SHARE = 4  # one client may have a quarter of them


class Admission:
    """`capacity`: sequences in all. `per_client`: of one client. clock: as time.monotonic."""

    def __init__(self, capacity: int, per_client: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity, self.per_client, self._clock = capacity, per_client, clock
        self._held = Counter[str]()  # places by client
        self._ends: deque[tuple[float, str]] = deque(maxlen=MOST_ENDS)  # when places became free, and whose
        self._since = 0.0  # when the server began to be busy

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
            raise self._refusal(f"the queue is full ({active} of {self.capacity})", self.retry_after(missing))
        held = self._held[client]
        if (missing := held + sequences - self.per_client) > 0:
            message = f"the queue has {held} sequences of this client, and holds {self.per_client}"
            raise self._refusal(message, self.retry_after(missing, client))
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

    def retry_after(self, missing: int, client: str | None = None) -> int:
        """Seconds until so many places will be free, at the rate at which they lately became free; of one client, if given."""
        now = self._clock()
        begin = max(self._since, now - WINDOW)
        if len(self._ends) == MOST_ENDS:  # older ones are not known
            begin = max(begin, self._ends[0][0])
        ends = sum(at >= begin and client in (None, name) for at, name in self._ends)
        return min(LONGEST_RETRY, max(1, math.ceil(missing * (now - begin) / max(ends, 1))))

    def _leave(self, client: str) -> None:
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._ends.append((self._clock(), client))

    @staticmethod
    def _refusal(message: str, seconds: int) -> ApiError:
        return ApiError(429, f"{message}; try again in {seconds} s", None, "queue_full", {"retry-after": str(seconds)})


class Unread:
    """Bytes of answers that are in memory until their clients have read them. `most`: of all; one client has UNREAD_SHARE of it."""

    def __init__(self, most: int = UNREAD_BYTES) -> None:
        self._most = most
        self._held = Counter[str]()  # by client

    @contextmanager
    def hold(self, client: str, size: int) -> Iterator[None]:
        """Take `size` bytes until the end of the `with` block. Raises a 429 if there is no room now, and a 400 if there never is."""
        share = self._most // UNREAD_SHARE
        if size > share:
            message = f"the answer has {size} bytes, but the server keeps {share} for a client; send fewer inputs at once"
            raise bad(None, message, "too_many_inputs")
        if self._held[client] + size > share or self._held.total() + size > self._most:
            message = "too many embeddings are computed or wait to be read; read the answers to earlier requests first"
            raise ApiError(429, message, None, "queue_full")
        self._held[client] += size
        try:
            yield
        finally:
            self._held[client] -= size
            if not self._held[client]:
                del self._held[client]
