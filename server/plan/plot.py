"""The plot of `--plot`: latencies by load."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import CYCLE, new_figure, plain_log_axis
from files import writing


def draw(
    curves: Mapping[str, Sequence[Mapping[str, Any]]], limits: Mapping[str, float], share: str, title: str, path: Path
) -> None:
    """curves: of `choice.curves`. limits: the goals in ms, by the key of a point. Raises UserError if matplotlib is missing or `path`
    cannot be written."""
    figure = new_figure(10, 4.2)
    panels = figure.subplots(1, len(limits))
    for panel, (key, limit) in zip(panels, limits.items(), strict=True):
        for (name, points), colour in zip(curves.items(), CYCLE, strict=False):
            load = [point["requests_per_second"] for point in points]
            panel.plot(load, [point[key][share] for point in points], color=colour, marker="o", markersize=3, label=name)
        panel.axhline(limit, color="black", linestyle="--", linewidth=1)
        panel.set(xlabel="requests/s", ylabel=f"{key.partition('_')[0].upper()} {share}, ms")
        plain_log_axis(panel.yaxis)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    with writing(path):
        figure.savefig(path)
