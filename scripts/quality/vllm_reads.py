"""Let vLLM read what scripts.quantize writes, and compare its log-probabilities of held-out text with ours.

    python -m scripts.quality.vllm_reads --vllm-python ~/vllm/bin/python
    python -m scripts.quality.vllm_reads --vllm-python ~/vllm/bin/python --model DIR --widths int4 --dtype float16
    python -m scripts.quality.vllm_reads --model DIR    # by transformers, which needs no GPU (`make setup-dev`)

Each width is written into a temporary folder. vLLM loads it in a process of its own, with the Python of its environment, and
scores the prompts; then we do, on the same GPU and in the same data type. A width agrees if the mean change of a token's
log-probability is at most --tolerance. The row `16 bits` is the checkpoint as it is: it shows what the two programs' kernels differ by.

With fp8 both programs round each layer's inputs to fp8. Where their inputs differ in the last bit, some are rounded to other codes,
so the programs differ by about what this rounding changes. `fp8-w8a16` has the same weights, and its config.json leaves the inputs
as they are: it must agree like the other widths, so it finds wrong codes and scales. fp8 may differ by sqrt(2) times the change between
one program's own results of the two, which two independent roundings of that size do; of the programs, by the smaller change, so one
that rounds too much, or not at all, does not agree. Random weights (`scripts.random_checkpoint`) react more to a wrong scale than the
embedded models.

Only a model that vLLM knows can be compared, so no residual variant but standard. Prompts are held-out stories, or random tokens
if the model has no tokenizer. Writes vllm-reads.json and .md (transformers-reads) into out (with --write into docs/results).
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from checkpoints.presets import model_config
from cli import Parser, run
from engine import LLM
from errors import UserError
from options import dtype_name, whole_number
from scripts.lib.failures import reason
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned, cell
from scripts.lib.results import ROOT, add_write_option, results_folder, write_table
from scripts.quality.heldout import SEED, held_out_stories, likelihoods
from scripts.quality.vllm_scores import MARK
from scripts.quantize import LENGTH, SAMPLES, quantize_model
from text.tokenizer_files import find_tokenizer, load_tokenizer

PLAIN, W8A16 = "16 bits", "fp8-w8a16"
WIDTHS: dict[str, tuple[str, str] | None] = {  # scripts.quantize's --weights and --method
    PLAIN: None,
    "fp8": ("fp8", "rtn"),
    W8A16: ("fp8", "rtn"),
    "int8": ("int8", "rtn"),
    "int4": ("int4", "rtn"),
    "int4-gptq": ("int4", "gptq"),
}
WORKER = Path(__file__).with_name("vllm_scores.py")
MOST_TOKENS = 512  # of a prompt
MINUTES = 10  # that a program may take for one width
# vLLM 0.24 finds no kernel for fp8 weights and 16-bit inputs on Hopper without it
WEIGHT_ONLY = {"VLLM_TEST_FORCE_FP8_MARLIN": "1"}

ROUNDING = (
    f"Rounding: the mean change between fp8 and {W8A16}, the same weights with inputs in 16 bits, in the program in which it is smaller. "
    "Two programs' fp8 may differ by sqrt(2) times as much. "
)

Scores = list[list[float]]


def held_out(model: Path, count: int) -> list[list[int]]:
    """Token ids of `count` prompts."""
    config = model_config(str(model), None, 1)
    longest = min(MOST_TOKENS, config.max_seq_len - 1)
    if find_tokenizer(model) is None:
        draw = random.Random(SEED)
        return [[draw.randrange(config.vocab_size) for _ in range(draw.randrange(2, longest + 1))] for _ in range(count)]
    return [story[:longest] for story in held_out_stories(load_tokenizer(model), count)]


def keep_inputs(folder: Path) -> None:
    """Change the config.json of a checkpoint of fp8 so that the layers' inputs are not rounded."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    path.write_text(json.dumps(config))


def their_scores(
    python: str | None, model: Path, dtype: str, prompts: list[list[int]], environment: dict[str, str]
) -> tuple[str, Scores]:
    """vLLM's log-probabilities, or those of transformers if `python` is None, after the program's name and version. environment: what
    it adds to ours. Raises UserError with the program's last words if it cannot load or score."""
    name = "vLLM" if python else "transformers"
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.json")
        job.write_text(json.dumps({"program": name, "model": str(model), "dtype": dtype, "prompts": prompts}))
        try:
            command = [python or sys.executable, str(WORKER), str(job)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=60 * MINUTES, env=os.environ | environment
            )
        except OSError as e:
            raise UserError(f"--vllm-python {python} cannot be started ({e.strerror or e}); name a Python with vLLM") from None
        except subprocess.TimeoutExpired:
            raise UserError(f"{name} did not end within {MINUTES} minutes") from None
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or len(lines) != 1:
        print(done.stderr, file=sys.stderr)
        raise UserError(f"{name} ended with exit code {done.returncode}: {reason(done.stderr)}")
    found = json.loads(lines[0])
    return f"{name} {found['version']}", found["logprobs"]


