"""Train the same model as every residual variant for a few hundred steps, and draw the loss curves in one plot.

    python -m scripts.quality.pretrain_variants --model ladder-1b --ranks 8               # on GPUs
    python -m scripts.quality.pretrain_variants --model tiny --ranks 2 --steps 40 --sequence-length 128 --streams 2 --dry-run

The data is the synthetic corpus, tokenized as for the embedded models. So the curves only compare the variants with each other.
Writes pretrain-MODEL.json, .md and .png into out, or with --write into docs/results. The ranks start once and train one variant
after the other. A variant whose metrics in --out are complete is not trained again.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from cli import Parser, note, run
from errors import UserError
from presets import preset
from processes import on_ranks
from scripts.corpus.tokens import TOKENS_PER_DOCUMENT, write_corpus
from scripts.lib import results
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import table_lines
from tp import World, init_world
from training.loop import prepare, together
from training.loop import train as train_one
from training.metrics import plot_losses, read_metrics
from training.train import parse_args as training_args
from training.train import setup
from variants import TRAINABLE

VARIANTS = tuple(name for name in TRAINABLE if name != "hybrid")  # which is converted, not trained from scratch
TOKENIZER = results.ROOT / "models" / "tiny-standard"
LOG_EVERY = 5  # steps
WARMUP = 0.25  # of the steps; with fewer, the deeper variants diverge while Adam's second moments are still inaccurate
TRAIN = "--train"  # first word of the ranks' command line


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ladder-1b", metavar="PRESET", help="default: ladder-1b")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--streams", type=int, default=8, help="streams of the desync variants (default: 8)")
    parser.add_argument("--steps", type=int, default=300, help="default: 300")
    parser.add_argument("--sequence-length", type=int, default=2048, metavar="TOKENS", help="default: 2048")
    parser.add_argument("--global-batch", type=int, default=64, metavar="WINDOWS", help="default: 64")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="WINDOWS", help="default: 1")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="peak of the learning rate (default: 1e-4)")
    parser.add_argument("--out", type=Path, help="default: out/pretrain-MODEL")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="time limit of the training; the results so far are shown"
    )
    parser.add_argument("--dry-run", action="store_true", help="write only to --out")
    results.add_write_option(parser)
    parser.add_argument("more", nargs="*", help="after --: further options of python -m training.train, such as --compile")
    args = parser.parse_args()
    preset(args.model)
    args.out = args.out or results.ROOT / "out" / f"pretrain-{args.model.replace(':', '-')}"
    return args


# --- the ranks ------------------------------------------------------------------------------------------------------------


def train(world: World, words: list[str]) -> None:
    """Train one variant. words: the command line of training.train. Collective."""
    args = training_args(words)
    found = together(world, lambda: setup(args))
    trainer, snapshots = prepare(args, world, found)
    train_one(args, world, trainer, snapshots, found)


def on_rank(command_lines: list[list[str]]) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off unless the user turns it on
    world = init_world(training_args(command_lines[0]).device)
    for words in command_lines:
        train(world, words)
        gc.collect()  # frees modules and hooks, which refer to each other
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


# --- the command ----------------------------------------------------------------------------------------------------------


def words(args: argparse.Namespace, variant: str, data: Path) -> list[str]:
    """The command line of training.train for a variant."""
    full = f"{variant}:{args.streams}" if variant.startswith("desync") else variant
    line = ["--model", args.model, "--variant", full, "--data", data, "--out", args.out / variant, "--metrics-only"]
    line += ["--steps", args.steps, "--sequence-length", args.sequence_length, "--log-every", LOG_EVERY]
    line += ["--global-batch", args.global_batch, "--micro-batch", args.micro_batch]
    line += ["--learning-rate", args.learning_rate, "--warmup", int(WARMUP * args.steps)]
    return [*map(str, line), *args.more]


def corpus(args: argparse.Namespace) -> Path:
    """Write a token file with enough windows for all steps, unless it exists. Returns its path."""
    data: Path = args.out / "tokens.bin"
    if not data.with_suffix(".json").exists():
        count = args.steps * args.global_batch * args.sequence_length // TOKENS_PER_DOCUMENT
        write_corpus(data, TOKENIZER, 1, count + 100)
    return data


def metrics(args: argparse.Namespace, variant: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_metrics(args.out / variant / "metrics.jsonl")
    return found


def launch(args: argparse.Namespace, todo: list[list[str]]) -> str | None:
    """Train all variants in `todo` in one launch of ranks. Returns None, or why the training ended early."""
    line = [*on_ranks(args.ranks), "-m", "scripts.quality.pretrain_variants"]
    process = subprocess.Popen([*line, TRAIN, json.dumps(todo)], cwd=results.ROOT)
    try:
        code = process.wait(args.timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher then terminates its ranks
        process.wait()
        return f"stopped after {args.timeout:.0f} s (--timeout)"
    return f"the training failed with exit code {code}; see above" if code else None


def table(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]], where: dict[str, Any]) -> str:
    """A Markdown table of each variant's last loss and median speed, with a caption."""
    head = ["variant", "steps", "loss, nats a token", "step, ms", "tokens a GPU and second"]
    rows: list[list[object]] = []
    for variant, lines in found.items():
        last, steady = lines[-1], sorted(lines, key=lambda line: line["step_ms"])[len(lines) // 2]
        speed = [f"{steady['step_ms']:,.0f}", f"{steady['tokens_per_gpu_second']:,.0f}"]
        rows.append([variant, last["step"], f"{last['loss']:.4f}", *speed])
    batch = f"{args.global_batch} windows of {args.sequence_length} tokens a step, {args.streams} desync streams"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    caption = f"{args.model} on {args.ranks} ranks, {batch}, synthetic corpus; medians of step times. Made on {describe(where, device)}."
    return "\n".join([*table_lines(head, rows), "", caption, ""])


def main() -> None:
    if sys.argv[1:2] == [TRAIN]:
        on_rank(json.loads(sys.argv[2]))
        return
    args, where = parse_args(), machine()
    results.check_folder(args.out)
    folder = None if args.dry_run else results.results_folder(args)
    data = corpus(args)
    # a variant is done if the last line of its metrics is that of the last step
    todo = [v for v in args.variants if not (lines := metrics(args, v)) or lines[-1]["step"] < args.steps]
    failure = launch(args, [words(args, variant, data) for variant in todo]) if todo else None
    found = {variant: lines for variant in args.variants if (lines := metrics(args, variant))}
    if found:
        text = table(args, found, where)
        print(text)
    if found and folder:
        name = f"pretrain-{args.model.replace(':', '-')}"
        settings = {key: value for key, value in vars(args).items() if not isinstance(value, Path)}
        raw = results.write_json(name, {"machine": where, "settings": settings, "metrics": found}, folder)
        results.write_text(folder / f"{name}.md", text, raw)
        plot_losses([(variant, args.out / variant / "metrics.jsonl") for variant in found], folder / f"{name}.png")
        results.made(folder / f"{name}.png", raw)
        note(f"wrote {name}.json, .md and .png in {folder.relative_to(results.ROOT)}")
    if failure:
        raise UserError(failure)


if __name__ == "__main__":
    run(main)
