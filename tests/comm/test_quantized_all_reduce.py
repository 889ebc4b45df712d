"""Quantized all-reduces on 1, 2, 3 and 4 gloo ranks, against the same arithmetic in one process; and when their phases run."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from checkpoints.presets import PRESETS
from checkpoints.weights import load_model
from comms import QuantizedGlooCommunicator, parse_scheme
from comms.quantize import hadamard_transform
from comms.quantized import CHUNK, Worker, quantized_all_reduce
from comms.registry import choose
from config import with_variant
from errors import UserError
from layers.attention import Causal
from model import Transformer
from tests.kernels.test_quantize import defined
from tests.support.command_line import HYBRID, launch
from tests.support.ranks import Ranks
from tp import World

CPU = torch.device("cpu")
WIDTHS = ["int8", "int6", "int4", "fp8"]


def by_hand(partials: Tensor, name: str) -> Tensor:
    """The expected all-reduce of `partials` (N, ...), computed in one process.

    Each group of consecutive values is quantized and dequantized, the ranks' groups are added in rank order in fp32, and the
    total is quantized and dequantized. An incomplete last group is padded with its last value."""
    scheme = parse_scheme(name)
    size = scheme.group_of(partials)
    flat = partials.flatten(1).float()
    count = flat.shape[1]
    full = torch.cat((flat, flat[:, -1:].expand(-1, -count % size)), dim=1).view(len(partials), -1, size)
    transformed = torch.stack([hadamard_transform(p) for p in full]) if scheme.hadamard else full
    total = reduce(torch.add, [defined(p, scheme.reduce) for p in transformed])
    total = defined(total, scheme.gather)
    total = hadamard_transform(total) if scheme.hadamard else total
    return total.flatten()[:count].view(partials.shape[1:]).to(partials.dtype)


def all_reduced(world: World, name: str, partials: list[Tensor]) -> list[Tensor]:
    """All-reduces of this rank's partials (row r of each). All have begun before the first wait."""
    communicator = QuantizedGlooCommunicator(parse_scheme(name))
    pending = [communicator.begin_all_reduce(p[world.rank].clone()) for p in partials]
    return [each.wait() for each in pending]


def assert_all_reduced(ranks: Ranks, n: int, name: str, partials: list[Tensor]) -> None:
    results = ranks.run(n, all_reduced, name, partials)
    for sums in results:
        for total, parts, first in zip(sums, partials, results[0], strict=True):
            expected = by_hand(parts, name)
            assert (total.dtype, total.shape) == (parts.dtype, parts.shape[1:])
            assert torch.equal(total.isnan(), expected.isnan())
            assert torch.equal(total.nan_to_num(), expected.nan_to_num())
            assert torch.equal(total.view(torch.uint8), first.view(torch.uint8)), "the ranks differ"


@pytest.mark.parametrize(("place", "name"), list(enumerate([*WIDTHS, "int4:32", "int8:64"])))
def test_sums_of_any_size(place: int, name: str, in_turn: Callable[..., int], ranks: Ranks, seed: int) -> None:
    n = in_turn([1, 2, 3, 4], place)
    assert_all_reduced(ranks, n, name, [torch.randn(n, size) for size in (1, 127, 128, 129, 1000)])


@pytest.mark.parametrize(
    "name", ["int4:token", "int8:32:symmetric", "int4:hadamard", "fp8:token:hadamard", "int6:64:symmetric"]
)
def test_schemes_of_the_ablation(name: str, ranks: Ranks, seed: int) -> None:
    assert_all_reduced(ranks, 2, name, [torch.randn(2, 3, 5, 192), torch.randn(2, 1, 64), torch.randn(2, 2, 3, 100).bfloat16()])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_ranks_nan_or_infinity_is_seen_by_all(bad: float, ranks: Ranks, seed: int) -> None:
    for name in ("int8", "int4:32:hadamard"):
        partials = torch.randn(2, 300)
        partials[random.randrange(2), 140] = bad
        assert_all_reduced(ranks, 2, name, [partials])
        group = parse_scheme(name).group or 0
        expected = torch.arange(300) // group == 140 // group
        assert torch.equal(ranks.run(2, all_reduced, name, [partials])[1][0].isnan(), expected)


def chunked(world: World, partials: Tensor, chunks: list[int]) -> list[Tensor]:
    scheme = parse_scheme("int6:32")
    return [quantized_all_reduce(partials[world.rank], scheme, None, chunk) for chunk in chunks]


def test_chunks_change_nothing(ranks: Ranks, seed: int) -> None:
    partials = torch.randn(3, 2001)
    for sums in ranks.run(3, chunked, partials, [1, 96, 500, 2001, CHUNK]):
        for total in sums:
            assert torch.equal(total, by_hand(partials, "int6:32"))


