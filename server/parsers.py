"""The parser of a request's answers: which one, and the plain one."""

from server import tool_calls
from server.parts import Arguments, Call, Parser, Part, Text
from server.schemas import ChatBody
from server.service import Service


def parser_for(service: Service, body: ChatBody) -> Parser:
    """A new parser for one answer to the request."""
    return WholeCalls(body) if body.tools and body.tool_choice != "none" else Plain()


class Plain:
    """All text is text."""

    complete = False

    def push(self, text: str, final: bool = False) -> list[Part]:
        return [Text(text)] if text else []


class WholeCalls:
    """Either the whole answer consists of tool calls, or it is text."""

    def __init__(self, body: ChatBody) -> None:
        self._body = body
        self._held, self._undecided = "", True
        self.complete = False

    def push(self, text: str, final: bool = False) -> list[Part]:
        self._held += text
        if self._undecided and not final:
            self._undecided = bool(self._body.forced_tools) or tool_calls.may_become_call(self._held)
            if self._undecided:
                return []
        held, self._held = self._held, ""
        calls = tool_calls.parse_calls(held, self._body) if self._undecided else None
        self.complete = calls is not None
        if calls is None and self._body.forced_tools:
            calls = tool_calls.parse_cut_call(held, self._body)
        if not calls:
            return [Text(held)] if held else []
        return [
            part
            for call in calls
            for part in (Call(call["id"], call["function"]["name"]), Arguments(call["function"]["arguments"]))
        ]
