"""Which communicator a command line names: checked before any rank is met, built when all of them have."""

from dataclasses import dataclass

import torch

from comm.interface import Communicator
from comm.process_group import GlooCommunicator, NcclCommunicator
from comm.quantize import WIDTHS, parse_scheme
from comm.quantized import QuantizedGlooCommunicator
from comm.simulated import Link, SimulatedLink, parse_link
from errors import UserError

ON_GPU = ("nccl", "one-shot", "two-shot", "fused")
KNOWN = (
    "gloo (CPU), nccl (CUDA, any topology), one-shot, two-shot, fused with GEMMs (CUDA, one host), auto (the fastest of these), "
    f"{', '.join(WIDTHS)} (both, quantized; a group may follow, as in int8:64)"
)


@dataclass(frozen=True)
class Choice:
    """A communicator that serves its device."""

    name: str
    device: str
    link: Link | None = None  # None: as fast as it is
    error_budget: float = 0.0  # relative error of a sum that `auto` may make for speed

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
            return self._quantized()
        if self.backend == "gloo":
            return GlooCommunicator()
        if self.name == "nccl":
            return NcclCommunicator()
        from comm.auto import auto, fused, over_shared_memory  # these need Triton, which a machine without a GPU may lack
        from comm.symmetric import KINDS

        here = torch.device("cuda", torch.cuda.current_device())
        if self.name == "auto":
            return auto(here, self.error_budget)
        if self.name == "fused":
            return fused(here)
        return over_shared_memory(next(kind for kind in KINDS if kind == self.name), here)

    def _quantized(self) -> Communicator:
        scheme = parse_scheme(self.name)
        if self.device == "cpu":
            return QuantizedGlooCommunicator(scheme)
        from comm.quantized_symmetric import quantized_symmetric

        return quantized_symmetric(scheme, torch.device("cuda", torch.cuda.current_device()))


def choose(device: str, name: str | None = None, link: str | None = None, error_budget: float = 0.0) -> Choice:
    """device: `cpu` or `cuda`. name: of KNOWN; None takes what fits the device. link: of `--simulate-link`, on CPU only.
    error_budget: of `--comm-error-budget`, for `auto` only.

    Raises UserError for a name that is unknown or does not serve the device, a bad group, link or budget.
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
    if not 0 <= error_budget < 1:
        raise UserError(
            f"--comm-error-budget is {error_budget}; give the relative error of a sum, such as 0.01, or 0 for exact sums"
        )
    if error_budget and (name != "auto" or device != "cuda"):
        raise UserError("--comm-error-budget is for --comm auto on GPUs, which chooses within it; leave it out")
    return Choice(name, device, None if link is None else parse_link(link), error_budget)


def _is_quantized(name: str) -> bool:
    return name.split(":")[0] in WIDTHS
