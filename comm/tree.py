"""All-reduces for `--deterministic`: the rest of the tree of sums that each rank's row-parallel layers begin (`kernels/determinism.py`)."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from comm.interface import OverlappedAllReduce, PendingAllReduce
from comm.process_group import HostAllReduce, ProcessGroupCommunicator, all_gather
from kernels.determinism import tree_sum

FEW_BYTES = 1 << 16  # of a message, up to which one collective takes less time than two that send less


class TreeCommunicator(ProcessGroupCommunicator):
    """1, 2, 4 or 8 ranks, over gloo or NCCL. Adds as a binary tree over the ranks, rounding each node to the partial sums' dtype.

    Of a short message, every rank gathers all partial sums. Of a long one, it adds one slice, and gathers the sums of the others."""

    name = "tree"

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0.0 if dist.get_backend() != "nccl" else None

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        flat = partial.contiguous().flatten()
        begin = self._gather if flat.nbytes <= FEW_BYTES else self._exchange
        finish = begin(flat)

        def result() -> Tensor:
            return finish()[: flat.numel()].view(partial.shape)

        return _Joined(result) if partial.is_cuda else HostAllReduce(self, result)

    def _gather(self, flat: Tensor) -> Callable[[], Tensor]:
        gathered = flat.new_empty(self.world_size * flat.numel())
        work = all_gather(gathered, flat, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return tree_sum(gathered.chunk(self.world_size))

        return finish

    def _exchange(self, flat: Tensor) -> Callable[[], Tensor]:
        slices = F.pad(flat, (0, -flat.numel() % self.world_size))
        received = torch.empty_like(slices)
        work = dist.all_to_all_single(received, slices, async_op=True)

        def finish() -> Tensor:
            work.wait()
            all_gather(slices, tree_sum(received.chunk(self.world_size)))
            return slices

        return finish


class _Joined(OverlappedAllReduce):
    def __init__(self, result: Callable[[], Tensor]) -> None:
        self.result = result

    def join(self) -> Tensor:
        return self.result()
