"""From a Responses body to the chat request that the server runs. A worker can run this for long conversations."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import msgspec

from files import shown
from server import translation
from server.body import shown_names
from server.errors import bad
from server.http import to_json
from server.responses.items import input_items, messages_of
from server.responses.schemas import (
    AllowedFunctions,
    CustomTool,
    FlatSchemaFormat,
    FunctionTool,
    NamedFunction,
    Namespace,
    Offered,
    OtherTool,
    ResponsesBody,
)
from server.schemas import ChatBody, SamplingBody
from server.translation import Chat, chat_function, chat_of, chat_schema

# Fields of the chat request whose names differ from those of the Responses body, for errors.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
PASSED = (
    *SamplingBody.model_fields,
    "stream",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "user",
    "priority",
    "top_logprobs",
)
# Fields of the body that the response repeats, with their defaults.
REPEATED: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "store": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "truncation": "disabled",
    "user": None,
    "metadata": {},
}


class Converted(NamedTuple):
    chat: ChatBody
    items: bytes  # JSON list: the items of this turn's input, each with an id
    repeated: dict[str, msgspec.Raw]  # see `repeated`


def convert(body: ResponsesBody, history: Sequence[bytes], found: Mapping[str, bytes]) -> Converted:
    """history: JSON lists of the conversation's earlier items. found: the stored items that `input` refers to, by their ids.

    Raises a 400 that names the field of the Responses body.
    """
    earlier = [item for part in history for item in json.loads(part)]
    items, unreadable = input_items(body, earlier, found)
    messages = messages_of(body.instructions, [*earlier, *items])
    if not messages:
        raise bad("input", "has nothing that the model sees; give it a message")
    chat = to_chat(body, messages)
    chat._ignored = [*body.ignored, *shown_names([*body.left_out, *unreadable])]
    return Converted(chat, to_json(items), repeated(body))


def repeated(body: ResponsesBody) -> dict[str, msgspec.Raw]:
    """What the response repeats of the body, which may be long. Encoded once: a stream has the response three times."""
    given = {name: getattr(body, name) for name in REPEATED}
    fields = {name: default if given[name] is None else _plain(given[name]) for name, default in REPEATED.items()}
    text = body.text
    fields |= {
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "text": {
            "format": text.format.model_dump(by_alias=True) if text and text.format else {"type": "text"},
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tools": [_repeated_tool(tool) for tool in body.tools or [] if not isinstance(tool, OtherTool)],
    }
    return {name: msgspec.Raw(to_json(value)) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, (NamedFunction, AllowedFunctions)) else value


def _repeated_tool(tool: FunctionTool | CustomTool | Namespace) -> dict[str, Any]:
    if isinstance(tool, Namespace):
        inner = [_repeated_tool(one) for one in tool.tools if not isinstance(one, OtherTool)]
        return {"type": tool.type, "name": tool.name, "description": tool.description or "", "tools": inner}
    if isinstance(tool, CustomTool):
        return tool.model_dump(exclude_none=True)
    return {name: getattr(tool, name) for name in ("type", "name", "description", "parameters", "strict")}


def to_chat(body: ResponsesBody, messages: Sequence[Mapping[str, Any]]) -> ChatBody:
    """The chat request. Raises a 400 that names the field of the Responses body."""
    choice = _tool_choice(body)
    with renamed(body):
        return chat_of(
            {name: getattr(body, name) for name in PASSED}
            | {
                "model": body.model,
                "messages": messages,
                "max_completion_tokens": body.max_output_tokens,
                "tools": [_chat_tool(one) for one in body.functions] or None,
                "tool_choice": choice,
                "response_format": _chat_format(body),
                "logprobs": body.with_logprobs or None,
                "reasoning_effort": body.reasoning and body.reasoning.effort,
                "store": True if body.store and not body.background else None,
            }
        )


def _tool_choice(body: ResponsesBody) -> Any:
    """The chat request's tool_choice."""
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        return chat_function(choice.name)
    if not isinstance(choice, AllowedFunctions):
        return choice
    allowed = {one.name for one in choice.tools}
    if missing := allowed - {one.name for one in body.functions}:
        raise bad("tool_choice.tools", f"names {shown(min(missing))}, which is not in tools")
    names = [chat_function(one.name) for one in choice.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": names}}


def _chat_tool(one: Offered) -> Chat:
    about = one.tool.about if isinstance(one.tool, CustomTool) else one.tool.description
    return chat_function(one.name, description=about, parameters=one.tool.parameters, strict=one.tool.strict)


def _chat_format(body: ResponsesBody) -> Chat | None:
    chosen = body.text.format if body.text else None
    if isinstance(chosen, FlatSchemaFormat):
        return chat_schema(chosen.schema_, name=chosen.name, description=chosen.description, strict=chosen.strict)
    return {"type": chosen.type} if chosen else None


def renamed(body: ResponsesBody) -> AbstractContextManager[None]:
    """Errors of the chat request name the field of the Responses body."""
    return translation.renamed(partial(_own_name, body), {"truncate_prompt_tokens cuts": "truncation: auto cuts"})


def _own_name(body: ResponsesBody, param: str) -> str:
    first, _, rest = param.partition(".")
    if first != "tools" or not rest:
        return NAMES.get(first, param)
    number, _, field = rest.partition(".")
    path = body.functions[int(number)].path
    return ".".join(filter(None, (path, field.removeprefix("function").removeprefix("."))))
