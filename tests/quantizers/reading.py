"""Reading the written checkpoints with Rung, on ranks."""

from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from errors import UserError, first_line
from layers.attention import Causal
from tp import World

REFERENCE = "reference.safetensors"  # `tokens` and the tool's logits, in the folder of a checkpoint that Rung reads


@torch.no_grad()
def read(world: World, folders: list[Path]) -> list[dict[str, float] | str]:
    """For each checkpoint its relative errors, or the line with which it is refused."""
    found: list[dict[str, float] | str] = []
    for folder in folders:
        try:
            found.append(errors(world, folder))
        except UserError as e:
            found.append(first_line(e).replace(f"{folder}/", ""))
    return found


def errors(world: World, folder: Path) -> dict[str, float]:
    """Relative errors of logits: `dense` without rounding of activations, `rounded` with it if the tool can, and `closest`, the
    same of the token that has the smallest."""
    model = load_model(str(folder), model_config(str(folder), None, world.world_size), world, torch.float32)
    if not (folder / REFERENCE).exists():
        return {}
    expected = load_file(folder / REFERENCE)
    tokens = expected["tokens"]
    context = Causal(tokens.shape[1], tokens.device)
    with mock.patch("quantized.weight.quantized_input", lambda x, *_, **__: x):
        found = {"dense": relative(model(tokens, context), expected["dense"]).item()}
    if "rounded" in expected:
        logits, rounded = model(tokens, context), expected["rounded"]
        found["rounded"] = relative(logits, rounded).item()
        found["closest"] = min(relative(*pair).item() for pair in zip(logits.flatten(0, 1), rounded.flatten(0, 1), strict=True))
    return found


def relative(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).norm() / expected.norm()
