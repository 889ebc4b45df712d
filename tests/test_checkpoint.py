"""Loading weights: every format against transformers and the other formats, slices, damaged files, peak memory."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import export, sources, weights
from checkpoints.export import save_checkpoint
from checkpoints.hf_config import config_from_hf, config_to_hf
from checkpoints.presets import model_config, preset
from checkpoints.sources import INDEX, PTH, SINGLE, open_source, weights_fingerprint
from checkpoints.weights import build_model, check_source, load_model, places
from comms import Communicator, Local, NoCommunication
from config import ModelConfig, with_variant
from errors import UserError
from layers.attention import Causal
from model import Transformer
from tests import ROOT
from tests.support.models import ALONE, CPU
from tp import SPLITS, World

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
VARIANTS = ["standard", "parallel", "ladder", "hybrid:1", "desync-2x:2", "desync-4x:4", "upper-bound"]
SHAPE = dict(
    vocab_size=101,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=6,
    intermediate_size=64,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)


def build(name: str, config: ModelConfig, comm: Communicator, dtype: torch.dtype = torch.float32, seed: int = 0) -> Transformer:
    """The model of one rank. If `comm` is one of several ranks without the others, errors are not exchanged between ranks."""
    make = load_model if comm.world_size == 1 else build_model
    return make(name, config, World(comm.rank, comm.world_size, CPU, comm), dtype, seed)


def tiny(family: str = "llama", **more: Any) -> ModelConfig:
    return config_from_hf(SHAPE | {"model_type": family, **more})


def hf_model(family: str = "llama", **more: Any) -> Any:
    """A transformers model with random weights, norms and biases."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **SHAPE | more))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()


def load(path: Path, comm: Communicator | None = None, dtype: torch.dtype = torch.float32) -> Transformer:
    return build(str(path), model_config(str(path), None, 1), comm or Local(), dtype)


