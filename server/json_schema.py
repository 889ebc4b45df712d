"""Compile JSON schemas to grammars. Objects are closed by default. What cannot be enforced is refused or reported.

A schema is rewritten before llguidance compiles it:

- A missing `additionalProperties` means false, as in OpenAI's strict mode and other grammar engines: a model that may invent
  property names does so up to its token limit. An object that lists no properties stays open. Several schemas can describe one
  object: members of an `allOf`, branches of an `anyOf`, and the target of a `$ref` that has sibling keywords. Each of them
  allows the names of the others, as `unevaluatedProperties: false` would.
- A keyword that llguidance cannot enforce stays if the schema is strict, and llguidance refuses the schema. Otherwise the
  keyword is removed and reported.
- An object must not contain a name twice. A grammar can ensure this for listed properties, so patterns that spell out their
  names become listed properties. It cannot for other patterns: a strict schema with them is refused. Otherwise they are
  reported, and only their values are enforced.

This module imports little, because it runs in worker processes.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from llguidance import LLMatcher, LLTokenizer

from engine.grammars import MAX_TEXT, compiled, limits
from errors import UserError

ONE_SPACE = "[ ]?"  # between JSON tokens: a small model could otherwise fill the answer with blank lines
MAX_NODES = 100_000  # subschemas that the rewrite visits, plus the names that closed objects allow
MAX_NOTED = 100  # most keywords reported as not enforced

# keywords whose value is one schema, a list of schemas, or schemas by name
ONE = ("items", "additionalItems", "additionalProperties")
MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions")
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
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MOST_COUNTED = 1 << 24  # characters, items or properties: more than an answer has
EXACT = 1 << 53  # llguidance reads numbers as doubles, which are exact up to here
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
INTERNAL = re.compile(r"\s*while processing json-schema:\S*|:\s+\([A-Z]\w* \(.*", re.DOTALL)
SPECIAL_ID = re.compile(r"<\[\d+\]>")  # in Lark
SPELLED_OUT = re.compile(r"\^(?:\((?:\?:)?([\w-]+(?:\|[\w-]+)*)\)|([\w-]+))\$", re.ASCII)  # ^name$ or ^(one|two)$
# Words in llguidance's errors about patterns, formats and bounds that are valid but not supported. With any other error they are
# invalid or too complex.
UNSUPPORTED_ERRORS = ("not supported", "Unknown format", "not disjoint", "Failed to generate regex", "too many digits")


class SchemaError(UserError):
    """A schema cannot be enforced; the message is one line. `tool`: index of its tool in the request, if known."""

    def __init__(self, message: str, tool: int | None = None) -> None:
        super().__init__(message)
        self.tool = tool


@dataclass(frozen=True)
class Compiled:
    grammar: str
    not_enforced: tuple[str, ...] = ()  # JSON pointers of keywords that are not enforced, then llguidance's warnings


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


@dataclass(frozen=True)
class Names:
    """The property names that an object may have: listed names, names that match a pattern, or any name."""

    listed: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    open: bool = False  # any name: `additionalProperties` or `unevaluatedProperties` is given and is not false

    def __or__(self, other: "Names") -> "Names":
        return Names(self.listed | other.listed, self.patterns | other.patterns, self.open or other.open)


NO_NAMES = Names()


def _union(all_names: Collection[Names]) -> Names:
    listed, patterns = (frozenset[str]().union(*sets) for sets in _sets(all_names))
    return Names(listed, patterns, any(names.open for names in all_names))


def _of_the_others(all_names: Collection[Names]) -> Iterator[Names]:
    """For each of the names, the union of all others. One at a time, because together they may take much memory."""
    union = _union(all_names)
    listed, patterns = (Counter(chain.from_iterable(sets)) for sets in _sets(all_names))
    opened = sum(names.open for names in all_names)
    for names in all_names:
        yield Names(
            union.listed - {name for name in names.listed if listed[name] == 1},
            union.patterns - {pattern for pattern in names.patterns if patterns[pattern] == 1},
            opened > names.open,
        )


def _sets(all_names: Collection[Names]) -> tuple[list[frozenset[str]], list[frozenset[str]]]:
    return [names.listed for names in all_names], [names.patterns for names in all_names]


def compile_schema(schema: dict[str, Any], strict: bool, whitespace: str | None = None, path: str = "#") -> Compiled:
    """Compile a JSON schema. `whitespace`: the regex of what may stand between JSON tokens; None: at most one space.

    `path`: of the schema, for what is reported. Raises SchemaError.
    """
    rewriter = Rewriter()
    return _compile(lambda: rewriter.document(schema, path, strict), rewriter, strict, whitespace)


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

    def calls() -> dict[str, Any]:
        found = [_call(rewriter, tool, key) for tool in tools]
        return {"anyOf": found if answer is None else [*found, rewriter.document(answer, "#", strict)]}

    try:
        return _compile(calls, rewriter, strict or any(tool.strict for tool in tools), whitespace)
    except SchemaError as e:
        if answer is not None:
            compile_schema(answer, strict, whitespace)  # raises an error of the answer alone
        elif len(tools) == 1:
            raise SchemaError(str(e), tools[0].position) from e
        for tool in tools:
            compile_calls([tool])  # raises an error that names the wrong tool
        raise


def _call(rewriter: "Rewriter", tool: CallableTool, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: rewriter.document(tool.schema, f"{tool.path}#", tool.strict)},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _compile(build: Callable[[], Any], rewriter: "Rewriter", strict: bool, whitespace: str | None = None) -> Compiled:
    options: Any = {"whitespace_pattern": whitespace or ONE_SPACE} if whitespace != "" else {"whitespace_flexible": False}
    options["lenient"] = not strict
    try:
        schema = {**build(), "$defs": rewriter.definitions}
        text = LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except RecursionError as e:
        raise SchemaError("it is nested too deeply") from e
    except (ValueError, TypeError) as e:  # from llguidance
        raise SchemaError(_line(str(e))) from e
    return Compiled(text, (*rewriter.not_enforced, *check_grammar(text)))


def check_matcher(text: str) -> None:
    """Compile a grammar as a rank does, which finds more wrong than `check_grammar`, and what takes too much. Raises SchemaError."""
    _check_length(text)
    no_special = SPECIAL_ID.sub("<[255]>", text)  # the tokenizer of bytes has no special tokens
    try:
        compiled(LLTokenizer("byte"), no_special)
    except UserError as e:
        raise SchemaError(_line(str(e))) from e


def _check_length(text: str) -> None:
    if len(text.encode()) > MAX_TEXT:
        raise SchemaError(f"it is longer than {MAX_TEXT} bytes")


def check_grammar(text: str, **bounds: int) -> list[str]:
    """llguidance's warnings about a grammar. bounds: see `limits`. Raises SchemaError."""
    _check_length(text)
    failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits(**bounds))
    if failed:
        raise SchemaError(_line(messages[0]))
    return [_line(message) for message in messages if not message.startswith("no tokenizer")]  # only the engine has one


