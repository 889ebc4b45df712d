"""Runs Gluon kernels for Hopper on the CPU, because Triton's interpreter cannot: `load` imports a module of kernels with this
simulator in place of Triton, and its kernels then run when they are launched.

The simulator knows what `kernels/linear_stream.py` and the kernels of `kernels/linear_quantized.py` use, PTX included. Programs may
store to addresses in `mapped` memory, which other processes read, as `kernels/device.py` does. Programs
start in random order, some of them only after others have ended, and their partitions take turns at random. TMA loads and wgmmas are as late as their barriers and waits allow. It raises `Fault` for: memory or a buffer that is used
before it is loaded, or overwritten before it has been read; bytes that a barrier did not expect, or a second arrival in a phase;
addresses outside a tensor; memory but `early` tensors before the wait for the previous kernel; and programs that all wait.
Registers, memory order, and integers of 32 bits are not simulated.
"""

import importlib.util
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor


class Fault(Exception):
    """A kernel does what would give wrong results, or never end, on a GPU."""


class _Stopped(BaseException):
    """Ends the threads of a launch that has failed."""


# --- threads ------------------------------------------------------------------------------------------------------------------


class _Thread:
    """A program or one of its partitions. Only one thread runs at a time."""

    def __init__(self, launch: "_Launch", program: int, job: Callable[[], None], warps: int) -> None:
        self.launch, self.program, self.job, self.warps = launch, program, job, warps
        self.ready: Callable[[], bool] = lambda: True
        self.turn, self.over, self.waited = threading.Semaphore(0), False, False
        self.wgmmas: deque[Callable[[], None]] = deque()
        self.unfenced: list[tuple[Tensor, Tensor]] = []  # of memory that this thread has stored: flags, and which of them
        self.host = threading.Thread(target=self._run, daemon=True)
        self.host.start()

    def _run(self) -> None:
        self.turn.acquire()
        _here.thread = self
        try:
            if not self.launch.failure:
                self.job()
                _check(not self.wgmmas, "a partition ends before its wgmmas")
        except _Stopped:
            pass
        except BaseException as error:
            self.launch.failure = self.launch.failure or error
        self.over = True
        self.launch.turn.release()

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let other threads run, at least until `ready()`."""
        self.ready = ready
        self.launch.turn.release()
        self.turn.acquire()
        if self.launch.failure:
            raise _Stopped


class _Launch:
    """The threads of a launch, and the TMA loads under way."""

    def __init__(self, dice: random.Random, early: Sequence[Tensor], mapped: Sequence[Tensor]) -> None:
        self.dice, self.early, self.mapped = dice, early, mapped
        self.turn, self.failure = threading.Semaphore(0), None
        self.threads: list[_Thread] = []
        self.loads: list[Callable[[], None]] = []
        self.programs, self.released_early = 0, False

    def start(self, program: int, job: Callable[[], None], warps: int) -> _Thread:
        thread = _Thread(self, program, job, warps)
        self.threads.append(thread)
        return thread

    def run(self, programs: int, job: Callable[[], None], warps: int, most: int) -> None:
        """most: programs that run at the same time."""
        self.programs = programs
        waiting, resident = self.dice.sample(range(programs), programs), self.dice.randint(1, min(programs, most))
        running: list[_Thread] = []
        while waiting or self.threads:
            running = [thread for thread in running if not thread.over]
            while waiting and len(running) < resident:
                running.append(self.start(waiting.pop(), job, warps))
            choices: list[Any] = [thread for thread in self.threads if thread.ready()] + self.loads
            if not choices and not self.failure:
                self.failure = Fault("all threads wait")
            if self.failure:
                waiting, choices = [], list(self.threads)
            chosen = self.dice.choice(choices)
            if isinstance(chosen, _Thread):
                chosen.turn.release()
                self.turn.acquire()
                if chosen.over:
                    self.threads.remove(chosen)
            else:
                self.loads.remove(chosen)
                chosen()
        if self.failure:
            raise self.failure


_here = threading.local()


def _thread() -> _Thread:
    thread: _Thread = _here.thread
    return thread


def _check(right: bool, message: str) -> None:
    if not right:
        raise Fault(message)


# --- values -------------------------------------------------------------------------------------------------------------------


class Block(Tensor):
    """A tile in registers, or a scalar."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None, shape=self.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:  # type: ignore[override]
        if isinstance(dtype, PointerType):
            return _mapped(int(self), dtype.element_ty)
        return self.view(dtype) if bitcast else super().to(dtype)

    def split(self) -> Any:  # type: ignore[override]
        """Both halves along the last dim, which is 2."""
        left, right = self.unbind(-1)
        return left, right


