"""The communicators under test, and what checks and timings of them share."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from comm.build import exact
from comm.interface import Communicator
from comm.process_group import NcclCommunicator
from comm.quantize import WIDTHS, parse_scheme
from comm.quantized_symmetric import QuantizedKernel, QuantizedSymmetricCommunicator
from comm.relay import RelayCommunicator
from comm.symmetric import KINDS, KernelCommunicator, Kind, SymmetricCommunicator
from comm.table import graph_microseconds
from errors import UserError
from kernels.all_reduce import Exchange
from scripts.bench.comm.parts import Parts
from tp import World

WIDTH = 8192  # of a residual stream
MAX_POLLS = 1 << 25  # polls before a kernel gives up: enough for another rank to compile, but less than LONGEST_PART
SIZES = [1 << n for n in (12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 24, 26, 27)]


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
        super().__init__(world, seconds, parts)
        self.nccl = NcclCommunicator()
        self.ours = self._over_shared_memory()
        for ours in self.ours.values():
            limit_polls(ours)

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

    def by_size(self, call_for: Callable[[Tensor], Callable[[], object]], sizes: Iterable[int] = SIZES) -> dict[int, float]:
        """µs of `call_for(message)` by the bytes of the message. Sizes for which no time is left are missing."""
        return {n: round(graph_microseconds(call_for(self.random(n // 2))), 2) for n in sizes if self.in_time()}

    def blocking(self, comm: Communicator, sizes: Iterable[int]) -> dict[int, float]:
        return self.by_size(lambda x: lambda: comm.all_reduce(x), sizes)
