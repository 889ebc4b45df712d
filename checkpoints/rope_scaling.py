"""How a checkpoint extends RoPE beyond its first training context: reading and writing `rope_scaling` of `config.json`.

The types are those of transformers: `linear` (Chen et al., arXiv:2306.15595), `dynamic` (NTK-aware scaling by length), `yarn` (Peng
et al., arXiv:2309.00071), `longrope` (Ding et al., arXiv:2402.13753) and `llama3`. `layers/rope.py` computes with them.

`dynamic` and `longrope` depend on a length. Here it is the length of the process's context, not that of a sequence. So the
tokens of a sequence depend neither on the other sequences of a batch nor on how its prompt was cut into chunks, and cached
keys never have to be rotated again. docs/checkpoints.md gives the consequences.
"""

import math
from dataclasses import asdict
from typing import Any

from config import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling
from errors import UserError
from files import count, get, positive, shown

MAX_LENGTH = 1 << 27  # of a context, in tokens
TYPES: dict[str, Any] = {
    "llama3": Llama3Scaling,
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}


def rope_of(raw: dict[str, Any], local: bool) -> tuple[dict[str, Any], ...]:
    """RoPE's settings in a `config.json`: those that count, those in `rope_parameters`, and those of layers with a window.

    Before transformers 5 they are `rope_scaling` and a top-level `rope_theta`; transformers 5 has both in `rope_parameters`, with
    an object for each type of layer if those with a window may differ (`local`).
    A file with both uses `rope_scaling`, as in transformers: people add it to files by hand.
    """
    given = get(raw, "rope_parameters", dict, {})
    parameters = get(given, "full_attention", dict, given) if local else given
    windowed = get(given, "sliding_attention", dict, {}) if local else {}
    return get(raw, "rope_scaling", dict, {}) or parameters, parameters, windowed


def read_scaling(raw: dict[str, Any], rope: dict[str, Any], theta: float, head_dim: int) -> tuple[RopeScaling | None, int]:
    """The scaling in a `config.json`, and the context in tokens that it is meant for.

    That context is `max_position_embeddings`; `linear` and `dynamic` multiply it by their factor, and `yarn` multiplies the
    original context. Raises UserError.
    """
    length = count(raw, "max_position_embeddings", 2048, MAX_LENGTH)
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise UserError(f"RoPE settings of their own for {shown(nested[0])} are not supported; give one set for all layers")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None, length
    if not isinstance(kind, str) or kind not in TYPES:
        raise UserError(f"RoPE scaling rope_type = {shown(kind)} is not supported; supported: default, {', '.join(TYPES)}")
    scaling: RopeScaling
    match kind:
        case "llama3":
            low, high = (positive(rope, f"{name}_freq_factor") for name in ("low", "high"))
            original = count(rope, "original_max_position_embeddings", most=MAX_LENGTH)
            scaling = Llama3Scaling(positive(rope, "factor"), low, high, original)
        case "yarn":
            scaling = _yarn(rope, _original(raw, rope, length), length, theta)
            length = round(scaling.original_max_position_embeddings * scaling.factor)
        case "longrope":
            scaling = _longrope(rope, _original(raw, rope, length), length, head_dim // 2)
        case _:
            if kind == "dynamic" and head_dim < 4:
                raise UserError(f"dynamic RoPE scaling needs a head_dim of at least 4, not {head_dim}")
            factor = positive(rope, "factor", least=1)
            scaling = TYPES[kind](factor, length)
            length = round(length * factor)
    if length > MAX_LENGTH:
        raise UserError(f"RoPE scaling's factor makes a context of {length:,} tokens; at most {MAX_LENGTH:,} are supported")
    return scaling, length


def _original(raw: dict[str, Any], rope: dict[str, Any], length: int) -> int:
    """The context before scaling, in tokens. A top-level key takes precedence, as in transformers."""
    inner = count(rope, "original_max_position_embeddings", length, MAX_LENGTH)
    return count(raw, "original_max_position_embeddings", inner, MAX_LENGTH)


def _yarn(rope: dict[str, Any], original: int, length: int, theta: float) -> YarnScaling:
    factor = positive(rope, "factor", max(1.0, length / original), least=1)
    fast, slow = positive(rope, "beta_fast", 32.0), positive(rope, "beta_slow", 1.0)
    if fast < slow or theta <= 1:
        raise UserError(f"yarn needs beta_fast ({fast:g}) above beta_slow ({slow:g}), and a rope_theta ({theta:g}) above 1")
    scales = [get(rope, key, float, None) for key in ("mscale", "mscale_all_dim")]
    attention = positive(rope, "attention_factor", None)
    if attention is None:
        above, below = (1 + 0.1 * scale * math.log(factor) for scale in (scales if all(scales) else (1.0, 0.0)))
        if above <= 0 or below <= 0:
            raise UserError(f"mscale and mscale_all_dim must be positive, not {scales[0]!r} and {scales[1]!r}")
        attention = above / below
    return YarnScaling(factor, original, attention, fast, slow, get(rope, "truncate", bool, True))


def _longrope(rope: dict[str, Any], original: int, length: int, frequencies: int) -> LongRopeScaling:
    short, long = (_factors(rope, key, frequencies) for key in ("short_factor", "long_factor"))
    factor = positive(rope, "factor", length / original)
    attention = positive(rope, "attention_factor", None)
    if attention is None and factor > 1 and original < 2:
        raise UserError(f"original_max_position_embeddings must be at least 2 for longrope, not {original}")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(short, long, original, attention)


def _factors(rope: dict[str, Any], key: str, size: int) -> tuple[float, ...]:
    values = get(rope, key, list)
    if len(values) != size:
        raise UserError(f"{key} must have one number for each of {size} frequencies, not {len(values)}")
    return tuple(positive({key: value}, key) for value in values)


def read_local_theta(raw: dict[str, Any], windowed: dict[str, Any], default: float) -> float:
    """RoPE's base in layers with a window. Raises UserError if their RoPE is scaled."""
    if (kind := windowed.get("rope_type", "default")) != "default":
        raise UserError(f"rope_type {shown(kind)} of sliding_attention is not supported; only full_attention can be scaled")
    return positive(windowed, "rope_theta", positive(raw, "rope_local_base_freq", default))


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any]:
    """The settings that `read_scaling` reads back. `max_position_embeddings` is written elsewhere in the file."""
    if scaling is None:
        return {"rope_type": "default"}
    kind = next(name for name, cls in TYPES.items() if isinstance(scaling, cls))
    values = {key: value for key, value in asdict(scaling).items() if key != "trained"}
    return {"rope_type": kind} | {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
