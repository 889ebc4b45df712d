"""Linear layers of few input rows: at decoding, the time of a layer is that of reading its weight once.

PyTorch defines the layers. On a GPU, up to MAX_ROWS rows go to the Triton kernels of `kernels/linear_triton.py` wherever they
are expected to beat cuBLAS: `linear_configs.json`, which `scripts/bench_linear.py` measures, says it of the shapes it knows,
a heuristic of the others.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
SWIGLU_ROWS = 16  # every program computes all of silu(gate) * up: with more rows that is dearer than a kernel of its own
SMS = 132  # of an H100 or H200; the heuristic wants at least two programs on each
STAGES_BYTES = 88 << 10  # of an SM's 227 KB
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
    prefetch: bool = True


Config = Gemv | Mma


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias with fp32 accumulation: (..., K), (N, K) and (N,) to (..., N). One dtype: bf16, fp16 or fp32.

    With few rows on a GPU, layers of one device must run one after another (they share counters), and the first of them
    outside a CUDA graph's capture.
    """
    chosen = _chosen(x, weight, bias, weight.shape[1])
    if chosen is None:
        return F.linear(x, weight, bias)
    return _run(x, weight, bias, chosen, swiglu=False)


def swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """linear(silu(gate) * up): (..., 2K) and (N, K) to (..., N). The product is computed in fp32 and rounded once."""
    chosen = _chosen(gate_up, weight, None, 2 * weight.shape[1])
    if chosen is None or gate_up.numel() // gate_up.shape[-1] > SWIGLU_ROWS:
        return linear(swiglu(gate_up), weight)
    return _run(gate_up, weight, None, chosen, swiglu=True)


@cache
def config(rows: int, n: int, k: int, dtype: torch.dtype) -> Config | None:
    """How to multiply `rows` rows with an (n, k) weight; None where F.linear is expected to be as fast."""
    if not 0 < rows <= MAX_ROWS:
        return None
    key = table_key(rows, n, k)
    if dtype.itemsize == 2 and key in measured():
        return measured()[key]
    return default_config(rows, n, k, dtype)


def default_config(rows: int, n: int, k: int, dtype: torch.dtype) -> Config | None:
    """The heuristic for shapes that nobody measured: 1 to MAX_ROWS rows."""
    rows = _bucket(rows)
    if rows <= GEMV_ROWS:
        return _default_gemv(rows, n, k, 16 // dtype.itemsize)
    return _default_mma(rows, n, k) if dtype.itemsize == 2 else None  # fp32 on tensor cores would be rounded to TF32


def pipeline_stages(rows: int, block_n: int, block_k: int) -> int:
    """The most that let two programs of `Mma` share an SM's memory, SwiGLU's second input included."""
    return max(2, min(8, STAGES_BYTES // (2 * block_k * (block_n + max(16, rows)))))


def table_key(rows: int, n: int, k: int) -> str:
    """What `linear_configs.json` calls these rows, rounded up to a power of two, and this shape."""
    return f"{_bucket(rows)},{n},{k}"


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


def _chosen(x: Tensor, weight: Tensor, bias: Tensor | None, features: int) -> Config | None:
    """The config of an input (..., features); None leaves it to F.linear, which also reports shapes that do not fit."""
    if not on_gpu(x) or torch.compiler.is_compiling() or x.shape[-1] != features or not x.numel():
        return None
    same = x.dtype == weight.dtype and x.device == weight.device and (bias is None or bias.dtype == x.dtype)
    if not same or x.dtype not in DTYPES or not (weight.is_contiguous() and _aligned(x) and _aligned(weight)):
        return None
    return config(x.numel() // features, *weight.shape, x.dtype)


def _aligned(x: Tensor) -> bool:
    """Whether each row is contiguous and begins at a multiple of 16 bytes."""
    unit = 16 // x.element_size()
    aligned = x.shape[-1] % unit == 0 and all(stride % unit == 0 for stride in x.stride()[:-1])
    return aligned and x.stride(-1) == 1 and x.data_ptr() % 16 == 0


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Config, swiglu: bool) -> Tensor:
    from kernels import linear_triton  # a machine without a GPU may have no Triton

    return linear_triton.run(x.reshape(-1, x.shape[-1]), weight, bias, chosen, swiglu).view(*x.shape[:-1], len(weight))
