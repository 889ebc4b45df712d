"""Tables of measured times: how long each algorithm takes on this machine, case by case. A table is measured once, kept as
a JSON file, and checked when it is read."""

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PLAUSIBLE = (0.3, 1e6)  # µs

# A case to the algorithms that are measured for it. Raises ValueError or AttributeError if there is no such case.
Algorithms = Callable[[str], set[str]]
Times = dict[str, dict[str, float]]  # µs by case and algorithm


@dataclass
class Table:
    """The same on all ranks. A case is a message size (`comm/auto.py`) or a pair of layers (`comm/fused.py`).

    kind: the begin of the file's name. key: what the times depend on. times: of the slowest rank. made: seconds since the
    epoch.
    """

    kind: str
    key: dict[str, str]
    times: Times = field(default_factory=dict)
    made: float = field(default_factory=time.time)

    @property
    def path(self) -> Path:
        """In $RUNG_CACHE, else in ~/.cache/rung."""
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        return Path(os.environ.get("RUNG_CACHE") or Path.home() / ".cache" / "rung") / f"{self.kind}-{digest[:16]}.json"


def load(
    kind: str, key: dict[str, str], algorithms: Algorithms, group: dist.ProcessGroup | None = None, rebuild: bool = False
) -> Table:
    """Rank 0's plausible cases on every rank of `group`; none to `rebuild` the table. Collective."""
    table = Table(kind, key)
    if dist.get_rank(group) == 0 and not rebuild:
        table = read(table, algorithms)
    return from_first(table, group)


def read(empty: Table, algorithms: Algorithms) -> Table:
    """The plausible cases of the file of `empty`; `empty` if the file is missing, truncated, of another key or from the
    future."""
    try:
        content = json.loads(empty.path.read_text())
        times = {case: {name: float(t) for name, t in by_name.items()} for case, by_name in content["times"].items()}
        made = float(content["made"])
        if content["key"] != empty.key or not 0 < made <= time.time() + 60:  # from the future: made under another clock
            return empty
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return empty
    return Table(empty.kind, empty.key, plausible(times, algorithms), made)


def plausible(times: Times, algorithms: Algorithms) -> Times:
    """The cases that have a time for exactly their algorithms, and none that is impossibly short or long."""

    def holds(case: str) -> bool:
        try:
            expected = algorithms(case)
        except (ValueError, AttributeError):
            return False
        low, high = PLAUSIBLE
        return set(times[case]) == expected and all(low <= t <= high for t in times[case].values())  # False for NaN, too

    return {case: times[case] for case in times if holds(case)}


def save(table: Table, group: dist.ProcessGroup | None = None) -> None:
    """Write rank 0's table. If it cannot be written, say so and continue."""
    if dist.get_rank(group) != 0:
        return
    try:
        write(table)
    except OSError as error:
        print(f"{table.path} cannot be written, so each start measures again: {error}", file=sys.stderr, flush=True)


def write(table: Table) -> None:
    """Replace the table's file at once: a reader never sees half a table. Raises OSError."""
    path = table.path
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump({"key": table.key, "made": table.made, "times": table.times}, file, indent=1)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def from_first(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Rank 0's value on every rank. Collective."""
    values = [value]
    source = dist.get_global_rank(group, 0) if group else 0
    dist.broadcast_object_list(values, src=source, group=group)
    return values[0]


# --- the key -----------------------------------------------------------------------------------------------------------------


def machine(device: torch.device, world_size: int, dtype: torch.dtype, code: Sequence[str]) -> dict[str, str]:
    """What measured times depend on: another GPU, driver, library or code needs another table. code: patterns of the files
    whose content counts."""
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
    """Of the content of the files that match the patterns."""
    root = Path(__file__).resolve().parents[1]
    paths = sorted(path for pattern in patterns for path in root.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


# --- measuring ---------------------------------------------------------------------------------------------------------------


def graph_microseconds(
    call: Callable[[], object], chain: int = 20, replays: int = 7, group: dist.ProcessGroup | None = None
) -> float:
    """Median time of `call` on the slowest rank, in a CUDA graph of `chain` calls. Collective."""
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
