"""A model's description: shape, family, residual variant. Presets by name; reading and writing the HF `config.json`.

A residual variant is a property of the checkpoint. `config.json` has it under these keys:

| variant | keys |
|---|---|
| standard | none: a plain Llama, Mistral, Qwen2 or Qwen3 config |
| ladder and hybrid ladder | `model_type: "llamaLadder"` and `ladder_layers`: an int k (the last k layers) or a list |
| parallel, and ladder of another family | `model_type: "rung"`, `base_model_type`, `residual_variant` |
| desync | these three, and `desync_streams` and `desync_pattern` |

No other library has a model type `rung`. That is intended: a library that ignored the variant would load such a checkpoint
without an error and generate nonsense.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from errors import UserError
from files import CONFIG_BYTES, read_json
from json_fields import count, get, one_or_list, positive, shown
from rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    attention_factor,
    read_scaling,
    rope_of,
    scaling_to_hf,
)

VARIANTS = ("standard", "parallel", "ladder", "desync", "upper-bound")
VARIANT_NAMES = "standard, parallel, ladder, hybrid[:LAYERS], desync-2x[:STREAMS], desync-4x[:STREAMS], upper-bound"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# Far above any published model. A larger value means a broken file, and checking such a model would take long.
MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "head_dim": 1 << 14,
}

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llamaLadder": "LlamaLadderForCausalLM",
    "rung": "RungForCausalLM",
}


@dataclass(frozen=True)
class Reduces:
    """One layer of a desync pattern: after which of its two modules the streams are all-reduced."""

    attention: bool
    mlp: bool


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's complete description. Counts are of the full model, never of one rank's shard."""

    # shape
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_seq_len: int  # tokens, prompt and answer together
    # family
    family: str = "llama"
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False  # of all three layers
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window of each layer, in tokens; empty: no layer has one
    # residual variant
    variant: str = "standard"
    ladder_layers: tuple[int, ...] = ()  # for `ladder` only; all layers or some of them (hybrid)
    desync_streams: int = 1  # S: how many streams the checkpoint was trained with
    desync_pattern: tuple[Reduces, ...] = ()  # one entry a layer
    # other settings of `config.json` that must be saved again
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def is_hybrid(self) -> bool:
        return self.variant == "ladder" and len(self.ladder_layers) < self.n_layers

    @property
    def description(self) -> str:
        """The variant in the paper's terms: `hybrid ladder (layers 4-7 of 8)`, `desync-2x (S = 4)`."""
        if self.is_hybrid:
            first, last = min(self.ladder_layers), max(self.ladder_layers)
            named = f"{first}-{last}" if len(self.ladder_layers) == last - first + 1 else str(list(self.ladder_layers))
            return f"hybrid ladder (layers {named} of {self.n_layers})"
        if self.variant == "desync":
            names = {desync_pattern(self.n_layers, every): f"desync-{every}x" for every in (2, 4)}
            return f"{names.get(self.desync_pattern, 'desync')} (S = {self.desync_streams})"
        return self.variant

    @property
    def rope_factor(self) -> float:
        """The factor by which RoPE multiplies queries and keys in addition to rotating them."""
        return attention_factor(self.rope_scaling)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def parameter_count(self) -> int:
        """Entries of the full model's matrices. A tied embedding counts once; norms and biases, which are few, do not count."""
        attention = self.hidden_size * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.n_layers * (attention + mlp) + tables


def desync_pattern(n_layers: int, every: int) -> tuple[Reduces, ...]:
    """`desync-nx` of the paper's section 5: only the last of every n consecutive all-reduces remains. The model's last module
    always reduces."""
    modules = [(i + 1) % every == 0 or i == 2 * n_layers - 1 for i in range(2 * n_layers)]
    return tuple(Reduces(attention=modules[2 * i], mlp=modules[2 * i + 1]) for i in range(n_layers))


