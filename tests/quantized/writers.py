"""Writes random quantized checkpoints in each format, bit by bit from the formats' definitions, beside the same weights in fp32.

Used by the tests of `quantized/`. Nothing here imports the code that is tested, except the model's description.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.hf_config import config_to_hf
from config import ModelConfig

Tensors = dict[str, Tensor]
FP8 = torch.float8_e4m3fn


@dataclass
class Format:
    """quantization: of config.json. write: from (out_features, in_features) to (tensors by suffix, weight in fp32).
    activations: how the layer's input is rounded. others: formats of the layers that have a part of this name."""

    quantization: dict[str, Any]
    write: Callable[[int, int], tuple[Tensors, Tensor]]
    activations: str = "none"
    file: str = "config.json"
    kept: tuple[str, ...] = field(default=())  # parts of the names of layers that stay in fp32
    others: dict[str, "Format"] = field(default_factory=dict)


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    hidden, heads, kv = config.hidden_size, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes = {"q": (heads, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, heads)}
    mlp = {"gate": (config.intermediate_size, hidden), "up": (config.intermediate_size, hidden)}
    mlp["down"] = (hidden, config.intermediate_size)
    found = {}
    for i in range(config.n_layers):
        found |= {f"model.layers.{i}.self_attn.{name}_proj": shape for name, shape in shapes.items()}
        for of in [f"experts.{e}." for e in range(config.experts.count)] if config.experts else [""]:
            found |= {f"model.layers.{i}.mlp.{of}{name}_proj": shape for name, shape in mlp.items()}
    return found


def write(config: ModelConfig, format: Format, quantized: Path, plain: Path) -> None:
    """The same random model as a quantized checkpoint and as one in fp32."""
    matrix = {"model.embed_tokens.weight", *([] if config.tie_embeddings else ["lm_head.weight"])}
    common = {name: torch.randn(config.vocab_size, config.hidden_size) for name in matrix}
    norms = ("input",) if config.variant == "parallel" else ("input", "post_attention")
    names = [f"model.layers.{i}.{norm}_layernorm" for i in range(config.n_layers) for norm in norms]
    common |= {f"{name}.weight": torch.rand(config.hidden_size) + 0.5 for name in (*names, "model.norm")}
    if config.experts:
        routers = [f"model.layers.{i}.mlp.gate.weight" for i in range(config.n_layers)]
        common |= {name: torch.randn(config.experts.count, config.hidden_size) for name in routers}
    ours, theirs = dict(common), dict(common)
    for name, (n, k) in linear_shapes(config).items():
        if any(kept in name for kept in format.kept):
            ours[name + ".weight"] = theirs[name + ".weight"] = torch.randn(n, k) / k**0.5
            continue
        tensors, weight = next((other for part, other in format.others.items() if part in name), format).write(n, k)
        ours |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
        theirs[name + ".weight"] = weight.contiguous()
    raw = config_to_hf(config) | {"torch_dtype": "float32"}
    for folder, tensors in ((quantized, ours), (plain, theirs)):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(raw))
    if format.file == "config.json":
        (quantized / "config.json").write_text(json.dumps(raw | {"quantization_config": format.quantization}))
    else:
        (quantized / format.file).write_text(json.dumps(format.quantization))


# --- pieces -------------------------------------------------------------------------------------------------------------------


def pack_rows(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Each row's unsigned values in int32 words, the first in the lowest bits, or as `order` says: the value of each position."""
    per_word = 32 // bits
    words = values.astype(np.uint32).reshape(len(values), -1, per_word)
    out = np.zeros(words.shape[:2], dtype=np.uint32)
    for position in range(per_word):
        out |= words[:, :, position] << np.uint32(bits * (order.index(position) if order else position))
    return torch.from_numpy(out.view(np.int32))


def integers(bits: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(random.getrandbits(64)).integers(0, 2**bits, shape)


def scales(k: int, bits: int, *shape: int) -> Tensor:
    """Positive fp32 scales for weights of about k ** -0.5."""
    return (torch.rand(*shape) + 0.5) * (4 / 2**bits) / k**0.5


def dense(codes: np.ndarray, zeros: np.ndarray | int, scale: Tensor, group_of: np.ndarray) -> Tensor:
    """(code - zero) * scale with one column of zeros (N, G) and scale (N, G) for each group."""
    wide = zeros[:, group_of] if isinstance(zeros, np.ndarray) else zeros
    return torch.from_numpy((codes - wide) * scale.double().numpy()[:, group_of]).float()


def group_indices(k: int, group: int, shuffled: bool) -> np.ndarray:
    found = np.arange(k) // group
    return np.random.default_rng(random.getrandbits(64)).permutation(found) if shuffled else found


def fp8(n: int, k: int) -> Tensor:
    return (torch.randn(n, k) * 60).clamp(-448, 448).to(FP8)


# --- compressed-tensors -------------------------------------------------------------------------------------------------------


def compressed(
    format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, ignore: tuple[str, ...] = ()
) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *ignore],
        "kv_cache_scheme": None,
    }


TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True, "num_bits": 8}
STATIC = {"strategy": "tensor", "dynamic": False, "symmetric": True, "num_bits": 8}
GROUP = {"strategy": "group", "group_size": 128, "dynamic": True, "symmetric": True, "num_bits": 8}


def one_byte(kind: str, strategy: str, inputs: dict[str, Any] | None = None, **more: Any) -> Format:
    """float-quantized and int-quantized."""

    def write(n: int, k: int) -> tuple[Tensors, Tensor]:
        codes = fp8(n, k) if kind == "float" else torch.from_numpy(integers(8, n, k) - 128).to(torch.int8)
        shape = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // 128), -(-k // 128))}[strategy]
        scale = scales(k, 8, *shape)
        full = scale.expand(n, k) if strategy != "block" else scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
        tensors = {"weight": codes, "weight_scale": scale}
        if inputs and not inputs["dynamic"]:
            tensors["input_scale"] = torch.rand(1) * 0.02 + 0.02
        return tensors, codes.float() * full

    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    inputs = inputs and inputs | {"type": kind}
    activations = "none" if inputs is None else "static" if not inputs["dynamic"] else inputs["strategy"]
    return Format(compressed(f"{kind}-quantized", weights, inputs), write, activations)


def packed_by_tensor(bits: int) -> Format:
    """pack-quantized, asymmetric with one scale: its zero point is not packed."""
    plain = packed(bits, None, symmetric=False)

    def write(n: int, k: int) -> tuple[Tensors, Tensor]:
        codes, zero, scale = integers(bits, n, k), integers(bits, 1, 1), scales(k, bits, 1, 1)
        tensors = {"weight_packed": pack_rows(codes, bits), "weight_scale": scale[0], "weight_shape": torch.tensor([n, k])}
        tensors["weight_zero_point"] = torch.from_numpy(zero[0] - 2 ** (bits - 1)).to(torch.int8)
        return tensors, dense(codes, zero, scale, group_indices(k, k, False))

    weights = plain.quantization["config_groups"]["group_0"]["weights"] | {"strategy": "tensor"}
    return Format(compressed("pack-quantized", weights), write)


