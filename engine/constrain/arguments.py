"""Grammars for the arguments of calls that are no JSON: of Python, of tags, and of Gemma."""

import json
from collections.abc import Collection, Iterable
from typing import Any

from engine.calls.syntax import ArgumentSyntax
from engine.calls.values import WORD, parsed, regex, resolved, target, types_of
from engine.constrain.grammars import Compiled, Rules, SchemaError, accepted, lark_json
from engine.constrain.json_schema import CallableTool, compile_schema

MAX_DEPTH = 12  # of nested values whose schemas are followed
MAX_LENGTH = 1000  # longest text whose length is enforced
LENGTHS = ("minLength", "maxLength")
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
PAIRS = {"properties", "required", "additionalProperties"}
ENFORCED = {"integer": NUMBERS, "number": NUMBERS, "array": {"items", "minItems", "maxItems"}, "object": PAIRS}
NO_DEMAND = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment"}
NO_DEMAND |= {"$defs", "definitions", "$anchor", "$dynamicAnchor", "nullable"}


class ArgumentGrammar:
    """The arguments of one tool. What of its schema cannot be enforced is named by `Rules.leave_out`, or a SchemaError if the tool is
    strict."""

    def __init__(self, rules: Rules, syntax: ArgumentSyntax, tool: CallableTool) -> None:
        self._rules, self._syntax, self._tool = rules, syntax, tool
        self._root = tool.schema
        self._any = self._text = ""  # the rules of any value, and of any text
        self._end = syntax.end if syntax.tag else syntax.quotes[0]  # of a text, for the parser
        self._mark = syntax.edge + self._end if syntax.tag else self._end
        self._close = rules.literal(self._mark) if syntax.tag else ""

    def build(self) -> str:
        """Lark for all arguments, and what surrounds them."""
        syntax, path = self._syntax, f"{self._tool.path}#"
        self._name_beside_references(self._root, path, {"type"})
        self._name_others(resolved(self._root, self._root), {"type", *PAIRS}, path)
        pairs = self._pairs(self._root, path, 0)
        return pairs if syntax.tag else f"{self._rules.literal(syntax.begin)} {pairs} {self._rules.literal(syntax.end)}"

    # --- pairs -----------------------------------------------------------------------------------------------------------------

    def _pairs(self, schema: dict[str, Any], path: str, depth: int) -> str:
        schema = resolved(schema, self._root)
        listed, required = schema.get("properties"), schema.get("required", [])
        unlisted = schema.get("additionalProperties")
        properties = {name: unlisted if isinstance(unlisted, dict) else {} for name in required} | (listed or {})
        found = [
            (self._pair(name, self._value(one, f"{path}/properties/{name}", depth + 1, name), depth), name in required)
            for name, one in properties.items()
            if one is not False
        ]
        more = schema.get("additionalProperties", listed is None)
        other = (
            self._other_pair(more if isinstance(more, dict) else {}, path, depth, [*properties]) if more is not False else ""
        )
        if self._syntax.tag:
            tags = [pair if needed else f"({pair})?" for pair, needed in found]
            return " ".join([*tags, *([f"({other})*"] if other else [])])
        return self._separated(found, other)

    def _separated(self, pairs: list[tuple[str, bool]], other: str) -> str:
        """Pairs with commas between. pairs: each with whether it must occur. other: any number of these may follow."""
        rest = f"(COMMA {other})*" if other else ""
        first = [f"{other} {rest}"] if other else []
        empty = True  # nothing need follow
        for pair, needed in reversed(pairs):
            behind = self._rules.rule(rest) if rest else ""
            first = [f"{pair} {behind}", *([] if needed else first)]
            rest = f"COMMA {pair} {behind}" if needed else f"(COMMA {pair})? {behind}"
            empty = empty and not needed
        return f"({' | '.join(first)}){'?' * empty}" if first else ""

    def _pair(self, name: str, value: str, depth: int) -> str:
        syntax, rules = self._syntax, self._rules
        if syntax.tag:
            begin = rules.literal(syntax.tag + self._spelled_name(name, depth))
            return f"{begin} {rules.spaced(syntax.to_value)} {rules.literal(syntax.edge)} {value} SPACE"
        assign = rules.literal(":" if depth else syntax.assign)
        return f"{rules.literal(self._spelled_name(name, depth))} {assign} SPACE {value}"

    def _spelled_name(self, name: str, depth: int) -> str:
        """A name as the model writes it. Raises SchemaError if the parser would read another one."""
        syntax = self._syntax
        if depth and syntax.escapes:
            return json.dumps(name)
        if syntax.to_value.split()[0] not in name if syntax.tag else name and WORD.fullmatch(name):
            return name
        if syntax.tag or syntax.escapes:
            raise self._unwritable(name)
        return self._spelled(name)

    def _other_pair(self, schema: dict[str, Any], path: str, depth: int, listed: list[str]) -> str:
        """A pair with a name that is not listed."""
        value = self._value(schema, f"{path}/additionalProperties", depth + 1)
        if self._syntax.tag:
            pair = self._pair("", value, depth).removeprefix(f"{self._rules.literal(self._syntax.tag)} ")
            return f"{self._rules.literal(self._syntax.tag)} {self._other_than('NAME', listed)} {pair}"
        name = self._name(listed) if depth else self._other_than("NAME", listed)
        return f"{name} {self._rules.literal(':' if depth else self._syntax.assign)} SPACE {value}"

    # --- values ----------------------------------------------------------------------------------------------------------------

    def _value(self, schema: Any, path: str, depth: int, name: str = "") -> str:
        """A value. In tags it ends with its closing tag. name: of its property."""
        if depth > MAX_DEPTH:
            self._leave_out(path)
            return self._any_value()
        self._name_beside_references(schema, path)
        if isinstance(schema, dict) and "$ref" in schema:
            path = f"{path}/$ref"
        if schema is False:
            self._leave_out(path)
        schema = resolved(schema, self._root)
        if "enum" in schema or "const" in schema:
            values = self._fitting(schema, path)
            known = set(map(json.dumps, values))
            texts = [text for one in values for text in self._constant(one, known, name)]
            return f"{self._rules.any_of(texts)} {self._close}"
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                self._name_others(schema, {key, "type"}, path)
                each = []
                for i, branch in enumerate(schema[key]):
                    self._name_beside_references(branch, f"{path}/{key}/{i}")
                    each.append(self._value(self._of_type(branch, schema, path), f"{path}/{key}/{i}", depth + 1, name))
                return self._alternatives(each)
        types = schema.get("type", "object" if "properties" in schema else [])
        kinds = types if isinstance(types, list) else [types]
        whole = {"array", "object"} if self._syntax.tag else set[str]()  # JSON, with all that its schema demands
        if not whole.intersection(kinds):
            self._name_others(schema, {"type"}.union(*(self._enforced(kind) for kind in kinds)), path)
        if not kinds:
            return self._any_value()
        return self._alternatives([self._typed(kind, schema, path, depth) for kind in kinds])

    def _of_type(self, branch: Any, schema: dict[str, Any], path: str) -> Any:
        """A branch of `schema`, with the types of both."""
        if "type" not in schema or branch is False:
            return branch
        found = resolved(branch, self._root)
        if found.get("type", schema["type"]) != schema["type"]:
            self._leave_out(f"{path}/type")
        return {"type": schema["type"], **found}

    def _fitting(self, schema: dict[str, Any], path: str) -> list[Any]:
        """The constants that fit the whole schema. Raises SchemaError if none does."""
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        if len(schema.keys() - NO_DEMAND) > 1:
            grammar = self._as_json(schema, path, strict=False).grammar
            values = [json.loads(text) for text in accepted(grammar, list(map(lark_json, values)))]
        if not values:
            raise SchemaError(f"{path}: no value fits", self._tool.position)
        return values

    def _as_json(self, schema: dict[str, Any], path: str, strict: bool) -> Compiled:
        definitions: dict[str, Any] = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return compile_schema({**definitions, **schema}, strict, path=path)

    def _enforced(self, kind: str) -> set[str]:
        """The keywords that this form can enforce for values of a type."""
        if kind == "string":
            return {*LENGTHS, *(("pattern", "format") if self._syntax.escapes else ())}
        return ENFORCED.get(kind, set())

    def _alternatives(self, each: list[str]) -> str:
        """Any of them. In tags a free text is all that another value could be."""
        return self._free() if self._syntax.tag and self._free() in each else self._choice(each)

    def _free(self) -> str:
        """A text without bounds, up to what ends it."""
        if not self._text:
            self._text = self._rules.until(self._mark, self._without_end("TEXT") if self._syntax.tag else "TEXT")
        return self._text

    def _without_end(self, text: str) -> str:
        """`text` that has nothing that ends it for the parser."""
        return self._rules.terminal(rf"{text} & ~/(.|\n)*({regex(self._end)})(.|\n)*/")

    def _typed(self, kind: str, schema: dict[str, Any], path: str, depth: int) -> str:
        rules, names = self._rules, self._syntax.names
        if kind == "string":
            return self._string(schema, path)
        if kind == "boolean":
            return self._choice(f"{rules.literal(one)} {self._close}" for one in names[:2])
        if kind == "null":
            return f"{rules.literal(names[2])} {self._close}"
        if self._syntax.tag or kind not in ("array", "object"):
            own = schema if kind in ("array", "object") else {key: schema[key] for key in NUMBERS if key in schema}
            return f"{rules.part(self._as_json({**own, 'type': kind}, path, self._tool.strict))} {self._close}"
        if kind == "object":
            return f'"{{" {self._pairs(schema, path, depth)} "}}"'
        item = rules.rule(self._value(schema.get("items", {}), f"{path}/items", depth + 1))
        least, most = schema.get("minItems", 0), schema.get("maxItems", "")
        if most == 0:
            return '"[" "]"'
        items = f"{item} (COMMA {item}){{{max(least - 1, 0)},{most and most - 1}}}"
        return f'"[" ({items}){"?" * (not least)} "]"'

    def _string(self, schema: dict[str, Any], path: str) -> str:
        syntax, rules = self._syntax, self._rules
        own = {key: schema[key] for key in self._enforced("string") if key in schema}
        if syntax.escapes:
            text = rules.part(compile_schema({**own, "type": "string"}, self._tool.strict, path=path))
            return text if own else rf"({text} | /'([^'\\\n]|\\['\"\\ntr])*'/)"
        begin = "" if syntax.tag else rules.literal(self._end)
        least, most = own.get("minLength", 0), own.get("maxLength", "")
        if not own or max(least, most or 0) > MAX_LENGTH:
            for key in own:
                self._leave_out(f"{path}/{key}")
            return f"{begin} {self._free()}".strip()
        text = self._without_end(rf"/(.|\n){{{least},{most}}}/")
        return f"{begin} {rules.until(self._mark, text)}"

    def _any_value(self) -> str:
        syntax, rules = self._syntax, self._rules
        if syntax.tag:
            return self._free()
        if not self._any:
            self._any = rules.rule("")  # which is a part of itself
            pair = f'{self._name([])} ":" SPACE {self._any}'
            scalars = [self._typed(kind, {}, "", 0) for kind in ("string", "number", "boolean", "null")]
            array, pairs = f'"[" ({self._any} (COMMA {self._any})*)? "]"', f'"{{" ({pair} (COMMA {pair})*)? "}}"'
            rules.fill(self._any, " | ".join([*scalars, array, pairs]))
        return self._any

    def _name(self, listed: list[str]) -> str:
        """A name within a value that is not listed."""
        if self._syntax.escapes:
            return self._other_than(r'/"[^"\\\n]*"/', [json.dumps(one, ensure_ascii=False) for one in listed])
        quoted = self._rules.until(self._mark, self._other_than("TEXT", listed))
        return f"({self._other_than('NAME', listed)} | {self._rules.literal(self._mark)} {quoted})"

    def _other_than(self, terminal: str, texts: list[str]) -> str:
        return self._rules.terminal(f"{terminal} & ~/({'|'.join(map(regex, texts))})/") if texts else terminal

    def _constant(self, value: Any, known: set[str], name: str) -> list[str]:
        """A value of the property `name`, in the ways in which the model may write it. known: JSON of all its values. Raises
        SchemaError if the parser would read none of them."""
        if not self._syntax.tag:
            text = self._spelled(value)
            in_single_quotes = "'" + text[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
            return [text, in_single_quotes] if self._syntax.escapes and isinstance(value, str) else [text]
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        types = types_of(self._root, name)
        read = value if types == {"string"} and text is value else json.loads(parsed(text, types))
        ends = self._end in text and (isinstance(value, str) or not types or "string" in types)
        if ends or json.dumps(read) not in known:
            raise self._unwritable(value)
        return [text]

    def _spelled(self, value: Any) -> str:
        syntax = self._syntax
        if value is None or isinstance(value, bool):
            return syntax.names[2 if value is None else not value]
        if syntax.escapes or isinstance(value, int | float):
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, list):
            return f"[{','.join(map(self._spelled, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{self._spelled_name(name, 1)}:{self._spelled(one)}' for name, one in value.items())}}}"
        if self._end in value:
            raise self._unwritable(value)
        return f"{self._end}{value}{self._end}"

    def _unwritable(self, value: Any) -> SchemaError:
        shown = json.dumps(value, ensure_ascii=False)[:100]
        return SchemaError(f"{shown} cannot be written in the form in which this model writes calls", self._tool.position)

    def _choice(self, each: Iterable[str]) -> str:
        return f"({' | '.join(each)})"

    # --- what is not enforced --------------------------------------------------------------------------------------------------

    def _name_others(self, schema: dict[str, Any], enforced: set[str], path: str) -> None:
        for key in schema:
            if key not in NO_DEMAND | enforced:
                self._leave_out(f"{path}/{key}")

    def _name_beside_references(self, schema: Any, path: str, enforced: Collection[str] = ()) -> None:
        """Only what they lead to is enforced."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            path, given, schema = f"{path}/$ref", schema, target(schema["$ref"], self._root)
            self._name_others(given, {"$ref", *enforced}, path.removesuffix("/$ref"))

    def _leave_out(self, path: str) -> None:
        if self._tool.strict:
            raise SchemaError(f"{path} cannot be enforced in the form in which this model writes calls", self._tool.position)
        self._rules.leave_out(path)
