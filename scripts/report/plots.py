"""Draw the ladder paper's figures 2 and 4, and the split of a decode step's time, from the rows of a sweep.

    python -m scripts.report.plots --sweep out/sweep.jsonl --out out/plots

| file | shows |
|---|---|
| throughput.svg | throughput relative to the standard model, by ranks and batch size (figure 2) |
| pareto.svg | time to complete a batch against tokens a second and GPU, with the Pareto front as a line (figure 4) |
| split.svg | a decode step: computation, hidden communication, exposed communication |

Points are medians. Whiskers extend to the slowest and the fastest run; in split.svg they extend to the quartiles of the steps.
An upper bound far above the variants is written as a number at the end of the axis, so that it does not compress the other
points. A panel shows at most six variants in addition to the standard model.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from cli import Parser, note, run
from errors import UserError
from figures import MOST_LINES, PARTS, plain_log_axis, variant_colour
from files import check_folder
from scripts.lib.results import ROOT
from scripts.lib.statistics import quartiles
from scripts.sweep.rows import Row, add_sweep_option, baseline, finished, ratio, read_rows

MAX_PANELS = 12
BREAK_ABOVE = 1.6  # the axis of ratios ends at 1 + BREAK_ABOVE * the largest gain of the variants
LEAST_ROOM = 0.1  # the axis is scaled for a gain of at least this
MEASURED = {"fmt": "|", "color": "black", "markersize": 7, "capsize": 2, "elinewidth": 0.8}
STEP = "the median step and its quartiles"

Panel = tuple[str, list[Row]]  # title and rows
mpl.rcParams |= {"svg.fonttype": "none", "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False}


def panels(rows: Sequence[Row], by: Callable[[Row], tuple[Any, ...]]) -> list[Panel]:
    """Group rows by `by`, which becomes the panel's title. Raises UserError for more than MAX_PANELS panels."""
    found = [
        (", ".join(str(part) for part in key if part), list(group)) for key, group in groupby(sorted(rows, key=by), key=by)
    ]
    if len(found) > MAX_PANELS:
        raise UserError(f"the sweep has {len(found)} sets of models and lengths, more than {MAX_PANELS}; plot a file of fewer")
    return [(title, finished(group)) for title, group in found]


def configuration(row: Row) -> tuple[Any, ...]:
    """The values that are constant in a panel. Ranks, batch sizes and variants vary within it."""
    s = row.setting
    link = "" if s.interconnect == "default" else s.interconnect
    return (
        s.model_and_widths,
        f"{s.prompt_length} + {s.new_tokens} tokens",
        s.comm or "",
        link,
        s.dtype,
        "compiled" if s.compile else "",
    )


def column(shown: Sequence[Panel], height: float = 3.4) -> tuple[Figure, list[Any]]:
    """A figure with the panels one below the other, because a page may be only 500 pixels wide."""
    figure, axes = plt.subplots(len(shown), figsize=(5, height * len(shown)), layout="constrained", squeeze=False)
    for axis, (title, _) in zip(axes.flat, shown, strict=True):
        axis.set_title(fill(title, 42), loc="left", fontsize=9)
    return figure, list(axes.flat)


def of_few(shown: Sequence[Panel]) -> list[Panel]:
    """Split panels so that each has at most MOST_LINES variants in addition to the standard model."""
    found = []
    for title, rows in shown:
        names = [name for name in variants(rows) if name != "standard"] or ["standard"]
        for first in range(0, len(names), MOST_LINES):
            some = {"standard", *names[first : first + MOST_LINES]}
            found.append((title, [row for row in rows if row.setting.variant in some]))
    return found


def variants(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.setting.variant for row in rows))


def gains(rows: Sequence[Row], variant: str) -> dict[tuple[int, int], float]:
    """Throughput relative to the standard model by (ranks, batch), where both were run."""
    found = {(r.setting.tp, r.setting.batch): ratio(r, rows, "throughput") for r in rows if r.setting.variant == variant}
    return {place: gain for place, gain in found.items() if gain is not None}


