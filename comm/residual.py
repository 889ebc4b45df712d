"""The residual stream as a block sees it: read it through a norm, add a module's output. Which all-reduces are in flight, on which
stream, fused with which GEMM, and which rows of the stream this rank has, is decided here and by the communicator."""

from typing import NamedTuple, Protocol

from torch import Tensor

from comm.interface import Communicator, Handle, Product, Scattered


class Norm(Protocol):
    """An RMSNorm layer."""

    eps: float

    @property
    def weight(self) -> Tensor: ...

    def __call__(self, x: Tensor, /) -> Tensor: ...


class Linear(Protocol):
    """A linear layer, as a communicator may fuse it with an all-reduce: see `tp.ShardedLinear`."""

    @property
    def weight(self) -> Tensor: ...

    def __call__(self, x: Tensor, /) -> Tensor:
        """finish(x @ weight.T + whole_bias())."""
        ...

    def whole_bias(self) -> Tensor | None: ...

    def finish(self, out: Tensor) -> Tensor:
        """What follows the product: SwiGLU in a gated layer, else nothing."""
        ...


class Residual(NamedTuple):
    """The stream is `x` plus the results of all-reduces in flight. An immutable value: each method returns a new stream, so a layer's
    forward can be computed again from its inputs, and PyTorch finds the tensors in it (pytree).

    x: (B, T, C); while `rows` is set, the rows of it that this rank owns. sums: in flight, oldest first.
    """

    x: Tensor
    comm: Communicator
    sums: tuple[Handle, ...] = ()
    rows: Scattered | None = None

    def read(self, norm: Norm, layer: Linear, lag: int = 0) -> tuple["Residual", Tensor]:
        """(the stream, layer(norm(stream))), where all sums but the newest `lag` have been added to the stream."""
        ready = max(0, len(self.sums) - lag)
        stream = self._whole() if lag else self
        for total in self.sums[: ready - 1] if ready else ():
            stream = stream._add(total)
        if ready:
            stream, normed = stream._add_norm(self.sums[ready - 1], norm, whole=lag > 0)
        else:
            normed = norm(stream.x)
        stream = stream._replace(sums=self.sums[ready:])
        if isinstance(normed, Scattered):
            return stream, layer.finish(normed.linear(layer.weight, layer.whole_bias()))
        return stream, layer(normed)

    def add(self, x: Tensor, layer: Linear | None = None, lag: int = 0) -> "Residual":
        """The stream plus the all-reduce of layer(x), a partial sum (B, T, C), or of `x` itself without a layer.

        lag: of the reads that follow. With 0 the next read needs the sum, so it begins only then, and may be computed together with
        the layer, the residual addition and the norm. Otherwise it begins now, on a side stream.
        """
        if layer is None:
            return self._append(self.comm.start(x) if lag else self.comm.defer(x))
        if lag:
            return self._append(self.comm.start(layer(x)))
        if layer.whole_bias() is None and self.comm.takes_product(x, layer.weight):
            return self._append(self.comm.defer(Product(x, layer.weight)))
        return self._append(self.comm.defer(layer(x)))

    def finish(self) -> Tensor:
        """The whole stream (B, T, C), once all sums have been added."""
        stream = self
        for total in self.sums:
            stream = stream._add(total)
        return stream._whole().x

    # --- private: rows and sums ---------------------------------------------------------------------------------------------

    def _append(self, total: Handle) -> "Residual":
        return self._replace(sums=(*self.sums, total))

    def _whole(self) -> "Residual":
        """All rows of x on every rank."""
        return self if self.rows is None else self._replace(x=self.rows.whole(self.x), rows=None)

    def _add(self, total: Handle) -> "Residual":
        stream = self if total.takes_rows else self._whole()
        return stream._replace(x=total.settle(stream.x), rows=None)

    def _add_norm(self, total: Handle, norm: Norm, whole: bool) -> tuple["Residual", Tensor | Scattered]:
        """(stream plus sum, its norm). whole: both on every rank; else perhaps this rank's rows of both."""
        if whole and total.takes_rows:
            stream = self._add(total)
            return stream, norm(stream.x)
        stream = self if total.takes_rows else self._whole()
        x, normed = total.add_norm(stream.x, norm.weight, norm.eps)
        return stream._replace(x=x, rows=normed if isinstance(normed, Scattered) else None), normed
