"""A request of /v1/messages, once its prompt is known."""

import uuid
from collections.abc import Sequence
from typing import Any

from engine.text import Delta
from server.endpoint import GenerationRequest, StreamWriter, WholeChoice
from server.generation import Prompt
from server.messages.bodies import MessagesBody
from server.messages.errors import error_body
from server.messages.events import PING, MessageEvents, content_blocks, event
from server.parsers import PartReader, marks_reasoning, parser_for
from server.problems import ApiError
from server.schemas import ChatBody
from server.service import Service


class MessagesRequest(GenerationRequest):
    id_prefix, kind = "msg", "message"
    stream_end, heartbeat = b"", PING

    def __init__(
        self, service: Service, body: MessagesBody, chat: ChatBody, prompts: list[Prompt], grammar: str, request_id: str = ""
    ) -> None:
        """`chat`: `body.chat`, perhaps with another seed."""
        self.body, self.chat, self.request_id = body, chat, request_id
        left = service.max_model_len - len(prompts[0].ids)
        self.is_cut_by_context = left < body.max_tokens
        budget = body.thinking and body.thinking.budget_tokens
        if budget and marks_reasoning(service, chat):
            chat = chat.model_copy(update={"thinking_token_budget": budget})
        super().__init__(service, chat, grammar, prompts, [min(left, body.max_tokens)])
        self.id = f"{self.id_prefix}_{uuid.uuid4().hex[:24]}"

    def write_error(self, error: ApiError) -> bytes:
        return event("error", **error_body(error, self.request_id))

    def part_reader(self, index: int) -> PartReader:
        return PartReader(parser_for(self.service, self.chat, self.plan.prompt(index).ids), self.usage)

    def reply(self, choices: Sequence[WholeChoice]) -> dict[str, Any]:
        whole = choices[0]
        content = content_blocks(whole.parts.joined(), self.body.shows_thinking)
        called = whole.reader is not None and whole.reader.called
        reason, sequence = self.stop_reason(whole.finish_reason, whole.stop_reason, called)
        return self.message(content) | {"stop_reason": reason, "stop_sequence": sequence, "usage": self.report()}

    def message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The message, as long as it is not known why it stops."""
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return head | {"stop_reason": None, "stop_sequence": None}

    def stop_reason(self, finish: str | None, stop: str | int | None, called: bool) -> tuple[str, str | None]:
        """`stop_reason` and `stop_sequence`. `stop`: the text or token that ended the answer. `called`: it ends with calls."""
        if called:
            return "tool_use", None
        if finish == "length":
            return "model_context_window_exceeded" if self.is_cut_by_context else "max_tokens", None
        return ("stop_sequence", stop) if isinstance(stop, str) else ("end_turn", None)

    def report(self) -> dict[str, Any]:
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

    def stream_writer(self) -> StreamWriter:
        return MessageStream(self)


class MessageStream:
    """The events of a message."""

    def __init__(self, request: MessagesRequest) -> None:
        self._request, self._reader = request, request.part_reader(0)
        self._events = MessageEvents(request.message([]), request.body.shows_thinking)

    def push(self, delta: Delta) -> bytes:
        request, events = self._request, self._events
        data = [events.start(request.report())] if delta.first else []
        data += [events.part(part) for part in self._reader.push(delta)]
        if delta.finish_reason:
            reason = request.stop_reason(delta.finish_reason, delta.stop_reason, self._reader.called)
            data.append(events.end(*reason, request.report()))
        return b"".join(data)

    def last(self) -> bytes:
        return b""
