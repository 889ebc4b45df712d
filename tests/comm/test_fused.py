"""All-reduces fused with the GEMMs around them: the kernels in Triton's interpreter on gloo ranks with shared memory, and on
GPUs."""

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import MODELS
from tests.support.gpus import gpu_report, needs_two
from tests.support.ranks import Ranks
from tests.support.sums import same_on_all_ranks, symmetric
from tp import World

pytest.importorskip("triton", reason="Triton is not installed; pip install triton")

EPS = 1e-5
# relative to the result: for a GEMM's rounding, and because the interpreter truncates where it should round to bf16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def fused(world: World, **options: Any) -> Any:
    from comms.fused import FusedCommunicator

    return FusedCommunicator(world.comm, world.device, **({"capacity": 1 << 17, "min_rows": 1} | options))


class Layer(NamedTuple):
    """A linear layer as a communicator sees it."""

    weight: Tensor
    bias: Tensor | None = None
    only_called: bool = False

    @property
    def out_features(self) -> int:
        return len(self.weight)

    @property
    def multiplied(self) -> Tensor | None:
        return None if self.only_called else self.weight

    def reads_codes(self, like: Tensor) -> bool:
        return False

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def whole_bias(self) -> Tensor | None:
        return self.bias

    def finish(self, out: Tensor) -> Tensor:
        return out


class Layers:
    """Random layers of a model of width C, K features a rank before the all-reduce, M after it: the same on all ranks."""

    def __init__(self, world: World, seed: int, dtype: torch.dtype = torch.float32, k: int = 24, c: int = 40, m: int = 56):
        self.world, self.dtype, self.k = world, dtype, k
        self.generator = torch.Generator().manual_seed(seed)
        self.first, self.second = self.random(world.world_size, c, k) / k**0.5, self.random(world.world_size, m, c) / c**0.5
        self.scale, self.bias = self.random(c), self.random(world.world_size, m)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def inputs(self, *rows: int) -> Tensor:
        """Every rank's input of the first layer (N, *rows, K)."""
        return self.random(self.world.world_size, *rows, self.k)

    def sum(self, inputs: Tensor) -> Tensor:
        """The all-reduce of the first layer, in fp64."""
        return torch.einsum("nbtk,nck->btc", inputs.double(), self.first.double())

    def begin(self, comm: Any, inputs: Tensor) -> Any:
        """The pending all-reduce of the first layer."""
        return comm.begin_linear_all_reduce(inputs[self.world.rank], Layer(self.first[self.world.rank]))

    def norm(self) -> nn.Module:
        norm = nn.RMSNorm(len(self.scale), EPS, dtype=self.dtype).requires_grad_(False)
        norm.weight.copy_(self.scale)
        norm.scale = norm.weight  # as in `model.RMSNorm`
        return norm

    def second_layer(self, bias: bool = False) -> "Layer":
        """The second layer."""
        return Layer(self.second[self.world.rank], self.bias[self.world.rank] if bias else None)

    def close(self, got: Tensor, exact: Tensor) -> bool:
        error = (got.double() - exact).abs().max().item()
        return (
            got.shape == exact.shape
            and got.dtype == self.dtype
            and error <= TOLERANCE[self.dtype] * (1 + exact.abs().max().item())
        )


def normed(x: Tensor, layers: Layers) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], layers.scale.double(), EPS)


# --- one pair of layers ------------------------------------------------------------------------------------------------------


PUSH = (False, 1)  # of a `Gather`, after its split: whether it pulls, and chunks


