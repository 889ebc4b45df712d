"""How long each way of summing takes on this machine, by message size: measured once, kept as JSON, checked whenever it is read."""

import hashlib
import json
import math
import os
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES = tuple(1 << i for i in range(10, 27))  # bytes of a message: 1 KiB to 64 MiB
TOLERANCE = 1.03  # what is chosen is nowhere slower than nccl by more
PLAUSIBLE = (0.3, 1e6)  # µs of one sum

Times = dict[str, dict[int, float]]  # name: bytes: µs


@dataclass(frozen=True)
class Table:
    """key: what the measurement depends on. made: seconds since the epoch. times: `nccl` at all SIZES, others where they serve."""

    key: dict[str, str]
    made: float
    times: Times

    def microseconds(self, name: str, size: int) -> float:
        """Interpolated in the size; the first time below the sizes measured, the last bandwidth above; infinity where the way
        does not serve."""
        low, high = _neighbours(size)
        times = self.times[name]
        if low not in times or high not in times:
            return math.inf
        if size > SIZES[-1]:
            return times[high] * size / high
        return times[low] + (times[high] - times[low]) * max(0, size - low) / max(1, high - low)

    def choose(self, size: int, names: Iterable[str] | None = None) -> str:
        """The fastest way for a message of `size` bytes among those that are not slower than nccl at the sizes around it. names:
        the ways to choose from, `nccl` among them; None: all."""
        around = _neighbours(size)
        nccl = self.times["nccl"]
        sound = [
            name
            for name in names or self.times
            if all(n in self.times[name] and self.times[name][n] <= TOLERANCE * nccl[n] for n in around)
        ]
        return min(sound, key=lambda name: self.microseconds(name, size))


def _neighbours(size: int) -> tuple[int, int]:
    """The measured sizes around `size`: the last one that is not above it, and the next; twice the same at and beyond the ends."""
    index = bisect_right(SIZES, size)
    low = SIZES[max(0, index - 1)]
    return low, low if size <= low else SIZES[min(index, len(SIZES) - 1)]


# --- what a table is for -----------------------------------------------------------------------------------------------------


def machine(device: torch.device, world_size: int, dtype: torch.dtype, code: Sequence[str]) -> dict[str, str]:
    """What measured times depend on: with another GPU, driver, library or code another table is needed. code: patterns of files whose
    content decides."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "ranks": str(world_size),
        "dtype": str(dtype).removeprefix("torch."),
        "driver": _driver(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "triton": version("triton"),
        "code": digest(code),
    }


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return "unknown"


def digest(patterns: Sequence[str]) -> str:
    """Of the files that the patterns name."""
    root = Path(__file__).resolve().parents[1]
    paths = sorted(path for pattern in patterns for path in root.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


# --- the file ----------------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """$RUNG_CACHE, else ~/.cache/rung."""
    return Path(os.environ.get("RUNG_CACHE") or Path.home() / ".cache" / "rung")


def path_of(key: dict[str, str], kind: str = "comm") -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{kind}-{digest[:16]}.json"


def read(path: Path, key: dict[str, str], served: dict[str, tuple[int, ...]]) -> Table | None:
    """The table at `path`, or None unless it was measured for `key` and has a plausible time for every size that each way
    serves. A table that cannot be read is one that is not there."""
    try:
        content = json.loads(path.read_text())
        times = {name: {int(n): float(t) for n, t in by_size.items()} for name, by_size in content["times"].items()}
        table = Table(content["key"], float(content["made"]), times)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return table if table.key == key and is_plausible(table, served) else None


def is_plausible(table: Table, served: dict[str, tuple[int, ...]]) -> bool:
    """Every way has a time for exactly the sizes it serves, none of which light or patience forbids, and 64 MiB take longer than
    1 KiB. A table from the future was made under another clock."""
    if {name: tuple(sorted(times)) for name, times in table.times.items()} != {n: tuple(s) for n, s in served.items()}:
        return False
    everything = [t for times in table.times.values() for t in times.values()]
    low, high = PLAUSIBLE
    if not all(low <= t <= high for t in everything):  # also False for NaN
        return False
    nccl = table.times["nccl"]
    return nccl[SIZES[-1]] > nccl[SIZES[0]] and 0 < table.made <= time.time() + 60


def write(path: Path, table: Table) -> None:
    """All of it or nothing: a reader never sees half a table. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump({"key": table.key, "made": table.made, "times": table.times}, file, indent=1)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def agreed(
    key: dict[str, str],
    served: dict[str, tuple[int, ...]],
    measure: Callable[[], Times],
    group: dist.ProcessGroup | None = None,
    rebuild: bool = False,
) -> Table:
    """One table for all ranks of `group`: rank 0's file if it is sound, else measured by all together and kept by rank 0.
    Collective. Raises RuntimeError on every rank if what was measured is not plausible."""
    first = dist.get_rank(group) == 0
    path = path_of(key)
    table: Table | None = _from_first(read(path, key, served) if first and not rebuild else None, group)
    if table is None:
        times = measure()
        table = _from_first(Table(key, time.time(), times), group)
        if not is_plausible(table, served):
            raise RuntimeError(f"sums took implausible times, so none can be chosen by them: {table.times}")
        if first:
            _keep(path, table)
    return table


def _keep(path: Path, table: Table) -> None:
    try:
        write(path, table)
    except OSError as error:
        print(
            f"what was measured is measured anew each time, since {path} cannot be written: {error}",
            file=sys.stderr,
            flush=True,
        )


def _from_first(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Rank 0's value on every rank."""
    values = [value]
    source = dist.get_global_rank(group, 0) if group else 0
    dist.broadcast_object_list(values, src=source, group=group)
    return values[0]


# --- measuring ---------------------------------------------------------------------------------------------------------------


def graph_microseconds(
    call: Callable[[], object], chain: int = 20, replays: int = 7, group: dist.ProcessGroup | None = None
) -> float:
    """Median time of `call` in a CUDA graph of `chain` of them, the slowest rank's. Collective."""
    call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(chain):
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / chain)
    slowest = torch.tensor(sorted(times)[replays // 2], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()
