"""Quantized checkpoints that are damaged or not supported: one line on every rank, before or while weights are read."""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.hf_config import config_from_hf, config_to_hf
from checkpoints.presets import model_config
from errors import UserError
from quantized.hf import read_quantization
from quantized.scheme import SCHEMES
from tests.quantized.test_formats import COMPRESSED, SHAPE
from tests.quantized.writers import FORMATS, STATIC, TOKEN, Tensors, compressed, write
from tests.support.command_line import launch
from tests.support.models import ALONE
from tests.support.ranks import Ranks
from tests.test_bad_input import check_refused, refusals

SCALES = re.compile("scale|SCB")
LAYER = "model.layers.1.mlp.down_proj"


def at(suffix: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Tensors], None]:
    """Change one tensor of LAYER, or remove it."""

    def spoil(tensors: Tensors) -> None:
        found = change(tensors.pop(f"{LAYER}.{suffix}"))
        if found is not None:
            tensors[f"{LAYER}.{suffix}"] = found

    return spoil


def first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        found = tensor.clone()
        found.view(-1)[-1] = value
        return found

    return change


# a format, what to do with its tensors, and what the message has to contain
DAMAGE: dict[str, tuple[str, Callable[[Tensors], None], tuple[str, ...]]] = {
    "scales missing": ("W4A16 group 128", at("weight_scale", lambda t: None), ("lacks", "weight_scale")),
    "scales misshapen": ("W4A16 group 128", at("weight_scale", lambda t: t[:, :-1].contiguous()), ("weight_scale", "(128, 2)")),
    "scale zero": ("fp8 by channel, dynamic", at("weight_scale", first(0.0)), ("weight_scale", "zero")),
    "scale negative": ("GPTQ 4 bits", at("scales", first(-1.0)), ("scales", "negative")),
    "scale NaN": ("AWQ", at("scales", first(float("nan"))), ("scales", "finite")),
    "block scale infinite": ("HF block fp8", at("weight_scale_inv", first(float("inf"))), ("weight_scale_inv", "finite")),
    "input scale zero": ("int8 by channel, static", at("input_scale", first(0.0)), ("input_scale", "zero")),
    "input scale missing": ("ModelOpt fp8", at("input_scale", lambda t: None), ("lacks", "input_scale")),
    "fp8 scale missing": ("HF fp8 by tensor, dynamic", at("weight_scale_inv", lambda t: None), ("lacks", "weight_scale_inv")),
    "activation scale missing": (
        "HF fp8 by tensor, static",
        at("activation_scale", lambda t: None),
        ("lacks", "activation_scale", "input_scale"),
    ),
    "scales under both names": (
        "HF fp8 by tensor, dynamic",
        lambda tensors: tensors.update({f"{LAYER}.weight_scale": torch.ones(())}),
        ("both", "weight_scale_inv", "weight_scale"),
    ),
    "packed truncated": (
        "W4A16 group 128",
        at("weight_packed", lambda t: t[:, :-8].contiguous()),
        ("weight_packed", "(128, 40)"),
    ),
    "qweight truncated": ("GPTQ 4 bits", at("qweight", lambda t: t[:-8].contiguous()), ("qweight", "(40, 128)")),
    "words of another type": ("AWQ", at("qweight", lambda t: t.long()), ("qweight", "int64", "int32")),
    "weights not rounded": ("fp8 by tensor, static", at("weight", lambda t: t.bfloat16()), ("weight", "bfloat16", "float8")),
    "groups beyond the last": ("GPTQ 8 bits act-order", at("g_idx", first(99)), ("g_idx", "groups")),
    "groups of different sizes": ("GPTQ 8 bits act-order", at("g_idx", torch.zeros_like), ("g_idx", "groups that are not of")),
    "zero points of a symmetric layer": ("GPTQ 4 bits", at("qzeros", first(0)), ("qzeros", "zero points")),
    "zero points of a symmetric AWQ layer": ("AWQ symmetric", at("qzeros", first(0)), ("qzeros", "zero points")),
    "another weight_shape": ("W8A16 group 64", at("weight_shape", first(1)), ("weight_shape",)),
    "tiles of a GPU": ("bitsandbytes int8", at("weight_format", lambda t: t + 2), ("weight_format", "tiles")),
    "tensors of another format": ("W8A16 group 64", at("weight_packed", lambda t: None), ("lacks", "weight_packed")),
}