def _line(text: str) -> str:
    """llguidance's message in one line, without what only its code has: names of the rewritten definitions, types, syntax trees."""
    return " ".join(INTERNAL.sub("", text).replace("f64", "a number").split())[:300]


def _is_unsupported(probe: dict[str, Any]) -> bool:
    """Whether llguidance refuses `probe` as valid but not supported."""
    try:
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(probe), limits=limits())
    except (ValueError, TypeError, RecursionError) as e:
        problem = str(e)
    return any(words in problem for words in UNSUPPORTED_ERRORS)


@dataclass
class Rewriter:
    """Rewrites documents and collects the definitions that they refer to.

    A definition is stored once for each set of additional names that references to it must allow.
    """

    definitions: dict[str, Any] = field(default_factory=dict)
    not_enforced: list[str] = field(default_factory=list)
    nodes: int = 0

    def document(self, schema: dict[str, Any], path: str, strict: bool) -> Any:
        cleaned = _Cleaner(self, strict).clean(schema, path)
        return _Document(self, cleaned, path, strict).rewrite(cleaned, path, NO_NAMES)

    def count(self, nodes: int = 1) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise SchemaError(f"it has more than {MAX_NODES} parts")

    def leave_out(self, path: str) -> None:
        if path not in self.not_enforced and len(self.not_enforced) < MAX_NOTED:
            self.not_enforced.append(path)


