"""Answers that are kept for a while: in memory, for bounded time, number and bytes. Only their owner finds them.

A conversation is kept as the items of all its turns. Turns share the JSON of the items before them, so a turn costs only what it
adds, and the deletion of an earlier answer takes nothing from a later one.
"""

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any, Protocol

from server.http import to_json

RECORD_BYTES = 1024  # that a record takes apart from its data
LINK_BYTES = 8  # that it takes for each turn before
LARGEST_SHARE = 4  # one answer may take a quarter of all, and so may those of one owner that are computed in the background
RUNNING_SHARE = 2  # all of these may take half: nothing can be dropped for them, so they would drive out what others have


@dataclass(frozen=True)
class StoreBounds:
    seconds: float
    answers: int
    bytes: int


@dataclass(eq=False)
class Items:
    """The JSON list of a turn's input items or output items. `places`: of output items in `data`, by their ids, to which requests may
    refer. `users`: records that have it."""

    data: bytes
    places: dict[str, slice] = field(default_factory=dict)
    users: int = 0

    @classmethod
    def of_output(cls, items: Sequence[dict[str, Any]]) -> "Items":
        parts = [to_json(item) for item in items]
        ends = list(accumulate((len(part) + 1 for part in parts), initial=1))
        places = {item["id"]: slice(at, at + len(part)) for item, part, at in zip(items, parts, ends, strict=False)}
        return cls(b"[" + b",".join(parts) + b"]", places)


class Running(Protocol):
    def json(self) -> bytes:
        """The response as it is now."""

    async def cancel(self) -> None:
        """End it, and wait until it has ended."""


@dataclass(eq=False)
class Record:
    """One answer. `input`: the items of all turns before it and of its own. `running`: what computes it in the background."""

    id: str
    answer: bytes  # JSON; empty while it is computed
    input: list[Items]
    output: Items | None = None
    background: bool = False
    running: Running | None = None
    too_large: bool = False  # to be kept: the id alone is
    since: float = 0.0  # when it was kept

    @property
    def json(self) -> bytes:
        return self.running.json() if self.running else self.answer

    @property
    def size(self) -> int:
        """Bytes that it takes alone."""
        return RECORD_BYTES + LINK_BYTES * len(self.items) + len(self.answer)

    @property
    def whole(self) -> int:
        """Bytes with those that it shares with others."""
        return self.size + sum(len(items.data) for items in self.items)

    @property
    def items(self) -> list[Items]:
        return [*self.input, self.output] if self.output else self.input


@dataclass
class _Owner:
    records: dict[str, Record] = field(default_factory=dict)  # the oldest first
    outputs: dict[str, Items] = field(default_factory=dict)  # by the ids of their items
    bytes: int = 0

    @property
    def amounts(self) -> tuple[int, int]:
        return len(self.records), self.bytes


class Store:
    """clock: as time.monotonic."""

    def __init__(self, bounds: StoreBounds, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds, self._clock = bounds, clock
        self._owners: dict[str, _Owner] = {}
        self._ages: dict[Record, str] = {}  # owners, by all records, the oldest first
        self._totals = [0, 0]  # of records and bytes
        self._rankings: list[list[tuple[int, str]]] = [[], []]  # by records and by bytes: the owners, who has most last

    def put(self, owner: str, record: Record) -> bool:
        """Keep an answer, or replace what was kept of it. The oldest ones of who has most go. False if it is too large."""
        self.remove(owner, record.id)
        if not self.fits(record):
            return False
        record.since = self._clock()
        self._count(owner, record, 1)
        self._ages[record] = owner
        self._make_room()
        return True

    def find(self, owner: str, id: str) -> Record | None:
        self._expire()
        held = self._owners.get(owner)
        return held.records.get(id) if held else None

    def items(self, owner: str, ids: Iterable[str]) -> dict[str, bytes]:
        """The JSON of those output items of kept answers that are there, by their ids."""
        self._expire()
        outputs = self._owners[owner].outputs if owner in self._owners else {}
        return {id: outputs[id].data[outputs[id].places[id]] for id in ids if id in outputs}

    def remove(self, owner: str, id: str) -> Record | None:
        held = self._owners.get(owner)
        if record := held.records.get(id) if held else None:
            self._count(owner, record, -1)
            del self._ages[record]
        return record

    def running(self, owner: str) -> int:
        """The number of the owner's answers that are computed in the background."""
        held = self._owners.get(owner)
        return sum(record.running is not None for record in held.records.values()) if held else 0

    def fits(self, record: Record) -> bool:
        """Whether it is not too large to be kept."""
        return record.whole * LARGEST_SHARE <= self._bounds.bytes

    def has_room(self, owner: str, record: Record) -> bool:
        """Whether an answer may be computed in the background besides those that are now."""
        running = [(name, one.whole) for one, name in self._ages.items() if one.running is not None]
        own = sum(size for name, size in running if name == owner) + record.whole
        total = sum(size for _, size in running) + record.whole
        return own * LARGEST_SHARE <= self._bounds.bytes and total * RUNNING_SHARE <= self._bounds.bytes

    def _count(self, owner: str, record: Record, sign: int) -> None:
        """Add a record to what its owner has (1), or take it away (-1)."""
        held = self._owners.pop(owner, _Owner())
        for i, amount in enumerate(held.amounts if held.records else ()):
            self._totals[i] -= amount
            del self._rankings[i][bisect_left(self._rankings[i], (amount, owner))]
        held.bytes += sign * record.size
        for items in record.items:
            if items.users == (sign < 0):  # the first one that has them comes, or the last one goes
                held.bytes += sign * len(items.data)
                for id in items.places:
                    held.outputs.pop(id, None)
                if sign > 0:
                    held.outputs |= dict.fromkeys(items.places, items)
            items.users += sign
        if sign > 0:
            held.records[record.id] = record
        else:
            del held.records[record.id]
        if held.records:
            self._owners[owner] = held
        for i, amount in enumerate(held.amounts if held.records else ()):
            self._totals[i] += amount
            insort(self._rankings[i], (amount, owner))

    def _make_room(self) -> None:
        """Drop the oldest finished answer of the owner who has most, as often as necessary and possible."""
        self._expire()
        for i, most in enumerate((self._bounds.answers, self._bounds.bytes)):
            while self._totals[i] > most and (victim := self._victim(i)):
                self.remove(*victim)

    def _victim(self, i: int) -> tuple[str, str] | None:
        ranked = ((owner, one) for _, owner in reversed(self._rankings[i]) for one in self._owners[owner].records.values())
        return next(((owner, one.id) for owner, one in ranked if one.running is None), None)

    def _expire(self) -> None:
        oldest = self._clock() - self._bounds.seconds
        old = list(takewhile(lambda record: record.since < oldest, self._ages))
        for record in old:
            if record.running is None:
                self.remove(self._ages[record], record.id)
