"""`tests/support/gluon.py` for `kernels/prefill_attention_hopper.py`, in which several partitions use parts of the same memory.

Shared memory has addresses: a matrix is panels of 64 columns, one after the other, whose rows have the 128-byte pattern. The
simulator raises `Fault` also for shared memory that is not fenced between a store and a wgmma, and overwritten while it is read.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.support import gluon
from tests.support.gluon import Fault, Pointer, Simulator, _Barrier, _block, _Buffers, _check, _Sums, _thread

__all__ = ["Fault", "load"]

PANEL = 64

# --- memory ------------------------------------------------------------------------------------------------------------


def _load(pointer: Pointer, mask: Any = None, other: int = 0) -> Any:
    """Without a pause, because no kernel writes block tables: the loads of keys then follow their barriers closely."""
    offset, used = pointer.where(mask)
    return _block(torch.where(used, pointer.memory[offset].long(), other))


@dataclass
class _Memory:
    """An allocation: elements, and for each one whether it is being loaded, is stored but not fenced, and how often it is read."""

    values: Tensor
    loading: Tensor = field(init=False)
    unfenced: Tensor = field(init=False)
    readers: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.loading, self.unfenced = (torch.zeros(len(self.values), dtype=torch.bool) for _ in range(2))
        self.readers = torch.zeros(len(self.values), dtype=torch.int32)


@dataclass(frozen=True)
class Shared:
    """A view of an allocation from element `offset` on."""

    memory: _Memory
    shape: tuple[int, ...]
    offset: int = 0
    transposed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.values.dtype

    @property
    def layout(self) -> None:
        return None

    @property
    def type(self) -> Any:
        return SimpleNamespace(shape=list(self.shape))

    def index(self, i: Any) -> "Shared":
        _check(0 <= int(i) < self.shape[0], f"there is no buffer {int(i)}")
        return Shared(self.memory, self.shape[1:], self.offset + int(i) * math.prod(self.shape[1:]))

    def permute(self, _order: Sequence[int]) -> "Shared":
        return Shared(self.memory, self.shape, self.offset, True)

    def _reinterpret(self, _dtype: Any, shape: Sequence[int], _layout: Any) -> "Shared":
        _check(math.prod(shape) == math.prod(self.shape), "a view has another size than its memory")
        return Shared(self.memory, tuple(shape), self.offset)

    def addresses(self) -> Tensor:
        """Of the elements of a matrix whose leading dimensions are rows: (rows, columns)."""
        rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
        _check(self.offset % (8 * PANEL) == 0 and rows % 8 == 0, "a matrix does not begin at a row pattern")
        row, column = torch.arange(rows)[:, None], torch.arange(columns)
        chunk = (column % PANEL // 8) ^ (row % 8)
        return self.offset + column // PANEL * rows * PANEL + row * PANEL + chunk * 8 + column % 8

    def read(self) -> Tensor:
        values = self.memory.values[self.addresses()]
        return values.T if self.transposed else values

    def load(self, _layout: Any) -> Any:
        _check(not self.memory.loading[self.addresses()].any(), "shared memory is read before it is loaded")
        return _block(self.read())

    def store(self, value: Tensor) -> None:
        at = self.addresses()
        _check(not self.memory.loading[at].any() and not self.memory.readers[at].any(), "shared memory is overwritten")
        self.memory.values[at] = value.as_subclass(Tensor).to(self.dtype)
        self.memory.unfenced[at] = True
        _thread().unfenced.append((self.memory.unfenced, at))
        _thread().pause()


def _fence() -> None:
    while _thread().unfenced:
        unfenced, at = _thread().unfenced.pop()
        unfenced[at] = False


def _allocate(dtype: torch.dtype, shape: Sequence[int], _layout: Any) -> Any:
    if dtype == torch.int64:
        return _Buffers(dtype, shape)  # barriers
    return Shared(_Memory(torch.full((math.prod(shape),), torch.nan, dtype=dtype)), tuple(shape))


@dataclass
class Descriptor:
    """A TMA descriptor: of a contiguous tensor on the host, and in a kernel."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    layout: Any

    def __post_init__(self) -> None:
        size = self.base.element_size()
        aligned = self.base.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in self.strides[:-1])
        _check(aligned and self.strides[-1] == 1, "a descriptor is not aligned")
        _check(max(self.block_shape) <= 256 and self.block_shape[-1] * size <= 128, "a descriptor's block is not possible")
        _check(self.base.numel() == math.prod(self.shape), "a descriptor is not of its tensor's size")

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(shape=list(self.block_shape), nbytes=math.prod(self.block_shape) * self.base.element_size())

    def read(self, coordinates: Sequence[Any]) -> Tensor:
        """A block, with zeros beyond the tensor."""
        block = torch.zeros(*self.block_shape, dtype=self.dtype)
        pairs = list(zip(map(int, coordinates), self.block_shape, strict=True))
        found = self.base.as_strided(self.shape, self.strides)[tuple(slice(at, at + size) for at, size in pairs)]
        block[tuple(slice(0, size) for size in found.shape)] = found
        return block


