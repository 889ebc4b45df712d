"""Measures which configs make linear layers fastest on this GPU. `kernels/linear_config.py` says what a config is.

A time is that of one layer in a CUDA graph of a chain of layers with different weights, the median of several replays. Each
kernel may start while the previous one finishes, as in a model.

Of quantized layers only the tiles are measured, of the kernel that is expected to be the fastest. A norm precedes each layer, as in a
model: directly behind one another, programs of two layers share an SM more than they do in a model, which was slower with what was
fastest so.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import swiglu
from kernels.dispatch import replay_seconds
from kernels.linear import linear_with
from kernels.linear_config import (
    CODE_ROWS,
    CODES,
    EXACT_ROWS,
    MAX_ROWS,
    PROMPT_ROWS,
    STREAM_ROWS,
    Config,
    Format,
    Gemv,
    Mma,
    QuantizedConfig,
    QuantizedStream,
    Shape,
    Stream,
    candidates,
    code_candidates,
    has_stream,
    quantized_candidates,
    table_key,
)
from kernels.linear_quantized import Packed, dequantize, is_exact, scaled_linear_with
from kernels.linear_quantized import linear_with as quantized_linear_with
from kernels.norm import rms_norm
from kernels.row_codes import FP8, MAX_SIZE, RowCodes, quantize_rows

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHAIN = 24  # most layers in a graph
REPLAYS = 7
WARM_UPS = 3
CHECKED = 2048  # most features whose values are compared with fp32: all of them would take too much memory
KEPT_MARGIN = 0.98  # a kernel is kept if it takes less than this share of cuBLAS's time
USUAL_MARGIN = 1.03  # times the fastest config's time
TIE = 1.01  # times of the fastest config's time: as fast, within the noise
GEMV_IN_A_MODEL = 1.15  # times a gemv's time in a chain, with several rows: an estimate from Llama-3-8B with two on an H200
MOST_CONFIGS = 6  # of a quantized case that are measured
# Rows of the weight, columns, warps and programs on an SM of stream configs that are measured first. With 1 to 16 rows of the layers of
# Llama 8B and 70B on an H200, one of them was always about as fast as the fastest of all.
LIKELY_TILES = ((128, 256, 4, 2), (128, 256, 4, 1), (64, 256, 4, 2), (128, 256, 4, 3), (64, 256, 4, 3))


def row_counts(shape: Shape, most: int) -> list[int]:
    """The numbers of rows to measure, if decoding computes at most `most`."""
    prompts = PROMPT_ROWS if shape.swiglu and has_stream() else ()
    return [rows for rows in ROWS if rows < 2 * most] + [*prompts]


# --- what is measured ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """`rows` rows times each of `weights` (n, k)."""

    rows: int
    shape: Shape
    weights: Sequence[Tensor]

    @property
    def key(self) -> str:
        return table_key(self.rows, self.shape.n, self.shape.k, self.shape.swiglu)

    def candidates(self) -> list[Config]:
        return candidates(self.rows, self.shape)

    @property
    def device(self) -> torch.device:
        return self.weights[0].device

    def input(self) -> Any:
        return torch.randn(self.rows, self.shape.k, device=self.device, dtype=self.weights[0].dtype)

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        """By PyTorch, in the weight's dtype: cuBLAS, and a kernel for SwiGLU."""
        y = F.linear(x, weight)
        return swiglu(y) if self.shape.swiglu else y

    def ours(self, x: Tensor, weight: Tensor, config: Config) -> Tensor:
        return linear_with(x, weight, None, config, self.shape.swiglu)

    def before(self, x: Any) -> Any:
        """The input of a layer in a chain, from x: what the kernel before it computes."""
        return x

    def usual(self) -> Config | None:
        """The config that is kept unless another one is faster by more than USUAL_MARGIN."""
        return None

    def exact(self, x: Tensor, weight: Tensor) -> Tensor:
        """In fp32, the first CHECKED features."""
        some = weight.view(2 if self.shape.swiglu else 1, -1, self.shape.k)[:, :CHECKED].flatten(0, 1)
        return self.plain(x.float(), some.float())

    def kernel_key(self, config: Config) -> tuple[Any, ...]:
        """The values that a compiled kernel depends on. Problems with equal keys share a kernel."""
        rows, n, k, swiglu = self.rows, self.shape.n, self.shape.k, self.shape.swiglu
        if isinstance(config, Stream):  # of integers, Triton compiles whether they are multiples of 16
            features = n // (2 if swiglu else 1)
            return replace(config, programs=1), config.tile_rows(rows), swiglu, features % 16 == 0, k % 16 == 0
        even = k % config.block_k == 0
        if isinstance(config, Mma):
            return config, max(rows, 16), swiglu, even
        return replace(config, prefetch=True), rows, swiglu, even


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
        kind, gated = (CODES, False) if self.of_codes else (shape.format.name, shape.swiglu)
        return table_key(self.rows, shape.n, shape.k, gated, kind)

    def candidates(self) -> list[Any]:
        shape = self.shape
        if self.of_codes:
            return code_candidates(self.rows, shape.n, shape.k)[:MOST_CONFIGS]
        found = quantized_candidates(self.rows, shape.n, shape.k, shape.format, shape.swiglu)
        alike = [config for config in found[1:] if type(config) is type(found[0])]
        return [*found[:1], *sorted(alike, key=lambda config: _tile(config) not in LIKELY_TILES)][:MOST_CONFIGS]

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
        return quantized_linear_with(x, weight, None, config, self.shape.swiglu)

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


