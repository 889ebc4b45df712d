"""The times of a step by its rows, and of a draft by a one-layer EAGLE-3 head, with random weights.

    python -m scripts.bench.serving.draft_times --models llama-3-8b
    python launch.py --ranks 2 -m scripts.bench.serving.draft_times --models llama-3-70b:16 --rows 1 5

The head has the model's width and knows --draft-vocab of its ids; it uses the model's embedding, as most published heads. A draft
is timed as the engine makes it, with the host's work and the wait for its tokens. host_us is by how much a step with drafts, which
cannot be launched before the last one has ended, takes longer besides. On a GPU a step of 5 rows is padded to 8. Prints a JSON line
for each model.
"""

import argparse
import gc
import json
from statistics import median

import torch

from checkpoints.eagle import random_config, random_head
from checkpoints.presets import model_config
from checkpoints.weights import DTYPES, load_model
from cli import Parser, run
from engine.core import Engine
from engine.limits import EngineLimits
from engine.tuning import tune
from options import TUNE_SECONDS, ModelOptions, add_options, dtype_name, rank_options, whole_number
from tp import World, init_world

SEQUENCES, CONTEXT = 8, 2048


def measure(name: str, args: argparse.Namespace, world: World) -> dict[str, object]:
    config = model_config(name, args.variant, world.world_size, args.quantize)
    dtype = DTYPES[dtype_name(args.dtype, world.device.type)]
    model = load_model(name, config, world, dtype)
    head = random_head(random_config(config, args.draft_vocab), world, dtype)
    tune(model, world, 2 * SEQUENCES, args.tune_seconds, draft=head)
    limits = EngineLimits(CONTEXT, SEQUENCES, max_batch_tokens=256, draft_tokens=args.tokens, kv_dtype=args.kv_dtype)
    engine = Engine(model, None, limits, world, head)
    engine.capture()
    drafter = engine.speculation.model_drafter
    assert drafter is not None
    steps = {rows: median(engine.runner.seconds(rows) for _ in range(args.repeats)) for rows in args.rows}
    draft = args.tokens * median(drafter.seconds(1, args.tokens) for _ in range(args.repeats))
    host = median(engine.runner.host_seconds() for _ in range(args.repeats))
    first = steps[args.rows[0]]
    return {
        "model": name,
        "ranks": world.world_size,
        "communicator": world.comm.name,
        "step_us": {rows: round(1e6 * seconds, 1) for rows, seconds in steps.items()},
        "step_ratio": {rows: round(seconds / first, 3) for rows, seconds in steps.items()},
        "chain_tokens": args.tokens,
        "chain_us": round(1e6 * draft, 1),
        "chain_share_of_step": round(draft / first, 3),
        "host_us": round(1e6 * host, 1),
    }


def main() -> None:
    parser = Parser(description=__doc__)
    add_options(parser, ModelOptions, "the models", without=("model", "tp", "max_model_len", "compile"))
    parser.add_argument(
        "--models", nargs="+", default=["llama-3-8b", "llama-3-70b:16"], help="default: llama-3-8b llama-3-70b:16"
    )
    parser.add_argument(
        "--rows", nargs="+", type=whole_number(1, 2 * SEQUENCES), default=[1, 2, 3, 5, 9], help="default: 1 2 3 5 9"
    )
    parser.add_argument("--tokens", type=whole_number(1, 7), default=4, help="of a draft (default: 4)")
    parser.add_argument("--draft-vocab", type=whole_number(1), default=32000, help="ids that the head knows (default: 32000)")
    parser.add_argument(
        "--tune-seconds",
        type=whole_number(0),
        default=TUNE_SECONDS,
        help="to find the fastest kernels, as in the server (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=whole_number(1), default=50, help="default: 50")
    args = parser.parse_args()
    world = init_world(**rank_options(args))
    for name in args.models:
        with torch.inference_mode():
            result = measure(name, args, world)
        if world.rank == 0:
            print(json.dumps(result), flush=True)
        gc.collect()  # the next model needs the memory
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(main)
