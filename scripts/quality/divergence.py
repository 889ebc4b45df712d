"""How many greedy answers differ between 1 rank and several, between single requests and a batch, and with and without drafts,
with and without --deterministic?

    python -m scripts.quality.divergence                                          # models/tiny-hybrid in bfloat16, tp 2, batches of 64
    python -m scripts.quality.divergence --model DIR --tp 4 --items 200 --tokens 512
    python -m scripts.quality.divergence --device cuda --tp 2                     # on GPUs
    python -m scripts.quality.divergence --device cuda --compare drafts           # on one GPU
    python -m scripts.quality.divergence --items 8 --tokens 32 --batch 8 --dry-run

Drafts are those of `--speculate ngram` and, if the model has a head of its own, of this head; single requests on 1 rank get them.
Each prompt is the beginning of a held-out story. An answer has --tokens tokens, whatever they are. Two answers part at the first token
that differs. Writes divergence.json and .md, or divergence-gpu, into out (with --write into docs/results); with only some
comparisons divergence-drafts.json and so on. The exit code is 1 if an answer with --deterministic differs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cli import Parser, run
from engine import LLM, SamplingParams
from engine.draft_models import AUTO, EMBEDDED, TEXT
from engine.llm import Completion
from errors import UserError
from options import DTYPE_NAMES, whole_number
from ranks.processes import on_ranks
from scripts.corpus.documents import documents, render
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.results import ROOT, add_write_option, results_folder, write_table
from scripts.quality.heldout import SEED
from text.tokenizer_files import load_tokenizer
from tp import init_world

PROMPT_TOKENS = 24
MODES = {"fast": False, "deterministic": True}
COMPARED = ("ranks", "batch", "drafts")
WITHOUT = "no drafts and "  # begins the names of comparisons with drafts


class Answers(NamedTuple):
    """tokens: the ids of each answer. drafted: how many of them all were drafted before they were drawn."""

    tokens: list[list[int]]
    drafted: int = 0


def work(args: argparse.Namespace) -> None:
    """What one rank does: answer all prompts in batches of each size. Rank 0 writes the `Answers`, by batch size."""
    world = init_world(args.device, deterministic=args.deterministic)
    llm = LLM(args.model, world=world, dtype=args.dtype, speculate=args.speculate)
    tokenizer = load_tokenizer(Path(args.model))
    stories = documents(SEED, args.items, split="heldout", kind="story")
    prompts = [tokenizer.encode(render(story), add_special_tokens=False)[:PROMPT_TOKENS] for story in stories]
    params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
    found = {size: answer(llm, prompts, params, size) for size in args.sizes}
    if world.rank == 0:
        args.answers.write_text(json.dumps(found))


def answer(llm: LLM, prompts: list[list[int]], params: SamplingParams, size: int) -> Answers:
    """The answers in batches of `size`."""
    given, drafted = [Completion(prompt) for prompt in prompts], 0
    for first in range(0, len(prompts), size):
        batch = slice(first, first + size)
        for deltas in llm.stream(prompts[batch], params, answers=given[batch]):
            drafted += sum(delta.drafted for delta in deltas)
    return Answers([one.token_ids for one in given], drafted)


def answers(args: argparse.Namespace, ranks: int, mode: str, sizes: list[int], speculate: str | None = None) -> list[Answers]:
    """The answers on so many ranks, for each batch size. speculate: as of `generate.py`."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [*on_ranks(ranks), "-m", "scripts.quality.divergence", "--answers", file.name, "--model", args.model]
        command += ["--items", str(args.items), "--tokens", str(args.tokens), "--dtype", args.dtype, "--device", args.device]
        command += ["--sizes", *map(str, sizes), *(["--deterministic"] if MODES[mode] else [])]
        command += ["--speculate", speculate] if speculate else []
        if subprocess.run(command, cwd=ROOT).returncode:
            raise UserError(f"the answers on {ranks} ranks failed; see above")
        found = json.loads(Path(file.name).read_text())
    return [Answers(*found[str(size)]) for size in sizes]


