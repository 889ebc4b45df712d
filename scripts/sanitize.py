"""Run the GPU kernels under compute-sanitizer's memcheck, of CUDA's toolkit, and write what it says to sanitizer.txt.

    python -m scripts.sanitize --raw out/sanitizer
    python -m scripts.sanitize --raw out/sanitizer --minutes 9 --compute-sanitizer /usr/local/cuda/bin/compute-sanitizer

The GPU tests of each file of tests/kernels are one step, and all all-reduce algorithms on one rank are another. Steps that are
done are not repeated. Thousands of replays of a graph, which would take hours, are left out: memcheck finds a kernel's
invalid access in the first one. What NCCL and CUDA probe at their start are no accesses, so such errors are not reported.
"""

import argparse
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from cli import Parser, note, run
from errors import UserError
from scripts.lib.machine import describe, machine
from scripts.lib.results import ROOT, write_text
from scripts.lib.steps import Step, add_run_options, log_of, run_steps, steps_done

CHOSEN = r"gpu|captured|entry_points|fusion"  # parts of the names of tests that need a GPU
LEFT_OUT = ("replays", "on_gpus")  # thousands of replays
SECONDS, SLOW = 150, {"attention": 440}  # of a step on one H100, about
FAULT = 9  # exit code of memcheck if it reports an error
SAID = re.compile(r"^========= (?!COMPUTE-SANITIZER)\S.*|^\d+ (?:passed|failed|error|skipped).* in .*", re.MULTILINE)


def steps(tool: str) -> Iterator[Step]:
    memcheck = (tool, "--tool", "memcheck", "--error-exitcode", str(FAULT))
    chosen = f"({' or '.join(CHOSEN.split('|'))}) and not " + " and not ".join(LEFT_OUT)
    for path in sorted((ROOT / "tests" / "kernels").glob("test_*.py")):
        names = re.findall(rf"^def (test_\w*(?:{CHOSEN})\w*)", path.read_text(), re.MULTILINE)
        if any(not any(part in name for part in LEFT_OUT) for name in names):
            tests = (sys.executable, "-m", "pytest", "-x", "-k", chosen, str(path.relative_to(ROOT)))
            name = path.stem.removeprefix("test_")
            yield Step(name, SLOW.get(name, SECONDS), (*memcheck, *tests))
    sums = (sys.executable, "-m", "tests.comm.gpu_memcheck_rank")
    yield Step("all-reduces", SECONDS, (*memcheck, "--report-api-errors", "no", *sums))


def summary(found: Sequence[Step], raw: Path) -> str:
    """What memcheck and pytest said of each step: equal lines once, with their number."""
    parts: list[str] = []
    for step in found:
        log = log_of(step, raw)
        if not log.exists():
            parts.append(f"== {step.name}: not run")
            continue
        lines = Counter(SAID.findall(log.read_text(errors="replace")))
        verdict = "exit code 0" if step.name in steps_done(raw) else "failed or stopped"
        parts += [f"== {step.name}: {verdict}", *(f"{count:7} {line}" for line, count in lines.items())]
    return "\n".join(parts) + f"\n\nMade on {describe(machine(), 'cuda')}.\n"


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--compute-sanitizer", default="compute-sanitizer", metavar="PATH", help="default: that of PATH")
    add_run_options(parser, ROOT / "out" / "sanitizer")
    args = parser.parse_args()
    if args.minutes <= 0:
        raise UserError("--minutes must be above 0")
    return args


def main() -> None:
    args = parse_args()
    found = list(steps(args.compute_sanitizer))
    if not args.list:
        if shutil.which(args.compute_sanitizer) is None:
            raise UserError(
                f"there is no {args.compute_sanitizer}; install CUDA's toolkit, or name it: --compute-sanitizer PATH"
            )
        if not torch.cuda.is_available():
            raise UserError("memcheck checks the kernels of a GPU, and there is none; run it where CUDA finds one")
    try:
        run_steps(found, args)
    finally:  # after Ctrl-C or a failed step, too
        if args.raw.is_dir() and not args.list:
            write_text(path := args.raw / "sanitizer.txt", text := summary(found, args.raw))
            print(text)
            note(f"wrote {path}")


if __name__ == "__main__":
    run(main)
