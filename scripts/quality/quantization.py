"""Measure quantized all-reduces in the embedded models: error of the sums, bytes and perplexity by width, group and scheme.

    python -m scripts.quality.quantization                                      # tiny-standard and tiny-hybrid on 4 ranks
    python -m scripts.quality.quantization --tp 2 --items 5 --models models/tiny-parallel --dry-run

This is a small version of the Flash Communication paper's figures 4 and 5 and of its tables 4 and 5 (with and without a
Hadamard rotation). Errors are measured on real partial sums, which are recorded while a model reads held-out stories. Writes
quantization.json and .md into out (with --write into docs/results). Ranks are started once.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from cli import Parser, run
from comm import Communicator, PendingAllReduce, Scheme, parse_scheme
from comm.quantize import WIDTHS, Format, dequantize_sum, hadamard_transform, quantize
from comm.registry import choose
from engine import LLM
from errors import UserError
from ranks.processes import on_ranks
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import table_lines
from scripts.lib.results import ROOT, add_write_option, results_folder, write_table
from scripts.quality.heldout import held_out_stories, perplexity
from text.tokenizer_files import load_tokenizer
from tp import World, init_world

GROUPS = ("32", "64", "128", "token")
SCHEMES = [
    *(f"{width}:{group}" for width in WIDTHS for group in GROUPS),
    *(f"{width}:{group}:symmetric" for width in ("int8", "int6", "int4") for group in ("128", "token")),
    *(f"{width}:{group}:hadamard" for width in ("int4", "fp8") for group in GROUPS),
]
RECORDED = 2  # stories whose partial sums are recorded


class Recorder(Communicator):
    """Wraps a communicator and keeps a copy of every partial sum passed to it."""

    def __init__(self, inner: Communicator) -> None:
        self.inner, self.rank, self.world_size, self.name = inner, inner.rank, inner.world_size, inner.name
        self.partials: list[Tensor] = []

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        self.partials.append(partial.clone())
        return self.inner.begin_all_reduce(partial, overlap)

    def all_gather(self, shard: Tensor) -> Tensor:
        return self.inner.all_gather(shard)


def record(path: Path, world: World) -> list[tuple[Tensor, Tensor]]:
    """Pairs of this rank's partial sum and the exact sum, of all modules over RECORDED held-out stories. Collective.

    The embedding's all-reduce is left out, because in it each value comes from a single rank.
    """
    recorder = Recorder(world.comm)
    model = load_model(str(path), model_config(str(path), None, world.world_size), replace(world, comm=recorder), torch.float32)
    llm, tokenizer, kept = LLM(model, world=world), load_tokenizer(path), []
    for story in held_out_stories(tokenizer, RECORDED):
        recorder.partials = []
        llm.score(story)
        kept += recorder.partials[1:]
    return [(partial, world.comm.all_reduce(partial.clone())) for partial in kept]


def relative_error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Total squared error of (exact, approximate) pairs divided by the total of the exact values' squares."""
    wrong = sum((b.double() - a.double()).square().sum().item() for a, b in pairs)
    return wrong / sum(a.double().square().sum().item() for a, _ in pairs)


