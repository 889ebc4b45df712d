"""Quantized all-reduces in two steps (Li et al., "Flash Communication", arXiv:2412.04964, Algorithm 1): a reduce-scatter by an all-to-all
and local sums, then an all-gather of the sums. The steps also serve exact values, and other transports than process groups (`comms/relay.py`).

The message is cut into chunks, and each chunk into N slices of whole groups of values, one for each rank:

    encode -> all-to-all -> decode, add this rank's slice in fp32 -> encode -> all-gather -> decode

Every rank decodes the same gathered bytes, so all ranks get bitwise the same result. All chunks are sent before the first one
is added, so that the arithmetic of one chunk overlaps with the transfer of the next.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from comms.interface import Done, PendingAllReduce, on_side_stream
from comms.process_group import HostAllReduce, ProcessGroupCommunicator, all_gather
from comms.quantize import PER_TOKEN, Scheme, dequantize_sum, hadamard_transform, quantize
from errors import UserError

EXACT_GROUP = 64  # values; slices are multiples of it, which copy engines copy fast
CHUNK = 1 << 20  # values of a chunk, at most
NCCL_CHUNK = 1 << 24  # larger, because each NCCL collective costs tens of µs


@dataclass(frozen=True)
class Codec:
    """The encoding of values for the two exchanges, in groups of `group` values of at most `size` bytes.

    encode: (G, group) values to (G, bytes) uint8, for the all-to-all. sum: (N, G, bytes) of N ranks to their sum (G, group)
    fp32. encode_sum: the sum to (G, bytes) uint8, for the all-gather. decode: (G, bytes) to (G, group) values.
    """

    group: int
    size: int
    encode: Callable[[Tensor], Tensor]
    sum: Callable[[Tensor], Tensor]
    encode_sum: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


def codec_of(scheme: Scheme | None, partial: Tensor) -> Codec:
    """The codec for a message. scheme: None for exact all-reduces."""
    return _exact(partial.dtype) if scheme is None else _quantized(scheme, scheme.group_of(partial))


def _quantized(scheme: Scheme, group: int) -> Codec:
    def transform(x: Tensor) -> Tensor:
        return hadamard_transform(x.float()) if scheme.hadamard else x

    return Codec(
        group=group,
        size=max(width.record_bytes(group) for width in (scheme.reduce, scheme.gather)),
        encode=lambda x: quantize(transform(x), scheme.reduce),
        sum=lambda records: dequantize_sum(records, scheme.reduce),
        encode_sum=lambda total: quantize(total, scheme.gather),
        decode=lambda records: transform(dequantize_sum(records[None], scheme.gather)),
    )


def _exact(dtype: torch.dtype) -> Codec:
    """Values are sent as they are. A sum is rounded once, from fp32."""
    return Codec(
        group=EXACT_GROUP,
        size=EXACT_GROUP * dtype.itemsize,
        encode=lambda x: x.view(torch.uint8),
        sum=lambda parts: _sum_in_order(parts.view(dtype)),
        encode_sum=lambda total: total.to(dtype).view(torch.uint8),
        decode=lambda parts: parts.view(dtype),
    )


def _sum_in_order(parts: Tensor) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


class Transport(ABC):
    """Asynchronous collectives of bytes. Both methods return a function that waits (the current stream, or the host with
    gloo) and returns the received bytes."""

    world_size: int

    @abstractmethod
    def all_to_all(self, sent: Tensor) -> Callable[[], Tensor]:
        """Send part n of N of `sent` (G, bytes) to rank n. Receive (G, bytes): the parts of all ranks for this rank."""

    @abstractmethod
    def all_gather(self, sent: Tensor) -> Callable[[], Tensor]:
        """Send (G, bytes) to all ranks. Receive (N * G, bytes)."""


class ProcessGroupTransport(Transport):
    """Collectives of a process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.world_size = group, dist.get_world_size(group)

    def all_to_all(self, sent: Tensor) -> Callable[[], Tensor]:
        received = torch.empty_like(sent)
        return self._waiting(dist.all_to_all_single(received, sent, group=self.group, async_op=True), received)

    def all_gather(self, sent: Tensor) -> Callable[[], Tensor]:
        received = sent.new_empty(self.world_size * sent.shape[0], sent.shape[1])
        return self._waiting(all_gather(received, sent, group=self.group, async_op=True), received)

    @staticmethod
    def _waiting(work: dist.Work, received: Tensor) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            work.wait()
            return received

        return wait


