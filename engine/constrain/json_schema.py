"""Compile the JSON schemas of answers and of tools' arguments to grammars. Objects are closed by default. What cannot be enforced is
refused or reported.

llguidance compiles schemas, and refuses what it cannot enforce. A schema is rewritten before that, for what it does not do:

- A missing `additionalProperties` means false, as in OpenAI's strict mode and other grammar engines: a model that may invent
  property names does so up to its token limit. An object that lists no properties stays open. Several schemas can describe one
  object: members of an `allOf`, branches of an `anyOf`, and the target of a `$ref` that has sibling keywords. Each of them
  allows the names of the others, as `unevaluatedProperties: false` would.
- A keyword that it refuses is removed and reported with its place, unless the schema is strict.
- It rounds large numbers, gives `date` days that do not exist, and lets digits of times go on; and it does not notice if
  several `multipleOf` of one value are too large together.
- An object must not contain a name twice. A grammar can ensure this for listed properties, so patterns that spell out their
  names become listed properties. It cannot for other patterns: a strict schema with them is refused. Otherwise they are
  reported, and only their values are enforced.

This module imports little, because it runs in worker processes.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from math import lcm
from typing import Any, NamedTuple
from urllib.parse import quote

from llguidance import LLMatcher

from engine.calls.values import anchors, target
from engine.constrain.grammars import Compiled, SchemaError, check_grammar, one_line
from engine.grammars import limits

ONE_SPACE = "[ ]?"  # between JSON tokens: a small model could otherwise fill the answer with blank lines
MAX_NODES = 100_000  # subschemas that the rewrite visits, plus the names that closed objects allow
MAX_NOTED = 100  # most keywords reported as not enforced

# removed: references are resolved before compiling, and clients may not set llguidance's options
DROPPED = ("$defs", "definitions", "$id", "id", "$schema", "$anchor", "$dynamicAnchor", "x-guidance")
# keywords of JSON Schema that llguidance does not support, with the values that have no effect
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("if", "then", "else", "propertyNames", "unevaluatedItems"), (True, {})),
    **dict.fromkeys(("contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef"), ()),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    "not": (False,),
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, False, {}),  # false: `_Document._close` does the same
}
# what a schema without `type` means: these keywords say nothing about values of other types
OF_TYPE: dict[str, tuple[str, ...]] = {
    "object": ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
MEMBERS = ("allOf", "anyOf", "oneOf", "$ref")  # keywords whose schemas apply to the same value
CONSTRAINTS = {"const", "enum"}.union(*OF_TYPE.values())
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MOST_COUNTED = 1 << 24  # characters, items or properties: more than an answer has
EXACT = 1 << 53  # llguidance reads numbers as doubles, which are exact up to here
MAX_MULTIPLES = 64  # different ones that are compared
MOST_PRODUCT = (1 << 32) - 1  # llguidance multiplies the numbers of several `multipleOf` in 32 bits
# formats whose digits would otherwise have no end, and days and seconds that exist in every year and minute
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAYS = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = f"(?:{_YEAR}-(?:{_DAYS})|{_LEAP}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3])(?::[0-5][0-9]){2}(?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_DURATION = "P(?:{0}W|(?:{0}Y(?:{0}M(?:{0}D)?)?|{0}M(?:{0}D)?|{0}D)(?:T{1})?|T{1})".format(
    "[0-9]{1,9}", "(?:{0}H(?:{0}M(?:{0}S)?)?|{0}M(?:{0}S)?|{0}S)".format("[0-9]{1,9}")
)
FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "duration": _DURATION}
SPELLED_OUT = re.compile(r"\^(?:\((?:\?:)?([\w-]+(?:\|[\w-]+)*)\)|([\w-]+))\$", re.ASCII)  # ^name$ or ^(one|two)$
# Words in llguidance's errors about patterns, formats and bounds that are valid but not supported. With any other error they are
# invalid or too complex.
UNSUPPORTED_ERRORS = ("not supported", "Unknown format", "not disjoint", "Failed to generate regex", "too many digits")
TOO_LARGE = ": numbers of this size cannot be enforced exactly"
NOT_UNIQUE = ": that no name comes twice can only be enforced of names in `properties`"


# --- compiling ---------------------------------------------------------------------------------------------------------------


class CallableTool(NamedTuple):
    """A tool that may be called. `position`: in the request's tools. `strict`: all of `parameters` must be enforced."""

    position: int
    name: str
    parameters: dict[str, Any] | None
    strict: bool

    @property
    def path(self) -> str:
        return f"tools.{self.position}.function.parameters"

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments, which are an object. A tool that lists no parameters accepts none. Raises SchemaError."""
        keywords = set(self.parameters or {}) - {"type", "title", "description", "$schema"}
        if not self.parameters or not keywords or (keywords == {"required"} and not self.parameters["required"]):
            return {"type": "object", "properties": {}}
        given = self.parameters.get("type", "object")
        if "object" not in (given if isinstance(given, list) else [given]):
            raise SchemaError("its type is not object", self.position)
        return {**self.parameters, "type": "object"}


def compile_schema(schema: dict[str, Any], strict: bool, whitespace: str | None = None, path: str = "#") -> Compiled:
    """Compile a JSON schema. `whitespace`: the regex of what may stand between JSON tokens; None: at most one space.

    `path`: of the schema, for what is reported. Raises SchemaError.
    """
    rewriter = Rewriter()
    return _compile(rewriter.document(schema, path, strict), rewriter, strict, whitespace)


def compile_arguments(tool: CallableTool) -> Compiled:
    """Compile the schema of a tool's arguments. Raises SchemaError, which names the tool."""
    try:
        return compile_schema(tool.schema, tool.strict, path=f"{tool.path}#")
    except SchemaError as e:
        raise SchemaError(str(e), tool.position) from e