def random_model(config: ModelConfig, seed: int = 0, comm: Communicator | None = None) -> Transformer:
    """A model in which every tensor is random. `random_weights` would leave the norms at 1 and the biases at 0."""
    model = Transformer(config, comm or Local(), CPU, torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for place in places(model):
        place.tensor.normal_(0.0, 0.2, generator=generator)
    return model


def full_tensors(model: Transformer) -> dict[str, Tensor]:
    """The tensors of the checkpoint format, assembled from the layout of a model that has all shards."""
    parts: dict[str, dict[int, Tensor]] = {}
    dims: dict[str, int] = {}
    for place in places(model):
        parts.setdefault(place.name, {})[place.rows.start] = place.tensor
        dims[place.name] = place.dim
    full = {name: torch.cat([by_row[i] for i in sorted(by_row)], dim=dims[name]) for name, by_row in parts.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in full:
            full[name] = full[name][: model.config.vocab_size]
    return full


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def logits(model: Transformer, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, Causal(tokens.shape[1], CPU))


def fails(call: Callable[[], object], *names: object) -> None:
    """Check that `call` raises a UserError whose message is one line and contains each of `names`."""
    with pytest.raises(UserError) as error:
        call()
    message = str(error.value)
    assert len(message.splitlines()) == 1, message
    for name in names:
        assert str(name) in message


# --- Hugging Face directories ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_what_transformers_saves_loads_equal(family: str, tied: bool, sharded: bool, tmp_path: Path, seed: int) -> None:
    theirs = hf_model(family, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB" if sharded else "1GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 if sharded else (tmp_path / SINGLE).exists()
    assert (tmp_path / INDEX).exists() == sharded
    ours = load(tmp_path)
    expected = {n: t for n, t in theirs.state_dict().items() if not (tied and n == "lm_head.weight")}
    assert_equal(full_tensors(ours), expected)
    assert_equal(full_tensors(load(tmp_path, dtype=torch.bfloat16)), {name: t.bfloat16() for name, t in expected.items()})
    tokens = torch.randint(0, 101, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(logits(ours, tokens), theirs(tokens).logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "biases"),
    [
        ("llama", dict(attention_bias=True)),
        ("llama", dict(mlp_bias=True)),
        ("llama", dict(attention_bias=True, mlp_bias=True)),
        ("qwen3", dict(attention_bias=True)),
        ("qwen2", dict(attention_bias=True)),  # without effect in this family
    ],
)
def test_biases_load_and_are_written_as_transformers_has_them(
    family: str, biases: dict[str, bool], tmp_path: Path, seed: int
) -> None:
    theirs = hf_model(family, **biases)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, tokens = load(tmp_path / "theirs"), torch.randint(0, 101, (2, 9))
    assert_equal(full_tensors(ours), theirs.state_dict())
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(logits(ours, tokens), expected, atol=2e-4, rtol=1e-4)
    save_checkpoint(ours, tmp_path / "ours", torch.float32)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(back(tokens).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_tied_checkpoint_may_repeat_its_table_and_old_ones_their_frequencies(
    tmp_path: Path, seed: int, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(weights, "COMPARED_ROWS", 30)
    save_checkpoint(random_model(tiny(tie_word_embeddings=True), seed), tmp_path, torch.float32)
    tensors = load_file(tmp_path / SINGLE)
    table, frequencies = tensors["model.embed_tokens.weight"], "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(tensors | {"lm_head.weight": table.clone(), frequencies: torch.ones(3)}, tmp_path / SINGLE)
    assert_equal(full_tensors(load(tmp_path)), tensors)
    assert frequencies in (said := capsys.readouterr().err) and "lm_head" not in said and "link" not in said
    others = [table.index_add(0, torch.tensor([row]), torch.ones(1, table.shape[1])) for row in (0, 29, 30, 100)]
    for other in (*others, torch.cat([table, table[:3]]), table[:-1].clone()):
        save_file(tensors | {"lm_head.weight": other}, tmp_path / SINGLE)
        fails(lambda: load(tmp_path), "lm_head.weight", "tie_word_embeddings")
    save_file({"lm_head.weight" if "embed" in name else name: t for name, t in tensors.items()}, tmp_path / SINGLE)
    assert_equal(full_tensors(load(tmp_path)), tensors)  # transformers ties the tables in both directions
    assert torch.equal(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).model.embed_tokens.weight, table)


# --- which files, and under which names ----------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path, seed: int) -> tuple[Path, dict[str, Tensor]]:
    """An empty folder but for config.json, and the tensors of a model."""
    tensors = {n: t.clone() for n, t in full_tensors(random_model(tiny("qwen3"), seed)).items()}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_to_hf(tiny("qwen3"))))
    return folder, tensors


def split(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    names = sorted(tensors)
    return [{n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]}]


def save_shards(folder: Path, tensors: dict[str, Tensor], stem: str, suffix: str) -> None:
    index = {}
    for i, part in enumerate(split(tensors)):
        save_as(folder / (name := f"{stem}-{i + 1:05d}-of-00002{suffix}"), part)
        index |= dict.fromkeys(part, name)
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def save_as(file: Path, tensors: dict[str, Tensor]) -> None:
    if file.suffix == ".safetensors":
        save_file(tensors, file, metadata={"format": "pt"})
    else:
        torch.save(tensors, file)


@pytest.mark.parametrize("name", [SINGLE, "pytorch_model.bin", "model.pth", "other.bin", "consolidated.pt"])
def test_the_names_of_the_tensors_decide_the_layout(name: str, parts: Any, gpt_fast: Any) -> None:
    folder, tensors = parts
    save_as(folder / name, tensors)
    for path in [folder / name] + [folder] * (name in (SINGLE, "pytorch_model.bin", PTH)):
        assert_equal(full_tensors(load(path)), tensors)
    directory, theirs, model = gpt_fast
    (directory / PTH).unlink()
    save_as(directory / name, theirs)
    assert_equal(full_tensors(load(directory / name)), model.state_dict())
    save_as(directory / name, theirs | {"model.layers.1.mlp.up_proj.weight": theirs["layers.1.feed_forward.w3.weight"].clone()})
    fails(lambda: load(directory / name), "two layouts", "mlp.up_proj")


@pytest.mark.parametrize(("stem", "suffix"), [("model", ".safetensors"), ("pytorch_model", ".bin")])
def test_shards_are_the_same_in_both_formats(stem: str, suffix: str, parts: Any) -> None:
    folder, tensors = parts
    save_shards(folder, tensors, stem, suffix)
    assert_equal(full_tensors(load(folder)), tensors)
    index = folder / f"{stem}{suffix}.index.json"
    content = json.loads(index.read_text())
    wrong = sorted(tensors)[0]
    content["weight_map"][wrong] = f"{stem}-00002-of-00002{suffix}"
    index.write_text(json.dumps(content))
    fails(lambda: load(folder), wrong, "00002-of-00002", "again")


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda n: n.removeprefix("model."),
        lambda n: f"_orig_mod.{n}",
        lambda n: f"module.{n}",
        lambda n: f"module._orig_mod.{n}",
        lambda n: n.replace("layers.1.", "layers.1._orig_mod.").replace("mlp.", "_checkpoint_wrapped_module.mlp."),
        lambda n: f"base_model.model.{n}",
        lambda n: f"language_model.{n}",
        lambda n: n.replace("model.", "model.language_model.", 1),
    ],
)
def test_wrappers_of_a_model_are_taken_off_its_tensors_names(wrapped: Callable[[str], str], parts: Any) -> None:
    folder, tensors = parts
    save_as(folder / SINGLE, {wrapped(name): tensor for name, tensor in tensors.items()})
    assert_equal(full_tensors(load(folder)), tensors)
    save_as(folder / SINGLE, {wrapped(n): t for n, t in tensors.items()} | {"model.model.norm.weight": torch.ones(48)})
    fails(lambda: load(folder), "twice", "model.norm.weight")
    name = wrapped("model.layers.0.self_attn.q_proj.lora_A.weight")  # of an adapter that is not merged
    save_as(folder / SINGLE, {wrapped(n): t for n, t in tensors.items()} | {name: torch.ones(2, 48)})
    fails(lambda: load(folder), "unknown", "lora_A")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_a_head_computes_hidden_states_and_no_tokens(
    family: str, tmp_path: Path, seed: int, capsys: Any
) -> None:
    """As published embedding models are saved, from transformers' class without a head."""
    theirs = hf_model(family)
    theirs.model.save_pretrained(tmp_path)
    ours, tokens = load(tmp_path), torch.randint(0, 101, (2, 9))
    assert "lm_head.weight" in capsys.readouterr().err
    with torch.no_grad():
        hidden = ours.norm(ours.hidden(tokens, Causal(9, CPU)))
        torch.testing.assert_close(hidden, theirs.model(tokens).last_hidden_state, atol=2e-4, rtol=1e-4)
    assert logits(ours, tokens).isnan().all()
    fails(lambda: check_source(str(tmp_path), ours.config, ALONE, torch.float32), "lacks lm_head.weight")