def whiskers(row: Row, rows: Sequence[Row]) -> tuple[float, float]:
    """Distances of the slowest and the fastest run from the median, in units of the standard model's median throughput."""
    base, values, middle = baseline(row, rows), row.values("throughput"), row.median("throughput")
    unit = base.median("throughput") if base else None
    assert unit is not None and middle is not None
    return (middle - min(values)) / unit, (max(values) - middle) / unit


def compared(rows: Sequence[Row]) -> list[Panel]:
    """The panels in which at least one variant can be compared with the standard model."""
    shown = of_few(panels(finished(rows), configuration))
    return [(t, found) for t, found in shown if any(gains(found, v) for v in variants(found) if v != "standard")]


def ceiling(rows: Sequence[Row]) -> float | None:
    """The upper limit of the axis of ratios: above all runs of the variants, but below the upper bound.

    None if the upper bound is not far above the variants, so that the axis needs no limit.
    """
    compared = [row for row in rows if baseline(row, rows)]
    tops = dict.fromkeys((True, False), 1.0)
    for row in compared:
        bound = row.setting.variant == "upper-bound"
        tops[bound] = max(tops[bound], (ratio(row, rows, "throughput") or 0) + whiskers(row, rows)[1])
    room = 1 + BREAK_ABOVE * max(tops[False] - 1, LEAST_ROOM)
    return room if tops[True] > room else None


def beyond(axis: Any, x: float, gain: float, top: float) -> None:
    """Draw an arrow with the number at the end of the axis, for a point above `top`."""
    arrow = {"arrowstyle": "-|>", "color": "#555555", "shrinkA": 0, "shrinkB": 0}
    place: dict[str, Any] = {"xytext": (0, -15), "textcoords": "offset points", "ha": "center", "annotation_clip": False}
    axis.annotate(f"{gain:.2f}", (x, top), fontsize=8, color="#555555", arrowprops=arrow, **place)


def ratio_axis(axis: Any, top: float | None) -> None:
    axis.axhline(1, color=variant_colour("standard"), linewidth=1, label="standard")
    axis.set_ylabel("tokens/s over standard")
    if top is not None:
        axis.set_ylim(top=top)


def legend(figure: Figure, axes: Sequence[Any]) -> None:
    """Draw one legend below all panels, with each name once. Inside a panel it would cover points."""
    entries = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = min(4, len(entries))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def throughput(rows: Sequence[Row]) -> Figure | None:
    """Figure 2: one group of points for each number of ranks, with one point per batch size."""
    if not (shown := compared(rows)):
        return None
    figure, axes = column(shown)
    for axis, (_, found) in zip(axes, shown, strict=True):
        places = sorted({(r.setting.tp, r.setting.batch) for r in found})
        top = ceiling(found)
        ratio_axis(axis, top)
        for variant in (v for v in variants(found) if v != "standard"):
            mine = [r for r in found if r.setting.variant == variant and baseline(r, found)]
            for tp in sorted({r.setting.tp for r in mine}):
                line_of(axis, variant, [r for r in mine if r.setting.tp == tp], found, places, top)
        lowest = min(ratio(r, found, "throughput") - whiskers(r, found)[0] for r in found if baseline(r, found))  # type: ignore[operator]
        axis.set_ylim(bottom=min(lowest, 1) - LEAST_ROOM / 2)
        axis.set_xticks(range(len(places)), [f"{batch}\ntp {tp}" for tp, batch in places], fontsize=9)
        axis.set_xlabel("batch and ranks")
    legend(figure, axes)
    return figure


