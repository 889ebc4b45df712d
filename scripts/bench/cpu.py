"""Measure greedy decoding of one sequence on a CPU, by width, beside transformers and, with --gguf, llama.cpp (llama-cpp-python).

Programs take turns. A figure is the median over rounds of the tokens in a second of a thread's computing time, with several threads of
the clock; ratios are medians of each round's. Writes bench-cpu.json and .md into out (with --write into docs/results).
"""

import time
from collections.abc import Callable
from importlib import import_module
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from cli import Parser, run
from engine import LLM, SamplingParams
from options import whole_number
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.real_models import MODELS, fetch
from scripts.lib.results import add_write_option, results_folder, write_table

WIDTHS = {"float32": None, "bfloat16": None, "int8": "int8", "int4": "int4"}  # and --quantize
PROMPT = "Once upon a time"
Decode = Callable[[int], Any]  # generates so many tokens after PROMPT


def rung(path: Path, width: str) -> Decode:
    llm = LLM(str(path), dtype="float32" if width == "float32" else "bfloat16", quantize=WIDTHS[width])
    return lambda count: llm.generate([PROMPT], SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))


def of_transformers(path: Path, dtype: str) -> Decode:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    ids = transformers.AutoTokenizer.from_pretrained(path)(PROMPT, return_tensors="pt")
    return lambda count: model.generate(**ids, min_new_tokens=count, max_new_tokens=count, do_sample=False)


def of_llama_cpp(path: Path, threads: int) -> Decode:
    llama = import_module("llama_cpp").Llama(str(path), n_threads=threads, n_threads_batch=threads, verbose=False)
    options: Any = {"temperature": 0.0, "logit_bias": {llama.token_eos(): -1e9}}
    return lambda count: llama.create_completion(PROMPT, max_tokens=count, **options)


def main() -> None:
    parser = Parser(description=__doc__)
    for name, default in (("threads", 1), ("tokens", 32), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=whole_number(1), default=default, metavar="N", help=f"default: {default}")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="also measure llama.cpp, with this file")
    add_write_option(parser)
    args = parser.parse_args()
    target, path = results_folder(args), fetch("smollm2")
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    decodes = {f"Rung, {width}": rung(path, width) for width in WIDTHS}
    decodes |= {f"transformers, {width}": of_transformers(path, width) for width in ("float32", "bfloat16")}
    if args.gguf:
        decodes[f"llama.cpp, {args.gguf.name}"] = of_llama_cpp(args.gguf, args.threads)
    rows: dict[str, list[float]] = {name: [] for name in decodes}
    for _ in range(args.rounds):
        for name, decode in decodes.items():
            times = [clock(), decode(1), clock(), decode(1 + args.tokens), clock()][::2]
            rows[name].append((times[2] - 2 * times[1] + times[0]) / args.tokens)  # without the step that reads the prompt
    where, first = machine(), rows["Rung, float32"]
    lines = [[name, f"{1 / median(each):.1f}", f"{median(map(truediv, first, each)):.2f}"] for name, each in rows.items()]
    what = f"{MODELS['smollm2'].title}, {args.tokens} tokens, {args.threads} thread(s), {args.rounds} rounds in turn"
    content = captioned(["weights", "tokens/s", "times Rung's float32"], lines, f"{what}. Made on {describe(where, 'cpu')}.")
    write_table("bench-cpu", {"machine": where, "settings": what, "seconds": rows}, content, target)
    print(content)


if __name__ == "__main__":
    run(main)
