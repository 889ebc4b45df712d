"""Which parser reads the answers of a model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.calls.harmony import HarmonyParser
from engine.calls.parser import AnswerParser, Tools, message_of
from engine.calls.syntax import HARMONY, JSON, SYNTAXES, syntax_of
from engine.text import special_ids
from engine.thinking import REASONING, ReasoningSyntax, reasoning_after, reasoning_of
from errors import UserError
from files import shown
from text.tokenizer import Tokenizer


def answer_parser(reasoning: ReasoningSyntax | None, inside: bool, tools: Tools | None, hidden: frozenset[str]) -> AnswerParser:
    """The parser of one answer; see `AnswerParser`."""
    is_harmony = reasoning is REASONING["harmony"] or (tools is not None and tools.syntax is HARMONY)
    return (HarmonyParser if is_harmony else AnswerParser)(reasoning, inside, tools, hidden)


def call_reader(
    tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, int], Callable[[Sequence[int], str], tuple[dict[str, Any], bool]]]:
    """The special tokens that texts with calls must have, with their ids, and a function: from a prompt's ids and its answer's text to the
    message of /v1/chat/completions, and whether it ends with whole calls. tools: as there. Raises UserError for others."""
    try:
        schemas = {tool["function"]["name"]: dict(tool["function"].get("parameters") or {}) for tool in tools}
    except (TypeError, KeyError, AttributeError, ValueError):
        raise UserError(f"tools are dicts with type and function, which has a name; not {shown(tools)}") from None
    template = tokenizer.pick_template(None, with_tools=True)
    syntax, reasoning = SYNTAXES.get(syntax_of(template) or "") or JSON, reasoning_of(template)
    special = special_ids(tokenizer, (*(reasoning.markers if reasoning else ()), *syntax.markers))

    def read(prompt: Sequence[int], text: str) -> tuple[dict[str, Any], bool]:
        known = Tools(syntax, frozenset(schemas), schemas=schemas)
        parser = answer_parser(*reasoning_after(tokenizer, reasoning, prompt), known, frozenset(special))
        return message_of(parser.push(text, final=True)), parser.complete

    return special, read
