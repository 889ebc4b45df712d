"""Linear layers of few input rows: at decoding, the time of a layer is that of reading its weight once.

PyTorch defines the layers. On a GPU, up to MAX_ROWS rows go to the Triton kernels of `kernels/linear_triton.py` wherever they
are expected to beat cuBLAS: `linear_configs.json`, which `make bench-linear` measures, says it of the shapes it knows,
a heuristic of the others.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import swiglu
from kernels.dispatch import on_gpu

MAX_ROWS = 64
GEMV_ROWS = 4  # more cost the FMA units longer than the memory
SMS = 132  # of an H100 or H200; the heuristic wants at least two programs on each
SHARED_BYTES = 212 << 10  # of an SM's 227 KB, shared by its programs
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CONFIGS = Path(__file__).with_name("linear_configs.json")


@dataclass(frozen=True)
class Gemv:
    """Each program has `block_n` rows of the weight, `block_k` columns at a time."""

    block_n: int
    block_k: int
    warps: int
    prefetch: bool = True  # whether to ask L2 for columns beyond the first tile before the input is there


@dataclass(frozen=True)
class Mma:
    """Tensor cores; each program has `block_n` rows of the weight and 1 / `split` of their columns, `block_k` at a time."""

    block_n: int
    block_k: int
    split: int
    stages: int
    warps: int = 4
    early: bool = True  # whether to load a tile before the input is there


Config = Gemv | Mma


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias with fp32 accumulation: (..., K), (N, K) and (N,) to (..., N). One dtype: bf16, fp16 or fp32.

    With few rows on a GPU, layers of one device must run one after another (they share counters), and the first of them
    outside a CUDA graph's capture.
    """
    chosen = _chosen(x, weight, bias, swiglu=False)
    return F.linear(x, weight, bias) if chosen is None else _run(x, weight, bias, chosen, swiglu=False)


def linear_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up of (gate, up) = linear(x): (..., K), (2I, K), the gate's I rows first, and (2I,) to (..., I).

    Where one kernel does it all, gate and up stay in fp32 and only the result is rounded (Shazeer, arXiv:2002.05202); elsewhere
    `linear` rounds them before `kernels.activation.swiglu`. The conditions are those of `linear`.
    """
    chosen = _chosen(x, weight, bias, swiglu=True)
    return swiglu(linear(x, weight, bias)) if chosen is None else _run(x, weight, bias, chosen, swiglu=True)


@cache
def config(rows: int, n: int, k: int, dtype: torch.dtype, swiglu: bool = False) -> Config | None:
    """How to multiply `rows` rows with an (n, k) weight; None where F.linear, and a kernel for `swiglu`, should be as fast."""
    if not 0 < rows <= MAX_ROWS:
        return None
    for key in (table_key(rows, n, k, swiglu), table_key(rows, n, k)):  # the layer alone is a good guess
        if dtype.itemsize == 2 and key in measured():
            return _with_pairs(measured()[key]) if swiglu else measured()[key]
    return default_config(rows, n, k, dtype, swiglu)


def default_config(rows: int, n: int, k: int, dtype: torch.dtype, swiglu: bool = False) -> Config | None:
    """The heuristic for shapes that nobody measured: 1 to MAX_ROWS rows."""
    rows = _bucket(rows)
    if rows <= GEMV_ROWS:
        chosen = _default_gemv(rows, n, k, 16 // dtype.itemsize)
        return _with_pairs(chosen) if swiglu else chosen
    return _default_mma(rows, n, k) if dtype.itemsize == 2 else None  # fp32 on tensor cores would be rounded to TF32


def _with_pairs(chosen: Config | None) -> Config | None:
    """The config of programs that have a row of the gate with each row of `up`."""
    if isinstance(chosen, Gemv) and chosen.block_n == 1:
        return replace(chosen, block_n=2, block_k=max(chosen.block_k // 2, 128 * chosen.warps))
    return chosen


def pipeline_stages(rows: int, block_n: int, block_k: int, programs: int = 2) -> int:
    """The most that let `programs` programs of `Mma` share an SM's memory."""
    return max(2, min(8, SHARED_BYTES // programs // (2 * block_k * (block_n + max(16, rows)))))


def table_key(rows: int, n: int, k: int, swiglu: bool = False) -> str:
    """What `linear_configs.json` calls these rows, rounded up to a power of two, and this shape."""
    return f"{_bucket(rows)},{n},{k}" + (",swiglu" if swiglu else "")


def _bucket(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


@cache
def measured() -> Mapping[str, Config | None]:
    """The configs that were measured, by `table_key`; empty without a table."""
    if not CONFIGS.exists():
        return {}
    return {key: parse_config(fields) for key, fields in json.loads(CONFIGS.read_text())["configs"].items()}


def parse_config(fields: Mapping[str, Any] | None) -> Config | None:
    """A config as `linear_configs.json` has it: `kind`, `gemv` or `mma`, and the dataclass's fields; null for F.linear."""
    if fields is None:
        return None
    kinds: dict[str, type[Gemv] | type[Mma]] = {"gemv": Gemv, "mma": Mma}
    return kinds[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


def format_config(config: Config | None) -> dict[str, Any] | None:
    """What `parse_config` reads."""
    return None if config is None else {"kind": type(config).__name__.lower(), **asdict(config)}


def _default_gemv(rows: int, n: int, k: int, vector: int) -> Gemv:
    """vector: values in 16 bytes, of which each thread takes one piece of a row at a time, or more where rows are few."""
    block_n = max(b for b in (1, 2, 4) if b == 1 or n // b >= 8 * SMS)
    block_k = min(512 * vector // max(block_n, rows), max(k & -k, 32 * vector), 1 << (k - 1).bit_length())
    return Gemv(block_n, block_k, warps=min(4, max(1, block_k // (32 * vector))))


def _default_mma(rows: int, n: int, k: int) -> Mma:
    block_n, block_k = 64, min(128 if rows <= 32 else 64, max(16, 1 << (k - 1).bit_length()))
    programs, steps = -(-n // block_n), -(-k // block_k)
    split = max(1, min(round(2 * SMS / programs), steps // 4, 16))
    return Mma(block_n, block_k, split, pipeline_stages(rows, block_n, block_k))


def _chosen(x: Tensor, weight: Tensor, bias: Tensor | None, swiglu: bool) -> Config | None:
    """The config of this layer; None leaves it to F.linear, which also reports shapes that do not fit."""
    n, k = weight.shape
    if not on_gpu(x) or torch.compiler.is_compiling() or x.shape[-1] != k or not x.numel() or (swiglu and n % 2):
        return None
    same = x.dtype == weight.dtype and x.device == weight.device and (bias is None or bias.dtype == x.dtype)
    if not same or x.dtype not in DTYPES or not (weight.is_contiguous() and _aligned(x) and _aligned(weight)):
        return None
    return config(x.numel() // k, n, k, x.dtype, swiglu)


def _aligned(x: Tensor) -> bool:
    """Whether each row is contiguous and begins at a multiple of 16 bytes."""
    unit = 16 // x.element_size()
    aligned = x.shape[-1] % unit == 0 and all(stride % unit == 0 for stride in x.stride()[:-1])
    return aligned and x.stride(-1) == 1 and x.data_ptr() % 16 == 0


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Config, swiglu: bool) -> Tensor:
    from kernels import linear_triton  # a machine without a GPU may have no Triton

    out = linear_triton.run(x.reshape(-1, x.shape[-1]), weight, bias, chosen, swiglu)
    return out.view(*x.shape[:-1], out.shape[-1])
