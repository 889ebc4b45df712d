"""Convert the embedded standard model to a hybrid ladder, retrain it briefly, and measure the quality before and after.

    python -m scripts.quality.adapt_demo                      # half and 5/8 of the layers, 2 ranks
    python -m scripts.quality.adapt_demo --ladder-layers 4 --steps 20 --items 40 --out /tmp/adapt --dry-run

This is a small version of table 4 of the ladder paper (arXiv:2501.06589). The retraining corpus shares no document with the
original training corpus or the held-out tasks. Writes adapt.json, .md and .png into out (with --write into docs/results). The
models stay in --out and can be used with generate.py and the server.
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cli import Parser, note, run
from comm import Local
from errors import UserError
from processes import on_ranks
from scripts.corpus.tokens import TOKENS_PER_DOCUMENT, write_corpus
from scripts.lib import results
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import table_lines
from scripts.quality.accuracy import evaluate
from scripts.quality.embedded import TASKS
from tp import World
from training.convert import convert
from training.metrics import plot_losses

SEED = 77  # of the retraining corpus
SEQUENCE, BATCH = 512, 16  # tokens, windows


def prepare_tokens(out: Path, model: Path, tokens: int) -> Path:
    """Write the token file for the retraining and return its path."""
    path = out / "tokens.bin"
    write_corpus(path, model, SEED, tokens // TOKENS_PER_DOCUMENT + 1)
    return path


def retrain(args: argparse.Namespace, layers: int, data: Path) -> Path:
    """Adapt the model to `layers` ladder layers. Returns the folder with its metrics and model. Raises UserError."""
    out = args.out / f"hybrid-{layers}"
    command = [*on_ranks(args.ranks)]
    command += ["-m", "training.adapt", "--model", str(args.model), "--ladder-layers", str(layers), "--data", str(data)]
    command += [
        "--sequence-length",
        str(SEQUENCE),
        "--global-batch",
        str(BATCH),
        "--micro-batch",
        "1",
        "--steps",
        str(args.steps),
    ]
    command += ["--learning-rate", str(args.learning_rate), "--warmup", "10", "--distill", str(args.distill), "--out", str(out)]
    command += ["--save-every", "50", "--log-every", "5", *(["--resume"] if out.exists() else [])]
    if subprocess.run(command, cwd=results.ROOT).returncode:
        raise UserError(f"the retraining with {layers} ladder layers failed; see above")
    return out


def table(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    head = ["model", "perplexity", *TASKS, "mean"]
    lines: list[list[str]] = []
    for row in rows:
        scores = [row[task] * 100 for task in TASKS]
        mean = sum(scores) / len(scores)
        lines.append([row["what"], f"{row['perplexity']:.4f}", *(f"{s:.1f}" for s in (*scores, mean))])
    caption = (
        f"Exact match in %, {rows[0]['items_per_task']} held-out items a task. Retrained for {about['steps']} steps of "
        f"{BATCH} x {SEQUENCE} tokens, {about['distill']:.0%} of the loss by distillation, peak learning rate "
        f"{about['learning_rate']:g}. Made on {describe(about['machine'], 'cpu')}."
    )
    return "\n".join([*table_lines(head, lines), "", caption, ""])


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=results.ROOT / "models" / "tiny-standard", help="default: models/tiny-standard"
    )
    parser.add_argument(
        "--ladder-layers",
        type=int,
        nargs="+",
        default=[4, 5],
        metavar="K",
        help="how many of its 8 layers become ladder layers (default: 4 5)",
    )
    parser.add_argument("--steps", type=int, default=120, help=f"training steps of {BATCH} x {SEQUENCE} tokens (default: 120)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak of the learning rate (default: 1e-3)")
    parser.add_argument("--distill", type=float, default=0.5, help="weight of the distillation loss (default: 0.5)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--items", type=int, default=200, help="held-out documents per task (default: 200)")
    parser.add_argument("--out", type=Path, default=results.ROOT / "out" / "adapt", help="default: out/adapt")
    parser.add_argument("--dry-run", action="store_true", help="print the table and write only to --out")
    results.add_write_option(parser)
    args: argparse.Namespace = parser.parse_args()
    return args


def main() -> None:
    args = parse_args()
    results.check_folder(args.out)
    folder = None if args.dry_run else results.results_folder(args)
    data = prepare_tokens(args.out, args.model, args.steps * BATCH * SEQUENCE)
    models = {"original": args.model}
    for layers in tqdm(args.ladder_layers, desc="ladder layers", unit="model"):
        convert(args.model, args.out / f"zero-shot-{layers}", layers, force=True)
        models[f"{layers} ladder layers, zero-shot"] = args.out / f"zero-shot-{layers}"
        models[f"{layers} ladder layers, retrained"] = retrain(args, layers, data) / "model"
    alone = World(0, 1, torch.device("cpu"), Local())
    rows = [
        {"what": what} | evaluate(path, alone, args.items)
        for what, path in tqdm(models.items(), desc="evaluating", unit="model")
    ]
    about = {"steps": args.steps, "learning_rate": args.learning_rate, "distill": args.distill, "machine": machine()}
    text = table(rows, about)
    print(text)
    if folder is None:
        return
    runs = [(f"{layers} ladder layers", args.out / f"hybrid-{layers}" / "metrics.jsonl") for layers in args.ladder_layers]
    losses = {label: [json.loads(line) for line in path.read_text().splitlines()] for label, path in runs}
    raw = results.write_json("adapt", about | {"rows": rows, "metrics": losses}, folder)
    results.write_text(folder / "adapt.md", text, raw)
    plot_losses(runs, folder / "adapt.png")
    results.made(folder / "adapt.png", raw)
    note(
        f"wrote adapt.json, .md and .png in {folder.relative_to(results.ROOT)}; serve one with make serve MODEL={runs[0][1].parent}/model"
    )


if __name__ == "__main__":
    run(main)
