"""Compare the latency of the all-reduces over shared memory on GPUs with NCCL's and PyTorch's, by the size of the message.

    python launch.py --ranks 4 -m scripts.bench.comm.all_reduce --out out/comm.json

Parts are independent: a failed part is reported, and the others still run. A part that hangs ends the process with a traceback.
`--parts quantized` runs only the quantized all-reduces. With NCCL_P2P_DISABLE=1 all of them use host memory. Whether the sums are
right is what the tests of `comms/` check on GPUs.
"""

import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cli import Parser, run
from comms.build import exact
from comms.interface import Communicator
from comms.process_group import NcclCommunicator
from comms.quantize import WIDTHS, parse_scheme
from comms.quantized import QuantizedNcclCommunicator
from comms.relay import RelayCommunicator
from comms.symmetric import CAPACITY, KINDS, KernelCommunicator, Kind, QuantizedSymmetricCommunicator, SymmetricCommunicator
from comms.table import graph_microseconds
from errors import UserError
from kernels.norm import add_rms_norm, add_rms_norm_codes
from scripts.bench.comm.parts import Parts, join_ranks
from tp import World

WIDTH = 8192  # of a residual stream
MAX_POLLS = 1 << 25  # polls before a kernel gives up: enough for another rank to compile, but less than LONGEST_PART
SIZES = [1 << n for n in (12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 24, 26, 27)]
QUANTIZED_SIZES = [1 << n for n in (16, 18, 20, 22, 24, 26, 27)]
LONG = [1 << n for n in (20, 24, 26)]  # messages of quantized sums over NCCL and on the side stream
SIDE_STREAM_WIDTHS = ("int8", "int4")  # also measured on the side stream

Times = dict[int, float]  # µs by the bytes of a message, or by the rows


def limit_polls(ours: Communicator) -> None:
    """Make the communicator's kernels give up waiting before the part's time limit."""
    if isinstance(ours, RelayCommunicator):
        ours.relay.max_polls = MAX_POLLS
    if isinstance(ours, KernelCommunicator):
        for workspace in (ours.blocking.workspace, ours.overlapped.workspace, ours.gathers):
            workspace.exchange = replace(workspace.exchange, max_polls=MAX_POLLS)


