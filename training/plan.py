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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoints.hub import fetch_named
from checkpoints.presets import PRESETS, model_config
from cli import Parser, run
from comms.cluster import load_cluster, shipped_clusters
from errors import UserError
from files import model_name
from options import zero_or_more
from training.options import add_exchange_options, execution_settings
from training.planner.collectives import profile_for
from training.planner.cost import Prediction, predict
from training.planner.node_order import node_order, read_leaves, spans
from training.planner.report import MOST_GPUS, as_json, describe, draw, rows, scaling, table, why_chosen
from training.planner.search import OBJECTIVE, OBJECTIVES, TOLERANCE, alternatives, choose
from training.planner.workload import PRECISIONS, Workload
from training.sharding import Mesh, Sharding

SUFFIXES = {"k": 2**10, "m": 2**20, "g": 2**30}


def count(text: str) -> int:
    """Parse a whole number: `4M` is 4 * 2**20, `16k` is 16 * 2**10."""
    number, factor = (text[:-1], SUFFIXES[text[-1].lower()]) if text[-1:].lower() in SUFFIXES else (text, 1)
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1; write 4194304, 4096k or 4M (4 * 2**20)")
    return int(number) * factor


def _add_model_and_cluster_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is trained, on what")
    what.add_argument(
        "--model", required=True, metavar="DIR|PRESET", help=f"a checkpoint directory, or one of {', '.join(PRESETS)}"
    )
    what.add_argument("--gpus", type=count, required=True, metavar="N", help="number of GPUs, in whole nodes")
    what.add_argument("--gpus-per-node", type=count, metavar="N", help="GPUs in a node (default: the cluster's)")
    what.add_argument(
        "--gpu-memory", type=zero_or_more, metavar="GB", help="memory of a GPU in units of 1e9 bytes (default: the cluster's)"
    )
    clusters = f"{', '.join(shipped_clusters())} or a .json file (default: h100)"
    what.add_argument("--cluster", default="h100", metavar="NAME|FILE", help=clusters)
    times = "measured times of collectives, instead of times computed from the cluster's links"
    what.add_argument("--profile", type=Path, metavar="FILE", help=times)


def _add_batch_options(parser: argparse.ArgumentParser) -> None:
    batch = parser.add_argument_group("the batch; k, M and G are 2**10, 2**20 and 2**30")
    batch.add_argument(
        "--sequence-length", type=count, default=4096, metavar="TOKENS", help="length of a sequence (default: 4096)"
    )
    batch.add_argument(
        "--micro-batch", type=count, default=1, metavar="SEQUENCES", help="sequences that a GPU computes at once (default: 1)"
    )
    batch.add_argument(
        "--global-batch", type=count, default=2**22, metavar="TOKENS", help="tokens in a step, over all GPUs (default: 4M)"
    )


def _add_execution_options(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how it is trained")
    how.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="bfloat16",
        help="parameter, gradient and optimizer states take 2 + 2 + 12 bytes in bfloat16 (default), 4 + 4 + 8 in float32",
    )
    add_exchange_options(how)
    how.add_argument(
        "--reserve",
        type=zero_or_more,
        default=2.0,
        metavar="GB",
        help="memory for CUDA, NCCL and fragmentation, for which there is no formula (default: 2)",
    )


def _add_choice_options(parser: argparse.ArgumentParser) -> None:
    search = parser.add_argument_group("the choice")
    least = "what to minimize: the step time (default), or the communication, as in the paper"
    search.add_argument("--objective", choices=OBJECTIVES, default=OBJECTIVE, help=least)
    search.add_argument(
        "--tolerance",
        type=zero_or_more,
        default=TOLERANCE,
        help=f"plans within this share of the best count as equal; of these, the one with the least communication, G = P and "
        f"the least memory is chosen (default: {TOLERANCE})",
    )
    search.add_argument("--sharding", metavar="P,G,OS", help="predict this sharding, such as 8,8,8x4, instead of choosing one")
    search.add_argument(
        "--leaves",
        type=Path,
        metavar="FILE",
        help="file with a line NODE LEAF for each node: also print the order of nodes whose groups span the fewest leaf switches",
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    out.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"draw predicted MFU from one node to {MOST_GPUS} GPUs (png, svg or pdf)"
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    _add_model_and_cluster_options(parser)
    _add_batch_options(parser)
    _add_execution_options(parser)
    _add_choice_options(parser)
    _add_output_options(parser)
    args = parser.parse_args(argv)
    if args.plot and args.plot.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {args.plot}: give a name that ends in .png, .svg or .pdf")
    fetch_named(args, model="config")
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
        global_batch=args.global_batch,
        precision=args.precision,
        reserve_bytes=args.reserve * 1e9,
        **execution_settings(args),
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


def main() -> None:
    args = parse_args()
    workload = workload_of(args)
    memory_bytes = 1e9 * (args.gpu_memory if args.gpu_memory is not None else workload.cluster.memory_gb)
    leaves = read_leaves(args.leaves, workload.mesh.nodes) if args.leaves else None
    ranked = decide(workload, args, memory_bytes)
    others = alternatives(workload, memory_bytes, args.objective)
    record: dict[str, Any] = {
        "model": model_name(args.model),
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
        text += f"\n(groups of {size} nodes span {after} leaf switches in all, {before} in the order of the file)"
    print(json.dumps(record) if args.json else text)
    if args.plot:
        title = f"{model_name(args.model)}, {workload.cluster.name}, {workload.global_batch / 2**20:g}M tokens a step or one micro-batch a GPU"
        draw(scaling(workload, args, memory_bytes), title, args.plot)


if __name__ == "__main__":
    run(main)
