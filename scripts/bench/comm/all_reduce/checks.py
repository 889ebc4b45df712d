"""Checks of the exact all-reduces, of norms after them, and of all-gathers."""

from collections.abc import Iterable

import torch
from torch import Tensor

from comm.symmetric import KINDS, OVERLAP_CAPACITY
from kernels.row_codes import RowCodes, quantize_rows
from scripts.bench.comm.all_reduce.bench import WIDTH, Bench
from scripts.bench.comm.parts import Replays

NEAR = 2.0**-18  # relative: more than two fp32 norms of a row differ by


def sums(bench: Bench, dtype: torch.dtype, sizes: Iterable[int]) -> int:
    """Check all-reduces of both kinds on both streams, with sizes in random order. Returns the number of checks."""
    jobs = [(kind, n, overlap) for kind in KINDS for n in sizes for overlap in (False, True)]
    bench.draw.shuffle(jobs)
    for kind, n, overlap in jobs:
        mine, ours = bench.random(n, dtype=dtype), bench.ours[kind]
        handle = ours.begin_all_reduce(mine.clone(), overlap=overlap)
        bench.check_sum(f"{kind} {n} {dtype} {overlap=}", handle.wait(), mine, dtype)
    return len(jobs)


def norms(bench: Bench, shapes: Iterable[tuple[int, int]]) -> int:
    """Check all-reduces of both kinds with residual addition and norm, and that the norm in 8 bits has the codes of the one in 16
    bits. Returns the number of checks."""
    dtype, jobs = torch.bfloat16, [(kind, rows, width) for kind in KINDS for rows, width in shapes]
    for kind, rows, width in jobs:
        partial, x = bench.random(rows, width, dtype=dtype), bench.common(rows, width, dtype=dtype)
        weight = bench.common(width, dtype=dtype)
        total, normed = bench.ours[kind].begin_all_reduce(partial.clone()).add_norm(x, weight, 1e-5)
        bench.check_sum(f"{kind} add {rows} {width}", total, partial, dtype, x)
        exact = torch.nn.functional.rms_norm(total.float(), (width,), weight.float(), 1e-5)
        plain = torch.nn.functional.rms_norm(total, (width,), weight, 1e-5)
        bench.check_close(f"{kind} norm {rows} {width}", normed, exact, plain, dtype)
        if width % 16 == 0:
            after, codes = bench.ours[kind].begin_all_reduce(partial.clone()).add_norm_codes(x, weight, 1e-5)
            check_codes(f"{kind} codes {rows} {width}", codes, exact, dtype)
            bench.check_same(f"{kind} sum before codes {rows} {width}", after, total)
    return len(jobs)


def check_codes(what: str, got: RowCodes, exact: Tensor, dtype: torch.dtype) -> None:
    """Raise AssertionError unless `got` has the codes and scales of `exact` (rows, width) fp32, rounded to dtype.

    Kernels add a row's squares in several orders, so a value very near the middle of two of dtype may become either of them. A row
    whose largest value is so near, and which may have either scale, is left out."""
    below, above = (quantize_rows((exact * (1 + side * NEAR)).to(dtype)) for side in (-1, 1))
    known = (below.scales == above.scales)[:, 0]
    codes, low, high = (each.codes.view(torch.uint8) for each in (got, below, above))
    apart = int(((codes != low) & (codes != high))[known].sum()) + int((got.scales != below.scales)[known].sum())
    assert apart == 0, f"{what}: {apart} of {codes.numel()} values and {len(codes)} scales"
    assert known.any(), f"{what}: all rows left out"


def gathers(bench: Bench) -> int:
    """Check all-gathers, which must copy all bits. Returns the number of checks."""
    shapes = [(1, 1), (64, 1), (64, 3), (7, 33), (1, 8000)]
    for rows, n in shapes:
        shard = torch.randint(-(2**62), 2**62, (rows, n), generator=bench.generator, device=bench.world.device)
        got = bench.ours["one-shot"].all_gather(shard)
        assert torch.equal(got, torch.cat(list(bench.everyones(shard)), dim=-1)), f"gather {rows} {n}"
    return len(shapes)


def replays(bench: Bench, count: int) -> dict[str, float]:
    """Replay a CUDA graph of all-reduces of both kinds on both streams, with norms and all-gathers between them.

    Each replay has other inputs. They are small integers, whose sums are exact, and the graph itself counts wrong values.
    Returns the number of replays and the µs per replay.
    """
    device, n, test = bench.world.device, bench.world.world_size, Replays(bench.world.device)
    index = torch.arange(3 * WIDTH, device=device).view(3, WIDTH)

    def values(rank: int, salt: int) -> Tensor:
        return ((index + test.step * 7 + rank * 5 + salt) % 16).bfloat16()

    def expected(salt: int) -> Tensor:
        return sum((values(rank, salt) for rank in range(n)), torch.zeros_like(values(0, 0)))

    x, weight = torch.zeros(3, WIDTH, dtype=torch.bfloat16, device=device), torch.ones(WIDTH, device=device).bfloat16()

    def body() -> None:
        for i, ours in enumerate(bench.ours.values()):
            overlapped = [ours.begin_all_reduce(values(bench.world.rank, i + salt), overlap=True) for salt in (0, 10)]
            total, _ = ours.begin_all_reduce(values(bench.world.rank, i + 3)).add_norm(x, weight, 1e-5)
            test.wrong.add_((total != expected(i + 3)).sum())
            test.wrong.add_((ours.all_reduce(values(bench.world.rank, i + 6)) != expected(i + 6)).sum())
            gathered = ours.all_gather(test.step.view(1, 1) * 10 + bench.world.rank)
            test.wrong.add_((gathered.flatten() != test.step * 10 + torch.arange(n, device=device)).sum())
            for handle, salt in zip(overlapped, (i, i + 10), strict=True):
                test.wrong.add_((handle.wait() != expected(salt)).sum())

    def between() -> None:
        test.wrong.add_((bench.ours["two-shot"].all_reduce(values(bench.world.rank, 1)) != expected(1)).sum())

    return {"replays": count, "microseconds": test.run(body, count, between)}


def during_gemms(bench: Bench, count: int) -> int:
    """Check all-reduces of the longest messages on the side stream while GEMMs occupy every SM, as in a ladder's prefill.

    The programs of such an all-reduce start late and at different times. Returns the number of replays.
    """
    x, weight = bench.random(1024, WIDTH), bench.random(WIDTH, WIDTH)
    test = Replays(bench.world.device)

    def body() -> None:
        for kind, ours in bench.ours.items():
            ones = torch.ones(OVERLAP_CAPACITY[kind] // 2, dtype=torch.bfloat16, device=bench.world.device)
            handles = [ours.begin_all_reduce(ones.clone(), overlap=True) for _ in range(16)]
            for _ in range(4):
                torch.mm(x, weight)
            for handle in handles:
                test.wrong.add_((handle.wait() != bench.world.world_size).sum())

    test.run(body, count)
    return count
