"""Checkpoints by GPTQModel. The logits are of the model in fp32 with the weights that GPTQModel's layers dequantize."""

from pathlib import Path
from typing import Any

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from writing import BASE, CALIBRATION, TOKENS, write_all

DATA = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in CALIBRATION.tolist()]
PLAIN = {"bits": 4, "group_size": 128, "desc_act": False}
ORDERED = {"bits": 4, "desc_act": True, "act_group_aware": False}
READ: dict[str, dict[str, Any]] = {
    "GPTQ, its defaults": {"bits": 4, "group_size": 128},
    "GPTQ, 4 bits, asymmetric, act-order": {**ORDERED, "group_size": 32, "sym": False},
    "GPTQ, 4 bits by row, act-order": {**ORDERED, "group_size": -1},
    "GPTQ v2, 4 bits, asymmetric": {**PLAIN, "format": "gptq_v2", "sym": False},
    "GPTQ, 8 bits": {**PLAIN, "bits": 8},
    "GPTQ, 4 and 8 bits by dynamic": {**PLAIN, "dynamic": {r"+:.*down_proj.*": {"bits": 8}}},
    "AWQ, its defaults": {"bits": 4, "group_size": 128, "method": "awq", "format": "gemm"},
}
REFUSED = {"GPTQ, 3 bits": {**PLAIN, "bits": 3}}


def dequantized(layer: Any) -> Tensor:
    """The fp32 weight (out_features, in_features) of a quantized layer."""
    layer.scales.data = layer.scales.data.float()
    if hasattr(layer, "dequantize_weight"):
        weight = layer.dequantize_weight()
    else:
        weight = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, layer.bits, layer.group_size)
    return weight.float().T


def write(options: dict[str, Any], folder: Path, read: bool) -> dict[str, Tensor]:
    model = GPTQModel.load(str(BASE), QuantizeConfig(**options), device="cpu")
    model.quantize(DATA, batch_size=4)
    model.save(str(folder))
    if not read:
        return {}
    backend = BACKEND.AWQ_TORCH if options.get("method") == "awq" else BACKEND.TORCH
    model = GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=torch.float16)
    plain = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    plain.load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # AWQ also changes norms
    with torch.no_grad():
        for name, layer in model.model.named_modules():
            if hasattr(layer, "qweight"):
                plain.get_submodule(name).weight.copy_(dequantized(layer))
        return {"dense": plain(TOKENS).logits}


write_all(READ, REFUSED, write)
