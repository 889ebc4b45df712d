"""Quantized all-reduces over shared memory: the kernels in Triton's interpreter on gloo ranks, bit for bit equal to the
two-step all-reduce over a process group; and on GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from comms import parse_scheme
from comms.quantized import quantized_all_reduce
from comms.registry import choose
from errors import UserError
from tests.comm.test_every_sum import values
from tests.support.gpus import gpu_report, needs_two
from tests.support.ranks import Ranks
from tests.support.sums import CPU, same_bits
from tp import World

pytest.importorskip("triton", reason="Triton is not installed; pip install triton")


def wrong_pieces(world: World, seed: int) -> list[str]:
    """Sizes whose all-reduce is wrong. Some take several launches, which leave old bytes in the buffers for later ones."""
    from comms.symmetric import wire_format_of
    from comms.workspace import open_workspace
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


def bf16_errors(world: World, seed: int) -> list[str]:
    """bf16 in, bf16 out. The tolerance is one bf16 step, because the interpreter truncates where it should round."""
    from comms.symmetric import QuantizedSymmetricCommunicator

    scheme, generator = parse_scheme("int8"), torch.Generator().manual_seed(seed)
    comm = QuantizedSymmetricCommunicator(scheme, CPU)
    mine = values(generator, world, 3001, dtype=torch.bfloat16)
    total, expected = comm.all_reduce(mine), quantized_all_reduce(mine, scheme, None)
    apart = (total.float() - expected.float()).abs() > torch.finfo(torch.bfloat16).eps * expected.float().abs()
    return [f"{int(apart.sum())} values"] if total.dtype != torch.bfloat16 or apart.any() else []


def test_bf16_goes_in_and_comes_out(interpreters: Ranks, seed: int) -> None:
    assert interpreters.run(2, bf16_errors, seed) == [[], []], f"seed {seed}"


def refusals(world: World) -> list[str]:
    from comms.symmetric import QuantizedSymmetricCommunicator, wire_format_of
    from comms.workspace import open_workspace
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
    from comms.symmetric import launch_tilings
    from kernels.quantized_all_reduce import MAX_REGISTERS, WARPS_OF_SM

    assert WARPS_OF_SM * 32 * MAX_REGISTERS == 65536  # the registers of an SM
    blocking, overlapped, norm = launch_tilings(sms)
    for first, second in ((blocking, overlapped), (overlapped, blocking), (norm, overlapped), (overlapped, norm)):
        room = fewest_free_slots(sms, first.programs, first.warps, second.warps)
        assert second.programs <= room, f"{second} with {first}"


# --- GPUs --------------------------------------------------------------------------------------------------------------------


@needs_two
def test_on_gpus(tmp_path: Path) -> None:
    """The same bits as the two-step all-reduce over NCCL, in all widths, also after thousands of graph replays."""
    pattern = "correct quantized|replays quantized"
    report = gpu_report("tests.comm.gpu_all_reduce_rank", tmp_path, pattern, most=8, timeout=600)
    assert {"correct quantized", "replays quantized"} <= report["found"].keys()
