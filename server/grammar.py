"""JSON by force: grammars for the engine's mask, and tool calls read back from the text."""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher

from server.problems import bad
from server.schemas import ChatBody, GenerationBody, JsonSchemaResponseFormat, Tool

# At most one space between the parts: a small model could otherwise fill the answer with blank lines.
WHITESPACE: Any = {"whitespace_pattern": "[ ]?"}
TAGGED_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def for_format(body: GenerationBody) -> str | None:
    chosen = body.json_format
    if chosen is None:
        return None
    schema = chosen.json_schema.schema_ if isinstance(chosen, JsonSchemaResponseFormat) else {"type": "object"}
    return compile_schema(schema, "response_format")


def for_tools(tools: Sequence[Tool]) -> str:
    """One call: {"name": …, "arguments": {…}} of one of `tools`."""
    calls, definitions = [], {}
    for i, tool in enumerate(tools):
        arguments = tool.function.parameters or {"type": "object"}
        if tool.function.parameters and len(tools) > 1:
            compile_schema(arguments, f"tools.{i}.function.parameters")  # the error names the tool
        # `#/…` in a tool's schema means its own root, which is not the root of the whole any more
        definitions[f"tool{i}"] = _move_references(arguments, f"#/$defs/tool{i}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/tool{i}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return compile_schema({"anyOf": calls, "$defs": definitions}, "tools")


def _move_references(schema: Any, root: str) -> Any:
    if isinstance(schema, dict):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _move_references(value, root)
            for key, value in schema.items()
        }
    return [_move_references(item, root) for item in schema] if isinstance(schema, list) else schema


def compile_schema(schema: dict[str, Any], param: str) -> str:
    """The grammar. Raises a 400 that names `param` for a schema that the library cannot enforce."""
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(schema, overrides=WHITESPACE)
        problem = LLMatcher.validate_grammar(grammar)
    except Exception as e:  # the library raises ValueError, TypeError and RecursionError for schemas from strangers
        problem = str(e)
    if problem:
        raise bad(param, f"has a schema that cannot be enforced: {' '.join(problem.split())[:300]}", "invalid_schema")
    return grammar


# ------------------------------------------------------------------------------------------------------- reading back


def may_become_call(text: str) -> bool:
    """Whether an answer that begins so could be a call; a stream holds it back until that is known."""
    start = text.lstrip()
    return not start or start[0] in "{[" or start.startswith("<tool_call>") or "<tool_call>".startswith(start)


def parse_calls(text: str, body: ChatBody) -> list[dict[str, Any]] | None:
    """Tool calls if the whole text is some: an object, a list of them, or <tool_call> tags; else None."""
    names = {tool.function.name for tool in body.tools or []}
    parts = TAGGED_CALL.findall(text) if text.lstrip().startswith("<tool_call>") else [text]
    found: list[Any] = []
    for part in parts:
        try:
            value = json.loads(part)
        except (ValueError, RecursionError):
            return None
        found += value if isinstance(value, list) else [value]
    calls = [_call(one, names) for one in found]
    if not calls or any(call is None for call in calls):
        return None
    kept = calls[:1] if body.parallel_tool_calls is False else calls
    return [call for call in kept if call is not None]


def _call(value: Any, names: set[str]) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters"))  # the latter is Llama 3's word
    if not isinstance(arguments, dict) or len(value) != 2:
        return None
    function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