@pytest.mark.parametrize("key", ["model", "state_dict", "module", "optimizer"])
def test_tensors_within_another_dict_are_refused_by_its_key(key: str, parts: Any) -> None:
    folder, tensors = parts
    for content in ({key: tensors}, {"model.norm.weight": tensors["model.norm.weight"], key: tensors}, {key: [1]}):
        torch.save(content, folder / "pytorch_model.bin")
        fails(lambda: load(folder), repr(key), "save")


def test_of_several_checkpoints_in_a_folder_transformers_choice_counts(parts: Any, capsys: Any, seed: int) -> None:
    folder, tensors = parts
    order = [SINGLE, INDEX, "pytorch_model.bin"]
    contents = {name: {n: t + i for n, t in tensors.items()} for i, name in enumerate(order)}
    save_as(folder / SINGLE, contents[SINGLE])
    save_shards(folder, contents[INDEX], "model", ".safetensors")
    save_as(folder / "pytorch_model.bin", contents["pytorch_model.bin"])
    save_as(folder / PTH, tensors)
    for i, name in enumerate(order):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert_equal(full_tensors(load(folder)), theirs.state_dict())
        assert_equal(contents[name], theirs.state_dict())
        said = capsys.readouterr().err
        assert all(other in said for other in [*order[i:], PTH])
        if name == SINGLE:
            fails(lambda: load(folder / "model-00001-of-00002.safetensors"), "not part", SINGLE)
        (folder / name).unlink()
    assert_equal(full_tensors(load(folder)), tensors)
    assert "not read" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/tmp/model.safetensors", "sub/model.safetensors", "..", ""])
def test_an_index_names_files_of_its_folder_only(name: str, parts: Any) -> None:
    folder, tensors = parts
    (folder.parent / "other").mkdir()
    save_as(folder.parent / "other" / SINGLE, tensors)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    fails(lambda: load(folder), folder / INDEX, repr(name), "folder")


