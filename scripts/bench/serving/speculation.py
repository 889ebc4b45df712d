"""How many tokens of a draft are right, and tokens/s with and without speculation, by task and number of clients.

    python -m scripts.bench.serving.speculation
    python -m scripts.bench.serving.speculation --models models/tiny-hybrid --tasks story --clients 1

The tasks are held-out documents of the corpus on which the embedded models were trained; `edit` and `chat` are for public checkpoints:
--models coder --tasks edit chat. Source `ngram` has the request's own text alone. For source `prediction` the request also predicts its
answer, in which each token is right with the probability --accept-rate: this stands in for a real draft, and says nothing of one. Sources
`head` and `model` are --drafts, beside the text: folders (default: an embedded model's own head, and tiny-parallel for tiny-standard).

With and without take turns after every few requests, in a random order, so that a slowdown of the machine affects both; a ratio is
the median of those of the runs. It needs a quiet machine. Rows are kept in out/speculation.jsonl: the same command goes on where it
stopped. Writes speculation.json and .md, or speculation-real of public checkpoints, into out (with --write into docs/results). Drafts of
models with random weights are measured by `scripts.bench.serving.load` with --accept-rate.
"""

import argparse
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec
import torch

from checkpoints.eagle import EagleHead
from checkpoints.presets import model_config
from checkpoints.weights import DTYPES, load_model
from cli import Parser, run
from engine.core import Engine
from engine.draft_models import EMBEDDED, find_draft
from engine.limits import EngineLimits
from engine.llm import encode_chat, encode_texts, read_tokenizer
from engine.protocol import SamplingParams, Submit
from errors import UserError
from files import ENGINE, source_digest
from options import MOST_DRAFT_TOKENS, whole_number
from scripts.corpus.documents import KINDS, documents
from scripts.lib.experiment import Experiment
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import Columns, table
from scripts.lib.real_models import ASKED, checkpoint, questions
from scripts.lib.results import OUT, ROOT, add_write_option, results_folder, write_table
from scripts.lib.rows import weights_checksum
from text.tokenizer import Tokenizer
from tp import World, init_world

STORY_WORDS = 10  # of a story are the prompt
GOAL = 0.97  # the least ratio that is wanted where drafts do not help
CODE = (*ENGINE, "scripts/corpus/*.py", "scripts/corpus/*.toml", "scripts/bench/serving/speculation.py")
COLUMNS: Columns = {
    "model": "{model}",
    "task": "{task}",
    "source": "{source}",
    "clients": "{clients}",
    "accepted of a draft": lambda row: "–" if row["accepted_length"] is None else f"{row['accepted_length']:.2f}",
    "tokens a step": "{tokens_per_step:.2f}",
    "tokens/s without": "{without:.0f}",
    "with": "{with:.0f}",
    "ratio": "{ratio:.2f}",
    "its quartiles": "{quartiles[0]:.2f} – {quartiles[1]:.2f}",
    "runs": "{repeats}",
}


