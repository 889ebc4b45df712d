"""Checkpoints by NVIDIA's ModelOpt. The logits are of the model with its quantizers of activations and the file's weights."""

import copy
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from writing import BASE, CALIBRATION, TOKENS, write_all

READ = {"FP8": mtq.FP8_DEFAULT_CFG, "FP8_PER_CHANNEL_PER_TOKEN": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG}
REFUSED = {"INT4_AWQ": mtq.INT4_AWQ_CFG, "NVFP4": mtq.NVFP4_DEFAULT_CFG}


def write(config: dict, folder: Path, read: bool) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16).eval()
    model = mtq.quantize(model, copy.deepcopy(config), lambda model: [model(row[None]) for row in CALIBRATION])
    plain = copy.deepcopy(model).float()  # the export packs the model itself
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=folder)
    if not read:
        return {}
    file = load_file(folder / "model.safetensors")
    mtq.disable_quantizer(plain, "*weight_quantizer")
    with torch.no_grad():
        for name, module in plain.named_modules():
            if (scale := file.get(f"{name}.weight_scale")) is not None:  # of the tensor, or of each row
                module.weight.copy_(file[f"{name}.weight"].float() * scale.float().reshape(-1, 1))
        rounded = plain(TOKENS).logits
        mtq.disable_quantizer(plain, "*input_quantizer")
        return {"dense": plain(TOKENS).logits, "rounded": rounded}


write_all(READ, REFUSED, write)