# --- overlap and waiting -----------------------------------------------------------------------------------------------------


def finished_elsewhere(world: World) -> bool:
    """Rank 1 completes three all-reduces before rank 0 waits for any, so both of rank 0's phases ran without a wait there."""
    communicator = QuantizedGlooCommunicator(parse_scheme("int4"))
    pending = [communicator.begin_all_reduce(torch.ones(500)) for _ in range(3)]
    if world.rank == 1:
        assert all(each.wait().isfinite().all() for each in pending)
    dist.barrier()
    return world.rank == 1 or all(each.wait().isfinite().all() for each in pending)


def test_both_phases_run_before_the_wait(ranks: Ranks) -> None:
    assert ranks.run(2, finished_elsewhere) == [True, True]


def waited_for_a_late_rank(world: World) -> tuple[float, float]:
    communicator = QuantizedGlooCommunicator(parse_scheme("int8"))
    if world.rank == 1:
        threading.Event().wait(1.0)
    communicator.all_reduce(torch.ones(10))
    first = communicator.waited
    pending = communicator.begin_all_reduce(torch.ones(10))
    dist.barrier()
    communicator.worker.submit(lambda: torch.ones(1)).result()  # the all-reduce has finished before `pending.wait()`
    pending.wait()
    return first, communicator.waited - first


def test_only_exposed_time_is_counted_as_waited(ranks: Ranks) -> None:
    (late, hidden), _ = ranks.run(2, waited_for_a_late_rank)
    assert late > 0.1
    assert hidden < late


def test_a_failing_call_raises_where_it_is_waited_for() -> None:
    worker = Worker()

    def fail() -> Tensor:
        raise RuntimeError("Connection closed by peer")

    broken, fine = worker.submit(fail), worker.submit(lambda: torch.ones(2))
    with pytest.raises(RuntimeError, match="Connection closed"):
        broken.result(100)
    assert fine.result(100).tolist() == [1, 1]


def test_the_thread_ends_with_its_communicator() -> None:
    before = set(threading.enumerate())
    worker = Worker()
    (thread,) = set(threading.enumerate()) - before
    worker.submit(lambda: torch.ones(2)).result(100)
    del worker
    thread.join(100)
    assert not thread.is_alive()


# --- in a model, chosen by name --------------------------------------------------------------------------------------------


@torch.inference_mode()
def logits_of(world: World, variant: str, name: str, seed: int) -> Tensor:
    communicator = choose("cpu", name).build()
    quantized = World(world.rank, world.world_size, CPU, communicator)
    config = with_variant(PRESETS["tiny"], variant)
    model: Transformer = load_model("tiny", config, quantized, torch.float32, seed)
    tokens = torch.arange(20).view(2, 10) * 7 + seed % 100
    return model(tokens, Causal(10, CPU))


@pytest.mark.parametrize("place", range(2))
def test_every_variant_stays_near_its_exact_logits(place: int, in_turn: Callable[..., str], ranks: Ranks, seed: int) -> None:
    variant = in_turn(("standard", "parallel", "ladder", "hybrid", "desync-2x:4"), place)
    exact = ranks.run(2, logits_of, variant, "gloo", seed)[0]
    errors = {}
    for name in ("int8", "int4"):
        first, second = ranks.run(2, logits_of, variant, name, seed)
        assert torch.equal(first, second)
        errors[name] = ((first - exact).norm() / exact.norm()).item()
    assert 0 < errors["int8"] < 0.03
    assert errors["int8"] < errors["int4"] < 0.5


def test_generate_on_two_ranks() -> None:
    common = ("--model", HYBRID, "--prompt", "Once upon a time", "--temperature", 0, "--max-new-tokens", 8, "--json")
    done = launch(*common, "--comm", "int8:64", ranks=2)
    assert done.code == 0, done.err
    assert done.record["text"]
    assert "(int8:64)" in done.err


def refused(world: World, name: str) -> str:
    """What a rank says of a model of another width."""
    try:
        Transformer(
            replace(PRESETS["ladder-1b"], hidden_size=54), choose("cpu", name).build(), torch.device("meta"), torch.float32
        )
    except UserError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("name", ["int8:token", "int4:token:hadamard"])
def test_a_width_that_is_no_group_is_refused_in_one_line(name: str, ranks: Ranks) -> None:
    for said in ranks.run(2, refused, name):
        assert (
            f"--comm {name}: the 54 values" in said and said.endswith(f"use {name.replace('token', '64')}") and "\n" not in said
        )
