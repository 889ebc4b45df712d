"""Checkpoints by llmcompressor. The logits are transformers' with the weights that compressed-tensors decompresses."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from writing import BASE, CALIBRATION, LENGTH, ROWS, TOKENS, write_all

IntermediatesCache.pin_memory = lambda *_, **__: None  # it would ask for an accelerator
DATA = Dataset.from_dict({"input_ids": CALIBRATION.tolist(), "attention_mask": [[1] * LENGTH] * ROWS})
Scheme = dict[str, Any]
FP8: Scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
BY_TOKEN: Scheme = {**FP8, "strategy": "token", "dynamic": True}
INT8: Scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INT4: Scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def preset(name: str, **more: Any) -> QuantizationModifier:
    return QuantizationModifier(**{"targets": "Linear", "scheme": name, "ignore": ["lm_head"], **more})


def group(weights: Scheme, inputs: Scheme | None = None, targets: str = "Linear") -> Scheme:
    return {"targets": [targets], "weights": weights, "input_activations": inputs}


def own(*groups: Scheme, modifier: Any = QuantizationModifier) -> Any:
    return modifier(config_groups={f"group_{i}": one for i, one in enumerate(groups)}, ignore=["lm_head"])


FP8_AND_INT4 = group({**FP8, "strategy": "channel"}, BY_TOKEN, "re:.*self_attn.*"), group(INT4, targets="re:.*mlp.*")
READ = {
    **{name: preset(name) for name in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16")},
    "FP8, cache in fp8": preset("FP8", kv_cache_scheme=FP8),
    "FP8_DYNAMIC, output layer": preset("FP8_DYNAMIC", ignore=[]),
    "FP8_DYNAMIC and W4A16": own(*FP8_AND_INT4),
    "W8A8, static inputs": own(group(INT8, {**INT8, "strategy": "tensor"})),
    "W4A16, GPTQ with act-order": own(group({**INT4, "actorder": "weight"}), modifier=GPTQModifier),
    "W4A16_ASYM, AWQ": [AWQModifier(), own(group({**INT4, "symmetric": False}))],
}
REFUSED = {
    "W8A8, asymmetric inputs": own(group(INT8, {**INT8, "symmetric": False, "strategy": "token", "dynamic": True})),
    **{name: preset(name) for name in ("W4AFP8", "NVFP4")},
}


def write(recipe: Any, folder: Path, read: bool) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16)
    oneshot(model=model, recipe=recipe, dataset=DATA, num_calibration_samples=ROWS, max_seq_length=LENGTH)
    model.save_pretrained(folder, save_compressed=True)
    if not read:
        return {}
    whole = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=whole).eval()
    with torch.no_grad():
        for module in model.modules():
            module.quantization_enabled = isinstance(module, torch.nn.Linear)  # not the cache: Rung has --kv-dtype
        rounded = model(TOKENS).logits
        for module in model.modules():
            module.quantization_enabled = False
        dense = model(TOKENS).logits
    return {"dense": dense} if torch.equal(dense, rounded) else {"dense": dense, "rounded": rounded}


write_all(READ, REFUSED, write)
