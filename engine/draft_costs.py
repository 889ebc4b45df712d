"""Measures at the start what steps and drafts cost, as `Speculation` needs to know it: the same numbers on all ranks."""

import random
import time
from collections.abc import Callable
from functools import partial

from engine.draft_models import Chains
from engine.drafts import Costs
from engine.runner import Runner
from engine.suffix_automaton import SuffixAutomaton
from tp import World

Case = tuple[Callable[[int], float], int]  # a function of a number, and the largest number that it takes
MEASURED_ROWS = 1, 4, 16, 64, 256  # of steps
MEASURED_SECONDS = 0.5  # for which a table is measured, about; larger numbers are then extrapolated
ROUNDS = 3, 20  # of a measurement, at least and at most; the fastest counts
MEASURED_APART = 4  # sequences of a step, of which one has a draft
INDEXED = 256  # tokens of a text that is indexed to measure how long a token takes


def measure(runner: Runner, chains: Chains | None, max_model_len: int, world: World) -> Costs:
    """What steps and the drafts of a model cost. Collective."""
    capacity = runner.capacity
    cases: dict[str, Case] = {"steps": (runner.seconds, min(capacity.draws, capacity.tokens, max_model_len))}
    if chains is not None:
        cases["links"] = chains.seconds, min(capacity.sequences, capacity.tokens)
        cases["prompts"] = partial(chains.seconds, 1, 1), min(capacity.tokens - 1, max_model_len - 2)  # sees one more
    count = min(MEASURED_APART, capacity.sequences, capacity.tokens - 1)
    if runner.graphs is None and count > 1:  # a GPU's kernels compute all rows alike
        cases["apart"] = lambda n: runner.seconds(count + n - 1, count), 2  # without a draft, and with one
    host, indexing = world.largest([min(cost() for _ in range(ROUNDS[0])) for cost in (runner.host_seconds, indexing_seconds)])
    found = dict(zip(cases, fastest_seconds([*cases.values()], world), strict=True))
    apart = found["apart"][2] - found["apart"][1] if "apart" in found else 0.0
    return Costs(found["steps"], found.get("links"), found.get("prompts"), host, indexing, max(0.0, apart))


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
