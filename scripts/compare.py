"""Compare Rung with vLLM on this machine: decode and prefill by batch size, offline throughput, and the servers under load.

    python -m scripts.compare --models llama-3-8b --ranks 1 --vllm-python ~/vllm/bin/python
    python -m scripts.compare --models llama-3-8b --ranks 1 --vllm-python ~/vllm/bin/python --quantize fp8 --kv-dtype fp8
    python -m scripts.compare --models llama-3-8b --ranks 1 --vllm-python ~/vllm/bin/python --prompt-length 7936 --batch-sizes 1 8 --rates
    python -m scripts.compare --models llama-3-70b:16 --ranks 2 --vllm-python ~/vllm/bin/python --minutes 9 --raw out/compare-2

vLLM and Rung take turns, with the same lengths and random weights. Steps that are done are not repeated, so a stopped comparison
can be resumed; other flags of a step need another --raw. At the end it prints a table of what was measured so far, with how many
times as fast Rung is, and writes it to compare.md in --raw. Without --vllm-python it measures Rung alone, and prints a table only
if vLLM was measured before.
"""

import argparse
import re
from collections.abc import Iterator

from cli import Parser, note, run
from errors import UserError
from options import KV_DTYPES
from scripts.lib.results import ROOT, write_text
from scripts.lib.steps import Step, add_step_options, run_steps, script, sweep, vllm_flags
from scripts.lib.vllm_model import QUANTIZES
from scripts.report.compare import AT_ONCE, compare
from scripts.sweep.rows import VLLM, with_widths

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RATES = (4, 16, 32)  # requests/s
PROMPT = 1024  # tokens of a prompt
STEPS, ANSWER = 64, AT_ONCE  # tokens of answers: in a sweep, and under load and offline
REQUESTS = 256  # offline


def steps(args: argparse.Namespace) -> Iterator[Step]:
    servers = [*((VLLM,) if args.vllm_python else ()), *args.variants]
    widths = f" --kv-dtype {args.kv_dtype}" + (f" --quantize {args.quantize}" if args.quantize else "")
    for model in args.models:
        name = with_widths(model, args.quantize, args.kv_dtype)
        name += "" if args.prompt_length == PROMPT else f", {args.prompt_length} tokens"
        batches = " ".join(map(str, args.batch_sizes))
        lengths = f"--prompt-lengths {args.prompt_length} --new-tokens {STEPS}{widths}"
        for server in servers:
            flags = f"--models {model} --variants {server} --batch-sizes {batches} {lengths}"
            seconds = 180 if server == VLLM else 90
            if args.rates:  # also all requests at once, in the same launch
                flags += f" --also {REQUESTS} {args.prompt_length} {ANSWER}"
                yield sweep(f"{name} {server} and offline", seconds + 60, args, "sweep.jsonl", flags)
            else:
                yield sweep(f"{name} {server}", seconds, args, "sweep.jsonl", flags)
        for server in servers if args.rates else ():
            yield _load(model, name, server, args, widths)


def _load(model: str, name: str, server: str, args: argparse.Namespace, widths: str) -> Step:
    """A server under load; for Rung also its engine with all requests at once, in the steps of a server."""
    rates = " ".join(f"{rate:g}" for rate in args.rates)
    flags = f"--model {model} --ranks {args.ranks} --rates {rates} --seconds {args.seconds:g} --requests {REQUESTS}"
    flags += f" --max-num-seqs {REQUESTS} --prompt-length {args.prompt_length} --new-tokens {ANSWER}{widths}"
    more = vllm_flags(args) if server == VLLM else ("--variant", server, "--offline")
    out = args.raw / f"load-{re.sub('[:/, ]+', '-', name)}-{server}.json"
    seconds = 60 + len(args.rates) * (args.seconds + 15)
    return Step(f"load {name} {server}", round(seconds), script("bench.serving.load", flags, *more, "--out", out))


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["llama-3-8b"], metavar="MODEL", help="presets (default: llama-3-8b)")
    parser.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        help="Rung's residual variants (default: standard; on several ranks also ladder)",
    )
    parser.add_argument(
        "--batch-sizes", nargs="+", type=int, default=BATCHES, metavar="N", help=f"default: {' '.join(map(str, BATCHES))}"
    )
    parser.add_argument(
        "--rates",
        nargs="*",
        type=float,
        default=RATES,
        metavar="R",
        help=f"requests/s; none: no servers and no offline throughput, only steps (default: {' '.join(map(str, RATES))})",
    )
    parser.add_argument(
        "--prompt-length", type=int, default=PROMPT, metavar="N", help=f"tokens of a prompt (default: {PROMPT})"
    )
    parser.add_argument("--seconds", type=float, default=10, metavar="S", help="of arrivals at each rate (default: 10)")
    parser.add_argument("--quantize", choices=QUANTIZES, help="width of the weights of both")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="KV cache of both (default: auto)")
    add_step_options(parser, ROOT / "out" / "compare")
    args = parser.parse_args()
    if min(args.ranks, args.prompt_length, *args.batch_sizes) < 1 or min(args.minutes, args.seconds, *args.rates) <= 0:
        raise UserError("--ranks, --batch-sizes, --prompt-length, --rates, --seconds and --minutes must be above 0")
    args.variants = args.variants or (["standard"] if args.ranks == 1 else ["standard", "ladder"])
    return args


def main() -> None:
    args = parse_args()
    try:
        run_steps(list(steps(args)), args)
    finally:  # after Ctrl-C or a failed step, too
        table = compare(args.raw) if args.raw.is_dir() and not args.list else None
        if table is not None:
            write_text(path := args.raw / "compare.md", table)
            print(table)
            note(f"wrote {path}")


if __name__ == "__main__":
    run(main)
