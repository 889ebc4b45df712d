"""Writing quantized layers in the formats of compressed-tensors, which transformers and vLLM read, too."""

from typing import Any

import torch
from torch import Tensor

from quantized.scheme import Scheme
from quantized.weight import Quantized


def scheme_to_hf(scheme: Scheme) -> dict[str, Any]:
    """`quantization_config` of config.json for a model whose linear layers, except the head, all have this symmetric scheme."""
    weights = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.is_float else "int",
        "symmetric": True,
        "strategy": "group" if scheme.group else "channel",
        "group_size": scheme.group,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": weights["type"], "symmetric": True, "strategy": "token", "dynamic": True}
    activations = inputs if scheme.activations == "token" else None
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if scheme.is_float else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def compressed_tensors(layer: Quantized, scheme: Scheme) -> dict[str, Tensor]:
    """The tensors of a layer (N, K) by the suffix of their names, as the config of `scheme_to_hf` asks for them. See
    `formats.packed_codes` about integers."""
    if scheme.is_float:
        return {"weight": layer.codes, "weight_scale": layer.scales}
    words = (layer.codes if scheme.bits == 4 else layer.codes.view(torch.uint8) ^ 128).contiguous().view(torch.int32)
    shape = len(words), words.shape[1] * 32 // scheme.bits
    return {"weight_packed": words, "weight_scale": layer.scales, "weight_shape": torch.tensor(shape)}
