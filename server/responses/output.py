"""The output items of an answer, and the events with which they grow, in the order that OpenAI publishes.

The items of a whole answer are made in the same way, and the events dropped.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from server.endpoint import JsonLists
from server.http import to_json
from server.parts import Arguments, Call, Part, Text
from server.parts import Reasoning as Thought
from server.responses.items import is_json, new_id, seal
from server.responses.schemas import CustomTool, Offered
from text.chat_form import read_arguments

Event = tuple[str, dict[str, Any]]  # its type, and its fields but the type and the number
Status = Literal["completed", "incomplete"]


class Output:
    """`items`: the finished ones."""

    def __init__(self, sealed: bool, functions: Sequence[Offered]) -> None:
        """sealed: whether reasoning comes as `encrypted_content` besides. functions: those that may be called."""
        self.items: list[dict[str, Any]] = []
        self._sealed = sealed
        self._functions = {one.name: one for one in functions}
        self._open: _Message | _Reasoning | _FunctionCall | None = None
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
                one = self._functions.get(part.name)
                kind = _CustomCall if one and isinstance(one.tool, CustomTool) else _FunctionCall
                namespace = {"namespace": one.namespace} if one and one.namespace else {}
                yield from self._begin(kind, part.id, {"name": one.tool.name if one else part.name, **namespace})
            elif isinstance(part, Thought):
                if not isinstance(self._open, _Reasoning):
                    yield from self._begin(_Reasoning, self._sealed)
                yield from self._grow(part.text)
            elif isinstance(part, Arguments):
                yield from self._grow(part.text)

    def end(self, status: Status) -> Iterator[Event]:
        """The events at the end of the answer. One without calls has a message, even if it is empty."""
        called = any(item["type"] != "reasoning" for item in self.items) or isinstance(self._open, _FunctionCall)
        if not isinstance(self._open, _Message) and not called and (status == "completed" or not self._open):
            yield from self._begin(_Message)
            if self._blank:
                yield from self._grow(self._blank)
        yield from self._end_item(status)

    def stop(self) -> None:
        """The answer ends in the middle, without further events: the open item stays as it is."""
        for _ in self._end_item("incomplete"):
            pass

    def _push_text(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, _Message):
            self._blank += text
            if not text.strip():
                return
            text, self._blank = self._blank, ""
            yield from self._begin(_Message)
        yield from self._grow(text)

    def _grow(self, text: str) -> Iterator[Event]:
        assert self._open is not None
        if not text:
            return
        logprobs = self._logprobs.finish().get("all")
        yield from self._open.grow(text, logprobs)

    def _begin(self, kind: "type[_Message | _Reasoning | _FunctionCall]", *arguments: Any) -> Iterator[Event]:
        yield from self._end_item("completed")
        self._blank = self._blank if kind is _Message else ""
        self._open = kind(len(self.items), *arguments)
        yield from self._open.begin()

    def _end_item(self, status: Status) -> Iterator[Event]:
        if self._open is not None:
            status = self._open.last_status(status)
            yield from self._open.end(status)
            self.items.append(self._open.item(status))
            self._open = None


class _Open:
    """An item that grows. `place`: what all its events have."""

    prefix: str

    def __init__(self, index: int) -> None:
        self.id = new_id(self.prefix)
        self.index = index
        self.place: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def item(self, status: str) -> dict[str, Any]:
        raise NotImplementedError

    def last_status(self, status: Status) -> Status:
        """The item's status if it ends as `status` says."""
        return status

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self.index, "item": self.item("in_progress")}

    def end(self, status: Status) -> Iterator[Event]:
        yield "response.output_item.done", {"output_index": self.index, "item": self.item(status)}


class _Content(_Open):
    """An item of one content part."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.place["content_index"] = 0

    def part(self) -> dict[str, Any]:
        raise NotImplementedError

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield "response.content_part.added", {**self.place, "part": self.part()}

    def end(self, status: Status) -> Iterator[Event]:
        yield "response.content_part.done", {**self.place, "part": self.part()}
        yield from super().end(status)


class _Message(_Content):
    prefix = "msg"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs = bytearray()

    def logprobs(self) -> msgspec.Raw | list[Any]:
        return msgspec.Raw(b"[" + self._logprobs + b"]") if self._logprobs else []

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs()}

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def grow(self, text: str, logprobs: msgspec.Raw | None) -> Iterator[Event]:
        self._texts.append(text)
        if logprobs is not None:
            self._logprobs += b"," * bool(self._logprobs) + bytes(logprobs)[1:-1]
        yield "response.output_text.delta", {**self.place, "delta": text, "logprobs": [] if logprobs is None else logprobs}

    def end(self, status: Status) -> Iterator[Event]:
        yield "response.output_text.done", {**self.place, "text": self.text, "logprobs": self.logprobs()}
        yield from super().end(status)


class _Reasoning(_Content):
    prefix = "rs"

    def __init__(self, index: int, sealed: bool) -> None:
        super().__init__(index)
        self._sealed = sealed

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        item = {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        return item | ({"encrypted_content": seal(self.text)} if self._sealed and content else {})

    def grow(self, text: str, logprobs: msgspec.Raw | None) -> Iterator[Event]:
        self._texts.append(text)
        yield "response.reasoning_text.delta", {**self.place, "delta": text}

    def end(self, status: Status) -> Iterator[Event]:
        yield "response.reasoning_text.done", {**self.place, "text": self.text}
        yield from super().end(status)


class _FunctionCall(_Open):
    prefix = "fc"

    def __init__(self, index: int, call_id: str, name: dict[str, str]) -> None:
        super().__init__(index)
        self._head = {"call_id": call_id, **name}

    def last_status(self, status: Status) -> Status:
        return status if is_json(self.text) else "incomplete"  # a stop text or EOS may cut a call off

    def item(self, status: str) -> dict[str, Any]:
        return {"id": self.id, "type": "function_call", "status": status, **self._head, "arguments": self.text}

    def grow(self, text: str, logprobs: msgspec.Raw | None) -> Iterator[Event]:
        self._texts.append(text)
        yield "response.function_call_arguments.delta", {**self.place, "delta": text}

    def end(self, status: Status) -> Iterator[Event]:
        yield "response.function_call_arguments.done", {**self.place, "arguments": self.text}
        yield from super().end(status)


class _CustomCall(_FunctionCall):
    """A call of a custom tool, whose arguments have its input."""

    prefix = "ctc"

    @property
    def input(self) -> str:
        value = read_arguments(self.text)
        given = value.get("input", "") if isinstance(value, dict) else value
        return given if isinstance(given, str) else to_json(given).decode()

    def item(self, status: str) -> dict[str, Any]:
        return {"id": self.id, "type": "custom_tool_call", "status": status, **self._head, "input": self.input}

    def grow(self, text: str, logprobs: msgspec.Raw | None) -> Iterator[Event]:
        self._texts.append(text)  # JSON, which is read once it is whole
        yield from ()

    def end(self, status: Status) -> Iterator[Event]:
        yield "response.custom_tool_call_input.delta", {**self.place, "delta": self.input}
        yield "response.custom_tool_call_input.done", {**self.place, "input": self.input}
        yield from _Open.end(self, status)
