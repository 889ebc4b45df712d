"""Measure what quantized weights and an 8-bit KV cache cost the embedded models: held-out perplexity, divergence and exact match.

    python -m scripts.quality.weights                                          # all models/tiny-*, all widths, on the GPU if any
    python -m scripts.quality.weights --models models/tiny-hybrid --widths int4 int4-gptq --stories 100 --items 20

Each story's log-likelihood and each answer are compared with those of the same model in 16 bits, so that the standard errors are
those of paired differences: the stories differ far more than the widths do. A perplexity may change in both directions, because a
small error in the weights also helps some tokens; the divergence from the model in 16 bits sums all changes up. GPTQ quantizes on the CPU; all else runs through the engine, on a GPU in
bf16 with the kernels that serve, on a CPU in fp32. One file for each model and width is kept in out/accuracy-weights; a command
that was stopped goes on after the last one, and commands for different models may run at the same time. Writes
accuracy-weights.json and .md into out (with --write into docs/results).
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from checkpoints.presets import model_config
from cli import Parser, note, run
from config import TRAINABLE
from engine import LLM
from errors import UserError
from options import dtype_name, whole_number
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.results import OUT, ROOT, add_write_option, results_folder, write_table
from scripts.lib.rows import code_digest, row_file, weights_checksum, write_row
from scripts.lib.statistics import ratio_error
from scripts.quality.heldout import TASKS, held_out_stories, likelihoods, matches
from scripts.quantize import LENGTH, SAMPLES, quantize_model
from text.tokenizer_files import load_tokenizer

PLAIN = "16 bits"
LOADED: dict[str, dict[str, str]] = {  # arguments of LLM
    PLAIN: {},
    "fp8": {"quantize": "fp8"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "int4-gptq": {},
    "fp8-kv": {"kv_dtype": "fp8"},
}


def evaluate(path: Path, width: str, stories: int, items: int) -> dict[str, Any]:
    """What one model answers with weights or keys and values of `width`."""
    tokenizer = load_tokenizer(path)
    with tempfile.TemporaryDirectory() as folder:
        if width == "int4-gptq":
            made = Path(folder, path.name)
            quantize_model(str(path), made, "int4", "gptq", None, SAMPLES, LENGTH)
            path = made
        llm = LLM(path, tokenizer, **LOADED[width])  # type: ignore[arg-type]  # a dictionary of texts
    return {
        "stories": [[round(token, 6) for token in told] for told in likelihoods(llm, held_out_stories(tokenizer, stories))],
        "answers": {task: matches(llm, tokenizer, task, items) for task in TASKS},
    }


def file_of(path: Path, width: str, args: argparse.Namespace) -> Path:
    """The file of the evaluation of one model and width with these settings."""
    settings = {"stories": args.stories, "items": args.items, "weights": weights_checksum(path), "of": "tokens"}
    settings |= {"torch": torch.__version__, "cuda": torch.cuda.is_available(), "code": code_digest()}
    return row_file(OUT / "accuracy-weights", f"{path.name}-{width}", settings)


# --- differences --------------------------------------------------------------------------------------------------------------


def change(of: dict[str, Any], to: dict[str, Any]) -> tuple[float, float]:
    """The mean log-likelihood a token that is lost from `of` to `to`, nats, which is the relative change of the perplexity while it
    is small; and its standard error over stories (of a ratio: Cochran, Sampling Techniques, section 2.11)."""
    return _mean_of_tokens(of, to, lambda lost: lost)


def divergence(of: dict[str, Any], to: dict[str, Any]) -> tuple[float, float]:
    """Half the mean squared change of a token's log-likelihood from `of` to `to`, and its standard error: while the change is small,
    the Kullback-Leibler divergence, nats, if the tokens are as likely as `of` says."""
    return _mean_of_tokens(of, to, lambda lost: lost**2 / 2)


def _mean_of_tokens(of: dict[str, Any], to: dict[str, Any], value: Callable[[float], float]) -> tuple[float, float]:
    """The mean of `value` of what each token's log-likelihood loses, and its standard error over stories."""
    both = zip(of["stories"], to["stories"], strict=True)
    stories = [[value(before - after) for before, after in zip(*pair, strict=True)] for pair in both]
    return ratio_error([*map(sum, stories)], [*map(len, stories)])


def exact_match(found: dict[str, Any]) -> tuple[float, float]:
    """The share of exact answers over all tasks, and its binomial standard error: of a mean of tasks with shares of their own."""
    tasks = [torch.tensor(right, dtype=torch.float64) for right in found["answers"].values()]
    shares = [right.mean().item() for right in tasks]
    variance = sum(p * (1 - p) / len(right) for p, right in zip(shares, tasks, strict=True))
    return sum(shares) / len(shares), math.sqrt(variance) / len(shares)


