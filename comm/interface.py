"""The communicator's interface, and the two that send nothing."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import rejoin
from kernels.linear import linear
from kernels.norm import add_rms_norm


class Scattered(ABC):
    """A normed stream of which every rank has some rows only, for the column-parallel layer that reads all of them."""

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """linear(all rows, weight, bias): (B, T, C) of all ranks together and (N, C) to (B, T, N)."""

    @abstractmethod
    def whole(self, rows: Tensor) -> Tensor:
        """All rows (B, T, C) of a stream of which this rank has `rows` (R, C). Collective."""


@dataclass(frozen=True)
class Product:
    """A partial sum that is not computed yet: x (B, T, K) times the transpose of weight (C, K)."""

    x: Tensor
    weight: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], len(self.weight))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.x.element_size()


def computed(partial: Tensor | Product) -> Tensor:
    """The partial sum itself."""
    return linear(partial.x, partial.weight) if isinstance(partial, Product) else partial


class Handle(ABC):
    """A sum in flight. Ask for it once, by `wait`, `settle` or `add_norm`.

    takes_rows: whether `settle` and `add_norm` accept this rank's rows (R, C) of the stream in place of all of it.
    """

    takes_rows = False

    @abstractmethod
    def wait(self) -> Tensor:
        """The sum over all ranks, same shape and dtype as the partial."""

    def settle(self, x: Tensor) -> Tensor:
        """x + sum, whole on every rank. x: whole, or the rows that an `add_norm` of the same communicator returned."""
        return x + self.wait()

    def add_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | Scattered]:
        """What nearly always follows: (x + sum, rms_norm(x + sum) * weight), which some communicators compute in the kernel
        that sums. A communicator that makes sums of Products may return this rank's rows of both."""
        return add_rms_norm(x, self.wait(), weight, eps)


class Beside(Handle):
    """A sum on another stream or thread, which the current stream joins."""

    @abstractmethod
    def arrive(self) -> Tensor:
        """Make the current stream wait for the sum."""

    def wait(self) -> Tensor:
        total = self.arrive()
        rejoin(total)
        return total

    def add_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, self.arrive(), weight, eps, early=False)


class OtherStream(Beside):
    """A sum on another CUDA stream. It holds the partial, whose memory the current stream must not give to others before."""

    def __init__(self, done: torch.cuda.Event, partial: Tensor, total: Tensor) -> None:
        self.done, self.partial, self.total = done, partial, total

    def arrive(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self.done)
        return self.total


def start_beside(stream: torch.cuda.Stream, partial: Tensor, sum: Callable[[], Tensor]) -> Handle:
    """`sum`, which reads `partial`, on `stream`, while the current one goes on. What that stream allocates needs no `record_stream`,
    with which a graph's capture would use no memory twice: it may use the memory again only in a later sum, before which it waits
    for all that the current stream has been given, readers of this sum included."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        total = sum()
        return OtherStream(stream.record_event(), partial, total)


class Communicator(ABC):
    """Sums and gathers over the ranks of one tensor-parallel group.

    All ranks call the same methods in the same order, and all of them receive bitwise the same result, so that every
    rank samples the same token.
    """

    name: str
    rank: int
    world_size: int
    waited: float | None = None  # seconds this host has waited for other ranks; None where only the device knows

    @abstractmethod
    def start(self, partial: Tensor) -> Handle:
        """Begin to sum `partial` (any shape, floating point) over all ranks. The communicator may overwrite `partial`."""

    def defer(self, partial: Tensor | Product) -> Handle:
        """The same for a caller that computes nothing before it asks for the sum: it may begin only then."""
        return self.start(computed(partial))

    def takes_product(self, x: Tensor, weight: Tensor) -> bool:
        """Whether `defer` takes Product(x, weight), which this communicator computes and sums in one."""
        return False

    @abstractmethod
    def all_gather(self, shard: Tensor) -> Tensor:
        """Concatenate the ranks' `shard`s (..., n) along the last dim, in rank order: (..., n * world_size)."""

    def check(self) -> None:  # noqa: B027
        """Raise RuntimeError if a sum went wrong without a word, as a kernel's may that gives up waiting for another rank. Waits
        for the device."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum and wait."""
        return self.defer(partial).wait()


class Done(Handle):
    """The handle of a sum that needed no waiting."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def wait(self) -> Tensor:
        return self.total


class Local(Communicator):
    """One rank: a partial sum is already whole."""

    name, rank, world_size, waited = "local", 0, 1, 0.0

    def start(self, partial: Tensor) -> Handle:
        return Done(partial)

    def all_gather(self, shard: Tensor) -> Tensor:
        return shard


class NoCommunication(Communicator):
    """The `upper-bound` variant: every rank goes on with its own partial sums, so the text is wrong on more than one rank.

    A gather returns this rank's shard in its place and the least value elsewhere, so that a sampled token is still a token.
    """

    name = "none"

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def start(self, partial: Tensor) -> Handle:
        return Done(partial)

    def all_gather(self, shard: Tensor) -> Tensor:
        n = shard.shape[-1]
        around = (self.rank * n, (self.world_size - 1 - self.rank) * n)
        least = -torch.inf if shard.is_floating_point() else torch.iinfo(shard.dtype).min
        return F.pad(shard, around, value=least)
