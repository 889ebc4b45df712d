"""Compile what a request demands of its answer: a format, a tool call, either of both, or calls within free text.

The parts, such as a JSON schema, are grammars of their own. A Lark grammar refers to them and says in which order they come.
In free text a lazy rule ends at the first text that begins a call; from there on the call's grammar holds. Special tokens are
no text for llguidance: a grammar names them by id.

A server runs this in worker processes.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from cli import note
from engine.calls.syntax import HARMONY, JSON, JSON_LIST, SYNTAXES, CallSyntax, Marks, syntax_of
from engine.calls.values import regex
from engine.constrain.arguments import ArgumentGrammar
from engine.constrain.formats import compile_format, schema_of
from engine.constrain.grammars import Compiled, Rules, SchemaError, accepted, check_matcher
from engine.constrain.json_schema import CallableTool, compile_arguments, compile_calls, compile_schema
from engine.text import special_ids
from errors import UserError
from text.tokenizer import Tokenizer

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]  # of constraints
GAP = r"/\n{1,4}/?"  # between reasoning and what follows it
SPACES = r"[ \n]{0,2}"  # with a bound, because a small model could otherwise fill the answer with them

FENCE = "```[a-z_]*"
# most tools whose arguments may come before the name, and most optional properties of all of them: the grammar follows those of all
# tools until it knows which
MAX_UNNAMED = 16
MAX_UNNAMED_PROPERTIES = 128


class Constraint(NamedTuple):
    """What the whole answer must be. `param`: the field of the request that says so."""

    kind: Kind
    value: Any
    param: str
    strict: bool = False  # all of a JSON schema must be enforced
    whitespace: str | None = None  # the regex of what may stand between JSON tokens; None: the default


class Demand(NamedTuple):
    """What a request demands of its answer.

    `tools` with `calls` "must": one call. "may": one or several calls, or else `constraint`; or calls within free text if that is
    None. `special`: ids of special tokens that `syntax`, `reasoning` and structural tags may spell, by their text.
    """

    constraint: Constraint | None = None
    tools: Sequence[CallableTool] = ()
    calls: Literal["must", "may"] = "may"
    several: bool = True
    syntax: CallSyntax = JSON
    reasoning: Marks | None = None
    special: dict[str, int] = {}

    def with_special(self, tokenizer: Tokenizer) -> "Demand":
        """The same with `special` of this tokenizer."""
        if self.constraint and self.constraint.kind == "structural_tag":
            return self._replace(special=tokenizer.special_texts)
        texts = (*self.syntax.markers, *(self.reasoning[:2] if self.reasoning else ()))
        return self._replace(special=special_ids(tokenizer, texts))


class Spelling(NamedTuple):
    """How a call may be spelled, as regular expressions. `around`: spaces around an object. `head`: an object up to the name's value.
    `to_arguments`: from a name to the arguments. `tail`: what follows. `id_lengths`: of an id between a name and `[ARGS]`.

    `free`: arguments may also come before the name, or be left out. `arguments_first`: an object up to such arguments. `to_name`: from
    there to the name.
    """

    around: str
    head: str
    to_arguments: str
    tail: str
    id_lengths: str
    free: bool = False
    arguments_first: str = ""
    to_name: str = ""


def free_spelling() -> Spelling:
    """All that models write, for calls that they begin themselves."""
    space = SPACES
    pair = f'("id"{space}:{space}"[A-Za-z0-9_-]{{1,64}}"|"type"{space}:{space}"function"){space}'
    pairs, more = f"({pair},{space}){{0,2}}", f"(,{space}{pair}){{0,2}}"
    name, key = f'"name"{space}:{space}"', f'"(arguments|parameters)"{space}:{space}'
    return Spelling(
        around=space,
        head=rf"\{{{space}{pairs}{name}",
        to_arguments=f"{space}{more},{space}{key}",
        tail=rf"{space}{more}\}}{space}",
        id_lengths="1,64",
        free=True,
        arguments_first=rf"\{{{space}{pairs}{key}",
        to_name=f"{space},{space}{name}",
    )


def forced_spelling(syntax: CallSyntax) -> Spelling:
    """What the family writes. A model that would write something else chooses badly among more."""
    space, around = "[ ]?", r"[ \n]?"
    name, key = f'"name"{space}:{space}"', f'"{syntax.key}"{space}:{space}'
    call_id = f'(,{space}"id"{space}:{space}"[A-Za-z0-9]{{{syntax.id_length}}}"{space})?' if syntax.id_length else ""
    return Spelling(
        around=around,
        head=rf"\{{{space}{name}",
        to_arguments=f"{space},{space}{key}",
        tail=rf"{space}{call_id}\}}{around}",
        id_lengths=str(syntax.id_length),
    )


class Function(NamedTuple):
    """A tool in a grammar. `arguments`: a reference to their grammar. `bare`: it may be called without any. `optional`: how many of
    them it lists that may be left out."""

    name: str
    arguments: str
    bare: bool
    optional: int


class Place(NamedTuple):
    """Where text may be a call without a trigger. `begin`: the regular expression of an object up to the name's value. `call`: what
    follows if it is a call. `other`: text that is none."""

    begin: str
    call: str
    other: str


def compile_demand(demand: Demand) -> Compiled:
    """Raises SchemaError, also for a grammar that the ranks would refuse, and before it costs them anything."""
    found = _demanded(demand)
    check_matcher(found.grammar)
    return found


def _demanded(demand: Demand) -> Compiled:
    constraint, tools, syntax = demand.constraint, demand.tools, demand.syntax
    has_tags = constraint is not None and constraint.kind == "structural_tag"
    if has_tags and tools:
        raise SchemaError("structural tags cannot be combined with tools")
    if syntax == HARMONY:
        return _in_harmony(demand)
    free = demand.calls == "may" and constraint is None
    rules = AnswerRules(demand.special, demand.reasoning, free_spelling() if free else forced_spelling(syntax))
    if free:
        return rules.finish(rules.free_with_calls(syntax, rules.callables(syntax, tools)))
    if constraint and has_tags:
        return rules.finish(rules.free(rules.structures(constraint.value)))
    has_plain = bool(tools) and syntax.plain and not syntax.arguments
    if has_plain and constraint and constraint.kind == "json":  # one schema: both may begin alike
        whole = [compile_calls(tools, schema_of(constraint.value), constraint.strict, constraint.whitespace, syntax.key)]
    else:
        whole = [compile_calls(tools, key=syntax.key)] if has_plain else []
        whole += [compile_format(*constraint[:2], *constraint[3:])] if constraint else []
    marked = list[str]()
    if tools and (syntax.trigger or syntax.arguments):
        must = demand.calls == "must"
        marked = rules.all_calls(syntax, rules.callables(syntax, tools, must), demand.several and not must)
    if len(whole) == 1 and not marked:
        return rules.finish_with(whole[0])
    return rules.finish(rules.after_reasoning(f"({' | '.join([*marked, *map(rules.part, whole)])})"))


def _in_harmony(demand: Demand) -> Compiled:
    """An answer in gpt-oss's format: messages of reasoning and text, then a call, or a last text, which a constraint is for."""
    constraint, must = demand.constraint, demand.calls == "must"
    rules = AnswerRules(demand.special, None, forced_spelling(HARMONY))
    channel, constrain, message = (rules.literal(f"<|{name}|>") for name in ("channel", "constrain", "message"))
    # the recipient is written behind the channel or in front of it
    content = f"/ ?/ ({constrain})? /(json)?/ {message}"
    ends = [
        f'({channel} "commentary to=functions." {rules.literal(tool.name)} | " to=functions." {rules.literal(tool.name)} {channel} '
        f'"commentary") {content} {tool.arguments} ({rules.literal("<|call|>")})?'
        for tool in rules.callables(HARMONY, demand.tools, must)
    ]
    if not must:
        text = "TEXT" if constraint is None else ""
        if constraint and constraint.kind == "structural_tag":
            text = rules.free(rules.structures(constraint.value))
        elif constraint:
            text = rules.part(compile_format(*constraint[:2], *constraint[3:]))
        ends.append(f'{channel} "final" {content if constraint else message} {text}')
    before = rules.rule(
        f"{channel} /(analysis|commentary)/ {message} {rules.until('<|end|>')} {rules.literal('<|start|>assistant')}"
    )
    return rules.finish(f"{before}* ({' | '.join(ends)})")


