"""Random models: configs and checkpoints."""

import random
from dataclasses import replace
from pathlib import Path

import torch

from checkpoints.export import save_checkpoint
from comm import Local
from config import ModelConfig, Reduces
from model import Transformer


def custom_desync(config: ModelConfig) -> ModelConfig:
    """`config` with four streams, of which random modules reduce, and the last one."""
    last = config.n_layers - 1
    pattern = tuple(Reduces(random.random() < 0.5, random.random() < 0.5 or i == last) for i in range(config.n_layers))
    return replace(config, variant="desync", desync_streams=4, desync_pattern=pattern)


@torch.no_grad()
def save_random(config: ModelConfig, directory: Path) -> Path:
    """Save a checkpoint from one process. Its random weights, norms and biases all affect the logits."""
    model = Transformer(config, Local(), torch.device("cpu"), torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif name.endswith(".bias"):
            parameter.normal_(0.0, 0.5)
        else:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    save_checkpoint(model, directory, torch.float32)
    return directory
