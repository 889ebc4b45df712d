"""Check and time the algorithms of a layer."""

import time
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cli import note
from comm.table import graph_microseconds
from scripts.bench.comm.fused.algorithms import Algorithms, Call, Layer, all_gather_rows
from scripts.bench.comm.fused.tables import GEMM, UNFUSED, Row
from scripts.bench.comm.parts import Parts
from tp import World

MOST_ROWS = 64  # most rows of each owner that are checked


class Reference(NamedTuple):
    """Numbers of some rows of a result, and the fp32 values of these rows."""

    rows: Tensor
    values: Tensor


class Bench(Parts):
    """Checks and times algorithms, each in a part of its own."""

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__(world, seconds)
        self.algorithms = Algorithms(world)
        self.dtype = self.algorithms.dtype

    def check(self) -> None:
        self.algorithms.comm.check()

    def tell(self, name: str, seconds: float, failed: str | None) -> None:
        """Print only errors, because a progress bar is shown."""
        if failed:
            note(f"{name}: {failed}")

    def layer(self, layer: Layer, m: int) -> list[Row]:
        """Check, then time all algorithms for m rows. Collective.

        Repeated calls have the same input, so that a rank that is ahead overwrites rows that others still read with equal values.
        """
        title = f"{layer.name} {m}"
        if (operands := self.part(f"{title} operands", lambda: self._operands(layer, m))) is None:
            return []
        self.found.pop(f"{title} operands")  # the report must not keep them
        calls, x, reference = operands
        times: dict[str, float | None] = {}
        allowed = 0.0
        for name, call in calls.items():
            if not name.startswith(GEMM):
                self.algorithms.spoil_buffers(layer, x)
                error = self.part(f"{title} {name} result", partial(self._error, call, reference))
                if name == UNFUSED:
                    allowed = max(2 * (error or 0.0), self._rounding(layer) * self._largest(reference.values))
                if error is None or error > allowed:
                    self.errors.setdefault(f"{title} {name} result", f"an error of {error}, {allowed} is allowed")
                    continue
            times[name] = self.part(f"{title} {name}", partial(self._time, call))
        return _rows(layer, m, {name: t for name, t in times.items() if t is not None})

    def _operands(self, layer: Layer, m: int) -> tuple[dict[str, Call], Tensor, Reference]:
        """The calls for a random weight, their input, and the reference of their result. Collective."""
        ranks = self.world.world_size
        n, k = layer.weight_shape(ranks)
        weight = self.random(n, k) / k**0.5
        x = self.random(m if layer.scatter else m // ranks, k)
        whole = x if layer.scatter else self.random(m, k)
        return self.algorithms.calls(layer, x, whole, weight), x, self._reference(layer, x, weight)

    def _reference(self, layer: Layer, x: Tensor, weight: Tensor) -> Reference:
        """In a scatter, some of this rank's rows of the result, else some of all rows. Collective."""
        ranks, rank = self.world.world_size, self.world.rank
        if layer.scatter:
            share = len(x) // ranks
            some = torch.arange(0, share, max(1, share // MOST_ROWS), device=x.device)
            parts = torch.cat([x[owner * share + some] for owner in range(ranks)]).float() @ weight.float().t()
            dist.all_reduce(parts)
            return Reference(some, parts[rank * len(some) :][: len(some)])
        rows = all_gather_rows(x, ranks)
        some = torch.arange(0, len(rows), max(1, len(x) // MOST_ROWS), device=x.device)
        return Reference(some, rows[some].float() @ weight.float().t())

    def _error(self, call: Call, reference: Reference) -> float:
        """The largest error of a call's result on any rank. Collective."""
        dist.barrier()  # no rank is still reading what this call overwrites
        result = call()
        error = self._largest(result[reference.rows].float() - reference.values)
        dist.barrier()
        return error

    def _rounding(self, layer: Layer) -> float:
        """Relative rounding error of a result, and of k additions in fp32 in another order."""
        return torch.finfo(self.dtype).eps + layer.k**0.5 * torch.finfo(torch.float32).eps

    def _largest(self, x: Tensor) -> float:
        """The largest magnitude on any rank, inf if there is a NaN. Collective."""
        largest = x.abs().max()
        largest = torch.where(largest.isnan(), torch.inf, largest)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    def _time(self, call: Call) -> float:
        """µs of a call. Collective."""
        if self.algorithms.gpu:
            return graph_microseconds(call, chain=4, replays=5)
        call()
        begin = time.perf_counter()
        call()
        slowest = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item() * 1e6


def _rows(layer: Layer, m: int, times: dict[str, float]) -> list[Row]:
    """A row for each algorithm with communication. Empty if the unfused algorithm or all GEMMs failed."""
    gemms = [t for name, t in times.items() if name.startswith(GEMM)]
    if UNFUSED not in times or not gemms:
        return []
    shape = layer.name, layer.scatter, m, layer.n, layer.k
    return [Row(*shape, name, t, min(gemms), times[UNFUSED]) for name, t in times.items() if not name.startswith(GEMM)]
