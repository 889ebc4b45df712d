"""Train every embedded variant with several seeds, and compare the variants with the errors of seeds and of prompts.

    python -m scripts.quality.seeds --processes 18 --minutes 9 -- --compile --cuda-graph   # on GPUs: 18 models at a time
    python -m scripts.quality.seeds --seeds 1 2 --variants standard ladder --tokens 2e5 --batch 4 --stories 20 --items 5   # a try

All models have the corpus (its seed is 1), the tokens and the recipe of `scripts.corpus.train_tiny`, which gets the options after
--. A seed is that of the initial weights and of the order of windows. Each model is evaluated as soon as it is trained: one file
of each is kept in --out, with the log-likelihood of each held-out story and whether each prompt was answered exactly. So a command
that was stopped goes on with the models that lack their file, each from its last snapshot. With other --stories or --items, or
after a change of the code, kept models are evaluated again, and not trained. Processes are spread over the GPUs.
Writes accuracy-seeds.json and .md into out (with --write into docs/results). --install then makes the models of the median
seeds the embedded ones.
"""

import argparse
import json
import math
import shutil
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from checkpoints.presets import model_config
from cli import Parser, note, run
from config import TRAINABLE
from errors import UserError
from files import check_folder
from options import whole_number
from ranks.processes import die_with_parent
from scripts.corpus import train_tiny
from scripts.corpus.tokens import write_corpus
from scripts.lib import results
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned, pair
from scripts.lib.passed_on import check_passed_on
from scripts.lib.rows import by_versions, code_digest, only_command, read_row, weights_checksum, write_row
from scripts.lib.statistics import holm, mean_error, paired_test
from scripts.lib.workers import Workers, same_command, time_left, visible_gpus
from scripts.quality.heldout import TASKS, difference, evaluate, free, nats, opened, prompts_error, share, stories_error
from training.metrics import read_metrics
from training.token_file import open_tokens

CORPUS_SEED = 1
MODELS = results.ROOT / "models"
BASE = "standard"  # the variant with which the others are compared
# of each seed the slowest first, so that none is left at the end: a model stays on its GPU
ORDER = ("desync-4x", "desync-2x", "standard", "ladder", "hybrid", "parallel")
EVALUATION = 25.0  # seconds, with the start of a process; the guess before the first model is evaluated
SAVE_EVERY = 100  # steps, which is what a kill loses at most
OURS = ("--variant", "--seed", "--resume", "--tokens", "--batch", "--data", "--out", "--save-every")  # of train_tiny
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Run:
    """One model. Seed 0 is the embedded model, which is only evaluated."""

    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.seed or 'embedded'}"


# --- one model --------------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, one: Run) -> None:
    """Train one model, unless it is. Raises UserError."""
    folder: Path = args.out / one.name
    note_file = folder / "settings.json"
    known = readable_row(note_file) or {"codes": [], "done": False}
    if known["done"]:
        if model_of(args, one).exists():
            return
        known = {"codes": [], "done": False}  # somebody has removed it
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    known |= {"training_settings": training_settings(args, one), "codes": sorted({*known["codes"], code_digest()})}
    write_row(note_file, known)
    for name in TOKENIZER:
        shutil.copy(MODELS / "tiny-standard" / name, folder / "tokenizer")
    line = ["--variant", one.variant, "--seed", one.seed, "--resume", "--tokens", args.tokens, "--batch", args.batch]
    line += ["--save-every", SAVE_EVERY]
    train_tiny.main([str(word) for word in [*line, "--data", args.data, "--out", folder, *args.more]])
    record = model_of(args, one) / "training.json"  # its seconds are not those of a model alone
    record.write_text(json.dumps(json.loads(record.read_text()) | {"models_at_a_time": args.processes}) + "\n")
    write_row(note_file, known | {"done": True})
    shutil.rmtree(folder / f"run-{one.variant}" / "snapshots", ignore_errors=True)


def work(args: argparse.Namespace, one: Run) -> None:
    """Train and evaluate one model, and write its file."""
    if one.seed:
        train(args, one)
    path, started = model_of(args, one), time.monotonic()
    free()
    record = json.loads((path / "training.json").read_text())
    record = {key: record[key] for key in ("settings", "tokens_in_corpus", "seconds", "machine", "torch")}
    record["codes"] = (readable_row(args.out / one.name / "settings.json") or {"codes": []})["codes"]
    found = {"variant": one.variant, "seed": one.seed, **asked(args, one), "training": record, "machine": machine()}
    found["dtype"] = "bfloat16" if torch.cuda.is_available() else "float32"
    found |= evaluate(opened(path), args.stories, args.items)
    found["evaluation_seconds"] = round(time.monotonic() - started, 1)
    write_row(file_of(args, one), found)


