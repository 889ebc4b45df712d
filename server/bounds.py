"""Parse a request's JSON body, with limits on its number of values and its depth.

One byte of JSON can take a hundred bytes in memory, and thousands of bytes in the list of its validation errors.
"""

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from server.problems import ApiError, from_model, unparsable

B = TypeVar("B", bound=BaseModel)

MAX_DEPTH = 100  # several times the depth of tool schemas
MAX_CONTAINERS = 16384  # lists and objects
MAX_VALUES = 1 << 18  # of all kinds; raised for a model whose context holds more token ids


@dataclass(frozen=True)
class BodyBounds:
    """Limits of a body. `values`: list items and object members. `containers`: those that are lists and objects."""

    values: int = MAX_VALUES
    containers: int = MAX_CONTAINERS
    depth: int = MAX_DEPTH


def parse(raw: bytes, model: type[B], bounds: BodyBounds) -> B:
    """Parse a JSON body as `model`. Raises a 400: invalid JSON, too many values, or the first wrong field."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise unparsable(e) from None
    if not surely_within(raw, bounds):
        check_complexity(value, bounds)
    try:
        return model.model_validate(value)
    except ValidationError as e:
        raise from_model(e, value) from None


def surely_within(raw: bytes, bounds: BodyBounds) -> bool:
    """Whether the number of brackets and commas alone proves that a body is within `bounds`.

    This test costs almost nothing and is enough for most requests. Others need `check_complexity`.
    """
    containers = raw.count(b"[") + raw.count(b"{")
    return containers <= min(bounds.depth, bounds.containers) and containers + raw.count(b",") <= bounds.values


def check_complexity(value: Any, bounds: BodyBounds) -> None:
    """Raises a 400 for a value that exceeds `bounds`."""
    level, depth, values, containers = [value], 0, 0, 0
    while level := [one for one in level if isinstance(one, (dict, list))]:
        depth += 1
        containers += len(level)
        values += sum(map(len, level))
        if depth > bounds.depth or containers > bounds.containers or values > bounds.values:
            most = f"{bounds.values} values, {bounds.containers} lists and objects, {bounds.depth} levels"
            raise ApiError(400, f"the body has too many values or is nested too deeply; at most: {most}", None, "too_complex")
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
