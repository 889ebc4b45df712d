"""Making quantized checkpoints: GPTQ against its definition, and what scripts.quantize writes against what is read again."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import scripts.quantize
from checkpoints.hf_config import config_to_hf
from checkpoints.memory import weight_bytes
from checkpoints.presets import model_config
from checkpoints.sources import open_files
from config import ModelConfig, with_variant
from engine.draft_models import EMBEDDED
from errors import UserError
from quantized.gptq import DAMPING, best_scales, gptq
from quantized.scheme import SCHEMES, on_load
from quantized.weight import dequantize, quantize, unpack
from scripts.quantize import LENGTH, SAMPLES, STATE, Job, begin, finish, quantize_checkpoint, quantize_model, scheme_of
from tests.support.command_line import MODELS, Here
from tests.support.models import ALONE, CPU, load, logits_of, save_random
from tests.support.ranks import Ranks

CONFIG = ModelConfig(
    vocab_size=101, hidden_size=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, intermediate_size=256, max_seq_len=64
)
VARIANTS = ["standard", "parallel", "ladder", "hybrid:1", "desync-2x:2", "desync-4x:4"]


def before_rounding(weight: Tensor, hessian: Tensor, scales: Tensor, group: int, codes: Tensor) -> Tensor:
    """What GPTQ rounds to `codes` (N, K), in units of the scales: column by column in fp64, by elimination from the inverse of the
    damped Hessian (equation 2 of the paper). Each error is that of the code given, so a tie decides nothing for later columns."""
    left, found = weight.double().clone(), torch.zeros(weight.shape, dtype=torch.float64)
    damped = hessian.double() + DAMPING * hessian.diagonal().double().mean() * torch.eye(len(hessian))
    inverse = torch.linalg.inv(damped)
    for i in hessian.diagonal().argsort(descending=True, stable=True).tolist():
        scale = scales[:, i // group].double()
        found[:, i] = left[:, i] / scale
        left -= ((left[:, i] - codes[:, i] * scale) / inverse[i, i])[:, None] * inverse[i]
        inverse -= inverse[:, i, None] * inverse[i] / inverse[i, i]
        inverse[i, i] = 1.0  # this column is done; its row and column are 0
    return found


def test_gptq_follows_its_definition(seed: int) -> None:
    weight, scheme = torch.randn(24, 192), replace(SCHEMES["int4"], group=64)
    inputs, heldout = (torch.randn(2, 800, 192) @ torch.randn(192, 192) / 14).unbind()
    hessian = inputs.T @ inputs
    found, nearest = gptq(weight, hessian, scheme, "layer"), quantize(weight, scheme, "layer")
    codes = unpack(found.codes).double()
    unrounded = before_rounding(weight, hessian, found.scales, 64, codes)
    assert (codes - unrounded.clamp(-8, 7)).abs().max() < 0.5 + 1e-3  # of fp32

    def error(dequantized: Tensor) -> float:
        return ((dequantized - weight) @ heldout.T).square().mean().item()

    assert error(dequantize(found)) < 0.8 * error(dequantize(nearest))


def test_gptq_chooses_the_scales_that_round_best(seed: int) -> None:
    weight, importance, scheme = torch.randn(5, 3, 32).pow(3), torch.rand(3, 32).pow(4), replace(SCHEMES["int4"], group=32)
    found = best_scales(weight, importance, scheme)

    def error(scales: Tensor) -> Tensor:
        wide = scales.double()[..., None]
        return (((weight / wide).round().clamp(-8, 7) * wide - weight).square() * importance).sum(-1)

    tried = torch.stack([error(weight.abs().amax(-1) / 7.5 * (0.6 + 0.02 * i)) for i in range(25)])
    torch.testing.assert_close(error(found), tried.amin(0), rtol=1e-4, atol=1e-9)
    for least in (0.0, 1e-7):
        scales = best_scales(torch.full((2, 1, 32), least, dtype=torch.float16), importance[:1], scheme)
        assert scales.isfinite().all() and (scales > 0).all()


def test_inputs_that_are_always_zero_do_no_harm(seed: int) -> None:
    inputs = torch.randn(100, 64) * (torch.arange(64) % 3 > 0)
    found = gptq(torch.randn(8, 64), inputs.T @ inputs, replace(SCHEMES["int4"], group=32), "layer")
    weight = dequantize(found)
    assert weight.isfinite().all() and not weight[:, ::3].any(), "of columns that no input reaches nothing is known"


def test_a_hessian_that_rounding_made_indefinite_is_damped_more(seed: int) -> None:
    vectors, _ = torch.linalg.qr(torch.randn(64, 64))
    weight, scheme = torch.randn(8, 64), replace(SCHEMES["int4"], group=32)
    for least in (0.0, -0.05, -0.5):  # its smallest eigenvalue
        values = torch.ones(64).index_fill(0, torch.tensor(5), least)
        assert dequantize(gptq(weight, vectors * values @ vectors.T, scheme, "layer")).isfinite().all()
    with pytest.raises(UserError, match="too different in size for GPTQ"):
        gptq(weight, vectors * values.index_fill(0, torch.tensor(5), -3.0) @ vectors.T, scheme, "layer")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_the_nearest_ones(bits: int, symmetric: bool, seed: int) -> None:
    weight, scheme = torch.randn(6, 96) + torch.randn(6, 1), replace(SCHEMES["int4"], bits=bits, group=32, symmetric=symmetric)
    found = quantize(weight, scheme, "layer")
    steps = found.scales.repeat_interleave(32, 1)
    assert ((dequantize(found) - weight).abs() <= (0.5 if symmetric else 1.0) * steps * 1.001).all()
    assert (found.zeros is None) == symmetric and unpack(found.codes).unique().numel() > 2 ** (bits - 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float, seed: int) -> None:
    weight = torch.randn(6, 64)
    weight.view(-1)[torch.randint(weight.numel(), ())] = value
    for scheme in SCHEMES.values():
        with pytest.raises(UserError, match="layer has weights that are not finite"):
            quantize(weight, replace(scheme, group=scheme.group and 32), "layer")
    with pytest.raises(UserError, match="layer has weights that are not finite"):
        gptq(weight, torch.eye(64), replace(SCHEMES["int4"], group=32), "layer")


# --- scripts.quantize ---------------------------------------------------------------------------------------------------------


def job_for(source: Path, out: Path, weights: str) -> Job:
    config = model_config(str(source), None, 1)
    return Job(config, open_files(source), scheme_of(weights, config), out, CPU, torch.float32)


@torch.no_grad()
def make(source: Path, out: Path, weights: str, tokens: Tensor | None = None) -> Path:
    job = job_for(source, out, weights)
    begin(out, {"weights": weights})
    quantize_checkpoint(job, tokens)
    finish(source, job)
    return out


def dequantized(source: Path, out: Path, weights: str, suffix: str = "_proj.weight") -> Path:
    """The source with each linear layer rounded to nearest and dequantized, row by row and group by group, as a plain
    checkpoint. suffix: of the names of these layers' weights."""
    scheme, tensors = scheme_of(weights, model_config(str(source), None, 1)), load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(suffix):
            groups = tensor.unflatten(1, (-1, scheme.group or tensor.shape[1]))
            scale = groups.abs().amax(-1, keepdim=True) / {"fp8": 448, "int8": 127.5, "int4": 7.5}[weights]
            lowest, codes = {"int8": -128, "int4": -8}.get(weights, 0), groups / scale
            codes = codes.to(torch.float8_e4m3fn).float() if weights == "fp8" else codes.round().clamp(lowest, -lowest - 1)
            tensors[name] = (codes * scale).flatten(1)
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    shutil.copyfile(source / "config.json", out / "config.json")
    return out


