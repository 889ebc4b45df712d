"""Measure how much accuracy retraining gives back, against its tokens, for several numbers of converted layers, with and without
distillation.

    python -m scripts.quality.adapt_curve --workers 6 --minutes 9.5           # on GPUs, as often as needed
    python -m scripts.quality.adapt_curve --shares 0.01 --layers 4 --distill 0.5 --rates 1e-3 --seeds 1 2 --training-tokens 4e5 \\
        --sequence-length 128 --batch 4 --stories 20 --items 5 --out /tmp/curve    # a try on a CPU

For each number of layers, share of the training tokens and distillation, the learning rate with the lowest loss on held-out
stories is searched with the first seed. The further seeds have that rate. These stories have another seed than those of the
figures. Each retrained model is a row file in --out, and workers take what has no file yet. So a command that was stopped goes
on with the rest, each model from its last snapshot, and tries again what has failed. Rows of another version of the code stay, and
the table says so. A model whose loss is no longer finite has a row without results. Writes adapt-curve.json, .md and .png into out
(with --write into docs/results), also if models are missing; with --epochs 4 it is adapt-curve-4-epochs.
"""

import argparse
import itertools
import json
import math
import shutil
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cli import Parser, note, run
from errors import UserError, first_line
from figures import CYCLE, new_figure
from files import check_folder
from hf_config import read_config
from options import whole_number
from processes import die_with_parent
from scripts.corpus.tokens import write_enough
from scripts.lib import results
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned, pair
from scripts.lib.passed_on import check_passed_on
from scripts.lib.rows import by_versions, claimed, code_digest, only_command, read_row, row_file, weights_checksum, write_row
from scripts.lib.statistics import mean_error
from scripts.lib.workers import Workers, same_command, visible_gpus
from scripts.quality.heldout import TASKS, difference, evaluate, free, nats, opened, prompts_error, share, told
from scripts.quality.seeds import SAVE_EVERY
from tp import init_world
from training import adapt
from training.convert import convert, to_hybrid_ladder
from training.loop import prepare, train
from training.metrics import Diverged, read_metrics, seconds_of

DATA_SEED = 77  # of the retraining corpus, which shares short tasks with the original one, but none with the held-out ones
SEARCH_SEED = 3  # of the held-out documents on which learning rates are compared
OURS = (  # of training.adapt, or without the model that is evaluated
    "--model", "--ladder-layers", "--data", "--out", "--steps", "--warmup", "--learning-rate", "--distill", "--sequence-length",
    "--global-batch", "--seed", "--resume", "--save-every", "--log-every", "--metrics-only", "--stop-after",
)  # fmt: skip
SETTINGS = (  # that the results name
    *("layers", "shares", "epochs", "distill", "rates", "seeds", "training_tokens"),
    *("sequence_length", "batch", "stories", "items", "more"),
)


@dataclass(frozen=True)
class Cell:
    """One retrained model, or with no tokens the converted one, or with no layers the original."""

    layers: int
    tokens: int = 0
    distill: float = 0.0
    rate: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.layers}-layers-{self.tokens}-tokens-distill-{self.distill:g}-rate-{self.rate:g}-seed-{self.seed}"

    @property
    def group(self) -> tuple[int, int, float]:
        """What has one learning rate."""
        return self.layers, self.tokens, self.distill


# --- which models -----------------------------------------------------------------------------------------------------------


def searched(args: argparse.Namespace) -> list[Cell]:
    """The models that need no other: the original, the converted ones, and each learning rate with the first seed. The shortest
    first, so that the time left is soon known."""
    groups = itertools.product(sorted(tokens_of(args)), args.layers, args.distill, args.rates)
    untrained = [Cell(0), *(Cell(layers) for layers in args.layers)]
    return untrained + [Cell(layers, tokens, distill, rate, args.seeds[0]) for tokens, layers, distill, rate in groups]