@torch.inference_mode()
def wrong_pairs(
    world: World, scatter: str, gather: tuple[str, bool, int], shapes: list[tuple[int, int]], pairs: int, seed: int
) -> list[str]:
    """Streams (batch, length) through some pairs of layers, as in a model: all-reduce, norm and layer, and at the end the
    whole stream. Returns the wrong results."""
    from comms.row_buffers import Gather, Strategy

    comm, draw, found = fused(world, strategy=Strategy(scatter, Gather(*gather))), random.Random(seed), []
    tiled = "tiles" in scatter + gather[0]
    for number, (b, t) in enumerate(shapes):
        # the interpreter's dot treats bf16 as integers
        dtype = draw.choice([d for d in TOLERANCE if not tiled or d != torch.bfloat16])
        k, c, m = (draw.randrange(1, 9) * (8 if tiled else 1) for _ in range(3))
        c += 8  # the norm of few values would magnify the rounding of a row that is nearly zero
        layers = Layers(world, seed + number, dtype, k, c, m)
        x = whole = layers.random(b, t, len(layers.scale))
        exact = whole.double()
        for pair in range(pairs):
            inputs = layers.inputs(b, t)
            exact = exact + layers.sum(inputs)
            time.sleep(draw.random() * 0.03 * ((world.rank + pair) % 2))
            pending = layers.begin(comm, inputs)
            if pair == pairs - 1:
                whole = pending.add(x)
                if not layers.close(whole, exact) or not same_on_all_ranks(whole):
                    found.append(f"add {b} {t} {dtype}")
                break
            layer = layers.second_layer(bias=pair > 0)._replace(only_called=pair == 1)
            x, out = pending.add_norm_linear(x, layers.norm(), layer)
            if not pending.scatters or len(x) * world.world_size != b * t:
                found.append(f"not fused: {b} {t}")
            mine = exact.view(world.world_size, -1, exact.shape[-1])[world.rank]
            expected = F.linear(
                normed(exact, layers), layer.weight.double(), None if layer.bias is None else layer.bias.double()
            )
            if not layers.close(x, mine) or not layers.close(out, expected):
                found.append(f"pair {pair} of {b} {t} {dtype}")
    comm.check()
    return found


PAIRS = [
    ("owners", ("spans", *PUSH)),
    ("spans", ("owners", *PUSH)),
    ("tiles", ("tiles", *PUSH)),
    ("owners", ("spans", True, 1)),
    ("spans", ("tiles", True, 2)),
    ("tiles", ("owners", True, 1)),
]


@pytest.mark.parametrize("place", range(3))
def test_pairs(interpreters: Ranks, in_turn: Callable[..., Any], place: int, seed: int) -> None:
    """Each split of the scatter and of the gather, with random delays."""
    (scatter, gather), n = in_turn(PAIRS[2 * place : 2 * place + 2], place), in_turn([2, 4, 2], place)
    shapes = [(1, 4), (2, 6), (1, 16)]
    assert interpreters.run(n, wrong_pairs, scatter, gather, shapes, 3, seed) == [[]] * n, f"seed {seed}"


LONG_PAIRS = [
    ("spans", ("spans", *PUSH)),
    ("tiles", ("tiles", *PUSH)),
    ("spans", ("tiles", False, 2)),
    ("owners", ("tiles", True, 4)),
    ("spans", ("owners", True, 2)),
    ("owners", ("spans", False, 4)),
]


@pytest.mark.parametrize("place", range(2))
def test_rows_of_several_flags(interpreters: Ranks, in_turn: Callable[..., Any], place: int, seed: int) -> None:
    scatter, gather = in_turn(LONG_PAIRS[3 * place : 3 * place + 3], place)
    shapes = [(1, 2 * 132), (1, 4)]  # and a short message after the long one
    assert interpreters.run(2, wrong_pairs, scatter, gather, shapes, 2, seed) == [[]] * 2, f"seed {seed}"


