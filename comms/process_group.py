"""Communicators over torch.distributed process groups: gloo on CPU, NCCL on any topology of GPUs, and the tree of `--deterministic`.

Ranks may share a GPU, to try and to test what needs more GPUs than a host has. Their kernels run in turns of a few milliseconds. Results
are those of separate GPUs; times say nothing.
"""

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from comms.interface import Communicator, OverlappedAllReduce, PendingAllReduce
from kernels.determinism import tree_sum

SHARE_GPUS = "RUNG_SHARE_GPUS"  # environment variable: 1 lets ranks share GPUs
FEW_BYTES = 1 << 16  # of a partial sum, up to which one exchange of all of it takes less time than two that send less

# torch 2.13 renamed this function and warns about the old name; torch 2.11 has only the old name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def may_share_gpus() -> bool:
    return os.environ.get(SHARE_GPUS) == "1"


def prepare_shared_gpus(rank: int) -> None:
    """Let NCCL and PyTorch's symmetric memory accept ranks that share a GPU. To be called before the process group exists."""
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"  # NCCL refuses two ranks on one GPU of a host, so each rank is a host
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


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
    """CPU ranks. Adds in fp32 for every dtype, while the caller computes. A ring of gloo's threads adds long partial sums; each rank
    sends every other one a short one, which takes half the time of a ring."""

    name = "gloo"
    waited = 0.0

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        dtype, total = partial.dtype, partial.float().contiguous()  # fp32 is not copied, so `partial` is overwritten
        is_short = total.nbytes <= FEW_BYTES
        if is_short:
            sent = total.expand(self.world_size, *total.shape).contiguous()
            parts = torch.empty_like(sent)  # by rank
            work = dist.all_to_all_single(parts, sent, async_op=True)
        else:
            work = dist.all_reduce(total, async_op=True)

        def result() -> Tensor:
            work.wait()
            return (parts.sum(0) if is_short else total).to(dtype)

        return HostAllReduce(self, result)


class NcclCommunicator(ProcessGroupCommunicator):
    """GPUs of one host or several. Adds in the partial sum's dtype, on NCCL's own stream."""

    name = "nccl"

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        total = partial.contiguous()
        work = dist.all_reduce(total, async_op=True)

        def join() -> Tensor:
            work.wait()
            return total

        return OverlappedAllReduce(join)


class TreeCommunicator(ProcessGroupCommunicator):
    """The rest of the tree of sums that each rank's row-parallel layers begin with `--deterministic` (`kernels/determinism.py`).

    1, 2, 4 or 8 ranks, over gloo or NCCL. Adds as a binary tree over the ranks, rounding each node to the partial sums' dtype.

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

        return OverlappedAllReduce(result) if partial.is_cuda else HostAllReduce(self, result)

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
