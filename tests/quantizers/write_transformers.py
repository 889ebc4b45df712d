"""Checkpoints in fp8 by transformers. The logits are of the weights that it dequantizes; its own kernels need a GPU."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from writing import BASE, TOKENS, write_all

FineGrainedFP8HfQuantizer.validate_environment = lambda *_, **__: None  # it would ask for a GPU
READ: dict[str, dict[str, Any]] = {
    "blocks": {},
    "blocks, some layers in 16 bits": {"modules_to_not_convert": ["lm_head", "down_proj"]},
    "tensor": {"weight_block_size": None},
}


def write(options: dict[str, Any], folder: Path, read: bool) -> dict[str, Tensor]:
    def load(path: Path, dtype: torch.dtype, **more: Any) -> Any:
        config = FineGrainedFP8Config(**options, **more)
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=config, device_map="cpu")

    load(BASE, torch.bfloat16).save_pretrained(folder)
    with torch.no_grad():
        return {"dense": load(folder, torch.float32, dequantize=True)(TOKENS).logits}


write_all(READ, {}, write)
