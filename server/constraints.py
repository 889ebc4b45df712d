"""Compile what a request demands of its answer: a format, a tool call, either of both, or calls within free text.

The parts, such as a JSON schema, are grammars of their own. A Lark grammar refers to them and says in which order they come.
In free text a lazy rule ends at the first text that begins a call; from there on the call's grammar holds. Special tokens are
no text for llguidance: a grammar names them by id.

This module runs in worker processes.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import ValidationError

from server.call_syntax import JSON, CallSyntax, Marks
from server.json_schema import CallableTool, Compiled, SchemaError, check_grammar, compile_calls, compile_schema
from server.schemas import Constraint, StructuralTagFormat

LARK = re.compile(r"^\s*(%llguidance\b|\??start\b[^:\n]*:(?!:=))", re.MULTILINE)  # otherwise GBNF, whose rules are `name ::= …`
GAP = r"/\n{1,4}/?"  # between reasoning and what follows it


class Demand(NamedTuple):
    """What a request demands of its answer.

    `tools` with `calls` "must": one call. "may": one or several calls, or else `constraint`; or calls within free text if that is
    None, which needs a `syntax` with a trigger. Without a trigger a call is the JSON of its name and arguments. `special`: ids of special
    tokens that `syntax`, `reasoning` and structural tags may spell, by their text.
    """

    constraint: Constraint | None = None
    tools: Sequence[CallableTool] = ()
    calls: Literal["must", "may"] = "may"
    several: bool = True
    syntax: CallSyntax = JSON
    reasoning: Marks | None = None
    special: dict[str, int] = {}


class Tag(NamedTuple):
    """A part of free text: `begin`, which starts with `trigger`, text of the grammar `body`, and `end`."""

    trigger: str
    begin: str
    body: Compiled
    end: str


def compile_demand(demand: Demand) -> Compiled:
    """Raises SchemaError."""
    constraint, tools, syntax = demand.constraint, demand.tools, demand.syntax
    rules = _Rules(demand.special, demand.reasoning)
    if not tools:
        assert constraint is not None
        if constraint.kind == "structural_tag":
            return rules.finish(rules.free(_structures(constraint.value, demand.special)))
        return rules.finish_with(_compile(constraint))
    if demand.calls == "may" and constraint is None:
        assert syntax.trigger
        tags = [
            Tag(syntax.trigger, syntax.before_name + t.name + syntax.before_arguments, b, syntax.end)
            for t, b in _optional(tools)
        ]
        return rules.finish(rules.free(tags))
    if not syntax.trigger:
        if demand.calls == "may" and constraint is not None and constraint.kind == "json":  # one schema: both may begin alike
            schema = _schema(constraint.value)
            return rules.finish_with(compile_calls(tools, schema, constraint.strict, constraint.whitespace, syntax.key))
        call = rules.part(compile_calls(tools, key=syntax.key))
    else:
        call = rules.call(syntax, _required(tools) if demand.calls == "must" else _optional(tools))
    if demand.calls == "must":
        return rules.finish(rules.after_reasoning(call))
    assert constraint is not None
    calls = f'{call} ("\\n" {call})*' if demand.several and syntax.trigger else call
    if constraint.kind == "structural_tag":
        raise SchemaError("structural tags cannot be combined with tools")
    return rules.finish(rules.after_reasoning(f"({calls} | {rules.part(_compile(constraint))})"))


def _compile(constraint: Constraint) -> Compiled:
    """The grammar of a format."""
    match constraint.kind:
        case "json":
            return compile_schema(_schema(constraint.value), constraint.strict, constraint.whitespace)
        case "regex":
            return _checked(LLMatcher.grammar_from_regex(constraint.value))
        case "choice":  # a terminal: as many as one likes are a single item of the parser
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in constraint.value)
            return _checked(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"))
        case _:
            return _checked(LLMatcher.grammar_from_lark(_lark(constraint.value)))


def _lark(text: str) -> str:
    if LARK.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except RecursionError as e:
        raise SchemaError("it is nested too deeply") from e
    except Exception as e:  # the library raises many kinds
        raise SchemaError(f"it is neither Lark, which begins at `start:`, nor GBNF: {' '.join(str(e).split())[:200]}") from e


def _schema(given: dict[str, Any] | str) -> dict[str, Any]:
    schema = _object(given)
    return schema or {"type": "object"}


def _object(given: dict[str, Any] | str) -> dict[str, Any]:
    """A JSON object, given as such or as text."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as e:
            raise SchemaError("it is not valid JSON") from e
    if not isinstance(given, dict):
        raise SchemaError("it is not an object")
    return given


def _structures(given: dict[str, Any] | str, special: Iterable[str]) -> list[Tag]:
    """special: texts of special tokens. Raises SchemaError."""
    try:
        tags = StructuralTagFormat.model_validate(_object(given) | {"type": "structural_tag"})
    except ValidationError as e:
        first = e.errors()[0]
        raise SchemaError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from e
    found = []
    for i, one in enumerate(tags.structures):
        trigger = next((t for t in tags.triggers if one.begin.startswith(t)), None)
        if trigger is None:
            raise SchemaError(f"structures.{i}.begin starts with none of the triggers")
        if late := next((text for text in special if trigger.find(text) > 0), None):  # the text before it would be the trigger
            raise SchemaError(
                f"the trigger {trigger!r} has the special token {late!r} behind other text; let it begin with that"
            )
        found.append(Tag(trigger, one.begin, compile_schema(one.schema_, False, path=f"structures.{i}.schema#"), one.end))
    return found


