"""What quantization holds at once beside its result: tensors that are alive at the same time, counted on the CPU."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoints import memory
from checkpoints.memory import cache_bytes, check_memory, loading_bytes, weight_bytes
from checkpoints.presets import model_config, preset
from checkpoints.sources import open_files
from checkpoints.weights import READERS, all_places, fill_all, random_weights
from comms import Local
from errors import UserError
from model import Transformer
from quantized import formats
from quantized.scheme import QUANTIZATIONS, SCHEMES, Scheme, on_load
from quantized.weight import Quantized, quantize, rounding_bytes
from scripts.quantize import quantize_checkpoint
from tests.quantized.test_quantize import job_for
from tests.support.live_bytes import LiveBytes
from tests.support.models import ALONE, CPU, save_random

SHAPE = replace(preset("tiny"), n_layers=4, hidden_size=128, intermediate_size=384)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("piece", [1 << 12, 1 << 20])
def test_rounding_needs_the_memory_that_is_counted(name: str, piece: int, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr("quantized.weight.PIECE", piece)
    weight, live = torch.randn(384, 256).bfloat16(), LiveBytes()
    with live.watched():
        found = quantize(weight, SCHEMES[name], "layer")
    held = sum(tensor.untyped_storage().nbytes() for tensor in found if tensor is not None)
    assert live.now == held < 1.1 * weight.numel()
    assert live.most - held + 4 * weight.numel() <= rounding_bytes(*weight.shape)


@pytest.mark.parametrize("name", SCHEMES)
def test_readers_round_one_weight_at_a_time(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """As many threads as a GPU's reading has. Only what they round would be on the device."""
    source, live = save_random(SHAPE, tmp_path), LiveBytes()
    config = model_config(str(source), None, 1, name)

    def watched(weight: Tensor, scheme: Scheme, layer: str) -> Quantized:
        live.add(weight.nbytes)
        time.sleep(0.005)  # another thread that may round at the same time does
        with live.watched():
            found = quantize(weight, scheme, layer)
        live.add(-weight.nbytes)
        return found

    monkeypatch.setattr(formats, "quantize", watched)
    model = Transformer(config, Local(), CPU, torch.float32).requires_grad_(False)
    fill_all(all_places(model), open_files(source), READERS)
    assert 0 < live.most - live.now <= loading_bytes(config, 1)


def peak_of_quantizing(source: Path, out: Path, weights: str, samples: int) -> int:
    """The most bytes of tensors at once while a checkpoint is quantized. samples: GPTQ's, of 64 tokens; 0 rounds to nearest."""
    live, tokens = LiveBytes(), torch.randint(0, 128, (samples, 64)) if samples else None
    job = job_for(source, out, weights)
    out.mkdir()
    with live.watched(), torch.no_grad():
        assert len(quantize_checkpoint(job, tokens)) == job.config.n_layers
    return live.most


@pytest.mark.parametrize(("weights", "samples"), [("fp8", 0), ("int4", 4)])
def test_the_peak_of_quantizing_is_that_of_one_layer(weights: str, samples: int, tmp_path: Path, seed: int) -> None:
    peaks = []
    for layers in (2, 3):
        source = save_random(replace(SHAPE, n_layers=layers, vocab_size=128), tmp_path / f"source {layers}")
        peaks.append(peak_of_quantizing(source, tmp_path / f"made {layers}", weights, samples))
    assert peaks[0] > 4 * 128 * 384 and peaks[1] <= 1.02 * peaks[0]


def test_gptq_holds_the_inputs_of_each_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of each the stream and the last module's output, which the next layer adds; beside what one layer needs. Without GPTQ's own
    memory, which does not depend on the samples."""
    monkeypatch.setattr("scripts.quantize.gptq", lambda weight, hessian, scheme, name: quantize(weight, scheme, name))
    source = save_random(replace(SHAPE, n_layers=3, vocab_size=128), tmp_path / "source")
    few, many = (peak_of_quantizing(source, tmp_path / f"made {count}", "int4", count) for count in (2, 66))
    assert many - few < 1.1 * 64 * 64 * SHAPE.hidden_size * 4 * 2


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_random_weights_are_rounded_one_at_a_time(name: str, seed: int) -> None:
    config, live = replace(SHAPE, quantization=on_load(name)), LiveBytes()
    model = Transformer(config, Local(), CPU, torch.float32).requires_grad_(False)
    with live.watched():
        random_weights(model)
    assert 0 < live.most - live.now <= loading_bytes(config, 1)


def test_a_weight_that_is_rounded_has_to_fit_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the cache, which is allocated later, needs more."""
    config = replace(SHAPE, quantization=on_load("int4"))
    weights, loading = weight_bytes(config, 1, torch.float32), loading_bytes(config, 1)
    assert loading == rounding_bytes(384, 128) and not loading_bytes(SHAPE, 1)
    tokens = 2 * loading // cache_bytes(config, 1, torch.float32, 1)
    cache = cache_bytes(config, 1, torch.float32, tokens)
    for needed, more in ((weights + loading, 0), (weights + cache, tokens)):
        monkeypatch.setattr(memory, "host_free_bytes", lambda needed=needed: needed)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        check_memory("model", config, ALONE, torch.float32, more)
        monkeypatch.setattr(memory, "host_free_bytes", lambda needed=needed: needed - 1)
        with pytest.raises(UserError, match="model needs about"):
            check_memory("model", config, ALONE, torch.float32, more)
