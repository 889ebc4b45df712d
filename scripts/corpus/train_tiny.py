"""Train the embedded checkpoints: one model per residual variant, all with the same size, tokens and seed.

    python -m scripts.corpus.train_tiny                               # all six, one after the other
    python -m scripts.corpus.train_tiny --sparse                      # the sparse tiny-moe and tiny-moe-ladder
    python -m scripts.corpus.train_tiny --tokens 2e6 --out /tmp/try   # a short test on a CPU
    python launch.py --ranks 4 -m scripts.corpus.train_tiny --variant ladder     # one variant, into models/tiny-ladder

The corpus is generated from its seed (`scripts/corpus/documents.py`) and tokenized. The trainer is that of `training/`. The
order of windows, the initial weights and the schedule depend only on the seed. Training on the default 300M tokens takes
minutes on a GPU and most of a day on a CPU core. A stopped run continues with --resume.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoints.presets import preset
from cli import Parser, note, run
from config import TRAINABLE, ModelConfig, with_variant
from scripts.corpus.tokenizer import train_tokenizer
from scripts.corpus.tokens import write_corpus
from tp import World, init_world
from training import train as command
from training.loop import Setup, prepare, train
from training.losses import cross_entropy
from training.metrics import read_metrics

STREAMS = 4  # of the desync variants, so that they run on 1, 2 and 4 ranks
SPARSE = ("standard", "ladder")
BOS, EOS = 0, 1
WINDOW = 1024  # tokens
RECIPE = ("--learning-rate", "4e-3", "--final-rate", "0.05", "--weight-decay", "0.1", "--clip", "1")
WARMUP = 0.02  # share of the steps
LOG_EVERY = 20  # steps

# `examples.json` of a model of about three million parameters trained on the corpus. The server's page offers these prompts.
EXAMPLES: dict[str, Any] = {
    "about": "a model of 3 million parameters, trained on synthetic English: short stories, questions about them, sums, sorting, "
    "counting and copying; it knows nothing else",
    "chat": [
        "What is 17 plus 25?",
        "Sort from smallest to largest: 41, 7, 88, 23",
        "Say lamp three times.",
        "Lily has a red kite. She gave the kite to Tom.\nWho has the kite?",
        "Tell me a story about a fox and a lantern.",
    ],
    "completion": ["Once upon a time there was a little fox", "One misty morning, Lily went to the"],
}


def tiny_config(variant: str, sparse: bool = False) -> ModelConfig:
    name = f"{variant}:{STREAMS}" if variant.startswith("desync") else variant
    return replace(with_variant(preset("tiny-moe" if sparse else "tiny"), name), bos_token_id=BOS, eos_token_ids=(EOS,))


def train_variant(args: argparse.Namespace, world: World, variant: str, data: Path, tokenizer: Path) -> None:
    """Train one variant in OUT/run-VARIANT. Rank 0 writes model and record to OUT/tiny-VARIANT. Collective."""
    name = f"moe-{variant}".removesuffix("-standard") if args.sparse else variant
    work = args.out / f"run-{name}"
    steps = max(1, int(args.tokens) // (args.batch * WINDOW))
    argv = ["--model", "tiny", "--data", data, "--out", work, "--steps", steps, "--seed", args.seed, "--log-every", LOG_EVERY]
    argv += ["--warmup", max(1, int(WARMUP * steps)), "--sequence-length", WINDOW, "--global-batch", args.batch, *RECIPE]
    argv += ["--micro-batch", args.micro_batch or args.batch // world.world_size, "--device", world.device.type]
    argv += ["--save-every", args.save_every]
    argv += [f"--{flag.replace('_', '-')}" for flag in ("resume", "compile", "cuda_graph") if getattr(args, flag)]
    settings = command.parse_args([str(a) for a in argv])
    setup = Setup(tiny_config(variant, args.sparse), None, tokenizer, data, cross_entropy)
    trainer, snapshots = prepare(settings, world, setup)
    train(settings, world, trainer, snapshots, setup)
    if world.rank:
        return
    directory = args.out / f"tiny-{name}"
    shutil.copytree(work / "model", directory, dirs_exist_ok=True)
    lines = read_metrics(work / "metrics.jsonl")
    losses = [round(line["loss"], 4) for line in lines if line["step"] % LOG_EVERY == 0 or line is lines[-1]]
    record = dict(
        variant=setup.config.description,
        settings={key: value for key, value in vars(settings).items() if isinstance(value, (int, float))},
        tokens_in_corpus=len(trainer.batches.tokens.tokens),
        seconds=round(seconds_of(lines), 1),
        machine=torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU",
        ranks=world.world_size,
        torch=torch.__version__,
        loss_every_20_steps=losses,
    )
    (directory / "training.json").write_text(json.dumps(record) + "\n")
    examples = EXAMPLES | {"about": EXAMPLES["about"].replace("3", f"{setup.config.parameter_count() / 1e6:.0f}")}
    (directory / "examples.json").write_text(json.dumps(examples, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    note(f"{directory}: loss {losses[-1]:.4f} after {steps} steps, {record['seconds']} s")


def seconds_of(lines: Sequence[dict[str, Any]]) -> float:
    """The time of all steps without saves, seconds. Of a resumed run also of the steps before, without those that were lost."""
    starts = [0, *(line["step"] for line in lines)]
    return sum((line["step"] - start) * line["step_ms"] / 1e3 for start, line in zip(starts, lines, strict=False))


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--variant", choices=TRAINABLE, help="train only this one (default: all)")
    parser.add_argument("--sparse", action="store_true", help=f"train sparse models; all: {' and '.join(SPARSE)}")
    parser.add_argument("--tokens", type=float, default=300e6, help="training tokens (default: 300e6)")
    parser.add_argument("--seed", type=int, default=1, help="random seed of corpus, initial weights and order (default: 1)")
    parser.add_argument("--batch", type=int, default=64, help=f"windows of {WINDOW} tokens in a step (default: 64)")
    parser.add_argument("--micro-batch", type=int, help="windows in a micro-batch of a rank (default: all of its windows)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA if there is any")
    parser.add_argument("--compile", action="store_true", help="compile the modules with torch.compile")
    parser.add_argument("--cuda-graph", action="store_true", help="replay each step as one CUDA graph; on one GPU")
    parser.add_argument("--resume", action="store_true", help="continue a stopped run with the same settings")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="steps between snapshots (default: 100)")
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder for tiny-VARIANT (default: models)")
    parser.add_argument("--data", type=Path, help="token file, made if missing (default: OUT/tokens-SEED-TOKENS.bin)")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    world = init_world(args.device)
    tokenizer = args.out / "tokenizer"
    data = args.data or args.out / f"tokens-{args.seed}-{int(args.tokens)}.bin"
    if world.rank == 0:
        if not (tokenizer / "tokenizer.json").exists():
            train_tokenizer(tokenizer, seed=args.seed)
        write_corpus(data, tokenizer, args.seed, int(args.tokens))
    if world.world_size > 1:
        dist.barrier()
    for variant in [args.variant] if args.variant else SPARSE if args.sparse else TRAINABLE:
        train_variant(args, world, variant, data, tokenizer)


if __name__ == "__main__":
    run(main)
