"""Quantized two-step all-reduce (Li et al., "Flash Communication", arXiv:2412.04964, Algorithm 1) over a process group. The
steps are those of `comm/two_step.py`."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from comm.interface import Done, PendingAllReduce, on_side_stream
from comm.process_group import HostAllReduce, ProcessGroupCommunicator
from comm.quantize import PER_TOKEN, Scheme
from comm.two_step import ProcessGroupTransport, codec_of, two_step_all_reduce
from errors import UserError

CHUNK = 1 << 20  # values of a chunk, at most
NCCL_CHUNK = 1 << 24  # larger, because each NCCL collective costs tens of µs


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
