"""Random models: configs and checkpoints. And models of checkpoints in fp32."""

import random
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.export import save_checkpoint
from checkpoints.presets import model_config
from checkpoints.weights import load_model
from comms import Local
from config import ModelConfig, Reduces
from layers.attention import Causal
from model import Transformer
from tp import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU, Local())


def custom_desync(config: ModelConfig) -> ModelConfig:
    """`config` with four streams, of which random modules reduce, and the last one."""
    last = config.n_layers - 1
    pattern = tuple(Reduces(random.random() < 0.5, random.random() < 0.5 or i == last) for i in range(config.n_layers))
    return replace(config, variant="desync", desync_streams=4, desync_pattern=pattern)


def multipliers() -> dict[str, float]:
    """Of a Granite, of sizes at which each of them, and the epsilon that depends on one of them, changes logits."""
    return dict(
        embedding_multiplier=random.uniform(0.1, 4),
        attention_multiplier=random.uniform(0.05, 0.2),
        residual_multiplier=random.choice([0.22, 2.5]),
        logits_scaling=random.uniform(0.3, 3),
    )


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Random weights, norms and biases, all of which affect the logits."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif name.endswith((".bias", "sinks")):
            parameter.normal_(0.0, 0.5)
        else:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5)


def save_random(config: ModelConfig, directory: Path) -> Path:
    """Save a checkpoint from one process, with weights of `randomize`."""
    model = Transformer(config, Local(), CPU, torch.float32)
    randomize(model)
    save_checkpoint(model, directory, torch.float32)
    return directory


def load(world: World, folder: Path, quantize: str | None = None) -> Transformer:
    """The model of a checkpoint, in fp32."""
    return load_model(str(folder), model_config(str(folder), None, world.world_size, quantize), world, torch.float32)


@torch.no_grad()
def logits_of(world: World, folder: Path, tokens: Tensor, quantize: str | None = None) -> Tensor:
    """(B, T) ids to (B, T, vocab_size)."""
    return load(world, folder, quantize)(tokens, Causal(tokens.shape[1], CPU))