def validate(config: ModelConfig) -> ModelConfig:
    """Return `config`, or raise `UserError` if it cannot describe a model."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise UserError(f"bad model config: {message}")

    for field in fields(config):
        value = getattr(config, field.name)
        if field.type is int:
            require(type(value) is int and value >= 1, f"{field.name} must be a whole number of at least 1, not {value!r}")
        if field.type is float:
            require(0 < value < math.inf, f"{field.name} must be a positive number, not {value!r}")
    require(config.family in FAMILIES, f"family {config.family!r} is unknown; known: {', '.join(FAMILIES)}")
    require(config.variant in VARIANTS, f"variant {config.variant!r} is unknown; known: {', '.join(VARIANTS)}")
    require(
        config.n_heads % config.n_kv_heads == 0,
        f"{config.n_heads} attention heads cannot share {config.n_kv_heads} KV heads evenly",
    )
    require(config.head_dim % 2 == 0, f"head_dim must be even for RoPE, not {config.head_dim}")
    require(
        config.family == "qwen2" or config.qkv_bias == config.o_bias,
        f"the {config.family} family has a bias in q, k, v and o_proj, or in none of them",
    )
    sizes = {w for w in config.windows if w is not None}
    require(len(config.windows) in (0, config.n_layers), "windows must name one sliding window a layer")
    require(len(sizes) <= 1 and min(sizes, default=1) >= 1, f"sliding_window must be one positive size, not {sorted(sizes)}")
    require(config.family != "llama" or not sizes, "sliding_window is not a feature of the llama family; use mistral")
    if config.variant == "ladder":
        known = sorted(set(config.ladder_layers) & set(range(config.n_layers)))
        require(
            bool(known) and list(config.ladder_layers) == known,
            f"ladder_layers must name layers from 0 to {config.n_layers - 1}, each once and in order, "
            f"not {list(config.ladder_layers)}",
        )
    if config.variant == "desync":
        require(
            len(config.desync_pattern) == config.n_layers,
            f"desync_pattern has {len(config.desync_pattern)} entries for {config.n_layers} layers; give one a layer",
        )
        require(
            config.desync_pattern[-1].mlp,
            "the last module of a desync model must reduce; set mlp of the last layer to true",
        )
    return config


# --- presets -----------------------------------------------------------------------------------------------------------

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


def with_variant(config: ModelConfig, name: str) -> ModelConfig:
    """`config` with another residual variant, for benchmarks: the weights were not trained for it.

    `name`: standard, parallel, ladder, upper-bound, `hybrid` (ladder in the upper half), `hybrid:K` (in the last K layers),
    `desync-2x` or `desync-4x`, optionally with `:S` for the number of streams (without it, the config's own; see
    `model_config` for presets).
    """
    kind, colon, number = name.partition(":")
    if colon and not (number.isdecimal() and int(number) >= 1 and kind in ("hybrid", "desync-2x", "desync-4x")):
        raise UserError(f"unknown variant {name!r}; a number goes only behind hybrid, desync-2x and desync-4x: hybrid:16")
    plain = replace(config, variant="standard", ladder_layers=(), desync_streams=1, desync_pattern=())
    layers = config.n_layers
    if kind in ("standard", "parallel", "upper-bound"):
        return replace(plain, variant=kind)
    if kind == "ladder":
        return replace(plain, variant="ladder", ladder_layers=tuple(range(layers)))
    if kind == "hybrid":
        count = int(number) if number else layers - layers // 2
        if count > layers:
            raise UserError(f"variant {name!r}: the model has only {layers} layers")
        return replace(plain, variant="ladder", ladder_layers=tuple(range(layers - count, layers)))
    if kind in ("desync-2x", "desync-4x"):
        pattern = desync_pattern(layers, int(kind[len("desync-")]))
        streams = int(number) if number else config.desync_streams
        return replace(plain, variant="desync", desync_streams=streams, desync_pattern=pattern)
    raise UserError(f"unknown variant {name!r}; known: {VARIANT_NAMES}")


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


def named_config(name: str) -> ModelConfig:
    """The config of a preset, a checkpoint (a folder, or a weights file in it), or a `config.json`. Raises UserError."""
    if is_preset(name):
        return preset(name)
    path = Path(name)
    if path.suffix == ".json":
        file = path
    else:
        file = (path.parent if path.is_file() else path) / "config.json"
    if not path.exists():
        raise UserError(f"{file} is missing; {instead(name)}")
    return read_config(file)


# --- Hugging Face config.json ------------------------------------------------------------------------------------------


def read_config(path: Path) -> ModelConfig:
    """Read `config.json` of an HF-layout checkpoint directory.

    Raises UserError if the file is missing or not JSON, if a key is missing, or for a feature that Rung does not support.
    """
    try:
        raw = read_json(path, CONFIG_BYTES)
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing; --model takes a preset's name, or a checkpoint with config.json beside its weights"
        ) from None
    try:
        return config_from_hf(raw)
    except UserError as e:
        raise UserError(f"{path}: {e}") from None


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """Translate a `config.json` that transformers (4 or 5) or Rung wrote, or that of a published hybrid ladder.

    Raises UserError if a key is missing or has the wrong type, or for a feature that Rung does not support.
    """
    model_type = _model_type(raw)
    family = {"llamaLadder": "llama", "rung": get(raw, "base_model_type", str, "llama")}.get(model_type, model_type)
    if family not in FAMILIES:
        raise UserError(f"model_type {shown(family)} is not supported; supported: {', '.join(FAMILIES)}, llamaLadder, rung")
    rope, parameters = rope_of(raw), get(raw, "rope_parameters", dict, {})
    _refuse_unsupported(raw, rope, parameters)
    n_layers, hidden, heads = (
        count(raw, key, most=MOST[key]) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    head_dim = count(raw, "head_dim", 128 if family == "qwen3" else hidden // heads, MOST["head_dim"])
    theta = 10000.0
    for holder in (parameters, raw, rope):  # the last one that has the key takes precedence
        theta = positive(holder, "rope_theta", theta)
    scaling, length = read_scaling(raw, theta, head_dim)
    eos = one_or_list(raw, "eos_token_id")
    config = ModelConfig(
        vocab_size=count(raw, "vocab_size", most=MOST["vocab_size"]),
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=heads,
        n_kv_heads=count(raw, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=count(raw, "intermediate_size", most=MOST["intermediate_size"]),
        max_seq_len=length,
        family=family,
        norm_eps=get(raw, "rms_norm_eps", float, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=get(raw, "tie_word_embeddings", bool, False),
        **_biases(raw, family),
        qk_norm=family == "qwen3",
        windows=_windows(raw, family, n_layers),
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
        bos_token_id=get(raw, "bos_token_id", int, None),
        **_variant(raw, n_layers),
    )
    return validate(config)


def _model_type(raw: dict[str, Any]) -> str:
    """The file's `model_type`. The oldest files have none; they are Llamas, unless `architectures` names another model."""
    architectures = get(raw, "architectures", list, [])
    unnamed = raw.get("model_type") is None
    if unnamed and any(name != ARCHITECTURES["llama"] for name in architectures):
        raise UserError(
            f"model_type is missing, and architectures names {shown(architectures[0])}; add the model_type of that model"
        )
    return get(raw, "model_type", str, "llama")


