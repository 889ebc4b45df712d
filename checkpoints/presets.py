"""The models that `--model` names: presets, which have a shape but no weights, and checkpoints."""

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from checkpoints.hf_config import read_config
from cli import note
from config import VARIANTS, Llama3Scaling, ModelConfig, with_variant
from errors import UserError
from files import model_folder
from quantized.scheme import QUANTIZATIONS, on_load

_LLAMA31_ROPE = Llama3Scaling(8.0, 1.0, 4.0, 8192)
_LLAMA32: dict[str, Any] = dict(
    rope_theta=5e5, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192), tie_embeddings=True, max_seq_len=131072
)


def _preset(layers: int, heads: int, kv_heads: int, hidden: int, intermediate: int, vocab: int, **more: Any) -> ModelConfig:
    shape = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=intermediate,
        max_seq_len=8192,
    )
    return ModelConfig(**{**shape, **more})


PRESETS: dict[str, ModelConfig] = {
    # the 1B and 3B models that the ladder paper trains from scratch (3B with 32 heads, so that 8 ranks can share them)
    "ladder-1b": _preset(40, 24, 24, 1536, 4096, 49152, max_seq_len=2048, tie_embeddings=True),
    "ladder-3b": _preset(40, 32, 32, 2304, 9216, 49152, max_seq_len=2048, tie_embeddings=True),
    "llama-3.2-1b": _preset(16, 32, 8, 2048, 8192, 128256, **_LLAMA32),
    "llama-3.2-3b": _preset(28, 24, 8, 3072, 8192, 128256, **_LLAMA32),
    "llama-3-8b": _preset(32, 32, 8, 4096, 14336, 128256, rope_theta=5e5),
    # Llama 1, the models that AMSP is evaluated with
    "llama-7b": _preset(32, 32, 32, 4096, 11008, 32000, max_seq_len=2048, norm_eps=1e-6),
    "llama-13b": _preset(40, 40, 40, 5120, 13824, 32000, max_seq_len=2048, norm_eps=1e-6),
    "llama-30b": _preset(60, 52, 52, 6656, 17920, 32000, max_seq_len=2048, norm_eps=1e-6),
    "llama-34b": _preset(48, 64, 8, 8192, 22016, 32000, rope_theta=1e6, max_seq_len=16384),
    "llama-3-70b": _preset(80, 64, 8, 8192, 28672, 128256, rope_theta=5e5),
    "llama-3.1-405b": _preset(
        126, 128, 8, 16384, 53248, 128256, rope_theta=5e5, rope_scaling=_LLAMA31_ROPE, max_seq_len=131072
    ),
    # BLOOM's shape with Llama's modules: the gated MLP has as many weights as BLOOM's plain MLP of 4 x hidden
    "bloom-176b": _preset(70, 112, 112, 14336, 38400, 250880, max_seq_len=2048, tie_embeddings=True),
    # small enough for a laptop's CPU: for tests, and to try Rung without a checkpoint
    "tiny": _preset(8, 8, 4, 192, 320, 1024, head_dim=32, max_seq_len=1024, tie_embeddings=True),
}

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
    return replace(config, n_layers=int(layers))


def instead(name: str) -> str:
    """Suggestions for `name`, which is neither a path nor a preset: similar names, and all checkpoints and presets."""
    here = [str(path.parent) for path in sorted(Path("models").glob("*/config.json"))[:LISTED]]
    names = {Path(folder).name: folder for folder in here} | {name: name for name in [*PRESETS, *here]}
    last = Path(name).name.partition(":")[0]
    found = dict.fromkeys(names[close] for text in (name, last) for close in get_close_matches(text, names, n=2, cutoff=0.6))
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
    return with_variant(config, variant)