def _tma_load(descriptor: Descriptor, coordinates: Sequence[Any], barrier: _Barrier, to: Shared) -> None:
    thread, memory, at = _thread(), to.memory, to.addresses()
    _check(thread.waited, "memory is loaded before the previous kernel has finished")
    free = not memory.loading[at].any() and not memory.readers[at].any()
    _check(free and not memory.unfenced[at].any(), "shared memory is overwritten")
    _check(list(to.shape) == list(descriptor.block_shape), "a buffer is not of the descriptor's size")
    memory.loading[at] = True
    memory.values[at] = torch.nan

    def land() -> None:
        memory.values[at] = descriptor.read(coordinates).flatten(0, -2)
        memory.loading[at] = False
        barrier.arrived(descriptor.block_type.nbytes)

    thread.launch.loads.append(land)
    thread.pause()


# --- wgmma --------------------------------------------------------------------------------------------------------------------


def _wgmma(a: Any, b: Shared, sums: Any, use_acc: bool = True, is_async: bool = False) -> _Sums:
    operands = [x for x in (a, b) if isinstance(x, Shared)]
    for x in operands:
        at = x.addresses()
        _check(not x.memory.loading[at].any(), "a wgmma reads memory that is not loaded")
        _check(not x.memory.unfenced[at].any(), "a wgmma reads memory that is not fenced")
        x.memory.readers[at] += 1
    found = sums if isinstance(sums, _Sums) else _Sums(sums.clone() if use_acc else torch.zeros_like(sums))
    found.pending += 1

    def multiply() -> None:
        left = a.read() if isinstance(a, Shared) else a
        found.values = _block(found.values + left.float() @ b.read().float())
        found.pending -= 1
        for x in operands:
            x.memory.readers[x.addresses()] -= 1

    _check(is_async, "wgmmas are asynchronous")
    _thread().wgmmas.append(multiply)
    _thread().pause()
    return found


def _wgmma_wait(outstanding: int, deps: Sequence[_Sums]) -> Any:
    _thread().pause()
    return gluon._wgmma_wait(outstanding, deps)


# --- the modules --------------------------------------------------------------------------------------------------------------


class _Simulator(Simulator):
    most_programs = 1  # so that the partitions of a program meet each other often
    more: ClassVar[dict[str, dict[str, Any]]] = {
        "triton.experimental.gluon.language": {
            "full": lambda shape, value, dtype, _layout: _block(torch.full(shape, value, dtype=dtype)),
            "exp2": torch.exp2,
            "max": lambda x, axis: x.amax(axis),
            "sum": lambda x, axis: x.sum(axis),
            "load": _load,
            "allocate_shared_memory": _allocate,
        },
        "triton.experimental.gluon.language.nvidia.hopper": {
            "tma": SimpleNamespace(async_copy_global_to_shared=_tma_load),
            "fence_async_shared": _fence,
            "warpgroup_mma": _wgmma,
            "warpgroup_mma_wait": _wgmma_wait,
        },
        "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": Descriptor},
    }

    def jit(self, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """The kernel has no constant PDL."""
        if function is None:
            return self.jit
        kernel = function
        return super().jit(lambda *args, PDL=True, **constants: kernel(*args, **constants), **options)


def load(name: str, seed: int, replace: tuple[str, str] = ("", "")) -> Any:
    """The module of kernels with this name, on a simulator. replace: a text of its source, which must be there, and another one."""
    return gluon.load(name, seed, replace, kind=_Simulator)[0]
