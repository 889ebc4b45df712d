"""How many bytes of answers wait in memory for clients that read slowly."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

BYTES = 1 << 30  # of all answers
SHARE = 4  # one client may have a quarter


@dataclass(eq=False)
class _Answer:
    close: Callable[[], None]
    bytes: int = 0
    closed: bool = False


class Backlog:
    """Beyond the bounds connections are closed, that of the answer first that has waited longest: of a client that exceeds its
    share, or else of the one that has most. So nobody's answers keep others from theirs. A client's only answer does not exceed
    its share."""

    def __init__(self, most: int = BYTES) -> None:
        """most: bytes of all answers."""
        self._most, self._share = most, most // SHARE
        self._answers: dict[str, dict[_Answer, None]] = {}  # by client: those that wait, the oldest first
        self._bytes = Counter[str]()  # by client

    @property
    def total(self) -> int:
        """Bytes of all answers."""
        return self._bytes.total()

    @contextmanager
    def hold(self, client: str, close: Callable[[], None]) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes of an answer until the end of the `with` block; negative ones have been read.

        close: closes the answer's connection. It is called while bytes of this or another answer are counted.
        """
        answer = _Answer(close)

        def count(size: int) -> None:
            if answer.closed:
                return
            self._add(client, answer, size)
            while size > 0 and (most := self._exceeding(client)) is not None:
                oldest = next(iter(self._answers[most]))
                self._add(most, oldest, -oldest.bytes)
                oldest.closed = True
                oldest.close()

        try:
            yield count
        finally:
            self._add(client, answer, -answer.bytes)

    def _add(self, client: str, answer: _Answer, size: int) -> None:
        if not size:
            return
        answer.bytes += size
        self._bytes[client] += size
        if answer.bytes:
            self._answers.setdefault(client, {})[answer] = None
        else:
            del self._answers[client][answer]
            if not self._answers[client]:
                del self._answers[client], self._bytes[client]

    def _exceeding(self, client: str) -> str | None:
        """The client whose answers are too many after one of `client` has grown."""
        if self._bytes[client] > self._share and len(self._answers.get(client, ())) > 1:
            return client
        return max(self._bytes, key=self._bytes.__getitem__) if self.total > self._most else None
