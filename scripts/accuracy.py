"""How well the embedded models write and answer: held-out perplexity and exact match per task, variant and tp.

    python scripts/accuracy.py                                    # all of models/tiny-* at tp 1, 2 and 4
    python scripts/accuracy.py --tp 1 --items 50 --models models/tiny-hybrid

The small twin of tables 3 and 5 of the ladder paper. Held-out documents share no cast, operands or lists with the training
corpus. Writes docs/results/accuracy.json and accuracy.md. With --tp it starts torchrun once for each number of ranks.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checkpoint import load_model, model_config
from cli import Parser, run
from engine.offline import Timing, generate, score
from engine.sampler import SamplingParams
from engine.stopping import OutputStream
from errors import UserError
from model import Transformer
from scripts.corpus import documents, render
from scripts.results import RESULTS, ROOT, describe, machine, write_json
from tokenizer import Tokenizer, load_tokenizer
from tp import World, init_world

TASKS = ("question", "arithmetic", "sorting", "counting", "copying")
ORDER = ("standard", "parallel", "ladder", "hybrid", "desync-2x", "desync-4x")
SEED = 2  # of the held-out documents
MAX_ANSWER = 64  # tokens
BATCH = 64


def perplexity(model: Transformer, tokenizer: Tokenizer, items: int) -> float:
    """exp of the mean negative log-likelihood (nats) a token, over held-out stories, the begin token not counted."""
    total, count = 0.0, 0
    for document in documents(SEED, items, split="heldout", kind="story"):
        logprobs, _ = score(model, tokenizer.encode(render(document), add_special_tokens=False))
        total -= sum(p for p in logprobs if p is not None)
        count += len(logprobs) - 1
    return math.exp(total / count)


def exact_match(model: Transformer, tokenizer: Tokenizer, task: str, items: int) -> float:
    """Share of held-out prompts whose greedy answer is the expected text to the letter."""
    by_length: dict[int, list[tuple[list[int], str]]] = defaultdict(list)
    for document in documents(SEED, items, split="heldout", kind=task):
        prompt = tokenizer.encode_chat(document.prompt_messages)
        by_length[len(prompt)].append((prompt, document.answer))
    right = 0
    for group in by_length.values():
        for first in range(0, len(group), BATCH):
            right += count_right(model, tokenizer, group[first : first + BATCH])
    return right / items


def count_right(model: Transformer, tokenizer: Tokenizer, batch: list[tuple[list[int], str]]) -> int:
    prompts = [prompt for prompt, _ in batch]
    outputs = [OutputStream(tokenizer, prompt, MAX_ANSWER, frozenset(tokenizer.eos_ids)) for prompt in prompts]
    greedy = [SamplingParams(temperature=0)] * len(batch)
    for tokens in generate(model, prompts, greedy, MAX_ANSWER, Timing()):
        for output, token in zip(outputs, tokens, strict=True):
            if output.finish_reason is None:
                output.push(token)
        if all(output.finish_reason for output in outputs):
            break
    return sum(output.text == expected for output, (_, expected) in zip(outputs, batch, strict=True))


def evaluate(path: Path, world: World, items: int) -> dict[str, Any]:
    """One row of the table: one checkpoint on the ranks at hand, fp32."""
    config = model_config(str(path), None, world.world_size)
    model = load_model(str(path), config, world, torch.float32)
    tokenizer = load_tokenizer(path)
    row: dict[str, Any] = {
        "model": path.name,
        "variant": config.description,
        "tp": world.world_size,
        "items_per_task": items,
        "perplexity": perplexity(model, tokenizer, items),
    }
    return row | {task: exact_match(model, tokenizer, task, items) for task in TASKS}


def work(args: argparse.Namespace) -> None:
    """One torchrun worker: evaluate every model, and let rank 0 write the rows."""
    world = init_world("cpu")
    rows = []
    for path in tqdm(args.models, desc=f"tp {world.world_size}", unit="model", disable=world.rank > 0):
        rows.append(evaluate(path, world, args.items))
    if world.rank == 0:
        args.rows.write_text(json.dumps(rows))


def launch(ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as rows:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), __file__]
        command += ["--items", str(args.items), "--rows", rows.name, "--models", *map(str, args.models)]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise UserError(f"the evaluation on {ranks} ranks failed; see above")
        return json.loads(Path(rows.name).read_text())


def table(rows: list[dict[str, Any]], where: dict[str, Any]) -> str:
    """Markdown: one line a model, perplexity at each tp, and exact match at tp 1 with its spread over tp if there is any."""
    sizes = sorted({row["tp"] for row in rows})
    head = ["model", "variant", *(f"perplexity, tp {n}" for n in sizes), *TASKS, "mean"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = {row["tp"]: row for row in rows if row["model"] == name}
        cells = [f"`{name}`", mine[sizes[0]]["variant"], *(f"{mine[n]['perplexity']:.4f}" for n in sizes)]
        for task in (*TASKS, "mean"):
            values = [_task(mine[n], task) * 100 for n in sizes]
            same = max(values) - min(values) < 0.05
            cells.append(f"{values[0]:.1f}" if same else f"{min(values):.1f} to {max(values):.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    caption = (
        f"Exact match in %, {rows[0]['items_per_task']} held-out items a task, greedy, fp32; a single figure is the same at "
        f"tp {', '.join(map(str, sizes))}. Made on {describe(where, 'cpu')}."
    )
    return "\n".join([*lines, "", caption, ""])


def _task(row: dict[str, Any], task: str) -> float:
    return sum(row[t] for t in TASKS) / len(TASKS) if task == "mean" else row[task]


def main() -> None:
    found = [ROOT / "models" / f"tiny-{name}" for name in ORDER]
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", default=found, help="checkpoints (default: models/tiny-*)")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks (default: 1 2 4)")
    parser.add_argument("--items", type=int, default=200, help="held-out documents a task (default: 200)")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rows:
        work(args)
        return
    rows = [row for ranks in args.tp for row in launch(ranks, args)]
    where = machine()
    path = write_json("accuracy", {"machine": where, "rows": rows})
    text = table(rows, where)
    (RESULTS / "accuracy.md").write_text(text)
    print(f"{text}\nwrote {path.relative_to(ROOT)} and accuracy.md beside it")


if __name__ == "__main__":
    run(main)
