"""Measure the embedded models' quality: held-out perplexity, and exact match by task, for each variant, tp and --comm.

    python -m scripts.quality.accuracy                                          # all models/tiny-* at tp 1, 2 and 4, exact all-reduces
    python -m scripts.quality.accuracy --comm gloo int8 int6 int4 fp8 --tp 2 4  # the effect of quantized all-reduces
    python -m scripts.quality.accuracy --tp 1 2 --comm gloo int4:64 --items 50 --models models/tiny-hybrid --dry-run

This is a small version of tables 3 and 5 of the ladder paper, and of tables 2 and 6 of the Flash Communication paper. Held-out
documents share no operands or lists with the training corpus, and no cast with its stories and questions. Writes accuracy.json
and accuracy.md into out (with --write into docs/results), or accuracy-quantized.json and .md if --comm names communicators other
than gloo. Ranks are started once for each number of ranks and communicator. Each evaluation is kept in out/accuracy.jsonl as soon
as it is done, so a command that was stopped goes on with the others. One rank sends nothing, so tp 1 is evaluated only with gloo.
"""

import argparse
import subprocess
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from cli import Parser, run
from comms.quantize import WIDTHS
from comms.registry import choose
from config import TRAINABLE
from engine import LLM
from errors import UserError
from ranks.processes import on_ranks
from scripts.lib.experiment import Experiment
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.results import OUT, ROOT, add_write_option, results_folder, write_table
from scripts.lib.rows import code_digest, weights_checksum
from scripts.quality.heldout import TASKS, matches, perplexity
from text.tokenizer_files import load_tokenizer
from tp import World, init_world

EXACT = "gloo"  # the exact communicator, with which the others are compared


def evaluate(path: Path, world: World, items: int) -> dict[str, Any]:
    """One row of the table: the checkpoint at `path` on the ranks of `world`, in fp32. Collective."""
    config = model_config(str(path), None, world.world_size)
    model = load_model(str(path), config, world, torch.float32)
    tokenizer = load_tokenizer(path)
    llm = LLM(model, tokenizer, world)
    row: dict[str, Any] = {
        "model": path.name,
        "variant": config.description,
        "tp": world.world_size,
        "comm": world.comm.name if world.world_size > 1 else EXACT,
        "items_per_task": items,
        "perplexity": perplexity(llm, tokenizer, items),
    }
    return row | {task: sum(matches(llm, tokenizer, task, items)) / items for task in TASKS}


def setting_of(path: Path, ranks: int, comm: str, args: argparse.Namespace) -> dict[str, Any]:
    """The settings of an evaluation: all that its figures depend on, apart from the code."""
    return {"model": path.name, "weights": weights_checksum(path), "tp": ranks, "comm": comm, "items": args.items}


def evaluations(args: argparse.Namespace) -> Experiment:
    """The file of the evaluations that this version of the code has done."""
    return Experiment(args.rows, {"torch": torch.__version__, "code": code_digest()})


def work(args: argparse.Namespace) -> None:
    """What one rank does: evaluate every model. Rank 0 writes each row as soon as it is measured."""
    world = init_world("cpu", args.comm[0])
    what = f"tp {world.world_size}, {args.comm[0]}"
    for path in tqdm(args.models, desc=what, unit="model", disable=world.rank > 0):
        row = evaluate(path, world, args.items)
        if world.rank == 0:
            evaluations(args).add(setting_of(path, world.world_size, args.comm[0], args), {"found": row})