class _Cleaner:
    """Replaces patterns by the names that they spell out.

    Unless strict, removes keywords that llguidance cannot enforce, and reports them.
    """

    def __init__(self, rewriter: Rewriter, strict: bool) -> None:
        self.rewriter, self.strict = rewriter, strict
        self.checked: dict[str, bool] = {}

    def clean(self, schema: Any, path: str) -> Any:
        self.rewriter.count()
        if not isinstance(schema, dict):
            return schema
        new = {}
        for key, value in schema.items():
            if key in NAMED and isinstance(value, dict):
                value = {name: self.clean(one, f"{path}/{key}/{_escape(name)}") for name, one in value.items()}
            elif key in MANY and isinstance(value, list):
                value = [self.clean(one, f"{path}/{key}/{i}") for i, one in enumerate(value)]
            elif key in ONE:
                value = self.clean(value, f"{path}/{key}")
            elif key in COUNTS and isinstance(value, int | float) and value >= MOST_COUNTED:
                if key.startswith("min"):
                    raise SchemaError(f"{path}/{key}: no answer has so many characters, items or properties")
                continue  # all answers have fewer
            elif key in COUNTS and isinstance(value, float) and value.is_integer():
                value = int(value)
            elif self._is_inexact(schema, key, value) or (not self.strict and self._cannot(schema, key, value)):
                if self.strict:
                    raise SchemaError(f"{path}/{key}: numbers of this size cannot be enforced exactly")
                self.rewriter.leave_out(f"{path}/{_escape(key)}")
                if key != "unevaluatedProperties":  # `_Document.rewrite` needs it to close the object
                    continue
            new[key] = value
        self._clean_patterns(new, path)
        if isinstance(form := new.get("format"), str) and form in FORMATS:
            pattern = {"pattern": f"^{FORMATS[new.pop('format')]}$"}
            new.update({"allOf": [*new.get("allOf", []), pattern]} if "pattern" in new else pattern)
        return new

    def _is_inexact(self, schema: dict[str, Any], key: str, value: Any) -> bool:
        """Whether the value has numbers that llguidance would read as others, or not at all."""
        if key in ("const", "enum"):
            return any(abs(number) > EXACT for number in _numbers(value))
        if key not in OF_TYPE["number"] or isinstance(value, bool) or not isinstance(value, int | float):
            return False
        kind = "integer" if schema.get("type") == "integer" else "number"
        return abs(value) > EXACT or self._is_unsupported({"type": kind, key: value})

    def _cannot(self, schema: dict[str, Any], key: str, value: Any) -> bool:
        if key in UNSUPPORTED:
            return not _is_neutral(key, value)
        return (
            key in ("pattern", "format")
            and isinstance(value, str)
            and self._is_unsupported({"type": schema.get("type", "string"), key: value})
        )

    def _clean_patterns(self, new: dict[str, Any], path: str) -> None:
        """Replace patterns by listed names if they spell them out.

        Without strict, patterns that llguidance does not support become any name whose value fits one of their schemas. Raises
        SchemaError if strict, because the grammar cannot prevent that a name occurs twice.
        """
        patterns, listed = new.get("patternProperties"), new.get("properties", {})
        if not isinstance(patterns, dict) or not isinstance(listed, dict):
            return
        names = _spelled_out(patterns)
        if names is not None and not names.keys() & listed.keys():
            del new["patternProperties"]
            new["properties"] = {**listed, **names}
            return
        if self.strict and any(value is not False for value in patterns.values()):
            raise SchemaError(
                f"{path}/patternProperties: that no name comes twice can only be enforced of names in `properties`"
            )
        unsupported = self._is_unsupported({"type": "object", "patternProperties": dict.fromkeys(patterns, True)})
        if unsupported and not self.strict:
            del new["patternProperties"]
            values = [*patterns.values(), new.get("additionalProperties", False)]
            values = [one for one in values if one is not False]
            new["additionalProperties"] = values[0] if len(values) == 1 else {"anyOf": values} if values else False
        if unsupported or any(value is not False for value in patterns.values()):
            self.rewriter.leave_out(f"{path}/patternProperties")

    def _is_unsupported(self, probe: dict[str, Any]) -> bool:
        key = json.dumps(probe)
        if key not in self.checked:
            self.checked[key] = _is_unsupported(probe)
        return self.checked[key]


