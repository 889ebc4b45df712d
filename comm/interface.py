"""The communicator's interface, and the two that send nothing."""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Handle(Protocol):
    """A sum in flight."""

    def wait(self) -> Tensor:
        """The sum over all ranks, same shape and dtype as the partial. Call it once."""
        ...


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

    @abstractmethod
    def all_gather(self, shard: Tensor) -> Tensor:
        """Concatenate the ranks' `shard`s (..., n) along the last dim, in rank order: (..., n * world_size)."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum and wait: `start(partial).wait()`."""
        return self.start(partial).wait()


class Done:
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

    A gather returns this rank's shard in its place and -inf elsewhere, so that a sampled token is still a token.
    """

    name = "none"

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def start(self, partial: Tensor) -> Handle:
        return Done(partial)

    def all_gather(self, shard: Tensor) -> Tensor:
        n = shard.shape[-1]
        around = (self.rank * n, (self.world_size - 1 - self.rank) * n)
        return F.pad(shard, around, value=-torch.inf)
