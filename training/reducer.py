"""Reduces gradients from the backward pass to the ranks that own their optimizer states (AMSP, sections IV.C and V.C).

A shard of a gradient is the result of a reduce-scatter or, if P is not sharded, comes directly from backward. Shards are
collected in a bucket. A full bucket is all-reduced among the ranks that hold the same P shard while backward continues:
in the last micro-batch among all of these ranks, in the earlier ones among those of the G mesh. Each rank keeps its part
of the sum and drops the rest. If all ranks own equal parts, the last all-reduce is a reduce-scatter, which delivers only
a rank's own part.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from training.groups import Group
from training.weights import Weight, reduce_scatter

LAG = 2  # on a CPU: unfinished reduce-scatters allowed before backward waits for the oldest one


class Exposed:
    """Adds up the time in which computation waited for communication.

    On a CPU it is the time spent in waits. On a GPU it is the time between two events in the compute stream, before and
    after a wait. The events are read only by `take`, so that measuring never makes the host wait. In a CUDA graph, which is one
    rank's, nothing is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield
        elif self.device.type == "cuda":
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            yield
            after.record()
            self.events.append((before, after))
        else:
            start = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - start

    def wait(self, work: dist.Work | None) -> None:
        if work is not None:
            with self.waiting():
                work.wait()

    def take(self) -> float:
        """Seconds since the last call. On a GPU the host waits for the device."""
        if self.events:
            torch.cuda.synchronize(self.device)
            self.seconds += sum(before.elapsed_time(after) for before, after in self.events) / 1e3
            self.events.clear()
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@dataclass
class Bucket:
    """A bucket in flight: `flat` is sent, `members` get the sums of whole shards or, if `scattered`, of the owned parts."""

    members: list[tuple[Weight, Tensor]]
    flat: Tensor
    work: dist.Work | None
    scattered: bool = False


class Reducer:
    """`add` every gradient shard, in the same order on all ranks, and call `finish` after each backward pass.

    `last` must be set before the backward pass of the step's last micro-batch. After that pass, `gradients` holds the sum
    over all ranks and micro-batches of the elements of each weight that this rank owns.
    """

    def __init__(self, bucket_bytes: int, overlap: bool, exposed: Exposed) -> None:
        self.bucket_bytes, self.overlap, self.exposed = bucket_bytes, overlap, exposed
        self.last = True
        self.gradients: dict[Weight, Tensor] = {}
        self._accumulated: dict[Weight, Tensor] = {}
        self._scattering: deque[tuple[Weight, Tensor, Tensor, dist.Work | None]] = deque()
        self._members: list[tuple[Weight, Tensor]] = []
        self._filled = 0  # bytes of `_members`
        self._reducing: deque[Bucket] = deque()
        # A side stream waits for one collective and starts the next, so that the compute stream does not wait.
        cuda = exposed.device.type == "cuda"
        self._stream = torch.cuda.Stream(exposed.device) if cuda else None

    def add(self, weight: Weight, flat: Tensor, shard: Tensor, work: dist.Work | None) -> None:
        """Take over a gradient `shard` (weight.chunk,), which is valid once `work` is done. `work` reads `flat`."""
        self._scattering.append((weight, flat, shard, work))
        while len(self._scattering) > (LAG if self._stream is None else 0):
            self._receive()

    def take(self) -> dict[Weight, Tensor]:
        """Return `gradients` for use on the current stream, and forget them."""
        gradients, self.gradients = self.gradients, {}
        if self._stream is not None:
            for gradient in gradients.values():
                gradient.record_stream(torch.cuda.current_stream())
        return gradients

    def finish(self) -> None:
        """To be called after backward: reduce what is left, and wait for all reductions."""
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
        """Keep this rank's part of a sum, and drop the rest."""
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
            work.wait()  # only the side stream waits; the wait of the compute stream is measured in `finish`

    @contextmanager
    def _aside(self, *inputs: Tensor) -> Iterator[None]:
        """Run on the side stream, after the work queued so far on the compute stream. inputs: tensors of the compute
        stream's memory."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        for tensor in inputs:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield


def _all_reduce(members: list[tuple[Weight, Tensor]], group: Group) -> Bucket:
    """Begin to all-reduce the shards over `group`."""
    flat = torch.cat([shard for _, shard in members])
    pieces = flat.split([shard.numel() for _, shard in members])
    work = dist.all_reduce(flat, group=group.handle, async_op=True)
    return Bucket([(w, piece) for (w, _), piece in zip(members, pieces, strict=True)], flat, work)


def _scatter(members: list[tuple[Weight, Tensor]], group: Group) -> Bucket:
    """Begin to reduce-scatter the shards over `group`. Each rank gets the part of every shard that it owns."""
    rows = torch.cat([shard.view(group.size, -1) for _, shard in members], dim=1)
    mine = rows.new_empty(rows.shape[1])
    work = reduce_scatter(mine, rows.view(-1), group=group.handle, async_op=True)
    pieces = mine.split([shard.numel() // group.size for _, shard in members])
    return Bucket([(w, piece) for (w, _), piece in zip(members, pieces, strict=True)], rows, work, scattered=True)
