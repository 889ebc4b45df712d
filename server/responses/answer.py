"""One request of /v1/responses: its prompt, its answer, and the events of its stream in the order that OpenAI publishes."""

import io
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from engine.calls.parser import Call, Part, Reasoning, Text
from engine.text import Delta
from server.bounds import TokenBounds, fit_answer
from server.chat import TranslatedChat, read_conversation
from server.endpoint import JsonLists
from server.errors import TOO_LONG, ApiError
from server.generation import Prompt
from server.http import Event, to_json
from server.replies import ResponsesReply
from server.responses.convert import is_json, new_id, seal
from server.responses.schemas import CustomTool, Offered, ResponsesBody
from server.schemas import ChatBody
from server.service import Service
from text.chat_form import read_arguments

RESERVED_SHARE = 4  # truncation auto leaves a quarter of the context for an answer without max_output_tokens

Status = Literal["completed", "incomplete"]


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


class ResponsesRequest(TranslatedChat):
    """`repeated`: see convert.py. `keep(request)` is called once the response is complete."""

    id_prefix, kind = "resp", "response"
    streams_whole = True  # the last event has all items

    def __init__(
        self,
        service: Service,
        body: ResponsesBody,
        chat: ChatBody,
        prompts: list[Prompt],
        grammar: str,
        repeated: Mapping[str, Any],
        keep: Callable[["ResponsesRequest"], None] = lambda request: None,
    ) -> None:
        context, logprobs = service.max_model_len, chat.listed_logprobs
        # the answer's log-probabilities must fit into memory
        default = context if logprobs is None else TokenBounds(context).logprobs // (1 + logprobs)
        default = min(default, service.defaults.get("max_tokens", context))
        limit = fit_answer(context, len(prompts[0].ids), chat.limit, default, "max_output_tokens", "messages")
        super().__init__(service, chat, prompts, grammar, limit)
        self.id = new_id(self.id_prefix)
        own = {name: value for name, value in service.defaults.items() if name in repeated and getattr(body, name) is None}
        self.body, self._repeated, self.keep = body, {**repeated, **own}, keep
        self.output = Output(body.with_encrypted, body.functions)
        self.status = "queued"
        self.completed_at: int | None = None
        self.error: dict[str, str] | None = None
        self._numbers = itertools.count()  # of events

    def encode(self, events: Iterable[Event]) -> bytes:
        numbered = [(kind, {"sequence_number": next(self._numbers), **fields}) for kind, fields in events]
        return super().encode(numbered)

    def events_of(self, delta: Delta) -> Iterator[Event]:
        if self.status == "queued":
            self.status = "in_progress"
            yield "response.created", {"response": self.reply()}
            yield "response.in_progress", {"response": self.reply()}
        logprobs = self.logprobs(delta)
        yield from self.output.push(self.reader.push(delta), logprobs["content"] if logprobs else None)
        if delta.finish_reason:
            status: Status = "incomplete" if delta.finish_reason == "length" else "completed"
            yield from self.output.end(status)
            self.status = status
            self.completed_at = int(time.time()) if status == "completed" else None
            self.keep(self)
            yield f"response.{status}", {"response": self.reply()}

    def write_error(self, error: ApiError) -> bytes:
        return self.encode([self.fail(error)])

    def cancel(self) -> None:
        self.status = "cancelled"
        self.output.stop()

    def fail(self, error: ApiError) -> Event:
        """The event of an error after the start."""
        self.status = "failed"
        self.output.stop()
        self.error = {"code": "rate_limit_exceeded" if error.status_code == 429 else "server_error", "message": error.message}
        return "response.failed", {"response": self.reply()}

    def reply(self) -> dict[str, Any]:
        own = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "completed_at": self.completed_at,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "model": self.model,
            "output": self.output.items,
            "service_tier": "default",
            "usage": self._report() if self.status in ("completed", "incomplete") else None,
        }
        return {name: own[name] if name in own else self._repeated[name] for name in ResponsesReply.model_fields}

    def _report(self) -> dict[str, Any]:
        counts = self.usage.report()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": counts["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": counts["total_tokens"],
        }


