"""Values of tool calls' arguments that models write in other forms than JSON."""

import json
import re
from collections.abc import Iterator
from typing import Any

WORD = re.compile(r"[^\s,:=()\[\]{}<\"']*")  # a name without quotes
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
MAX_DEPTH = 8  # of references and alternatives in a schema
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def quoted(text: str) -> str:
    """The text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def regex(text: str) -> str:
    """A regular expression that matches the text alone."""
    return "".join(f"\\x{{{ord(c):x}}}" for c in text)


def json_word(word: str) -> str:
    """JSON of a value without quotes: a number, true, false or null, in Python's spelling too. Anything else is a string."""
    if word in NAMES:
        return NAMES[word]
    return word if NUMBER.fullmatch(word) else quoted(word)


def parsed(text: str, types: set[str]) -> str:
    """JSON of a value that may have these types; empty: any type. What is no JSON of such a type is a string."""
    word = NAMES.get(text.strip(), text.strip())
    try:
        value = json.loads(word, parse_constant=float.fromhex)  # which fails for NaN
    except (ValueError, RecursionError):
        return quoted(text)
    found = TYPES[type(value)]
    if isinstance(value, str):
        return quoted(text) if "string" in types or not types else word
    fits = found in types or "string" not in types or (found == "integer" and "number" in types)
    return word if fits else quoted(text)


def resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """The schema, or the one within `root` to which it refers. Empty if there is none."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(schema.get("$ref"), str):
            return schema
        schema = target(schema["$ref"], root)
    return {}


def target(pointer: str, root: dict[str, Any]) -> Any:
    """What a reference within `root` names; None: nothing."""
    found: Any = root
    for key in pointer.removeprefix("#").split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def types_of(root: dict[str, Any], name: str) -> set[str]:
    """The types that the schema `root` allows for the property `name`; empty: any."""
    properties = resolved(root, root).get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return set(_types(schema, root, MAX_DEPTH))


def _types(schema: Any, root: dict[str, Any], depth: int) -> Iterator[str]:
    schema = resolved(schema, root)
    given = schema.get("type", [])
    yield from [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)]
    if "type" not in schema:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        yield from [TYPES.get(type(value), "string") for value in (values if isinstance(values, list) else [])]
        for key in ("anyOf", "oneOf", "allOf") if depth else ():
            for one in schema[key] if isinstance(schema.get(key), list) else []:
                yield from _types(one, root, depth - 1)
