"""The pace against a simulated device: it hardly waits, and requests wait less than if every step was prepared at once."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.pace import Pace
from engine.runner import InFlightStep
from engine.sequence import Chunk

HIDDEN = torch.zeros(1, 1)


@dataclass
class Device:
    """Runs steps one after the other. A launch takes the host some time, and of another rank longer."""

    busy_until: float = 0.0
    idle: float = 0.0
    ends: dict[int, float] = field(default_factory=dict)

    def launch(self, step: InFlightStep, now: float, late: float, seconds: float) -> None:
        begin = max(now + late, self.busy_until)
        self.idle += max(0.0, now + late - self.busy_until)
        self.busy_until = self.ends[id(step)] = begin + seconds


@dataclass
class Case:
    """Steps of a prompt are `heavier` than others, one in `every`; hosts need `host` seconds, other ranks `late` more."""

    decode: float
    heavier: float
    every: int
    host: float
    late: float
    noise: float


def run(case: Case, seed: int, paced: bool, steps: int = 3000) -> tuple[float, float]:
    """The share of the time for which the device waited, and the mean seconds from a request's arrival to the begin of its step."""
    rng, clock = random.Random(seed), [0.0]
    pace, device = Pace(lambda: clock[0]), Device()
    sequence: Any = None
    waits: list[float] = []
    arrival, ahead, warm = 0.0, None, 500
    measured_from = idle_before = 0.0
    for number in range(steps):
        if number == warm:
            measured_from, idle_before = clock[0], device.idle
        clock[0] += pace.pause() + rng.random() * 5e-5 if paced else 0.0
        arrived = arrival <= clock[0]
        prompt = rng.random() < 1 / case.every
        length = rng.choice([500, 1000, 2000]) if prompt else 0
        chunks = [Chunk(sequence, 100 + number % 400, 1, True, False)]
        chunks += [Chunk(sequence, 0, length, True, True)] if prompt else []
        step = InFlightStep(chunks, chunks, HIDDEN, False, launches=("prefill", length) if prompt else ("decode", 1))
        seconds = case.decode * (1 + number % 400 / 4000) + case.heavier * length / 1000
        clock[0] += case.host * rng.uniform(0.7, 1.3)
        device.launch(step, clock[0], case.late * rng.random(), seconds * (1 + case.noise * rng.gauss(0, 1)))
        step.launched = clock[0]
        if arrived:
            if number >= warm:
                waits.append(device.ends[id(step)] - seconds - arrival)
            arrival = clock[0] + rng.expovariate(1 / (5 * case.decode))
        if ahead is not None:
            end = device.ends[id(ahead)]
            ahead.ended = end if end > clock[0] else None
            clock[0] = max(clock[0], end)
            pace.follow(ahead, step)
            clock[0] += 1e-4
        ahead = step
    return (device.idle - idle_before) / (clock[0] - measured_from), sum(waits) / len(waits)


@pytest.mark.parametrize("decode", [0.002, 0.006, 0.018])
@pytest.mark.parametrize("every", [4, 1000])
def test_the_device_hardly_waits_and_requests_wait_less(decode: float, every: int, seed: int) -> None:
    case = Case(decode, heavier=4 * decode, every=every, host=0.0006, late=0.0003, noise=0.003)
    (idle, wait), (idle_at_once, wait_at_once) = (run(case, seed, paced) for paced in (True, False))
    assert idle < 0.001 and idle_at_once == 0
    assert wait < 0.95 * wait_at_once


@pytest.mark.parametrize("late", [0.002, 0.004])
@pytest.mark.parametrize("noise", [0.003, 0.03])
def test_it_makes_way_for_late_ranks(late: float, noise: float, seed: int) -> None:
    case = Case(decode=0.006, heavier=0.024, every=1000, host=0.0006, late=late, noise=noise)
    (idle, wait), (_, wait_at_once) = (run(case, seed, paced) for paced in (True, False))
    assert idle < 0.01
    assert wait < 1.05 * wait_at_once


class Decoding:
    """Steps of 6 ms, one after the other, of a host that needs 0.6 ms for each."""

    def __init__(self, seed: int) -> None:
        self.now, self.rng = 0.0, random.Random(seed)
        self.pace, self.device = Pace(lambda: self.now), Device()

    def run(self, held_up: Mapping[int, float]) -> list[float]:
        """The pauses of 400 steps. held_up: the seconds by which some take longer."""
        before, pauses = None, []
        for number in range(400):
            pauses.append(self.pace.pause())
            self.now += pauses[-1] + 0.0006
            step = InFlightStep([], [], HIDDEN, False, launches=("decode", 1), launched=self.now)
            self.device.launch(step, self.now, 0.0, 0.006 + held_up.get(number, 0.0))
            if before is not None:
                end = self.device.ends[id(before)]
                before.ended = end if end > self.now else None
                self.now = max(self.now, end)
                self.pace.follow(before, step)
            before = step
        assert before is not None
        self.pace.follow(before, None)
        self.pace.rest()
        return pauses


def test_a_step_that_was_held_up_is_not_waited_for(seed: int) -> None:
    """The first step of a case compiles; later ones may have been stopped."""
    decoding = Decoding(seed)
    pauses = decoding.run({0: 1.0} | {decoding.rng.randrange(2, 400): 1.0 for _ in range(20)})
    assert max(pauses) < 0.006


@pytest.mark.parametrize("held_up", range(1, 7))
def test_one_late_step_does_not_make_the_next_ones_late(held_up: int, seed: int) -> None:
    """Whichever is held up, and for however long."""
    decoding = Decoding(seed)
    pauses = decoding.run({held_up: 10 ** decoding.rng.uniform(-3, 0)})
    assert decoding.device.idle < 0.008  # the first launch, and at most one of the others
    assert sum(pause > 0.003 for pause in pauses[200:]) > 160


def test_an_idle_time_is_not_what_the_host_needs(seed: int) -> None:
    decoding = Decoding(seed)
    decoding.run({})
    decoding.pace.pause()
    decoding.now += 1.0  # requests come
    assert sum(pause > 0.003 for pause in decoding.run({})) > 320


def test_nothing_is_waited_for_where_no_step_runs() -> None:
    pace = Pace(lambda: 1.0)
    step = InFlightStep([], [], HIDDEN, False, launched=0.9, ended=1.0)
    pace.pause()
    for after in (None, InFlightStep([], [], HIDDEN, False, launched=0.95)):
        pace.follow(step, after)
        assert pace.pause() == 0
