"""Launch configurations of linear layers of few rows.

The fastest config of a shape comes from what was measured on this machine (`engine/tuning.py`), else from the table of this GPU
in `linear_configs/`, which `scripts/bench/kernels/linear.py` makes, else from that of another GPU, else from a heuristic.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

MAX_ROWS = 64
GEMV_ROWS = 4  # with more rows, the FMA units are slower than the memory
SMS = 132  # of an H100 or H200; the heuristic aims at two or more programs on each
SHARED_BYTES = 212 << 10  # of an SM's 227 KB, shared by its programs
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CONFIGS = Path(__file__).with_name("linear_configs")  # a file for each GPU
SIMILAR = "NVIDIA H200"  # whose table serves GPUs that have none


@dataclass(frozen=True)
class Gemv:
    """Config of the gemv kernel. Each program has `block_n` rows of the weight, `block_k` columns at a time."""

    block_n: int
    block_k: int
    warps: int
    prefetch: bool = True  # whether to prefetch columns after the first tile into L2 before the input is ready


@dataclass(frozen=True)
class Mma:
    """Config of the mma kernel. Each program has `block_n` rows of the weight and 1 / `split` of their columns, `block_k` at a
    time."""

    block_n: int
    block_k: int
    split: int
    stages: int
    warps: int = 4
    early: bool = True  # whether to load a tile before the input is ready


Config = Gemv | Mma


@cache
def config(rows: int, n: int, k: int, dtype: torch.dtype, swiglu: bool = False) -> Config | None:
    """The config for `rows` rows and an (n, k) weight; None if F.linear, with a separate kernel for `swiglu`, is as fast."""
    if not 0 < rows <= MAX_ROWS:
        return None
    for key in (table_key(rows, n, k, swiglu), table_key(rows, n, k)):  # without swiglu if that was not measured
        if dtype.itemsize == 2 and key in (known := measured()):
            return _with_pairs(known[key]) if swiglu else known[key]
    return default_config(rows, n, k, dtype, swiglu)


def default_config(rows: int, n: int, k: int, dtype: torch.dtype, swiglu: bool = False) -> Config | None:
    """The heuristic for shapes that were not measured: 1 to MAX_ROWS rows."""
    rows = _bucket(rows)
    if rows <= GEMV_ROWS:
        chosen = _default_gemv(rows, n, k, 16 // dtype.itemsize)
        return _with_pairs(chosen) if swiglu else chosen
    return _default_mma(rows, n, k) if dtype.itemsize == 2 else None  # fp32 on tensor cores would be rounded to TF32


def _with_pairs(chosen: Config | None) -> Config | None:
    """The config with at least two rows a program, so that each row of the gate is with its row of the up projection."""
    if isinstance(chosen, Gemv) and chosen.block_n == 1:
        return replace(chosen, block_n=2, block_k=max(chosen.block_k // 2, 128 * chosen.warps))
    return chosen


def pipeline_stages(rows: int, block_n: int, block_k: int, programs: int = 2) -> int:
    """The largest number of stages with which `programs` programs of `Mma` fit an SM's shared memory, from 2 to 8."""
    return max(2, min(8, SHARED_BYTES // programs // (2 * block_k * (block_n + max(16, rows)))))


def table_key(rows: int, n: int, k: int, swiglu: bool = False) -> str:
    """The key in a table of these rows, rounded up to a power of two, and this shape."""
    return f"{_bucket(rows)},{n},{k}" + (",swiglu" if swiglu else "")


def _bucket(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def measured() -> Mapping[str, Config | None]:
    """The configs that were measured, by `table_key`: on this machine, on such a GPU, or else on a similar one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else SIMILAR
    return {**(shipped(name) or shipped(SIMILAR)), **_tuned}


@cache
def shipped(gpu: str) -> Mapping[str, Config | None]:
    """The table of GPUs with this name; empty if there is none."""
    path = CONFIGS / f"{gpu.replace(' ', '-')}.json"
    if not path.exists():
        return {}
    return {key: parse_config(fields) for key, fields in json.loads(path.read_text())["configs"].items()}


def use(configs: Mapping[str, Config | None]) -> None:
    """Prefer these configs, which were measured on this machine, from now on."""
    _tuned.update(configs)
    config.cache_clear()


_tuned: dict[str, Config | None] = {}


def parse_config(fields: Mapping[str, Any] | None) -> Config | None:
    """The config of a JSON value: `kind`, which is `gemv` or `mma`, and the dataclass's fields; null for F.linear."""
    if fields is None:
        return None
    kinds: dict[str, type[Gemv] | type[Mma]] = {"gemv": Gemv, "mma": Mma}
    return kinds[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


def format_config(config: Config | None) -> dict[str, Any] | None:
    """The inverse of `parse_config`."""
    return None if config is None else {"kind": type(config).__name__.lower(), **asdict(config)}


def _default_gemv(rows: int, n: int, k: int, vector: int) -> Gemv:
    """vector: values in 16 bytes. A thread loads one such piece of a row at a time, or more if there are few rows."""
    block_n = max(b for b in (1, 2, 4) if b == 1 or n // b >= 8 * SMS)
    block_k = min(512 * vector // max(block_n, rows), max(k & -k, 32 * vector), 1 << (k - 1).bit_length())
    return Gemv(block_n, block_k, warps=min(4, max(1, block_k // (32 * vector))))


def _default_mma(rows: int, n: int, k: int) -> Mma:
    block_n, block_k = 64, min(128 if rows <= 32 else 64, max(16, 1 << (k - 1).bit_length()))
    programs, steps = -(-n // block_n), -(-k // block_k)
    split = max(1, min(round(2 * SMS / programs), steps // 4, 16))
    return Mma(block_n, block_k, split, pipeline_stages(rows, block_n, block_k))
