"""The communicator interface that the model uses, its all-reduces in flight, the faults of kernels that wait for another rank, and the
two communicators that send nothing."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import rejoin
from kernels.linear_quantized import Packed
from kernels.norm import add_rms_norm, add_rms_norm_codes
from kernels.row_codes import RowCodes

# How an all-reduce is computed that another module may hide:
# overlapped: on a side stream while the next module computes; few-sms: the same, by a kernel that leaves almost all SMs to
# that module; deferred: not hidden, but when its result is read, and so in one kernel with what follows; copy-engines: as
# overlapped, with messages of LEAST_COPIED bytes or more sent by copy engines.
Schedule = Literal["overlapped", "few-sms", "deferred", "copy-engines"]
LEAST_COPIED = 8 << 20  # shorter ones take less time than the launches of the copies
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

Input = Any  # of a layer: a Tensor, or `RowCodes` (`kernels/row_codes.py`) where the layer reads them


class Norm(Protocol):
    """An RMSNorm layer."""

    eps: float

    @property
    def scale(self) -> Tensor:
        """(C,): what the normed values are multiplied by."""
        ...

    def __call__(self, x: Tensor, /) -> Tensor: ...


class Layer(Protocol):
    """A layer of a normed stream that communicators call."""

    @property
    def only_called(self) -> bool:
        """Whether the layer can only be called, because it is quantized and has no `weight`, or because it has adapters or experts."""
        ...

    @property
    def multiplied(self) -> Tensor | Packed | None:
        """The weight, also a quantized one, of a layer that is finish(x @ weight.T + whole_bias()); None if it has several or
        adapters, or if no kernel reads it."""
        ...

    def reads_codes(self, like: Tensor, /) -> bool:
        """Whether an input with the rows (..., any) and the data type of `like` may be `RowCodes`."""
        ...

    def __call__(self, x: Input, /) -> Any:
        """For a layer that is not `only_called`, finish(x @ weight.T + whole_bias()). A gated layer returns what the next layer
        reads."""
        ...


class Linear(Layer, Protocol):
    """A linear layer, which a communicator may fuse with an all-reduce: see `layers.linear.ShardedLinear`."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def out_features(self) -> int: ...

    def whole_bias(self) -> Tensor | None: ...

    def finish(self, out: Tensor) -> Any:
        """Apply what follows the matrix product: SwiGLU in a gated layer, else nothing."""
        ...


# --- all-reduces whose result is read later -------------------------------------------------------------------------------


class PendingAllReduce(ABC):
    """An all-reduce that has begun, or that begins when its result is read. Read it once, by `wait` or a method that adds.

    scatters: whether `add_norm_linear` leaves each rank only its own rows (R, C) of the residual stream. If so, `add` and
    `add_norm_linear` also take these rows as x.
    """

    scatters = False

    @abstractmethod
    def wait(self) -> Tensor:
        """The sum over all ranks, with the partial sum's shape and dtype. On CUDA only the current stream waits, not the
        host."""

    def add(self, x: Tensor) -> Tensor:
        """x + sum, all rows on every rank."""
        return x + self.wait()

    def add_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + sum, rms_norm(x + sum) * weight), all rows on every rank. Some communicators compute it in the all-reduce's
        kernel."""
        return add_rms_norm(x, self.wait(), weight, eps)

    def add_norm_codes(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, RowCodes]:
        """`add_norm` in 8 bits."""
        return add_rms_norm_codes(x, self.wait(), weight, eps)

    def add_norm_linear(self, x: Tensor, norm: Norm, layer: Linear) -> tuple[Tensor, Any]:
        """(x + sum, layer(norm(x + sum))). The second has all rows on every rank."""
        add_norm = self.add_norm_codes if layer.reads_codes(x) else self.add_norm
        total, normed = add_norm(x, norm.scale, norm.eps)
        self.release()  # before the layer allocates its result
        return total, layer(normed)

    def begun(self) -> "PendingAllReduce":
        """This all-reduce, after it has begun. To be called before the first of the methods above; `scatters` is known then."""
        return self

    def release(self) -> None:
        """After the result has been read: drop all tensors, because callers may hold this object for much longer. Only in
        inference mode, since a layer that is computed again for a backward pass reads its result again."""
        if torch.is_inference_mode_enabled():
            vars(self).clear()


class Done(PendingAllReduce):
    """An all-reduce that has finished."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def wait(self) -> Tensor:
        return self.total


class DeferredAllReduce(PendingAllReduce):
    """The all-reduce of layer(x), or of x without a layer. Both begin when the result is read."""

    def __init__(self, comm: "Communicator", x: Input, layer: Linear | None) -> None:
        self.comm, self.x, self.layer = comm, x, layer

    def begun(self) -> PendingAllReduce:
        comm, x, layer = self.comm, self.x, self.layer
        self.release()
        return comm.begin_all_reduce(x) if layer is None else comm.begin_linear_all_reduce(x, layer)

    def wait(self) -> Tensor:
        return self.begun().wait()


class SelectedRows(PendingAllReduce):
    """The W wanted rows `index` (W,) of another all-reduce's sum (B, T, C): (B, W, C)."""

    def __init__(self, whole: PendingAllReduce, index: Tensor) -> None:
        self.whole, self.index = whole, index

    def wait(self) -> Tensor:
        whole = self.whole.begun()
        rows = whole.wait()[:, self.index]
        whole.release()
        return rows


class Normed(PendingAllReduce):
    """A norm of another all-reduce's sum."""

    def __init__(self, whole: PendingAllReduce, norm: Norm) -> None:
        self.whole, self.norm = whole, norm

    def wait(self) -> Tensor:
        whole = self.whole.begun()
        normed = self.norm(whole.wait())
        whole.release()
        return normed


