"""Choose how to shard parameters, gradients and optimizer states, and predict the step.

    python -m training.plan --model llama-30b --gpus 1024 --cluster a800 --recompute
    python -m training.plan --model llama-3-8b --gpus 64 --cluster h100 --objective communication --plot mfu.png
    python -m training.plan --model models/tiny-hybrid --gpus 4 --gpus-per-node 4 --precision float32 \\
        --sequence-length 256 --global-batch 4k --profile profile.json

A mesh a x b spans a GPUs on each of b nodes. Parameters (P), gradients (G) and optimizer states (OS) each have a mesh. A state
is cut into a * b parts over its mesh, and copied to the other meshes of that shape; 1x1 is a full copy on every GPU. Of the
plans that fit into memory, the one with the shortest predicted step is chosen, or with --objective communication the one that
AMSP (arXiv:2311.00257) would choose. Times of collectives come from --profile (make profile-collectives measures one), or from
the link speeds of --cluster. docs/planner.md explains the model and what it leaves out.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cli import Parser, run
from errors import UserError
from presets import PRESETS, model_config
from training.planner.cluster import load_cluster, shipped_clusters
from training.planner.collectives import profile_for, synthesize
from training.planner.cost import Prediction, predict
from training.planner.node_order import node_order, read_leaves, spans
from training.planner.search import OBJECTIVE, OBJECTIVES, TOLERANCE, Alternative, alternatives, choose
from training.planner.workload import OVERLAPS, PRECISIONS, Workload
from training.sharding import Mesh, Sharding

MOST_GPUS = 4096  # in the plot
SUFFIXES = {"k": 2**10, "m": 2**20, "g": 2**30}


def count(text: str) -> int:
    """Parse a whole number: `4M` is 4 * 2**20, `16k` is 16 * 2**10."""
    number, factor = (text[:-1], SUFFIXES[text[-1].lower()]) if text[-1:].lower() in SUFFIXES else (text, 1)
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1; write 4194304, 4096k or 4M (4 * 2**20)")
    return int(number) * factor


def amount(text: str) -> float:
    """Parse a number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return value


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m training.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is trained, on what")
    what.add_argument(
        "--model", required=True, metavar="DIR|PRESET", help=f"a checkpoint directory, or one of {', '.join(PRESETS)}"
    )
    what.add_argument("--gpus", type=count, required=True, metavar="N", help="all of them; whole nodes")
    what.add_argument("--gpus-per-node", type=count, metavar="N", help="default: the cluster's")
    what.add_argument("--gpu-memory", type=amount, metavar="GB", help="of one GPU, 1e9 bytes each (default: the cluster's)")
    what.add_argument(
        "--cluster", default="h100", metavar="NAME|FILE", help=f"{', '.join(shipped_clusters())} or a .json (default: h100)"
    )
    what.add_argument(
        "--profile", type=Path, metavar="FILE", help="measured times of collectives, in place of the cluster's links"
    )

    batch = parser.add_argument_group("the batch; k, M and G are 2**10, 2**20 and 2**30")
    batch.add_argument("--sequence-length", type=count, default=4096, metavar="TOKENS", help="default: 4096")
    batch.add_argument("--micro-batch", type=count, default=1, metavar="SEQUENCES", help="of a GPU at once (default: 1)")
    batch.add_argument("--global-batch", type=count, default=2**22, metavar="TOKENS", help="of a step (default: 4M)")

    how = parser.add_argument_group("how it is trained")
    how.add_argument(
        "--recompute", action="store_true", help="keep the layers' inputs only, compute the layers again in backward"
    )
    how.add_argument(
        "--precision", choices=PRECISIONS, default="bfloat16", help="bfloat16: 2 + 2 + 12 bytes a parameter; float32: 4 + 4 + 8"
    )
    how.add_argument("--intra-tensor", action="store_true", help="spread updates by all-gather instead of broadcasts")
    how.add_argument("--bucket-mb", type=amount, default=64.0, metavar="MIB", help="of summed gradients (default: 64)")
    how.add_argument(
        "--no-overlap", nargs="+", choices=OVERLAPS, default=[], metavar="WHAT", help=f"expose some of {', '.join(OVERLAPS)}"
    )
    how.add_argument(
        "--reserve",
        type=amount,
        default=2.0,
        metavar="GB",
        help="for CUDA, NCCL and fragmentation, which no formula gives (default: 2)",
    )

    search = parser.add_argument_group("the choice")
    search.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default=OBJECTIVE,
        help="shortest step (the default), or least communication, as the paper",
    )
    search.add_argument(
        "--tolerance",
        type=amount,
        default=TOLERANCE,
        help=f"plans this close count as equal; then communication, G = P and less memory decide (default: {TOLERANCE})",
    )
    search.add_argument("--sharding", metavar="P,G,OS", help="judge these meshes, such as 8,8,8x4, instead of choosing")
    search.add_argument(
        "--leaves",
        type=Path,
        metavar="FILE",
        help="lines NODE LEAF: also print the order of nodes that spans the fewest leaf switches",
    )

    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON object on stdout instead of text")
    out.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"draw predicted MFU from one node to {MOST_GPUS} GPUs (png, svg or pdf)"
    )
    args = parser.parse_args(argv)
    if args.bucket_mb == 0:
        raise UserError("--bucket-mb must be above 0; 64 is the executor's")
    if args.plot and args.plot.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {args.plot}: give a name that ends in .png, .svg or .pdf")
    return args


