"""One request of /v1/responses: its prompt, its answer, and the events of its stream."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from engine.text import Delta
from server.chat import read_conversation
from server.endpoint import GenerationRequest, StreamWriter, WholeChoice
from server.generation import Prompt
from server.http import to_json
from server.limits import Limits, fit_answer
from server.parsers import PartReader, parser_for
from server.problems import TOO_LONG, ApiError
from server.responses.items import new_id
from server.responses.output import Event, Output
from server.responses.schemas import ResponsesBody
from server.schemas import ChatBody
from server.service import Service

RESERVED_SHARE = 4  # truncation auto leaves a quarter of the context for an answer without max_output_tokens


async def read_prompt(service: Service, body: ResponsesBody, chat: ChatBody, size: int) -> list[Prompt]:
    """As `read_conversation`, but with truncation auto a prompt that is too long is cut at its start."""
    if body.truncation == "auto" and body.max_output_tokens:
        return await read_conversation(service, chat.model_copy(update={"truncate_prompt_tokens": -1}), size)
    try:
        return await read_conversation(service, chat, size)
    except ApiError as e:
        if body.truncation != "auto" or e.code != TOO_LONG:
            raise
    kept = service.max_model_len - service.max_model_len // RESERVED_SHARE
    return await read_conversation(service, chat.model_copy(update={"truncate_prompt_tokens": kept}), size)


class ResponsesRequest(GenerationRequest):
    """`repeated`: see convert.py. `keep(request)` is called once the response is complete."""

    id_prefix, kind = "resp", "response"
    stream_end = b""

    def __init__(
        self,
        service: Service,
        body: ResponsesBody,
        chat: ChatBody,
        prompts: list[Prompt],
        grammar: str,
        repeated: Mapping[str, msgspec.Raw],
        keep: Callable[["ResponsesRequest"], None] = lambda request: None,
    ) -> None:
        context, logprobs = service.max_model_len, chat.listed_logprobs
        # the answer's log-probabilities must fit into memory
        default = None if logprobs is None else Limits(context).logprobs // (1 + logprobs)
        limit = fit_answer(context, len(prompts[0].ids), chat.limit, default, "max_output_tokens", "messages")
        super().__init__(service, chat, grammar, prompts, [limit])
        self.id = new_id(self.id_prefix)
        self.body, self._repeated, self._streams = body, repeated, False
        self.output = Output(body.with_encrypted, body.functions)
        self.status = "queued"
        self.completed_at: int | None = None
        self.error: dict[str, str] | None = None
        self._incomplete: dict[str, str] | None = None
        self._reader, self._keep = PartReader(parser_for(service, chat, prompts[0].ids), self.usage), keep
        self._events = 0

    # --- what a GenerationRequest defines ------------------------------------------------------------------------------------

    def reply(self, choices: Sequence[WholeChoice]) -> dict[str, Any]:
        return self.response()

    def stream_writer(self) -> StreamWriter:
        self._streams = True
        return ResponseStream(self)

    def write_error(self, error: ApiError) -> bytes:
        return self.encode([self.fail(error)])

    def _collect(self, choices: Sequence[WholeChoice], delta: Delta) -> None:
        if not self._streams:  # otherwise the stream's writer has it
            for _ in self.push(delta):
                pass

    def encode(self, events: Iterable[Event]) -> bytes:
        """Number and encode events."""
        encoded = []
        for kind, fields in events:
            data = to_json({"type": kind, "sequence_number": self._events, **fields})
            encoded.append(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")
            self._events += 1
        return b"".join(encoded)

    # --- the answer ----------------------------------------------------------------------------------------------------------

    def push(self, delta: Delta) -> Iterator[Event]:
        """The events of the next delta."""
        if self.status == "queued":
            self.status = "in_progress"
            yield "response.created", {"response": self.response()}
            yield "response.in_progress", {"response": self.response()}
        logprobs = self.logprobs(delta)
        yield from self.output.push(self._reader.push(delta), logprobs["content"] if logprobs else None)
        if delta.finish_reason:
            yield from self._end(cut=delta.finish_reason == "length")

    def _end(self, cut: bool) -> Iterator[Event]:
        yield from self.output.end("incomplete" if cut else "completed")
        self.status = "incomplete" if cut else "completed"
        self._incomplete = {"reason": "max_output_tokens"} if cut else None
        self.completed_at = None if cut else int(time.time())
        self._keep(self)
        yield f"response.{self.status}", {"response": self.response()}

    def cancel(self) -> None:
        self.status = "cancelled"
        self.output.stop()

    def fail(self, error: ApiError) -> Event:
        """The event of an error after the start."""
        self.status = "failed"
        self.output.stop()
        self.error = {"code": "rate_limit_exceeded" if error.status_code == 429 else "server_error", "message": error.message}
        return "response.failed", {"response": self.response()}

    def response(self) -> dict[str, Any]:
        """The response object as it is now."""
        body, reasoning, repeated = self.body, self.body.reasoning, self._repeated
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "background": bool(body.background),
            "completed_at": self.completed_at,
            "error": self.error,
            "incomplete_details": self._incomplete,
            "instructions": repeated["instructions"],
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self.model,
            "output": self.output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": repeated["text"],
            "tool_choice": _plain(body.tool_choice) or "auto",
            "tools": repeated["tools"],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if self.status in ("completed", "incomplete") else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> dict[str, Any]:
        counts = self.usage.report()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": counts["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": counts["total_tokens"],
        }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else value.model_dump()


class ResponseStream:
    def __init__(self, request: ResponsesRequest) -> None:
        self._request = request

    def push(self, delta: Delta) -> bytes:
        return self._request.encode(self._request.push(delta))

    def last(self) -> bytes:
        return b""  # the last delta brings the last event