def quantized_row_counts(shape: QuantizedShape, most: int) -> list[int]:
    """`row_counts` of a quantized layer."""
    few = [rows for rows in ROWS if rows < 2 * most and rows <= (CODE_ROWS if shape.scaled else STREAM_ROWS)]
    return few + ([] if shape.scaled else [2 * STREAM_ROWS, *PROMPT_ROWS])


def quantized_problem_of(rows: int, n: int, k: int, gated: bool, kind: str) -> QuantizedProblem:
    """The problem of a key's fields, without weights. Raises ValueError if there is no such kind of weight."""
    if kind == CODES and not gated and rows > EXACT_ROWS:
        return QuantizedProblem(rows, QuantizedShape(n, k, format=Format("fp8"), scaled=True), [])
    return QuantizedProblem(rows, QuantizedShape(n, k, gated, format=Format.parse(kind)), [])


# --- measuring -------------------------------------------------------------------------------------------------------------


def measure(problem: Problem) -> tuple[dict[Config | None, float], list[str]]:
    """Seconds of a layer by each candidate, and by cuBLAS (None). Also a message for each candidate that failed or was wrong."""
    x, messages = problem.input(), []
    weights = problem.weights[: max(2, CHAIN * MAX_ROWS // max(MAX_ROWS, problem.rows))]  # few if the outputs are large
    times: dict[Config | None, float] = {None: seconds_per_layer(lambda w: problem.plain(problem.before(x), w), weights)}
    for config in problem.candidates():
        try:
            if is_right(problem, x, config):
                times[config] = seconds_per_layer(lambda w, c=config: problem.ours(problem.before(x), w, c), weights)  # type: ignore[misc]
            else:
                messages.append(f"{config} is wrong for {problem.key}")
        except Exception as error:  # for example too much shared memory
            messages.append(f"{config} failed for {problem.key}: {error!r}")
    return times, messages


def winner(rows: int, times: dict[Config | None, float], usual: Config | None = None) -> Config | None:
    """The fastest config for so many rows, or None if cuBLAS is about as fast (`KEPT_MARGIN`).

    `usual` is kept unless another one is clearly faster. Of configs that are as fast (`TIE`), one that reads weights before its
    input is ready: in a model the kernel before it often leaves bandwidth unused, in a chain of linear layers it does not.
    """
    if rows > 1:
        times = {config: time * (GEMV_IN_A_MODEL if isinstance(config, Gemv) else 1) for config, time in times.items()}
    least = min(times.values())
    if least >= KEPT_MARGIN * times[None]:
        return None
    if usual is not None and times[usual] <= USUAL_MARGIN * least:
        return usual
    equal = [config for config, time in times.items() if config is not None and time <= TIE * least]
    return min(equal, key=lambda config: (not _reads_early(config), times[config]))


def _reads_early(config: Config) -> bool:
    return config.prefetch if isinstance(config, Gemv) else config.early if isinstance(config, Mma) else True


def seconds_per_layer(layer: Callable[[Tensor], Tensor], weights: Sequence[Tensor]) -> float:
    layer(weights[0])
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        kept = [layer(weight) for weight in weights[:CHAIN]]
    for _ in range(WARM_UPS):
        graph.replay()
    return median(replay_seconds(graph, REPLAYS)) / len(kept)


def is_right(problem: Problem, x: Tensor, config: Config) -> bool:
    """Whether the config's error against fp32 is at most twice that of the PyTorch layer, in the first features."""
    weight = problem.weights[0]
    exact = problem.exact(x, weight)
    plain = problem.plain(x, weight)[:, : exact.shape[1]].float()
    got = problem.ours(x, weight, config)[:, : exact.shape[1]].float()
    return bool((got - exact).norm() <= 2 * (plain - exact).norm() + 1e-6 * exact.norm())


def compile_kernels(problems: Sequence[Problem], threads: int, deadline: float) -> None:
    """Compile all candidates, each distinct kernel once, on several threads, until `deadline` of `time.monotonic`."""
    kernels = {problem.kernel_key(c): (problem, c) for problem in problems for c in problem.candidates()}

    def compile_one(job: tuple[Problem, Config]) -> None:
        problem, config = job
        if time.monotonic() > deadline:
            return
        torch.cuda.set_device(problem.device)
        with torch.inference_mode(), suppress(Exception):  # `measure` reports candidates that fail
            problem.ours(problem.input(), problem.weights[0], config)

    jobs = list(kernels.values())
    for job in jobs[:1]:  # alone: it creates what all kernels share, such as counters and the driver's state
        compile_one(job)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(compile_one, jobs[1:]))
    torch.cuda.synchronize()