def launch(ranks: int, comm: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all models. Models that have no row yet are evaluated on so many ranks."""
    settings, done = {path: setting_of(path, ranks, comm, args) for path in args.models}, evaluations(args)
    todo = [path for path, setting in settings.items() if done.row(setting) is None]
    if todo:
        command = [*on_ranks(ranks), "-m", "scripts.quality.accuracy", "--worker", "--rows", str(args.rows)]
        command += ["--items", str(args.items), "--comm", comm, "--models", *map(str, todo)]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise UserError(f"the evaluation on {ranks} ranks failed; see above. The same command goes on")
        done = evaluations(args)  # those of the ranks, too
    return [row["found"] for setting in settings.values() if (row := done.row(setting))]


def table(rows: list[dict[str, Any]], where: dict[str, Any]) -> str:
    """A Markdown table for exact all-reduces, one line per model: perplexity at each tp, and exact match by task.

    Exact match is a range if it differs between tps.
    """
    rows = [row for row in rows if row["comm"] == EXACT]
    sizes = sorted({row["tp"] for row in rows})
    head = ["model", "variant", *(f"perplexity, tp {n}" for n in sizes), *TASKS, "mean"]
    lines: list[list[str]] = []
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = {row["tp"]: row for row in rows if row["model"] == name}
        cells = [f"`{name}`", mine[sizes[0]]["variant"], *(f"{mine[n]['perplexity']:.4f}" for n in sizes)]
        for task in (*TASKS, "mean"):
            values = [_task(mine[n], task) * 100 for n in sizes]
            same = max(values) - min(values) < 0.05
            cells.append(f"{values[0]:.1f}" if same else f"{min(values):.1f} to {max(values):.1f}")
        lines.append(cells)
    caption = (
        f"Exact match in %, {rows[0]['items_per_task']} held-out items a task, greedy, fp32; a single figure is the same at "
        f"tp {', '.join(map(str, sizes))}. Made on {describe(where, 'cpu')}."
    )
    return captioned(head, lines, caption)


def quantized_table(rows: list[dict[str, Any]], where: dict[str, Any]) -> str:
    """A Markdown table for quantized all-reduces: the change of perplexity and of mean exact match, by model, algorithm and tp."""
    exact = {(row["model"], row["tp"]): row for row in rows if row["comm"] == EXACT}
    pairs = list(dict.fromkeys((row["comm"], row["tp"]) for row in rows if row["comm"] != EXACT))
    head = ["model", *(f"{comm}, tp {tp}" for comm, tp in pairs)]
    lines: list[list[str]] = []
    for name in dict.fromkeys(row["model"] for row in rows):
        cells = [f"`{name}`"]
        for pair in pairs:
            row = next(row for row in rows if (row["model"], row["comm"], row["tp"]) == (name, *pair))
            same = exact[name, row["tp"]]
            change = row["perplexity"] / same["perplexity"] - 1
            cells.append(f"{change:+.3%}; {(_task(row, 'mean') - _task(same, 'mean')) * 100:+.1f}")
        lines.append(cells)
    caption = (
        f"Change against exact fp32 sums: of perplexity in %; of the mean exact match in points, {rows[0]['items_per_task']} "
        f"held-out items a task, greedy, fp32. Groups of 128 values unless named. Made on {describe(where, 'cpu')}."
    )
    return captioned(head, lines, caption)


def _task(row: dict[str, Any], task: str) -> float:
    return sum(row[t] for t in TASKS) / len(TASKS) if task == "mean" else row[task]


def main() -> None:
    found = [ROOT / "models" / f"tiny-{name}" for name in TRAINABLE]
    parser = Parser(description=__doc__)
    parser.add_argument("--models", type=Path, nargs="+", default=found, help="checkpoints (default: models/tiny-*)")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks (default: 1 2 4)")
    parser.add_argument("--items", type=int, default=200, help="held-out documents per task (default: 200)")
    parser.add_argument(
        "--comm",
        nargs="+",
        default=[EXACT],
        metavar="NAME",
        help=f"all-reduce algorithms: {EXACT}, {', '.join(WIDTHS)} (default: {EXACT})",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the tables and write nothing")
    add_write_option(parser)
    parser.add_argument(
        "--rows", type=Path, default=OUT / "accuracy.jsonl", help="file of the evaluations (default: out/accuracy.jsonl)"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rows, args.models = args.rows.absolute(), [path.absolute() for path in args.models]
    if args.worker:
        work(args)
        return
    folder = None if args.dry_run else results_folder(args)
    for path in args.models:
        model_config(str(path), None, 1)
    for comm in args.comm:
        choose("cpu", comm)  # refuse a bad name now instead of hours later
    if args.comm != [EXACT] and max(args.tp) == 1:
        raise UserError("one rank does no all-reduce, so --comm changes nothing; give --tp 2")
    if EXACT not in args.comm:
        raise UserError(f"--comm {' '.join(args.comm)} lacks {EXACT}, which the others are compared with; add it")
    runs = [(ranks, comm) for ranks in args.tp for comm in args.comm if ranks > 1 or comm == EXACT]
    rows = [row for run in tqdm(runs, desc="tp and comm", unit="run") for row in launch(*run, args)]
    where = machine()
    quantized = args.comm != [EXACT]
    name, text = ("accuracy-quantized", quantized_table(rows, where)) if quantized else ("accuracy", table(rows, where))
    print(text)
    if folder:
        write_table(name, {"machine": where, "rows": rows}, text, folder)


if __name__ == "__main__":
    run(main)