def limit_context(config: ModelConfig, length: int | None) -> ModelConfig:
    """`config` with a context of at most `length` tokens; None keeps the checkpoint's context."""
    return config if length is None else replace(config, max_seq_len=min(length, config.max_seq_len))


def _refuse_unsupported(*holders: dict[str, Any]) -> None:
    supported: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish", None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1.0, None),
    }
    for key, values in supported.items():
        for holder in holders:
            if holder.get(key) not in values:
                raise UserError(
                    f"{key} = {shown(holder[key])} is not supported; convert the checkpoint to a plain bf16 one of its family"
                )


def _biases(raw: dict[str, Any], family: str) -> dict[str, Any]:
    """Which layers have a bias. Llama and Qwen3 have it in q, k, v and o_proj if `attention_bias` is true. Qwen2 always has
    it in q, k and v, and never in o_proj."""
    attention, mlp = get(raw, "attention_bias", bool, False), get(raw, "mlp_bias", bool, False)
    for key, value, families in (("attention_bias", attention, ("llama", "qwen2", "qwen3")), ("mlp_bias", mlp, ("llama",))):
        if value and family not in families:
            raise UserError(f"{key} is true, but a {family} model has no such bias; set it to false if the weights have none")
    return dict(qkv_bias=attention or family == "qwen2", o_bias=attention and family != "qwen2", mlp_bias=mlp)


