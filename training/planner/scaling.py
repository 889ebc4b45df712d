"""Predicted MFU by the number of GPUs: the chosen plan and those of other systems, as a plot."""

import argparse
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from errors import UserError
from figures import new_figure
from training.planner.collectives import synthesize
from training.planner.search import alternatives, choose
from training.planner.workload import Workload
from training.sharding import Mesh

MOST_GPUS = 4096


def scaling(workload: Workload, args: argparse.Namespace, memory_bytes: float) -> dict[str, list[tuple[int, float]]]:
    """Predicted MFU by scheme: (GPUs, MFU) for the cluster sizes at which it fits, from one node to MOST_GPUS in powers
    of two.

    The global batch stays the same, rounded to whole micro-batches, but each GPU gets at least one micro-batch.
    """
    sizes = [workload.mesh.gpus * 2**i for i in range(13) if workload.mesh.gpus * 2**i <= MOST_GPUS]
    found: dict[str, list[tuple[int, float]]] = {}
    for gpus in tqdm(sizes, unit="cluster size", disable=None):
        nodes = gpus // workload.mesh.gpus
        least = gpus * workload.tokens
        batch = max(1, round(workload.global_batch / least)) * least
        profile = workload.profile if args.profile else synthesize(workload.cluster, nodes)
        here = replace(workload, mesh=Mesh(workload.mesh.gpus, nodes), profile=profile, global_batch=batch)
        try:
            best = choose(here, memory_bytes, args.objective, args.tolerance)[0]
            others = alternatives(here, memory_bytes, args.objective)
        except UserError:  # no plan fits on so few GPUs, or the measured profile does not cover so many
            continue
        for name, plan in [("chosen", best), *((other.name, other.plan) for other in others if other.fits)]:
            found.setdefault(name, []).append((gpus, plan.mfu))
    return found


def draw(lines: dict[str, list[tuple[int, float]]], title: str, path: Path) -> None:
    """Write the plot of `scaling`. Raises UserError if there is nothing to draw, if matplotlib is missing, or if `path`
    cannot be written."""
    if not lines:
        raise UserError("--plot has nothing to draw: at no power of two of nodes a plan fits and is profiled; leave --plot out")
    figure = new_figure(8, 4.5)
    axis = figure.subplots()
    for name, points in lines.items():
        gpus, mfu = zip(*points, strict=True)
        axis.plot(
            gpus, [100 * m for m in mfu], marker="o", markersize=4, label=name, linewidth=2.5 if name == "chosen" else 1.2
        )
    axis.set_xscale("log", base=2)
    ticks = sorted({g for points in lines.values() for g, _ in points})
    axis.set_xticks(ticks, [str(g) for g in ticks])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("GPUs")
    axis.set_ylabel("predicted MFU, %")
    axis.set_title(title, loc="left", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend()
    try:
        figure.savefig(path)
    except OSError as e:
        raise UserError(f"--plot {path} cannot be written ({e.strerror}); name a file in a folder that exists") from None
