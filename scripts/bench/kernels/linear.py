"""Compare every candidate config of linear layers of few rows with cuBLAS on one GPU; make the table for `kernels/linear.py`.

    python -m scripts.bench.kernels.linear --out linear.json                                     # all shapes, on GPU 0
    python launch.py --ranks 4 -m scripts.bench.kernels.linear --out linear.json --seconds 55   # a quarter of the shapes a GPU
    python -m scripts.bench.kernels.linear --device 2 --part 2/4 --shapes 70b-tp4 --rows 1 16
    python -m scripts.bench.kernels.linear --merge linear.json.0 linear.json.1 --out kernels/linear_configs.json

A time is that of one layer in a CUDA graph of a chain of layers, the median of several replays. The layers have distinct
weights, many times the size of the L2 cache, so that every weight is read from HBM. Each kernel may start while the previous one
finishes. The shapes that end in -swiglu are measured with `linear_swiglu`, and compared with cuBLAS plus a separate kernel for
silu(gate) * up. Candidates that give wrong results are dropped, with a message. Writes {"machine", "times", "configs"}; on
several ranks each rank writes FILE.RANK.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cli import Parser, run
from errors import UserError
from kernels.activation import swiglu
from kernels.linear import linear_with
from kernels.linear_config import (
    GEMV_ROWS,
    SMS,
    Config,
    Gemv,
    Mma,
    default_config,
    format_config,
    pipeline_stages,
    table_key,
)
from scripts.bench.kernels.graph_times import replay_seconds
from scripts.lib.machine import machine

ROWS = (1, 2, 4, 8, 16, 32, 64)
POOL_BYTES = 1 << 30  # of weights; more if two layers of the largest shape need more
CHAIN = 24  # most layers in a graph
REPLAYS = 7
WARM_UPS = 3
GEMV_TILES = {  # by rows: (n, k, warps, prefetch); with more rows of x, more rows of the weight (n) reuse each tile of x
    1: ((1, 4096, 4, True), (2, 2048, 4, False), (2, 2048, 4, True), (4, 1024, 4, False), (4, 512, 2, True)),
    2: ((2, 2048, 4, False), (2, 2048, 4, True), (4, 1024, 4, False), (4, 512, 2, True), (8, 512, 4, False)),
    4: ((4, 1024, 4, False), (8, 512, 4, False)),
}
KEPT_MARGIN = 0.98  # a kernel is kept if it takes less than this share of cuBLAS's time


@dataclass(frozen=True)
class Shape:
    """A weight (n, k) of a model at a degree of tensor parallelism."""

    name: str
    n: int
    k: int
    swiglu: bool = False

    @property
    def bytes(self) -> int:
        return 2 * self.n * self.k


def shapes() -> list[Shape]:
    """The distinct shapes of Llama-70B and Llama-8B, ordered so that each `--part` has large and small ones."""
    found: dict[tuple[int, int, bool], Shape] = {}
    for model, hidden, heads, kv_heads, inter, vocab, degrees in (
        ("70b", 8192, 64, 8, 28672, 128256, (8, 4)),
        ("8b", 4096, 32, 8, 14336, 128256, (1, 4, 8)),
    ):
        for tp in degrees:
            layers = {
                "qkv": ((heads + 2 * kv_heads) * 128 // tp, hidden),
                "o": (hidden, heads * 128 // tp),
                "gate_up": (2 * inter // tp, hidden),
                "down": (hidden, inter // tp),
                "head": (vocab // tp, hidden),
            }
            for name, (n, k) in layers.items():
                found.setdefault((n, k, False), Shape(f"{model}-tp{tp}-{name}", n, k))
            n, k = layers["gate_up"]
            found.setdefault((n, k, True), Shape(f"{model}-tp{tp}-gate_up-swiglu", n, k, swiglu=True))
    return list(found.values())


def candidates(rows: int, shape: Shape) -> list[Config]:
    """About six configs to try, starting with that of the heuristic `default_config`."""
    default = default_config(rows, shape.n, shape.k, torch.bfloat16, shape.swiglu)
    found: list[Config] = [default] if default else []
    if rows <= GEMV_ROWS:
        found += gemv_candidates(rows, shape)
    if rows > 1:
        found += mma_candidates(rows, shape)[: 1 if rows == 2 else None]
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
    if rows <= GEMV_ROWS:
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


@dataclass(frozen=True)
class Problem:
    rows: int
    shape: Shape
    x: Tensor
    weights: list[Tensor]

    def ours(self, config: Config) -> Callable[[Tensor], Tensor]:
        return lambda weight: linear_with(self.x, weight, None, config, self.shape.swiglu)

    def plain(self, weight: Tensor) -> Tensor:
        return self.activation(F.linear(self.x, weight))

    def exact(self, weight: Tensor) -> Tensor:
        return self.activation(F.linear(self.x.float(), weight.float()))

    def activation(self, y: Tensor) -> Tensor:
        return swiglu(y) if self.shape.swiglu else y


def problem(rows: int, shape: Shape, pool: Tensor) -> Problem:
    count = min(CHAIN, len(pool) // (shape.n * shape.k))
    weights = [pool[i * shape.n * shape.k :][: shape.n * shape.k].view(shape.n, shape.k) for i in range(count)]
    return Problem(rows, shape, torch.randn(rows, shape.k, device=pool.device, dtype=pool.dtype), weights)


def seconds_per_layer(layer: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    layer(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [layer(weight) for weight in weights]
    for _ in range(WARM_UPS):
        graph.replay()
    return median(replay_seconds(graph, REPLAYS)) / len(kept)


def is_right(task: Problem, config: Config, exact: Tensor) -> bool:
    """Whether the config's error against fp32 is at most twice that of the PyTorch layer."""
    got, plain = task.ours(config)(task.weights[0]).float(), task.plain(task.weights[0]).float()
    return bool((got - exact).norm() <= 2 * (plain - exact).norm() + 1e-6 * exact.norm())


