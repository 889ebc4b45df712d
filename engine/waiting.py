"""The order in which waiting sequences start: by priority, then fair between clients.

Of the clients that wait, the one is next that has the fewest running sequences for its weight. Among equals it is the one that
started the fewest for its weight lately: weighted round robin, with virtual start times as in start-time fair queueing (P. Goyal,
H. M. Vin, H. Cheng, 1996, section 2). A client's own sequences keep their order of arrival. The order depends on nothing but what
was added and removed, so that all ranks agree on it.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from engine.sequence import Sequence


@dataclass
class _Line:
    """The sequences of one client and priority."""

    started: float  # virtual time: grows by 1 / weight with each sequence that starts
    sequences: deque[Sequence] = field(default_factory=deque)


class _Level:
    """The sequences of one priority."""

    def __init__(self) -> None:
        self.lines: dict[str, _Line] = {}  # by client; none is empty
        self.now = 0.0  # the virtual time of the last start

    def __iter__(self) -> Iterator[Sequence]:
        return chain(*[line.sequences for line in self.lines.values()])

    def line(self, client: str) -> _Line:
        return self.lines.setdefault(client, _Line(self.now))

    def first(self, running: Iterable[Sequence]) -> Sequence:
        lines = iter(self.lines.values())
        best = next(lines).sequences[0]
        if len(self.lines) > 1:
            counts = Counter(s.turn.client for s in running)
            for line in lines:
                best = min(best, line.sequences[0], key=lambda s: self._precedence(s, counts))
        return best

    def _precedence(self, sequence: Sequence, counts: Mapping[str, int]) -> tuple[float, float]:
        turn = sequence.turn
        return counts[turn.client] / turn.weight, self.lines[turn.client].started

    def remove(self, sequence: Sequence, starts: bool) -> None:
        line = self.lines[sequence.turn.client]
        line.sequences.remove(sequence)
        if starts:
            self.now = max(self.now, line.started)
            line.started += 1 / sequence.turn.weight
        if not line.sequences:
            del self.lines[sequence.turn.client]


class WaitingQueue:
    """The waiting sequences. Iterates over them by priority, in no further order."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}  # by priority; none is empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return chain(*[self._levels[priority] for priority in sorted(self._levels)])

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that has just arrived."""
        self._level(sequence).line(sequence.turn.client).sequences.append(sequence)

    def add_again(self, sequence: Sequence) -> None:
        """Add a sequence that was preempted: it starts before all others of its client and priority."""
        line = self._level(sequence).line(sequence.turn.client)
        line.sequences.appendleft(sequence)
        line.started -= 1 / sequence.turn.weight

    def first(self, running: Iterable[Sequence]) -> Sequence | None:
        """The sequence that starts next."""
        return self._levels[min(self._levels)].first(running) if self._levels else None

    def start(self, sequence: Sequence) -> None:
        """Remove a sequence, because it starts."""
        self._remove(sequence, starts=True)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ends without a start."""
        self._remove(sequence, starts=False)

    def _level(self, sequence: Sequence) -> _Level:
        """The level to which a sequence is added."""
        self._count += 1
        return self._levels.setdefault(sequence.turn.priority, _Level())

    def _remove(self, sequence: Sequence, starts: bool) -> None:
        level = self._levels[sequence.turn.priority]
        level.remove(sequence, starts)
        self._count -= 1
        if not level.lines:
            del self._levels[sequence.turn.priority]
