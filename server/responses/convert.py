"""From a Responses body to the items that are kept, and to the chat request that the server runs; pages of kept items.

These are plain functions, so that a worker can run them for long conversations.
"""

import base64
import binascii
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import msgspec

from files import shown
from server import translation
from server.body import shown_names
from server.errors import bad
from server.http import to_json
from server.responses.schemas import (
    CALLS,
    OUTPUTS,
    UNSEEN,
    AdditionalTools,
    AllowedFunctions,
    ContentText,
    CustomTool,
    FlatSchemaFormat,
    FunctionTool,
    GivenCall,
    GivenCallOutput,
    GivenMessage,
    GivenReasoning,
    ItemReference,
    NamedFunction,
    Namespace,
    Offered,
    OtherItem,
    OtherTool,
    ResponsesBody,
    joined_name,
)
from server.schemas import ChatBody, RefusalPart, SamplingBody
from server.translation import Chat, chat_call, chat_function, chat_of, chat_schema

SEALED = b"rung:"  # begins the `encrypted_content` that this server writes
ALL_CALLS = {"function_call": "arguments", **CALLS}
ALL_OUTPUTS = {"function_call_output": "output", "custom_tool_call_output": "output", **OUTPUTS}
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}  # of ids; else "item"
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


# --- items -------------------------------------------------------------------------------------------------------------------


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def references(body: ResponsesBody) -> list[str]:
    return [one.id for one in body.input if isinstance(one, ItemReference)] if isinstance(body.input, list) else []


