"""A list of measuring commands that write raw files into one folder: run in turn, resumable, within a time limit."""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cli import note
from errors import UserError
from files import check_folder
from scripts.lib.process_tree import end
from scripts.lib.results import ROOT
from scripts.lib.vllm_model import add_vllm_memory

GRACE_SECONDS = 20  # time that a stopped step gets to end its ranks
PATIENCE = 2.5  # a step is stopped after this multiple of its expected time
DONE, BETWEEN = "done.txt", "  "  # a line is a step's name and the digest of its command


@dataclass(frozen=True)
class Step:
    """One command. seconds: its expected time, a little more than on 4 H200s, with kernels that are compiled for the first time.

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
    more = vllm_flags(args) if "vllm" in flags.split() else ()
    return Step(name, seconds, script("sweep", f"--tp {args.ranks} {flags}", "--out", args.raw / file, *more))


def vllm_flags(args: argparse.Namespace) -> tuple[object, ...]:
    """The flags of a command that may start vLLM."""
    python = ("--vllm-python", args.vllm_python) if args.vllm_python else ()
    return *python, *(("--vllm-memory", args.vllm_memory) if python and args.vllm_memory else ())


def add_step_options(parser: argparse.ArgumentParser, raw: Path) -> None:
    """Add the flags of steps on several ranks, with vLLM or without. raw: the default folder of the raw files."""
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks, with one GPU each")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="Python of an environment with vLLM")
    add_vllm_memory(parser)
    add_run_options(parser, raw)


def add_run_options(parser: argparse.ArgumentParser, raw: Path) -> None:
    """Add the flags of `run_steps`. raw: the default folder of the raw files."""
    parser.add_argument(
        "--raw", type=Path, default=raw, metavar="DIR", help=f"folder of the raw files (default: {raw.relative_to(ROOT)})"
    )
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="run only steps whose names contain one of these texts")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit for all steps (default: none)")
    parser.add_argument("--list", action="store_true", help="print the steps and their expected seconds, and measure nothing")


def run_steps(steps: Sequence[Step], args: argparse.Namespace) -> None:
    """Run the steps that are not done yet, as the flags say. Raises UserError if one failed, or any was done with other flags."""
    deadline = time.monotonic() + args.minutes * 60
    found = [step for step in steps if not args.only or any(text in step.name for text in args.only)]
    if args.list:
        print("\n".join(f"{step.seconds:4} s  {step.name}" for step in found))
        return
    check_folder(args.raw)
    done = steps_done(args.raw)
    other = [step.name for step in steps if step.name in done and done[step.name] != digest(step, args.raw)]
    if other:  # files would be overwritten, or mixed, also by steps that share one with them
        raise UserError(
            f"{args.raw} has steps that were done with other flags ({'; '.join(other)}); name another folder: --raw"
        )
    failed = False
    for step in found:
        if step.name in done:
            note(f"{step.name}: done before with these flags")
            continue
        left = deadline - time.monotonic()
        if left < step.seconds + GRACE_SECONDS:
            note(f"{step.name}: not started, {max(0, left):.0f} s are left and it takes about {step.seconds}")
            continue
        began = time.monotonic()
        problem = perform(step, args, min(left - GRACE_SECONDS, PATIENCE * step.seconds))
        note(f"{step.name}: {problem or 'done'}, {time.monotonic() - began:.0f} s")
        failed |= problem is not None
        if problem is None:
            with (args.raw / DONE).open("a") as names:
                names.write(f"{step.name}{BETWEEN}{digest(step, args.raw)}\n")
    if failed:
        raise UserError("some steps did not end well, see above; the same command tries them again")


def steps_done(raw: Path) -> dict[str, str]:
    """The names of the steps that are done, and the digests of their commands."""
    lines = (raw / DONE).read_text().splitlines() if (raw / DONE).exists() else []
    return {name: flags for name, _, flags in (line.partition(BETWEEN) for line in lines)}


def digest(step: Step, raw: Path) -> str:
    """Of a step's command, wherever this Python, this repository and the folder of the raw files are."""
    words = [f"{word}/".removeprefix(f"{raw}/").removeprefix(f"{ROOT}/") for word in step.command if word != sys.executable]
    return hashlib.sha256(repr(words).encode()).hexdigest()[:8]


def log_of(step: Step, raw: Path) -> Path:
    """Where a step's output goes, unless it has a file of its own."""
    return raw / f"{step.name.replace(' ', '-').replace('/', '-').replace(':', '-').replace(',', '')}.log"


def perform(step: Step, args: argparse.Namespace, seconds: float) -> str | None:
    """Run a step for at most `seconds`, with its output in NAME.log in --raw. Returns None, or why it failed."""
    log = log_of(step, args.raw)
    log.write_bytes(b"")
    with log.open("a") as said, (step.output or log).open("a") as output:  # both at its end, if they are one file
        process = subprocess.Popen(step.command, cwd=ROOT, stdout=output, stderr=said, start_new_session=True)
        try:
            code = process.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
            end(process, seconds=GRACE_SECONDS)
            with suppress(ProcessLookupError):  # what has lost its parent is not in the tree, but in the session
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(stopped, KeyboardInterrupt):
                raise
            return f"stopped after {seconds:.0f} s"
    return None if code == 0 else f"exit code {code}; {log} says why"
