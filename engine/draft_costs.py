"""Measures at the start what steps and drafts cost, as `Speculation` needs to know it: the same numbers on all ranks."""

from collections.abc import Callable
from functools import partial

from engine.draft_models import Chains
from engine.drafts import Costs
from engine.runner import Runner
from tp import World

MEASURED_ROWS = 1, 4, 16, 64, 256  # of steps
MEASURED_SECONDS = 0.5  # for which a table is measured, about; larger numbers are then extrapolated
ROUNDS = 3, 20  # of a measurement, at least and at most; the fastest counts


def measure(runner: Runner, chains: Chains | None, max_model_len: int, world: World) -> Costs:
    """What steps and the drafts of a model cost. Collective."""
    capacity = runner.capacity
    cases: list[tuple[Callable[[int], float], int]] = [(runner.seconds, min(capacity.draws, capacity.tokens, max_model_len))]
    if chains is not None:
        cases.append((chains.seconds, min(capacity.sequences, capacity.tokens)))
        cases.append((partial(chains.seconds, 1, 1), min(capacity.tokens - 1, max_model_len - 2)))  # sees one more
    [host_seconds] = world.largest([min(runner.host_seconds() for _ in range(ROUNDS[0]))])
    steps, *of_chains = fastest_seconds(cases, world)
    links, prompts = of_chains or (None, None)
    return Costs(steps, links, prompts, host_seconds)


def fastest_seconds(cases: list[tuple[Callable[[int], float], int]], world: World) -> list[dict[int, float]]:
    """Of each case, a function and the largest number that it takes: its seconds for some numbers, of the slowest rank. All are
    called in turn, again and again, so that a disturbance meets all alike. Collective."""
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
