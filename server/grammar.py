"""Constrained generation: the grammar for a request's JSON format or tools, and parsing tool calls from the answer."""

import json
import re
import uuid
from collections.abc import Callable
from typing import Any

from starlette.types import Receive

from engine.grammars import MAX_TEXT
from server.http import unless_gone
from server.json_schema import Compiled, ForcedTool, SchemaError, compile_calls, compile_schema
from server.problems import bad
from server.schemas import ChatBody, GenerationBody, JsonSchemaResponseFormat
from server.service import Service

TAGGED_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
CUT_CALL = re.compile(r'\s*\{ ?"name" ?: ?"([A-Za-z0-9_.-]+)" ?, ?"arguments" ?: ?(.*)', re.DOTALL)
UNCONSTRAINED = Compiled("")
MAX_NAMED = 10  # most keywords in the response header of those that are not enforced
KEPT = 64  # most cached grammars of earlier requests
KEPT_TEXT = 4 << 20  # most characters of cached grammars and their schemas


async def for_request(service: Service, body: GenerationBody, receive: Receive) -> Compiled:
    """The grammar of a forced tool call or of a JSON format; UNCONSTRAINED if the request has neither.

    Raises a 400 that names the field for a schema that is wrong, or strict and not enforceable. Raises ClientGone if the client
    leaves.
    """
    tools = _forced(body) if isinstance(body, ChatBody) else []
    chosen = body.json_format
    try:
        if tools:
            return await unless_gone(receive, _compiled(service, compile_calls, tools))
        if isinstance(chosen, JsonSchemaResponseFormat):
            schema, strict = chosen.json_schema.schema_, chosen.json_schema.strict is True
            return await unless_gone(receive, _compiled(service, compile_schema, schema, strict))
        return await _compiled(service, compile_schema, {"type": "object"}, True) if chosen else UNCONSTRAINED
    except SchemaError as e:
        param = "response_format" if not tools else "tools" if e.tool is None else f"tools.{e.tool}.function.parameters"
        raise bad(param, f"has a schema that cannot be enforced: {e}", "invalid_schema") from e


def _forced(body: ChatBody) -> list[ForcedTool]:
    forced = {tool.function.name for tool in body.forced_tools}
    return [
        ForcedTool(place, tool.function.name, tool.function.parameters, tool.function.strict is True)
        for place, tool in enumerate(body.tools or [])
        if tool.function.name in forced
    ]


async def _compiled(service: Service, compiler: Callable[..., Compiled], *arguments: Any) -> Compiled:
    """Run `compiler` in a worker, and cache the result for later requests with the same schema. Raises SchemaError."""
    try:
        key = compiler.__name__, json.dumps(arguments)
    except RecursionError as e:
        raise SchemaError("it is nested too deeply") from e
    if len(key[1]) > MAX_TEXT:
        raise SchemaError(f"it is longer than {MAX_TEXT} characters")
    kept = service.grammars
    compiled = kept[key] if key in kept else await service.workers.run(compiler, *arguments, slow=True)
    kept[key] = compiled
    kept.move_to_end(key)
    while len(kept) > KEPT or sum(len(asked) + len(found.grammar) for (_, asked), found in kept.items()) > KEPT_TEXT:
        kept.popitem(last=False)
    return compiled


def name_left_out(compiled: Compiled) -> str:
    """The keywords that are not enforced, as a header's value; empty if there are none."""
    shown, more = compiled.not_enforced[:MAX_NAMED], len(compiled.not_enforced) - MAX_NAMED
    text = ", ".join(shown) + (f", and {more} more" if more > 0 else "")
    return "".join(c if " " <= c <= "~" else "?" for c in text)


# ------------------------------------------------------------------------------------------------------- reading back


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

    None if the text does not tell the tool yet.
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