def model_of(args: argparse.Namespace, one: Run) -> Path:
    return (args.out / one.name if one.seed else MODELS) / f"tiny-{one.variant}"


@cache
def fingerprint(data: Path) -> str:
    """Of a token file. Raises UserError."""
    return open_tokens(data, train_tiny.tiny_config(BASE).vocab_size).fingerprint


def training_settings(args: argparse.Namespace, one: Run) -> dict[str, Any]:
    """What all trained models must share. An embedded model has a checksum instead."""
    if not one.seed:
        return {"weights": weights_checksum(model_of(args, one))}
    return {name: getattr(args, name) for name in ("tokens", "batch", "more")} | {"data": fingerprint(args.data)}


def asked(args: argparse.Namespace, one: Run) -> dict[str, Any]:
    """The settings of a row. A model is evaluated again with other settings of evaluation, of which the code is one."""
    evaluation = {"stories": args.stories, "items": args.items, "code": code_digest()}
    return {"training_settings": training_settings(args, one), "evaluation_settings": evaluation}


def file_of(args: argparse.Namespace, one: Run) -> Path:
    path: Path = args.out / f"{one.name}.json"
    return path


def readable_row(path: Path) -> dict[str, Any] | None:
    """The row in `path`, None if there is none that can be read: a part of a row counts as none."""
    try:
        return read_row(path)
    except (OSError, ValueError):
        return None


def row_of(args: argparse.Namespace, one: Run) -> dict[str, Any] | None:
    """What was measured of one model, None if nothing with these settings and this code."""
    row = readable_row(file_of(args, one))
    return row if row is not None and row.items() >= asked(args, one).items() else None


def check_training(args: argparse.Namespace, one: Run) -> None:
    """Raise UserError if a model in --out was trained with other settings."""
    for path in (args.out / one.name / "settings.json", file_of(args, one)):
        row, now = readable_row(path), training_settings(args, one)
        if row is not None and row.get("training_settings") != now:
            raise UserError(
                f"{path} is of other settings of training ({row.get('training_settings')}, now {now}); name another --out"
            )


# --- all models -------------------------------------------------------------------------------------------------------------