def parted(a: list[int], b: list[int]) -> int | None:
    """How many tokens two answers have in common before the first that differs; None if none does."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def drafts(model: str) -> dict[str, str]:
    """The values of --speculate that are compared with none, by their names in tables."""
    return {TEXT: TEXT} | ({"own head": AUTO} if (Path(model) / EMBEDDED).is_dir() else {})


def compared(args: argparse.Namespace, mode: str) -> tuple[Answers, dict[str, Answers]]:
    """The answers to single requests on one rank, and those compared with them, by the name of the comparison."""
    batch = [args.batch] if "batch" in args.compare else []
    alone, *together = answers(args, 1, mode, [1, *batch])
    found: dict[str, Answers] = {}
    if "ranks" in args.compare:
        (found[f"tp 1 and tp {args.tp}"],) = answers(args, args.tp, mode, [1])
    found |= {f"batch 1 and {args.batch}": those for those in together}
    if "drafts" in args.compare:
        for name, speculate in drafts(args.model).items():
            (found[f"{WITHOUT}{name}"],) = answers(args, 1, mode, [1], speculate)
    return alone, found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each mode and comparison. `parted`: for each answer, see there. `drafted`: of all tokens, if there are drafts."""
    rows = []
    for mode in MODES:
        alone, found = compared(args, mode)
        for what, others in found.items():
            places = [parted(a, b) for a, b in zip(alone.tokens, others.tokens, strict=True)]
            row = {"mode": mode, "compared": what, "parted": places}
            rows.append(row | ({"drafted": others.drafted} if what.startswith(WITHOUT) else {}))
    return rows


def table(rows: list[dict[str, Any]], args: argparse.Namespace, where: dict[str, Any]) -> str:
    lines, with_drafts = [], any("drafted" in row for row in rows)
    for row in rows:
        places = [place for place in row["parted"] if place is not None]
        middle = f"{median(places):g}" if places else ""
        cells = [f"{len(places)} of {len(row['parted'])}", str(min(places, default="")), middle]
        share = f"{row['drafted'] / (args.tokens * len(row['parted'])):.0%}" if "drafted" in row else ""
        lines.append([row["compared"], row["mode"], *cells, *([share] if with_drafts else [])])
    caption = f"Greedy answers of {args.tokens} tokens, `{Path(args.model).name}` in {args.dtype}. Made on {describe(where, args.device)}."
    head = ["compared", "mode", "answers that differ", "first token that differs: earliest", "median"]
    head += ["tokens from drafts"] if with_drafts else []
    return captioned(head, lines, caption)


def file_name(args: argparse.Namespace) -> str:
    """Of the results. Those of some comparisons do not replace those of all."""
    some = [what for what in COMPARED if what in args.compare]
    parts = ["divergence", *(some if len(some) < len(COMPARED) else []), *(["gpu"] if args.device == "cuda" else [])]
    return "-".join(parts)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--model", default="models/tiny-hybrid", help="a checkpoint with a tokenizer (default: models/tiny-hybrid)"
    )
    parser.add_argument("--tp", type=whole_number(2, 8), default=2, metavar="N", help="ranks compared with one (default: 2)")
    parser.add_argument("--batch", type=whole_number(2), default=64, metavar="N", help="sequences of a batch (default: 64)")
    parser.add_argument("--items", type=whole_number(1), default=64, metavar="N", help="prompts (default: 64)")
    parser.add_argument("--tokens", type=whole_number(1), default=128, metavar="N", help="of an answer (default: 128)")
    parser.add_argument(
        "--compare", nargs="+", choices=COMPARED, default=[*COMPARED], help="with single requests on one rank (default: all)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--dry-run", action="store_true", help="print the table and write nothing")
    add_write_option(parser)
    for name, kind in (
        ("--answers", {"type": Path}),
        ("--sizes", {"type": int, "nargs": "+"}),
        ("--deterministic", {"action": "store_true"}),
        ("--speculate", {}),
    ):
        parser.add_argument(name, help=argparse.SUPPRESS, **kind)  # of the ranks
    args = parser.parse_args()
    if args.answers:
        work(args)
        return
    folder = None if args.dry_run else results_folder(args)
    rows, where = measure(args), machine()
    text, name = table(rows, args, where), file_name(args)
    print(text)
    if folder:
        content = {"machine": where, "device": args.device, "tokens": args.tokens, "rows": rows}
        write_table(name, content, text, folder)
    differ = sum(place is not None for row in rows if MODES[row["mode"]] for place in row["parted"])
    if differ:
        print(f"{differ} answers differ with --deterministic", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run(main)
