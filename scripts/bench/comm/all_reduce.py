"""Check the all-reduces over shared memory on GPUs, and compare their latency with NCCL's and PyTorch's.

    python launch.py --ranks 4 -m scripts.bench.comm.all_reduce --out out/comm.json

Parts are independent: a failed part is reported, and the others still run. A part that hangs ends the process with a traceback.
`--parts quantized` runs only the quantized all-reduces. With NCCL_P2P_DISABLE=1 all of them use host memory.
"""

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from cli import Parser
from cli import run as run_command
from comm.build import exact
from comm.interface import Communicator
from comm.process_group import NcclCommunicator
from comm.quantize import WIDTHS, parse_scheme
from comm.quantized import QuantizedNcclCommunicator, quantized_all_reduce
from comm.quantized_symmetric import QuantizedKernel, QuantizedSymmetricCommunicator
from comm.relay import RelayCommunicator
from comm.symmetric import CAPACITY, KINDS, OVERLAP_CAPACITY, KernelCommunicator, Kind, SymmetricCommunicator
from comm.table import graph_microseconds
from errors import UserError
from kernels import all_reduce
from kernels.all_reduce import Exchange, Tiling
from kernels.norm import add_rms_norm
from kernels.quantized_all_reduce import Rounds, quantized_add_norm, quantized_sum
from scripts.bench.comm.parts import Parts, Replays, add_gpu_options, join_ranks
from tp import World

WIDTH = 8192  # of a residual stream
PATIENCE = 1 << 25  # polls before a kernel gives up: enough for another rank to compile, but less than LONGEST_PART
SIZES = [1 << n for n in (12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 24, 26, 27)]
ONE_SHOT_TILINGS = [Tiling(256, 4), Tiling(512, 8), Tiling(512, 4), Tiling(1024, 16)]
TWO_SHOT_TILINGS = [Tiling(2048, 8, n) for n in (16, 32, 64, 128)] + [Tiling(4096, 8, n) for n in (8, 16, 24, 32, 64, 128)]
WIDTHS_BESIDE = ("int8", "int4")  # also tested on the side stream
QUANTIZED_SIZES = [1 << n for n in (16, 18, 20, 22, 24, 26, 27)]
QUANTIZED_TILINGS = [
    *(Rounds(2048, 4, programs, rounds) for programs in (132, 264, 396) for rounds in (1, 4, 8)),
    *(Rounds(4096, 8, programs, rounds) for programs in (66, 132, 264) for rounds in (2, 4)),
]


def impatient(ours: Communicator) -> None:
    """Lower the communicator's patience, so that its kernels give up waiting before the part's time limit."""
    if isinstance(ours, RelayCommunicator):
        ours.relay.patience = PATIENCE
    if isinstance(ours, KernelCommunicator):
        for workspace in (ours.blocking.workspace, ours.overlapped.workspace, ours.gathers):
            workspace.exchange = replace(workspace.exchange, patience=PATIENCE)


