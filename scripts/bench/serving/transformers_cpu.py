"""Compare decode speed on the CPU with transformers.generate: same weights (models/tiny-standard), threads and prompt.

    python -m scripts.bench.serving.transformers_cpu --threads 1 --new-tokens 256

The two alternate run by run, so that a slowdown of the machine affects both. The ratio is that of the medians. Both decode
greedily in fp32 with a KV cache, uncompiled, and must produce the same tokens. Writes bench-cpu.json and .md into out (with
--write into docs/results).
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from checkpoint import load_model
from cli import Parser, run
from engine import LLM, SamplingParams
from errors import UserError
from presets import model_config
from scripts.lib.machine import describe, machine
from scripts.lib.results import ROOT, add_write_option, results_folder, write_json, write_text
from tokenizer_files import load_tokenizer
from tp import init_world


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-standard", help="a standard checkpoint")
    parser.add_argument("--threads", type=int, default=1, help="threads of both programs (default: 1)")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8], help="batch sizes (default: 1 8)")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens to decode (default: 256)")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each program (default: 5)")
    add_write_option(parser)
    args = parser.parse_args()
    folder = results_folder(args)
    torch.set_num_threads(args.threads)
    world = init_world("cpu")
    ours = load_model(str(args.model), model_config(str(args.model), None, 1), world, torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    prompt = load_tokenizer(args.model).encode("Once upon a time")
    greedy, llm = SamplingParams(max_tokens=args.new_tokens, temperature=0, ignore_eos=True), LLM(ours, world=world)

    def run_ours(batch: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        answers = llm.generate([prompt] * batch, greedy)
        return time.perf_counter() - start, answers[0].token_ids

    def run_theirs(batch: int) -> tuple[float, list[int]]:
        ids, start = torch.tensor([prompt] * batch), time.perf_counter()
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.new_tokens,
            min_new_tokens=args.new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return time.perf_counter() - start, out[0, len(prompt) :].tolist()

    rows: list[dict[str, Any]] = []
    for batch in args.batch_size:
        run_ours(batch), run_theirs(batch)
        seconds: dict[str, list[float]] = {"rung": [], "transformers": []}
        for _ in tqdm(range(args.repeats), desc=f"batch {batch}", unit="turn"):
            for name, measured in (("rung", run_ours(batch)), ("transformers", run_theirs(batch))):
                seconds[name].append(measured[0])
        if run_ours(batch)[1] != run_theirs(batch)[1]:
            raise UserError("the two did not decode the same tokens, so their times cannot be compared")
        speed = {name: batch * args.new_tokens / median(s) for name, s in seconds.items()}
        rows.append({"batch": batch, "tokens_per_second": speed, "seconds": seconds})
    where = machine()
    settings = {"model": args.model.name, "threads": args.threads, "new_tokens": args.new_tokens}
    path = write_json("bench-cpu", {"machine": where, "settings": settings, "rows": rows}, folder)
    text = table(rows, f"{args.threads} thread(s), median of {args.repeats} runs. Made on {describe(where, 'cpu')}.")
    write_text(path.with_suffix(".md"), text, path)
    print(f"{text}\nwrote {path.relative_to(ROOT)}")


def table(rows: list[dict[str, Any]], caption: str) -> str:
    lines = ["| batch | Rung, tokens/s | transformers, tokens/s | ratio |", "|---|---|---|---|"]
    for row in rows:
        ours, theirs = row["tokens_per_second"]["rung"], row["tokens_per_second"]["transformers"]
        lines.append(f"| {row['batch']} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |")
    return "\n".join([*lines, "", caption, ""])


if __name__ == "__main__":
    run(main)
