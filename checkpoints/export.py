"""Writes checkpoints: a model in the HF layout, a tokenizer's files, the code with which transformers loads ladders."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.eagle import ARCHITECTURE, EagleHead, head_places
from checkpoints.hf_config import config_to_hf
from checkpoints.sources import FUSED, INDEX, SINGLE, paired, published
from checkpoints.weights import places
from config import FAMILIES, ModelConfig
from errors import UserError
from files import writing
from model import Transformer

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
MAX_FILE_BYTES = 4 * 10**9  # of one written safetensors file
MODELING = Path(__file__).with_name("modeling_rung.py")


def save_checkpoint(
    model: Transformer, directory: Path, dtype: torch.dtype = torch.bfloat16, tokenizer_from: Path | None = None
) -> None:
    """Write `model` in the HF layout: config.json, safetensors (with an index above 4 GB), a copy of a tokenizer's files, and for
    ladders the code with which transformers loads them.

    Raises UserError if the directory cannot be written, or if `model` is split over several ranks, because a model is saved from one
    process that holds all of it, or quantized.
    """
    if model.config.quantization is not None:
        raise UserError("a quantized model is not saved again; copy its checkpoint, or use scripts.quantize")
    if model.comm.world_size != 1:
        raise UserError("a model is saved from one process that holds all of it; load it without torchrun to save it")
    tensors: dict[str, Tensor] = {}
    for place in places(model):
        full = tensors.setdefault(place.name, torch.empty(place.shape, dtype=dtype))
        stop = min(place.rows.stop, place.shape[place.dim])
        size = stop - place.rows.start
        full.narrow(place.dim, place.rows.start, size).copy_(place.tensor.narrow(place.dim, 0, size))
    if model.config.family == "gpt_oss":
        tensors = _stacked(tensors)
    if FAMILIES[model.config.family].fused:
        tensors = _fused(tensors, model.config)
    tensors = {published(name, model.config.family): tensor for name, tensor in tensors.items()}
    raw = config_to_hf(model.config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    with writing(directory):
        _save_weights(tensors, directory)
        if tokenizer_from is not None and tokenizer_from.resolve() != directory.resolve():
            copy_tokenizer(tokenizer_from, directory)
        save_config(raw | add_modeling(directory, model.config), directory)


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of each layer as one tensor, the opposite of `sources.stacked`."""
    found, experts = dict[str, Tensor](), dict[str, list[Tensor]]()
    for name, tensor in tensors.items():
        layer, _, part = name.partition(".experts.")
        if part:
            experts.setdefault(f"{layer}.experts.{part.partition('.')[2]}", []).append(
                tensor.mT if tensor.dim() == 2 else tensor
            )
        else:
            found[name] = tensor
    for name, each in experts.items():
        if ".gate_proj." in name:
            pairs = torch.stack([torch.stack(each), torch.stack(experts[name.replace(".gate_", ".up_")])], -1)
            found[name.replace(".gate_", ".gate_up_").replace(".bias", "_bias").removesuffix(".weight")] = pairs.flatten(-2)
        elif ".down_proj." in name:
            found[name.replace(".bias", "_bias").removesuffix(".weight")] = torch.stack(each)
    return found


def _fused(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors with q, k and v of a layer as one, and gate and up, as in the files of families with `fused`. Empties `tensors`."""
    names, found = {part: (parts, whole) for whole, parts in FUSED.items() for part in parts}, dict[str, Tensor]()
    for name in list(tensors):
        prefix, _, part = name.removesuffix(".weight").rpartition(".")
        parts, whole = names.get(part, ((), ""))
        if not parts:
            found[name] = tensors.pop(name)
        elif part == parts[0]:
            rows = {one: tensors.pop(f"{prefix}.{one}.weight") for one in parts}
            each = [paired(t, config, back=True) if one in ("q_proj", "k_proj") else t for one, t in rows.items()]
            found[f"{prefix.rpartition('.')[0]}.{whole}.weight"] = torch.cat(each)
    return found


def save_head(head: EagleHead, directory: Path) -> None:
    """Write a draft head in bf16 in the published layout `LlamaForCausalLMEagle3`: config.json and model.safetensors.

    config.json has the layers whose streams the head reads twice: `eagle_aux_hidden_state_layer_ids` names the layers after the
    streams (vLLM), the same key in `eagle_config` the layers before them (SGLang). Raises UserError if the directory cannot be written.
    """
    config, key = head.config, "eagle_aux_hidden_state_layer_ids"
    drafted, known = config.draft_vocab_size, torch.zeros(config.layer.vocab_size, dtype=torch.bool)
    targets = head.targets.cpu()
    known[targets] = True
    tensors = {place.name: place.tensor.to("cpu", torch.bfloat16).contiguous() for place in head_places(head)}
    raw = config_to_hf(config.layer) | {
        "architectures": [ARCHITECTURE],
        "torch_dtype": "bfloat16",
        "draft_vocab_size": drafted,
        "target_hidden_size": config.base_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        key: list(config.stream_layers),
        "eagle_config": {"use_aux_hidden_state": True, key: [i - 1 for i in config.stream_layers]},
    }
    with writing(directory):
        _save_weights(tensors | {"d2t": targets - torch.arange(drafted), "t2d": known}, directory)
        save_config(raw, directory)


def _save_weights(tensors: dict[str, Tensor], directory: Path) -> None:
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > MAX_FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    directory.mkdir(parents=True, exist_ok=True)
    for stale in ("config.json", INDEX, SINGLE):  # of an earlier checkpoint in the folder: a reader might prefer it
        (directory / stale).unlink(missing_ok=True)
    if len(files) == 1:
        save_tensors(files[0], directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, file in enumerate(files):
        file_name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        save_tensors(file, directory / file_name)
        weight_map |= dict.fromkeys(file, file_name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file, which those may read who may read other new files: safetensors alone keeps it from all but its owner."""
    save_file(dict(tensors), path, metadata={"format": "pt"})
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def save_config(raw: dict[str, Any], directory: Path) -> None:
    """Write config.json. It comes last: with it, a folder is taken for a checkpoint, and without weights for a random one."""
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the `TOKENIZER_FILES` that exist from one folder to another."""
    for file in TOKENIZER_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, target / file)


def add_modeling(directory: Path, config: ModelConfig) -> dict[str, Any]:
    """Copy the code with which transformers loads a model with ladder layers, and return what its config.json needs for that.

    With both, `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)` works. Does nothing for other variants: a
    standard model needs no code, and parallel, desync and sparse ladder models run in Rung only.
    """
    if config.variant != "ladder" or config.experts:
        return {}
    shutil.copyfile(MODELING, directory / MODELING.name)
    name = f"modeling_rung.{FAMILIES[config.family].name}Ladder"
    return {"auto_map": {"AutoConfig": f"{name}Config", "AutoModelForCausalLM": f"{name}ForCausalLM"}}
