"""What every communicator promises, on CPU ranks: sums of any size and dtype, blocking or overlapped, with equal bits on all ranks; norms
after them; gathers; and an error where another rank does not come.

A communicator's name is followed by its scheme if it is quantized. Kernels run in Triton's interpreter.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comms import GlooCommunicator, HierarchicalCommunicator, parse_scheme
from comms.process_group import gather_objects
from comms.quantize import Scheme
from comms.quantized import QuantizedGlooCommunicator, quantized_all_reduce
from comms.relay import ALIGNMENT, CHUNKS, RelayCommunicator
from tests.support.ranks import Ranks
from tests.support.sums import CPU, STEPS, close, partials, same_bits, same_on_all_ranks, symmetric
from tp import World

pytest.importorskip("triton", reason="Triton is not installed; pip install triton")

# without bf16: the interpreter truncates where it should round to bf16
EXACT = (torch.float32, torch.float16)
TOKEN = 96  # values of a token


@contextmanager
def opened(world: World, kind: str, scheme: Scheme | None) -> Iterator[Any]:
    """The communicator, whose messages are sent in several chunks, pieces and rounds."""
    import comms.relay
    import comms.symmetric as module

    with pytest.MonkeyPatch.context() as patch:
        if kind == "gloo":
            made: Any = GlooCommunicator() if scheme is None else QuantizedGlooCommunicator(scheme)
        elif kind == "hierarchical":
            patch.setitem(os.environ, "NCCL_HOSTID", "abab"[world.rank])
            made = HierarchicalCommunicator(CPU)
        elif kind == "relay":
            patch.setattr(comms.relay, "MIN_CHUNK", 64)
            patch.setattr(comms.relay, "MAX_CHUNK", 3000)
            made = RelayCommunicator(scheme, CPU, capacity=CHUNKS * ALIGNMENT + (1 << 13))
        elif scheme is not None:
            made = module.QuantizedSymmetricCommunicator(scheme, CPU)
            tiling = replace(made.blocking.tiling, block=256, programs=2, rounds=2)
            made.blocking = replace(made.blocking, tiling=tiling, norm=replace(made.blocking.norm, programs=2))
            made.overlapped = replace(made.overlapped, tiling=replace(tiling, programs=1, rounds=3))
        else:
            made = symmetric(
                "one-shot" if kind == "host" else "two-shot" if kind == "copy-engines" else kind, MEMORY.get(kind, "peer")
            )
        if kind == "copy-engines":
            patch.setattr(module, "LEAST_COPIED", 0)
            made.copy_engines = module.CopyEngines(CPU, 4 << 10)
        yield made
        made.check()


MEMORY = {"host": "host"}
SCHEDULES = {"one-shot": ["overlapped", "few-sms"], "two-shot": ["overlapped", "few-sms"], "copy-engines": ["copy-engines"]}


def values(generator: torch.Generator, world: World, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """This rank's random values: groups of different magnitudes, some constant, some zero, some halfway between codes."""
    by_rank = torch.randn(world.world_size, *shape, generator=generator)
    flat = by_rank.view(world.world_size, -1)
    for begin in range(0, flat.shape[1], 48):
        part = flat[:, begin : begin + 48]
        part *= 10.0 ** torch.randint(-3, 4, (1, 1), generator=generator)
        kind = int(torch.randint(8, (1,), generator=generator))
        if kind < 3:
            part[:] = (0.0, -0.0, 3.25)[kind]
        elif kind == 3:
            part[:] = torch.arange(part.shape[1]) % 31 - 15.5
    return by_rank[world.rank].to(dtype)


def wrong_sums(world: World, name: str, seed: int) -> list[str]:
    """Messages whose all-reduce is wrong, of most sizes in random order. Half of the all-reduces are overlapped, and ranks are late."""
    kind, _, text = name.partition(" ")
    scheme = parse_scheme(text) if text else None
    draw, own, generator, found = (
        random.Random(seed),
        random.Random(f"{seed} {world.rank}"),
        torch.Generator().manual_seed(seed),
        [],
    )
    sizes = [1, 2, 511, 2048, *(draw.randrange(3, 5000) for _ in range(2)), *([30_000] if kind in ("gloo", "relay") else [])]
    with opened(world, kind, scheme) as comm:
        for number, size in enumerate(draw.sample(sizes, 4)):
            dtype, overlap = draw.choice(list(EXACT if scheme else STEPS)), (seed + number) % 2 == 0
            comm.use(draw.choice(SCHEDULES.get(kind, ["overlapped"])))
            time.sleep(own.random() * 0.02)
            wrong = wrong_sum if scheme is None else wrong_quantized_sum
            if complaint := wrong(world, comm, scheme, size, dtype, overlap, generator, draw):
                found.append(f"{size} {dtype} {overlap=}: {complaint}")
        found += wrong_gathers(world, comm, generator)
        if list(comm.begin_all_reduce(torch.zeros(0, 5), overlap=draw.random() < 0.5).wait().shape) != [0, 5]:
            found.append("an empty sum is not empty")
    return found


