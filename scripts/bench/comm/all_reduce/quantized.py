"""Checks and times of the quantized all-reduces."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from comm.quantize import WIDTHS, parse_scheme
from comm.quantized import QuantizedNcclCommunicator, quantized_all_reduce
from comm.table import graph_microseconds
from kernels.norm import add_rms_norm
from kernels.quantized_all_reduce import RoundTiling, quantized_add_norm, quantized_sum
from scripts.bench.comm.all_reduce.bench import WIDTH, Bench
from scripts.bench.comm.parts import Replays

SIDE_STREAM_WIDTHS = ("int8", "int4")  # also tested on the side stream
SIZES = [1 << n for n in (16, 18, 20, 22, 24, 26, 27)]
TILINGS = [
    *(RoundTiling(2048, 4, programs, rounds) for programs in (132, 264, 396) for rounds in (1, 4, 8)),
    *(RoundTiling(4096, 8, programs, rounds) for programs in (66, 132, 264) for rounds in (2, 4)),
]


def sums(bench: Bench) -> int:
    """Check that quantized all-reduces have the same bits as the two-step algorithm over NCCL, with sizes in random order.

    All widths run on the main stream, and SIDE_STREAM_WIDTHS also on the side stream. The sizes need only a few kernels, because
    each takes seconds to compile. Returns the number of checks.
    """
    jobs = [(name, n, False) for name in WIDTHS for n in (9, 8200, 70001, 128, 65536, 1 << 20, 9 << 20, 34 << 20)]
    jobs += [(name, n, True) for name in SIDE_STREAM_WIDTHS for n in (128, 1 << 20, 9 << 20)]
    bench.draw.shuffle(jobs)
    for name, n, overlap in jobs:
        mine, ours = bench.random(n), bench.quantized[name]
        mine[bench.draw.randrange(n) // 128 * 128 :][:128] = bench.draw.choice((0.0, -0.0, 3.25, 1e-30))
        total = ours.begin_all_reduce(mine, overlap=overlap).wait()
        bench.check_same(f"{name} {n} {overlap=}", total, quantized_all_reduce(mine, parse_scheme(name), None))
    return len(jobs)


def norms(bench: Bench) -> int:
    """Check the all-reduce, residual addition and norm of int8. Returns the number of checks."""
    name, weight, some_rows = "int8", bench.common(WIDTH), (1, 7, 64, 2048)
    for rows in some_rows:
        ours, mine, x = bench.quantized[name], bench.random(rows, WIDTH), bench.common(rows, WIDTH)
        total, normed = ours.begin_all_reduce(mine).add_norm(x, weight, 1e-5)
        bench.check_same(f"{name} add {rows}", total, x + quantized_all_reduce(mine, parse_scheme(name), None))
        exact = torch.nn.functional.rms_norm(total.float(), (WIDTH,), weight.float(), 1e-5)
        plain = torch.nn.functional.rms_norm(total, (WIDTH,), weight, 1e-5)
        bench.check_close(f"{name} norm {rows}", normed, exact, plain, torch.bfloat16)
    return len(some_rows)


def replays(bench: Bench, count: int) -> dict[str, float]:
    """Replay a CUDA graph of quantized all-reduces on both streams.

    Inputs rotate among three tables while the buffers alternate between two slots, so that every slot sees every table. The
    graph itself counts the values that differ from the two-step algorithm over NCCL. Returns the number of replays and the
    µs per replay.
    """
    test = Replays(bench.world.device)
    tables = {name: bench.random(3, 3 * WIDTH) for name in bench.quantized}
    expected = {
        name: torch.stack([quantized_all_reduce(x, parse_scheme(name), None) for x in tables[name]]) for name in bench.quantized
    }

    def body() -> None:
        turns = [(test.step + i) % 3 for i in range(2)]
        for name, ours in bench.quantized.items():
            inputs = [tables[name].index_select(0, turn.view(1)).view(-1) for turn in turns]
            other = ours.begin_all_reduce(inputs[1], overlap=name in SIDE_STREAM_WIDTHS)
            sums = (ours.all_reduce(inputs[0]), other.wait())
            for total, turn in zip(sums, turns, strict=True):
                test.wrong.add_((total != expected[name].index_select(0, turn.view(1)).view(-1)).sum())

    def between() -> None:  # a long all-reduce
        bench.quantized["int8"].all_reduce(bench.random(1 << 20))

    return {"replays": count, "microseconds": test.run(body, count, between, every=500)}


def on_main_stream(bench: Bench, name: str) -> dict[int, float]:
    """µs by bytes."""
    return bench.blocking(bench.quantized[name], SIZES)


def portable(bench: Bench, name: str) -> dict[int, float]:
    """µs by bytes of the two-step algorithm over NCCL."""
    comm, sizes = QuantizedNcclCommunicator(parse_scheme(name)), (1 << 20, 1 << 24, 1 << 26)
    calls = {n: partial(comm.all_reduce, bench.random(n // 2)) for n in sizes}
    return {n: round(graph_microseconds(call, chain=4, replays=5), 2) for n, call in calls.items() if bench.in_time()}


def on_side_stream(bench: Bench, name: str) -> dict[int, float]:
    """µs by bytes on the side stream."""
    comm = bench.quantized[name]
    return bench.by_size(lambda x: lambda: comm.begin_all_reduce(x, overlap=True).wait(), (1 << 20, 1 << 24, 1 << 26))


def tilings(bench: Bench, name: str) -> dict[str, dict[int, float]]:
    """µs by tiling and bytes."""
    kernel = bench.quantized_kernel(name)
    exchange = kernel.workspace.exchange
    return {
        f"{t.block}x{t.warps}x{t.programs}x{t.rounds}": bench.by_size(
            lambda x, t=t: lambda: quantized_sum(x, kernel.wire, exchange, t),  # type: ignore[misc]
            (1 << 20, 1 << 24, 1 << 26),
        )
        for t in TILINGS
    }


def with_norm(bench: Bench) -> dict[str, dict[int, float]]:
    """µs of all-reduce, residual addition and norm by rows of WIDTH: in two kernels, in one, and in one with other tilings."""
    weight, kernel = bench.common(WIDTH), bench.quantized_kernel("int8")
    calls: dict[str, Callable[[Tensor, Tensor], object]] = {
        "nccl, then add_rms_norm": lambda p, x: bench.nccl.begin_all_reduce(p).add_norm(x, weight, 1e-5),
        "int8, then add_rms_norm": lambda p, x: add_rms_norm(x, kernel.all_reduce(p), weight, 1e-5),
    }
    for programs, rounds in ((132, 4), (84, 1), (84, 4), (84, 8), (42, 4)):
        calls[f"int8, fused, {programs} programs, {rounds} rounds"] = partial(
            lambda tiling, p, x: quantized_add_norm(p, x, weight, 1e-5, kernel.wire, kernel.workspace.exchange, tiling),
            replace(kernel.norm, programs=programs, rounds=rounds),
        )
    found: dict[str, dict[int, float]] = {}
    for name, call in calls.items():
        for rows in (64, 1024, 4096):
            p, x = bench.random(rows, WIDTH), bench.random(rows, WIDTH)
            if bench.in_time():
                found.setdefault(name, {})[rows] = round(graph_microseconds(partial(call, p, x)), 2)
    return found
