"""Run all GPU measurements on this machine, the most important first. Measurements that are done are not repeated.

    python -m scripts.measure_gpus --ranks 8 --raw docs/results/gpu-8
    python -m scripts.measure_gpus --ranks 4 --raw out/gpu-4 --minutes 9 --vllm-python ~/vllm/bin/python
    python -m scripts.measure_gpus --ranks 2 --models llama-3-70b:16 llama-3-70b:4 llama-3-8b --list

Each step is one of the measuring commands of docs/benchmarks.md and writes a raw file into --raw. `make performance` makes
tables and plots of the raw files. When a step's command succeeds, the step is recorded in `done.txt` in --raw. If a sweep is
stopped, the rows that it has measured are kept. With --minutes, a step is not started if it would probably not end in time. A
step that takes much longer than expected is stopped, and the next one starts. --vllm-python names the Python of an environment
with vLLM, and adds vLLM to all steps that it can run.

--models takes three models: a large one, the same with fewer layers, and a small one.
"""

import argparse
from collections.abc import Iterator

from cli import Parser, run
from errors import UserError
from processes import on_ranks
from quantized.scheme import SCHEMES
from scripts.lib.results import ROOT
from scripts.lib.steps import Step, add_step_options, run_steps, script, sweep, vllm_flags
from scripts.sweep.rows import VLLM

MODELS = ("llama-3-70b", "llama-3-70b:16", "llama-3-8b")
VARIANTS = ("standard", "ladder", "upper-bound", "parallel", "desync-4x", "desync-2x")


def models(args: argparse.Namespace) -> Iterator[Step]:
    """Decode and prefill by batch size and variant. Each variant is one launch, in which all batch sizes share the loaded model."""
    large, cut, small = args.models
    peer = (VLLM,) if args.vllm_python else ()
    for variant in (*peer, *VARIANTS):
        flags = f"--models {large} --variants {variant} --batch-sizes 1 4 16 64 --new-tokens 64"
        yield sweep(f"{large} {variant}", 180 if variant == VLLM else 85, args, "sweep-large.jsonl", flags)
    flags = f"--models {large} --variants standard ladder upper-bound --batch-sizes 1 --new-tokens 64"
    yield sweep(f"{large} no-p2p", 50, args, "sweep-large.jsonl", f"{flags} --interconnects no-p2p --comms nccl auto")
    for model in (cut, small):
        for variant in (*peer, "standard", "ladder", "upper-bound"):
            flags = f"--models {model} --variants {variant} --batch-sizes 1 4 16 64 128 --new-tokens 64"
            yield sweep(f"{model} {variant}", 90 if variant == VLLM else 45, args, "sweep-small.jsonl", flags)


def serving(args: argparse.Namespace) -> Iterator[Step]:
    """The server under Poisson load, and the engine with all requests at once."""
    _, cut, _ = args.models
    load = f"--model {cut} --ranks {args.ranks} --rates 4 16 32 64 --seconds 4 --drain 3 --max-num-seqs 256"
    load += " --prompt-length 1024 --new-tokens 256"
    kinds: dict[str, tuple[object, ...]] = {VLLM: vllm_flags(args)} if args.vllm_python else {}
    kinds |= {"standard": (), "ladder": ("--variant", "ladder")}
    for name, more in kinds.items():
        yield Step(
            f"load {name}",
            95 if name == VLLM else 60,
            script("bench.serving.load", load, *more, "--out", args.raw / f"load-{name}.json"),
        )
    for variant in ("standard", "ladder"):
        flags = f"-m engine.bench --model {cut} --variant {variant} --requests 256 --prompt-length 1024 --new-tokens 512"
        yield Step(f"offline {variant}", 25, (*on_ranks(args.ranks), *flags.split()), args.raw / "offline.jsonl")
    if args.vllm_python:
        flags = f"--models {cut} --variants vllm --batch-sizes 256 --prompt-lengths 1024 --new-tokens 512"
        yield sweep("offline vllm", 100, args, "sweep-offline.jsonl", flags)


def all_reduces(args: argparse.Namespace) -> Iterator[Step]:
    """All-reduces by algorithm and size, GEMMs fused with collectives, and prefill by communicator."""
    _, cut, _ = args.models
    for name, seconds, command, out in (
        ("all-reduces", 50, ("all_reduce",), args.raw / "comm.json"),
        ("quantized all-reduces", 90, ("all_reduce", "--parts", "µs nccl$|quantized"), args.raw / "quantized.json"),
        ("overlap", 40, ("fused",), args.raw),
    ):
        module, *more = command
        yield Step(name, seconds, (*on_ranks(args.ranks), "-m", f"scripts.bench.comm.{module}", *more, "--out", str(out)))
    flags = f"--models {cut} --variants standard ladder upper-bound --batch-sizes 8 --new-tokens 16 --comms nccl auto int8 int6 int4"
    for link in ("default", "no-p2p"):
        yield sweep(f"prompts by communicator, {link}", 65, args, "sweep-grid.jsonl", f"{flags} --interconnects {link}")


def widths(args: argparse.Namespace) -> Iterator[Step]:
    """Variants by the widths of weights and of all-reduces: weights that are read faster make the all-reduces a larger part."""
    _, cut, _ = args.models
    flags = f"--models {cut} --variants standard ladder hybrid desync-4x upper-bound --batch-sizes 1 16 --new-tokens 32"
    for link in ("default", "no-p2p"):
        for weights in (None, *SCHEMES):
            quantize = f" --quantize {weights}" if weights else ""
            more = f"{flags} --comms auto int8 int4 --interconnects {link}{quantize}"
            yield sweep(f"weights in {weights or '16 bits'}, {link}", 100, args, "widths.jsonl", more)


def others(args: argparse.Namespace) -> Iterator[Step]:
    """Two simulated hosts, start-up, and training."""
    large, cut, _ = args.models
    flags = f"--models {cut} --variants {' '.join(VARIANTS)} --batch-sizes 1 --new-tokens 64 --interconnects two-hosts"
    yield sweep("two hosts", 35, args, "sweep-two-hosts.jsonl", flags)
    flags = f"--model {large} --ranks {args.ranks} --runs cold warm"
    yield Step("start-up", 120, script("bench.serving.startup", flags, "--out", args.raw / "startup.json"))
    flags = f"--ranks {args.ranks} --one-launch"
    yield Step("training", 700, script("bench.training", flags, "--out", args.raw / "training"))


def steps(args: argparse.Namespace) -> list[Step]:
    return [*models(args), *serving(args), *all_reduces(args), *widths(args), *others(args)]


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs=3, default=MODELS, metavar="MODEL", help=f"three models, see above (default: {' '.join(MODELS)})"
    )
    add_step_options(parser, ROOT / "out" / "gpus")
    args = parser.parse_args()
    if args.ranks < 2 or args.minutes <= 0:
        raise UserError("--ranks must be at least 2, and --minutes above 0")
    return args


def main() -> None:
    args = parse_args()
    run_steps(steps(args), args)


if __name__ == "__main__":
    run(main)
