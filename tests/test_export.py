"""Exported checkpoints: training writes complete checkpoints with a tokenizer, and transformers loads ladder models."""

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from checkpoints.export import add_modeling, save_checkpoint
from checkpoints.hf_config import config_from_hf, read_config
from checkpoints.presets import preset
from checkpoints.weights import load_model, random_weights
from comms import Local
from config import FAMILIES, ModelConfig, with_variant
from layers.attention import Causal
from model import Transformer
from tests import MODELS, ROOT
from tests.support.command_line import environment
from tests.support.models import ALONE, CPU, multipliers
from tests.test_hf_config import DENSE
from tests.test_model import grown, hf_shape
from text.tokenizer_files import load_tokenizer
from training import tokenize_data, train
from training.convert import convert

STANDARD = MODELS / "tiny-standard"
LOAD = """
import sys, torch, transformers
found = {}
for directory, ids in torch.load(sys.argv[1]).items():
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32).eval()
    with torch.inference_mode():
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
        found[directory] = type(model).__name__, model(ids).logits, written
torch.save(found, sys.argv[2])
"""


def in_transformers(prompts: dict[Path, Tensor], tmp_path: Path) -> dict[Path, tuple[str, Tensor, Tensor]]:
    """By checkpoint: the model's class, logits and 8 greedy tokens, from a process without this repository's modules."""
    asked, out = tmp_path / "asked.pt", tmp_path / "out.pt"
    torch.save({str(directory): ids for directory, ids in prompts.items()}, asked)
    alone = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, asked, out],
        cwd=tmp_path,
        env=environment() | alone,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return {Path(directory): found for directory, found in torch.load(out).items()}


def our_logits(model: Transformer, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids, Causal(ids.shape[1], CPU))


def random_model(config: ModelConfig, seed: int) -> Transformer:
    """A model with weights so large that every layer changes the output."""
    model = Transformer(config, Local(), CPU, torch.float32).eval().requires_grad_(False)
    random_weights(model, seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(8)
    return model


def ladder_of(family: str, seed: int) -> ModelConfig:
    """A small random shape of the family with the ladder residual in random layers."""
    draw = random.Random(seed)
    more = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} | (multipliers() if family == "granite" else {})
    more |= grown() if family == "ministral3" else {}
    raw = transformers.AutoConfig.for_model(family, **hf_shape(**more) | {"eos_token_id": 2, "pad_token_id": 0}).to_dict()
    config = config_from_hf(raw)
    layers = sorted(draw.sample(range(config.n_layers), draw.randint(1, config.n_layers)))
    return replace(config, variant="ladder", ladder_layers=tuple(layers))


def test_transformers_computes_what_we_compute(tmp_path: Path, seed: int) -> None:
    """Logits, and greedy continuations with transformers' cache, of a converted checkpoint and of every family with random
    ladder layers."""
    models = {tmp_path / family: random_model(ladder_of(family, seed), seed) for family in DENSE}
    for directory, model in models.items():
        save_checkpoint(model, directory, torch.float32)
        assert read_config(directory / "config.json") == model.config
    hybrid = convert(STANDARD, tmp_path / "hybrid", 4)
    models[tmp_path / "hybrid"] = load_model(str(tmp_path / "hybrid"), hybrid, ALONE, torch.float32)
    prompts = {directory: torch.randint(model.config.vocab_size, (2, 11)) for directory, model in models.items()}
    for directory, (name, logits, written) in in_transformers(prompts, tmp_path).items():
        model, ids = models[directory], prompts[directory]
        assert name == f"{FAMILIES[model.config.family].name}LadderForCausalLM"
        torch.testing.assert_close(logits, our_logits(model, ids), atol=2e-3, rtol=1e-4)
        for _ in range(8):
            best = our_logits(model, ids)[:, -1].topk(2)
            clear = best.values[:, 0] - best.values[:, 1] > 1e-2  # in a near-tie both tokens are right
            assert torch.equal(written[clear, ids.shape[1]], best.indices[clear, 0])
            ids = torch.cat([ids, written[:, ids.shape[1] : ids.shape[1] + 1]], dim=1)
        standard = random_model(replace(model.config, variant="standard", ladder_layers=()), seed)
        if directory.name in DENSE:  # shows that the comparison would fail if transformers ignored the ladder
            assert (logits - our_logits(standard, prompts[directory])).abs().max() > 0.05


def test_other_variants_get_no_code(tmp_path: Path) -> None:
    for variant in ("standard", "parallel"):
        config = with_variant(preset("tiny"), variant)
        assert add_modeling(tmp_path, config) == {} and not list(tmp_path.iterdir())


def test_what_a_preset_s_training_wrote_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The commands of docs/training.md. The trained preset gets the tokenizer of the token file. If there is none, training
    warns at its start."""

    def run(main: Callable[[], None], *args: object) -> str:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, args)])
        main()
        return capfd.readouterr().err

    text, tokens = tmp_path / "text.txt", tmp_path / "text.bin"
    text.write_text("Once upon a time there was a cat. " * 200)
    run(tokenize_data.main, "--model", STANDARD, "--out", tokens, "--processes", 1, text)
    options = ("--model", "tiny", "--variant", "ladder", "--data", tokens, "--device", "cpu", "--sequence-length", 32)
    options = (*options, "--global-batch", 2, "--steps", 1)
    assert "tokenizer" not in run(train.main, *options, "--out", tmp_path / "run")
    made = tmp_path / "run" / "model"
    assert (made / "modeling_rung.py").exists()
    assert load_tokenizer(made).encode("a cat") == load_tokenizer(STANDARD).encode("a cat")
    for file in (tmp_path / "text.tokenizer").iterdir():
        file.unlink()
    said = run(train.main, *options, "--out", tmp_path / "without")
    assert "warning: the result will have no tokenizer" in said and "--tokenizer DIR" in said


def test_the_embedded_models_have_the_code_of_now() -> None:
    """A checkpoint with ladder layers has a copy of it, for transformers."""
    code = (ROOT / "checkpoints" / "modeling_rung.py").read_bytes()
    copies = sorted(MODELS.glob("*/modeling_rung.py"))
    assert [copy.parent.name for copy in copies] == ["tiny-hybrid", "tiny-hybrid-int4", "tiny-ladder"]
    assert all(copy.read_bytes() == code for copy in copies)
