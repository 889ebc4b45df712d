"""All-reduces in two exchanges: each rank sums one slice of the message, then all gather the sums.

The message is cut into chunks, and each chunk into N slices of whole groups of values, one a rank:

    encode -> all-to-all -> decode, sum my slice in fp32 -> encode -> all-gather -> decode

Every rank decodes the same gathered bytes, so all of them get bitwise the same sum. All chunks are sent before the first one is
summed, so one chunk's arithmetic runs while the next one's bytes travel.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from comm.process_group import all_gather
from comm.quantize import Scheme, dequantize_sum, quantize, rotate

EXACT_GROUP = 64  # values: bytes that copy engines like


@dataclass(frozen=True)
class Coding:
    """How the values of a message travel, in groups of `group`, each at most `size` bytes.

    send: (G, group) values to (G, bytes) uint8. sum: (N, G, bytes) of N ranks to (G, group) fp32. send_sum: that to (G, bytes).
    receive: (G, bytes) to (G, group).
    """

    group: int
    size: int
    send: Callable[[Tensor], Tensor]
    sum: Callable[[Tensor], Tensor]
    send_sum: Callable[[Tensor], Tensor]
    receive: Callable[[Tensor], Tensor]


def quantized(scheme: Scheme, partial: Tensor) -> Coding:
    """As the scheme says for this message."""

    def turn(x: Tensor) -> Tensor:
        return rotate(x.float()) if scheme.hadamard else x

    group = scheme.group_of(partial)
    return Coding(
        group=group,
        size=max(width.record_bytes(group) for width in (scheme.reduce, scheme.gather)),
        send=lambda x: quantize(turn(x), scheme.reduce),
        sum=lambda records: dequantize_sum(records, scheme.reduce),
        send_sum=lambda total: quantize(total, scheme.gather),
        receive=lambda records: turn(dequantize_sum(records[None], scheme.gather)),
    )


def exact(dtype: torch.dtype) -> Coding:
    """Values as they are; a sum is rounded once, from fp32."""
    return Coding(
        group=EXACT_GROUP,
        size=EXACT_GROUP * dtype.itemsize,
        send=lambda x: x.view(torch.uint8),
        sum=lambda parts: _sum_in_order(parts.view(dtype)),
        send_sum=lambda total: total.to(dtype).view(torch.uint8),
        receive=lambda parts: parts.view(dtype),
    )


def _sum_in_order(parts: Tensor) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


class Transport(ABC):
    """How bytes get to other ranks. Both exchanges start at once; the call that they return gives what arrives, once the current
    stream, or the host under gloo, has waited for it."""

    world_size: int

    @abstractmethod
    def all_to_all(self, sent: Tensor) -> Callable[[], Tensor]:
        """The n-th of N parts of `sent` (G, bytes) to rank n; (G, bytes) of all ranks' parts for this one."""

    @abstractmethod
    def all_gather(self, sent: Tensor) -> Callable[[], Tensor]:
        """(G, bytes) to all ranks; (N * G, bytes)."""


class ProcessGroupTransport(Transport):
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


def two_steps(partial: Tensor, coding: Coding, transport: Transport, chunk: int) -> Tensor:
    """The sum of all ranks' `partial` (any shape, floating point), same shape and dtype. chunk: values, at most. Collective."""
    slices = coding.group * transport.world_size
    chunks = partial.flatten().split(max(1, chunk // slices) * slices)
    exchanges = [transport.all_to_all(coding.send(_to_groups(part, slices, coding.group))) for part in chunks]
    gathers = [transport.all_gather(coding.send_sum(_sum(exchange(), coding, transport))) for exchange in exchanges]
    totals = [coding.receive(gather()).flatten()[: len(part)] for gather, part in zip(gathers, chunks, strict=True)]
    return (torch.cat(totals) if len(totals) > 1 else totals[0]).to(partial.dtype).view(partial.shape)


def _sum(received: Tensor, coding: Coding, transport: Transport) -> Tensor:
    return coding.sum(received.unflatten(0, (transport.world_size, -1)))


def _to_groups(flat: Tensor, slices: int, group: int) -> Tensor:
    """(M,) to (G, group), G a multiple of the world size. The last value fills up: it widens no group's range."""
    missing = -len(flat) % slices
    if missing:
        flat = torch.cat((flat, flat[-1:].expand(missing)))
    return flat.view(-1, group)
