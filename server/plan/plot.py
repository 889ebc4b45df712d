"""The plot of `--plot`: latencies by load."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from errors import UserError
from figures import CYCLE, plain_log_axis


def draw(
    curves: Mapping[str, Sequence[Mapping[str, Any]]], limits: Mapping[str, float], share: str, title: str, path: Path
) -> None:
    """curves: of `choice.curves`. limits: the goals in ms, by the key of a point. Raises UserError if matplotlib is missing or `path`
    cannot be written."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise UserError("--plot needs matplotlib, which is for developers; make setup-dev installs it") from None
    figure, panels = plt.subplots(1, len(limits), figsize=(10, 4.2), layout="constrained")
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
    try:
        figure.savefig(path)
    except OSError as e:
        raise UserError(f"--plot {path} cannot be written ({e.strerror}); name a file in a folder that exists") from None
    plt.close(figure)
