"""Read a text that arrives in pieces, by a grammar that is written as generators."""

import re
from collections.abc import Callable, Generator, Iterable
from typing import Any

Sink = Callable[[str], Any]  # takes the next piece of a text
Truth = Generator[None, None, bool]
Word = Generator[None, None, str]

INSIDE_STRING = re.compile(r'[^"\\]*')
BETWEEN_BRACKETS = re.compile(r'[^"{}\[\]]*')


def ignore(text: str) -> None:
    """The sink of what nobody needs."""


class Markers:
    """Texts to search for."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(dict.fromkeys(texts))
        self.pattern = re.compile("|".join(map(re.escape, self.texts)) or "(?!)")
        self.starts = {one[:n] for one in self.texts for n in range(1, len(one))}
        self.longest = max(map(len, self.texts), default=1) - 1  # of `starts`
        self.first = frozenset(one[0] for one in self.texts)


class Reader:
    """A text that arrives by `feed`. The other methods are generators: they yield whenever they need the next piece.

    They read each character a bounded number of times, and their results do not depend on how the text is cut.
    """

    def __init__(self) -> None:
        self.final = False  # no piece follows
        self.cut = False  # something was read for which the text ended too early
        self._text, self._at, self._before = "", 0, 0
        self._until: tuple[Markers, Sink] | None = None  # of an `until` that has passed on all that was fed

    def feed(self, text: str, final: bool) -> None:
        self._before += self._at
        self._text, self._at, self.final, self._until = self._text[self._at :] + text, 0, final, None

    def passes_on(self, text: str) -> bool:
        """Whether nothing is to be done with the next piece but to pass it on, which then has been: the usual case."""
        if self._until is None or not self._until[0].first.isdisjoint(text):
            return False
        self._until[1](text)
        self._before += len(text)
        return True

    @property
    def position(self) -> int:
        """How many characters were read."""
        return self._before + self._at

    def peek(self) -> Word:
        """The next character; empty at the end of the text."""
        while self._at == len(self._text) and not self.final:
            yield
        self.cut = self.cut or self._at == len(self._text)
        return self._text[self._at : self._at + 1]

    def take(self, sink: Sink) -> Word:
        """Read one character; empty at the end of the text."""
        character = yield from self.peek()
        self._at += len(character)
        sink(character)
        return character

    def literal(self, wanted: str, sink: Sink = ignore) -> Truth:
        """Whether the text goes on with `wanted`, which is then read."""
        while len(self._text) - self._at < len(wanted):
            if not wanted.startswith(self._text[self._at :]):
                return False
            if self.final:
                self.cut = True
                return False
            yield
        if not self._text.startswith(wanted, self._at):
            return False
        self._at += len(wanted)
        sink(wanted)
        return True

    def run(self, pattern: re.Pattern[str], sink: Sink = ignore) -> Generator[None]:
        """Read characters as long as they match. pattern: a class of characters, any number of times."""
        while True:
            found = pattern.match(self._text, self._at)
            end = found.end() if found else self._at
            sink(self._text[self._at : end])
            self._at = end
            if end < len(self._text) or self.final:
                return
            yield

    def until(self, markers: Markers, sink: Sink, whole: bool = True) -> Word:
        """Read up to the first marker, and it too. It is returned, and not passed on; empty: there is none. Not whole: the start of a
        marker at the end of the text is not passed on either."""
        while True:
            if found := markers.pattern.search(self._text, self._at):
                sink(self._text[self._at : found.start()])
                self._at = found.end()
                return found[0]
            longest = 0 if self.final and whole else min(markers.longest, len(self._text) - self._at)
            kept = next((n for n in range(longest, 0, -1) if self._text[-n:] in markers.starts), 0)
            end = len(self._text) - kept
            sink(self._text[self._at : end])
            self._at = end
            if self.final:
                return ""
            self._until = None if kept else (markers, sink)
            yield

    def rest_of_string(self, sink: Sink) -> Truth:
        """Read a JSON string after its first quote. False: the text ends before it."""
        while True:
            yield from self.run(INSIDE_STRING, sink)
            character = yield from self.take(sink)
            if character == "\\":
                character = yield from self.take(sink)
            elif character:
                return True
            if not character:
                return False

    def json_object(self, sink: Sink) -> Truth:
        """Read an object, whose first bracket comes next. Only its brackets and strings are looked at. False: the text ends
        before it."""
        depth = 0
        while True:
            yield from self.run(BETWEEN_BRACKETS, sink)
            character = yield from self.take(sink)
            if not character:
                return False
            if character == '"':
                yield from self.rest_of_string(sink)
                continue
            depth += 1 if character in "{[" else -1
            if not depth:
                return True
