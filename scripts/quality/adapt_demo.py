"""Convert the embedded standard model to a hybrid ladder, retrain it briefly, and measure the quality before and after.

    python -m scripts.quality.adapt_demo                      # half and 5/8 of the layers: 2 ranks on a CPU, else a GPU
    python -m scripts.quality.adapt_demo --ladder-layers 4 --steps 20 --items 40 --out /tmp/adapt --dry-run

This is a small version of table 4 of the ladder paper (arXiv:2501.06589). The retraining corpus has another seed than the
original one. It shares short tasks with it, mostly sums, but none with the held-out tasks. The command first measures a few steps
and says how long it will take. If it is stopped, the same command goes on. Writes adapt.json, .md and .png into out (with --write
into docs/results). The models stay in --out and can be used with generate.py and the server.
"""

import argparse
import math
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cli import Parser, note, run
from errors import UserError
from files import check_folder
from options import whole_number
from processes import on_ranks
from scripts.corpus.tokens import TOKENS_PER_DOCUMENT, write_corpus
from scripts.lib import results
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.rows import code_digest, kept, row_file, weights_checksum
from scripts.quality.heldout import TASKS, evaluate, nats, opened, share
from training.convert import convert
from training.metrics import draw_losses, read_metrics

SEED = 77  # of the retraining corpus
SEQUENCE, BATCH = 512, 16  # tokens, windows
PROBE_STEPS, PROBE_SHARE = 3, 10  # steps, and one in so many items, from which the duration is estimated


def retrain(args: argparse.Namespace, layers: int, data: Path, out: Path, *more: object) -> None:
    """Adapt the model to `layers` ladder layers. Its metrics and the model are written to `out`. Raises UserError."""
    line: list[object] = ["--model", args.model, "--ladder-layers", layers, "--data", data, "--out", out]
    line += ["--sequence-length", SEQUENCE, "--global-batch", BATCH, "--micro-batch", args.micro_batch, "--steps", args.steps]
    line += ["--learning-rate", args.learning_rate, "--warmup", 10, "--distill", args.distill, *more]
    command = [*on_ranks(args.ranks), "-m", "training.adapt", *map(str, line)]
    if subprocess.run(command, cwd=results.ROOT).returncode:
        raise UserError(f"the retraining with {layers} ladder layers failed; see above")


def measured(args: argparse.Namespace, path: Path) -> Path:
    """The file of the evaluation of the model at `path`."""
    settings = {"weights": weights_checksum(path), "items": args.items, "torch": torch.__version__, "code": code_digest()}
    return row_file(args.out / "rows", path.parent.name, settings | {"cuda": torch.cuda.is_available()})


def row_of(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """The figures of the model at `path`, from its file if it was measured before."""
    found = kept(measured(args, path), lambda: evaluate(opened(path), args.items, args.items))
    row = {"items_per_task": args.items, "perplexity": math.exp(nats(found))}
    return row | {task: share(found, task) for task in TASKS}


def steps_left(args: argparse.Namespace, layers: int) -> int:
    lines = read_metrics(args.out / f"hybrid-{layers}" / "metrics.jsonl")
    return int(args.steps - lines[-1]["step"]) if lines else int(args.steps)


def duration(args: argparse.Namespace, data: Path, models: list[Path]) -> float:
    """About how many seconds the rest will take, judged from some steps and a part of an evaluation, which are run for it."""
    steps = {layers: steps_left(args, layers) for layers in args.ladder_layers}
    evaluations = sum(not (path / "config.json").exists() or not measured(args, path).exists() for path in models)
    seconds = 0.0
    if any(steps.values()):
        with tempfile.TemporaryDirectory() as folder:
            began, out = time.monotonic(), Path(folder)
            retrain(args, args.ladder_layers[0], data, out, "--metrics-only", "--log-every", 1, "--stop-after", PROBE_STEPS)
            times = [line["step_ms"] / 1e3 for line in read_metrics(out / "metrics.jsonl")]
        start = time.monotonic() - began - sum(times)
        seconds += sum(start + left * min(times) for left in steps.values() if left)
    if evaluations:
        began, few = time.monotonic(), max(2, args.items // PROBE_SHARE)
        evaluate(opened(args.model), few, few)
        seconds += evaluations * (time.monotonic() - began) * args.items / few
    return seconds


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
        f"{about['learning_rate']:g}. Made on {describe(about['machine'], about['device'])}."
    )
    return captioned(head, lines, caption)


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
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
    parser.add_argument("--ranks", type=whole_number(1), help="number of ranks (default: 2 on a CPU, 1 on a GPU)")
    parser.add_argument(
        "--micro-batch",
        type=whole_number(1),
        metavar="WINDOWS",
        help="windows that a rank computes at once (default: 1 on a CPU, all of its windows on a GPU)",
    )
    parser.add_argument("--items", type=whole_number(2), default=200, help="held-out documents per task (default: 200)")
    parser.add_argument("--out", type=Path, default=results.ROOT / "out" / "adapt", help="default: out/adapt")
    parser.add_argument("--dry-run", action="store_true", help="print the table and write only to --out")
    results.add_write_option(parser)
    args: argparse.Namespace = parser.parse_args()
    cuda = torch.cuda.is_available()
    args.ranks = args.ranks or (1 if cuda else 2)
    args.micro_batch = args.micro_batch or (max(1, BATCH // args.ranks) if cuda else 1)
    args.out = args.out.absolute()
    return args


def main() -> None:
    args = parse_args()
    check_folder(args.out)
    folder = None if args.dry_run else results.results_folder(args)
    tokens = args.steps * BATCH * SEQUENCE
    write_corpus(data := args.out / f"tokens-{tokens}.bin", args.model, SEED, tokens + TOKENS_PER_DOCUMENT)
    models = {"original": args.model}
    for layers in args.ladder_layers:
        models[f"{layers} ladder layers, zero-shot"] = args.out / f"zero-shot-{layers}" / "model"
        convert(args.model, models[f"{layers} ladder layers, zero-shot"], layers, force=True)
        models[f"{layers} ladder layers, retrained"] = args.out / f"hybrid-{layers}" / "model"
    note("measuring how long it will take")
    note(f"about {duration(args, data, list(models.values())) / 60:.1f} min")
    for layers in tqdm(args.ladder_layers, desc="ladder layers", unit="model"):
        out = args.out / f"hybrid-{layers}"
        resume = ["--resume"] if out.exists() else []
        retrain(args, layers, data, out, "--save-every", 50, "--log-every", 5, *resume)
    rows = [{"what": what} | row_of(args, path) for what, path in tqdm(models.items(), desc="evaluating", unit="model")]
    about = {"steps": args.steps, "learning_rate": args.learning_rate, "distill": args.distill, "machine": machine()}
    about["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    text = table(rows, about)
    print(text)
    if folder is None:
        return
    runs = {f"{layers} ladder layers": args.out / f"hybrid-{layers}" for layers in args.ladder_layers}
    losses = {label: read_metrics(run / "metrics.jsonl") for label, run in runs.items()}
    content = about | {"rows": rows, "metrics": losses}
    results.write_table("adapt", content, text, folder, lambda path: draw_losses(list(losses.items()), path))
    note(f"serve a model with make serve MODEL={next(iter(runs.values()))}/model")


if __name__ == "__main__":
    run(main)