def _block(value: Any, dtype: torch.dtype | None = None) -> Any:
    return torch.as_tensor(value, dtype=dtype).as_subclass(Block)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PointerType:
    element_ty: torch.dtype


@dataclass(frozen=True)
class Pointer:
    """Addresses in a tensor."""

    memory: Tensor  # 1D
    offset: Any = 0

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    def to(self, dtype: PointerType, bitcast: bool) -> "Pointer":
        return Pointer(self.memory.view(dtype.element_ty))

    def where(self, mask: Any) -> tuple[Tensor, Tensor]:
        """The offsets, and which of them are used."""
        thread = _thread()
        early = any(self.memory.data_ptr() == tensor.data_ptr() for tensor in thread.launch.early)
        _check(thread.waited or early or not _pdl.on, "memory is used before the previous kernel has finished")
        offset = torch.as_tensor(self.offset).as_subclass(Tensor)
        used = torch.as_tensor(True if mask is None else mask).as_subclass(Tensor).expand(offset.shape)
        inside = (offset >= 0) & (offset < len(self.memory))
        _check(bool((inside | ~used).all()), "an address is outside its tensor")
        return offset.clamp(0, len(self.memory) - 1), used


def _pointer(x: Tensor) -> Pointer:
    """To a tensor, including the gaps between its rows."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return Pointer(x.as_strided((size,), (1,)))


def _mapped(address: int, dtype: torch.dtype) -> Pointer:
    """A pointer to an address in memory that is `mapped`."""
    for memory in _thread().launch.mapped:
        if 0 <= address - memory.data_ptr() < memory.nbytes:
            return Pointer(memory.view(dtype), (address - memory.data_ptr()) // dtype.itemsize)
    raise Fault("an address is in no memory")


def _load(
    pointer: Pointer,
    mask: Any = None,
    other: Any = 0,
    cache_modifier: str = "",
    eviction_policy: str = "",
    volatile: bool = False,
) -> Any:
    offset, used = pointer.where(mask)
    _thread().pause()
    return _block(torch.where(used, pointer.memory[offset], torch.tensor(other, dtype=pointer.memory.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, used = pointer.where(mask)
    _thread().pause()
    value = torch.as_tensor(value, dtype=pointer.memory.dtype).as_subclass(Tensor).expand(offset.shape)
    pointer.memory[offset[used]] = value[used]


def _atomic_add(pointer: Pointer, value: int, sem: str, scope: str) -> Any:
    offset, _ = pointer.where(None)
    _thread().pause()
    before = pointer.memory[offset].clone()
    pointer.memory[offset] += value
    return _block(before)


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
        self._end()

    def arrived(self, bytes: int) -> None:
        self.bytes -= bytes
        _check(self.bytes >= 0, "a barrier gets bytes that it did not expect")
        self._end()

    def _end(self) -> None:
        if self.arrivals == self.bytes == 0:
            self.phase ^= 1
            self.arrivals = self.count


class _Buffer:
    """A tile in shared memory."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.loading, self.readers = values, False, 0

    @property
    def type(self) -> Any:
        return SimpleNamespace(shape=self.values.shape)

    def permute(self, order: Sequence[int]) -> "_View":
        return _View(self, order)

    def slice(self, start: int, length: int, dim: int = 0) -> "_Slice":
        return _Slice(self, self.values).slice(start, length, dim)


@dataclass(frozen=True)
class _View:
    buffer: _Buffer
    order: Sequence[int]

    def load(self, layout: Any) -> Any:
        return self.buffer.slice(0, len(self.buffer.values)).load(layout).permute(self.order)


@dataclass(frozen=True)
class _Slice:
    buffer: _Buffer
    values: Tensor

    def slice(self, start: int, length: int, dim: int = 0) -> "_Slice":
        _check(start >= 0 and start + length <= self.values.shape[dim], "a slice is outside its buffer")
        return _Slice(self.buffer, self.values.narrow(dim, start, length))

    def load(self, _layout: Any) -> Any:
        _thread().pause()
        _check(not self.buffer.loading, "a buffer is read that is not loaded")
        return _block(self.values.clone())


def _poison(dtype: torch.dtype) -> float:
    return torch.nan if dtype.is_floating_point else -1


class _Buffers:
    def __init__(self, dtype: Any, shape: Sequence[int]) -> None:
        self.type, self.dtype = SimpleNamespace(shape=list(shape)), dtype
        barriers = dtype == torch.int64
        self.all = [
            _Barrier() if barriers else _Buffer(torch.full(list(shape[1:]), _poison(dtype), dtype=dtype))
            for _ in range(shape[0])
        ]

    def index(self, i: Any) -> Any:
        _check(0 <= int(i) < len(self.all), f"there is no buffer {int(i)}")
        return self.all[int(i)]


