"""Train every embedded variant with several seeds, and compare the variants with the errors of seeds and of prompts.

    python -m scripts.quality.seeds --processes 6 -- --compile                     # on a GPU: 18 models, 6 at a time
    python -m scripts.quality.seeds --seeds 1 2 --variants standard ladder --tokens 2e5 --stories 20 --items 5 -- --batch 4   # a try

All models have the corpus (its seed is 1), the tokens and the recipe of `scripts.corpus.train_tiny`, which gets the options after
--. A seed is that of the initial weights and of the order of windows. Each model is evaluated as soon as it is trained: one file
of each is kept in --out, with the log-likelihood of each held-out story and whether each prompt was answered exactly. So a command
that was stopped goes on with the models that lack their file.
Writes accuracy-seeds.json, .md and .png into out (with --write into docs/results).
"""

import argparse
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cli import Parser, note, run
from engine import LLM, SamplingParams
from errors import UserError
from figures import variant_colour
from options import whole_number
from presets import model_config
from processes import die_with_parent
from scripts.corpus import train_tiny
from scripts.corpus.documents import documents, render
from scripts.corpus.tokens import TOKENS_PER_DOCUMENT, write_corpus
from scripts.lib import results
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import table_lines
from scripts.lib.statistics import mean_error, paired_test
from scripts.quality.accuracy import MAX_ANSWER, SEED
from scripts.quality.embedded import TASKS
from tokenizer_files import load_tokenizer
from training.metrics import read_metrics
from variants import TRAINABLE

CORPUS_SEED = 1
BASE = "standard"  # the variant with which the others are compared
# the slowest first, so that none is left at the end
ORDER = ("desync-4x", "desync-2x", "standard", "ladder", "hybrid", "parallel")
EVALUATION = 25.0  # seconds, with the start of a process
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


