"""Train a model from scratch, or continue to train a checkpoint, on any number of ranks.

    python -m training.train --model ladder-1b --data tokens.bin --steps 1000 --out out/ladder-1b --variant ladder
    python launch.py --ranks 8 -m training.train --model ladder-1b --data tokens.bin --steps 1000 --out out/1b

--model is a preset or a config.json alone (random weights), or a checkpoint directory. --data is a token file that
`python -m training.tokenize_data` wrote. --sharding says how parameters, gradients and optimizer states are sharded; by default
the planner chooses. A run that was killed continues with the same command and --resume, also on another number of ranks. The
result is written to model/ under --out, where generate.py and the server can read it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from checkpoints.hub import fetch_named
from checkpoints.presets import PRESETS, has_random_weights, model_config, named_config
from checkpoints.sources import open_source
from cli import Parser, run
from config import TRAINABLE, require_causal, usage
from errors import UserError
from tp import init_world, together
from training.loop import Setup, prepare, train
from training.losses import cross_entropy
from training.options import parse_run
from training.token_file import tokenizer_folder


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    what = parser.add_argument_group("what is trained")
    what.add_argument(
        "--model", required=True, metavar="DIR|PRESET", help=f"a checkpoint directory, or one of {', '.join(PRESETS)}"
    )
    what.add_argument(
        "--variant", help=f"residual variant: {usage(TRAINABLE)} (default: the checkpoint's, standard for a preset)"
    )
    what.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder whose tokenizer is copied to the result (default: that of --model, or that of the token file for a preset)",
    )
    args = parse_run(parser, argv, learning_rate=3e-4)
    fetch_named(args, model="model")
    return args


def setup(args: argparse.Namespace) -> Setup:
    """Read and check everything that needs no other rank. Raises UserError."""
    if args.tokenizer and not args.tokenizer.is_dir():
        raise UserError(f"--tokenizer {args.tokenizer} is no directory; name one with tokenizer.json or tokenizer.model")
    random = has_random_weights(args.model)
    streams = named_config(args.model).n_kv_heads if random else 1  # for a desync variant without a number of streams
    require_causal(config := model_config(args.model, args.variant, streams))
    if random:  # no checkpoint limits the positions to those that were trained
        config = replace(config, max_seq_len=max(config.max_seq_len, args.sequence_length))
    return Setup(
        config=config,
        source=None if random else open_source(args.model, config),
        tokenizer_from=args.tokenizer or (tokenizer_folder(args.data) if random else Path(args.model)),
        data=args.data,
        loss=cross_entropy,
    )


def main() -> None:
    args = parse_args()
    world = init_world(args.device, deterministic=args.deterministic)
    found = together(world, lambda: setup(args))
    trainer, snapshots = prepare(args, world, found)
    train(args, world, trainer, snapshots, found)


if __name__ == "__main__":
    run(main)
