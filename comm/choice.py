"""Which communicator a command line names: checked before any rank is met, built when all of them have."""

from dataclasses import dataclass

from comm.interface import Communicator
from comm.process_group import GlooCommunicator, NcclCommunicator
from comm.quantize import WIDTHS, Scheme, parse_scheme
from comm.quantized import quantized
from comm.simulated import Link, SimulatedLink, parse_link
from errors import UserError

KNOWN = f"gloo (CPU), nccl (CUDA), {', '.join(WIDTHS)} (both, quantized; a group may follow, as in int8:64)"


@dataclass(frozen=True)
class Choice:
    """A communicator that serves its device."""

    backend: str  # of torch.distributed: gloo or nccl
    device: str
    scheme: Scheme | None = None  # None: exact sums
    link: Link | None = None  # None: as fast as it is

    def build(self) -> Communicator:
        """The communicator over the default process group. Collective."""
        if self.scheme:
            communicator = quantized(self.scheme, self.device)
        else:
            communicator = NcclCommunicator() if self.backend == "nccl" else GlooCommunicator()
        return SimulatedLink(communicator, self.link) if self.link else communicator


def choose(device: str, name: str | None = None, link: str | None = None) -> Choice:
    """device: `cpu` or `cuda`. name: of KNOWN; None takes what fits the device. link: of `--simulate-link`, on CPU only.

    Raises UserError for a name that is unknown or does not serve the device, a bad group or a bad link.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    name = backend if name is None else name
    quantized = name.split(":")[0] in WIDTHS
    if not quantized and name not in ("gloo", "nccl"):
        raise UserError(f"unknown communicator {name!r}; known: {KNOWN}")
    if not quantized and name != backend:
        raise UserError(f"--comm {name} does not serve --device {device}; use {backend}")
    if link is not None and device != "cpu":
        raise UserError("--simulate-link slows down gloo ranks only; use it with --device cpu")
    return Choice(backend, device, parse_scheme(name) if quantized else None, None if link is None else parse_link(link))
