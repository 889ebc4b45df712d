"""How many tokens a step should compute at most: throughput by `--max-batch-tokens`, all requests at once, random weights.

    python launch.py --ranks 2 -m scripts.bench.serving.step_tokens --model llama-3-70b:16 --out out/step-tokens.json
    python -m scripts.bench.serving.step_tokens --merge out/step-tokens.json   # into engine/step_tokens.json, and prints a table

The model is loaded once. Each number of tokens gets an engine of its own, which computes the same requests. While a prompt of
another request is computed, a running one waits for about the 99th percentile of the steps' times. `engine/step_tokens.py` says which number
becomes the default.
"""

import argparse
import gc
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import engine.bench as bench
from checkpoints.presets import model_config
from checkpoints.weights import DTYPES, load_model
from cli import Parser, run
from engine.core import Engine
from engine.limits import EngineLimits
from engine.step_tokens import TABLE, Entry, entries, kind
from errors import UserError
from model import Transformer
from options import ModelOptions, add_options, dtype_name, rank_options, whole_number
from scripts.lib.machine import machine
from scripts.lib.markdown import table_lines
from scripts.lib.results import write_text
from tp import World, init_world

OWN = ("gpu", "model", "ranks")  # by which an entry replaces an older one
FIGURES = {
    "max_batch_tokens": "tokens of a step",
    "generated_tokens_per_second": "tokens/s",
    "median_step_ms": "step, ms: p50",
    "p99_step_ms": "p99",
}


def measured(model: Transformer, tokens: int, args: argparse.Namespace, world: World) -> dict[str, Any]:
    limits = EngineLimits(max_num_seqs=args.max_num_seqs, max_batch_tokens=tokens, kv_dtype=args.kv_dtype)
    engine = Engine(model, None, limits, world)
    engine.capture()
    # two steps of other prompts first, because those that are too large for a graph compile their kernels
    few = {"requests": -(-2 * tokens // args.prompt_length), "new_tokens": 2, "seed": args.seed + 1}
    with torch.inference_mode():
        bench.throughput(engine, argparse.Namespace(**vars(args) | few), world)
        found = bench.throughput(engine, args, world)
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return found


def measure(args: argparse.Namespace) -> None:
    world = init_world(**rank_options(args))
    config = model_config(args.model, args.variant, world.world_size, args.quantize)
    model = load_model(args.model, config, world, DTYPES[dtype_name(args.dtype, world.device.type)])
    content = {
        "machine": machine(),
        "model": args.model,
        "variant": config.description,
        "ranks": world.world_size,
        "layer_weights": config.layer_parameter_count() // world.world_size,
        "runs": [measured(model, tokens, args, world) for tokens in args.tokens],
    }
    if world.rank == 0:
        print(table([content]))
        write_text(args.out, json.dumps(content, indent=1) + "\n")


def table(files: list[dict[str, Any]]) -> str:
    """A Markdown table with a line for each run."""
    lines = [
        [one["model"], one["variant"], one["machine"]["gpus"], str(one["ranks"]), *(f"{run[key]:,g}" for key in FIGURES)]
        for one in files
        for run in one["runs"]
    ]
    return "\n".join(table_lines(["model", "variant", "GPUs", "ranks", *FIGURES.values()], lines))


def merge(paths: list[Path]) -> None:
    """Write these files' throughputs into the table of the defaults, in place of older ones of the same model. Raises UserError."""
    files = [json.loads(path.read_text()) for path in paths]
    found = {tuple(getattr(entry, name) for name in OWN): entry for entry in entries()}
    for path, one in zip(paths, files, strict=True):
        gpu = kind(one["machine"]["gpus"].partition(" x ")[2])
        if not gpu:
            raise UserError(f"{path} was measured without a GPU; the table is of GPUs")
        rates = {run["max_batch_tokens"]: run["generated_tokens_per_second"] for run in one["runs"]}
        entry = Entry(gpu, one["model"], one["ranks"], one["layer_weights"], rates)
        found[tuple(getattr(entry, name) for name in OWN)] = entry
        print(f"{gpu}, {entry.model} on {entry.ranks} ranks: {entry.tokens} tokens")
    text = ",\n ".join(json.dumps(asdict(found[key])) for key in sorted(found))
    write_text(TABLE, f"[\n {text}\n]\n")
    print(table(files))


def main() -> None:
    parser = Parser(description=__doc__)
    add_options(parser, ModelOptions, "the model", without=("model", "tp", "max_model_len", "compile"))
    parser.add_argument("--model", default="llama-3-8b", help="a checkpoint or a preset (default: llama-3-8b)")
    bench.add_load(parser, requests=256, prompt_length=1024, new_tokens=256)
    parser.add_argument(
        "--tokens", nargs="+", type=whole_number(1), default=[1024, 2048, 4096], help="of a step (default: 1024 2048 4096)"
    )
    parser.add_argument("--out", type=Path, default=Path("out/step-tokens.json"), help="default: out/step-tokens.json")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing, but take these into the table")
    parser.set_defaults(trace=None)
    args = parser.parse_args()
    if args.merge:
        merge(args.merge)
    else:
        measure(args)


if __name__ == "__main__":
    run(main)
