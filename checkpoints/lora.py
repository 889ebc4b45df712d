"""Reading low-rank adapters in the layout of Hugging Face PEFT: `adapter_config.json` and `adapter_model.safetensors`.

A linear layer W of the base becomes W + factor * B A (Hu et al., LoRA, arXiv:2106.09685), with factor alpha / rank, or
alpha / sqrt(rank) if `use_rslora` (Kalajdzievski, arXiv:2312.03732). Adapters of other kinds are refused by name.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoints.weights import full_shape
from config import FAMILIES, ModelConfig
from errors import UserError, first_line
from files import CONFIG_BYTES, descriptor_path, open_regular, read_json
from kernels.lora import LowRank, padded_rank
from layers.linear import ShardedLinear
from model import Transformer
from tp import SPLITS, checkpoint_name, stream_shards

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # the layers that can be adapted
FLOATS = {"F32", "F16", "BF16"}
# fields of adapter_config.json that change what an adapter computes, and that mean nothing if they are false or empty
UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "fan_in_fan_out",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "megatron_config",
    "quantization_config",
)
UNMERGED = ("layer_replication", "alora_invocation_tokens", "use_qalora", "arrow_config")  # what PEFT cannot merge, either
CHANGING = re.compile(r"pissa.*|olora|corda|loftq|lora_ga")  # values of init_lora_weights that change the base's weights

# PEFT's own names: with a wrapper more, or with the adapter's name, as a `state_dict` of its model has them
NAME = re.compile(r"(?:base_model\.model\.)*(.+)\.lora_([AB])(?:\.default)?\.weight")
TABLE = re.compile(r"\b(lm_head|embed_tokens)\b")


class NotServedError(UserError):
    """An adapter that PEFT can merge into its base."""


@dataclass(frozen=True)
class LoraLimits:
    """How many adapters a model holds at once, and their largest rank."""

    slots: int
    rank: int

    def bytes(self, config: ModelConfig, world_size: int, dtype: torch.dtype) -> int:
        """Of one rank's slots. Raises UserError if the model cannot be split."""
        shards, total = stream_shards(config, 0, world_size), 0
        for part in PARTS:
            rows, columns = full_shape(config, part)
            split = SPLITS[part]
            for shard in shards:
                own = len(shard.range(config, split.axis))
                total += (own + columns if split.dim == 0 else rows + own) * config.n_layers
        return total * padded_rank(self.rank) * self.slots * dtype.itemsize


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter's folder, whose config and tensors' names and shapes are right for a model."""

    folder: Path
    tensors: Any  # the opened safetensors file
    names: dict[str, str]  # of its tensors, by those of `tensor_name`
    factors: dict[str, float]  # by the layers' names in the checkpoint
    rank: int  # the largest

    def layer(self, module: ShardedLinear, like: LowRank) -> tuple[Tensor, Tensor]:
        """What a slot of `like` gets for this layer, (P, R, K) and (N, R) on the CPU. Raises UserError for values that are not finite."""
        (_, _, rank, _), dtype = like.a.shape, like.a.dtype
        a, b = torch.zeros(like.a.shape[1:], dtype=dtype), torch.zeros(like.b.shape[1:], dtype=dtype)
        try:
            for i, (part, rows) in enumerate(zip(module.parts, b.split(like.sizes), strict=True)):
                name = checkpoint_name(module.layer, part)
                if name in self.factors:
                    low, high = (self.tensors.get_slice(self.names[tensor_name(name, kind)]) for kind in "AB")
                    own, used = module.own_range(part), low.get_shape()[0]
                    columns = low[:, own.start : own.stop] if SPLITS[part].dim == 1 else low[:]
                    features = high[:] if SPLITS[part].dim == 1 else high[own.start : own.stop]
                    a[i, :used] = columns
                    rows[:, :used] = features.float() * self.factors[name]
                    if used > rank or not (a[i].isfinite().all() and rows.isfinite().all()):
                        raise UserError(f"{self.folder}: the adapter of {name} has values that are not finite in {dtype}")
        except (SafetensorError, OSError, RuntimeError, ValueError) as e:  # the file has changed
            raise UserError(f"{self.folder / WEIGHTS} cannot be read ({first_line(e)}); copy it again") from None
        return a, b


def adapted_layers(model: Transformer) -> Iterator[ShardedLinear]:
    """The linear layers of this rank that can have adapters."""
    return (module for module in model.layers.modules() if isinstance(module, ShardedLinear) and not module.is_mixed)


def adapted_parts(config: ModelConfig) -> tuple[str, ...]:
    """The parts of a layer that can be adapted: not those of experts, and not those that the family's files have as one tensor."""
    return PARTS[:4] if config.experts else ("o_proj", "down_proj") if FAMILIES[config.family].fused else PARTS