def tokens_of(args: argparse.Namespace) -> list[int]:
    """The tokens of each share, in whole steps. Shares that round to the same steps are one."""
    step = args.batch * args.sequence_length
    return list(dict.fromkeys(max(1, int(part * args.training_tokens) // step) * step for part in args.shares))


checksum = cache(weights_checksum)


def file_of(args: argparse.Namespace, cell: Cell) -> Path:
    names = ("batch", "sequence_length", "epochs", "stories", "items", "more")
    settings = {name: getattr(args, name) for name in names} | {"weights": checksum(args.model), "cell": asdict(cell)}
    return row_file(args.out / "rows", cell.name, settings)


def failure_of(args: argparse.Namespace, cell: Cell) -> Path:
    """The file that tells the other workers of this command that a model could not be measured."""
    return file_of(args, cell).with_suffix(".failed")


def failures(args: argparse.Namespace) -> list[Path]:
    return sorted((args.out / "rows").glob("*.failed"))


def best_rate(args: argparse.Namespace, group: tuple[int, int, float]) -> float | None:
    """The learning rate with the lowest loss on the stories of the search, infinite for a model that diverged. None as long as a
    rate has no row."""
    rows = {rate: read_row(file_of(args, Cell(*group, rate, args.seeds[0]))) for rate in args.rates}
    found = {rate: nats(row["search"]) if row["search"] else math.inf for rate, row in rows.items() if row is not None}
    return min(found, key=lambda rate: found[rate]) if len(found) == len(rows) else None


def chosen(args: argparse.Namespace) -> list[Cell]:
    """The models with the best learning rate and each seed, of the groups whose rate is known."""
    groups = dict.fromkeys(cell.group for cell in searched(args) if cell.tokens)
    rates = {group: best_rate(args, group) for group in groups}
    return [Cell(*group, rate, seed) for group, rate in rates.items() if rate is not None for seed in args.seeds]


# --- one process, many models -----------------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    """Measure models until all have rows or have failed. After an error that leaves the GPU unusable, raises it."""
    while True:
        cells = list(dict.fromkeys([*searched(args), *chosen(args)]))
        todo = [cell for cell in cells if not file_of(args, cell).exists() and not failure_of(args, cell).exists()]
        if not todo and (len(cells) == total(args) or failures(args)):
            return
        for cell in todo:
            with claimed(file_of(args, cell)) as mine:
                if mine and not failure_of(args, cell).exists():
                    try:
                        write_row(file_of(args, cell), measure(args, cell))
                    except Exception as e:
                        traceback.print_exc()
                        write_row(failure_of(args, cell), {"model": cell.name, "reason": first_line(e)})
                        if not gpu_is_usable():
                            raise
                    break  # there may be new models, which come before those that no search waits for
        else:
            time.sleep(1)


def gpu_is_usable() -> bool:
    """Whether this process can still use its GPU, if it has one: an illegal address, for one, ends that."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def measure(args: argparse.Namespace, cell: Cell) -> dict[str, Any]:
    """Retrain and evaluate one model. Results are None if its loss is no longer finite. A retraining that was stopped goes on."""
    free()  # what a model before it that failed has left
    device = "cuda" if torch.cuda.is_available() else "cpu"  # a snapshot fits only the device's data type
    folder = args.out / "work" / f"{file_of(args, cell).stem}-{device}"
    started, row = time.monotonic(), asdict(cell) | {"code": code_digest(), "heldout": None, "search": None}
    try:
        if cell.tokens:
            retrain(args, cell, folder)
        elif cell.layers:
            convert(args.model, folder / "model", cell.layers, force=True)
    except Diverged as e:
        note(f"{cell.name}: {e}")
        path = None
    else:
        path = folder / "model" if cell.layers else args.model
    trained = time.monotonic()
    free()
    if path is not None:
        llm = opened(path)
        row["heldout"] = evaluate(llm, args.stories, args.items)
        if cell.tokens and cell.seed == args.seeds[0]:
            row["search"] = {"stories": told(llm, args.stories, SEARCH_SEED)}
        if not all(math.isfinite(nats(row[name])) for name in ("heldout", "search") if row[name]):  # of the last step's update
            row["heldout"] = row["search"] = None
    row["training_seconds"] = seconds_of(read_metrics(folder / "metrics.jsonl")) if cell.tokens else trained - started
    row["evaluation_seconds"] = time.monotonic() - trained
    shutil.rmtree(folder, ignore_errors=True)
    return row


def retrain(args: argparse.Namespace, cell: Cell, out: Path) -> None:
    steps = args.epochs * cell.tokens // (args.batch * args.sequence_length)
    line: list[object] = ["--model", args.model, "--ladder-layers", cell.layers, "--out", out]
    line += ["--data", data_of(args, cell.tokens)]
    line += ["--steps", steps, "--learning-rate", cell.rate, "--distill", cell.distill]
    line += ["--sequence-length", args.sequence_length, "--global-batch", args.batch, "--micro-batch", args.batch]
    line += ["--seed", cell.seed, "--resume", "--save-every", SAVE_EVERY, "--log-every", max(1, steps // 20), *args.more]
    settings = adapt.parse_args([str(word) for word in line])
    world = init_world(settings.device)
    setup = adapt.setup(settings, world)
    trainer, snapshots = prepare(settings, world, setup)
    try:
        train(settings, world, trainer, snapshots, setup)
    finally:
        snapshots.wait()  # nothing else may be written into a folder that is removed
        trainer.executor.close()  # which a training that failed has not done; it would keep the model in memory


# --- all processes ----------------------------------------------------------------------------------------------------------


def data_of(args: argparse.Namespace, tokens: int) -> Path:
    path: Path = args.out / f"{tokens}-tokens.bin"
    return path


def total(args: argparse.Namespace) -> int:
    """How many models there are in all."""
    cells = searched(args)
    return len(cells) + len({cell.group for cell in cells if cell.tokens}) * (len(args.seeds) - 1)


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    cells = dict.fromkeys([*searched(args), *chosen(args)])
    return [row for cell in cells if (row := read_row(file_of(args, cell))) is not None]


def seconds_left(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> float | None:
    """Until all models have rows, from the seconds of the rows there are: so many a model, and so many a token. None before the
    first retrained model with results."""
    trained = [row for row in rows if row["tokens"] and row["search"]]
    if not trained:
        return None
    wanted = [(cell.tokens, 1) for cell in searched(args)]
    wanted += [(tokens, len(args.seeds) - 1) for _, tokens, _ in dict.fromkeys(c.group for c in searched(args) if c.tokens)]
    tokens = sum(each * count for each, count in wanted) - sum(row["tokens"] for row in rows)
    of_token = sum(row["training_seconds"] for row in trained) / sum(row["tokens"] for row in trained)
    of_model = sum(row["evaluation_seconds"] for row in trained) / len(trained)
    return float((tokens * of_token + (total(args) - len(rows)) * of_model) / args.workers)


def command(args: argparse.Namespace, started: float) -> list[str]:
    """Run the workers until all models have rows or have failed, or the time is over. Returns what to say of what failed."""
    workers, said, deadline, failed = Workers(visible_gpus(), count=args.workers), 0.0, started + args.minutes * 60, list[str]()
    for path in failures(args):  # of the command before, perhaps for want of memory or time
        path.unlink()
    if len(rows_of(args)) == total(args):
        return failed
    words = same_command("scripts.quality.adapt_curve", "--work")
    for i in range(args.workers):
        workers.start(f"worker-{i}", words, args.out / f"worker-{i}.log")
    while workers.running:
        if time.monotonic() > deadline:
            note("the time is over")
            workers.stop()
        for name, code in workers.ended().items():
            if code:
                failed.append(f"; {name} failed with exit code {code}, see {args.out / name}.log")
                note(failed[-1].removeprefix("; "))
                if len(failed) <= args.workers:  # else something ends each of them
                    workers.start(name, words, args.out / f"{name}.log")
        if time.monotonic() > said + 20:
            said, rows = time.monotonic(), rows_of(args)
            left = seconds_left(args, rows)
            when = "no estimate before the first" if left is None else f"about {left / 60:.1f} min left"
            note(f"{len(rows)} of {total(args)} models; {when}")
        time.sleep(0.5)
    return failed + [f"; {row['model']} failed ({row['reason']})" for row in map(read_row, failures(args)) if row]


# --- results ----------------------------------------------------------------------------------------------------------------


def brief(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the sums of its stories, and a character for each answer: it is kept with the results."""
    found = dict(row)
    for name in ("heldout", "search"):
        if row[name] is not None:
            totals = [round(sum(of), 4) for of in zip(*row[name]["stories"], strict=True)]
            answers = {task: "".join(map(str, given)) for task, given in row[name].get("answers", {}).items()}
            found[name] = {"stories": [totals]} | ({"answers": answers} if answers else {})
    return found


def summary(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry for the original, for each converted model, and for each group: means over seeds with their standard errors."""
    groups: dict[tuple[int, int, float], list[dict[str, Any]]] = {}
    for cell in [*(one for one in searched(args) if not one.tokens), *chosen(args)]:
        if (row := read_row(file_of(args, cell))) is not None and row["heldout"]:
            groups.setdefault(cell.group, []).append(row)
    original = groups.get((0, 0, 0.0), [None])[0]
    found = []
    for (layers, tokens, distill), rows in sorted(groups.items()):
        entry: dict[str, Any] = {"layers": layers, "tokens": tokens, "distill": distill, "rate": rows[0]["rate"]}
        models = [row["heldout"] for row in rows]
        entry |= {"seeds": len(rows), "perplexity": mean_error([math.exp(nats(one)) for one in models])}
        for task in (*TASKS, "mean"):
            over_prompts = prompts_error([one["answers"] for one in models], task)
            entry[task] = (*mean_error([share(one, task) for one in models]), over_prompts)
        if original is not None and layers:
            first = original["heldout"]
            lost = [difference(one["answers"], first["answers"]) for one in models]
            entry["difference"] = entry["mean"][0] - share(first, "mean"), prompts_error(lost, "mean")
            entry["perplexity_change"] = mean_error([math.exp(nats(one) - nats(first)) - 1 for one in models])
            if (layers, 0, 0.0) in groups:
                converted = share(groups[layers, 0, 0.0][0]["heldout"], "mean")
                gap = share(first, "mean") - converted
                mean, error, _ = entry["mean"]
                entry["recovered"] = ((mean - converted) / gap, error / abs(gap)) if gap else (math.nan, math.nan)
        found.append(entry)
    return found


def table(entries: list[dict[str, Any]], args: argparse.Namespace, where: dict[str, Any]) -> str:
    head = ["ladder layers", "tokens, M", "distillation", "learning rate", "seeds", "perplexity", "change, %", *TASKS, "mean"]
    head += ["against the original, points", "recovered, %"]
    lines = []
    for entry in entries:
        trained = bool(entry["tokens"])
        edge = " (edge)" if entry["rate"] in (min(args.rates), max(args.rates)) else ""
        cells = [str(entry["layers"] or "original"), f"{entry['tokens'] / 1e6:.3g}" if entry["layers"] else ""]
        cells += [f"{entry['distill']:.0%}", f"{entry['rate']:g}" + edge, str(entry["seeds"])] if trained else [""] * 3
        cells.append(pair(entry["perplexity"][0], entry["perplexity"][1], "{:.4f}"))
        change = entry.get("perplexity_change")
        cells.append(pair(100 * change[0], 100 * change[1], "{:+.2f}") if change else "")
        for task in (*TASKS, "mean"):
            mean, error, over_prompts = (100 * x for x in entry[task])
            cells.append(f"{pair(mean, error)} (± {over_prompts:.1f})")
        lost = entry.get("difference")
        cells.append(f"{100 * lost[0]:+.1f} (± {100 * lost[1]:.1f})" if lost else "")
        back = entry.get("recovered")
        lines.append([*cells, pair(100 * back[0], 100 * back[1], "{:.0f}") if back else ""])
    rows = rows_of(args)
    diverged = [Cell(*(row[field.name] for field in fields(Cell))).name for row in rows if not row["heldout"]]
    epochs = f", {args.epochs} passes over the tokens" if args.epochs > 1 else ""
    missing = total(args) - len(rows)
    not_ready = f"Not ready: {missing} of {total(args)} models. " if missing else ""
    infinite = f"The loss did not stay finite: {', '.join(diverged)}. " if diverged else ""
    caption = (
        f"Means over seeds ± their standard error; in brackets the error over prompts. All seeds start from the same model and vary "
        f"only the windows. Recovered: of the mean exact match that conversion takes; its error is the mean's, divided by what "
        f"conversion takes, which is the same for all seeds. Learning rates searched among "
        f"{', '.join(f'{rate:g}' for rate in args.rates)} on other held-out stories; edge: the lowest or highest of them, beyond which "
        f"another may be better. {infinite}{not_ready}"
        f"Steps of {args.batch} windows of {args.sequence_length} tokens{epochs}. Perplexity over {args.stories} held-out stories; exact match in "
        f"%, {args.items} held-out items a task, greedy. The original was trained on {args.training_tokens / 1e6:,.0f}M tokens. Made on "
        f"{describe(where)}{by_versions({row['code'] for row in rows})}."
    )
    return captioned(head, lines, caption)


def draw(entries: list[dict[str, Any]], epochs: int, path: Path) -> None:
    """The mean exact match, how much of the original's is missing, and the perplexity against the tokens, with errors over seeds: a
    line for each number of layers and distillation. Without the perplexity of converted models, beside which all others would look
    the same. epochs: passes over these tokens."""
    figure = new_figure(13, 3.6)
    match, missing, perplexity = figure.subplots(1, 3)
    missing.set_yscale("symlog", linthresh=1)  # a model may be better than the original
    original = next((entry for entry in entries if not entry["layers"]), None)
    layers = sorted({entry["layers"] for entry in entries} - {0})
    shares = sorted({entry["distill"] for entry in entries if entry["tokens"]})
    for (i, count), (k, distill) in itertools.product(enumerate(layers), enumerate(shares)):
        look: dict[str, Any] = {"color": CYCLE[i % len(CYCLE)], "linestyle": ("--", "-", ":", "-.")[k % 4]}
        retrained = [e for e in entries if e["layers"] == count and e["tokens"] and e["distill"] == distill]
        mine = [e for e in entries if e["layers"] == count and not e["tokens"]] + retrained
        label = f"{count} layers, {distill:.0%} distillation"
        draw_line(match, mine, [100 * e["mean"][0] for e in mine], [100 * e["mean"][1] for e in mine], look | {"label": label})
        draw_line(perplexity, retrained, [e["perplexity"][0] for e in retrained], [e["perplexity"][1] for e in retrained], look)
        if original is not None:
            lost = [100 * (original["mean"][0] - e["mean"][0]) for e in mine]
            draw_line(missing, mine, lost, [100 * e["mean"][1] for e in mine], look)
    if original is not None:
        match.axhline(100 * original["mean"][0], color="black", linewidth=0.8, label="original")
        missing.axhline(0, color="black", linewidth=0.8)
        perplexity.axhline(original["perplexity"][0], color="black", linewidth=0.8)
    for axes in (match, missing, perplexity):
        axes.set_xlabel("retraining tokens, M" if epochs == 1 else f"distinct retraining tokens, M, {epochs} passes")
    match.set(ylabel="exact match, %, mean of tasks")
    missing.set(ylabel="exact match missing, points")
    missing.set_yticks(ticks := [0, 1, 2, 5, 10, 20, 50, 100], labels=[str(tick) for tick in ticks])
    perplexity.set(ylabel="held-out perplexity, retrained")
    figure.legend(loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=150)


def draw_line(
    axes: Any, entries: list[dict[str, Any]], values: Sequence[float], errors: Sequence[float], look: dict[str, Any]
) -> None:
    """One value of each entry against its tokens. An error that is not known, as of one seed, is not drawn."""
    tokens = [entry["tokens"] / 1e6 for entry in entries]
    known = [0.0 if math.isnan(error) else error for error in errors]
    axes.errorbar(tokens, values, known, marker="o", markersize=3, capsize=3, **look)
    axes.grid(alpha=0.3)


# --- the command ------------------------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    embedded = results.ROOT / "models" / "tiny-standard"
    parser.add_argument("--model", type=Path, default=embedded, help="a standard checkpoint (default: models/tiny-standard)")
    parser.add_argument("--layers", type=whole_number(1), nargs="+", default=[4, 5, 8], help="ladder layers (default: 4 5 8)")
    shares = "shares of the training tokens (default: 0.01 0.03 0.1)"
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.03, 0.1], help=shares)
    parser.add_argument("--epochs", type=whole_number(1), default=1, help="passes over these tokens (default: 1)")
    parser.add_argument(
        "--distill", type=float, nargs="+", default=[0.0, 0.5], help="weights of the distillation (default: 0 0.5)"
    )
    rates = [5e-4, 1e-3, 2e-3]
    parser.add_argument("--rates", type=float, nargs="+", default=rates, help="learning rates (default: 5e-4 1e-3 2e-3)")
    parser.add_argument("--seeds", type=whole_number(1), nargs="+", default=[1, 2, 3], help="of the windows (default: 1 2 3)")
    parser.add_argument("--training-tokens", type=float, help="of the model (default: as its training.json says)")
    parser.add_argument("--sequence-length", type=whole_number(1), default=512, metavar="TOKENS", help="default: 512")
    parser.add_argument("--batch", type=whole_number(1), default=32, metavar="WINDOWS", help="windows a step (default: 32)")
    parser.add_argument("--stories", type=whole_number(2), default=1000, help="held-out stories (default: 1000)")
    parser.add_argument("--items", type=whole_number(2), default=1000, help="held-out prompts of a task (default: 1000)")
    parser.add_argument("--workers", type=whole_number(1), help="processes, over all GPUs (default: one on each)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop so long after the start and show what is ready; the same command goes on from the last snapshots (default: no limit)",
    )
    parser.add_argument("--out", type=Path, default=results.OUT / "adapt-curve", help="default: out/adapt-curve")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    results.add_write_option(parser)
    parser.add_argument("more", nargs="*", help="after --: further options of python -m training.adapt, such as --compile")
    args = parser.parse_args()
    args.out, args.workers = args.out.absolute(), args.workers or max(1, torch.cuda.device_count())
    check_passed_on(args.more, OURS)
    for name in ("layers", "shares", "distill", "rates", "seeds"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    if not all(part > 0 for part in args.shares) or not all(0 <= part <= 1 for part in args.distill):
        raise UserError("--shares must be above 0, and --distill from 0 to 1")
    config = read_config(args.model / "config.json")
    for layers in args.layers:
        to_hybrid_ladder(config, layers)
    record = args.model / "training.json"
    if args.training_tokens is None:
        if not record.exists():
            raise UserError(f"{record} does not exist; say how many tokens the model was trained on with --training-tokens")
        args.training_tokens = json.loads(record.read_text())["tokens_in_corpus"]
    return args


def main() -> None:
    started, args = time.monotonic(), parse_args()
    if args.work:
        die_with_parent()
        work(args)
        return
    check_folder(args.out / "rows")
    with only_command(args.out):
        measure_all(args, started)


def measure_all(args: argparse.Namespace, started: float) -> None:
    """Measure what is missing, and write the results. Raises UserError."""
    folder, where = results.results_folder(args), machine()
    for tokens in tokens_of(args):
        write_enough(data_of(args, tokens), args.model, DATA_SEED, tokens + 1)  # windows overlap by one token
    failed = command(args, started)
    entries = summary(args)
    if entries:
        text = table(entries, args, where)
        print(text)
        settings = {name: getattr(args, name) for name in SETTINGS}
        content = {"machine": where, "settings": settings, "summary": entries, "rows": [brief(row) for row in rows_of(args)]}
        name = "adapt-curve" if args.epochs == 1 else f"adapt-curve-{args.epochs}-epochs"
        results.write_table(name, content, text, folder, lambda path: draw(entries, args.epochs, path))
    if (ready := len(rows_of(args))) < total(args):
        raise UserError(f"{ready} of {total(args)} models are ready; the same command goes on{''.join(failed)}")


if __name__ == "__main__":
    run(main)