class Output:
    """The output items of an answer. `items`: the finished ones."""

    def __init__(self, sealed: bool, functions: Sequence[Offered]) -> None:
        """sealed: whether reasoning comes as `encrypted_content` besides. functions: those that may be called."""
        self.items: list[dict[str, Any]] = []
        self._sealed = sealed
        self._functions = {one.name: one for one in functions}
        self._open: Item | None = None
        self._blank = ""  # white space that is text only if text follows
        self._logprobs = JsonLists()  # of tokens whose text has not come yet

    def push(self, parts: Sequence[Part], logprobs: Sequence[Any] | None) -> Iterator[Event]:
        """The events of the next parts. logprobs: of the tokens that came with them."""
        if logprobs:
            self._logprobs.extend({"all": list(logprobs)})
        for part in parts:
            if isinstance(part, Text):
                yield from self._push_text(part.text)
            elif isinstance(part, Call):
                yield from self._begin_call(part)
            else:
                if isinstance(part, Reasoning) and self._layout is not REASONING:
                    yield from self._begin(REASONING, {"summary": []})
                yield from self._grow(part.text)

    def end(self, status: Status) -> Iterator[Event]:
        """The events at the end of the answer. One without calls has a message, even if it is empty."""
        called = any(item["type"] != "reasoning" for item in self.items) or self._layout in (FUNCTION, CUSTOM)
        if self._layout is not MESSAGE and not called and (status == "completed" or not self._open):
            yield from self._begin(MESSAGE, {"role": "assistant"})
            if self._blank:
                yield from self._grow(self._blank)
        yield from self._end_item(status)

    def stop(self) -> None:
        """The answer ends in the middle, without further events: the open item stays as it is."""
        for _ in self._end_item("incomplete"):
            pass

    @property
    def _layout(self) -> "Layout | None":
        """The layout of the open item."""
        return self._open.layout if self._open else None

    def _push_text(self, text: str) -> Iterator[Event]:
        if self._layout is not MESSAGE:
            self._blank += text
            if not text.strip():
                return
            text, self._blank = self._blank, ""
            yield from self._begin(MESSAGE, {"role": "assistant"})
        yield from self._grow(text)

    def _begin_call(self, call: Call) -> Iterator[Event]:
        one = self._functions.get(call.name)
        head = {"call_id": call.id, "name": one.tool.name if one else call.name}
        if one and one.namespace:
            head["namespace"] = one.namespace
        yield from self._begin(CUSTOM if one and isinstance(one.tool, CustomTool) else FUNCTION, head)

    def _begin(self, layout: "Layout", head: dict[str, Any]) -> Iterator[Event]:
        yield from self._end_item("completed")
        self._blank = self._blank if layout is MESSAGE else ""
        self._open = Item(layout, len(self.items), head, self._sealed and layout is REASONING)
        yield from self._open.begin()

    def _grow(self, text: str) -> Iterator[Event]:
        assert self._open is not None
        if text:
            yield from self._open.grow(text, self._logprobs.finish().get("all"))

    def _end_item(self, status: Status) -> Iterator[Event]:
        if self._open is not None:
            status = self._open.last_status(status)
            yield from self._open.end(status)
            self.items.append(self._open.whole(status))
            self._open = None


class Layout(NamedTuple):
    """How one type of item and its events are written."""

    type: str
    prefix: str  # of ids
    event: str  # what its events are named after, and the type of its content part
    field: str  # of the text, in the item or its content part, and in the event that ends it
    in_content: bool  # whether the text is in a content part


MESSAGE = Layout("message", "msg", "output_text", "text", True)
REASONING = Layout("reasoning", "rs", "reasoning_text", "text", True)
FUNCTION = Layout("function_call", "fc", "function_call_arguments", "arguments", False)
CUSTOM = Layout("custom_tool_call", "ctc", "custom_tool_call_input", "input", False)  # its arguments have its input


class Item:
    """An item that grows."""

    def __init__(self, layout: Layout, index: int, head: dict[str, Any], sealed: bool) -> None:
        """head: the fields that do not change. sealed: whether its text comes as `encrypted_content` besides."""
        self.layout, self._index, self._head, self._sealed = layout, index, head, sealed
        self._id = new_id(layout.prefix)
        self._place = {"item_id": self._id, "output_index": index} | ({"content_index": 0} if layout.in_content else {})
        self._text = io.StringIO()
        self._logprobs = bytearray()  # of a message, encoded

    def whole(self, status: str) -> dict[str, Any]:
        """The item as it is now."""
        item = {"id": self._id, "type": self.layout.type, "status": status, **self._head}
        if not self.layout.in_content:
            return item | {self.layout.field: self._written()}
        if status == "in_progress":
            return item | {"content": []}
        return item | {"content": [self._part()]} | ({"encrypted_content": seal(self._written())} if self._sealed else {})

    def last_status(self, status: Status) -> Status:
        """The item's status if it ends as `status` says. A stop text or EOS may cut a call off."""
        return status if self.layout.in_content or is_json(self._text.getvalue()) else "incomplete"

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self._index, "item": self.whole("in_progress")}
        if self.layout.in_content:
            yield "response.content_part.added", {**self._place, "part": self._part()}

    def grow(self, text: str, logprobs: msgspec.Raw | None) -> Iterator[Event]:
        self._text.write(text)
        if logprobs is not None and self.layout is MESSAGE:
            self._logprobs += b"," * bool(self._logprobs) + bytes(logprobs)[1:-1]
        if self.layout is not CUSTOM:  # its input is read once it is whole
            yield self._event("delta", "delta", text, [] if logprobs is None else logprobs)

    def end(self, status: Status) -> Iterator[Event]:
        text = self._written()
        if self.layout is CUSTOM:
            yield self._event("delta", "delta", text, [])
        yield self._event("done", self.layout.field, text, self._all_logprobs())
        if self.layout.in_content:
            yield "response.content_part.done", {**self._place, "part": self._part()}
        yield "response.output_item.done", {"output_index": self._index, "item": self.whole(status)}

    def _event(self, kind: str, field: str, text: str, logprobs: Any) -> Event:
        fields = {**self._place, field: text} | ({"logprobs": logprobs} if self.layout is MESSAGE else {})
        return f"response.{self.layout.event}.{kind}", fields

    def _part(self) -> dict[str, Any]:
        more = {"annotations": [], "logprobs": self._all_logprobs()} if self.layout is MESSAGE else {}
        return {"type": self.layout.event, "text": self._written(), **more}

    def _all_logprobs(self) -> msgspec.Raw | list[Any]:
        return msgspec.Raw(b"[" + self._logprobs + b"]") if self._logprobs else []

    def _written(self) -> str:
        """The text, of a custom call the one in its arguments."""
        text = self._text.getvalue()
        if self.layout is not CUSTOM:
            return text
        value = read_arguments(text)
        given = value.get("input", "") if isinstance(value, dict) else value
        return given if isinstance(given, str) else to_json(given).decode()
