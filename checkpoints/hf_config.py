"""Reading and writing a model's description as the `config.json` of a Hugging Face checkpoint.

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
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoints.rope_scaling import read_local_theta, read_scaling, rope_of, scaling_to_hf
from config import (
    FAMILIES,
    MULTIPLIERS,
    TEXTS,
    DynamicScaling,
    Experts,
    LinearScaling,
    LongRopeScaling,
    ModelConfig,
    Reduces,
    validate,
)
from errors import UserError
from files import CONFIG_BYTES, count, get, one_or_list, positive, read_json, shown
from quantized.hf import INSTEAD, METHODS, read_quantization
from quantized.scheme import Quantization

QUANTIZED = {  # files beside config.json that say how a checkpoint is quantized, and the method of those that do not name it
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",  # of AutoGPTQ
    "quant_config.json": "awq",  # of AutoAWQ
}

# Far above any published model. A larger value means a broken file, and checking such a model would take long.
MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "head_dim": 1 << 14,
}

# the keys beside a text_config that count
WHOLE = ("quantization_config", "tie_word_embeddings", "eos_token_id", "bos_token_id")
COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts")  # transformers 5 writes either for the same family
_KEYS = tomllib.loads(Path(__file__).with_name("config_keys.toml").read_text())
NEUTRAL: dict[str, list[Any]] = _KEYS["neutral"]  # keys that are refused, but for the values that change nothing
MISSING: dict[str, dict[str, Any]] = _KEYS["missing"]  # what files of a model_type leave out
HARMLESS: set[str] = {key for keys in _KEYS["harmless"].values() for key in keys}

ARCHITECTURES = {name: f"{family.name}ForCausalLM" for name, family in FAMILIES.items()} | {
    "llamaLadder": "LlamaLadderForCausalLM",
    "rung": "RungForCausalLM",
}


class Recorded(dict[str, Any]):
    """A JSON object that knows which of its keys were read."""

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__(raw)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


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
        others = [path.with_name(name) for name in QUANTIZED if path.with_name(name).exists()]
        if raw.get("quantization_config") is None and others:
            raw["quantization_config"] = {"quant_method": QUANTIZED[others[0].name]} | read_json(others[0], CONFIG_BYTES)
        return config_from_hf(raw)
    except UserError as e:
        raise UserError(f"{path}: {e}") from None


def unread_keys(path: Path) -> list[str]:
    """What to tell the user of a valid `config.json`: what it says without effect."""
    raw = Recorded(text_of(read_json(path, CONFIG_BYTES)))
    config = config_from_hf(raw)
    unread = sorted(
        key for key, value in raw.items() if value is not None and key not in raw.read | HARMLESS | {"architectures"}
    )
    remarks = [f"{path}: keys without effect here: {shown(', '.join(unread))}"] if unread else []
    kind, names = _model_type(raw), get(raw, "architectures", list, [])
    if other := [
        name for name in names if not re.match(rf"({kind}|{FAMILIES[config.family].name})(For|Model|Ladder)", str(name), re.I)
    ]:
        remarks.append(f"{path}: architectures names {shown(other[0])}, but model_type {kind} counts")
    return remarks


def text_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model that a multimodal one has, with what is said of the whole; another model's as it is. Both with
    what is missing."""
    kinds = TEXTS.get(kind := get(raw, "model_type", str, "llama"))
    if kinds is None:
        missing = MISSING.get(kind, {})
        return raw if missing.keys() <= raw.keys() else missing | raw
    text = {"model_type": kinds[0]} | get(raw, "text_config", dict)
    if text["model_type"] not in kinds:
        raise UserError(
            f"text_config has model_type {shown(text['model_type'])}, which is not supported; supported: {', '.join(kinds)}"
        )
    return MISSING.get(text["model_type"], {}) | text | {key: raw[key] for key in WHOLE if raw.get(key) is not None}


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """Translate a `config.json` that transformers (4 or 5) or Rung wrote, or that of a published hybrid ladder.

    Raises UserError if a key is missing or has the wrong type, or for a feature that Rung does not support.
    """
    raw = text_of(raw)
    model_type = _model_type(raw)
    family = {"llamaLadder": "llama", "rung": get(raw, "base_model_type", str, "llama")}.get(model_type, model_type)
    if family not in FAMILIES:
        raise UserError(
            f"model_type {shown(family)} is not supported; supported: {', '.join([*FAMILIES, *TEXTS])}, llamaLadder, rung"
        )
    local = FAMILIES[family].local_theta
    rope, parameters, windowed = rope_of(raw, local is not None)
    experts = _experts(raw, family)
    multipliers: dict[str, Any] = {key: positive(raw, key, 1.0) for key in MULTIPLIERS if FAMILIES[family].multipliers}
    fused = FAMILIES[family].fused
    known = (*FAMILIES[family].keys, *(COUNTS_OF_EXPERTS if experts else ()))
    _refuse_unsupported(raw, rope, parameters, windowed, family=family, known=known)
    partial = positive(rope, "partial_rotary_factor", positive(raw, "partial_rotary_factor", 1.0)) if fused else 1.0
    if partial > 1:
        raise UserError(f"partial_rotary_factor must be at most 1, not {partial!r}")
    n_layers, hidden, heads = (
        count(raw, key, most=MOST[key]) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    head_dim = count(raw, "head_dim", FAMILIES[family].head_dim or hidden // heads, MOST["head_dim"])
    theta = FAMILIES[family].theta
    for holder in (parameters, raw, rope):  # the last one that has the key takes precedence
        theta = positive(holder, "rope_theta", theta)
    if FAMILIES[family].scaled and not rope:
        raise UserError(f"rope_scaling is missing; a {family} model's config.json says how RoPE is scaled")
    scaling, length = read_scaling(raw, rope, theta, int(head_dim * partial))
    if fused and scaling is not None:  # transformers reads yarn as longrope, and takes 4096 for a missing original length
        if not isinstance(scaling, LongRopeScaling):
            raise UserError(f"a {family} model's RoPE can be scaled by longrope only; correct rope_scaling")
        count(raw, "original_max_position_embeddings")
    if fused and raw.get("quantization_config") is not None:
        raise UserError(f"a quantized {family} checkpoint is not supported; use the one in 16 bits with --quantize")
    length = scaling.trained if FAMILIES[family].extended and isinstance(scaling, LinearScaling) else length
    if default := FAMILIES[family].query_scalar:
        multipliers["attention_multiplier"] = positive(raw, "query_pre_attn_scalar", default) ** -0.5
    if FAMILIES[family].scaled_embeddings:
        multipliers["embedding_multiplier"] = math.sqrt(hidden)
    bare = _without_rope(raw, family, n_layers)
    windows = _windows(raw, family, n_layers, bare)
    eos = one_or_list(raw, "eos_token_id")
    config = ModelConfig(
        vocab_size=count(raw, "vocab_size", most=MOST["vocab_size"]),
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=heads,
        n_kv_heads=count(raw, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=count(raw, FAMILIES[family].expert_size or "intermediate_size", most=MOST["intermediate_size"]),
        max_seq_len=length,
        family=family,
        norm_eps=get(raw, "rms_norm_eps", float, FAMILIES[family].eps),
        rope_theta=theta,
        rope_scaling=scaling,
        partial_rotary_factor=partial,
        tie_embeddings=get(raw, "tie_word_embeddings", bool, FAMILIES[family].tied),
        **_biases(raw, family),
        qk_norm=FAMILIES[family].qk_norm,
        windows=windows,
        local_theta=None if local is None or not any(windows) else read_local_theta(raw, windowed, local or theta),
        no_rope_layers=bare,
        query_growth=get(rope, "llama_4_scaling_beta", float) if FAMILIES[family].growing else None,
        experts=experts,
        causal=get(raw, "is_causal", bool, True),
        **multipliers,
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
        bos_token_id=get(raw, "bos_token_id", int, None),
        quantization=_quantization(raw),
        **_variant(raw, n_layers),
    )
    return validate(config)


def _experts(raw: dict[str, Any], family: str) -> Experts | None:
    """The experts of a sparse family's layers. Raises UserError where some layers have none."""
    known = FAMILIES[family]
    if not known.expert_size:
        return None
    counts = {key: count(raw, key) for key in COUNTS_OF_EXPERTS if raw.get(key) is not None}
    if len(set(counts.values())) != 1:
        raise UserError(f"a {family} model needs one number of experts, num_experts or num_local_experts, not {shown(counts)}")
    if get(raw, "mlp_only_layers", list, []) or get(raw, "decoder_sparse_step", int, 1) != 1:
        raise UserError("mlp_only_layers and decoder_sparse_step: a sparse model with some dense layers is not supported")
    normalized = get(raw, "norm_topk_prob", bool, False) if known.normalized is None else known.normalized
    chosen = count(raw, "num_experts_per_tok")
    if raw.get("experts_per_token", chosen) != chosen:
        raise UserError(
            f"experts_per_token = {shown(raw['experts_per_token'])}, but num_experts_per_tok = {chosen}; correct one"
        )
    limit = known.limit and get(raw, "swiglu_limit", float, known.limit)
    return Experts(counts.popitem()[1], chosen, normalized, limit)


def _quantization(raw: dict[str, Any]) -> Quantization | None:
    found = get(raw, "quantization_config", dict, None)
    if isinstance(raw.get("quantization"), dict) and "quant_method" not in (found or {}):
        raise UserError(f"quantization without quant_method is MLX's format; {INSTEAD}: {', '.join(METHODS)}")
    if found is None:
        return None
    try:
        quantization = read_quantization(found)
    except UserError as e:
        raise UserError(f"quantization_config: {e}") from None
    return quantization if quantization.rules else None


def _model_type(raw: dict[str, Any]) -> str:
    """The file's `model_type`. The oldest files have none; they are Llamas, unless `architectures` names another model."""
    architectures = get(raw, "architectures", list, [])
    unnamed = raw.get("model_type") is None
    if unnamed and any(name != ARCHITECTURES["llama"] for name in architectures):
        raise UserError(
            f"model_type is missing, and architectures names {shown(architectures[0])}; add the model_type of that model"
        )
    return get(raw, "model_type", str, "llama")


def _refuse_unsupported(*holders: dict[str, Any], family: str, known: Sequence[str]) -> None:
    activations = [FAMILIES[family].activation, *(["swish"] if FAMILIES[family].activation == "silu" else [])]
    supported = NEUTRAL | dict.fromkeys(("hidden_act", "hidden_activation"), activations) | {"partial_rotary_factor": [1]}
    for key, values in supported.items():
        for holder in holders if key not in known else ():
            if holder.get(key) not in (None, *values):
                raise UserError(
                    f"{key} = {shown(holder[key])} is not supported, and changes what a model computes; use a checkpoint without it"
                )


def _biases(raw: dict[str, Any], family: str) -> dict[str, Any]:
    """Which layers have a bias: q, k, v and o_proj if `attention_bias` is true, unless the family has it always in the first three."""
    known = FAMILIES[family]
    attention, mlp = get(raw, "attention_bias", bool, known.biased), get(raw, "mlp_bias", bool, False)
    for key, value, allowed in (("attention_bias", attention, known.attention_bias), ("mlp_bias", mlp, known.mlp_bias)):
        if value and not allowed:
            raise UserError(f"{key} is true, but a {family} model has no such bias; set it to false if the weights have none")
    o_bias = get(raw, "attention_out_bias", bool, False) if known.out_bias else attention and not known.qkv_bias
    return dict(qkv_bias=attention or known.qkv_bias, o_bias=o_bias, mlp_bias=mlp or known.sparse_bias)


def _without_rope(raw: dict[str, Any], family: str, n_layers: int) -> tuple[int, ...]:
    """The layers without RoPE: those with a 0 in `no_rope_layers`, or the last of each `no_rope_layer_interval` layers."""
    if not FAMILIES[family].bare:
        return ()
    interval = count(raw, "no_rope_layer_interval", FAMILIES[family].bare)
    rotated = get(raw, "no_rope_layers", list, [int((i + 1) % interval > 0) for i in range(n_layers)])
    if len(rotated) < n_layers or any(type(one) is not int or one not in (0, 1) for one in rotated):
        raise UserError(f"no_rope_layers must have a 0 or a 1 for each of {n_layers} layers, not {shown(rotated)}")
    return tuple(i for i in range(n_layers) if not rotated[i])


def _windows(raw: dict[str, Any], family: str, n_layers: int, bare: tuple[int, ...]) -> tuple[int | None, ...]:
    """Each layer's sliding window. A missing key has the default of transformers."""
    windows = FAMILIES[family].windows
    used, kinds = get(raw, "use_sliding_window", bool, windows == "none"), get(raw, "layer_types", list, None)
    if windows == "none" and used and (raw.get("sliding_window") or any(kind != "full_attention" for kind in kinds or ())):
        raise UserError(f"sliding_window is not a feature of the {family} family; set it to null, or model_type to mistral")
    if windows == "none" or (windows in ("where used", "without RoPE") and not used):
        return ()
    if raw.get("sliding_window", default := FAMILIES[family].window) is None:
        if FAMILIES[family].local_theta is not None and (not kinds or any(kind != "full_attention" for kind in kinds)):
            raise UserError(
                "sliding_window is null, but layers have a window; give its tokens, or full_attention in layer_types"
            )
        return ()
    window = count(raw, "sliding_window", default)
    if kinds is None and windows == "without RoPE":
        kinds = ["sliding_attention" if i in bare else "full_attention" for i in range(n_layers)]
    elif kinds is None:  # all layers, all but each n-th, or those from max_window_layers on
        windows = count(raw, "sliding_window_pattern", windows) if isinstance(windows, int) else windows
        first = get(raw, "max_window_layers", int, 28) if windows == "where used" else 0
        full = [i < first or (isinstance(windows, int) and (i + 1) % windows == 0) for i in range(n_layers)]
        kinds = ["full_attention" if one else "sliding_attention" for one in full]
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise UserError(f"layer_types names {shown(kind)}, which is not supported; supported: full_, sliding_attention")
    found = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return found if set(found) != {None} or len(found) != n_layers else ()


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
    plain, family = config.variant == "standard", FAMILIES[config.family]
    published = config.variant == "ladder" and config.family == "llama"
    model_type = config.family if plain else "llamaLadder" if published else "rung"
    scaling, rope = config.rope_scaling, scaling_to_hf(config.rope_scaling)
    rope |= {} if config.query_growth is None else {"llama_4_scaling_beta": config.query_growth}
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
        "hidden_act" if family.activation == "silu" else "hidden_activation": family.activation,
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
    if config.family != "llama":
        raw["pad_token_id"] = None  # a missing key may mean a token outside the vocabulary
    if not config.causal:
        raw["is_causal"] = False
    if family.query_scalar:
        raw["query_pre_attn_scalar"] = round((config.attention_multiplier or 1.0) ** -2)
    if family.bare:
        raw["no_rope_layers"] = [int(i not in config.no_rope_layers) for i in range(config.n_layers)]
    if family.local_theta is not None:
        theta = config.local_theta or config.rope_theta
        windowed = {"rope_type": "default", "rope_theta": theta}
        raw["rope_parameters"] = {"full_attention": raw["rope_parameters"], "sliding_attention": windowed}
        raw["rope_local_base_freq"] = theta
    if family.attention_bias and not family.qkv_bias:
        raw["attention_bias"] = config.qkv_bias
    if family.out_bias:
        raw["attention_out_bias"] = config.o_bias
    if family.mlp_bias:
        raw["mlp_bias"] = config.mlp_bias
    if family.fused:
        raw["partial_rotary_factor"] = raw["rope_parameters"]["partial_rotary_factor"] = config.partial_rotary_factor
        raw |= {key: value for key, value in rope.items() if key == "original_max_position_embeddings"}
    if family.multipliers:
        raw |= {key: getattr(config, key) for key in MULTIPLIERS}
    if config.experts:
        raw |= {"num_local_experts": config.experts.count, "num_experts_per_tok": config.experts.chosen}
        raw[family.expert_size] = config.intermediate_size
        if family.normalized is None:
            raw |= {"num_experts": config.experts.count, "norm_topk_prob": config.experts.normalized}
        if config.experts.limit:
            raw["swiglu_limit"] = config.experts.limit
    if any(config.windows):
        raw["sliding_window"] = next(w for w in config.windows if w)
        raw["use_sliding_window"] = True
        if family.windows != "all" or not all(config.windows):  # transformers reads a Mistral with this key as another model
            raw["layer_types"] = ["sliding_attention" if w else "full_attention" for w in config.windows]
    elif family.windows == "all" or isinstance(family.windows, int):
        raw["sliding_window"] = None  # a missing key would mean Mistral's default of 4096
        if family.windows != "all":
            raw["layer_types"] = ["full_attention"] * config.n_layers
    if not plain:
        raw |= {"base_model_type": config.family, "residual_variant": config.variant}
    if config.variant == "ladder":
        raw["ladder_layers"] = list(config.ladder_layers)
    if config.variant == "desync":
        raw["desync_streams"] = config.desync_streams
        raw["desync_pattern"] = [asdict(p) for p in config.desync_pattern]
    return raw