def compile_calls(
    tools: Sequence[CallableTool],
    answer: dict[str, Any] | None = None,
    strict: bool = False,
    whitespace: str | None = None,
    key: str = "arguments",
) -> Compiled:
    """Compile a grammar for one call {"name": …, "arguments": {…}} of one of `tools`, or for JSON that fits the schema `answer`.

    `strict`: that of `answer`. `key`: of the arguments. Raises SchemaError.
    """
    rewriter = Rewriter()
    try:
        found = [_call(rewriter, tool, key) for tool in tools]
        found += [] if answer is None else [rewriter.document(answer, "#", strict)]
        return _compile({"anyOf": found}, rewriter, strict or any(tool.strict for tool in tools), whitespace)
    except SchemaError as e:
        if answer is not None:
            compile_schema(answer, strict, whitespace)  # raises an error of the answer alone
        elif len(tools) == 1:
            raise SchemaError(str(e), tools[0].position) from e
        for tool in tools:
            compile_arguments(tool)  # raises an error that names the wrong tool
        raise


def _call(rewriter: "Rewriter", tool: CallableTool, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: rewriter.document(tool.schema, f"{tool.path}#", tool.strict)},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _compile(schema: dict[str, Any], rewriter: "Rewriter", strict: bool, whitespace: str | None) -> Compiled:
    options: Any = {"whitespace_pattern": whitespace or ONE_SPACE} if whitespace != "" else {"whitespace_flexible": False}
    options["lenient"] = not strict
    try:
        text = LLMatcher.grammar_from_json_schema({**schema, "$defs": rewriter.definitions}, overrides=options)
    except RecursionError as e:
        raise SchemaError("it is nested too deeply") from e
    except (ValueError, TypeError) as e:  # from llguidance
        raise SchemaError(one_line(str(e))) from e
    return Compiled(text, (*rewriter.not_enforced, *check_grammar(text)))


# --- rewriting ---------------------------------------------------------------------------------------------------------------


Names = frozenset[str] | None  # the property names that an object may have; None: any
NO_NAMES: Names = frozenset()


def _union(all_names: Iterable[Names]) -> Names:
    found = list(all_names)
    return None if None in found else frozenset[str]().union(*(names for names in found if names is not None))


class Around(NamedTuple):
    """What other schemas of the same value say. `names`: those that they allow. `typed`: one of them says the value's type. `shared`:
    they demand something of it, or of what contains it. `followed`: the references that led here."""

    names: Names = NO_NAMES
    typed: bool = False
    shared: bool = False
    followed: tuple[str, ...] = ()


