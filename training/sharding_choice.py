"""Resolves --sharding, to the given meshes or to the planner's choice, before any memory is allocated."""

import argparse
from dataclasses import dataclass, replace

import torch

from comm.cluster import Cluster, load_cluster, shipped_clusters
from config import ModelConfig
from errors import UserError
from training.executor import Execution
from training.options import dtype_of, execution_settings
from training.planner.collectives import profile_for
from training.planner.cost import predict
from training.planner.search import OBJECTIVE, OBJECTIVES, TOLERANCE, choose
from training.planner.workload import Workload
from training.sharding import Mesh, Sharding


@dataclass(frozen=True)
class Planned:
    """The sharding of a run, and the planner's predicted step time if there is one."""

    sharding: Sharding
    why: str
    step_seconds: float | None = None
    intra_tensor: bool = False  # cut every tensor's optimizer states evenly, instead of giving each tensor one owner


def execution_of(args: argparse.Namespace, planned: Planned) -> Execution:
    given = execution_settings(args)
    return Execution(
        given["overlap"], args.intra_tensor or planned.intra_tensor, args.recompute, args.compile, given["bucket_bytes"]
    )


def plan(args: argparse.Namespace, config: ModelConfig, mesh: Mesh, device: torch.device) -> Planned:
    """Resolve --sharding before any memory is allocated. Raises UserError if the meshes do not nest or tile the ranks, or
    if the plan does not fit into memory."""
    workload = workload_of(args, config, mesh, device)
    if args.sharding != "auto":
        sharding = Sharding.parse(args.sharding)
        sharding.check(mesh)
        if workload is None:
            return Planned(sharding, "as given")
        found = predict(workload, sharding)
        free = _memory(device)
        if free is not None and found.memory.total > free:
            raise UserError(
                f"--sharding {args.sharding} needs about {found.memory.total / 1e9:.1f} GB a GPU of {free / 1e9:.1f}; "
                "use --sharding auto, larger meshes, --recompute or a smaller --micro-batch"
            )
        return Planned(sharding, "as given", found.step_seconds)
    if workload is None:
        return Planned(Sharding(Mesh(), Mesh(), Mesh(mesh.gpus)), "auto without a --cluster: optimizer states over a node")
    return choice(workload, _memory(device) or workload.cluster.memory_gb * 1e9)


def choice(workload: Workload, memory_bytes: float) -> Planned:
    """The planner's choice. Unless the workload has evenly cut optimizer states, it is computed with and without even cuts.
    Of the two, the one with the lower cost is taken; if the costs are within the tolerance, the one with less
    communication."""
    cuts = dict.fromkeys((workload.intra_tensor, True))
    plans = {cut: choose(replace(workload, intra_tensor=cut), memory_bytes)[0] for cut in cuts}
    cost = OBJECTIVES[OBJECTIVE]
    least = min(map(cost, plans.values()))
    close = {cut: plan for cut, plan in plans.items() if cost(plan) <= (1 + TOLERANCE) * least}
    cut, best = min(close.items(), key=lambda item: item[1].communication.total)
    return Planned(best.sharding, f"auto: the planner's choice on {workload.cluster.name}", best.step_seconds, cut)


def workload_of(args: argparse.Namespace, config: ModelConfig, mesh: Mesh, device: torch.device) -> Workload | None:
    """The planner's input; None on a CPU without --cluster."""
    cluster = _cluster(args, device)
    if cluster is None:
        return None
    cluster, profile = profile_for(cluster, mesh, args.profile_collectives)
    return Workload(
        config=config,
        mesh=mesh,
        cluster=cluster,
        profile=profile,
        global_batch=args.global_batch * args.sequence_length,
        precision=str(dtype_of(args, device)).removeprefix("torch."),
        **execution_settings(args),
    )


def _cluster(args: argparse.Namespace, device: torch.device) -> Cluster | None:
    if args.cluster:
        return load_cluster(args.cluster)
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device).lower()
    return load_cluster(next((c for c in shipped_clusters() if c in name), "h100"))


def _memory(device: torch.device) -> float | None:
    """Bytes of this GPU's memory; None on a CPU."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None
