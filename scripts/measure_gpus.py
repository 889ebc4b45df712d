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
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cli import Parser, note, run
from errors import UserError
from processes import on_ranks
from scripts.lib.results import ROOT, check_folder
from scripts.sweep.rows import VLLM

MODELS = ("llama-3-70b", "llama-3-70b:16", "llama-3-8b")
VARIANTS = ("standard", "ladder", "upper-bound", "parallel", "desync-4x", "desync-2x")
GRACE_SECONDS = 20  # time that a stopped step gets to end its ranks
PATIENCE = 2.5  # a step is stopped after this multiple of its expected time
DONE = "done.txt"


@dataclass(frozen=True)
class Step:
    """One command. seconds: its expected time, a little more than on 4 H200s (for training an estimate: there it did not end
    in 500 s).

    output: file for its stdout, if the command does not write a file itself.
    """

    name: str
    seconds: int
    command: tuple[str, ...]
    output: Path | None = None


def script(module: str, flags: str, *more: object) -> tuple[str, ...]:
    """The command of a script that starts its ranks itself. more: arguments that may contain spaces."""
    return sys.executable, "-m", f"scripts.{module}", *flags.split(), *map(str, more)


def sweep(name: str, seconds: int, args: argparse.Namespace, file: str, flags: str) -> Step:
    """A step that adds rows to the sweep in `file`."""
    vllm = ("--vllm-python", args.vllm_python) if args.vllm_python else ()
    return Step(name, seconds, script("sweep", f"--tp {args.ranks} {flags}", "--out", args.raw / file, *vllm))


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
    kinds: dict[str, tuple[str, ...]] = {VLLM: ("--vllm-python", args.vllm_python)} if args.vllm_python else {}
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
    return [*models(args), *serving(args), *all_reduces(args), *others(args)]


def perform(step: Step, args: argparse.Namespace, seconds: float) -> str | None:
    """Run a step for at most `seconds`, with its output in NAME.log in --raw. Returns None, or why it failed."""
    log = args.raw / f"{step.name.replace(' ', '-').replace('/', '-').replace(':', '-').replace(',', '')}.log"
    with log.open("w") as said, (step.output or log).open("a") as output:
        process = subprocess.Popen(step.command, cwd=ROOT, stdout=output, stderr=said, start_new_session=True)
        try:
            code = process.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
            _end(process)
            if isinstance(stopped, KeyboardInterrupt):
                raise
            return f"stopped after {seconds:.0f} s"
    return None if code == 0 else f"exit code {code}; {log} says why"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGTERM to a step's process group, and SIGKILL if it does not end within GRACE_SECONDS."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks, with one GPU each")
    parser.add_argument(
        "--raw", type=Path, default=ROOT / "out" / "gpus", metavar="DIR", help="folder of the raw files (default: out/gpus)"
    )
    parser.add_argument(
        "--models", nargs=3, default=MODELS, metavar="MODEL", help=f"three models, see above (default: {' '.join(MODELS)})"
    )
    parser.add_argument("--vllm-python", metavar="PYTHON", help="Python of an environment with vLLM")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="run only steps whose names contain one of these texts")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit for all steps (default: none)")
    parser.add_argument("--list", action="store_true", help="print the steps and their expected seconds, and measure nothing")
    args = parser.parse_args()
    if args.ranks < 2 or args.minutes <= 0:
        raise UserError("--ranks must be at least 2, and --minutes above 0")
    return args


def main() -> None:
    args = parse_args()
    end = time.monotonic() + args.minutes * 60
    found = [step for step in steps(args) if not args.only or any(text in step.name for text in args.only)]
    if args.list:
        print("\n".join(f"{step.seconds:4} s  {step.name}" for step in found))
        return
    done = check_folder(args.raw) / DONE
    failed = False
    for step in found:
        if done.exists() and step.name in done.read_text().splitlines():
            note(f"{step.name}: done before")
            continue
        left = end - time.monotonic()
        if left < step.seconds + GRACE_SECONDS:
            note(f"{step.name}: not started, {max(0, left):.0f} s are left and it takes about {step.seconds}")
            continue
        began = time.monotonic()
        problem = perform(step, args, min(left - GRACE_SECONDS, PATIENCE * step.seconds))
        note(f"{step.name}: {problem or 'done'}, {time.monotonic() - began:.0f} s")
        failed |= problem is not None
        if problem is None:
            with done.open("a") as names:
                names.write(step.name + "\n")
    if failed:
        raise UserError("some steps did not end well, see above; the same command tries them again")


if __name__ == "__main__":
    run(main)
