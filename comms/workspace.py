"""Symmetric memory: a buffer on each rank that every rank of a group can address. The kernels' workspaces are in it.

Between GPUs with peer access it is PyTorch's symmetric memory, over NVLink or PCIe. Between other GPUs of one host it is
page-locked host memory, a file that all ranks map. CPU ranks, whose kernels run in Triton's interpreter, also use such a file.
NVLink multicast is not used.
"""

import errno
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from comms.hierarchical import host_of_each_rank
from comms.interface import fault_word
from comms.process_group import gather_objects
from errors import UserError
from kernels.all_reduce import Exchange
from kernels.device import MAX_PROGRAMS

# The memory in which a rank receives data from other ranks: its GPU's memory (peer access) or host memory.
Memory = Literal["peer", "host"]


@dataclass
class Workspace:
    """A buffer on each rank for the kernels. Launches on it must run one after another. owner: keeps the memory mapped."""

    exchange: Exchange
    owner: Any


@dataclass
class SharedBuffer:
    """The buffers of all ranks, by rank, in this process's address space. views: (bytes,) uint8 at the addresses. owner:
    keeps the memory mapped."""

    addresses: tuple[int, ...]
    views: tuple[Tensor, ...]
    owner: Any

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Part of a rank's buffer from byte `offset`, a multiple of the dtype's size, as a contiguous tensor."""
        return self.views[rank][offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def open_shared(size: int, device: torch.device) -> SharedBuffer:
    """A buffer of `size` zeroed bytes on every rank. Collective; not during graph capture.

    Raises UserError on every rank if the group's GPUs have no peer access.
    """
    if device.type == "cuda":
        addresses, (buffer, handle) = _map_gpus(size, device)
        views = tuple(_view_of_peer(handle, rank, address, size) for rank, address in enumerate(addresses))
        shared = SharedBuffer(tuple(addresses), views, (buffer, handle))
        torch.cuda.synchronize(device)  # the buffer is zeroed before any rank writes to it
    else:
        shared = _views_of_file(size)
    dist.barrier()
    return shared


def open_host(size: int, device: torch.device) -> SharedBuffer:
    """A buffer of `size` zeroed bytes for every rank, in host memory that all GPUs of the host and their copy engines can
    address. Collective; not during graph capture.

    Raises UserError on every rank if the ranks are on several hosts, or if the host has too little memory to share or to lock.
    """
    if device.type == "cuda" and on_several_hosts():
        raise UserError(f"these GPUs have no memory that all of them can address: {_SEVERAL_HOSTS}; use --comm auto")
    shared = _views_of_file(size)
    if device.type == "cuda":
        _lock_pages(shared.owner)
    dist.barrier()
    return shared


def _views_of_file(size: int) -> SharedBuffer:
    addresses, whole = _map_file(size)
    views = tuple(whole[a - addresses[0] : a - addresses[0] + size] for a in addresses)
    return SharedBuffer(tuple(addresses), views, whole)


def _view_of_peer(handle: Any, rank: int, address: int, size: int) -> Tensor:
    """The `size` bytes at `address` of a rank. The handle's offsets count from the begin of the allocation."""
    offset = address - handle.get_buffer(rank, (1,), torch.uint8).data_ptr()
    view: Tensor = handle.get_buffer(rank, (size,), torch.uint8, offset)
    assert view.data_ptr() == address
    return view


