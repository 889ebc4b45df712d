"""The table and the plot of the training benchmark's rows."""

import argparse
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from figures import BLUE, CYCLE, GREY, new_figure
from scripts.bench.training.launches import EXPOSED, Row
from scripts.bench.training.rank import SYSTEMS
from scripts.lib.machine import describe
from scripts.lib.markdown import captioned, cell


def quartiles(row: Row) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the step times, in ms."""
    low, middle, high = np.quantile(row["step_ms"], (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def speed(row: Row, milliseconds: float) -> float:
    """TGS (tokens per GPU and second) of a step that takes `milliseconds`."""
    return float(row["tokens_per_step"] / row["settings"]["ranks"] / milliseconds * 1e3)


def utilization(row: Row, milliseconds: float) -> float | None:
    """MFU (0 to 1) of a step that takes `milliseconds`. None if the device's peak is unknown."""
    if not row["peak_flops"]:
        return None
    return float(row["flops_per_step"] / row["settings"]["ranks"] / row["peak_flops"] / milliseconds * 1e3)


def label(row: Row) -> str:
    """The name of a row among the rows of its model."""
    name = SYSTEMS[row["settings"]["system"]]
    if row["settings"]["system"] == "planner" and "--sharding" in row["settings"]["more"]:
        name = "as asked"
    exposed = tuple(row["settings"]["no_overlap"])
    return name if not exposed else f"{name}, {next(n for n, e in EXPOSED.items() if e == exposed)}"


def cells_of(row: Row) -> list[object]:
    settings = row["settings"]
    head = [settings["model"], label(row), settings["micro_batches"]]
    if "error" in row:
        return [*head, f"failed: {row['error'].replace('|', '/')}", *[""] * 9]
    low, middle, high = quartiles(row)
    predicted = row.get("predicted_ms")
    return [
        *head,
        row["sharding"],
        f"{speed(row, middle):,.0f}",
        cell(utilization(row, middle), ".1%"),
        f"{middle:,.1f}",
        f"{low:,.1f} to {high:,.1f}",
        cell(row["peak_memory_gb"], ".1f"),
        cell(row["waited_ms"], ".1f"),
        cell(row["traced_exposed_ms"], ".1f"),
        cell(predicted, ",.1f"),
        cell(None if predicted is None else predicted / middle, ".2f"),
    ]


def table(rows: list[Row], args: argparse.Namespace) -> str:
    """A Markdown table of all rows, with a caption."""
    columns = ["model", "system", "micro-batches", "meshes", "TGS", "MFU", "step, ms", "quartiles", "peak memory, GB"]
    columns += ["waited, ms", "exposed in a trace, ms", "predicted, ms", "predicted / measured"]
    precision = next((row["precision"] for row in rows if "error" not in row), "")
    nodes = ", as two nodes" + (" with sockets between them" if args.device == "cuda" else "") if args.two_nodes else ""
    more = f", {' '.join(args.more)}" if args.more else ""
    each = [f"{number} ({model})" for model, number in zip(args.models, args.micro_batch, strict=False)]
    windows = ", ".join(each) if len(args.micro_batch) > 1 else str(args.micro_batch[0])
    caption = (
        f"{args.ranks} ranks{nodes}, {precision}, windows of {args.sequence_length} tokens, {windows} in a micro-batch"
        f"{more}. Medians and quartiles of {args.steps} steps after {args.unmeasured}, of the slowest rank. Waited: our executor's "
        "time a step in which computation stood still for communication. Exposed in a trace: NCCL's kernels ran and no other, on "
        "rank 0. Peak memory is PyTorch's, of the fullest GPU. Predictions are the planner's, for our executor. Made on "
        f"{describe(rows[0]['machine'], args.device)}."
    )
    return captioned(columns, map(cells_of, rows), caption)


def figure_of(row: Row) -> tuple[float, float, float]:
    """The plotted values: the median, and its distances down and up to the quartiles. MFU in %, or TGS if the peak is unknown."""
    low, middle, high = (
        value * 100 if (value := utilization(row, ms)) is not None else speed(row, ms) for ms in reversed(quartiles(row))
    )
    return middle, middle - low, high - middle


def plot(rows: list[Row], args: argparse.Namespace, path: Path) -> None:
    """Plot bars of each model's systems, or with --ablation lines over micro-batches. The whiskers are quartiles."""
    good = [row for row in rows if "error" not in row]
    unit = "MFU, %" if good and good[0]["peak_flops"] else "TGS, tokens a GPU and second"
    figure = new_figure(5, 2.7 * len(args.models) + (1.2 if args.ablation else 0.5))
    for axis, model in zip(figure.subplots(len(args.models), 1, squeeze=False)[:, 0], args.models, strict=True):
        mine = [row for row in good if row["settings"]["model"] == model]
        draw = draw_lines if args.ablation else draw_bars
        draw(axis, mine)
        axis.set_title(model, loc="left", fontsize=10)
        if not args.ablation:  # bars begin at 0
            axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
    figure.supylabel(unit, fontsize=10)
    figure.savefig(path, dpi=150)


def draw_bars(axis: Any, rows: list[Row]) -> None:
    several = len({row["settings"]["micro_batches"] for row in rows}) > 1
    for place, row in enumerate(rows):
        middle, down, up = figure_of(row)
        color = GREY if row["settings"]["system"].startswith("fsdp2") else BLUE
        axis.bar(place, middle, yerr=[[down], [up]], color=color, capsize=3)
    names = [f"{label(row)}, M = {row['settings']['micro_batches']}" if several else label(row) for row in rows]
    axis.set_xticks(range(len(rows)), names, rotation=20, ha="right", fontsize=8)


def draw_lines(axis: Any, rows: list[Row]) -> None:
    for name, color in zip(dict.fromkeys(map(label, rows)), cycle(CYCLE), strict=False):
        line = sorted((row["settings"]["micro_batches"], *figure_of(row)) for row in rows if label(row) == name)
        counts, middles, downs, ups = zip(*line, strict=True)
        axis.errorbar(counts, middles, yerr=[downs, ups], marker="o", markersize=4, capsize=3, label=name, color=color)
    axis.set_xscale("log", base=2)
    ticks = sorted({row["settings"]["micro_batches"] for row in rows})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xlabel("micro-batches of a step")
    if rows:
        axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))  # inside it would cover lines