def warm_up(tasks: list[Problem], threads: int, deadline: float) -> None:
    """Compile all candidates of the tasks in parallel, each distinct `kernel_key` once, until `deadline`."""
    kernels = {kernel_key(task, config): (task, config) for task in tasks for config in candidates(task.rows, task.shape)}

    def compile_one(job: tuple[Problem, Config]) -> None:
        if time.monotonic() > deadline:
            return
        torch.cuda.set_device(job[0].x.device)
        with torch.inference_mode(), suppress(Exception):  # `measure` reports failing candidates
            job[0].ours(job[1])(job[0].weights[0])

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(compile_one, job) for job in kernels.values()]:
            future.result()
    torch.cuda.synchronize()
    print(f"compiled {len(kernels)} kernels", flush=True)


def kernel_key(task: Problem, config: Config) -> tuple[Any, ...]:
    """The values that a compiled kernel depends on. Shapes with equal keys share a kernel."""
    rows = max(task.rows, 16 if isinstance(config, Mma) else 1)
    same = replace(config, prefetch=True) if isinstance(config, Gemv) else config
    return same, rows, task.shape.swiglu, task.shape.k % config.block_k == 0


def measure(task: Problem) -> list[dict[str, Any]]:
    """A row for each candidate and for cuBLAS, the fastest first."""
    found: list[tuple[Config | None, float]] = [(None, seconds_per_layer(task.plain, task.weights))]
    exact = task.exact(task.weights[0])
    for config in candidates(task.rows, task.shape):
        try:
            if not is_right(task, config, exact):
                print(f"WRONG {task.rows} rows, {task.shape.name}: {config}", flush=True)
                continue
            found.append((config, seconds_per_layer(task.ours(config), task.weights)))
        except Exception as error:  # for example too much shared memory; go on with the next candidate
            print(f"FAILED {task.rows} rows, {task.shape.name}: {config}: {error!r}", flush=True)
    lines = [
        {
            "shape": task.shape.name,
            "rows": task.rows,
            "n": task.shape.n,
            "k": task.shape.k,
            "swiglu": task.shape.swiglu,
            "config": format_config(config),
            "us": round(1e6 * seconds, 2),
            "gb_per_s": round(task.shape.bytes / seconds / 1e9),
        }
        for config, seconds in found
    ]
    return sorted(lines, key=lambda line: line["us"])


