"""Chooses the meshes of P, G and OS (AMSP, section V.B), and predicts what well-known systems would choose.

    minimize     the predicted step time; or, as in the paper, T_P + T_G + T_OS         (1)
    subject to   the plan fits into the memory of a GPU                                 (2)
                 P inside G inside OS inside all GPUs                                   (3)
                 G = P or G = OS                                                        (4)
                 GPUs per node of each mesh divide R, its nodes divide N                (5, 6)
                 of the meshes of one size, only the one on the fewest nodes            (7)

The cluster has N nodes of R GPUs. (5, 6) and (7) are filters that reduce the search space. All plans that remain are tried.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

from errors import UserError
from training.planner.collectives import divisors
from training.planner.cost import Prediction, predict
from training.planner.memory import Memory, memory
from training.planner.workload import Workload
from training.sharding import Mesh, Sharding

OBJECTIVES: dict[str, Callable[[Prediction], float]] = {
    "communication": lambda plan: plan.communication.total,
    "step": lambda plan: plan.step_seconds,
}
OBJECTIVE = "step"
TOLERANCE = 0.01  # a fraction; profiles are not more exact than this


def tiling_meshes(cluster: Mesh) -> list[Mesh]:
    """The first filter: the meshes that tile the cluster, so that every GPU and every node has work (equations 5 and 6)."""
    return [Mesh(a, b) for a, b in product(divisors(cluster.gpus), divisors(cluster.nodes))]


def filtered_meshes(cluster: Mesh) -> list[Mesh]:
    """Both filters: of the tiling meshes of each size, the one on the fewest nodes (equation 7). Sorted by size."""
    by_size: dict[int, Mesh] = {}
    for mesh in tiling_meshes(cluster):
        known = by_size.get(mesh.size)
        if known is None or mesh.nodes < known.nodes:
            by_size[mesh.size] = mesh
    return [by_size[size] for size in sorted(by_size)]


def shardings(meshes: Iterable[Mesh]) -> list[Sharding]:
    """All shardings with these meshes that nest (3) and have G = P or G = OS (4)."""
    known = list(meshes)
    pairs = [(p, os) for p in known for os in known if p.inside(os)]
    return [Sharding(p, g, os) for p, os in pairs for g in dict.fromkeys((p, os))]


def _close(plans: Iterable[Prediction], objective: str, tolerance: float) -> list[Prediction]:
    """The plans within `tolerance` (a fraction) of the lowest `objective`."""
    costs = {plan: OBJECTIVES[objective](plan) for plan in plans}
    return [plan for plan, cost in costs.items() if cost <= (1 + tolerance) * min(costs.values())]


def choose(
    workload: Workload, memory_bytes: float, objective: str = OBJECTIVE, tolerance: float = TOLERANCE
) -> list[Prediction]:
    """The plans that fit into `memory_bytes` of a GPU: the chosen one first, then the others sorted by `objective`.

    objective: `step` is the predicted step time. `communication` is the paper's equation 1, which includes communication
    that is hidden behind computation, and does not include the time of Adam. Plans within `tolerance` (a fraction) of the
    lowest count as equal. Of these, the one with the least communication is chosen, as in the paper: even hidden communication
    takes SMs and memory bandwidth from the computation. If it is about equal, too, one with G = P is chosen, because it stays
    as good when micro-batches are added (at M = 1, T_G is 0 for every G), and then the one with the least memory.

    Raises UserError if no plan fits.
    """
    fitting = [s for s in shardings(filtered_meshes(workload.mesh)) if memory(workload, s).total <= memory_bytes]
    if not fitting:
        least = memory(workload, Sharding(workload.mesh, workload.mesh, workload.mesh))
        raise UserError(
            f"no plan fits: even with all states sharded over all {workload.mesh.size} GPUs a GPU needs {least.total / 1e9:.1f} GB of "
            f"{memory_bytes / 1e9:.1f}; try {' or '.join(_remedies(workload, least, memory_bytes))}"
        )
    ranked = sorted((predict(workload, s) for s in fitting), key=lambda plan: (OBJECTIVES[objective](plan), plan.memory.total))

    def preference(plan: Prediction) -> tuple[bool, float, float]:
        return plan.sharding.gradients != plan.sharding.parameters, plan.memory.total, plan.communication.total

    best = min(_close(_close(ranked, objective, tolerance), "communication", tolerance), key=preference)
    return [best, *(plan for plan in ranked if plan is not best)]


def _remedies(workload: Workload, least: Memory, memory_bytes: float) -> list[str]:
    """Options that would make the fully sharded plan smaller."""
    remedies = []
    if workload.micro_batch > 1:
        remedies.append("--micro-batch 1")
    if not workload.recompute:
        remedies.append("--recompute")
    if least.total - least.parameters - least.gradients - least.optimizer < memory_bytes:
        remedies.append("more GPUs")
    return [*remedies, "a shorter --sequence-length"]


# --- other systems -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alternative:
    """A well-known scheme (AMSP, figure 1 and table IV), predicted for the same executor."""

    name: str
    plan: Prediction
    fits: bool


def alternatives(workload: Workload, memory_bytes: float, objective: str = OBJECTIVE) -> list[Alternative]:
    """Data parallelism, ZeRO-1, -2, -3 (Rajbhandari et al., arXiv:1910.02054), MiCS (Zhang et al., arXiv:2205.00119) and
    ZeRO++ without quantization (Wang et al., arXiv:2306.10209).

    MiCS and ZeRO++ get the best mesh that fits. ZeRO-1 and -2 send their updates by all-gather, as they were published.
    """
    one, full = Mesh(), workload.mesh
    gathering = replace(workload, intra_tensor=True)
    cost = OBJECTIVES[objective]

    def best(plans: Iterable[Prediction]) -> Prediction:
        """The plan with the lowest cost that fits, or the one with the least memory if none fits."""
        known = list(plans)
        fitting = [plan for plan in known if plan.memory.total <= memory_bytes]
        return min(fitting, key=cost) if fitting else min(known, key=lambda plan: plan.memory.total)

    zero3 = Sharding(full, full, full)
    sharded = [mesh for mesh in filtered_meshes(workload.mesh) if mesh.size > 1 or workload.mesh.size == 1]
    found = {
        "data parallel": predict(workload, Sharding(one, one, one)),
        "ZeRO-1": predict(gathering, Sharding(one, one, full)),
        "ZeRO-2": predict(gathering, Sharding(one, full, full)),
        "ZeRO-3": predict(workload, zero3),
        "MiCS": best(predict(workload, Sharding(mesh, mesh, mesh)) for mesh in sharded),
        "ZeRO++": best(predict(workload, zero3, secondary=mesh) for mesh in sharded),
    }
    return [Alternative(name, plan, plan.memory.total <= memory_bytes) for name, plan in found.items()]
