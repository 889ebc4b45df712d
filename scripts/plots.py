"""The ladder paper's figures 2, 3 and 4, and where a step's time goes, from the rows of a sweep.

    python scripts/plots.py --sweep out/sweep.jsonl --out out/plots

| file | shows |
|---|---|
| throughput.svg | throughput relative to the standard model, by ranks and batch size (figure 2) |
| bars.svg | the same as bars at the most ranks, with the slowest and the fastest run (figure 3) |
| pareto.svg | time to complete a batch against tokens a second and GPU, with the best points joined (figure 4) |
| split.svg | a decode step: computing, communication hidden behind it, communication that is waited for |
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from cli import Parser, note, run
from errors import UserError
from scripts.results import ROOT, check_folder
from scripts.sweep_rows import ORDER, Row, baseline, finished, ratio, read_rows

COLOURS = dict(zip(ORDER, ("#6b7280", "#b45309", "#2563eb", "#7c3aed", "#0d9488", "#15803d", "#d1d5db"), strict=True))
PARTS = {  # of a step, in the order of the bar
    "compute": ("#93c5fd", "computing"),
    "hidden": ("#2563eb", "computing while communicating (hidden)"),
    "exposed": ("#dc2626", "waiting for communication (exposed)"),
    "idle": ("#e5e7eb", "neither"),
}
MAX_PANELS = 12

Panel = tuple[str, list[Row]]  # title and rows
mpl.rcParams |= {"svg.fonttype": "none", "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False}


def colour(variant: str) -> str:
    return COLOURS.get(variant.split(":")[0], "#db2777")


def panels(rows: Sequence[Row], by: Callable[[Row], tuple[Any, ...]]) -> list[Panel]:
    """Rows that share `by`, which becomes the title. No more than a page can show."""
    found = [
        (", ".join(str(part) for part in key if part), list(group)) for key, group in groupby(sorted(rows, key=by), key=by)
    ]
    if len(found) > MAX_PANELS:
        raise UserError(f"the sweep has {len(found)} sets of models and lengths, more than {MAX_PANELS}; plot a file of fewer")
    return [(title, finished(group)) for title, group in found]


def configuration(row: Row) -> tuple[Any, ...]:
    """What one panel holds constant. Ranks, batch sizes and variants vary within it."""
    s = row.setting
    link = "" if s.interconnect == "default" else s.interconnect
    return s.model, f"{s.prompt_length} + {s.new_tokens} tokens", s.comm or "", link, s.dtype, "compiled" if s.compile else ""


def grid(shown: Sequence[Panel], width: float = 6.0, height: float = 3.4) -> tuple[Figure, list[Any]]:
    columns = min(2, len(shown))
    lines = -(-len(shown) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(width * columns, height * lines), layout="constrained", squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, (title, _) in zip(axes.flat, shown, strict=False):
        axis.set_title(title, loc="left", fontsize=8)
    return figure, list(axes.flat[: len(shown)])


def variants(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.setting.variant for row in rows))


def gains(rows: Sequence[Row], variant: str) -> dict[tuple[int, int], float]:
    """Throughput over the standard model's by (ranks, batch), where both were run."""
    found = {(r.setting.tp, r.setting.batch): ratio(r, rows, "throughput") for r in rows if r.setting.variant == variant}
    return {place: gain for place, gain in found.items() if gain is not None}


def whiskers(row: Row, rows: Sequence[Row]) -> tuple[float, float]:
    """How far the slowest and the fastest run lie below and above the median, in units of the standard model's median."""
    base, values, middle = baseline(row, rows), row.values("throughput"), row.median("throughput")
    unit = base.median("throughput") if base else None
    assert unit is not None and middle is not None
    return (middle - min(values)) / unit, (max(values) - middle) / unit


def compared(rows: Sequence[Row]) -> list[Panel]:
    """Panels in which something can be set against the standard model."""
    shown = panels(finished(rows), configuration)
    return [(t, found) for t, found in shown if any(gains(found, v) for v in variants(found) if v != "standard")]


