"""From a Responses body to the chat request that the server runs. A worker can run this for long conversations."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from pydantic import ValidationError

from files import shown
from server.body import shown_names
from server.http import to_json
from server.problems import ApiError, bad, from_model
from server.responses.items import input_items
from server.responses.schemas import (
    CALLS,
    OUTPUTS,
    AllowedFunctions,
    CustomTool,
    FlatSchemaFormat,
    FunctionTool,
    NamedFunction,
    Namespace,
    Offered,
    OtherTool,
    ResponsesBody,
    joined_name,
)
from server.schemas import ChatBody, SamplingBody

# Fields of the chat request whose names differ from those of the Responses body, for errors.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
PASSED = (*SamplingBody.model_fields, "stream", "parallel_tool_calls", "chat_template_kwargs", "user", "priority")


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
    """The fields of the body that the response repeats and that may be long. Encoded once: a stream has the response three times."""
    text = body.text
    fields = {
        "instructions": body.instructions,
        "text": {
            "format": text.format.model_dump(by_alias=True) if text and text.format else {"type": "text"},
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tools": [_repeated_tool(tool) for tool in body.tools or [] if not isinstance(tool, OtherTool)],
    }
    return {name: msgspec.Raw(to_json(value)) for name, value in fields.items()}


def _repeated_tool(tool: FunctionTool | CustomTool | Namespace) -> dict[str, Any]:
    if isinstance(tool, Namespace):
        inner = [_repeated_tool(one) for one in tool.tools if not isinstance(one, OtherTool)]
        return {"type": tool.type, "name": tool.name, "description": tool.description or "", "tools": inner}
    if isinstance(tool, CustomTool):
        return tool.model_dump(exclude_none=True)
    return {name: getattr(tool, name) for name in ("type", "name", "description", "parameters", "strict")}


# --- messages ------------------------------------------------------------------------------------------------------------------


def messages_of(instructions: str | None, items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat messages of a conversation. Reasoning, text and calls of one answer become one message of the assistant."""
    writer = _Messages(instructions)
    for item in items:
        writer.add(item)
    return writer.messages


class _Messages:
    def __init__(self, instructions: str | None) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
        self._reasoning: list[str] = []

    def add(self, item: dict[str, Any]) -> None:
        kind = item["type"]
        if kind == "message":
            self._add_message(item["role"], item["content"][0]["text"] if item["content"] else "")
        elif kind == "reasoning":
            self._reasoning += [part["text"] for part in item["content"]]
        elif kind == "function_call":
            self._add_call(item["call_id"], joined_name(item.get("namespace"), item["name"]), item["arguments"])
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        call_id = item.get("call_id") or ""
        if field := CALLS.get(kind):
            given = item.get(field)
            name = item.get("name") or kind.removesuffix("_call")
            self._add_call(call_id, name, given if field == "arguments" or isinstance(given, dict) else {field: given})
        if field := OUTPUTS.get(kind):
            given = item.get(field)
            self._append(
                {
                    "role": "tool",
                    "tool_call_id": call_id,
                    "content": given if isinstance(given, str) else to_json(given).decode(),
                }
            )

    def _add_message(self, role: str, text: str) -> None:
        if role == "assistant":
            self._assistant(answers=True)["content"] = text
            return
        if self._reasoning:  # an answer that ended in its reasoning
            self._assistant(answers=True)["content"] = ""
        self._append({"role": role, "content": text})

    def _add_call(self, call_id: str, name: str, arguments: Any) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant(answers=False).setdefault("tool_calls", []).append(call)

    def _assistant(self, answers: bool) -> dict[str, Any]:
        """The assistant's message to which the next item belongs: the last one, unless text (`answers`) would follow text or calls."""
        last = self.messages[-1] if self.messages else {}
        taken = answers and ("content" in last or "tool_calls" in last)
        if last.get("role") != "assistant" or taken or self._reasoning:
            last = {"role": "assistant"}
            if self._reasoning:
                last["reasoning_content"] = "\n".join(self._reasoning)
            self._append(last)
        return last

    def _append(self, message: dict[str, Any]) -> None:
        self._reasoning = []
        self.messages.append(message)


# --- the chat request ----------------------------------------------------------------------------------------------------------


def to_chat(body: ResponsesBody, messages: Sequence[Mapping[str, Any]]) -> ChatBody:
    """The chat request. Raises a 400 that names the field of the Responses body."""
    given = {name: getattr(body, name) for name in PASSED}
    tools, choice = _tools(body)
    values = {
        **{name: value for name, value in given.items() if value is not None},
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_chat_tool(one) for one in tools] or None,
        "tool_choice": choice,
        "response_format": _chat_format(body),
        "logprobs": body.with_logprobs or None,
        "top_logprobs": body.top_logprobs,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "store": True if body.store and not body.background else None,
    }
    with renamed(body):
        try:
            return ChatBody.model_validate({name: value for name, value in values.items() if value is not None})
        except ValidationError as e:
            raise from_model(e, values) from None


def _tools(body: ResponsesBody) -> tuple[list[Offered], Any]:
    """The tools that are offered, and the chat request's tool_choice."""
    tools, choice = body.functions, body.tool_choice
    if isinstance(choice, NamedFunction):
        return tools, {"type": "function", "function": {"name": choice.name}}
    if not isinstance(choice, AllowedFunctions):
        return tools, choice if tools else None if choice in ("auto", "none") else choice
    allowed = {one.name for one in choice.tools}
    if missing := allowed - {one.name for one in tools}:
        raise bad("tool_choice.tools", f"names {shown(min(missing))}, which is not in tools")
    names = [{"type": "function", "function": {"name": one.name}} for one in choice.tools]
    return tools, {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": names}}


def _chat_tool(one: Offered) -> dict[str, Any]:
    optional = {name: getattr(one.tool, name) for name in ("parameters", "strict")}
    optional["description"] = one.tool.about if isinstance(one.tool, CustomTool) else one.tool.description
    given = {name: value for name, value in optional.items() if value is not None}
    return {"type": "function", "function": {"name": one.name, **given}}


def _chat_format(body: ResponsesBody) -> dict[str, Any] | None:
    chosen = body.text.format if body.text else None
    if chosen is None:
        return None
    if not isinstance(chosen, FlatSchemaFormat):
        return {"type": chosen.type}
    named = {"name": chosen.name, "schema": chosen.schema_, "description": chosen.description, "strict": chosen.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in named.items() if value is not None}}


@contextmanager
def renamed(body: ResponsesBody) -> Iterator[None]:
    """Errors of the chat request name the field of the Responses body."""
    try:
        yield
    except ApiError as e:
        if e.param is None:
            raise
        param = _responses_name(body, e.param)
        message = e.message.replace("truncate_prompt_tokens cuts", "truncation: auto cuts")
        if message.startswith(f"{e.param}: "):
            message = param + message.removeprefix(e.param)
        raise ApiError(e.status_code, message, param, e.code, e.headers) from e


def _responses_name(body: ResponsesBody, param: str) -> str:
    first, _, rest = param.partition(".")
    if first != "tools" or not rest:
        return NAMES.get(first, param)
    number, _, field = rest.partition(".")
    path = _tools(body)[0][int(number)].path
    return ".".join(filter(None, (path, field.removeprefix("function").removeprefix("."))))
