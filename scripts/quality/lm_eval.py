"""Run lm-evaluation-harness against the server, and compare every score and answer with those of the model without a server.

    python -m scripts.quality.lm_eval --lm-eval .venv-lm-eval

There are two tasks, made from held-out documents. In the first, questions have four candidate answers, whose log-likelihoods
must agree with `LLM.score`. In the second, sums are answered greedily, and the texts must equal those of
`LLM.generate`. The harness needs its own environment, without torch:

    python3 -m venv .venv-lm-eval && .venv-lm-eval/bin/pip install 'lm-eval[api]' transformers

Starts its own server on a free loopback port, in fp32. The model without a server runs on one rank. With --ranks 2 a CPU's
matrix kernels may add in the same order as on one rank, so that the largest difference is 0; with 4 ranks it is not. Nothing is
downloaded. Writes lm-eval.json into out (with --write into docs/results).
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cli import Parser, run
from engine import LLM, SamplingParams
from engine.llm import encode_texts
from errors import UserError
from ranks.bounded import bounded
from scripts.corpus.documents import Document, documents
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import table_lines
from scripts.lib.results import ROOT, add_write_option, results_folder, write_json
from scripts.lib.servers import rung_server
from scripts.quality.heldout import SEED
from text.tokenizer import Tokenizer
from text.tokenizer_files import load_tokenizer
from tp import init_world

CHOICES = 4
MAX_ANSWER = 16  # tokens
LIMITS = ("--max-num-seqs", "64", "--max-queue", "256")  # of the server
INSTALL = "python3 -m venv .venv-lm-eval && .venv-lm-eval/bin/pip install 'lm-eval[api]' transformers"

Item = dict[str, Any]  # a document as the harness reads it
TASKS: dict[str, dict[str, Any]] = {
    "rung_question": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc"}],
    },
    "rung_arithmetic": {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["<|end|>"], "do_sample": False, "temperature": 0, "max_gen_toks": MAX_ANSWER},
        "metric_list": [{"metric": "exact_match"}],
    },
}


# --- the harness and its tasks --------------------------------------------------------------------------------------------


def questions(tokenizer: Tokenizer, items: int) -> list[Item]:
    """Prompts with four candidates: the right answer and the answers of three other documents."""
    rng = random.Random(SEED)
    found = list(documents(SEED, items, split="heldout", kind="question"))
    answers = sorted({document.answer for document in documents(SEED, max(items, 40), split="heldout", kind="question")})
    rows = []
    for document, prompt in zip(found, rendered(tokenizer, found), strict=True):
        choices = [document.answer, *rng.sample([a for a in answers if a != document.answer], CHOICES - 1)]
        rng.shuffle(choices)
        gold = choices.index(document.answer)
        rows.append({"prompt": prompt, "choices": choices, "gold": gold})
    return rows


def sums(tokenizer: Tokenizer, items: int) -> list[Item]:
    found = list(documents(SEED, items, split="heldout", kind="arithmetic"))
    prompts = rendered(tokenizer, found)
    return [{"prompt": prompt, "gold": document.answer} for document, prompt in zip(found, prompts, strict=True)]


def rendered(tokenizer: Tokenizer, asked: Sequence[Document]) -> list[str]:
    """The prompts, as the checkpoint's chat template writes them. Raises UserError for a template without an end or a bound."""
    return bounded("the prompts", lambda: [tokenizer.render_chat(document.prompt_messages) for document in asked])


def write_tasks(folder: Path, data: dict[str, list[Item]]) -> None:
    """Write a JSON-lines file and a task file for each task. The task files hold JSON, which is valid YAML."""
    for name, rows in data.items():
        lines = folder / f"{name}.jsonl"
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(lines)}},
            "test_split": "test",
            "doc_to_text": "prompt",
            "doc_to_target": "gold",
            "target_delimiter": "",
            **TASKS[name],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task, indent=1))


