"""Launch configurations of linear layers of few rows.

The fastest config of a shape comes from what was measured on this machine (`engine/tuning.py`), else from the table of this GPU
in `linear_configs/`, which `scripts/bench/kernels/linear.py` and, for one row, `one_row.py` of commit 4a2e01f made, else from that of
another GPU, else from a heuristic.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

MAX_ROWS = 256
MAX_SWIGLU_ROWS = 8192  # with SwiGLU, for which cuBLAS takes another pass over its output
PROMPT_ROWS = (512, 1024, 2048)  # more than MAX_ROWS, that are measured; the last also serves more rows
MMA_ROWS = 64  # of the mma kernel, at most
GEMV_ROWS = 4  # with more rows, the FMA units are slower than the memory
SMS = 132  # of an H100 or H200; the heuristic aims at two or more programs on each
SHARED_BYTES = 212 << 10  # of an SM's 227 KB, shared by its programs
STREAM_BYTES = 222 << 10  # of the stream kernel's buffers, at most; a few KB are for changes of layout
LOADER_REGISTERS = 40  # of a thread of the stream kernel's loading warp
SUMS = 128  # fp32 sums of a thread of the stream kernel, at most
MAX_TILES = 16384  # of a layer whose programs add their sums: the number of counters of a device
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VERSION = 2  # of the kernels; raise it when one is added or becomes faster, so that the shapes in the tables are measured again
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


@dataclass(frozen=True)
class Stream:
    """Config of the stream kernel: `programs` programs, each with `stages` buffers for `block_n` rows of the weight, `block_k`
    columns of them, and the input's part. `warps` warps multiply, and one more loads."""

    block_n: int
    block_k: int
    stages: int
    warps: int = 4
    programs: int = SMS

    def tile_rows(self, rows: int) -> int:
        """Rows of a tile of the input: at least 8 (wgmma), and as many as there are registers for their sums."""
        return min(_padded(rows), SUMS * 32 * self.warps // self.block_n)

    def sharers(self, rows: int) -> int:
        """Programs of each tile of rows."""
        return self.programs // -(-rows // self.tile_rows(rows))

    def shared_bytes(self, rows: int) -> int:
        """Of the buffers and their barriers."""
        return self.stages * (2 * self.block_k * (self.block_n + self.tile_rows(rows)) + 16)

    def registers(self, rows: int) -> int:
        """Registers of a thread at launch. Then the loading warp and three idle ones give most of theirs to the others."""
        sums = self.block_n * self.tile_rows(rows) // (32 * self.warps)  # of a thread
        needed = 80 if sums <= 16 else 152 if sums <= 64 else 216 if self.warps == 4 else 232
        return -(-(needed * self.warps + 4 * LOADER_REGISTERS) // (8 * (self.warps + 4))) * 8

    def shares_an_sm(self, rows: int) -> bool:
        """Whether two programs fit an SM, so that the next layer's can start before this layer's end."""
        threads = 32 * (self.warps + 4)
        return self.shared_bytes(rows) <= STREAM_BYTES // 2 and 2 * threads * self.registers(rows) <= 65536

    def supports(self, rows: int, n: int, k: int, swiglu: bool) -> bool:
        """Whether the kernel can compute this layer of 16-bit values."""
        block = self.block_n // (2 if swiglu else 1)  # rows of the weight in a wgmma
        fits = block >= 16 * self.warps and self.stages >= 2 and self.shared_bytes(rows) <= STREAM_BYTES
        steps = -(-n // self.block_n) * -(-k // self.block_k)
        return fits and self.sharers(rows) > 0 and 2 * self.programs <= MAX_TILES and steps * self.programs < 2**31


def _padded(rows: int) -> int:
    return max(8, 1 << (rows - 1).bit_length())


Config = Gemv | Mma | Stream
KINDS: dict[str, type[Gemv] | type[Mma] | type[Stream]] = {"gemv": Gemv, "mma": Mma, "stream": Stream}


@cache
def config(rows: int, n: int, k: int, dtype: torch.dtype, swiglu: bool = False) -> Config | None:
    """The config for `rows` rows and an (n, k) weight; None if F.linear, with a separate kernel for `swiglu`, is as fast."""
    if not 0 < rows <= (MAX_SWIGLU_ROWS if swiglu else MAX_ROWS):
        return None
    known, few = measured() if dtype.itemsize == 2 else {}, min(rows, PROMPT_ROWS[-1])
    for key in (table_key(few, n, k, swiglu), table_key(few, n, k)):  # without swiglu if that was not measured
        if key in known and not (isinstance(chosen := known[key], Stream) and not chosen.supports(rows, n, k, swiglu)):
            return _with_pairs(chosen) if swiglu else chosen
    return default_config(rows, n, k, dtype, swiglu)


def default_config(rows: int, n: int, k: int, dtype: torch.dtype, swiglu: bool = False) -> Config | None:
    """The heuristic for shapes that were not measured."""
    rows = _bucket(rows)
    if rows <= GEMV_ROWS:
        chosen = _default_gemv(rows, n, k, 16 // dtype.itemsize)
        return _with_pairs(chosen) if swiglu else chosen
    # fp32 on tensor cores would be rounded to TF32
    return _default_mma(rows, n, k) if dtype.itemsize == 2 and rows <= MMA_ROWS else None


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
    known = {**(shipped(name) or shipped(SIMILAR)), **_tuned}
    return known if has_stream() else {key: config for key, config in known.items() if not isinstance(config, Stream)}


@cache
def has_stream() -> bool:
    """Whether this machine's GPUs have what the stream kernel needs: Hopper's TMA and wgmma."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def shipped(gpu: str) -> Mapping[str, Config | None]:
    """The configs of the table of GPUs with this name; empty if there is none."""
    older, current = _shipped(gpu)
    return {**older, **current}


def shipped_now(gpu: str) -> Mapping[str, Config | None]:
    """Those of `shipped` that were measured with this `VERSION` of the kernels."""
    return _shipped(gpu)[1]


@cache
def _shipped(gpu: str) -> tuple[dict[str, Config | None], dict[str, Config | None]]:
    path = CONFIGS / f"{gpu.replace(' ', '-')}.json"
    older, current = read_table(path) if path.exists() else ({}, {})
    return _parsed(older, path), _parsed(current, path)


def read_table(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a table's configs by key: those measured with earlier versions of the kernels, and with this one."""
    content = json.loads(path.read_text())
    older, configs = content.get("older", {}), content["configs"]
    return (older, configs) if content.get("version") == VERSION else ({**older, **configs}, {})


def _parsed(table: Mapping[str, Any], path: Path) -> dict[str, Config | None]:
    found = {}
    for key, fields in table.items():
        with suppress(KeyError, TypeError):  # a kind or a field that these kernels do not have
            found[key] = parse_config(fields)
    if len(found) < len(table):
        print(
            f"{path.name}: {len(table) - len(found)} configs of other kernels ignored; measure with make tune", file=sys.stderr
        )
    return found


def use(configs: Mapping[str, Config | None]) -> None:
    """Prefer these configs, which were measured on this machine, from now on."""
    _tuned.update(configs)
    config.cache_clear()


_tuned: dict[str, Config | None] = {}


def parse_config(fields: Mapping[str, Any] | None) -> Config | None:
    """The config of a JSON value: `kind`, which is `gemv`, `mma` or `stream`, and the dataclass's fields; null for F.linear."""
    if fields is None:
        return None
    return KINDS[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


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
