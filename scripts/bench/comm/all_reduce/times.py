"""Times of the exact all-reduces, alone, with a norm, and on the side stream during a GEMV."""

import re
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from comm.interface import Communicator
from comm.table import graph_microseconds
from kernels import all_reduce
from kernels.all_reduce import Tiling
from kernels.norm import add_rms_norm, add_rms_norm_codes
from scripts.bench.comm.all_reduce.bench import SIZES, WIDTH, Bench

ONE_SHOT_TILINGS = [Tiling(256, 4), Tiling(512, 8), Tiling(512, 4), Tiling(1024, 16)]
TWO_SHOT_TILINGS = (
    [Tiling(2048, 8, n) for n in (64, 128)]
    + [Tiling(4096, 8, n) for n in (16, 24, 64, 128)]
    + [Tiling(8192, 16, n) for n in (12, 64, 128)]
)


def torch_op(bench: Bench, name: str, sizes: Iterable[int]) -> dict[int, float]:
    """µs by bytes of an operator of PyTorch's symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric_memory

    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    buffer = symmetric_memory.empty(max(sizes) // 2, dtype=torch.bfloat16, device=bench.world.device)
    buffer.zero_()
    symmetric_memory.rendezvous(buffer, dist.group.WORLD)
    op = getattr(torch.ops.symm_mem, name)
    return bench.by_size(lambda x: lambda: op(buffer[: x.numel()], "sum", group), sizes)


def one_shot_tilings(bench: Bench) -> dict[str, dict[int, float]]:
    """µs by tiling and bytes."""
    exchange = bench.exchange("one-shot")
    sizes = [n for n in SIZES if n <= exchange.capacity]
    return {
        f"{t.block}x{t.warps}": bench.by_size(lambda x, t=t: lambda: all_reduce.one_shot(x, exchange, t), sizes)  # type: ignore[misc]
        for t in ONE_SHOT_TILINGS
    }


def two_shot_tilings(bench: Bench) -> dict[str, dict[int, float]]:
    """µs by tiling and bytes."""
    exchange = bench.exchange("two-shot")
    sizes = [n for n in SIZES if 1 << 15 <= n <= exchange.capacity]
    return {
        f"{t.block}x{t.warps}x{t.programs}": bench.by_size(
            lambda x, t=t: lambda: all_reduce.two_shot(x, exchange, t),  # type: ignore[misc]
            sizes,
        )
        for t in TWO_SHOT_TILINGS
    }


def with_norm(bench: Bench) -> dict[str, dict[int, float]]:
    """µs of all-reduce, residual addition and norm by rows of WIDTH, in one kernel and in two."""
    weight = bench.common(WIDTH)
    found: dict[str, dict[int, float]] = {}
    calls: dict[str, Callable[[Tensor, Tensor], object]] = {
        "nccl, then add_rms_norm": lambda p, x: bench.nccl.begin_all_reduce(p).add_norm(x, weight, 1e-5),
        "add_rms_norm alone": lambda p, x: add_rms_norm(x, p, weight, 1e-5),
    }
    for kind, ours in bench.ours.items():
        calls[f"{kind}, then add_rms_norm"] = lambda p, x, ours=ours: add_rms_norm(x, ours.all_reduce(p), weight, 1e-5)  # type: ignore[misc]
        calls[f"{kind}, then add_rms_norm_codes"] = lambda p, x, ours=ours: add_rms_norm_codes(  # type: ignore[misc]
            x, ours.all_reduce(p), weight, 1e-5
        )
        calls[f"{kind}, fused, in 8 bits"] = lambda p, x, ours=ours: ours.begin_all_reduce(p).add_norm_codes(x, weight, 1e-5)  # type: ignore[misc]
        calls[f"{kind}, fused"] = lambda p, x, ours=ours: ours.begin_all_reduce(p).add_norm(x, weight, 1e-5)  # type: ignore[misc]
    for t in ONE_SHOT_TILINGS:
        calls[f"one-shot, fused {t.block}x{t.warps}"] = lambda p, x, t=t: all_reduce.one_shot_add_norm(  # type: ignore[misc]
            p, x, weight, 1e-5, bench.exchange("one-shot"), t
        )
    for t in (Tiling(0, 8, 64), Tiling(0, 16, 64), Tiling(0, 16, 128)) if bench.peers else ():
        calls[f"two-shot, fused {t.warps}x{t.programs}"] = lambda p, x, t=t: all_reduce.two_shot_add_norm(  # type: ignore[misc]
            p, x, weight, 1e-5, bench.exchange("two-shot"), t
        )
    for name, call in calls.items():
        found[name] = {}
        for rows in (1, 4, 16, 64, 128):
            partial, x = bench.random(rows, WIDTH), bench.random(rows, WIDTH)
            # in one-shot kernels all programs of a row wait for each other, so all must be resident on the GPU at once
            if bench.in_time() and (not re.match("one-shot, fused [0-9]", name) or rows <= 16):
                found[name][rows] = round(graph_microseconds(lambda c=call, p=partial, x=x: c(p, x)), 2)  # type: ignore[misc]
    return found


def during_a_gemv(bench: Bench) -> dict[str, dict[int, float]]:
    """µs of an all-reduce on the side stream overlapped with a GEMV of 7168 x 8192 weights, and of the GEMV alone."""
    weight = bench.random(7168, WIDTH)
    found: dict[str, dict[int, float]] = {}
    comms: dict[str, Communicator] = {"nccl": bench.nccl, **{str(kind): ours for kind, ours in bench.ours.items()}}
    for rows in (1, 64):
        x, partial = bench.random(rows, WIDTH), bench.random(rows, WIDTH)

        def alone(x: Tensor = x) -> None:
            torch.nn.functional.linear(x, weight)

        found.setdefault("GEMV alone", {})[rows] = round(graph_microseconds(alone), 2)
        for name, comm in comms.items():

            def both(x: Tensor = x, partial: Tensor = partial, comm: Communicator = comm) -> None:
                handle = comm.begin_all_reduce(partial, overlap=True)
                torch.nn.functional.linear(x, weight)
                handle.wait()

            found.setdefault(name, {})[rows] = round(graph_microseconds(both), 2)
    return found
