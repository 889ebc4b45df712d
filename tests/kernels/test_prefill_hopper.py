"""The prefill kernel for Hopper: its source on a simulator and the kernel on a GPU, against fp64 and PyTorch; its schedule."""

import math
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import prefill_schedule as schedules
from kernels.paged_attention import paged_prefill, specialized
from kernels.prefill_schedule import prefill_schedule, prefill_schedule_reference
from tests.kernels.test_attention import Pages, Shape, prefill_faults, redraw
from tests.support.gluon_attention import Fault, load
from tests.support.gpus import needs_hopper
from tests.support.kernels import kernels_always
from tests.support.ranks import Ranks
from tests.support.replays import wrong_replays

SHAPES = [
    Shape(16, 2, 128, 16, None),
    Shape(7, 1, 64, 8, None),
    Shape(6, 3, 64, 32, None),
    Shape(2, 1, 256, 64, None),
    Shape(4, 4, 128, 256, None),
    Shape(16, 1, 64, 16, None),
]


def simulated(seed: int, replace: tuple[str, str] = ("", "")) -> Callable[..., Tensor]:
    """`paged_prefill` with the kernel on the simulator, its source changed by `replace`."""
    module = load("kernels.prefill_attention_hopper", seed, replace)

    def prefill(
        q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        out = torch.full_like(q, torch.nan)
        schedule = prefill_schedule_reference(starts, lengths, len(q), module.tokens_of_tile(q.shape[1] // keys.shape[2]))
        absent = schedule[:, 1] == 0
        schedule[absent, 2:] = torch.randint(1, 500, schedule[absent, 2:].shape).int()  # the kernel leaves these undefined
        scale = math.log2(math.e) / math.sqrt(q.shape[2])
        module.prefill(q, keys, values, tables, schedule, out, scale, random.randint(1, 4))
        return out

    return prefill


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_simulator(shape: Shape, seed: int) -> None:
    dtype = random.choice([torch.bfloat16, torch.float16])
    assert prefill_faults(simulated(seed), shape, 160, "cpu", dtype) == []


# a text of the kernel's source, and another one with which it is wrong
SEEDED = {
    "keys are released before they are multiplied": ("scores = warpgroup_mma_wait(1, (scores,))\n    mbarrier.arrive(k_free.index(slot))\n", "mbarrier.arrive(k_free.index(slot))\n    scores = warpgroup_mma_wait(1, (scores,))\n"),
    "one consumer releases keys": ("k_full, k_free = _barriers(STAGES, 1), _barriers(STAGES, 2)", "k_full, k_free = _barriers(STAGES, 1), _barriers(STAGES, 1)"),
    "scores do not wait for keys": ("    mbarrier.wait(k_full.index(slot), step // STAGES & 1)\n", ""),
    "values beyond the end are not cleared": ("if (used < BLOCK_N) & (used % LOADED != 0):", "if used < 0:"),
    "results are not fenced": ("            fence_async_shared()\n            mbarrier.arrive(q_free", "            mbarrier.arrive(q_free"),
    "queries see one key too few": ("keys[None, :] <= position", "keys[None, :] < position"),
    "no consumer begins": ("(turn & 1) ^ (1 - CONSUMER)", "turn & 1"),
    "the previous kernel": ("    tl.extra.cuda.gdc_wait()\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", [None, *SEEDED])
def test_the_simulator_finds(fault: str | None, seed: int) -> None:
    """Two key-value heads, sequences of several steps, some of which end within a block. The scores are so large that exponentials
    overflow without the maximum of a row. Faults that only delay the other consumer's turn are not found."""
    shape, starts, lengths = Shape(8, 4, 64, 32, None), [0, 200, 201, 270], [200, 650, 333]
    pages, kernel = Pages.of(shape, lengths, "cpu", torch.bfloat16), simulated(seed, SEEDED[fault] if fault else ("", ""))
    q = 100 * torch.randn(starts[-1], shape.n_heads, shape.head_dim).bfloat16()
    arguments = q, pages.keys, pages.values, pages.tables, torch.tensor(starts).int(), torch.tensor(lengths).int(), None, 200
    expected = paged_prefill(*arguments)
    try:
        right = all(torch.allclose(kernel(*arguments), expected, atol=2e-2, rtol=2e-2) for _ in range(3))
    except Fault:
        right = False
    assert right == (fault is None)


# --- the schedule -------------------------------------------------------------------------------------------------------------


def schedule_faults(seed: int, device: str) -> list[str]:
    random.seed(seed)
    found = []
    for _ in range(3):
        counts = random.choices([0, 1, random.randint(1, 300), 40], k=random.randint(1, 20))
        lengths = torch.tensor([n + random.choice([0, 16, random.randrange(400)]) for n in counts], dtype=torch.int32)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        arguments = sum(counts) + random.choice([0, 70]), random.choice([2, 16, 128])
        expected = prefill_schedule_reference(starts, lengths, *arguments)
        with kernels_always(schedules):
            got = prefill_schedule(starts.to(device), lengths.to(device), *arguments).cpu()
        exists = expected[:, 1] > 0
        same = torch.equal(got[:, 1], expected[:, 1]) and torch.equal(got[exists, :5], expected[exists, :5])
        found += [] if same else [f"{counts}, {lengths.tolist()}, {arguments}: {got[:, :5]}, not {expected[:, :5]}"]
    return found


def test_the_schedule_in_the_interpreter(interpreters: Ranks, seed: int) -> None:
    assert interpreters.call(schedule_faults, seed, "cpu") == []


def test_the_schedule_has_each_row_once_and_the_longest_tiles_first(seed: int) -> None:
    counts = random.choices(range(50), k=9)
    lengths = torch.tensor([n + random.randrange(100) for n in counts])
    starts, rows = torch.tensor([0, *counts]).cumsum(0), sum(counts) + 5
    table = prefill_schedule_reference(starts, lengths, rows, 8)
    tiles = table[table[:, 1] > 0].tolist()
    assert sorted(row for first, count, *_ in tiles for row in range(first, first + count)) == list(range(rows))
    work = [min(position + count, length) for _, count, position, length, *_ in tiles]
    assert work == sorted(work, reverse=True)
    for first, count, position, length, span, *_ in tiles:
        if length:
            assert position == lengths[span] - (starts[span + 1] - first)
            assert length == lengths[span] and first + count <= starts[span + 1]


# --- on a GPU -----------------------------------------------------------------------------------------------------------------


@needs_hopper
def test_the_schedule_on_a_gpu(seed: int) -> None:
    assert schedule_faults(seed, "cuda") == []


def poisoned_prefill(q: Tensor, keys: Tensor, *rest: Any, **more: Any) -> Tensor:
    """`paged_prefill` in memory that held NaN."""
    assert specialized(q, keys, None)
    torch.full_like(q, torch.nan)  # freed at once, so that the result's memory is most likely the same
    with torch.no_grad():
        return paged_prefill(q, keys, *rest, **more)


@needs_hopper
def test_on_a_gpu(seed: int) -> None:
    """Half of the shapes in bf16 and half in fp16, chosen at random."""
    dtypes = [torch.bfloat16, torch.float16] * (len(SHAPES) // 2)
    random.shuffle(dtypes)
    pairs = zip(SHAPES, dtypes, strict=True)
    cases = ((shape, longest, "cuda", dtype) for (shape, dtype), longest in product(pairs, [160, 3000]))
    assert [fault for case in cases for fault in prefill_faults(poisoned_prefill, *case)] == []


@needs_hopper
@pytest.mark.parametrize("shape", [*SHAPES[:2], Shape(16, 2, 128, 16, 700)], ids=str)
def test_replays_of_prefill_repeat_their_bits(shape: Shape, seed: int) -> None:
    """Also of the kernel of other GPUs, which takes windows."""
    rows = 1500
    pages = Pages.of(shape, [2000] * 5, "cuda", torch.bfloat16)
    q = torch.randn(rows, shape.n_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    starts, lengths = torch.zeros(6, dtype=torch.int32, device="cuda"), torch.zeros(5, dtype=torch.int32, device="cuda")
    assert specialized(q, pages.keys, shape.window) == (shape.window is None)

    def refresh() -> None:
        counts = torch.randint(0, rows // 5, (5,))
        starts[1:] = counts.cumsum(0).int()
        lengths.copy_(torch.where(counts > 0, counts + torch.randint(0, 2000 - rows // 5, (5,)), 0))
        q.normal_()
        redraw(pages)

    with torch.no_grad():
        arguments = q, pages.keys, pages.values, pages.tables, starts, lengths, shape.window, rows
        assert wrong_replays(lambda: paged_prefill(*arguments), refresh) == 0, seed