def _required(tools: Iterable[CallableTool]) -> list[tuple[CallableTool, Compiled]]:
    """The arguments of tools of which one must be called."""
    return [(tool, _arguments(tool)) for tool in tools]


def _optional(tools: Iterable[CallableTool]) -> list[tuple[CallableTool, Compiled]]:
    """The same of tools that need not be called. One whose schema is wrong and not strict takes any object."""
    return [(tool, _arguments(tool) if tool.strict else _arguments_or_any(tool)) for tool in tools]


def _arguments(tool: CallableTool) -> Compiled:
    try:
        return compile_schema(tool.schema, tool.strict, path=f"{tool.path}#")
    except SchemaError as e:
        raise SchemaError(str(e), tool.position) from e


def _arguments_or_any(tool: CallableTool) -> Compiled:
    try:
        return _arguments(tool)
    except SchemaError:
        return Compiled(compile_schema({"type": "object"}, strict=True).grammar, (tool.path,))


def _checked(grammar: str) -> Compiled:
    return Compiled(grammar, tuple(check_grammar(grammar)))


class _Rules:
    """The rules of a Lark grammar, and the grammars to which they refer."""

    def __init__(self, special: dict[str, int], reasoning: Marks | None) -> None:
        self.special, self.reasoning = special, reasoning
        self._rules = [r"TEXT: /(.|\n)*/"]
        self._parts: list[dict[str, Any]] = []
        self._not_enforced: list[str] = []

    def finish(self, start: str) -> Compiled:
        """The whole grammar, whose first rule is `start`."""
        lark = "\n".join([f"start: {start}", *self._rules])
        text = json.dumps({"grammars": [{"name": "start", "lark_grammar": lark}, *self._parts]})
        check_grammar(text)
        return Compiled(text, tuple(self._not_enforced))

    def finish_with(self, only: Compiled) -> Compiled:
        """The whole grammar of an answer that is `only`."""
        return self.finish(self.after_reasoning(self.part(only))) if self.reasoning else only

    def part(self, compiled: Compiled) -> str:
        """A reference to a grammar."""
        (grammar,) = json.loads(compiled.grammar)["grammars"]
        name = f"part_{len(self._parts)}"
        self._parts.append({**grammar, "name": name})
        self._not_enforced += compiled.not_enforced
        return f"@{name}"

    def call(self, syntax: CallSyntax, tools: Iterable[tuple[CallableTool, Compiled]]) -> str:
        """A call of one of the tools, given with their arguments."""
        calls = [
            f"{self._literal(syntax.before_name + tool.name + syntax.before_arguments)} {self.part(arguments)} {self._literal(syntax.end)}"
            for tool, arguments in tools
        ]
        return self._rule(" | ".join(calls))

    def free(self, tags: Sequence[Tag]) -> str:
        """Free text that may hold `tags`, after reasoning, which holds none of them. As for the parser, only the beginning can be
        reasoning."""
        triggers: dict[str, list[str]] = {}
        for tag in tags:
            rest = f"{self._literal(tag.begin[len(tag.trigger) :])} {self.part(tag.body)} {self._literal(tag.end)}"
            triggers.setdefault(tag.trigger, []).append(rest)
        rests = {trigger: self._rule(" | ".join(found)) for trigger, found in triggers.items()}

        def tagged(text: str) -> str:
            return self._rule(" | ".join(f"{self._until(trigger, text)} {rest}" for trigger, rest in rests.items()))

        more = f"{tagged('TEXT')}* TEXT"
        if self.reasoning is None:
            return more
        begin, end, begins_inside = self.reasoning
        if begins_inside:
            return f"{self._until(end)} {more}"
        text = "TEXT"
        if begin not in self.special:
            text = "OUTSIDE"
            self._rules.append(rf"OUTSIDE: /(.|\n)*/ & ~/\s*{_regex(begin)}(.|\n)*/")
        return f"(({self._opened()} | {tagged(text)}) {more} | TEXT)"

    def after_reasoning(self, answer: str) -> str:
        """`answer`, after reasoning if the model reasons."""
        if self.reasoning is None:
            return answer
        if self.reasoning.begins_inside:
            return f"{self._until(self.reasoning.end)} {GAP} {answer}"
        return f"({self._opened()} {GAP})? {answer}"

    def _opened(self) -> str:
        """Reasoning with its beginning and its end."""
        assert self.reasoning is not None
        begin, end, _ = self.reasoning
        if begin in self.special:
            return rf"/\s*/ {self._literal(begin)} {self._until(end)}"
        if end in self.special:
            return rf"/\s*{_regex(begin)}(.|\n)*/ {self._literal(end)}"
        return self._rule(rf"/\s*{_regex(begin)}(.|\n)*/ {self._literal(end)}", lazy=True)

    def _until(self, mark: str, text: str = "TEXT") -> str:
        """Text up to the first `mark`, and the mark."""
        first, rest = self._pieces(mark)[0], self._pieces(mark)[1:]
        if first in self.special:
            return f"{text} {self._literal(mark)}"
        return " ".join([self._rule(f"{text} {self._literal(first)}", lazy=True), *map(self._literal, rest)])

    def _rule(self, body: str, lazy: bool = False) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' * lazy}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """Exactly `text`."""
        pieces = self._pieces(text)
        return " ".join(f"<[{self.special[p]}]>" if p in self.special else json.dumps(p, ensure_ascii=False) for p in pieces)

    def _pieces(self, text: str) -> list[str]:
        """`text`, cut before and after special tokens."""
        spelled = sorted(self.special, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, spelled))})", text) if spelled else [text]
        return [piece for piece in pieces if piece]


def _regex(text: str) -> str:
    return "".join(f"\\x{{{ord(c):x}}}" for c in text)