@pytest.mark.parametrize(("variant", "weights"), [("standard", "int8"), *((variant, "int4") for variant in VARIANTS)])
def test_rounding_to_nearest_is_read_again(variant: str, weights: str, ranks: Ranks, tmp_path: Path, seed: int) -> None:
    source, tokens = save_random(with_variant(CONFIG, variant), tmp_path / "source"), torch.randint(0, 101, (2, 8))
    made = make(source, tmp_path / "made", weights)
    expected = logits_of(ALONE, dequantized(source, tmp_path / "plain", weights), tokens)
    for found in ranks.run(2, logits_of, made, tokens):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_rounding_at_load_is_that_of_the_file(weights: str, tmp_path: Path, seed: int) -> None:
    source, tokens = save_random(CONFIG, tmp_path / "source"), torch.randint(0, 101, (2, 8))
    made = make(source, tmp_path / "made", weights)
    assert torch.equal(logits_of(ALONE, made, tokens), logits_of(ALONE, source, tokens, weights))


def test_the_head_may_be_rounded_at_load(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    source, tokens = save_random(CONFIG, tmp_path / "source"), torch.randint(0, 101, (2, 8))
    blocks = dequantized(source, tmp_path / "blocks", "int8")
    expected = logits_of(ALONE, dequantized(blocks, tmp_path / "plain", "int8", "lm_head.weight"), tokens)
    torch.testing.assert_close(logits_of(ALONE, source, tokens, "int8+head"), expected, atol=1e-4, rtol=1e-4)
    for found in ranks.run(2, logits_of, source, tokens, "int8+head"):  # whose row-parallel layers have other scales
        assert (found - expected).norm() < 0.05 * expected.norm()
    config = model_config(str(source), None, 1)
    sizes = [weight_bytes(replace(config, quantization=on_load(name)), 1, torch.float32) for name in ("int4", "int4+head")]
    assert sizes[0] - sizes[1] == pytest.approx(3 * 101 * 64, rel=0.1)
    tied = save_random(replace(CONFIG, tie_embeddings=True), tmp_path / "tied")
    with pytest.raises(UserError, match="its embedding, which stays"):
        model_config(str(tied), None, 1, "int4+head")


@pytest.mark.parametrize("variant", VARIANTS)
def test_gptq_of_every_variant_is_nearer_than_rounding(variant: str, tmp_path: Path, seed: int) -> None:
    source = save_random(with_variant(CONFIG, variant), tmp_path / "source")
    calibration, tokens = torch.randint(0, 101, (24, 32)), torch.randint(0, 101, (16, 32))
    exact = logits_of(ALONE, source, tokens)
    errors = [
        (logits_of(ALONE, make(source, tmp_path / name, "int4", inputs), tokens) - exact).square().mean()
        for name, inputs in (("gptq", calibration), ("rtn", None))
    ]
    assert errors[0] < errors[1]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


FIRST, SECOND, LAST = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))


