"""Which communicator a command line names: checked before any rank is met, built when all of them have."""

from dataclasses import dataclass

import torch

from comm.interface import Communicator
from comm.process_group import GlooCommunicator, NcclCommunicator
from comm.quantize import WIDTHS, parse_scheme
from comm.quantized import quantized
from comm.simulated import Link, SimulatedLink, parse_link
from errors import UserError

ON_GPU = ("nccl", "one-shot", "two-shot")
KNOWN = (
    "gloo (CPU), nccl (CUDA, any topology), one-shot, two-shot (CUDA, one host), auto (the fastest of these by message size), "
    f"{', '.join(WIDTHS)} (both, quantized; a group may follow, as in int8:64)"
)


@dataclass(frozen=True)
class Choice:
    """A communicator that serves its device."""

    name: str
    device: str
    link: Link | None = None  # None: as fast as it is

    @property
    def backend(self) -> str:
        """Of torch.distributed."""
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def is_exact(self) -> bool:
        """Whether sums lose nothing but to rounding."""
        return not _is_quantized(self.name)

    def build(self) -> Communicator:
        """The communicator over the default process group. Collective. Raises UserError where the GPUs cannot do it."""
        communicator = self._build()
        return SimulatedLink(communicator, self.link) if self.link else communicator

    def _build(self) -> Communicator:
        if not self.is_exact:
            return quantized(parse_scheme(self.name), self.device)
        if self.backend == "gloo":
            return GlooCommunicator()
        if self.name == "nccl":
            return NcclCommunicator()
        from comm.auto import auto  # these need Triton, which a machine without a GPU may lack
        from comm.symmetric import KINDS, SymmetricCommunicator

        here = torch.device("cuda", torch.cuda.current_device())
        kind = next((kind for kind in KINDS if kind == self.name), None)
        return auto(here) if kind is None else SymmetricCommunicator(kind, here)


def choose(device: str, name: str | None = None, link: str | None = None) -> Choice:
    """device: `cpu` or `cuda`. name: of KNOWN; None takes what fits the device. link: of `--simulate-link`, on CPU only.

    Raises UserError for a name that is unknown or does not serve the device, a bad group or a bad link.
    """
    name = ("auto" if device == "cuda" else "gloo") if name is None else name
    if _is_quantized(name):
        parse_scheme(name)
    elif name not in ("gloo", "auto", *ON_GPU):
        raise UserError(f"unknown communicator {name!r}; known: {KNOWN}")
    elif name != "auto" and (name in ON_GPU) != (device == "cuda"):
        raise UserError(f"--comm {name} does not serve --device {device}; use {'auto' if device == 'cuda' else 'gloo'}")
    if link is not None and device != "cpu":
        raise UserError("--simulate-link slows down gloo ranks only; use it with --device cpu")
    return Choice(name, device, None if link is None else parse_link(link))


def _is_quantized(name: str) -> bool:
    return name.split(":")[0] in WIDTHS
