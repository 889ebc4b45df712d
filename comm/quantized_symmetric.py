"""Quantized sums over memory that all ranks address (`comm/workspace.py`), by the kernels of `kernels/quantized_all_reduce.py`.

Bit for bit what `comm/quantized.py` computes over a process group, in one launch.
"""

import sys
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from comm.interface import Communicator
from comm.quantize import Scheme
from comm.quantized import QuantizedGlooCommunicator, QuantizedNcclCommunicator
from comm.relay import RelayCommunicator
from comm.symmetric import Kind, Lane, SymmetricCommunicator
from comm.workspace import memory_between, open_workspace
from errors import UserError
from kernels.all_reduce import MAX_PROGRAMS
from kernels.norm import add_rms_norm
from kernels.quantized_all_reduce import BESIDE, NORM, SUM, Rounds, Wire, fits_norm, quantized_add_norm, quantized_sum

KIND: Kind = "two-shot"
CAPACITY = 32 << 20  # values of a launch: 64 MiB of bf16; longer messages take several
BESIDE_CAPACITY = 8 << 20
NORM_CAPACITY = 4 << 20  # bytes up to which the norm joins the sum's launch; more rows it reads faster in one of its own
SHORT_ROW = 4096  # values up to which a row needs half the warps


def wire_of(scheme: Scheme) -> Wire | None:
    """The scheme as the kernels know it; None if they do not serve it: rotations, and a group a token."""
    if scheme.hadamard or scheme.group is None:
        return None
    reduce, gather = scheme.reduce, scheme.gather
    return Wire(scheme.group, reduce.bits, gather.bits, reduce.symmetric, reduce.floating)


@dataclass(frozen=True)
class QuantizedLane(Lane):
    """Quantized sums that follow each other on one stream."""

    tiling: Rounds
    wire: Wire
    norm: Rounds

    def fits(self, partial: Tensor) -> bool:
        """Always: a long message takes several launches."""
        return True

    def sum(self, partial: Tensor) -> Tensor:
        return quantized_sum(partial, self.wire, self.workspace.exchange, self.tiling, self.pdl)

    def add_norm(self, partial: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        exchange = self.workspace.exchange
        if partial.nbytes > NORM_CAPACITY or not fits_norm(partial, x, weight, self.wire, exchange):
            return add_rms_norm(x, self.sum(partial), weight, eps)
        tiling = replace(self.norm, warps=self.norm.warps // 2) if x.shape[-1] <= SHORT_ROW else self.norm
        return quantized_add_norm(partial, x, weight, eps, self.wire, exchange, tiling, self.pdl)


class QuantizedSymmetricCommunicator(SymmetricCommunicator):
    """Ranks of one host whose GPUs reach each other; CPU ranks in Triton's interpreter, for tests. Only sums are quantized.

    All its launches may be captured in CUDA graphs, and replayed any number of times beside others that are not.
    """

    def __init__(self, scheme: Scheme, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """Collective. Raises UserError on every rank if the GPUs of `group` (None: all ranks) cannot reach each other, or if no
        kernel serves the scheme."""
        wire = wire_of(scheme)
        if wire is None:
            raise UserError(f"--comm {scheme.name}: no kernel over symmetric memory rotates, or takes a group a token")
        sum, beside, norm = shares_of_gpu(_fewest_processors(device, group))
        here, there = (open_workspace(wire.buffer_bytes, size, device, group) for size in (CAPACITY, BESIDE_CAPACITY))
        self.scheme = scheme
        # not programmatic beside: what it would overlap with lies on another stream
        lanes = QuantizedLane(KIND, here, sum, True, wire, norm), QuantizedLane(KIND, there, beside, False, wire, norm)
        self._set_up(scheme.name, lanes, device, group, "peer")


def shares_of_gpu(processors: int) -> tuple[Rounds, Rounds, Rounds]:
    """How sums, sums beside computation, and sums with a norm are cut on a GPU of so many SMs.

    A sum here and one beside wait for their twins on other GPUs, which may have begun in the other order: both must fit a GPU at
    once, however the first one is spread over its SMs. An SM takes 4 programs of a sum, here or beside, or 1 with a norm."""
    beside = max(1, min(BESIDE.programs, 3 * processors // 8))
    return (
        replace(SUM, programs=min(3 * processors, MAX_PROGRAMS - 1)),
        replace(BESIDE, programs=beside),
        replace(NORM, programs=max(1, processors - beside)),
    )


def _fewest_processors(device: torch.device, group: dist.ProcessGroup | None) -> int:
    """SMs of the group's smallest GPU: all ranks must cut messages alike."""
    mine = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    everyones = [0] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    return min(everyones)


def quantized_symmetric(
    scheme: Scheme,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    short: SymmetricCommunicator | None = None,
) -> Communicator:
    """The fastest communicator for the scheme, for the ranks of `group` (None: all): over symmetric memory where the GPUs reach each
    other and a kernel serves the scheme; through host memory where they do not, short messages as they are, by `short` (None: one is
    made); else over the process group. Collective."""
    if device.type != "cuda":
        return QuantizedGlooCommunicator(scheme, group)
    try:
        if memory_between(device, group) == "host":
            short = short or SymmetricCommunicator("one-shot", device, group, "host")
            return RelayCommunicator(scheme, device, group, short=short)
        if wire_of(scheme) is not None:
            return QuantizedSymmetricCommunicator(scheme, device, group)
    except UserError as error:  # on every rank
        if dist.get_rank(group) == 0:
            print(f"{scheme.name} goes over NCCL: {error}", file=sys.stderr, flush=True)
    return QuantizedNcclCommunicator(scheme, group)
