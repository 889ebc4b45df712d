"""Measure quantized linear layers of few rows on one GPU, beside the same layers in 16 bits.

    python -m scripts.bench.kernels.linear_quantized --seconds 580
    python -m scripts.bench.kernels.linear_quantized --models llama-3-8b --quantize bfloat16 fp8 --rows 1 16

The layers are those of a model of BLOCKS blocks with random weights, called as its blocks call them: gate and up projection with
SwiGLU; fp8 layers with codes as inputs where the kernel before them writes codes. The kernels' configs are found as a server's first
start finds them, and kept where it keeps them. Of several ranks there is the first one, without its all-reduces.

A time is that of one layer in a CUDA graph of a chain of layers whose weights the L2 cache cannot hold (`kernels/linear_tuning.py`).
The head is in 16 bits or, as `--quantize int8+head` has it, in int8. Writes {"machine", "read_bytes_per_second", "unmeasured",
"rows"}: the read ceiling of the GPU, the cases for whose configs there was no time, and µs, bytes and TB/s of weights and scales of
each layer. `make performance` makes a table of it.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from checkpoints.presets import model_config
from checkpoints.weights import build_model
from cli import Parser, run
from comm import Local, NoCommunication
from config import ModelConfig
from engine.tuning import tune
from errors import UserError
from kernels.linear_tuning import CHAIN, seconds_per_layer
from kernels.row_codes import RowCodes, quantize_rows
from layers.linear import ShardedLinear
from model import Transformer
from options import TUNE_SECONDS, whole_number
from scripts.lib.machine import machine
from scripts.lib.results import check_output
from tp import World

RANKS = {"llama-3-8b": (1,), "llama-3-70b": (1, 2)}  # of each model
ROWS = (1, 2, 4, 8, 16, 64)
BLOCKS = CHAIN  # of the model: one for each layer of a chain
DTYPE = torch.bfloat16
# values of --quantize here: those of the engine
QUANTIZE = {"bfloat16": None, "fp8": "fp8", "int8": "int8+head", "int4": "int4"}
LAYERS: dict[str, Callable[[Any], Sequence[ShardedLinear]]] = {
    "qkv": lambda model: [block.attention.wqkv for block in model.layers],
    "o": lambda model: [block.attention.wo for block in model.layers],
    "gate_up-swiglu": lambda model: [block.mlp.w_gate_up for block in model.layers],
    "down": lambda model: [block.mlp.w_down for block in model.layers],
    "head": lambda model: [model.head],  # larger than L2 alone
}
AFTER_CODES = ("qkv", "gate_up-swiglu", "down")  # layers behind a kernel that can write codes: a norm, or SwiGLU


class Place(NamedTuple):
    """Whose layers are measured. quantize: a key of QUANTIZE."""

    model: str
    ranks: int
    quantize: str

    @property
    def preset(self) -> str:
        return f"{self.model}:{BLOCKS}"

    @property
    def config(self) -> ModelConfig:
        return model_config(self.preset, None, self.ranks, QUANTIZE[self.quantize])

    @property
    def layers(self) -> list[str]:
        """The measured ones. Where only the blocks are quantized, the head is that of bfloat16."""
        flag = QUANTIZE[self.quantize]
        return [name for name in LAYERS if name != "head" or flag is None or flag.endswith("+head")]


def places(args: argparse.Namespace) -> list[Place]:
    """Raises UserError if there are none."""
    found = [
        Place(model, ranks, quantize)
        for model in args.models
        for ranks in RANKS[model]
        if ranks in args.ranks
        for quantize in args.quantize
    ]
    if not found:
        known = "; ".join(f"{model} on {' and '.join(map(str, ranks))}" for model, ranks in RANKS.items())
        raise UserError(f"--models and --ranks name nothing that is measured; known: {known} ranks")
    return found


def build(place: Place, device: torch.device) -> Transformer:
    """The first rank's model with random weights, ready for the kernels of `device`."""
    world = World(0, place.ranks, device, NoCommunication(0, place.ranks))
    return build_model(place.preset, place.config, world, DTYPE)


def input_of(name: str, layer: ShardedLinear, rows: int) -> Tensor | RowCodes:
    """A random input (rows, in_features) as the kernel before the layer called `name` leaves it."""
    x = torch.randn(rows, layer.in_features, device=next(layer.parameters()).device, dtype=DTYPE)
    return quantize_rows(x) if name in AFTER_CODES and layer.reads_codes(x) else x


def read_bytes(layer: ShardedLinear) -> int:
    """Of its weight, scales and zero points."""
    return sum(tensor.nbytes for tensor in layer.parameters())


