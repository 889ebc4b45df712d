"""Builds the communicators of GPUs. Which form one takes depends on whether the GPUs have peer access. Needs Triton.

All functions are collective over `group` (None: all ranks).
"""

import sys

import torch
import torch.distributed as dist

from comm.auto import CODE, AutoCommunicator, measured, size_table
from comm.fused import FusedCommunicator
from comm.interface import Communicator
from comm.process_group import NcclCommunicator
from comm.quantize import WIDTHS, Scheme, parse_scheme, relative_error
from comm.quantized import QuantizedGlooCommunicator, QuantizedNcclCommunicator
from comm.quantized_symmetric import QuantizedSymmetricCommunicator, wire_of
from comm.relay import RelayCommunicator
from comm.symmetric import Kind, SymmetricCommunicator
from comm.table import from_first, machine
from comm.workspace import Memory, check_reachable, memory_between
from errors import UserError


def exact(
    kind: Kind, device: torch.device, group: dist.ProcessGroup | None = None, memory: Memory | None = None
) -> Communicator:
    """One-shot or two-shot, over peer access or host memory. memory: None finds out. Raises UserError as `open_workspace`
    does."""
    memory = memory or memory_between(device, group)
    if kind == "two-shot" and memory == "host":
        return RelayCommunicator(None, device, group)
    return SymmetricCommunicator(kind, device, group, memory)


def quantized(
    scheme: Scheme,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    short: SymmetricCommunicator | None = None,
) -> Communicator:
    """The fastest form for the scheme: one kernel, between GPUs with peer access and if a kernel supports the scheme; the
    relay, between others of one host; else the process group. short: one-shot all-reduces for the relay's short messages;
    None builds them."""
    if device.type != "cuda":
        return QuantizedGlooCommunicator(scheme, group)
    try:
        if memory_between(device, group) == "host":
            short = short or SymmetricCommunicator("one-shot", device, group, "host")
            return RelayCommunicator(scheme, device, group, short=short)
        if wire_of(scheme) is not None:
            return QuantizedSymmetricCommunicator(scheme, device, group)
    except UserError as error:  # on every rank
        _print(f"{scheme.name} goes over NCCL: {error}", group)
    return QuantizedNcclCommunicator(scheme, group)


def auto(
    device: torch.device, error_budget: float = 0.0, group: dist.ProcessGroup | None = None, rebuild: bool = False
) -> Communicator:
    """NCCL between hosts, else the fastest algorithm by message size. Between GPUs with peer access, all-reduces of many
    rows are fused with GEMMs where that is faster still.

    error_budget: the relative error (see `relative_error`) up to which all-reduces may be quantized. rebuild: measure even
    if there is a table."""
    try:
        chosen = by_size(device, error_budget, group, rebuild)
    except UserError as error:
        budget = " and quantizes nothing" if error_budget else ""
        _print(f"auto uses nccl{budget}: {error}", group)
        return NcclCommunicator(group)
    if memory_between(device, group) == "host":
        return chosen
    try:
        both = FusedCommunicator(chosen, device, group, rebuild=rebuild)
    except UserError as error:
        _print(f"auto fuses no all-reduces with GEMMs: {error}", group)
        return chosen
    both.name = chosen.name
    return both


def fused(device: torch.device, group: dist.ProcessGroup | None = None) -> Communicator:
    """All-reduces of many rows fused with the GEMMs around them, even where that is slower; the others as `auto`. Raises
    UserError on every rank if the GPUs have no peer access."""
    check_reachable(device, group)
    return FusedCommunicator(by_size(device, 0.0, group), device, group, compare=False)


def by_size(
    device: torch.device, error_budget: float, group: dist.ProcessGroup | None = None, rebuild: bool = False
) -> AutoCommunicator:
    """All algorithms within the error budget, and the table that chooses. Raises UserError as `open_workspace` does."""
    memory = memory_between(device, group)
    one_shot = SymmetricCommunicator("one-shot", device, group, memory)
    algorithms: dict[str, Communicator] = {"nccl": NcclCommunicator(group), "one-shot": one_shot}
    try:
        algorithms["two-shot"] = exact("two-shot", device, group, memory)
    except UserError as error:  # /dev/shm may be large enough for short messages only
        _print(f"auto goes without two-shot: {error}", group)
    short = one_shot if memory == "host" else None
    for scheme in schemes_within(error_budget, group):
        algorithms[scheme.name] = quantized(scheme, device, group, short)
    forms = " ".join(f"{name}={type(communicator).__name__}" for name, communicator in algorithms.items())
    key = machine(device, dist.get_world_size(group), torch.bfloat16, CODE) | {"algorithms": forms, "memory": memory}
    table = size_table(key, algorithms, lambda: measured(algorithms, device, torch.bfloat16, group), group, rebuild)
    return AutoCommunicator(algorithms, table)


def schemes_within(error_budget: float, group: dist.ProcessGroup | None = None) -> list[Scheme]:
    """The widths with at most this relative error for this number of ranks, as rank 0 computes it."""
    if not error_budget:
        return []
    ranks, first = dist.get_world_size(group), dist.get_rank(group) == 0
    names = [name for name in WIDTHS if first and relative_error(parse_scheme(name), ranks) <= error_budget]
    return [parse_scheme(name) for name in from_first(names, group)]


def _print(text: str, group: dist.ProcessGroup | None) -> None:
    if dist.get_rank(group) == 0:
        print(text, file=sys.stderr, flush=True)
