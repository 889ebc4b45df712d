"""The options that all training commands share, and simple objects that are made from them."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from checkpoints.weights import DTYPES
from comms.cluster import shipped_clusters
from config import ModelConfig
from errors import UserError
from kernels import determinism
from options import above_zero, dtype_name, zero_or_more
from training.executor import BUCKET_BYTES
from training.optimizer import Schedule
from training.sharding import OVERLAPS, Mesh

PASSES = 4  # of adaptation; docs/training.md has the accuracy after one and four
WARMUP = 20  # steps of adaptation for each step of warm-up
BALANCE, ROUTER_Z = 0.01, 0.001  # of a sparse model's losses, as their papers recommend (see `router_losses`)
POSITIVE = (
    *("sequence_length", "global_batch", "micro_batch", "steps", "save_every", "keep", "log_every"),
    *("learning_rate", "clip", "gpus_per_node", "stop_after"),
)


def parse_run(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, learning_rate: float, by_passes: bool = False
) -> argparse.Namespace:
    """Add the options of a run behind those of its command, and parse and check them all. The last two as in `add_batch_options`."""
    add_batch_options(parser, learning_rate, by_passes)
    add_execution_options(parser)
    add_router_options(parser)
    add_run_options(parser)
    args = parser.parse_args(argv)
    check_numbers(args)
    determinism.refuse(args.deterministic, compiled=args.compile)
    return args


def add_batch_options(parser: argparse.ArgumentParser, learning_rate: float, by_passes: bool = False) -> None:
    """by_passes: --steps and --warmup may be left out, and the command calls `complete_steps`."""
    batch = parser.add_argument_group("the data, the batch and the optimizer")
    batch.add_argument(
        "--data", type=Path, required=True, metavar="FILE.bin", help="token file, written by python -m training.tokenize_data"
    )
    batch.add_argument(
        "--sequence-length", type=int, default=1024, metavar="TOKENS", help="length of a window of the data (default: 1024)"
    )
    batch.add_argument(
        "--global-batch", type=int, default=64, metavar="WINDOWS", help="windows in a step, over all ranks (default: 64)"
    )
    batch.add_argument(
        "--micro-batch", type=int, default=1, metavar="WINDOWS", help="windows that a rank computes at once (default: 1)"
    )
    steps = "number of optimizer steps of the whole run" + (f" (default: {PASSES} passes over the data)" if by_passes else "")
    batch.add_argument("--steps", type=int, required=not by_passes, metavar="N", help=steps)
    batch.add_argument(
        "--learning-rate", type=float, default=learning_rate, help=f"peak learning rate (default: {learning_rate:g})"
    )
    batch.add_argument(
        "--warmup",
        type=int,
        default=None if by_passes else 20,
        metavar="STEPS",
        help=f"steps of linear warm-up before the cosine schedule (default: {f'--steps / {WARMUP}' if by_passes else 20})",
    )
    batch.add_argument(
        "--final-rate", type=float, default=0.1, help="learning rate at the end, as a share of the peak (default: 0.1)"
    )
    batch.add_argument("--weight-decay", type=float, default=0.1, help="weight decay of the matrices (default: 0.1)")
    batch.add_argument("--clip", type=float, default=1.0, help="clip the gradient to this global norm (default: 1)")
    batch.add_argument("--seed", type=int, default=0, help="seed of the order of the data and of random weights (default: 0)")


def add_execution_options(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how the states are sharded and the step is run")
    how.add_argument(
        "--sharding",
        default="auto",
        metavar="P,G,OS|auto",
        help="meshes of parameters, gradients and optimizer states, each GPUs per node x nodes: 1,1,8 or 8,8,8x4. auto: the "
        "planner's choice (python -m training.plan) on GPUs, optimizer states over a node on a CPU (default: auto)",
    )
    how.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="ranks on each host (default: as many as were started on this host)"
    )
    clusters = f"for --sharding auto: {', '.join(shipped_clusters())} or a .json file (default: by the GPU's name)"
    how.add_argument("--cluster", metavar="NAME|FILE", help=clusters)
    times = "for --sharding auto: times of collectives, measured by make profile-collectives"
    how.add_argument("--profile-collectives", type=Path, metavar="FILE", help=times)
    dtypes = "dtype of weights and gradients (default: bfloat16 on CUDA, float32 on a CPU)"
    how.add_argument("--dtype", choices=("float32", "bfloat16"), help=dtypes)
    how.add_argument("--compile", action="store_true", help="compile the modules with torch.compile")
    same = "compute the forward pass with the bits of inference with --deterministic; slower"
    how.add_argument("--deterministic", action="store_true", help=same)
    add_exchange_options(how)
    how.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA if there is a GPU")


def add_exchange_options(group: argparse._ArgumentGroup) -> None:
    """Options that `training.plan` predicts and training follows."""
    group.add_argument(
        "--recompute",
        action="store_true",
        help="save memory: keep the input of each layer alone, and compute it again backward",
    )
    group.add_argument(
        "--intra-tensor",
        action="store_true",
        help="cut the optimizer states of every tensor evenly, instead of giving each tensor one owner: all-gathers send the "
        "updates instead of broadcasts",
    )
    size = "size of the buckets in which gradients are all-reduced (default: 64)"
    group.add_argument("--bucket-mb", type=above_zero, default=BUCKET_BYTES / 2**20, metavar="MIB", help=size)
    apart = "do not overlap this communication with computation"
    group.add_argument("--no-overlap", nargs="+", choices=OVERLAPS, default=[], metavar="WHAT", help=apart)


def execution_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a planner's `Workload` that are options of planning and of training alike."""
    return {
        "sequence_length": args.sequence_length,
        "micro_batch": args.micro_batch,
        "recompute": args.recompute,
        "intra_tensor": args.intra_tensor,
        "bucket_bytes": max(1, int(args.bucket_mb * 2**20)),
        "overlap": frozenset(OVERLAPS) - frozenset(args.no_overlap),
    }


