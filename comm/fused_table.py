"""How long pairs of layers around a sum take by each way, measured on this machine and kept as JSON beside the table of sums."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from comm.table import PLAUSIBLE, Table, _from_first, _keep, machine, path_of

UNFUSED = "unfused"
CODE = (
    "comm/fused*.py",
    "comm/row_buffers.py",
    "comm/table.py",
    "kernels/fused_rows.py",
    "kernels/tile_gemm*.py",
    "kernels/*_scatter.py",
    "kernels/*_gemm.py",
)

PairTimes = dict[str, float]  # way: µs


def bucket(rows: int) -> int:
    """Rounded up to a power of two."""
    return 1 << (rows - 1).bit_length()


@dataclass(frozen=True)
class Pair:
    """Two layers with a sum between them, on one rank: (rows, k) x (c, k), the sum, then (rows, c) x (m, c)."""

    rows: int
    k: int
    c: int
    m: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        return f"{bucket(self.rows)},{self.k},{self.c},{self.m},{str(self.dtype).removeprefix('torch.')}"

    @classmethod
    def parse(cls, key: str) -> "Pair":
        """A pair of that key. Raises ValueError, or AttributeError for an unknown dtype."""
        *sizes, dtype = key.split(",")
        rows, k, c, m = map(int, sizes)
        return cls(rows, k, c, m, getattr(torch, dtype))


@dataclass
class PairTable:
    """The same on all ranks. key: what the times depend on. times: by `Pair.key`, the slowest rank's."""

    key: dict[str, str]
    times: dict[str, PairTimes] = field(default_factory=dict)

    def keep(self) -> None:
        """Write it, if it can be written."""
        content: Any = self.times
        _keep(self.path, Table(self.key, time.time(), content))

    @property
    def path(self) -> Path:
        return path_of(self.key, "fused")


def open_table(key: dict[str, str], names_of: Callable[[Pair], set[str]], group: dist.ProcessGroup | None = None) -> PairTable:
    """Rank 0's table for `key`, on every rank of `group`: those of its entries that have a plausible time for each of the pair's
    names, or none if the file is not there, torn or another machine's. Collective."""
    table = PairTable(key)
    found = read(table, names_of) if dist.get_rank(group) == 0 else None
    table.times = _from_first(found, group)
    return table


def read(table: PairTable, names_of: Callable[[Pair], set[str]]) -> dict[str, PairTimes]:
    """The sound entries of the file of `table`."""
    low, high = PLAUSIBLE
    try:
        content = json.loads(table.path.read_text())
        if content["key"] != table.key:
            return {}
        times = {key: {str(way): float(t) for way, t in by_way.items()} for key, by_way in content["times"].items()}
        names = {key: names_of(Pair.parse(key)) for key in times}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return {key: by for key, by in times.items() if set(by) == names[key] and all(low <= t <= high for t in by.values())}


def machine_key(device: torch.device, world_size: int, beside: str) -> dict[str, str]:
    """All that the times depend on, but for the shapes. beside: what unfused pairs sum with."""
    return machine(device, world_size, torch.bfloat16, CODE) | {"beside": beside}
