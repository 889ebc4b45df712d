"""The communicators by name: where each runs, how it is built, and what `--help` says about it.

A name is checked before the process group exists, and the communicator is built afterwards. torch and `comm/` are imported only
when they are needed, so that `--help` is fast, and Triton only on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from errors import UserError
from kernels import determinism

if TYPE_CHECKING:
    import torch

    from comm import Communicator, Link


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
        from comm.private_gloo import PRIVATE_GLOO

        return "nccl" if self.device == "cuda" else PRIVATE_GLOO

    @property
    def is_exact(self) -> bool:
        """Whether all-reduces are not quantized: their only error is rounding."""
        return not _entry(self.name).quantized

    def build(self) -> Communicator:
        """The communicator over the default process group. Collective. Raises UserError if these GPUs do not support it."""
        import torch

        from comm import SimulatedLink

        device = torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")
        builders = TREE if determinism.enabled() else _entry(self.name).builders
        communicator = builders[self.device](self, device)
        return SimulatedLink(communicator, self.link) if self.link else communicator


def choose(device: str, name: str | None = None, link: str | None = None, error_budget: float = 0.0) -> Choice:
    """The communicator with this name, checked. device: `cpu` or `cuda`. name: a key of COMMUNICATORS, with options if it is
    quantized; None for the device's default. link: as in `--simulate-link`, on CPU only. error_budget: for `auto` on GPUs only.
    With --deterministic, every exact one adds as a tree.

    Raises UserError for a name that is unknown or does not run on the device, for a wrong group, link or budget, and for quantized
    all-reduces with --deterministic.
    """
    from comm import parse_link, parse_scheme

    name = DEFAULT[device] if name is None else name
    entry = _entry(name)
    if entry.quantized:
        parse_scheme(name)
    if device not in entry.builders:
        raise UserError(f"--comm {name} does not run on --device {device}; use {DEFAULT[device]}")
    if link is not None and device != "cpu":
        raise UserError("--simulate-link slows down gloo ranks only; use it with --device cpu")
    if not 0 <= error_budget < 1:
        raise UserError(
            f"--comm-error-budget is {error_budget}; give the relative error of an all-reduce (0.01), or 0 for exact ones"
        )
    if error_budget and (name != "auto" or device != "cuda"):
        raise UserError("--comm-error-budget applies to --comm auto on GPUs only; leave it out")
    if determinism.enabled() and (entry.quantized or error_budget):
        flag = f"--comm {name}" if entry.quantized else "--comm-error-budget"
        raise UserError(
            f"{flag} quantizes all-reduces, whose rounding depends on the number of ranks; leave it or --deterministic out"
        )
    return Choice(name, device, None if link is None else parse_link(link), error_budget)


# --- the registry ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A communicator's help text, and how it is built over the default process group on each kind of device that it runs
    on. quantized: all-reduces are quantized, and options may follow the name (`comm.parse_scheme`)."""

    help: str
    builders: dict[str, Callable[[Choice, torch.device], Communicator]]
    quantized: bool = False


def _comm() -> Any:
    import comm

    return comm


def _build() -> Any:
    from comm import build

    return build


_WIDTH = Entry(
    "quantized, on both; a group may follow, as in int8:64",
    {
        "cpu": lambda choice, device: _comm().QuantizedGlooCommunicator(_comm().parse_scheme(choice.name)),
        "cuda": lambda choice, device: _build().quantized(_comm().parse_scheme(choice.name), device),
    },
    quantized=True,
)
COMMUNICATORS: dict[str, Entry] = {
    "gloo": Entry("CPU", {"cpu": lambda choice, device: _comm().GlooCommunicator()}),
    "nccl": Entry("CUDA, any topology", {"cuda": lambda choice, device: _comm().NcclCommunicator()}),
    "one-shot": Entry("CUDA, one host", {"cuda": lambda choice, device: _build().exact("one-shot", device)}),
    "two-shot": Entry("CUDA, one host", {"cuda": lambda choice, device: _build().exact("two-shot", device)}),
    "fused": Entry("with GEMMs; CUDA, one host", {"cuda": lambda choice, device: _build().fused(device)}),
    "hierarchical": Entry(
        "several hosts, on both",
        dict.fromkeys(("cpu", "cuda"), lambda choice, device: _comm().HierarchicalCommunicator(device)),
    ),
    "auto": Entry(
        "the fastest of these",
        {
            "cpu": lambda choice, device: _comm().fastest_between_hosts(_comm().GlooCommunicator(), device),
            "cuda": lambda choice, device: _build().auto(device, choice.error_budget),
        },
    ),
    **dict.fromkeys(("int8", "int6", "int4", "fp8"), _WIDTH),
}
DEFAULT = {"cpu": "gloo", "cuda": "auto"}
TREE: dict[str, Callable[[Choice, torch.device], Communicator]] = {
    "cpu": lambda choice, device: _comm().TreeCommunicator(),
    "cuda": lambda choice, device: _build().tree(choice.name, device),
}
KNOWN = ", ".join(
    f"{', '.join(names)} ({text})" for text, names in groupby(COMMUNICATORS, lambda name: COMMUNICATORS[name].help)
)


def _entry(name: str) -> Entry:
    """Raises UserError for an unknown name."""
    base = name.partition(":")[0]
    entry = COMMUNICATORS.get(base)
    if entry is None or (name != base and not entry.quantized):
        raise UserError(f"unknown communicator {name!r}; known: {KNOWN}")
    return entry
