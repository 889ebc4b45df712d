"""Constrained generation: the grammar for a request's JSON format or forced tool call, compiled in a worker and cached."""

import json
from collections.abc import Callable
from typing import Any

from engine.grammars import MAX_TEXT
from server.json_schema import Compiled, ForcedTool, SchemaError, compile_calls, compile_schema
from server.problems import bad
from server.schemas import ChatBody, GenerationBody, JsonSchemaResponseFormat
from server.service import Service

UNCONSTRAINED = Compiled("")
MAX_NAMED = 10  # most keywords in the response header of those that are not enforced
MAX_CACHED = 64  # most cached grammars of earlier requests
MAX_CACHED_TEXT = 4 << 20  # most characters of cached grammars and their schemas


async def for_request(service: Service, body: GenerationBody) -> Compiled:
    """The grammar of a forced tool call or of a JSON format; UNCONSTRAINED if the request has neither.

    Raises a 400 that names the field for a schema that is wrong, or strict and not enforceable.
    """
    tools = _forced(body) if isinstance(body, ChatBody) else []
    chosen = body.json_format
    try:
        if tools:
            return await _compiled(service, compile_calls, tools)
        if isinstance(chosen, JsonSchemaResponseFormat):
            schema, strict = chosen.json_schema.schema_, chosen.json_schema.strict is True
            return await _compiled(service, compile_schema, schema, strict)
        return await _compiled(service, compile_schema, {"type": "object"}, True) if chosen else UNCONSTRAINED
    except SchemaError as e:
        param = "response_format" if not tools else "tools" if e.tool is None else f"tools.{e.tool}.function.parameters"
        raise bad(param, f"has a schema that cannot be enforced: {e}", "invalid_schema") from e


def _forced(body: ChatBody) -> list[ForcedTool]:
    forced = {tool.function.name for tool in body.forced_tools}
    return [
        ForcedTool(position, tool.function.name, tool.function.parameters, tool.function.strict is True)
        for position, tool in enumerate(body.tools or [])
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
    cache = service.grammars
    compiled = cache[key] if key in cache else await service.workers.run(compiler, *arguments, slow=True)
    cache[key] = compiled
    cache.move_to_end(key)
    while (
        len(cache) > MAX_CACHED or sum(len(asked) + len(found.grammar) for (_, asked), found in cache.items()) > MAX_CACHED_TEXT
    ):
        cache.popitem(last=False)
    return compiled


def name_left_out(compiled: Compiled) -> str:
    """The keywords that are not enforced, as a header's value; empty if there are none."""
    shown, more = compiled.not_enforced[:MAX_NAMED], len(compiled.not_enforced) - MAX_NAMED
    text = ", ".join(shown) + (f", and {more} more" if more > 0 else "")
    return "".join(c if " " <= c <= "~" else "?" for c in text)
