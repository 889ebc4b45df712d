"""The choice of a ladder's schedules: the same on all ranks whatever their clocks say, measured once, and used by the steps."""

import os
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

import comms.workspace
import engine.core
import engine.runner
import engine.schedules
import engine.step_inputs
from checkpoints.export import save_checkpoint
from comms import GlooCommunicator, PendingAllReduce
from comms.interface import LEAST_COPIED, SCHEDULES, Schedule
from comms.table import Table
from engine.core import Engine
from engine.limits import EngineLimits
from engine.paged_cache import PagedCache, PagedContext
from engine.protocol import SamplingParams
from engine.schedules import LIMIT, MOST_REPLAYS, TURNS, Captured, Schedules, table_key
from engine.sequence import Chunk, Sequence
from engine.step_inputs import INVENTED, Capacity, DecodeInputs, SpanInputs, Tables
from model import Transformer
from tests.engine.test_engine import assert_same, config_of, load, random_model, random_submits, serve
from tests.engine.test_runner import Answer, as_on_a_gpu
from tests.support.ranks import Ranks
from tp import World

Timed = list[tuple[str, int]]  # schedules, and how many replays were timed


def measured(
    world: World, times: list[list[list[float]]], spent: float = 0.0
) -> tuple[list[str], list[int], list[str], list[Timed]]:
    """times: by case, rank and schedule, in seconds. For each case, the schedule of the step that was kept, the number of prepared
    steps, the schedule that the communicator then uses, and what was timed."""
    prepared: list[str] = []
    counts, kept, used, timed = [], [], [], []

    def prepare() -> Captured:
        schedule = world.comm.schedule
        prepared.append(schedule)
        return Captured(lambda: None, schedule)

    for case, by_rank in enumerate(times, 1):
        own, turns = by_rank[world.rank], []

        def timer(call: Callable[[], object], count: int, own: list[float] = own, turns: Timed = turns) -> list[float]:
            turns.append((world.comm.schedule, count))
            # the turn in which the GPU lowers its clock does not count
            late = 1e-3 * len(turns) if len(turns) <= len(SCHEDULES) else 0.0
            return [own[SCHEDULES.index(world.comm.schedule)] + late] * count

        schedules = Schedules(world.comm, world, Table("overlap", {}), SCHEDULES, LEAST_COPIED, timer, spent=spent)
        for _ in range(2):  # the second time it is known
            kept.append(schedules.fastest(f"decode {case}", prepare, lambda: None).output)
        timed.append(turns)
        counts.append(len(prepared))
        used.append(world.comm.schedule)
        world.comm.use("overlapped")
        schedules.use(f"decode {case}")
        assert world.comm.schedule == used[-1] == kept[-1] == kept[-2] and not schedules.is_open(f"decode {case}")
        prepared.clear()
    return kept[::2], counts, used, timed


@pytest.mark.parametrize("n", [2, 4])
def test_all_ranks_choose_what_is_fastest_on_the_slowest(n: int, ranks: Ranks, seed: int) -> None:
    sizes = [10 ** random.uniform(-5, -1) for _ in range(8)]
    times = [[[size * random.uniform(1, 2) for _ in SCHEDULES] for _ in range(n)] for size in sizes]
    expected = []
    for case in times:
        slowest = [max(column) for column in zip(*case, strict=True)]
        better = [(time, name) for time, name in zip(slowest, SCHEDULES, strict=True) if time < 0.99 * slowest[0]]
        expected.append(min(better, default=(0.0, SCHEDULES[0]))[1])
    results = ranks.run(n, measured, times)
    for kept, counts, used, timed in results:
        assert kept == used == expected, f"seed {seed}"
        assert counts == [len(SCHEDULES) + 1] * 8, "each schedule once, and what is known once"
        assert timed == results[0][3], "the ranks must replay as often as each other"
        for turns in timed:
            assert [schedule for schedule, _ in turns] == [*SCHEDULES] * TURNS
            assert all(1 <= count <= MOST_REPLAYS for _, count in turns)


@pytest.mark.parametrize(("gain", "found"), [(0.0, "overlapped"), (0.009, "overlapped"), (0.011, "deferred")])
def test_another_schedule_must_be_faster_by_1_percent(gain: float, found: str, ranks: Ranks) -> None:
    times = [[[1.0, 2.0, 1.0 - gain, 2.0]] * 2]
    assert all(kept == [found] for kept, *_ in ranks.run(2, measured, times))


