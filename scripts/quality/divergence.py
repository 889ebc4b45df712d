"""How many greedy answers differ between 1 rank and several, and between single requests and a batch, with and without
--deterministic?

    python -m scripts.quality.divergence                                          # models/tiny-hybrid in bfloat16, tp 2, batches of 64
    python -m scripts.quality.divergence --model DIR --tp 4 --items 200 --tokens 512
    python -m scripts.quality.divergence --device cuda --tp 2                     # on GPUs
    python -m scripts.quality.divergence --items 8 --tokens 32 --batch 8 --dry-run

Each prompt is the beginning of a held-out story. An answer has --tokens tokens, whatever they are. Two answers part at the first token
that differs. Writes divergence.json, .md and .png, or divergence-gpu, into out (with --write into docs/results). The exit code is
1 if an answer with --deterministic differs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from cli import Parser, run
from engine import LLM, SamplingParams
from errors import UserError
from figures import BLUE, GREEN, ORANGE, VERMILION
from options import DTYPE_NAMES, whole_number
from processes import on_ranks
from scripts.corpus.documents import documents, render
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import table_lines
from scripts.lib.results import ROOT, add_write_option, made, results_folder, write_json, write_text
from scripts.quality.accuracy import SEED
from tokenizer_files import load_tokenizer
from tp import init_world

PROMPT_TOKENS = 24
MODES = {"fast": False, "deterministic": True}


def work(args: argparse.Namespace) -> None:
    """What one rank does: answer all prompts in batches of each size. Rank 0 writes the token ids, by batch size."""
    world = init_world(args.device, deterministic=args.deterministic)
    llm = LLM(args.model, world=world, dtype=args.dtype)
    tokenizer = load_tokenizer(Path(args.model))
    stories = documents(SEED, args.items, split="heldout", kind="story")
    prompts = [tokenizer.encode(render(story), add_special_tokens=False)[:PROMPT_TOKENS] for story in stories]
    params, found = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True), {}
    for size in args.sizes:
        batches = [llm.generate(prompts[first : first + size], params) for first in range(0, len(prompts), size)]
        found[size] = [answer.token_ids for batch in batches for answer in batch]
    if world.rank == 0:
        args.answers.write_text(json.dumps(found))


def answers(args: argparse.Namespace, ranks: int, mode: str, sizes: list[int]) -> list[list[list[int]]]:
    """The answers on so many ranks, for each batch size."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [*on_ranks(ranks), "-m", "scripts.quality.divergence", "--answers", file.name, "--model", args.model]
        command += ["--items", str(args.items), "--tokens", str(args.tokens), "--dtype", args.dtype, "--device", args.device]
        command += ["--sizes", *map(str, sizes), *(["--deterministic"] if MODES[mode] else [])]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise UserError(f"the answers on {ranks} ranks failed; see above")
        found = json.loads(Path(file.name).read_text())
    return [found[str(size)] for size in sizes]


def parted(a: list[int], b: list[int]) -> int | None:
    """How many tokens two answers have in common before the first that differs; None if none does."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each mode and comparison. `parted`: for each answer, see there."""
    rows = []
    for mode in MODES:
        alone, together = answers(args, 1, mode, [1, args.batch])
        (split,) = answers(args, args.tp, mode, [1])
        for what, others in ((f"tp 1 and tp {args.tp}", split), (f"batch 1 and {args.batch}", together)):
            places = [parted(a, b) for a, b in zip(alone, others, strict=True)]
            rows.append({"mode": mode, "compared": what, "parted": places})
    return rows


def table(rows: list[dict[str, Any]], args: argparse.Namespace, where: dict[str, Any]) -> str:
    lines = []
    for row in rows:
        places = [place for place in row["parted"] if place is not None]
        middle = f"{median(places):g}" if places else ""
        cells = [f"{len(places)} of {len(row['parted'])}", str(min(places, default="")), middle]
        lines.append([row["compared"], row["mode"], *cells])
    caption = f"Greedy answers of {args.tokens} tokens, `{Path(args.model).name}` in {args.dtype}. Made on {describe(where, args.device)}."
    head = ["compared", "mode", "answers that differ", "first token that differs: earliest", "median"]
    return "\n".join([*table_lines(head, lines), "", caption, ""])


def plot(rows: list[dict[str, Any]], tokens: int, path: Path) -> None:
    """The share of answers that are still the same, by tokens."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for row, colour in zip(rows, (VERMILION, ORANGE, BLUE, GREEN), strict=True):
        places, count = [place for place in row["parted"] if place is not None], len(row["parted"])
        same = [100 * (1 - sum(place < n for place in places) / count) for n in range(tokens + 1)]
        style: dict[str, Any] = {"linestyle": "--" if row["compared"].startswith("batch") else "-", "linewidth": 2}
        axes.plot(range(tokens + 1), same, color=colour, label=f"{row['compared']}, {row['mode']}", **style)
    axes.set(xlabel="tokens of the answer", ylabel="answers still the same, %", xlim=(0, tokens), ylim=(0, 103))
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="models/tiny-hybrid", help="a checkpoint with a tokenizer (default: models/tiny-hybrid)"
    )
    parser.add_argument("--tp", type=whole_number(2, 8), default=2, metavar="N", help="ranks compared with one (default: 2)")
    parser.add_argument("--batch", type=whole_number(2), default=64, metavar="N", help="sequences of a batch (default: 64)")
    parser.add_argument("--items", type=whole_number(1), default=64, metavar="N", help="prompts (default: 64)")
    parser.add_argument("--tokens", type=whole_number(1), default=128, metavar="N", help="of an answer (default: 128)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--dry-run", action="store_true", help="print the table and write nothing")
    add_write_option(parser)
    for name, kind in (
        ("--answers", {"type": Path}),
        ("--sizes", {"type": int, "nargs": "+"}),
        ("--deterministic", {"action": "store_true"}),
    ):
        parser.add_argument(name, help=argparse.SUPPRESS, **kind)  # of the ranks
    args = parser.parse_args()
    if args.answers:
        work(args)
        return
    folder = None if args.dry_run else results_folder(args)
    rows, where = measure(args), machine()
    text, name = table(rows, args, where), "divergence" if args.device == "cpu" else "divergence-gpu"
    print(text)
    if folder:
        raw = write_json(name, {"machine": where, "device": args.device, "tokens": args.tokens, "rows": rows}, folder)
        write_text(folder / f"{name}.md", text, raw)
        plot(rows, args.tokens, folder / f"{name}.png")
        made(folder / f"{name}.png", raw)
        print(f"wrote {name}.json, {name}.md and {name}.png in {folder.relative_to(ROOT)}")
    differ = sum(place is not None for row in rows if MODES[row["mode"]] for place in row["parted"])
    if differ:
        print(f"{differ} answers differ with --deterministic", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run(main)