@torch.inference_mode()
def late_copies(world: World, rows: list[int], seed: int) -> list[str]:
    """Pairs of random strategies, one after another. Each rank starts its copies late, chunk by chunk, and in a pull after
    the ready flags. Returns the wrong results."""
    import comms.row_buffers as module

    draw, late, found, split = random.Random(seed), random.Random(f"{seed} {world.rank}"), [], module.chunks_of

    def slowly(rows: int, count: int) -> Iterator[slice]:
        for chunk in split(rows, count):
            time.sleep(late.choice([0, 0, 0.01, 0.03]))
            yield chunk

    gathers = list(module.GATHERS.values())
    comm, layers = fused(world, capacity=1 << 18), Layers(world, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "chunks_of", slowly)
        for number, t in enumerate(rows):
            comm.default = module.Strategy(draw.choice(module.SCATTERS), draw.choice(gathers))
            x, inputs = layers.random(1, t, len(layers.scale)), layers.inputs(1, t)
            exact = x.double() + layers.sum(inputs)
            x, out = layers.begin(comm, inputs).add_norm_linear(x, layers.norm(), layers.second_layer())
            if not layers.close(out, F.linear(normed(exact, layers), layers.second[world.rank].double())):
                found.append(f"pair {number} of {t} rows: {comm.default}")
    comm.check()
    return found


def test_late_copies_lose_no_rows(interpreters: Ranks, in_turn: Callable[..., tuple[int, list[int]]], seed: int) -> None:
    n, rows = in_turn([(2, [8, 520, 12, 520, 520, 8]), (4, [8, 520, 520, 8, 4])], 0)
    assert interpreters.run(n, late_copies, rows, seed) == [[]] * n, f"seed {seed}"


@torch.inference_mode()
def flags_by_chunk(world: World, pull: bool, seed: int) -> list[int]:
    """The number of flags of 500 rows that are set at the reading rank before each chunk is copied, and after all have been
    copied."""
    import comms.row_buffers as module
    from kernels.fused_rows import BLOCKS, advance

    buffers, split, counts = fused(world, capacity=1 << 18).buffers, module.chunks_of, []
    layout, other = buffers.layout, 1 - world.rank
    reader, source = (world.rank, other) if pull else (other, world.rank)
    flags = buffers.shared.view(reader, layout.row_flags, (2, BLOCKS), torch.int64)[source]

    def watched(rows: int, count: int) -> Iterator[slice]:
        for chunk in split(rows, count):
            counts.append(int((flags == layout.epochs[0]).sum()))
            yield chunk

    layers, shard = Layers(world, seed), module.RowShard(500, 40, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "chunks_of", watched)
        rows = layers.random(2, 500, 40)
        buffers.my_rows(world.rank, shard).copy_(rows[world.rank])
        advance(layout)
        out = buffers.gather_linear(shard, layers.second[world.rank], None, module.Gather("owners", pull, 3))
    counts.append(int((flags == layout.epochs[0]).sum()))
    assert layers.close(out, F.linear(rows.view(1000, 40).double(), layers.second[world.rank].double())), f"seed {seed}"
    return counts


@pytest.mark.parametrize("pull", [False, True])
def test_a_chunk_is_announced_when_it_is_there(interpreters: Ranks, pull: bool, seed: int) -> None:
    assert interpreters.run(2, flags_by_chunk, pull, seed) == [[0, 1, 2, 4]] * 2, f"seed {seed}"


