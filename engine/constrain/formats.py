"""Compile what a whole answer must be, JSON, a text that matches, one of some texts, or a text of a grammar, to a grammar of llguidance."""

import json
import re
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from cli import note
from engine.constrain.grammars import Compiled, SchemaError, check_grammar, check_matcher, lark_json
from engine.constrain.json_schema import compile_schema
from errors import UserError

LARK = re.compile(r"^\s*(%llguidance\b|\??start\b[^:\n]*:(?!:=))", re.MULTILINE)  # otherwise GBNF, whose rules are `name ::= …`
MOST_SYMBOLS = (
    10_000  # of a client's own grammar: a step takes a quarter of a second if 64 answers begin 6,000 alternatives at once
)


def compile_format(kind: str, value: Any, strict: bool = False, whitespace: str | None = None) -> Compiled:
    """The grammar of a format. kind: json, regex, choice or grammar. value: a JSON schema or its text, a regular expression, texts, or
    a grammar in Lark or GBNF. strict, whitespace: of JSON, see `compile_schema`. Raises SchemaError."""
    match kind:
        case "json":
            return compile_schema(schema_of(value), strict, whitespace)
        case "regex":
            grammar = LLMatcher.grammar_from_regex(_whole(value))
            return Compiled(grammar, tuple(check_grammar(grammar)))
        case "choice":  # a terminal: as many as one likes are a single item of the parser
            texts = " | ".join(map(lark_json, value))
            return _of_lark(f"start: CHOICE\nCHOICE: {texts}")
        case _:
            return _of_lark(_lark(_whole(value)))


@lru_cache(maxsize=32)  # for many prompts
def format_grammar(name: str, value: str) -> str:
    """The grammar of json_schema, regex or choice of `SamplingParams`. value: as JSON. Notes what of a schema is not enforced. Raises
    UserError."""
    try:
        found = compile_format(name.removesuffix("_schema"), json.loads(value))
        check_matcher(found.grammar)
    except SchemaError as e:
        raise UserError(f"{name} cannot be enforced: {e}") from None
    if found.not_enforced:
        note(f"not enforced of a {name}: {', '.join(found.not_enforced)}")
    return found.grammar


def _whole(text: str) -> str:
    """The text, if it can be encoded. Raises SchemaError."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise SchemaError("it has a lone surrogate, half of a character") from e
    return text


def _of_lark(text: str) -> Compiled:
    """In the form that `Rules.part` can put into a larger grammar, which `LLMatcher.grammar_from_lark` does not promise."""
    grammar = json.dumps({"grammars": [{"lark_grammar": text}]})
    return Compiled(grammar, tuple(check_grammar(grammar, symbols=MOST_SYMBOLS)))


def _lark(text: str) -> str:
    if LARK.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except RecursionError as e:
        raise SchemaError("it is nested too deeply") from e
    except Exception as e:  # the library raises many kinds
        raise SchemaError(f"it is neither Lark, which begins at `start:`, nor GBNF: {' '.join(str(e).split())[:200]}") from e


def schema_of(given: dict[str, Any] | str) -> dict[str, Any]:
    """A JSON schema, of any object if it is empty. Raises SchemaError."""
    return object_of(given) or {"type": "object"}


def object_of(given: dict[str, Any] | str) -> dict[str, Any]:
    """A JSON object, given as such or as text. Raises SchemaError."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as e:
            raise SchemaError("it is not valid JSON") from e
    if not isinstance(given, dict):
        raise SchemaError("it is not an object")
    return given
