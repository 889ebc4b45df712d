"""The communicator that measures how this machine sums fastest, and chooses by message size."""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from comm.interface import Communicator, Handle, Product, computed
from comm.process_group import GlooCommunicator, NcclCommunicator
from comm.symmetric import CAPACITY, KINDS, SymmetricCommunicator
from comm.table import SIZES, Table, Times, agreed, graph_microseconds
from errors import UserError

# Sizes that each way is measured at. Beyond them it would take NCCL, or leave most of its ranks' slices empty.
SERVED: dict[str, tuple[int, ...]] = {
    "nccl": SIZES,
    "one-shot": tuple(n for n in SIZES if n <= CAPACITY["one-shot"]),
    "two-shot": tuple(n for n in SIZES if n >= 8 << 10),
}


class AutoCommunicator(Communicator):
    """Each sum by the way that the table says is fastest for its size, which all ranks read alike."""

    name = "auto"

    def __init__(self, ways: dict[str, Communicator], table: Table) -> None:
        """ways: a communicator for each name in the table. table: the same on all ranks."""
        self.ways, self.table = ways, table
        self.rank, self.world_size = ways["nccl"].rank, ways["nccl"].world_size
        self._chosen: dict[int, Communicator] = {}

    def way(self, partial: Tensor) -> Communicator:
        size = partial.nbytes
        if size not in self._chosen:
            self._chosen[size] = self.ways[self.table.choose(size)]
        return self._chosen[size]

    def start(self, partial: Tensor) -> Handle:
        return self.way(partial).start(partial)

    def defer(self, partial: Tensor | Product) -> Handle:
        partial = computed(partial)
        return self.way(partial).defer(partial)

    def all_gather(self, shard: Tensor) -> Tensor:
        return self.ways["one-shot"].all_gather(shard)

    def check(self) -> None:
        for way in self.ways.values():
            way.check()


def auto(device: torch.device, group: dist.ProcessGroup | None = None, rebuild: bool = False) -> Communicator:
    """What sums fastest on `device`: gloo on CPU; nccl between GPUs that do not reach each other; else an AutoCommunicator.
    Collective. rebuild: measure anew even if there is a table."""
    if device.type == "cpu":
        return GlooCommunicator(group)
    ways: dict[str, Communicator] = {"nccl": NcclCommunicator(group)}
    try:
        ways |= {kind: SymmetricCommunicator(kind, device, group) for kind in KINDS}
    except UserError as error:
        if dist.get_rank(group) == 0:
            print(f"{error}: auto takes nccl", file=sys.stderr, flush=True)
        return ways["nccl"]
    key = machine(device, dist.get_world_size(group), torch.bfloat16)
    return AutoCommunicator(ways, agreed(key, SERVED, lambda: measured(ways, device, torch.bfloat16), group, rebuild))


def machine(device: torch.device, world_size: int, dtype: torch.dtype) -> dict[str, str]:
    """All that the times depend on: another GPU, driver, library or kernel asks for another table."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "ranks": str(world_size),
        "dtype": str(dtype).removeprefix("torch."),
        "driver": _driver(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "triton": triton.__version__,
        "code": _digest(("kernels/all_reduce.py", "comm/symmetric.py", "comm/workspace.py", "comm/table.py")),
    }


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return "unknown"


def _digest(names: Sequence[str]) -> str:
    root = Path(__file__).resolve().parents[1]
    return hashlib.sha256(b"".join((root / name).read_bytes() for name in names)).hexdigest()[:12]


def measured(ways: dict[str, Communicator], device: torch.device, dtype: torch.dtype) -> Times:
    """Blocking sums of each way at the sizes it serves, inside CUDA graphs. Collective over all ranks."""
    times: Times = {}
    with torch.inference_mode():
        for name, way in ways.items():
            times[name] = {}
            for size in SERVED[name]:
                partial = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
                times[name][size] = graph_microseconds(lambda way=way, partial=partial: way.all_reduce(partial))  # type: ignore[misc]
    return times
