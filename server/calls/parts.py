"""What a chat answer consists of, in the order in which the model writes it: reasoning, text and tool calls.

A parser finds these parts in the text of one answer. Each endpoint lays them out in its own way: chat completions, Responses and
Messages read the same parts.
"""

import io
from dataclasses import dataclass
from typing import Protocol


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


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the JSON text of the last call's arguments."""

    text: str


Part = Reasoning | Text | Call | Arguments


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
