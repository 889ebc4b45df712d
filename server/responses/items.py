"""Items: those of a request as they are kept, the chat messages that they become, and pages of those that are kept.

These are plain functions, so that a worker can run them for long conversations.
"""

import base64
import binascii
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.errors import bad
from server.http import to_json
from server.responses.schemas import (
    CALLS,
    OUTPUTS,
    UNSEEN,
    AdditionalTools,
    ContentText,
    GivenCall,
    GivenCallOutput,
    GivenMessage,
    GivenReasoning,
    ItemReference,
    OtherItem,
    ResponsesBody,
    joined_name,
)
from server.schemas import RefusalPart
from server.translation import Chat, chat_call

SEALED = b"rung:"  # begins the `encrypted_content` that this server writes
ALL_CALLS = {"function_call": "arguments", **CALLS}
ALL_OUTPUTS = {"function_call_output": "output", "custom_tool_call_output": "output", **OUTPUTS}
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}  # of ids; else "item"


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
