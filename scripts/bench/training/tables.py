"""The table of the training benchmark's rows."""

import argparse

import numpy as np

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
