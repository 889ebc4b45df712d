"""Two-step sums between GPUs of one host that do not reach each other: through locked host memory, by the copy engines.

Each rank has an outbox there: flags, what it sends to be summed, and the sums that it sends. It copies its bytes out, then the
number of this sum, the epoch, to their flag; others wait for the flag and copy in. Copies out, copies in and arithmetic have a
stream each, so that both directions of PCIe and the SMs work at a time. Flags cost no fence and no SM: copies of one stream arrive
in order. The epoch lies in device memory, so that a CUDA graph may replay a sum any number of times.

One place each will do, whatever the ranks' speed. What is to be summed in e + 1 is overwritten by a rank that has received all
sums of e, each of which was sent behind its sender's reading of all that was to be summed in e. Sums of e + 1 are overwritten by a
rank that has received all that is to be summed in e + 1, each part of which was sent behind its sender's whole sum e.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from comm.interface import Done, Handle, Product, computed, start_beside
from comm.process_group import _ProcessGroupCommunicator
from comm.quantize import Scheme
from comm.two_step import Coding, Transport, exact, quantized, two_steps
from comm.workspace import open_host

if TYPE_CHECKING:
    from comm.symmetric import SymmetricCommunicator  # which needs Triton

CHUNKS = 4  # of a message at most: while one is summed, others travel
# values: a chunk costs 30 µs of launches, so it must take longer than that to travel
LEAST_CHUNK, LONGEST_CHUNK = 1 << 20, 1 << 23
ALIGNMENT = 256  # bytes, also of what the flags take
SECONDS = 60.0  # that a CPU rank waits


class Relay(Transport):
    """Exchanges over outboxes in host memory; `begin` and `end` every sum. All ranks make the same ones in the same order."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, area: int) -> None:
        """Collective. area: bytes of a message, encoded. Raises UserError as `open_host` does."""
        self.rank, self.world_size, self.area = dist.get_rank(group), dist.get_world_size(group), area
        self.starts = ALIGNMENT, ALIGNMENT + area  # of the areas in an outbox, behind the flags
        self.shared = open_host(self.starts[1] + area // self.world_size + CHUNKS * ALIGNMENT, device, group)
        self.epoch, self.fault = (torch.zeros(1, dtype=kind, device=device) for kind in (torch.int64, torch.int32))
        self.outward, self.inward = (
            torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None for _ in range(2)
        )
        self.patience: int | None = None  # polls of a kernel that waits; None for its own
        self.held: list[Tensor] = []  # what copies read and write, or views of it
        self.used, self.exchanges = [0, 0], [0, 0]  # by step, since `begin`

    def begin(self) -> None:
        """Of what is given to the current stream from here on: a sum."""
        self.epoch.add_(1)
        self.used, self.exchanges = [0, 0], [0, 0]

    def end(self) -> None:
        """The current stream goes on when all copies are done."""
        for stream in (self.outward, self.inward):
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        self.held.clear()

    def check(self) -> None:
        """Raise RuntimeError if a rank has waited in vain, as far as the current stream knows."""
        if int(self.fault):
            raise RuntimeError(f"rank {self.rank} waited in vain for another rank's part of a sum, in host memory")

    def all_to_all(self, sent: Tensor) -> Callable[[], Tensor]:
        parts = sent.view(self.world_size, -1)  # bytes
        begin, number = self._reserve(0, sent.nbytes)
        here = self._place(self.rank, begin, sent.nbytes).view(parts.shape)
        with self._on(self.outward):
            for others in (slice(0, self.rank), slice(self.rank + 1, None)):
                here[others].copy_(parts[others], non_blocking=True)
            self._announce(0, number)
        mine = begin + self.rank * parts.shape[1]
        return self._receive(0, number, mine, torch.empty_like(sent), parts[self.rank])

    def all_gather(self, sent: Tensor) -> Callable[[], Tensor]:
        begin, number = self._reserve(1, sent.nbytes)
        with self._on(self.outward):
            self._place(self.rank, begin, sent.nbytes).copy_(sent.view(-1), non_blocking=True)
            self._announce(1, number)
        received = sent.new_empty(self.world_size * sent.shape[0], sent.shape[1])
        return self._receive(1, number, begin, received, sent.view(-1))

    def _reserve(self, step: int, size: int) -> tuple[int, int]:
        """(byte of an outbox where these bytes begin, number of the exchange in its step)."""
        begin, number = self.used[step], self.exchanges[step]
        self.used[step] += -(-size // ALIGNMENT) * ALIGNMENT
        self.exchanges[step] += 1
        assert number < CHUNKS and self.used[0] <= self.area, f"exchange {number}, {self.used} bytes of {self.area}"
        return self.starts[step] + begin, number

    def _place(self, rank: int, begin: int, size: int) -> Tensor:
        return self.shared.view(rank, begin, (size,), torch.uint8)

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """A stream of copies, once it has waited for the current one."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def _announce(self, step: int, number: int) -> None:
        self.shared.view(self.rank, self._flag(step, number), (1,), torch.int64).copy_(self.epoch, non_blocking=True)

    @staticmethod
    def _flag(step: int, number: int) -> int:
        return (step * CHUNKS + number) * 16  # bytes: addresses that all look alike to a compiler

    def _receive(self, step: int, number: int, begin: int, received: Tensor, own: Tensor) -> Callable[[], Tensor]:
        """All ranks' bytes from `begin` on, this rank's `own` among them, in `received`."""
        parts, done = received.view(self.world_size, -1), None
        self.held += [own, received]
        with self._on(self.inward):
            if self.inward is not None and self.outward is not None:
                self.inward.wait_stream(self.outward)  # wherever a graph runs its branches, nobody waits who has not sent
            parts[self.rank].copy_(own)
            self._await(self._flag(step, number))
            for i in range(1, self.world_size):
                source = (self.rank + i) % self.world_size
                parts[source].copy_(self._place(source, begin, parts.shape[1]), non_blocking=True)
            if self.inward is not None:
                done = self.inward.record_event()

        def wait() -> Tensor:
            if done is not None:
                torch.cuda.current_stream().wait_event(done)
            return received

        return wait

    def _await(self, flag: int) -> None:
        if self.world_size == 1:
            return
        if self.inward is not None:
            from kernels.relay import await_flags  # Triton, which a CPU machine need not have

            addresses = (address + flag for rank, address in enumerate(self.shared.addresses) if rank != self.rank)
            await_flags(tuple(addresses), self.epoch, self.fault, self.patience)
            return
        deadline, epoch = time.monotonic() + SECONDS, int(self.epoch)
        flags = [self.shared.view(rank, flag, (1,), torch.int64) for rank in range(self.world_size) if rank != self.rank]
        while any(int(seen) < epoch for seen in flags):
            if time.monotonic() > deadline:
                self.fault.fill_(1)
                return
            time.sleep(1e-4)


class RelayCommunicator(_ProcessGroupCommunicator):
    """Ranks of one host; CPU ranks, for tests. All its launches may be captured in CUDA graphs."""

    def __init__(
        self,
        scheme: Scheme | None,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        area: int | None = None,
        short: "SymmetricCommunicator | None" = None,
    ) -> None:
        """Collective. scheme: None for exact sums. area: see `Relay`; None for what a long message takes. short: for messages that its
        workspaces take, which would cost a relay more launches than bytes, and for gathers. Raises UserError as `open_host` does."""
        super().__init__(group)
        self.name, self.scheme, self.short = "two-shot" if scheme is None else scheme.name, scheme, short
        self.relay = Relay(device, group, area or self._area())
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def start(self, partial: Tensor) -> Handle:
        if not partial.numel():
            return Done(partial)
        if self.short is not None and self.short.beside.fits(partial):
            return self.short.start(partial)
        if self.stream is None:
            return Done(self._sum(partial))
        return start_beside(self.stream, partial, lambda: self._sum(partial))

    def defer(self, partial: Tensor | Product) -> Handle:
        partial = computed(partial)
        if self.short is not None and self.short.here.fits(partial):
            return self.short.defer(partial)
        return self.start(partial)

    def all_gather(self, shard: Tensor) -> Tensor:
        return super().all_gather(shard) if self.short is None else self.short.all_gather(shard)

    def _sum(self, partial: Tensor) -> Tensor:
        coding = exact(partial.dtype) if self.scheme is None else quantized(self.scheme, partial)
        totals = [self._piece(piece, coding) for piece in partial.flatten().split(self._longest(coding))]
        return (torch.cat(totals) if len(totals) > 1 else totals[0]).view(partial.shape)

    def _area(self) -> int:
        """Bytes for the longest chunks of 16-bit values; other messages, or groups, go in pieces of what fits."""
        sample = torch.empty(0, 4096, dtype=torch.bfloat16)
        coding = exact(sample.dtype) if self.scheme is None else quantized(self.scheme, sample)
        return (CHUNKS * LONGEST_CHUNK // coding.group + self.world_size * CHUNKS) * coding.size + CHUNKS * ALIGNMENT

    def _longest(self, coding: Coding) -> int:
        """Values that an outbox takes, whatever their last group and chunk lack."""
        groups = (self.relay.area - CHUNKS * ALIGNMENT) // coding.size - self.world_size * CHUNKS
        assert groups > 0, f"groups of {coding.size} bytes for an outbox of {self.relay.area}"
        return min(groups, max(1, CHUNKS * LONGEST_CHUNK // coding.group)) * coding.group

    def _piece(self, piece: Tensor, coding: Coding) -> Tensor:
        self.relay.begin()
        total = two_steps(piece, coding, self.relay, self._chunk(len(piece), coding.group * self.world_size))
        self.relay.end()
        return total

    @staticmethod
    def _chunk(size: int, slices: int) -> int:
        """Two chunks of a message of `size` values, but neither too short nor too long ones, of whole slices."""
        chunk = min(max(-(-size // 2), LEAST_CHUNK), LONGEST_CHUNK)
        return -(-chunk // slices) * slices

    def check(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()
        self.relay.check()
        if self.short is not None:
            self.short.check()
