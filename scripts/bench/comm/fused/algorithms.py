"""The layers that are measured, and the algorithms that compute a layer together with its communication."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from comm.fused import FusedCommunicator
from comm.fused_strategies import GATHERS, TILED, UNTILED, Gather, Split, Strategy
from comm.row_buffers import RowShard
from kernels import fused_rows
from kernels.linear import linear
from scripts.bench.comm.fused.tables import GEMM, TORCH, UNFUSED
from tp import World

CAPACITY, CPU_CAPACITY = 8192 * 12288 * 2, 1 << 18  # bytes of the largest residual stream measured on a GPU, and on a CPU
# torch 2.13 renamed these functions and warns about the old names; torch 2.11 has only the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Layer:
    """A layer whose weight has the shape (n, k) over all ranks. scatter: GEMM + reduce-scatter, else all-gather + GEMM."""

    name: str
    n: int
    k: int
    scatter: bool

    def weight_shape(self, ranks: int) -> tuple[int, int]:
        """The shape of one rank's weight."""
        return (self.n, self.k // ranks) if self.scatter else (self.n // ranks, self.k)


SHAPES: dict[str, tuple[Layer, ...]] = {
    "llama": (
        Layer("w_gate_up", 57344, 8192, False),
        Layer("w_down", 8192, 28672, True),
        Layer("wqkv", 10240, 8192, False),
        Layer("wo", 8192, 8192, True),
    ),
    "gpt3": (Layer("GPT-3 up", 49152, 12288, False), Layer("GPT-3 down", 12288, 49152, True)),
    "tiny": (Layer("tiny up", 512, 64, False), Layer("tiny down", 64, 256, True)),
}


def all_gather_rows(rows: Tensor, ranks: int) -> Tensor:
    """The rows of all ranks, in the order of the ranks. Collective."""
    gathered = rows.new_empty(len(rows) * ranks, rows.shape[1])
    _all_gather(gathered, rows)
    return gathered


class Algorithms:
    """The algorithms that this machine can run. `scatters` and `gathers` are the fused ones."""

    def __init__(self, world: World) -> None:
        """Collective: opens the buffers of the fused algorithms."""
        self.rank, self.ranks, self.device = world.rank, world.world_size, world.device
        self.gpu = world.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        capacity = CAPACITY if self.gpu else CPU_CAPACITY
        self.comm = FusedCommunicator(world.comm, world.device, capacity=capacity, min_rows=1, strategy=Strategy())
        self.scatters: list[Split] = [*UNTILED, *TILED] if self.gpu else list(UNTILED)
        others = [Gather(split) for split in self.scatters if split not in GATHERS]
        self.gathers = [gather for gather in (*GATHERS.values(), *others) if gather.split in self.scatters]

    def calls(self, layer: Layer, x: Tensor, whole: Tensor, weight: Tensor) -> dict[str, Call]:
        """Every algorithm for a layer by name: GEMMs alone, then `UNFUSED`, then the others.

        x: all m rows of this rank's input features (scatter), or this rank's m / ranks rows of all features (gather).
        whole: m rows, the input of the GEMMs alone.
        """
        calls: dict[str, Call] = {GEMM: lambda: torch.mm(whole, weight.t()), f"{GEMM} of rung": lambda: linear(whole, weight)}
        calls[UNFUSED] = (lambda: self._reduce_scatter(x, weight)) if layer.scatter else lambda: self._gather(x, weight)
        if self.gpu:
            calls[TORCH] = self._torch(layer, x, weight)
        if layer.scatter:
            return calls | {split: self._fused_scatter(x, weight, split) for split in self.scatters}
        return calls | {str(gather): self._fused_gather(x, weight, gather) for gather in self.gathers}

    def _gather(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(all_gather_rows(x, self.ranks), weight.t())

    def _reduce_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        products = torch.mm(x, weight.t())
        mine = products.new_empty(len(x) // self.ranks, len(weight))
        _reduce_scatter(mine, products)
        return mine

    def _torch(self, layer: Layer, x: Tensor, weight: Tensor) -> Call:
        """PyTorch's fused operators, which the import registers. Without `return_A` the all-gather would use NVLink multicast
        if the machine has it."""
        import torch.distributed._symmetric_memory

        assert dist.group.WORLD is not None
        group, ops = dist.group.WORLD.group_name, torch.ops.symm_mem
        if layer.scatter:
            return lambda: ops.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group)
        return lambda: ops.fused_all_gather_matmul(x, [weight.t()], 0, group, return_A=True)[1][0]

    def _fused_scatter(self, x: Tensor, weight: Tensor, split: Split) -> Call:
        buffers, shard = self.comm.buffers, RowShard(len(x) // self.ranks, len(weight), x.dtype)

        def call() -> Tensor:
            buffers.scatter(x, weight, split)
            fused_rows.reduce_rows(buffers.layout, shard.rows, shard.size, shard.dtype, None)
            buffers.join()
            return buffers.my_rows(self.rank, shard)

        return call

    def _fused_gather(self, x: Tensor, weight: Tensor, gather: Gather) -> Call:
        """The fused all-gather + GEMM of rows that are in the buffer already, where the norm before the layer writes them."""
        buffers, shard = self.comm.buffers, RowShard(len(x), x.shape[1], x.dtype)

        def call() -> Tensor:
            fused_rows.advance(buffers.layout)
            return buffers.gather_linear(shard, weight, None, gather)

        return call

    def spoil_buffers(self, layer: Layer, x: Tensor) -> None:
        """Fill the buffers of partial sums and rows with NaNs, so that results of an earlier call cannot hide an error of a later
        one. A gather's own input rows x are written into the buffer again."""
        buffers = self.comm.buffers
        buffers.shared.views[self.rank][buffers.layout.partials :].fill_(255)
        if not layer.scatter:
            buffers.my_rows(self.rank, RowShard(len(x), x.shape[1], x.dtype)).copy_(x)
