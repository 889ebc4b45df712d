"""What llguidance says about a grammar: whether it is valid, and within the limits of the ranks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

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
