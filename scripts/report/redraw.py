"""Draw the tracked figures again from their raw files, and write the tables of GPU measurements again.

    python -m scripts.report.redraw --write      # into docs/results; without --write into out

Measures nothing. Two sets of figures have other commands: `make plan-paper` computes the planner's raw file and draws its
figures, and `make plot-hidden` draws overlap.svg directly from the trace.
"""

import argparse
import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from cli import Parser, note, run
from scripts.bench.training.tables import plot, table
from scripts.lib.results import RESULTS, add_write_option, made, results_folder
from scripts.quality import adapt_curve, divergence, pretrain_variants, seeds
from scripts.report import performance
from training.metrics import draw_losses

FOLDERS = sorted(path for path in RESULTS.iterdir() if path.is_dir())  # of GPU measurements
FIGURES: dict[str, Callable[[Any, Path], object]] = {  # names of raw files, and what draws their figure
    "accuracy-seeds": lambda found, out: seeds.draw(found["rows"], found["summary"], out),
    "adapt": lambda found, out: draw_losses(list(found["metrics"].items()), out),
    "adapt-curve*": lambda found, out: adapt_curve.draw(found["summary"], found["settings"]["epochs"], out),
    "divergence*": lambda found, out: divergence.plot(found["rows"], found["tokens"], out),
    "pretrain-*": lambda found, out: pretrain_variants.draw(found["metrics"], out),
}


def main() -> None:
    parser = Parser(description=__doc__)
    add_write_option(parser)
    folder = results_folder(parser.parse_args())
    for raw in FOLDERS:
        performance.show(raw, folder)
    for path in sorted(RESULTS.glob("*.json")):
        if path.name.startswith("training-"):
            training(path, folder)
        for name, draw in FIGURES.items():
            if fnmatch(path.stem, name):
                draw(json.loads(path.read_text()), out := folder / f"{path.stem}.png")
                made(out, path)
                note(f"drew {out}")


def training(path: Path, folder: Path) -> None:
    """Draw the figure and write the table of a result file of `make bench-training`."""
    found, out = json.loads(path.read_text()), folder / f"{path.stem}.png"
    args = argparse.Namespace(**found["settings"])
    plot(found["rows"], args, out)
    out.with_suffix(".md").write_text(table(found["rows"], args))
    for shown in (out, out.with_suffix(".md")):
        made(shown, path)
    note(f"drew {out}")


if __name__ == "__main__":
    run(main)
