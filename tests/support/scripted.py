"""The stream of a request whose deltas and parts a test gives, in the layout of its endpoint."""

from collections.abc import Sequence

from engine.calls.parser import Part
from engine.protocol import TokenLogprobs
from engine.text import Delta
from server.endpoint import GenerationRequest
from server.errors import ApiError

ERROR = ApiError(500, "internal error; the server's log has the details")


class Scripted:
    """A parser whose parts do not come from the text."""

    def __init__(self, parts: Sequence[list[Part]], complete: bool = False, reasoned: int = 0) -> None:
        """parts: those that each delta brings."""
        self._parts, self.complete, self.reasoned = iter(parts), complete, reasoned

    def push(self, text: str, final: bool = False) -> list[Part]:
        return next(self._parts)


def deltas(
    texts: Sequence[str], reason: str, logprobs: list[TokenLogprobs] | None = None, stop: str | None = None
) -> list[Delta]:
    """A delta of one token for each text. reason: why the last one ends the answer; empty if it does not. logprobs: of each."""
    last = len(texts) - 1
    return [
        Delta(0, i == 0, text, [300], logprobs, [i], (reason if i == last else "") or None, stop, None)
        for i, text in enumerate(texts)
    ]


def written(request: GenerationRequest, given: Sequence[Delta], error: ApiError = ERROR) -> bytes:
    """The stream of a request. error: what follows if the last delta does not end the answer."""
    writer, found = request.stream_writer(), b""
    for delta in given:
        request.usage.completion += 1
        found += writer.push(delta)
    return found + (writer.last() if given[-1].finish_reason else request.write_error(error)) + request.stream_end