class Bench(Parts):
    """The communicators under test. `ours`: those over shared memory, by kind."""

    def __init__(self, world: World, seconds: float, parts: str) -> None:
        """Collective. seconds: time after which `in_time` returns False. parts: see `Parts`."""
        super().__init__(world, parts)
        self.deadline = time.monotonic() + seconds
        self.nccl = NcclCommunicator()
        self.ours = self._over_shared_memory()
        for ours in self.ours.values():
            limit_polls(ours)

    def in_time(self) -> bool:
        """Whether rank 0 has time left. Collective: all ranks get the same answer."""
        answer = [time.monotonic() < self.deadline]
        dist.broadcast_object_list(answer, group=self.world.control)
        return answer[0]

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
            limit_polls(ours)
        return made

    def check(self) -> None:
        torch.cuda.synchronize()
        for ours in (*self.ours.values(), *self.__dict__.get("quantized", {}).values()):
            ours.check()

    def by_size(self, call_for: Callable[[Tensor], Callable[[], object]], sizes: Iterable[int] = SIZES) -> Times:
        """µs of `call_for(message)`. Sizes for which no time is left are missing."""
        return {n: round(graph_microseconds(call_for(self.random(n // 2))), 2) for n in sizes if self.in_time()}

    def blocking(self, comm: Communicator, sizes: Iterable[int] = SIZES) -> Times:
        return self.by_size(lambda x: lambda: comm.all_reduce(x), sizes)

    def quantized_width(self, name: str) -> Times:
        return self.blocking(self.quantized[name], QUANTIZED_SIZES)

    def on_side_stream(self, name: str) -> Times:
        comm = self.quantized[name]
        return self.by_size(lambda x: lambda: comm.begin_all_reduce(x, overlap=True).wait(), LONG)

    def portable(self, name: str) -> Times:
        """Of the two-step algorithm over NCCL."""
        comm = QuantizedNcclCommunicator(parse_scheme(name))
        calls = {n: partial(comm.all_reduce, self.random(n // 2)) for n in LONG}
        return {n: round(graph_microseconds(call, chain=4, replays=5), 2) for n, call in calls.items() if self.in_time()}

    def torch_op(self, name: str, sizes: list[int]) -> Times:
        """Of an operator of PyTorch's symmetric memory."""
        import torch.distributed._symmetric_memory as symmetric_memory

        assert dist.group.WORLD is not None
        group = dist.group.WORLD.group_name
        buffer = symmetric_memory.empty(max(sizes) // 2, dtype=torch.bfloat16, device=self.world.device)
        buffer.zero_()
        symmetric_memory.rendezvous(buffer, dist.group.WORLD)
        op = getattr(torch.ops.symm_mem, name)
        return self.by_size(lambda x: lambda: op(buffer[: x.numel()], "sum", group), sizes)

    def with_norm(self) -> dict[str, Times]:
        """Of all-reduce, residual addition and norm by rows of WIDTH, in one kernel and in two."""
        weight = self.common(WIDTH)
        calls: dict[str, Callable[[Tensor, Tensor], object]] = {
            "nccl, then add_rms_norm": lambda p, x: self.nccl.begin_all_reduce(p).add_norm(x, weight, 1e-5),
            "add_rms_norm alone": lambda p, x: add_rms_norm(x, p, weight, 1e-5),
        }

        def add(kind: Kind, ours: Communicator) -> None:
            calls[f"{kind}, then add_rms_norm"] = lambda p, x: add_rms_norm(x, ours.all_reduce(p), weight, 1e-5)
            calls[f"{kind}, then add_rms_norm_codes"] = lambda p, x: add_rms_norm_codes(x, ours.all_reduce(p), weight, 1e-5)
            calls[f"{kind}, fused, in 8 bits"] = lambda p, x: ours.begin_all_reduce(p).add_norm_codes(x, weight, 1e-5)
            calls[f"{kind}, fused"] = lambda p, x: ours.begin_all_reduce(p).add_norm(x, weight, 1e-5)

        for kind, ours in self.ours.items():
            add(kind, ours)
        found: dict[str, Times] = {name: {} for name in calls}
        for name, call in calls.items():
            for rows in (1, 4, 16, 64, 128):
                p, x = self.random(rows, WIDTH), self.random(rows, WIDTH)
                if self.in_time():
                    found[name][rows] = round(graph_microseconds(partial(call, p, x)), 2)
        return found


def measure(bench: Bench) -> None:
    """Run all parts, the most important first. Collective."""
    bench.part("µs nccl", partial(bench.blocking, bench.nccl))
    for kind, ours in bench.ours.items():
        some = [n for n in SIZES if n <= CAPACITY["one-shot"]] if kind == "one-shot" else SIZES
        bench.part(f"µs {kind}", partial(bench.blocking, ours, some))
    bench.part("µs with norm", bench.with_norm)
    if bench.peers:
        for name, most in (("one_shot_all_reduce", 1 << 20), ("two_shot_all_reduce_", 1 << 26)):
            bench.part(f"µs torch {name}", partial(bench.torch_op, name, [n for n in SIZES if n <= most]))
    for name in WIDTHS:
        bench.part(f"µs quantized {name}", partial(bench.quantized_width, name))
    for name in SIDE_STREAM_WIDTHS:
        bench.part(f"µs quantized beside {name}", partial(bench.on_side_stream, name))
        bench.part(f"µs portable quantized {name}", partial(bench.portable, name))


def main() -> None:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the report to this JSON file")
    parser.add_argument(
        "--seconds", type=float, default=70.0, help="start no further timing after this many seconds (default: 70)"
    )
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
        measure(bench)
    bench.write_gpu_report(arguments.out, p2p=bench.peers)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
