"""Runs `kernels/prefill_attention_hopper.py` on the CPU, because Triton's interpreter cannot run Gluon: `load` imports the module
with this simulator in place of Triton. Its kernel then runs when it is launched, program by program in random order.

The partitions of a program take turns at random. TMA loads land at random times; wgmmas run as late as their waits allow. Shared
memory has addresses: a matrix is panels of 64 columns, one after the other, whose rows have the 128-byte pattern. The simulator
raises `Fault` for: shared memory that is used before it is loaded or fenced, or overwritten while it is read; bytes that a
barrier did not expect, or a second arrival in a phase; addresses outside a tensor; sums that are used before they are waited for;
memory used before the wait for the previous kernel; and partitions that all wait. Layouts of registers are not simulated.
"""

import importlib.util
import math
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

PANEL = 64


class Fault(Exception):
    """A kernel does what would give wrong results, or never end, on a GPU."""


class _Stopped(BaseException):
    """Ends the threads of a program that has failed."""


def _check(right: bool, message: str) -> None:
    if not right:
        raise Fault(message)


# --- threads ------------------------------------------------------------------------------------------------------------------


class _Partition:
    """A partition of a program. Only one runs at a time."""

    def __init__(self, program: "_Program", job: Callable[[], None]) -> None:
        self.program, self.job = program, job
        self.ready: Callable[[], bool] = lambda: True
        self.turn, self.over = threading.Semaphore(0), False
        self.wgmmas: deque[Callable[[], None]] = deque()
        self.unfenced: list[tuple[Tensor, Tensor]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self.turn.acquire()
        _here.partition = self
        try:
            if not self.program.failure:
                self.job()
                _check(not self.wgmmas, "a partition ends before its wgmmas")
        except _Stopped:
            pass
        except BaseException as error:
            self.program.failure = self.program.failure or error
        self.over = True
        self.program.turn.release()

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let other partitions run, at least until `ready()`."""
        self.ready = ready
        self.program.turn.release()
        self.turn.acquire()
        if self.program.failure:
            raise _Stopped


class _Program:
    def __init__(self, number: int, programs: int, dice: random.Random) -> None:
        self.number, self.programs, self.dice = number, programs, dice
        self.turn, self.failure, self.waited = threading.Semaphore(0), None, False
        self.partitions: list[_Partition] = []
        self.loads: list[Callable[[], None]] = []

    def run(self, job: Callable[[], None]) -> None:
        self.partitions = [_Partition(self, job)]
        while self.partitions:
            choices: list[Any] = [x for x in self.partitions if x.ready()] + self.loads
            if not choices and not self.failure:
                self.failure = Fault("all partitions wait")
            chosen = self.dice.choice(list(self.partitions) if self.failure else choices)
            if isinstance(chosen, _Partition):
                chosen.turn.release()
                self.turn.acquire()
                if chosen.over:
                    self.partitions.remove(chosen)
            else:
                self.loads.remove(chosen)
                chosen()
        if self.failure:
            raise self.failure
        _check(not self.loads, "a program ends before its loads")


_here = threading.local()


def _partition() -> _Partition:
    partition: _Partition = _here.partition
    return partition


def _warp_specialize(partitions: Sequence[Any], _warps: Sequence[int], _registers: Sequence[int]) -> None:
    program = _partition().program
    started = [_Partition(program, lambda f=f, args=args: f(*args)) for f, args in partitions]
    program.partitions += started
    _partition().pause(lambda: all(x.over for x in started))


# --- values -------------------------------------------------------------------------------------------------------------------


class Block(Tensor):
    """A tile in registers, or a scalar."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None, shape=self.shape)


def _block(value: Any) -> Any:
    return torch.as_tensor(value).as_subclass(Block)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pointer:
    """Addresses in a tensor."""

    memory: Tensor  # 1D
    offset: Any = 0

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    def where(self, mask: Any) -> tuple[Tensor, Tensor]:
        """The offsets, and which of them are used."""
        _check(_partition().program.waited, "memory is used before the previous kernel has finished")
        offset = torch.as_tensor(self.offset).as_subclass(Tensor)
        used = torch.as_tensor(True if mask is None else mask).as_subclass(Tensor).expand(offset.shape)
        inside = (offset >= 0) & (offset < len(self.memory))
        _check(bool((inside | ~used).all()), "an address is outside its tensor")
        return offset.clamp(0, len(self.memory) - 1), used


def _load(pointer: Pointer, mask: Any = None, other: int = 0) -> Any:
    offset, used = pointer.where(mask)
    return _block(torch.where(used, pointer.memory[offset].long(), other))


def _store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    offset, used = pointer.where(mask)
    pointer.memory[offset[used]] = value.as_subclass(Tensor)[used]


# --- shared memory ------------------------------------------------------------------------------------------------------------


class _Barrier:
    """An mbarrier. A phase ends when all arrivals and all expected bytes are there."""

    def __init__(self) -> None:
        self.count = self.arrivals = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.arrivals = count

    def arrive(self, bytes: int = 0) -> None:
        _check(self.arrivals > 0, "a barrier has one arrival too many in its phase")
        self.arrivals -= 1
        self.bytes += bytes
        self.end()
        _partition().pause()

    def end(self, bytes: int = 0) -> None:
        """Count loaded bytes, and end the phase if all is there."""
        self.bytes -= bytes
        _check(self.bytes >= 0, "a barrier gets bytes that it did not expect")
        if self.arrivals == self.bytes == 0:
            self.phase ^= 1
            self.arrivals = self.count


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
        _partition().unfenced.append((self.memory.unfenced, at))
        _partition().pause()


def _fence() -> None:
    while _partition().unfenced:
        unfenced, at = _partition().unfenced.pop()
        unfenced[at] = False


def _allocate(dtype: torch.dtype, shape: Sequence[int], _layout: Any) -> Any:
    if dtype == torch.int64:
        barriers = [_Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=lambda i: barriers[int(i)], type=SimpleNamespace(shape=list(shape)))
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
    partition, memory, at = _partition(), to.memory, to.addresses()
    _check(partition.program.waited, "memory is loaded before the previous kernel has finished")
    free = not memory.loading[at].any() and not memory.readers[at].any()
    _check(free and not memory.unfenced[at].any(), "shared memory is overwritten")
    _check(list(to.shape) == list(descriptor.block_shape), "a buffer is not of the descriptor's size")
    memory.loading[at] = True
    memory.values[at] = torch.nan

    def land() -> None:
        memory.values[at] = descriptor.read(coordinates).flatten(0, -2)
        memory.loading[at] = False
        barrier.end(descriptor.block_type.nbytes)

    partition.program.loads.append(land)
    partition.pause()


# --- wgmma --------------------------------------------------------------------------------------------------------------------


@dataclass
class _Sums:
    """Sums that wgmmas under way add to."""

    values: Any
    pending: int = 0


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
    _partition().wgmmas.append(multiply)
    _partition().pause()
    return found


def _wgmma_wait(outstanding: int, deps: Sequence[_Sums]) -> Any:
    _partition().pause()
    while len(_partition().wgmmas) > outstanding:
        _partition().wgmmas.popleft()()
    found = tuple(x if x.pending else x.values for x in deps)
    return found if len(found) > 1 else found[0]


# --- the modules --------------------------------------------------------------------------------------------------------------


def _gdc_wait() -> None:
    _partition().program.waited = True


class _Kernel:
    """A jitted function: called by other kernels, or launched by `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., Any], dice: random.Random) -> None:
        self.function, self.dice = function, dice

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, maxnreg: int, launch_pdl: bool, **constants: Any) -> None:
            given = [Pointer(x.view(-1)) if isinstance(x, Tensor) else x for x in args]
            for number in self.dice.sample(range(grid[0]), grid[0]):
                _Program(number, grid[0], self.dice).run(lambda: self.function(*given, **constants))

        return launch


def _modules(dice: random.Random) -> dict[str, ModuleType]:
    def jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
        return (lambda f: _Kernel(f, dice)) if function is None else _Kernel(function, dice)

    layouts = ("NVMMADistributedLayout", "NVMMASharedLayout", "SliceLayout", "BlockedLayout", "DotOperandLayout")
    language = {
        "constexpr": lambda value: value,
        "program_id": lambda _axis: _partition().program.number,
        "num_programs": lambda _axis: _partition().program.programs,
        "static_range": range,
        "cdiv": lambda a, b: (a + b - 1) // b,
        "minimum": lambda a, b: torch.minimum(_block(a), _block(b)),
        "maximum": lambda a, b: torch.maximum(_block(a), _block(b)),
        "where": lambda mask, a, b: torch.where(_block(mask), a, b),
        "zeros": lambda shape, dtype, _layout: _block(torch.zeros(*shape, dtype=dtype)),
        "full": lambda shape, value, dtype, _layout: _block(torch.full(shape, value, dtype=dtype)),
        "zeros_like": torch.zeros_like,
        "arange": lambda start, end, _layout: _block(torch.arange(start, end)),
        "exp2": torch.exp2,
        "max": lambda x, axis: x.amax(axis),
        "sum": lambda x, axis: x.sum(axis),
        "convert_layout": lambda x, _layout: x,
        "load": _load,
        "store": _store,
        "allocate_shared_memory": _allocate,
        "warp_specialize": _warp_specialize,
        **{name: lambda *args: None for name in layouts},
        **{name: getattr(torch, name) for name in ("float32", "int64")},
    }
    barrier = SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, bytes: barrier.arrive(bytes),
        arrive=lambda barrier: barrier.arrive(),
        wait=lambda barrier, phase: _partition().pause(lambda: barrier.phase != int(phase)),
    )
    hopper = {
        "mbarrier": barrier,
        "tma": SimpleNamespace(async_copy_global_to_shared=_tma_load),
        "fence_async_shared": _fence,
        "warpgroup_mma": _wgmma,
        "warpgroup_mma_wait": _wgmma_wait,
    }
    cuda = SimpleNamespace(gdc_wait=_gdc_wait, gdc_launch_dependents=lambda: None)
    contents: dict[str, dict[str, Any]] = {
        "triton": {},
        "triton.language": {"extra": SimpleNamespace(cuda=cuda)},
        "triton.experimental": {},
        "triton.experimental.gluon": {"jit": jit},
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia": {},
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.nvidia": {},
        "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": Descriptor},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, content in contents.items():
        vars(modules[name]).update(content)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, modules[name])
    return modules


def load(name: str, seed: int, replace: tuple[str, str] = ("", "")) -> Any:
    """The module of kernels with this name, on a simulator. replace: a text of its source, which must be there, and another one."""
    spec = importlib.util.find_spec(name)
    assert spec and spec.origin
    with open(spec.origin) as file:
        source = file.read()
    assert replace[0] in source, replace
    module = ModuleType(name)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in _modules(random.Random(seed)).items():
            patch.setitem(sys.modules, key, value)
        exec(compile(source.replace(*replace) if replace[0] else source, spec.origin, "exec"), vars(module))
    return module
