"""The models that `--model` names: presets, which have a shape but no weights, and checkpoints."""

import tomllib
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from checkpoints.hf_config import config_from_hf, read_config
from cli import note
from config import VARIANTS, ModelConfig, validate, with_variant
from errors import UserError
from files import model_folder
from quantized.scheme import QUANTIZATIONS, on_load


def _read_presets() -> dict[str, ModelConfig]:
    raw = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
    shared = raw.pop("all")
    return {name: config_from_hf(shared | own) for name, own in raw.items()}


PRESETS = _read_presets()
LISTED = 12  # most checkpoints in the folder models/ that a message names


def preset(name: str) -> ModelConfig:
    """The config named `NAME` or `NAME:LAYERS` (`llama-3-70b:16` is 16 of its 80 layers)."""
    base, colon, layers = name.partition(":")
    if base not in PRESETS:
        raise UserError(f"no preset {base!r} (and no such directory); {instead(name)}")
    config = PRESETS[base]
    if not colon:
        return config
    if not layers.isdecimal() or not 1 <= int(layers) <= config.n_layers:
        raise UserError(f"preset {name!r}: give a number of layers from 1 to {config.n_layers} behind the colon")
    bare = tuple(layer for layer in config.no_rope_layers if layer < int(layers))
    return replace(config, n_layers=int(layers), windows=config.windows[: int(layers)], no_rope_layers=bare)


def instead(name: str) -> str:
    """Suggestions for `name`, which is neither a path nor a preset: similar names, and all checkpoints and presets."""
    here = [str(path.parent) for path in sorted(Path("models").glob("*/config.json"))[:LISTED]]
    names = {Path(folder).name: folder for folder in here} | {name: name for name in [*PRESETS, *here]}
    last = Path(name).name.partition(":")[0]
    hub = [name.partition(":")[0]] if "/" in name and ":" in name else []  # what llama.cpp writes behind it is not known here
    close = [names[one] for text in (name, last) for one in get_close_matches(text, names, n=2, cutoff=0.6)]
    found = dict.fromkeys([*hub, *close])
    meant = f"did you mean {' or '.join(list(found)[:2])}? " if found else ""
    folders = f"checkpoints here: {', '.join(here)}; " if here else ""
    return f"{meant}{folders}presets: {', '.join(PRESETS)}"


# --- the names that `--model` takes --------------------------------------------------------------------------------------


def is_preset(name: str) -> bool:
    """Whether `name`, a value of `--model`, is a preset. If a path of that name exists, it is a path."""
    return not Path(name).exists() and "/" not in name and not name.endswith((".pth", ".json"))


def is_shape(name: str) -> bool:
    """Whether `name` is a `config.json` without weights: the file itself, or a folder that has only this file."""
    path = Path(name)
    if path.is_dir():
        return [file.name for file in path.iterdir()] == ["config.json"]
    return path.suffix == ".json"


def has_random_weights(name: str) -> bool:
    """Whether `--model NAME` has a shape but no weights: a preset, or a `config.json` alone."""
    return is_preset(name) or is_shape(name)


def warn_of_noise(name: str, config: ModelConfig) -> None:
    """Say so if the text of `--model NAME`, computed with this config, has no meaning."""
    if has_random_weights(name):
        note(f"warning: {name} is a shape without weights: they are random and its text is noise, for benchmarks only")
    elif config.description != named_config(name).description:
        note(f"warning: computing {config.description}, for which the checkpoint was not trained; its text will be wrong")


def named_config(name: str) -> ModelConfig:
    """The config of a preset, a checkpoint (a folder, or a weights file in it), or a `config.json`. Raises UserError."""
    if is_preset(name):
        return preset(name)
    if not Path(name).exists():
        raise UserError(f"{config_file(name)} is missing; {instead(name)}")
    path = Path(name)
    kinds = {file.suffix for file in (path.iterdir() if path.is_dir() else [path])}
    if ".gguf" in kinds and not kinds & {".safetensors", ".bin", ".pth"}:
        raise UserError(
            f"{name} is in GGUF, the format of llama.cpp, which is not read; use the folder that it was made of, with its "
            "config.json and safetensors: --quantize int4 rounds it at load"
        )
    return read_config(config_file(name))


def config_file(name: str) -> Path:
    """The file that describes a checkpoint (a folder, or a weights file in it), or a `config.json` itself."""
    path = Path(name)
    return path if path.suffix == ".json" else model_folder(path) / "config.json"


def model_config(name: str, variant: str | None, world_size: int, quantize: str | None = None) -> ModelConfig:
    """The config of a checkpoint (directory or `.pth` file), preset or `config.json`, with another variant if one is given.

    quantize: how to quantize it at load, one of `quantized.scheme.QUANTIZATIONS`. Raises UserError if it is quantized already.

    A desync variant of a model that is not desync has one stream for each rank, unless it gives a number: `desync-2x:8`.
    """
    config = named_config(name)
    if quantize is not None:
        if config.quantization is not None:
            raise UserError(f"{name} is quantized already ({config.quantization.description}); leave out --quantize {quantize}")
        if quantize not in QUANTIZATIONS:
            raise UserError(f"unknown quantization {quantize!r}; known: {', '.join(QUANTIZATIONS)}")
        if config.tie_embeddings and quantize.endswith("+head"):
            raise UserError(f"--quantize {quantize}: the head of {name} is its embedding, which stays; leave out +head")
        config = replace(config, quantization=on_load(quantize))
    if variant is None:
        return config
    if config.variant != "desync" and variant in VARIANTS and VARIANTS[variant].kind == "desync":
        variant = f"{variant}:{world_size}"
    return validate(with_variant(config, variant))
