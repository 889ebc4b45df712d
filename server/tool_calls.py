"""Find tool calls in the text of an answer."""

import json
import re
import uuid
from typing import Any

from server.schemas import ChatBody

TAGGED_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
CUT_CALL = re.compile(r'\s*\{ ?"name" ?: ?"([A-Za-z0-9_.-]+)" ?, ?"arguments" ?: ?(.*)', re.DOTALL)


def may_become_call(text: str) -> bool:
    """Whether an answer that begins with `text` could be a tool call. A stream holds it back until this is certain."""
    start = text.lstrip()
    return not start or start[0] in "{[" or start.startswith("<tool_call>") or "<tool_call>".startswith(start)


def parse_calls(text: str, body: ChatBody) -> list[dict[str, Any]] | None:
    """The tool calls if the whole text consists of calls: an object, a list of objects, or <tool_call> tags. Otherwise None."""
    names = {tool.function.name for tool in body.tools or []}
    parts = TAGGED_CALL.findall(text) if text.lstrip().startswith("<tool_call>") else [text]
    found: list[Any] = []
    for part in parts:
        try:
            value = json.loads(part)
        except (ValueError, RecursionError):
            return None
        found += value if isinstance(value, list) else [value]
    calls = [_parsed(one, names) for one in found]
    if not calls or any(call is None for call in calls):
        return None
    kept = calls[:1] if body.parallel_tool_calls is False else calls
    return [call for call in kept if call is not None]


def parse_cut_call(text: str, body: ChatBody) -> list[dict[str, Any]] | None:
    """The incomplete forced call that `text` begins, with the incomplete JSON of its arguments.

    None if the text does not name the tool yet.
    """
    names = [tool.function.name for tool in body.forced_tools]
    found = CUT_CALL.match(text)
    if found:
        return [_call(found[1], found[2])] if found[1] in names else None
    return [_call(names[0], "")] if len(names) == 1 else None


def _parsed(value: Any, names: set[str]) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters"))  # the latter is Llama 3's name
    if not isinstance(arguments, dict) or len(value) != 2:
        return None
    return _call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": arguments}}
