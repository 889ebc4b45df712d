"""Memory that every rank of a group can address: the buffers through which the kernels of `kernels/all_reduce.py` meet.

On GPUs of one host it is PyTorch's symmetric memory, reached over NVLink or PCIe peer to peer. On CPU, where the kernels run in
Triton's interpreter, it is a file that all ranks map. NVLink multicast is not used.
"""

import math
import mmap
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from errors import UserError
from kernels.all_reduce import MAX_PROGRAMS, Exchange


@dataclass
class Workspace:
    """A buffer on each rank, and what keeps it mapped. Launches on it must follow each other on one stream."""

    exchange: Exchange
    owner: Any

    def check(self) -> None:
        """Raise RuntimeError if a kernel has given up waiting for a rank. Waits for the device."""
        fault = int(self.exchange.fault)
        if fault:
            raise RuntimeError(f"rank {self.exchange.rank} waited in vain for another rank's part of a sum (place {fault})")


@dataclass
class SharedBuffer:
    """A buffer of every rank, by rank, as this process addresses it: addresses, and views (bytes,) uint8 of the same memory."""

    addresses: tuple[int, ...]
    views: tuple[Tensor, ...]
    owner: Any

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Part of a rank's buffer from byte `offset`, a multiple of the dtype's size, as a contiguous tensor."""
        return self.views[rank][offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def open_shared(size: int, device: torch.device, group: dist.ProcessGroup | None = None) -> SharedBuffer:
    """`size` zeroed bytes of every rank. Collective, and not during graph capture.

    Raises UserError on every rank if the group's GPUs cannot reach each other.
    """
    group = group or dist.group.WORLD
    assert group is not None
    if device.type == "cuda":
        addresses, (buffer, handle) = _map_gpus(size, device, group)
        views = tuple(_view_of_peer(handle, rank, address, size) for rank, address in enumerate(addresses))
        shared = SharedBuffer(tuple(addresses), views, (buffer, handle))
        torch.cuda.synchronize(device)  # zeroed, before any rank writes there
    else:
        addresses, whole = _map_file(size, group)
        views = tuple(whole[a - addresses[0] : a - addresses[0] + size] for a in addresses)
        shared = SharedBuffer(tuple(addresses), views, whole)
    dist.barrier(group)
    return shared


def _view_of_peer(handle: Any, rank: int, address: int, size: int) -> Tensor:
    """The bytes from `address` on of a rank's buffer: the handle counts from the begin of an allocation."""
    offset = address - handle.get_buffer(rank, (1,), torch.uint8).data_ptr()
    view: Tensor = handle.get_buffer(rank, (size,), torch.uint8, offset)
    assert view.data_ptr() == address
    return view


def open_workspace(
    size_of: Callable[[int, int], int],
    capacity: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> Workspace:
    """A workspace for messages of up to `capacity` bytes (a multiple of 64). Collective, and not during graph capture.

    size_of: (world_size, capacity) to the buffer's bytes, `one_shot_bytes` or `two_shot_bytes`.
    Raises UserError on every rank if the group's GPUs cannot reach each other.
    """
    group = group or dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(group), size_of(dist.get_world_size(group), capacity)
    addresses, owner = _map_gpus(size, device, group) if device.type == "cuda" else _map_file(size, group)
    exchange = Exchange(
        rank=rank,
        peers=(*addresses[rank + 1 :], *addresses[: rank + 1]),
        epochs=torch.zeros(MAX_PROGRAMS, dtype=torch.int64, device=device),
        squares=torch.zeros(2, MAX_PROGRAMS, dtype=torch.int64, device=device),
        fault=torch.zeros(1, dtype=torch.int32, device=device),
        capacity=capacity,
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # zeroed, before any rank writes there
    dist.barrier(group)
    return Workspace(exchange, owner)


def check_reachable(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Raise UserError on every rank unless each GPU of the group can address every other, and may: NCCL_P2P_DISABLE=1 forbids it to
    all of us, and ranks with different NCCL_HOSTIDs are on different hosts. Collective."""
    mine = (os.environ.get("NCCL_HOSTID", socket.gethostname()), _boot_id(), device.index)
    places = _gather_objects(mine, group)
    reasons = {"they are on several hosts"} if len({place[:2] for place in places}) > 1 else set()
    if any(_gather_objects(os.environ.get("NCCL_P2P_DISABLE") == "1", group)):
        reasons.add("NCCL_P2P_DISABLE=1 forbids it")
    if not reasons:
        unreachable = [index for *_, index in places if not _reaches(device, index)]
        everyones = _gather_objects(unreachable, group)
        reasons = {
            f"GPU {place[2]} does not reach GPU {i}" for place, some in zip(places, everyones, strict=True) for i in some
        }
    if reasons:
        raise UserError(f"these GPUs cannot address each other's memory: {min(reasons)}; use --comm nccl")


def _reaches(device: torch.device, index: int) -> bool:
    if index == device.index:
        return True
    return index < torch.cuda.device_count() and torch.cuda.can_device_access_peer(device, index)


def _boot_id() -> str:
    """Containers of different hosts may share a name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    return everyones


def _map_gpus(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[list[int], Any]:
    """Every rank's buffer of `size` zeroed bytes, as this GPU addresses it."""
    import torch.distributed._symmetric_memory as symmetric_memory

    check_reachable(device, group)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    handle, problem = None, ""
    try:
        buffer: Tensor = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        buffer.zero_()
        handle = symmetric_memory.rendezvous(buffer, group)
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
    problem = next(filter(None, _gather_objects(problem, group)), "")
    if problem or handle is None:
        raise UserError(f"these GPUs cannot map each other's memory ({problem}); use --comm nccl")
    # the handle knows allocations, of which the buffer may be a part
    offsets = _gather_objects(buffer.data_ptr() - handle.buffer_ptrs[handle.rank], group)
    return [base + offset for base, offset in zip(handle.buffer_ptrs, offsets, strict=True)], (buffer, handle)


def _map_file(size: int, group: dist.ProcessGroup) -> tuple[list[int], Any]:
    """The same for CPU ranks of one host: one file that all of them map, a part for each rank."""
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    name = ""
    if rank == 0:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        descriptor, name = tempfile.mkstemp(prefix="rung-", dir=folder)
        os.ftruncate(descriptor, size * world_size)
        os.close(descriptor)
    name = _gather_objects(name, group)[0]
    with open(name, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), size * world_size)
    dist.barrier(group)
    if rank == 0:
        os.unlink(name)  # the memory lives as long as someone maps it
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    return [whole.data_ptr() + i * size for i in range(world_size)], whole