def _windows(raw: dict[str, Any], family: str, n_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window. A missing key has the default of transformers."""
    if family == "llama" or (family != "mistral" and not get(raw, "use_sliding_window", bool, False)):
        return ()
    if raw.get("sliding_window", 4096) is None:
        return ()
    window = count(raw, "sliding_window", 4096)
    kinds = get(raw, "layer_types", list, None)
    if kinds is None:  # Qwen: the layers from max_window_layers on; Mistral: all of them
        first = 0 if family == "mistral" else get(raw, "max_window_layers", int, 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(n_layers)]
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise UserError(f"layer_types names {shown(kind)}, which is not supported; supported: full_, sliding_attention")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if set(windows) != {None} or len(windows) != n_layers else ()


def _variant(raw: dict[str, Any], n_layers: int) -> dict[str, Any]:
    variant = get(raw, "residual_variant", str, "ladder" if "ladder_layers" in raw else "standard")
    if variant == "ladder":
        layers: Any = one_or_list(raw, "ladder_layers") if "ladder_layers" in raw else n_layers
        if isinstance(layers, int):
            if not 0 <= layers <= n_layers:
                raise UserError(f"ladder_layers = {layers} but the model has {n_layers} layers")
            layers = range(n_layers - layers, n_layers)
        # no ladder layers, written as 0, an empty list or null: an ordinary Llama
        return dict(variant="ladder", ladder_layers=tuple(sorted(layers))) if layers else {}
    if variant == "desync":
        pattern = []
        for layer in get(raw, "desync_pattern", list):
            if not isinstance(layer, dict):
                raise UserError(f"desync_pattern must hold one object a layer, not {shown(layer)}")
            pattern.append(Reduces(get(layer, "attention", bool), get(layer, "mlp", bool)))
        streams = count(raw, "desync_streams")
        return dict(variant="desync", desync_streams=streams, desync_pattern=tuple(pattern))
    return dict(variant=variant)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The contents of `config.json`. `config_from_hf` reads them back to an equal config; transformers reads them if the
    variant is standard."""
    plain = config.variant == "standard"
    published = config.variant == "ladder" and config.family == "llama"
    model_type = config.family if plain else "llamaLadder" if published else "rung"
    scaling, rope = config.rope_scaling, scaling_to_hf(config.rope_scaling)
    trained = scaling.trained if isinstance(scaling, LinearScaling | DynamicScaling) else config.max_seq_len
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": trained,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        # both forms: transformers 5 reads the first key, older readers the other two
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if scaling else None,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0] if len(config.eos_token_ids) == 1 else list(config.eos_token_ids) or None,
        "torch_dtype": "bfloat16",
    }
    if config.family in ("llama", "qwen3"):
        raw["attention_bias"] = config.o_bias
    if config.family == "llama":
        raw["mlp_bias"] = config.mlp_bias
    if any(config.windows):
        raw["sliding_window"] = next(w for w in config.windows if w)
        raw["use_sliding_window"] = True
        if config.family != "mistral" or not all(config.windows):  # transformers reads a Mistral with this key as another model
            raw["layer_types"] = ["sliding_attention" if w else "full_attention" for w in config.windows]
    elif config.family == "mistral":
        raw["sliding_window"] = None  # a missing key would mean Mistral's default of 4096
    if not plain:
        raw |= {"base_model_type": config.family, "residual_variant": config.variant}
    if config.variant == "ladder":
        raw["ladder_layers"] = list(config.ladder_layers)
    if config.variant == "desync":
        raw["desync_streams"] = config.desync_streams
        raw["desync_pattern"] = [asdict(p) for p in config.desync_pattern]
    return raw