def _count_optional(tool: CallableTool) -> int:
    properties, required = ((tool.parameters or {}).get(key) for key in ("properties", "required"))
    names = set(properties) if isinstance(properties, dict) else set[str]()
    return len(names.difference(one for one in required if isinstance(one, str)) if isinstance(required, list) else names)


@lru_cache(maxsize=32)  # for many prompts
def calls_grammar(tokenizer: Tokenizer, template: str, tools: str, reasoning: Marks | None) -> tuple[str | None, bool]:
    """The grammar of free text with calls of the tools, a JSON list as in /v1/chat/completions, and whether one is strict. None: they stay
    free, as the template does not tell how they are written, or a schema is wrong, which a note says. Raises UserError if it is strict."""
    functions = [tool["function"] for tool in json.loads(tools)]
    found = [CallableTool(i, f["name"], f.get("parameters"), f.get("strict") is True) for i, f in enumerate(functions)]
    strict = any(tool.strict for tool in found)
    syntax = SYNTAXES.get(syntax_of(template) or "")
    if tokenizer.no_grammars or syntax is None or (syntax is JSON and not strict):  # as JSON is only a guess
        return None, strict
    try:
        compiled = compile_demand(Demand(tools=found, syntax=syntax, reasoning=reasoning).with_special(tokenizer))
    except SchemaError as e:
        if strict:
            raise UserError(f"tools have a schema that cannot be enforced: {e}") from None
        note(f"the arguments of calls are not constrained: {e}")
        return None, strict
    if compiled.not_enforced:
        note(f"not enforced of tools: {', '.join(compiled.not_enforced)}")
    return compiled.grammar, strict


