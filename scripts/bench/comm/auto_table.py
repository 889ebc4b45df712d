"""Print the tables of `--comm auto` for this machine: µs of all-reduces by message size and algorithm, and its choices.

python launch.py --ranks 8 -m scripts.bench.comm.auto_table

It also prints the µs of pairs of layers with an all-reduce between them, fused and unfused, for the pairs that models have used.
"""

import time

import torch

from cli import Parser, run
from comms.auto import SIZES, AutoCommunicator, fastest
from comms.build import auto
from comms.fused import FusedCommunicator
from comms.registry import choose
from comms.row_buffers import UNFUSED, best_strategy
from comms.table import Table
from scripts.bench.comm.parts import join_ranks
from scripts.lib.markdown import size_text


def age_text(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"


def lines(table: Table, now: float) -> list[str]:
    """The table as text: one row per message size, one column per algorithm, and the choice of `auto`."""
    head = f"{table.path}, {age_text(now - table.made)} old"
    key = ", ".join(f"{name} {value}" for name, value in table.key.items())
    names = list(dict.fromkeys(name for by_name in table.times.values() for name in by_name))
    rows = [["message", *(f"{name}, µs" for name in names), "auto takes"]]
    for size in SIZES:
        by_name = table.times[str(size)]
        times = [f"{by_name[name]:.1f}" if name in by_name else "–" for name in names]
        rows.append([size_text(size), *times, fastest(table, size, names)])
    return [head, key, "", *aligned(rows)]


def pair_lines(table: Table) -> list[str]:
    """The measured pairs of layers as text. A model's pairs are fused if the sum of their gains is positive."""
    rows = [["rows, K, C, M, dtype", "unfused, µs", "fused, µs", "gain, µs", "scatter + gather"]]
    for key, times in sorted(table.times.items()):
        strategy, fused = best_strategy(times)
        rows.append([key, f"{times[UNFUSED]:.1f}", f"{fused:.1f}", f"{times[UNFUSED] - fused:+.1f}", str(strategy)])
    known = aligned(rows) if table.times else ["no model has met many rows yet: run one"]
    return ["", f"{table.path}: a sum of many rows between the layers (K to C) and (C to M) of a rank", "", *known]


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def main() -> None:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rebuild", action="store_true", help="measure anew, whatever the age of the table")
    parser.add_argument(
        "--comm-error-budget",
        type=float,
        default=0.0,
        metavar="E",
        help="quantized sums up to this relative error, too (0.01: int8)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is any")
    arguments = parser.parse_args()
    choose(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"), None, None, arguments.comm_error_budget)
    world = join_ranks(arguments.device)
    on_gpu = world.device.type == "cuda"
    communicator = auto(world.device, arguments.comm_error_budget, rebuild=arguments.rebuild) if on_gpu else world.comm
    if world.rank == 0:
        if isinstance(communicator, FusedCommunicator) and isinstance(communicator.inner, AutoCommunicator):
            print("\n".join([*lines(communicator.inner.table, time.time()), *pair_lines(communicator.table)]))
        else:
            print(f"auto takes {communicator.name} for every size on {world.device.type}")


if __name__ == "__main__":
    run(main)