class Bench(Parts):
    """The communicators under test, the checks and the timings."""

    def __init__(self, world: World, seconds: float, parts: str) -> None:
        super().__init__(world, seconds, parts)
        self.nccl = NcclCommunicator()
        self.ours = self._over_shared_memory()
        for ours in self.ours.values():
            impatient(ours)

    def _over_shared_memory(self) -> dict[Kind, Communicator]:
        """The communicators over shared memory. Empty if the ranks are on several hosts."""
        try:
            return {kind: exact(kind, self.world.device) for kind in KINDS}
        except UserError as error:
            if self.world.rank == 0:
                print(f"nccl and portable forms only: {error}", file=sys.stderr)
            return {}

    @property
    def peers(self) -> bool:
        """Whether the GPUs can access each other's memory."""
        return any(isinstance(ours, SymmetricCommunicator) and ours.memory == "peer" for ours in self.ours.values())

    @cached_property
    def quantized(self) -> dict[str, Communicator]:
        """The quantized communicators by width, created at first use."""
        form = QuantizedSymmetricCommunicator if self.peers else RelayCommunicator
        made: dict[str, Communicator] = {name: form(parse_scheme(name), self.world.device) for name in WIDTHS}
        for ours in made.values():
            impatient(ours)
        return made

    def exchange(self, kind: Kind) -> Exchange:
        ours = self.ours[kind]
        assert isinstance(ours, SymmetricCommunicator)
        return ours.blocking.workspace.exchange

    def quantized_kernel(self, name: str) -> QuantizedKernel:
        ours = self.quantized[name]
        assert isinstance(ours, QuantizedSymmetricCommunicator) and isinstance(ours.blocking, QuantizedKernel)
        return ours.blocking

    def check(self) -> None:
        torch.cuda.synchronize()
        for ours in (*self.ours.values(), *self.__dict__.get("quantized", {}).values()):
            ours.check()

    def check_sum(self, what: str, got: Tensor, partial: Tensor, dtype: torch.dtype, x: Tensor | None = None) -> None:
        """Raise AssertionError unless `got` has the same bits on all ranks and at most twice the error of summing in `dtype`."""
        parts = self.everyones(partial)
        exact = parts.float().sum(0) + (0 if x is None else x.float())
        plain = parts[0].clone() if x is None else x + parts[0]
        for part in parts[1:]:
            plain = plain + part
        self.check_close(what, got, exact, plain, dtype)

    def check_close(self, what: str, got: Tensor, exact: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
        bits = self.everyones(got.contiguous().view(torch.uint8))
        assert all(torch.equal(bits[0], other) for other in bits), f"{what}: the ranks differ"
        error, allowed = (got.float() - exact).abs().max().item(), (plain.float() - exact).abs().max().item()
        floor = torch.finfo(dtype).eps * exact.abs().max().item()
        assert error <= max(2 * allowed, floor), f"{what}: error {error}, plain {allowed}"

    # --- correctness ---------------------------------------------------------------------------------------------------------

    def sums(self, dtype: torch.dtype, sizes: Iterable[int]) -> int:
        """Check all-reduces of both kinds on both streams, with sizes in random order. Returns the number of checks."""
        jobs = [(kind, n, beside) for kind in KINDS for n in sizes for beside in (False, True)]
        self.draw.shuffle(jobs)
        for kind, n, beside in jobs:
            mine, ours = self.random(n, dtype=dtype), self.ours[kind]
            handle = ours.begin_all_reduce(mine.clone(), overlap=beside)
            self.check_sum(f"{kind} {n} {dtype} {beside=}", handle.wait(), mine, dtype)
        return len(jobs)

    def norms(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype = torch.bfloat16) -> int:
        jobs = [(kind, rows, width) for kind in KINDS for rows, width in shapes]
        for kind, rows, width in jobs:
            partial, x, weight = self.random(rows, width, dtype=dtype), self.common(rows, width, dtype=dtype), None
            weight = self.common(width, dtype=dtype)
            total, normed = self.ours[kind].begin_all_reduce(partial.clone()).add_norm(x, weight, 1e-5)
            self.check_sum(f"{kind} add {rows} {width}", total, partial, dtype, x)
            exact = torch.nn.functional.rms_norm(total.float(), (width,), weight.float(), 1e-5)
            plain = torch.nn.functional.rms_norm(total, (width,), weight, 1e-5)
            self.check_close(f"{kind} norm {rows} {width}", normed, exact, plain, dtype)
        return len(jobs)

    def gathers(self) -> int:
        shapes = [(1, 1), (64, 1), (64, 3), (7, 33), (1, 8000)]
        for rows, n in shapes:
            shard = torch.randint(-(2**62), 2**62, (rows, n), generator=self.generator, device=self.world.device)
            got = self.ours["one-shot"].all_gather(shard)
            assert torch.equal(got, torch.cat(list(self.everyones(shard)), dim=-1)), f"gather {rows} {n}"
        return len(shapes)

    def replays(self, count: int) -> dict[str, float]:
        """Replay a CUDA graph of all-reduces of both kinds on both streams, with norms and all-gathers between them.

        Each replay has other inputs. They are small integers, whose sums are exact, and the graph itself counts wrong values.
        Returns the number of replays and the µs per replay.
        """
        device, n, test = self.world.device, self.world.world_size, Replays(self.world.device)
        index = torch.arange(3 * WIDTH, device=device).view(3, WIDTH)

        def values(rank: int, salt: int) -> Tensor:
            return ((index + test.step * 7 + rank * 5 + salt) % 16).bfloat16()

        def expected(salt: int) -> Tensor:
            return sum((values(rank, salt) for rank in range(n)), torch.zeros_like(values(0, 0)))

        x, weight = torch.zeros(3, WIDTH, dtype=torch.bfloat16, device=device), torch.ones(WIDTH, device=device).bfloat16()

        def body() -> None:
            for i, ours in enumerate(self.ours.values()):
                beside = [ours.begin_all_reduce(values(self.world.rank, i + salt), overlap=True) for salt in (0, 10)]
                total, _ = ours.begin_all_reduce(values(self.world.rank, i + 3)).add_norm(x, weight, 1e-5)
                test.wrong.add_((total != expected(i + 3)).sum())
                test.wrong.add_((ours.all_reduce(values(self.world.rank, i + 6)) != expected(i + 6)).sum())
                gathered = ours.all_gather(test.step.view(1, 1) * 10 + self.world.rank)
                test.wrong.add_((gathered.flatten() != test.step * 10 + torch.arange(n, device=device)).sum())
                for handle, salt in zip(beside, (i, i + 10), strict=True):
                    test.wrong.add_((handle.wait() != expected(salt)).sum())

        def between() -> None:
            test.wrong.add_((self.ours["two-shot"].all_reduce(values(self.world.rank, 1)) != expected(1)).sum())

        return {"replays": count, "microseconds": test.run(body, count, between)}

    # --- quantized all-reduces -----------------------------------------------------------------------------------------------

    def quantized_sums(self) -> int:
        """Check that quantized all-reduces have the same bits as the two-step algorithm over NCCL, with sizes in random order.

        All widths run on the main stream, and WIDTHS_BESIDE also on the side stream. The sizes need only a few kernels, because
        each takes seconds to compile. Returns the number of checks.
        """
        jobs = [(name, n, False) for name in WIDTHS for n in (9, 8200, 70001, 128, 65536, 1 << 20, 9 << 20, 34 << 20)]
        jobs += [(name, n, True) for name in WIDTHS_BESIDE for n in (128, 1 << 20, 9 << 20)]
        self.draw.shuffle(jobs)
        for name, n, beside in jobs:
            mine, ours = self.random(n), self.quantized[name]
            mine[self.draw.randrange(n) // 128 * 128 :][:128] = self.draw.choice((0.0, -0.0, 3.25, 1e-30))
            total = ours.begin_all_reduce(mine, overlap=beside).wait()
            self.check_same(f"{name} {n} {beside=}", total, quantized_all_reduce(mine, parse_scheme(name), None))
        return len(jobs)

    def check_same(self, what: str, got: Tensor, expected: Tensor) -> None:
        apart = int((got.view(torch.int16) != expected.view(torch.int16)).sum())
        assert apart == 0, f"{what}: {apart} of {got.numel()} values"

    def quantized_norms(self) -> int:
        jobs = [(name, rows) for name in ("int8",) for rows in (1, 7, 64, 2048)]
        weight = self.common(WIDTH)
        for name, rows in jobs:
            ours, mine, x = self.quantized[name], self.random(rows, WIDTH), self.common(rows, WIDTH)
            total, normed = ours.begin_all_reduce(mine).add_norm(x, weight, 1e-5)
            self.check_same(f"{name} add {rows}", total, x + quantized_all_reduce(mine, parse_scheme(name), None))
            exact = torch.nn.functional.rms_norm(total.float(), (WIDTH,), weight.float(), 1e-5)
            plain = torch.nn.functional.rms_norm(total, (WIDTH,), weight, 1e-5)
            self.check_close(f"{name} norm {rows}", normed, exact, plain, torch.bfloat16)
        return len(jobs)

    def quantized_replays(self, count: int) -> dict[str, float]:
        """Replay a CUDA graph of quantized all-reduces on both streams.

        Inputs rotate among three tables while the buffers alternate between two slots, so that every slot sees every table. The
        graph itself counts the values that differ from the two-step algorithm over NCCL. Returns the number of replays and the
        µs per replay.
        """
        test = Replays(self.world.device)
        tables = {name: self.random(3, 3 * WIDTH) for name in self.quantized}
        expected = {
            name: torch.stack([quantized_all_reduce(x, parse_scheme(name), None) for x in tables[name]])
            for name in self.quantized
        }

        def body() -> None:
            turns = [(test.step + i) % 3 for i in range(2)]
            for name, ours in self.quantized.items():
                inputs = [tables[name].index_select(0, turn.view(1)).view(-1) for turn in turns]
                other = ours.begin_all_reduce(inputs[1], overlap=name in WIDTHS_BESIDE)
                sums = (ours.all_reduce(inputs[0]), other.wait())
                for total, turn in zip(sums, turns, strict=True):
                    test.wrong.add_((total != expected[name].index_select(0, turn.view(1)).view(-1)).sum())

        def between() -> None:  # a long all-reduce
            self.quantized["int8"].all_reduce(self.random(1 << 20))

        return {"replays": count, "microseconds": test.run(body, count, between, every=500)}

    def portable(self, name: str) -> dict[int, float]:
        way, sizes = QuantizedNcclCommunicator(parse_scheme(name)), (1 << 20, 1 << 24, 1 << 26)
        calls = {n: partial(way.all_reduce, self.random(n // 2)) for n in sizes}
        return {n: round(graph_microseconds(call, chain=4, replays=5), 2) for n, call in calls.items() if self.in_time()}

    def quantized_beside(self, name: str) -> dict[int, float]:
        way = self.quantized[name]
        return self.by_size(lambda x: lambda: way.begin_all_reduce(x, overlap=True).wait(), (1 << 20, 1 << 24, 1 << 26))

    def quantized_tilings(self, name: str) -> dict[str, dict[int, float]]:
        kernel = self.quantized_kernel(name)
        exchange = kernel.workspace.exchange
        return {
            f"{t.block}x{t.warps}x{t.programs}x{t.rounds}": self.by_size(
                lambda x, t=t: lambda: quantized_sum(x, kernel.wire, exchange, t),  # type: ignore[misc]
                (1 << 20, 1 << 24, 1 << 26),
            )
            for t in QUANTIZED_TILINGS
        }

    def quantized_with_norm(self) -> dict[str, dict[int, float]]:
        """µs of all-reduce, residual addition and norm by rows of WIDTH: in two kernels, in one, and in one with other tilings."""
        weight, kernel = self.common(WIDTH), self.quantized_kernel("int8")
        calls: dict[str, Callable[[Tensor, Tensor], object]] = {
            "nccl, then add_rms_norm": lambda p, x: self.nccl.begin_all_reduce(p).add_norm(x, weight, 1e-5),
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
                p, x = self.random(rows, WIDTH), self.random(rows, WIDTH)
                if self.in_time():
                    found.setdefault(name, {})[rows] = round(graph_microseconds(partial(call, p, x)), 2)
        return found

    def beside_gemms(self, count: int) -> int:
        """Check all-reduces of the longest messages on the side stream while GEMMs occupy every SM, as in a ladder's prefill.

        The programs of such an all-reduce start late and at different times. Returns the number of replays.
        """
        x, weight = self.random(1024, WIDTH), self.random(WIDTH, WIDTH)
        test = Replays(self.world.device)

        def body() -> None:
            for kind, ours in self.ours.items():
                ones = torch.ones(OVERLAP_CAPACITY[kind] // 2, dtype=torch.bfloat16, device=self.world.device)
                handles = [ours.begin_all_reduce(ones.clone(), overlap=True) for _ in range(16)]
                for _ in range(4):
                    torch.mm(x, weight)
                for handle in handles:
                    test.wrong.add_((handle.wait() != self.world.world_size).sum())

        test.run(body, count)
        return count

    # --- times ---------------------------------------------------------------------------------------------------------------

    def by_size(self, call_for: Callable[[Tensor], Callable[[], object]], sizes: Iterable[int] = SIZES) -> dict[int, float]:
        return {n: round(graph_microseconds(call_for(self.random(n // 2))), 2) for n in sizes if self.in_time()}

    def blocking(self, way: Communicator, sizes: Iterable[int]) -> dict[int, float]:
        return self.by_size(lambda x: lambda: way.all_reduce(x), sizes)

    def torch_op(self, name: str, sizes: Iterable[int]) -> dict[int, float]:
        import torch.distributed._symmetric_memory as symmetric_memory

        assert dist.group.WORLD is not None
        group = dist.group.WORLD.group_name
        buffer = symmetric_memory.empty(max(sizes) // 2, dtype=torch.bfloat16, device=self.world.device)
        buffer.zero_()
        symmetric_memory.rendezvous(buffer, dist.group.WORLD)
        op = getattr(torch.ops.symm_mem, name)
        return self.by_size(lambda x: lambda: op(buffer[: x.numel()], "sum", group), sizes)

    def one_shot_tilings(self) -> dict[str, dict[int, float]]:
        exchange = self.exchange("one-shot")
        sizes = [n for n in SIZES if n <= exchange.capacity]
        return {
            f"{t.block}x{t.warps}": self.by_size(lambda x, t=t: lambda: all_reduce.one_shot(x, exchange, t), sizes)  # type: ignore[misc]
            for t in ONE_SHOT_TILINGS
        }

    def two_shot_tilings(self) -> dict[str, dict[int, float]]:
        exchange = self.exchange("two-shot")
        sizes = [n for n in SIZES if 1 << 15 <= n <= exchange.capacity]
        return {
            f"{t.block}x{t.warps}x{t.programs}": self.by_size(
                lambda x, t=t: lambda: all_reduce.two_shot(x, exchange, t),  # type: ignore[misc]
                sizes,
            )
            for t in TWO_SHOT_TILINGS
        }

    def with_norm(self) -> dict[str, dict[int, float]]:
        """µs of all-reduce, residual addition and norm by rows of WIDTH, in one kernel and in two."""
        weight = self.common(WIDTH)
        found: dict[str, dict[int, float]] = {}
        calls: dict[str, Callable[[Tensor, Tensor], object]] = {
            "nccl, then add_rms_norm": lambda p, x: self.nccl.begin_all_reduce(p).add_norm(x, weight, 1e-5),
            "add_rms_norm alone": lambda p, x: add_rms_norm(x, p, weight, 1e-5),
        }
        for kind, ours in self.ours.items():
            calls[f"{kind}, then add_rms_norm"] = lambda p, x, ours=ours: add_rms_norm(x, ours.all_reduce(p), weight, 1e-5)  # type: ignore[misc]
            calls[f"{kind}, fused"] = lambda p, x, ours=ours: ours.begin_all_reduce(p).add_norm(x, weight, 1e-5)  # type: ignore[misc]
        for t in ONE_SHOT_TILINGS:
            calls[f"one-shot, fused {t.block}x{t.warps}"] = lambda p, x, t=t: all_reduce.one_shot_add_norm(  # type: ignore[misc]
                p, x, weight, 1e-5, self.exchange("one-shot"), t
            )
        for t in (Tiling(0, 8, 64), Tiling(0, 16, 64), Tiling(0, 32, 64)) if self.peers else ():
            calls[f"two-shot, fused {t.warps} warps"] = lambda p, x, t=t: all_reduce.two_shot_add_norm(  # type: ignore[misc]
                p, x, weight, 1e-5, self.exchange("two-shot"), t
            )
        for name, call in calls.items():
            found[name] = {}
            for rows in (1, 4, 16, 64):
                partial, x = self.random(rows, WIDTH), self.random(rows, WIDTH)
                # in one-shot kernels all programs of a row wait for each other, so all must be resident on the GPU at once
                if self.in_time() and (not name.startswith("one-shot, fused ") or rows <= 16):
                    found[name][rows] = round(graph_microseconds(lambda c=call, p=partial, x=x: c(p, x)), 2)  # type: ignore[misc]
        return found

    def beside_a_gemm(self) -> dict[str, dict[int, float]]:
        """µs of an all-reduce on the side stream overlapped with a GEMV of 7168 x 8192 weights, and of the GEMV alone."""
        weight = self.random(7168, WIDTH)
        found: dict[str, dict[int, float]] = {}
        ways: dict[str, Communicator] = {"nccl": self.nccl, **{str(kind): ours for kind, ours in self.ours.items()}}
        for rows in (1, 64):
            x, partial = self.random(rows, WIDTH), self.random(rows, WIDTH)

            def alone(x: Tensor = x) -> None:
                torch.nn.functional.linear(x, weight)

            found.setdefault("GEMV alone", {})[rows] = round(graph_microseconds(alone), 2)
            for name, way in ways.items():

                def both(x: Tensor = x, partial: Tensor = partial, way: Communicator = way) -> None:
                    handle = way.begin_all_reduce(partial, overlap=True)
                    torch.nn.functional.linear(x, weight)
                    handle.wait()

                found.setdefault(name, {})[rows] = round(graph_microseconds(both), 2)
        return found


def run(bench: Bench, replays: int) -> None:
    sizes = (8, 1000, 8192, 8200, 65536, 131072, 1 << 20)
    bench.part("correct bf16", lambda: bench.sums(torch.bfloat16, sizes))
    bench.part("correct norms", lambda: bench.norms([(1, 8192), (4, 8192), (16, 8192), (64, 8192), (3, 1000), (9, 4096)]))
    bench.part("correct gathers", bench.gathers)
    bench.part("replays", lambda: bench.replays(replays))
    bench.part("replays beside GEMMs", lambda: bench.beside_gemms(replays // 10))
    bench.part("µs nccl", partial(bench.blocking, bench.nccl, SIZES))
    for (kind, ours), those in zip(bench.ours.items(), ([n for n in SIZES if n <= CAPACITY["one-shot"]], SIZES), strict=False):
        bench.part(f"µs {kind}", partial(bench.blocking, ours, those))
    bench.part("µs with norm", bench.with_norm)
    bench.part("µs beside a GEMV", bench.beside_a_gemm)
    bench.part("µs one-shot tilings", bench.one_shot_tilings)
    if bench.peers:
        bench.part("µs two-shot tilings", bench.two_shot_tilings)
    for name, most in (("one_shot_all_reduce", 1 << 20), ("two_shot_all_reduce_", 1 << 26)):
        if bench.peers:
            bench.part(f"µs torch {name}", partial(bench.torch_op, name, [n for n in SIZES if n <= most]))
    run_quantized(bench, min(replays, 2000))
    for dtype in (torch.float32, torch.float16):
        if bench.in_time():
            bench.part(f"correct {dtype}", partial(bench.sums, dtype, (1, 7, 1001, 8192, 70000)))


def run_quantized(bench: Bench, replays: int) -> None:
    bench.part("correct quantized", bench.quantized_sums)
    bench.part("replays quantized", lambda: bench.quantized_replays(replays))
    for name in WIDTHS:
        bench.part(f"µs quantized {name}", lambda name=name: bench.blocking(bench.quantized[name], QUANTIZED_SIZES))  # type: ignore[misc]
    for name in WIDTHS_BESIDE:
        if bench.peers:
            bench.part(f"µs quantized tilings {name}", partial(bench.quantized_tilings, name))
        bench.part(f"µs quantized beside {name}", partial(bench.quantized_beside, name))
        bench.part(f"µs portable quantized {name}", partial(bench.portable, name))
    bench.part("correct quantized norms", bench.quantized_norms)
    if bench.peers:
        bench.part("µs quantized with norm", bench.quantized_with_norm)


def main() -> None:
    parser = Parser(description=__doc__.partition("\n")[0])
    add_gpu_options(parser, replays=10_000, seconds=70.0)
    parser.add_argument(
        "--parts",
        default=r"^(?!.*quantized)",
        help="run only the parts whose names match this regular expression (default: all but quantized all-reduces; '.' for all)",
    )
    arguments = parser.parse_args()
    try:
        re.compile(arguments.parts)
    except re.error as error:
        raise UserError(f"--parts {arguments.parts} is no regular expression: {error}") from None
    world = join_ranks("cuda")
    with torch.inference_mode():
        bench = Bench(world, arguments.seconds, arguments.parts)
        run(bench, arguments.replays)
    bench.write_gpu_report(arguments.out, p2p=bench.peers)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
