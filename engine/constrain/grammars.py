"""Grammars of llguidance: the rules of one in Lark, and whether one is valid, and within the limits of the ranks."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from engine.grammars import MAX_TEXT, compiled, limits
from errors import UserError

INTERNAL = re.compile(r"\s*while processing json-schema:\S*|:\s+\([A-Z]\w* \(.*", re.DOTALL)
SPECIAL_ID = re.compile(r"<\[\d+\]>")  # in Lark


class SchemaError(UserError):
    """A schema cannot be enforced; the message is one line. `tool`: index of its tool in the request, if known."""

    def __init__(self, message: str, tool: int | None = None) -> None:
        super().__init__(message)
        self.tool = tool


@dataclass(frozen=True)
class Compiled:
    grammar: str
    not_enforced: tuple[str, ...] = ()  # JSON pointers of keywords that are not enforced, then llguidance's warnings


def check_matcher(text: str) -> None:
    """Compile a grammar as a rank does, which finds more wrong than `check_grammar`, and what takes too much. Raises SchemaError."""
    _check_length(text)
    no_special = SPECIAL_ID.sub("<[255]>", text)  # the tokenizer of bytes has no special tokens
    try:
        compiled(LLTokenizer("byte"), no_special)
    except UserError as e:
        raise SchemaError(one_line(str(e))) from e


def accepted(text: str, answers: Sequence[str]) -> list[str]:
    """Those of the answers that are complete in the language of a grammar. Raises SchemaError if it cannot be told."""
    matcher, found = LLMatcher(LLTokenizer("byte"), text, log_level=0), []
    for answer in answers:
        one, ids = matcher.deep_copy(), list(answer.encode(errors="replace"))
        if one.try_consume_tokens(ids) == len(ids) and one.is_accepting():
            found.append(answer)
        if problem := one.get_error():
            raise SchemaError(one_line(problem))
    return found


def _check_length(text: str) -> None:
    if len(text.encode()) > MAX_TEXT:
        raise SchemaError(f"it is longer than {MAX_TEXT} bytes")


def check_grammar(text: str, **bounds: int) -> list[str]:
    """llguidance's warnings about a grammar. bounds: see `limits`. Raises SchemaError."""
    _check_length(text)
    failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits(**bounds))
    if failed:
        raise SchemaError(one_line(messages[0]))
    return [one_line(message) for message in messages if not message.startswith("no tokenizer")]  # only the engine has one


def one_line(text: str) -> str:
    """llguidance's message in one line, without what only its code has: names of the rewritten definitions, types, syntax trees."""
    return " ".join(INTERNAL.sub("", text).replace("f64", "a number").split())[:300]


class Rules:
    """The rules of a Lark grammar, and the grammars to which they refer. special: ids of special tokens, by the texts that spell them."""

    def __init__(self, special: dict[str, int]) -> None:
        self.special = special
        spelled = sorted(special, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, spelled))})") if spelled else None
        self._rules = [r"TEXT: /(.|\n)*/"]
        self._parts: list[dict[str, Any]] = []
        self._not_enforced: list[str] = []

    def finish(self, start: str) -> Compiled:
        """The whole grammar, whose first rule is `start`."""
        lark = "\n".join([f"start: {start}", *self._rules])
        text = json.dumps({"grammars": [{"name": "start", "lark_grammar": lark}, *self._parts]})
        return Compiled(text, tuple(self._not_enforced))

    def part(self, compiled: Compiled) -> str:
        """A reference to a grammar."""
        (grammar,) = json.loads(compiled.grammar)["grammars"]
        name = f"part_{len(self._parts)}"
        self._parts.append({**grammar, "name": name})
        for path in compiled.not_enforced:
            self.leave_out(path)
        return f"@{name}"

    def until(self, mark: str, text: str = "TEXT") -> str:
        """Text up to the first `mark`, and the mark."""
        first, *rest = self.pieces(mark)
        if first in self.special:
            return f"{text} {self.literal(mark)}"
        return " ".join([self.rule(f"{text} {self.literal(first)}", lazy=True), *map(self.literal, rest)])

    def rule(self, body: str, lazy: bool = False) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' * lazy}: {body}")
        return name

    def fill(self, name: str, body: str) -> None:
        """Say what a rule is that was empty."""
        self._rules[self._rules.index(f"{name}: ")] = f"{name}: {body}"

    def terminal(self, expression: str) -> str:
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def any_of(self, texts: Sequence[str]) -> str:
        """One of the texts. Without special tokens it is a terminal: as many as one likes are a single item of the parser."""
        if all(text and text not in self.special and len(self.pieces(text)) == 1 for text in texts):
            return self.terminal(" | ".join(map(lark_json, texts)))
        return f"({' | '.join(map(self.literal, texts))})"

    def leave_out(self, path: str) -> None:
        """Note that something is not enforced."""
        if path not in self._not_enforced:
            self._not_enforced.append(path)

    def spaced(self, text: str) -> str:
        """The words of `text`; where it has spaces, there may be some."""
        return " SPACE ".join(map(self.literal, re.split(r"\s+", text)))

    def literal(self, text: str) -> str:
        """Exactly `text`."""
        pieces = self.pieces(text)
        return " ".join(f"<[{self.special[p]}]>" if p in self.special else lark_json(p) for p in pieces)

    def pieces(self, text: str) -> list[str]:
        """`text`, cut before and after special tokens."""
        return [piece for piece in (self._special.split(text) if self._special else [text]) if piece]


def lark_json(value: Any) -> str:
    """JSON, and of a text also a string of a Lark grammar, which may hold no control characters."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")