def line_of(
    axis: Any, variant: str, mine: list[Row], rows: list[Row], places: list[tuple[int, int]], top: float | None
) -> None:
    """Draw one variant at one number of ranks: points with whiskers, and arrows for points beyond the axis."""
    mine = sorted(mine, key=lambda r: r.setting.batch)
    x = [places.index((r.setting.tp, r.setting.batch)) for r in mine]
    y = [gains(rows, variant)[r.setting.tp, r.setting.batch] for r in mine]
    errors = list(zip(*(whiskers(r, rows) for r in mine), strict=True))
    label = variant if variant not in axis.get_legend_handles_labels()[1] else None
    look = {"color": variant_colour(variant), "label": label, "markersize": 4, "capsize": 2, "elinewidth": 0.8}
    axis.errorbar(x, y, yerr=errors, fmt="o--" if variant == "upper-bound" else "o-", **look)
    for place, gain in zip(x, y, strict=True):
        if top is not None and gain > top:
            beyond(axis, place, gain, top)


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front of (latency, throughput) points: those that no other point beats in both, by increasing latency."""
    best: list[tuple[float, float]] = []
    for latency, rate in sorted(points, key=lambda p: (p[0], -p[1])):
        if not best or rate > best[-1][1]:
            best.append((latency, rate))
    return best


def pareto(rows: Sequence[Row]) -> Figure | None:
    """Figure 4: completion time and throughput per rank of all ranks and batch sizes, with each variant's Pareto front."""
    if not (shown := of_few(panels(finished(rows), configuration))):
        return None
    figure, axes = column(shown)
    for axis, (_, found) in zip(axes, shown, strict=True):
        for variant in variants(found):
            points, look = [], {"color": variant_colour(variant), "fmt": "o", "markersize": 4, "elinewidth": 0.8}
            for row in (r for r in found if r.setting.variant == variant):
                latency, rate = row.median("completion_ms"), row.median("throughput")
                assert latency is not None and rate is not None
                points.append((latency / 1e3, rate / row.setting.tp))
                x, y = ([v / 1e3 for v in row.values("completion_ms")], [v / row.setting.tp for v in row.values("throughput")])
                around = [[[at - min(v)], [max(v) - at]] for at, v in zip(points[-1], (x, y), strict=True)]
                axis.errorbar(*points[-1], xerr=around[0], yerr=around[1], alpha=0.45, **look)
            best = frontier(points)
            style = "o--" if variant == "upper-bound" else "o-"
            axis.plot(*zip(*best, strict=True), style, color=variant_colour(variant), markersize=4, label=variant)
        plain_log_axis(axis.xaxis)
        plain_log_axis(axis.yaxis)
        axis.set_xlabel("s to complete a batch")
        axis.set_ylabel("tokens/s a rank")
    legend(figure, axes)
    return figure


def split(rows: Sequence[Row]) -> Figure | None:
    """The split of a decode step's time. The four parts add up to the step."""
    known = [row for row in finished(rows) if row.split]
    if not known:
        return None

    def place(row: Row) -> tuple[Any, ...]:
        return (*configuration(row), f"from {row.split['source']}" if row.split else "")

    shown = panels(known, place)
    longest = max(len(found) for _, found in shown)
    figure, axes = column(shown, height=2.4 + 0.28 * longest)
    for axis, (_, found) in zip(axes, shown, strict=True):
        labels = [f"{r.setting.variant}, tp {r.setting.tp}, batch {r.setting.batch}" for r in found]
        starts = [0.0] * len(found)
        for part, (shade, title) in PARTS.items():
            widths = [float((r.split or {})[part]) for r in found]
            axis.barh(range(len(found)), widths, left=starts, color=shade, label=title)
            starts = [a + b for a, b in zip(starts, widths, strict=True)]
        steps = [[ms for sample in r.samples for ms in sample["step_ms"]] for r in found]
        for line, ms in enumerate(steps):
            if ms:
                middle, (low, high) = median(ms), quartiles(ms)
                axis.errorbar(middle, line, xerr=[[middle - low], [high - middle]], **MEASURED, label=None if line else STEP)
        axis.set_yticks(range(len(found)), labels, fontsize=9)
        axis.set_ylim(len(found) - 0.4, -0.6)
        axis.set_xlabel("ms of a decode step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", frameon=False, fontsize=9)
    return figure


FIGURES: dict[str, Callable[[Sequence[Row]], Figure | None]] = {
    "throughput": throughput,
    "pareto": pareto,
    "split": split,
}


def main() -> None:
    parser = Parser(description=__doc__)
    add_sweep_option(parser)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "plots", metavar="FOLDER", help="folder of the plots (default: out/plots)"
    )
    args = parser.parse_args()
    rows = read_rows(args.sweep)
    check_folder(args.out)
    for name, draw in FIGURES.items():
        figure = draw(rows)
        if figure is None:
            note(f"{name}.svg: the sweep has no rows for it")
            continue
        figure.savefig(args.out / f"{name}.svg")
        plt.close(figure)
        print(args.out / f"{name}.svg")


if __name__ == "__main__":
    run(main)
