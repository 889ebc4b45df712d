"""How many tokens of a draft are right, and tokens/s with and without speculation, by task and number of clients.

    python -m scripts.bench.serving.speculation
    python -m scripts.bench.serving.speculation --jobs 12 --pair-seconds 160 --repeats 3 --long-requests 8 --seconds 500   # 24 cores
    python launch.py --ranks 2 -m scripts.bench.serving.speculation --models llama-3-70b:16 --accept-rate 0.7

The tasks are held-out documents of the corpus on which the embedded models were trained. A preset's weights are random and its
prompts are random ids. Source `ngram` has the request's own text alone. For source `prediction` the request also predicts its
answer, in which each token is right with the probability --accept-rate: this stands in for a real draft, and says nothing of one.
Sources `head` and `model` are --drafts, beside the text: the folders of heads and of smaller models (default: of an embedded model
its own head, and tiny-parallel for tiny-standard). Where weights are random, drafts are computed, but their tokens are replaced by
those of the answer with the probability --accept-rate: their time is real, their agreement is not.

With and without take turns after every few requests, in a random order, so that a slowdown of the machine affects both; a ratio is
the median of those of the runs. It needs a quiet machine. Writes speculation.json and .md into out (with --write into docs/results).

With --jobs N each pair of a model and a task is measured in a process of its own, which has --cores cores and as many threads, at most
N at a time. A pair's rows are kept in out/speculation, and --seconds bounds the whole: run the same command again to go on. The last
cores are taken first, so other work belongs on the first ones (taskset).
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from tqdm import tqdm

from checkpoints.eagle import EagleHead
from checkpoints.presets import has_random_weights, model_config
from checkpoints.weights import DTYPES, load_model
from cli import Parser, run
from engine.core import Engine
from engine.draft_models import EMBEDDED, find_draft
from engine.limits import EngineLimits
from engine.llm import encode_chat, encode_texts, read_tokenizer
from engine.model_drafter import ModelDrafter
from engine.protocol import SamplingParams, Submit
from engine.sequence import Sequence
from errors import UserError
from files import ENGINE, check_folder, source_digest
from options import MOST_DRAFT_TOKENS, ModelOptions, add_options, dtype_name, whole_number
from ranks.processes import die_with_parent, is_rank
from scripts.corpus.documents import KINDS, documents
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.results import OUT, ROOT, add_write_option, results_folder, write_table
from scripts.lib.rows import read_row, row_file, weights_checksum, write_row
from scripts.lib.statistics import median_error, quartiles
from scripts.lib.workers import Workers, core_sets, time_left
from text.tokenizer import Tokenizer
from tp import World, init_world

STORY_WORDS = 10  # of a story are the prompt
RANDOM_PROMPT = 64  # tokens
RANDOM_IDS = "random ids"  # the task of a model without a tokenizer
LONG = "story", "request"  # tasks with answers of up to --new-tokens; those of the others have a few tokens
GOAL = 0.97  # the least ratio that is wanted where drafts do not help
START = 15.0  # seconds of a job before it measures, about
CODE = (*ENGINE, "scripts/corpus/*.py", "scripts/lib/workers.py", "scripts/bench/serving/speculation.py")


def requests_of(task: str, clients: int, args: argparse.Namespace) -> int:
    """How many requests of a task there are: --requests or --long-requests, at least one for each client."""
    return max(args.long_requests if task in LONG and args.long_requests else args.requests, clients)


def prompts_of(task: str, tokenizer: Tokenizer | None, vocab_size: int, count: int, seed: int) -> list[list[int]]:
    """Prompts from held-out documents, or random ids if there is no tokenizer."""
    if tokenizer is None:
        rng = random.Random(seed)
        return [[rng.randrange(vocab_size) for _ in range(RANDOM_PROMPT)] for _ in range(count)]
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


class Agreeing:
    """Drafts of a model with random weights, each token of which is replaced by that of the answer with the probability `rate`."""

    def __init__(self, drafter: ModelDrafter, rate: float, vocab_size: int) -> None:
        self.drafter, self.rate, self.vocab_size = drafter, rate, vocab_size
        self.answers: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def draft(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        found = self.drafter.draft(counts)
        return {s: [self._token(s, i) for i in range(len(draft))] for s, draft in found.items()}

    def _token(self, sequence: Sequence, place: int) -> int:
        known, at = self.answers[sequence.request_id], sequence.generated + place
        right = random.Random(f"{sequence.request_id} {at}").random() < self.rate  # the same on all ranks
        return ((known[at] if at < len(known) else 0) + (not right)) % self.vocab_size


def another(done: int, spent: float, args: argparse.Namespace) -> bool:
    """Whether a load that was run `done` times in `spent` seconds is run again: --repeats times, and then as long as the next run is
    likely to end within the load's part of --pair-seconds."""
    if done < args.repeats:
        return True
    return args.pair_seconds is not None and spent * (done + 1) / done <= args.pair_seconds / len(args.clients)