class _Document:
    """One schema document. `#` in its references means its root."""

    def __init__(self, rewriter: Rewriter, root: Any, path: str, strict: bool) -> None:
        self.rewriter, self.root, self.path, self.strict = rewriter, root, path, strict
        self.defined: dict[tuple[str, Names, bool], str] = {}  # definition by reference, additional names, and `typed`

    # ---------------------------------------------------------------------------------------------------- one schema

    def rewrite(self, schema: Any, path: str, others: Names, typed: bool = False, followed: tuple[str, ...] = ()) -> Any:
        """Rewrite `schema` and the schemas in it. Of the same value: `others`: names that other schemas allow. `typed`: whether one of
        them says its type. `followed`: references that led here.

        A schema that says no type but has keywords of one, such as `properties`, means values of that type."""
        self.rewriter.count()
        if not isinstance(schema, dict):
            return schema
        new = {k: v for k, v in schema.items() if k not in DROPPED and not (k in UNSUPPORTED and _is_neutral(k, v))}
        if not self.strict:
            new.pop("unevaluatedProperties", None)
        elif cannot := sorted(new.keys() & UNSUPPORTED.keys()):
            raise SchemaError(f"{path}/{_escape(cannot[0])} cannot be enforced")
        if not (typed := typed or _says_type(schema) or any(_says_type(one) for one in new.get("allOf", ()))):
            kinds = [kind for kind, keys in OF_TYPE.items() if not new.keys().isdisjoint(keys)]
            if kinds:
                new["type"], typed = kinds, True
        if schema.get("unevaluatedProperties") is False:  # it does not see other schemas
            others = NO_NAMES
        own = _own_names(schema)
        parts = list(_parts(schema))
        of_parts = [self._names(part, ()) for _, _, part in parts]
        all_names = own | others | _union(of_parts)
        self._rewrite_values(new, path)
        self._rewrite_parts(new, path, own | others, parts, of_parts, typed, followed)
        if _lists_properties(schema) and "additionalProperties" not in schema and not all_names.open:
            self._close(new, all_names)
        return new

    def _rewrite_values(self, new: dict[str, Any], path: str) -> None:
        """Rewrite the schemas of child values: properties and items."""
        for key in ("properties", "patternProperties"):
            if isinstance(new.get(key), dict):
                new[key] = {
                    name: self.rewrite(one, f"{path}/{key}/{_escape(name)}", NO_NAMES) for name, one in new[key].items()
                }
        for key in ONE:
            if isinstance(new.get(key), dict):
                new[key] = self.rewrite(new[key], f"{path}/{key}", NO_NAMES)
        for key in ("prefixItems", "items"):
            if isinstance(new.get(key), list):
                new[key] = [self.rewrite(one, f"{path}/{key}/{i}", NO_NAMES) for i, one in enumerate(new[key])]

    def _rewrite_parts(
        self,
        new: dict[str, Any],
        path: str,
        own: Names,
        parts: list[tuple[str, int, Any]],
        of_parts: list[Names],
        typed: bool,
        followed: tuple[str, ...],
    ) -> None:
        """Rewrite the members of `allOf`, `anyOf` and `oneOf`, and the target of `$ref`.

        Each member allows the names of all schemas that apply together with it. These are all other parts except, for a branch
        of `anyOf` or `oneOf`, its alternatives. Its own names do not count: some of them may belong to one of its branches.
        """
        by_key: dict[str, list[Names]] = {}
        for (key, _, _), names in zip(parts, of_parts, strict=True):
            by_key.setdefault(key, []).append(names)
        outside = {key: own | _union([names for other in by_key if other != key for names in by_key[other]]) for key in by_key}
        beside = _of_the_others(by_key.get("allOf", []))  # branches and a reference have none
        members: dict[str, list[Any]] = {}
        for key, i, part in parts:
            others = outside[key] | next(beside) if key == "allOf" else outside[key]
            if key == "$ref":
                new["$ref"] = self._reference(part["$ref"], others, typed, followed)
            else:
                members.setdefault(key, []).append(self.rewrite(part, f"{path}/{key}/{i}", others, typed, followed))
        new.update(members)
        if "oneOf" in members:
            self._rewrite_one_of(new, [part for key, _, part in parts if key == "oneOf"], path)

    def _rewrite_one_of(self, new: dict[str, Any], branches: list[Any], path: str) -> None:
        """Replace `oneOf` by `anyOf`. They are equal if no value fits two branches.

        Otherwise llguidance can enforce only `anyOf`: a strict schema is refused, and another one reported.
        """
        if not self._exclusive(branches):
            if self.strict:
                raise SchemaError(
                    f"{path}/oneOf can only be enforced if types or constants show that no value fits two branches"
                )
            self.rewriter.leave_out(f"{path}/oneOf")
        members = new.pop("oneOf")
        if "anyOf" in new:
            new["allOf"] = [*new.get("allOf", []), {"anyOf": members}]
        else:
            new["anyOf"] = members

    # ---------------------------------------------------------------------------------------------------- names

    def _names(self, schema: Any, followed: tuple[str, ...]) -> Names:
        """All names that a schema and its parts allow for the object. `followed`: references that were followed already."""
        self.rewriter.count()
        if not isinstance(schema, dict):
            return NO_NAMES
        found = _own_names(schema)
        for key, _, part in _parts(schema):
            if key != "$ref":
                found |= self._names(part, followed)
            elif part["$ref"] not in followed:
                found |= self._names(self._target(part["$ref"]), (*followed, part["$ref"]))
        return found

    def _close(self, new: dict[str, Any], names: Names) -> None:
        """Allow only `names` in the object."""
        self.rewriter.count(len(names.listed) + len(names.patterns))
        listed, patterns = new.get("properties", {}), new.get("patternProperties", {})
        if isinstance(listed, dict) and (more := sorted(names.listed - set(listed))):
            new["properties"] = {**listed, **dict.fromkeys(more, True)}
        if isinstance(patterns, dict) and (more := sorted(names.patterns - set(patterns))):
            new["patternProperties"] = {**patterns, **dict.fromkeys(more, True)}
        new["additionalProperties"] = False

    # ---------------------------------------------------------------------------------------------------- references

    def _target(self, reference: str) -> Any:
        """The schema that `reference` names. Raises SchemaError unless it is in this document."""
        own = self.root.get("$id") if isinstance(self.root, dict) else None
        if isinstance(own, str) and f"{reference}#".startswith(own.rstrip("#") + "#"):
            reference = reference[len(own.rstrip("#")) :] or "#"
        if reference != "#" and not reference.startswith("#/"):
            if reference.startswith("#") and (found := self._anchors.get(unquote(reference[1:]))) is not None:
                return found
            raise SchemaError(f"$ref {reference[:100]!r} must begin with #/ or be the $anchor of a part of the schema")
        here = self.root
        for step in unquote(reference[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(here, list) and step.isdecimal() and int(step) < len(here):
                here = here[int(step)]
            elif isinstance(here, dict) and step in here:
                here = here[step]
            else:
                raise SchemaError(f"$ref {reference[:100]!r} leads nowhere")
        return here

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        """The parts of the document that have a name, which a reference may give instead of a path."""
        found, left = dict[str, Any](), [self.root]
        while left:
            here = left.pop()
            self.rewriter.count()
            for key in ("$anchor", "$dynamicAnchor") if isinstance(here, dict) else ():
                if isinstance(here.get(key), str):
                    found[here[key]] = here
            left += here.values() if isinstance(here, dict) else here if isinstance(here, list) else ()
        return found

    def _reference(self, reference: str, others: Names, typed: bool, followed: tuple[str, ...]) -> str:
        target = self._target(reference)
        if reference in followed:
            raise SchemaError(f"$ref {reference[:100]!r} leads back to itself, so it says nothing")
        name = self.defined.get((reference, others, typed))
        if name is None:
            name = self.defined[reference, others, typed] = str(len(self.rewriter.definitions))
            self.rewriter.definitions[name] = True  # placeholder: the target may refer to itself
            place = self.path.rstrip("#") + reference
            self.rewriter.definitions[name] = self.rewrite(target, place, others, typed, (*followed, reference))
        return f"#/$defs/{name}"

    # ---------------------------------------------------------------------------------------------------- exclusive branches

    def _exclusive(self, branches: Any) -> bool:
        """Whether types and constants prove that no value fits two of `branches`."""
        schemas = [self._followed(one) for one in branches]
        if not all(isinstance(one, dict) for one in schemas):
            return False
        if _disjoint([_types(one) for one in schemas]) or _disjoint([_constants(one) for one in schemas]):
            return True
        tags = [
            {name: _constants(self._followed(value)) for name, value in _required_properties(one).items()} for one in schemas
        ]
        shared = set.intersection(*(set(one) for one in tags)) if tags else set()
        return all(_types(one) == {"object"} for one in schemas) and any(
            _disjoint([one[name] for one in tags]) for name in shared
        )

    def _followed(self, schema: Any) -> Any:
        for _ in range(10):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._target(schema["$ref"])
        return schema


def _spelled_out(patterns: dict[str, Any]) -> dict[str, Any] | None:
    """The names that patterns spell out, with their schemas. None if one is not a list of names, or two share a name."""
    names: dict[str, Any] = {}
    for pattern, schema in patterns.items():
        found = SPELLED_OUT.fullmatch(pattern)
        for name in (found[1] or found[2]).split("|") if found else [""]:
            if not name or name in names:
                return None
            names[name] = schema
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


def _lists_properties(schema: dict[str, Any]) -> bool:
    """Whether the schema says which properties exist, so that others are not allowed."""
    listed = any(isinstance(schema.get(key), dict) for key in ("properties", "patternProperties"))
    return listed or schema.get("unevaluatedProperties") is False


def _own_names(schema: dict[str, Any]) -> Names:
    listed, patterns, required = (schema.get(key) for key in ("properties", "patternProperties", "required"))
    names = set(listed) if isinstance(listed, dict) else set[str]()
    if isinstance(required, list) and _lists_properties(schema) and schema.get("unevaluatedProperties") is not False:
        names |= {name for name in required if isinstance(name, str)}
    open_ = schema.get("additionalProperties", schema.get("unevaluatedProperties", False)) is not False
    return Names(frozenset(names), frozenset(patterns if isinstance(patterns, dict) else ()), open_)


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """The subschemas that apply to the same value, as (keyword, index in its list, schema)."""
    for key in ("allOf", "anyOf", "oneOf"):
        members = schema.get(key)
        for i, member in enumerate(members if isinstance(members, list) else []):
            yield key, i, member
    if isinstance(schema.get("$ref"), str):
        yield "$ref", 0, {"$ref": schema["$ref"]}


def _disjoint(sets: list[set[str] | None]) -> bool:
    """Whether no two sets share an element. None stands for the set of all values."""
    seen: set[str] = set()
    for one in sets:
        if one is None or one & seen:
            return False
        seen |= one
    return True


def _types(schema: dict[str, Any]) -> set[str] | None:
    given = schema.get("type")
    if isinstance(given, str):
        given = [given]
    types = {one for one in given if isinstance(one, str)} if isinstance(given, list) else None
    return types | {"integer"} if types and "number" in types else types


def _constants(schema: Any) -> set[str] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    values = schema.get("enum")
    return {json.dumps(value, sort_keys=True) for value in values} if isinstance(values, list) else None


def _required_properties(schema: dict[str, Any]) -> dict[str, Any]:
    listed, required = schema.get("properties"), schema.get("required")
    if not isinstance(listed, dict) or not isinstance(required, list):
        return {}
    return {name: value for name, value in listed.items() if name in required}


def _escape(name: str) -> str:
    """Encode a name for a JSON pointer in a URI fragment (RFC 6901, section 6): ASCII only."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="$")
