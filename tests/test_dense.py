"""Dense families that differ from Llama in more than biases and norms: the logits of transformers on every number of ranks, and export."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from checkpoints.export import save_checkpoint
from checkpoints.hf_config import unread_keys
from checkpoints.sources import open_source
from engine.runner import Runner
from kernels.sampling import gumbel_noise
from layers.attention import Causal
from quantized.scheme import SCHEMES
from scripts.quantize import Calibration, Job
from tests.support.models import ALONE, CPU, load, logits_of, randomize
from tests.support.ranks import Ranks
from training.losses import head_logits

SHAPE = dict(vocab_size=101, hidden_size=64, num_hidden_layers=3, intermediate_size=48, rms_norm_eps=1e-3)


def heads() -> dict[str, int]:
    return dict(num_attention_heads=4, num_key_value_heads=random.choice([1, 2, 4]))


def multipliers() -> dict[str, float]:
    """Of a Granite, of sizes at which each of them, and the epsilon that depends on one of them, changes logits."""
    return dict(
        embedding_multiplier=random.uniform(0.1, 4),
        attention_multiplier=random.uniform(0.05, 0.2),
        residual_multiplier=random.choice([0.22, 2.5]),
        logits_scaling=random.uniform(0.3, 3),
    )


MODELS: dict[str, Callable[[], Any]] = {
    "granite": lambda: transformers.GraniteConfig(
        **SHAPE, **heads(), **multipliers(), attention_bias=random.random() < 0.5, tie_word_embeddings=random.random() < 0.5
    ),
}


def save_theirs(family: str, folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(MODELS[family](), attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_transformers(family: str, ranks: Ranks, tmp_path: Path, seed: int) -> None:
    """On 1, 2 and 4 ranks, of their checkpoint; and theirs of ours, which has the same bits. All keys of their config.json are used."""
    theirs = save_theirs(family, tmp_path)
    tokens = torch.randint(101, (2, random.randint(5, 12)))
    with torch.inference_mode():
        expected = theirs(tokens).logits
    for n in (1, 2, 4):
        for logits in ranks.run(n, logits_of, tmp_path, tokens):
            assert (logits - expected).abs().max() < 1e-4 * expected.abs().max().clamp(1)
        quantized = ranks.run(n, logits_of, tmp_path, tokens, "int8")[0]
        assert 1e-5 < (quantized - expected).abs().max() / expected.abs().max() < 0.1
    assert unread_keys(tmp_path / "config.json") == []
    model = load(ALONE, tmp_path)
    save_checkpoint(model, tmp_path / "ours", torch.float32)
    ours, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "ours", tmp_path))
    assert ours.keys() == before.keys() and all(torch.equal(ours[name], before[name]) for name in before)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.inference_mode():
        assert torch.equal(again(tokens).logits, expected)
    assert load(ALONE, tmp_path / "ours").config == model.config


def test_what_reads_embeddings_streams_and_logits_of_a_granite_scales_them(tmp_path: Path, seed: int) -> None:
    """Draft heads read the streams of transformers. GPTQ begins with the model's embeddings. Training and draws on GPUs have its logits."""
    theirs, tokens = save_theirs("granite", tmp_path), torch.randint(101, (1, 7))
    model = load(ALONE, tmp_path)
    with torch.inference_mode():
        expected = theirs(tokens, output_hidden_states=True)
        hidden, streams = model.hidden_and_streams(tokens, Causal(7, CPU), (0, 1, 2))
        job = Job(model.config, open_source(str(tmp_path), model.config), SCHEMES["int4"], tmp_path, CPU, torch.float32)
        assert torch.equal(Calibration(job, tokens).streams[0].x, model.embed(tokens))
    for stream, other in zip(streams, expected.hidden_states, strict=False):
        torch.testing.assert_close(stream, other, atol=1e-4, rtol=1e-4)
    logits = expected.logits[0]
    torch.testing.assert_close(head_logits(model, model.norm(hidden[0]), model.head.weight), logits, atol=1e-4, rtol=1e-4)
    temperature, seeds, positions = torch.full((7,), 0.9), torch.arange(7), torch.arange(7)
    runner: Any = SimpleNamespace(model=model, text_ids=101)
    drawn = Runner._drawn(runner, hidden[0], temperature, seeds, positions)
    scores = logits / 0.9 + gumbel_noise(seeds[:, None], positions[:, None], torch.arange(101))
    best = scores.topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > 1e-3
    assert torch.equal(drawn[clear], best.indices[clear, 0])
