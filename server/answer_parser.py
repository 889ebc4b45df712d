"""Find reasoning, text and tool calls in an answer, as it is written.

An answer is reasoning, then text and calls in any order. A call is one only if it names a known tool, and once its arguments
begin. Whatever only looks like one is text, but not the beginning of a further call where the answer is cut off. Spaces next to a
call, and line breaks next to the end of the reasoning, separate them and are dropped.
"""

import json
import re
import uuid
from collections.abc import Generator
from dataclasses import dataclass

from engine.thinking import ReasoningSyntax
from server.call_syntax import CallSyntax
from server.incremental import Markers, Reader, Sink, Truth, Word
from server.parts import Arguments, Call, Part, Reasoning, Text

SPACES = re.compile(r"\s*")
NEWLINES = re.compile(r"\n*")
ANYTHING = re.compile(r"(?s:.)*")
LETTERS = re.compile(r"[a-z_]*")
NAME = re.compile(r"[A-Za-z0-9_.-]*")

FENCE = "```"
CLOSES = {"<tool_call>": "</tool_call>", FENCE: FENCE}
ARGUMENTS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")  # with a string; not needed


@dataclass(frozen=True)
class Tools:
    """The calls that an answer may have."""

    syntax: CallSyntax
    names: frozenset[str]
    parallel: bool = True  # false: only the first call counts
    forced: bool = False  # the answer is a call
    forced_name: str = ""  # the only tool that it may call, if there is only one

    def new_id(self) -> str:
        random, length = uuid.uuid4().hex, self.syntax.id_length
        return random[:length] if length else f"call_{random[:24]}"

    @property
    def openers(self) -> tuple[str, ...]:
        """What begins calls in the middle of an answer."""
        return self.syntax.markers[:1] or (FENCE,)


class _Trimmed:
    """Passes text on, but spaces at its end only if more text follows."""

    def __init__(self, sink: Sink, spaces: str | None) -> None:
        """spaces: which characters; None: all spaces."""
        self._sink, self._spaces, self._held = sink, spaces, list[str]()

    def push(self, text: str) -> None:
        body = text.rstrip(self._spaces)
        if body:
            if self._held:
                self.flush()
            self._sink(body)
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def flush(self) -> None:
        self._sink("".join(self._held))
        self.drop()

    def drop(self) -> None:
        self._held.clear()


