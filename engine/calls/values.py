"""Values of tool calls' arguments that models write in other forms than JSON."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

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
        try:
            schema = target(schema["$ref"], root)
        except LookupError:
            return {}
    return {}


def target(reference: str, root: Any, known: Callable[[], Mapping[str, Any]] | None = None) -> Any:
    """The part of the schema `root` that a reference names: by a JSON pointer (RFC 6901, section 6) or by its `$anchor`.

    known: its `anchors`, if they are not to be looked for again. Raises LookupError if there is no such part.
    """
    own = root.get("$id") if isinstance(root, dict) else None
    if isinstance(own, str) and f"{reference}#".startswith(own.rstrip("#") + "#"):
        reference = reference[len(own.rstrip("#")) :] or "#"
    if not reference.startswith("#"):
        raise LookupError(reference)
    fragment = unquote(reference[1:])
    if fragment and not fragment.startswith("/"):
        return (known() if known else anchors(root))[fragment]
    here = root
    for step in fragment.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, list) and step.isdecimal():
            here = here[int(step)]
        elif isinstance(here, dict):
            here = here[step]
        else:
            raise LookupError(step)
    return here


def anchors(root: Any, count: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The parts of a schema that have a name, which a reference may give instead of a path. count: called for each part."""
    found, left = dict[str, Any](), [root]
    while left:
        here = left.pop()
        count()
        for key in ("$anchor", "$dynamicAnchor") if isinstance(here, dict) else ():
            if isinstance(here.get(key), str):
                found[here[key]] = here
        left += here.values() if isinstance(here, dict) else here if isinstance(here, list) else ()
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
