"""One GPU and several NCCL ranks give the same text as the CPU. Skipped without a GPU."""

import json
import os

import pytest
import torch

from checkpoints.presets import PRESETS
from checkpoints.weights import load_model
from comms import Local
from config import with_variant
from layers.attention import Causal
from tests.support.gpus import most_ranks, torchrun
from tp import World

EMBEDDED = ("standard", "parallel", "ladder", "hybrid", "desync-2x", "desync-4x")
GPUS = most_ranks()

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


def greedy_tokens(model: str, ranks: int, *flags: str) -> list[int]:
    options = ["--model", f"models/tiny-{model}", "--prompt", "Once upon a time there was", "--temperature", "0", "--json"]
    printed = torchrun(ranks, "generate.py", *options, "--max-new-tokens", "60", *flags, timeout=200)
    tokens: list[int] = json.loads(printed)["token_ids"]
    return tokens


def world(device: str) -> World:
    return World(0, 1, torch.device(device), Local())


@pytest.mark.parametrize("name", ["standard", "parallel", "ladder", "hybrid", "desync-2x:4", "desync-4x:4"])
def test_bf16_logits_stay_near_fp32(name: str) -> None:
    """The GPU's bf16 logits are at most twice as far from CPU fp32 as the CPU's own bf16 logits are."""
    config = with_variant(PRESETS["tiny"], name)
    seed = int.from_bytes(os.urandom(3), "big")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (3, 40), generator=generator)
    reference = load_model("tiny", config, world("cpu"), torch.float32, seed)
    logits = {}
    for device in ("cpu", "cuda"):
        model = load_model("tiny", config, world(device), torch.bfloat16, seed)
        model.load_state_dict({k: v.to(torch.bfloat16) for k, v in reference.state_dict().items()})
        with torch.inference_mode():
            logits[device] = model(tokens.to(device), Causal(40, torch.device(device))).cpu()
    with torch.inference_mode():
        exact = reference(tokens, Causal(40, torch.device("cpu")))
    error = {device: ((x - exact).norm() / exact.norm()).item() for device, x in logits.items()}
    assert error["cuda"] <= 2 * error["cpu"], (seed, error)
    assert 0 < error["cuda"] < 0.1, (seed, error)


@pytest.mark.parametrize("model", EMBEDDED)
def test_same_greedy_tokens_on_every_number_of_gpus(model: str) -> None:
    expected = greedy_tokens(model, 1, "--device", "cpu")
    for ranks in (n for n in (1, 2, 4) if n <= GPUS):
        assert greedy_tokens(model, ranks, "--device", "cuda", "--dtype", "float32") == expected, ranks


def test_compiled_modules_write_the_same_tokens() -> None:
    flags = ("--device", "cuda", "--dtype", "float32")
    ranks = min(2, GPUS)
    assert greedy_tokens("hybrid", ranks, *flags, "--compile") == greedy_tokens("hybrid", ranks, *flags)
