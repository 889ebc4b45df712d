"""How many bytes of bodies a process holds. Standard library only, because the gateway of replicas imports this."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 4  # one client may have a quarter


class Full(Exception):
    """There is no room for the body now."""


class Bodies:
    """Bytes of the bodies whose requests have no answer yet, and of those that are still arriving."""

    def __init__(self, most: int, largest: int, free: int = 0) -> None:
        """most: bytes of all bodies. largest: bytes of one body; all, and a client, may always have as many. free: bytes at the
        start of each body that do not count, so that there is always room for short ones."""
        self._most, self._share, self._free = max(most, largest), max(most // SHARE, largest), free
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
            if self._held[client] + size > self._share:
                raise self._full(self._share, " of one client")
            if self.held + size > self._most:
                raise self._full(self._most, "")
            self._held[client] += size
            taken += size

        try:
            yield take
        finally:
            self._held[client] -= taken
            if not self._held[client]:
                del self._held[client]

    def _full(self, size: int, whose: str) -> Full:
        return Full(f"requests without an answer have {size >> 20} MiB of bodies{whose}, the most at once; try again soon")