def wrong_sum(
    world: World, comm: Any, scheme: None, size: int, dtype: torch.dtype, overlap: bool, generator: torch.Generator, draw: Any
) -> str:
    partial, exact = partials(world, generator, size, dtype=dtype)
    if draw.random() < 0.3:  # not aligned to 4 bytes for 16-bit values
        partial = torch.cat((partial[:1], partial))[1:]
    total = comm.begin_all_reduce(partial, overlap).wait()
    right = close(total, exact, STEPS[dtype]) and total.dtype == dtype
    if isinstance(comm, RelayCommunicator):  # adds in the order of the ranks, and rounds once
        parts = comm.all_gather(partial).view(-1, size).float()
        right = right and torch.equal(total, sum(parts[1:], parts[0]).to(dtype))
    return "" if right and same_on_all_ranks(total) else "not the sum"


def wrong_quantized_sum(
    world: World, comm: Any, scheme: Scheme, size: int, dtype: torch.dtype, overlap: bool, generator: torch.Generator, draw: Any
) -> str:
    """Bit by bit against the two steps over a process group. Some messages hold a NaN or an infinity."""
    shape = (size // TOKEN + 1, TOKEN) if scheme.group is None else (size,)
    mine, bad, of = (
        values(generator, world, *shape, dtype=dtype),
        draw.choice((1.5, torch.nan, torch.inf, -torch.inf)),
        draw.randrange(4),
    )
    place = draw.randrange(mine.numel())
    if world.rank == of % world.world_size:
        mine.view(-1)[place] = bad
    expected = quantized_all_reduce(mine, scheme, None)
    total = comm.begin_all_reduce(mine.clone(), overlap).wait()
    if not same_bits(total, expected) or not same_on_all_ranks(total):
        return f"other bits, with {bad}"
    return "" if bool(total.view(-1)[place].isnan()) == (bad != 1.5) else f"{bad} became {total.view(-1)[place]}"


def wrong_gathers(world: World, comm: Any, generator: torch.Generator) -> list[str]:
    found = []
    for shape, dtype in (((1, 1), torch.int64), ((7, 3), torch.int64), ((3, 2, 50), torch.float16), ((2, 3), torch.int8)):
        shards = torch.randint(-100, 100, (world.world_size, *shape), generator=generator).to(dtype)
        if not torch.equal(comm.all_gather(shards[world.rank]), torch.cat(list(shards), dim=-1)):
            found.append(f"gather {shape} {dtype}")
    return found


# with the numbers of ranks, in turn
NAMES: dict[str, list[int]] = {
    "gloo": [1, 3],
    "gloo int4": [2, 3],
    "hierarchical": [4],
    "one-shot": [2, 4],
    "two-shot": [4, 2],
    "host": [3, 2],
    "copy-engines": [1, 2, 3, 4],
    "kernel int8": [1, 2, 4, 3],
    "kernel int6": [2, 4, 3],
    "kernel int4:32": [4, 3, 1, 2],
    "kernel fp8:64": [3, 1, 2],
    "kernel int8:16:symmetric": [3],
    "kernel int4:512:symmetric": [3],
    "relay": [1, 2, 3, 4],
    "relay int8": [2, 3],
    "relay int6:64": [3, 4],
    "relay int4:token:hadamard": [4, 2],
}


@pytest.mark.parametrize(("place", "name"), list(enumerate(NAMES)))
def test_sums_and_gathers(interpreters: Ranks, place: int, name: str, in_turn: Callable[..., int], seed: int) -> None:
    n = in_turn(NAMES[name], place)
    assert interpreters.run(n, wrong_sums, name, seed) == [[]] * n, f"seed {seed}"


# --- norms --------------------------------------------------------------------------------------------------------------------


def wrong_norms(world: World, name: str, seed: int) -> list[str]:
    """Sums with a residual addition and a norm, also in 8 bits, that are wrong. A row that is not finite has the scale NaN."""
    from tests.support.kernels import codes_as_on_a_gpu

    kind, _, text = name.partition(" ")
    scheme, generator, found = parse_scheme(text) if text else None, torch.Generator().manual_seed(seed), []
    shapes = [
        (1, 96, torch.float32),
        (5, 250, torch.float32),
        (9, 64, torch.float16),
        (5, 976, torch.float16),
        (3, 33, torch.bfloat16),
    ]
    with opened(world, kind, scheme) as comm:
        for rows, width, dtype in shapes[:-1] if scheme else shapes:
            partial, exact = partials(world, generator, 1, rows, width, dtype=dtype)
            x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((1, rows, width), (width,)))
            total, normed = comm.begin_all_reduce(partial.clone()).add_norm(x, weight, 1e-5)
            if scheme is None:  # the two-shot kernel rounds the sum before the addition
                right = close(total, x.double() + exact, STEPS[dtype], x.abs() + exact.abs())
            else:
                right = same_bits(total, x + quantized_all_reduce(partial, scheme, None))
            expected = F.rms_norm(total.double(), (width,), weight.double(), 1e-5)
            right = (
                right and close(normed, expected, 2 * STEPS[dtype]) and same_on_all_ranks(total) and same_on_all_ranks(normed)
            )
            found += [] if right else [f"{rows} {width} {dtype}"]
            if width % 16 == 0 and dtype == torch.float16:
                partial[0, 0, 5] = torch.nan
                with codes_as_on_a_gpu():
                    codes_total, codes = comm.begin_all_reduce(partial.clone()).add_norm_codes(x, weight, 1e-5)
                total, normed = comm.begin_all_reduce(partial).add_norm(x, weight, 1e-5)
                found += [f"{rows} {width}: {what}" for what in differences_of_codes(codes, normed, exactly=scheme is None)]
                found += [] if same_bits(codes_total, total) else [f"{rows} {width}: sum before codes"]
    return found