def test_links_are_followed_and_said_but_for_those_of_a_cache(parts: Any, capsys: Any) -> None:
    folder, tensors = parts
    snapshot, blobs = folder.parent / "snapshots" / "0123", folder.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(tensors, blobs / "ab", metadata={"format": "pt"})
    shutil.copy(folder / "config.json", blobs / "cd")
    (snapshot / SINGLE).symlink_to("../../blobs/ab")
    (snapshot / "config.json").symlink_to("../../blobs/cd")
    assert_equal(full_tensors(load(snapshot)), tensors)
    assert not capsys.readouterr().err
    (folder / SINGLE).symlink_to(blobs / "ab")
    assert_equal(full_tensors(load(folder)), tensors)
    assert f"{folder / SINGLE} is a link to {blobs / 'ab'}" in capsys.readouterr().err


# --- gpt-fast ----------------------------------------------------------------------------------------------------------------


def gpt_fast_tensors(state: dict[str, Tensor], n_heads: int, n_kv_heads: int) -> dict[str, Tensor]:
    """Convert tensors from Hugging Face's names and layout to gpt-fast's, as the conversion script of gpt-fast does."""

    def permute(w: Tensor, heads: int) -> Tensor:
        return w.view(heads, 2, w.shape[0] // heads // 2, w.shape[1]).transpose(1, 2).reshape(w.shape)

    out = {
        "tok_embeddings.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    layers = {int(name.split(".")[2]) for name in state if name.startswith("model.layers.")}
    for i in layers:
        old, new = f"model.layers.{i}.", f"layers.{i}."
        q, k, v = (state[f"{old}self_attn.{p}_proj.weight"] for p in "qkv")
        out[f"{new}attention.wqkv.weight"] = torch.cat([permute(q, n_heads), permute(k, n_kv_heads), v])
        out[f"{new}attention.wo.weight"] = state[f"{old}self_attn.o_proj.weight"]
        out[f"{new}feed_forward.w1.weight"] = state[f"{old}mlp.gate_proj.weight"]
        out[f"{new}feed_forward.w3.weight"] = state[f"{old}mlp.up_proj.weight"]
        out[f"{new}feed_forward.w2.weight"] = state[f"{old}mlp.down_proj.weight"]
        out[f"{new}attention_norm.weight"] = state[f"{old}input_layernorm.weight"]
        out[f"{new}ffn_norm.weight"] = state[f"{old}post_attention_layernorm.weight"]
    return {name: tensor.detach().clone() for name, tensor in out.items()}


@pytest.fixture
def gpt_fast(tmp_path: Path, seed: int) -> tuple[Path, dict[str, Tensor], Any]:
    """A directory with model.pth and config.json, the tensors in model.pth, and the transformers model they come from."""
    theirs = hf_model()
    theirs.config.save_pretrained(tmp_path)
    tensors = gpt_fast_tensors(theirs.state_dict(), 8, 4)
    torch.save(tensors, tmp_path / PTH)
    return tmp_path, tensors, theirs


@pytest.mark.parametrize("n", [2, 8])
def test_ranks_slice_both_formats_alike(gpt_fast: tuple[Path, dict[str, Tensor], Any], n: int, monkeypatch: Any) -> None:
    directory, _, theirs = gpt_fast
    monkeypatch.setattr(sources, "MAX_TOUCHED_BYTES", 20_000)  # so small that the file is opened more than once
    theirs.save_pretrained(directory / "hf")
    for rank in range(n):
        comm = NoCommunication(rank, n)
        assert_equal(load(directory / PTH, comm).state_dict(), load(directory / "hf", comm).state_dict())


def test_columns_of_a_mapped_file_count_as_all_its_pages(tmp_path: Path, seed: int) -> None:
    """So that no more of it stays in memory than is meant to."""
    torch.save({"a": torch.randn(40, 30), "b": torch.ones(())}, tmp_path / "model.pth")
    source = sources.PickledSource(tmp_path / "model.pth")
    counted = []
    for read in (("a", 0, 3, 5), ("a", 1, 3, 5), ("b", 0, 0, 1)):
        source.read(*read)
        counted.append(source.touched)
    assert counted == [4 * 2 * 30, 4 * (60 + 1200), 4 * (60 + 1200 + 1)]


def test_the_fingerprint_of_a_gpt_fast_file_tells_weights_apart(gpt_fast: tuple[Path, dict[str, Tensor], Any]) -> None:
    directory, tensors, theirs = gpt_fast
    config = model_config(str(directory), None, 1)
    theirs.save_pretrained(directory / "hf")
    before = weights_fingerprint(open_source(str(directory), config), config)
    assert weights_fingerprint(open_source(str(directory / "hf"), config), config) == before
    for name, row in (("layers.0.attention.wqkv.weight", 0), ("layers.0.attention.wo.weight", -1), ("output.weight", 57)):
        changed = {**tensors, name: tensors[name].clone()}
        changed[name][row] += 1
        torch.save(changed, directory / PTH)
        assert weights_fingerprint(open_source(str(directory), config), config) != before


# --- random weights ----------------------------------------------------------------------------------------------------------


def build_random(config: ModelConfig, seed: int, rank: int = 0, n: int = 1) -> Transformer:
    comm = NoCommunication(rank, n) if n > 1 else Local()
    return build("tiny", config, comm, seed=seed)


@pytest.mark.parametrize("variant", ["standard", "parallel", "desync-2x:4"])
def test_random_weights_depend_on_the_seed_alone(variant: str, seed: int) -> None:
    config = with_variant(preset("tiny:2"), variant)
    first = build_random(config, seed)
    torch.randn(5)  # changes the state of the global generator
    assert_equal(build_random(config, seed).state_dict(), first.state_dict())
    other = build_random(config, seed + 1).state_dict()
    matrices = {name: tensor for name, tensor in first.state_dict().items() if tensor.dim() == 2}
    assert all(not torch.equal(other[name], tensor) for name, tensor in matrices.items())
    flat = torch.cat([t.flatten() for t in matrices.values()])
    assert flat.std().item() == pytest.approx(0.02, rel=0.01) and abs(flat.mean().item()) < 1e-4
    starts = [place.tensor.flatten()[:8] for place in places(first) if place.tensor.dim() == 2]
    assert len(starts) == len({tuple(s.tolist()) for s in starts})  # no two tensors are equal
    assert all((t == 1).all() for name, t in first.state_dict().items() if "norm" in name)


def test_random_biases_are_zero() -> None:
    state = build_random(tiny("qwen2"), 3).state_dict()
    biases = [tensor for name, tensor in state.items() if name.endswith("bias")]
    assert len(biases) == 3 and not any(b.any() for b in biases)


def test_ranks_draw_different_shards_but_equal_replicas_of_a_kv_head(seed: int) -> None:
    config, n = tiny(), 8  # 4 KV heads: ranks 2 k and 2 k + 1 hold head k
    ranks = [{p.name: p.tensor for p in places(build_random(config, seed, r, n))} for r in range(n)]
    for name, first in ranks[0].items():
        if first.dim() < 2:
            continue
        kv = "k_proj" in name or "v_proj" in name
        for a in range(n):
            for b in range(a):
                assert torch.equal(ranks[a][name], ranks[b][name]) == (kv and a // 2 == b // 2), (name, a, b)


# --- slices ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize(("family", "variant"), [("llama", "standard"), ("qwen2", "parallel"), ("qwen3", "ladder")])
def test_the_slices_of_all_ranks_are_the_whole(family: str, variant: str, n: int, tmp_path: Path, seed: int) -> None:
    config = with_variant(tiny(family), variant)
    save_checkpoint(random_model(config, seed), tmp_path, torch.float32)
    whole = load_file(tmp_path / SINGLE)
    ranks = [{p.name: p.tensor for p in places(load(tmp_path, NoCommunication(r, n)))} for r in range(n)]
    assert all(rank.keys() == whole.keys() for rank in ranks)
    for name, expected in whole.items():
        part = name.split(".")[-2]
        slices = [rank[name] for rank in ranks]
        if part not in SPLITS:
            assert all(torch.equal(s, expected) for s in slices), name
            continue
        if part in ("k_proj", "v_proj") and n > config.n_kv_heads:
            copies = n // config.n_kv_heads
            assert all(torch.equal(s, slices[i // copies * copies]) for i, s in enumerate(slices)), name
            slices = slices[::copies]
        found = torch.cat(slices, dim=1 if part in ("o_proj", "down_proj") else 0)
        if part in ("embed_tokens", "lm_head"):
            assert len(found) == -(-101 // n) * n
            assert not found[101:].any()
            found = found[:101]
        assert torch.equal(found, expected), name


# --- errors ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, seed: int) -> Path:
    save_checkpoint(random_model(tiny(), seed), tmp_path / "model", torch.float32)
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path, seed: int, monkeypatch: Any) -> Path:
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 40_000)
    save_checkpoint(random_model(tiny(), seed), tmp_path / "model", torch.float32)
    return tmp_path / "model"


def test_a_missing_directory(tmp_path: Path) -> None:
    fails(lambda: load(tmp_path / "nowhere"), tmp_path / "nowhere", "missing")
    fails(lambda: load(tmp_path / "nowhere.pth"), tmp_path / "nowhere.pth", "missing")
    fails(lambda: model_config("nowhere", None, 1), "nowhere", "presets")


# Each row spoils a file in a folder, or the tensors of one, and has the words of the message.
Spoiler = Callable[[Path], object]
Tensors = dict[str, Tensor]
GARBAGE = [b"garbage", b"\xff" * 1000, b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0\xff\xff", b"<html>" * 99]
CUTS = (0, 1, 7, 8, 9, 0.01, 0.3, 0.9, -1)  # bytes, or a share of them


def cut(name: str, where: float) -> Spoiler:
    def apply(folder: Path) -> None:
        content = (file := sorted(folder.glob(name))[-1]).read_bytes()
        file.write_bytes(content[: int(where * len(content)) if isinstance(where, float) else where])

    return apply


def holds(name: str, content: bytes) -> Spoiler:
    return lambda folder: (folder / name).write_bytes(content)


def tensors(change: Callable[[Tensors], Tensors], name: str = SINGLE) -> Spoiler:
    def apply(folder: Path) -> None:
        found = load_file(folder / name) if name == SINGLE else torch.load(folder / name)
        save_as(folder / name, change(found))

    return apply


def more(name: str, *shape: int) -> Spoiler:
    return tensors(lambda found: found | {name: torch.zeros(shape)})


def lacking(name: str, file: str = SINGLE) -> Spoiler:
    return tensors(lambda found: {other: tensor for other, tensor in found.items() if other != name}, file)


def lost_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / "tokenizer.json").write_text("{}")  # because a folder with only config.json means random weights


Q2, UP3, NORM, EMBEDDED = (
    "model.layers.2.self_attn.q_proj.weight", "model.layers.3.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight",
)  # fmt: skip
SPOILED: list[tuple[Spoiler, list[object]]] = [
    *((cut("config.json", where), ["config.json", "again"]) for where in (0, 1, 0.5, -3)),
    (lambda folder: (folder / "config.json").unlink(), ["config.json", "missing"]),
    (lost_weights, [SINGLE, INDEX, PTH]),
    *((cut(SINGLE, where), [SINGLE, "truncated"]) for where in CUTS),
    *((holds(SINGLE, content), [SINGLE, "again"]) for content in GARBAGE),
    *((lacking(name), [name, "lacks"]) for name in (Q2, NORM, EMBEDDED)),
    (tensors(lambda found: {f"x.{name}": tensor for name, tensor in found.items()}), ["more", "lacks"]),
    *((more(name, 48), [name, "unknown"]) for name in (UP3, "model.layers.0.self_attn.q_proj.bias", "score.weight")),
    (more("x\n\x1b[31m", 1), ["unknown tensors", "'x\\n"]),
    (more("x" * 100_000, 1), ["unknown tensors", "'xxx"]),
    *(
        (more(name, *shape), [name, shape, "config.json"])
        for name, shape in [
            ("model.layers.1.self_attn.k_proj.weight", (48, 48)),
            ("model.layers.2.mlp.down_proj.weight", (64, 48)),
            (NORM, (47,)),
            (NORM, (48, 1)),
            ("lm_head.weight", (102, 48)),
        ]
    ),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILED)
def test_a_spoiled_checkpoint_is_refused_on_every_rank(spoil: Spoiler, words: list[object], saved: Path) -> None:
    spoil(saved)
    for comm in (Local(), NoCommunication(1, 2)):
        fails(lambda comm=comm: load(saved, comm), *words)


BAD_INDEXES = [
    b"",
    b"{",
    b"[]",
    b"{}",
    b'{"weight_map": 3}',
    b'{"weight_map": {"a": 3}}',
    b'{"weight_map": {"a": []}}',
    b"\xff\xfe\0",
]


def forget(folder: Path) -> None:
    """Remove a shard, and what the index says of it."""
    shard = sorted(folder.glob("model-*"))[1]
    shard.unlink()
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: file for name, file in index.items() if file != shard.name}}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        *((holds(INDEX, content), [INDEX, "again"]) for content in BAD_INDEXES),
        (cut(INDEX, 0.5), [INDEX, "again"]),
        (holds(INDEX, b'{"weight_map": {}}'), ["lacks", EMBEDDED]),
        (lambda folder: sorted(folder.glob("model-*"))[1].unlink(), ["model-00002-of-", "missing", "again"]),
        (forget, ["lacks", "model.layers."]),
        (cut("model-*", -5), ["model-", "truncated"]),
    ],
)
def test_a_spoiled_checkpoint_of_several_files_is_refused(spoil: Spoiler, words: list[object], sharded: Path) -> None:
    spoil(sharded)
    fails(lambda: load(sharded), *words)


FUSED = "layers.1.attention.wqkv.weight"
NO_TENSORS: list[Any] = [[1, 2], {"model": {}}, {"norm.weight": 3}, {3: torch.zeros(2)}, torch.zeros(3), print]


def pth(name: str, *shape: int) -> Spoiler:
    return tensors(lambda found: found | {name: torch.zeros(shape)}, PTH)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        *((cut(PTH, where), [PTH, "convert it again"]) for where in (0, 1, 100, 0.5, -1)),
        (holds(PTH, b"\x80\x02garbage"), [PTH, "convert it again"]),
        *((lambda folder, thing=thing: torch.save(thing, folder / PTH), [PTH, "convert it again"]) for thing in NO_TENSORS),
        (
            lambda folder: torch.save(torch.load(folder / PTH), folder / PTH, _use_new_zipfile_serialization=False),
            [PTH, "convert it again"],
        ),
        *((pth(FUSED, *shape), [FUSED, "96 rows", "config.json"]) for shape in ((95, 48), (97, 48), ())),
        (pth(FUSED, 96, 47), ["model.layers.1.self_attn", "config.json"]),
        (lacking(FUSED, PTH), ["model.layers.1.self_attn.q_proj.weight", "lacks"]),
        (pth("layers.1.attention.wo.scales", 48), ["attention.wo.scales", "unknown"]),  # quantized by gpt-fast
        (lambda folder: (folder / "config.json").unlink(), ["config.json", "missing", "beside"]),
    ],
)
def test_a_spoiled_pth_is_refused(spoil: Spoiler, words: list[object], gpt_fast: Any) -> None:
    spoil(gpt_fast[0])
    fails(lambda: load(gpt_fast[0] / PTH), *words)


