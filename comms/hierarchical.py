"""All-reduces between ranks of several hosts in three steps: a reduce-scatter within each host, an all-reduce of each shard between
the hosts, an all-gather within each host (as in Jia et al., arXiv:1807.11205, section 3.4).

A ring over all N ranks sends 2 (N - 1) / N of the message over each link between hosts, in each direction. Here it is 2 (H - 1) / H
for H hosts, which is the least that any all-reduce sends: with two hosts and many ranks almost half.
"""

import math
import os
import socket
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from comms.interface import Communicator, Done, PendingAllReduce, Schedule, on_side_stream
from comms.process_group import HostAllReduce, ProcessGroupCommunicator, all_gather, gather_objects, may_share_gpus
from comms.quantized import Worker
from errors import UserError
from ranks.processes import boot_id

HOST_ID = "RUNG_HOST_ID"  # environment variable: names this rank's host, whatever NCCL is told
SIZES = tuple(1 << i for i in range(12, 27, 2))  # bytes of the messages with which `fastest_between_hosts` measures
RUNS = 3
GAIN = 0.9  # share of the flat all-reduce's time that must suffice; less of a gain may be noise
SLOW_SECONDS = 0.05  # of a message, behind which larger ones are not measured: the choice for it is also theirs

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def host_of_each_rank() -> list[tuple[str, str]]:
    """The host of each rank, by rank. As in NCCL, different NCCL_HOSTIDs count as different hosts, but not between ranks
    that share GPUs, where all differ. HOST_ID comes before both. Collective."""
    name = socket.gethostname() if may_share_gpus() else os.environ.get("NCCL_HOSTID", socket.gethostname())
    return [(host, boot) for host, boot in gather_objects((os.environ.get(HOST_ID) or name, boot_id()))]


class HierarchicalCommunicator(ProcessGroupCommunicator):
    """Ranks of several hosts, equally many on each. Adds in fp32 on CPUs, and in the partial sum's dtype on GPUs."""

    name = "hierarchical"

    def __init__(self, device: torch.device) -> None:
        """Collective. Raises UserError on every rank for one host, one rank a host, or unequal numbers of ranks."""
        super().__init__()
        hosts = host_of_each_rank()
        by_host = [[r for r, its in enumerate(hosts) if its == host] for host in dict.fromkeys(hosts)]
        counts = sorted({len(some) for some in by_host})
        if len(by_host) == 1 or counts == [1] or len(counts) > 1:
            numbers = " or ".join(map(str, counts))
            raise UserError(
                f"--comm hierarchical needs several hosts with the same number of ranks, at least 2, but there are {len(by_host)} "
                f"with {numbers} each; use --comm {'nccl' if device.type == 'cuda' else 'gloo'}"
            )
        across = list(zip(*by_host, strict=True))  # the first rank of each host, the second, …
        # groups of its own, because these all-reduces overlap with the caller's collectives
        self.within = dist.new_group(next(some for some in by_host if self.rank in some), use_local_synchronization=True)
        self.between = dist.new_group(list(next(some for some in across if self.rank in some)), use_local_synchronization=True)
        self.local_size = counts[0]
        self.worker = None if device.type == "cuda" else Worker()  # gloo runs only single collectives in the background
        self.stream = torch.cuda.Stream(priority=-1) if device.type == "cuda" else None
        self.waited = 0.0 if self.worker else None

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        if not partial.numel():
            return Done(partial)
        if self.worker:
            return HostAllReduce(self, self.worker.submit(lambda: self._sum(partial.float()).to(partial.dtype)).result)
        return on_side_stream(self.stream, partial, lambda: self._sum(partial))

    def _sum(self, partial: Tensor) -> Tensor:
        flat = F.pad(partial.contiguous().flatten(), (0, -partial.numel() % self.local_size))
        shard = flat.new_empty(flat.numel() // self.local_size)
        reduce_scatter(shard, flat, group=self.within)
        dist.all_reduce(shard, group=self.between)
        total = torch.empty_like(flat)
        all_gather(total, shard, group=self.within)
        return total[: partial.numel()].view(partial.shape)


class BySize(Communicator):
    """Each all-reduce by the communicator that was faster at the measured size next to its own."""

    def __init__(self, flat: Communicator, hierarchical: Communicator, faster: dict[int, bool]) -> None:
        """faster: for measured sizes in bytes, whether `hierarchical` was faster; it has at least one."""
        self._both, self._faster = (flat, hierarchical), faster
        self.rank, self.world_size = flat.rank, flat.world_size
        self.name = flat.name if not any(faster.values()) else f"{flat.name} and hierarchical"
        self.waited = flat.waited

    def use(self, schedule: Schedule) -> None:
        super().use(schedule)
        for one in self._both:
            one.use(schedule)

    def choose(self, size: int) -> Communicator:
        """The communicator for a message of `size` bytes."""
        return self._both[self._faster[min(self._faster, key=lambda measured: abs(math.log2(measured / max(1, size))))]]

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        pending = self.choose(partial.nbytes).begin_all_reduce(partial, overlap)
        return pending if self.waited is None else HostAllReduce(self, pending.wait)

    def all_gather(self, shard: Tensor) -> Tensor:
        return self._both[0].all_gather(shard)


def fastest_between_hosts(flat: Communicator, device: torch.device) -> Communicator:
    """`flat`, or this and hierarchical all-reduces by size, as measured now. Collective."""
    try:
        hierarchical = HierarchicalCommunicator(device)
    except UserError:
        return flat
    faster: dict[int, bool] = {}
    with torch.inference_mode():
        for size in SIZES:
            message = torch.zeros(size // 4, device=device)
            seconds = [_seconds(one, message) for one in (flat, hierarchical)]
            faster[size] = seconds[1] < GAIN * seconds[0]
            if max(seconds) > SLOW_SECONDS:
                break
    return BySize(flat, hierarchical, faster)


def _seconds(communicator: Communicator, message: Tensor) -> float:
    """The median time of an all-reduce on the slowest rank, after one that is not measured: the same number on every rank."""
    found = []
    for _ in range(RUNS + 1):
        dist.barrier()
        start = time.perf_counter()
        communicator.all_reduce(message)
        if message.is_cuda:
            torch.cuda.synchronize(message.device)
        found.append(time.perf_counter() - start)
    slowest = torch.tensor(median(found[1:]), device=message.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()
