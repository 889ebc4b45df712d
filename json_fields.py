"""Checked access to the values of an untrusted JSON object. A wrong value raises UserError with a message of one line."""

import math
from typing import Any

from errors import UserError

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", list: "a list", dict: "an object"}
REQUIRED: Any = object()
SHOWN = 80  # most characters of a wrong value in a message


def shown(value: object) -> str:
    """A wrong value as text for a message, truncated if it is long."""
    try:
        text = repr(value[: SHOWN + 1] if isinstance(value, str) else value)
    except ValueError:  # an integer with more digits than Python converts to text
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def get(raw: dict[str, Any], key: str, kind: type, default: Any = REQUIRED) -> Any:
    """`raw[key]`, or `default` if it is absent. null counts as absent, as in transformers.

    Raises UserError if the value is not of JSON type `kind`, is a number that is not finite, or is absent and required.
    """
    value: Any = raw.get(key)
    if value is None and default is not REQUIRED:
        return default
    if value is None:
        raise UserError(f"key {key!r} is missing")
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 1 << 63 else math.inf
    finite = not isinstance(value, float) or math.isfinite(value)
    if type(value) is not kind or not finite:  # not isinstance: in Python, True is an int
        raise UserError(f"{key} must be {KINDS[kind]}, not {shown(raw[key])}")
    return value


def count(raw: dict[str, Any], key: str, default: Any = REQUIRED, most: int = 1 << 31) -> int:
    """`raw[key]`, a whole number from 1 to `most`. Raises UserError otherwise."""
    value = get(raw, key, int, default)
    if not 1 <= value <= most:
        raise UserError(f"{key} must be {'at least 1' if value < 1 else f'at most {most:,}'}, not {shown(value)}")
    return value


def positive(raw: dict[str, Any], key: str, default: Any = REQUIRED, least: float = 0.0) -> float:
    """`raw[key]`, a number above 0 and at least `least`. Raises UserError otherwise."""
    value = get(raw, key, float, default)
    if value is not None and not (value > 0 and value >= least):
        raise UserError(f"{key} must be {f'at least {least:g}' if least else 'a positive number'}, not {value!r}")
    return value


def one_or_list(raw: dict[str, Any], key: str) -> int | list[int]:
    """`raw[key]`, a whole number or a list of whole numbers; if absent, an empty list. Raises UserError otherwise."""
    value = raw.get(key)
    if value is None:
        return []
    if type(value) is not int and not (type(value) is list and all(type(v) is int for v in value)):
        raise UserError(f"{key} must be a whole number or a list of them, not {shown(value)}")
    return value
