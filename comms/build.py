"""Builds the communicators of GPUs. Requires Triton. The implementation depends on whether the GPUs have peer access, so that a kernel
of one addresses the memory of the others (`memory` is "peer"), or exchange data through host memory ("host").

All functions are collective.
"""

import sys

import torch
import torch.distributed as dist

from comms.auto import CODE, AutoCommunicator, measure_times, size_table
from comms.fused import FusedCommunicator
from comms.hierarchical import HierarchicalCommunicator, fastest_between_hosts
from comms.interface import Communicator
from comms.process_group import NcclCommunicator, TreeCommunicator
from comms.quantize import WIDTHS, Scheme, parse_scheme, relative_error
from comms.quantized import QuantizedNcclCommunicator
from comms.relay import RelayCommunicator
from comms.symmetric import KINDS, Kind, QuantizedSymmetricCommunicator, SymmetricCommunicator, wire_format_of
from comms.table import from_rank_0, machine_key
from comms.workspace import Memory, check_reachable, memory_between, on_several_hosts
from errors import UserError
from kernels import determinism


def on_gpus(name: str, device: torch.device, error_budget: float) -> Communicator:
    """The communicator with this name of `comms/registry.py`. error_budget: see `auto`. Raises UserError if these GPUs do not support it."""
    if determinism.enabled():
        return tree(name, device)
    if name in KINDS:
        return exact(name, device)
    if name == "nccl":
        return NcclCommunicator()
    if name == "hierarchical":
        return HierarchicalCommunicator(device)
    if name == "fused":
        return fused(device)
    return auto(device, error_budget) if name == "auto" else quantized(parse_scheme(name), device)


def exact(kind: Kind, device: torch.device, memory: Memory | None = None) -> Communicator:
    """One-shot or two-shot all-reduces (docs/communication.md). memory: None for what these ranks have. Raises UserError as
    `open_workspace`."""
    memory = memory or memory_between(device)
    if kind == "two-shot" and memory == "host":
        return RelayCommunicator(None, device)
    return SymmetricCommunicator(kind, device, memory)


def quantized(
    scheme: Scheme,
    device: torch.device,
    one_shot: SymmetricCommunicator | None = None,
) -> Communicator:
    """The fastest implementation for the scheme: one kernel, if the GPUs have peer access and the kernel supports the scheme;
    the relay, between other GPUs of one host; else a process group. one_shot: for the relay's short messages; None builds
    it."""
    try:
        if memory_between(device) == "host":
            one_shot = one_shot or SymmetricCommunicator("one-shot", device, "host")
            return RelayCommunicator(scheme, device, one_shot=one_shot)
        if wire_format_of(scheme) is not None:
            return QuantizedSymmetricCommunicator(scheme, device)
    except UserError as error:  # on every rank
        _print(f"{scheme.name} uses NCCL: {error}")
    return QuantizedNcclCommunicator(scheme)


def auto(device: torch.device, error_budget: float = 0.0, rebuild: bool = False) -> Communicator:
    """Between hosts NCCL's all-reduces or hierarchical ones, whichever were faster for the size; else the fastest algorithm by
    message size. Between GPUs with peer access, all-reduces of many rows are fused with GEMMs where that is faster.

    error_budget: the relative error (see `relative_error`) up to which all-reduces may be quantized. rebuild: measure even
    if there is a table."""
    if on_several_hosts():
        if error_budget:
            _print("auto quantizes nothing between hosts")
        return fastest_between_hosts(NcclCommunicator(), device)
    try:
        chosen = by_size(device, error_budget, rebuild)
    except UserError as error:
        budget = " and quantizes nothing" if error_budget else ""
        _print(f"auto uses nccl{budget}: {error}")
        return NcclCommunicator()
    if memory_between(device) == "host":
        return chosen
    try:
        with_fused = FusedCommunicator(chosen, device, rebuild=rebuild)
    except UserError as error:
        _print(f"auto fuses no all-reduces with GEMMs: {error}")
        return chosen
    with_fused.name = chosen.name
    return with_fused


def fused(device: torch.device) -> Communicator:
    """All-reduces of many rows fused with the GEMMs around them, even where that is slower; the others as `auto`. Raises
    UserError on every rank if the GPUs have no peer access."""
    check_reachable(device)
    return FusedCommunicator(by_size(device, 0.0), device, compare=False)


def by_size(device: torch.device, error_budget: float, rebuild: bool = False) -> AutoCommunicator:
    """All algorithms within the error budget, and the table that chooses. Raises UserError as `open_workspace`."""
    memory = memory_between(device)
    one_shot = SymmetricCommunicator("one-shot", device, memory)
    process_group = TreeCommunicator() if determinism.enabled() else NcclCommunicator()
    algorithms: dict[str, Communicator] = {"nccl": process_group, "one-shot": one_shot}
    try:
        algorithms["two-shot"] = exact("two-shot", device, memory)
    except UserError as error:  # /dev/shm may be large enough for short messages only
        _print(f"auto does not use two-shot: {error}")
    short = one_shot if memory == "host" else None
    for scheme in schemes_within(error_budget):
        algorithms[scheme.name] = quantized(scheme, device, short)
    forms = " ".join(f"{name}={type(communicator).__name__}" for name, communicator in algorithms.items())
    key = machine_key(device, dist.get_world_size(), torch.bfloat16, CODE) | {"algorithms": forms, "memory": memory}
    table = size_table(key, algorithms, lambda: measure_times(algorithms, device, torch.bfloat16), rebuild)
    return AutoCommunicator(algorithms, table)


def tree(name: str, device: torch.device) -> Communicator:
    """What `--deterministic` uses for the communicator with this name. A sum of 2 ranks, added in fp32 and rounded once, is their
    tree, so 2 GPUs with peer access use the kernels over symmetric memory, but for those that also do something else in another order;
    if none can be opened, the process group."""
    over_nccl = name in ("nccl", "hierarchical") or dist.get_world_size() != 2 or memory_between(device) != "peer"
    if over_nccl:
        return TreeCommunicator()
    if name in KINDS:
        return exact(name, device, "peer")
    try:
        return by_size(device, 0.0)
    except UserError as error:
        _print(f"{name} uses {TreeCommunicator.name}: {error}")
        return TreeCommunicator()


def schemes_within(error_budget: float) -> list[Scheme]:
    """The default schemes whose relative error for this number of ranks is at most `error_budget`, computed on rank 0."""
    if not error_budget:
        return []
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    names = [name for name in WIDTHS if first and relative_error(parse_scheme(name), ranks) <= error_budget]
    return [parse_scheme(name) for name in from_rank_0(names)]


def _print(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)
