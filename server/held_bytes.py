"""How many bytes a process holds for its clients. Standard library only, because the gateway of replicas imports this."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 4  # one client may have a quarter


class Full(Exception):
    """There is no room for so many bytes now."""


class HeldBytes:
    """Bytes of what requests hold in memory: their bodies, for example, until they have their answers."""

    def __init__(self, most: int, largest: int, free: int = 0) -> None:
        """most: bytes of all requests. largest: bytes of one; all, and a client, may always have as many. free: the first bytes of
        each request, which do not count, so that there is always room for short ones."""
        self._most, self.share, self._free = max(most, largest), max(most // SHARE, largest), free
        self._held = Counter[str]()  # by client

    @property
    def held(self) -> int:
        """Bytes of all clients."""
        return self._held.total()

    @contextmanager
    def hold(self, client: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes bytes until the end of the `with` block. It raises Full if they do not fit."""
        free, taken = self._free, 0

        def take(size: int) -> None:
            nonlocal free, taken
            uncounted = min(size, free)
            free -= uncounted
            size -= uncounted
            if not size:
                return
            if self._held[client] + size > self.share:
                raise _full(self.share, " of one client")
            if self.held + size > self._most:
                raise _full(self._most, "")
            self._held[client] += size
            taken += size

        try:
            yield take
        finally:
            self._held[client] -= taken
            if not self._held[client]:
                del self._held[client]


def _full(size: int, whose: str) -> Full:
    return Full(f"requests{whose} without an answer may hold at most {size >> 20} MiB; try again soon")
