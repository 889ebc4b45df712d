"""Measure which kernels make a model's linear layers of few rows fastest on this machine, and keep the result.

A server does the same at a model's first start, for at most --tune-seconds, and only for shapes that no table of this GPU has.
Here there is no time limit. The result is in $RUNG_CACHE, else in ~/.cache/rung; server, generate.py and benchmarks use it.
"""

import math

from checkpoints.hub import fetch_named
from checkpoints.presets import model_config
from checkpoints.weights import DTYPES, load_model
from cli import Parser, note, run
from engine.tuning import best, name_of, supported, tune
from errors import UserError
from options import ModelOptions, add_options, dtype_name
from tp import init_world


def main() -> None:
    parser = Parser(description=__doc__)
    add_options(
        parser,
        ModelOptions,
        "the model",
        without=("tp", "max_model_len", "kv_dtype", "compile", "overlap", "simulate_link", "deterministic"),
    )
    parser.add_argument("--rows", type=int, default=256, help="most sequences of a decode step (default: 256)")
    parser.add_argument("--rebuild", action="store_true", help="measure again what has been measured")
    args = parser.parse_args()
    fetch_named(args, model="model")
    world = init_world(args.device, args.comm, comm_error_budget=args.comm_error_budget)
    config = model_config(args.model, args.variant, world.world_size, args.quantize)
    model = load_model(args.model, config, world, DTYPES[dtype_name(args.dtype, world.device.type)])
    if not supported(model, world):
        raise UserError("only GPUs have kernels to choose from, for bfloat16 and float16; this is a CPU or another dtype")
    tuned = tune(model, world, args.rows, math.inf, quiet=world.rank > 0, rebuild=args.rebuild)
    if world.rank:
        return
    for message in tuned.messages:
        note(message)
    print(f"{'rows, n, k':>36} PyTorch µs  chosen µs")
    for case, times in sorted(tuned.found.items()):
        chosen = best(case, times)
        own = times[name_of(chosen)]
        print(f"{case:>36} {times[name_of(None)]:>10.2f} {own:>10.2f}  {chosen or 'PyTorch'}")
    print(f"{len(tuned.found)} cases measured in {tuned.seconds:.1f} s")


if __name__ == "__main__":
    run(main)
