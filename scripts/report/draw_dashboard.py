"""Draw the Grafana dashboard deploy/grafana/rung.json from a Prometheus server, into a PNG: to look at it without Grafana.

python -m scripts.report.draw_dashboard --prometheus http://127.0.0.1:9090 --minutes 10 --out out/dashboard.png

Each panel has Grafana's place, title, unit, legends and queries.
"""

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib

from cli import Parser, run
from errors import UserError
from figures import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, WINE, YELLOW
from files import check_folder
from scripts.report.dashboard import COLUMNS, PATH

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.dates import DateFormatter
from matplotlib.ticker import FuncFormatter, PercentFormatter

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, BLACK, WINE, YELLOW)
POINTS = 120  # of a curve
UNIT = 0.5  # inches of one of Grafana's rows and columns

DAY = 86400.0  # seconds: matplotlib's unit of time

Series = tuple[str, list[float], list[float]]  # legend, times in days since 1970, values


def series(client: httpx.Client, target: dict[str, Any], start: float, end: float) -> list[Series]:
    """The curves of a panel's query with all its variables set to "All". Raises UserError if Prometheus refuses it."""
    step = max(1.0, (end - start) / POINTS)
    expression = target["expr"].replace("$__rate_interval", f"{max(20, math.ceil(4 * step))}s").replace("$model", ".*")
    times = {"start": start, "end": end, "step": step}
    answer = client.get("/api/v1/query_range", params={"query": expression.replace("$instance", ".*"), **times}).json()
    if answer["status"] != "success":
        raise UserError(f"Prometheus refuses {expression}: {answer['error']}")
    return [_series(target["legendFormat"], result) for result in answer["data"]["result"]]


def _series(legend: str, result: dict[str, Any]) -> Series:
    for label, value in result["metric"].items():
        legend = legend.replace(f"{{{{{label}}}}}", value)
    return legend, [at / DAY for at, _ in result["values"]], [float(value) for _, value in result["values"]]


def draw(axes: Axes, panel: dict[str, Any], curves: list[Series], start: float, end: float) -> None:
    for (legend, times, values), colour in zip(curves, itertools.cycle(COLOURS)):
        axes.plot(times, values, label=legend, color=colour, linewidth=1.2)
    axes.set_title(panel["title"], fontsize=10, loc="left", fontweight="bold")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if unit == "percentunit":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    elif unit == "s":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{1000 * value:g} ms" if value < 1 else f"{value:g} s"))
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M"))
    axes.xaxis_date()
    axes.set_xlim(start / DAY, end / DAY)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    finite = [value for _, _, values in curves for value in values if math.isfinite(value)]
    axes.set_ylim(0, 1.08 * max(finite, default=1.0) or 1.0)
    if not finite:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="grey")
    elif len(curves) <= len(COLOURS):
        axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL", help="(default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="time span that ends now (default: 10)")
    parser.add_argument(
        "--rows", type=int, default=1000, help="draw only so many of the dashboard's rows of panels (default: all)"
    )
    parser.add_argument("--out", type=Path, default=Path("out/dashboard.png"), help="(default: %(default)s)")
    args = parser.parse_args()
    check_folder(args.out.parent)
    panels = json.loads(PATH.read_text())["panels"]
    ends = [p["gridPos"]["y"] for p in panels if p["type"] == "row"][args.rows : args.rows + 1]
    height = ends[0] if ends else max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    figure = plt.figure(figsize=(COLUMNS * UNIT, height * UNIT))
    end = time.time()
    start = end - 60 * args.minutes
    with httpx.Client(base_url=args.prometheus, trust_env=False, timeout=30) as client:
        for panel in (p for p in panels if p["gridPos"]["y"] < height):
            place = panel["gridPos"]
            left, bottom = place["x"] / COLUMNS, 1 - (place["y"] + place["h"]) / height
            if panel["type"] == "row":
                figure.text(0.01, bottom + 0.2 / height, panel["title"], fontsize=13)
                continue
            box = (left + 0.045, bottom + 1.4 / height, place["w"] / COLUMNS - 0.06, (place["h"] - 2.3) / height)
            try:
                curves = [c for target in panel["targets"] for c in series(client, target, start, end)]
            except httpx.TransportError as e:
                raise UserError(f"no Prometheus answers at {args.prometheus} ({e}); name it with --prometheus") from None
            draw(figure.add_axes(box), panel, curves, start, end)
    figure.savefig(args.out, dpi=80)
    print(args.out)


if __name__ == "__main__":
    run(main)
