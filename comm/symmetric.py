"""All-reduces by kernels over memory that all ranks can address (`comm/workspace.py`): the GPUs' own memory or the host's.

A blocking all-reduce is launched on the current stream when its result is read. Its kernel then also does the residual
addition and the norm that follow. An overlapped all-reduce is launched at once on a side stream. The two have separate
workspaces, because they may run at the same time.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from comm.interface import Done, Linear, PendingAllReduce, on_side_stream
from comm.process_group import GlooCommunicator, NcclCommunicator, ProcessGroupCommunicator
from comm.workspace import Memory, Workspace, open_workspace
from kernels import all_reduce, linear_push
from kernels.all_reduce import Tiling
from kernels.device import MAX_PROGRAMS
from kernels.dispatch import on_gpu
from kernels.norm import add_rms_norm

Kind = Literal["one-shot", "two-shot"]
KINDS: tuple[Kind, ...] = ("one-shot", "two-shot")

# bytes of a message; longer ones go over the process group
CAPACITY: dict[Kind, int] = {"one-shot": 256 << 10, "two-shot": 8 << 20}
OVERLAP_CAPACITY: dict[Kind, int] = {"one-shot": 256 << 10, "two-shot": 1 << 20}  # a decode step of 64 rows of 70B
GATHER_CAPACITY = 64 << 10  # logits of one row on two ranks; longer messages go over the process group
# Rows of a linear layer that sends its own partial sums. With fewer rows the ordinary kernels read the weight as fast, and
# only 1 µs of the all-reduce is left to hide. With more rows the message is so long that its bytes count.
PUSHED_ROWS = 3, 16

# An overlapped all-reduce gets few programs: they use most of the link's bandwidth and leave the SMs to the GEMMs.
TILING: dict[Kind, Tiling] = {"one-shot": all_reduce.ONE_SHOT, "two-shot": all_reduce.TWO_SHOT}
OVERLAP_TILING: dict[Kind, Tiling] = {
    "one-shot": all_reduce.ONE_SHOT,
    "two-shot": Tiling(all_reduce.TWO_SHOT.block, all_reduce.TWO_SHOT.warps, programs=24),
}
_ALL_REDUCE = {"one-shot": all_reduce.one_shot, "two-shot": all_reduce.two_shot}
_ADD_NORM = {"one-shot": all_reduce.one_shot_add_norm, "two-shot": all_reduce.two_shot_add_norm}
_BYTES = {"one-shot": all_reduce.one_shot_bytes, "two-shot": all_reduce.two_shot_bytes}


@dataclass(frozen=True)
class AllReduceKernel:
    """An all-reduce kernel with its workspace and launch parameters. Its launches follow each other on one stream.

    pdl: programmatic dependent launch, which overlaps the begin of a kernel with the end of the one before it on the same
    stream.
    """

    kind: Kind
    workspace: Workspace
    tiling: Tiling
    pdl: bool

    def fits(self, partial: Tensor) -> bool:
        """Whether the workspace has room for a slice of a multiple of 16 values for each rank."""
        unit = 16 * self.workspace.exchange.world_size
        return partial.numel() <= self.workspace.exchange.capacity // partial.element_size() // unit * unit

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over all ranks. partial: contiguous, not empty, and it `fits`."""
        return _ALL_REDUCE[self.kind](partial, self.workspace.exchange, self.tiling, self.pdl)

    def add_norm(self, partial: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + sum, rms_norm(x + sum) * weight), in one kernel if there is one for these shapes."""
        if self._norm_fits(partial, x, weight):
            return _ADD_NORM[self.kind](partial, x, weight, eps, self.workspace.exchange, pdl=self.pdl)
        return add_rms_norm(x, self.all_reduce(partial), weight, eps)

    def _norm_fits(self, partial: Tensor, x: Tensor, weight: Tensor) -> bool:
        if not all_reduce.fits_norm(partial, x, weight):
            return False
        ranks, rows = self.workspace.exchange.world_size, x.numel() // x.shape[-1]
        if self.kind == "one-shot":
            return partial.nbytes <= self.workspace.exchange.capacity and all_reduce.norm_programs(x) <= MAX_PROGRAMS
        # a rank adds up whole rows, so there must be one for each
        needed = -(-rows // ranks) * ranks * x.shape[-1] * x.element_size()
        return rows >= ranks and needed <= self.workspace.exchange.capacity


class _BlockingAllReduce(PendingAllReduce):
    """Launched when it is read."""

    def __init__(self, kernel: AllReduceKernel, partial: Tensor) -> None:
        self.kernel, self.partial = kernel, partial

    def wait(self) -> Tensor:
        return self.kernel.all_reduce(self.partial)

    def add_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.kernel.add_norm(self.partial, x, weight, eps)


class _PushedAllReduce(PendingAllReduce):
    """The linear layer's kernel sends its own partial sums (`kernels/linear_push.py`). Both kernels are launched when it is
    read."""

    def __init__(self, kernel: AllReduceKernel, x: Tensor, weight: Tensor) -> None:
        self.kernel, self.x, self.weight = kernel, x, weight

    def wait(self) -> Tensor:
        self._push()
        shape = (*self.x.shape[:-1], len(self.weight))
        return linear_push.receive(shape, self.x.dtype, self.kernel.workspace.exchange, pdl=self.kernel.pdl)

    def add_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self._push()
        return linear_push.receive_add_norm(x, weight, eps, self.kernel.workspace.exchange, pdl=self.kernel.pdl)

    def _push(self) -> None:
        linear_push.linear_push(self.x, self.weight, self.kernel.workspace.exchange, pdl=self.kernel.pdl)


class KernelCommunicator(ProcessGroupCommunicator):
    """All-reduces by kernels over memory that all ranks address. Messages that are too long for a workspace go over NCCL,
    which is faster for them, too.

    All launches may be captured in CUDA graphs, and replayed any number of times between launches that are not captured.
    """

    def __init__(
        self,
        name: str,
        blocking: AllReduceKernel,
        overlapped: AllReduceKernel,
        device: torch.device,
        group: dist.ProcessGroup | None,
        memory: Memory,
    ) -> None:
        """Collective. Raises UserError as `open_workspace` does."""
        super().__init__(group)
        self.name, self.blocking, self.overlapped, self.memory = name, blocking, overlapped, memory
        self.long = NcclCommunicator(group) if device.type == "cuda" else GlooCommunicator(group)
        self.gathers = open_workspace(all_reduce.one_shot_bytes, GATHER_CAPACITY, device, group, memory)
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        if self.stream is None:
            self.waited = 0.0

    def fits(self, partial: Tensor, overlap: bool) -> bool:
        """Whether a kernel takes this message."""
        return (self.overlapped if overlap else self.blocking).fits(partial)

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        partial = partial.contiguous()
        if not partial.numel():
            return Done(partial)
        if not self.fits(partial, overlap):
            return self.long.begin_all_reduce(partial, overlap)
        if not overlap:
            return _BlockingAllReduce(self.blocking, partial)
        return on_side_stream(self.stream, partial, lambda: self.overlapped.all_reduce(partial))

    def all_gather(self, shard: Tensor) -> Tensor:
        shard = shard.contiguous()
        if shard.dim() == 0 or shard.nbytes > GATHER_CAPACITY or shard.shape[-1] * shard.element_size() % 4:
            return super().all_gather(shard)
        return all_reduce.one_shot_gather(shard, self.gathers.exchange)

    def check(self) -> None:
        for workspace in (self.blocking.workspace, self.overlapped.workspace, self.gathers):
            workspace.check()


class SymmetricCommunicator(KernelCommunicator):
    """Exact all-reduces of ranks of one host. CPU ranks, for tests, run the kernels in Triton's interpreter."""

    def __init__(
        self, kind: Kind, device: torch.device, group: dist.ProcessGroup | None = None, memory: Memory = "peer"
    ) -> None:
        """Collective. memory: see `open_workspace`, whose UserError this raises for the ranks of `group` (None: all)."""
        assert kind == "one-shot" or memory == "peer", "over host memory, two-shot all-reduces are the relay's"
        blocking = open_workspace(_BYTES[kind], CAPACITY[kind], device, group, memory)
        overlapped = open_workspace(_BYTES[kind], OVERLAP_CAPACITY[kind], device, group, memory)
        super().__init__(
            kind,
            AllReduceKernel(kind, blocking, TILING[kind], pdl=True),
            # no programmatic launch: the kernel that it should overlap with is on another stream
            AllReduceKernel(kind, overlapped, OVERLAP_TILING[kind], pdl=False),
            device,
            group,
            memory,
        )

    def begin_linear_all_reduce(self, x: Tensor, layer: Linear, overlap: bool = False) -> PendingAllReduce:
        if overlap or layer.bias is not None or not self._pushes(x, layer.weight):
            return super().begin_linear_all_reduce(x, layer, overlap)
        return _PushedAllReduce(self.blocking, x, layer.weight)

    def _pushes(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the layer's kernel sends its partial sums: few rows, one-shot only."""
        least, most = PUSHED_ROWS
        if self.name != "one-shot" or not least <= math.prod(x.shape[:-1]) <= most:
            return False
        return on_gpu(x) and not torch.compiler.is_compiling() and linear_push.fits(x, weight, self.blocking.workspace.exchange)