def stopped(out: Path) -> None:
    (out / LAST).unlink()
    (out / "config.json").unlink()


def torn(out: Path) -> None:
    for file in (out / FIRST, out / LAST):
        file.write_bytes((content := file.read_bytes())[: random.choice([0, 100, len(content) - 1])])


def of_another_layer(out: Path) -> None:
    for name in (FIRST, SECOND):
        shutil.copy(out / LAST, out / name)


@pytest.mark.parametrize("spoil", [stopped, torn, of_another_layer])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_what_is_missing_or_damaged_is_written_again(
    spoil: Callable[[Path], None], weights: str, tmp_path: Path, seed: int
) -> None:
    source = save_random(with_variant(CONFIG, "hybrid:1"), tmp_path / "source")
    inputs = torch.randint(0, 101, (4, 16)) if weights == "int4" else None
    files = contents(out := make(source, tmp_path / "made", weights, inputs))
    spoil(out)
    assert contents(make(source, out, weights, inputs)) == files
    with pytest.raises(UserError, match="other settings"):
        make(source, out, "fp8")
    with pytest.raises(UserError, match="other files"):
        make(source, source, weights)
    (out / SECOND).unlink()
    (out / SECOND).mkdir()
    with pytest.raises(UserError, match=f"{out / SECOND} cannot be written .*name another output"):
        make(source, out, weights, inputs)


