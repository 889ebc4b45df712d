"""Two-step all-reduces between GPUs of one host without peer access: copy engines send through page-locked host memory.

Each rank has a send buffer in host memory, with three parts: flags, the partial sums that it sends, and the results that it
sends. A rank copies bytes to its send buffer, and then the number of this all-reduce, the epoch, to their flag. The other
ranks wait for the flag and copy the bytes. Copies to host memory, copies from it, and arithmetic run on three streams, so
that both directions of PCIe and the SMs work at the same time. A flag needs no fence and no SM, because the copies of one
stream arrive in order. The epoch is in device memory, so that a CUDA graph may replay an all-reduce any number of times.

No double buffering is needed, however far ranks are apart in time:

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

from comms.interface import Done, PendingAllReduce, fault_word, on_side_stream
from comms.process_group import ProcessGroupCommunicator
from comms.quantize import Scheme
from comms.quantized import Codec, Transport, codec_of, two_step_all_reduce
from comms.workspace import open_host

if TYPE_CHECKING:
    from comms.symmetric import SymmetricCommunicator  # needs Triton

CHUNKS = 4  # of a message, at most; one is reduced while others are copied
# values of a chunk; its launches take 30 µs, so copying it must take longer
MIN_CHUNK, MAX_CHUNK = 1 << 20, 1 << 23
ALIGNMENT = 256  # bytes; also the size of the flags
TIMEOUT = 60.0  # seconds for which a CPU rank waits


class Relay(Transport):
    """All-to-all and all-gather through send buffers in host memory. Call `begin` before and `end` after each all-reduce. All
    ranks make the same calls in the same order."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        """Collective. capacity: bytes of an encoded message, at most. Raises UserError as `open_host`."""
        self.rank, self.world_size, self.capacity = dist.get_rank(), dist.get_world_size(), capacity
        self.starts = ALIGNMENT, ALIGNMENT + capacity  # offsets of partial sums and of results, after the flags
        self.shared = open_host(self.starts[1] + capacity // self.world_size + CHUNKS * ALIGNMENT, device)
        self.epoch, self.fault = torch.zeros(1, dtype=torch.int64, device=device), fault_word(device)
        self.send_stream, self.receive_stream = (
            torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None for _ in range(2)
        )
        self.max_polls: int | None = None  # polls before a kernel gives up; None for the kernel's default
        self.keep_alive: list[Tensor] = []  # tensors that pending copies read or write
        self.used, self.exchanges = [0, 0], [0, 0]  # bytes and exchanges of each step since `begin`

    def begin(self) -> None:
        """Begin an all-reduce on the current stream."""
        self.epoch.add_(1)
        self.used, self.exchanges = [0, 0], [0, 0]

    def end(self) -> None:
        """Make the current stream wait for all copies."""
        for stream in (self.send_stream, self.receive_stream):
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        self.keep_alive.clear()

    def all_to_all(self, sent: Tensor) -> Callable[[], Tensor]:
        parts = sent.view(self.world_size, -1)  # bytes
        begin, number = self._reserve(0, sent.nbytes)
        send_buffer = self._bytes_of(self.rank, begin, sent.nbytes).view(parts.shape)
        with self._copying_on(self.send_stream):
            for others in (slice(0, self.rank), slice(self.rank + 1, None)):
                send_buffer[others].copy_(parts[others], non_blocking=True)
            self._set_flag(0, number)
        offset = begin + self.rank * parts.shape[1]
        return self._receive(0, number, offset, torch.empty_like(sent), parts[self.rank])

    def all_gather(self, sent: Tensor) -> Callable[[], Tensor]:
        begin, number = self._reserve(1, sent.nbytes)
        with self._copying_on(self.send_stream):
            self._bytes_of(self.rank, begin, sent.nbytes).copy_(sent.view(-1), non_blocking=True)
            self._set_flag(1, number)
        received = sent.new_empty(self.world_size * sent.shape[0], sent.shape[1])
        return self._receive(1, number, begin, received, sent.view(-1))

    def _reserve(self, step: int, size: int) -> tuple[int, int]:
        """(offset in a send buffer for these bytes, number of the exchange in its step)."""
        begin, number = self.used[step], self.exchanges[step]
        self.used[step] += -(-size // ALIGNMENT) * ALIGNMENT
        self.exchanges[step] += 1
        assert number < CHUNKS and self.used[0] <= self.capacity, f"exchange {number}, {self.used} bytes of {self.capacity}"
        return self.starts[step] + begin, number

    def _bytes_of(self, rank: int, begin: int, size: int) -> Tensor:
        return self.shared.view(rank, begin, (size,), torch.uint8)

    def _copying_on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """A context that uses `stream`, after it has waited for the current stream. None (CPU): no effect."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def _set_flag(self, step: int, number: int) -> None:
        self.shared.view(self.rank, self._flag_offset(step, number), (1,), torch.int64).copy_(self.epoch, non_blocking=True)

    @staticmethod
    def _flag_offset(step: int, number: int) -> int:
        return (step * CHUNKS + number) * 16  # a multiple of 16 bytes, so that Triton specializes all addresses alike

    def _receive(self, step: int, number: int, begin: int, received: Tensor, own: Tensor) -> Callable[[], Tensor]:
        """Copy the bytes at `begin` of every rank's send buffer to `received`; this rank's bytes are `own`."""
        parts, done = received.view(self.world_size, -1), None
        self.keep_alive += [own, received]
        with self._copying_on(self.receive_stream):
            if self.receive_stream is not None and self.send_stream is not None:
                # a graph may run its branches in any order; this rank must send before it waits for others
                self.receive_stream.wait_stream(self.send_stream)
            parts[self.rank].copy_(own)
            self._wait_flag(self._flag_offset(step, number))
            for i in range(1, self.world_size):
                source = (self.rank + i) % self.world_size
                parts[source].copy_(self._bytes_of(source, begin, parts.shape[1]), non_blocking=True)
            if self.receive_stream is not None:
                done = self.receive_stream.record_event()

        def wait() -> Tensor:
            if done is not None:
                torch.cuda.current_stream().wait_event(done)
            return received

        return wait

    def _wait_flag(self, flag: int) -> None:
        if self.world_size == 1:
            return
        if self.receive_stream is not None:
            from kernels.relay import wait_flags  # needs Triton, which a CPU machine may lack

            addresses = (address + flag for rank, address in enumerate(self.shared.addresses) if rank != self.rank)
            wait_flags(tuple(addresses), self.epoch, self.fault, self.max_polls)
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
        capacity: int | None = None,
        one_shot: "SymmetricCommunicator | None" = None,
    ) -> None:
        """Collective. scheme: None for exact all-reduces. capacity: see `Relay`; None for the longest chunks. one_shot: used for
        all-gathers and for messages that fit its workspaces, for which a relay's launches would take longer than the
        copies. Raises UserError as `open_host`."""
        super().__init__()
        self.name, self.scheme, self.one_shot = "two-shot" if scheme is None else scheme.name, scheme, one_shot
        self.relay = Relay(device, capacity or self._default_capacity())
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        if not partial.numel():
            return Done(partial)
        if self.one_shot is not None and self.one_shot.fits(partial, overlap):
            return self.one_shot.begin_all_reduce(partial, overlap)
        return on_side_stream(self.stream, partial, lambda: self._sum(partial))

    def all_gather(self, shard: Tensor) -> Tensor:
        return super().all_gather(shard) if self.one_shot is None else self.one_shot.all_gather(shard)

    def _sum(self, partial: Tensor) -> Tensor:
        codec = codec_of(self.scheme, partial)
        totals = [self._reduce_piece(piece, codec) for piece in partial.flatten().split(self._max_piece(codec))]
        return (torch.cat(totals) if len(totals) > 1 else totals[0]).view(partial.shape)

    def _default_capacity(self) -> int:
        """Bytes for CHUNKS of the longest chunks of 16-bit values. Messages that need more are cut into pieces."""
        codec = codec_of(self.scheme, torch.empty(0, 4096, dtype=torch.bfloat16))
        return (CHUNKS * MAX_CHUNK // codec.group + self.world_size * CHUNKS) * codec.size + CHUNKS * ALIGNMENT

    def _max_piece(self, codec: Codec) -> int:
        """Values that a send buffer holds, with the padding of the last group and chunk."""
        groups = (self.relay.capacity - CHUNKS * ALIGNMENT) // codec.size - self.world_size * CHUNKS
        assert groups > 0, f"groups of {codec.size} bytes for a send buffer of {self.relay.capacity}"
        return min(groups, max(1, CHUNKS * MAX_CHUNK // codec.group)) * codec.group

    def _reduce_piece(self, piece: Tensor, codec: Codec) -> Tensor:
        self.relay.begin()
        total = two_step_all_reduce(piece, codec, self.relay, self._chunk(len(piece), codec.group * self.world_size))
        self.relay.end()
        return total

    @staticmethod
    def _chunk(size: int, slices: int) -> int:
        """Values of a chunk, a multiple of `slices`: half of a message of `size` values, from MIN_CHUNK to MAX_CHUNK."""
        chunk = min(max(-(-size // 2), MIN_CHUNK), MAX_CHUNK)
        return -(-chunk // slices) * slices
