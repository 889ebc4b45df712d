"""Two-step all-reduces between GPUs of one host without peer access: through page-locked host memory, by the copy engines.

Each rank has an outbox in host memory, with three parts: flags, the partial sums that it sends, and the results that it
sends. A rank copies bytes to its outbox, and then the number of this all-reduce, the epoch, to their flag. The other ranks
wait for the flag and copy the bytes in. Copies out, copies in and arithmetic have a stream each, so that both directions of
PCIe and the SMs work at the same time. A flag needs no fence and no SM, because the copies of one stream arrive in order.
The epoch is in device memory, so that a CUDA graph may replay an all-reduce any number of times.

One place for partial sums and one for results are enough, even if ranks are fast and slow:

- *Partial sums.* A rank overwrites those of epoch e with those of e + 1 when it has received all results of e. Each result
  was sent after its sender had read all partial sums of e.
- *Results.* A rank overwrites those of epoch e with those of e + 1 when it has received all partial sums of e + 1. Each of
  these was sent after its sender had completed all-reduce e.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from comm.interface import Done, PendingAllReduce, on_side_stream
from comm.process_group import ProcessGroupCommunicator
from comm.quantize import Scheme
from comm.two_step import Coding, Transport, coding_of, two_step_all_reduce
from comm.workspace import open_host

if TYPE_CHECKING:
    from comm.symmetric import SymmetricCommunicator  # needs Triton

CHUNKS = 4  # of a message, at most: while one is added up, others are copied
# values; the launches of a chunk take 30 µs, so copying it must take longer
LEAST_CHUNK, LONGEST_CHUNK = 1 << 20, 1 << 23
ALIGNMENT = 256  # bytes; also the size of all flags together
TIMEOUT = 60.0  # seconds for which a CPU rank waits


class Relay(Transport):
    """Exchanges over outboxes in host memory. Call `begin` before and `end` after each all-reduce. All ranks make the same
    exchanges in the same order."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, area: int) -> None:
        """Collective. area: bytes of an encoded message. Raises UserError as `open_host` does."""
        self.rank, self.world_size, self.area = dist.get_rank(group), dist.get_world_size(group), area
        self.starts = ALIGNMENT, ALIGNMENT + area  # where the two areas of an outbox begin, after the flags
        self.shared = open_host(self.starts[1] + area // self.world_size + CHUNKS * ALIGNMENT, device, group)
        self.epoch, self.fault = (torch.zeros(1, dtype=kind, device=device) for kind in (torch.int64, torch.int32))
        self.outward, self.inward = (
            torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None for _ in range(2)
        )
        self.patience: int | None = None  # polls before a kernel gives up; None for the kernel's default
        self.held: list[Tensor] = []  # what pending copies read and write
        self.used, self.exchanges = [0, 0], [0, 0]  # bytes and exchanges of each step since `begin`

    def begin(self) -> None:
        """Begin an all-reduce on the current stream."""
        self.epoch.add_(1)
        self.used, self.exchanges = [0, 0], [0, 0]

    def end(self) -> None:
        """Make the current stream wait for all copies."""
        for stream in (self.outward, self.inward):
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        self.held.clear()

    def check(self) -> None:
        """Raise RuntimeError if a wait for another rank timed out. Waits for the current stream."""
        if int(self.fault):
            raise RuntimeError(f"rank {self.rank} timed out waiting for another rank's part of an all-reduce in host memory")

    def all_to_all(self, sent: Tensor) -> Callable[[], Tensor]:
        parts = sent.view(self.world_size, -1)  # bytes
        begin, number = self._reserve(0, sent.nbytes)
        outbox = self._place(self.rank, begin, sent.nbytes).view(parts.shape)
        with self._on(self.outward):
            for others in (slice(0, self.rank), slice(self.rank + 1, None)):
                outbox[others].copy_(parts[others], non_blocking=True)
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
        """(offset in an outbox for these bytes, number of the exchange in its step)."""
        begin, number = self.used[step], self.exchanges[step]
        self.used[step] += -(-size // ALIGNMENT) * ALIGNMENT
        self.exchanges[step] += 1
        assert number < CHUNKS and self.used[0] <= self.area, f"exchange {number}, {self.used} bytes of {self.area}"
        return self.starts[step] + begin, number

    def _place(self, rank: int, begin: int, size: int) -> Tensor:
        return self.shared.view(rank, begin, (size,), torch.uint8)

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """Use a stream of copies, after it has waited for the current stream."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def _announce(self, step: int, number: int) -> None:
        self.shared.view(self.rank, self._flag(step, number), (1,), torch.int64).copy_(self.epoch, non_blocking=True)

    @staticmethod
    def _flag(step: int, number: int) -> int:
        return (
            step * CHUNKS + number
        ) * 16  # bytes; all addresses are multiples of 16, so that Triton compiles one kernel for them

    def _receive(self, step: int, number: int, begin: int, received: Tensor, own: Tensor) -> Callable[[], Tensor]:
        """Copy the bytes at `begin` of every rank's outbox to `received`; this rank's are `own`."""
        parts, done = received.view(self.world_size, -1), None
        self.held += [own, received]
        with self._on(self.inward):
            if self.inward is not None and self.outward is not None:
                # a graph may run its branches in any order: this rank must have sent before it waits for others
                self.inward.wait_stream(self.outward)
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
            from kernels.relay import await_flags  # needs Triton, which a CPU machine may lack

            addresses = (address + flag for rank, address in enumerate(self.shared.addresses) if rank != self.rank)
            await_flags(tuple(addresses), self.epoch, self.fault, self.patience)
            return
        deadline, epoch = time.monotonic() + TIMEOUT, int(self.epoch)
        flags = [self.shared.view(rank, flag, (1,), torch.int64) for rank in range(self.world_size) if rank != self.rank]
        while any(int(seen) < epoch for seen in flags):
            if time.monotonic() > deadline:
                self.fault.fill_(1)
                return
            time.sleep(1e-4)


class RelayCommunicator(ProcessGroupCommunicator):
    """Ranks of one host; CPU ranks for tests. All launches may be captured in CUDA graphs."""

    def __init__(
        self,
        scheme: Scheme | None,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        area: int | None = None,
        short: "SymmetricCommunicator | None" = None,
    ) -> None:
        """Collective. scheme: None for exact all-reduces. area: see `Relay`; None for the size of a long message. short:
        takes the gathers, and the messages that fit into its workspaces, for which a relay's launches would take longer
        than the copies. Raises UserError as `open_host` does."""
        super().__init__(group)
        self.name, self.scheme, self.short = "two-shot" if scheme is None else scheme.name, scheme, short
        self.relay = Relay(device, group, area or self._area())
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        if not partial.numel():
            return Done(partial)
        if self.short is not None and self.short.fits(partial, overlap):
            return self.short.begin_all_reduce(partial, overlap)
        return on_side_stream(self.stream, partial, lambda: self._sum(partial))

    def all_gather(self, shard: Tensor) -> Tensor:
        return super().all_gather(shard) if self.short is None else self.short.all_gather(shard)

    def _sum(self, partial: Tensor) -> Tensor:
        coding = coding_of(self.scheme, partial)
        totals = [self._piece(piece, coding) for piece in partial.flatten().split(self._longest(coding))]
        return (torch.cat(totals) if len(totals) > 1 else totals[0]).view(partial.shape)

    def _area(self) -> int:
        """Bytes for CHUNKS of the longest chunks of 16-bit values. Messages that need more are cut into pieces."""
        coding = coding_of(self.scheme, torch.empty(0, 4096, dtype=torch.bfloat16))
        return (CHUNKS * LONGEST_CHUNK // coding.group + self.world_size * CHUNKS) * coding.size + CHUNKS * ALIGNMENT

    def _longest(self, coding: Coding) -> int:
        """How many values an outbox holds, if their last group and chunk are padded."""
        groups = (self.relay.area - CHUNKS * ALIGNMENT) // coding.size - self.world_size * CHUNKS
        assert groups > 0, f"groups of {coding.size} bytes for an outbox of {self.relay.area}"
        return min(groups, max(1, CHUNKS * LONGEST_CHUNK // coding.group)) * coding.group

    def _piece(self, piece: Tensor, coding: Coding) -> Tensor:
        self.relay.begin()
        total = two_step_all_reduce(piece, coding, self.relay, self._chunk(len(piece), coding.group * self.world_size))
        self.relay.end()
        return total

    @staticmethod
    def _chunk(size: int, slices: int) -> int:
        """Values of a chunk, whole slices: half of a message of `size` values, within the limits for chunks."""
        chunk = min(max(-(-size // 2), LEAST_CHUNK), LONGEST_CHUNK)
        return -(-chunk // slices) * slices

    def check(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()
        self.relay.check()
        if self.short is not None:
            self.short.check()
