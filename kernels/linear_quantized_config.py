"""Launch configurations of quantized linear layers, and what their kernels need to know of a weight."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from kernels import linear_config, linear_tuning
from kernels.linear_config import GEMV_ROWS, PROMPT_ROWS, SMS, STREAM_BYTES, SUMS, Stream

GROUPS = (16, 32, 64, 128)  # input features that share a scale
STREAM_ROWS = 128  # rows of the stream kernel, at most
MMA_ROWS = 16  # of a tile that mma multiplies, at most; wgmma with more
EXACT_ROWS = 8  # of them, if products of fp8 codes can compute more
INT8_EXACT_ROWS = 64  # and if products of int8 codes can
CODE_ROWS = 64  # of the kernel for products of codes; with more, PyTorch's
CODES = "codes"  # in place of a format in a key: the product of codes
GEMV_CODES = (
    27 << 20
)  # bytes of a weight that the gemv kernel computes: it has half of them in flight before its input is ready
LARGE = 10**8  # codes of a weight whose 4-bit tiles have more rows
TILES = (  # rows of the weight, columns, warps and programs, at most, of other configs
    *((n, k, 4, programs) for n, k in ((128, 128), (128, 256), (64, 256), (64, 128)) for programs in (2 * SMS, SMS)),
    *((n, k, 4, 3 * SMS) for n, k in ((128, 256), (128, 128), (64, 256))),
    *((n, k, 8, SMS) for n, k in ((128, 128), (128, 256), (256, 128))),
)
GEMV_TILES = (  # rows, warps, chunks, programs for each SM
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
        return self.tile_rows(rows) <= MMA_ROWS

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


_tuned: dict[str, Any] = {}  # by `table_key`


def table_key(rows: int, n: int, k: int, fmt: Format | None, swiglu: bool = False) -> str:
    """The key of these rows, rounded up to a power of two, and this weight. fmt: None for a product of fp8 codes."""
    return f"{linear_config.table_key(rows, n, k, swiglu)},{fmt.name if fmt else CODES}"


def use(configs: Mapping[str, Any]) -> None:
    """Prefer these configs by `table_key`, which were measured on this machine, from now on."""
    _tuned.update(configs)
    config.cache_clear()
    code_config.cache_clear()


@cache
def config(rows: int, n: int, k: int, fmt: Format, swiglu: bool) -> QuantizedConfig | None:
    """The config for `rows` rows and an (n, k) weight; None if no kernel supports it, or none was faster than PyTorch."""
    if (key := table_key(min(rows, PROMPT_ROWS[-1]), n, k, fmt, swiglu)) in _tuned:
        return _tuned[key]
    if rows > STREAM_ROWS and (fmt.bits != 4 or rows * n * k < LEAST_TILED):
        return None
    return next(iter(candidates(rows, n, k, fmt, swiglu)), None)


@cache
def code_config(rows: int, n: int, k: int) -> Stream | None:
    """The config for products of fp8 codes (rows, k) and (n, k); None if PyTorch's are expected to be faster."""
    if (key := table_key(rows, n, k, None)) in _tuned:
        return _tuned[key]
    found = code_candidates(rows, n, k)
    return found[0] if found and rows <= CODE_ROWS else None


def code_candidates(rows: int, n: int, k: int) -> list[Stream]:
    """Configs to try, the one that is expected to be fastest first: those of a layer of 16 bits with as many bytes."""
    found = linear_tuning.stream_candidates(rows, linear_tuning.Shape(n, k // 2))
    return sorted(found, key=lambda chosen: chosen.block_n != 64)


def candidates(rows: int, n: int, k: int, fmt: Format, swiglu: bool) -> list[QuantizedConfig]:
    """Configs to try, the one that is expected to be fastest first: measured on an H200 with the layers of Llama 8B and 70B."""
    if rows > STREAM_ROWS:
        return tile_candidates(n, k, fmt)
    gemv = gemv_candidates(rows, n, k, fmt, swiglu) if rows <= COLUMNS else []
    stream = stream_candidates(rows, n, k, fmt, swiglu)
    return [*gemv, *stream] if rows <= GEMV_ROWS and n * k * fmt.bits // 8 <= GEMV_CODES else [*stream, *gemv]


def tile_candidates(n: int, k: int, fmt: Format) -> list[QuantizedConfig]:
    """Each has as many buffers as there is room for. On an H100 tiles of 256 columns were faster than of 128, and tiles of 64 rows
    only for few rows and small weights."""
    found = []
    for tile_k, rows in ((256, 128), (128, 128), (128, 64)):
        one = QuantizedTiles(TILE_N, tile_k, 1, rows=rows)
        found.append(replace(one, stages=STREAM_BYTES // one.ring_bytes(fmt)))
    fitting = {one.rows: one for one in reversed(found) if one.fits(n, k, fmt)}  # for each number of rows the first that fits
    return [fitting[rows] for rows in (128, 64) if rows in fitting]


def gemv_candidates(rows: int, n: int, k: int, fmt: Format, swiglu: bool) -> list[QuantizedGemv]:
    """Tiles without more chunks than a row has."""
    row, found = -(-k * fmt.bits // 512), []  # chunks
    for block_n, warps, chunks, on_an_sm in GEMV_TILES:
        one = QuantizedGemv(block_n, warps, chunks, on_an_sm)
        if (warps * chunks < 2 * row or chunks == 2) and n > block_n * SMS * on_an_sm and one.fits(rows, n, k, swiglu, fmt):
            found.append(one)
    first = QuantizedGemv(16, 4, 8)
    return sorted(found, key=lambda one: one != first)


def stream_candidates(rows: int, n: int, k: int, fmt: Format, swiglu: bool) -> list[QuantizedStream]:
    """Each has as many buffers as there is room for."""
    sums = SUMS // 2 if fmt.group else SUMS
    block_n = 128 if swiglu or (fmt.bits == 4 and n * k >= LARGE) else 64
    first = (block_n, 256 if rows <= 32 else 128, 4, SMS if rows > 64 and (block_n == 64 or fmt.bits == 8) else 2 * SMS)
    found = []
    for tile_n, tile_k, warps, most in dict.fromkeys((first, *TILES)):
        programs = linear_tuning.whole_programs(-(-n // tile_n), most)
        one = QuantizedStream(tile_n, tile_k, 1, warps, programs, sums)
        stages = STREAM_BYTES // one.on_an_sm // one.ring_bytes(rows, fmt)
        chosen = replace(one, stages=min(stages, 24))
        if chosen.fits(rows, n, k, swiglu, fmt):
            found.append(chosen)
    return found
