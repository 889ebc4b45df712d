"""Sums over memory that all ranks address (`comm/workspace.py`), the GPUs' own or the host's, by the kernels of
`kernels/all_reduce.py`.

`start` sums on a stream of its own, beside what the caller computes; `defer` sums on the caller's stream once it is asked for, and
then together with the residual addition and the norm that follow. The two have buffers of their own, for they may overlap. Where a few
rows follow a linear layer (a `Product`), that layer's kernel sends them itself (`kernels/linear_push.py`).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from comm.interface import Done, Handle, Product, computed, start_beside
from comm.process_group import GlooCommunicator, NcclCommunicator, _ProcessGroupCommunicator
from comm.workspace import Memory, Workspace, open_workspace
from kernels import all_reduce, linear_push
from kernels.all_reduce import Tiling
from kernels.dispatch import on_gpu
from kernels.norm import add_rms_norm

Kind = Literal["one-shot", "two-shot"]
KINDS: tuple[Kind, ...] = ("one-shot", "two-shot")

# bytes of a message; longer ones go over the process group
CAPACITY: dict[Kind, int] = {"one-shot": 256 << 10, "two-shot": 8 << 20}
BESIDE_CAPACITY: dict[Kind, int] = {"one-shot": 256 << 10, "two-shot": 1 << 20}  # what decode steps of 70B send, 64 rows
# Rows of a linear layer that sends its own partial sums: with fewer the plain kernels read the weight as fast, and all but 1 µs of
# the sum is gone already; with more the bytes count.
PUSHED_ROWS = 3, 16
GATHER_CAPACITY = 64 << 10  # logits of one row over two ranks; longer ones go over the process group

# Beside other kernels a sum gets few programs: enough for most of the link's bandwidth, and the GEMMs keep their SMs.
BLOCKING: dict[Kind, Tiling] = {"one-shot": all_reduce.ONE_SHOT, "two-shot": all_reduce.TWO_SHOT}
BESIDE: dict[Kind, Tiling] = {
    "one-shot": all_reduce.ONE_SHOT,
    "two-shot": Tiling(all_reduce.TWO_SHOT.block, all_reduce.TWO_SHOT.warps, programs=24),
}
_SUM = {"one-shot": all_reduce.one_shot, "two-shot": all_reduce.two_shot}
_ADD_NORM = {"one-shot": all_reduce.one_shot_add_norm, "two-shot": all_reduce.two_shot_add_norm}


@dataclass(frozen=True)
class Lane:
    """Sums of one kind that follow each other on one stream."""

    kind: Kind
    workspace: Workspace
    tiling: Tiling
    pdl: bool

    def fits(self, partial: Tensor) -> bool:
        """Whether every rank has room for its slice of whole 16 values."""
        unit = 16 * self.workspace.exchange.world_size
        return partial.numel() <= self.workspace.exchange.capacity // partial.element_size() // unit * unit

    def sum(self, partial: Tensor) -> Tensor:
        """Over all ranks; contiguous, not empty, and it `fits`."""
        return _SUM[self.kind](partial, self.workspace.exchange, self.tiling, self.pdl)

    def add_norm(self, partial: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + sum, rms_norm(x + sum)): in one kernel if there is one for these shapes."""
        if self._norm_fits(partial, x, weight):
            return _ADD_NORM[self.kind](partial, x, weight, eps, self.workspace.exchange, pdl=self.pdl)
        return add_rms_norm(x, self.sum(partial), weight, eps)

    def _norm_fits(self, partial: Tensor, x: Tensor, weight: Tensor) -> bool:
        if not all_reduce.fits_norm(partial, x, weight):
            return False
        ranks, rows = self.workspace.exchange.world_size, x.numel() // x.shape[-1]
        if self.kind == "one-shot":
            return partial.nbytes <= self.workspace.exchange.capacity and all_reduce.norm_programs(x) <= all_reduce.MAX_PROGRAMS
        # a rank sums whole rows, so there must be one for each
        needed = -(-rows // ranks) * ranks * x.shape[-1] * x.element_size()
        return rows >= ranks and needed <= self.workspace.exchange.capacity


class _Deferred(Handle):
    """A sum that begins when it is asked for."""

    def __init__(self, lane: Lane, partial: Tensor) -> None:
        self.lane, self.partial = lane, partial

    def wait(self) -> Tensor:
        return self.lane.sum(self.partial)

    def add_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.lane.add_norm(self.partial, x, weight, eps)


class _Pushed(Handle):
    """A sum whose partials the linear layer itself sends."""

    def __init__(self, lane: Lane, partial: Product) -> None:
        self.lane, self.partial = lane, partial

    def wait(self) -> Tensor:
        self._push()
        return linear_push.receive(self.partial.shape, self.partial.x.dtype, self.lane.workspace.exchange, pdl=self.lane.pdl)

    def add_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self._push()
        return linear_push.receive_add_norm(x, weight, eps, self.lane.workspace.exchange, pdl=self.lane.pdl)

    def _push(self) -> None:
        linear_push.linear_push(self.partial.x, self.partial.weight, self.lane.workspace.exchange, pdl=self.lane.pdl)


class SymmetricCommunicator(_ProcessGroupCommunicator):
    """Ranks of one host; CPU ranks in Triton's interpreter, for tests.

    Messages longer than a workspace holds are NCCL's: from there on it is faster, too.

    All its launches may be captured in CUDA graphs, and replayed any number of times beside others that are not.
    """

    def __init__(
        self, kind: Kind, device: torch.device, group: dist.ProcessGroup | None = None, memory: Memory = "peer"
    ) -> None:
        """Collective. memory: see `open_workspace`, whose UserError this raises for the ranks of `group` (None: all)."""
        assert kind == "one-shot" or memory == "peer", "over host memory two-shot sums are the relay's"
        size_of = all_reduce.one_shot_bytes if kind == "one-shot" else all_reduce.two_shot_bytes
        capacities = CAPACITY[kind], BESIDE_CAPACITY[kind]
        here, beside = (open_workspace(size_of, capacity, device, group, memory) for capacity in capacities)
        # not programmatic beside: what it would overlap with lies on another stream
        lanes = Lane(kind, here, BLOCKING[kind], pdl=True), Lane(kind, beside, BESIDE[kind], pdl=False)
        self._set_up(kind, lanes, device, group, memory)

    def _set_up(
        self, name: str, lanes: tuple[Lane, Lane], device: torch.device, group: dist.ProcessGroup | None, memory: Memory
    ) -> None:
        """What all sums over symmetric memory have besides their two lanes, for sums here and beside."""
        _ProcessGroupCommunicator.__init__(self, group)
        self.name, (self.here, self.beside), self.memory = name, lanes, memory
        self.long = NcclCommunicator(group) if device.type == "cuda" else GlooCommunicator(group)
        self.gathers = open_workspace(all_reduce.one_shot_bytes, GATHER_CAPACITY, device, group, memory)
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        if self.stream is None:
            self.waited = 0.0

    def start(self, partial: Tensor) -> Handle:
        """The sum on the side stream."""
        partial = partial.contiguous()
        if not partial.numel():
            return Done(partial)
        if not self.beside.fits(partial):
            return self.long.start(partial)
        if self.stream is None:
            return Done(self.beside.sum(partial))
        return start_beside(self.stream, partial, lambda: self.beside.sum(partial))

    def takes_product(self, x: Tensor, weight: Tensor) -> bool:
        """Small messages of one-shot sums are the linear layer's to send."""
        rows = math.prod(x.shape[:-1])
        if self.name != "one-shot":
            return False
        wanted = PUSHED_ROWS[0] <= rows <= PUSHED_ROWS[1] and on_gpu(x) and not torch.compiler.is_compiling()
        return wanted and linear_push.fits(x, weight, self.here.workspace.exchange)

    def defer(self, partial: Tensor | Product) -> Handle:
        if isinstance(partial, Product) and self.takes_product(partial.x, partial.weight):
            return _Pushed(self.here, partial)
        partial = computed(partial).contiguous()
        if not partial.numel():
            return Done(partial)
        return _Deferred(self.here, partial) if self.here.fits(partial) else self.long.defer(partial)

    def all_gather(self, shard: Tensor) -> Tensor:
        shard = shard.contiguous()
        if shard.dim() == 0 or shard.nbytes > GATHER_CAPACITY or shard.shape[-1] * shard.element_size() % 4:
            return super().all_gather(shard)
        return all_reduce.one_shot_gather(shard, self.gathers.exchange)

    def check(self) -> None:
        """Raise RuntimeError if a kernel has given up waiting for another rank. Waits for the device."""
        for workspace in (self.here.workspace, self.beside.workspace, self.gathers):
            workspace.check()
