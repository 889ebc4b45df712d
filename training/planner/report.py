"""Shows plans as text, as a Markdown table, as JSON, and as a plot of predicted MFU by the number of GPUs."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from errors import UserError
from training.metrics import new_figure
from training.planner.collectives import synthesize
from training.planner.cost import Prediction
from training.planner.search import OBJECTIVES, Alternative, alternatives, choose
from training.planner.workload import Workload
from training.sharding import Mesh


def as_json(plan: Prediction) -> dict[str, Any]:
    """A plan as plain JSON: meshes as text, memory in bytes, times in seconds."""
    meshes = plan.sharding
    return {
        "parameters": str(meshes.parameters),
        "gradients": str(meshes.gradients),
        "optimizer": str(meshes.optimizer),
        "secondary": None if plan.secondary is None else str(plan.secondary),
        "memory_bytes": asdict(plan.memory) | {"total": plan.memory.total},
        "communication_seconds": asdict(plan.communication) | {"total": plan.communication.total},
        "exposed_seconds": asdict(plan.exposed) | {"total": plan.exposed.total},
        "compute_seconds": plan.compute_seconds,
        "optimizer_seconds": plan.optimizer_seconds,
        "step_seconds": plan.step_seconds,
        "mfu": plan.mfu,
        "tokens_per_gpu_second": plan.tokens_per_gpu_second,
    }


def listed(values: dict[str, float], scale: float, unit: str) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value / scale:.3g}" for name, value in values.items() if value) + f" {unit}"


def describe(workload: Workload, plan: Prediction, memory_bytes: float) -> str:
    """The chosen plan as text."""
    w = workload
    batch = f"{w.micro_batches} x {w.micro_batch} x {w.sequence_length} tokens per GPU (micro-batches x sequences x length)"
    return "\n".join(
        [
            f"{w.parameters / 1e6:,.0f}M parameters on {w.mesh.nodes} nodes of {w.mesh.gpus} GPUs, {batch}"
            + (", with recomputation" if w.recompute else ""),
            f"times of collectives: {w.profile.name}",
            "",
            f"plan     {plan.sharding}",
            f"memory   {plan.memory.total / 1e9:.1f} of {memory_bytes / 1e9:.1f} GB per GPU: {listed(asdict(plan.memory), 1e9, 'GB')}",
            f"step     {plan.step_seconds:.3f} s: compute {plan.compute_seconds:.3f}, optimizer {plan.optimizer_seconds:.3f}, exposed communication {plan.exposed.total:.3f} s",
            f"         all communication {plan.communication.total:.3f} s: {listed(asdict(plan.communication), 1, 's') if plan.communication.total else 'none'}",
            f"MFU      {plan.mfu:.1%}, {plan.tokens_per_gpu_second:.0f} tokens per GPU and second",
        ]
    )


def table(rows: Sequence[tuple[str, Prediction, bool]]) -> str:
    """Plans as a Markdown table."""
    lines = ["| scheme | P | G | OS | memory, GB | communication, s | step, s | MFU |", "|---|---|---|---|---|---|---|---|"]
    for name, plan, fits in rows:
        p, g, os_ = plan.sharding.parameters, plan.sharding.gradients, plan.sharding.optimizer
        first = f"{p} + {plan.secondary}" if plan.secondary else str(p)
        speed = f"{plan.step_seconds:.3f} | {plan.mfu:.1%}" if fits else "does not fit | "
        lines.append(
            f"| {name} | {first} | {g} | {os_} | {plan.memory.total / 1e9:.1f} | {plan.communication.total:.3f} | {speed} |"
        )
    return "\n".join(lines)


def why_chosen(ranked: Sequence[Prediction], objective: str, tolerance: float) -> str:
    """A note if another plan is better than the chosen one by the objective, within the tolerance; otherwise empty."""
    cost = OBJECTIVES[objective]
    if len(ranked) < 2 or cost(ranked[0]) <= cost(ranked[1]):
        return ""
    more = cost(ranked[0]) / cost(ranked[1]) - 1
    preferred = "the least communication" if objective == "step" else "G = P, then the least memory"
    return (
        f"\n\nthe {objective} of the chosen plan is {more:.2%} longer than that of the next plan; this counts as equal "
        f"(--tolerance {tolerance:g}), and of equal plans the one with {preferred} is chosen"
    )


def rows(ranked: Sequence[Prediction], others: Sequence[Alternative]) -> list[tuple[str, Prediction, bool]]:
    """The rows of the table: the chosen plan, the next two, and the plans of other systems."""
    names = ["chosen", "second", "third"]
    return [(n, p, True) for n, p in zip(names, ranked, strict=False)] + [(a.name, a.plan, a.fits) for a in others]


# --- MFU by the number of GPUs -------------------------------------------------------------------------------------------


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