def compare(engines: dict[str, Engine], submits: list[Submit], clients: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each source of drafts."""
    started = time.monotonic()
    plain = serve(engines["off"], submits, clients)
    predicted = predicting(submits, plain.answers, engines["off"].vocab_size, args.accept_rate)
    by_model = [name for name in engines if name not in ("off", "ngram")]
    runs: dict[str, list[Served]] = {name: [] for name in ("off", "ngram", "prediction", *by_model)}
    for engine in engines.values():
        if isinstance(engine.speculation.model_drafter, Agreeing):
            engine.speculation.model_drafter.answers = plain.answers
    turns = random.Random(args.seed)  # the same on all ranks
    while another(len(runs["off"]), time.monotonic() - started, args):
        for name in runs:
            runs[name].append(Served())
        for first in range(0, len(submits), clients):
            for name in turns.sample(list(runs), len(runs)):
                engine = engines["ngram" if name == "prediction" else name]
                asked = predicted if name == "prediction" else submits
                runs[name][-1] += serve(engine, asked[first : first + clients], clients)
    ratios = {source: [one.speed / off.speed for one, off in zip(runs[source], runs["off"], strict=True)] for source in runs}
    return [
        {
            "source": source,
            "clients": clients,
            "without": round(median(one.speed for one in runs["off"]), 1),
            "with": round(median(one.speed for one in runs[source]), 1),
            "ratio": round(median(ratios[source]), 3),
            "quartiles": [round(one, 3) for one in quartiles(ratios[source])],
            "error": round(median_error(ratios[source]), 4) if len(ratios[source]) > 1 else None,
            "repeats": len(ratios[source]),
            "tokens_per_step": round(last.tokens / last.steps, 3),  # of a sequence
            "accepted_length": last.accepted / last.drafts if last.drafts else None,
            "other_answers": sum(last.answers[key] != ids for key, ids in plain.answers.items()),
        }
        for source in runs
        if source != "off" and (last := runs[source][-1])
    ]


def measure(name: str, args: argparse.Namespace, world: World) -> list[dict[str, Any]]:
    config = model_config(name, args.variant, world.world_size)
    tokenizer = read_tokenizer(name, config)
    model = load_model(name, config, world, DTYPES[dtype_name(args.dtype, world.device.type)])
    longest = min(config.max_seq_len, 2048)
    found = [find_draft(path, None, config, tokenizer, world.world_size) for path in drafts_for(name, args)]
    drafts = [(draft, draft.load(world, model.norm.weight.dtype)) for draft in found if draft is not None]
    named = {f"{'head' if isinstance(one, EagleHead) else 'model'} {Path(draft.name).name}": one for draft, one in drafts}
    engines = {}
    for key, one in {"off": None, "ngram": None, **named}.items():
        share = 0.8 / (2 + len(named)) if world.device.type == "cuda" else None
        most = 0 if key == "off" else args.draft_tokens
        limits = EngineLimits(longest, max(args.clients), kv_memory=share, draft_tokens=most)
        engines[key] = Engine(model, tokenizer, limits, world, one)
        engines[key].capture()
        drafter = engines[key].speculation.model_drafter
        if drafter is not None and has_random_weights(name):
            engines[key].speculation.model_drafter = Agreeing(drafter, args.accept_rate, config.vocab_size)  # type: ignore[assignment]
    stops = sorted(tokenizer.eos_ids) if tokenizer else []
    params = SamplingParams(max_tokens=args.new_tokens, temperature=0, stop_token_ids=stops)
    rows = []
    for task in tqdm(args.tasks if tokenizer else [RANDOM_IDS], desc=Path(name).name, disable=world.rank > 0):
        for clients in args.clients:
            prompts = prompts_of(task, tokenizer, config.vocab_size, requests_of(task, clients, args), args.seed)
            submits = [Submit(str(i), prompt, params) for i, prompt in enumerate(prompts)]
            rows += [{"model": Path(name).name, "task": task, **row} for row in compare(engines, submits, clients, args)]
    return rows


def drafts_for(name: str, args: argparse.Namespace) -> list[str]:
    """The folders of the heads and models that draft for a model."""
    if args.drafts is not None:
        return list(args.drafts)
    other = [str(ROOT / "models" / "tiny-parallel")] if Path(name).name == "tiny-standard" else []
    return [*([str(head)] if (head := Path(name) / EMBEDDED).is_dir() else []), *other]


# --- a process for each pair of a model and a task ---------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    """Measure a pair, and keep its rows."""
    die_with_parent()
    started = time.monotonic()
    world = init_world("cpu", args.comm, args.simulate_link, args.comm_error_budget, deterministic=args.deterministic)
    with torch.inference_mode():
        rows = measure(args.models[0], args, world)
    write_row(args.into, {"seconds": round(time.monotonic() - started, 1), "communicator": world.comm.name, "rows": rows})


def files_of(args: argparse.Namespace) -> dict[tuple[str, str], Path]:
    """The file of each pair, in the order of the table. Its name depends on all that the rows do."""
    common = {key: value for key, value in vars(args).items() if key not in ("models", "tasks", "seconds", "write", "into")}
    common |= {"machine": machine(), "code": source_digest(CODE)}
    found = {}
    for name in args.models:
        tasks = args.tasks if read_tokenizer(name, model_config(name, args.variant, 1)) else [RANDOM_IDS]
        folders = [Path(path) for path in (name, *drafts_for(name, args))]
        weights = {str(path): weights_checksum(path) for path in folders if path.is_dir()}
        for task in tasks:
            settings = common | {"model": name, "task": task, "weights": weights}
            found[name, task] = row_file(OUT / "speculation", f"{Path(name).name} {task}", settings)
    return found


def launched(args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """The rows of all pairs, and their communicator. Raises UserError if a pair is missing at `deadline`, of `time.monotonic()`."""
    check_folder(OUT / "speculation")
    workers, files, failed = Workers([], core_sets(args.jobs, args.cores)), files_of(args), list[str]()
    todo = sorted((pair for pair in files if not files[pair].exists()), key=lambda pair: pair[1] not in LONG)
    began, usual = dict[str, float](), None if args.pair_seconds is None else args.pair_seconds + START
    try:
        with tqdm(total=len(files), initial=len(files) - len(todo), unit="pair", miniters=0, mininterval=2) as bar:
            while (todo or workers.running) and time.monotonic() < deadline:
                while todo and len(workers.running) < args.jobs:
                    name, task = pair = todo.pop(0)
                    words = [sys.executable, "-m", "scripts.bench.serving.speculation", *sys.argv[1:], "--models", name]
                    words += [*(["--tasks", task] if task != RANDOM_IDS else []), "--into", str(files[pair])]
                    workers.start(files[pair].stem, words, files[pair].with_suffix(".log"))
                    began[files[pair].stem] = time.monotonic()
                time.sleep(0.2)
                done = 0
                for stem, code in workers.ended().items():
                    failed += [f"{stem}.log"] * bool(code)
                    usual = time.monotonic() - began[stem] if not code else usual
                    done += not code
                if usual is not None:
                    running = [max(0.0, began[stem] + usual - time.monotonic()) for stem in workers.running]
                    bar.set_postfix_str(f"about {time_left(running, [usual] * len(todo), args.jobs):.0f} s left", refresh=False)
                bar.update(done)
    finally:
        workers.stop()
    if failed:
        raise UserError(f"jobs failed; see {', '.join(failed)} in {OUT / 'speculation'}. The same command measures the others")
    found = [row for path in files.values() if (row := read_row(path)) is not None]
    if len(found) < len(files):
        raise UserError(f"{len(found)} of {len(files)} pairs are measured; the same command goes on")
    return {"rows": [row for one in found for row in one["rows"]], "communicator": found[0]["communicator"]}


# --- the command ---------------------------------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add_options(
        parser,
        ModelOptions,
        "the models",
        without=("model", "tp", "max_model_len", "compile", "quantize", "kv_dtype", "overlap"),
    )
    embedded = [str(ROOT / "models" / f"tiny-{name}") for name in ("standard", "ladder", "hybrid")]
    parser.add_argument("--models", nargs="+", default=embedded, help="checkpoints or presets (default: three embedded ones)")
    parser.add_argument("--tasks", nargs="+", choices=KINDS, default=KINDS, help="default: all")
    parser.add_argument("--clients", nargs="+", type=whole_number(1), default=[1, 16], help="requests at once (default: 1 16)")
    parser.add_argument(
        "--draft-tokens", type=whole_number(1, MOST_DRAFT_TOKENS), default=7, help="most tokens of a draft (default: 7)"
    )
    parser.add_argument("--drafts", nargs="*", metavar="DIR", help="heads and models that draft (default: see above)")
    parser.add_argument(
        "--accept-rate",
        type=float,
        default=0.9,
        help="of predicted tokens, and of drafts of random weights, that are right (default: 0.9)",
    )
    parser.add_argument(
        "--requests", type=whole_number(1), default=32, help="of each task, at least one a client (default: 32)"
    )
    parser.add_argument("--long-requests", type=whole_number(1), help=f"of {' and '.join(LONG)} (default: as --requests)")
    parser.add_argument("--new-tokens", type=whole_number(2), default=200, help="most tokens of an answer (default: 200)")
    parser.add_argument("--repeats", type=whole_number(1), default=5, help="measured runs, at least (default: 5)")
    parser.add_argument(
        "--pair-seconds",
        type=whole_number(1),
        metavar="S",
        help="repeat for so long for each model and task, the same for each of --clients (default: only --repeats times)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--jobs", type=whole_number(1), metavar="N", help="processes at a time, on a CPU (default: this one alone)"
    )
    parser.add_argument("--cores", type=whole_number(1), default=2, metavar="N", help="of a job (default: 2)")
    parser.add_argument("--seconds", type=whole_number(1), metavar="S", help="end all jobs after so many (default: no limit)")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # of a job
    add_write_option(parser)
    args = parser.parse_args()
    if not 0 <= args.accept_rate <= 1:
        raise UserError(f"--accept-rate is a probability from 0 to 1, not {args.accept_rate}")
    if args.jobs and (is_rank() or args.device == "cuda"):
        raise UserError("--jobs is for models on a single CPU rank; leave it out")
    if args.seconds and not args.jobs:
        raise UserError("--seconds bounds jobs; give --jobs, too")
    if args.pair_seconds and is_rank():
        raise UserError("--pair-seconds is for one rank, as others would stop at other times; give --repeats")
    return args


def table(rows: list[dict[str, Any]], caption: str) -> str:
    head = ["model", "task", "source", "clients", "accepted of a draft", "tokens a step", "tokens/s without", "with", "ratio"]
    head += ["its quartiles", "runs"]
    lines = []
    for row in rows:
        accepted = "–" if row["accepted_length"] is None else f"{row['accepted_length']:.2f}"
        speeds = [f"{row['without']:.0f}", f"{row['with']:.0f}", f"{row['ratio']:.2f}"]
        speeds += ["{:.2f} – {:.2f}".format(*row["quartiles"]), row["repeats"]]
        cells = [row[key] for key in ("model", "task", "source", "clients")]
        lines.append([*cells, accepted, f"{row['tokens_per_step']:.2f}", *speeds])
    return captioned(head, lines, caption)


def caption_of(rows: list[dict[str, Any]], settings: dict[str, Any], where: str) -> str:
    runs = f"{settings['repeats']} runs"
    if settings["pair_seconds"]:
        runs = f"as many runs as {settings['pair_seconds']} s for a model and task allow, at least {settings['repeats']}"
    low = sum(row["ratio"] < GOAL for row in rows)
    errors = [row["error"] / row["ratio"] for row in rows if row["error"] is not None]
    spread = f" A ratio's standard error, from its quartiles, is {median(errors):.1%} in the median row and at most {max(errors):.1%}."
    jobs = f" Each model and task had {settings['cores']} core(s) of the machine, and at most {settings['jobs']} ran at once."
    return (
        f"Greedy, {settings['ranks']} rank(s), medians of {runs}. Tokens a step are those of a sequence. Predictions are "
        f"the answers themselves, each token right with probability {settings['accept_rate']:g}; so are drafts of presets, whose weights are "
        f"random. Heads and models draft beside n-grams. {low} of {len(rows)} ratios are below {GOAL}."
        f"{spread if errors else ''}{jobs if settings['jobs'] else ''} Made on {where}."
    )


def main() -> None:
    started, args = time.monotonic(), parse_args()
    if args.into:
        work(args)
        return
    folder = results_folder(args)
    if args.jobs:
        found = launched(args, started + (args.seconds or math.inf)) | {"ranks": 1}
    else:
        world = init_world(args.device, args.comm, args.simulate_link, args.comm_error_budget, deterministic=args.deterministic)
        found = {"rows": [], "ranks": world.world_size, "communicator": world.comm.name}
        with torch.inference_mode():
            for name in args.models:
                found["rows"] += measure(name, args, world)
        if world.rank:
            return
    where, rows = machine(), found.pop("rows")
    device = "cpu" if args.jobs else world.device.type
    names = ("draft_tokens", "accept_rate", "requests", "long_requests", "new_tokens", "repeats", "pair_seconds", "seed")
    settings = {key: getattr(args, key) for key in (*names, "jobs", "cores")} | found
    text = table(rows, caption_of(rows, settings, describe(where, device)))
    print(f"{text}\n{json.dumps(settings)}")
    write_table("speculation", {"machine": where, "settings": settings, "rows": rows}, text, folder)


if __name__ == "__main__":
    run(main)
