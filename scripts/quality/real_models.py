"""Measure public checkpoints: greedy texts and perplexity beside transformers, in every width.

    python -m scripts.quality.real_models --models smollm2 --tokens 256  # minutes on a CPU

The first run fetches the models (`scripts/lib/real_models.py`) and writes int4 by GPTQ. Texts come from Python: topics of its
documentation, modules of its library. Writes real-models.json and .md into out (with --write into docs/results). Each row is kept in
out/real-models.jsonl as soon as it is measured, so a command that was stopped goes on.
"""

import argparse
import json
import math
import subprocess
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
import transformers

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from cli import Parser, run
from engine import LLM, SamplingParams
from engine.llm import encode_chat, encode_texts
from errors import UserError
from options import whole_number
from quantized.scheme import SCHEMES
from ranks.processes import on_ranks
from scripts.lib.experiment import Experiment
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.real_models import MODELS, NAMES, checkpoint, fetch, folder, text
from scripts.lib.results import OUT, ROOT, add_write_option, results_folder, write_table
from scripts.lib.rows import code_digest
from text.tokenizer_files import load_tokenizer
from tp import World, init_world

WIDTHS = ("transformers", "float32", "bfloat16", *SCHEMES, "gptq")
COMMS = ("exact", "int8", "int6", "int4")
QUESTIONS = {
    "smollm2": ("What is the capital of France?", "Write a short story about a lighthouse.", "Why is the sky blue?"),
    "coder": ("Write a Python function that reverses a string.", "What does `git rebase` do?", "Sort a list of pairs by its second item."),
}  # fmt: skip
NEW_TOKENS = 48
ROW = OUT / "real-models-row.json"  # where the ranks leave what they found


def evaluate(setting: dict[str, Any], world: World) -> dict[str, Any]:
    """Perplexity; in fp32 with exact sums also log-probabilities and greedy texts, to be compared. Collective."""
    name, width = setting["model"], setting["width"]
    path = checkpoint(name, width)
    config = model_config(path, None, world.world_size, width if width in SCHEMES else None)
    model = load_model(path, config, world, torch.float32 if width == "float32" else torch.bfloat16)
    llm = LLM(model, load_tokenizer(folder(name)), world, kv_dtype=setting["kv"])
    ids, prompts = inputs(setting)
    if setting["kv"] == "auto":
        logprobs = [one for one in llm.score(ids).logprobs if one is not None]
    else:  # through the cache
        found = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs or []
        logprobs = [one.chosen.logprob for one in found if one]
    if width != "float32" or setting["comm"] != "exact":
        return figures(logprobs)
    answers = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0))
    return figures(logprobs, [answer.token_ids for answer in answers])


def reference(setting: dict[str, Any]) -> dict[str, Any]:
    """The same by transformers, in fp32."""
    device, (read, prompts) = setting["device"], inputs(setting)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(setting["model"]), dtype=torch.float32).to(device)
    ids = torch.tensor([read], device=device)
    with torch.inference_mode():
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
        asked = [torch.tensor([prompt], device=device) for prompt in prompts]
        made = [model.generate(one, attention_mask=one > -1, max_new_tokens=NEW_TOKENS, do_sample=False) for one in asked]
    return figures(logprobs, [answer[0, one.shape[1] :].tolist() for one, answer in zip(asked, made, strict=True)])


def inputs(setting: dict[str, Any]) -> tuple[list[int], list[list[int]]]:
    """The ids of the measured text, and those of each question."""
    name, tokenizer = setting["model"], load_tokenizer(folder(setting["model"]))
    prompts = [encode_chat(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS[name]]
    return encode_texts(tokenizer, [text(name)])[0][: setting["tokens"]], prompts


def figures(logprobs: Sequence[float], answers: list[list[int]] | None = None) -> dict[str, Any]:
    found = {"perplexity": math.exp(-fmean(logprobs))}
    return found if answers is None else found | {"logprobs": logprobs, "answers": answers}


def work(setting: dict[str, Any]) -> None:
    """What one rank does."""
    world = init_world(setting["device"], None if setting["comm"] == "exact" else setting["comm"])
    row = reference(setting) if setting["width"] == "transformers" else evaluate(setting, world)
    if world.rank == 0:
        ROW.write_text(json.dumps(row))


def settings(args: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    two = args.device == "cpu" or torch.cuda.device_count() > 1
    for name in args.models:
        plain = {"model": name, "tokens": args.tokens, "device": args.device, "kv": "auto", "tp": 1, "comm": "exact"}
        found += [plain | {"width": width} for width in WIDTHS] + [plain | {"width": "bfloat16", "kv": "fp8"}]
        if two and model_config(str(folder(name)), None, 1).n_heads % 2 == 0:
            found += [plain | {"width": "float32", "tp": 2, "comm": comm} for comm in COMMS]
    return found


def measured(setting: dict[str, Any]) -> dict[str, Any]:
    """One setting's figures, from processes of its own."""
    checkpoint(setting["model"], setting["width"])  # here, where there is one rank
    command = [*on_ranks(setting["tp"]), "-m", "scripts.quality.real_models", "--worker", json.dumps(setting)]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise UserError(f"{setting} failed; see above. The same command goes on")
    return dict(json.loads(ROW.read_text()))


def table(rows: list[dict[str, Any]], where: dict[str, Any]) -> str:
    """A line for each setting: perplexity, and beside transformers in fp32 the largest difference of log-probabilities and equal texts."""
    lines, exact = [], rows[0]
    for row in rows:
        setting, differ, same = row["setting"], "", ""
        exact = row if setting["width"] == "transformers" else exact
        if "answers" in row and row is not exact:
            differ = f"{max(abs(a - b) for a, b in zip(row['logprobs'], exact['logprobs'], strict=True)):.1e}"
            same = f"{sum(a == b for a, b in zip(row['answers'], exact['answers'], strict=True))} of {len(exact['answers'])}"
        more = ["fp8 KV cache"] * (setting["kv"] == "fp8") + [f"2 ranks, {setting['comm']} sums"] * (setting["tp"] > 1)
        what = ", ".join([NAMES.get(setting["width"], setting["width"]), *more])
        change = f"{row['perplexity'] / exact['perplexity'] - 1:+.2%}"
        lines.append([MODELS[setting["model"]].title, what, f"{row['perplexity']:.3f}", change, differ, same])
    head = ["model", "computed in", "perplexity", "change", "largest difference of a log-probability", "equal greedy texts"]
    first, python = rows[0]["setting"], where["python"]
    what, made = f"{first['tokens']} tokens of text from Python {python}", describe(where, first["device"])
    return captioned(head, lines, f"{what}; widths other than float32 compute in bf16. Made on {made}.")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--tokens", type=whole_number(2), default=1024, metavar="N", help="of the text (default: 1024)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    add_write_option(parser)
    args = parser.parse_args()
    if args.worker:
        work(args.worker)
        return
    target, where = results_folder(args), machine()
    for name in args.models:
        fetch(name)
    rows = Experiment(OUT / "real-models.jsonl", {"torch": torch.__version__, "code": code_digest()})
    found = list(rows.measure(settings(args), lambda setting: measured(dict(setting))))
    kept = [{key: value for key, value in row.items() if key not in ("logprobs", "about")} for row in found]
    content = table(found, where)
    write_table("real-models", {"machine": where, "rows": kept}, content, target)
    print(content)


if __name__ == "__main__":
    run(main)
