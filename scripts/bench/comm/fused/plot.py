"""The plot of effective communication times by the number of rows."""

from collections import Counter
from pathlib import Path
from typing import Any

from figures import BLACK, CYCLE, MOST_LINES, new_figure
from scripts.bench.comm.fused.tables import TORCH, UNFUSED, Row


def plot(rows: list[Row], title: str, path: Path) -> None:
    """Plot effective communication time relative to the GEMM's time by m: one panel per layer, one line per algorithm.

    Algorithms that are not drawn are in the table. There are no error bars because the report holds only medians.
    """
    layers = list(dict.fromkeys(row.layer for row in rows))
    if not layers:
        return
    columns = min(len(layers), 2)
    lines_of_panels = -(-len(layers) // columns)
    figure = new_figure(3.4 * columns, 2.9 * lines_of_panels + 0.6)
    panels = figure.subplots(lines_of_panels, columns, squeeze=False, sharey=True)
    styles = line_styles(list(dict.fromkeys(row.way for row in rows)))
    for panel, layer in zip(panels.flat, layers, strict=False):
        draw_layer(panel, [row for row in rows if row.layer == layer], styles)
    for panel in panels.flat[len(layers) :]:
        panel.set_axis_off()
    figure.supylabel("effective communication time, % of the GEMM's", fontsize=9)
    figure.supxlabel("m, rows", fontsize=9)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)


def draw_layer(panel: Any, rows: list[Row], styles: dict[str, dict[str, str]]) -> None:
    """Draw the rows of one layer. The axis is linear up to 100 % and logarithmic above, so that no point is cut off."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    for way in shown_ways(rows):
        points = sorted((row.m, 100 * row.ect / row.gemm) for row in rows if row.way == way)
        panel.plot(*zip(*points, strict=True), markersize=4, linewidth=1.2, label=way, **styles[way])
    panel.set_yscale("symlog", linthresh=100, linscale=2)
    panel.yaxis.set_major_locator(FixedLocator([0, 20, 40, 60, 80, 100, 200, 400, 1000]))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.set_xscale("log", base=2)
    ticks = sorted({row.m for row in rows})[::2]
    panel.set_xticks(ticks, [f"{m:,}" for m in ticks], fontsize=8)
    panel.set_title(f"{rows[0].layer} ({rows[0].n}, {rows[0].k})", fontsize=9, loc="left")
    panel.axhline(0, color="#9ca3af", linewidth=0.8)
    panel.axhline(100, color="#9ca3af", linewidth=0.8, linestyle=":")
    panel.legend(frameon=False, fontsize=7)


def shown_ways(rows: list[Row]) -> list[str]:
    """The algorithms that a panel shows: unfused, torch's, and ours that are fastest at some m, the most often fastest first."""
    peers = [way for way in (UNFUSED, TORCH) if any(row.way == way for row in rows)]
    best = Counter(
        min((row for row in rows if row.m == m and row.way not in peers), key=lambda row: row.overall).way
        for m in sorted({row.m for row in rows})
        if any(row.m == m and row.way not in peers for row in rows)
    )
    return [*peers, *(way for way, _ in best.most_common(MOST_LINES - len(peers)))]


def line_styles(ways: list[str]) -> dict[str, dict[str, str]]:
    """Line styles by algorithm: a colour for each way to split the GEMM, dashes for pulls, a marker for each number of chunks."""
    parts = {way: way.partition("/")[::2] for way in ways}
    splits = list(dict.fromkeys(carried.removesuffix("-pull") for carried, _ in parts.values()))
    markers, colours = {"": "o", "2": "s", "4": "^"}, (BLACK, *CYCLE)
    return {
        way: {
            "color": colours[splits.index(carried.removesuffix("-pull")) % len(colours)],
            "linestyle": "--" if carried.endswith("-pull") else "-",
            "marker": markers.get(chunks, "x"),
        }
        for way, (carried, chunks) in parts.items()
    }