def test_the_only_file_may_have_autogptq_s_name(saved: Path) -> None:
    expected = load(saved)
    (saved / SINGLE).rename(named := saved / "gptq_model-4bit-128g.safetensors")
    found = load(saved)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    shutil.copy(named, saved / "gptq_model-8bit-32g.safetensors")
    fails(lambda: load(saved), saved, "2 checkpoints", SINGLE)
    shutil.copy(named, saved / SINGLE)  # the usual name decides
    load(saved)


def test_of_a_tensor_in_two_files_that_of_the_index_counts(sharded: Path, capsys: Any) -> None:
    index, expected = json.loads((sharded / INDEX).read_text())["weight_map"], load(sharded).state_dict()
    files = sorted(sharded.glob("model-*"))
    tensors = {file: load_file(file) for file in files}
    copies = {name: tensor + 1 for found in tensors.values() for name, tensor in found.items()}
    for file in files:
        save_file(copies | tensors[file], file, metadata={"format": "pt"})
    assert set(index.values()) == {file.name for file in files}
    capsys.readouterr()
    for name, tensor in load(sharded).state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert len((said := capsys.readouterr().err).splitlines()) == 1 and "several have" in said


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)])
def test_a_data_type_of_which_no_slice_can_be_read(dtype: str, bits: int, saved: Path) -> None:
    tensors = load_file(file := saved / SINGLE)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, file)
    size = int.from_bytes((content := file.read_bytes())[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    more = bytes(norm.numel() * bits // 8)
    header["model.norm.weight"] = {"dtype": dtype, "shape": [*norm.shape], "data_offsets": [len(data), len(data) + len(more)]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data + more)
    fails(lambda: load(saved), "model.norm.weight", dtype, "not supported")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(value: float, saved: Path, seed: int) -> None:
    """In the file, or in a dtype that is too narrow for the file's values."""
    tensors = load_file(saved / SINGLE)
    name = random.choice(sorted(tensors))
    good = tensors[name].clone()
    tensors[name].view(-1)[random.randrange(good.numel())] = value
    save_file(tensors, saved / SINGLE)
    fails(lambda: load(saved), f"{name} has values that are not finite in torch.float32")
    save_file(tensors | {name: good.float() * 1e6}, saved / SINGLE)
    load(saved)
    fails(lambda: load(saved, dtype=torch.float16), f"{name} has values that are not finite in torch.float16")


def test_a_model_that_the_ranks_cannot_share(saved: Path) -> None:
    fails(lambda: load(saved, NoCommunication(0, 3)), "8 attention heads", "3 ranks")


def test_variants_of_a_checkpoint_and_of_a_preset(saved: Path) -> None:
    assert model_config(str(saved), None, 4) == replace(tiny(), eos_token_ids=(), bos_token_id=None)
    assert model_config(str(saved), "desync-2x", 4) == with_variant(tiny(), "desync-2x:4")
    assert model_config("tiny", "desync-4x", 2).desync_streams == 2
    assert model_config("tiny", "desync-4x:8", 2).desync_streams == 8
    raw = config_to_hf(with_variant(tiny(), "desync-2x:8"))
    (saved / "config.json").write_text(json.dumps(raw))
    assert model_config(str(saved), "desync-4x", 2).desync_streams == 8  # the number of streams it was trained with
    assert model_config(str(saved), "ladder", 2) == with_variant(tiny(), "ladder")
    fails(lambda: model_config("tiny", "desync", 2), "'desync'", "desync-2x")


# --- memory ------------------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from checkpoints import sources, weights
from comms import NoCommunication
from checkpoints.presets import model_config
from tp import World

def memory(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

path, n = sys.argv[2], int(sys.argv[3])
sources.MAX_TOUCHED_BYTES = int(sys.argv[4]) or sources.MAX_TOUCHED_BYTES
torch.ones(64, 64) @ torch.ones(64, 64)
config = model_config(path, None, n)
before = memory("VmRSS")
comm = NoCommunication(0, n)
model = weights.build_model(path, config, World(0, n, torch.device("cpu"), comm), torch.bfloat16)
print(memory("VmHWM") - before, sum(p.nbytes for p in model.parameters()))
"""
MIB = 2**20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of a model with 400 MB of bf16 weights, in both formats: `hf` and `pth`."""
    directory = tmp_path_factory.mktemp("large")
    raw = SHAPE | dict(
        model_type="llama", vocab_size=16000, hidden_size=2048, num_hidden_layers=3, num_attention_heads=16,
        num_key_value_heads=4, head_dim=128, intermediate_size=6144,
    )  # fmt: skip
    model = Transformer(config_from_hf(raw), Local(), CPU, torch.bfloat16).requires_grad_(False)
    for parameter in model.parameters():  # random, so that the system cannot compress or share pages; quick to make
        parameter.view(torch.int16).random_(0, 0x7F80) if parameter.dim() == 2 else parameter.fill_(1)
    save_checkpoint(model, directory / "hf")
    (directory / "pth").mkdir()
    shutil.copy(directory / "hf" / "config.json", directory / "pth")
    torch.save(gpt_fast_tensors(load_file(directory / "hf" / SINGLE), 16, 4), directory / "pth" / PTH)
    assert (directory / "hf" / SINGLE).stat().st_size > 400e6
    yield directory
    shutil.rmtree(directory)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its peak memory from /proc")
@pytest.mark.parametrize(("layout", "touched"), [("hf", 0), ("pth", 0), ("pth", 16 * MIB)])
def test_a_rank_reads_no_more_than_its_shard(layout: str, touched: int, large: Path) -> None:
    command = [sys.executable, "-c", MEASURE, str(ROOT), str(large / layout), "4", str(touched)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    peak, shard = (int(word) for word in done.stdout.split())
    assert shard == pytest.approx((large / "hf" / SINGLE).stat().st_size / 4, rel=0.01)
    assert shard < peak < 1.3 * shard + 300 * MIB
    # A reader that keeps pages mapped would need the shard, its row slices a second time, and all row-parallel tensors whole.
    if layout == "hf" or touched:
        assert peak < 1.3 * shard + 64 * MIB
