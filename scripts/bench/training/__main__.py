"""Measure the training speed of our executor with several shardings, and of torch's FSDP2, on the same model, data and machine.

    python -m scripts.bench.training --models ladder-1b ladder-3b llama-7b --ranks 8 --write
    python -m scripts.bench.training --models llama-7b --ranks 8 --two-nodes --write
    python -m scripts.bench.training --models llama-7b --ranks 8 --ablation --micro-batches 1 2 4 8 --write
    python -m scripts.bench.training --models tiny --ranks 2 --steps 3 --device cpu           # a test with gloo ranks
    python -m scripts.bench.training --models llama-30b --ranks 8 --write -- --recompute --compile
    python -m scripts.bench.training --models ladder-1b llama-7b --micro-batch 4 1 --ranks 8 --write --one-launch --timeout 300

Systems: the planner's choices for the shortest step and for the least communication; ZeRO-1, -2, -3 and MiCS (the best mesh
that fits) on our executor; FSDP2 over all ranks, FSDP2 with one gradient reduction per step, and HSDP. Weights and tokens are
random.

Each configuration is one launch of ranks. If it runs out of memory, crashes or takes too long, its row holds the error. Each row
is written to --out as soon as it is measured, with all raw samples, so that the same command resumes a stopped run.
--one-launch measures all configurations in the same processes, which saves start-up time. After a crash, a new launch continues
with the next configuration. Configurations that --timeout leaves no time for get a row with that error. Traces are recorded
after all timings, because a profiler may slow down later steps of its process.

--two-nodes simulates two hosts: NCCL_HOSTID differs between the halves of the ranks, so that NCCL uses sockets over loopback
between them, and neither NVLink nor shared memory. Every mesh counts the halves as nodes. The first launch measures the speed of
that link. CPU ranks get the same meshes but no slower link.

On GPUs the first launch measures the collectives, so that the planner predicts for this machine's links; --links names a file
to use instead. On a CPU there are no predictions unless `-- --cluster NAME` names a cluster, and then they are for that cluster.

--ablation measures table V of AMSP (arXiv:2311.00257) over the number of micro-batches: everything overlapped, all but the
updates, all but updates and gradients, and nothing overlapped.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from checkpoints.presets import preset
from cli import Parser, run
from errors import UserError
from scripts.bench.training.launches import Row, measure_all
from scripts.bench.training.rank import SYSTEMS, add_trace_and_tuning_options
from scripts.bench.training.tables import table
from scripts.lib.machine import machine
from scripts.lib.results import RESULTS, ROOT, write_table

MODELS = ("ladder-1b", "ladder-3b", "llama-7b")


def _add_comparison_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=f"presets (default: {' '.join(MODELS)})")
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, help="systems to measure (default: all; with --ablation the planner's choice)"
    )
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks, with one GPU each (default: 8)")
    parser.add_argument(
        "--two-nodes", action="store_true", help="simulate two hosts with half of the ranks each and a slow link between them"
    )
    parser.add_argument("--ablation", action="store_true", help="measure what each overlap gains, instead of comparing systems")


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--micro-batch",
        type=int,
        nargs="+",
        default=[1],
        metavar="WINDOWS",
        help="windows in a micro-batch of a rank: one number for all models, or one for each (default: 1)",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        nargs="+",
        metavar="N",
        help="micro-batches of a rank in a step (default: 4, on a CPU 2; with --ablation 1 2 4 8)",
    )
    parser.add_argument("--sequence-length", type=int, metavar="TOKENS", help="length of a window (default: 2048, on a CPU 64)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="measured steps (default: 20)")
    parser.add_argument("--unmeasured", type=int, metavar="N", help="steps before the measured ones (default: 5, on a CPU 1)")
    add_trace_and_tuning_options(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA if there is any")
    parser.add_argument(
        "--links", type=Path, metavar="FILE", help="times of collectives for the planner, from make profile-collectives"
    )


def _add_launch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "out" / "bench-training",
        metavar="DIR",
        help="folder of rows.jsonl (default: out/bench-training)",
    )
    parser.add_argument("--one-launch", action="store_true", help="measure all configurations in the same processes")
    parser.add_argument(
        "--timeout",
        type=float,
        default=1200,
        metavar="SECONDS",
        help="time limit of each launch, or of all with --one-launch (default: 1200)",
    )
    parser.add_argument("--retry", action="store_true", help="measure again configurations that failed")
    parser.add_argument("--write", action="store_true", help="write docs/results/training-*.md and .json")
    parser.add_argument(
        "more", nargs="*", help="after --: execution options of python -m training.train, such as --recompute --compile"
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    _add_comparison_options(parser)
    _add_step_options(parser)
    _add_launch_options(parser)
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cuda = args.device == "cuda"  # defaults: for a measurement on GPUs, for a short test on a CPU
    args.sequence_length = (2048 if cuda else 64) if args.sequence_length is None else args.sequence_length
    args.unmeasured = (5 if cuda else 1) if args.unmeasured is None else args.unmeasured
    args.micro_batches = args.micro_batches or ([1, 2, 4, 8] if args.ablation else [4 if cuda else 2])
    args.systems = args.systems or (["planner"] if args.ablation else list(SYSTEMS))
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Raise UserError for arguments that no launch could use."""
    for model in args.models:
        preset(model)
    counts = {"--ranks": args.ranks, "--micro-batch": min(args.micro_batch), "--micro-batches": min(args.micro_batches)}
    counts |= {"--sequence-length": args.sequence_length, "--steps": args.steps, "--unmeasured": args.unmeasured}
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    if len(args.micro_batch) not in (1, len(args.models)):
        raise UserError(
            f"{len(args.micro_batch)} numbers of --micro-batch for {len(args.models)} models; give 1, or 1 for each"
        )
    if args.ranks < 2 or (args.two_nodes and args.ranks % 2):
        raise UserError(f"--ranks {args.ranks}: training is compared on at least 2 ranks, and on an even number as two nodes")
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and args.ranks > gpus:
        raise UserError(f"--ranks {args.ranks} need a GPU each, but this host has {gpus}; lower --ranks, or try --device cpu")
    ours = [system for system in args.systems if not system.startswith("fsdp2")]
    if args.ablation and ours != args.systems:
        raise UserError("--ablation switches off parts of our executor; leave FSDP2 out of --systems")
    if args.links and not args.links.is_file():
        raise UserError(f"--links {args.links} is no file; write it with make profile-collectives, or leave --links out")


def write(rows: list[Row], args: argparse.Namespace, where: Row, text: str) -> None:
    name = f"training-{args.ranks}{'-two-nodes' * args.two_nodes}{'-ablation' * args.ablation}"
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    content = {"machine": where, "settings": settings, "rows": rows}
    write_table(name, content, text, RESULTS)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `launch` then ends its processes
    args, where = parse_args(), machine()
    rows = measure_all(args, where)
    text = table(rows, args)
    print(text)
    if args.write:
        write(rows, args, where, text)


if __name__ == "__main__":
    run(main)
