"""Measures which configs make linear layers of few rows fastest on this GPU. `kernels/linear_config.py` says what a config is.

A time is that of one layer in a CUDA graph of a chain of layers with different weights, the median of several replays. Each
kernel may start while the previous one finishes, as in a model.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import swiglu
from kernels.dispatch import replay_seconds
from kernels.linear import linear_with
from kernels.linear_config import (
    GEMV_ROWS,
    MAX_ROWS,
    MMA_ROWS,
    PROMPT_ROWS,
    SMS,
    STREAM_BYTES,
    Config,
    Gemv,
    Mma,
    Stream,
    default_config,
    has_stream,
    pipeline_stages,
    table_key,
)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHAIN = 24  # most layers in a graph
REPLAYS = 7
WARM_UPS = 3
CHECKED = 2048  # most features whose values are compared with fp32: all of them would take too much memory
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
KEPT_MARGIN = 0.98  # a kernel is kept if it takes less than this share of cuBLAS's time
USUAL_MARGIN = 1.03  # times the fastest config's time
TIE = 1.01  # times of the fastest config's time: as fast, within the noise
GEMV_IN_A_MODEL = 1.15  # times a gemv's time in a chain, with several rows: an estimate from Llama-3-8B with two on an H200


@dataclass(frozen=True)
class Shape:
    """A weight (n, k), and whether the layer is `linear_swiglu`."""

    n: int
    k: int
    swiglu: bool = False

    @property
    def bytes(self) -> int:
        return 2 * self.n * self.k


# --- candidates -----------------------------------------------------------------------------------------------------------


def row_counts(shape: Shape, most: int) -> list[int]:
    """The numbers of rows to measure, if decoding computes at most `most`."""
    prompts = PROMPT_ROWS if shape.swiglu and has_stream() else ()
    return [rows for rows in ROWS if rows < 2 * most] + [*prompts]


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


# --- measuring ------------------------------------------------------------------------------------------------------------


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
