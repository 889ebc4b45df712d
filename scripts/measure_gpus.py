"""Run all GPU measurements on this machine, the most important first. Measurements that are done are not repeated.

    python -m scripts.measure_gpus --ranks 8 --raw docs/results/gpu-8
    python -m scripts.measure_gpus --ranks 4 --raw out/gpu-4 --minutes 9 --vllm-python ~/vllm/bin/python
    python -m scripts.measure_gpus --ranks 2 --models llama-3-70b:16 llama-3-70b:4 llama-3-8b --list

Each step is one of the measuring commands of docs/benchmarks.md and writes a raw file into --raw. `make performance` makes
tables and plots of the raw files. When a step's command succeeds, the step is recorded in `done.txt` in --raw, with a digest of
its flags: other flags need another folder. If a sweep is stopped, the rows that it has measured are kept. With --minutes, a step
is not started if it would probably not end in time. A step that takes much longer than expected is stopped, and the next one
starts. --vllm-python names the Python of an environment with vLLM, and adds vLLM to all steps that it can run.

--models takes three models: a large one, the same with fewer layers, and a small one.
"""

import argparse
from collections.abc import Iterator

import torch

from checkpoints.memory import cache_bytes, loading_bytes, weight_bytes
from checkpoints.presets import model_config
from cli import Parser, run
from errors import UserError
from quantized.scheme import SCHEMES
from ranks.processes import on_ranks
from scripts.lib.results import ROOT
from scripts.lib.steps import Step, add_step_options, run_steps, script, sweep, vllm_flags
from scripts.sweep.rows import VLLM

MODELS = ("llama-3-70b", "llama-3-70b:16", "llama-3-8b")
MAIN = "standard ladder upper-bound"  # variants that are measured in the same launch and run close in time
HUGE, HUGE_BATCH = "llama-3.1-405b", 16
LEAST_TIMEOUT = 150  # seconds for one run of a sweep, with loading or the start of vLLM
GPU_BYTES = 80e9  # of memory, where no GPU can be asked
HUGE_SHARE = 0.8  # of it, which the largest model may take beside activations


def models(args: argparse.Namespace) -> Iterator[Step]:
    """Decode and prefill of the large model by batch size and variant, first over NVLink, then also through host memory."""
    large, *_ = args.models
    flags, slow = f"--models {large} --batch-sizes 1 4 16 64 --new-tokens 64", through_host_memory(large)
    yield swept(f"{large} {MAIN}", 200, args, "sweep-large.jsonl", f"{flags} --variants {MAIN}")
    yield swept(f"{large} no-p2p", 55, args, "sweep-large.jsonl", f"{slow} --variants {MAIN} --batch-sizes 1")
    if args.vllm_python:
        yield swept(f"{large} vllm", 170, args, "sweep-large.jsonl", f"{flags} --variants {VLLM}")
    for variants, seconds in (("parallel desync-4x", 110), ("desync-2x", 65)):
        yield swept(f"{large} {variants}", seconds, args, "sweep-large.jsonl", f"{flags} --variants {variants}")
    more = f"{slow} --variants standard ladder --batch-sizes 4 16"
    yield swept(f"{large} no-p2p, batch 4 16", 125, args, "sweep-large.jsonl", more)


def large_again(args: argparse.Namespace) -> Iterator[Step]:
    """What takes long of the large model: many long prompts through host memory, and half of the ranks, if it fits into 80 GB there."""
    large, *_ = args.models
    more = f"{through_host_memory(large)} --variants standard ladder --batch-sizes 64"
    yield swept(f"{large} no-p2p, batch 64", 210, args, "sweep-large.jsonl", more)
    if args.ranks >= 8:
        flags = f"--models {large} --tp {args.ranks // 2} --batch-sizes 1 4 16 64 --new-tokens 64"
        for variants, seconds in ((MAIN, 200), *(((VLLM, 170),) if args.vllm_python else ())):
            name = f"{large} {variants}, tp {args.ranks // 2}"
            yield swept(name, seconds, args, "sweep-large.jsonl", f"{flags} --variants {variants}")


def smaller(args: argparse.Namespace) -> Iterator[Step]:
    """Decode and prefill of the two smaller models by batch size. Their variants are in memory together and take turns."""
    _, *others = args.models
    for model in others:
        flags = f"--models {model} --batch-sizes 1 4 16 64 128 --new-tokens 64"
        yield swept(f"{model} {MAIN}", 110, args, "sweep-small.jsonl", f"{flags} --variants {MAIN}")
        if args.vllm_python:
            yield swept(f"{model} vllm", 110, args, "sweep-small.jsonl", f"{flags} --variants {VLLM}")


def serving(args: argparse.Namespace) -> Iterator[Step]:
    """The server under Poisson load, and the engine with all requests at once."""
    _, cut, _ = args.models
    load = f"--model {cut} --ranks {args.ranks} --rates 4 16 32 64 --seconds 4 --drain 3 --max-num-seqs 256"
    load += " --prompt-length 1024 --new-tokens 256"
    kinds: dict[str, tuple[object, ...]] = {"standard": (), "ladder": ("--variant", "ladder")}
    if args.vllm_python:
        kinds[VLLM] = vllm_flags(args)
    for name, more in kinds.items():
        yield Step(
            f"load {name}",
            115 if name == VLLM else 90,
            script("bench.serving.load", load, *more, "--out", args.raw / f"load-{name}.json"),
        )
    for variant in ("standard", "ladder"):
        flags = f"-m engine.bench --model {cut} --variant {variant} --requests 256 --prompt-length 1024 --new-tokens 512"
        yield Step(f"offline {variant}", 35, (*on_ranks(args.ranks), *flags.split()), args.raw / "offline.jsonl")
    if args.vllm_python:
        flags = f"--models {cut} --variants vllm --batch-sizes 256 --prompt-lengths 1024 --new-tokens 512"
        yield swept("offline vllm", 120, args, "sweep-offline.jsonl", flags)