def test_after_the_limit_steps_use_the_default(ranks: Ranks, seed: int) -> None:
    for kept, counts, *_ in ranks.run(2, measured, [[[3.0, 2.0, 1.0, 2.0]] * 2], LIMIT):
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


def key_with(world: World, environment: dict[str, str]) -> tuple[dict[str, str], ...]:
    """The keys on two GPUs that could address each other: without the environment, and with it on rank 1."""
    model, there = random_model(config_of("ladder")), replace(world, device=torch.device("cuda", world.rank))
    with (
        patch.object(comms.workspace, "_reaches", lambda *_: True),
        patch.object(engine.schedules, "machine_key", lambda *_: {}),
    ):
        without = table_key(model, there, "auto")
        with patch.dict(os.environ, environment if world.rank else {}):
            return without, table_key(model, there, "auto")


@pytest.mark.parametrize(
    ("environment", "links"), [({}, "peer"), ({"NCCL_P2P_DISABLE": "1"}, "host"), ({"NCCL_HOSTID": "another"}, "2 hosts")]
)
def test_times_over_other_links_are_not_used(environment: dict[str, str], links: str, ranks: Ranks, seed: int) -> None:
    for without, found in ranks.run(2, key_with, environment):
        assert without["links"] == "peer" and found["links"] == links
        assert (found == without) == (not environment)


def test_the_choices_in_words() -> None:
    chosen: dict[str, Schedule] = {
        "decode 64": "deferred",
        "prefill 16": "few-sms",
        "decode 1": "overlapped",
        "decode 8": "overlapped",
    }
    assert str(tried(SCHEDULES, chosen)) == "decode 1 to 8 overlapped, decode 64 deferred, prefill 16 few-sms"


def test_copy_engines_are_tried_where_messages_are_long() -> None:
    few = tuple(schedule for schedule in SCHEDULES if schedule != "copy-engines")
    assert [tried(SCHEDULES)._candidates(f"prefill {rows}") for rows in (7, 8)] == [few, SCHEDULES]
    assert tried(("copy-engines",))._candidates("prefill 7") == ("copy-engines",)


def tried(possible: tuple[Schedule, ...], chosen: dict[str, Schedule] | None = None) -> Schedules:
    """Of a model whose all-reduces have an eighth of LEAST_COPIED for each row."""
    comm = GlooCommunicator.__new__(GlooCommunicator)
    world = World(0, 1, torch.device("cpu"), comm)
    return Schedules(comm, world, Table("", {}), possible, LEAST_COPIED // 8, chosen=chosen or {})


# --- in the engine -----------------------------------------------------------------------------------------------------------


class Counting(GlooCommunicator):
    """Counts the all-reduces that begin, by the schedule and whether they are overlapped."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: Counter[tuple[str, bool]] = Counter()

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        self.begun[self.schedule, overlap] += 1
        return super().begin_all_reduce(partial, overlap)


class Recording(PagedContext):
    """Remembers the last step's context."""

    last: "Recording"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        Recording.last = self


def assert_plausible(context: PagedContext, before: Tensor) -> None:
    """The step attended with real rows, and left the cache as it was before."""
    cache, longest = context.cache, context.tables.shape[1] * context.cache.block_size
    assert torch.equal(cache.keys_values, before)
    assert (context.cache_rows < 0).all()
    assert ((context.tables >= 0) & (context.tables < cache.keys_values.shape[2])).all()
    lengths, rows = context.lengths.tolist(), len(context.positions)
    assert max(lengths) == min(INVENTED, longest, rows if context.starts is not None else INVENTED)
    if context.starts is None:
        assert min(lengths) == max(lengths) and context.positions.tolist() == [length - 1 for length in lengths]
        return
    starts = context.starts.tolist()
    assert starts[0] == 0 and starts[-1] == sum(lengths) == min(rows, longest * len(lengths))
    for start, length in zip(starts, lengths, strict=False):
        assert context.positions[start : start + length].tolist() == list(range(length))


def invented(rank: int, model: Transformer) -> Callable[[Callable[[], object], int], list[float]]:
    """Seconds of a step that make each schedule the fastest for some sizes, and on each rank another one by a little."""

    def timer(call: Callable[[], object], count: int) -> list[float]:
        before = Recording.last.cache.keys_values.clone()
        call()
        assert_plausible(Recording.last, before)
        place = SCHEDULES.index(model.comm.schedule)
        return [1 + (place + len(MEASURED)) % len(SCHEDULES) + 0.1 * ((place + rank) % 3)] * count

    return timer


MEASURED: list[str] = []


def rank_serves(world: World, directory: Path, overlap: str, largest_graph: int, submits: Any, seed: int) -> tuple[Any, ...]:
    """The answers; the choices; and the all-reduces of a decode step of one row."""
    random.seed(seed)  # so that either all ranks capture all graphs before, or none does
    MEASURED.clear()
    world = replace(world, comm=Counting(), overlap=overlap)
    model = load(world, directory)
    measure = Schedules._measure

    def measure_and_count(self: Schedules, case: str, *more: Any) -> None:
        measure(self, case, *more)
        MEASURED.append(case)

    of = Schedules.of

    def invented_of(model: Transformer, world: World, kv_dtype: str) -> Schedules:
        return replace(of(model, world), timer=invented(world.rank, model))

    with (
        as_on_a_gpu(),
        patch.object(Schedules, "_measure", measure_and_count),
        patch.object(engine.step_inputs, "PagedContext", Recording),
        patch.object(engine.runner, "LARGEST_GRAPH", largest_graph),
    ):
        with patch.object(Schedules, "of", invented_of):
            limits = EngineLimits(max_num_seqs=5, max_batch_tokens=24, kv_memory=1e6, block_size=8)
            made = Engine(model, None, limits, world)
        answers: dict[str, Answer] = serve(made, submits, 2)  # if nothing was captured yet, with measurements between the steps
        made.runner.capture()
        answers |= {f"again {name}": answer for name, answer in serve(made, submits, 2).items()}
        world.comm.begun.clear()  # type: ignore[attr-defined]
        with torch.inference_mode():
            made.runner.graphs.replay(("decode", 1))  # type: ignore[union-attr]
    return answers, dict(made.runner.schedules.chosen), dict(world.comm.begun)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("place", "overlap"), [(0, "auto"), (1, "deferred")])
