"""Compare decode speed on the CPU with transformers.generate: same weights (models/tiny-standard), threads and prompt.

    python -m scripts.bench.serving.transformers_cpu --threads 1 --new-tokens 256

The two alternate run by run, so that a slowdown of the machine affects both. The ratio is that of the medians. Both decode
greedily in fp32 with a KV cache, uncompiled, and must produce the same tokens. Writes bench-cpu.json and .md into out (with
--write into docs/results).
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from cli import Parser, run
from engine import LLM, SamplingParams
from engine.llm import encode_texts
from errors import UserError
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.results import ROOT, add_write_option, results_folder, write_table
from text.tokenizer_files import load_tokenizer
from tp import init_world

Decode = Callable[[int], list[int]]  # of a batch size: decodes, and returns the tokens of the first sequence


def load_rung(args: argparse.Namespace, prompt: list[int]) -> Decode:
    world = init_world("cpu")
    model = load_model(str(args.model), model_config(str(args.model), None, 1), world, torch.float32)
    greedy, llm = SamplingParams(max_tokens=args.new_tokens, temperature=0, ignore_eos=True), LLM(model, world=world)
    return lambda batch: llm.generate([prompt] * batch, greedy)[0].token_ids


def load_transformers(args: argparse.Namespace, prompt: list[int]) -> Decode:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()

    def decode(batch: int) -> list[int]:
        ids = torch.tensor([prompt] * batch)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.new_tokens,
            min_new_tokens=args.new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return decode


def compare(programs: dict[str, Decode], batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Times of a batch size, after a warm-up. Raises UserError if the programs decode different tokens."""
    first, *others = [decode(batch) for decode in programs.values()]
    if any(tokens != first for tokens in others):
        raise UserError("the two did not decode the same tokens, so their times cannot be compared")
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in tqdm(range(args.repeats), desc=f"batch {batch}", unit="turn"):
        for name, decode in programs.items():
            start = time.perf_counter()
            decode(batch)
            seconds[name].append(time.perf_counter() - start)
    speed = {name: batch * args.new_tokens / median(s) for name, s in seconds.items()}
    return {"batch": batch, "tokens_per_second": speed, "seconds": seconds}


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-standard", help="a standard checkpoint")
    parser.add_argument("--threads", type=int, default=1, help="threads of both programs (default: 1)")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8], help="batch sizes (default: 1 8)")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens to decode (default: 256)")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each program (default: 5)")
    add_write_option(parser)
    args: argparse.Namespace = parser.parse_args()
    return args


def table(rows: list[dict[str, Any]], caption: str) -> str:
    lines: list[list[object]] = []
    for row in rows:
        ours, theirs = row["tokens_per_second"]["rung"], row["tokens_per_second"]["transformers"]
        lines.append([row["batch"], f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"])
    head = ["batch", "Rung, tokens/s", "transformers, tokens/s", "ratio"]
    return captioned(head, lines, caption)


def main() -> None:
    args = parse_args()
    folder = results_folder(args)
    torch.set_num_threads(args.threads)
    [prompt] = encode_texts(load_tokenizer(args.model), ["Once upon a time"])
    programs = {"rung": load_rung(args, prompt), "transformers": load_transformers(args, prompt)}
    rows = [compare(programs, batch, args) for batch in args.batch_size]
    where = machine()
    settings = {"model": args.model.name, "threads": args.threads, "new_tokens": args.new_tokens}
    text = table(rows, f"{args.threads} thread(s), median of {args.repeats} runs. Made on {describe(where, 'cpu')}.")
    print(text)
    write_table("bench-cpu", {"machine": where, "settings": settings, "rows": rows}, text, folder)


if __name__ == "__main__":
    run(main)
