"""Shows plans as text, as a Markdown table and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from training.planner.cost import Prediction
from training.planner.search import OBJECTIVES, Alternative
from training.planner.workload import Workload


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