def prompts_of(task: str, tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    """Prompts from held-out documents, or of public checkpoints."""
    if task in ASKED:
        return [encode_chat(tokenizer, [{"role": "user", "content": asked}]) for asked in questions(task, count, seed)]
    prompts = []
    for document in documents(seed, count, split="heldout", kind=task):
        if document.text is None:
            prompts.append(encode_chat(tokenizer, document.messages[:-1]))
        else:
            prompts += encode_texts(tokenizer, [" ".join(document.text.split()[:STORY_WORDS])])
    return prompts


def predicting(submits: list[Submit], answers: dict[str, list[int]], vocab_size: int, rate: float) -> list[Submit]:
    """The requests with predictions of their answers, in which a token is right with probability `rate`."""
    rng, replace = random.Random(0), msgspec.structs.replace
    found = []
    for submit in submits:
        guess = [token if rng.random() < rate else rng.randrange(vocab_size) for token in answers[submit.request_id]]
        found.append(replace(submit, params=replace(submit.params, prediction=guess)))
    return found


@dataclass
class Served:
    """What became of requests. steps: of all sequences."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    accepted: int = 0
    answers: dict[str, list[int]] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """tokens/s"""
        return self.tokens / self.seconds

    def __add__(self, other: "Served") -> "Served":
        sums = {
            name: getattr(self, name) + getattr(other, name) for name in ("seconds", "tokens", "steps", "drafts", "accepted")
        }
        return Served(**sums, answers=self.answers | other.answers)


def serve(engine: Engine, submits: list[Submit], clients: int) -> Served:
    """Answer the requests, at most `clients` at a time."""
    coming, active = iter(submits), 0
    answers: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
    steps = drafts = accepted = 0
    start = time.perf_counter()
    while True:
        while active < clients and (submit := next(coming, None)):
            if refused := engine.submit(submit):
                raise UserError(refused.message)
            active += 1
        if not engine.has_work():
            break
        for output in engine.step():
            answers[output.request_id] += output.token_ids
            steps, drafts, accepted = steps + 1, drafts + bool(output.drafted), accepted + output.accepted
            active -= output.finish_reason is not None
    seconds = time.perf_counter() - start
    return Served(seconds, sum(map(len, answers.values())), steps, drafts, accepted, answers)


def compare(
    engines: Mapping[str, Engine], submits: list[Submit], clients: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for each source of drafts."""
    plain = serve(engines["off"], submits, clients)
    predicted = predicting(submits, plain.answers, engines["off"].vocab_size, args.accept_rate)
    sources = ["off", "ngram", "prediction", *(name for name in engines if name not in ("off", "ngram"))]
    runs: dict[str, list[Served]] = {name: [] for name in sources}
    turns = random.Random(args.seed)
    for _ in range(args.repeats):
        for name in sources:
            runs[name].append(Served())
        for first in range(0, len(submits), clients):
            for name in turns.sample(sources, len(sources)):
                engine, asked = (engines["ngram"], predicted) if name == "prediction" else (engines[name], submits)
                runs[name][-1] += serve(engine, asked[first : first + clients], clients)
    for source in sources[1:]:
        ratios = [one.speed / off.speed for one, off in zip(runs[source], runs["off"], strict=True)]
        last = runs[source][-1]
        yield {
            "source": source,
            "without": round(median(one.speed for one in runs["off"]), 1),
            "with": round(median(one.speed for one in runs[source]), 1),
            "ratio": round(median(ratios), 3),
            "quartiles": [round(one, 3) for one in quartiles(ratios)],
            "repeats": args.repeats,
            "tokens_per_step": round(last.tokens / last.steps, 3),  # of a sequence
            "accepted_length": last.accepted / last.drafts if last.drafts else None,
            "other_answers": sum(last.answers[key] != ids for key, ids in plain.answers.items()),
        }


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and third quartile, between which the middle half of the values lies."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return low, high


def tokenizer_of(name: str) -> Tokenizer:
    """Raises UserError for a model without one, which has no tasks."""
    tokenizer = read_tokenizer(name, model_config(name, None, 1))
    if tokenizer is None:
        raise UserError(f"{name} has no tokenizer, so it has no tasks; measure its drafts with scripts.bench.serving.load")
    return tokenizer


def load(name: str, args: argparse.Namespace, world: World) -> tuple[Tokenizer, dict[str, Engine]]:
    """A model's tokenizer, and its engines by the source of their drafts: `off`, `ngram`, heads and models."""
    config, tokenizer = model_config(name, None, 1), tokenizer_of(name)
    model = load_model(name, config, world, DTYPES[args.dtype])
    engines = {}

    def add(key: str, draft_tokens: int, draft: Any = None) -> None:
        limits = EngineLimits(min(config.max_seq_len, 2048), max(args.clients), draft_tokens=draft_tokens)
        engines[key] = Engine(model, tokenizer, limits, world, draft)
        engines[key].capture()

    add("off", 0)
    add("ngram", args.draft_tokens)
    for found in [find_draft(path, None, config, tokenizer, 1) for path in drafts_for(name, args)]:
        if found is not None:
            draft = found.load(world, DTYPES[args.dtype])
            add(f"{'head' if isinstance(draft, EagleHead) else 'model'} {Path(found.name).name}", args.draft_tokens, draft)
    return tokenizer, engines


def drafts_for(name: str, args: argparse.Namespace) -> list[str]:
    """The folders of the heads and models that draft for a model."""
    if args.drafts is not None:
        return list(args.drafts)
    other = [str(ROOT / "models" / "tiny-parallel")] if Path(name).name == "tiny-standard" else []
    return [*([str(head)] if (head := Path(name) / EMBEDDED).is_dir() else []), *other]


def settings_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The grid, with all that a row's figures depend on. Raises UserError."""
    names = ("dtype", "draft_tokens", "accept_rate", "requests", "new_tokens", "repeats", "seed")
    shared = {name: getattr(args, name) for name in names}
    found = []
    for name in args.models:
        tokenizer_of(name)
        if missing := [path for path in drafts_for(name, args) if not (Path(path) / "config.json").is_file()]:
            raise UserError(f"--drafts {missing[0]} is no folder of a head or a model")
        weights = {path: weights_checksum(Path(path)) for path in (name, *drafts_for(name, args))}
        for task, clients in product(args.tasks, args.clients):
            found.append({"model": name, "task": task, "clients": clients, "weights": weights, **shared})
    return found


def measure(args: argparse.Namespace, experiment: Experiment) -> list[dict[str, Any]]:
    """The rows of all settings, one for each source of drafts."""
    world = init_world("cpu")
    loaded = cache(lambda name: load(name, args, world))

    @torch.inference_mode()
    def one(setting: Mapping[str, Any]) -> dict[str, Any]:
        tokenizer, engines = loaded(setting["model"])
        stops = sorted(tokenizer.eos_ids)
        params = SamplingParams(max_tokens=args.new_tokens, temperature=0, stop_token_ids=stops)
        prompts = prompts_of(setting["task"], tokenizer, max(args.requests, setting["clients"]), args.seed)
        submits = [Submit(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        return {"sources": list(compare(engines, submits, setting["clients"], args))}

    return [
        {
            "model": Path(row["setting"]["model"]).name,
            "task": row["setting"]["task"],
            "clients": row["setting"]["clients"],
            **source,
        }
        for row in experiment.measure(settings_of(args), one)
        for source in row["sources"]
    ]


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    embedded = [str(ROOT / "models" / f"tiny-{name}") for name in ("standard", "ladder", "hybrid")]
    parser.add_argument(
        "--models", nargs="+", default=embedded, help="folders, smollm2 or coder (default: three embedded ones)"
    )
    parser.add_argument("--tasks", nargs="+", choices=(*KINDS, *ASKED), default=KINDS, help="default: those of the corpus")
    parser.add_argument("--clients", nargs="+", type=whole_number(1), default=[1, 16], help="requests at once (default: 1 16)")
    parser.add_argument(
        "--draft-tokens", type=whole_number(1, MOST_DRAFT_TOKENS), default=7, help="most tokens of a draft (default: 7)"
    )
    parser.add_argument("--drafts", nargs="*", metavar="DIR", help="heads and models that draft (default: see above)")
    parser.add_argument("--accept-rate", type=float, default=0.9, help="of predicted tokens that are right (default: 0.9)")
    parser.add_argument(
        "--requests", type=whole_number(1), default=32, help="of each task, at least one a client (default: 32)"
    )
    parser.add_argument("--new-tokens", type=whole_number(2), default=200, help="most tokens of an answer (default: 200)")
    parser.add_argument("--repeats", type=whole_number(1), default=5, help="measured runs (default: 5)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument("--threads", type=whole_number(1), default=1, help="of PyTorch (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    add_write_option(parser)
    args = parser.parse_args()
    args.models = [checkpoint(name) for name in args.models]
    if not 0 <= args.accept_rate <= 1:
        raise UserError(f"--accept-rate is a probability from 0 to 1, not {args.accept_rate}")
    return args


def main() -> None:
    args = parse_args()
    folder, where = results_folder(args), machine()
    torch.set_num_threads(args.threads)
    rows = measure(
        args, Experiment(OUT / "speculation.jsonl", {"machine": where, "code": source_digest(CODE), "threads": args.threads})
    )
    low = sum(row["ratio"] < GOAL for row in rows)
    caption = (
        f"Greedy, medians of {args.repeats} runs, {args.threads} thread(s). Tokens a step are those of a sequence. Predictions are the "
        f"answers themselves, each token right with probability {args.accept_rate:g}. Heads and models draft beside n-grams. {low} of "
        f"{len(rows)} ratios are below {GOAL}. Made on {describe(where, 'cpu')}."
    )
    text = table(COLUMNS, rows, caption)
    print(text, end="")
    settings = {
        name: value for name, value in vars(args).items() if name not in ("models", "tasks", "clients", "drafts", "write")
    }
    name = "speculation-real" if set(args.tasks) <= ASKED.keys() else "speculation"
    write_table(name, {"machine": where, "settings": settings, "rows": rows}, text, folder)


if __name__ == "__main__":
    run(main)
