"""Quantized two-step all-reduce (Li et al., "Flash Communication", arXiv:2412.04964, Algorithm 1) over a process group.

The message of M values is cut into chunks, and each chunk into N slices of whole groups, one a rank:

    quantize -> all-to-all -> dequantize, sum my slice in fp32 -> quantize -> all-gather -> dequantize

Every rank dequantizes the same gathered bytes, so all of them get bitwise the same sum. All chunks are sent before the first
one is summed, so one chunk's arithmetic runs while the next one's bytes travel.
"""

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from comm.interface import Beside, Done, Handle
from comm.process_group import _all_gather, _ProcessGroupCommunicator
from comm.quantize import Scheme, dequantize_sum, quantize, rotate

CHUNK = 1 << 20  # values of a chunk, at most


def two_step_sum(partial: Tensor, scheme: Scheme, group: dist.ProcessGroup | None, chunk: int = CHUNK) -> Tensor:
    """The sum of all ranks' `partial` (any shape, floating point), same shape and dtype. Collective; it waits for the ranks:
    the host under gloo, the current stream under NCCL."""
    world_size, size = dist.get_world_size(group), scheme.group_of(partial)
    slices = size * world_size
    chunks = partial.flatten().split(max(1, chunk // slices) * slices)
    exchanges = [_exchange(_to_groups(part, size, world_size, scheme), scheme, group) for part in chunks]
    gathers = [_gather(exchange(), scheme, group) for exchange in exchanges]
    totals = [_from_groups(gather(), scheme)[: len(part)] for gather, part in zip(gathers, chunks, strict=True)]
    return torch.cat(totals).to(partial.dtype).view(partial.shape)


def _exchange(groups: Tensor, scheme: Scheme, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """Send each rank its slice of `groups` (G, size); the call that is returned gives the sum of mine, (G / N, size) fp32."""
    sent = quantize(groups, scheme.reduce)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return dequantize_sum(received.unflatten(0, (dist.get_world_size(group), -1)), scheme.reduce)

    return wait


def _gather(total: Tensor, scheme: Scheme, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """Send my slice's sum to all ranks; the call that is returned gives everyone's, (G, size) fp32."""
    sent = quantize(total, scheme.gather)
    received = sent.new_empty(dist.get_world_size(group) * sent.shape[0], sent.shape[1])
    work = _all_gather(received, sent, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return dequantize_sum(received[None], scheme.gather)

    return wait


def _to_groups(flat: Tensor, size: int, world_size: int, scheme: Scheme) -> Tensor:
    """(M,) to (G, size), G a multiple of the world size. The last value fills up: it widens no group's range."""
    missing = -len(flat) % (size * world_size)
    if missing:
        flat = torch.cat((flat, flat[-1:].expand(missing)))
    groups = flat.view(-1, size)
    return rotate(groups.float()) if scheme.hadamard else groups


def _from_groups(groups: Tensor, scheme: Scheme) -> Tensor:
    return (rotate(groups) if scheme.hadamard else groups).flatten()


class QuantizedCommunicator(_ProcessGroupCommunicator):
    """What the two below share. Only sums are quantized: `all_gather`, which brings logits together, is exact."""

    def __init__(self, scheme: Scheme, group: dist.ProcessGroup | None = None) -> None:
        """All ranks of `group` must construct it together, since its sums get a process group of their own: they run beside
        whatever the caller sends over `group` meanwhile, and the order of collectives must not differ between ranks."""
        super().__init__(group)
        self.scheme, self.name = scheme, scheme.name
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.sums = dist.new_group(ranks, use_local_synchronization=True)


class QuantizedGlooCommunicator(QuantizedCommunicator):
    """CPU ranks. The two exchanges of a sum run in a thread of the communicator's: gloo can start a collective and go on, but
    what lies between the two needs someone to wait for the first, sum, and start the second while the caller computes."""

    waited: float = 0.0

    def __init__(self, scheme: Scheme, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(scheme, group)
        self.worker = Worker()

    def start(self, partial: Tensor) -> Handle:
        if not partial.numel():
            return Done(partial)
        return _FutureSum(self, self.worker.submit(lambda: two_step_sum(partial, self.scheme, self.sums)))


class _FutureSum(Handle):
    """A sum in the worker's hands; `wait` adds its time to the communicator's `waited`."""

    def __init__(self, communicator: QuantizedGlooCommunicator, total: "Future[Tensor]") -> None:
        self.communicator, self.total = communicator, total

    def wait(self) -> Tensor:
        start = time.perf_counter()
        try:
            return self.total.result()
        finally:
            self.communicator.waited += time.perf_counter() - start


class Worker:
    """One thread that makes calls in the order in which they are submitted, and ends when nobody can submit any more.

    A daemon, unlike the threads of an executor: a process that ends on an error does not wait for a sum that the other ranks
    may never complete.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Future[Tensor], Callable[[], Tensor]] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self.calls,), daemon=True, name="quantized sums").start()
        weakref.finalize(self, self.calls.put, None)

    def submit(self, call: Callable[[], Tensor]) -> "Future[Tensor]":
        """The result to come, or the exception that the call raises."""
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
    """GPU ranks. Quantization and both exchanges are queued on a side stream, so they go on while the current stream computes;
    `wait` makes the current stream wait for them and does not block the host."""

    def __init__(self, scheme: Scheme, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(scheme, group)
        self.stream = torch.cuda.Stream(priority=-1)

    def start(self, partial: Tensor) -> Handle:
        if not partial.numel():
            return Done(partial)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            partial.record_stream(self.stream)
            total = two_step_sum(partial, self.scheme, self.sums)
            return _StreamSum(self.stream.record_event(), total)


class _StreamSum(Beside):
    def __init__(self, done: torch.cuda.Event, total: Tensor) -> None:
        self.done, self.total = done, total

    def arrive(self) -> Tensor:
        stream = torch.cuda.current_stream()
        stream.wait_event(self.done)
        self.total.record_stream(stream)
        return self.total
