"""Lay the parts of an answer out as content blocks, whole or as the published sequence of events."""

import json
from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from server.http import to_json
from server.messages.convert import ID_PREFIX
from server.parts import Arguments, Call, Part, Reasoning, Text

SIGNATURE = "unsigned"  # clients expect one and send it back; this server does not check it


def event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **fields}) + b"\n\n"


PING = event("ping")


def content_blocks(parts: Iterable[Part], shows_thinking: bool = True) -> list[dict[str, Any]]:
    """The whole content. shows_thinking: false leaves the text of thinking empty."""
    pieces: list[tuple[dict[str, Any], list[str]]] = []
    for part in parts:
        if not pieces or _begins_block(part, pieces[-1][0]["type"]):
            pieces.append((_start(part), []))
        if not isinstance(part, Call):
            pieces[-1][1].append(part.text)
    return [_whole(block, "".join(texts), shows_thinking) for block, texts in pieces]


def _begins_block(part: Part, current: str | None) -> bool:
    return isinstance(part, Call) or current != _KINDS[type(part)]


_KINDS = {Reasoning: "thinking", Text: "text", Call: "tool_use", Arguments: "tool_use"}


def _start(part: Part) -> dict[str, Any]:
    """The block that begins with `part`, still empty."""
    if isinstance(part, Call):
        return {"type": "tool_use", "id": ID_PREFIX + part.id.removeprefix("call_"), "name": part.name, "input": {}}
    return (
        {"type": "thinking", "thinking": "", "signature": ""} if isinstance(part, Reasoning) else {"type": "text", "text": ""}
    )


def _whole(block: dict[str, Any], text: str, shows_thinking: bool) -> dict[str, Any]:
    if block["type"] == "tool_use":
        return block | {"input": read_input(text)}
    if block["type"] == "thinking":
        return block | {"thinking": text * shows_thinking, "signature": SIGNATURE}
    return block | {"text": text}


def read_input(text: str) -> dict[str, Any]:
    """The arguments of a call. Of a call that was cut off, its complete values: Anthropic's clients read streams the same way."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = from_json(text, allow_partial=True)
        except ValueError:
            value = {}
    return value if isinstance(value, dict) else {}


class MessageEvents:
    """Encodes the events of one streamed message: `start`, `part` for each part, `end`."""

    def __init__(self, head: dict[str, Any], shows_thinking: bool = True) -> None:
        """`head`: the message as it begins, without its usage."""
        self._head, self._shows_thinking = head, shows_thinking
        self._index = -1
        self._open: str | None = None  # type of the block that has begun

    def start(self, usage: dict[str, Any]) -> bytes:
        return event("message_start", message={**self._head, "usage": usage})

    def part(self, part: Part) -> bytes:
        data = b""
        if _begins_block(part, self._open):
            block = _start(part)
            data = self._stop()
            self._index, self._open = self._index + 1, block["type"]
            data += event("content_block_start", index=self._index, content_block=block) + PING * (self._index == 0)
        if isinstance(part, Reasoning):
            return data + (self._delta("thinking_delta", thinking=part.text) if self._shows_thinking else b"")
        if isinstance(part, Text):
            return data + self._delta("text_delta", text=part.text)
        return data + (self._delta("input_json_delta", partial_json=part.text) if isinstance(part, Arguments) else b"")

    def end(self, stop_reason: str, stop_sequence: str | None, usage: dict[str, Any]) -> bytes:
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return self._stop() + event("message_delta", delta=delta, usage=usage) + event("message_stop")

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        signature = self._delta("signature_delta", signature=SIGNATURE) if self._open == "thinking" else b""
        return signature + event("content_block_stop", index=self._index)

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return event("content_block_delta", index=self._index, delta={"type": kind, **fields})