class AnswerParser:
    """The parser of all families: they differ in `reasoning` and `tools`."""

    def __init__(self, reasoning: ReasoningSyntax | None, inside: bool, tools: Tools | None, hidden: frozenset[str]) -> None:
        """inside: the prompt has begun the reasoning. hidden: markers that are special tokens, which are no text."""
        self.complete = False
        self.reasoned: int | None = 0
        self._reasoning, self._inside, self._tools, self._hidden = reasoning, inside, tools, hidden
        self._reader = Reader()
        self._new: list[tuple[type[Reasoning | Text | Arguments], list[str]] | Call] = []
        self._text = _Trimmed(lambda text: self._add(Text, text), None)
        self._held: list[str] = []  # what may be a call
        self._calls, self._shown, self._begun, self._name = 0, False, False, ""  # of the last call
        self._steps = self._answer()

    def push(self, text: str, final: bool = False) -> list[Part]:
        if final or not self._reader.passes_on(text):
            self._reader.feed(text, final)
            next(self._steps, None)
        new, self._new = self._new, []
        return [one if isinstance(one, Call) else one[0]("".join(one[1])) for one in new]

    # --- output --------------------------------------------------------------------------------------------------------

    def _add(self, kind: type[Reasoning | Text | Arguments], text: str) -> None:
        last = self._new[-1] if self._new else None
        if isinstance(last, tuple) and last[0] is kind:
            last[1].append(text)
        elif text:
            self._new.append((kind, [text]))

    def _release(self) -> None:
        """What may have been a call is text."""
        text = "".join(self._held)
        for marker in self._hidden:
            text = text.replace(marker, "")
        self._text.push(text)
        self._held.clear()

    def _begin_call(self, tools: Tools) -> None:
        self._text.drop()
        self._held.clear()
        self._begun, self._shown = True, tools.parallel or not self._calls
        self._calls += 1
        if self._shown:
            self.complete = False
            self._new.append(Call(tools.new_id(), self._name))

    def _argue(self, text: str) -> None:
        if self._shown:
            self._add(Arguments, text)

    # --- the grammar ---------------------------------------------------------------------------------------------------

    def _answer(self) -> Generator[None]:
        if self._reasoning:
            yield from self._think(self._reasoning)
        openers = self._tools.openers if self._tools else ()
        if self._tools:
            yield from self._reader.run(SPACES, self._held.append)
            yield from self._group((yield from self._first(openers)), self._tools)
        markers = Markers([*openers, *self._hidden])
        while marker := (yield from self._reader.until(markers, self._text.push)):
            if self._tools and marker in openers:
                self._held.append(marker)
                yield from self._group(marker, self._tools)
        self._text.flush()

    def _think(self, syntax: ReasoningSyntax) -> Generator[None]:
        spaces: list[str] = []
        yield from self._reader.run(SPACES, spaces.append)
        began = yield from self._reader.literal(syntax.start)  # also inside: some models repeat it
        if not began:
            if not self._inside:
                self._text.push("".join(spaces))
                return
            self._add(Reasoning, "".join(spaces).lstrip("\n"))
        self.reasoned = None
        if began:
            yield from self._reader.run(NEWLINES)
        thought = _Trimmed(lambda text: self._add(Reasoning, text), "\n")
        markers = Markers([syntax.end, *self._hidden])
        while marker := (yield from self._reader.until(markers, thought.push)):
            if marker == syntax.end:
                self.reasoned = self._reader.position
                yield from self._reader.run(NEWLINES)
                return
        thought.flush()

    def _first(self, openers: tuple[str, ...]) -> Word:
        """What opens calls at the start of the text; empty: nothing, which is allowed there."""
        for opener in dict.fromkeys([*openers, FENCE]):
            if (yield from self._reader.literal(opener, self._held.append)):
                return opener
        return ""

    def _group(self, opener: str, tools: Tools) -> Generator[None]:
        """The calls after `opener`, and what closes them."""
        reader, hold = self._reader, self._held.append
        if opener == FENCE:
            yield from reader.run(LETTERS, hold)
        yield from reader.run(SPACES, hold)
        marked = opener not in ("", FENCE)
        before = 0 if marked else self._calls
        if opener == "[TOOL_CALLS]" and (yield from reader.peek()) not in ("[", "{"):
            found = yield from self._named_call(tools)
        else:
            found = yield from self._listed_calls(tools, marked or tools.forced)
        if found:
            yield from reader.run(SPACES)
            yield from reader.literal(CLOSES.get(opener, ""))
            yield from reader.run(SPACES)
        if reader.cut and self._calls > before:  # what is cut off behind a call is no text: a further call, or a closing marker
            self._held.clear()
            yield from reader.run(ANYTHING)
        self._release()

    def _listed_calls(self, tools: Tools, certain: bool) -> Truth:
        """Objects one after another, or a list of them. False if not even the first is a call. certain: nothing else may come."""
        reader, hold = self._reader, self._held.append
        listed = yield from reader.literal("[", hold)
        yield from reader.run(SPACES, hold)
        any_call = False
        while (yield from self._object(tools, certain)):
            any_call = True
            yield from reader.run(SPACES, hold)
            if listed and (yield from reader.literal("]")):
                self._held.clear()
                return True
            yield from reader.literal("," if listed else ";", hold)
            yield from reader.run(SPACES, hold)
            if (yield from reader.peek()) != "{":
                break
        if not "".join(self._held).strip():
            self._held.clear()
        return any_call and not self._held

    def _object(self, tools: Tools, certain: bool) -> Truth:
        """A call as a JSON object. False: it is none, and what was read of it is held."""
        self._name, self._begun = "", False
        ended = yield from self._members(tools)
        if self._begun:
            if ended:
                self._held.clear()
            return True
        if self._reader.cut:
            self._name, self.complete = self._name or tools.forced_name, False
        if certain and self._name and (ended or self._reader.cut):
            self._begin_call(tools)
            self._argue("{}" if ended else "")
            self.complete = self.complete or ended
            return True
        return False

    def _members(self, tools: Tools) -> Truth:
        """Whether an object follows that has the keys of a call, with values of their types."""
        reader, hold = self._reader, self._held.append
        early: list[str] = []  # arguments before the name
        if not (yield from reader.literal("{", hold)):
            return False
        while True:
            yield from reader.run(SPACES, hold)
            key = yield from self._string()
            yield from reader.run(SPACES, hold)
            if not (yield from reader.literal(":", hold)):
                return False
            yield from reader.run(SPACES, hold)
            if key == "name" and not self._name:
                name = yield from self._string()
                if name not in tools.names:
                    return False
                self._name = name
                if early:
                    self._begin_call(tools)
                    self._argue("".join(early))
                    self.complete = True
            elif key in ARGUMENTS and not self._begun and not early:
                if not (yield from self._arguments(tools, early)):
                    return False
            elif not (key in OTHER_KEYS and (yield from self._string())):
                return False
            yield from reader.run(SPACES, hold)
            if (yield from reader.literal("}", hold)):
                return True
            if not (yield from reader.literal(",", hold)):
                return False

    def _arguments(self, tools: Tools, early: list[str]) -> Truth:
        """Arguments, which are passed on as they come; appended to `early` if the name is not known yet."""
        if (yield from self._reader.peek()) != "{":
            return False
        if self._name:
            self._begin_call(tools)
            ended = yield from self._reader.json_object(self._argue)
            self.complete = self.complete or ended
            return ended
        ended = yield from self._reader.json_object(early.append)
        self._held += early
        return ended

    def _named_call(self, tools: Tools) -> Truth:
        """Mistral's newer form: the name, perhaps an id, and the arguments."""
        reader, hold = self._reader, self._held.append
        start = len(self._held)
        self._begun = False
        yield from reader.run(NAME, hold)
        self._name = "".join(self._held[start:])
        if (yield from reader.literal("[CALL_ID]", hold)):
            yield from reader.run(NAME, hold)
        yield from reader.literal("[ARGS]", hold)
        yield from reader.run(SPACES, hold)
        known = self._name in tools.names
        if known and (yield from self._arguments(tools, [])):
            return True
        if known and reader.cut and not self._begun:
            self._begin_call(tools)
        if reader.cut:
            self.complete = False
        return self._begun

    def _string(self) -> Word:
        """The value of a JSON string, which is held; empty if it is none."""
        hold = self._held.append
        if not (yield from self._reader.literal('"', hold)):
            return ""
        start = len(self._held)
        if not (yield from self._reader.rest_of_string(hold)):
            return ""
        try:
            value: str = json.loads('"' + "".join(self._held[start:]), strict=False)
        except ValueError:
            return ""
        return value
