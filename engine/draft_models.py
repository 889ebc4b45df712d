"""The draft model or draft head that `--speculate` names: which one it is, whether it goes with the target model, and its weights.

A small model is held whole by every rank: reading 2 GB takes less than the all-reduces of a sharded one. Its ranks compute the same
with the same bits, so they agree on drafts without a message. A larger one is sharded like the target.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoints.eagle import EagleConfig, EagleHead, check_head, is_head, load_head, random_config, random_head
from checkpoints.memory import weight_bytes
from checkpoints.presets import has_random_weights, model_config
from checkpoints.weights import load_model
from comms import Local
from config import ModelConfig
from errors import UserError
from files import model_folder
from model import Transformer
from text.tokenizer import Tokenizer
from text.tokenizer_files import find_tokenizer, load_tokenizer
from tp import World, stream_shards

TEXT, AUTO = "ngram", "auto"  # what `--speculate` takes instead of a model
RANDOM_HEAD = "random-head"  # a head with random weights, for a target with random weights
EMBEDDED = "draft"  # the folder of a checkpoint's own head
REPLICATED = 2 << 30  # bytes of weights up to which every rank holds a whole draft model


@dataclass(frozen=True)
class Draft:
    """A draft model or head that `--speculate` names."""

    name: str
    config: ModelConfig | EagleConfig
    target: ModelConfig

    def load(self, world: World, dtype: torch.dtype, seed: int = 0) -> Transformer | EagleHead:
        """The model on this rank: whole if it is small or cannot be split, else sharded like the target; a head as
        `eagle.load_head` has it. Collective. Raises UserError."""
        if isinstance(self.config, EagleConfig) and self.name == RANDOM_HEAD:
            return random_head(self.config, world, dtype)
        if isinstance(self.config, EagleConfig):
            return load_head(Path(self.name), self.target, world, dtype)
        return load_model(self.name, self.config, world_of(self.config, world, dtype), dtype, seed)


def resolved(speculate: str | None, model: str | None) -> str | None:
    """A value of `--speculate`, with what `auto` means for the model: its own head, or text if it has none or is not known."""
    if speculate != AUTO:
        return speculate
    head = model_folder(model) / EMBEDDED if model else None
    return str(head) if head and head.is_dir() else TEXT


def find_draft(
    speculate: str | None, model: str | None, target: ModelConfig, tokenizer: Tokenizer | None, ranks: int
) -> Draft | None:
    """What `--speculate` names, None for text. model: the target's path, whose head `auto` takes, if it is known. Raises UserError
    for a model that does not exist or has another vocabulary than the target, and for a head of other widths."""
    speculate = resolved(speculate, model)
    if speculate in (None, TEXT):
        return None
    if speculate == RANDOM_HEAD:
        if model is None or not has_random_weights(model):
            raise UserError(f"--speculate {RANDOM_HEAD} is for benchmarks of presets, which have random weights; name a folder")
        return Draft(speculate, random_config(target), target)
    if (Path(speculate) / "config.json").exists() and is_head(Path(speculate)):
        if target.kind.speed_limit and ranks > 1:
            raise UserError(
                f"--speculate {speculate}: a draft head does not go with {target.variant} on several ranks; leave it out"
            )
        return Draft(speculate, check_head(Path(speculate), target).hollow.config, target)
    try:
        config = model_config(speculate, None, 1)
    except UserError as e:
        raise UserError(f"--speculate {speculate} is neither {TEXT}, {AUTO} nor a model: {e}") from None
    if config.vocab_size != target.vocab_size:
        raise UserError(
            f"--speculate {speculate}: its vocabulary has {config.vocab_size} tokens, the model's {target.vocab_size}; "
            "a draft model needs the same vocabulary"
        )
    folder = model_folder(speculate)
    if tokenizer is not None and not has_random_weights(speculate) and find_tokenizer(folder) is not None:
        own = load_tokenizer(folder)
        if (own.pieces.data, own.special_ids) != (tokenizer.pieces.data, tokenizer.special_ids):
            raise UserError(
                f"--speculate {speculate}: its tokenizer has other tokens than the model's; a draft model needs the same"
            )
    return Draft(speculate, config, target)


def check_accept_rate(rate: float | None, draft: Draft | None, model: str) -> None:
    """Raises UserError unless a simulated acceptance rate (`EngineLimits.accept_rate`) has sense."""
    if rate is None:
        return
    if not 0 <= rate <= 1:
        raise UserError(f"--accept-rate is a probability from 0 to 1, not {rate:g}")
    if not has_random_weights(model):
        raise UserError(
            f"--accept-rate is for benchmarks of models with random weights, and {model} has trained ones; leave it out"
        )
    if draft is None:
        raise UserError(f"--accept-rate needs drafts of a model or head; give --speculate {RANDOM_HEAD}")


def world_of(config: ModelConfig, world: World, dtype: torch.dtype) -> World:
    """The ranks among which a draft model is split: all, or only this one."""
    alone = World(0, 1, world.device, Local())
    if weight_bytes(config, 1, dtype) <= REPLICATED:
        return alone
    try:
        stream_shards(config, 0, world.world_size)
    except UserError:
        return alone
    return world