def workload_of(args: argparse.Namespace) -> Workload:
    """The planner's input from the command line. Raises UserError for invalid options."""
    cluster = load_cluster(args.cluster)
    per_node = args.gpus_per_node or cluster.gpus_per_node
    if args.gpus % per_node:
        near = max(1, round(args.gpus / per_node)) * per_node
        raise UserError(
            f"--gpus {args.gpus} is no multiple of the {per_node} GPUs of a node; give whole nodes, such as {near}, or change --gpus-per-node"
        )
    mesh = Mesh(per_node, args.gpus // per_node)
    cluster, profile = profile_for(cluster, mesh, args.profile)
    return Workload(
        config=model_config(args.model, None, 1),
        mesh=mesh,
        cluster=cluster,
        profile=profile,
        sequence_length=args.sequence_length,
        micro_batch=args.micro_batch,
        global_batch=args.global_batch,
        recompute=args.recompute,
        precision=args.precision,
        intra_tensor=args.intra_tensor,
        bucket_bytes=max(1, int(args.bucket_mb * 2**20)),
        overlap=frozenset(OVERLAPS) - frozenset(args.no_overlap),
        reserve_bytes=args.reserve * 1e9,
    )


def decide(workload: Workload, args: argparse.Namespace, memory_bytes: float) -> list[Prediction]:
    """The plans that `choose` returns, or only the plan of --sharding. Raises UserError if none of them fits into memory."""
    if args.sharding is None:
        return choose(workload, memory_bytes, args.objective, args.tolerance)
    plan = predict(workload, Sharding.parse(args.sharding))
    if plan.memory.total > memory_bytes:
        best = choose(workload, memory_bytes, args.objective, args.tolerance)[0]
        mesh = best.sharding
        raise UserError(
            f"{plan.sharding} needs {plan.memory.total / 1e9:.1f} GB of {memory_bytes / 1e9:.1f} a GPU and cannot fit; "
            f"--sharding {mesh.parameters},{mesh.gradients},{mesh.optimizer} does, with {best.memory.total / 1e9:.1f} GB"
        )
    return [plan]


# --- showing it ----------------------------------------------------------------------------------------------------------


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
    batch = f"{workload.micro_batches} x {workload.micro_batch} x {workload.sequence_length} tokens a GPU"
    return "\n".join(
        [
            f"{workload.parameters / 1e6:,.0f}M parameters on {workload.mesh.nodes} x {workload.mesh.gpus} GPUs, {batch}"
            + (", recomputing" if workload.recompute else ""),
            f"collectives: {workload.profile.name}",
            "",
            f"plan     {plan.sharding}",
            f"memory   {plan.memory.total / 1e9:.1f} of {memory_bytes / 1e9:.1f} GB a GPU: {listed(asdict(plan.memory), 1e9, 'GB')}",
            f"step     {plan.step_seconds:.3f} s: compute {plan.compute_seconds:.3f}, optimizer {plan.optimizer_seconds:.3f}, exposed communication {plan.exposed.total:.3f} s",
            f"         communication in all {plan.communication.total:.3f} s: {listed(asdict(plan.communication), 1, 's') if plan.communication.total else 'none'}",
            f"MFU      {plan.mfu:.1%}, {plan.tokens_per_gpu_second:.0f} tokens a GPU and second",
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
        f"\n\nthe chosen plan's {objective} is {more:.2%} longer than the next one's, which counts as equal (--tolerance {tolerance:g}); "
        f"of equal plans the one with {preferred} is chosen"
    )


def rows(ranked: Sequence[Prediction], others: Sequence[Alternative]) -> list[tuple[str, Prediction, bool]]:
    """The rows of the table: the chosen plan, the next two, and the plans of other systems."""
    names = ["chosen", "next", "then"]
    return [(n, p, True) for n, p in zip(names, ranked, strict=False)] + [(a.name, a.plan, a.fits) for a in others]


# --- the plot ------------------------------------------------------------------------------------------------------------


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
    os.environ.setdefault("MPLBACKEND", "Agg")
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise UserError("--plot needs matplotlib, which is for developers; make setup-dev installs it") from None

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
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
    plt.close(figure)


def main() -> None:
    args = parse_args()
    workload = workload_of(args)
    memory_bytes = 1e9 * (args.gpu_memory if args.gpu_memory is not None else workload.cluster.memory_gb)
    leaves = read_leaves(args.leaves, workload.mesh.nodes) if args.leaves else None
    ranked = decide(workload, args, memory_bytes)
    others = alternatives(workload, memory_bytes, args.objective)
    record: dict[str, Any] = {
        "model": args.model,
        "gpus": workload.mesh.size,
        "gpus_per_node": workload.mesh.gpus,
        "gpu_memory_gb": memory_bytes / 1e9,
        "cluster": asdict(workload.cluster),
        "profile": workload.profile.name,
        "micro_batches": workload.micro_batches,
        "objective": args.objective,
        "chosen": as_json(ranked[0]),
        "ranked": [as_json(plan) for plan in ranked[:10]],
        "alternatives": {a.name: as_json(a.plan) | {"fits": a.fits} for a in others},
    }
    text = f"{describe(workload, ranked[0], memory_bytes)}\n\n{table(rows(ranked, others))}"
    text += why_chosen(ranked, args.objective, args.tolerance)
    if leaves:
        names, switches = leaves
        order = node_order(switches, ranked[0].sharding)
        record["node_order"] = [names[node] for node in order]
        size = ranked[0].sharding.optimizer.nodes
        before, after = spans(switches, size), spans([switches[node] for node in order], size)
        text += f"\n\nstart ranks in this order of nodes: {' '.join(record['node_order'])}"
        text += f"\n(groups of {size} nodes touch {after} leaf switches in all, {before} in the order of the file)"
    print(json.dumps(record) if args.json else text)
    if args.plot:
        title = (
            f"{args.model}, {workload.cluster.name}, {workload.global_batch / 2**20:g}M tokens a step or one micro-batch a GPU"
        )
        draw(scaling(workload, args, memory_bytes), title, args.plot)


if __name__ == "__main__":
    run(main)
