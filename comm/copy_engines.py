"""Long all-reduces between GPUs with peer access by copy engines, so that a concurrent GEMM keeps the SMs.

Each rank owns a slice of the message. It copies every other rank's slice of its partial sum to that rank's buffer, waits for its own
slice of theirs, and adds them in rank order in fp32, with few programs. Then the ranks copy the sums from each other's buffers. A flag
is the number of the all-reduce, the epoch, which is in device memory, so that a CUDA graph may replay an all-reduce any number
of times. It is copied after the data on the same stream, and so arrives after it.

No double buffering is needed:

- *Partial sums.* A rank sends those of epoch e + 1 when it has completed all-reduce e, for which it waited for the flags of all
  sums of e. Their owners set them after they had read all partial sums of e.
- *Sums.* A rank overwrites those of epoch e when it has received all partial sums of e + 1. Each was sent after its sender had
  copied all sums of e.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from comm.faults import fault_word
from comm.workspace import open_shared
from kernels.relay import add_parts, wait_flags

CAPACITY = 64 << 20  # bytes of a message, which is sent in pieces if it is longer: 4,096 tokens of 8,192 features in 16 bits
ALIGNMENT = 256  # bytes; slices begin at multiples of it
FLAG_BYTES = 16  # so that Triton specializes all addresses alike
PARTIAL, SUM = range(2)  # what a flag says has arrived


class CopyEngines:
    """All-reduces on one stream at a time. All ranks make the same calls in the same order."""

    def __init__(self, device: torch.device, capacity: int = CAPACITY) -> None:
        """Collective. capacity: bytes of the longest piece, a multiple of ALIGNMENT for each rank. Raises UserError as
        `open_shared`."""
        self.rank, self.world_size, self.capacity = dist.get_rank(), dist.get_world_size(), capacity
        self.slice_bytes = -(-capacity // (self.world_size * ALIGNMENT)) * ALIGNMENT
        # a rank's buffer: flags, the partial sums of its slice by rank, and their sum
        self.data = -(-2 * self.world_size * FLAG_BYTES // ALIGNMENT) * ALIGNMENT
        self.shared = open_shared(self.data + (self.world_size + 1) * self.slice_bytes, device)
        self.epoch, self.fault = torch.zeros(1, dtype=torch.int64, device=device), fault_word(device)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over all ranks, on the current stream. partial: contiguous."""
        flat = partial.view(-1)
        total = torch.empty_like(flat)
        most = self.world_size * (self.slice_bytes // flat.itemsize)
        for piece, out in zip(flat.split(most), total.split(most), strict=True):
            self._add(piece, out)
        return total.view(partial.shape)

    def _add(self, piece: Tensor, out: Tensor) -> None:
        step = -(-len(piece) * piece.itemsize // (self.world_size * ALIGNMENT)) * ALIGNMENT // piece.itemsize
        slices = [slice(rank * step, (rank + 1) * step) for rank in range(self.world_size)]
        others = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        own = piece[slices[self.rank]]
        self.epoch.add_(1)
        for owner in others:
            part = piece[slices[owner]]
            self._slot(owner, self.rank, part).copy_(part, non_blocking=True)
            self._flag(owner, PARTIAL).copy_(self.epoch, non_blocking=True)
        self._wait(PARTIAL, others)
        received = self.shared.view(self.rank, self.data, (self.world_size, self.slice_bytes // piece.itemsize), piece.dtype)
        add_parts(own, received, self.rank, self._slot(self.rank, self.world_size, own), out[slices[self.rank]])
        for other in others:
            self._flag(other, SUM).copy_(self.epoch, non_blocking=True)
        self._wait(SUM, others)
        for owner in others:
            part = out[slices[owner]]
            part.copy_(self._slot(owner, self.world_size, part), non_blocking=True)

    def _slot(self, owner: int, number: int, like: Tensor) -> Tensor:
        """Where `owner` has the partial sums of rank `number`, or their sum if that is the number of ranks."""
        return self.shared.view(owner, self.data + number * self.slice_bytes, like.shape, like.dtype)

    def _flag_offset(self, kind: int, source: int) -> int:
        return (kind * self.world_size + source) * FLAG_BYTES

    def _flag(self, at: int, kind: int) -> Tensor:
        """This rank's flag in the buffer of rank `at`."""
        return self.shared.view(at, self._flag_offset(kind, self.rank), (1,), torch.int64)

    def _wait(self, kind: int, others: list[int]) -> None:
        own = self.shared.addresses[self.rank]
        if others:
            wait_flags(tuple(own + self._flag_offset(kind, other) for other in others), self.epoch, self.fault)