def open_workspace(
    size_of: Callable[[int, int], int],
    capacity: int,
    device: torch.device,
    memory: Memory = "peer",
) -> Workspace:
    """A workspace for messages of up to `capacity` bytes (a multiple of 64). Collective; not during graph capture.

    size_of: the buffer's bytes for (world_size, capacity), such as `one_shot_bytes`. memory: host memory is for one-shot
    kernels only. Raises UserError on every rank if the GPUs have no peer access, or for host memory as `open_host` does.
    """
    rank, size = dist.get_rank(), size_of(dist.get_world_size(), capacity)
    addresses, owner, host_buffer = _map(size, device, memory)
    exchange = Exchange(
        rank=rank,
        peers=(*addresses[rank + 1 :], *addresses[: rank + 1]),
        epochs=torch.zeros(MAX_PROGRAMS, dtype=torch.int64, device=device),
        squares=torch.zeros(2, MAX_PROGRAMS, dtype=torch.int64, device=device),
        fault=fault_word(device),
        capacity=capacity,
        host_buffer=host_buffer,
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the buffer is zeroed before any rank writes to it
    dist.barrier()
    return Workspace(exchange, owner)


def memory_between(device: torch.device) -> Memory:
    """The memory that the ranks can use: `peer` on CPU and between GPUs with peer access, else `host`. Collective."""
    return "peer" if device.type == "cpu" or not _obstacles(device) else "host"


def links(device: torch.device) -> str:
    """How the ranks reach each other, on which the times of all-reduces depend: `memory_between`, or how many hosts there are.
    Collective."""
    hosts = len(set(host_of_each_rank()))
    return f"{hosts} hosts" if hosts > 1 else memory_between(device)


def _map(size: int, device: torch.device, memory: Memory) -> tuple[list[int], Any, int | None]:
    """(addresses of all ranks' buffers of `size` zeroed bytes, their owner, address of this rank's host buffer). The host
    buffer receives what other ranks send; None if this rank's own buffer does. Collective."""
    if memory == "host":
        host, rank = open_host(size, device), dist.get_rank()
        own = torch.zeros(size, dtype=torch.uint8, device=device)
        addresses = [*host.addresses]
        addresses[rank] = own.data_ptr()
        return addresses, (host, own), host.addresses[rank]
    return *(_map_gpus(size, device) if device.type == "cuda" else _map_file(size)), None


def check_reachable(device: torch.device) -> None:
    """Raise UserError on every rank unless all GPUs of the group can and may address each other. Collective."""
    if obstacles := _obstacles(device):
        raise UserError(f"these GPUs cannot address each other's memory: {min(obstacles)}; use --comm auto")


_SEVERAL_HOSTS = "they are on several hosts"


def on_several_hosts() -> bool:
    """Whether the ranks are on several hosts. Collective."""
    return len(set(host_of_each_rank())) > 1


def _obstacles(device: torch.device) -> set[str]:
    """The reasons why GPUs of the group cannot or may not use peer access; empty if they can. NCCL_P2P_DISABLE=1 on one rank
    disables it for all. The same on every rank. Collective."""
    found = {_SEVERAL_HOSTS} if on_several_hosts() else set()
    if any(gather_objects(os.environ.get("NCCL_P2P_DISABLE") == "1")):
        found.add("NCCL_P2P_DISABLE=1 disables it")
    if not found:
        indices = gather_objects(device.index)
        unreachable = gather_objects([i for i in indices if not _reaches(device, i)])
        found = {f"GPU {gpu} cannot access GPU {i}" for gpu, some in zip(indices, unreachable, strict=True) for i in some}
    return found


def _reaches(device: torch.device, index: int) -> bool:
    if index == device.index:
        return True
    return index < torch.cuda.device_count() and torch.cuda.can_device_access_peer(device, index)


def _map_gpus(size: int, device: torch.device) -> tuple[list[int], Any]:
    """(addresses of all ranks' buffers of `size` zeroed bytes on this GPU, their owner). Collective."""
    import torch.distributed._symmetric_memory as symmetric_memory

    check_reachable(device)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    handle, problem = None, ""
    try:
        buffer: Tensor = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        buffer.zero_()
        assert dist.group.WORLD is not None
        handle = symmetric_memory.rendezvous(buffer, dist.group.WORLD)
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
    problem = next(filter(None, gather_objects(problem)), "")
    if problem or handle is None:
        raise UserError(f"these GPUs cannot map each other's memory ({problem}); use --comm nccl")
    # the handle has the addresses of allocations, and the buffer may be a part of one
    offsets = gather_objects(buffer.data_ptr() - handle.buffer_ptrs[handle.rank])
    return [base + offset for base, offset in zip(handle.buffer_ptrs, offsets, strict=True)], (buffer, handle)


def _map_file(size: int) -> tuple[list[int], Tensor]:
    """As `_map_gpus`, in host memory: the ranks of one host map one file, with a part for each rank. Collective."""
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with ExitStack() as first:
        name, inode, problem = _shared_file(size * world_size, first) if rank == 0 else ("", 0, "")
        name, inode, problem = gather_objects((name, inode, problem))[0]
        if problem:
            raise UserError(problem)
        mapped = None
        try:
            with open(name, "r+b") as file:
                if os.fstat(file.fileno()).st_ino != inode:  # in another container, rank 0's process id is another process's
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                mapped = mmap.mmap(file.fileno(), size * world_size)
        except OSError as error:
            problem = (
                f"rank {rank} cannot map {name} ({error.strerror}); if the ranks are in several containers, use --comm nccl"
            )
        problem = next(filter(None, gather_objects(problem)), "")
    if problem or mapped is None:
        raise UserError(problem)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    return [whole.data_ptr() + i * size for i in range(world_size)], whole


def _shared_file(size: int, opened: ExitStack) -> tuple[str, int, str]:
    """(name of a file of `size` zeroed bytes, its inode, ""), or ("", 0, the error). It exists until `opened` is closed, and then as long as a
    process maps it. Its pages are reserved, because access to a page for which there is no memory would kill the process."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    try:
        # on Linux it is in no folder, so it goes with its processes, however they end
        file = opened.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
        os.posix_fallocate(file.fileno(), 0, size)
        return f"/proc/{os.getpid()}/fd/{file.fileno()}", os.fstat(file.fileno()).st_ino, ""
    except OSError as error:
        why = f"{folder} has no {max(1, size >> 20)} MiB to share ({error.strerror})"
        return "", 0, f"{why}; give it more (docker run --shm-size), or use --comm nccl"


def _lock_pages(mapped: Tensor) -> None:
    """Let GPUs use this host memory at the process's addresses. Raises UserError on every rank if it cannot be locked."""
    runtime, problem = torch.cuda.cudart(), ""
    error = runtime.cudaHostRegister(mapped.data_ptr(), mapped.nbytes, _PORTABLE | _MAPPED)
    if int(error) == 0:
        weakref.finalize(mapped, _unlock_pages, mapped.data_ptr()).atexit = False  # the driver does it at exit
    else:
        problem = runtime.cudaGetErrorString(error)
        with suppress(RuntimeError):  # this launch clears the error, which CUDA keeps until it is reported
            torch.zeros(1, device="cuda")
    if problem := next(filter(None, gather_objects(problem)), ""):
        raise UserError(f"{mapped.nbytes >> 20} MiB of host memory cannot be locked ({problem}); use --comm nccl")


def _unlock_pages(address: int) -> None:
    torch.cuda.synchronize()  # no copy may still use the memory
    torch.cuda.cudart().cudaHostUnregister(address)


_PORTABLE, _MAPPED = 1, 2  # flags of cudaHostRegister
