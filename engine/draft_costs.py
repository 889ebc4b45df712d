"""What steps and drafts cost (`Costs`), which is measured at the start: the same numbers on all ranks."""

import random
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import accumulate

from engine.model_drafter import ModelDrafter
from engine.runner import Runner
from engine.suffix_automaton import SuffixAutomaton
from tp import World

Points = tuple[tuple[int, float], ...]
Case = tuple[Callable[[int], float], int]  # a function of a number, and the largest number that it takes
MEASURED_ROWS = 1, 4, 16, 64, 256  # of steps
MEASURED_SECONDS = 0.5  # for which a table is measured, about; larger numbers are then extrapolated
ROUNDS = 3, 20  # of a measurement, at least and at most; the fastest counts
MEASURED_MIXED = 4  # sequences of a step, of which one has a draft
INDEXED = 256  # tokens of a text that is indexed to measure how long a token takes
LEAST_PRICE = 0.1  # tokens; a drafted row also takes time on the host
LEAST_GAIN = 0.05  # tokens of each sequence of a step with drafts: the work of the host that `Costs` does not contain


class Costs:
    """How long steps and drafts take, in seconds, by rows or by sequences. Fewer never take longer than was measured for more: if they
    did, the clock was disturbed. Prices are in tokens: one is the time in which a step computes a token without drafts."""

    def __init__(
        self,
        steps: Mapping[int, float],
        draft_steps: Mapping[int, float] | None = None,
        prompts: Mapping[int, float] | None = None,
        host_seconds: float = 0.0,
        indexing: float = 0.0,
        mixed: float = 0.0,
    ) -> None:
        """Each mapping has at least two numbers, in ascending order. Others are on the lines through these points.

        steps: by rows. draft_steps: a step of the draft model, by sequences. prompts: what the draft model takes to compute a prompt,
        by its tokens. None if no model drafts. host_seconds: what a step takes longer if it is not launched while the one before runs.
        indexing: a token of a text. mixed: what a step takes longer if only some of its sequences have drafts."""
        self._steps, self._draft_steps, self._prompts = map(_points, (steps, draft_steps, prompts))
        self.host_seconds, self.indexing, self.mixed = host_seconds, indexing, mixed

    def seconds(self, rows: int) -> float:
        """Of a step of so many rows."""
        return _on_lines(self._steps, rows)

    def prompt_seconds(self, tokens: int) -> float:
        """For which the draft model computes a prompt."""
        most, seconds = self._prompts[-1]  # the last two may be equal, and a prompt is far longer than they
        return max(_on_lines(self._prompts, tokens), seconds * tokens / most if tokens > most else 0.0)

    def token_seconds(self, rows: int) -> float:
        """In which a step of so many rows computes a token without drafts: the unit of the prices."""
        return self.seconds(rows) / rows

    def row_price(self, rows: int) -> float:
        """How many tokens a drafted row must bring in a step of so many other rows: the time that it adds, if each of the others
        has two drafted ones."""
        return max(LEAST_PRICE, (self.seconds(3 * rows) / self.seconds(rows) - 1) / 2)

    def draft_step_price(self, rows: int, sequences: int) -> float:
        """How many tokens a step of the draft model for so many sequences must bring in a step of so many other rows."""
        return _on_lines(self._draft_steps, sequences) / self.token_seconds(rows)

    def fixed_price(self, rows: int) -> float:
        """How many tokens drafts must bring to a step of so many other rows, because it is not launched ahead, mostly not all of its
        sequences have one, and for the host's work."""
        seconds = self.host_seconds + (self.mixed if rows > 1 else 0.0)
        return seconds / self.token_seconds(rows) + LEAST_GAIN * rows


def _points(seconds: Mapping[int, float] | None) -> Points:
    """Measured points, of which none is above a later one."""
    found = seconds or {1: 0.0, 2: 0.0}
    return tuple(zip(found, list(accumulate([*found.values()][::-1], min))[::-1], strict=True))


@lru_cache(maxsize=1 << 12)  # asked for the same numbers in each step
def _on_lines(points: Points, x: int) -> float:
    last = len(points) - 1
    i = next((i for i in range(1, last) if x <= points[i][0]), last)
    (first, before), (second, after) = points[i - 1], points[i]
    return before + (after - before) * (x - first) / (second - first)


FREE = Costs({1: 1.0, 2: 1.0})  # of steps, before they are measured


def measure(runner: Runner, drafter: ModelDrafter | None, max_model_len: int, world: World) -> Costs:
    """Measure what steps and drafts cost. drafter: None if no model drafts. Collective."""
    capacity = runner.capacity
    cases: dict[str, Case] = {"steps": (runner.seconds, min(capacity.draws, capacity.tokens, max_model_len))}
    if drafter is not None:
        cases["draft steps"] = drafter.seconds, min(capacity.sequences, capacity.tokens)
        cases["prompts"] = partial(drafter.seconds, 1, 1), min(capacity.tokens - 1, max_model_len - 2)  # sees one more
    count = min(MEASURED_MIXED, capacity.sequences, capacity.tokens - 1)
    if runner.graphs is None and count > 1:  # a GPU's kernels compute all rows alike
        cases["mixed"] = lambda n: runner.seconds(count + n - 1, count), 2  # without a draft, and with one
    host, indexing = world.largest([min(cost() for _ in range(ROUNDS[0])) for cost in (runner.host_seconds, indexing_seconds)])
    found = dict(zip(cases, fastest_seconds([*cases.values()], world), strict=True))
    mixed = found["mixed"][2] - found["mixed"][1] if "mixed" in found else 0.0
    return Costs(found["steps"], found.get("draft steps"), found.get("prompts"), host, indexing, max(0.0, mixed))


def indexing_seconds() -> float:
    """How long it takes to index a token of a text."""
    draw, text = random.Random(0), SuffixAutomaton()
    tokens = [draw.randrange(INDEXED // 4) for _ in range(INDEXED)]
    start = time.perf_counter()
    for token in tokens:
        text.append(token)
    return (time.perf_counter() - start) / INDEXED


def fastest_seconds(cases: list[Case], world: World) -> list[dict[int, float]]:
    """The seconds of each case for some numbers, of the slowest rank. All are called in turn, again and again, so that a disturbance
    meets all alike. Collective."""
    found = [dict[int, float]() for _ in cases]
    for times, (seconds, most) in zip(found, cases, strict=True):
        for n in sorted({min(n, max(2, most)) for n in MEASURED_ROWS}):
            if len(times) > 1 and ROUNDS[0] * sum(times.values()) > MEASURED_SECONDS:
                break
            [times[n]] = world.largest([seconds(n)])
    total = sum([sum(times.values()) for times in found])
    calls = [(seconds, n) for times, (seconds, _) in zip(found, cases, strict=True) for n in times]
    count = min(max(int(len(cases) * MEASURED_SECONDS / total), ROUNDS[0]), ROUNDS[1])
    fastest = iter(world.largest(list(map(min, *([seconds(n) for seconds, n in calls] for _ in range(count))))))
    return [{n: next(fastest) for n in times} for times in found]
