"""Random low-rank adapters in PEFT's layout, and the base with their weights merged into it, computed from the definition."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def base_tensors(base: Path) -> dict[str, Tensor]:
    return {name: t for path in base.glob("*.safetensors") for name, t in load_file(path).items()}


def write_adapter(folder: Path, base: Path, parts: tuple[str, ...] | None = None, size: float = 1.0, **settings: Any) -> Path:
    """Write a random adapter of the checkpoint `base`, on random ones of its modules if none are named, whose products are about as
    large as the base's times `size`."""
    # with three of them one is not of queries or keys, which alone change nothing where a token sees only itself
    parts = parts or tuple(random.sample(PARTS, random.randint(3, 7)))
    rank, tensors = settings.get("r", random.randint(1, 9)), {}
    ranks = settings.get("rank_pattern", {})
    for name, weight in base_tensors(base).items():
        layer = name.removesuffix(".weight")
        if layer.endswith(parts) and name.endswith("proj.weight"):
            r = next((value for key, value in ranks.items() if layer.endswith("." + key)), rank)
            a, b = torch.randn(r, weight.shape[1]) * weight.shape[1] ** -0.5, torch.randn(weight.shape[0], r) * size / r
            tensors[f"base_model.model.{layer}.lora_A.weight"] = a
            tensors[f"base_model.model.{layer}.lora_B.weight"] = b
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(parts), "bias": "none"} | settings
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(folder: Path, base: Path, adapter: Path) -> Path:
    """The checkpoint W + factor * B A, without patterns in the adapter's config."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    factor = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    tensors, own = {k: v.float() for k, v in base_tensors(base).items()}, load_file(adapter / "adapter_model.safetensors")
    for name, a in own.items():
        if "lora_A" in name:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            tensors[layer + ".weight"] += factor * own[name.replace("lora_A", "lora_B")] @ a
    save_file(tensors, folder / "model.safetensors")
    return folder