def test_the_embedded_model_is_what_the_command_writes_now(tmp_path: Path) -> None:
    """On a copy of its folder the command refuses other settings, and writes again what belongs to the weights: config.json, the
    tokenizer's files, the code for transformers. Its weights are compared by their fingerprints and names only."""
    made, out = MODELS / "tiny-hybrid-int4", tmp_path / "made"
    shutil.copytree(made, out)
    quantize_model(str(MODELS / "tiny-hybrid"), out, "int4", "gptq", None, SAMPLES, LENGTH)
    shutil.rmtree(out / EMBEDDED)  # left out of the embedded model, to keep it small
    assert contents(out) == contents(made)


@pytest.mark.parametrize("torn", [b"", b"{", b"[]"])
def test_a_damaged_state_is_refused(torn: bytes, tmp_path: Path, seed: int) -> None:
    source = save_random(CONFIG, tmp_path / "source")
    out = make(source, tmp_path / "made", "int8")
    (out / STATE).write_bytes(torn)
    with pytest.raises(UserError, match=r"quantize.json does not tell [^\n;]*; name a new folder$"):
        make(source, out, "int8")


def test_the_state_is_written_once_and_whole(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[: random.randrange(len(text))])
        raise KeyboardInterrupt

    source, out = save_random(CONFIG, tmp_path / "source"), tmp_path / "made"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", stop)
        with pytest.raises(KeyboardInterrupt):
            make(source, out, "int8")
    make(source, out, "int8")
    written = (out / STATE).stat()
    make(source, out, "int8")
    again = (out / STATE).stat()
    assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def stored_as(dtype: torch.dtype, source: Path, folder: Path) -> Path:
    """A copy of a checkpoint whose linear layers have this data type."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    stored = {name: tensor.to(dtype) if "_proj" in name else tensor for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_that_are_codes_already_are_refused(dtype: torch.dtype, tmp_path: Path, seed: int) -> None:
    source = stored_as(dtype, save_random(CONFIG, tmp_path / "wide"), tmp_path / "source")
    for weights in SCHEMES:
        with pytest.raises(UserError, match=f"_proj.weight has data type {dtype}, but config.json"):
            make(source, tmp_path / weights, weights)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight", "lm_head.weight"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_what_is_copied_is_checked(name: str, method: str, tmp_path: Path, seed: int) -> None:
    """Otherwise the file that is written could not be read."""
    source = save_random(CONFIG, tmp_path / "source")
    inputs = torch.randint(0, 101, (4, 16)) if method == "gptq" else None
    tensors = load_file(file := source / "model.safetensors")
    for i, value in enumerate((float("nan"), float("inf"))):
        spoiled = tensors[name].clone()
        spoiled.view(-1)[random.randrange(spoiled.numel())] = value
        save_file(tensors | {name: spoiled}, file)
        with pytest.raises(UserError, match=f"{name} has (weights|values) that are not finite"):
            make(source, tmp_path / str(i), "int8", inputs)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, file)
    with pytest.raises(UserError, match=f"{name} has data type torch.int8, but config.json"):
        make(source, tmp_path / "codes", "int8", inputs)


@pytest.mark.parametrize(("weights", "method"), [("fp8", "rtn"), ("int8", "rtn"), ("int4", "gptq")])
def test_weights_in_64_bits_are_quantized_as_in_32(weights: str, method: str, tmp_path: Path, seed: int) -> None:
    """In a file, and at load."""
    source = save_random(CONFIG, tmp_path / "source")
    inputs = torch.randint(0, 101, (4, 16)) if method == "gptq" else None
    wide = stored_as(torch.float64, source, tmp_path / "wide")
    made, expected = (make(path, tmp_path / f"made of {path.name}", weights, inputs) for path in (wide, source))
    assert contents(made) == contents(expected)
    rounded, right = (load(ALONE, path, weights).state_dict() for path in (wide, source))
    assert rounded.keys() == right.keys()
    assert all(torch.equal(tensor.float(), right[name].float()) for name, tensor in rounded.items())


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("model.layers.1.mlp.up_proj.weight", slice(None)),
        ("model.layers.0.mlp.up_proj.weight", slice(-1, None)),
        ("model.norm.weight", slice(-1, None)),
        ("model.embed_tokens.weight", None),  # one that is drawn
        ("lm_head.weight", None),
    ],
)
def test_a_model_that_was_trained_further_is_not_mixed_with_the_earlier_one(
    name: str, rows: slice | None, tmp_path: Path, seed: int
) -> None:
    source = save_random(CONFIG, tmp_path / "source")
    command = (str(source), tmp_path / "made", "int8", "rtn", None, 1, 1)
    quantize_model(*command)
    quantize_model(*command)
    weights = load_file(source / "model.safetensors")
    weights[name][random.randrange(CONFIG.head_dim, CONFIG.vocab_size) if rows is None else rows] += 0.01
    save_file(weights, source / "model.safetensors")
    with pytest.raises(UserError, match=r"other settings: weights .*new folder"):
        quantize_model(*command)


@pytest.mark.parametrize("changed", [replace(CONFIG, rope_theta=5e5), with_variant(CONFIG, "ladder")], ids=["theta", "ladder"])
def test_a_model_whose_config_has_changed_is_not_mixed_with_the_earlier_one(
    changed: ModelConfig, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another path to the same model is no change."""
    source = save_random(CONFIG, tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    for path in (source, "source/", "./source"):
        quantize_model(str(path), tmp_path / "made", "int8", "rtn", None, 1, 1)
    (source / "config.json").write_text(json.dumps(config_to_hf(changed)))
    with pytest.raises(UserError, match=r"other settings: config.json .*new folder"):
        quantize_model(str(source), tmp_path / "made", "int8", "rtn", None, 1, 1)


def test_a_full_disk_gets_one_line(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    source = save_random(CONFIG, tmp_path / "source")
    monkeypatch.setattr("scripts.quantize.save_tensors", full)
    with pytest.raises(UserError, match=r"^[^\n]*model-00001-of-00003.safetensors cannot be written[^\n]*No space left[^\n]*$"):
        make(source, tmp_path / "made", "int8")
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="cannot be written"):
            make(source, out, "int8")


def without_code(folder: Path) -> None:
    """Make a checkpoint one like the embedded and the published hybrids, which have no code for transformers."""
    (folder / "modeling_rung.py").unlink(missing_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(("variant", "weights"), [*(("standard", weights) for weights in SCHEMES), ("hybrid:1", "int4")])
def test_transformers_reads_it(variant: str, weights: str, tmp_path: Path, seed: int) -> None:
    pytest.importorskip("compressed_tensors")
    config = with_variant(CONFIG, variant)
    source, tokens = save_random(config, tmp_path / "source"), torch.randint(0, 101, (2, 8))
    without_code(source)
    made = make(source, tmp_path / "made", weights, None if weights != "int4" else torch.randint(0, 101, (4, 16)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, trust_remote_code=True)
    with torch.no_grad():
        expected = theirs(tokens).logits
    error = (logits_of(ALONE, made, tokens) - expected).norm() / expected.norm()
    assert error < (0.1 if weights == "fp8" else 1e-4)  # fp8 rounds activations, too: see test_formats.COARSE


def test_the_command_quantizes_with_text(tmp_path: Path, seed: int) -> None:
    source = save_random(with_variant(replace(CONFIG, vocab_size=1024), "hybrid:1"), tmp_path / "source")
    shutil.copyfile(MODELS / "tiny-hybrid" / "tokenizer.json", source / "tokenizer.json")
    stored = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(stored, source / "model.safetensors")
    (source / "draft").mkdir()
    (source / "draft" / "config.json").write_text("a head's")
    quantize_model(str(source), tmp_path / "made", "int4", "gptq", None, samples=2, length=32)
    assert (tmp_path / "made" / "draft" / "config.json").read_text() == "a head's"
    config = model_config(str(tmp_path / "made"), None, 1)
    assert config.quantization is not None and config.is_hybrid
    assert (tmp_path / "made" / "tokenizer.json").exists()
    written = load_file(tmp_path / "made" / "model-00002-of-00003.safetensors")
    assert {t.dtype for t in written.values() if t.is_floating_point()} == {torch.bfloat16}, (
        "GPTQ's scales are in the file's type"
    )
    assert load(ALONE, tmp_path / "made").config == config
    for name, message in ((str(tmp_path / "made"), "quantized already"), ("tiny", "no weights")):
        with pytest.raises(UserError, match=message):
            quantize_model(name, tmp_path / "other", "int8", "rtn", None, 1, 1)


@pytest.mark.parametrize("below", ["", "made", "../link/made"])
def test_a_folder_inside_the_draft_head_is_refused(below: str, tmp_path: Path, seed: int) -> None:
    source = save_random(CONFIG, tmp_path / "source")
    (source / "link").symlink_to(source / "draft", target_is_directory=True)
    if below:
        (source / "draft").mkdir()
    with pytest.raises(UserError, match="draft head, which is copied; name a folder elsewhere"):
        quantize_model(str(source), source / "draft" / below, "int8", "rtn", None, 1, 1)


@pytest.fixture
def quantizing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The refusal of the command with these flags."""
    here = Here(monkeypatch, capfd, scripts.quantize.main, flags=())
    return lambda *flags: here.refuses("--model", MODELS / "tiny-hybrid", "--out", tmp_path / "out", *flags)


def test_flags_of_a_text_that_would_not_be_used_are_refused(quantizing: Callable[..., str], tmp_path: Path) -> None:
    for flags in (["--weights", random.choice(["fp8", "int8"])], ["--method", "rtn"]):
        for name, value in (("--calibration", tmp_path), ("--samples", scripts.quantize.SAMPLES), ("--length", 8)):
            assert f"{name} is for --method gptq" in quantizing(name, value, *flags)


@pytest.mark.parametrize(
    ("make_text", "message"),
    [
        (os.mkfifo, "is a pipe, not a file"),
        (Path.mkdir, "is a folder, not a file"),
        (lambda text: text.write_bytes(bytes([0xFF])), "cannot be read as text"),
        (lambda text: None, "cannot be read as text"),
        (lambda text: os.truncate(text.open("w").name, scripts.quantize.TEXT_BYTES + 1), "has more than 256 MiB"),  # no blocks
    ],
    ids=["pipe", "folder", "binary", "missing", "large"],
)
def test_a_calibration_that_is_no_text_file_is_refused(
    make_text: Callable[[Path], Any], message: str, quantizing: Callable[..., str], tmp_path: Path
) -> None:
    make_text(tmp_path / "text")
    assert message in quantizing("--calibration", tmp_path / "text")


def test_the_costs_are_of_the_layers_that_were_written(tmp_path: Path, seed: int) -> None:
    source = MODELS / "tiny-ladder"
    took = quantize_model(str(source), tmp_path / "made", "int4", "gptq", None, samples=1, length=16)
    assert re.fullmatch(r"[0-9.]+ s a layer, at most [0-9.]+ GB of .*memory", took)
    again = quantize_model(str(source), tmp_path / "made", "int4", "gptq", None, samples=1, length=16)
    assert again.startswith("at most")  # no layer was left