@dataclass
class Rewriter:
    """Rewrites documents and collects the definitions that they refer to.

    A definition is stored once for each way in which other schemas describe the values of references to it.
    """

    definitions: dict[str, Any] = field(default_factory=dict)
    not_enforced: list[str] = field(default_factory=list)
    # `multipleOf` of values that several schemas may describe, and whether it may apply several times
    multiples: dict[Decimal, bool] = field(default_factory=dict)
    nodes: int = 0
    unsupported: dict[str, bool] = field(default_factory=dict)  # by schema, as JSON

    def document(self, schema: dict[str, Any], path: str, strict: bool) -> Any:
        """Rewrite a document, whose place in the request is `path`. Raises SchemaError."""
        try:
            return _Document(self, schema, path, strict).rewrite(schema, path, Around())
        except RecursionError as e:
            raise SchemaError("it is nested too deeply") from e

    def count(self, nodes: int = 1) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise SchemaError(f"it has more than {MAX_NODES} parts")

    def multiplies(self, multiple: Any, again: bool) -> bool:
        """Whether llguidance can compute the least common multiple of this and earlier `multipleOf`: it does not notice if it
        cannot. again: the same keyword may apply to a value several times."""
        if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not multiple:
            return True  # it refuses that
        given = abs(Decimal(str(multiple)))
        multiples = {**self.multiples, given: again or given in self.multiples}
        digits = max(0, *(-int(one.normalize().as_tuple().exponent) for one in multiples))
        whole = {int(one.scaleb(digits)): repeated for one, repeated in multiples.items()}
        products = (one * lcm(*(other for other in whole if other != one or repeated)) for one, repeated in whole.items())
        fits = len(whole) <= MAX_MULTIPLES and max(products) <= MOST_PRODUCT
        if fits:
            self.multiples = multiples
        return fits

    def refuses(self, probe: dict[str, Any]) -> bool:
        """Whether llguidance refuses `probe` as valid but not supported."""
        key = json.dumps(probe)
        if key not in self.unsupported:
            try:
                problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(probe), limits=limits())
            except (ValueError, TypeError, RecursionError) as e:
                problem = str(e)
            self.unsupported[key] = any(words in problem for words in UNSUPPORTED_ERRORS)
        return self.unsupported[key]


