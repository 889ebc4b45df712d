"""Turn a pretrained standard model into a hybrid ladder by light retraining (Ladder-residual, arXiv:2501.06589, section 5).

    python -m training.tokenize_data --model DIR --chat chats.jsonl --sequence-length 1024 --out chats.bin
    python launch.py --ranks 8 -m training.adapt --model DIR --ladder-layers 16 --data chats.bin --out out/hybrid

--ladder-layers names the layers that switch to the ladder residual: a number K for the last K layers, or a list such as 12-31.
All weights are trained, in four passes over the data or for --steps. Half of the loss, or what --distill says, is the KL divergence
from the predictions of the original model, which every rank then also holds. The result is written to model/ under --out and is
served like any checkpoint.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.hf_config import read_config
from checkpoints.hub import fetch_checkpoint
from checkpoints.sources import open_source, weights_fingerprint
from checkpoints.weights import build_model
from cli import Parser, run
from comms import Local
from config import ModelConfig, require_causal
from errors import UserError
from layers.attention import Causal
from model import Transformer
from tp import World, init_world, together
from training.batches import Batch
from training.convert import parse_layers, to_hybrid_ladder
from training.loop import Setup, prepare, train
from training.losses import cross_entropy, distillation
from training.options import dtype_of, parse_run


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    what = parser.add_argument_group("what becomes what")
    what.add_argument("--model", type=Path, required=True, metavar="ORG/NAME|DIR", help="a standard checkpoint")
    what.add_argument("--ladder-layers", required=True, metavar="K|LIST", help="the last K layers, or a list such as 12-31")
    what.add_argument(
        "--distill",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="share of the loss that is the KL divergence from the predictions of the original model, 0 to 1. With 0, no rank holds "
        "the original (default: 0.5)",
    )
    args = parse_run(parser, argv, learning_rate=1e-5, by_passes=True)
    fetch_checkpoint(args)
    if not 0 <= args.distill <= 1:
        raise UserError(f"--distill must be between 0 and 1, not {args.distill}")
    return args


def setup(args: argparse.Namespace, world: World) -> Setup:
    """Read and check everything that needs no other rank. Raises UserError."""
    require_causal(original := read_config(args.model / "config.json"))
    config = to_hybrid_ladder(original, parse_layers(args.ladder_layers))
    source = open_source(str(args.model), original)
    loss = cross_entropy if args.distill == 0 else Distillation(args, original, world)
    return Setup(config, source, args.model, args.data, loss, weights_fingerprint(source, original) if args.distill else None)


class Distillation:
    """The loss (1 - share) * cross entropy + share * KL(original || model).

    Each rank holds the whole original model, in the training dtype. It is read at the first batch, after all other checks
    have passed.
    """

    def __init__(self, args: argparse.Namespace, original: ModelConfig, world: World) -> None:
        self.args, self.original, self.device = args, original, world.device
        self.teacher: Transformer | None = None

    def __call__(self, model: Transformer, hidden: Tensor, batch: Batch) -> Tensor:
        if self.teacher is None:
            alone = World(0, 1, self.device, Local())
            self.teacher = build_model(str(self.args.model), self.original, alone, dtype_of(self.args, self.device))
        with torch.no_grad():
            context = Causal(batch.inputs.shape[1], self.device)
            teacher_hidden = self.teacher.norm(self.teacher.hidden(batch.inputs, context))
        return distillation(model, hidden, self.teacher, teacher_hidden, batch, share=self.args.distill)


def main() -> None:
    args = parse_args()
    world = init_world(args.device, deterministic=args.deterministic)
    found = together(world, lambda: setup(args, world))
    trainer, snapshots = prepare(args, world, found)
    train(args, world, trainer, snapshots, found)


if __name__ == "__main__":
    run(main)
