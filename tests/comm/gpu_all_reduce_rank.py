"""A rank of the GPU tests of all-reduces: exact ones against sums in fp32, quantized ones against the two-step algorithm over NCCL,
alone, with norms, beside GEMMs, and in CUDA graphs that are replayed.

    python launch.py --ranks 4 -m tests.comm.gpu_all_reduce_rank REPORT.json "correct|replays"
"""

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from comms.quantize import WIDTHS, parse_scheme
from comms.quantized import quantized_all_reduce
from comms.symmetric import KINDS, OVERLAP_CAPACITY
from kernels.row_codes import RowCodes, quantize_rows
from scripts.bench.comm.all_reduce import SIDE_STREAM_WIDTHS, WIDTH, Bench
from scripts.bench.comm.parts import join_ranks
from tests.support.gpu_checks import OnAllRanks, Replays

REPLAYS = 2000
NEAR = 2.0**-18  # relative: more than two fp32 norms of a row differ by


class Checks(OnAllRanks, Bench):
    """The communicators under test, and how their results are compared."""

    def check_sum(self, what: str, got: Tensor, partial: Tensor, dtype: torch.dtype, x: Tensor | None = None) -> None:
        """Raise AssertionError unless `got` has the same bits on all ranks and at most twice the error of summing in `dtype`."""
        parts = self.everyones(partial)
        exact = parts.float().sum(0) + (0 if x is None else x.float())
        plain = parts[0].clone() if x is None else x + parts[0]
        for part in parts[1:]:
            plain = plain + part
        self.check_close(what, got, exact, plain, dtype)

    def check_close(self, what: str, got: Tensor, exact: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
        """Raise AssertionError unless `got` has the same bits on all ranks and at most twice the error of `plain`."""
        bits = self.everyones(got.contiguous().view(torch.uint8))
        assert all(torch.equal(bits[0], other) for other in bits), f"{what}: the ranks differ"
        error, allowed = (got.float() - exact).abs().max().item(), (plain.float() - exact).abs().max().item()
        floor = torch.finfo(dtype).eps * exact.abs().max().item()
        assert error <= max(2 * allowed, floor), f"{what}: error {error}, plain {allowed}"

    def check_same(self, what: str, got: Tensor, expected: Tensor) -> None:
        """Raise AssertionError unless both tensors have the same bits."""
        apart = int((got.view(torch.uint8) != expected.view(torch.uint8)).view(*got.shape, -1).any(-1).sum())
        assert apart == 0, f"{what}: {apart} of {got.numel()} values"


def sums(bench: Checks, dtype: torch.dtype, sizes: Iterable[int]) -> int:
    """Check all-reduces of both kinds on both streams, with sizes in random order. Returns the number of checks."""
    jobs = [(kind, n, overlap) for kind in KINDS for n in sizes for overlap in (False, True)]
    bench.draw.shuffle(jobs)
    for kind, n, overlap in jobs:
        mine, ours = bench.random(n, dtype=dtype), bench.ours[kind]
        handle = ours.begin_all_reduce(mine.clone(), overlap=overlap)
        bench.check_sum(f"{kind} {n} {dtype} {overlap=}", handle.wait(), mine, dtype)
    return len(jobs)


def norms(bench: Checks, shapes: Iterable[tuple[int, int]]) -> int:
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


def gathers(bench: Checks) -> int:
    """Check all-gathers, which must copy all bits. Returns the number of checks."""
    shapes = [(1, 1), (64, 1), (64, 3), (7, 33), (1, 8000)]
    for rows, n in shapes:
        shard = torch.randint(-(2**62), 2**62, (rows, n), generator=bench.generator, device=bench.world.device)
        got = bench.ours["one-shot"].all_gather(shard)
        assert torch.equal(got, torch.cat(list(bench.everyones(shard)), dim=-1)), f"gather {rows} {n}"
    return len(shapes)


def replays(bench: Checks) -> float:
    """Replay a CUDA graph of all-reduces of both kinds on both streams, with norms and all-gathers between them.

    Each replay has other inputs. They are small integers, whose sums are exact, and the graph itself counts wrong values.
    Returns the µs of a replay.
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

    return test.run(body, REPLAYS, between)


def during_gemms(bench: Checks) -> float:
    """Check all-reduces of the longest messages on the side stream while GEMMs occupy every SM, as in a ladder's prefill.

    The programs of such an all-reduce start late and at different times. Returns the µs of a replay.
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

    return test.run(body, REPLAYS // 10)


def quantized_sums(bench: Checks) -> int:
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


def quantized_norms(bench: Checks) -> int:
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


def quantized_replays(bench: Checks) -> float:
    """Replay a CUDA graph of quantized all-reduces on both streams.

    Inputs rotate among three tables while the buffers alternate between two slots, so that every slot sees every table. The
    graph itself counts the values that differ from the two-step algorithm over NCCL. Returns the µs of a
    replay.
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

    return test.run(body, REPLAYS, between, every=500)


def main() -> None:
    """Run the parts whose names match a regular expression, the most important first."""
    out, parts = sys.argv[1:]
    world = join_ranks("cuda")
    with torch.inference_mode():
        checks = Checks(world, 0, parts)
        shapes = [(1, 8192), (4, 8192), (16, 8192), (64, 8192), (3, 1000), (9, 4096)]
        checks.part("correct bf16", partial(sums, checks, torch.bfloat16, (8, 1000, 8192, 8200, 65536, 131072, 1 << 20)))
        checks.part("correct norms", partial(norms, checks, shapes))
        checks.part("correct gathers", partial(gathers, checks))
        checks.part("replays", partial(replays, checks))
        checks.part("replays beside GEMMs", partial(during_gemms, checks))
        checks.part("correct quantized", partial(quantized_sums, checks))
        checks.part("replays quantized", partial(quantized_replays, checks))
        checks.part("correct quantized norms", partial(quantized_norms, checks))
        for dtype in (torch.float32, torch.float16):
            checks.part(f"correct {dtype}", partial(sums, checks, dtype, (1, 7, 1001, 8192, 70000)))
    checks.write_gpu_report(Path(out), p2p=checks.peers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