@torch.inference_mode()
def microseconds(name: str, layers: Sequence[ShardedLinear], rows: int) -> float:
    """Of one of the layers called `name`, which all have the same shape."""
    x = input_of(name, layers[0], rows)

    def call(layer: Any) -> Any:
        return layer(x)

    chain: list[Any] = list(islice(cycle(layers), CHAIN))
    return 1e6 * seconds_per_layer(call, chain)


def measured(place: Place, model: Transformer, counts: Sequence[int], deadline: float) -> Iterator[dict[str, Any]]:
    """A row for each layer and each number of rows in `counts`, until `deadline` of `time.monotonic`."""
    for name in place.layers:
        layers = LAYERS[name](model)
        n, k, size = layers[0].out_features, layers[0].in_features, read_bytes(layers[0])
        for rows in counts:
            if time.monotonic() > deadline:
                return
            us = microseconds(name, layers, rows)
            shape = {"layer": name, "n": n, "k": k, "rows": rows, "bytes": size}
            yield {**place._asdict(), **shape, "us": round(us, 2), "tb_per_s": round(size / us / 1e6, 3)}


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """A line of one layer's rows."""
    first = rows[0]
    where = (
        f"{first['model']} tp {first['ranks']} {first['quantize']:>8} {first['layer']:>14} {first['n']:>6} x {first['k']:<5}"
    )
    return f"{where} " + "  ".join(f"{row['rows']}: {row['us']:.1f} us {row['tb_per_s']:.2f} TB/s" for row in rows)


def bench(args: argparse.Namespace, device: torch.device, ceiling: Callable[[], float]) -> None:
    """Measure all cases and write them after each model. ceiling: measures the bytes/s at which `device` reads."""
    deadline = time.monotonic() + args.seconds
    content: dict[str, Any] = {"machine": machine(), "read_bytes_per_second": ceiling(), "unmeasured": 0, "rows": []}
    print(f"reads at {content['read_bytes_per_second'] / 1e12:.3f} TB/s", flush=True)
    torch.cuda.empty_cache()
    write(content, args.out)
    todo = places(args)
    total = sum(len(args.rows) * len(place.layers) for place in todo)
    with tqdm(total=total, unit="case", disable=None) as bar:
        for place in todo:
            if (left := deadline - time.monotonic()) <= 0:
                break
            bar.set_description(" ".join(map(str, place)))
            model = build(place, device)
            # a world of its own, because the other ranks are not there
            tuned = tune(model, World(0, 1, device, Local()), max(args.rows), min(left, args.tune_seconds))
            content["unmeasured"] += tuned.missing - len(tuned.found)
            found = []
            for row in measured(place, model, args.rows, deadline):
                found.append(row)
                bar.update()
            content["rows"] += found
            for name in dict.fromkeys(row["layer"] for row in found):
                bar.write(describe([row for row in found if row["layer"] == name]))
            write(content, args.out)
            del model
            torch.cuda.empty_cache()  # the next model's tensors have other sizes
    if len(content["rows"]) < total:
        print(f"out of time: {len(content['rows'])} of {total} cases measured")
    print(f"wrote {args.out}")


def write(content: dict[str, Any], path: Path) -> None:
    """As JSON with one line per row."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in content["rows"])
    head = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items() if name != "rows")
    path.write_text(f'{{\n{head},\n "rows": [\n{rows}\n ]\n}}\n')


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("linear-quantized.json"), help="the file to write (default: linear-quantized.json)"
    )
    parser.add_argument("--models", nargs="+", choices=RANKS, default=[*RANKS], help="default: all")
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2), default=[1, 2], help="default: 1 2")
    parser.add_argument(
        "--quantize",
        nargs="+",
        choices=QUANTIZE,
        default=[*QUANTIZE],
        help="how the weights are stored; int8 also quantizes the head (default: all)",
    )
    parser.add_argument(
        "--rows", nargs="+", type=whole_number(1, 128), default=[*ROWS], help="input rows (default: 1 2 4 8 16 64)"
    )
    parser.add_argument(
        "--seconds", type=float, default=580, help="start no further case after this many seconds (default: 580)"
    )
    parser.add_argument(
        "--tune-seconds",
        type=float,
        default=TUNE_SECONDS,
        help="as the server's: at most so many seconds of each model to find the fastest configs (default: %(default)s)",
    )
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    places(args)
    if not torch.cuda.is_available():
        raise UserError("measuring needs a GPU, and this machine shows none")
    from scripts.bench.kernels.read import read_ceiling  # needs Triton

    check_output(args.out)
    bench(args, torch.device("cuda", torch.cuda.current_device()), read_ceiling)


if __name__ == "__main__":
    run(main)
