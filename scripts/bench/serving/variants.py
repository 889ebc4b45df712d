"""Measure generate.py's milliseconds per token on large presets with random weights, by residual variant.

    python -m scripts.bench.serving.variants --ranks 8
    python -m scripts.bench.serving.variants --ranks 2 --models tiny --prompt-length 64 --new-tokens 32     # a test on a CPU

Each model and variant is one launch of generate.py, with a warm-up sample and three measured samples. The figures are their
medians. Writes baseline-RANKS.json and .md into out, or with --write into docs/results.
"""

import argparse
import json
import subprocess
from statistics import median
from typing import Any

from tqdm import tqdm

from cli import Parser, run
from errors import UserError
from presets import model_config
from processes import on_ranks
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.results import ROOT, add_write_option, results_folder, write_json, write_text

MODELS = ("llama-3-8b", "llama-3-70b:16")
VARIANTS = ("standard", "parallel", "ladder", "desync-4x", "upper-bound")
SAMPLES = 3
FIGURES = ("prefill_ms", "decode_ms_per_token", "weight_gb_per_second", "peak_memory_gb")


def measure(model: str, variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one launch. Returns all its raw samples and their medians. Raises UserError if it fails."""
    command = [*on_ranks(args.ranks)]
    command += ["generate.py", "--json", "--ignore-eos", "--temperature", "0", "--num-samples", str(SAMPLES + 1)]
    command += ["--prompt-length", str(args.prompt_length), "--max-new-tokens", str(args.new_tokens)]
    command += ["--model", model, "--variant", variant, *args.flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        raise UserError(f"{model} {variant} failed:\n{result.stderr[-2000:]}")
    samples = [json.loads(line) for line in result.stdout.splitlines()][1:]  # the first one is the warm-up
    raw = [{name: sample[name] for name in FIGURES} for sample in samples]
    return {
        "model": model,
        "variant": samples[0]["variant"],
        "median": {name: median(sample[name] for sample in raw) for name in FIGURES},
        "samples": raw,
    }


def table(rows: list[dict[str, Any]], where: dict[str, Any], args: argparse.Namespace) -> str:
    head = ["model", "variant", "prefill, ms", "decode, ms a token", "weights read, GB/s a rank"]
    lines: list[list[str]] = []
    for row in rows:
        middle = row["median"]
        figures = [
            f"{middle['prefill_ms']:.2f}",
            f"{middle['decode_ms_per_token']:.3f}",
            f"{middle['weight_gb_per_second']:.0f}",
        ]
        lines.append([row["model"], row["variant"], *figures])
    flags = f", {' '.join(args.flags)}" if args.flags else ""
    caption = (
        f"Batch 1, {args.prompt_length} + {args.new_tokens} tokens, random weights, {args.ranks} rank(s){flags}, median of "
        f"{SAMPLES}. Made on {describe(where)}."
    )
    return captioned(head, lines, caption)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="tensor-parallel ranks (default: 8)")
    parser.add_argument("--models", nargs="+", default=MODELS, help=f"presets (default: {' '.join(MODELS)})")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, help=f"default: {' '.join(VARIANTS)}")
    parser.add_argument("--prompt-length", type=int, default=1024, help="prompt tokens (default: 1024)")
    parser.add_argument("--new-tokens", type=int, default=512, help="generated tokens (default: 512)")
    parser.add_argument("--name", help="name of the result files (default: baseline-RANKS)")
    add_write_option(parser)
    parser.add_argument("flags", nargs="*", help="further flags of generate.py, after --: -- --compile")
    args = parser.parse_args()
    cases = [(model, variant) for model in args.models for variant in args.variants]
    for model, variant in cases:
        model_config(model, variant, args.ranks)
    folder = results_folder(args)
    where, name = machine(), args.name or f"baseline-{args.ranks}"
    rows: list[dict[str, Any]] = []
    for model, variant in tqdm(cases, unit="launch"):
        rows.append(measure(model, variant, args))
        settings = {key: value for key, value in vars(args).items() if key != "write"}
        path = write_json(name, {"machine": where, "settings": settings, "rows": rows}, folder)  # a stopped run keeps it
    text = table(rows, where, args)
    write_text(folder / f"{name}.md", text, path)
    print(f"{text}\nwrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    run(main)