def run_harness(command: str, model: Path, url: str, folder: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Run the harness. Returns its results, and its samples by task in the order of the documents. Raises UserError."""
    settings = {
        "model": model.name,
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": model,
        "num_concurrent": 4,
        "max_retries": 1,  # a request that fails is an error, not a delay
        "max_length": 1024,
    }
    full = [command, "run", "--model", "local-completions", "--model_args", ",".join(f"{k}={v}" for k, v in settings.items())]
    full += ["--tasks", ",".join(TASKS), "--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(full, env=os.environ | offline, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise UserError(f"lm_eval ended with exit code {done.returncode}; see above")
    results = json.loads(next((folder / "out").rglob("results_*.json")).read_text())
    samples = {}
    for name in TASKS:
        lines = next((folder / "out").rglob(f"samples_{name}_*.jsonl")).read_text().splitlines()
        samples[name] = sorted(map(json.loads, lines), key=lambda sample: sample["doc_id"])
    return results, samples


# --- our own answers ------------------------------------------------------------------------------------------------------


def likelihood(llm: LLM, tokenizer: Tokenizer, prompt: str, answer: str) -> tuple[float, bool]:
    """The log-probability (nats) of `answer` after `prompt`, and whether greedy decoding would generate it."""
    before, ids = encode_texts(tokenizer, [prompt, prompt + answer], add_special_tokens=False)
    start = len(before)
    scores = llm.score(ids)
    return sum(p for p in scores.logprobs[start:] if p is not None), scores.argmax[start - 1 : -1] == ids[start:]


def greedy(llm: LLM, tokenizer: Tokenizer, prompt: str) -> str:
    ids = encode_texts(tokenizer, [prompt], add_special_tokens=False)
    return llm.generate(ids, SamplingParams(max_tokens=MAX_ANSWER, temperature=0))[0].text


def compare_scores(
    rows: list[Item], samples: list[Any], ours: Callable[[str, str], tuple[float, bool]], tolerance: float
) -> dict[str, Any]:
    """A row of the table: the share of right choices by our scores, and the differences between the harness's scores and ours."""
    right, largest, wrong = 0, 0.0, []
    for number, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        expected = [ours(row["prompt"], choice) for choice in row["choices"]]
        got = [(float(value), str(is_greedy) == "True") for ((value, is_greedy),) in sample["resps"]]  # logged as strings
        apart = [abs(mine - theirs) for (mine, _), (theirs, _) in zip(expected, got, strict=True)]
        largest = max(largest, *apart)
        if not all(a <= tolerance for a in apart) or [g for _, g in expected] != [g for _, g in got]:  # NaN is a mismatch
            wrong.append({"item": number, "ours": expected, "harness": got})
        values = [value for value, _ in expected]
        right += values.index(max(values)) == row["gold"]
    return {"compared": len(rows) * CHOICES, "ours": right / len(rows), "largest_difference": largest, "mismatches": wrong}


def compare_texts(rows: list[Item], samples: list[Any], ours: Callable[[str], str]) -> dict[str, Any]:
    right, wrong = 0, []
    for number, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        expected, got = ours(row["prompt"]), sample["resps"][0][0]
        right += expected == row["gold"]
        if expected != got:
            wrong.append({"item": number, "ours": expected, "harness": got})
    return {"compared": len(rows), "ours": right / len(rows), "mismatches": wrong}


def table(rows: list[dict[str, Any]]) -> str:
    head = ["task", "metric", "items", "harness", "ours", "compared", "mismatches", "largest difference, nats"]
    lines: list[list[object]] = []
    for row in rows:
        apart = f"{row['largest_difference']:.1e}" if "largest_difference" in row else "-"
        found = [f"{row['harness']:.3f}", f"{row['ours']:.3f}", row["compared"], len(row["mismatches"]), apart]
        lines.append([row["task"], row["metric"], row["items"], *found])
    return "\n".join(table_lines(head, lines))


def check(args: argparse.Namespace, command: str) -> tuple[str, list[dict[str, Any]]]:
    """Run server and harness, and compare. Returns the harness's version and one row per task."""
    tokenizer = load_tokenizer(args.model)
    llm = LLM(str(args.model), world=init_world("cpu"), dtype="float32")
    data = {"rung_question": questions(tokenizer, args.items), "rung_arithmetic": sums(tokenizer, args.items)}
    with tempfile.TemporaryDirectory() as name:
        write_tasks(Path(name), data)
        with rung_server(args.ranks, ["--model", str(args.model), *LIMITS], Path(name) / "server.log") as server:
            results, samples = run_harness(command, args.model, server.url, Path(name))
    compared = {
        "rung_question": compare_scores(
            data["rung_question"],
            samples["rung_question"],
            lambda prompt, answer: likelihood(llm, tokenizer, prompt, answer),
            args.tolerance,
        ),
        "rung_arithmetic": compare_texts(
            data["rung_arithmetic"], samples["rung_arithmetic"], lambda prompt: greedy(llm, tokenizer, prompt)
        ),
    }
    rows = []
    for task, row in compared.items():
        metric = TASKS[task]["metric_list"][0]["metric"]
        harness = results["results"][task][f"{metric},none"]
        rows.append({"task": task, "metric": metric, "items": args.items, "harness": harness, **row})
    return results["lm_eval_version"], rows


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--lm-eval",
        default="lm_eval",
        metavar="PATH",
        help="the harness's command, or its environment (default: lm_eval on PATH)",
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-hybrid", help="default: models/tiny-hybrid")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the server (default: 2)")
    parser.add_argument("--items", type=int, default=40, help="held-out documents per task (default: 40)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, help="largest difference of a candidate's scores, in nats (default: 1e-3)"
    )
    add_write_option(parser)
    args = parser.parse_args()
    folder = results_folder(args)
    if args.items < 1:
        raise UserError(f"--items must be at least 1, not {args.items}")
    command = shutil.which(args.lm_eval) or shutil.which(f"{args.lm_eval}/bin/lm_eval")
    if command is None:
        raise UserError(f"no lm_eval at {args.lm_eval}; install it with `{INSTALL}` and pass --lm-eval .venv-lm-eval")
    args.model = args.model.resolve()
    version, rows = check(args, command)
    where = machine()
    settings = {"model": args.model.name, "ranks": args.ranks, "seed": SEED, "tolerance": args.tolerance}
    path = write_json("lm-eval", {"machine": where, "lm_eval": version, "settings": settings, "rows": rows}, folder)
    print(f"{table(rows)}\n\nlm_eval {version}, {describe(where, 'cpu')}; wrote {path.relative_to(ROOT)}")
    if wrong := [f"{row['task']}: {len(row['mismatches'])} mismatches" for row in rows if row["mismatches"]]:
        raise UserError("; ".join(wrong))
    if wrong := [row["task"] for row in rows if abs(row["harness"] - row["ours"]) > 1e-9]:
        raise UserError(f"the harness's metric is not ours for {', '.join(wrong)}")


if __name__ == "__main__":
    run(main)
