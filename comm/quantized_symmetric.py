"""Quantized all-reduces over symmetric memory (`comm/workspace.py`) with the kernels of `kernels/quantized_all_reduce.py`: one
launch, with bitwise the result of `comm/quantized.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from comm.process_group import gather_objects
from comm.quantize import Scheme
from comm.symmetric import AllReduceKernel, KernelCommunicator, Kind
from comm.workspace import open_workspace
from errors import UserError
from kernels.device import MAX_PROGRAMS
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

KIND: Kind = "two-shot"
CAPACITY = 32 << 20  # values of a launch: 64 MiB of bf16; longer messages take several launches
OVERLAP_CAPACITY = 8 << 20
NORM_CAPACITY = (
    4 << 20
)  # bytes up to which the norm is computed in the all-reduce's launch; with more, a separate launch is faster
SHORT_ROW = 4096  # values of a row, at most, for which half of the warps are enough


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
        if codes or partial.nbytes > NORM_CAPACITY or not fits_norm(partial, x, weight, self.wire, exchange):
            return self.then_norm(partial, x, weight, eps, codes)
        tiling = replace(self.norm, warps=self.norm.warps // 2) if x.shape[-1] <= SHORT_ROW else self.norm
        return quantized_add_norm(partial, x, weight, eps, self.wire, exchange, tiling, self.pdl)


class QuantizedSymmetricCommunicator(KernelCommunicator):
    """Ranks of one host whose GPUs have peer access. CPU ranks, for tests, run the kernels in Triton's interpreter. Only
    all-reduces are quantized."""

    def __init__(self, scheme: Scheme, device: torch.device) -> None:
        """Collective. Raises UserError on every rank if the GPUs have no peer access, or if no
        kernel supports the scheme."""
        wire = wire_format_of(scheme)
        if wire is None:
            raise UserError(f"--comm {scheme.name}: the kernel supports no Hadamard transform and no group per token")
        tiling, overlap_tiling, norm = launch_tilings(_fewest_sms(device))
        blocking = open_workspace(wire.buffer_bytes, CAPACITY, device)
        overlapped = open_workspace(wire.buffer_bytes, OVERLAP_CAPACITY, device)
        self.scheme = scheme
        super().__init__(
            scheme.name,
            QuantizedKernel(KIND, blocking, tiling, True, wire, norm),
            # no programmatic launch: the kernel that it should overlap with is on another stream
            QuantizedKernel(KIND, overlapped, overlap_tiling, False, wire, norm),
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
