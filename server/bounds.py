"""How many values a request's body may have and how deep they may lie, and the checked fields that it becomes.

A byte of JSON can become a hundred in memory, and thousands in a list of all that is wrong with it.
"""

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from server.problems import ApiError, from_errors, unparsable

B = TypeVar("B", bound=BaseModel)

MAX_DEPTH = 100  # as deep as tool schemas get, several times over
MAX_CONTAINERS = 16384  # lists and objects
MAX_VALUES = 1 << 18  # of all kinds; more if the context holds more token ids


@dataclass(frozen=True)
class Bounds:
    """`values` counts list items and object members, `containers` those that are lists and objects."""

    values: int = MAX_VALUES
    containers: int = MAX_CONTAINERS
    depth: int = MAX_DEPTH


def parse(raw: bytes, model: type[B], bounds: Bounds) -> B:
    """The fields of a JSON body. Raises a 400 that says what is wrong: no JSON, too many values, or the first wrong field."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise unparsable(e) from None
    if not surely_within(raw, bounds):
        check(value, bounds)
    try:
        return model.model_validate(value)
    except ValidationError as e:
        raise from_errors([{**one, "loc": ("body", *one["loc"])} for one in e.errors(include_url=False)], value) from None


def surely_within(raw: bytes, bounds: Bounds) -> bool:
    """Whether a body cannot go beyond `bounds`, by its brackets and commas alone: what most requests can be told by, at no cost."""
    containers = raw.count(b"[") + raw.count(b"{")
    return containers <= min(bounds.depth, bounds.containers) and containers + raw.count(b",") <= bounds.values


def check(value: Any, bounds: Bounds) -> None:
    """Raises a 400 for a value beyond `bounds`."""
    level, depth, values, containers = [value], 0, 0, 0
    while level := [one for one in level if isinstance(one, (dict, list))]:
        depth += 1
        containers += len(level)
        values += sum(map(len, level))
        if depth > bounds.depth or containers > bounds.containers or values > bounds.values:
            most = f"{bounds.values} values, {bounds.containers} lists and objects, {bounds.depth} levels"
            raise ApiError(400, f"the body has too many values or is nested too deeply; at most: {most}", None, "too_complex")
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
