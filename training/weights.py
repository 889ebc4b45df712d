"""Parameters whose states are sharded together: one matrix, or all norms and biases in one buffer.

`shard` is the part that a rank keeps. `full` is the whole buffer; its storage is freed while no computation needs it. The
model's parameters are views of `full`, so they have their values again as soon as it is gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comms.process_group import all_gather
from training.groups import Groups

# torch 2.13 renamed this function and warns about the old name; torch 2.11 has only the old name
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(eq=False)
class Weight:
    """`parameters`, flattened one after the other and padded so that every part has the same size.

    Each P part is a `shard` of `chunk` elements. A rank's optimizer states cover the slice `owned` of its shard, possibly
    empty.
    """

    names: Sequence[str]
    parameters: Sequence[nn.Parameter]
    groups: Groups
    cuts: int  # parts into which optimizer sharding cuts a shard; 1 if the shard has one owner
    owner: int = 0  # if the shard has one owner: its part number
    shard: Tensor = field(init=False)
    full: Tensor = field(init=False)
    gathering: dist.Work | None = field(default=None, init=False)
    updating: list[dist.Work] = field(default_factory=list, init=False)  # transfers of new values in flight

    def __post_init__(self) -> None:
        first = self.parameters[0]
        self.numel = sum(p.numel() for p in self.parameters)
        self.shapes = [p.shape for p in self.parameters]
        self.parts = self.groups.gather.size
        self.chunk = -(-self.numel // (self.parts * self.cuts)) * self.cuts
        self.full = torch.zeros(self.parts * self.chunk, dtype=first.dtype, device=first.device)
        flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.full[: self.numel] = flat
        self.shard = self.full
        if self.parts > 1:
            self.shard = self.full[self.start : self.start + self.chunk].clone()
        offset = 0
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            parameter.data = self.full[offset : offset + shape.numel()].view(shape)
            offset += shape.numel()
        self.release()

    # --- parts ---------------------------------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        """The index in `full` at which this rank's shard begins."""
        return self.groups.gather.index * self.chunk

    def part(self, index: int) -> slice:
        """The elements of the shard that part `index` of the optimizer states covers."""
        if self.cuts == 1:
            return slice(0, self.chunk) if index == self.owner else slice(0, 0)
        size = self.chunk // self.cuts
        return slice(index * size, (index + 1) * size)

    @property
    def owned(self) -> slice:
        return self.part(self.groups.part)

    @property
    def kept(self) -> slice:
        """The elements of the shard whose gradients this rank accumulates: those of all optimizer parts in its part of G."""
        inner = self.groups.parts[1]
        parts = range(self.groups.coordinates.gradients * inner, (self.groups.coordinates.gradients + 1) * inner)
        slices = [s for s in map(self.part, parts) if s.stop > s.start]
        return slice(slices[0].start, slices[-1].stop) if slices else slice(0, 0)

    @property
    def evenly_owned(self) -> bool:
        """Whether the ranks that hold this shard own equal parts of it, in the order of the ranks."""
        return self.cuts == self.groups.replicas.size and self.groups.in_order

    def pieces(self) -> list[tuple[str, int, int, slice]]:
        """The elements that this rank owns, by parameter: name, start and stop in the flattened parameter, and their
        slice of `owned`."""
        found, offset = [], 0
        low = self.start + self.owned.start
        high = min(self.start + self.owned.stop, self.numel)
        for name, shape in zip(self.names, self.shapes, strict=True):
            first, last = max(low, offset), min(high, offset + shape.numel())
            if first < last:
                found.append((name, first - offset, last - offset, slice(first - low, last - low)))
            offset += shape.numel()
        return found

    # --- all-gather of the parameters -----------------------------------------------------------------------------------

    def gather(self) -> None:
        """Begin to all-gather `full`, unless that is done or in flight."""
        if self.parts == 1 or self.gathering is not None or self.full.untyped_storage().size():
            return
        self.arrive()
        self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
        self.gathering = all_gather(self.full, self.shard, group=self.groups.gather.handle, async_op=True)

    def wait(self) -> None:
        """Wait until `full` is gathered and the new values have been received."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
        self.arrive()

    def release(self) -> None:
        """Free the storage of `full`. The parameters keep their shapes, and get their values back with the next gather."""
        if self.parts > 1:
            self.full.untyped_storage().resize_(0)

    # --- gradients and new values ----------------------------------------------------------------------------------------

    def flatten(self, gradients: Sequence[Tensor]) -> Tensor:
        """The parameters' gradients as one flat tensor with padding, (parts * chunk,)."""
        padding = self.parts * self.chunk - self.numel
        if len(gradients) == 1 and not padding:
            return gradients[0].reshape(-1)
        flat = [g.reshape(-1) for g in gradients]
        return torch.cat([*flat, flat[0].new_zeros(padding)])

    def scatter(self, flat: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Begin to reduce-scatter `flat` over the ranks of a P block. Returns this rank's shard, (chunk,), valid once the
        work is done. If P is not sharded: `flat` itself, and None."""
        if self.parts == 1:
            return flat, None
        shard = flat.new_empty(self.chunk)
        return shard, reduce_scatter(shard, flat, group=self.groups.scatter.handle, async_op=True)

    def spread(self) -> None:
        """Begin to send this rank's new values to the ranks that share its shard, and to receive theirs."""
        group = self.groups.optimizer
        if group.size == 1:
            return
        if self.cuts == 1:
            source = self.groups.owners[self.owner]
            work = dist.broadcast(self.shard, source, group=group.handle, async_op=True)
        elif self.groups.in_order:
            work = all_gather(self.shard, self.shard[self.owned].clone(), group=group.handle, async_op=True)
        else:
            by_rank = {rank: part for part, rank in self.groups.owners.items()}
            views = [self.shard[self.part(by_rank[rank])] for rank in group.ranks]
            work = dist.all_gather(views, views[group.index].clone(), group=group.handle, async_op=True)
        assert work is not None
        self.updating.append(work)

    def arrive(self) -> None:
        """Wait for new values in flight."""
        for work in self.updating:
            work.wait()
        self.updating.clear()


def balance(sizes: Sequence[int], parts: tuple[int, int]) -> list[int]:
    """Choose an owner for each tensor (inter-tensor; AMSP, section IV.C.2). Returns a part number below g * o for each tensor.

    The largest tensor comes first, and each goes to the part with the fewest elements so far. `parts` = (g, o): the g
    parts of G are balanced first, then the o optimizer parts inside each of them, so that a rank never owns the optimizer
    states of a gradient that it does not keep.
    """
    outer, inner = [0] * parts[0], [[0] * parts[1] for _ in range(parts[0])]
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        g = min(range(parts[0]), key=outer.__getitem__)
        o = min(range(parts[1]), key=inner[g].__getitem__)
        outer[g] += sizes[i]
        inner[g][o] += sizes[i]
        owners[i] = g * parts[1] + o
    return owners