def test_chunks_are_whole_blocks(seed: int) -> None:
    """Every row is in one chunk, in order; no chunk is empty, and no block is in two chunks."""
    from comms.row_buffers import chunks_of
    from kernels.fused_rows import BLOCK_ROWS

    for _ in range(200):
        rows, count = random.randrange(1, 2000), random.randrange(1, 9)
        chunks = list(chunks_of(rows, count))
        assert [row for chunk in chunks for row in range(rows)[chunk]] == list(range(rows)), f"seed {seed}"
        assert len(chunks) == min(count, -(-rows // BLOCK_ROWS)), f"seed {seed}"
        sizes = [-(-(chunk.stop - chunk.start) // BLOCK_ROWS) for chunk in chunks]
        assert max(sizes) - min(sizes) <= 1 and all(chunk.start % BLOCK_ROWS == 0 for chunk in chunks), f"seed {seed}"


@torch.inference_mode()
def wrong_results(world: World, seed: int) -> list[str]:
    """Fused all-reduces that are read by each method, in random order, and unfused all-reduces between them."""
    comm, layers, draw, found = fused(world), Layers(world, seed), random.Random(seed), []
    for step in range(12):
        b, t = draw.choice([(1, 4), (1, 8), (2, 8), (1, 16)])
        kind = draw.choice(["wait", "add", "add_norm", "add_norm_linear", "rows", "inner"])
        inputs, x = layers.inputs(b, t), layers.random(b, t, len(layers.scale))
        exact, pending, layer = layers.sum(inputs), layers.begin(comm, inputs), layers.second_layer()
        if kind == "inner":
            good = layers.close(comm.all_reduce(layers.random(3) * 0 + 1), torch.full((3,), float(world.world_size)).double())
        elif kind == "wait":
            total = pending.wait()
            good = layers.close(total, exact) and same_on_all_ranks(total)
        elif kind == "add":
            total = pending.add(x)
            good = layers.close(total, x.double() + exact) and same_on_all_ranks(total)
        elif kind == "add_norm":
            total, out = pending.add_norm(x, layers.scale, EPS)
            good = layers.close(total, x.double() + exact) and layers.close(out, normed(x.double() + exact, layers))
        else:
            rows, out = pending.add_norm_linear(x, layers.norm(), layer)
            good = layers.close(out, F.linear(normed(x.double() + exact, layers), layer.weight.double()))
            if kind == "rows":  # the next reader needs all rows
                whole = comm.gather_rows(rows).view(x.shape)
                good = good and layers.close(whole, x.double() + exact) and same_on_all_ranks(whole)
        if not good:
            found.append(f"step {step}: {kind} {b} {t}")
    comm.check()
    return found


def test_each_way_to_read_the_result(interpreters: Ranks, in_turn: Callable[..., int], seed: int) -> None:
    n = in_turn([2, 4], 0)
    assert interpreters.run(n, wrong_results, seed) == [[]] * n, f"seed {seed}"


@torch.inference_mode()
def wrong_ladders(world: World, shapes: list[tuple[int, int]], seed: int) -> list[str]:
    """Streams through modules of a ladder whose all-reduces are deferred: fused with both layers, one module later."""
    from comms import Residual

    comm, layers, found = fused(world), Layers(world, seed), []
    comm.use("deferred")
    for b, t in shapes:
        totals, norm, second = [layers.random(b, t, len(layers.scale))], layers.norm(), layers.second_layer()
        stream = Residual(totals[0], comm)
        totals[0] = totals[0].double()
        before = comm.fused
        for module in range(5):
            stream, out = stream.read(norm, second, lag=1)
            expected = F.linear(normed(totals[max(0, module - 1)], layers), second.weight.double())
            if not layers.close(out, expected) or (stream.scattered is None) != (module < 2):
                found.append(f"module {module} of {b} {t}")
            inputs = layers.inputs(b, t)
            totals.append(totals[-1] + layers.sum(inputs))
            stream = stream.add(inputs[world.rank], Layer(layers.first[world.rank]), lag=1)
        whole = stream.finish()
        if not layers.close(whole, totals[-1]) or not same_on_all_ranks(whole) or comm.fused - before != 5:
            found.append(f"{b} {t}")
    comm.check()
    return found


def test_deferred_all_reduces_of_a_ladder(interpreters: Ranks, in_turn: Callable[..., int], seed: int) -> None:
    n = in_turn([2, 4], 1)
    assert interpreters.run(n, wrong_ladders, [(1, 4), (2, 6), (1, 16)], seed) == [[]] * n, f"seed {seed}"


@torch.inference_mode()
def refusals(world: World, seed: int) -> list[str]:
    """All-reduces that cannot be fused use `inner`, and are right."""
    found = []
    for rows, capacity, minimum in ((5, 1 << 16, 1), (8, 256, 1), (8, 1 << 16, 6)):
        layers = Layers(world, seed)
        comm = fused(world, min_rows=minimum)
        comm.buffers.layout = replace(comm.buffers.layout, capacity=capacity)
        inputs = layers.inputs(1, rows)
        pending, exact = layers.begin(comm, inputs), layers.sum(inputs)
        if pending.scatters or not layers.close(pending.add(torch.zeros(1, rows, 40)), exact):
            found.append(f"{rows} {capacity} {minimum}")
    comm, layers = fused(world), Layers(world, seed)
    x, weight, bias = layers.inputs(1, 8)[world.rank], layers.first[world.rank], layers.random(40)
    fine = world.world_size > 1
    for what, layer, overlap, grad, expected in (
        ("plain", Layer(weight), False, False, fine),
        ("overlapped", Layer(weight), True, False, False),
        ("with a bias", Layer(weight, bias), False, False, False),
        ("with autograd", Layer(weight), False, True, False),
    ):
        with torch.set_grad_enabled(grad):
            pending = comm.begin_linear_all_reduce(x, layer, overlap)
        if pending.scatters != expected:
            found.append(what)
        if not expected:
            pending.wait()
    return found


@pytest.mark.parametrize("n", [1, 2, 4])
def test_what_cannot_be_fused_stays_unfused(interpreters: Ranks, n: int, seed: int) -> None:
    assert interpreters.run(n, refusals, seed) == [[]] * n, f"seed {seed}"


@torch.inference_mode()
def bad_stream(world: World, seed: int) -> list[str]:
    comm, layers, said = fused(world), Layers(world, seed), []
    for shape, dtype in (((1, 7, 40), torch.float32), ((1, 8, 39), torch.float32), ((1, 8, 40), torch.bfloat16)):
        pending = layers.begin(comm, layers.inputs(1, 8))
        with pytest.raises(ValueError, match="does not match an all-reduce") as error:
            pending.add_norm_linear(torch.zeros(shape, dtype=dtype), layers.norm(), layers.second_layer())
        said.append(str(error.value))
    return said


def test_a_stream_of_another_shape_is_refused(interpreters: Ranks, seed: int) -> None:
    for said in interpreters.run(2, bad_stream, seed):
        assert "(1, 7, 40)" in said[0] and "(1, 8, 39)" in said[1] and "bfloat16" in said[2]


@torch.inference_mode()
def lone_wait(world: World, seed: int) -> list[str]:
    """Rank 1 does not take part; rank 0 times out."""
    comm, layers = fused(world), Layers(world, seed)
    comm.buffers.layout = replace(comm.buffers.layout, max_polls=20)
    if world.rank == 0:
        layers.begin(comm, layers.inputs(1, 8)).wait()
        with pytest.raises(RuntimeError, match="rank 0 timed out"):
            comm.check()
    return []


@torch.inference_mode()
def lone_barrier(world: World, seed: int) -> list[str]:
    """Rank 1 does not signal that its rows are ready; rank 0 times out."""
    from comms.interface import check_faults
    from kernels.fused_rows import ready_barrier

    buffers = fused(world).buffers
    ready = [buffers.shared.view(rank, buffers.layout.ready_flags, (world.world_size, 64), torch.int64) for rank in range(2)]
    if world.rank == 0:
        buffers.layout.epochs.fill_(seed)
        ready_barrier(replace(buffers.layout, max_polls=20))
        assert [bool((flags[0] == seed).all()) for flags in ready] == [True, True]
        with pytest.raises(RuntimeError, match=r"rank 0 timed out .* \(fault code 7\)"):
            check_faults()
    return []


@pytest.mark.parametrize("alone", [lone_wait, lone_barrier])
def test_a_rank_that_times_out_says_so(interpreters: Ranks, alone: Any, seed: int) -> None:
    assert interpreters.run(2, alone, seed) == [[], []]


# --- choosing ----------------------------------------------------------------------------------------------------------------


CALLS: list[str] = []  # keys of the pairs for which `invented_times` was called


def invented_times(comm: Any, pair: Any, first: Tensor, second: Tensor) -> dict[str, float]:
    """Made-up times: unfused is faster below 16 rows; the fastest scatter is `owners`, the fastest gather `owners-pull`."""
    from comms.row_buffers import names_of

    CALLS.append(pair.key)
    times = dict.fromkeys(names_of(pair.key), 40.0) | {
        "unfused": 50.0,
        "owners+spans": 21.0,
        "spans+spans": 25.0,
        "spans+owners": 24.5,
        "spans+owners-pull": 24.0,
    }
    return {name: t + (100 if pair.rows < 16 and name != "unfused" else 0) for name, t in times.items()}


def step(comm: Any, layers: Layers, rows: int) -> bool:
    """Two all-reduces with a layer after the first, as in a model of one layer. Returns whether they were fused."""
    x, inputs = layers.random(1, rows, len(layers.scale)), layers.inputs(1, rows)
    pending, exact, second = layers.begin(comm, inputs), x.double() + layers.sum(inputs), layers.second_layer()
    x, out = pending.add_norm_linear(x, layers.norm(), second)
    more = layers.inputs(1, rows)
    whole = layers.begin(comm, more).add(x)
    comm.decide()
    assert layers.close(out, F.linear(normed(exact, layers), second.weight.double())), f"rows {rows}"
    assert layers.close(whole, exact + layers.sum(more)), f"rows {rows}"
    return bool(pending.scatters)


@torch.inference_mode()
def choices(world: World, folder: str, rows: tuple[int, ...], seed: int) -> tuple[list[bool], list[str], list[str]]:
    """For steps with these numbers of rows: whether they were fused, the measured pairs, and the chosen strategies."""
    os.environ["RUNG_CACHE"] = folder
    CALLS.clear()
    comm, layers = fused(world, measure=invented_times), Layers(world, seed)
    fused_steps = [step(comm, layers, number) for number in rows]
    comm.check()
    return fused_steps, list(CALLS), sorted({str(strategy) for strategy in comm.chosen.values()})


def test_a_step_that_is_faster_unfused_is_so_from_then_on(interpreters: Ranks, tmp_path: Path, seed: int) -> None:
    rows = (16, 16, 8, 8, 12, 4)
    for steps, measured, strategies in interpreters.run(2, choices, str(tmp_path), rows, seed):
        assert steps == [True, True, True, False, True, True], f"seed {seed}"  # 12 rows count as 16; 4 are measured first
        assert measured == ["16,24,40,56,float32", "8,24,40,56,float32", "4,24,40,56,float32"]
        assert strategies == ["owners+owners-pull"]
    for steps, measured, _ in interpreters.run(2, choices, str(tmp_path), rows, seed):
        assert steps == [True, True, True, False, True, True]
        assert measured == []  # the table was stored


def times_by_second_layer(comm: Any, pair: Any, first: Tensor, second: Tensor) -> dict[str, float]:
    """Made-up times, in which the fastest gather depends on the second layer."""
    from comms.row_buffers import names_of

    fastest = "spans+owners" if pair.m > 56 else "spans+owners-pull"
    return dict.fromkeys(names_of(pair.key), 40.0) | {"unfused": 50.0, fastest: 20.0}


@torch.inference_mode()
def two_second_layers(world: World, folder: str, seed: int) -> list[str]:
    """The gathers of pairs with equal first layers, and second layers of 56 and 64 rows."""
    os.environ["RUNG_CACHE"] = folder
    comm, both = fused(world, measure=times_by_second_layer), [Layers(world, seed, m=m) for m in (56, 64)]
    for layers in both * 2:
        assert step(comm, layers, 16)
    used = []
    for layers in both:
        pending = layers.begin(comm, layers.inputs(1, 16))
        pending.add_norm_linear(layers.random(1, 16, len(layers.scale)), layers.norm(), layers.second_layer())
        used.append(str(pending.strategy).partition("+")[2])  # scatters are equally fast
    comm.check()
    return used


def test_each_pair_has_its_own_strategy(interpreters: Ranks, tmp_path: Path, seed: int) -> None:
    """A hybrid's first layer is followed by different second layers: in its standard part, and in its deferred ladder."""
    assert interpreters.run(2, two_second_layers, str(tmp_path), seed) == [["owners-pull", "owners"]] * 2


def test_buckets_of_rows(seed: int) -> None:
    """Powers of two, and their quarters from 1,024 to 4,096: a bucket holds the rows up to itself and above the one before."""
    from comms.row_buffers import Pair, bucket

    powers = [2**i for i in range(20)]
    buckets = [power + i * power // 4 for power in powers for i in range(4 if 1024 <= power < 4096 else 1)]
    for rows in [*buckets, *(n + 1 for n in buckets[:-1]), *(random.randint(1, buckets[-1]) for _ in range(200))]:
        expected = min(n for n in buckets if n >= rows)
        assert bucket(rows) == expected, f"seed {seed}: {rows} rows"
        key = Pair(rows, 64, 128, 32, torch.bfloat16).key
        assert key == f"{expected},64,128,32,bfloat16" == Pair.parse(key).key


def test_the_best_of_random_times(seed: int) -> None:
    """The fastest scatter and the fastest gather, among all that are measured."""

    from comms.row_buffers import SCATTERS, Gather, Pair, Strategy, best_strategy, names_of

    pair = Pair(random.choice([1000, 1100, 2048]), 64, 128, 32, torch.bfloat16)
    times = {name: random.uniform(10, 100) for name in sorted(names_of(pair.key))}
    gathers = [Gather(split, pull) for split in SCATTERS for pull in (False, True)]
    gathers += [Gather("tiles", False, 2), Gather("tiles", False, 4), Gather("tiles", True, 4)]
    all_strategies = [Strategy(scatter, gather) for scatter in SCATTERS for gather in gathers]
    expected = {s: times[f"{s.scatter}+spans"] + times[f"spans+{s.gather}"] - times["spans+spans"] for s in all_strategies}
    strategy, fused = best_strategy(times)
    assert fused == pytest.approx(min(expected.values())) == pytest.approx(expected[strategy]), f"seed {seed}"
    assert len(times) == 1 + len(SCATTERS) + len(gathers) - 1  # no others: unfused, and the default counted once
    few, single = (names_of(replace(pair, **change).key) for change in ({"rows": 256}, {"dtype": torch.float32}))
    assert set(times) - few == {"spans+tiles/2", "spans+tiles/4", "spans+tiles-pull/4"}
    with pytest.raises(AttributeError):
        names_of("16,24,40,56,float33")
    assert single == {"unfused", "spans+spans", "owners+spans", "spans+owners", "spans+spans-pull", "spans+owners-pull"}


# --- whole models ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def difference_from_one_rank(world: World, name: str, ids: list[int]) -> tuple[float, int]:
    """The largest difference of an embedded model's logits from those of one rank, and how many of its all-reduces were
    fused."""
    from checkpoints.presets import model_config
    from checkpoints.weights import load_model
    from comms import Local
    from layers.attention import Causal

    path = str(MODELS / name)
    comm = fused(world, capacity=1 << 20)
    tokens, context = torch.tensor([ids]), Causal(len(ids), world.device)
    alone, model = (
        load_model(path, model_config(path, None, there.world_size), there, torch.float32)
        for there in (World(0, 1, world.device, Local()), replace(world, comm=comm))
    )
    expected = alone(tokens, context)
    error, fused_count = (model(tokens, context) - expected).abs().max().item(), comm.fused
    index = torch.tensor([len(ids) - 1, 3, 0, 7])
    some = model.logits(model.hidden(tokens, context, index))
    return max(error, (some - expected[:, index]).abs().max().item()), fused_count


@pytest.mark.parametrize(
    ("name", "all_reduces"), [("tiny-standard", 16), ("tiny-hybrid", 7), ("tiny-ladder", 0), ("tiny-parallel", 0)]
)
def test_models_with_fused_all_reduces(interpreters: Ranks, name: str, all_reduces: int, seed: int) -> None:
    """All all-reduces of standard layers are fused, but the last one before a ladder layer is not: the ladder overlaps it. A ladder
    layer needs the whole stream, so its rows are gathered before the first one."""
    ids = [random.Random(seed).randrange(300) for _ in range(12)]
    for error, fused_count in interpreters.run(2, difference_from_one_rank, name, ids):
        assert error < 1e-3, (name, seed)
        assert fused_count == all_reduces


def communicators(world: World) -> dict[str, Any]:
    """Every exact communicator that runs on CPU ranks."""
    from comms.relay import RelayCommunicator
    from comms.simulated import Link, SimulatedLink

    return {
        "gloo": world.comm,
        "simulated": SimulatedLink(world.comm, Link(1e-6, 1e12)),
        "fused": fused(world),
        "one-shot": symmetric("one-shot"),
        "two-shot": symmetric("two-shot"),
        "relay": RelayCommunicator(None, world.device, capacity=1 << 16),
    }


@torch.inference_mode()
def biased_differences_from_one_rank(world: World, folders: list[Path], ids: list[int]) -> dict[str, float]:
    """The largest difference of each checkpoint's logits from one rank's, by checkpoint and communicator."""
    from checkpoints.presets import model_config
    from checkpoints.weights import load_model
    from comms import Local
    from layers.attention import Causal

    tokens, context, found = torch.tensor([ids]), Causal(len(ids), world.device), {}
    kinds = communicators(world)
    for folder in folders:
        config = model_config(str(folder), None, 1)
        alone = load_model(str(folder), config, World(0, 1, world.device, Local()), torch.float32)(tokens, context)
        for kind, comm in kinds.items():
            if "mlp" in folder.name and kind != "fused":
                continue  # a bias after every other all-reduce matters only if all-reduces may scatter rows
            logits = load_model(str(folder), config, replace(world, comm=comm), torch.float32)(tokens, context)
            found[f"{folder.name} {kind}"] = (logits - alone).abs().max().item()
    return found


def test_biases_after_all_reduces_with_every_communicator(interpreters: Ranks, tmp_path: Path, seed: int) -> None:
    """The hybrid has a standard and a ladder block."""
    from config import ModelConfig, with_variant
    from tests.support.models import save_random

    plain = ModelConfig(96, 32, 2, 4, 2, 8, 32, 64)
    mlp, both = replace(plain, mlp_bias=True), replace(plain, qkv_bias=True, o_bias=True, mlp_bias=True)
    folders = [save_random(mlp, tmp_path / "mlp"), save_random(with_variant(both, "hybrid:1"), tmp_path / "both")]
    ids = [random.Random(seed).randrange(96) for _ in range(4)]
    for differences in interpreters.run(2, biased_differences_from_one_rank, folders, ids):
        assert max(differences.values()) < 1e-4, differences


# --- GPUs --------------------------------------------------------------------------------------------------------------------


@needs_two
def test_on_gpus(tmp_path: Path) -> None:
    """Every strategy's result is as exact as the unfused one, also in graphs that are replayed a thousand times."""
    assert gpu_report("tests.comm.gpu_fused_rank", tmp_path, timeout=600)["found"]["replays"] == 1000


def found_on_cpu(world: World) -> tuple[dict[str, Any], dict[str, str]]:
    from tests.comm.gpu_fused_rank import checked

    checks = checked(world, rows=(8,), replays=2)
    return checks.found, checks.errors


def test_the_checks_of_gpus_run_on_two_cpu_ranks(interpreters: Ranks) -> None:
    expected = {"replays": 2, "GEMM + reduce-scatter 8": 2, "all-gather + GEMM 8": 4}
    assert interpreters.run(2, found_on_cpu) == [(expected, {})] * 2
