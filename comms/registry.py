"""The communicators by name: where each runs, how it is built, and what `--help` says about it.

A name is checked before the process group exists, and the communicator is built afterwards: that of GPUs by `comms/build.py`, which
requires Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby

import torch

from comms.hierarchical import HierarchicalCommunicator, fastest_between_hosts
from comms.interface import Communicator
from comms.private_gloo import PRIVATE_GLOO
from comms.process_group import GlooCommunicator, TreeCommunicator
from comms.quantize import WIDTHS, parse_scheme
from comms.quantized import QuantizedGlooCommunicator
from comms.simulated import Link, SimulatedLink, parse_link
from errors import UserError
from kernels import determinism


@dataclass(frozen=True)
class Choice:
    """A communicator, checked to run on its device, that is not built yet."""

    name: str
    device: str
    link: Link | None = None  # to simulate; None: no simulation
    error_budget: float = 0.0  # relative error up to which `auto` may quantize an all-reduce

    @property
    def backend(self) -> str:
        """The backend of torch.distributed."""
        return "nccl" if self.device == "cuda" else PRIVATE_GLOO

    @property
    def is_exact(self) -> bool:
        """Whether all-reduces are not quantized: their only error is rounding."""
        return not is_quantized(self.name)

    def build(self) -> Communicator:
        """The communicator over the default process group. Collective. Raises UserError if these GPUs do not support it."""
        if self.device == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            found: Communicator = import_module("comms.build").on_gpus(self.name, device, self.error_budget)
            return found
        communicator = _on_cpu(self.name)
        return SimulatedLink(communicator, self.link) if self.link else communicator


def _on_cpu(name: str) -> Communicator:
    if determinism.enabled():
        return TreeCommunicator()
    if is_quantized(name):
        return QuantizedGlooCommunicator(parse_scheme(name))
    device = torch.device("cpu")
    if name == "hierarchical":
        return HierarchicalCommunicator(device)
    return fastest_between_hosts(GlooCommunicator(), device) if name == "auto" else GlooCommunicator()


def choose(device: str, name: str | None = None, link: str | None = None, error_budget: float = 0.0) -> Choice:
    """The communicator with this name, checked. device: `cpu` or `cuda`. name: a key of COMMUNICATORS, with options if it is
    quantized; None for the device's default. link: as in `--simulate-link`, on CPU only. error_budget: for `auto` on GPUs only.
    With --deterministic, every exact one adds as a tree.

    Raises UserError for a name that is unknown or does not run on the device, for a wrong group, link or budget, and for quantized
    all-reduces with --deterministic.
    """
    name = DEFAULT[device] if name is None else name
    base = name.partition(":")[0]
    if base not in COMMUNICATORS or (name != base and base not in WIDTHS):
        raise UserError(f"unknown communicator {name!r}; known: {KNOWN}")
    if is_quantized(name):
        parse_scheme(name)
    if device not in COMMUNICATORS[base].devices:
        raise UserError(f"--comm {name} does not run on --device {device}; use {DEFAULT[device]}")
    if link is not None and device != "cpu":
        raise UserError("--simulate-link slows down gloo ranks only; use it with --device cpu")
    if not 0 <= error_budget < 1:
        raise UserError(
            f"--comm-error-budget is {error_budget}; give the relative error of an all-reduce (0.01), or 0 for exact ones"
        )
    if error_budget and (name != "auto" or device != "cuda"):
        raise UserError("--comm-error-budget applies to --comm auto on GPUs only; leave it out")
    if determinism.enabled() and (is_quantized(name) or error_budget):
        flag = f"--comm {name}" if is_quantized(name) else "--comm-error-budget"
        raise UserError(
            f"{flag} quantizes all-reduces, whose rounding depends on the number of ranks; leave it or --deterministic out"
        )
    return Choice(name, device, None if link is None else parse_link(link), error_budget)


# --- the registry ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A communicator's help text, and the kinds of devices that it runs on. Options may follow the name of a quantized one
    (`comms.quantize.parse_scheme`)."""

    help: str
    devices: Sequence[str]


BOTH = "cpu", "cuda"
COMMUNICATORS: dict[str, Entry] = {
    "gloo": Entry("CPU", ["cpu"]),
    "nccl": Entry("CUDA, any topology", ["cuda"]),
    **dict.fromkeys(("one-shot", "two-shot"), Entry("CUDA, one host", ["cuda"])),
    "fused": Entry("with GEMMs; CUDA, one host", ["cuda"]),
    "hierarchical": Entry("several hosts, on both", BOTH),
    "auto": Entry("the fastest of these", BOTH),
    **dict.fromkeys(WIDTHS, Entry("quantized, on both; a group may follow, as in int8:64", BOTH)),
}
DEFAULT = {"cpu": "gloo", "cuda": "auto"}
KNOWN = ", ".join(
    f"{', '.join(names)} ({text})" for text, names in groupby(COMMUNICATORS, lambda name: COMMUNICATORS[name].help)
)


def is_quantized(name: str) -> bool:
    return name.partition(":")[0] in WIDTHS
