"""Quantized layers beside layers in fp32, by every communicator and every schedule of a ladder."""

import random
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

import torch

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from comms.interface import SCHEDULES
from config import ModelConfig, with_variant
from layers.attention import Causal
from tests.quantized.writers import FORMATS, write
from tests.support.ranks import Ranks
from tp import World

MIXED = "W4A16 by channel, some kept"  # k_proj and the MLP of layer 0 are not quantized
SHAPE = ModelConfig(
    vocab_size=96, hidden_size=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, intermediate_size=64, max_seq_len=64
)


@torch.inference_mode()
def differences(world: World, folder: Path, ids: list[int]) -> dict[str, tuple[float, int]]:
    """The largest difference of the logits from gloo's on the same ranks, and how many all-reduces were fused, by communicator and
    schedule."""
    from tests.comm.test_fused import communicators

    config, tokens, context = (
        model_config(str(folder), None, world.world_size),
        torch.tensor([ids]),
        Causal(len(ids), world.device),
    )
    expected, found = load_model(str(folder), config, world, torch.float32)(tokens, context), {}
    for name, comm in communicators(world).items():
        model = load_model(str(folder), config, replace(world, comm=comm), torch.float32)
        for schedule in SCHEDULES:
            comm.use(schedule)
            before = getattr(comm, "fused", 0)
            error = (model(tokens, context) - expected).abs().max().item()
            found[f"{name} {schedule}"] = error, getattr(comm, "fused", 0) - before
    return found


def notes(world: World, folder: Path) -> dict[str, list[str]]:
    """What loading a model prints, by communicator, without the progress that a busy machine shows."""
    from tests.comm.test_fused import communicators

    found = {}
    for name, comm in communicators(world).items():
        with redirect_stderr(StringIO()) as printed:
            load_model(str(folder), model_config(str(folder), None, 2), replace(world, comm=comm), torch.float32)
        found[name] = [line for line in printed.getvalue().splitlines() if line.strip() and "reading weights" not in line]
    return found


def test_fused_says_that_quantized_layers_are_not(interpreters: Ranks, tmp_path: Path, seed: int) -> None:
    write(SHAPE, FORMATS[MIXED], tmp_path, tmp_path / "plain")
    first, second = interpreters.run(2, notes, tmp_path)
    (line,) = first.pop("fused")
    assert "quantized layers are not fused" in line and len(first) > 1
    assert not any(first.values()) and not any(second.values())
    assert not any(lines for found in interpreters.run(2, notes, tmp_path / "plain") for lines in found.values())


def test_only_layers_that_are_not_quantized_are_fused(
    in_turn: Callable[..., str], interpreters: Ranks, tmp_path: Path, seed: int
) -> None:
    variant = in_turn(("hybrid:1", "ladder"), 0)
    write(with_variant(SHAPE, variant), FORMATS[MIXED], tmp_path, tmp_path / "plain")
    ids = [random.randrange(SHAPE.vocab_size) for _ in range(4)]
    for found in interpreters.run(2, differences, tmp_path, ids):
        for name, (error, fused) in found.items():
            assert error < 1e-3, name
            deferred = variant == "hybrid:1" or name == "fused deferred"
            assert fused == int(name.startswith("fused") and deferred), name
