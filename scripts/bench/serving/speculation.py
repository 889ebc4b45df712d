"""How many tokens of a draft are right, and tokens/s with and without speculation, by task and number of clients.

    python -m scripts.bench.serving.speculation
    python launch.py --ranks 2 -m scripts.bench.serving.speculation --models llama-3-70b:16 --accept-rate 0.7

The tasks are held-out documents of the corpus on which the embedded models were trained. A preset's weights are random and its
prompts are random ids. Source `ngram` has the request's own text alone. For source `prediction` the request also predicts its
answer, in which each token is right with the probability --accept-rate: this stands in for a real draft, and says nothing of one.
Sources `head` and `model` are --drafts, beside the text: the folders of heads and of smaller models (default: of an embedded model
its own head, and tiny-parallel for tiny-standard). Where weights are random, drafts are computed, but their tokens are replaced by
those of the answer with the probability --accept-rate: their time is real, their agreement is not.

With and without take turns after every few requests, in a random order, so that a slowdown of the machine affects both; a ratio is
the median of those of the runs. It needs a quiet machine. Writes speculation.json and .md into out (with --write into docs/results).
"""

import argparse
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from tqdm import tqdm

from checkpoint import DTYPES, load_model
from cli import Parser, run
from eagle import EagleHead
from engine.core import Engine, EngineLimits
from engine.draft_models import EMBEDDED, find_draft
from engine.drafts import Chains
from engine.llm import read_tokenizer
from engine.protocol import SamplingParams, Submit
from engine.scheduler import Sequence
from errors import UserError
from options import MOST_DRAFT_TOKENS, ModelOptions, add_options, dtype_name, whole_number
from presets import has_random_weights, model_config
from scripts.corpus.documents import KINDS, documents
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import table_lines
from scripts.lib.results import ROOT, add_write_option, results_folder, write_json, write_text
from tokenizer import Tokenizer
from tp import World, init_world

STORY_WORDS = 10  # of a story are the prompt
RANDOM_PROMPT = 64  # tokens


