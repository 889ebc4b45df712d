"""Communicators over torch.distributed process groups: gloo on CPU, NCCL on any topology of GPUs."""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from comm.interface import Beside, Communicator, Handle

# torch 2.13 renamed it and warns of the old name, the only one in 2.11
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Pending(Beside):
    """An all-reduce of a process group; `arrive` also casts back to the caller's dtype."""

    def __init__(self, work: dist.Work, total: Tensor, dtype: torch.dtype) -> None:
        self.work, self.total, self.dtype = work, total, dtype

    def arrive(self) -> Tensor:
        self.work.wait()
        return self.total.to(self.dtype)


class _MeasuredPending(_Pending):
    """The same, where waiting blocks the host: adds the time to the communicator's `waited`."""

    def __init__(self, communicator: "GlooCommunicator", work: dist.Work, total: Tensor, dtype: torch.dtype) -> None:
        super().__init__(work, total, dtype)
        self.communicator = communicator

    def arrive(self) -> Tensor:
        start = time.perf_counter()
        try:
            return super().arrive()
        finally:
            self.communicator.waited += time.perf_counter() - start


class _ProcessGroupCommunicator(Communicator):
    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group`: an initialized process group; None takes the default one."""
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, shard: Tensor) -> Tensor:
        gathered = shard.new_empty(self.world_size * shard.shape[0], *shard.shape[1:])
        all_gather(gathered, shard.contiguous(), group=self.group)
        by_rank = gathered.unflatten(0, (self.world_size, -1))  # (N, ..., n)
        return by_rank.movedim(0, -2).flatten(-2)  # (..., N, n) to (..., N * n)


class GlooCommunicator(_ProcessGroupCommunicator):
    """CPU ranks. Sums in fp32 whatever the dtype; gloo's threads sum while the caller computes on."""

    name = "gloo"
    waited: float = 0.0

    def start(self, partial: Tensor) -> Handle:
        total = partial.float().contiguous()  # a no-op for fp32: the partial itself is overwritten
        return _MeasuredPending(self, dist.all_reduce(total, group=self.group, async_op=True), total, partial.dtype)


class NcclCommunicator(_ProcessGroupCommunicator):
    """GPU ranks of one host or several. Sums in the partial's dtype, on NCCL's own stream; `wait` makes the current stream
    wait for it and does not block the host."""

    name = "nccl"

    def start(self, partial: Tensor) -> Handle:
        total = partial.contiguous()
        return _Pending(dist.all_reduce(total, group=self.group, async_op=True), total, partial.dtype)
