"""Measure the time from the server's command to its first token, by phase, with a cold and a warm kernel cache.

    python -m scripts.bench.serving.startup --model llama-3-70b --ranks 8
    python -m scripts.bench.serving.startup --model models/tiny-hybrid --ranks 2 --runs cold warm warm -- --comm int8

Each run starts a new server, requests one token as soon as it is ready, and stops it. A cold run has empty cache folders for
the kernels that Triton, Inductor and the CUDA driver compile, and for what Rung measures of its kernels and all-reduces. A warm
run has the folders that the previous runs filled. The operating system's file cache is not cleared, so the first start after a
reboot also reads PyTorch from disk. Flags after `--` are passed to the server.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from cli import Parser, note, run
from errors import UserError
from scripts.lib.machine import machine
from scripts.lib.markdown import table_lines
from scripts.lib.results import ROOT, check_output, write_text
from scripts.lib.servers import rung_server

LINE = re.compile(r"(\S+Z) info start-up: ([^,\n]+)(?:, ([\d.]+) s after the process began)?")
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda", "RUNG_CACHE": "rung"}
PROMPT_TOKENS = 16


def stamps(log: str, began: float) -> list[tuple[str, float]]:
    """The start-up phases in the server's log and when each ended, in seconds since `began` (of `time.time()`).

    The first entry is the launcher's start-up, if the server's first line tells when the server's process began.
    """
    found: list[tuple[str, float]] = []
    for stamp, name, age in LINE.findall(log):
        seconds = datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%S.%f%z").timestamp() - began
        if age and 0 < float(age) < seconds:
            found.append(("launcher", seconds - float(age)))
        found.append((name, seconds))
    return found


def durations(reached: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds of each phase, from the end of the previous one. Phases with equal names are added up."""
    found: dict[str, float] = {}
    last = 0.0
    for name, seconds in reached:
        found[name] = round(found.get(name, 0.0) + seconds - last, 3)
        last = seconds
    return found


def first_token(client: httpx.Client) -> None:
    """Request one token and wait for it. Raises UserError if none comes."""
    body = {"prompt": list(range(1, PROMPT_TOKENS + 1)), "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and any(c["token_ids"] for c in json.loads(line[6:]).get("choices", [])):
                return
    raise UserError(f"the server answered {response.status_code} without a token")


def measure(args: argparse.Namespace, caches: Path) -> dict[str, Any]:
    """One start: seconds from the command until /health answers (`ready`) and until the first token, and seconds by phase."""
    flags = ["--model", args.model, "--log-format", "text", "--log-level", "info", *args.flags]
    log = args.out.with_suffix(".log")
    environ = {name: str(caches / folder) for name, folder in CACHES.items()}
    for folder in environ.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    began = time.time()
    with rung_server(args.ranks, flags, log, **environ) as server:
        ready = time.time() - began
        with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client:
            first_token(client)
        first = time.time() - began
    reached = stamps(log.read_text(errors="replace"), began)
    if not reached:
        raise UserError(f"{log} has no line of the start; leave --log-format and --log-level to this script")
    phases = durations([*reached, ("ready", ready), ("first token", first)])
    return {"ready": round(ready, 3), "first_token": round(first, 3), "phases": phases}


def table(runs: list[dict[str, Any]]) -> str:
    """A Markdown table with one line per run, in seconds."""
    names = list(dict.fromkeys(name for one in runs for name in one["phases"]))
    rows = [
        [one["cache"], *(f"{one['phases'].get(name, 0.0):.2f}" for name in names), f"{one['first_token']:.2f}"] for one in runs
    ]
    return "\n".join([*table_lines(["kernel cache", *names, "command to first token"], rows), "", "Seconds."])


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR|PRESET", help="a checkpoint, or a preset with random weights")
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks (default: 2)")
    parser.add_argument(
        "--runs",
        nargs="+",
        choices=("cold", "warm"),
        default=["cold", "warm"],
        help="kernel cache of each run, in this order (default: cold warm)",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "startup.json", help="JSON file to write (default: out/startup.json)"
    )
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of the server")
    args = parser.parse_args()
    if args.ranks < 1:
        raise UserError("--ranks must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    check_output(args.out)
    runs = []
    with tempfile.TemporaryDirectory(prefix="rung-kernels-") as root:
        caches = Path(root) / "0"
        for i, cache in enumerate(args.runs):
            if cache == "cold":
                caches = Path(root) / str(i)
            runs.append({"cache": cache, **measure(args, caches)})
            note(f"{cache}: first token after {runs[-1]['first_token']:.2f} s")
    settings = {"model": args.model, "ranks": args.ranks, "flags": args.flags}
    write_text(args.out, json.dumps({"machine": machine(), "settings": settings, "runs": runs}, indent=1) + "\n")
    print(table(runs))
    note(f"wrote {args.out}")


if __name__ == "__main__":
    run(main)
