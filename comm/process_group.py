"""Communicators over torch.distributed process groups: gloo on CPU, NCCL on any topology of GPUs."""

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from comm.interface import Communicator, OverlappedAllReduce, PendingAllReduce

# torch 2.13 renamed this function and warns about the old name; torch 2.11 has only the old name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_objects(value: Any) -> list[Any]:
    """The value of each rank, by rank, as JSON has it. Collective. Through the store: whoever reaches NCCL's ports between hosts may
    send what a rank would unpickle."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    number = store.add(f"gathered from {rank}", 1)
    store.set(f"gathered {number} {rank}", json.dumps(value))
    return [json.loads(store.get(f"gathered {number} {other}")) for other in range(dist.get_world_size())]


class ProcessGroupCommunicator(Communicator):
    """Rank, world size and all-gather of a process group."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, shard: Tensor) -> Tensor:
        gathered = shard.new_empty(self.world_size * shard.shape[0], *shard.shape[1:])
        all_gather(gathered, shard.contiguous())
        by_rank = gathered.unflatten(0, (self.world_size, -1))  # (N, ..., n)
        return by_rank.movedim(0, -2).flatten(-2)  # (..., N, n) to (..., N * n)


class HostAllReduce(PendingAllReduce):
    """An all-reduce for which the host waits. It adds the time to the communicator's `waited`."""

    def __init__(self, communicator: Communicator, result: Callable[[], Tensor]) -> None:
        """result: waits for the all-reduce and returns its result."""
        self.communicator, self.result = communicator, result

    def wait(self) -> Tensor:
        start = time.perf_counter()
        try:
            return self.result()
        finally:
            self.communicator.waited = (self.communicator.waited or 0.0) + time.perf_counter() - start


class GlooCommunicator(ProcessGroupCommunicator):
    """CPU ranks. Adds in fp32 for every dtype, in gloo's threads, while the caller computes."""

    name = "gloo"
    waited = 0.0

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        dtype, total = partial.dtype, partial.float().contiguous()  # fp32 is not copied, so `partial` is overwritten
        work = dist.all_reduce(total, async_op=True)

        def result() -> Tensor:
            work.wait()
            return total.to(dtype)

        return HostAllReduce(self, result)


class NcclCommunicator(ProcessGroupCommunicator):
    """GPUs of one host or several. Adds in the partial sum's dtype, on NCCL's own stream."""

    name = "nccl"

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        total = partial.contiguous()
        return _NcclAllReduce(dist.all_reduce(total, async_op=True), total)


class _NcclAllReduce(OverlappedAllReduce):
    def __init__(self, work: dist.Work, total: Tensor) -> None:
        self.work, self.total = work, total

    def join(self) -> Tensor:
        self.work.wait()
        return self.total
