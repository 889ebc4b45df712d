"""Launch configurations of linear layers, and what the kernels of quantized ones need to know of a weight.

The fastest config of a shape comes from what was measured on this machine (`engine/tuning.py`), else from the table of this GPU
in `linear_configs/`, which `scripts/bench/kernels/linear.py` and, for one row, `one_row.py` of commit 4a2e01f made, else from that of
another GPU, else from a heuristic. Of quantized layers there are no tables: the heuristic is the first of the candidates.
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

# of quantized layers
GROUPS = (16, 32, 64, 128)  # input features that share a scale
STREAM_ROWS = 128  # rows of the stream kernel, at most
TILE_MMA_ROWS = 16  # of a tile that mma multiplies, at most; wgmma with more
EXACT_ROWS = 8  # of them, if products of fp8 codes can compute more
INT8_EXACT_ROWS = 64  # and if products of int8 codes can
CODE_ROWS = 64  # of the kernel for products of codes; with more, PyTorch's
CODES = "codes"  # in place of a format in a key: the product of codes
GEMV_CODES = (
    27 << 20
)  # bytes of a weight that its gemv kernel computes: it has half of them in flight before its input is ready
LARGE = 10**8  # codes of a weight whose 4-bit tiles have more rows
QUANTIZED_TILES = (  # rows of the weight, columns, warps and programs, at most, of other configs
    *((n, k, 4, programs) for n, k in ((128, 128), (128, 256), (64, 256), (64, 128)) for programs in (2 * SMS, SMS)),
    *((n, k, 4, 3 * SMS) for n, k in ((128, 256), (128, 128), (64, 256))),
    *((n, k, 8, SMS) for n, k in ((128, 128), (128, 256), (256, 128))),
)
QUANTIZED_GEMV_TILES = (  # rows, warps, chunks, programs for each SM
    *((16, 8, 4, 0), (16, 8, 8, 0), (16, 4, 4, 0), (16, 4, 8, 0), (16, 8, 2, 0), (32, 8, 2, 0), (32, 4, 4, 0)),
    *((16, 8, 4, 2), (16, 8, 4, 3), (16, 4, 4, 4), (32, 8, 2, 2)),
)
REGISTERS = {(4, 1): 144, (8, 1): 168, (4, 2): 128, (4, 3): 80}  # of a thread, by warps and programs of an SM
WGMMA_REGISTERS = 128  # fewer do not suffice for wgmma's operands
TILE_N = 256  # rows of the weight of a tile, with more than STREAM_ROWS rows: four wgmmas
# Rows times codes of a 4-bit weight from which its tiles were faster than writing it in 16 bits for cuBLAS: measured on an H100 with
# the layers of Llama 8B and 70B and 256 to 4,096 rows.
LEAST_TILED = 10**10
MIN_SHARERS = 8  # programs of a tile of rows, at least
PIECE = 64  # input features of a wgmma's operand A in registers, at most
COLUMNS = 8  # of operand B of an mma: rows of the input, for each group of a chunk

# --- configs ---------------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Format:
    """How a weight is stored. kind: `fp8`, `int8` or `int4`. group: input features that share a scale, 0 for all of them."""

    kind: str
    group: int = 0
    zeros: bool = False
    wide_scales: bool = False  # of groups: fp32 rather than 16 bits

    @property
    def name(self) -> str:
        """In the keys of tables: `int4-128-zeros`."""
        return "-".join([self.kind, str(self.group), *["zeros"] * self.zeros, *["wide"] * self.wide_scales])

    @classmethod
    def parse(cls, name: str) -> "Format":
        """The inverse of `name`. Raises ValueError."""
        kind, group, *flags = name.split("-")
        found = cls(kind, int(group), "zeros" in flags, "wide" in flags)
        if found.name != name or kind not in ("fp8", "int8", "int4") or found.group not in (0, *GROUPS):
            raise ValueError(name)
        return found

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8

    @property
    def unit(self) -> int:
        """Input features whose codes are 16 bytes of a row, which four threads share."""
        return 128 // self.bits

    @property
    def piece(self) -> int:
        """Input features that are converted and multiplied at a time."""
        return min(PIECE, self.group or PIECE)


@dataclass(frozen=True)
class QuantizedStream(Stream):
    """`Stream` of a quantized weight. `programs` may be a multiple of the number of SMs, if as many fit an SM.

    sums: fp32 sums of a thread, at most; with groups, as many more are those of one group.
    """

    sums: int = SUMS

    def tile_rows(self, rows: int) -> int:
        return min(super().tile_rows(rows), self.sums * 32 * self.warps // self.block_n)

    def step_bytes(self, rows: int, fmt: Format) -> int:
        """Of a step's codes, input and scales."""
        groups = self.block_k // fmt.group if fmt.group else 0
        scale = (4 if fmt.wide_scales else 2) + (2 if fmt.zeros else 0)
        codes = self.block_n * self.block_k * fmt.bits // 8
        return codes + 2 * self.block_k * self.tile_rows(rows) + groups * self.block_n * scale

    def ring_bytes(self, rows: int, fmt: Format) -> int:
        """Of the buffers and their barriers."""
        return self.stages * (self.step_bytes(rows, fmt) + 16)

    @property
    def on_an_sm(self) -> int:
        """Programs that share an SM."""
        return -(-self.programs // SMS)

    def registers(self, rows: int) -> int:
        """Registers of a thread at launch. Then the other warps give most of theirs to the multiplying ones, which get 248, 232,
        216 or 120. Raises KeyError if so many programs do not fit."""
        return REGISTERS[self.warps, self.on_an_sm]

    def is_mma(self, rows: int) -> bool:
        """Whether mma multiplies, rather than wgmma."""
        return self.tile_rows(rows) <= TILE_MMA_ROWS

    def fits(self, rows: int, n: int, k: int, swiglu: bool, fmt: Format) -> bool:
        """Whether the kernel can compute this layer of 16-bit inputs."""
        block = self.block_n // (2 if swiglu else 1)  # rows of the weight in a wgmma
        room = block >= 16 * self.warps and self.stages >= 2 and self.ring_bytes(rows, fmt) <= STREAM_BYTES // self.on_an_sm
        aligned = k % fmt.unit == 0 and fmt.group % fmt.unit == 0 and self.block_k % 128 == 0
        steps = -(-n // self.block_n) * -(-k // self.block_k)
        registers = REGISTERS.get((self.warps, self.on_an_sm), 0) >= (1 if self.is_mma(rows) else WGMMA_REGISTERS)
        sums = self.sums <= (SUMS // 2 if fmt.group else SUMS)
        return room and aligned and registers and sums and self.sharers(rows) > 0 and steps * self.programs < 2**31


@dataclass(frozen=True)
class QuantizedTiles(Stream):
    """Config of the kernel for many rows: tiles of `block_n` rows of the weight, half of them for each of two warpgroups, and `rows`
    rows of the input."""

    warps: int = 8
    rows: int = 128

    def tile_rows(self, rows: int) -> int:
        return self.rows

    @property
    def most_rows(self) -> int:
        """Of a launch. A program has one tile of rows, so with many tiles of rows their numbers of programs would leave SMs idle."""
        return self.rows * (self.programs // MIN_SHARERS)

    def ring_bytes(self, fmt: Format) -> int:
        """Of the buffers and their barriers."""
        groups = self.block_k // fmt.group if fmt.group else 0
        codes = self.block_n * (self.block_k * fmt.bits // 8 + groups * (4 if fmt.zeros else 2))
        return self.stages * (codes + 2 * self.block_k * self.rows + 16)

    def fits(self, n: int, k: int, fmt: Format) -> bool:
        """Whether the kernel can compute this layer of 16-bit inputs, whose scales of groups have 16 bits, too."""
        room = self.stages >= 2 and self.ring_bytes(fmt) <= STREAM_BYTES
        aligned = k % fmt.unit == 0 and fmt.group % fmt.unit == 0 and self.block_k % 128 == 0
        tile = self.block_n == TILE_N and self.warps == 8 and self.rows in (64, 128) and self.programs >= MIN_SHARERS
        steps = -(-n // self.block_n) * -(-k // self.block_k)
        return room and aligned and tile and not fmt.wide_scales and steps * self.programs < 2**31


@dataclass(frozen=True)
class QuantizedGemv:
    """Config of the gemv kernel. Each program has tiles of `block_n` rows of the weight, a multiple of 16, and `warps` warps with
    `chunks` chunks of a row in flight, each of 64 bytes. on_an_sm: programs for each SM, at most; 0 for one for each tile."""

    block_n: int
    warps: int
    chunks: int
    on_an_sm: int = 0

    @property
    def registers(self) -> int | None:
        """Of a thread, at most, so that as many programs fit an SM."""
        return 65536 // (32 * self.warps * self.on_an_sm) // 8 * 8 if self.on_an_sm else None

    def groups(self, fmt: Format) -> int:
        """Groups of a chunk."""
        return max(1, 4 * fmt.unit // fmt.group) if fmt.group else 1

    def fits(self, rows: int, n: int, k: int, swiglu: bool, fmt: Format) -> bool:
        """Whether the kernel can compute this layer of 16-bit inputs."""
        return rows <= COLUMNS // self.groups(fmt) and k % fmt.unit == 0 and fmt.group % fmt.unit == 0


QuantizedConfig = QuantizedGemv | QuantizedStream | QuantizedTiles

# --- the choice ------------------------------------------------------------------------------------------------------------


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


@cache
def quantized_config(rows: int, n: int, k: int, fmt: Format, swiglu: bool) -> QuantizedConfig | None:
    """The config for `rows` rows and an (n, k) weight; None if no kernel supports it, or none was faster than PyTorch."""
    if (key := table_key(min(rows, PROMPT_ROWS[-1]), n, k, swiglu, fmt.name)) in _tuned:
        return _tuned[key]
    if rows > STREAM_ROWS and (fmt.bits != 4 or rows * n * k < LEAST_TILED):
        return None
    return next(iter(quantized_candidates(rows, n, k, fmt, swiglu)), None)


@cache
def code_config(rows: int, n: int, k: int) -> Stream | None:
    """The config for products of fp8 codes (rows, k) and (n, k); None if PyTorch's are expected to be faster."""
    if (key := table_key(rows, n, k, kind=CODES)) in _tuned:
        return _tuned[key]
    found = code_candidates(rows, n, k)
    return found[0] if found and rows <= CODE_ROWS else None


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


def table_key(rows: int, n: int, k: int, swiglu: bool = False, kind: str = "") -> str:
    """The key in a table of these rows, rounded up to a power of two, and this weight. kind: of a quantized weight the name of its
    `Format`, or CODES for a product of fp8 codes."""
    return ",".join([f"{_bucket(rows)},{n},{k}", *["swiglu"] * swiglu, *[kind] * bool(kind)])


def _bucket(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


# --- tables ----------------------------------------------------------------------------------------------------------------


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


def use(configs: Mapping[str, Any]) -> None:
    """Prefer these configs by `table_key`, which were measured on this machine, from now on."""
    _tuned.update(configs)
    for choice in (config, quantized_config, code_config):
        choice.cache_clear()


_tuned: dict[str, Any] = {}


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


# --- candidates, of which the fastest is measured ---------------------------------------------------------------------------

GEMV_TILES = {  # by rows: (n, k, warps, prefetch); with more rows of x, more rows of the weight (n) reuse each tile of x
    1: ((1, 4096, 4, True), (2, 2048, 4, False), (2, 2048, 4, True), (4, 1024, 4, False), (4, 512, 2, True)),
    2: ((2, 2048, 4, False), (2, 2048, 4, True), (4, 1024, 4, False), (4, 512, 2, True), (8, 512, 4, False)),
    4: ((4, 1024, 4, False), (8, 512, 4, False)),
}
# by rows: (n, k, warps). Each program of a tile reads the whole input from L2, so a tile of few features reads, with 64 rows and
# more, as many bytes of the input as of the weight
STREAM_TILES = {
    8: ((64, 128, 4), (64, 256, 4)),
    16: ((64, 128, 4), (64, 256, 4)),
    32: ((64, 128, 4), (128, 128, 4)),
    64: ((64, 128, 4), (128, 128, 4), (128, 128, 8), (256, 64, 8)),
    128: ((64, 64, 4), (128, 64, 4), (128, 64, 8), (256, 64, 8)),
    256: ((128, 64, 8), (256, 64, 8)),
}


@dataclass(frozen=True)
class Shape:
    """A weight (n, k), and whether the layer is `linear_swiglu`."""

    n: int
    k: int
    swiglu: bool = False

    @property
    def bytes(self) -> int:
        return 2 * self.n * self.k


def candidates(rows: int, shape: Shape) -> list[Config]:
    """About six to ten configs to try, starting with that of the heuristic `default_config`."""
    default = default_config(rows, shape.n, shape.k, torch.bfloat16, shape.swiglu)
    found: list[Config] = [default] if default else []
    if rows <= GEMV_ROWS:
        found += gemv_candidates(rows, shape)
    if 1 < rows <= MMA_ROWS:
        found += mma_candidates(rows, shape)[: 1 if rows == 2 else None]
    if has_stream():
        found += stream_candidates(rows, shape)
    return list(dict.fromkeys(found))


def gemv_candidates(rows: int, shape: Shape) -> list[Config]:
    """GEMV tiles that give every SM work and pad K by at most 20 %."""
    return [
        Gemv(block_n, block_k, warps, prefetch)
        for block_n, block_k, warps, prefetch in GEMV_TILES[rows]
        if -(-shape.k // block_k) * block_k <= 1.2 * shape.k and shape.n // block_n >= 2 * SMS and block_n > shape.swiglu
    ]


def mma_candidates(rows: int, shape: Shape) -> list[Config]:
    """Tiles and splits of K. One, two or three programs share an SM, and each SM runs that many or twice as many in total."""
    tiles: list[Config] = [
        mma_candidate(rows, shape, 64, 128, sharing=2, each=2),
        replace(mma_candidate(rows, shape, 64, 128, sharing=2, each=2), early=False),
        mma_candidate(rows, shape, 64, 128, sharing=3, each=3),
    ]
    if rows <= GEMV_ROWS or (rows <= 16 and has_stream()):  # the other kernels are mostly faster there
        return tiles
    if rows > 16:
        wide = mma_candidate(rows, shape, 128, 128, sharing=1, each=1)
        return [*tiles[:2], replace(wide, warps=8, early=False)]
    return [
        *tiles,
        mma_candidate(rows, shape, 64, 128, sharing=3, each=6),
        mma_candidate(rows, shape, 64, 64 if shape.k > 2048 else 256, sharing=3, each=3),
        mma_candidate(rows, shape, 32, 128, sharing=2, each=2),
    ]


def mma_candidate(rows: int, shape: Shape, block_n: int, block_k: int, sharing: int, each: int) -> Mma:
    tiles, steps = -(-shape.n // block_n), -(-shape.k // block_k)
    split = max(1, min(each * SMS // tiles, steps // 2, 16))
    return Mma(block_n, block_k, split, pipeline_stages(rows, block_n, block_k, sharing))


def stream_candidates(rows: int, shape: Shape) -> list[Stream]:
    """Tiles with as many buffers as an SM has room for, the first also with so few that two programs share an SM."""
    found: list[Stream] = []
    for block_n, block_k, warps in STREAM_TILES[min(max(8, 1 << (rows - 1).bit_length()), 256)]:
        if shape.swiglu and block_n < 32 * warps:
            block_n, block_k = 2 * block_n, max(64, block_k // 2)
        rings = (STREAM_BYTES,) if found else (STREAM_BYTES, STREAM_BYTES // 2)
        tiles = [stream_candidate(rows, block_n, block_k, warps, ring) for ring in rings]
        programs = whole_programs(-(-shape.n // block_n))
        found += [replace(tile, programs=programs) for tile in tiles if tile is tiles[0] or tile.shares_an_sm(rows)]
    return [config for config in dict.fromkeys(found) if config.supports(rows, shape.n, shape.k, shape.swiglu)]


def stream_candidate(rows: int, block_n: int, block_k: int, warps: int, shared: int = STREAM_BYTES) -> Stream:
    one = Stream(block_n, block_k, 1, warps)
    return replace(one, stages=max(1, shared // one.shared_bytes(rows)))


def whole_programs(tiles: int, most: int = SMS) -> int:
    """A number of programs, at least 0.9 times `most` if there is one, that gives each the same number of tiles or each tile the
    same number of programs; else `most`."""
    equal = [n for n in range(round(0.9 * most), most + 1) if tiles % n == 0 or n % tiles == 0]
    return max(equal, default=most)


def code_candidates(rows: int, n: int, k: int) -> list[Stream]:
    """Configs to try, the one that is expected to be fastest first: those of a layer of 16 bits with as many bytes."""
    found = stream_candidates(rows, Shape(n, k // 2))
    return sorted(found, key=lambda chosen: chosen.block_n != 64)


def quantized_candidates(rows: int, n: int, k: int, fmt: Format, swiglu: bool) -> list[QuantizedConfig]:
    """Configs to try, the one that is expected to be fastest first: measured on an H200 with the layers of Llama 8B and 70B."""
    if rows > STREAM_ROWS:
        return _quantized_tiles(n, k, fmt)
    gemv = _quantized_gemvs(rows, n, k, fmt, swiglu) if rows <= COLUMNS else []
    stream = quantized_streams(rows, n, k, fmt, swiglu)
    return [*gemv, *stream] if rows <= GEMV_ROWS and n * k * fmt.bits // 8 <= GEMV_CODES else [*stream, *gemv]


def _quantized_tiles(n: int, k: int, fmt: Format) -> list[QuantizedConfig]:
    """Each has as many buffers as there is room for. On an H100 tiles of 256 columns were faster than of 128, and tiles of 64 rows
    only for few rows and small weights."""
    found = []
    for tile_k, rows in ((256, 128), (128, 128), (128, 64)):
        one = QuantizedTiles(TILE_N, tile_k, 1, rows=rows)
        found.append(replace(one, stages=STREAM_BYTES // one.ring_bytes(fmt)))
    fitting = {one.rows: one for one in reversed(found) if one.fits(n, k, fmt)}  # for each number of rows the first that fits
    return [fitting[rows] for rows in (128, 64) if rows in fitting]


def _quantized_gemvs(rows: int, n: int, k: int, fmt: Format, swiglu: bool) -> list[QuantizedGemv]:
    """Tiles without more chunks than a row has."""
    row, found = -(-k * fmt.bits // 512), []  # chunks
    for block_n, warps, chunks, on_an_sm in QUANTIZED_GEMV_TILES:
        one = QuantizedGemv(block_n, warps, chunks, on_an_sm)
        if (warps * chunks < 2 * row or chunks == 2) and n > block_n * SMS * on_an_sm and one.fits(rows, n, k, swiglu, fmt):
            found.append(one)
    first = QuantizedGemv(16, 4, 8)
    return sorted(found, key=lambda one: one != first)


def quantized_streams(rows: int, n: int, k: int, fmt: Format, swiglu: bool) -> list[QuantizedStream]:
    """Each has as many buffers as there is room for."""
    sums = SUMS // 2 if fmt.group else SUMS
    block_n = 128 if swiglu or (fmt.bits == 4 and n * k >= LARGE) else 64
    first = (block_n, 256 if rows <= 32 else 128, 4, SMS if rows > 64 and (block_n == 64 or fmt.bits == 8) else 2 * SMS)
    found = []
    for tile_n, tile_k, warps, most in dict.fromkeys((first, *QUANTIZED_TILES)):
        programs = whole_programs(-(-n // tile_n), most)
        one = QuantizedStream(tile_n, tile_k, 1, warps, programs, sums)
        stages = STREAM_BYTES // one.on_an_sm // one.ring_bytes(rows, fmt)
        chosen = replace(one, stages=min(stages, 24))
        if chosen.fits(rows, n, k, swiglu, fmt):
            found.append(chosen)
    return found
