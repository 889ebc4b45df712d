"""Measure how much of the communication around a tensor-parallel GEMM is hidden when both are fused, with the metrics of the
Flux paper (Chang et al., arXiv:2406.06858).

    python launch.py --ranks 4 -m scripts.bench.comm.fused --shapes llama --seconds 60

Section 2.3 of the paper defines two metrics. Effective communication time: ECT = overall time - time of the best GEMM that is
not split (equation 1). Overlap efficiency: 1 - ECT / (ECT without overlap, that is of a GEMM and NCCL) (equation 2). At 100 %
all communication is hidden; below 0 % the fused algorithm is slower than without overlap.

A layer is all-gather + GEMM (m rows; the n output features are split over the ranks) or GEMM + reduce-scatter (the k input
features are split). An all-gather whose name ends in `-pull` fetches rows from their owners; others push them. `/4` means that
rows are sent in four chunks (figures 9 and 10). Writes gemm-overlap.json and .md.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cli import Parser, note, run
from errors import UserError
from scripts.bench.comm.fused.algorithms import SHAPES, Layer
from scripts.bench.comm.fused.bench import Bench
from scripts.bench.comm.fused.integer_pair import replays
from scripts.bench.comm.fused.tables import Row, markdown, rows_of
from scripts.bench.comm.parts import join_ranks
from scripts.lib.machine import describe, machine
from tp import World

NAME = "gemm-overlap"
ROWS = tuple(1 << i for i in (10, 12, 13, 11, 9, 8, 7, 6))  # m, the most informative first, since time may run out


def measure(world: World, layers: list[Layer], sizes: list[int], seconds: float, replay_count: int) -> dict[str, Any]:
    """The report. Sizes for which no time is left are missing. Collective."""
    with torch.inference_mode():
        bench = Bench(world, seconds)
        replayed = bench.part("replays", lambda: replays(bench.algorithms, replay_count)) if replay_count else 0
        rows: list[Row] = []
        for layer, m in tqdm([(layer, m) for m in sizes for layer in layers], unit="layer", disable=world.rank > 0):
            if bench.in_time():
                rows += bench.layer(layer, m)
    return {
        "where": describe(machine(), world.device.type),
        "ranks": world.world_size,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "seed": bench.seed,
        "replays": replayed,
        "rows": [asdict(row) | {"ect": row.ect, "efficiency": row.efficiency} for row in rows],
        "errors": bench.errors,
    }


def write(report: dict[str, Any], folder: Path) -> None:
    """Write the JSON file and the table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.json").write_text(json.dumps(report, indent=1) + "\n")
    rows, title = rows_of(report)
    (folder / f"{NAME}.md").write_text(markdown(rows, title))
    note(markdown(rows, title))


def main() -> None:
    parser = Parser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder (default out)")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), help="default: llama gpt3, on a CPU tiny")
    parser.add_argument("--rows", type=int, nargs="+", help="m (default 64 to 8192)")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no further layer is measured (default 60)")
    parser.add_argument("--replays", type=int, default=1000, help="of a CUDA graph that checks itself (default 1000)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is any")
    parser.add_argument("--report", type=Path, help="measure nothing; write the table of this JSON file")
    arguments = parser.parse_args()
    if arguments.report:
        return write(json.loads(arguments.report.read_text()), arguments.out)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off unless the user turns it on
    world = join_ranks(arguments.device)
    on_gpu = world.device.type == "cuda"
    names = arguments.shapes or (["llama", "gpt3"] if on_gpu else ["tiny"])
    sizes = arguments.rows or (list(ROWS) if on_gpu else [16, 8])
    layers = [layer for name in names for layer in SHAPES[name]]
    if bad := [m for m in sizes if m < 1 or m % world.world_size]:
        raise UserError(f"--rows {bad[0]}: give numbers that {world.world_size} ranks can divide")
    report = measure(world, layers, sizes, arguments.seconds, arguments.replays)
    if world.rank == 0:
        write(report, arguments.out)
    return None


if __name__ == "__main__":
    run(main)
