"""Checkpoints in 4 bits of bitsandbytes: each weight against QLoRA's definition and the package's own numbers; damaged ones."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.presets import model_config
from checkpoints.sources import open_source
from quantized import blockwise
from tests.quantized.test_formats import SHAPE, error
from tests.quantized.writers import Format, Tensors, write
from tests.support.models import ALONE, load, logits_of
from tests.support.ranks import Ranks
from tests.test_bad_input import refusals
from tp import World

ODD = replace(SHAPE, hidden_size=120, intermediate_size=344)  # blocks cross rows, and the boundaries of ranks
NF4 = (  # QLoRA, appendix E
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# bitsandbytes: a sign, two bits of exponent, one of mantissa
POSITIVE = (0, 1 / 192, 8 / 12, 1, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
FP4 = (*POSITIVE, *(-value for value in POSITIVE))


def four_bits(kind: str, nested: bool, block: int, storage: torch.dtype = torch.uint8) -> Format:
    table = torch.tensor(NF4 if kind == "nf4" else FP4, dtype=torch.float64).float()

    def write(n: int, k: int) -> tuple[Tensors, Tensor]:
        codes, blocks = torch.randint(16, (n * k,)), -(-n * k // block)
        scales = (torch.rand(blocks) + 0.5) / k**0.5
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
        tensors = {"weight.absmax": scales, "weight.quant_map": table.clone()}
        if nested:
            absmax, outer = torch.randint(256, (blocks,)), torch.rand(-(-blocks // 256)) / k**0.5
            found, offset = torch.linspace(-0.9, 1, 256), 1.25 / k**0.5
            tensors["weight.absmax"] = absmax.to(torch.uint8)
            tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": found}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            scales = found.double()[absmax] * outer.double()[torch.arange(blocks) // 256] + offset
        tensors["weight"] = (codes[::2] * 16 + codes[1::2]).to(torch.uint8).view(storage)[:, None]
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        values = table.double()[codes] * scales.double()[torch.arange(n * k) // block]
        return tensors, values.float().view(n, k)

    return Format({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}, write)


def of_package(kind: str, nested: bool) -> Format:
    bnb = pytest.importorskip("bitsandbytes")

    def write(n: int, k: int) -> tuple[Tensors, Tensor]:
        weight = (torch.randn(n, k) * k**-0.5).bfloat16()
        codes, state = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
        tensors = {f"weight.{suffix}": tensor for suffix, tensor in state.as_dict(packed=True).items()}
        return {"weight": codes} | {name: tensor.clone() for name, tensor in tensors.items()}, bnb.functional.dequantize_4bit(
            codes, state
        )

    return Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, write)


KINDS = {
    "nf4": four_bits("nf4", False, 64),
    "fp4": four_bits("fp4", False, 128),
    "nf4 with double quantization": four_bits("nf4", True, 64),
    "fp4 with double quantization": four_bits("fp4", True, 64),
    "nf4 in bf16": four_bits("nf4", True, 64, torch.bfloat16),
    "fp4 in fp32": four_bits("fp4", False, 256, torch.float32),
}


def differences(world: World, folder: Path) -> dict[str, float]:
    """Of each of this rank's weights from those of `plain`, the largest relative one."""
    pairs = zip(load(world, folder).named_parameters(), load(world, folder / "plain").parameters(), strict=True)
    return {name: ((ours - theirs).abs() / theirs.abs().clamp_min(1e-9)).max().item() for (name, ours), theirs in pairs}


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_those_of_the_definition(
    name: str, ranks: Ranks, tmp_path: Path, in_turn: Callable[..., int], seed: int
) -> None:
    write(ODD, KINDS[name], tmp_path, tmp_path / "plain")
    found = ranks.run(in_turn((1, 2), list(KINDS).index(name)), differences, tmp_path)
    assert all(largest < 1e-5 for of_rank in found for largest in of_rank.values()), found
    tokens = torch.randint(ODD.vocab_size, (1, 7))
    assert error(logits_of(ALONE, tmp_path, tokens), logits_of(ALONE, tmp_path / "plain", tokens)) < 1e-4


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_weights_are_those_of_bitsandbytes(kind: str, nested: bool, tmp_path: Path, seed: int) -> None:
    write(ODD, of_package(kind, nested), tmp_path, tmp_path / "plain")
    expected, source = load_file(tmp_path / "plain" / "model.safetensors"), open_source(str(tmp_path), ODD)
    for name in source.packed:
        assert torch.equal(source.read(name, 0, 0, len(expected[name])).bfloat16(), expected[name])


def test_a_slice_is_a_part_of_the_whole(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in pieces of a few rows."""
    write(ODD, KINDS[random.choice(list(KINDS))], tmp_path, tmp_path / "plain")
    monkeypatch.setattr(blockwise, "PIECE", 1000)
    expected, source = load_file(tmp_path / "plain" / "model.safetensors"), open_source(str(tmp_path), ODD)
    for name, dim in itertools.product(source.packed, (0, 1)):
        start, stop = sorted(random.sample(range(expected[name].shape[dim] + 1), 2))
        part = expected[name].narrow(dim, start, stop - start)
        torch.testing.assert_close(source.read(name, dim, start, stop), part, rtol=1e-5, atol=1e-9)


def test_they_may_be_rounded_again_and_take_the_memory_of_16_bits(tmp_path: Path, seed: int) -> None:
    write(SHAPE, KINDS["nf4"], tmp_path, tmp_path / "plain")
    assert model_config(str(tmp_path), None, 1).quantization is None
    tokens = torch.randint(SHAPE.vocab_size, (1, 7))
    found, expected = (logits_of(ALONE, folder, tokens, "int8") for folder in (tmp_path, tmp_path / "plain"))
    assert error(found, expected) < 1e-4


LAYER = "model.layers.1.mlp.down_proj.weight"
STATES: list[Any] = [*({"shape": shape} for shape in ([120, 172], [120, 344, 1], None)), 12, {"blocksize": 0}]
STATES += [{"blocksize": 1 << 40}, {"nested_blocksize": 1 << 40}, {"nested_offset": None}]


def damaged(name: str, tensor: Tensor) -> Iterator[Tensor | None]:
    other = torch.uint8 if tensor.is_floating_point() else torch.float32
    yield from (None, tensor[:-1].contiguous(), tensor.to(other), torch.tensor(1, dtype=tensor.dtype))
    yield from (tensor * torch.nan,) if "nested_absmax" in name else ()
    for state in STATES if "quant_state" in name else ():
        raw = json.loads(bytes(tensor.tolist())) | state if isinstance(state, dict) else state
        yield torch.tensor(list(json.dumps(raw).encode()), dtype=torch.uint8)


def test_damage_is_named_alike_on_every_rank(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    write(ODD, KINDS["nf4 with double quantization"], tmp_path, tmp_path / "plain")
    whole, folders = load_file(tmp_path / "model.safetensors"), []
    for name in (name for name in whole if name.startswith(LAYER)):
        for other in damaged(name, whole[name]):
            folders.append(tmp_path / f"{len(folders)} {name}")
            folders[-1].mkdir()
            (folders[-1] / "config.json").write_text((tmp_path / "config.json").read_text())
            left = {key: tensor for key, tensor in whole.items() if key != name}
            save_file(left if other is None else left | {name: other}, folders[-1] / "model.safetensors")
    one, another = ranks.run(2, refusals, folders)
    assert one == another
    for folder, message in zip(folders, one, strict=True):
        assert LAYER in message and message.isprintable() and len(message) < 700, (folder, message)
