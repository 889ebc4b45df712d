"""Turns: how much of a burst begins at once, and that nothing else waits for all of it."""

import asyncio
import random
from itertools import pairwise

import pytest

from server.connections import MOST_AT_ONCE, TURN_SECONDS, Turns


def begun_between_turns(costs: list[float], in_tasks: bool) -> list[int]:
    """How many had begun at each look of another task, if the one at index i takes costs[i] seconds, itself or in a task."""
    now, begun, looks = 0.0, list[int](), list[int]()

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def later(seconds: float) -> None:
        take(seconds)

    async def run() -> None:
        turns, tasks = Turns(lambda: now), set[asyncio.Task[None]]()

        def begin(i: int) -> None:
            begun.append(i)
            if in_tasks:
                tasks.add(asyncio.create_task(later(costs[i])))
            else:
                take(costs[i])

        for i in range(len(costs)):
            turns.call(lambda i=i: begin(i))  # type: ignore[misc]
        while len(begun) < len(costs):
            looks.append(len(begun))
            await asyncio.sleep(0)
        looks.append(len(begun))

    asyncio.run(asyncio.wait_for(run(), 60))
    assert begun == list(range(len(costs)))
    return looks


@pytest.mark.parametrize("in_tasks", [True, False])
def test_of_a_burst_so_many_begin_at_once_as_take_a_short_time(in_tasks: bool, seed: int) -> None:
    rng = random.Random(seed)
    long, short = [TURN_SECONDS * rng.uniform(1.1, 5) for _ in range(40)], [TURN_SECONDS / MOST_AT_ONCE / 2] * 400
    looks = begun_between_turns([*long, *short], in_tasks)
    parts = [after - before for before, after in pairwise([0, *looks]) if after > before]
    ends = [sum(parts[: i + 1]) for i in range(len(parts))]
    assert max(parts) <= MOST_AT_ONCE
    # as few as possible
    assert {part for part, end in zip(parts, ends, strict=True) if 2 * MOST_AT_ONCE <= end <= len(long)} == {1}
    assert parts[-2] == MOST_AT_ONCE  # as many as before, once they are short
    calm = [part for part, end in zip(parts, ends, strict=True) if end > len(long) + 1]
    assert all(after <= before + 1 for before, after in pairwise(calm)), calm


def test_what_comes_alone_begins_at_once() -> None:
    async def run() -> None:
        turns, begun = Turns(), list[int]()
        for i in range(3 * MOST_AT_ONCE):
            turns.call(lambda i=i: begun.append(i))  # type: ignore[misc]
            assert begun[-1] == i
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(run())
