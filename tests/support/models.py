"""Configs of random models."""

import random
from dataclasses import replace

from config import ModelConfig, Reduces


def custom_desync(config: ModelConfig) -> ModelConfig:
    """`config` with four streams, of which random modules reduce, and the last one."""
    last = config.n_layers - 1
    pattern = tuple(Reduces(random.random() < 0.5, random.random() < 0.5 or i == last) for i in range(config.n_layers))
    return replace(config, variant="desync", desync_streams=4, desync_pattern=pattern)
