"""Quantized all-reduces over shared memory: the kernels in Triton's interpreter on gloo ranks, bit for bit equal to the
two-step all-reduce over a process group; and on GPUs."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comm import parse_scheme
from comm.quantized import quantized_all_reduce
from comm.registry import choose
from errors import UserError
from tests.comm.test_symmetric import bits_by_rank
from tests.support.gpus import most_ranks, torchrun
from tests.support.ranks import Ranks
from tp import World

pytest.importorskip("triton", reason="Triton is not installed; pip install triton")

CPU = torch.device("cpu")
# without bf16: the interpreter truncates where it should round to bf16
EXACT = (torch.float32, torch.float16)


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


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """Whether the dtype and the bits are equal, except for those of NaNs."""
    signs = got.isnan() | (got.signbit() == expected.signbit())
    return got.dtype == expected.dtype and torch.equal(got.nan_to_num(7), expected.nan_to_num(7)) and bool(signs.all())


def wrong_sums(world: World, names: list[str], units: list[float], seed: int) -> list[str]:
    """Messages whose all-reduce is wrong. A unit is one tile of each rank. Dtypes alternate; Blocking or overlapped, which have
    separate workspaces, is chosen at random; some messages hold a NaN or an infinity."""
    from comm.symmetric import QuantizedSymmetricCommunicator

    draw, generator, found = random.Random(seed), torch.Generator().manual_seed(seed), []
    for name in names:
        scheme = parse_scheme(name)
        comm = QuantizedSymmetricCommunicator(scheme, CPU)
        tiling = replace(comm.blocking.tiling, block=256, programs=2, rounds=2)
        comm.blocking = replace(comm.blocking, tiling=tiling)
        comm.overlapped = replace(comm.overlapped, tiling=replace(tiling, programs=1, rounds=3))
        draw.shuffle(units)
        for job, unit in enumerate(units):
            n, dtype, overlap = max(1, int(unit * 256 * world.world_size)), EXACT[job % 2], draw.random() < 0.5
            mine = values(generator, world, n, dtype=dtype)
            place = draw.randrange(n)
            bad = draw.choice((1.5, torch.nan, torch.inf, -torch.inf))
            of = draw.randrange(world.world_size)
            if world.rank == of:
                mine[place] = bad
            expected = quantized_all_reduce(mine, scheme, None)
            total = comm.begin_all_reduce(mine.clone(), overlap).wait()
            if not same_bits(total, expected) or len(set(bits_by_rank(total.nan_to_num(7)))) != 1:
                found.append(f"{name} {n} {dtype} {overlap=} {bad}")
            if bool(total[place].isnan()) != (bad != 1.5):
                found.append(f"{name}: {bad} became {total[place]}")
        comm.check()
    return found


@pytest.mark.parametrize(("place", "name"), list(enumerate(["int8", "int6", "int4", "fp8"])))
def test_the_same_bits_as_the_two_steps(
    interpreters: Ranks, place: int, name: str, in_turn: Callable[..., int], seed: int
) -> None:
    """Messages of one value, of complete and incomplete groups, of one round and of several rounds."""
    n = in_turn([1, 2, 4, 3], place)
    names = [name, random.choice([f"{name}:32", f"{name}:64"])]
    units = [0.0, 1.0, random.uniform(0.01, 2), random.uniform(2, 3)]
    assert interpreters.run(n, wrong_sums, names, units, seed) == [[]] * n, f"seed {seed}"


def test_other_groups_and_no_zero_points(interpreters: Ranks, seed: int) -> None:
    names = ["int8:16:symmetric", "int4:512:symmetric", "int4:16"]
    assert interpreters.run(3, wrong_sums, names, [random.uniform(0.5, 1), 1.3], seed) == [[]] * 3, f"seed {seed}"


def wrong_pieces(world: World, seed: int) -> list[str]:
    """Sizes whose all-reduce is wrong. Some take several launches, which leave old bytes in the buffers for later ones."""
    from comm.symmetric import wire_format_of
    from comm.workspace import open_workspace
    from kernels.quantized_all_reduce import BLOCKING, quantized_sum

    scheme, generator, found = parse_scheme("int6:64"), torch.Generator().manual_seed(seed), []
    wire = wire_format_of(scheme)
    assert wire is not None
    workspace = open_workspace(wire.buffer_bytes, 4096, CPU)
    exchange = workspace.exchange
    for n in (5000, 10, 0, 4096):
        mine = values(generator, world, n)
        total = quantized_sum(mine, wire, exchange, replace(BLOCKING, block=512, programs=3))
        if n and not same_bits(total, quantized_all_reduce(mine, scheme, None)):
            found.append(str(n))
    launches = sum(-(-n // (4096 // (512 * world.world_size) * 512 * world.world_size)) for n in (5000, 10, 4096))
    return found + (["epochs"] if set(exchange.epochs.tolist()) != {launches} else [])


@pytest.mark.parametrize("n", [2, 3])
def test_messages_longer_than_the_workspace(interpreters: Ranks, n: int, seed: int) -> None:
    assert interpreters.run(n, wrong_pieces, seed) == [[]] * n, f"seed {seed}"


def wrong_norms(world: World, names: list[str], seed: int) -> list[str]:
    from comm.symmetric import QuantizedSymmetricCommunicator
    from kernels.quantized_all_reduce import fits_norm

    generator, found = torch.Generator().manual_seed(seed), []
    for name in names:
        scheme = parse_scheme(name)
        comm = QuantizedSymmetricCommunicator(scheme, CPU)
        comm.blocking = replace(comm.blocking, norm=replace(comm.blocking.norm, programs=2))
        for rows, width, dtype in (
            (1, 64, torch.float32),
            (9, 192, torch.float32),
            (7, 320, torch.float16),
            (3, 100, torch.float32),
        ):
            mine = torch.randn(world.world_size, rows, width, generator=generator)[world.rank].to(dtype)
            x = torch.randn(rows, width, generator=generator).to(dtype)
            weight = torch.randn(width, generator=generator).to(dtype)
            assert fits_norm(mine, x, weight, comm.blocking.wire, comm.blocking.workspace.exchange) == (width != 100)
            expected = x + quantized_all_reduce(mine, scheme, None)
            total, normed = comm.begin_all_reduce(mine).add_norm(x, weight, 1e-5)
            exact = F.rms_norm(expected.double(), (width,), weight.double(), 1e-5)
            bound = 4 * torch.finfo(dtype).eps * exact.abs() + 1e-6
            if not same_bits(total, expected) or not bool(((normed.double() - exact).abs() <= bound).all()):
                found.append(f"{name} {rows} {width} {dtype}")
            if len(set(bits_by_rank(normed))) != 1:
                found.append(f"ranks differ: {name} {rows} {width} {dtype}")
            if width % 16 == 0:
                codes_total, codes = comm.begin_all_reduce(mine).add_norm_codes(x, weight, 1e-5)
                largest = normed.float().abs().amax(-1, keepdim=True)
                if not same_bits(codes_total, expected) or not torch.allclose(codes.scales, largest / 448, rtol=1e-2):
                    found.append(f"codes {name} {rows} {width} {dtype}")
        comm.check()
    return found


@pytest.mark.parametrize(("name", "n"), [("fp8:16", 1), ("int4:64", 2), ("int8:32", 4)])
def test_a_sum_with_addition_and_norm(interpreters: Ranks, name: str, n: int, seed: int) -> None:
    assert interpreters.run(n, wrong_norms, [name], seed) == [[]] * n, f"seed {seed}"


def bf16_errors(world: World, seed: int) -> list[str]:
    """bf16 in, bf16 out. The tolerance is one bf16 step, because the interpreter truncates where it should round."""
    from comm.symmetric import QuantizedSymmetricCommunicator

    scheme, generator = parse_scheme("int8"), torch.Generator().manual_seed(seed)
    comm = QuantizedSymmetricCommunicator(scheme, CPU)
    mine = values(generator, world, 3001, dtype=torch.bfloat16)
    total, expected = comm.all_reduce(mine), quantized_all_reduce(mine, scheme, None)
    apart = (total.float() - expected.float()).abs() > torch.finfo(torch.bfloat16).eps * expected.float().abs()
    return [f"{int(apart.sum())} values"] if total.dtype != torch.bfloat16 or apart.any() else []


def test_bf16_goes_in_and_comes_out(interpreters: Ranks, seed: int) -> None:
    assert interpreters.run(2, bf16_errors, seed) == [[], []], f"seed {seed}"


def gathered_and_empty(world: World) -> tuple[Tensor, list[int]]:
    from comm.symmetric import QuantizedSymmetricCommunicator

    comm = QuantizedSymmetricCommunicator(parse_scheme("int4"), CPU)
    shard = torch.arange(3.0).view(1, 3) / 7 + world.rank
    return comm.all_gather(shard), list(comm.all_reduce(torch.zeros(0, 5)).shape)


def test_gathers_are_exact_and_an_empty_sum_is_empty(interpreters: Ranks) -> None:
    for gathered, shape in interpreters.run(2, gathered_and_empty):
        assert torch.equal(gathered, torch.cat([torch.arange(3.0).view(1, 3) / 7 + r for r in range(2)], dim=1))
        assert shape == [0, 5]


def lone_wait(world: World) -> list[str]:
    """Rank 1 does not take part. Rank 0 times out, in every phase that waits."""
    from comm.symmetric import QuantizedSymmetricCommunicator

    comm = QuantizedSymmetricCommunicator(parse_scheme("int8"), CPU)
    comm.blocking.workspace.exchange = replace(comm.blocking.workspace.exchange, max_polls=20)
    if world.rank == 0:
        comm.all_reduce(torch.ones(100))
        with pytest.raises(RuntimeError, match="rank 0 timed out"):
            comm.check()
    else:
        comm.check()
    return []


def test_a_rank_that_times_out_says_so(interpreters: Ranks) -> None:
    assert interpreters.run(2, lone_wait) == [[], []]


def refusals(world: World) -> list[str]:
    from comm.symmetric import QuantizedSymmetricCommunicator, wire_format_of
    from comm.workspace import open_workspace
    from kernels.quantized_all_reduce import BLOCKING, quantized_add_norm, quantized_sum

    wire = wire_format_of(parse_scheme("int8:64"))
    assert wire is not None
    workspace = open_workspace(wire.buffer_bytes, 1024, CPU)
    exchange = workspace.exchange
    x, said = torch.ones(2, 96), []
    for call in (
        lambda: quantized_sum(torch.ones(9), wire, exchange, replace(BLOCKING, block=1024)),
        lambda: quantized_add_norm(x, x, x[0], 1e-5, wire, exchange),
        lambda: QuantizedSymmetricCommunicator(parse_scheme("int8:hadamard"), CPU),
    ):
        try:
            call()
            said.append("nothing")
        except (ValueError, UserError) as error:
            said.append(str(error))
    return [*said, type(choose("cpu", "int4:token").build()).__name__]


def test_what_does_not_fit_is_refused(interpreters: Ranks) -> None:
    for capacity, rows, scheme, other in interpreters.run(2, refusals):
        assert "2 tiles of 1024" in capacity and "takes 1024" in capacity
        assert "(2, 96)" in rows and "64" in rows
        assert "int8:hadamard" in scheme
        assert other == "QuantizedGlooCommunicator"


def fewest_free_slots(sms: int, first: int, first_warps: int, warps: int) -> int:
    """How many programs of `warps` warps fit on a GPU of `sms` SMs together with `first` programs of `first_warps`
    warps, if the latter are distributed over the SMs in the worst way."""
    from kernels.quantized_all_reduce import WARPS_OF_SM

    room = [(WARPS_OF_SM - k * first_warps) // warps for k in range(WARPS_OF_SM // first_warps + 1)]
    least = {0: 0}  # fewest places, by number of first programs on the SMs so far
    for _ in range(sms):
        after: dict[int, int] = {}
        for placed, places in least.items():
            for k, more in enumerate(room):
                if placed + k <= first:
                    after[placed + k] = min(after.get(placed + k, places + more), places + more)
        least = after
    return least[first]


@pytest.mark.parametrize("sms", [8, 56, 84, 108, 114, 132, 144])
def test_kernels_that_wait_fit_a_gpu_in_any_distribution(sms: int) -> None:
    from comm.symmetric import launch_tilings
    from kernels.quantized_all_reduce import MAX_REGISTERS, WARPS_OF_SM

    assert WARPS_OF_SM * 32 * MAX_REGISTERS == 65536  # the registers of an SM
    blocking, overlapped, norm = launch_tilings(sms)
    for first, second in ((blocking, overlapped), (overlapped, blocking), (norm, overlapped), (overlapped, norm)):
        room = fewest_free_slots(sms, first.programs, first.warps, second.warps)
        assert second.programs <= room, f"{second} with {first}"


# --- GPUs --------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(most_ranks() < 2, reason="needs two GPUs")
def test_on_gpus(tmp_path: Path) -> None:
    """The same bits as the two-step all-reduce over NCCL, in all widths, also after thousands of graph replays."""
    out = tmp_path / "comm.json"
    program = ("-m", "tests.comm.gpu_all_reduce_rank", str(out), "correct quantized|replays quantized")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"NCCL_NVLS_ENABLE": "0"}
    torchrun(min(8, most_ranks()), *program, timeout=600, env=environment)
    report = json.loads(out.read_text())
    assert report["errors"] == {}
    assert {"correct quantized", "replays quantized"} <= report["found"].keys()