class Crew:
    """Trains several models at a time, each in a process of its own."""

    def __init__(self, args: argparse.Namespace, todo: list[Run], deadline: float) -> None:
        """deadline: of `time.monotonic()`."""
        self.args, self.todo, self.deadline = args, todo, deadline
        self.steps = max(1, int(args.tokens) // (args.batch * train_tiny.WINDOW))
        self.workers = Workers(visible_gpus(), count=args.processes)
        self.running: dict[str, Run] = {}
        self.failed: list[str] = []
        self.evaluations: list[float] = []  # seconds of those that are done

    def start(self, one: Run) -> None:
        words = same_command("scripts.quality.seeds", "--one", one.name)
        self.workers.start(one.name, words, self.args.out / f"{one.name}.log")
        self.running[one.name] = one

    def pace(self, one: Run) -> tuple[int, float] | None:
        """The steps left, and the seconds of a step lately. None before the first figures."""
        lines = read_metrics(self.args.out / one.name / f"run-{one.variant}" / "metrics.jsonl") if one.seed else []
        return (self.steps - lines[-1]["step"], lines[-1]["step_ms"] / 1e3) if len(lines) > 2 else None

    def seconds_left(self) -> float | None:
        """Until all models are evaluated, as the running ones are paced now. None before the first figures."""
        paces = {one: pace for one in [*self.running.values(), *self.todo] if (pace := self.pace(one)) is not None}
        if not paces and any(one.seed for one in [*self.running.values(), *self.todo]):
            return None
        usual = sum(each for _, each in paces.values()) / max(1, len(paces))
        evaluation = sum(self.evaluations) / len(self.evaluations) if self.evaluations else EVALUATION

        def needs(one: Run) -> float:
            left, each = paces.get(one, (self.steps if one.seed else 0, usual))
            return left * each + evaluation

        return time_left(map(needs, self.running.values()), map(needs, self.todo), self.args.processes)

    def work(self) -> None:
        said = time.monotonic()
        while self.todo or self.running:
            if time.monotonic() > self.deadline:
                note(f"the time is over: {', '.join(self.running) or 'nothing'} stopped")
                self.workers.stop()
                return
            while self.todo and len(self.running) < self.args.processes:
                self.start(self.todo.pop(0))
            time.sleep(1)
            for name, code in self.workers.ended().items():
                self.end(self.running.pop(name), code)
            if time.monotonic() > said + 20:
                said = time.monotonic()
                self.say()

    def end(self, one: Run, code: int) -> None:
        row = None if code else row_of(self.args, one)
        if row is None:
            again = one.name not in self.failed
            note(f"{one.name} failed, see {self.args.out / one.name}.log{'; it is tried once more' if again else ''}")
            self.failed.append(one.name)
            self.todo += [one] if again else []
        else:
            self.evaluations.append(row["evaluation_seconds"])

    def say(self) -> None:
        paces = {name: self.pace(one) for name, one in self.running.items()}
        shown = [f"{name} {p[0]} steps left at {p[1] * 1e3:.0f} ms" if p else f"{name} starting" for name, p in paces.items()]
        left = self.seconds_left()
        when = "no estimate yet" if left is None else f"about {left / 60:.1f} min for all"
        note(f"{'; '.join(shown)}; {len(self.todo)} models wait; {when}")


# --- statistics -------------------------------------------------------------------------------------------------------------


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a variant: means over its seeds with standard errors, and the paired comparison with the base."""
    found = []
    base = {row["seed"]: row for row in rows if row["variant"] == BASE}
    for variant in (name for name in TRAINABLE if any(row["variant"] == name for row in rows)):
        mine = {row["seed"]: row for row in rows if row["variant"] == variant}
        entry: dict[str, Any] = {"variant": variant, "seeds": sorted(mine)}
        perplexity, error = mean_error([math.exp(nats(row)) for row in mine.values()])
        entry["perplexity"] = perplexity, error, perplexity * stories_error(list(mine.values()))
        for task in (*TASKS, "mean"):
            over_prompts = prompts_error([row["answers"] for row in mine.values()], task)
            entry[task] = (*mean_error([share(row, task) for row in mine.values()]), over_prompts)
        middle = sorted(mine, key=lambda seed: share(mine[seed], "mean"))
        entry["median_seed"] = middle[(len(middle) - 1) // 2]
        pairs = [(row, base[seed]) for seed, row in sorted(mine.items()) if seed in base]
        if variant != BASE and pairs:
            entry["pairs"] = len(pairs)
            entry["nats_difference"] = paired_test([nats(a) - nats(b) for a, b in pairs])
            entry["nats_difference_stories_error"] = stories_error([a for a, _ in pairs], [b for _, b in pairs])
            entry["match_difference"] = paired_test([share(a, "mean") - share(b, "mean") for a, b in pairs])
            entry["match_difference_prompts_error"] = prompts_error(
                [difference(a["answers"], b["answers"]) for a, b in pairs], "mean"
            )
        found.append(entry)
    compared = [entry for entry in found if "pairs" in entry]
    for name in ("nats", "match"):
        for entry, p in zip(compared, holm([entry[f"{name}_difference"][2] for entry in compared]), strict=True):
            entry[f"{name}_holm_p"] = p
    return found


def table(entries: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    head = ["variant", "seeds", "median seed", "perplexity", *TASKS, "mean"]
    head += [f"perplexity against {BASE}, %", f"mean against {BASE}, points"]
    lines = []
    for entry in entries:
        mean, error, over_stories = entry["perplexity"]
        median = str(entry["median_seed"] or "embedded")
        cells = [entry["variant"], str(len(entry["seeds"])), median, f"{pair(mean, error, '{:.4f}')} (± {over_stories:.4f})"]
        for task in (*TASKS, "mean"):
            mean, error, over_prompts = (100 * x for x in entry[task])
            cells.append(f"{pair(mean, error)} (± {over_prompts:.1f})")
        if "pairs" in entry:
            (loss, error, _), stories = entry["nats_difference"], entry["nats_difference_stories_error"]
            scale = 100 * math.exp(loss)  # of errors: the derivative of 100 * expm1
            cells.append(pair(100 * math.expm1(loss), scale * error, "{:+.2f}"))
            cells[-1] += f" (± {scale * stories:.2f}){_probability(entry['nats_holm_p'])}"
            (match, error, _), prompts = entry["match_difference"], entry["match_difference_prompts_error"]
            cells.append(pair(100 * match, 100 * error, "{:+.1f}"))
            cells[-1] += f" (± {prompts * 100:.1f}){_probability(entry['match_holm_p'])}"
        lines.append([*cells, *[""] * (len(head) - len(cells))])
    freedom = sorted({entry["pairs"] - 1 for entry in entries if entry.get("pairs", 1) > 1})
    test = f", with p of the two-sided paired t test ({' or '.join(map(str, freedom))} degrees of freedom), adjusted by Holm over the variants"
    codes = {code for row in rows for code in row["training"]["codes"]}
    first = rows[-1]
    where = describe(first["machine"], "cuda" if first["dtype"] == "bfloat16" else "cpu")
    caption = (
        f"Means over seeds ± their standard error; in brackets the error over prompts or stories, which all seeds share. "
        f"Those of the same content are one cluster. "
        f"The median seed has the median of the mean exact match. "
        f"Differences are of models with the same seed{test if freedom else ''}. Perplexity over "
        f"{len(first['stories'])} held-out stories; exact match in %, {len(first['answers'][TASKS[0]])} held-out items a task, greedy, "
        f"{first['dtype']}. Trained on {first['training']['tokens_in_corpus'] / 1e6:,.0f}M tokens each{by_versions(codes)}. Each was evaluated on {where}."
    )
    return captioned(head, lines, caption)


def _probability(p: float) -> str:
    return "" if math.isnan(p) else f", p = {p:.2f}"


# --- the command ------------------------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--seeds", type=whole_number(1), nargs="*", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--variants", nargs="+", choices=TRAINABLE, default=list(TRAINABLE), help="default: all")
    parser.add_argument("--embedded", action="store_true", help="also evaluate models/tiny-*, which count as one more seed")
    parser.add_argument("--tokens", type=float, default=300e6, help="training tokens of a model (default: 300e6)")
    parser.add_argument(
        "--batch", type=whole_number(1), default=64, help=f"windows of {train_tiny.WINDOW} tokens a step (default: 64)"
    )
    parser.add_argument("--processes", type=whole_number(1), default=1, help="models that are trained at a time (default: 1)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop so long after the start and show what is ready; the same command goes on from the last snapshots (default: no limit)",
    )
    parser.add_argument("--stories", type=whole_number(2), default=1000, help="held-out stories (default: 1000)")
    parser.add_argument("--items", type=whole_number(2), default=1000, help="held-out prompts of a task (default: 1000)")
    parser.add_argument("--out", type=Path, default=results.OUT / "seeds", help="default: out/seeds")
    parser.add_argument("--data", type=Path, help="token file, made if missing (default: OUT/tokens-TOKENS.bin)")
    parser.add_argument(
        "--install",
        action="store_true",
        help="when all models are ready, replace models/tiny-VARIANT of each variant by the model of its median seed, and remove draft "
        "heads of replaced models, which must be trained again",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    results.add_write_option(parser)
    parser.add_argument("more", nargs="*", help="after --: further options of scripts.corpus.train_tiny, such as --compile")
    args = parser.parse_args()
    check_passed_on(args.more, OURS)
    if args.install and (args.embedded or not args.seeds):
        raise UserError("--install takes the median of trained models; give --seeds and leave out --embedded")
    args.out = args.out.absolute()
    args.data = args.data or args.out / f"tokens-{int(args.tokens)}.bin"
    return args


def main() -> None:
    started, args = time.monotonic(), parse_args()
    check_folder(args.out)
    seeds = [*([0] if args.embedded else []), *args.seeds]
    runs = [Run(variant, seed) for seed in seeds for variant in ORDER if variant in args.variants]
    if args.one:
        die_with_parent()
        work(args, next(one for one in runs if one.name == args.one))
        return
    with only_command(args.out):
        command(args, runs, started)


def command(args: argparse.Namespace, runs: list[Run], started: float) -> None:
    """Train and evaluate what is missing, and write the results. Raises UserError."""
    folder = results.results_folder(args)
    for one in runs:
        model_config(str(MODELS / f"tiny-{one.variant}"), None, 1)
    trained = [one for one in runs if one.seed]
    if trained:
        write_corpus(args.data, MODELS / "tiny-standard", CORPUS_SEED, int(args.tokens))
    for one in trained:
        check_training(args, one)
    todo = [one for one in runs if row_of(args, one) is None or (args.install and not model_of(args, one).exists())]
    crew = Crew(args, todo, started + args.minutes * 60)
    crew.work()
    rows = [row for one in runs if (row := row_of(args, one)) is not None]
    if rows:
        entries = summary(rows)
        text = table(entries, rows)
        print(text)
        content = {"summary": entries, "rows": rows}
        results.write_table("accuracy-seeds", content, text, folder)
    missing = [one.name for one in runs if row_of(args, one) is None]
    if missing:
        raise UserError(
            f"not ready: {', '.join(missing)}; failed: {', '.join(n for n in missing if n in crew.failed) or 'none'}. "
            "The same command goes on"
        )
    if args.install:
        for entry in entries:
            install(args, Run(entry["variant"], entry["median_seed"]))


def install(args: argparse.Namespace, one: Run) -> None:
    """Make a trained model the embedded one of its variant. The examples stay; a draft head, which was trained for the replaced
    weights, is removed."""
    source, target = model_of(args, one), model_of(args, Run(one.variant, 0))
    if weights_checksum(source) == weights_checksum(target):
        note(f"{target} is the model of seed {one.seed} already")
        return
    new, head = target.with_name(f"{target.name}.new"), target / "draft"
    again = f"; its draft head was removed: python -m scripts.corpus.train_drafts --models {target}" if head.exists() else ""
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(source, new)
    shutil.copy(target / "examples.json", new)
    shutil.rmtree(target)
    new.rename(target)
    note(f"{target} is now the model of seed {one.seed}, the median{again}")


if __name__ == "__main__":
    run(main)