def differences_of_codes(got: Any, normed: Tensor, exactly: bool = True) -> list[str]:
    """Where codes are not those of `normed`, bit by bit. exactly: else another kernel has computed the norm."""
    from kernels.row_codes import quantize_rows
    from tests.support.kernels import codes_as_on_a_gpu

    with codes_as_on_a_gpu():
        expected = quantize_rows(normed)
    finite = expected.scales[:, 0].isfinite()
    scales = got.scales[finite], expected.scales[finite]
    same = {
        "shape": got[2:] == expected[2:],
        "scales": torch.equal(*scales) if exactly else torch.allclose(*scales, rtol=1e-2),
        "codes": not exactly or torch.equal(got.codes.view(torch.uint8)[finite], expected.codes.view(torch.uint8)[finite]),
        "NaN": torch.equal(got.scales.isnan(), expected.scales.isnan()),
    }
    return [what for what, is_same in same.items() if not is_same]


NORMS = {"one-shot": [2, 4], "two-shot": [4, 2], "host": [3], "kernel fp8:16": [1], "kernel int4:64": [2]}


@pytest.mark.parametrize(("place", "name"), list(enumerate(NORMS)))
def test_a_sum_with_addition_and_norm(
    interpreters: Ranks, place: int, name: str, in_turn: Callable[..., int], seed: int
) -> None:
    n = in_turn(NORMS[name], place)
    assert interpreters.run(n, wrong_norms, name, seed) == [[]] * n, f"seed {seed}"


# --- waits --------------------------------------------------------------------------------------------------------------------


def lone_wait(world: World, name: str) -> None:
    """Rank 1 does not take part; rank 0 times out."""
    import comms.relay

    kind, _, text = name.partition(" ")
    with pytest.MonkeyPatch.context() as patch, opened(world, kind, parse_scheme(text) if text else None) as comm_:
        patch.setattr(comms.relay, "TIMEOUT", 0.1)
        if kind != "relay":
            comm_.blocking.workspace.exchange = replace(comm_.blocking.workspace.exchange, max_polls=20)
        if world.rank == 0:
            comm_.all_reduce(torch.ones(100))
            with pytest.raises(RuntimeError, match="rank 0 timed out"):
                comm_.check()


@pytest.mark.parametrize("name", ["one-shot", "two-shot", "host", "kernel int8", "relay"])
def test_a_rank_that_times_out_says_so(interpreters: Ranks, name: str) -> None:
    interpreters.run(2, lone_wait, name)


def begin_before_the_other(world: World, name: str) -> Tensor:
    """Rank 1 begins its all-reduce after rank 0 has begun its own, and said so through the store. If `begin_all_reduce` waited, this
    would deadlock."""
    kind, _, text = name.partition(" ")
    with opened(world, kind, parse_scheme(text) if text else None) as comm:
        if world.rank == 1:
            gather_objects(None)
        pending = comm.begin_all_reduce(torch.ones(500), overlap=True)
        if world.rank == 0:
            gather_objects(None)
        return pending.wait()


@pytest.mark.parametrize("name", ["gloo", "gloo int8"])
def test_beginning_does_not_wait_for_the_other_ranks(ranks: Ranks, name: str) -> None:
    for total in ranks.run(2, begin_before_the_other, name):
        assert (total - 2).abs().max() < 1e-3