def winner(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest config, or None if cuBLAS is about as fast (`KEPT_MARGIN`)."""
    plain = next(line for line in lines if line["config"] is None)
    return lines[0]["config"] if lines[0]["us"] < KEPT_MARGIN * plain["us"] else None


def describe(lines: list[dict[str, Any]]) -> str:
    plain = next(line for line in lines if line["config"] is None)
    best = lines[0]
    text = f"{best['shape']:>22} {best['n']:>6} x {best['k']:<6} {best['rows']:>3} rows: cuBLAS {plain['us']:7.2f} us "
    text += f"{plain['gb_per_s']:>5} GB/s, best {best['us']:7.2f} us {best['gb_per_s']:>5} GB/s  "
    return text + ("cuBLAS" if best["config"] is None else " ".join(f"{k}={v}" for k, v in best["config"].items()))


def bench(args: argparse.Namespace) -> None:
    start = time.monotonic()
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    part, parts = args.part or (rank, ranks)
    device = torch.device("cuda", rank if args.device is None else args.device)
    torch.cuda.set_device(device)
    chosen = [shape for shape in shapes() if not args.shapes or any(word in shape.name for word in args.shapes)][part::parts]
    if not chosen:
        raise UserError(f"--shapes {' '.join(args.shapes)} names no shape; known: {' '.join(s.name for s in shapes())}")
    largest = max(shape.bytes for shape in chosen)
    pool = torch.randn(max(POOL_BYTES, 2 * largest) // 2, device=device, dtype=torch.bfloat16).mul_(0.02)
    tasks = [problem(rows, shape, pool) for rows in args.rows for shape in chosen]
    content: dict[str, Any] = {"machine": machine(), "times": [], "configs": {}}
    with torch.inference_mode():
        warm_up(tasks[:1], 1, start + args.seconds)  # initializes what all kernels share: counters and the driver's state
        warm_up(tasks, args.threads, start + args.seconds * 0.6)
        for task in tasks:
            if time.monotonic() - start > args.seconds:
                print(f"out of time before {task.rows} rows, {task.shape.name}")
                break
            lines = measure(task)
            print(describe(lines), flush=True)
            content["times"] += lines
            content["configs"][table_key(task.rows, task.shape.n, task.shape.k, task.shape.swiglu)] = winner(lines)
    write(content, args.out if ranks == 1 else args.out.with_name(f"{args.out.name}.{rank}"))


def merge(parts: list[Path], out: Path) -> None:
    """Write the configs of several runs into one table, without their times."""
    contents = [json.loads(path.read_text()) for path in parts]
    configs = {key: config for content in contents for key, config in content["configs"].items()}
    write({"machine": contents[0]["machine"], "configs": dict(sorted(configs.items()))}, out)


def write(content: dict[str, Any], path: Path) -> None:
    """Write `content` as JSON with one line per time and per config."""
    path.parent.mkdir(parents=True, exist_ok=True)
    times = ",\n".join(f"  {json.dumps(line)}" for line in content.get("times", []))
    configs = ",\n".join(f"  {json.dumps(key)}: {json.dumps(config)}" for key, config in content["configs"].items())
    text = f'{{\n "machine": {json.dumps(content["machine"])},\n'
    text += f' "times": [\n{times}\n ],\n' if times else ""
    path.write_text(f'{text} "configs": {{\n{configs}\n }}\n}}\n')
    print(f"wrote {path}")


def a_part(text: str) -> tuple[int, int]:
    part, parts = (int(number) for number in text.split("/"))
    if not 0 <= part < parts:
        raise argparse.ArgumentTypeError(f"{text}: parts count from 0/{parts} to {parts - 1}/{parts}")
    return part, parts


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("linear.json"), help="the file to write (default: linear.json)")
    parser.add_argument("--device", type=int, help="the GPU's index (default: LOCAL_RANK)")
    parser.add_argument("--part", type=a_part, help="I/N: the I-th of N parts of the shapes (default: LOCAL_RANK's)")
    parser.add_argument(
        "--shapes", nargs="+", default=[], help="only shapes whose name contains one of these words, such as 70b-tp4 or down"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), choices=ROWS, help="input rows (default: all)")
    parser.add_argument("--seconds", type=float, default=55, help="start no further case after this many seconds (default: 55)")
    parser.add_argument("--threads", type=int, default=16, help="threads that compile (default: 16)")
    parser.add_argument("--merge", type=Path, nargs="+", help="merge the configs of these files of earlier runs into --out")
    args = parser.parse_args()
    if args.merge:
        merge(args.merge, args.out)
    elif not torch.cuda.is_available():
        raise UserError("measuring needs a GPU, and this machine shows none")
    else:
        bench(args)


if __name__ == "__main__":
    run(main)
