"""Find reasoning, text and tool calls in an answer in gpt-oss's format, harmony (github.com/openai/harmony, docs/format.md).

An answer is one message or several. Each begins with `<|start|>assistant`, but for the first, which the prompt has begun. A header
names the channel and perhaps a recipient, then comes the content. The channel analysis is reasoning, and a message to one of the
request's tools is a call. All else is text, also without a header.
"""

import re
from collections.abc import Generator
from typing import Any

from engine.calls.parser import SPACES, AnswerParser, Reasoning, Text, Tools
from engine.calls.reader import Markers, Sink, Word, ignore

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = Markers(["<|end|>", "<|call|>", "<|return|>", START])  # of a content
HEADER_ENDS = Markers([MESSAGE, *ENDS.texts])
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.-]+)")
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
BETWEEN = "\n\n"  # contents of one kind


class HarmonyParser(AnswerParser):
    """The parser of answers in this format. `hidden` and `inside` have no meaning here: it reads all markers."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._kinds = set[type[Reasoning | Text]]()  # of contents so far

    def _answer(self) -> Generator[None]:
        marker = ""
        while (yield from self._reader.peek()):
            marker = yield from self._message(marker == START)

    def _message(self, begun: bool) -> Word:
        """Read a message. Returns the marker that ended it; empty: the end of the text. begun: its first marker has been read."""
        reader, header = self._reader, list[str]()
        for begin in () if begun else (START, CHANNEL, " to="):
            begun = begun or (yield from reader.literal(begin, header.append))
        if not begun and reader.cut and reader.position:  # the beginning of a marker
            return (yield from reader.until(ENDS, ignore))
        if begun:
            marker = yield from reader.until(HEADER_ENDS, header.append)
            if marker != MESSAGE:  # a header that is cut off, or none
                self._sink(Text)("".join(header) * bool(marker))
                return marker
        written = "".join(header)
        name = found[1] if (found := RECIPIENT.search(written)) else ""
        if self._tools and name in self._tools.names:
            return (yield from self._called(name, self._tools))
        if not ANALYSIS.search(written):
            return (yield from reader.until(ENDS, self._sink(Text)))
        self.reasoned = None
        marker = yield from reader.until(ENDS, self._sink(Reasoning))
        self.reasoned = reader.position if marker else None
        return marker

    def _called(self, name: str, tools: Tools) -> Word:
        """Read the content of a call. Returns what `_message` returns."""
        reader = self._reader
        yield from reader.run(SPACES)
        if (yield from reader.peek()) != "{":
            return (yield from reader.until(ENDS, self._sink(Text)))
        self._name = name
        self._begin_call(tools)
        self.complete = (yield from reader.json_object(self._argue)) or (self.complete and not self._shown)
        return (yield from reader.until(ENDS, ignore))

    def _sink(self, kind: type[Reasoning | Text]) -> Sink:
        """Takes the next content of this kind. A line is between it and an earlier one."""
        begun = [False]

        def take(text: str) -> None:
            if text and not begun[0]:
                begun[0] = True
                self._add(kind, BETWEEN if kind in self._kinds else "")
                self._kinds.add(kind)
            self._add(kind, text)

        return take