def input_items(
    body: ResponsesBody, earlier: Sequence[dict[str, Any]], found: Mapping[str, bytes]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The items of `input` as they are kept, and the paths of what could not be read.

    earlier: the items before. found: JSON of the stored items that `input` refers to, by their ids. Raises a 400 for one that is
    not there.
    """
    given = [GivenMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input or []
    items, unreadable = list[dict[str, Any]](), list[str]()
    for position, item in enumerate(given):
        match item:
            case ItemReference(id=id):
                if id not in found:
                    raise bad(f"input.{position}.id", f"no stored item of yours has the id {id[:64]!r}; send the item itself")
                items.append(json.loads(found[id]))
            case GivenMessage():
                items.append(_message(item))
            case GivenCall():
                arguments = item.arguments if isinstance(item.arguments, str) else to_json(item.arguments or {}).decode()
                head = {"id": item.id, "status": "completed"} | item.model_dump(exclude_none=True)
                items.append(head | {"arguments": arguments})
            case GivenCallOutput():
                output = {"id": item.id, "type": item.type, "status": "completed", "call_id": item.call_id}
                items.append(output | {"output": _text(item.output)})
            case OtherItem() | AdditionalTools():
                if item.type in UNSEEN:
                    unreadable.append(f"input.{position}.{item.type}")
                kept = {"id": item.id, **item.model_dump(exclude_none=True)}
                items.append(kept | ({"call_id": kept.get("call_id") or item.id} if item.type in (*CALLS, *OUTPUTS) else {}))
            case GivenReasoning():
                text = _reasoning_text(item)
                if text is None and item.encrypted_content:
                    unreadable.append(f"input.{position}.encrypted_content")
                content = [{"type": "reasoning_text", "text": text}] if text else []
                head = {"id": item.id, "type": item.type, "status": "completed"}
                items.append({**head, "summary": [], "content": content})
    _give_ids(items, {item["id"] for item in earlier})
    return items, unreadable


def _give_ids(items: Sequence[dict[str, Any]], taken: set[str]) -> None:
    """Each item without an id gets one, and so does one whose id another item has: `page` finds an item by its id."""
    for item in items:
        if not item["id"] or item["id"] in taken:
            item["id"] = new_id(PREFIXES.get(item["type"], "item"))
        taken.add(item["id"])


def _message(item: GivenMessage) -> dict[str, Any]:
    kept = {"id": item.id, "type": "message", "status": "completed", "role": item.role}
    text = _text(item.content)
    if item.role == "assistant":
        return kept | {"content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]}
    return kept | {"content": [{"type": "input_text", "text": text}]}


def _text(content: str | list[ContentText | RefusalPart] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or [])


def _reasoning_text(item: GivenReasoning) -> str | None:
    """The text of a reasoning item. Clients that keep no plain reasoning send back what `seal` wrote. None: neither is there."""
    for parts in (item.content, None if item.encrypted_content else item.summary):
        if parts:
            return "\n".join(part.text for part in parts)
    try:
        opened = base64.b64decode(item.encrypted_content or "", validate=True)
        return opened.removeprefix(SEALED).decode() if opened.startswith(SEALED) else None
    except (binascii.Error, ValueError):
        return None


def messages_of(instructions: str | None, items: Iterable[dict[str, Any]]) -> list[Chat]:
    """The chat messages of a conversation. Reasoning, text and calls of one answer become one message of the assistant."""
    writer = _Messages(instructions)
    for item in items:
        writer.add(item)
    return writer.messages


class _Messages:
    def __init__(self, instructions: str | None) -> None:
        self.messages: list[Chat] = [{"role": "system", "content": instructions}] if instructions else []
        self._reasoning: list[str] = []

    def add(self, item: dict[str, Any]) -> None:
        kind = item["type"]
        if kind == "message":
            self._add_message(item["role"], item["content"][0]["text"] if item["content"] else "")
        elif kind == "reasoning":
            self._reasoning += [part["text"] for part in item["content"]]
        if field := ALL_CALLS.get(kind):
            given = item.get(field)
            name = joined_name(item.get("namespace"), item.get("name") or kind.removesuffix("_call"))
            arguments = given if field == "arguments" or isinstance(given, dict) else {field: given}
            call = chat_call(item.get("call_id") or "", name, arguments)
            self._assistant(answers=False).setdefault("tool_calls", []).append(call)
        if field := ALL_OUTPUTS.get(kind):
            given = item.get(field)
            text = given if isinstance(given, str) else to_json(given).decode()
            self._append({"role": "tool", "tool_call_id": item.get("call_id") or "", "content": text})

    def _add_message(self, role: str, text: str) -> None:
        if role == "assistant":
            self._assistant(answers=True)["content"] = text
            return
        if self._reasoning:  # an answer that ended in its reasoning
            self._assistant(answers=True)["content"] = ""
        self._append({"role": role, "content": text})

    def _assistant(self, answers: bool) -> Chat:
        """The assistant's message to which the next item belongs: the last one, unless text (`answers`) would follow text or calls."""
        last = self.messages[-1] if self.messages else {}
        taken = answers and ("content" in last or "tool_calls" in last)
        if last.get("role") != "assistant" or taken or self._reasoning:
            last = {"role": "assistant"}
            if self._reasoning:
                last["reasoning_content"] = "\n".join(self._reasoning)
            self._append(last)
        return last

    def _append(self, message: Chat) -> None:
        self._reasoning = []
        self.messages.append(message)


def seal(text: str) -> str:
    """Reasoning as `encrypted_content`. It is encoded, not encrypted: the client has the text anyhow."""
    return base64.b64encode(SEALED + text.encode(errors="replace")).decode()


def page(kept: Sequence[bytes], limit: int, newest_first: bool, after: str | None) -> bytes:
    """A list of kept items, as JSON. kept: JSON lists. after: the id of the item before the page; a 400 if there is none."""
    items = [item for part in kept for item in json.loads(part)]
    if newest_first:
        items.reverse()
    if after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise bad("after", f"no item has the id {after[:64]!r}")
        items = items[at + 1 :]
    shown = items[:limit]
    ends = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    listed = {"object": "list", "data": shown, "first_id": ends[0], "last_id": ends[1], "has_more": len(items) > limit}
    return to_json(listed)
