"""Quantized two-step all-reduce (Li et al., "Flash Communication", arXiv:2412.04964, Algorithm 1) over a process group: the two
steps of `comm/two_step.py`, with records of quantized groups."""

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from comm.interface import Done, Handle, start_beside
from comm.process_group import _ProcessGroupCommunicator
from comm.quantize import Scheme
from comm.two_step import ProcessGroupTransport, quantized, two_steps

CHUNK = 1 << 20  # values of a chunk, at most
NCCL_CHUNK = 1 << 24  # each collective of NCCL's costs tens of µs


def two_step_sum(partial: Tensor, scheme: Scheme, group: dist.ProcessGroup | None, chunk: int = CHUNK) -> Tensor:
    """The sum of all ranks' `partial` (any shape, floating point), same shape and dtype. Collective; it waits for the ranks:
    the host under gloo, the current stream under NCCL."""
    return two_steps(partial, quantized(scheme, partial), ProcessGroupTransport(group), chunk)


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
        return start_beside(self.stream, partial, lambda: two_step_sum(partial, self.scheme, self.sums, NCCL_CHUNK))