def add_router_options(parser: argparse.ArgumentParser) -> None:
    routers = parser.add_argument_group("the routers of a sparse model")
    balance = "weight of the load-balancing loss (Switch Transformers), computed over each micro-batch"
    routers.add_argument("--balance-loss", type=zero_or_more, metavar="WEIGHT", help=f"{balance} (default: {BALANCE})")
    z = "weight of the router z-loss (ST-MoE), which keeps the logits small"
    routers.add_argument("--router-z-loss", type=zero_or_more, metavar="WEIGHT", help=f"{z} (default: {ROUTER_Z})")


def complete_router_options(args: argparse.Namespace, config: ModelConfig) -> None:
    """Set what `add_router_options` left out, for a sparse model. Raises UserError for options that its training has no use for."""
    if config.experts is None and (args.balance_loss, args.router_z_loss) != (None, None):
        raise UserError("the model is not sparse, so it has no use for --balance-loss and --router-z-loss; leave them out")
    if config.experts is not None:
        if args.cuda_graph:
            raise UserError("--cuda-graph cannot hold a sparse model's choice of experts; leave it out")
        args.balance_loss = BALANCE if args.balance_loss is None else args.balance_loss
        args.router_z_loss = ROUTER_Z if args.router_z_loss is None else args.router_z_loss


def add_run_options(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for snapshots/, metrics.jsonl, loss.png and model/"
    )
    run.add_argument("--save-every", type=int, default=500, metavar="STEPS", help="steps between two snapshots (default: 500)")
    run.add_argument("--keep", type=int, default=2, metavar="N", help="number of snapshots to keep (default: 2)")
    newest = "continue from the newest snapshot in --out, with any sharding and number of ranks"
    run.add_argument("--resume", action="store_true", help=newest)
    run.add_argument(
        "--other-recipe",
        action="store_true",
        help="with --resume: go on although --steps, the learning rate or another setting of the optimizer or of the loss has changed",
    )
    last = "write a snapshot after this step, unless with --metrics-only, and exit; --resume continues"
    run.add_argument("--stop-after", type=int, metavar="STEP", help=last)
    metrics = "write neither snapshots nor the model, only metrics and the plot of the loss"
    run.add_argument("--metrics-only", action="store_true", help=metrics)
    run.add_argument(
        "--cuda-graph",
        action="store_true",
        help="replay a step as one CUDA graph, on one GPU and without --deterministic: faster for small models, whose kernels take less "
        "time than their launches",
    )
    run.add_argument("--log-every", type=int, default=10, metavar="STEPS", help="steps between two log lines (default: 10)")


def check_numbers(args: argparse.Namespace, positive: Sequence[str] = POSITIVE) -> None:
    """Raise UserError for a number outside its valid range. positive: those that must be above 0."""
    for name in positive:
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} must be above 0, not {value}")
    for name in ("warmup", "weight_decay", "final_rate"):
        value = getattr(args, name)
        if value is not None and not value >= 0:
            raise UserError(f"--{name.replace('_', '-')} must not be negative")


def complete_steps(args: argparse.Namespace, steps_per_pass: int) -> None:
    """Set `args.steps` and `args.warmup` if they were left out. steps_per_pass: over the data."""
    if args.steps is None:
        args.steps = PASSES * steps_per_pass
    if args.warmup is None:
        args.warmup = max(1, args.steps // WARMUP)


def schedule_of(args: argparse.Namespace) -> Schedule:
    return Schedule(args.learning_rate, args.steps, args.warmup, args.final_rate)


def dtype_of(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    return DTYPES[dtype_name(args.dtype, device.type)]


def ranks_mesh(args: argparse.Namespace, world_size: int) -> Mesh:
    """The ranks as a mesh, GPUs per node x nodes. Raises UserError if they do not fill whole nodes."""
    per_node = args.gpus_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if world_size % per_node:
        raise UserError(
            f"{world_size} ranks do not fill whole nodes of {per_node}; change --gpus-per-node or the number of ranks"
        )
    return Mesh(per_node, world_size // per_node)