def test_steps_use_what_was_chosen(
    place: int, overlap: str, in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    name = in_turn(["ladder", "hybrid:2"], place)
    n = in_turn([2, 2, 4], place)
    largest_graph = in_turn([2048, 16, 16, 2048], place)  # larger steps run without a graph
    model = random_model(replace(config_of(name), n_kv_heads=4))
    save_checkpoint(model, tmp_path, torch.float32)
    submits = random_submits(4 if n == 2 else 1)  # each step of more ranks than cores is slow
    results = ranks.run(n, rank_serves, tmp_path, overlap, largest_graph, submits, seed)
    for answers, chosen, begun in results:
        for submit in submits:
            for answer in (answers[submit.request_id], answers[f"again {submit.request_id}"]):
                assert_same(model, submit, answer.tokens)
        assert chosen == results[0][1]
        # short messages
        assert set(chosen.values()) == (set(SCHEDULES) - {"copy-engines"} if overlap == "auto" else {"deferred"})
        hidden = 0 if chosen["decode 1"] == "deferred" else 8 if name == "ladder" else 5
        expected = {(chosen["decode 1"], True): hidden, (chosen["decode 1"], False): 9 - hidden}  # and the embedding's
        assert begun == {key: count for key, count in expected.items() if count}


class CacheSizedError(Exception):
    """An engine begins to size its KV cache."""


def used_before_the_cache(world: World, directory: Path) -> list[str]:
    """The schedules that an engine uses before it sizes its KV cache."""
    used: list[str] = []
    world = replace(world, comm=Counting())
    model = load(world, directory)
    with (
        patch.object(engine.core, "count_blocks", side_effect=CacheSizedError),
        patch.object(Counting, "use", lambda self, schedule: used.append(schedule)),
        pytest.raises(CacheSizedError),
    ):
        Engine(model, None, EngineLimits(max_num_seqs=2, max_batch_tokens=24, block_size=8), world)
    return used


def test_buffers_are_opened_before_the_cache_takes_the_memory(ranks: Ranks, tmp_path: Path) -> None:
    save_checkpoint(random_model(replace(config_of("ladder"), n_kv_heads=4)), tmp_path, torch.float32)
    for used in ranks.run(2, used_before_the_cache, tmp_path):
        assert set(used) == set(SCHEDULES)


# --- invented inputs ---------------------------------------------------------------------------------------------------------


def random_chunks(sequences: int, longest: int, tokens: int, blocks: int, block_size: int) -> list[Chunk]:
    """Chunks of random sequences, of at most so many tokens together."""
    chunks = []
    for i in range(random.randint(1, sequences)):
        stop = random.randint(1, longest)
        count = random.randint(1, min(stop, tokens))
        ids = [random.randrange(50) for _ in range(stop)]
        sequence = Sequence(str(i), ids, stop, SamplingParams(seed=i, temperature=0.5))
        sequence.blocks = [random.randrange(blocks) for _ in range(-(-stop // block_size))]
        chunks.append(Chunk(sequence, stop - count, count, True, True))
        tokens -= count
        if not tokens:
            break
    return chunks


def test_what_was_invented_does_not_reach_the_next_step(seed: int) -> None:
    for _ in range(30):
        with as_on_a_gpu():
            compare_with_fresh_inputs()


def test_a_step_with_drafts_leaves_no_rows_for_the_next_one() -> None:
    """They are those of its drafts, too."""
    inputs = DecodeInputs(Capacity(4, 16, 4, drafted=8), torch.device("cpu"))
    sequences = [Sequence("", [1, 2, 3], 3, SamplingParams(), blocks=[0]) for _ in range(2)]
    for draft, goes_on in (([], True), ([4, 5], False)):
        chunks = [Chunk(one, 2, 1 + len(draft), True, True, draft) for one in sequences]
        inputs.write(chunks)
        assert inputs.continues([Chunk(one, 3, 1, True, False) for one in sequences]) == goes_on


def test_behind_its_last_block_a_row_has_that_one(seed: int) -> None:
    """A CPU multiplies what it reads there by 0: a NaN of another sequence must not be there."""
    tables = Tables(5, 6, torch.device("cpu"))
    for _ in range(10):
        blocks = [random.sample(range(1, 50), random.randint(1, 6)) for _ in range(random.randint(1, 5))]
        tables.update(blocks)
        for row, own in zip(tables.mirror.device.tolist(), blocks, strict=False):
            assert row == own + own[-1:] * (6 - len(own))


def compare_with_fresh_inputs() -> None:
    sequences, tokens, width, size = (random.randint(1, most) for most in (9, 90, 12, 8))
    capacity = Capacity(sequences, tokens, width, drafted=random.choice([0, 5]))
    cache = PagedCache(1, random.randint(1, 40), size, 1, 4, torch.device("cpu"), torch.float32)
    chunks = random_chunks(sequences, width * size, tokens, cache.keys_values.shape[2], size)
    used = sum(chunk.count for chunk in chunks)
    rows = random.randint(used, capacity.rows)
    fresh, after = SpanInputs(capacity, torch.device("cpu")), SpanInputs(capacity, torch.device("cpu"))
    after.invent(rows, 50, cache)
    for inputs in (fresh, after):
        inputs.write(chunks, rows, size)
        inputs.write_draws(chunks)
    spans = min(rows, sequences)
    assert torch.equal(fresh.tokens(rows), after.tokens(rows))
    assert_same_context(fresh.context(rows, spans, cache, rows), after.context(rows, spans, cache, rows))
    for one, other in zip(fresh.draws(len(chunks)), after.draws(len(chunks)), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(fresh.drawing(capacity.draws), after.drawing(capacity.draws))

    chunks = [Chunk(chunk.sequence, chunk.stop - 1, 1, True, True) for chunk in chunks]
    first, second = DecodeInputs(capacity, torch.device("cpu")), DecodeInputs(capacity, torch.device("cpu"))
    second.write(chunks)
    second.tables.update([chunk.sequence.blocks for chunk in chunks])
    second.invent(random.randint(1, capacity.draws), 50, cache)
    second.clear()
    assert not second.continues(chunks)
    assert (second.context(capacity.draws, cache, width * size).cache_rows < 0).all() and (second.positions == -1).all()
    for inputs in (first, second):
        inputs.write(chunks)
        inputs.tables.update([chunk.sequence.blocks for chunk in chunks])
    assert_same_context(first.context(sequences, cache, 1), second.context(sequences, cache, 1))
    for name in ("tokens", "seed"):
        assert torch.equal(getattr(first, name)[: len(chunks)], getattr(second, name)[: len(chunks)])
    assert torch.equal(first.temperature(len(chunks)), second.temperature(len(chunks)))


def assert_same_context(one: PagedContext, other: PagedContext) -> None:
    """What a step sees, apart from the blocks after a sequence's end, which it does not read."""
    for name in ("positions", "cache_rows", "lengths", "starts"):
        a, b = getattr(one, name), getattr(other, name)
        assert a is b is None or torch.equal(a, b), name
    for length, row, same in zip(one.lengths.tolist(), one.tables, other.tables, strict=True):
        held = -(-length // one.cache.block_size)
        assert torch.equal(row[:held], same[:held])