@dataclass
class Descriptor:
    """A TMA descriptor: of a tensor on the host, and in a kernel."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    layout: Any

    def __post_init__(self) -> None:
        size = self.base.element_size()
        _check(self.base.data_ptr() % 16 == 0 and self.strides[0] * size % 16 == 0, "a descriptor is not aligned")
        _check(self.strides[1] == 1 and max(self.block_shape) <= 256, "a descriptor's block is not possible")

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def block_type(self) -> Any:
        rows, columns = self.block_shape
        return SimpleNamespace(shape=list(self.block_shape), nbytes=rows * columns * self.base.element_size())

    def read(self, coordinates: Sequence[Any]) -> Tensor:
        """A block, with zeros beyond the tensor."""
        values = torch.zeros(*self.block_shape, dtype=self.dtype)
        row, column = map(int, coordinates)
        found = self.base[row : row + self.block_shape[0], column : column + self.block_shape[1]]
        values[: found.shape[0], : found.shape[1]] = found
        return values


def _tma_load(descriptor: Descriptor, coordinates: Sequence[Any], barrier: _Barrier, buffer: _Buffer) -> None:
    thread = _thread()
    early = any(descriptor.base.data_ptr() == tensor.data_ptr() for tensor in thread.launch.early)
    _check(thread.waited or early or not _pdl.on, "an input is loaded before the previous kernel has finished")
    _check(not buffer.loading and not buffer.readers, "a buffer is overwritten")
    _check(list(buffer.values.shape) == list(descriptor.block_shape), "a buffer is not of the descriptor's size")
    buffer.loading = True
    buffer.values.fill_(_poison(descriptor.dtype))

    def arrive() -> None:
        buffer.values.copy_(descriptor.read(coordinates))
        buffer.loading = False
        barrier.arrived(descriptor.block_type.nbytes)

    thread.launch.loads.append(arrive)
    thread.pause()


def _barrier_arrive(barrier: _Barrier, pred: Any = True) -> None:
    if pred:
        barrier.arrive()
    _thread().pause()


# --- wgmma --------------------------------------------------------------------------------------------------------------------


@dataclass
class _Sums:
    """Sums that wgmmas under way add to."""

    values: Any
    pending: int = 0


def _wgmma(a: Any, b: _View, sums: Any, use_acc: bool = True, is_async: bool = True) -> _Sums:
    """a: a buffer, or a tile in registers."""
    buffers = [b.buffer] + ([a] if isinstance(a, _Buffer) else [])
    values = a.values if isinstance(a, _Buffer) else a.as_subclass(Tensor)
    _check(not any(buffer.loading for buffer in buffers), "a wgmma reads a buffer that is not loaded")
    _check(values.shape[0] >= 16 * _thread().warps, "the tile has fewer rows than the warps multiply")
    _check(values.dtype == b.buffer.values.dtype, "the operands have two data types")
    found = sums if isinstance(sums, _Sums) else _Sums(sums.clone() if use_acc else torch.zeros_like(sums))
    found.pending += 1
    for buffer in buffers:
        buffer.readers += 1

    def multiply() -> None:
        found.values += values.float() @ b.buffer.values.permute(*b.order).float()
        found.pending -= 1
        for buffer in buffers:
            buffer.readers -= 1

    thread = _thread()
    thread.wgmmas.append(multiply)
    thread.pause()
    return found


def _mma(a: Any, b: Any, sums: Any) -> Any:
    _check(a.dtype == b.dtype, "the operands have two data types")
    return sums + a.float() @ b.float()


def _wgmma_wait(outstanding: int, deps: Sequence[Any]) -> Any:
    thread = _thread()
    while len(thread.wgmmas) > outstanding:
        thread.wgmmas.popleft()()
    found = tuple(x.values if isinstance(x, _Sums) and not x.pending else x for x in deps)
    return found if len(found) > 1 else found[0]


# --- PTX ----------------------------------------------------------------------------------------------------------------------

_PTX: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lambda a, b, c, table: _lop3(a, b, c, int(table)),
    "mul.rn.bf16x2": lambda a, b: _of_pairs(_pairs(a, torch.bfloat16) * _pairs(b, torch.bfloat16)),
    "sub.rn.bf16x2": lambda a, b: _of_pairs(_pairs(a, torch.bfloat16) - _pairs(b, torch.bfloat16)),
    "mul.rn.f16x2": lambda a, b: _of_pairs(_pairs(a, torch.float16) * _pairs(b, torch.float16)),
    "sub.rn.f16x2": lambda a, b: _of_pairs(_pairs(a, torch.float16) - _pairs(b, torch.float16)),
}


def _lop3(a: Tensor, b: Tensor, c: Tensor, table: int) -> Tensor:
    """Bit 4 a + 2 b + c of the table, for each bit of a, b and c."""
    found = torch.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found & 0xFFFFFFFF


def _pairs(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Words as (..., 2) values of 16 bits, the low half first."""
    return words.contiguous().view(torch.int16).unflatten(-1, (-1, 4))[..., :2].contiguous().view(dtype)