def rows_of(path: Path, found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each width of one model."""
    rows = []
    for width, one in found.items():
        lost, tokens = -sum(map(sum, one["stories"])), sum(map(len, one["stories"]))
        share, error = exact_match(one)
        row: dict[str, Any] = {"model": path.name, "variant": model_config(str(path), None, 1).description, "width": width}
        row |= {"perplexity": math.exp(lost / tokens), "exact_match": share, "exact_match_error": error}
        if width != PLAIN:
            row["divergence"], row["divergence_error"] = divergence(found[PLAIN], one)
        for name, other in (("16_bits", PLAIN), ("int4", "int4")):
            if other in found and width != other and (other == PLAIN or width == "int4-gptq"):
                row[f"change_from_{name}"], row[f"change_from_{name}_error"] = change(found[other], one)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], args: argparse.Namespace, where: dict[str, Any]) -> str:
    """A Markdown table with one line per model and one column per width."""
    names = {row["width"]: None for row in rows}
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = {row["width"]: row for row in rows if row["model"] == model}
        cells = [f"`{model}`", f"{mine[PLAIN]['perplexity']:.4f}; {_match(mine[PLAIN])}"]
        cells += [
            f"{_change(mine[name], '16_bits')}; {_divergence(mine[name])}; {_match(mine[name])}"
            for name in names
            if name != PLAIN
        ]
        if "change_from_int4" in mine.get("int4-gptq", {}):
            cells.append(_change(mine["int4-gptq"], "int4"))
        lines.append(cells)
    head = ["model", PLAIN, *(name for name in names if name != PLAIN)]
    head += ["int4-gptq against int4"] if len(lines[0]) > len(head) else []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    caption = (
        f"Perplexity over {args.stories} held-out stories, for {PLAIN} itself, else its change in % with the standard error of the "
        f"paired difference; divergence from {PLAIN}, nats x 10⁻⁴ a token; exact match in % over {len(TASKS)} tasks of {args.items} held-out items, greedy, with its binomial standard "
        f"error. int4 in groups that divide all widths, rounded to nearest, or by GPTQ with at most {SAMPLES} samples of {LENGTH} tokens; "
        f"fp8-kv: keys and values in fp8. Computed in {dtype_name(None, device)}. Made on {describe(where, device)}."
    )
    return captioned(head, lines, caption)


def _change(row: dict[str, Any], name: str) -> str:
    return f"{row[f'change_from_{name}'] * 100:+.3f} ± {row[f'change_from_{name}_error'] * 100:.3f}"


def _divergence(row: dict[str, Any]) -> str:
    return f"{row['divergence'] * 1e4:.2f} ± {row['divergence_error'] * 1e4:.2f}"


def _match(row: dict[str, Any]) -> str:
    return f"{row['exact_match'] * 100:.1f} ± {row['exact_match_error'] * 100:.1f}"


def main() -> None:
    embedded = [ROOT / "models" / f"tiny-{name}" for name in TRAINABLE]
    parser = Parser(description=__doc__)
    parser.add_argument("--models", type=Path, nargs="+", default=embedded, help="checkpoints (default: models/tiny-*)")
    parser.add_argument("--widths", nargs="+", choices=tuple(LOADED), default=list(LOADED), help="default: all")
    parser.add_argument("--stories", type=whole_number(2), default=1000, metavar="N", help="held-out stories (default: 1000)")
    parser.add_argument("--items", type=whole_number(1), default=200, metavar="N", help="prompts of a task (default: 200)")
    add_write_option(parser)
    args = parser.parse_args()
    folder = results_folder(args)
    for path in args.models:
        if model_config(str(path), None, 1).quantization is not None:
            raise UserError(f"{path} is quantized already; name checkpoints in 16 or 32 bits")
    widths = list(dict.fromkeys([PLAIN, *args.widths]))
    files = {(path, width): file_of(path, width, args) for path in args.models for width in widths}
    todo = {cell: file for cell, file in files.items() if not file.exists()}
    note(f"{len(todo)} of {len(files)} evaluations are left; after the first the bar says how long they will take")
    with tqdm(todo.items(), unit="evaluation") as bar:  # those that are kept would make its estimate too short
        for (path, width), file in bar:
            bar.set_description(f"{path.name}, {width}")
            write_row(file, evaluate(path, width, args.stories, args.items))
    found = {path: {width: json.loads(files[path, width].read_text()) for width in widths} for path in args.models}
    where, rows = machine(), [row for path in args.models for row in rows_of(path, found[path])]
    text = table(rows, args, where)
    print(text)
    content = {"machine": where, "stories": args.stories, "items": args.items, "rows": rows}
    write_table("accuracy-weights", content, text, folder)


if __name__ == "__main__":
    run(main)
