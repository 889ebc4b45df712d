"""Train an EAGLE-3 draft head for a checkpoint: one layer that guesses the next tokens, so that a step can verify several of them.

    python -m training.tokenize_data --model DIR --chat --sequence-length 1024 --out chats.bin chats.jsonl
    python -m training.draft --model DIR --data chats.bin --steps 5000 --out DIR/draft
    python launch.py --ranks 8 -m training.draft --model DIR --data chats.bin --steps 5000 --out DIR/draft

The model is not changed. It may have any residual variant, and is split over the ranks; each rank trains the same whole head. The
head reads the streams before the layers --streams, and learns the model's own predictions along the text of --data. It has to guess
like the model, not like the text; still, text of the kind that the model writes is best, its own answers above all. In each step of
training it also continues its own guesses --chain times, as it will in use.

A head for a model with a large vocabulary guesses only the --draft-vocab most frequent tokens of the text, which makes it faster.

The result in --out is config.json and model.safetensors in the layout that other servers read, too (LlamaForCausalLMEagle3).
metrics.jsonl has the loss and, for each token of a chain, the share of guesses that are the model's best token. A best token outside
the draft vocabulary is never guessed.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoints.eagle import STREAMS, EagleConfig, EagleHead, default_streams
from checkpoints.export import save_head
from checkpoints.hub import fetch_named
from checkpoints.presets import has_random_weights, model_config
from checkpoints.sources import open_source, weights_fingerprint
from checkpoints.weights import load_model
from cli import Parser, note, run
from comms import Local
from config import ModelConfig, require_causal
from errors import UserError, first_line
from files import check_folder, model_folder
from model import Transformer
from options import DTYPE_NAMES
from tp import World, init_world, together
from training.batches import GlobalBatches
from training.chains import chain_loss
from training.loop import check_same, identity
from training.metrics import Measured, Meter, plot_run
from training.optimizer import AdamSettings
from training.options import add_batch_options, check_numbers, dtype_of, schedule_of
from training.step import check_batch
from training.token_file import TokenFile, check_tokenizer, open_tokens

COUNTED = 1 << 26  # most tokens of the text that are counted for the draft vocabulary
SNAPSHOT = "snapshot.pt"
POSITIVE = (
    *("sequence_length", "global_batch", "micro_batch", "steps", "chain", "log_every", "save_every", "draft_vocab"),
    *("learning_rate", "clip"),
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    what = parser.add_argument_group("what is trained")
    what.add_argument("--model", required=True, metavar="ORG/NAME|DIR", help="the checkpoint that the head is for")
    what.add_argument(
        "--streams",
        type=int,
        nargs=STREAMS,
        metavar="LAYER",
        help="layers before which the head reads the stream, 0 to the number of layers (default: 2, the middle one, the last but two, "
        "which differ in models of 7 layers or more)",
    )
    what.add_argument("--draft-vocab", type=int, metavar="N", help="guess only the N most frequent tokens (default: all)")
    what.add_argument("--chain", type=int, default=4, metavar="TOKENS", help="length of the chains in training (default: 4)")
    add_batch_options(parser, learning_rate=1e-3)
    how = parser.add_argument_group("the run")
    how.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the head, metrics.jsonl and loss.png")
    how.add_argument(
        "--dtype",
        choices=DTYPE_NAMES,
        help="dtype of the model; the head is fp32 (default: bfloat16 on CUDA, float32 on a CPU)",
    )
    how.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA if there is a GPU")
    how.add_argument("--log-every", type=int, default=10, metavar="STEPS", help="steps between two log lines (default: 10)")
    how.add_argument(
        "--save-every",
        type=int,
        default=500,
        metavar="STEPS",
        help="steps between two snapshots, of which one is kept (default: 500)",
    )
    how.add_argument("--resume", action="store_true", help="continue from the snapshot in --out, with the same settings")
    args = parser.parse_args(argv)
    check_numbers(args, POSITIVE)
    if args.chain >= args.sequence_length:
        raise UserError(f"--chain {args.chain} must be shorter than --sequence-length {args.sequence_length}")
    fetch_named(args, model="model")
    return args


# --- the head at the start -----------------------------------------------------------------------------------------------


def head_config(args: argparse.Namespace, base: ModelConfig, drafted: int) -> EagleConfig:
    """A head with the widths and the RoPE of the model. Raises UserError."""
    given = args.streams or default_streams(base.n_layers)
    streams = tuple(sorted(set(given)))
    if len(streams) != STREAMS or streams[0] < 0 or streams[-1] > base.n_layers:
        wrong = f"not {list(given)}" if args.streams else f"since the default is {list(given)} with so few layers"
        raise UserError(f"--streams must name {STREAMS} different layers from 0 to {base.n_layers}, {wrong}")
    shape = ("vocab_size", "hidden_size", "n_heads", "n_kv_heads", "head_dim", "intermediate_size", "max_seq_len")
    same = {name: getattr(base, name) for name in (*shape, "norm_eps", "rope_theta", "rope_scaling")}
    if base.partial_rotary_factor != 1:  # a head rotates all features
        same["rope_scaling"] = None
    same["intermediate_size"] *= base.experts.chosen if base.experts else 1  # what a token has of the experts
    return EagleConfig(ModelConfig(n_layers=1, **same), base.hidden_size, drafted, streams)


def frequent_tokens(tokens: TokenFile, count: int) -> Tensor:
    """The ids of the `count` most frequent tokens at the beginning of the text, ascending, (count,) int64."""
    frequency = np.bincount(tokens.tokens[:COUNTED], minlength=count)
    return torch.from_numpy(np.sort(np.argsort(-frequency, kind="stable")[:count]))


@torch.no_grad()
def fill(head: EagleHead, args: argparse.Namespace, base: ModelConfig) -> None:
    """Random weights. The output layer starts as the model's own, unless that is quantized."""
    generator = torch.Generator().manual_seed(args.seed)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 * parameter.shape[1] ** -0.5)
    name = "model.embed_tokens.weight" if base.tie_embeddings else "lm_head.weight"
    source = open_source(args.model, base)
    if name in source.shapes():
        rows = source.read(name, 0, 0, base.vocab_size)
        head.output.weight.copy_(rows[head.targets.cpu()])


