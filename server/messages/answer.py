"""A request of /v1/messages, once its prompt is known: its answer as content blocks, whole or as the published sequence of events."""

import io
import json
import uuid
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from engine.calls.parser import Arguments, Call, Part, Reasoning, Text
from engine.text import Delta
from server.calls import marks_reasoning
from server.chat import TranslatedChat
from server.errors import ApiError, messages_error_body
from server.generation import Prompt
from server.http import Event, named_event
from server.messages.bodies import ID_PREFIX, MessagesBody
from server.schemas import ChatBody
from server.service import Service

SIGNATURE = "unsigned"  # clients expect one and send it back; this server does not check it
# by the type of a part: the type of its block, and the type and the field of the delta that it brings
LAYOUTS = {
    Reasoning: ("thinking", "thinking_delta", "thinking"),
    Text: ("text", "text_delta", "text"),
    Call: ("tool_use", "", ""),
    Arguments: ("tool_use", "input_json_delta", "partial_json"),
}


class MessagesRequest(TranslatedChat):
    id_prefix, kind = "msg", "message"
    heartbeat = named_event("ping", {})

    def __init__(
        self, service: Service, body: MessagesBody, chat: ChatBody, prompts: list[Prompt], grammar: str, request_id: str = ""
    ) -> None:
        """`chat`: `body.chat`, perhaps with another seed."""
        left = service.max_model_len - len(prompts[0].ids)
        budget = body.thinking and body.thinking.budget_tokens
        if budget and marks_reasoning(service, chat):
            chat = chat.model_copy(update={"thinking_token_budget": budget})
        super().__init__(service, chat, prompts, grammar, min(left, body.max_tokens))
        self.id = f"{self.id_prefix}_{uuid.uuid4().hex[:24]}"
        self.content = Content(body.shows_thinking)
        self._request_id, self._is_cut_by_context = request_id, left < body.max_tokens
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def events_of(self, delta: Delta) -> Iterator[Event]:
        if delta.first:
            yield "message_start", {"message": self.reply()}
        for part in self.reader.push(delta):
            yield from self.content.push(part)
        if delta.finish_reason:
            yield from self.content.end()
            reason, sequence = self._stop_reason(delta)
            self._stop = {"stop_reason": reason, "stop_sequence": sequence}
            yield "message_delta", {"delta": self._stop, "usage": self._report()}
            yield "message_stop", {}

    def reply(self) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": self.content.blocks, **self._stop, "usage": self._report()}

    def write_error(self, error: ApiError) -> bytes:
        return named_event("error", messages_error_body(error.status_code, error.message, self._request_id))

    def _stop_reason(self, delta: Delta) -> tuple[str, str | None]:
        """`stop_reason` and `stop_sequence`."""
        if self.reader.called:
            return "tool_use", None
        if delta.finish_reason == "length":
            return "model_context_window_exceeded" if self._is_cut_by_context else "max_tokens", None
        return ("stop_sequence", delta.stop_reason) if isinstance(delta.stop_reason, str) else ("end_turn", None)

    def _report(self) -> dict[str, Any]:
        """The usage so far. Tokens of the prompt that were cached count apart."""
        report = self.usage.report()
        cached = report["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": report["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": report["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": report["completion_tokens_details"]["reasoning_tokens"]},
        }


class Content:
    """The content blocks of an answer. `blocks`: the finished ones."""

    def __init__(self, shows_thinking: bool = True) -> None:
        """shows_thinking: false leaves the text of thinking empty."""
        self.blocks: list[dict[str, Any]] = []
        self._shows_thinking = shows_thinking
        self._open: dict[str, Any] | None = None  # as it began, without its text
        self._text = io.StringIO()  # of the open block

    def push(self, part: Part) -> Iterator[Event]:
        """The events of the next part."""
        kind, delta, field = LAYOUTS[type(part)]
        if self._open is None or self._open["type"] != kind or isinstance(part, Call):
            yield from self.end()
            self._open, self._text = _empty_block(part), io.StringIO()
            yield "content_block_start", {"index": len(self.blocks), "content_block": self._open}
            if not self.blocks:
                yield "ping", {}
        if not isinstance(part, Call):
            self._text.write(part.text)
            if self._shows_thinking or kind != "thinking":
                yield self._delta(delta, field, part.text)

    def end(self) -> Iterator[Event]:
        """The events at the end of the open block, if there is one."""
        if self._open is None:
            return
        block, text = self._open, self._text.getvalue()
        if block["type"] == "thinking":
            yield self._delta("signature_delta", "signature", SIGNATURE)
            block = block | {"thinking": text * self._shows_thinking, "signature": SIGNATURE}
        else:
            block = block | ({"input": read_input(text)} if block["type"] == "tool_use" else {"text": text})
        yield "content_block_stop", {"index": len(self.blocks)}
        self.blocks.append(block)
        self._open = None

    def _delta(self, kind: str, field: str, text: str) -> Event:
        return "content_block_delta", {"index": len(self.blocks), "delta": {"type": kind, field: text}}


def _empty_block(part: Part) -> dict[str, Any]:
    """The block that begins with `part`."""
    if isinstance(part, Call):
        return {"type": "tool_use", "id": ID_PREFIX + part.id.removeprefix("call_"), "name": part.name, "input": {}}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


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
