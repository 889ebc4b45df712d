"""Conversion to hybrid ladder: the config has the chosen layers, the weights do not change, and the result loads on any
number of ranks."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.hf_config import config_to_hf, read_config
from checkpoints.sources import INDEX, SINGLE
from checkpoints.weights import load_model
from config import Llama3Scaling, ModelConfig, with_variant
from errors import UserError
from layers.attention import Causal
from tests import MODELS
from tests.support.command_line import Here
from tests.support.models import ALONE
from tests.support.ranks import Ranks
from text.tokenizer_files import load_tokenizer
from tp import World
from training import convert
from training.convert import parse_layers, to_hybrid_ladder

STANDARD = MODELS / "tiny-standard"


@pytest.fixture(scope="module")
def standard() -> ModelConfig:
    return read_config(STANDARD / "config.json")


# --- the config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 9))
def test_a_number_means_the_last_layers(count: int, standard: ModelConfig) -> None:
    config = to_hybrid_ladder(standard, count)
    assert config.variant == "ladder" and config.ladder_layers == tuple(range(8))[-count:]
    assert config.is_hybrid == (count < 8)
    assert replace(config, variant="standard", ladder_layers=()) == standard


@pytest.mark.parametrize(
    ("text", "layers"),
    [("16", 16), ("12-15", [12, 13, 14, 15]), ("3,5", [3, 5]), ("1,4-6", [1, 4, 5, 6]), ("3-3", [3]), ("7,", None)]
    + [(text, None) for text in ("", "x", "-4", "4-", "1,,2", "1.5")],
)
def test_layers_on_the_command_line(text: str, layers: int | list[int] | None) -> None:
    if layers is not None:
        assert parse_layers(text) == layers
        return
    with pytest.raises(UserError, match=r"takes a number \(16\) or a list"):
        parse_layers(text)


@pytest.mark.parametrize(
    ("layers", "says"), [(0, "give 1 to 8"), (9, "give 1 to 8"), ([8], "from 0 to 7"), ([], "from 0 to 7")]
)
def test_layers_that_the_model_lacks(layers: int | list[int], says: str, standard: ModelConfig) -> None:
    with pytest.raises(UserError, match=says):
        to_hybrid_ladder(standard, layers)


@pytest.mark.parametrize("variant", ["parallel", "desync-2x:4", "ladder", "hybrid", "upper-bound"])
def test_only_a_standard_model_can_be_converted(variant: str, standard: ModelConfig) -> None:
    with pytest.raises(UserError, match=r"only a standard model can be converted.*start from the standard checkpoint"):
        to_hybrid_ladder(with_variant(standard, variant), 4)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_written_config_is_the_converted_one(family: str, standard: ModelConfig, tmp_path: Path) -> None:
    """In each family. Keys of config.json that Rung does not use are kept."""
    bias, norms = family == "qwen2", family == "qwen3"
    config = replace(standard, family=family, qkv_bias=bias, qk_norm=norms, windows=(64,) * 8 if family == "mistral" else ())
    if family == "llama":
        config = replace(config, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192), tie_embeddings=False, eos_token_ids=(1, 2))
    original = config_to_hf(config) | {"torch_dtype": "float16", "pad_token_id": 7, "use_cache": True}
    (tmp_path / "config.json").write_text(json.dumps(original))
    wanted = to_hybrid_ladder(read_config(tmp_path / "config.json"), [1, 6])
    written = convert.hybrid_json(tmp_path, wanted)
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_config(tmp_path / "config.json") == wanted
    assert written["torch_dtype"] == "float16" and written["pad_token_id"] == 7 and written["ladder_layers"] == [1, 6]
    assert written["model_type"] == ("llamaLadder" if family == "llama" else "rung")


# --- the checkpoint ------------------------------------------------------------------------------------------------------

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Here(monkeypatch, capfd, convert.main, ()).told


def logits_of(world: World, directory: str, config: ModelConfig, tokens: Tensor) -> Tensor:
    model = load_model(directory, config, world, torch.float32)
    with torch.no_grad():
        return model(tokens, Causal(tokens.shape[1], tokens.device))


@pytest.mark.parametrize("options", [(), ("--link",)])
def test_the_result_is_the_variant_of_the_same_weights(
    options: tuple[str, ...], command: Command, ranks: Ranks, standard: ModelConfig, tmp_path: Path, seed: int
) -> None:
    count, out = random.randint(1, 7), tmp_path / "out"
    code, said = command("--model", STANDARD, "--ladder-layers", count, "--out", out, *options)
    assert code == 0 and f"hybrid ladder (layers {8 - count}-7 of 8)" in said.replace("layers [7]", "layers 7-7"), said
    config, tokens = read_config(out / "config.json"), torch.randint(1024, (2, 24))
    expected = logits_of(ALONE, str(STANDARD), with_variant(standard, f"hybrid:{count}"), tokens)
    assert torch.equal(logits_of(ALONE, str(out), config, tokens), expected)
    assert not torch.allclose(logits_of(ALONE, str(STANDARD), standard, tokens), expected, atol=1e-2), "no conversion at all"
    for found in ranks.run(2, logits_of, str(out), config, tokens):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert (out / SINGLE).read_bytes() == (STANDARD / SINGLE).read_bytes()
    assert (out / SINGLE).samefile(STANDARD / SINGLE) == bool(options)
    assert load_tokenizer(out).encode("the fox") == load_tokenizer(STANDARD).encode("the fox")


def split_checkpoint(folder: Path) -> Path:
    """A copy of tiny-standard whose weights are in two files with an index, as those of larger models."""
    shutil.copytree(STANDARD, folder, ignore=shutil.ignore_patterns("draft"))
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_force_replaces_all_of_a_checkpoint(command: Command, tmp_path: Path) -> None:
    """The index of the old checkpoint must be removed: loading would prefer it to the new single file."""
    out, before = split_checkpoint(tmp_path / "out"), (STANDARD / SINGLE).read_bytes()
    (out / "notes.txt").write_text("mine")
    code, said = command("--model", STANDARD, "--ladder-layers", 4, "--out", out)
    assert code == 2 and "is not empty; name another directory, or overwrite its checkpoint with --force" in said
    assert read_config(out / "config.json").variant == "standard" and (out / INDEX).exists(), "nothing was touched"
    code, said = command("--model", STANDARD, "--ladder-layers", 4, "--out", out, "--force", "--link")
    assert code == 0, said
    names = {"config.json", SINGLE, "modeling_rung.py", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert {path.name for path in out.iterdir()} == names | {"notes.txt", "training.json", "examples.json"}
    code, said = command("--model", STANDARD, "--ladder-layers", 3, "--out", out, "--force")
    assert code == 0 and (STANDARD / SINGLE).read_bytes() == before, "the linked original is not written through"


def test_errors_leave_what_is_there(command: Command, tmp_path: Path) -> None:
    old, torn, other, empty = (tmp_path / name for name in ("old", "torn", "other", "empty"))
    for folder in (old, torn, other):
        shutil.copytree(STANDARD, folder)
    (torn / SINGLE).write_bytes((STANDARD / SINGLE).read_bytes()[:-100])
    (other / "config.json").write_text((STANDARD / "config.json").read_text().replace('_layers": 8', '_layers": 7'))
    empty.mkdir()
    (tmp_path / "file").touch()
    parallel = MODELS / "tiny-parallel"
    cases = [
        (parallel, "4", old, "only a standard model can be converted, and this one is parallel"),
        (torn, "4", old, "truncated or no safetensors file"),
        (other, "4", old, "has unknown tensors model.layers.7."),
        (STANDARD, "9", old, "the model has 8 layers"),
        (STANDARD, "7-8", old, "ladder_layers must name layers from 0 to 7"),
        (STANDARD, "many", old, "takes a number"),
        (old, "4", old, "the same directory as --model"),
        (empty, "4", old, "config.json is missing"),
        (tmp_path / "nowhere", "4", old, "is no directory; name a checkpoint's"),
        (STANDARD, "4", tmp_path / "file", "is a file; name a directory"),
        (STANDARD, "4", tmp_path / "file" / "below", "cannot be written"),
    ]
    for model, layers, out, says in cases:
        code, said = command("--model", model, "--ladder-layers", layers, "--out", out, "--force")
        assert code == 2 and says in said and said.count("error:") == 1, (model, said)
        assert {path.name for path in old.iterdir()} == {path.name for path in STANDARD.iterdir()}
