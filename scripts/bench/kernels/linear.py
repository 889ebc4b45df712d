"""Compare every candidate config of linear layers of few rows with cuBLAS on one GPU; make a table for `kernels/linear_configs`.

    python launch.py --ranks 2 -m scripts.bench.kernels.linear --out linear.json --seconds 300   # half of the shapes a GPU
    python -m scripts.bench.kernels.linear --merge linear-0.json linear-1.json                   # into kernels/linear_configs
    python -m scripts.bench.kernels.linear --shapes 70b-tp4 --rows 1 16

`kernels/linear_tuning.py` says how a time is measured. Here the layers have distinct random weights, many times the size of
the L2 cache, so that every weight is read from HBM. Shapes that end in -swiglu are compared with cuBLAS plus a separate kernel for
silu(gate) * up. Candidates that give wrong results are dropped, with a message. Writes {"machine", "version",
"times", "configs"}; on several ranks each writes a file of its own, such as linear-0.json. The version is that of the kernels.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cli import Parser, run
from errors import UserError
from kernels.linear_config import CONFIGS, MAX_ROWS, PROMPT_ROWS, VERSION, Config, Shape, format_config, read_table
from kernels.linear_tuning import CHAIN, ROWS, Problem, compile_kernels, measure, row_counts, winner
from scripts.lib.machine import machine

POOL_BYTES = 1 << 30  # of weights; more if two layers of the largest shape need more
LARGEST = 140e9  # bytes of a rank's weights that a GPU can hold
COMPILING_SHARE = 0.6  # of --seconds


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int

    def shapes(self, ranks: int) -> dict[str, Shape]:
        """The layers of each of `ranks` ranks, by name."""
        heads, kv_heads = self.heads // ranks, max(1, self.kv_heads // ranks)
        inter, vocab = self.intermediate // ranks, -(-self.vocab // ranks)
        return {
            "qkv": Shape((heads + 2 * kv_heads) * self.head_dim, self.hidden),
            "o": Shape(self.hidden, heads * self.head_dim),
            "gate_up-swiglu": Shape(2 * inter, self.hidden, swiglu=True),
            "down": Shape(self.hidden, inter),
            "head": Shape(vocab, self.hidden),
        }

    def fits(self, ranks: int) -> bool:
        """Whether this number of ranks can divide and hold the model."""
        shapes = self.shapes(ranks)
        size = self.layers * sum(shape.bytes for shape in shapes.values()) - (self.layers - 2) * shapes["head"].bytes
        return self.heads % ranks == 0 and self.intermediate % ranks == 0 and size <= LARGEST


MODELS = (  # the most common ones first
    Model("llama-70b", 8192, 64, 8, 128, 28672, 128256, 80),
    Model("llama-8b", 4096, 32, 8, 128, 14336, 128256, 32),
    Model("llama-405b", 16384, 128, 8, 128, 53248, 128256, 126),
    Model("llama-3b", 3072, 24, 8, 128, 8192, 128256, 28),
    Model("llama-1b", 2048, 32, 8, 64, 8192, 128256, 16),
    Model("qwen3-32b", 5120, 64, 8, 128, 25600, 151936, 64),
    Model("qwen3-14b", 5120, 40, 8, 128, 17408, 151936, 40),
    Model("qwen3-8b", 4096, 32, 8, 128, 12288, 151936, 36),
    Model("qwen3-4b", 2560, 32, 8, 128, 9728, 151936, 36),
    Model("qwen3-1.7b", 2048, 16, 8, 128, 6144, 151936, 28),
    Model("qwen3-0.6b", 1024, 16, 8, 128, 3072, 151936, 28),
    Model("qwen2.5-72b", 8192, 64, 8, 128, 29568, 152064, 80),
    Model("qwen2.5-32b", 5120, 40, 8, 128, 27648, 152064, 64),
    Model("qwen2.5-14b", 5120, 40, 8, 128, 13824, 152064, 48),
    Model("qwen2.5-7b", 3584, 28, 4, 128, 18944, 152064, 28),
    Model("qwen2.5-3b", 2048, 16, 2, 128, 11008, 151936, 36),
    Model("qwen2.5-1.5b", 1536, 12, 2, 128, 8960, 151936, 28),
    Model("qwen2.5-0.5b", 896, 14, 2, 64, 4864, 151936, 24),
    Model("mistral-7b", 4096, 32, 8, 128, 14336, 32768, 32),
    Model("mistral-24b", 5120, 32, 8, 128, 32768, 131072, 40),
    Model("mistral-123b", 12288, 96, 8, 128, 28672, 32768, 88),
)
DEGREES = (1, 2, 4, 8)


def shapes() -> dict[str, Shape]:
    """The distinct shapes of the models on 1 to 8 ranks, by the name of the first layer that has it: llama-70b-tp8-qkv."""
    names: dict[Shape, str] = {}
    for model in MODELS:
        for ranks in filter(model.fits, DEGREES):
            for layer, shape in model.shapes(ranks).items():
                names.setdefault(shape, f"{model.name}-tp{ranks}-{layer}")
    return {name: shape for shape, name in names.items()}


def problem(rows: int, shape: Shape, pool: torch.Tensor) -> Problem:
    size = shape.n * shape.k
    count = min(CHAIN, len(pool) // size)
    return Problem(rows, shape, [pool[i * size :][:size].view(shape.n, shape.k) for i in range(count)])


def lines(name: str, task: Problem, times: dict[Config | None, float]) -> list[dict[str, Any]]:
    """A row for each candidate and for cuBLAS, the fastest first."""
    return [
        {"shape": name, "rows": task.rows, **asdict(task.shape), "config": format_config(config)}
        | {"us": round(1e6 * seconds, 2), "gb_per_s": round(task.shape.bytes / seconds / 1e9)}
        for config, seconds in sorted(times.items(), key=lambda item: item[1])
    ]


def describe(found: list[dict[str, Any]]) -> str:
    plain = next(line for line in found if line["config"] is None)
    best = found[0]
    text = f"{best['shape']:>26} {best['n']:>6} x {best['k']:<6} {best['rows']:>3} rows: cuBLAS {plain['us']:7.2f} us "
    text += f"{plain['gb_per_s']:>5} GB/s, best {best['us']:7.2f} us {best['gb_per_s']:>5} GB/s  "
    return text + ("cuBLAS" if best["config"] is None else " ".join(f"{k}={v}" for k, v in best["config"].items()))


def bench(args: argparse.Namespace) -> None:
    start = time.monotonic()
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    known = shapes()
    chosen = [name for name in known if not args.shapes or any(word in name for word in args.shapes)][rank::ranks]
    if not chosen:
        raise UserError(f"--shapes {' '.join(args.shapes)} names no shape; known: {' '.join(known)}")
    largest = max(known[name].bytes for name in chosen)
    pool = torch.randn(max(POOL_BYTES, 2 * largest) // 2, device=device, dtype=torch.bfloat16).mul_(0.02)
    counts = {name: set(row_counts(known[name], MAX_ROWS)) & set(args.rows) for name in chosen}
    tasks = [(name, problem(rows, known[name], pool)) for name in chosen for rows in sorted(counts[name])]
    content: dict[str, Any] = {"machine": machine(), "gpu": torch.cuda.get_device_name(), "times": [], "configs": {}}
    with torch.inference_mode():
        compile_kernels([task for _, task in tasks], args.threads, start + COMPILING_SHARE * args.seconds)
        print(f"compiled for {time.monotonic() - start:.0f} s", flush=True)
        for name, task in tasks:
            if time.monotonic() - start > args.seconds:
                print(f"out of time before {task.rows} rows, {name}")
                break
            times, messages = measure(task)
            found = lines(name, task, times)
            print("\n".join((*messages, describe(found))), flush=True)
            content["times"] += found
            content["configs"][task.key] = format_config(winner(task.rows, times))
    write(content, file_of(args.out, rank, ranks))


def file_of(out: Path, rank: int, ranks: int) -> Path:
    """The file that a rank writes."""
    return out if ranks == 1 else out.with_stem(f"{out.stem}-{rank}")


def merge(parts: list[Path]) -> None:
    """Write the configs of several runs into the table of their GPU, without their times. Shapes that they lack stay, as older
    ones if they were measured with an earlier version of the kernels."""
    contents = [json.loads(path.read_text()) for path in parts]
    gpus = {content["gpu"] for content in contents}
    if len(gpus) > 1:
        raise UserError(f"these runs are of different GPUs: {', '.join(sorted(gpus))}; merge those of one at a time")
    if any(content.get("version") != VERSION for content in contents):
        raise UserError("one of these runs measured other versions of the kernels; measure it again")
    path = CONFIGS / f"{gpus.pop().replace(' ', '-')}.json"
    older, before = read_table(path) if path.exists() else ({}, {})
    configs = before | {key: config for content in contents for key, config in content["configs"].items()}
    older = {key: config for key, config in older.items() if key not in configs}
    write({"machine": contents[0]["machine"], "older": older, "configs": dict(sorted(configs.items()))}, path)


def write(content: dict[str, Any], path: Path) -> None:
    """Write `content` as JSON with one line per time and per config."""
    path.parent.mkdir(parents=True, exist_ok=True)
    times = ",\n".join(f"  {json.dumps(line)}" for line in content.get("times", []))
    gpu = f' "gpu": {json.dumps(content["gpu"])},\n' if "gpu" in content else ""
    text = f'{{\n "machine": {json.dumps(content["machine"])},\n{gpu} "version": {VERSION},\n'
    text += f' "times": [\n{times}\n ],\n' if times else ""
    tables = {"older": content["older"]} if content.get("older") else {}
    tables |= {"configs": content["configs"]}  # also an empty one, which --merge can read
    text += ",\n".join(f' "{name}": {{\n{entries(table)}\n }}' for name, table in tables.items())
    path.write_text(text + "\n}\n")
    print(f"wrote {path}")


def entries(table: Mapping[str, Any]) -> str:
    return ",\n".join(f"  {json.dumps(key)}: {json.dumps(config)}" for key, config in table.items())


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("linear.json"), help="the file to write (default: linear.json)")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=[],
        help="only shapes whose name contains one of these words, such as llama-70b-tp4 or down",
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[*ROWS, *PROMPT_ROWS],
        choices=[*ROWS, *PROMPT_ROWS],
        help="input rows (default: all)",
    )
    parser.add_argument("--seconds", type=float, default=55, help="start no further case after this many seconds (default: 55)")
    parser.add_argument("--threads", type=int, default=16, help="threads that compile (default: 16)")
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="merge the configs of these files of earlier runs into kernels/linear_configs"
    )
    args = parser.parse_args()
    if args.merge:
        merge(args.merge)
    elif not torch.cuda.is_available():
        raise UserError("measuring needs a GPU, and this machine shows none")
    else:
        bench(args)


if __name__ == "__main__":
    run(main)
