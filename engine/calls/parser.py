"""Find reasoning, text and tool calls in an answer, as it is written.

Each endpoint lays the parts out in its own way: chat completions, Responses and Messages read the same ones.

An answer is reasoning, then text and calls in any order. A call is one only if it names a known tool, and once its arguments
begin. Whatever only looks like one is text, but not the beginning of a further call where the answer is cut off. Spaces next to a
call, and line breaks next to the end of the reasoning, separate them and are dropped.
"""

import io
import json
import re
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.calls.reader import Markers, Reader, Sink, Truth, Word, ignore
from engine.calls.syntax import ArgumentSyntax, CallSyntax
from engine.calls.values import WORD, json_word, parsed, quoted, types_of
from engine.thinking import ReasoningSyntax

SPACES = re.compile(r"\s*")
NEWLINES = re.compile(r"\n*")
ANYTHING = re.compile(r"(?s:.)*")
LETTERS = re.compile(r"[a-z_]*")
NAME = re.compile(r"[A-Za-z0-9_.-]*")
ID = re.compile(r"[A-Za-z0-9_.:-]*")
BARE = re.compile(r"[^,()\[\]{}<\"']*")
OUTSIDE = {quote: re.compile(rf"[^{quote}\\]*") for quote in ('"', "'")}

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "": "", **{one: one for one in "\\\"'/"}}
HEX = frozenset("0123456789abcdefABCDEF")
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}

FENCE = "```"
ARGUMENTS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")  # with a string; not needed


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call begins. Its arguments follow, until the next part of another type."""

    id: str
    name: str

    def layout(self) -> dict[str, Any]:
        """As messages of /v1/chat/completions have it, with no arguments yet."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": ""}}


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the JSON text of the last call's arguments."""

    text: str


Part = Reasoning | Text | Call | Arguments


def message_of(parts: Sequence[Part], with_reasoning: bool = True) -> dict[str, Any]:
    """The whole parts of an answer as a message of /v1/chat/completions."""
    text = "".join(part.text for part in parts if isinstance(part, Text))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Call):
            calls.append(part.layout())
        elif isinstance(part, Arguments):
            calls[-1]["function"]["arguments"] = part.text
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if parts else ""), "refusal": None}
    if reasoning and with_reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


class Parser(Protocol):
    """Finds the parts of one answer. However the text is cut into pieces, the joined parts are the same."""

    complete: bool  # after the last piece: the answer has calls and none is cut off
    reasoned: int | None  # characters up to the end of the reasoning, markers included; None: it goes on

    def push(self, text: str, final: bool = False) -> list[Part]:
        """The parts that the next piece of text adds. Text that may turn out to be something else is held back until it is
        certain, and until `final` at the latest."""


class PartList:
    """Joins the parts of an answer as they come. Takes little more memory than their text."""

    def __init__(self) -> None:
        self._parts: list[tuple[type[Reasoning | Text | Arguments], io.StringIO] | Call] = []

    def add(self, part: Part) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(part, Call):
            self._parts.append(part)
        elif isinstance(last, tuple) and last[0] is type(part):
            last[1].write(part.text)
        else:
            self._parts.append((type(part), text := io.StringIO()))
            text.write(part.text)

    def joined(self) -> list[Part]:
        return [one if isinstance(one, Call) else one[0](one[1].getvalue()) for one in self._parts]