# --- training ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadMeasured(Measured):
    """A line about a head's training. `loss` (nats, the weighted mean over the tokens of a chain) and `gradient_norm` are averages,
    too."""

    agreement: list[float]  # by token of a chain: share of the guesses that are the model's best token


class HeadMeter(Meter):
    """The meter of a head's training. A step's result is its loss, gradient norm and agreements, (2 + chain,)."""

    advice = "use a lower --learning-rate or a longer --warmup"

    def line(self, results: list[list[float]], seconds: float) -> tuple[Measured, dict[str, str]]:
        loss, norm, *agreement = map(fmean, zip(*results, strict=True))
        shown = {"loss": f"{loss:.3f}", "agree": " ".join(f"{share:.0%}" for share in agreement)}
        return HeadMeasured(**self.common(loss, norm, seconds), agreement=agreement), shown


def train_step(
    args: argparse.Namespace,
    head: EagleHead,
    model: Transformer,
    batches: GlobalBatches,
    optimizer: torch.optim.Optimizer,
    step: int,
) -> Tensor:
    """One step. Returns its loss, gradient norm and agreements, (2 + chain,) fp32."""
    micro_batches = args.global_batch // args.micro_batch
    loss = weight = torch.zeros((), device=head.targets.device)
    agreed = supervised = torch.zeros(args.chain, device=head.targets.device)
    for i in range(micro_batches):
        found = chain_loss(head, model, batches.micro_batch(step, i, args.micro_batch).to(loss.device), args.chain)
        part, rows = found.weighted()
        part.backward()
        loss, weight = loss + part.detach(), weight + rows
        agreed, supervised = agreed + found.agreed, supervised + found.supervised
    weight = weight.clamp(min=torch.finfo(weight.dtype).tiny)  # without any row, loss and gradients are 0
    for parameter in head.parameters():
        assert parameter.grad is not None
        parameter.grad /= weight
    norm = torch.nn.utils.clip_grad_norm_(head.parameters(), args.clip)
    rate = schedule_of(args).rate(step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return torch.cat((torch.stack((loss / weight, norm)), agreed / supervised.clamp(min=1)))


def make_optimizer(args: argparse.Namespace, head: EagleHead) -> torch.optim.Optimizer:
    decay = {2: args.weight_decay, 1: 0.0}
    groups = [{"params": [p for p in head.parameters() if p.dim() == dim], "weight_decay": decay[dim]} for dim in decay]
    return torch.optim.AdamW(groups, betas=AdamSettings.betas, eps=AdamSettings.eps, fused=True)


def save_snapshot(
    args: argparse.Namespace, settings: dict[str, Any], head: EagleHead, optimizer: torch.optim.Optimizer, step: int
) -> None:
    state = {"step": step, "settings": settings, "head": head.state_dict(), "optimizer": optimizer.state_dict()}
    path, half = args.out / SNAPSHOT, args.out / f"{SNAPSHOT}.partial"
    try:
        torch.save(state, half)
        os.replace(half, path)
    except (OSError, RuntimeError) as e:  # torch has a RuntimeError for a full disk
        half.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written ({first_line(e)}); make room, then go on with --resume") from None


def restore(args: argparse.Namespace, settings: dict[str, Any], head: EagleHead, optimizer: torch.optim.Optimizer) -> int:
    """Load the snapshot in --out, if --resume is given and there is one. Returns the step to go on with. Raises UserError."""
    path = args.out / SNAPSHOT
    if not path.exists():
        if args.resume:
            note(f"no snapshot in {args.out} yet: starting from the beginning")
        return 0
    if not args.resume:
        raise UserError(f"{path} is of a run that was stopped; continue it with --resume, or remove it")
    try:
        state = torch.load(path, map_location=head.targets.device, weights_only=True)
        then = state["settings"]
    except (OSError, RuntimeError, ValueError, EOFError, LookupError, TypeError, UnpicklingError) as e:
        raise UserError(f"{path} is damaged ({first_line(e)}); remove it to start again") from None
    check_same(path, then, settings, "remove it")
    head.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def settings_of(args: argparse.Namespace, base: ModelConfig, batches: GlobalBatches, device: torch.device) -> dict[str, Any]:
    """Those that a resumed run must share with the original one."""
    more = {name: getattr(args, name) for name in ("streams", "draft_vocab", "chain")}
    return identity(args, base, batches, device) | more | {"weights": weights_fingerprint(open_source(args.model, base), base)}


# --- the command ---------------------------------------------------------------------------------------------------------


def prepare(args: argparse.Namespace, world: World) -> tuple[ModelConfig, GlobalBatches, EagleConfig]:
    """Check everything that needs no weights. Raises UserError."""
    if has_random_weights(args.model):
        raise UserError(f"--model {args.model} has random weights, of which a head can learn nothing; name a checkpoint")
    require_causal(base := model_config(args.model, None, world.world_size))
    if args.sequence_length > base.max_seq_len:
        raise UserError(f"--sequence-length {args.sequence_length} is beyond the model's {base.max_seq_len} positions")
    drafted = args.draft_vocab or base.vocab_size
    if drafted > base.vocab_size:
        raise UserError(f"--draft-vocab {drafted} is larger than the model's vocabulary of {base.vocab_size} tokens")
    check_batch(args.global_batch, 1, args.micro_batch)
    tokens = open_tokens(args.data, base.vocab_size)
    check_tokenizer(tokens, model_folder(args.model))
    batches = GlobalBatches(tokens, args.sequence_length, args.global_batch, args.seed)
    config = head_config(args, base, drafted)
    if (args.out / "config.json").exists():
        raise UserError(f"--out {args.out} holds a finished head or another checkpoint; name another folder")
    check_folder(args.out)
    return base, batches, config


def on_first(world: World, work: Callable[[], object]) -> None:
    """Run `work()` on rank 0. Collective: its UserError is raised on all ranks."""
    together(world, work if world.rank == 0 else lambda: None)


def train_head(args: argparse.Namespace, world: World) -> None:
    """Train a head and write it to --out. Collective. Raises UserError."""
    base, batches, config = together(world, lambda: prepare(args, world))
    torch.set_float32_matmul_precision("high")
    model = load_model(args.model, base, world, dtype_of(args, world.device))
    head = EagleHead(config, Local(), world.device, torch.float32)
    if config.draft_vocab_size < base.vocab_size:
        head.targets.copy_(frequent_tokens(batches.tokens, config.draft_vocab_size))
    together(world, lambda: fill(head, args, base))
    optimizer = make_optimizer(args, head)
    settings = together(world, lambda: settings_of(args, base, batches, world.device))
    first = together(world, lambda: restore(args, settings, head, optimizer))
    size = sum(p.numel() for p in head.parameters())
    note(
        f"head of {size / 1e6:,.2f}M parameters for {base.description}, reading the streams before layers {config.stream_layers}"
    )
    tokens = args.global_batch * args.sequence_length
    path = args.out / "metrics.jsonl"
    meter = HeadMeter(path, args.log_every, first, args.steps, schedule_of(args), tokens, world.rank == 0)
    for step in range(first, args.steps):
        meter.add(train_step(args, head, model, batches, optimizer, step))
        if (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            with meter.saving():
                on_first(world, partial(save_snapshot, args, settings, head, optimizer, step + 1))
    meter.close()
    on_first(world, partial(save_head, head.eval().requires_grad_(False), args.out))
    if world.rank == 0:
        (args.out / SNAPSHOT).unlink(missing_ok=True)
        plot_run(args.out)


def main() -> None:
    args = parse_args()
    world = init_world(args.device)
    train_head(args, world)
    note(f"done: {args.out}")


if __name__ == "__main__":
    run(main)
