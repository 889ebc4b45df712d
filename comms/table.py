"""Tables of measured times of algorithms on this machine, by case. A table is measured once, stored as a JSON file, and
checked when it is read."""

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from comms.process_group import gather_objects
from files import source_digest
from kernels.dispatch import replay_seconds

PLAUSIBLE = (0.3, 1e6)  # µs

# The algorithms that are measured for a case. Raises ValueError, AttributeError or LookupError if there is no such case.
Algorithms = Callable[[str], set[str]]
Times = dict[str, dict[str, float]]  # µs by case and algorithm


@dataclass
class Table:
    """Measured times, the same on all ranks. A case is a message size (`comms/auto.py`) or a pair of layers (`comms/fused.py`).

    kind: prefix of the file's name. key: what the times depend on. times: on the slowest rank. made: Unix time, seconds.
    """

    kind: str
    key: dict[str, str]
    times: Times = field(default_factory=dict)
    made: float = field(default_factory=time.time)

    @property
    def path(self) -> Path:
        """The JSON file, in $RUNG_CACHE or ~/.cache/rung."""
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        return Path(os.environ.get("RUNG_CACHE") or Path.home() / ".cache" / "rung") / f"{self.kind}-{digest[:16]}.json"


def load(
    kind: str, key: dict[str, str], algorithms: Algorithms, group: dist.ProcessGroup | None = None, rebuild: bool = False
) -> Table:
    """The plausible cases of rank 0's file, on every rank of `group`; empty with `rebuild`. Collective."""
    table = Table(kind, key)
    if dist.get_rank(group) == 0 and not rebuild:
        table = read(table, algorithms)
    return Table(**from_rank_0(vars(table), group))


def read(empty: Table, algorithms: Algorithms) -> Table:
    """The plausible cases of the file of `empty`. Returns `empty` if the file is missing or invalid, has another key, or its
    time is in the future."""
    try:
        content = json.loads(empty.path.read_text())
        times = {case: {name: float(t) for name, t in by_name.items()} for case, by_name in content["times"].items()}
        made = float(content["made"])
        if content["key"] != empty.key or not 0 < made <= time.time() + 60:  # in the future: the clock was wrong
            return empty
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return empty
    return Table(empty.kind, empty.key, plausible(times, algorithms), made)


def plausible(times: Times, algorithms: Algorithms) -> Times:
    """The cases that have a time for exactly their algorithms, all within PLAUSIBLE."""

    def is_plausible(case: str) -> bool:
        try:
            expected = algorithms(case)
        except (ValueError, AttributeError, LookupError):
            return False
        low, high = PLAUSIBLE
        return set(times[case]) == expected and all(low <= t <= high for t in times[case].values())  # False for NaN, too

    return {case: times[case] for case in times if is_plausible(case)}


def save(table: Table, algorithms: Algorithms, group: dist.ProcessGroup | None = None) -> None:
    """`write` rank 0's table. If it cannot be written, print a warning."""
    if dist.get_rank(group) != 0:
        return
    try:
        write(table, algorithms)
    except OSError as error:
        print(f"{table.path} cannot be written, so each start will measure again: {error}", file=sys.stderr, flush=True)


def write(table: Table, algorithms: Algorithms) -> None:
    """Replace the table's file atomically, so that no reader sees an incomplete table. Plausible cases of the file that the
    table lacks, which another program has measured meanwhile, stay in the file. Raises OSError."""
    path = table.path
    path.parent.mkdir(parents=True, exist_ok=True)
    # what another program writes from here to the replacement is lost, and only measured again
    times = read(Table(table.kind, table.key), algorithms).times | table.times
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump({"key": table.key, "made": table.made, "times": times}, file, indent=1)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def from_rank_0(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's value on every rank, without a group as JSON has it. Collective."""
    if group is None:
        return gather_objects(value if dist.get_rank() == 0 else None)[0]
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0), group=group)
    return values[0]


# --- cases by rows ----------------------------------------------------------------------------------------------------------

# rows between which steps have graphs of so many sizes that the next power of two may be nearly twice as large
FINE = 1024, 4096


def bucket(rows: int) -> int:
    """The number of rows for which fused all-reduces are measured: `rows` rounded up to a power of two, within FINE to a quarter of one: 1,024, 1,280, 1,536, 1,792, 2,048, 2,560."""
    power = 1 << (rows - 1).bit_length()
    unit = power // 8 if FINE[0] < rows <= FINE[1] else power
    return -(-rows // unit) * unit


# --- the key -----------------------------------------------------------------------------------------------------------------


def machine_key(device: torch.device, world_size: int, dtype: torch.dtype, code: Sequence[str]) -> dict[str, str]:
    """The key of a table: GPU, ranks, dtype, driver, libraries and code, on which measured times depend. code: glob patterns
    of the source files to include."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "ranks": str(world_size),
        "dtype": str(dtype).removeprefix("torch."),
        "driver": _driver(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "triton": version("triton"),
        "code": source_digest(code),
    }


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return "unknown"


# --- measuring ---------------------------------------------------------------------------------------------------------------


def graph_microseconds(call: Callable[[], object], chain: int = 20, replays: int = 7) -> float:
    """Median time of `call` in µs, on the slowest rank, in a CUDA graph of `chain` calls. Collective.

    If `call` waits for other ranks, they end a replay together, however late the host of one of them launched it. So each
    timed replay follows another one, and is launched while that one runs.
    """
    call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(chain):
            call()
    seconds = []
    for _ in range(replays):
        graph.replay()
        seconds += replay_seconds(graph, 1)
    slowest = torch.tensor(median(seconds) * 1e6 / chain, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()
