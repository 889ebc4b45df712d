"""The communicator of `--comm auto`: it measures how long all-reduces take on this machine, and chooses by message size."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from comms.interface import LEAST_COPIED, Communicator, Input, Linear, PendingAllReduce, Schedule
from comms.quantize import WIDTHS
from comms.relay import RelayCommunicator
from comms.symmetric import CAPACITY, SymmetricCommunicator
from comms.table import Table, Times, from_rank_0, graph_microseconds, load, plausible, save

CODE = (  # files that decide how long an all-reduce takes
    "kernels/*all_reduce.py",
    "kernels/quantize.py",
    "kernels/relay.py",
    "comms/symmetric.py",
    "comms/quantized.py",
    "comms/relay.py",
    "comms/workspace.py",
    "comms/interface.py",
    "comms/table.py",
)
SIZES = tuple(1 << i for i in range(10, 27))  # bytes of a message: 1 KiB to 64 MiB
TOLERANCE = 1.03  # the longest time of a choice, relative to nccl

# Message sizes at which each algorithm is measured. At others it would use NCCL, or most ranks would have empty slices.
MEASURED_SIZES: dict[str, tuple[int, ...]] = {
    "nccl": SIZES,
    "one-shot": tuple(n for n in SIZES if n <= CAPACITY["one-shot"]),
    "two-shot": tuple(n for n in SIZES if n >= 8 << 10),
    **{width: tuple(n for n in SIZES if n >= 64 << 10) for width in WIDTHS},
}


class AutoCommunicator(Communicator):
    """Each all-reduce by the algorithm that is fastest for its size.

    The table has the times of blocking all-reduces. Overlapped ones are exact and do not use a relay, whose kernels would
    each wait for SMs that a GEMM occupies. With few SMs they do not use NCCL, whose kernels take many, if there is another. With
    copy engines, the long ones are those of `two-shot`.
    """

    name = "auto"

    def __init__(self, algorithms: dict[str, Communicator], table: Table) -> None:
        """algorithms: a communicator for each name in the table, `nccl` and `one-shot` among them."""
        self.algorithms, self.table = algorithms, table
        self.rank, self.world_size = algorithms["nccl"].rank, algorithms["nccl"].world_size
        self._chosen: dict[tuple[int, bool, Schedule], Communicator] = {}

    def use(self, schedule: Schedule) -> None:
        super().use(schedule)
        for communicator in self.algorithms.values():
            communicator.use(schedule)

    def choose(self, size: int, overlap: bool = False) -> Communicator:
        """The fastest communicator for a message of `size` bytes."""
        key = size, overlap, self.schedule
        if key not in self._chosen:
            names = [name for name in self.algorithms if not (overlap and self._blocking_only(name))]
            name = fastest(self.table, size, names)
            has_own = overlap and isinstance(self.algorithms.get("two-shot"), SymmetricCommunicator)
            few_sms, copied = self.schedule == "few-sms", self.schedule == "copy-engines" and size >= LEAST_COPIED
            if has_own and (copied or (few_sms and name == "nccl")):
                name = "two-shot"
            self._chosen[key] = self.algorithms[name]
        return self._chosen[key]

    def _blocking_only(self, name: str) -> bool:
        return name in WIDTHS or isinstance(self.algorithms[name], RelayCommunicator)

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        return self.choose(partial.nbytes, overlap).begin_all_reduce(partial, overlap)

    def begin_linear_all_reduce(self, x: Input, layer: Linear, overlap: bool = False) -> PendingAllReduce:
        size = math.prod(x.shape[:-1]) * layer.out_features * x.dtype.itemsize
        return self.choose(size, overlap).begin_linear_all_reduce(x, layer, overlap)

    def all_gather(self, shard: Tensor) -> Tensor:
        return self.algorithms["one-shot"].all_gather(shard)


# --- the choice --------------------------------------------------------------------------------------------------------------


def fastest(table: Table, size: int, names: Iterable[str]) -> str:
    """The fastest algorithm for a message of `size` bytes, of those that are not slower than nccl at the measured sizes
    around it. names: those to choose from, `nccl` among them."""
    around = [table.times[str(n)] for n in _neighbours(size)]
    eligible = [name for name in names if all(name in t and t[name] <= TOLERANCE * t["nccl"] for t in around)]
    return min(eligible, key=lambda name: microseconds(table, name, size))


def microseconds(table: Table, name: str, size: int) -> float:
    """The time of a message of `size` bytes, interpolated linearly. Below the measured sizes it is the first time; above them
    it is computed with the last bandwidth. Infinity if the algorithm was not measured there."""
    low, high = _neighbours(size)
    first, last = (table.times[str(n)].get(name, math.inf) for n in (low, high))
    if math.inf in (first, last):
        return math.inf
    if size > SIZES[-1]:
        return last * size / high
    return first + (last - first) * max(0, size - low) / max(1, high - low)


def _neighbours(size: int) -> tuple[int, int]:
    """The largest measured size that is not above `size`, and the next one. Both are the same at and beyond the ends."""
    index = bisect_right(SIZES, size)
    low = SIZES[max(0, index - 1)]
    return low, low if size <= low else SIZES[min(index, len(SIZES) - 1)]


# --- the table ---------------------------------------------------------------------------------------------------------------


def size_table(
    key: dict[str, str],
    names: Iterable[str],
    measure: Callable[[], Times],
    rebuild: bool = False,
) -> Table:
    """Times of the algorithms `names` at all SIZES: read from rank 0's file if they are plausible, else measured by all
    ranks. Collective. Raises RuntimeError on every rank if the measured times are not plausible."""
    names = tuple(names)

    def algorithms(case: str) -> set[str]:
        return {name for name in names if int(case) in MEASURED_SIZES[name]}

    def is_plausible(times: Times) -> bool:
        """Whether all sizes are plausible, and the longest message takes longer than the shortest."""
        complete = set(plausible(times, algorithms)) == {str(n) for n in SIZES}
        return complete and times[str(SIZES[-1])]["nccl"] > times[str(SIZES[0])]["nccl"]

    table = load("comm", key, algorithms, rebuild=rebuild)
    if not is_plausible(table.times):
        table = Table(**from_rank_0(vars(Table("comm", key, measure()))))
        if not is_plausible(table.times):
            raise RuntimeError(f"all-reduces took implausible times, so auto cannot choose: {table.times}")
        save(table, algorithms)
    return table


def measure_times(algorithms: dict[str, Communicator], device: torch.device, dtype: torch.dtype) -> Times:
    """µs of blocking all-reduces by size and algorithm, in CUDA graphs. Collective."""
    times: Times = {str(size): {} for size in SIZES}
    with torch.inference_mode():
        for name, communicator in algorithms.items():
            for size in MEASURED_SIZES[name]:
                partial = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
                call = lambda c=communicator, partial=partial: c.all_reduce(partial)  # noqa: E731
                times[str(size)][name] = graph_microseconds(call)
    return times