def write_damaged(what: str, folder: Path) -> Path:
    """A checkpoint with this damage."""
    name, spoil, _ = DAMAGE[what]
    write(SHAPE, FORMATS[name], folder, folder / "plain")
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_damaged_tensors_are_refused_alike_on_every_rank(
    ranks: Ranks, tmp_path: Path, in_turn: Callable[..., list[str]], seed: int
) -> None:
    damages = in_turn((list(DAMAGE)[::2], list(DAMAGE)[1::2]), 0)
    folders = [write_damaged(what, tmp_path / str(i)) for i, what in enumerate(damages)]
    one, other = ranks.run(2, refusals, folders)
    assert one == other
    for what, message in zip(damages, one, strict=True):
        assert message and "\n" not in message, what
        assert all(part in message for part in DAMAGE[what][2]), (what, message)


def test_of_many_misshapen_tensors_every_rank_names_the_first(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    """Also a restart does, so that the line can be searched for."""
    write(replace(SHAPE, n_layers=8), FORMATS["W4A16 group 128"], tmp_path, tmp_path / "plain")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": FORMATS["W8A16 group 64"].quantization}))
    for (message,) in ranks.run(2, refusals, [tmp_path]):
        assert message.startswith("model.layers.0.mlp.down_proj.weight_packed has shape"), message


def test_a_kept_layer_that_an_earlier_pattern_of_gptqmodel_quantizes(tmp_path: Path, seed: int) -> None:
    """There the first pattern counts, here each `-:`. Such a file is refused, not misread."""
    plain = FORMATS["GPTQ 4 bits"]
    write(
        SHAPE,
        replace(plain, quantization=plain.quantization | {"dynamic": {".*": {}, "-:.*k_proj": {}}}),
        tmp_path,
        tmp_path / "plain",
    )
    (message,) = refusals(ALONE, [tmp_path])
    assert "lacks" in message and "k_proj.weight" in message and "\n" not in message


@pytest.mark.parametrize("what", ["scales missing", "scale NaN"])
def test_generate_ends_with_one_line_on_two_ranks(what: str, tmp_path: Path, seed: int) -> None:
    """Found in the headers, or while the weights are read."""
    folder = write_damaged(what, tmp_path / "model")
    check_refused(launch("--model", folder, "--prompt-ids", "1,2", "--max-new-tokens", 2, ranks=2), *DAMAGE[what][2])


def damaged(tensor: Tensor, is_scale: bool) -> Iterator[Tensor]:
    """A tensor that is truncated, or has one value that no checkpoint has, at a random place."""
    yield from (tensor.narrow(dim, 0, size - 1).contiguous() for dim, size in enumerate(tensor.shape))
    codes = tensor.dtype == torch.float8_e4m3fn
    for value in (0x7F, 0xFF) if codes else (0.0, -1.0, float("nan"), float("inf")) if is_scale else ():
        found = tensor.clone()
        flat = found.view(torch.uint8) if codes else found
        flat.view(-1)[random.randrange(flat.numel())] = value
        yield found


@pytest.mark.parametrize("name", FORMATS)
def test_scales_beyond_the_range_of_the_data_type(name: str, tmp_path: Path, seed: int) -> None:
    write(replace(SHAPE, n_layers=1), FORMATS[name], tmp_path, tmp_path / "plain")
    tensors = load_file(file := tmp_path / "model.safetensors")
    key = random.choice([key for key in tensors if re.search(r"\.(weight_scale|weight_scale_inv|scales|SCB)$", key)])
    tensors[key].view(-1)[random.randrange(tensors[key].numel())] = 10_000.0 * (127 if key.endswith("SCB") else 1)
    save_file(tensors, file)
    (message,) = refusals(ALONE, [tmp_path], torch.float16)
    assert key.rpartition(".")[0] in message and "not finite in torch.float16" in message and "\n" not in message
    assert refusals(ALONE, [tmp_path], random.choice([torch.bfloat16, torch.float32])) == [""]


@pytest.mark.parametrize("quantize", SCHEMES)
def test_weights_beyond_the_range_of_the_data_type_that_are_rounded(quantize: str, tmp_path: Path, seed: int) -> None:
    write(replace(SHAPE, n_layers=1), FORMATS["AWQ"], tmp_path, plain := tmp_path / "plain")
    tensors = load_file(file := plain / "model.safetensors")
    key = random.choice([key for key in tensors if key.endswith("_proj.weight")])
    tensors[key].view(-1)[random.randrange(tensors[key].numel())] = 70_000.0
    save_file(tensors, file)
    (message,) = refusals(ALONE, [plain], torch.float16, quantize)
    assert key.removesuffix(".weight") in message and "not finite in torch.float16" in message and "\n" not in message


def with_group_size(raw: Any, size: int) -> Any:
    if not isinstance(raw, dict):
        return raw
    changed = {name: with_group_size(value, size) for name, value in raw.items()}
    return changed | {"group_size": size} if isinstance(raw.get("group_size"), int) else changed


@pytest.mark.parametrize("place", range(8))
def test_each_tensor_of_each_format_is_checked(place: int, in_turn: Callable[..., str], tmp_path: Path, seed: int) -> None:
    """Of one layer on one rank; `DAMAGE` has cases of several ranks."""
    name = in_turn([*FORMATS][place::8], place)
    write(replace(SHAPE, n_layers=1), FORMATS[name], tmp_path, tmp_path / "plain")
    tensors = load_file(file := tmp_path / "model.safetensors")
    layer = random.choice([found for found in tensors if "layers.0" in found and SCALES.search(found)]).rpartition(".")[0]
    for key in (key for key in tensors if key.startswith(f"{layer}.")):
        for wrong in damaged(tensors[key], is_scale=bool(SCALES.search(key))):
            save_file(tensors | {key: wrong}, file)
            (message,) = refusals(ALONE, [tmp_path])
            assert key in message and "\n" not in message, (key, wrong.shape, message)
    save_file(tensors, file)
    config = tmp_path / FORMATS[name].file
    raw = json.loads(config.read_text())
    for size in (32, 64, 128):
        if (other := with_group_size(raw, size)) != raw:
            config.write_text(json.dumps(other))
            (message,) = refusals(ALONE, [tmp_path])
            assert message and "\n" not in message, size


def test_a_file_with_the_config_of_another_format(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    names = ["HF block fp8", "GPTQ 4 bits", "AWQ", "W4A16 group 128", "int8 by channel, dynamic"]
    folders = []
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        folder = tmp_path / str(len(folders))
        write(SHAPE, FORMATS[name], folder, folder / "plain")
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": FORMATS[other].quantization}))
        folders.append(folder)
    write(SHAPE, FORMATS["AWQ"], tmp_path / "none", tmp_path / "none" / "plain")
    raw.pop("quantization_config")
    (tmp_path / "none" / "config.json").write_text(json.dumps(raw))
    one, other_rank = ranks.run(2, refusals, [*folders, tmp_path / "none"])
    assert one == other_rank
    assert all("config.json" in message and "\n" not in message for message in one), one


W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
W8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
FP8 = {"quant_method": "fp8"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128}
INPUTS = TOKEN | {"type": "float"}
GROUP_OF_ONE = {"targets": ["lm_head"], "weights": W8}
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    *(({"quant_method": name}, f"'{name}' is not supported; use") for name in ("exl2", "exl3", "hqq", "aqlm", "torchao")),
    ({"load_in_8bit": 1}, "load_in_8bit"),
    (AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}, "llm_compressor"),
    (AUTO_ROUND | {"packing_format": None, "backend": "mlx"}, "mlx"),
    (AUTO_ROUND | {"bits": 3}, "bits = 3"),
    (AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "bits": 8}, "bits = 8"),
    (AUTO_ROUND | {"act_bits": 8}, "act_bits = 8"),
    (AUTO_ROUND | {"data_type": "mx_fp"}, "mx_fp"),
    (AUTO_ROUND | {"super_bits": 6}, "super_bits"),
    (AUTO_ROUND | {"extra_config": {".*(?!x)": {"bits": 8}}}, "look-around"),
    (AUTO_ROUND | {"extra_config": {"down_proj": {"bits": 2}}}, "bits = 2"),
    ({"quant_method": ["gptq"]}, "quant_method"),
    ({}, "quant_method"),
    (GPTQ | {"bits": 3}, "bits = 3"),
    (GPTQ | {"group_size": 40}, "group_size = 40"),
    (GPTQ | {"group_size": 1 << 70}, "group_size"),
    (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
    (GPTQ | {"format": "marlin"}, "marlin"),
    (GPTQ | {"format": "gptq_v2", "checkpoint_format": "gptq"}, "differ"),
    (GPTQ | {"dynamic": {".*down.*": {"bits": 3}}}, "bits = 3"),
    (GPTQ | {"dynamic": {".*down.*": {"format": "gptq_v2"}}}, "dynamic: format"),
    (GPTQ | {"dynamic": {".*down.*": 8}}, ".*down.*"),
    (GPTQ | {"dynamic": {"-:(?!model)": {}}}, "look-around"),
    (GPTQ | {"dynamic": {f"-:{i}": {} for i in range(101)}}, "regular expressions"),
    (AWQ | {"version": "gemv"}, "gemv"),
    (AWQ | {"format": "gemv"}, "gemv"),
    (AWQ | {"checkpoint_format": "gemv"}, "gemv"),
    (AWQ | {"bits": 8}, "bits = 8"),
    (FP8 | {"weight_block_size": [64, 64]}, "weight_block_size"),
    (FP8 | {"scale_fmt": "ue8m0"}, "ue8m0"),
    (FP8 | {"activation_scheme": "other"}, "activation_scheme"),
    (FP8 | {"fmt": "e5m2"}, "e5m2"),
    (FP8 | {"modules_to_convert": ["embed_tokens"]}, "modules_to_convert"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    ({"producer": {}, "quantization": {"quant_algo": "W4A8_AWQ"}}, "W4A8_AWQ"),
    (compressed("nvfp4-pack-quantized", W4), "nvfp4-pack-quantized"),
    (compressed("marlin-24", W4), "marlin-24"),
    (compressed("pack-quantized", W4 | {"num_bits": 3}), "3 bits"),
    (compressed("pack-quantized", W4 | {"type": "\x1b\n" * 1000}), r"\x1b\n"),
    (compressed("pack-quantized", W4 | {"group_size": 48}), "group_size = 48"),
    (compressed("pack-quantized", W4 | {"strategy": "tensor_group"}), "tensor_group"),
    (compressed("pack-quantized", W4, INPUTS | {"type": "int"}), "input_activations"),
    (compressed("float-quantized", W8 | {"symmetric": False}), "asymmetric"),
    (compressed("float-quantized", W8 | {"strategy": "block", "block_structure": [64, 128]}), "block_structure"),
    (compressed("float-quantized", W8, STATIC | {"type": "float", "dynamic": True}), "dynamic"),
    (compressed("float-quantized", W8, INPUTS | {"symmetric": False}), "symmetric"),
    (compressed("float-quantized", W8, INPUTS | {"num_bits": 4}), "num_bits = 4"),
    (compressed("float-quantized", W8, ignore=("re:(",)), "re:("),
    (compressed("float-quantized", W8, ignore=("re:(?!lm_head).*",)), "look-around"),
    (compressed("float-quantized", W8, ignore=("re:x",) * 101), "regular expressions"),
    (compressed("float-quantized", W8, ignore=("re:a{1000}{1000}{1000}",)), "a{1000}"),
    (compressed("float-quantized", W8) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    (compressed("float-quantized", W8) | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    (compressed("float-quantized", W8) | {"config_groups": {"group_0": 7}}, "config_groups"),
    (compressed("float-quantized", W8) | {"config_groups": {str(i): GROUP_OF_ONE for i in range(10_001)}}, "at most 10000"),
]


@pytest.mark.parametrize(("raw", "named"), UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as error:
        read_quantization(raw)
    assert named in str(error.value) and len(str(error.value)) < 500 and str(error.value).isprintable()


def test_gptq_keeps_the_head_unless_the_file_says_otherwise() -> None:
    raw = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    for head, bits in ((None, None), (False, None), (True, 4)):
        found = read_quantization(raw | {"lm_head": head})
        scheme = found.scheme("lm_head")
        assert (scheme and scheme.bits) == bits and found.scheme("model.layers.0.mlp.up_proj") is not None


@pytest.mark.parametrize("keys", [("format",), ("checkpoint_format",), ("format", "checkpoint_format")])
def test_each_key_for_the_format_of_gptq(keys: tuple[str, ...]) -> None:
    found = read_quantization(GPTQ | dict.fromkeys(keys, "gptq_v2") | {"dynamic": {".*down_proj": {"format": None}}})
    assert [rule.scheme.format for rule in found.rules] == ["gptq-v2"] * 2


@pytest.mark.parametrize("pattern", ["(.*.*)*x", "(.|.)" * 38 + "x", "(m?|.)+(.+)+$(.+)+x"])
def test_patterns_do_not_backtrack(pattern: str) -> None:
    """Python's engine would need 2 ** 30 steps or more for each layer."""
    found = read_quantization(compressed("float-quantized", W8, ignore=(f"re:{pattern}",)))
    assert found.scheme(LAYER) is not None


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("re:.*mlp.(gate|up|down)_proj$", True),
        (r"re:model\.layers\.[0-9]*[13579]\..*", True),
        ("re:mlp", False),  # a name has to begin with it
        (LAYER, True),
        (LAYER[:-1], False),
        (LAYER.replace(".", "_"), False),
    ],
)
def test_patterns_are_those_of_compressed_tensors(pattern: str, matches: bool) -> None:
    found = read_quantization(compressed("float-quantized", W8, ignore=(pattern,)))
    assert (found.scheme(LAYER) is None) == matches


NUMBERS: list[Any] = [None, True, -1, 0, 7, 1 << 70, 0.5, float("nan")]
JUNK = [*NUMBERS, "", "x", "re:(", [], [1], ["re:["], {}, {"x": 1}, [[]], [{}]]


def spoiled(value: Any) -> Iterator[Any]:
    """`value` with one of its parts, at any depth, replaced by each piece of JUNK."""
    yield from JUNK
    for key in value if isinstance(value, dict) else ():
        yield from ({**value, key: other} for other in spoiled(value[key]))


@pytest.mark.parametrize("name", FORMATS)
def test_a_wrong_value_anywhere_is_read_or_refused(name: str) -> None:
    messages = []
    for raw in spoiled(FORMATS[name].quantization):
        try:
            found = config_from_hf(config_to_hf(SHAPE) | {"quantization_config": raw}).quantization
            assert found is None or found.scheme(LAYER) is None or found.description
        except UserError as e:
            messages.append(str(e))
    assert messages and all(len(message) < 500 and len(message.splitlines()) == 1 for message in messages)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_quantized_already_is_not_quantized(name: str, tmp_path: Path, seed: int) -> None:
    write(SHAPE, FORMATS[name], tmp_path, tmp_path / "plain")
    with pytest.raises(UserError, match="quantized already"):
        model_config(str(tmp_path), None, 1, "int4")


FROZEN = {"quantization_status": "frozen"}


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_frozen_model_is_read_if_its_weights_are_compressed(name: str, tmp_path: Path, seed: int) -> None:
    """compressed-tensors freezes a model before it compresses its weights."""
    write(SHAPE, format := FORMATS[name], tmp_path, plain := tmp_path / "plain")
    raw = json.loads((plain / "config.json").read_text()) | {"quantization_config": format.quantization | FROZEN}
    for folder in (tmp_path, plain):
        (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    scales = {key: tensor for key, tensor in tensors.items() if key.endswith("_scale")}
    save_file(load_file(plain / "model.safetensors") | scales, plain / "model.safetensors")
    read, message = refusals(ALONE, [tmp_path, plain])
    assert not read
    assert "config.json" in message and ".weight" in message and "\n" not in message


def test_the_order_of_expressions_is_that_of_compressed_tensors(seed: int) -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    targets = ["re:.*down_proj", "re:model.*proj", r"re:.*layers\.1\..*", "Linear", LAYER, "re:model.layers.1.*"]
    for _ in range(20):
        some = random.sample(targets, random.randint(2, len(targets)))
        schemes = dict(zip(some, itertools.product((4, 8), (16, 32, 64)), strict=False))
        groups = {
            target: {"targets": [target], "weights": W4 | {"num_bits": bits, "group_size": size}}
            for target, (bits, size) in schemes.items()
        }
        found = read_quantization(compressed("pack-quantized", W4) | {"config_groups": groups}).scheme(LAYER)
        first = match.match_targets(LAYER, torch.nn.Linear(1, 1), some)[0]
        assert found is not None and (found.bits, found.group) == schemes[first], some


def test_a_boundary_that_leaves_less_than_a_kernel_reads(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    """328 features on 4 ranks are 82 each, which cut blocks of 128 into pieces of 2."""
    write(replace(SHAPE, intermediate_size=328), FORMATS["HF block fp8"], tmp_path, tmp_path / "plain")
    messages = ranks.run(4, refusals, [tmp_path])
    assert all(other == messages[0] for other in messages)
    assert "groups of 128" in messages[0][0] and "fewer ranks" in messages[0][0]


@pytest.mark.parametrize("name", ["W4A16 group 128", "GPTQ 4 bits", "AWQ group 128, some kept"])
def test_a_group_size_that_does_not_divide(name: str, tmp_path: Path, seed: int) -> None:
    write(SHAPE, FORMATS[name], tmp_path, tmp_path / "plain")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"hidden_size": 192}))
    (message,) = refusals(ALONE, [tmp_path])
    assert "192 input features, which groups of 128 do not divide" in message
