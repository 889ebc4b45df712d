"""Low-rank adapters: the model computes what the base with merged weights computes, for any mixture of rows, on any number of
ranks. Files that cannot be used are refused in one line."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention import Causal
from config import with_variant
from engine.adapters import Adapters
from errors import UserError
from kernels.lora import Groups, group_rows
from lora import LoraLimits, adapted_layers, open_adapter
from presets import model_config
from tests.support.adapters import PARTS, merged, write_adapter
from tests.support.ranks import Ranks
from tests.test_tensor_parallel import CPU, TOLERANCE, VARIANTS, alone, base_config, load, save_random, variant_of
from tp import World

SLOTS, RANK = 3, 16


def groups_of(slots: list[int], tile: int = 1000) -> Groups:
    return Groups(*map(torch.from_numpy, group_rows(np.array(slots), tile)), tile)


@torch.inference_mode()
def adapted_logits(world: World, base: Path, adapters: list[Path], tokens: Tensor, slots: list[int]) -> Tensor:
    """Logits of sequences (B, T), each with the adapter in its slot, -1 without one."""
    model = load(world, base)
    Adapters(model, LoraLimits(SLOTS, RANK), world).load_now([(path.name, str(path)) for path in adapters])
    context = Causal(tokens.shape[1], CPU)
    context.adapters = groups_of([slot for slot in slots for _ in range(tokens.shape[1])], random.choice([3, 16, 1000]))
    return model(tokens, context)


@pytest.mark.parametrize("place", range(len(VARIANTS)))
def test_rows_compute_what_merged_weights_compute(
    place: int, in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    """Each row of a mixed batch has the logits of its adapter, merged into the base and loaded as an ordinary checkpoint."""
    config = variant_of(base_config(), VARIANTS[place])
    base = save_random(config, tmp_path / "base")
    adapters = [write_adapter(tmp_path / str(i), base, PARTS if i == 2 else None, use_rslora=i == 1) for i in range(SLOTS)]
    models = [base, *(merged(tmp_path / f"merged-{i}", base, adapter) for i, adapter in enumerate(adapters))]
    slots = [*random.sample(range(-1, SLOTS), SLOTS + 1), random.randrange(-1, SLOTS)]
    tokens = torch.randint(config.vocab_size, (len(slots), random.randint(1, 9)))
    context = Causal(tokens.shape[1], CPU)
    with torch.inference_mode():
        expected = torch.cat([load(alone(), models[1 + slot])(row[None], context) for slot, row in zip(slots, tokens, strict=True)])
        plain = load(alone(), base)(tokens, context)
    assert (expected - plain)[[slot >= 0 for slot in slots]].abs().amax((1, 2)).min() > 100 * TOLERANCE, "adapters without effect"
    for found in ranks.run(in_turn((1, 2, 4), place), adapted_logits, base, adapters, tokens, slots):
        assert (found - expected).abs().max() < TOLERANCE