class AnswerRules(Rules):
    """The rules of an answer's grammar: reasoning, calls, free text."""

    def __init__(self, special: dict[str, int], reasoning: Marks | None, spelling: Spelling) -> None:
        super().__init__(special)
        self.reasoning, self.spelling = reasoning, spelling

    def finish_with(self, only: Compiled) -> Compiled:
        """The whole grammar of an answer that is `only`."""
        return self.finish(self.after_reasoning(self.part(only))) if self.reasoning else only

    # --- calls -----------------------------------------------------------------------------------------------------------------

    def callables(self, syntax: CallSyntax, tools: Iterable[CallableTool], must: bool = False) -> list[Function]:
        """The tools with the grammars of their arguments. must: one must be called. A tool that need not be called, and whose schema
        is wrong and not strict, takes any arguments."""
        self._rules += [f"TO_ARGUMENTS: /{self.spelling.to_arguments}/", f"TAIL: /{self.spelling.tail}/"]
        self._rules += [f"SPACE: /{self.spelling.around}/", f"COMMA: /{self.spelling.around},{self.spelling.around}/"]
        self._rules.append("NAME: /[A-Za-z0-9_.-]{1,64}/")
        return [self._callable(syntax, tool, must or tool.strict) for tool in tools]

    def _callable(self, syntax: CallSyntax, tool: CallableTool, must: bool) -> Function:
        try:
            compiled = compile_arguments(tool)
            if syntax.arguments is None:
                return Function(tool.name, self.part(compiled), bool(accepted(compiled.grammar, ["{}"])), _count_optional(tool))
            for path in compiled.not_enforced:
                self.leave_out(path)
            return Function(tool.name, self.rule(ArgumentGrammar(self, syntax.arguments, tool).build()), False, 0)
        except SchemaError:
            if must:
                raise
            self.leave_out(tool.path)
            return self._callable(syntax, tool._replace(parameters={"additionalProperties": True}), must=True)

    def all_calls(self, syntax: CallSyntax, tools: Sequence[Function], several: bool) -> list[str]:
        """Calls and nothing else, in the ways in which they may begin, but for JSON without a trigger."""
        found = [self._calls(syntax, tools, several)] if syntax.trigger else []
        if syntax.plain and syntax.arguments:
            found.append(self._calls(replace(syntax, trigger="", end=""), tools, several))
        return found

    def _calls(self, syntax: CallSyntax, tools: Sequence[Function], several: bool) -> str:
        begin = syntax.section[0] if syntax.section else syntax.trigger
        group = f"{self.literal(begin)} {self._group(syntax, tools, several)}"
        if not several or syntax.section or (syntax.between and not syntax.opening):
            return group
        group = self.rule(group)
        return rf"{group} (/[ \n]/? {group})*"

    def free_with_calls(self, syntax: CallSyntax, tools: Sequence[Function]) -> str:
        """Free text that may hold calls."""
        begin = syntax.section[0] if syntax.section else syntax.trigger
        tags = {begin: [self._group(syntax, tools, several=True)]} if begin else {}
        for other in syntax.also:  # has the first word of the end alone; the rest is text that the parser drops
            own = replace(syntax, before=syntax.before.strip().removeprefix(other), end="".join(syntax.end.split()[:1]))
            tags[other] = [self._group(own, tools, several=True)]
        if not syntax.plain:
            return self.free(tags)
        names = "|".join(regex(tool.name) for tool in tools)
        if syntax.arguments:
            call = self._named(syntax, tools)
            return self.free(tags, Place(r"\s*\[\s*", f'{call} (COMMA {call})* SPACE "]"', self._text_without(rf"({names})\(")))
        # any number of spaces, as for the parser: text is free anyway
        spelling = self.spelling
        head, to_arguments = (one.replace(spelling.around, r"\s*") for one in (spelling.head, spelling.to_arguments))
        calls = [f'/{regex(tool.name)}"{to_arguments}/ {tool.arguments} TAIL' for tool in tools]
        call = self.rule(" | ".join(calls))
        other = self._text_without(f'({names})"{to_arguments}')
        first = Place(rf"\s*({FENCE}\s*)?(\[\s*)?{head}", call, other)
        more = Place(rf"\s*[;,]?\s*{head}", call, other)
        return self.free(tags, first, more)

    def _group(self, syntax: CallSyntax, tools: Sequence[Function], several: bool) -> str:
        """What follows the first text of calls."""
        if syntax.form == "object":
            around = self.spelling.around
            group = self._object(f"{around}{regex(syntax.opening)}{around}" if syntax.opening else around, tools)
            more = f"{self._object(f'{regex(syntax.between)}{around}', tools)}*" if several and syntax.between else ""
            group = f"{group} {more} {self.literal(syntax.closing)}"
        else:
            group = call = self._named(syntax, tools)
            if syntax.between:
                comma = "COMMA" if syntax.between == "," else "SPACE"
                more = f"({comma} {call})*" * several
                group = f"SPACE {self.literal(syntax.opening)} SPACE {call} {more} SPACE {self.literal(syntax.closing)}"
            if syntax.id_mark:  # the older form of the family
                group = self.rule(f"{group} | {self._group(JSON_LIST, tools, several)}")
        group = f"{group} {self.spaced(syntax.end)}"
        if syntax.section is None:
            return group
        group = self.rule(f"SPACE {self.literal(syntax.trigger)} {group}")
        return f"{group}{'+' * several} SPACE {self.literal(syntax.section[1])}"

    def _object(self, begin: str, tools: Sequence[Function]) -> str:
        """An object that is a call, behind `begin`, a regular expression."""
        spelling = self.spelling
        bare = " | TAIL" if spelling.free else ""
        named = [f'/{regex(tool.name)}"/ (TO_ARGUMENTS {tool.arguments} TAIL{bare * tool.bare})' for tool in tools]
        found = f"/{begin}{spelling.head}/ {self.rule(' | '.join(named))}"
        optional = sum(tool.optional for tool in tools)
        if not spelling.free or len(tools) > MAX_UNNAMED or optional > MAX_UNNAMED_PROPERTIES:
            return self.rule(found)
        unnamed = [f'{tool.arguments} /{spelling.to_name}/ /{regex(tool.name)}"/ TAIL' for tool in tools]
        return self.rule(f"{found} | /{begin}{spelling.arguments_first}/ {self.rule(' | '.join(unnamed))}")

    def _named(self, syntax: CallSyntax, tools: Sequence[Function]) -> str:
        """A call that begins with its name."""
        spelling = self.spelling
        call_id = f"({self.literal(syntax.id_mark)} /[A-Za-z0-9]{{{spelling.id_lengths}}}/)?" if syntax.id_mark else ""
        call_id = "/:[0-9]{1,4}/" if syntax.name_in_id else call_id
        before = self.spaced(syntax.before)
        if syntax.before.strip() == syntax.before and not syntax.between:
            before = f"SPACE {before}"
        found = [
            f"{before} {self.literal(tool.name)} {call_id} {self.spaced(syntax.to_arguments)} {tool.arguments}"
            for tool in tools
        ]
        return self.rule(" | ".join(found))

    # --- free text -------------------------------------------------------------------------------------------------------------

    def structures(self, tags: dict[str, Any]) -> dict[str, list[str]]:
        """What follows each trigger of a structural tag: `structures` with begin, schema and end, and `triggers`. Raises SchemaError."""
        found: dict[str, list[str]] = {}
        for i, one in enumerate(tags["structures"]):
            begin = one["begin"]
            trigger = next((t for t in tags["triggers"] if begin.startswith(t)), None)
            if trigger is None:
                raise SchemaError(f"structures.{i}.begin starts with none of the triggers")
            # the text before it would be the trigger
            if late := next((text for text in self.special if trigger.find(text) > 0), None):
                raise SchemaError(
                    f"the trigger {trigger!r} has the special token {late!r} behind other text; let it begin with that"
                )
            body = self.part(compile_schema(one["schema"], False, path=f"structures.{i}.schema#"))
            rest = f"{self.literal(begin[len(trigger) :])} {body} {self.literal(one['end'])}"
            found.setdefault(trigger, []).append(rest)
        return found

    def free(self, tags: Mapping[str, Sequence[str]], first: "Place | None" = None, more: "Place | None" = None) -> str:
        """Free text after reasoning, which as for the parser only the beginning can be.

        tags: what follows each trigger in it, one of several. first, more: calls without a trigger at its beginning, and behind a
        call.
        """
        rests = {trigger: self.rule(" | ".join(found)) for trigger, found in tags.items()}

        def tagged(text: str) -> str:
            return self.rule(" | ".join(f"{self.until(trigger, text)} {rest}" for trigger, rest in rests.items()))

        def options(place: Place | None, text: str) -> tuple[list[str], list[str]]:
            """What a part of the answer may be that ends with a call, and the last part."""
            calls = [tagged(text)] if tags else []
            if place is None:
                return calls, [text]
            begin = f"/{place.begin}/"
            others = [f"{begin} {tagged(place.other)}"] if tags else []
            return [*calls, f"{begin} {place.call}", *others], [text, f"{begin} {place.other}"]

        calls, last = options(more, self._text_without(more.begin) if more else "TEXT")
        behind = f"({' | '.join(calls)})* ({' | '.join(last)})"

        def answer(text: str) -> str:
            calls, last = options(first, text)
            return " | ".join([*(f"{call} {behind}" for call in calls), *last])

        text = self._text_without(first.begin) if first else "TEXT"
        if self.reasoning is None:
            return f"({answer(text)})"
        begin, end, begins_inside = self.reasoning
        if begins_inside:
            return f"{self.until(end)} ({answer(text)})"
        outside = text if self.pieces(begin)[0] in self.special else self._text_without(rf"\s*{regex(begin)}", text)
        opened = self._opened(r"\s*")
        return f"({opened} ({answer(text)}) | {answer(outside)} | {text})"

    def after_reasoning(self, answer: str) -> str:
        """`answer`, after reasoning if the model reasons."""
        if self.reasoning is None:
            return answer
        if self.reasoning.begins_inside:
            return f"{self.until(self.reasoning.end)} {GAP} {answer}"
        return f"({self._opened(SPACES)} {GAP})? {answer}"

    def _opened(self, indent: str) -> str:
        """Reasoning with its beginning and its end. indent: the regular expression of the spaces before it."""
        assert self.reasoning is not None
        begin, end, _ = self.reasoning
        if self.pieces(begin)[0] in self.special:
            return f"/{indent}/ {self.literal(begin)} {self.until(end)}"
        if end in self.special:
            return rf"/{indent}{regex(begin)}(.|\n)*/ {self.literal(end)}"
        return self.rule(rf"/{indent}{regex(begin)}(.|\n)*/ {self.literal(end)}", lazy=True)

    def _text_without(self, begin: str, text: str = "TEXT") -> str:
        """Text that does not begin with the regular expression `begin`."""
        return self.terminal(rf"{text} & ~/({begin})(.|\n)*/")
