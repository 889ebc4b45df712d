"""Writing checkpoints: what is saved loads unchanged, here and in transformers, whole or in several files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file

from checkpoints import export
from checkpoints.export import save_checkpoint
from checkpoints.hf_config import read_config
from checkpoints.sources import INDEX, SINGLE, open_source
from checkpoints.weights import random_weights
from comms import Local, NoCommunication
from config import with_variant
from errors import UserError
from model import Transformer
from tests.test_checkpoint import FAMILIES, VARIANTS, assert_equal, fails, full_tensors, load, logits, random_model, tiny
from training.initialize import empty_model, materializer


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_saving_and_loading_changes_nothing(variant: str, sharded: bool, tmp_path: Path, seed: int, monkeypatch: Any) -> None:
    if sharded:
        monkeypatch.setattr(export, "MAX_FILE_BYTES", 40_000)
    family = FAMILIES[VARIANTS.index(variant) % 4]
    config = with_variant(tiny(family, tie_word_embeddings=sharded, eos_token_id=[3, 4]), variant)
    model = random_model(config, seed)
    save_checkpoint(model, tmp_path / "new" / "directory", torch.float32)
    save_checkpoint(model, tmp_path / "again", torch.float32)
    saved = tmp_path / "new" / "directory"
    assert (saved / INDEX).exists() == sharded
    if sharded:
        index = json.loads((saved / INDEX).read_text())
        files = sorted(saved.glob("model-*.safetensors"))
        assert len(files) > 2 and {f.name for f in files} == set(index["weight_map"].values())
        assert index["metadata"]["total_size"] == sum(t.nbytes for f in files for t in load_file(f).values())
    loaded = load(saved)
    assert loaded.config == config
    # Desync streams share norms and copies of KV heads. `random_model` made them differ, and the file holds only the last.
    if config.variant == "desync":
        save_checkpoint(loaded, tmp_path / "second", torch.float32)
        assert_equal(full_tensors(load(tmp_path / "second")), full_tensors(loaded))
    else:
        assert_equal(full_tensors(loaded), full_tensors(model))
    for rank in range(2):
        comm = NoCommunication(rank, 2)
        part = load(saved, comm)
        assert part.config == config and len(part.shards) == max(1, config.desync_streams // 2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sharded", [False, True])
def test_transformers_reads_what_is_saved(family: str, sharded: bool, tmp_path: Path, seed: int, monkeypatch: Any) -> None:
    if sharded:
        monkeypatch.setattr(export, "MAX_FILE_BYTES", 40_000)
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1} if family != "llama" else {}
    model = random_model(tiny(family, **window), seed)
    save_checkpoint(model, tmp_path, torch.float32)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert theirs.dtype == torch.float32
    assert_equal(full_tensors(model), theirs.state_dict())
    tokens = torch.randint(0, 101, (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(logits(model, tokens), theirs(tokens).logits, atol=2e-4, rtol=1e-4)


def test_saving_defaults_to_bfloat16_and_says_so(tmp_path: Path, seed: int) -> None:
    model = random_model(tiny(), seed)
    save_checkpoint(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_equal(load_file(tmp_path / SINGLE), {n: t.bfloat16() for n, t in full_tensors(model).items()})


@pytest.mark.parametrize("from_checkpoint", [True, False])
def test_training_begins_with_a_checkpoint_or_at_random(from_checkpoint: bool, tmp_path: Path, seed: int) -> None:
    """At random, what writes to the residual stream is smaller by the root of how many modules do."""
    model = random_model(tiny(), seed)
    if from_checkpoint:
        save_checkpoint(model, tmp_path, torch.float32)
    else:
        model = Transformer(model.config, Local(), torch.device("cpu"), torch.float32).requires_grad_(False)
        random_weights(model, seed)
        for name, parameter in model.named_parameters():
            if name.endswith((".wo.weight", ".w_down.weight")):
                parameter.mul_((2 * model.config.n_layers) ** -0.5)
    empty = empty_model(model.config, torch.device("cpu"), torch.float32)
    fill = materializer(empty, open_source(str(tmp_path), model.config) if from_checkpoint else None, seed)
    for name in [name for name, _ in empty.named_parameters()]:
        fill(name)
    assert_equal(full_tensors(empty), full_tensors(model))


def test_a_checkpoint_replaces_the_one_before_it(tmp_path: Path, seed: int, monkeypatch: Any) -> None:
    big, small = random_model(tiny(), seed), random_model(tiny(num_hidden_layers=1), seed + 1)
    for limit, model in ((40_000, big), (10**9, small), (40_000, big), (10**9, small)):
        monkeypatch.setattr(export, "MAX_FILE_BYTES", limit)
        save_checkpoint(model, tmp_path, torch.float32)
        assert [(tmp_path / name).exists() for name in (INDEX, SINGLE)] == [model is big, model is small]
        assert_equal(full_tensors(load(tmp_path)), full_tensors(model))
        assert_equal(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), full_tensors(model))


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (SafetensorError("No space left on device (os error 28)"), UserError)],
)
def test_a_save_that_stops_leaves_no_checkpoint(
    raised: BaseException, expected: type[BaseException], tmp_path: Path, seed: int, monkeypatch: Any
) -> None:
    """Not even a config.json, which alone describes a model with random weights. The folder has an older checkpoint at first."""

    def stopping(*_: Any, **__: Any) -> None:
        raise raised

    model = random_model(tiny(), seed)
    save_checkpoint(model, tmp_path, torch.float32)
    monkeypatch.setattr(export, "save_file", stopping)
    with pytest.raises(expected, match=r" cannot be written .*No space left" if expected is UserError else None):
        save_checkpoint(model, tmp_path, torch.float32)
    with pytest.raises(UserError, match=r"config\.json is missing"):
        read_config(tmp_path / "config.json")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_weights_have_the_permissions_of_new_files(mask: int, tmp_path: Path, seed: int) -> None:
    """A server of another user may have to read them."""
    before = os.umask(mask)
    try:
        save_checkpoint(random_model(tiny("llama"), seed), tmp_path / "saved", torch.float32)
    finally:
        os.umask(before)
    assert {oct(file.stat().st_mode & 0o777) for file in (tmp_path / "saved").iterdir()} == {oct(0o666 & ~mask)}


def test_a_tokenizer_is_copied_byte_by_byte(tmp_path: Path, seed: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    files = {
        "tokenizer.json": b'{"x": "\xc3\xa9"}\r\n',
        "tokenizer.model": bytes(range(256)),
        "chat_template.jinja": b"{{ x }}",
    }
    for name, content in {**files, "README.md": b"no tokenizer", "model.safetensors": b"no tokenizer"}.items():
        (source / name).write_bytes(content)
    save_checkpoint(random_model(tiny(), seed), target, tokenizer_from=source)
    assert {f.name for f in target.iterdir()} == {*files, "config.json", SINGLE}
    assert {name: (target / name).read_bytes() for name in files} == files
    save_checkpoint(random_model(tiny(), seed), target, tokenizer_from=target)  # the same directory: nothing to copy
    assert {name: (target / name).read_bytes() for name in files} == files


def test_a_part_of_a_model_is_not_saved(tmp_path: Path) -> None:
    model = random_model(tiny(), comm=NoCommunication(1, 2))
    fails(lambda: save_checkpoint(model, tmp_path / "out"), "one process", "torchrun")
    assert not (tmp_path / "out").exists()
