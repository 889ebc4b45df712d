"""The choice of a ladder's schedules: the same on all ranks whatever their clocks say, measured once, and used by the steps."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import engine.schedules
from comm import GlooCommunicator, PendingAllReduce
from comm.interface import SCHEDULES, Communicator
from comm.table import Table
from engine.core import Engine, EngineLimits
from engine.graphs import Captured
from engine.schedules import LIMIT, Schedules
from model import Transformer
from tests.engine.test_engine import assert_same, config_of, load, random_model, random_submits, serve
from tests.engine.test_runner import Answer, as_on_a_gpu
from tests.support.ranks import Ranks
from tp import World
from training.export import save_checkpoint


def measured(world: World, times: list[list[list[float]]], spent: float = 0.0) -> tuple[list[str], list[int], list[str]]:
    """times: by case, rank and schedule, in seconds. For each case, the schedule of the step that was kept, the number of measured
    steps, and the schedule that the communicator then uses."""
    prepared: list[str] = []
    counts, kept, used = [], [], []

    def prepare() -> Captured:
        schedule = world.comm.schedule
        prepared.append(schedule)
        return Captured(lambda: None, schedule)

    for case, by_rank in enumerate(times):
        clock = iter(by_rank[world.rank])
        timer = lambda call, count, clock=clock: [next(clock)] * count  # noqa: E731
        schedules = Schedules(world.comm, world, Table("overlap", {}), SCHEDULES, timer, spent=spent)
        for _ in range(2):  # the second time it is known
            kept.append(schedules.fastest(f"decode {case}", prepare).output)
        counts.append(len(prepared))
        used.append(world.comm.schedule)
        world.comm.use("overlapped")
        schedules.use(f"decode {case}")
        assert world.comm.schedule == used[-1] == kept[-1] == kept[-2] and not schedules.is_open(f"decode {case}")
        prepared.clear()
    return kept[::2], counts, used


@pytest.mark.parametrize("n", [2, 4])
def test_all_ranks_choose_what_is_fastest_on_the_slowest(n: int, ranks: Ranks, seed: int) -> None:
    times = [[[random.random() for _ in SCHEDULES] for _ in range(n)] for _ in range(8)]
    expected = [SCHEDULES[min(range(3), key=lambda i: max(rank[i] for rank in case))] for case in times]
    for kept, counts, used in ranks.run(n, measured, times):
        assert kept == used == expected, f"seed {seed}"
        assert counts == [4] * 8, "each schedule once, and what is known once"


def test_after_the_limit_steps_use_the_default(ranks: Ranks, seed: int) -> None:
    for kept, counts, _ in ranks.run(2, measured, [[[3.0, 2.0, 1.0]] * 2], LIMIT):
        assert kept == ["overlapped"] and counts == [2]


@pytest.mark.parametrize("variant", ["standard", "parallel", "upper-bound", "ladder"])
def test_nothing_is_measured_without_a_ladder_on_several_ranks(variant: str) -> None:
    model = random_model(config_of(variant))
    world = World(0, 1 if variant == "ladder" else 2, torch.device("cpu"), model.comm)
    assert not Schedules.of(model, world).is_open("decode 1")
    assert model.comm.schedule == "overlapped"


def test_a_forced_schedule_is_not_measured() -> None:
    model = random_model(config_of("ladder"))
    schedules = Schedules.of(model, World(0, 2, torch.device("cpu"), model.comm, overlap="deferred"))
    assert model.comm.schedule == "deferred"
    assert not schedules.is_open("decode 1")


def test_the_choices_in_words() -> None:
    chosen = {"decode 64": "deferred", "prefill 16": "few-sms", "decode 1": "overlapped", "decode 8": "overlapped"}
    schedules = Schedules(Communicator, World(0, 1, torch.device("cpu"), Communicator), Table("", {}), SCHEDULES, chosen=chosen)  # type: ignore[arg-type]
    assert str(schedules) == "decode 1 to 8 overlapped, decode 64 deferred, prefill 16 few-sms"


# --- in the engine -----------------------------------------------------------------------------------------------------------


class Counting(GlooCommunicator):
    """Counts the all-reduces that begin, by the schedule and whether they are overlapped."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: Counter[tuple[str, bool]] = Counter()

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        self.begun[self.schedule, overlap] += 1
        return super().begin_all_reduce(partial, overlap)


def invented(rank: int, model: Transformer) -> Callable[[Callable[[], object], int], list[float]]:
    """Seconds of a step that make each schedule the fastest for some sizes, and on each rank another one by a little."""

    def timer(call: Callable[[], object], count: int) -> list[float]:
        call()
        place = SCHEDULES.index(model.comm.schedule)
        return [1 + (place + len(MEASURED)) % 3 + 0.1 * ((place + rank) % 3)] * count

    return timer


MEASURED: list[str] = []


def rank_serves(world: World, directory: Path, overlap: str, submits: Any, seed: int) -> tuple[Any, ...]:
    """The answers; the choices; and the all-reduces of a decode step of one row."""
    random.seed(seed)  # so that either all ranks capture all graphs before, or none does
    MEASURED.clear()
    world = replace(world, comm=Counting(), overlap=overlap)
    model = load(world, directory)
    agree = Schedules._agree

    def agreed(self: Schedules, case: str, *more: Any) -> None:
        agree(self, case, *more)
        MEASURED.append(case)

    of = Schedules.of

    def invented_of(model: Transformer, world: World) -> Schedules:
        return replace(of(model, world), timer=invented(world.rank, model))

    with as_on_a_gpu(), patch.object(engine.schedules.Schedules, "_agree", agreed):
        with patch.object(engine.schedules.Schedules, "of", invented_of):
            limits = EngineLimits(max_num_seqs=5, max_batch_tokens=24, kv_memory=1e6, block_size=8)
            made = Engine(model, None, limits, world)
        made.runner.capture()
        answers: dict[str, Answer] = serve(made, submits, 2)
        world.comm.begun.clear()  # type: ignore[attr-defined]
        with torch.inference_mode():
            made.runner.graphs.replay(("decode", 1))  # type: ignore[union-attr]
    return answers, dict(made.runner.schedules.chosen), dict(world.comm.begun)  # type: ignore[attr-defined]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("name", "overlap"), [("ladder", "auto"), ("hybrid:2", "auto"), ("ladder", "deferred")])
def test_steps_use_what_was_chosen(name: str, overlap: str, n: int, ranks: Ranks, tmp_path: Path, seed: int) -> None:
    model = random_model(replace(config_of(name), n_kv_heads=4))
    save_checkpoint(model, tmp_path, torch.float32)
    submits = random_submits(5)
    results = ranks.run(n, rank_serves, tmp_path, overlap, submits, seed)
    for answers, chosen, begun in results:
        for submit in submits:
            assert_same(model, submit, answers[submit.request_id].tokens)
        assert chosen == results[0][1]
        assert set(chosen.values()) == (set(SCHEDULES) if overlap == "auto" else {"deferred"})
        hidden = 0 if chosen["decode 1"] == "deferred" else 8 if name == "ladder" else 5
        expected = {(chosen["decode 1"], True): hidden, (chosen["decode 1"], False): 9 - hidden}  # and the embedding's
        assert begun == {key: count for key, count in expected.items() if count}
