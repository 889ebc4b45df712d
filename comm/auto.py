"""The communicator that measures how this machine sums fastest, and chooses by message size; fused with GEMMs where that is
faster still (`comm/fused.py`)."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from comm.fused import FusedCommunicator
from comm.interface import Communicator, Handle, Product
from comm.process_group import GlooCommunicator, NcclCommunicator
from comm.quantize import WIDTHS, Scheme, parse_scheme, relative_error
from comm.quantized_symmetric import quantized_symmetric
from comm.relay import RelayCommunicator
from comm.symmetric import CAPACITY, Kind, SymmetricCommunicator
from comm.table import SIZES, Table, Times, _from_first, agreed, graph_microseconds, machine
from comm.workspace import Memory, check_reachable, memory_between
from errors import UserError

CODE = (
    "kernels/*all_reduce.py",
    "kernels/quantize.py",
    "kernels/relay.py",
    "comm/*symmetric.py",
    "comm/quantized.py",
    "comm/two_step.py",
    "comm/relay.py",
    "comm/workspace.py",
    "comm/interface.py",
    "comm/table.py",
)

# Sizes that each way is measured at. Beyond them it would take NCCL, or leave most of its ranks' slices empty.
SERVED: dict[str, tuple[int, ...]] = {
    "nccl": SIZES,
    "one-shot": tuple(n for n in SIZES if n <= CAPACITY["one-shot"]),
    "two-shot": tuple(n for n in SIZES if n >= 8 << 10),
    **{width: tuple(n for n in SIZES if n >= 64 << 10) for width in WIDTHS},
}


class AutoCommunicator(Communicator):
    """Each sum by the way that the table says is fastest for its size, which all ranks read alike. The table knows blocking sums
    only. Those beside computation are exact, and none is relayed: each of a relay's kernels would wait for SMs that a GEMM has."""

    name = "auto"

    def __init__(self, ways: dict[str, Communicator], table: Table) -> None:
        """ways: a communicator for each name in the table. table: the same on all ranks."""
        self.ways, self.table = ways, table
        self.rank, self.world_size = ways["nccl"].rank, ways["nccl"].world_size
        self._chosen: dict[tuple[int, bool], Communicator] = {}

    def way(self, size: int, beside: bool = False) -> Communicator:
        """For a message of `size` bytes, blocking or beside computation."""
        if (size, beside) not in self._chosen:
            names = [name for name in self.ways if not (beside and self._blocking_only(name))]
            self._chosen[size, beside] = self.ways[self.table.choose(size, names)]
        return self._chosen[size, beside]

    def _blocking_only(self, name: str) -> bool:
        return name in WIDTHS or isinstance(self.ways[name], RelayCommunicator)

    def start(self, partial: Tensor) -> Handle:
        return self.way(partial.nbytes, beside=True).start(partial)

    def defer(self, partial: Tensor | Product) -> Handle:
        return self.way(partial.nbytes).defer(partial)

    def takes_product(self, x: Tensor, weight: Tensor) -> bool:
        return self.way(Product(x, weight).nbytes).takes_product(x, weight)

    def all_gather(self, shard: Tensor) -> Tensor:
        return self.ways["one-shot"].all_gather(shard)

    def check(self) -> None:
        for way in self.ways.values():
            way.check()


def auto(
    device: torch.device, error_budget: float = 0.0, group: dist.ProcessGroup | None = None, rebuild: bool = False
) -> Communicator:
    """What sums fastest on `device`: gloo on CPU; nccl between hosts; else the fastest by message size and, between GPUs that reach
    each other, fused with GEMMs where that is faster still. Collective.

    error_budget: the relative error (see `relative_error`) up to which quantized sums may be taken. rebuild: measure anew even if
    there is a table."""
    if device.type == "cpu":
        return GlooCommunicator(group)
    try:
        by_size = by_message_size(device, error_budget, group, rebuild)
    except UserError as error:
        budget = ", whatever the error budget" if error_budget else ""
        _tell(f"{error}: auto takes nccl{budget}", group)
        return NcclCommunicator(group)
    if memory_between(device, group) == "host":
        return by_size
    try:
        chosen = FusedCommunicator(by_size, device, group, rebuild=rebuild)
    except UserError as error:
        _tell(f"{error}: auto fuses no sums with GEMMs", group)
        return by_size
    chosen.name = by_size.name
    return chosen


def _tell(text: str, group: dist.ProcessGroup | None) -> None:
    if dist.get_rank(group) == 0:
        print(text, file=sys.stderr, flush=True)


def fused(device: torch.device, group: dist.ProcessGroup | None = None) -> Communicator:
    """Sums of many rows fused with the GEMMs around them, whether or not that is faster than what `auto` takes; the others as
    `auto`. Collective. Raises UserError on every rank if the GPUs do not reach each other."""
    check_reachable(device, group)
    return FusedCommunicator(by_message_size(device, 0.0, group), device, group, compare=False)


def by_message_size(
    device: torch.device, error_budget: float, group: dist.ProcessGroup | None = None, rebuild: bool = False
) -> AutoCommunicator:
    """Every way within the budget, and the table that chooses. Collective. Raises UserError as `open_workspace` does."""
    memory = memory_between(device, group)
    one_shot = SymmetricCommunicator("one-shot", device, group, memory)
    ways: dict[str, Communicator] = {"nccl": NcclCommunicator(group), "one-shot": one_shot}
    try:
        ways["two-shot"] = over_shared_memory("two-shot", device, group, memory)
    except UserError as error:  # /dev/shm may be enough for short messages
        _tell(f"{error}: auto goes without two-shot", group)
    short = one_shot if memory == "host" else None
    ways |= {scheme.name: quantized_symmetric(scheme, device, group, short) for scheme in schemes_within(error_budget, group)}
    kinds = " ".join(f"{name}={type(way).__name__}" for name, way in ways.items())
    key = machine(device, dist.get_world_size(group), torch.bfloat16, CODE) | {"ways": kinds, "memory": memory}
    served = {name: SERVED[name] for name in ways}
    return AutoCommunicator(ways, agreed(key, served, lambda: measured(ways, device, torch.bfloat16, group), group, rebuild))


def over_shared_memory(
    kind: Kind, device: torch.device, group: dist.ProcessGroup | None = None, memory: Memory | None = None
) -> Communicator:
    """Sums of a kind in the memory that ranks of one host have in common. Collective. Raises UserError as `open_workspace` does."""
    memory = memory or memory_between(device, group)
    if kind == "two-shot" and memory == "host":
        return RelayCommunicator(None, device, group)
    return SymmetricCommunicator(kind, device, group, memory)


def schemes_within(error_budget: float, group: dist.ProcessGroup | None = None) -> list[Scheme]:
    """The widths whose sums of all ranks have at most this relative error, as the first rank finds it. Collective."""
    if not error_budget:
        return []
    ranks, first = dist.get_world_size(group), dist.get_rank(group) == 0
    names = [name for name in WIDTHS if first and relative_error(parse_scheme(name), ranks) <= error_budget]
    return [parse_scheme(name) for name in _from_first(names, group)]


def measured(
    ways: dict[str, Communicator], device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> Times:
    """Blocking sums of each way at the sizes it serves, inside CUDA graphs. Collective."""
    times: Times = {}
    with torch.inference_mode():
        for name, way in ways.items():
            times[name] = {}
            for size in SERVED[name]:
                partial = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
                times[name][size] = graph_microseconds(lambda way=way, partial=partial: way.all_reduce(partial), group=group)  # type: ignore[misc]
    return times