def submits_of(task: str, tokenizer: Tokenizer | None, vocab_size: int, args: argparse.Namespace) -> list[Submit]:
    """The requests of a task, greedy."""
    prompts: list[list[int]] = []
    if tokenizer is None:
        rng = random.Random(args.seed)
        prompts = [[rng.randrange(vocab_size) for _ in range(RANDOM_PROMPT)] for _ in range(args.requests)]
    else:
        for document in documents(args.seed, args.requests, split="heldout", kind=task):
            if document.text is None:
                prompts.append(tokenizer.encode_chat([dict(message) for message in document.messages[:-1]]))
            else:
                prompts.append(tokenizer.encode(" ".join(document.text.split()[:STORY_WORDS])))
    stops = sorted(tokenizer.eos_ids) if tokenizer else []
    params = SamplingParams(max_tokens=args.new_tokens, temperature=0, stop_token_ids=stops)
    return [Submit(str(i), prompt, params) for i, prompt in enumerate(prompts)]


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
    """Chains of a model with random weights, each token of which is replaced by that of the answer with the probability `rate`."""

    def __init__(self, chains: Chains, rate: float, vocab_size: int) -> None:
        self.chains, self.rate, self.vocab_size = chains, rate, vocab_size
        self.answers: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.chains, name)

    def draft(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        found = self.chains.draft(counts)
        return {s: [self._token(s, i) for i in range(len(draft))] for s, draft in found.items()}

    def _token(self, sequence: Sequence, place: int) -> int:
        known, at = self.answers[sequence.request_id], sequence.generated + place
        right = random.Random(f"{sequence.request_id} {at}").random() < self.rate  # the same on all ranks
        return ((known[at] if at < len(known) else 0) + (not right)) % self.vocab_size


def compare(engines: dict[str, Engine], submits: list[Submit], clients: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each source of drafts."""
    plain = serve(engines["off"], submits, clients)
    predicted = predicting(submits, plain.answers, engines["off"].vocab_size, args.accept_rate)
    chained = [name for name in engines if name not in ("off", "ngram")]
    runs: dict[str, list[Served]] = {name: [] for name in ("off", "ngram", "prediction", *chained)}
    for engine in engines.values():
        if isinstance(engine.speculation.chains, Agreeing):
            engine.speculation.chains.answers = plain.answers
    turns = random.Random(args.seed)  # the same on all ranks
    for _ in range(args.repeats):
        for name in runs:
            runs[name].append(Served())
        for first in range(0, len(submits), clients):
            for name in turns.sample(list(runs), len(runs)):
                engine, asked = (
                    engines["ngram" if name == "prediction" else name],
                    predicted if name == "prediction" else submits,
                )
                runs[name][-1] += serve(engine, asked[first : first + clients], clients)
    return [
        {
            "source": source,
            "clients": clients,
            "without": round(median(one.speed for one in runs["off"]), 1),
            "with": round(median(one.speed for one in runs[source]), 1),
            "ratio": round(median(one.speed / off.speed for one, off in zip(runs[source], runs["off"], strict=True)), 3),
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
        chains = engines[key].speculation.chains
        if chains is not None and has_random_weights(name):
            engines[key].speculation.chains = Agreeing(chains, args.accept_rate, config.vocab_size)
    rows = []
    for task in tqdm(args.tasks if tokenizer else ["random ids"], desc=Path(name).name, disable=world.rank > 0):
        submits = submits_of(task, tokenizer, config.vocab_size, args)
        for clients in args.clients:
            rows += [{"model": Path(name).name, "task": task, **row} for row in compare(engines, submits, clients, args)]
    return rows


def drafts_for(name: str, args: argparse.Namespace) -> list[str]:
    """The folders of the heads and models that draft for a model."""
    if args.drafts is not None:
        return list(args.drafts)
    other = [str(ROOT / "models" / "tiny-parallel")] if Path(name).name == "tiny-standard" else []
    return [*([str(head)] if (head := Path(name) / EMBEDDED).is_dir() else []), *other]


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--requests", type=whole_number(1), default=32, help="of each task (default: 32)")
    parser.add_argument("--new-tokens", type=whole_number(2), default=200, help="most tokens of an answer (default: 200)")
    parser.add_argument("--repeats", type=whole_number(1), default=5, help="measured runs (default: 5)")
    parser.add_argument("--seed", type=int, default=0)
    add_write_option(parser)
    args = parser.parse_args()
    if not 0 <= args.accept_rate <= 1:
        raise UserError(f"--accept-rate is a probability from 0 to 1, not {args.accept_rate}")
    return args


def table(rows: list[dict[str, Any]], caption: str) -> str:
    head = ["model", "task", "source", "clients", "accepted of a draft", "tokens a step", "tokens/s without", "with", "ratio"]
    lines = []
    for row in rows:
        accepted = "–" if row["accepted_length"] is None else f"{row['accepted_length']:.2f}"
        speeds = [f"{row['without']:.0f}", f"{row['with']:.0f}", f"{row['ratio']:.2f}"]
        cells = [row[key] for key in ("model", "task", "source", "clients")]
        lines.append([*cells, accepted, f"{row['tokens_per_step']:.2f}", *speeds])
    return "\n".join([*table_lines(head, lines), "", caption, ""])


def main() -> None:
    args = parse_args()
    folder = results_folder(args)
    world = init_world(args.device, args.comm, args.simulate_link, args.comm_error_budget, deterministic=args.deterministic)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name in args.models:
            rows += measure(name, args, world)
    if world.rank:
        return
    where = machine()
    settings = {key: getattr(args, key) for key in ("draft_tokens", "accept_rate", "requests", "new_tokens", "repeats", "seed")}
    settings |= {"ranks": world.world_size, "communicator": world.comm.name}
    path = write_json("speculation", {"machine": where, "settings": settings, "rows": rows}, folder)
    caption = (
        f"Greedy, {world.world_size} rank(s), medians of {args.repeats} runs. Tokens a step are those of a sequence. Predictions are "
        f"the answers themselves, each token right with probability {args.accept_rate:g}; so are drafts of presets, whose weights are "
        f"random. Heads and models draft beside n-grams. Made on "
        f"{describe(where, world.device.type)}."
    )
    text = table(rows, caption)
    write_text(path.with_suffix(".md"), text, path)
    print(f"{text}\nwrote {path.relative_to(ROOT)}\n{json.dumps(settings)}")


if __name__ == "__main__":
    run(main)
