"""Compare the GEMMs that exchange rows tile by tile with cuBLAS, for every tiling, on one GPU that stands for all ranks.

    python scripts/bench_gemm.py                                              # the shapes of Llama-70B and GPT-3 on 4 GPUs
    python scripts/bench_gemm.py --shapes down gate_up --rows 1024 8192 --seconds 30

Destinations and flags are in this GPU's own memory, and all rows to gather are present from the start. So no link is involved:
the times are those of the GEMM and of setting its flags. A tiling is marked WRONG if its error against fp32 is more than twice
cuBLAS's, and FAILED if it raises an exception. Times are medians of CUDA-graph replays, in microseconds, with TFLOP/s.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli import Parser, run
from errors import UserError
from kernels.all_gather_gemm import all_gather_gemm
from kernels.gemm_reduce_scatter import gemm_reduce_scatter
from kernels.tile_gemm import BLOCK, Tiling, candidates
from scripts.bench_linear import seconds_per_layer

RANKS, RANK = 4, 1
ROWS = (64, 256, 512, 1024, 2048, 4096, 8192)
CHAIN = 8  # GEMMs in a graph
SHAPES = {  # a rank's output and input features, and whether the GEMM is followed by a reduce-scatter (else: after an all-gather)
    "70b-down": (8192, 7168, True),
    "70b-o": (8192, 2048, True),
    "70b-gate_up": (14336, 8192, False),
    "70b-qkv": (2560, 8192, False),
    "gpt3-down": (12288, 12288, True),
    "gpt3-up": (12288, 12288, False),
}


@dataclass(frozen=True)
class Problem:
    x: Tensor  # (rows, K)
    weight: Tensor  # (features, K)
    scatters: bool
    areas: Tensor  # (RANKS, rows / RANKS, features)
    flags: Tensor  # (RANKS, blocks)
    epoch: Tensor
    fault: Tensor

    def ours(self, tiling: Tiling) -> Tensor:
        """The GEMM's result (rows, features). A scattering GEMM writes it into `areas`."""
        if not self.scatters:
            return all_gather_gemm(self.x, self.weight, self.flags, self.epoch, RANK, self.fault, tiling)
        areas, flags = (tuple(part.data_ptr() for part in whole) for whole in (self.areas, self.flags))
        gemm_reduce_scatter(self.x, self.weight, areas, flags, self.epoch, RANK, tiling)
        return self.areas.view(len(self.x), len(self.weight))


def problem(rows: int, features: int, k: int, scatters: bool) -> Problem:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    return Problem(
        x=random(rows, k),
        weight=random(features, k).mul_(0.02),
        scatters=scatters,
        areas=torch.zeros(RANKS, rows // RANKS, features, device="cuda", dtype=torch.bfloat16),
        flags=torch.ones(RANKS, -(-rows // RANKS // BLOCK), device="cuda", dtype=torch.int64),
        epoch=torch.ones(1, device="cuda", dtype=torch.int64),
        fault=torch.zeros(1, device="cuda", dtype=torch.int32),
    )


def is_right(task: Problem, tiling: Tiling) -> bool:
    """Whether the error against fp32 is at most twice cuBLAS's, and the flag of every block was set."""
    exact = F.linear(task.x[:512].float(), task.weight.float())
    plain = F.linear(task.x, task.weight)[:512].float()
    task.areas.fill_(torch.nan)
    if task.scatters:
        task.flags.zero_()
    got = task.ours(tiling)
    torch.cuda.synchronize()
    near = (got[:512].float() - exact).norm() <= 2 * (plain - exact).norm() + 1e-6 * exact.norm()
    return bool(near) and bool(got.isfinite().all()) and bool((task.flags == 1).all()) and not int(task.fault)


def ours(task: Problem, tiling: Tiling, _weight: Tensor) -> Tensor:
    return task.ours(tiling)


def measure(name: str, rows: int) -> str:
    """The times of cuBLAS and of the tilings as text, in the order of `candidates`."""
    features, k, scatters = SHAPES[name]
    task = problem(rows, features, k, scatters)

    def timed(product: Callable[[Tensor], Tensor]) -> str:
        seconds = seconds_per_layer(product, [task.weight] * CHAIN)
        return f"{1e6 * seconds:8.1f} us {2e-12 * rows * features * k / seconds:5.0f} TF"

    parts = [f"{name:>12} {rows:>5} rows: cuBLAS {timed(lambda weight: F.linear(task.x, weight))}"]
    for tiling in candidates(rows, features, k, RANKS):
        label = f"{tiling.block_m}x{tiling.block_n}{'s' if tiling.specialized else ''}"
        try:
            result = timed(partial(ours, task, tiling)) if is_right(task, tiling) else "WRONG"
            parts.append(f"{label} {result}")
        except Exception as error:  # for example too much shared memory; go on with the next tiling
            parts.append(f"{label} FAILED {error!r}"[:200])
    return "\n    ".join(parts)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[], help="shapes whose name has one of these words (default: all)")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=list(ROWS), choices=ROWS, help="rows of all ranks (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=55, help="after which no further case begins (default: 55)")
    args = parser.parse_args()
    chosen = [name for name in SHAPES if not args.shapes or any(word in name for word in args.shapes)]
    if not chosen:
        raise UserError(f"--shapes {' '.join(args.shapes)} names no shape; known: {' '.join(SHAPES)}")
    if not torch.cuda.is_available():
        raise UserError("this benchmark needs a GPU")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    deadline = time.monotonic() + args.seconds
    with torch.inference_mode():
        for rows in sorted(args.rows, reverse=True):
            for name in chosen:
                if time.monotonic() > deadline:
                    print(f"out of time before {rows} rows, {name}")
                    return
                print(measure(name, rows), flush=True)


if __name__ == "__main__":
    run(main)