def packed(
    bits: int, group: int | None, symmetric: bool = True, actorder: bool = False, ignore: tuple[str, ...] = ()
) -> Format:
    """pack-quantized."""

    def write(n: int, k: int) -> tuple[Tensors, Tensor]:
        size = group or k
        codes, scale = integers(bits, n, k), scales(k, bits, n, k // size)
        zeros = integers(bits, n, k // size)
        which = group_indices(k, size, actorder)
        tensors = {"weight_packed": pack_rows(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
        if not symmetric:
            tensors["weight_zero_point"] = pack_rows(zeros.T, bits).T
        if actorder:
            tensors["weight_g_idx"] = torch.from_numpy(which).int()
        return tensors, dense(codes, 2 ** (bits - 1) if symmetric else zeros, scale, which)

    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    weights |= {"strategy": "group" if group else "channel", "group_size": group, "actorder": "group" if actorder else None}
    patterns = tuple(f"re:.*{name}.*" for name in ignore)
    return Format(compressed("pack-quantized", weights, None, patterns), write, kept=ignore)


# --- others -------------------------------------------------------------------------------------------------------------------


def hf_block_fp8() -> Format:
    plain = one_byte("float", "block")

    def write(n: int, k: int) -> tuple[Tensors, Tensor]:
        tensors, weight = plain.write(n, k)
        return {"weight": tensors["weight"], "weight_scale_inv": tensors["weight_scale"]}, weight

    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    return Format(quantization | {"modules_to_not_convert": ["lm_head"]}, write, "group")


def fp8_by_tensor(scale: str, input_scale: str | None) -> Format:
    """quant_method fp8 without blocks, whose scale multiplies the codes whatever its name."""

    def write(n: int, k: int) -> tuple[Tensors, Tensor]:
        codes, factor = fp8(n, k), scales(k, 8, 1)[0].bfloat16()
        shape = random.choice([(), (1,), (1, 1)])  # transformers loads the first and writes the last
        tensors = {"weight": codes, scale: factor.reshape(shape)}
        if input_scale:
            tensors[input_scale] = torch.rand(()) * 0.02 + 0.02
        return tensors, codes.float() * factor.float()

    quantization = {"quant_method": "fp8", "activation_scheme": "static" if input_scale else "dynamic"}
    skipped = {"modules_to_not_convert": ["lm_head"]} if scale.endswith("inv") else {"ignored_layers": ["lm_head"]}
    return Format(quantization | {"weight_block_size": None} | skipped, write, "static" if input_scale else "token")


def modelopt(kept: tuple[str, ...] = ("o_proj",)) -> Format:
    def write(n: int, k: int) -> tuple[Tensors, Tensor]:
        codes, scale = fp8(n, k), scales(k, 8, 1)[0]
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.rand(()) * 0.02 + 0.02}, codes.float() * scale

    excluded = ["lm_head", *(f"*.{name}*" for name in kept)]
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": excluded}
    producer = {"name": "modelopt", "version": "0.29.0"}
    return Format({"producer": producer, "quantization": quantization}, write, "static", "hf_quant_config.json", kept)


def modelopt_by_channel() -> Format:
    """As ModelOpt 0.47 writes it, also into config.json."""

    def write(n: int, k: int) -> tuple[Tensors, Tensor]:
        codes, scale = fp8(n, k), scales(k, 8, n)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale[:, None]

    quantization = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "config_groups": {}}
    return Format(quantization | {"ignore": ["lm_head", "model.embed_tokens"]}, write, "token")


def gptq(bits: int, group: int, desc_act: bool = False, sym: bool = True, v2: bool = False) -> Format:
    def write(n: int, k: int) -> tuple[Tensors, Tensor]:
        size = k if group == -1 else group
        codes, scale, which = integers(bits, n, k), scales(k, bits, n, k // size).half(), group_indices(k, size, desc_act)
        zeros = np.full((n, k // size), 2 ** (bits - 1)) if sym else integers(bits, n, k // size)
        stored = zeros if v2 else (zeros - 1) % 2**bits
        tensors = {
            "qweight": pack_rows(codes, bits).T,  # words run along the input features
            "qzeros": pack_rows(stored.T, bits),  # and here along the output features
            "scales": scale.T,
            "g_idx": torch.from_numpy(which).int(),
        }
        return tensors, dense(codes, zeros, scale, which)

    quantization = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": desc_act,
        "sym": sym,
        "lm_head": False,
    }
    return Format(quantization | ({"format": "gptq_v2"} if v2 else {"checkpoint_format": "gptq"}), write)


def gptq_mixed() -> Format:
    """GPTQModel's `dynamic`: `-:` keeps layers, and of the others the first pattern that matches counts."""
    plain = gptq(4, 128)
    dynamic = {
        "-:.*k_proj": {},
        "+:.*down_proj": {"bits": 8, "group_size": 32, "sym": False},
        r".*layers\.0\.": {"group_size": 64},
    }
    others = {"down_proj": gptq(8, 32, sym=False), "layers.0.": gptq(4, 64)}
    return replace(plain, quantization=plain.quantization | {"dynamic": dynamic}, kept=("k_proj",), others=others)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the feature that each nibble of a word holds, as AWQ's packer writes them


def awq(group: int, kept: tuple[str, ...] = (), symmetric: bool = False) -> Format:
    def write(n: int, k: int) -> tuple[Tensors, Tensor]:
        codes, zeros, scale = integers(4, n, k), integers(4, n, k // group), scales(k, 4, n, k // group).half()
        zeros = np.full_like(zeros, 8) if symmetric else zeros
        tensors = {"qweight": pack_rows(codes.T, 4, AWQ_ORDER), "qzeros": pack_rows(zeros.T, 4, AWQ_ORDER), "scales": scale.T}
        return tensors, dense(codes, zeros, scale, group_indices(k, group, False))

    quantization = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": not symmetric, "version": "gemm"}
    return Format(quantization | {"modules_to_not_convert": list(kept) or None}, write, kept=kept)


def auto_round(packing: str, plain: Format, sym: bool, **extra: Any) -> Format:
    """As AutoRound writes them: without `g_idx`."""

    def write(n: int, k: int) -> tuple[Tensors, Tensor]:
        tensors, weight = plain.write(n, k)
        return {suffix: tensor for suffix, tensor in tensors.items() if suffix != "g_idx"}, weight

    common = {key: plain.quantization[key] for key in ("bits", "group_size")} | {"data_type": "int", "sym": sym, **extra}
    return replace(plain, quantization={"quant_method": "auto-round", "packing_format": packing, **common}, write=write)


def auto_round_mixed() -> Format:
    """A layer by its name, a part of one, and a regular expression."""
    extra = {"model.layers.0.mlp.up_proj": {"bits": 16}, "down_proj": {"bits": 8, "group_size": 32}}
    extra[r".*layers\.1\..*v_proj.*"] = {"bits": 8}
    others = {"down_proj": gptq(8, 32), "layers.1.self_attn.v_proj": gptq(8, 64)}
    found = auto_round("auto_round:auto_gptq", gptq(4, 64), True, extra_config=extra)
    return replace(found, kept=("layers.0.mlp.up_proj",), others=others)


def bitsandbytes_int8() -> Format:
    def write(n: int, k: int) -> tuple[Tensors, Tensor]:
        codes, largest = torch.from_numpy(integers(8, n, k) - 128).to(torch.int8), scales(k, 8, n) * 127
        tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, (codes.double() * largest.double()[:, None] / 127).float()

    return Format({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": None}, write)


def fbgemm() -> Format:
    kept = "model.layers.0.self_attn.o_proj"
    quantization = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head", kept]}
    return replace(one_byte("float", "channel", TOKEN), quantization=quantization, kept=(kept,))


FORMATS: dict[str, Format] = {
    "fp8 by tensor, static": one_byte("float", "tensor", STATIC),
    "fp8 by channel, dynamic": one_byte("float", "channel", TOKEN),
    "fp8 by channel, weights only": one_byte("float", "channel"),
    "fp8 by block, dynamic": one_byte("float", "block", GROUP, block_structure=[128, 128]),
    "int8 by channel, dynamic": one_byte("int", "channel", TOKEN),
    "int8 by channel, static": one_byte("int", "channel", STATIC),
    "int8 by tensor, weights only": one_byte("int", "tensor"),
    "W4A16 group 128": packed(4, 128),
    "W4A16 group 32 asymmetric": packed(4, 32, symmetric=False),
    "W4A16 group 64 act-order": packed(4, 64, actorder=True),
    "W4A16 by channel, some kept": packed(4, None, ignore=("k_proj", "layers.0.mlp")),
    "W4A16 by tensor asymmetric": packed_by_tensor(4),
    "W8A16 group 64": packed(8, 64),
    "W8A16 by channel asymmetric": packed(8, None, symmetric=False),
    "HF block fp8": hf_block_fp8(),
    "HF fp8 by tensor, dynamic": fp8_by_tensor("weight_scale_inv", None),
    "HF fp8 by tensor, static": fp8_by_tensor("weight_scale_inv", "activation_scale"),
    "AutoFP8 by tensor, static": fp8_by_tensor("weight_scale", "input_scale"),
    "ModelOpt fp8": modelopt(),
    "ModelOpt fp8 by channel": modelopt_by_channel(),
    "GPTQ 4 bits": gptq(4, 128),
    "GPTQ 4 bits act-order asymmetric": gptq(4, 32, desc_act=True, sym=False),
    "GPTQ 4 bits v2": gptq(4, 64, sym=False, v2=True),
    "GPTQ 8 bits by channel": gptq(8, -1),
    "GPTQ 8 bits act-order": gptq(8, 64, desc_act=True),
    "GPTQ mixed": gptq_mixed(),
    "AWQ": awq(64),
    "GPTQ of AutoGPTQ": replace(
        gptq(4, 64, desc_act=True),
        quantization={
            "bits": 4,
            "group_size": 64,
            "damp_percent": 0.01,
            "desc_act": True,
            "sym": True,
            "true_sequential": True,
        },
        file="quantize_config.json",
    ),
    "AWQ of AutoAWQ": replace(
        awq(64), quantization={"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}, file="quant_config.json"
    ),
    "AWQ symmetric": awq(64, symmetric=True),
    "AWQ group 128, some kept": awq(128, ("down_proj",)),
    "auto-round as AWQ": auto_round("auto_round:auto_awq", awq(64), False),
    "auto-round as GPTQ v2": auto_round("auto_round", gptq(4, 32, sym=False, v2=True), False),
    "auto-round as GPTQ, mixed": auto_round_mixed(),
    "bitsandbytes int8": bitsandbytes_int8(),
    "fbgemm fp8": fbgemm(),
}