def _of_pairs(values: Tensor) -> Tensor:
    """The inverse of `_pairs`."""
    halves = values.contiguous().view(torch.int16).long() & 0xFFFF
    return halves[..., 0] | halves[..., 1] << 16


def _inline_asm(asm: str, constraints: str, args: Sequence[Any], dtype: Sequence[torch.dtype], is_pure: bool, pack: int) -> Any:
    """For elements of 16 bits, two of a row in each word."""
    _check(pack == 2 and constraints.count("=&r") == len(dtype), "PTX that is not simulated")
    shape = args[0].shape
    given = [_of_pairs(arg.as_subclass(Tensor).expand(shape).unflatten(-1, (-1, 2))) for arg in args]
    registers = {f"${len(dtype) + i}": words for i, words in enumerate(given)}

    def operand(name: str) -> Tensor:
        return registers[name] if name in registers else torch.full_like(given[0], int(name, 0))

    for line in asm.strip("{} \n").splitlines():
        name, *operands = line.strip().rstrip(";").replace(",", "").split()
        if name != ".reg":
            sources = [int(o, 0) if name == "lop3.b32" and i == 3 else operand(o) for i, o in enumerate(operands[1:])]
            registers[operands[0]] = _PTX[name](*sources)
    return tuple(_block(_pairs(registers[f"${i}"], kind).reshape(shape)) for i, kind in enumerate(dtype))


# --- the modules --------------------------------------------------------------------------------------------------------------

_pdl = SimpleNamespace(on=False)
LAYOUTS = ("NVMMADistributedLayout", "SliceLayout", "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout")


def _gdc_launch_dependents() -> None:
    thread = _thread()
    thread.pause()
    thread.launch.released_early |= not thread.waited


def _gdc_wait() -> None:
    thread = _thread()
    thread.pause()
    thread.waited = True


def _warp_specialize(partitions: Sequence[Any], worker_warps: Sequence[int], worker_registers: Sequence[int]) -> None:
    parent = _thread()
    started = [
        parent.launch.start(parent.program, lambda f=f, args=args: f(*args), warps)
        for (f, args), warps in zip(partitions, (parent.warps, *worker_warps), strict=True)
    ]
    for thread in started:
        thread.waited = parent.waited
    parent.pause(lambda: all(thread.over for thread in started))