def tensor_name(layer: str, kind: str) -> str:
    """The name of a layer's A or B in the file."""
    return f"base_model.model.{layer}.lora_{kind}.weight"


def _plain(name: str) -> str:
    """The name of a tensor of the file as `tensor_name` has it; any other as it is."""
    return tensor_name(found[1], found[2]) if (found := NAME.fullmatch(name)) else name


def open_adapter(folder: Path, config: ModelConfig, most: int | None = None, root: Path | None = None) -> AdapterFiles:
    """Check an adapter's files against the model. most: its largest rank. root: the folder that the files must lie in, with all
    symbolic links followed. Raises UserError with what is wrong, in one line."""
    if root is not None and not _lies_in(folder, root):  # no word about files elsewhere
        raise UserError(f"{str(folder)!r} is not a folder in --lora-root {root}; only adapters there may be loaded")
    try:
        settings = read_json(folder / CONFIG, CONFIG_BYTES, root)
        weights = open_regular(folder / WEIGHTS, root)
    except FileNotFoundError as e:
        raise UserError(
            f"{e.filename} is missing; an adapter's folder has {CONFIG} and {WEIGHTS}, as PEFT saves them"
        ) from None
    try:
        with weights:
            _check_settings(settings)
            tensors = safe_open(descriptor_path(weights), framework="pt")  # maps the file
        names = {_plain(name): name for name in tensors.keys()}  # noqa: SIM118 (not a dict)
        if doubled := set(tensors.keys()) - set(names.values()):
            raise UserError(f"it has {min(doubled)} twice, under two names; save it anew")
        slices = {name: tensors.get_slice(theirs) for name, theirs in names.items()}
        shapes = {name: tuple(found.get_shape()) for name, found in slices.items()}
        kinds = {found.get_dtype() for found in slices.values()}
        if kinds - FLOATS:
            raise UserError(f"its tensors have data type {sorted(kinds - FLOATS)[0]}; save it in 16 or 32 bits")
        ranks = _ranks(shapes, config)
        _check_targets(settings, ranks, config)
        factors = {layer: _factor(settings, layer, rank) for layer, rank in ranks.items()}
        if most is not None and max(ranks.values()) > most:
            raise NotServedError(f"its rank {max(ranks.values())} is above --max-lora-rank {most}")
    except (SafetensorError, OSError) as e:
        raise UserError(f"{folder / WEIGHTS} is truncated or no safetensors file ({first_line(e)}); copy it again") from None
    except UserError as e:
        merge = f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained('merged')"
        instead = f"; merge it into its base with PEFT: {merge}" if isinstance(e, NotServedError) else ""
        raise UserError(f"the adapter {folder} cannot be used: {e}{instead}") from None
    return AdapterFiles(folder, tensors, names, factors, max(ranks.values()))


def _lies_in(path: Path, root: Path) -> bool:
    """Whether it does, with all symbolic links followed."""
    try:
        return path.resolve().is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError):  # no path, or a loop of links
        return False