def two_step_all_reduce(partial: Tensor, codec: Codec, transport: Transport, chunk: int) -> Tensor:
    """`partial` (any shape, floating point) added over all ranks, same shape and dtype. chunk: values, at most. Collective."""
    slices = codec.group * transport.world_size
    chunks = partial.flatten().split(max(1, chunk // slices) * slices)
    exchanges = [transport.all_to_all(codec.encode(_to_groups(part, slices, codec.group))) for part in chunks]
    gathers = [transport.all_gather(codec.encode_sum(_sum(exchange(), codec, transport))) for exchange in exchanges]
    totals = [codec.decode(gather()).flatten()[: len(part)] for gather, part in zip(gathers, chunks, strict=True)]
    return (torch.cat(totals) if len(totals) > 1 else totals[0]).to(partial.dtype).view(partial.shape)


def _sum(received: Tensor, codec: Codec, transport: Transport) -> Tensor:
    return codec.sum(received.unflatten(0, (transport.world_size, -1)))


def _to_groups(flat: Tensor, slices: int, group: int) -> Tensor:
    """(M,) to (G, group), G a multiple of the world size. Padded with the last value, which extends no group's range."""
    padding = -len(flat) % slices
    if padding:
        flat = torch.cat((flat, flat[-1:].expand(padding)))
    return flat.view(-1, group)


# --- communicators ---------------------------------------------------------------------------------------------------------


def quantized_all_reduce(partial: Tensor, scheme: Scheme, group: dist.ProcessGroup | None, chunk: int = CHUNK) -> Tensor:
    """`partial` (any shape, floating point) added over all ranks, same shape and dtype. Collective. The host waits for the
    other ranks with gloo, the current stream with NCCL."""
    return two_step_all_reduce(partial, codec_of(scheme, partial), ProcessGroupTransport(group), chunk)


class QuantizedCommunicator(ProcessGroupCommunicator):
    """The base of the two classes below. Only all-reduces are quantized: `all_gather`, which gathers logits, is exact."""

    def __init__(self, scheme: Scheme) -> None:
        """Collective. The all-reduces use their own process group: they overlap with the caller's collectives, and the order of
        collectives in a group must be the same on all ranks."""
        super().__init__()
        self.scheme, self.name = scheme, scheme.name
        self.own_group = dist.new_group()

    def check_width(self, width: int) -> None:
        if self.scheme.group is None and width % 4:
            why = f"the {width} values of a token are no multiple of 4, so they cannot be one group"
            raise UserError(f"--comm {self.name}: {why}; use {self.name.replace(PER_TOKEN, '64')}")


class QuantizedGlooCommunicator(QuantizedCommunicator):
    """CPU ranks. All-reduces run in a thread, because gloo runs only single collectives in the background: between the two
    collectives of an all-reduce, the thread waits for the first, adds, and starts the second while the caller computes."""

    waited = 0.0

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme)
        self.worker = Worker()

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        if not partial.numel():
            return Done(partial)
        return HostAllReduce(
            self, self.worker.submit(lambda: quantized_all_reduce(partial, self.scheme, self.own_group)).result
        )


class Worker:
    """A thread that makes calls in the order in which they are submitted. It ends when the Worker is garbage-collected.

    Unlike an executor's threads it is a daemon: a process that ends with an error must not wait for an all-reduce that the
    other ranks may never complete.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Future[Tensor], Callable[[], Tensor]] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self.calls,), daemon=True, name="quantized all-reduces").start()
        weakref.finalize(self, self.calls.put, None)

    def submit(self, call: Callable[[], Tensor]) -> "Future[Tensor]":
        """A future of the call's result, or of the exception that it raises."""
        future: Future[Tensor] = Future()
        self.calls.put((future, call))
        return future


@torch.no_grad()
def _serve(calls: "SimpleQueue[tuple[Future[Tensor], Callable[[], Tensor]] | None]") -> None:
    while (item := calls.get()) is not None:
        future, call = item
        try:
            future.set_result(call())
        except Exception as e:
            future.set_exception(e)
        del item, future, call  # hold no tensors while idle


class QuantizedNcclCommunicator(QuantizedCommunicator):
    """GPU ranks. Quantization and both exchanges are queued on a side stream at once."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme)
        self.stream = torch.cuda.Stream(priority=-1)

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        if not partial.numel():
            return Done(partial)
        return on_side_stream(
            self.stream, partial, lambda: quantized_all_reduce(partial, self.scheme, self.own_group, NCCL_CHUNK)
        )
