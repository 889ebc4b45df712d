"""Gradients on their way from the backward pass to the ranks that own their optimizer states (AMSP, sections IV.C and V.C).

A shard of a gradient comes out of its reduce-scatter (or, where P is not sharded, straight out of backward). It joins a bucket;
a full bucket is summed over the ranks that hold the same P shard while backward goes on: over all of them after the last
micro-batch, over those of the G mesh after the ones before it. Of each sum a rank keeps its part and drops the rest. Where
every rank's part is an equal cut, the last sum is a reduce-scatter, and nothing comes that would be dropped.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from training.groups import Group
from training.waiting import Exposed
from training.weights import Weight, reduce_scatter

LAG = 2  # reduce-scatters that may be unfinished while backward goes on, before one is waited for


@dataclass
class Bucket:
    """What is being summed: `flat` is sent, `members` get the sums, of whole shards or, if `scattered`, of the owned parts."""

    members: list[tuple[Weight, Tensor]]
    flat: Tensor
    work: dist.Work | None
    scattered: bool = False


class Reducer:
    """`add` every gradient shard in the same order on all ranks, `finish` after each backward pass.

    After the pass that `last` announced, `gradients` holds for each weight the owned elements' total.
    """

    def __init__(self, bucket_bytes: int, overlap: bool, exposed: Exposed) -> None:
        self.bucket_bytes, self.overlap, self.exposed = bucket_bytes, overlap, exposed
        self.last = True
        self.gradients: dict[Weight, Tensor] = {}
        self._accumulated: dict[Weight, Tensor] = {}
        self._scattering: deque[tuple[Weight, Tensor, Tensor, dist.Work | None]] = deque()
        self._members: list[tuple[Weight, Tensor]] = []
        self._filled = 0  # bytes of them
        self._reducing: deque[Bucket] = deque()
        # A second stream waits for one collective and feeds the next, so that the compute stream does not have to.
        cuda = exposed.device.type == "cuda"
        self._stream = torch.cuda.Stream(exposed.device) if cuda else None

    def add(self, weight: Weight, flat: Tensor, shard: Tensor, work: dist.Work | None) -> None:
        """Take over a gradient `shard` (weight.chunk,), valid once `work`, which reads `flat`, is done."""
        self._scattering.append((weight, flat, shard, work))
        while len(self._scattering) > (LAG if self._stream is None else 0):
            self._receive()

    def take(self) -> dict[Weight, Tensor]:
        """`gradients`, to be used on the current stream."""
        gradients, self.gradients = self.gradients, {}
        if self._stream is not None:
            for gradient in gradients.values():
                gradient.record_stream(torch.cuda.current_stream())
        return gradients

    def finish(self) -> None:
        """Backward is over: sum what is left, and wait for all sums."""
        while self._scattering:
            self._receive()
        self._flush()
        if self._stream is not None:
            with self.exposed.waiting():
                self._deliver_all()
                torch.cuda.current_stream().wait_stream(self._stream)
        else:
            self._deliver_all()

    def _receive(self) -> None:
        weight, flat, shard, work = self._scattering.popleft()
        if work is not None:
            with self._aside(flat, shard):
                self._wait(work)
        if self._members and self._members[0][0].groups is not weight.groups:
            self._flush()
        self._members.append((weight, shard))
        self._filled += shard.nbytes
        if self._filled >= self.bucket_bytes:
            self._flush()

    def _flush(self) -> None:
        members, self._members, self._filled = self._members, [], 0
        if not members:
            return
        groups = members[0][0].groups
        group = groups.replicas if self.last else groups.gradients
        with self._aside(*(shard for _, shard in members)):
            if self.last:
                for weight, shard in members:
                    if weight in self._accumulated:
                        shard[weight.kept] += self._accumulated.pop(weight)
            if group.size == 1:
                bucket = Bucket(members, members[0][1], None)
            elif self.last and members[0][0].evenly_owned:
                bucket = _scatter(members, group)
            else:
                bucket = _all_reduce(members, group)
        self._reducing.append(bucket)
        if self._stream is not None or group.size == 1 or not self.overlap:
            self._deliver_all()
        if self._stream is not None and not self.overlap:
            with self.exposed.waiting():
                torch.cuda.current_stream().wait_stream(self._stream)

    def _deliver_all(self) -> None:
        while self._reducing:
            bucket = self._reducing.popleft()
            with self._aside(bucket.flat):
                if bucket.work is not None:
                    self._wait(bucket.work)
                if bucket.scattered:
                    self.gradients.update(bucket.members)
                    continue
                for weight, shard in bucket.members:
                    self._keep(weight, shard)

    def _keep(self, weight: Weight, total: Tensor) -> None:
        """Select what is this rank's of a sum, and drop the rest."""
        part = weight.owned if self.last else weight.kept
        if part.stop == part.start:
            return
        mine = total[part]
        if self.last:
            self.gradients[weight] = mine.clone()
        elif weight in self._accumulated:
            self._accumulated[weight] += mine
        else:
            self._accumulated[weight] = mine.clone()

    def _wait(self, work: dist.Work) -> None:
        if self._stream is None:
            self.exposed.wait(work)
        else:
            work.wait()  # this stream's wait; that of the compute stream is measured in `finish`

    @contextmanager
    def _aside(self, *inputs: Tensor) -> Iterator[None]:
        """On the second stream, after what the compute stream has done so far. `inputs` are the compute stream's memory."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        for tensor in inputs:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield


def _all_reduce(members: list[tuple[Weight, Tensor]], group: Group) -> Bucket:
    """Begin to sum the shards over `group`."""
    flat = torch.cat([shard for _, shard in members])
    pieces = flat.split([shard.numel() for _, shard in members])
    work = dist.all_reduce(flat, group=group.handle, async_op=True)
    return Bucket([(w, piece) for (w, _), piece in zip(members, pieces, strict=True)], flat, work)


def _scatter(members: list[tuple[Weight, Tensor]], group: Group) -> Bucket:
    """Begin to sum the shards over `group`, each rank the part that it owns of every one of them."""
    rows = torch.cat([shard.view(group.size, -1) for _, shard in members], dim=1)
    mine = rows.new_empty(rows.shape[1])
    work = reduce_scatter(mine, rows.view(-1), group=group.handle, async_op=True)
    pieces = mine.split([shard.numel() // group.size for _, shard in members])
    return Bucket([(w, piece) for (w, _), piece in zip(members, pieces, strict=True)], rows, work, scattered=True)
