"""Let vLLM read what scripts.quantize writes, and compare its log-probabilities of held-out text with ours.

    python -m scripts.quality.vllm_reads --vllm-python ~/vllm/bin/python
    python -m scripts.quality.vllm_reads --vllm-python ~/vllm/bin/python --model DIR --widths int4 --dtype float16

Each width is written into a temporary folder. vLLM loads it in a process of its own, with the Python of its environment, and
scores the prompts; then we do, on the same GPU and in the same data type. A width agrees if the mean change of a token's
log-probability is at most --tolerance. The row `16 bits` is the checkpoint as it is: it shows what the two programs' kernels differ by.
Only a model that vLLM knows can be compared, so no residual variant but standard. Prompts are held-out stories, or random tokens
if the model has no tokenizer. Writes vllm-reads.json and .md into out (with --write into docs/results).
"""

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from cli import Parser, run
from engine import LLM
from errors import UserError
from options import dtype_name, whole_number
from presets import model_config
from scripts.lib.failures import reason
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.results import ROOT, add_write_option, results_folder, write_table
from scripts.quality.heldout import SEED, held_out_stories, likelihoods
from scripts.quality.vllm_scores import MARK
from scripts.quantize import LENGTH, SAMPLES, quantize_model
from tokenizer_files import find_tokenizer, load_tokenizer

PLAIN = "16 bits"
WIDTHS: dict[str, tuple[str, str] | None] = {  # scripts.quantize's --weights and --method
    PLAIN: None,
    "fp8": ("fp8", "rtn"),
    "int8": ("int8", "rtn"),
    "int4": ("int4", "rtn"),
    "int4-gptq": ("int4", "gptq"),
}
WORKER = Path(__file__).with_name("vllm_scores.py")
MOST_TOKENS = 512  # of a prompt
MINUTES = 10  # that vLLM may take for one width

Scores = list[list[float]]


def held_out(model: Path, count: int) -> list[list[int]]:
    """Token ids of `count` prompts."""
    config = model_config(str(model), None, 1)
    longest = min(MOST_TOKENS, config.max_seq_len - 1)
    if find_tokenizer(model) is None:
        draw = random.Random(SEED)
        return [[draw.randrange(config.vocab_size) for _ in range(draw.randrange(2, longest + 1))] for _ in range(count)]
    return [story[:longest] for story in held_out_stories(load_tokenizer(model), count)]


def vllm_scores(python: str, model: Path, dtype: str, prompts: list[list[int]]) -> tuple[str, Scores]:
    """vLLM's version, and its log-probabilities. Raises UserError with vLLM's last words if it cannot load or score."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.json")
        job.write_text(json.dumps({"model": str(model), "dtype": dtype, "prompts": prompts}))
        try:
            command = [python, str(WORKER), str(job)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 * MINUTES)
        except OSError as e:
            raise UserError(f"--vllm-python {python} cannot be started ({e.strerror or e}); name a Python with vLLM") from None
        except subprocess.TimeoutExpired:
            raise UserError(f"vLLM did not end within {MINUTES} minutes") from None
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or len(lines) != 1:
        print(done.stderr, file=sys.stderr)
        raise UserError(f"vLLM ended with exit code {done.returncode}: {reason(done.stderr)}")
    found = json.loads(lines[0])
    return found["vllm"], found["logprobs"]


def row_of(width: str, ours: Scores, theirs: Scores) -> dict[str, Any]:
    """Changes of tokens' log-probabilities from ours to vLLM's, nats. A value that is not finite is an infinite change."""
    apart = [
        abs(a - b) if math.isfinite(a - b) else math.inf
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    perplexities = [math.exp(-sum(map(sum, scores)) / len(apart)) for scores in (ours, theirs)]
    row = dict(zip(("perplexity", "vllm_perplexity"), perplexities, strict=True))
    return {"width": width, "tokens": len(apart), **row, "mean_change": sum(apart) / len(apart), "largest_change": max(apart)}


def compare(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """vLLM's version, and a row for each width; with `error` where vLLM failed."""
    prompts, version, theirs, rows = held_out(args.model, args.prompts), "unknown", {}, []
    with tempfile.TemporaryDirectory() as folder:
        paths = {width: args.model if WIDTHS[width] is None else Path(folder, width) for width in args.widths}
        for width, path in paths.items():
            if made := WIDTHS[width]:
                quantize_model(str(args.model), path, *made, None, SAMPLES, LENGTH, args.device)
            try:  # before our own model takes the GPU's memory
                version, theirs[width] = vllm_scores(args.vllm_python, path, args.dtype, prompts)
            except UserError as e:
                rows.append({"width": width, "error": str(e)})
        rows += [
            row_of(width, likelihoods(LLM(paths[width], dtype=args.dtype), prompts), scores) for width, scores in theirs.items()
        ]
    return version, sorted(rows, key=lambda row: args.widths.index(row["width"]))


def table(rows: list[dict[str, Any]], version: str, args: argparse.Namespace, where: dict[str, Any]) -> str:
    lines = []
    for row in rows:
        if "error" in row:
            cells = [row["error"], "", "", "", ""]
        else:
            cells = [row["tokens"], *(f"{row[name]:.4f}" for name in ("perplexity", "vllm_perplexity", "mean_change"))]
            cells.append(f"{row['largest_change']:.3f}")
        lines.append([row["width"], *cells])
    head = ["weights", "tokens", "perplexity", "vLLM's perplexity", "mean change, nats", "largest change, nats"]
    caption = (
        f"`{args.model.name}` as scripts.quantize writes it, read by vLLM {version} and by Rung in {args.dtype}: changes of a token's "
        f"log-probability between the two, over {args.prompts} prompts. Made on {describe(where, args.device)}."
    )
    return captioned(head, lines, caption)


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--vllm-python", required=True, metavar="PYTHON", help="the Python of an environment with vLLM")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-standard", help="default: models/tiny-standard")
    parser.add_argument("--widths", nargs="+", choices=tuple(WIDTHS), default=list(WIDTHS), help="default: all")
    parser.add_argument("--prompts", type=whole_number(1), default=64, metavar="N", help="default: 64")
    parser.add_argument(
        "--dtype", default=None, choices=("bfloat16", "float16", "float32"), help="default: as Rung's on this device"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.02, metavar="NATS", help="largest mean change of a token (default: 0.02)"
    )
    add_write_option(parser)
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.dtype = args.dtype or dtype_name(None, args.device)
    args.widths = list(dict.fromkeys(args.widths))
    return args


def main() -> None:
    args = parse_args()
    folder = results_folder(args)
    version, rows = compare(args)
    where = machine()
    text = table(rows, version, args, where)
    print(text)
    settings = {"model": args.model.name, "dtype": args.dtype, "prompts": args.prompts, "tolerance": args.tolerance}
    write_table("vllm-reads", {"machine": where, "vllm": version, "settings": settings, "rows": rows}, text, folder)
    if failed := [f"{row['width']}: {row['error']}" for row in rows if "error" in row]:
        raise UserError("; ".join(failed))
    if apart := [row["width"] for row in rows if not row["mean_change"] <= args.tolerance]:
        raise UserError(f"vLLM's log-probabilities are not ours: {', '.join(apart)}")


if __name__ == "__main__":
    run(main)