class _Kernel:
    """A jitted function: called by other kernels, or launched by `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., Any], simulator: "Simulator") -> None:
        self.function, self.simulator = function, simulator

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, launch_pdl: bool, maxnreg: int | None, **constants: Any) -> None:
            _pdl.on = constants["PDL"] = True
            given = [_given(x) for x in args]
            constants |= {name: _given(x) for name, x in constants.items() if name in ("state", "rank")}
            run = _Launch(self.simulator.dice, self.simulator.early, self.simulator.mapped)
            run.run(grid[0], lambda: self.function(*given, **constants), num_warps, self.simulator.most_programs)
            _check(not run.loads, "a kernel ends before its loads")
            self.simulator.released_early = run.released_early

        return launch


def _given(x: Any) -> Any:
    """An argument of a kernel as its programs see it."""
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return x._make(map(_given, x))  # type: ignore[attr-defined]
    if isinstance(x, tuple):
        return tuple(map(_given, x))
    return _pointer(x) if isinstance(x, Tensor) else _block(x) if isinstance(x, int) else x


class _SharedLayout:
    def __init__(self, *_fields: int) -> None:
        pass

    @staticmethod
    def get_default_for(_block: Sequence[int], _dtype: torch.dtype) -> None:
        pass


class Simulator:
    """The modules that stand in for Triton's. early: tensors that may be loaded before the previous kernel has finished. mapped:
    memory of bytes that programs address by numbers. more: by module, what another kernel needs beside or instead of this simulator's.
    most_programs: that run at the same time. released_early: whether the last launch let the next one start before its own wait."""

    most_programs = 1 << 20
    more: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, seed: int) -> None:
        self.dice, self.early, self.mapped = random.Random(seed), list[Tensor](), list[Tensor]()
        self.released_early = False

    def jit(self, function: Callable[..., Any] | None = None, **_options: Any) -> Any:
        return (lambda f: _Kernel(f, self)) if function is None else _Kernel(function, self)

    def modules(self) -> dict[str, ModuleType]:
        language = {
            "constexpr": lambda value: value,
            "program_id": lambda _axis: _block(_thread().program),
            "num_programs": lambda _axis: _thread().launch.programs,
            "num_warps": lambda: _thread().warps,
            "static_range": range,
            "cdiv": lambda a, b: (a + b - 1) // b,
            "minimum": lambda a, b: _block(torch.minimum(_block(a), _block(b))),
            "maximum": lambda a, b: _block(torch.maximum(_block(a), _block(b))),
            "where": lambda condition, a, b: _block(torch.where(_block(condition), _block(a), _block(b))),
            "zeros": lambda shape, dtype, _layout: _block(torch.zeros(*shape, dtype=dtype)),
            "zeros_like": lambda x: _block(torch.zeros_like(x)),
            "arange": lambda start, end, _layout: _block(torch.arange(start, end)),
            "exp": torch.exp,
            "convert_layout": lambda x, _layout: x,
            "pointer_type": PointerType,
            "multiple_of": lambda pointer, _unit: pointer,
            "join": lambda a, b: torch.stack([a, b], -1),
            "split": lambda x: x.unbind(-1),
            "sum": torch.sum,
            "expand_dims": torch.unsqueeze,
            "inline_asm_elementwise": _inline_asm,
            "load": _load,
            "store": _store,
            "atomic_add": _atomic_add,
            "thread_barrier": lambda: _thread().pause(),
            "debug_barrier": lambda: _thread().pause(),
            "allocate_shared_memory": lambda dtype, shape, _layout: _Buffers(dtype, shape),
            "warp_specialize": _warp_specialize,
            **{name: lambda *args: None for name in LAYOUTS},
            "NVMMASharedLayout": _SharedLayout,
            **{name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "int16", "int32", "int64", "uint32")},
            "float8e4nv": torch.float8_e4m3fn,
        }
        hopper = {
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=lambda barrier, count: barrier.init(count),
                expect=lambda barrier, bytes: barrier.arrive(bytes),
                arrive=_barrier_arrive,
                wait=lambda barrier, phase: _thread().pause(lambda: barrier.phase != phase),
            ),
            "tma": SimpleNamespace(async_copy_global_to_shared=_tma_load),
            "warpgroup_mma": _wgmma,
            "warpgroup_mma_wait": _wgmma_wait,
        }
        cuda = SimpleNamespace(gdc_wait=_gdc_wait, gdc_launch_dependents=_gdc_launch_dependents)
        contents: dict[str, dict[str, Any]] = {
            "triton": {"jit": self.jit},
            "triton.language": {**language, "extra": SimpleNamespace(cuda=cuda)},
            "triton.experimental": {},
            "triton.experimental.gluon": {"jit": self.jit, "constexpr_function": lambda function: function},
            "triton.experimental.gluon.language": language,
            "triton.experimental.gluon.language.nvidia": {},
            "triton.experimental.gluon.language.nvidia.ampere": {"mma_v2": _mma},
            "triton.experimental.gluon.language.nvidia.hopper": hopper,
            "triton.experimental.gluon.nvidia": {},
            "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": Descriptor},
        }
        modules = {name: ModuleType(name) for name in contents}
        for name, content in contents.items():
            vars(modules[name]).update(content | self.more.get(name, {}))
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(modules[parent], last, modules[name])
        return modules


def load(
    name: str, seed: int, replace: tuple[str, str] = ("", ""), needs: Sequence[str] = (), kind: type[Simulator] = Simulator
) -> tuple[Any, Simulator]:
    """The module of kernels with this name, on a simulator. replace: a text of its source, which must be there, and another one.
    needs: the modules of kernels that it imports."""
    simulator = kind(seed)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in simulator.modules().items():
            patch.setitem(sys.modules, key, value)
        for needed in needs:
            patch.setitem(sys.modules, needed, _execute(needed, ("", "")))
        return _execute(name, replace), simulator


def _execute(name: str, replace: tuple[str, str]) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec and spec.origin
    with open(spec.origin) as file:
        source = file.read()
    assert replace[0] in source, replace
    module = ModuleType(name)
    exec(compile(source.replace(*replace) if replace[0] else source, spec.origin, "exec"), vars(module))
    return module


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