class OverlappedAllReduce(PendingAllReduce):
    """An all-reduce on another CUDA stream. join: makes the current stream wait for the result, and returns it."""

    def __init__(self, join: Callable[[], Tensor]) -> None:
        self.join = join

    def wait(self) -> Tensor:
        total = self.join()
        rejoin(total)
        return total

    def add_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, self.join(), weight, eps, early=False)

    def add_norm_codes(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, RowCodes]:
        return add_rms_norm_codes(x, self.join(), weight, eps, early=False)


def on_side_stream(stream: torch.cuda.Stream | None, partial: Tensor, all_reduce: Callable[[], Tensor]) -> PendingAllReduce:
    """Run `all_reduce`, which reads `partial`, on `stream`, while the current stream goes on. stream None (CPU): run it now.

    Tensors allocated on `stream` need no `record_stream`, which would prevent the reuse of memory in a graph capture. `stream`
    can reuse their memory only in a later all-reduce. Before that, it waits for all work queued on the current stream, which
    includes the kernels that read this result.
    """
    if stream is None:
        return Done(all_reduce())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        total = all_reduce()
        done = stream.record_event()

    def join(held: Tensor = partial) -> Tensor:  # so that the current stream cannot reuse its memory too early
        torch.cuda.current_stream().wait_event(done)
        return total

    return OverlappedAllReduce(join)


# --- waits that give up -------------------------------------------------------------------------------------------------

# of each device whose kernels wait: the word that they set when they give up, after which sums are wrong
_words: dict[torch.device, Tensor] = {}


def fault_word(device: torch.device) -> Tensor:
    """(1,) int32, the same for all kernels of a device: 0, or the code of a wait that gave up."""
    device = torch.empty(0, device=device).device  # with its index
    if device not in _words:
        with torch.inference_mode(False):  # `check_faults` may write it outside of that mode
            _words[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return _words[device]


def raise_fault(word: Tensor) -> None:
    """Raise RuntimeError if a `fault_word`, or a copy of it, has a code."""
    if code := int(word):
        raise RuntimeError(
            f"rank {dist.get_rank()} timed out waiting for another rank's part of an all-reduce (fault code {code})"
        )


def check_faults() -> None:
    """Raise RuntimeError if a wait has given up since the last call. Waits for the devices."""
    for device, word in _words.items():
        if word.is_cuda:
            torch.cuda.synchronize(device)
        found = word.cpu().clone()
        word.zero_()
        raise_fault(found)


# --- communicators --------------------------------------------------------------------------------------------------------


class Communicator(ABC):
    """All-reduces and all-gathers over the ranks of one tensor-parallel group.

    All ranks call the same methods in the same order, and all of them get bitwise the same results, so that every rank
    samples the same token.
    """

    name: str
    rank: int
    world_size: int
    waited: float | None = None  # seconds for which this host has waited for other ranks; None if only the device waits
    schedule: Schedule = "overlapped"  # of the all-reduces that another module may hide; set by `use`

    def use(self, schedule: Schedule) -> None:
        """Compute all-reduces by this schedule from now on. Collective, because it may open buffers."""
        self.schedule = schedule

    @abstractmethod
    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        """Add `partial` (any shape, floating point) over all ranks. The communicator may overwrite `partial`.

        overlap: begin now, on a side stream, because the caller computes something before it reads the result. Otherwise the
        all-reduce may begin when the result is read, on the current stream and in one kernel with what follows.
        """

    def begin_linear_all_reduce(self, x: Input, layer: Linear, overlap: bool = False) -> PendingAllReduce:
        """As `begin_all_reduce` of layer(x), x (..., K). Some communicators fuse the layer with its all-reduce."""
        return self.begin_all_reduce(layer(x), overlap)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """`partial` added over all ranks."""
        return self.begin_all_reduce(partial).wait()

    @abstractmethod
    def all_gather(self, shard: Tensor) -> Tensor:
        """The ranks' `shard`s (..., n), concatenated along the last dim in rank order: (..., n * world_size)."""

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The ranks' rows (R, C), in rank order: (R * world_size, C). For communicators whose all-reduces scatter rows."""
        raise NotImplementedError(f"{self.name} leaves all rows on every rank")

    def decide(self) -> None:  # noqa: B027
        """Choose the fastest algorithms for the shapes of the step that ends. Every rank must have the whole residual stream.
        Collective."""

    def check_width(self, width: int) -> None:
        """Raises UserError if it cannot add up rows of so many values, a model's hidden size."""
        return

    def check(self) -> None:
        """Raise RuntimeError if an all-reduce failed, because a kernel timed out waiting for another rank. Waits for the
        device."""
        check_faults()


class Local(Communicator):
    """One rank: its partial sums are complete."""

    name, rank, world_size, waited = "local", 0, 1, 0.0

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        return Done(partial)

    def all_gather(self, shard: Tensor) -> Tensor:
        return shard


class NoCommunication(Communicator):
    """The `upper-bound` variant: every rank continues with its own partial sums, so the text is wrong on more than one rank.

    An all-gather returns this rank's shard at its position, padded with the lowest value, so that a sampled token is a valid id.
    """

    name = "none"

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        return Done(partial)

    def all_gather(self, shard: Tensor) -> Tensor:
        n = shard.shape[-1]
        around = (self.rank * n, (self.world_size - 1 - self.rank) * n)
        least = -torch.inf if shard.is_floating_point() else torch.iinfo(shard.dtype).min
        return F.pad(shard, around, value=least)
