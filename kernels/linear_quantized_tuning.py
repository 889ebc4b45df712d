"""Measures which configs make quantized linear layers fastest on this GPU, as `kernels/linear_tuning.py` does for layers
in 16 bits.

Only the tiles are measured, of the kernel that `kernels/linear_quantized_config.py` expects to be the fastest. A norm precedes each
layer, as in a model: directly behind one another, programs of two layers share an SM more than they do in a model, which was slower
with what was fastest so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear_quantized_config
from kernels.activation import swiglu
from kernels.linear_config import PROMPT_ROWS, Stream
from kernels.linear_quantized import Packed, dequantize, is_exact, linear_with, scaled_linear_with
from kernels.linear_quantized_config import (
    CODE_ROWS,
    CODES,
    EXACT_ROWS,
    STREAM_ROWS,
    Format,
    QuantizedConfig,
    QuantizedStream,
    table_key,
)
from kernels.linear_tuning import CHECKED, ROWS, Problem, Shape
from kernels.norm import rms_norm
from kernels.row_codes import FP8, MAX_SIZE, RowCodes, quantize_rows

MOST_CONFIGS = 6  # of a case that are measured
# Rows of the weight, columns, warps and programs on an SM of stream configs that are measured first. With 1 to 16 rows of the layers of
# Llama 8B and 70B on an H200, one of them was always about as fast as the fastest of all.
TILES = ((128, 256, 4, 2), (128, 256, 4, 1), (64, 256, 4, 2), (128, 256, 4, 3), (64, 256, 4, 3))


@dataclass(frozen=True, kw_only=True)
class QuantizedShape(Shape):
    """A quantized weight. scaled: whether the layer multiplies fp8 codes if it has more than EXACT_ROWS rows."""

    format: Format
    scaled: bool = False


@dataclass(frozen=True)
class QuantizedProblem(Problem):
    """`rows` rows times each of `weights`. With more than EXACT_ROWS rows of a `scaled` weight the product of codes, without SwiGLU,
    which another kernel computes."""

    shape: QuantizedShape
    weights: Sequence[Packed]  # type: ignore[assignment]
    dtype: torch.dtype = torch.bfloat16  # of the input

    @property
    def of_codes(self) -> bool:
        return self.shape.scaled and self.rows > EXACT_ROWS

    @property
    def is_used(self) -> bool:
        """Whether a layer with such a weight and so many rows has a config."""
        return self.of_codes or is_exact(self.weights[0], self.rows, self.dtype)

    @property
    def key(self) -> str:
        shape = self.shape
        fmt, gated = (None, False) if self.of_codes else (shape.format, shape.swiglu)
        return table_key(self.rows, shape.n, shape.k, fmt, gated)

    def candidates(self) -> list[Any]:
        shape = self.shape
        if self.of_codes:
            return linear_quantized_config.code_candidates(self.rows, shape.n, shape.k)[:MOST_CONFIGS]
        found = linear_quantized_config.candidates(self.rows, shape.n, shape.k, shape.format, shape.swiglu)
        alike = [config for config in found[1:] if type(config) is type(found[0])]
        return [*found[:1], *sorted(alike, key=lambda config: _tile(config) not in TILES)][:MOST_CONFIGS]

    @property
    def device(self) -> torch.device:
        return self.weights[0].codes.device

    def input(self) -> Any:
        x = torch.randn(self.rows, self.shape.k, device=self.device, dtype=self.dtype)
        return quantize_rows(x) if self.of_codes else x

    @cached_property  # outside the graph's capture: another kernel there would change the times
    def _ones(self) -> Tensor:
        return torch.ones(self.rows, self.shape.k, dtype=self.dtype, device=self.device)

    def before(self, x: Any) -> Any:
        if self.shape.k > MAX_SIZE:
            return x
        return quantize_rows(self._ones) if isinstance(x, RowCodes) else rms_norm(x, self._ones[0], 1e-5)

    def usual(self) -> Any:
        return next(iter(self.candidates()), None)

    def plain(self, x: Any, weight: Any) -> Tensor:
        """What computes the layer without a config."""
        if isinstance(x, RowCodes):
            return scaled_linear_with(x, weight, None, None)
        y = F.linear(x, dequantize(weight, x.dtype))
        return swiglu(y) if self.shape.swiglu else y

    def ours(self, x: Any, weight: Any, config: Any) -> Tensor:
        if isinstance(x, RowCodes):
            return scaled_linear_with(x, weight, None, config)
        return linear_with(x, weight, None, config, self.shape.swiglu)

    def exact(self, x: Any, weight: Any) -> Tensor:
        parts = 2 if self.shape.swiglu and not self.of_codes else 1
        rows = torch.arange(weight.n, device=weight.codes.device).view(parts, -1)[:, :CHECKED].flatten()
        zeros = None if weight.zeros is None else weight.zeros[..., rows]
        some = replace(weight, n=len(rows), codes=weight.codes[rows], scales=weight.scales[..., rows].contiguous(), zeros=zeros)
        if isinstance(x, RowCodes):
            return F.linear(x.codes.float(), some.codes.view(FP8).float()) * x.scales * some.scales
        return self.plain(x.float(), some)

    def kernel_key(self, config: Any) -> tuple[Any, ...]:
        shape = self.shape
        special = (self.rows == 1, self.rows % 16 == 0)  # Triton compiles integers that are 1, or multiples of 16, as such
        if self.of_codes:
            return (*super().kernel_key(config), CODES)
        if isinstance(config, Stream):
            even = shape.n // (2 if shape.swiglu else 1) % 16 == 0
            return (config, config.tile_rows(self.rows), shape.format, shape.swiglu, even, *special)
        return (config, shape.n, shape.k, shape.format, shape.swiglu, *special)


def _tile(config: QuantizedConfig) -> tuple[int, ...] | None:
    if not isinstance(config, QuantizedStream):
        return None
    return config.block_n, config.block_k, config.warps, config.on_an_sm


def row_counts(shape: QuantizedShape, most: int) -> list[int]:
    """The numbers of rows to measure, if decoding computes at most `most`."""
    few = [rows for rows in ROWS if rows < 2 * most and rows <= (CODE_ROWS if shape.scaled else STREAM_ROWS)]
    return few + ([] if shape.scaled else [2 * STREAM_ROWS, *PROMPT_ROWS])


def problem_of(rows: int, n: int, k: int, gated: bool, kind: str) -> QuantizedProblem:
    """The problem of a key's fields, without weights. Raises ValueError if there is no such kind of weight."""
    if kind == CODES and not gated and rows > EXACT_ROWS:
        return QuantizedProblem(rows, QuantizedShape(n, k, format=Format("fp8"), scaled=True), [])
    return QuantizedProblem(rows, QuantizedShape(n, k, gated, format=Format.parse(kind)), [])
