"""The rules of a Lark grammar of llguidance, and the grammars to which they refer."""

import json
import re
from collections.abc import Sequence
from typing import Any

from server.constrain.check import Compiled


class Rules:
    """special: ids of special tokens, by the texts that spell them."""

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