def drafts(args: argparse.Namespace) -> Iterator[Step]:
    """Closed loops of clients without drafts and with those of a random head."""
    large, *_ = args.models
    load = f"--model {large} --ranks {args.ranks} --clients 1 4 16 64 --requests 2 --max-num-seqs 64"
    load += " --prompt-length 256 --new-tokens 128"
    for file, more in (("clients", ""), ("clients-speculate", " --speculate random-head --accept-rate 0.75")):
        yield Step(file, 110, script("bench.serving.load", load + more, "--out", args.raw / f"{file}.json"))


def all_reduces(args: argparse.Namespace) -> Iterator[Step]:
    """All-reduces by algorithm and size, and prefill by communicator."""
    _, cut, _ = args.models
    for name, seconds, parts, out in (
        ("all-reduces", 60, "", "comm.json"),
        ("quantized all-reduces", 90, "µs nccl$|quantized", "quantized.json"),
        ("all-reduces, no-p2p", 60, "µs (nccl|one-shot|two-shot)$|quantized", "quantized-no-p2p.json"),
    ):
        environment = ("env", "NCCL_P2P_DISABLE=1") if name.endswith("no-p2p") else ()
        launched = (*environment, *on_ranks(args.ranks), "-m", "scripts.bench.comm.all_reduce")
        yield Step(name, seconds, (*launched, *(("--parts", parts) if parts else ()), "--out", str(args.raw / out)))
    flags = f"--models {cut} --variants standard ladder parallel desync-4x upper-bound --batch-sizes 8 --new-tokens 16"
    for link, seconds in (("default", 100), ("no-p2p", 130)):
        by_comm = f"{flags} --comms nccl auto int8 int6 int4 --interconnects {link}"
        yield swept(f"prompts by communicator, {link}", seconds, args, "sweep-grid.jsonl", by_comm)


def others(args: argparse.Namespace) -> Iterator[Step]:
    """Two simulated hosts, the largest model, and start-up."""
    large, cut, _ = args.models
    flags = f"--models {cut} --variants {MAIN} parallel desync-4x desync-2x --batch-sizes 1 --new-tokens 64"
    for comm, seconds in (("nccl", 45), ("hierarchical", 45)):
        more = f"{flags} --interconnects two-hosts --comms {comm}"
        yield swept(f"two hosts, {comm}", seconds, args, "sweep-two-hosts.jsonl", more)
    for scheme in huge_schemes(args.ranks):
        flags = f"--models {HUGE} --quantize {scheme} --variants {MAIN} --batch-sizes 1 {HUGE_BATCH} --new-tokens 32"
        yield swept(f"{HUGE} in {scheme}", 200, args, "sweep-huge.jsonl", flags)
    flags = f"--model {large} --ranks {args.ranks} --runs cold warm"
    yield Step("start-up", 120, script("bench.serving.startup", flags, "--out", args.raw / "startup.json"))


def widths(args: argparse.Namespace) -> Iterator[Step]:
    """Variants by the widths of weights and of all-reduces: weights that are read faster make the all-reduces a larger part."""
    _, cut, _ = args.models
    flags = f"--models {cut} --variants standard ladder hybrid desync-4x upper-bound --batch-sizes 1 16 --new-tokens 32"
    for link in ("default", "no-p2p"):
        for weights in (None, *SCHEMES):
            quantize = f" --quantize {weights}" if weights else ""
            more = f"{flags} --comms auto int8 int4 --interconnects {link}{quantize}"
            yield swept(f"weights in {weights or '16 bits'}, {link}", 110, args, "widths.jsonl", more)


def huge_schemes(ranks: int) -> Iterator[str]:
    """The widths in which the largest model fits into the memory of so many GPUs like this machine's."""
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else GPU_BYTES
    for scheme in ("fp8", "int4"):
        config = model_config(HUGE, "ladder", ranks, scheme)
        cache = cache_bytes(config, ranks, torch.bfloat16, HUGE_BATCH * (1024 + 32))
        if weight_bytes(config, ranks, torch.bfloat16) + loading_bytes(config, ranks) + cache < HUGE_SHARE * memory:
            yield scheme


def through_host_memory(model: str) -> str:
    """The flags of a sweep without NVLink, with NCCL's sums and with ours."""
    return f"--models {model} --new-tokens 64 --interconnects no-p2p --comms nccl auto"


def swept(name: str, seconds: int, args: argparse.Namespace, file: str, flags: str) -> Step:
    """A step that adds rows to the sweep in `file`, and tries rows again that failed. A run that hangs costs a part of the time."""
    return sweep(name, seconds, args, file, f"{flags} --runs {args.runs} --retry --timeout {max(LEAST_TIMEOUT, seconds)}")


def steps(args: argparse.Namespace) -> list[Step]:
    groups = (models, smaller, serving, drafts, all_reduces, others, large_again, widths)
    return [step for group in groups for step in group(args)]


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--models", nargs=3, default=MODELS, metavar="MODEL", help=f"three models, see above (default: {' '.join(MODELS)})"
    )
    parser.add_argument(
        "--runs", type=int, default=2, help="measured runs of a sweep (default: 2, as the expected times assume)"
    )
    add_step_options(parser, ROOT / "out" / "gpus")
    args = parser.parse_args()
    if args.ranks < 2 or args.runs < 1 or args.minutes <= 0:
        raise UserError("--ranks must be at least 2, --runs at least 1, and --minutes above 0")
    return args


def main() -> None:
    args = parse_args()
    run_steps(steps(args), args)


if __name__ == "__main__":
    run(main)