def coded(x: Tensor, width: Format, scheme: Scheme) -> Tensor:
    """`x` quantized and dequantized once, flat, in the groups of an all-reduce of `x`. Values after the last whole group are
    dropped."""
    size = scheme.group_of(x)
    groups = x.flatten()[: x.numel() // size * size].view(-1, size)
    groups = hadamard_transform(groups) if scheme.hadamard else groups
    again = dequantize_sum(quantize(groups, width)[None], width)
    return (hadamard_transform(again) if scheme.hadamard else again).flatten()


def evaluate(path: Path, world: World, names: list[str], items: int) -> list[dict[str, Any]]:
    """A row for each scheme. Errors before the reduction are those of this rank's partial sums. Collective."""
    sums = record(path, world)
    config, tokenizer = model_config(str(path), None, world.world_size), load_tokenizer(path)

    def measure(communicator: Communicator) -> float:
        model = load_model(str(path), config, replace(world, comm=communicator), torch.float32)
        return perplexity(LLM(model, world=world), tokenizer, items)

    exact, rows = measure(world.comm), []
    for name in tqdm(names, desc=path.name, unit="scheme", disable=world.rank > 0):
        communicator, scheme = choose("cpu", name).build(), parse_scheme(name)
        values = sum(partial.numel() for partial, _ in sums)
        sent = sum(scheme.sent_bytes(p.numel(), scheme.group_of(p), world.world_size) for p, _ in sums)
        rows.append(
            {
                "model": path.name,
                "scheme": name,
                "tp": world.world_size,
                "stories": items,
                "bytes_sent_a_value": sent / values,
                "bf16_bytes_a_value": 2 * 2 * (world.world_size - 1) / world.world_size,
                "error_before_reduce": phase_error([p for p, _ in sums], scheme.reduce, scheme),
                "error_before_gather": phase_error([total for _, total in sums], scheme.gather, scheme),
                "error_of_sum": relative_error([(total, communicator.all_reduce(p.clone())) for p, total in sums]),
                "perplexity": measure(communicator),
                "exact_perplexity": exact,
            }
        )
    return rows


def phase_error(tensors: list[Tensor], width: Format, scheme: Scheme) -> float:
    """The `relative_error` of only one of the two quantization steps."""
    approximate = [coded(x, width, scheme) for x in tensors]
    return relative_error([(x.flatten()[: len(y)], y) for x, y in zip(tensors, approximate, strict=True)])


def work(args: argparse.Namespace) -> None:
    """What one rank does: evaluate all models and schemes. Rank 0 writes the rows."""
    world = init_world("cpu")
    rows = [row for path in args.models for row in evaluate(path, world, args.schemes, args.items)]
    if world.rank == 0:
        args.rows.write_text(json.dumps(rows))


def launch(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as rows:
        command = [*on_ranks(args.tp), "-m", "scripts.quality.quantization"]
        command += ["--items", str(args.items), "--rows", rows.name, "--models", *map(str, args.models)]
        command += ["--schemes", *args.schemes]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise UserError(f"the evaluation on {args.tp} ranks failed; see above")
        return json.loads(Path(rows.name).read_text())


def table(rows: list[dict[str, Any]], where: dict[str, Any]) -> str:
    """Markdown tables, one per model, with one line per scheme."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "bytes against bf16": lambda row: f"{row['bytes_sent_a_value'] / row['bf16_bytes_a_value']:.3f}",
        "before the reduction": lambda row: f"{row['error_before_reduce']:.2e}",
        "before the gather": lambda row: f"{row['error_before_gather']:.2e}",
        "of the sum": lambda row: f"{row['error_of_sum']:.2e}",
        "perplexity": lambda row: f"{row['perplexity']:.4f} ({row['perplexity'] / row['exact_perplexity'] - 1:+.2%})",
    }
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        lines += [f"`{model}`, exact perplexity {mine[0]['exact_perplexity']:.4f}", ""]
        cells = [[f"`{row['scheme']}`", *(cell(row) for cell in columns.values())] for row in mine]
        lines += table_lines(["`--comm`", *columns], cells)
        lines.append("")
    caption = (
        f"{rows[0]['tp']} ranks, fp32 weights. Errors: squared, relative to the squares of the exact values, over the sums of "
        f"all modules in {RECORDED} held-out stories; perplexity over {rows[0]['stories']}. Bytes: what a rank sends, scales, zero "
        f"points and filled-up groups included, over what a ring of bf16 values sends. Made on {describe(where, 'cpu')}."
    )
    return "\n".join([*lines, caption, ""])


def main() -> None:
    found = [ROOT / "models" / f"tiny-{name}" for name in ("standard", "hybrid")]
    parser = Parser(description=__doc__)
    parser.add_argument("--models", type=Path, nargs="+", default=found, help="default: tiny-standard and tiny-hybrid")
    parser.add_argument(
        "--schemes",
        nargs="+",
        default=SCHEMES,
        metavar="NAME",
        help="quantization schemes, as --comm takes them (default: many)",
    )
    parser.add_argument("--tp", type=int, default=4, help="number of ranks (default: 4)")
    parser.add_argument("--items", type=int, default=50, help="held-out stories for the perplexity (default: 50)")
    parser.add_argument("--dry-run", action="store_true", help="print the table and write nothing")
    add_write_option(parser)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rows:
        work(args)
        return
    for name in args.schemes:
        if choose("cpu", name).is_exact:
            raise UserError(f"--schemes {name} is not quantized; name some of {', '.join(WIDTHS)}")
    folder = None if args.dry_run else results_folder(args)
    rows, where = launch(args), machine()
    text = table(rows, where)
    print(text)
    if folder:
        write_table("quantization", {"machine": where, "rows": rows}, text, folder)


if __name__ == "__main__":
    run(main)