@dataclass(frozen=True)
class Tools:
    """The calls that an answer may have."""

    syntax: CallSyntax
    names: frozenset[str]
    parallel: bool = True  # false: only the first call counts
    forced: bool = False  # the answer is a call
    forced_name: str = ""  # the only tool that it may call, if there is only one
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the tools' arguments, which say the types of values

    def new_id(self) -> str:
        random, length = uuid.uuid4().hex, self.syntax.id_length
        return random[:length] if length else f"call_{random[:24]}"

    @property
    def openers(self) -> tuple[str, ...]:
        """What begins calls in the middle of an answer."""
        return tuple(one for one in (self.syntax.trigger, *self.syntax.also) if one) or (FENCE,)


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

    def flush(self, dropped: str = "") -> None:
        self._sink("".join(self._held).removesuffix(dropped))
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
        self._dropped = hidden.union((tools.syntax.section if tools else None) or ())  # from text
        self._reader = Reader()
        self._new: list[tuple[type[Reasoning | Text | Arguments], list[str]] | Call] = []
        self._text = _Trimmed(lambda text: self._add(Text, text), None)
        self._held: list[str] = []  # what may be a call
        self._calls, self._shown, self._begun, self._name, self._id = 0, False, False, "", ""  # of the last call
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
        for marker in self._dropped:
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
            self._new.append(Call(self._id or tools.new_id(), self._name))

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
        markers = Markers([*openers, *self._dropped])
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
        alone = tools.syntax.form == "named" and not tools.syntax.between
        if marked and alone and (yield from reader.peek()) not in ("[", "{"):
            found = yield from self._named_call(tools, opener)
        else:
            found = yield from self._listed_calls(tools, marked or tools.forced, marked)
        if found:
            for word in [FENCE] if opener == FENCE else tools.syntax.end.split() if marked else []:
                yield from reader.run(SPACES)
                yield from reader.literal(word)
            yield from reader.run(SPACES)
        if reader.cut and self._calls > before:  # what is cut off behind a call is no text: a further call, or a closing marker
            self._held.clear()
            yield from reader.run(ANYTHING)
        self._release()

    def _spaced(self, text: str, sink: Sink = ignore) -> Truth:
        """Whether the words of `text` follow, with any spaces between them, which are then read."""
        for word in text.split():
            yield from self._reader.run(SPACES, sink)
            if not (yield from self._reader.literal(word, sink)):
                return False
        return True

    def _listed_calls(self, tools: Tools, certain: bool, marked: bool) -> Truth:
        """Calls one after another, or a list of them. False if not even the first is one. certain: nothing else may come."""
        reader, hold = self._reader, self._held.append
        listed = yield from reader.literal("[", hold)
        yield from reader.run(SPACES, hold)
        any_call, written = False, tools.syntax.arguments if listed or marked else None
        while True:
            if written and (yield from reader.peek()) != "{":
                found = yield from self._named_call(tools, "")
            else:
                found = yield from self._object(tools, certain)
            if not found:
                break
            any_call = True
            yield from reader.run(SPACES, hold)
            if listed and (yield from reader.literal("]")):
                self._held.clear()
                return True
            yield from reader.literal("," if listed else ";", hold)
            yield from reader.run(SPACES, hold)
            following = yield from reader.peek()
            if following != "{" and not (written and NAME.fullmatch(following) and following):
                break
        if not "".join(self._held).strip():
            self._held.clear()
        return any_call and not self._held

    def _object(self, tools: Tools, certain: bool) -> Truth:
        """A call as a JSON object. False: it is none, and what was read of it is held."""
        self._name, self._id, self._begun = "", "", False
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

    def _named_call(self, tools: Tools, opener: str) -> Truth:
        """A call whose name comes first, perhaps with an id, and then its arguments."""
        reader, hold, syntax = self._reader, self._held.append, tools.syntax
        self._begun, self._id = False, ""
        start = len(self._held)
        ready = yield from self._spaced(syntax.before.strip().removeprefix(opener), hold)
        yield from reader.run(SPACES, hold)
        name = len(self._held)
        yield from reader.run(ID if syntax.name_in_id else NAME, hold)
        self._name = "".join(self._held[name:])
        yield from reader.peek()
        if syntax.name_in_id and ":" in self._name:
            ready, self._id = True, "".join(self._held[start:]).strip()
            self._name = self._name.partition(":")[0]
        if syntax.id_mark and (yield from reader.literal(syntax.id_mark, hold)):
            yield from reader.run(NAME, hold)
        ready = ready and (yield from self._spaced(syntax.to_arguments, hold))
        if syntax.before or syntax.to_arguments:  # as in Python, no spaces stand in front of the arguments
            yield from reader.run(SPACES, hold)
        if self._name in tools.names and ready and (yield from self._any_arguments(tools)):
            return True
        return self._cut_off(tools)

    def _cut_off(self, tools: Tools) -> bool:
        """Whether what was read is a call, whose arguments are cut off or none."""
        if self._reader.cut:
            self.complete = False
            self._name = self._name if self._name in tools.names else tools.forced_name
            if self._name and not self._begun:
                self._begin_call(tools)
        return self._begun

    def _any_arguments(self, tools: Tools) -> Truth:
        """Arguments as the syntax writes them, passed on as JSON. False: none follow, or they are cut off."""
        syntax, reader = tools.syntax.arguments, self._reader
        if syntax is None:
            return (yield from self._arguments(tools, []))
        if syntax.begin:
            if not (yield from reader.literal(syntax.begin, self._held.append)):
                return False
            self._begin_call(tools)
            ended = yield from self._literals(syntax)
        else:
            closing = tools.syntax.end.split()[0]
            opened = yield from reader.literal(syntax.tag, self._held.append)
            if not opened and not (yield from reader.literal(closing, self._held.append)):
                return False
            self._begin_call(tools)
            ended = yield from self._tags(syntax, closing, tools.schemas.get(self._name, {}), opened)
        self.complete = self.complete or ended
        return ended

    def _tags(self, syntax: ArgumentSyntax, closing: str, schema: dict[str, Any], opened: bool) -> Truth:
        """Tags behind the first one, up to `closing`. False: the text ends before it."""
        reader, before = self._reader, "{"
        to_value, *further = syntax.to_value.split()
        while opened:
            name: list[str] = []
            if not (yield from reader.until(Markers([to_value]), name.append)):
                return False
            self._argue(f"{before}{quoted(''.join(name))}: ")
            before = ", "
            if not (yield from self._spaced(" ".join(further))) and reader.cut:
                return False
            yield from reader.literal(syntax.edge)
            if not (yield from self._tagged_value(syntax, types_of(schema, "".join(name)))):
                return False
            marker = yield from reader.until(Markers([syntax.tag, closing]), ignore)
            if not marker:
                return False
            opened = marker == syntax.tag
        self._argue("{}" if before == "{" else "}")
        return True

    def _tagged_value(self, syntax: ArgumentSyntax, types: set[str]) -> Truth:
        """A value up to its closing tag. A text is passed on as it comes, anything else once its type is known."""
        value: list[str] = []
        is_text = types == {"string"}
        text = _Trimmed(self._argue_text, "\n") if is_text else None
        if text:
            self._argue('"')
        elif types and "string" not in types and (yield from self._reader.peek()) in ("[", "{"):
            yield from self._reader.json_object(value.append)  # whose strings may have the closing tag
        ended = yield from self._reader.until(Markers([syntax.end]), text.push if text else value.append, whole=False)
        if text:
            text.flush(syntax.edge)
            self._argue('"' if ended else "")
        else:
            self._argue(parsed("".join(value).removesuffix(syntax.edge), types) if ended else "")
        return bool(ended)

    def _literals(self, syntax: ArgumentSyntax) -> Truth:
        """Pairs of a name and a value behind the bracket that opens them. False: the text ends before they do."""
        reader = self._reader
        closers, before, is_name = ["}"], "", True
        self._argue("{")
        while closers:
            yield from reader.run(SPACES)
            character = yield from reader.peek()
            if not character:
                return False
            if character in ")]}([{,:" or character == syntax.assign:
                yield from reader.take(ignore)
            if character in ")]}":
                self._argue(closers.pop())
                before, is_name = "", False
            elif character == ",":
                before, is_name = ", ", closers[-1] == "}"
            elif character in (":", syntax.assign):
                self._argue(": ")
                is_name = False
            else:
                self._argue(before)
                before = ""
                if character in "([{":
                    is_name = character == "{"
                    closers.append("}" if is_name else "]")
                    self._argue("{" if is_name else "[")
                elif not (yield from self._literal(syntax, is_name)):
                    return False
        return True

    def _literal(self, syntax: ArgumentSyntax, is_name: bool) -> Truth:
        """A string with quotes, or a word. False: the text ends before it."""
        reader = self._reader
        for quote in syntax.quotes:
            if (yield from reader.literal(quote)):
                self._argue('"')
                inside = (
                    self._escaped(quote) if syntax.escapes else reader.until(Markers([quote]), self._argue_text, whole=False)
                )
                ended = yield from inside
                self._argue('"' if ended else "")
                return bool(ended)
        if reader.cut:  # in a quote
            return False
        word: list[str] = []
        yield from reader.take(word.append)
        yield from reader.run(WORD if is_name else BARE, word.append)
        if not (yield from reader.peek()):
            return False
        text = "".join(word).strip()
        self._argue(quoted(text) if is_name else json_word(text))
        return True

    def _escaped(self, quote: str) -> Word:
        """The rest of a string with backslashes, up to and with its quote; empty: the text ends before it."""
        reader, digits = self._reader, list[str]()
        while True:
            character = yield from reader.take(ignore)
            if character in (quote, ""):
                return character
            if character != "\\":
                self._argue_text(character)
                yield from reader.run(OUTSIDE[quote], self._argue_text)
                continue
            character = yield from reader.take(ignore)
            digits.clear()
            while len(digits) < HEX_DIGITS.get(character, 0) and (yield from reader.peek()) in HEX:
                yield from reader.take(digits.append)
            if not (yield from reader.peek()):
                return ""
            if character == "u" and len(digits) == 4:
                self._argue(f"\\u{''.join(digits)}")  # perhaps half of a character
            elif digits:
                self._argue_text(chr(min(int("".join(digits), 16), 0x10FFFF)))
            else:
                self._argue_text(ESCAPES.get(character, f"\\{character}"))

    def _argue_text(self, text: str) -> None:
        """A piece of a string."""
        self._argue(quoted(text)[1:-1])

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
