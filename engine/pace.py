"""When the host prepares the next step: as late as the device allows, so that requests that arrive until then are in it.

A step is launched while the one before runs. If it was prepared as soon as that one began, a request that came a moment later would
wait for the ends of both. So rank 0 waits before it receives events, and the other ranks wait for what it sends them.

It waits until a short time, the lead, is left of the running step. What a step takes is known from those that were launched without
a pause, of which there are some always. Steps that take less leave less time for the next launch, and steps that take longer after a
pause were launched late by some rank. Both make the lead longer. If a pause lasted until the step had ended, what such a step takes
is learned again.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import log2
from typing import NamedTuple

from engine.runner import InFlightStep

MARGIN = 0.0005  # seconds of the lead, always
LATE = 0.004  # seconds of the lead, at most, for ranks that are late
EVERY = 8  # of so many steps, one is launched without a pause
DECAY = 1 / 64  # of a peak's height above the newest value
GAIN = 1 / 8  # of one step that was late, in the lead
MOST = 0.1  # by which a step counts as longer than usual: it may have been held up

Case = tuple[tuple[str, int], int, int]  # steps that take about the same time


class Peak:
    """A maximum that forgets slowly."""

    def __init__(self) -> None:
        self.value = 0.0

    def see(self, value: float) -> None:
        self.value = max(value, self.value + (value - self.value) * DECAY)


@dataclass
class Kind:
    """Decode steps, or steps with prompts, whose times differ more. In seconds."""

    short: Peak = field(default_factory=Peak)  # by which steps are shorter than usual
    late: float = 0.0  # by which those after a pause are longer


def case_of(step: InFlightStep) -> Case:
    """What is launched, and the orders of magnitude of the keys that are read for single tokens and of the pairs of a query and a key
    of prompts: powers of the square root of 2."""
    read = sum([c.stop for c in step.chunks if c.count == 1])
    pairs = sum([c.count * c.stop for c in step.chunks if c.count > 1])
    return step.launches, round(2 * log2(1 + read)), round(2 * log2(1 + pairs))


class Running(NamedTuple):
    """The step that the device runs, since then, and whether its launch followed a pause."""

    step: InFlightStep
    case: Case
    since: float
    after_pause: bool


class Pace:
    """Of rank 0's steps in a server. Where nobody asks for a pause, on other ranks and in `LLM`, nothing is learned."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._first: dict[Case, float] = {}  # seconds of the first step of a case, which may have compiled something
        self._usual: dict[Case, float] = {}  # seconds
        self._kinds: dict[str, Kind] = defaultdict(Kind)
        self._host = Peak()  # seconds from a pause's end to the launch
        self._turn, self._resumed = 0, now()
        self.paused = 0.0  # seconds of the last pause
        self._running: Running | None = None

    def pause(self) -> float:
        """The seconds to wait before the next step is prepared, which is due now if none is running."""
        self._turn, self.paused = self._turn + 1, 0.0
        running = self._running
        if running is not None and running.case in self._usual and self._turn % EVERY:
            kind = self._kinds[running.case[0][0]]
            lead = self._host.value + kind.short.value + kind.late + MARGIN
            self.paused = max(0.0, running.since + self._usual[running.case] - lead - self._now())
        self._resumed = self._now() + self.paused
        return self.paused

    def follow(self, step: InFlightStep, after: InFlightStep | None) -> None:
        """`step` has ended. after: the step that was launched meanwhile."""
        if not self._turn:
            return
        if self._running is not None and self._running.step is step:
            self._learn(self._running)
            if after is not None:
                self._host.see(after.launched - self._resumed)
        self._running = None
        if after is not None and step.ended is not None:
            self._running = Running(after, case_of(after), max(step.ended, after.launched), self.paused > 0)

    def rest(self) -> None:
        """No step is running, or nobody needs its tokens."""
        self._running = None

    def _learn(self, ran: Running) -> None:
        step, case, since, after_pause = ran
        kind, usual = self._kinds[case[0][0]], self._usual.get(case)
        if step.ended is None:
            if self.paused:  # for longer than the step took
                self._first.pop(case, None)
                self._usual.pop(case, None)
                kind.short.see(kind.short.value + MARGIN)
            return
        seconds = step.ended - since
        if usual is None:
            if case in self._first:
                self._usual[case] = min(seconds, self._first[case])
            self._first[case] = seconds
            return
        change = min(seconds - usual, usual * MOST)
        kind.short.see(max(0.0, -change))
        if after_pause:
            kind.late = min(max(0.0, kind.late + change * GAIN), LATE)
        else:
            self._usual[case] += change / 2
