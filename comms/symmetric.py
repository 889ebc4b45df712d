"""Exact and quantized all-reduces over symmetric memory (`comms/workspace.py`), which is in the GPUs' memory or in host memory.

A blocking all-reduce is launched on the current stream when its result is read. Its kernel then also does the residual
addition and the norm that follow. An overlapped all-reduce is launched at once on a side stream. The two have separate
workspaces, because they may run at the same time. One-shot, the kernel of a linear layer can send its own partial sums. Two-shot,
copy engines can send long overlapped messages.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from comms.interface import LEAST_COPIED, Done, Input, Linear, PendingAllReduce, Schedule, fault_word, on_side_stream
from comms.process_group import GlooCommunicator, NcclCommunicator, ProcessGroupCommunicator, TreeCommunicator, gather_objects
from comms.quantize import Scheme
from comms.workspace import Memory, Workspace, open_shared, open_workspace
from errors import UserError
from kernels import all_reduce, determinism, linear_push
from kernels.all_reduce import Tiling
from kernels.device import MAX_PROGRAMS
from kernels.dispatch import on_gpu
from kernels.linear_quantized import Packed
from kernels.norm import add_rms_norm, add_rms_norm_codes
from kernels.quantized_all_reduce import (
    BLOCKING,
    BLOCKING_NORM,
    OVERLAPPED,
    RoundTiling,
    WireFormat,
    fits_norm,
    quantized_add_norm,
    quantized_sum,
)
from kernels.relay import add_parts, wait_flags
from kernels.row_codes import RowCodes

Kind = Literal["one-shot", "two-shot"]
KINDS: tuple[Kind, ...] = ("one-shot", "two-shot")

# bytes of a message, at most; longer ones use the process group
CAPACITY: dict[Kind, int] = {"one-shot": 256 << 10, "two-shot": 16 << 20}  # 1,024 rows of 70B
OVERLAP_CAPACITY: dict[Kind, int] = {"one-shot": 256 << 10, "two-shot": 4 << 20}  # a decode step of 256 rows of 70B
FEW_SMS_CAPACITY: dict[Kind, int] = {"one-shot": 256 << 10, "two-shot": 8 << 20}  # 512 rows of 70B
GATHER_CAPACITY = 64 << 10  # logits of one row of Llama 3 on four ranks; longer messages use the process group
# Least and most rows of a linear layer that sends its own partial sums. With fewer rows, the ordinary kernels read the weight
# as fast, and only 1 µs of the all-reduce could be hidden. With more rows, the bandwidth of the link is the limit.
PUSHED_ROWS = 3, 16

QUANTIZED_CAPACITY = 32 << 20  # values of a launch: 64 MiB of bf16; longer messages take several launches
QUANTIZED_OVERLAP_CAPACITY = 8 << 20
QUANTIZED_NORM_CAPACITY = 4 << 20  # bytes up to which the norm is computed in the launch; with more, a separate one is faster
SHORT_ROW = 4096  # values of a row, at most, for which half of the warps of a quantized all-reduce with a norm are enough

COPIED = 64 << 20  # bytes that copy engines send at a time: 4,096 tokens of 8,192 features in 16 bits
ALIGNMENT = 256  # bytes; slices begin at multiples of it
FLAG_BYTES = 16  # so that Triton specializes all addresses alike
PARTIAL, SUM = range(2)  # what a flag says has arrived

# An overlapped all-reduce gets few programs: they use most of the link's bandwidth and leave the SMs to the GEMMs.
TILING: dict[Kind, Tiling] = {"one-shot": all_reduce.ONE_SHOT, "two-shot": all_reduce.TWO_SHOT}
OVERLAP_TILING: dict[Kind, Tiling] = {
    "one-shot": all_reduce.ONE_SHOT,
    "two-shot": Tiling(all_reduce.TWO_SHOT.block, all_reduce.TWO_SHOT.warps, programs=24),
}
# With few SMs, a program has more bytes in flight.
FEW_SMS_TILING: dict[Kind, Tiling] = {
    "one-shot": Tiling(block=2048, warps=16),
    "two-shot": Tiling(block=8192, warps=16, programs=12),
}
_ALL_REDUCE = {"one-shot": all_reduce.one_shot, "two-shot": all_reduce.two_shot}
_ADD_NORM: dict[Kind, Callable[..., tuple[Tensor, Any]]] = {
    "one-shot": all_reduce.one_shot_add_norm,
    "two-shot": all_reduce.two_shot_add_norm,
}
_BYTES = {"one-shot": all_reduce.one_shot_bytes, "two-shot": all_reduce.two_shot_bytes}


@dataclass(frozen=True)
class AllReduceKernel:
    """An all-reduce kernel with its workspace and launch parameters. Its launches run one after another on one stream.

    pdl: whether to use programmatic dependent launch, which overlaps the start of a kernel with the end of the previous one on
    the stream.
    """

    kind: Kind
    workspace: Workspace
    tiling: Tiling
    pdl: bool

    def fits(self, partial: Tensor) -> bool:
        """Whether the message fits the workspace, padded to slices of a multiple of 16 values."""
        unit = 16 * self.workspace.exchange.world_size
        return partial.numel() <= self.workspace.exchange.capacity // partial.element_size() // unit * unit

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over all ranks. partial: contiguous, not empty, and it `fits`."""
        return _ALL_REDUCE[self.kind](partial, self.workspace.exchange, self.tiling, self.pdl)

    def add_norm(self, partial: Tensor, x: Tensor, weight: Tensor, eps: float, codes: bool = False) -> tuple[Tensor, Any]:
        """(x + sum, rms_norm(x + sum) * weight), in one kernel if there is one for these shapes. codes: the norm as `RowCodes`."""
        if self._norm_fits(partial, x, weight, codes):
            return _ADD_NORM[self.kind](partial, x, weight, eps, self.workspace.exchange, pdl=self.pdl, codes=codes)
        return self.then_norm(partial, x, weight, eps, codes)

    def then_norm(self, partial: Tensor, x: Tensor, weight: Tensor, eps: float, codes: bool) -> tuple[Tensor, Any]:
        """`add_norm` by two kernels."""
        return (add_rms_norm_codes if codes else add_rms_norm)(x, self.all_reduce(partial), weight, eps)

    def _norm_fits(self, partial: Tensor, x: Tensor, weight: Tensor, codes: bool) -> bool:
        if not all_reduce.fits_norm(partial, x, weight, codes):
            return False
        # one-shot adds x before it rounds; and a row's squares are added in the order of `add_rms_norm` if both load 16 bytes at once
        if determinism.enabled() and (self.kind == "one-shot" or x.shape[-1] % 16):
            return False
        ranks, rows = self.workspace.exchange.world_size, x.numel() // x.shape[-1]
        if self.kind == "one-shot":
            most = MAX_PROGRAMS // 2 if codes else MAX_PROGRAMS  # programs of a row exchange two words for codes
            return partial.nbytes <= self.workspace.exchange.capacity and all_reduce.norm_programs(x) <= most
        # a rank reduces whole rows, so there must be at least one for each rank
        needed = -(-rows // ranks) * ranks * x.shape[-1] * x.element_size()
        return rows >= ranks and needed <= self.workspace.exchange.capacity


class _BlockingAllReduce(PendingAllReduce):
    """Launched when it is read."""

    def __init__(self, kernel: AllReduceKernel, partial: Tensor) -> None:
        self.kernel, self.partial = kernel, partial

    def wait(self) -> Tensor:
        return self.kernel.all_reduce(self.partial)

    def add_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.kernel.add_norm(self.partial, x, weight, eps)

    def add_norm_codes(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, RowCodes]:
        return self.kernel.add_norm(self.partial, x, weight, eps, codes=True)


class _PushedAllReduce(PendingAllReduce):
    """The linear layer's kernel sends its own partial sums (`kernels/linear_push.py`). Both kernels are launched when it is
    read."""

    def __init__(self, kernel: AllReduceKernel, x: Tensor, weight: Tensor | Packed) -> None:
        self.kernel, self.x, self.weight = kernel, x, weight

    def wait(self) -> Tensor:
        self._push()
        shape = (*self.x.shape[:-1], linear_push.shape_of(self.weight)[0])
        return linear_push.receive(shape, self.x.dtype, self.kernel.workspace.exchange, pdl=self.kernel.pdl)

    def add_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self._push()
        return linear_push.receive_add_norm(x, weight, eps, self.kernel.workspace.exchange, pdl=self.kernel.pdl)

    def _push(self) -> None:
        linear_push.linear_push(self.x, self.weight, self.kernel.workspace.exchange)


# --- copy engines ----------------------------------------------------------------------------------------------------------


class CopyEngines:
    """Long all-reduces between GPUs with peer access by copy engines, so that a concurrent GEMM keeps the SMs.

    Each rank owns a slice of the message. It copies every other rank's slice of its partial sum to that rank's buffer, waits for its own
    slice of theirs, and adds them in rank order in fp32, with few programs. Then the ranks copy the sums from each other's buffers. A flag
    is the number of the all-reduce, the epoch, which is in device memory, so that a CUDA graph may replay an all-reduce any number
    of times. It is copied after the data on the same stream, and so arrives after it.

    No double buffering is needed:

    - *Partial sums.* A rank sends those of epoch e + 1 when it has completed all-reduce e, for which it waited for the flags of all
      sums of e. Their owners set them after they had read all partial sums of e.
    - *Sums.* A rank overwrites those of epoch e when it has received all partial sums of e + 1. Each was sent after its sender had
      copied all sums of e.

    All-reduces run on one stream at a time. All ranks make the same calls in the same order.
    """

    def __init__(self, device: torch.device, capacity: int = COPIED) -> None:
        """Collective. capacity: bytes of the longest piece, a multiple of ALIGNMENT for each rank. Raises UserError as
        `open_shared`."""
        self.rank, self.world_size, self.capacity = dist.get_rank(), dist.get_world_size(), capacity
        self.slice_bytes = -(-capacity // (self.world_size * ALIGNMENT)) * ALIGNMENT
        # a rank's buffer: flags, the partial sums of its slice by rank, and their sum
        self.data = -(-2 * self.world_size * FLAG_BYTES // ALIGNMENT) * ALIGNMENT
        self.shared = open_shared(self.data + (self.world_size + 1) * self.slice_bytes, device)
        self.epoch, self.fault = torch.zeros(1, dtype=torch.int64, device=device), fault_word(device)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over all ranks, on the current stream. partial: contiguous."""
        flat = partial.view(-1)
        total = torch.empty_like(flat)
        most = self.world_size * (self.slice_bytes // flat.itemsize)
        for piece, out in zip(flat.split(most), total.split(most), strict=True):
            self._add(piece, out)
        return total.view(partial.shape)

    def _add(self, piece: Tensor, out: Tensor) -> None:
        step = -(-len(piece) * piece.itemsize // (self.world_size * ALIGNMENT)) * ALIGNMENT // piece.itemsize
        slices = [slice(rank * step, (rank + 1) * step) for rank in range(self.world_size)]
        others = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        own = piece[slices[self.rank]]
        self.epoch.add_(1)
        for owner in others:
            part = piece[slices[owner]]
            self._slot(owner, self.rank, part).copy_(part, non_blocking=True)
            self._flag(owner, PARTIAL).copy_(self.epoch, non_blocking=True)
        self._wait(PARTIAL, others)
        received = self.shared.view(self.rank, self.data, (self.world_size, self.slice_bytes // piece.itemsize), piece.dtype)
        add_parts(own, received, self.rank, self._slot(self.rank, self.world_size, own), out[slices[self.rank]])
        for other in others:
            self._flag(other, SUM).copy_(self.epoch, non_blocking=True)
        self._wait(SUM, others)
        for owner in others:
            part = out[slices[owner]]
            part.copy_(self._slot(owner, self.world_size, part), non_blocking=True)

    def _slot(self, owner: int, number: int, like: Tensor) -> Tensor:
        """Where `owner` has the partial sums of rank `number`, or their sum if that is the number of ranks."""
        return self.shared.view(owner, self.data + number * self.slice_bytes, like.shape, like.dtype)

    def _flag_offset(self, kind: int, source: int) -> int:
        return (kind * self.world_size + source) * FLAG_BYTES

    def _flag(self, at: int, kind: int) -> Tensor:
        """This rank's flag in the buffer of rank `at`."""
        return self.shared.view(at, self._flag_offset(kind, self.rank), (1,), torch.int64)

    def _wait(self, kind: int, others: list[int]) -> None:
        own = self.shared.addresses[self.rank]
        if others:
            wait_flags(tuple(own + self._flag_offset(kind, other) for other in others), self.epoch, self.fault)


# --- communicators ---------------------------------------------------------------------------------------------------------


class KernelCommunicator(ProcessGroupCommunicator):
    """All-reduces by kernels over symmetric memory. Messages that do not fit a workspace use NCCL, which is also faster for
    them, or gloo on CPU; with --deterministic `TreeCommunicator`, which has the same bits on 2 ranks.

    All launches may be captured in CUDA graphs. The graphs may be replayed any number of times between other launches.
    """

    def __init__(
        self,
        name: str,
        blocking: AllReduceKernel,
        overlapped: AllReduceKernel,
        device: torch.device,
        memory: Memory,
    ) -> None:
        """Collective. Raises UserError as `open_workspace`."""
        super().__init__()
        self.name, self.blocking, self.overlapped, self.memory = name, blocking, overlapped, memory
        exact = TreeCommunicator if determinism.enabled() else NcclCommunicator if device.type == "cuda" else GlooCommunicator
        self.fallback: ProcessGroupCommunicator = exact()
        self.gathers = open_workspace(all_reduce.one_shot_bytes, GATHER_CAPACITY, device, memory)
        self.few_sms: AllReduceKernel | None = None  # for overlapped all-reduces on few SMs; None: as `overlapped`
        self.copy_engines: CopyEngines | None = None  # for long overlapped all-reduces; None: as `overlapped`
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        if self.stream is None:
            self.waited = 0.0

    def kernel(self, overlap: bool) -> AllReduceKernel:
        """The kernel of all-reduces that fit it."""
        if not overlap:
            return self.blocking
        return self.few_sms if self.few_sms and self.schedule == "few-sms" else self.overlapped

    def fits(self, partial: Tensor, overlap: bool) -> bool:
        """Whether a kernel is used for this message."""
        return self.kernel(overlap).fits(partial)

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        partial = partial.contiguous()
        if not partial.numel():
            return Done(partial)
        if (engines := self.copy_engines) and self._copies(partial, overlap):
            return on_side_stream(self.stream, partial, lambda: engines.all_reduce(partial))
        if not self.fits(partial, overlap):
            return self.fallback.begin_all_reduce(partial, overlap)
        if not overlap:
            return _BlockingAllReduce(self.blocking, partial)
        return on_side_stream(self.stream, partial, lambda: self.kernel(overlap).all_reduce(partial))

    def _copies(self, partial: Tensor, overlap: bool) -> bool:
        """Whether copy engines send this message."""
        return overlap and self.schedule == "copy-engines" and partial.nbytes >= LEAST_COPIED

    def all_gather(self, shard: Tensor) -> Tensor:
        shard = shard.contiguous()
        if shard.dim() == 0 or shard.nbytes > GATHER_CAPACITY or shard.shape[-1] * shard.element_size() % 4:
            return super().all_gather(shard)
        return all_reduce.one_shot_gather(shard, self.gathers.exchange)


class SymmetricCommunicator(KernelCommunicator):
    """Exact all-reduces of ranks of one host. CPU ranks, for tests, run the kernels in Triton's interpreter."""

    def __init__(self, kind: Kind, device: torch.device, memory: Memory = "peer") -> None:
        """Collective. memory: see `open_workspace`, whose UserError this raises."""
        assert kind == "one-shot" or memory == "peer", "two-shot over host memory is RelayCommunicator"
        blocking = open_workspace(_BYTES[kind], CAPACITY[kind], device, memory)
        overlapped = open_workspace(_BYTES[kind], OVERLAP_CAPACITY[kind], device, memory)
        super().__init__(
            kind,
            AllReduceKernel(kind, blocking, TILING[kind], pdl=True),
            # no programmatic launch: the kernel that it should overlap with is on another stream
            AllReduceKernel(kind, overlapped, OVERLAP_TILING[kind], pdl=False),
            device,
            memory,
        )
        self.kind, self.device = kind, device

    def use(self, schedule: Schedule) -> None:
        """The buffers for few SMs and for copy engines are opened at the first use, because only a ladder needs them."""
        super().use(schedule)
        if schedule == "few-sms" and self.few_sms is None:
            capacity = FEW_SMS_CAPACITY[self.kind]
            workspace = open_workspace(_BYTES[self.kind], capacity, self.device, self.memory)
            self.few_sms = AllReduceKernel(self.kind, workspace, FEW_SMS_TILING[self.kind], pdl=False)
        if schedule == "copy-engines" and self.kind == "two-shot" and self.copy_engines is None:
            self.copy_engines = CopyEngines(self.device)

    def begin_linear_all_reduce(self, x: Input, layer: Linear, overlap: bool = False) -> PendingAllReduce:
        weight = layer.multiplied
        if overlap or weight is None or layer.bias is not None or isinstance(x, RowCodes) or not self._pushes(x, weight):
            return super().begin_linear_all_reduce(x, layer, overlap)
        return _PushedAllReduce(self.blocking, x, weight)

    def _pushes(self, x: Tensor, weight: Tensor | Packed) -> bool:
        """Whether the layer's kernel sends its own partial sums: with one-shot, and PUSHED_ROWS rows. It knows no parts."""
        min_rows, max_rows = PUSHED_ROWS
        if determinism.enabled() or self.name != "one-shot" or not min_rows <= math.prod(x.shape[:-1]) <= max_rows:
            return False
        return on_gpu(x) and not torch.compiler.is_compiling() and linear_push.fits(x, weight, self.blocking.workspace.exchange)


# --- quantized -------------------------------------------------------------------------------------------------------------


def wire_format_of(scheme: Scheme) -> WireFormat | None:
    """The scheme in the kernels' form; None if they do not support it (Hadamard transforms, one group per token)."""
    if scheme.hadamard or scheme.group is None:
        return None
    reduce, gather = scheme.reduce, scheme.gather
    return WireFormat(scheme.group, reduce.bits, gather.bits, reduce.symmetric, reduce.floating)


@dataclass(frozen=True)
class QuantizedKernel(AllReduceKernel):
    """A quantized all-reduce kernel. norm: launch parameters with the residual addition and the norm."""

    tiling: RoundTiling
    wire: WireFormat
    norm: RoundTiling

    def fits(self, partial: Tensor) -> bool:
        """Always: a long message takes several launches."""
        return True

    def all_reduce(self, partial: Tensor) -> Tensor:
        return quantized_sum(partial, self.wire, self.workspace.exchange, self.tiling, self.pdl)

    def add_norm(self, partial: Tensor, x: Tensor, weight: Tensor, eps: float, codes: bool = False) -> tuple[Tensor, Any]:
        exchange = self.workspace.exchange
        if codes or partial.nbytes > QUANTIZED_NORM_CAPACITY or not fits_norm(partial, x, weight, self.wire, exchange):
            return self.then_norm(partial, x, weight, eps, codes)
        tiling = replace(self.norm, warps=self.norm.warps // 2) if x.shape[-1] <= SHORT_ROW else self.norm
        return quantized_add_norm(partial, x, weight, eps, self.wire, exchange, tiling, self.pdl)


class QuantizedSymmetricCommunicator(KernelCommunicator):
    """Quantized all-reduces in one launch, with bitwise the result of `comms/quantized.py`. Only all-reduces are quantized.

    Ranks of one host whose GPUs have peer access. CPU ranks, for tests, run the kernels in Triton's interpreter."""

    def __init__(self, scheme: Scheme, device: torch.device) -> None:
        """Collective. Raises UserError on every rank if the GPUs have no peer access, or if no
        kernel supports the scheme."""
        wire = wire_format_of(scheme)
        if wire is None:
            raise UserError(f"--comm {scheme.name}: the kernel supports no Hadamard transform and no group per token")
        tiling, overlap_tiling, norm = launch_tilings(_fewest_sms(device))
        blocking = open_workspace(wire.buffer_bytes, QUANTIZED_CAPACITY, device)
        overlapped = open_workspace(wire.buffer_bytes, QUANTIZED_OVERLAP_CAPACITY, device)
        self.scheme = scheme
        super().__init__(
            scheme.name,
            QuantizedKernel("two-shot", blocking, tiling, True, wire, norm),
            # no programmatic launch: the kernel that it should overlap with is on another stream
            QuantizedKernel("two-shot", overlapped, overlap_tiling, False, wire, norm),
            device,
            "peer",
        )


def launch_tilings(sms: int) -> tuple[RoundTiling, RoundTiling, RoundTiling]:
    """Launch parameters of blocking all-reduces, overlapped ones, and blocking ones with a norm, for a GPU with `sms` SMs.

    A blocking and an overlapped all-reduce each wait for the same all-reduce on other GPUs, which may have begun the two in
    the other order. So both must fit on a GPU at once, however the first one is distributed over the SMs. An SM holds 4
    programs of an all-reduce without a norm, or 1 with a norm."""
    overlapped = max(1, min(OVERLAPPED.programs, 3 * sms // 8))
    return (
        replace(BLOCKING, programs=min(3 * sms, MAX_PROGRAMS - 1)),
        replace(OVERLAPPED, programs=overlapped),
        replace(BLOCKING_NORM, programs=max(1, sms - overlapped)),
    )


def _fewest_sms(device: torch.device) -> int:
    """SMs of the smallest GPU, because all ranks must cut messages in the same way."""
    mine = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return min(gather_objects(mine))