def throughput(rows: Sequence[Row]) -> Figure | None:
    """Figure 2: one group of points for each number of ranks, batch sizes within it."""
    if not (shown := compared(rows)):
        return None
    figure, axes = grid(shown)
    for axis, (_, found) in zip(axes, shown, strict=True):
        places = sorted({(r.setting.tp, r.setting.batch) for r in found})
        for variant in variants(found):
            ours = gains(found, variant)
            for tp in sorted({tp for tp, _ in places}):
                at = [(places.index(place), ours[place]) for place in places if place in ours and place[0] == tp]
                label = variant if tp == places[0][0] else None
                axis.plot(*zip(*at, strict=True) if at else ([], []), "o-", color=colour(variant), label=label, markersize=4)
        axis.axhline(1, color=colour("standard"), linewidth=0.8)
        axis.set_xticks(range(len(places)), [f"{batch}\ntp {tp}" for tp, batch in places], fontsize=8)
        axis.set_xlabel("batch and ranks")
        axis.set_ylabel("tokens/s over standard")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def bars(rows: Sequence[Row]) -> Figure | None:
    """Figure 3: at the most ranks, one group of bars for each batch size."""
    if not (shown := compared(rows)):
        return None
    figure, axes = grid(shown)
    for axis, (_, found) in zip(axes, shown, strict=True):
        tp = max(r.setting.tp for r in found)
        sizes = sorted({r.setting.batch for r in found if r.setting.tp == tp})
        names = variants(found)
        for i, variant in enumerate(names):
            ours = [r for r in found if r.setting.variant == variant and r.setting.tp == tp and baseline(r, found)]
            x = [sizes.index(r.setting.batch) + (i - (len(names) - 1) / 2) * 0.8 / len(names) for r in ours]
            heights = [gains(found, variant)[tp, r.setting.batch] for r in ours]
            errors = list(zip(*(whiskers(r, found) for r in ours), strict=True)) or None
            look = {"color": colour(variant), "label": variant, "error_kw": {"elinewidth": 0.8, "capsize": 2}}
            drawn = axis.bar(x, heights, 0.8 / len(names), yerr=errors, **look)
            axis.bar_label(drawn, fmt="%.2f", fontsize=7, padding=2)
        axis.axhline(1, color=colour("standard"), linewidth=0.8)
        axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axis.set_xlabel(f"batch, tp {tp}")
        axis.set_ylabel("tokens/s over standard")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (latency, throughput) points those that no other one beats in both, by rising latency."""
    best: list[tuple[float, float]] = []
    for latency, rate in sorted(points, key=lambda p: (p[0], -p[1])):
        if not best or rate > best[-1][1]:
            best.append((latency, rate))
    return best


def pareto(rows: Sequence[Row]) -> Figure | None:
    """Figure 4: all ranks and batch sizes of a variant together."""
    if not (shown := panels(finished(rows), configuration)):
        return None
    figure, axes = grid(shown)
    for axis, (_, found) in zip(axes, shown, strict=True):
        for variant in variants(found):
            points = []
            for row in (r for r in found if r.setting.variant == variant):
                latency, rate = row.median("completion_ms"), row.median("throughput")
                assert latency is not None and rate is not None
                points.append((latency / 1e3, rate / row.setting.tp))
            axis.plot(*zip(*points, strict=True), "o", color=colour(variant), markersize=4, alpha=0.35)
            best = frontier(points)
            axis.plot(*zip(*best, strict=True), "o-", color=colour(variant), markersize=4, label=variant)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("s to complete a batch")
        axis.set_ylabel("tokens/s a rank")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def split(rows: Sequence[Row]) -> Figure | None:
    """Where the time of a decode step goes; the four parts add up to it."""
    known = [row for row in finished(rows) if row.split]
    if not known:
        return None

    def place(row: Row) -> tuple[Any, ...]:
        return (*configuration(row), f"from {row.split['source']}" if row.split else "")

    shown = panels(known, place)
    longest = max(len(found) for _, found in shown)
    figure, axes = grid(shown, height=1.2 + 0.28 * longest)
    for axis, (_, found) in zip(axes, shown, strict=True):
        labels = [f"{r.setting.variant}, tp {r.setting.tp}, batch {r.setting.batch}" for r in found]
        left = [0.0] * len(found)
        for part, (shade, title) in PARTS.items():
            widths = [float((r.split or {})[part]) for r in found]
            axis.barh(range(len(found)), widths, left=left, color=shade, label=title)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.set_yticks(range(len(found)), labels, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel("ms of a decode step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


FIGURES: dict[str, Callable[[Sequence[Row]], Figure | None]] = {
    "throughput": throughput,
    "bars": bars,
    "pareto": pareto,
    "split": split,
}


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", type=Path, default=ROOT / "out" / "sweep.jsonl", help="default: out/sweep.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "plots", metavar="FOLDER", help="default: out/plots")
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