def mean_change(ours: Scores, theirs: Scores) -> float:
    return sum(apart := changes(ours, theirs)) / len(apart)


def changes(ours: Scores, theirs: Scores) -> list[float]:
    """Of tokens' log-probabilities, nats. A value that is not finite is an infinite change."""
    return [
        abs(a - b) if math.isfinite(a - b) else math.inf
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    ]


def row_of(width: str, ours: Scores, theirs: Scores) -> dict[str, Any]:
    """The changes from our log-probabilities to theirs, nats."""
    apart = changes(ours, theirs)
    perplexities = [math.exp(-sum(map(sum, scores)) / len(apart)) for scores in (ours, theirs)]
    row = dict(zip(("perplexity", "their_perplexity"), perplexities, strict=True))
    return {"width": width, "tokens": len(apart), **row, "mean_change": mean_change(ours, theirs), "largest_change": max(apart)}


def compare(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Who read, and a row for each width; with `error` where it failed. fp8's `rounding` is what the rounding of inputs changes, nats."""
    prompts, reader, theirs, rows = held_out(args.model, args.prompts), "unknown", {}, []
    with tempfile.TemporaryDirectory() as folder:
        paths = {width: args.model if WIDTHS[width] is None else Path(folder, width) for width in args.widths}
        for width, path in paths.items():
            if made := WIDTHS[width]:
                quantize_model(str(args.model), path, *made, None, SAMPLES, LENGTH, args.device)
            if width == W8A16:
                keep_inputs(path)
            environment = WEIGHT_ONLY if width == W8A16 else {}
            try:  # before our own model takes the GPU's memory
                reader, theirs[width] = their_scores(args.vllm_python, path, args.dtype, prompts, environment)
            except UserError as e:
                rows.append({"width": width, "error": str(e)})
        ours = {width: likelihoods(LLM(paths[width], dtype=args.dtype), prompts) for width in theirs}
    rows += [row_of(width, ours[width], scores) for width, scores in theirs.items()]
    for row in rows:
        if row["width"] == "fp8" and ours.keys() >= {"fp8", W8A16}:
            row["rounding"] = min(mean_change(scores["fp8"], scores[W8A16]) for scores in (ours, theirs))
    return reader, sorted(rows, key=lambda row: args.widths.index(row["width"]))


def limit(row: dict[str, Any], tolerance: float) -> float:
    """The largest mean change, nats, with which a width agrees."""
    return float(max(tolerance, math.sqrt(2) * row.get("rounding", 0.0)))


def table(rows: list[dict[str, Any]], reader: str, args: argparse.Namespace, where: dict[str, Any]) -> str:
    lines, rounded = [], any("rounding" in row for row in rows)
    for row in rows:
        if "error" in row:
            cells = [row["error"], *[""] * (4 + rounded)]
        else:
            cells = [row["tokens"], *(f"{row[name]:.4f}" for name in ("perplexity", "their_perplexity", "mean_change"))]
            cells += [f"{row['largest_change']:.3f}", *[cell(row.get("rounding"), ".4f")] * rounded]
        lines.append([row["width"], *cells])
    head = [
        "weights",
        "tokens",
        "perplexity",
        f"perplexity by {reader.split()[0]}",
        "mean change, nats",
        "largest change, nats",
    ]
    head += ["rounding, nats"] * rounded
    caption = (
        f"`{args.model.name}` as scripts.quantize writes it, read by {reader} and by Rung in {args.dtype}: changes of a token's "
        f"log-probability between the two, over {args.prompts} prompts. {ROUNDING if rounded else ''}Made on {describe(where, args.device)}."
    )
    return captioned(head, lines, caption)


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--vllm-python", metavar="PYTHON", help="the Python of an environment with vLLM (default: transformers)"
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-standard", help="default: models/tiny-standard")
    parser.add_argument(
        "--widths", nargs="+", choices=tuple(WIDTHS), default=list(WIDTHS), help="default: all; fp8 adds fp8-w8a16"
    )
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
    args.widths = [width for width in WIDTHS if width in args.widths or (width == W8A16 and "fp8" in args.widths)]
    return args


def main() -> None:
    args = parse_args()
    folder = results_folder(args)
    reader, rows = compare(args)
    where = machine()
    text = table(rows, reader, args, where)
    print(text)
    settings = {"model": args.model.name, "dtype": args.dtype, "prompts": args.prompts, "tolerance": args.tolerance}
    name = "vllm-reads" if args.vllm_python else "transformers-reads"
    write_table(name, {"machine": where, "reader": reader, "settings": settings, "rows": rows}, text, folder)
    if failed := [f"{row['width']}: {row['error']}" for row in rows if "error" in row]:
        raise UserError("; ".join(failed))
    if apart := [row["width"] for row in rows if not row["mean_change"] <= limit(row, args.tolerance)]:
        raise UserError(f"{reader.split()[0]}'s log-probabilities are not ours: {', '.join(apart)}")


if __name__ == "__main__":
    run(main)