def _check_settings(settings: dict[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise NotServedError(f"its peft_type is {settings.get('peft_type')!r}; only LORA is supported")
    if found := next((name for name in UNSUPPORTED if settings.get(name)), None):
        raise (UserError if found in UNMERGED else NotServedError)(f"{found} is not supported")
    if settings.get("bias", "none") != "none":
        raise NotServedError(f"bias {settings['bias']!r} is not supported; only none is")
    initial = settings.get("init_lora_weights")
    if isinstance(initial, str) and CHANGING.fullmatch(initial):
        raise NotServedError(f"init_lora_weights {initial} changes the base's weights")
    for name in ("r", "lora_alpha"):
        _number(name, settings.get(name))
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = settings.get(name) or {}
        if not isinstance(pattern, dict) or not all(re.fullmatch(r"[\w.]+", key) for key in pattern):
            raise NotServedError(f"{name} is not supported, except with names of layers and modules")
        for key, value in pattern.items():
            _number(f"{name} of {key}", value)


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise UserError(f"{name} is {value!r}, not a positive number")


def _ranks(shapes: dict[str, tuple[int, ...]], config: ModelConfig) -> dict[str, int]:
    """The rank of each layer that has tensors."""
    known = {
        checkpoint_name(i, part): full_shape(config, part) for i in range(config.n_layers) for part in adapted_parts(config)
    }
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        found = NAME.fullmatch(name)
        if table := TABLE.search(name):
            raise NotServedError(f"it changes {table[1]}, which is not supported")
        if config.experts and ".mlp." in name:
            raise NotServedError("it changes experts or their router, which is not supported")
        if FAMILIES[config.family].fused and (whole := re.search(r"\b(qkv_proj|gate_up_proj)\b", name)):
            raise NotServedError(f"it changes {whole[1]}, the fused layer of a {config.family} model, which is not supported")
        if not found or found[1] not in known:
            raise UserError(
                f"it has {name}, but this model has {', '.join(adapted_parts(config))} in {config.n_layers} layers; it is of another model"
            )
        layers.setdefault(found[1], {})[found[2]] = shape
    if not layers:
        raise UserError("it has no tensors")
    for layer, found_shapes in layers.items():
        if missing := {"A", "B"} - found_shapes.keys():
            raise UserError(f"{tensor_name(layer, missing.pop())} is missing")
        rank, (n, k) = found_shapes["A"][0] if found_shapes["A"] else 0, known[layer]
        for kind, expected in (("A", (rank, k)), ("B", (n, rank))):
            if found_shapes[kind] != expected or not rank:
                shape, asked = found_shapes[kind], ("rank", k) if kind == "A" else (n, "rank")
                raise UserError(
                    f"{tensor_name(layer, kind)} has shape {shape}, but this model needs {asked}; it is of another model"
                )
    return {layer: shapes["A"][0] for layer, shapes in layers.items()}


def _check_targets(settings: dict[str, Any], ranks: dict[str, int], config: ModelConfig) -> None:
    """Whether the tensors are those that the config names. A regular expression is not evaluated: it may take very long."""
    for layer, rank in ranks.items():
        asked = _of_pattern(settings.get("rank_pattern"), layer, settings["r"])
        if rank != asked:
            raise UserError(f"{tensor_name(layer, 'A')} has rank {rank}, but {CONFIG} says {asked}")
    targets = settings.get("target_modules")
    if targets == "all-linear":
        targets = list(PARTS)
    if isinstance(targets, str):
        return
    if not _are_names(targets):
        raise UserError(f"target_modules is {targets!r}, not names of modules")
    excluded = settings.get("exclude_modules") or []
    if not isinstance(excluded, str) and not _are_names(excluded):
        raise UserError(f"exclude_modules is {excluded!r}, not names of modules")
    if other := next((layer for layer in ranks if not _names(targets, layer)), None):
        raise UserError(f"it has tensors of {other}, which target_modules does not name")
    chosen = settings.get("layers_to_transform")
    layers = range(config.n_layers) if chosen is None else chosen if isinstance(chosen, list) else [chosen]
    for layer in (checkpoint_name(i, part) for i in layers for part in adapted_parts(config)):
        if _names(targets, layer) and layer not in ranks and not (isinstance(excluded, str) or _names(excluded, layer)):
            raise UserError(f"{tensor_name(layer, 'A')} is missing, though target_modules names this layer")


def _are_names(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _names(targets: Sequence[str], layer: str) -> bool:
    return any(layer == target or layer.endswith("." + target) for target in targets)


def _of_pattern(pattern: dict[str, Any] | None, layer: str, default: Any) -> Any:
    """The value of the first key that names the layer."""
    return next((value for key, value in (pattern or {}).items() if _names([key], layer)), default)


def _factor(settings: dict[str, Any], layer: str, rank: int) -> float:
    alpha = float(_of_pattern(settings.get("alpha_pattern"), layer, settings["lora_alpha"]))
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
