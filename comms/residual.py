"""The residual stream: blocks read it through a norm and a layer, and add a module's output to it. This file decides which
all-reduces are in flight and overlapped, by the communicator's schedule. The communicator decides whether they are fused with the
layers before and after."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from comms.interface import Communicator, DeferredAllReduce, Input, Layer, Linear, Norm, Normed, PendingAllReduce, SelectedRows


class Residual(NamedTuple):
    """The stream is `x` plus the results of the pending all-reduces. An immutable value: each method returns a new stream, so a
    layer's forward can be computed again from its inputs, and PyTorch finds the tensors in it (pytree).

    x: (B, T, C), or only this rank's rows (R, C) of it. pending: oldest first. scattered: (B, T, C) if x has only this
    rank's rows.
    """

    x: Tensor
    comm: Communicator
    pending: tuple[PendingAllReduce, ...] = ()
    scattered: torch.Size | None = None

    def read(self, norm: Norm | None, layer: Layer, lag: int = 0) -> tuple["Residual", Any]:
        """(the stream, layer(norm(stream))), after all pending all-reduces except the newest `lag` have been added to the
        stream. Without a norm, layer(stream)."""
        ready = max(0, len(self.pending) - lag)
        stream = self._replace(pending=self.pending[ready:])
        for pending in self.pending[: max(0, ready - 1) if norm else ready]:
            stream = stream._added(pending)
        if norm is None or not ready:
            stream = stream._gathered()
            return stream, layer(norm(stream.x) if norm else stream.x)
        last = self.pending[ready - 1].begun()
        stream = stream if last.scatters else stream._gathered()
        scattered = (stream.scattered or stream.x.shape) if last.scatters else None
        x, out = last.add_norm_linear(stream.x, norm, cast(Linear, layer))  # which is called if it is none
        last.release()
        return stream._replace(x=x, scattered=scattered), out

    def add(self, x: Input, layer: Linear | None = None, lag: int = 0, norm: Norm | None = None) -> "Residual":
        """The stream plus the all-reduce of layer(x), a partial sum (B, T, C), or plus a norm of it. Without a layer, x is the
        partial sum.

        lag: that of the reads that follow. With 0 the next read needs the result, so the all-reduce may begin then,
        together with the addition, the norm and the layers around it. Otherwise it begins now, on a side stream, unless the
        communicator's schedule defers it to its own read.
        """
        pending: PendingAllReduce
        if lag and self.comm.schedule == "deferred":
            pending = DeferredAllReduce(self.comm, x, layer)
        elif layer is None:
            pending = self.comm.begin_all_reduce(x, overlap=lag > 0)
        else:
            pending = self.comm.begin_linear_all_reduce(x, layer, overlap=lag > 0)
        return self._replace(pending=(*self.pending, Normed(pending, norm) if norm else pending))

    def rows(self, index: Tensor) -> "Residual":
        """The stream of the W wanted tokens `index` (W,): (B, W, C). All-reduces that have begun still add all rows."""
        stream = self._gathered()
        return stream._replace(x=stream.x[:, index], pending=tuple(SelectedRows(one, index) for one in self.pending))

    def recorded(self) -> tuple["Residual", Callable[[], Tensor]]:
        """(the stream, a function that returns the whole stream of this point, (B, T, C)). The function is to be called when all
        all-reduces that are pending now have been read. No more is sent for it, unless the newest one scatters rows."""
        if not self.pending:
            return self, lambda: self.x
        newest, shape = _Recorded(self.pending[-1]), self.scattered or self.x.shape
        stream = self._replace(pending=(*self.pending[:-1], newest))
        return stream, lambda: newest.whole if newest.whole.shape == shape else self.comm.gather_rows(newest.whole).view(shape)

    def finish(self) -> Tensor:
        """The whole stream (B, T, C), after all pending all-reduces have been added. The end of a step."""
        stream = self
        for pending in self.pending:
            stream = stream._added(pending)
        x = stream._gathered().x
        self.comm.decide()
        return x

    def _gathered(self) -> "Residual":
        """All rows of x on every rank."""
        if self.scattered is None:
            return self
        return self._replace(x=self.comm.gather_rows(self.x).view(self.scattered), scattered=None)

    def _added(self, pending: PendingAllReduce) -> "Residual":
        """`pending` added to all rows of x."""
        pending = pending.begun()
        stream = self if pending.scatters else self._gathered()
        x = pending.add(stream.x)
        pending.release()
        return stream._replace(x=x, scattered=None)


class _Recorded(PendingAllReduce):
    """An all-reduce that keeps the stream to which it has been added. All-reduces are added in their order, so that is the stream
    with it and all before it, at whatever later point it is read."""

    whole: Tensor  # all rows of the stream, or this rank's

    def __init__(self, inner: PendingAllReduce) -> None:
        self.inner = inner

    def begun(self) -> PendingAllReduce:
        self.inner = self.inner.begun()
        self.scatters = self.inner.scatters
        return self

    def wait(self) -> Tensor:
        return self.inner.wait()

    def add(self, x: Tensor) -> Tensor:
        self.whole = self.inner.add(x)
        return self.whole

    def add_norm_linear(self, x: Tensor, norm: Norm, layer: Linear) -> tuple[Tensor, Tensor]:
        self.whole, out = self.inner.add_norm_linear(x, norm, layer)
        return self.whole, out

    def release(self) -> None:
        self.inner.release()