class _Document:
    """One schema document. `#` in its references means its root."""

    def __init__(self, rewriter: "Rewriter", root: Any, path: str, strict: bool) -> None:
        self.rewriter, self.root, self.path, self.strict = rewriter, root, path, strict
        self.defined: dict[tuple[str, Names, bool, bool], str] = {}  # definition by reference and what is around it
        self.entered = 0  # definitions, whose rewriting has not ended

    def rewrite(self, schema: Any, path: str, around: Around) -> Any:
        """Rewrite `schema` and the schemas in it.

        A schema that says no type but has keywords of one, such as `properties`, means values of that type."""
        self.rewriter.count()
        if not isinstance(schema, dict):
            return schema
        new = self._enforceable(schema, path)
        typed = around.typed or _says_type(new) or any(_says_type(part) for key, _, part in _parts(schema) if key == "allOf")
        if not typed:
            kinds = [kind for kind, keys in OF_TYPE.items() if not new.keys().isdisjoint(keys)]
            if kinds:
                new["type"], typed = kinds, True
        sources = [key for key in ("anyOf", "oneOf", "$ref") if key in new] + [
            key for key, _, _ in _parts(new) if key == "allOf"
        ]
        shared = around.shared or len(sources) + (not CONSTRAINTS.isdisjoint(new)) > 1
        if shared and "multipleOf" in new and not self.rewriter.multiplies(new["multipleOf"], bool(self.entered)):
            self._leave_out(f"{path}/multipleOf", TOO_LARGE)
            del new["multipleOf"]
        if schema.get("unevaluatedProperties") is False:  # it does not see other schemas
            around = around._replace(names=NO_NAMES)
        self._rewrite_values(new, path, shared or {"properties", "patternProperties"} <= new.keys())
        self._list_patterns(new, path)
        of_parts = self._rewrite_parts(new, schema, path, around._replace(typed=typed, shared=shared))
        names = _union((_listed(schema), around.names, of_parts))
        is_open = "additionalProperties" in new or schema.get("unevaluatedProperties", False) is not False
        if _lists_properties(schema) and names is not None and not is_open:
            self._close(new, names)
        return new

    # ------------------------------------------------------------------------------------------- what can be enforced

    def _enforceable(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """The keywords of the schema that a grammar can enforce. The others are left out, or refused."""
        new = dict[str, Any]()
        for key, value in schema.items():
            if key in DROPPED or (key in UNSUPPORTED and _is_neutral(key, value)):
                continue
            if key in COUNTS and isinstance(value, int | float) and value >= MOST_COUNTED:
                if key.startswith("min"):
                    raise SchemaError(f"{path}/{key}: no answer has so many characters, items or properties")
                continue  # all answers have fewer
            if why := self._why_not(schema, key, value):
                self._leave_out(f"{path}/{_escape(key)}", why)
                if why != NOT_UNIQUE:  # a grammar can count names that come twice
                    continue
            new[key] = int(value) if key in COUNTS and isinstance(value, float) and value.is_integer() else value
        if isinstance(form := new.get("format"), str) and form in FORMATS:
            pattern = {"pattern": f"^{FORMATS[new.pop('format')]}$"}
            new.update({"allOf": [*new.get("allOf", []), pattern]} if "pattern" in new else pattern)
        return new

    def _leave_out(self, place: str, why: str) -> None:
        """Note that the keyword at a place is not enforced. Raises SchemaError if the schema is strict."""
        if self.strict:
            raise SchemaError(place + why)
        noted = self.rewriter.not_enforced
        if place not in noted and len(noted) < MAX_NOTED:
            noted.append(place)

    def _why_not(self, schema: dict[str, Any], key: str, value: Any) -> str:
        """Why a keyword cannot be enforced; empty if it can, or if llguidance refuses it by itself."""
        if key in UNSUPPORTED:
            return " cannot be enforced"
        if key in ("const", "enum"):
            return TOO_LARGE if any(abs(number) > EXACT for number in _numbers(value)) else ""
        if key in OF_TYPE["number"] and isinstance(value, int | float) and not isinstance(value, bool):
            kind = "integer" if schema.get("type") == "integer" else "number"
            return TOO_LARGE if abs(value) > EXACT or self.rewriter.refuses({"type": kind, key: value}) else ""
        if key == "minProperties" and isinstance(value, int | float):
            required = schema.get("required")
            several = value > (len(required) if isinstance(required, list) else 0) + 1
            is_open = schema.get("additionalProperties", not _lists_properties(schema)) is not False
            return NOT_UNIQUE * (several and is_open and "object" in (_types(schema) or {"object"}))
        if key in ("pattern", "format") and not self.strict and isinstance(value, str):
            return " cannot be enforced" * self.rewriter.refuses({"type": schema.get("type", "string"), key: value})
        return ""

    def _list_patterns(self, new: dict[str, Any], path: str) -> None:
        """Replace patterns by listed names if they spell them out.

        Without strict, patterns that llguidance does not support become any name whose value fits one of their schemas.
        """
        patterns, listed = new.get("patternProperties"), new.get("properties", {})
        if not isinstance(patterns, dict) or not isinstance(listed, dict):
            return
        names = _spelled_out(new)
        if names is not None:
            del new["patternProperties"]
            new["properties"] = {**listed, **names}
            return
        probe = {"type": "object", "patternProperties": dict.fromkeys(patterns, True)}
        unsupported = not self.strict and self.rewriter.refuses(probe)
        if unsupported or any(value is not False for value in patterns.values()):
            self._leave_out(f"{path}/patternProperties", NOT_UNIQUE)
        if unsupported:
            del new["patternProperties"]
            values = [one for one in (*patterns.values(), new.get("additionalProperties", False)) if one is not False]
            new["additionalProperties"] = values[0] if len(values) == 1 else {"anyOf": values} if values else False

    # ---------------------------------------------------------------------------------------------------- one schema's parts

    def _rewrite_values(self, new: dict[str, Any], path: str, shared: bool) -> None:
        """Rewrite the schemas of child values: properties and items."""
        inner = Around(shared=shared)
        for key in ("properties", "patternProperties"):
            if isinstance(new.get(key), dict):
                found = new[key].items()
                new[key] = {name: self.rewrite(one, f"{path}/{key}/{_escape(name)}", inner) for name, one in found}
        for key in ("items", "additionalItems", "additionalProperties"):
            if isinstance(new.get(key), dict):
                new[key] = self.rewrite(new[key], f"{path}/{key}", inner)
        for key in ("prefixItems", "items"):
            if isinstance(new.get(key), list):
                new[key] = [self.rewrite(one, f"{path}/{key}/{i}", inner) for i, one in enumerate(new[key])]

    def _rewrite_parts(self, new: dict[str, Any], schema: dict[str, Any], path: str, around: Around) -> Names:
        """Rewrite the members of `allOf`, `anyOf` and `oneOf`, and the target of `$ref`. Returns the names that they allow.

        Each member allows the names of all schemas that apply together with it. These are all other parts except, for a branch
        of `anyOf` or `oneOf`, its alternatives. Its own names do not count: some of them may belong to one of its branches.
        """
        parts = list(_parts(new))
        of_parts = [self._names(part, ()) for _, _, part in parts]
        keys = {key for key, _, _ in parts}
        own = _union((around.names, _own_names(schema)))
        outside = {
            one: _union((own, *(names for (key, _, _), names in zip(parts, of_parts, strict=True) if key != one)))
            for one in keys
        }
        members: dict[str, list[Any]] = {}
        for at, (key, i, part) in enumerate(parts):
            beside = [of_parts[j] for j, other in enumerate(parts) if other[0] == key and j != at] if key == "allOf" else []
            here = around._replace(names=_union((outside[key], *beside)))
            if key == "$ref":
                new["$ref"] = self._reference(part["$ref"], here)
            else:
                members.setdefault(key, []).append(self.rewrite(part, f"{path}/{key}/{i}", here))
        new.update(members)
        if "oneOf" in members:
            self._rewrite_one_of(new, [part for key, _, part in parts if key == "oneOf"], path)
        return _union(of_parts)

    def _rewrite_one_of(self, new: dict[str, Any], branches: list[Any], path: str) -> None:
        """Replace `oneOf` by `anyOf`. They are equal if no value fits two branches, and otherwise only `anyOf` can be enforced."""
        if not self._exclusive(branches):
            why = " can only be enforced if types or constants show that no value fits two branches"
            self._leave_out(f"{path}/oneOf", why)
        members = new.pop("oneOf")
        if "anyOf" in new:
            new["allOf"] = [*new.get("allOf", []), {"anyOf": members}]
        else:
            new["anyOf"] = members

    def _names(self, schema: Any, followed: tuple[str, ...]) -> Names:
        """All names that a schema and its parts allow for the object. `followed`: references that were followed already."""
        self.rewriter.count()
        if not isinstance(schema, dict):
            return NO_NAMES
        found = [_own_names(schema)]
        for key, _, part in _parts(schema):
            if key != "$ref":
                found.append(self._names(part, followed))
            elif part["$ref"] not in followed:
                found.append(self._names(self._target(part["$ref"]), (*followed, part["$ref"])))
        return _union(found)

    def _close(self, new: dict[str, Any], names: frozenset[str]) -> None:
        """Allow only `names` in the object."""
        self.rewriter.count(len(names))
        listed = new.get("properties", {})
        if isinstance(listed, dict) and (more := sorted(names - set(listed))):
            new["properties"] = {**listed, **dict.fromkeys(more, True)}
        new["additionalProperties"] = False

    # ---------------------------------------------------------------------------------------------------- references

    def _target(self, reference: str) -> Any:
        """The schema that `reference` names. Raises SchemaError unless it is in this document."""
        try:
            return target(reference, self.root, lambda: self._anchors)
        except LookupError:
            if reference == "#" or reference.startswith("#/"):
                raise SchemaError(f"$ref {reference[:100]!r} leads nowhere") from None
            raise SchemaError(
                f"$ref {reference[:100]!r} must begin with #/ or be the $anchor of a part of the schema"
            ) from None

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        return anchors(self.root, self.rewriter.count)

    def _reference(self, reference: str, around: Around) -> str:
        named = self._target(reference)
        if reference in around.followed:
            raise SchemaError(f"$ref {reference[:100]!r} leads back to itself, so it says nothing")
        key = (reference, around.names, around.typed, around.shared)
        if key not in self.defined:
            name = self.defined[key] = str(len(self.rewriter.definitions))
            self.rewriter.definitions[name] = True  # placeholder: the target may refer to itself
            inner = around._replace(followed=(*around.followed, reference))
            self.entered += 1
            self.rewriter.definitions[name] = self.rewrite(named, self.path.rstrip("#") + reference, inner)
            self.entered -= 1
        return f"#/$defs/{self.defined[key]}"

    # ---------------------------------------------------------------------------------------------------- exclusive branches

    def _exclusive(self, branches: list[Any]) -> bool:
        """Whether types and constants prove that no value fits two of `branches`."""
        schemas = [self._followed(one) for one in branches]
        if not all(isinstance(one, dict) for one in schemas):
            return False
        if _disjoint([_types(one) for one in schemas]) or _disjoint([_constants(one) for one in schemas]):
            return True
        if any(_types(one) != {"object"} for one in schemas):
            return False
        tags = [{name: _constants(self._followed(value)) for name, value in _required(one).items()} for one in schemas]
        return any(_disjoint([one.get(name) for one in tags]) for name in tags[0])

    def _followed(self, schema: Any) -> Any:
        for _ in range(10):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._target(schema["$ref"])
        return schema


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """The subschemas that apply to the same value, as (keyword, index in its list, schema)."""
    for key in MEMBERS[:3]:
        members = schema.get(key)
        for i, member in enumerate(members if isinstance(members, list) else []):
            yield key, i, member
    if isinstance(schema.get("$ref"), str):
        yield "$ref", 0, {"$ref": schema["$ref"]}


def _listed(schema: dict[str, Any]) -> frozenset[str]:
    """The names that the schema itself lists."""
    listed, required = schema.get("properties"), schema.get("required")
    names = {*(listed if isinstance(listed, dict) else ()), *(_spelled_out(schema) or ())}
    if isinstance(required, list) and _lists_properties(schema) and schema.get("unevaluatedProperties") is not False:
        names.update(name for name in required if isinstance(name, str))
    return frozenset(names)


def _own_names(schema: dict[str, Any]) -> Names:
    """The names that the schema itself allows."""
    patterns = schema.get("patternProperties")
    others = [one for one in patterns.values() if one is not False] if isinstance(patterns, dict) else []
    is_open = schema.get("additionalProperties", schema.get("unevaluatedProperties", False)) is not False
    return None if is_open or (others and _spelled_out(schema) is None) else _listed(schema)


def _lists_properties(schema: dict[str, Any]) -> bool:
    """Whether the schema says which properties exist, so that others are not allowed."""
    listed = any(isinstance(schema.get(key), dict) for key in ("properties", "patternProperties"))
    return listed or schema.get("unevaluatedProperties") is False


def _spelled_out(schema: dict[str, Any]) -> dict[str, Any] | None:
    """The names that the patterns of a schema spell out, with their schemas. None if one is not a list of names, or a name comes
    twice."""
    patterns, listed = schema.get("patternProperties"), schema.get("properties")
    names: dict[str, Any] = {}
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        found = SPELLED_OUT.fullmatch(pattern)
        for name in (found[1] or found[2]).split("|") if found else [""]:
            if not name or name in names or (isinstance(listed, dict) and name in listed):
                return None
            names[name] = value
    return names


def _is_neutral(key: str, value: Any) -> bool:
    return any(type(value) is type(one) and value == one for one in UNSUPPORTED[key])


def _says_type(schema: Any) -> bool:
    return isinstance(schema, dict) and not schema.keys().isdisjoint(("type", "const", "enum"))


def _numbers(value: Any) -> Iterator[int | float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers(one)
    elif isinstance(value, int | float):
        yield value


def _disjoint(sets: list[set[Any] | None]) -> bool:
    """Whether no two sets share an element. None stands for the set of all values."""
    known = [one for one in sets if one is not None]
    return len(known) == len(sets) and len(set[Any]().union(*known)) == sum(map(len, known))


def _types(schema: dict[str, Any]) -> set[Any] | None:
    given = schema.get("type")
    types = {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}
    return (types | {"integer"} if "number" in types else types) or None


def _constants(schema: Any) -> set[Any] | None:
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {_hashable(one) for one in values} if isinstance(values, list) else None


def _hashable(value: Any) -> Any:
    """Equal for equal JSON values only: 1 equals 1.0, but not true."""
    if isinstance(value, dict):
        return frozenset((name, _hashable(one)) for name, one in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list) else (isinstance(value, bool), value)


def _required(schema: dict[str, Any]) -> dict[str, Any]:
    """The schemas of the properties that must exist."""
    listed, required = schema.get("properties"), schema.get("required")
    if not isinstance(listed, dict) or not isinstance(required, list):
        return {}
    return {name: value for name, value in listed.items() if name in required}


def _escape(name: str) -> str:
    """Encode a name for a JSON pointer in a URI fragment (RFC 6901, section 6): ASCII only."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="$")