def evaluate(path: Path, stories: int, items: int) -> dict[str, Any]:
    """The log-likelihood (nats) and tokens of each held-out story, and whether each prompt of a task was answered exactly."""
    tokenizer = load_tokenizer(path)
    llm = LLM(path, tokenizer)
    texts = [render(document) for document in documents(SEED, stories, split="heldout", kind="story")]
    told = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    scored = llm.generate(told, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    likelihoods = [[one.chosen.logprob for one in answer.prompt_logprobs or [] if one is not None] for answer in scored]
    asked = {task: list(documents(SEED, items, split="heldout", kind=task)) for task in TASKS}
    flat = [document for some in asked.values() for document in some]
    prompts = [tokenizer.encode_chat(document.prompt_messages) for document in flat]
    answers = llm.generate(prompts, SamplingParams(max_tokens=MAX_ANSWER, temperature=0))
    right = [int(answer.text == document.answer) for answer, document in zip(answers, flat, strict=True)]
    return {
        "stories": [(round(sum(story), 4), len(story)) for story in likelihoods],
        "answers": {task: right[i * items : (i + 1) * items] for i, task in enumerate(TASKS)},
    }


def train(args: argparse.Namespace, one: Run) -> Path:
    """Train one model. Returns its folder. Raises UserError."""
    folder: Path = args.out / one.name
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        shutil.copy(results.ROOT / "models" / "tiny-standard" / name, folder / "tokenizer")
    line = ["--variant", one.variant, "--seed", one.seed, "--resume", "--tokens", args.tokens, "--batch", args.batch]
    train_tiny.main([str(word) for word in [*line, "--data", args.data, "--out", folder, *args.more]])
    return folder / f"tiny-{one.variant}"


def work(args: argparse.Namespace, one: Run) -> None:
    """Train and evaluate one model, and write its file."""
    path = train(args, one) if one.seed else results.ROOT / "models" / f"tiny-{one.variant}"
    torch.set_float32_matmul_precision("highest")  # which training has lowered
    gc.collect()  # frees the trainer, whose hooks refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    record = json.loads((path / "training.json").read_text())
    record = {key: record[key] for key in ("settings", "tokens_in_corpus", "seconds", "machine", "torch")}
    found = {"variant": one.variant, "seed": one.seed, "asked": asked(args), "training": record, "machine": machine()}
    found |= {"dtype": "bfloat16" if torch.cuda.is_available() else "float32"} | evaluate(path, args.stories, args.items)
    half = args.out / f"{one.name}.part"
    half.write_text(json.dumps(found))
    half.replace(file_of(args, one))
    shutil.rmtree(args.out / one.name / f"run-{one.variant}" / "snapshots", ignore_errors=True)


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that all files must share."""
    return {"tokens": args.tokens, "batch": args.batch, "stories": args.stories, "items": args.items}


def file_of(args: argparse.Namespace, one: Run) -> Path:
    path: Path = args.out / f"{one.name}.json"
    return path


def row_of(args: argparse.Namespace, one: Run) -> dict[str, Any] | None:
    """What was measured of one model, None if nothing. Raises UserError for a file with other settings."""
    if not file_of(args, one).exists():
        return None
    row: dict[str, Any] = json.loads(file_of(args, one).read_text())
    if row["asked"] != asked(args):
        raise UserError(f"{file_of(args, one)} is of other settings ({row['asked']}); name another --out")
    return row


# --- all models -------------------------------------------------------------------------------------------------------------


class Crew:
    """Trains several models at a time, each in a process of its own."""

    def __init__(self, args: argparse.Namespace, todo: list[Run]) -> None:
        self.args, self.todo = args, todo
        self.steps = max(1, int(args.tokens) // (args.batch * train_tiny.WINDOW))
        self.running: dict[Run, subprocess.Popen[bytes]] = {}
        self.failed: list[str] = []
        self.limit = time.monotonic() + args.minutes * 60

    def start(self, one: Run) -> None:
        words = [sys.executable, "-m", "scripts.quality.seeds", *sys.argv[1:]]
        before = words.index("--") if "--" in words else len(words)
        words[before:before] = ["--one", one.name]
        with (self.args.out / f"{one.name}.log").open("ab") as log:
            self.running[one] = subprocess.Popen(words, cwd=results.ROOT, stdout=log, stderr=log, start_new_session=True)

    def stop(self, one: Run) -> None:
        process = self.running.pop(one)
        os.killpg(process.pid, signal.SIGKILL)  # its session, with the compiler's processes
        process.wait()

    def pace(self, one: Run) -> tuple[int, float] | None:
        """The steps left, and the seconds of a step lately. None before the first figures."""
        lines = read_metrics(self.args.out / one.name / f"run-{one.variant}" / "metrics.jsonl") if one.seed else []
        return (self.steps - lines[-1]["step"], lines[-1]["step_ms"] / 1e3) if len(lines) > 2 else None

    def seconds_left(self) -> float:
        """Until all models are evaluated, as the running ones are paced now. 0 before the first figures."""
        paces = [pace for one in self.running if (pace := self.pace(one)) is not None]
        if not paces:
            return 0.0
        unpaced = len(self.todo) + len(self.running) - len(paces)
        seconds = sum(left * each for left, each in paces) + unpaced * self.steps * sum(each for _, each in paces) / len(paces)
        return seconds / len(self.running) + EVALUATION

    def work(self) -> None:
        said = 0.0
        while self.todo or self.running:
            if time.monotonic() > self.limit:
                note(f"the time is over: {', '.join(one.name for one in self.running)} stopped")
                for one in list(self.running):
                    self.stop(one)
                return
            while self.todo and len(self.running) < self.args.processes:
                self.start(self.todo.pop(0))
            time.sleep(1)
            for one in [one for one, process in self.running.items() if process.poll() is not None]:
                if self.running.pop(one).returncode:
                    self.failed.append(one.name)
            if time.monotonic() > said + 20:
                said = time.monotonic()
                self.say()

    def say(self) -> None:
        paces = {one.name: self.pace(one) for one in self.running}
        shown = [f"{name} {p[0]} steps left at {p[1] * 1e3:.0f} ms" if p else f"{name} starting" for name, p in paces.items()]
        note(f"{'; '.join(shown)}; {len(self.todo)} models wait; {self.seconds_left() / 60:.1f} min for all")


# --- statistics -------------------------------------------------------------------------------------------------------------


def nats(row: dict[str, Any]) -> float:
    """The mean negative log-likelihood of a token of the stories."""
    return -float(sum(s for s, _ in row["stories"])) / sum(n for _, n in row["stories"])


def share(row: dict[str, Any], task: str) -> float:
    """Of exact answers to a task, or of all tasks: `mean`."""
    if task == "mean":
        return sum(share(row, one) for one in TASKS) / len(TASKS)
    return float(sum(row["answers"][task])) / len(row["answers"][task])


def binomial_error(row: dict[str, Any], task: str) -> float:
    """The standard error of `share` over prompts."""
    if task == "mean":
        return math.sqrt(sum(binomial_error(row, one) ** 2 for one in TASKS)) / len(TASKS)
    p = share(row, task)
    return math.sqrt(p * (1 - p) / len(row["answers"][task]))


def prompts_error(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> float:
    """The standard error over prompts of the mean difference of `share(mean)` of pairs of models that got the same prompts."""
    variance = 0.0
    for task in TASKS:
        of = [list(zip(a["answers"][task], b["answers"][task], strict=True)) for a, b in pairs]
        differences = [sum(a - b for a, b in same) / len(same) for same in zip(*of, strict=True)]
        variance += mean_error(differences)[1] ** 2
    return math.sqrt(variance) / len(TASKS)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a variant: means over its seeds with standard errors, and the paired comparison with the base."""
    found = []
    base = {row["seed"]: row for row in rows if row["variant"] == BASE}
    for variant in (name for name in TRAINABLE if any(row["variant"] == name for row in rows)):
        mine = {row["seed"]: row for row in rows if row["variant"] == variant}
        entry: dict[str, Any] = {"variant": variant, "seeds": sorted(mine)}
        entry["perplexity"] = mean_error([math.exp(nats(row)) for row in mine.values()])
        for task in (*TASKS, "mean"):
            binomial = math.sqrt(sum(binomial_error(row, task) ** 2 for row in mine.values())) / len(mine)
            entry[task] = (*mean_error([share(row, task) for row in mine.values()]), binomial)
        middle = sorted(mine, key=lambda seed: share(mine[seed], "mean"))
        entry["median_seed"] = middle[(len(middle) - 1) // 2]
        pairs = [(row, base[seed]) for seed, row in sorted(mine.items()) if seed in base]
        if variant != BASE and pairs:
            entry["pairs"] = len(pairs)
            entry["nats_difference"] = paired_test([nats(a) - nats(b) for a, b in pairs])
            entry["match_difference"] = paired_test([share(a, "mean") - share(b, "mean") for a, b in pairs])
            entry["match_difference_prompts_error"] = prompts_error(pairs)
        found.append(entry)
    return found


def table(entries: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    head = ["variant", "seeds", "perplexity", *TASKS, "mean", f"perplexity against {BASE}, %", f"mean against {BASE}, points"]
    lines = []
    for entry in entries:
        mean, error = entry["perplexity"]
        cells = [entry["variant"], str(len(entry["seeds"])), _pair(mean, error, "{:.4f}")]
        cells += [_pair(100 * entry[task][0], 100 * entry[task][1]) for task in TASKS]
        mean, error, binomial = (100 * x for x in entry["mean"])
        cells.append(f"{_pair(mean, error)} (± {binomial:.1f})")
        if "pairs" in entry:
            (loss, loss_error, loss_p), (match, error, p) = entry["nats_difference"], entry["match_difference"]
            cells.append(_pair(100 * loss, 100 * loss_error, "{:+.2f}") + _probability(loss_p))
            prompts = entry["match_difference_prompts_error"]
            cells.append(f"{_pair(100 * match, 100 * error, '{:+.1f}')} (± {prompts * 100:.1f}){_probability(p)}")
        lines.append([*cells, *[""] * (len(head) - len(cells))])
    first = rows[-1]
    where = describe(first["machine"], "cuda" if first["dtype"] == "bfloat16" else "cpu")
    caption = (
        f"Means over seeds ± their standard error; in brackets the error over prompts (binomial, or of paired differences). "
        f"Differences are of models with the same seed, with p of the two-sided paired t test. Perplexity over "
        f"{len(first['stories'])} held-out stories; exact match in %, {len(first['answers'][TASKS[0]])} held-out items a task, greedy, "
        f"{first['dtype']}. Trained on {first['training']['tokens_in_corpus'] / 1e6:,.0f}M tokens each. Made on {where}."
    )
    return "\n".join([*table_lines(head, lines), "", caption, ""])


def _pair(value: float, error: float, form: str = "{:.1f}") -> str:
    """A value and its standard error, which one seed does not have."""
    return form.format(value) + ("" if math.isnan(error) else f" ± {form.replace('+', '').format(error)}")


def _probability(p: float) -> str:
    return "" if math.isnan(p) else f", p = {p:.2f}"


def draw(rows: list[dict[str, Any]], entries: list[dict[str, Any]], path: Path) -> None:
    """Each seed as a dot, and the mean with its standard error, for perplexity and mean exact match."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing needs matplotlib; run `make setup-dev`, or pip install matplotlib") from None

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    measures = {"perplexity": lambda row: math.exp(nats(row)), "mean": lambda row: 100 * share(row, "mean")}
    for axes, (name, measure) in zip(figure.subplots(1, 2), measures.items(), strict=True):
        for place, entry in enumerate(entries):
            colour, scale = variant_colour(entry["variant"]), 100 if name == "mean" else 1
            values = [measure(row) for row in rows if row["variant"] == entry["variant"]]
            axes.plot([place] * len(values), values, "o", color=colour, alpha=0.5, markersize=4)
            mean, error = (scale * value for value in entry[name][:2])
            axes.errorbar(place + 0.25, mean, None if math.isnan(error) else error, fmt="s", color=colour, capsize=4)
        axes.set_xticks(range(len(entries)), [entry["variant"] for entry in entries], rotation=30)
        axes.set_ylabel("held-out perplexity" if name == "perplexity" else "exact match, %, mean of tasks")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


# --- the command ------------------------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=whole_number(1), nargs="*", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--variants", nargs="+", choices=TRAINABLE, default=list(TRAINABLE), help="default: all")
    parser.add_argument("--embedded", action="store_true", help="also evaluate models/tiny-*, which count as one more seed")
    parser.add_argument("--tokens", type=float, default=300e6, help="training tokens of a model (default: 300e6)")
    parser.add_argument(
        "--batch", type=whole_number(1), default=64, help=f"windows of {train_tiny.WINDOW} tokens a step (default: 64)"
    )
    parser.add_argument("--processes", type=whole_number(1), default=1, help="models that are trained at a time (default: 1)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then, with what is ready (default: no limit)")
    parser.add_argument("--stories", type=whole_number(2), default=1000, help="held-out stories (default: 1000)")
    parser.add_argument("--items", type=whole_number(2), default=1000, help="held-out prompts of a task (default: 1000)")
    parser.add_argument("--out", type=Path, default=results.OUT / "seeds", help="default: out/seeds")
    parser.add_argument("--data", type=Path, help="token file, made if missing (default: OUT/tokens-TOKENS.bin)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    results.add_write_option(parser)
    parser.add_argument("more", nargs="*", help="after --: further options of scripts.corpus.train_tiny, such as --compile")
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.data = args.data or args.out / f"tokens-{int(args.tokens)}.bin"
    return args


def main() -> None:
    args = parse_args()
    results.check_folder(args.out)
    folder = results.results_folder(args)
    seeds = [*([0] if args.embedded else []), *args.seeds]
    runs = [Run(variant, seed) for seed in seeds for variant in ORDER if variant in args.variants]
    if args.one:
        die_with_parent()
        work(args, next(one for one in runs if one.name == args.one))
        return
    for one in runs:
        model_config(str(results.ROOT / "models" / f"tiny-{one.variant}"), None, 1)
    todo = [one for one in runs if row_of(args, one) is None]
    if any(one.seed for one in todo) and not args.data.with_suffix(".json").exists():
        tokenizer = results.ROOT / "models" / "tiny-standard"
        write_corpus(args.data, tokenizer, CORPUS_SEED, int(args.tokens) // TOKENS_PER_DOCUMENT)
    crew = Crew(args, todo)
    crew.work()
    rows = [row for one in runs if (row := row_of(args, one)) is not None]
    if rows:
        entries = summary(rows)
        text = table(entries, rows)
        print(text)
        raw = results.write_json("accuracy-seeds", {"summary": entries, "rows": rows}, folder)
        results.write_text(folder / "accuracy-seeds.md", text, raw)
        draw(rows, entries, folder / "accuracy-seeds.png")
        results.made(folder / "accuracy-seeds.png", raw)
        note(f"wrote accuracy-seeds.json, .md and .png in {folder}")
    missing = [one.name for one in runs if row_of(args, one) is None]
    if missing:
        raise UserError(
            f"not ready: {', '.join(missing)}; failed: {', '.join(crew.failed) or 'none'}. The same command goes on"
        )


if __name__ == "__main__":
    run(main)
