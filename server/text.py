"""Convert ids to text as they arrive, with stop strings, special tokens, and the position of each token in the text."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True)
class TextRules:
    """Where the text of an answer ends, and what it contains."""

    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    include_stop: bool  # the stop string or token that ends the text is a part of it
    skip_special: bool


class TextStream:
    """The text of one sequence. What `push` returns is final: no later stop string can remove it.

    The text does not depend on how the ids are grouped into messages, so that a streamed answer equals a whole one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], rules: TextRules, min_tokens: int) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, rules.skip_special, prompt_ids)
        self._text_ids = range(tokenizer.vocab_size)  # a model may pad its vocabulary with ids that have no text
        self._stop, self._stop_ids, self._include_stop = rules.stop, rules.stop_ids, rules.include_stop
        self._min_tokens = min_tokens
        self._held = ""  # text that might be the start of a stop string
        self.count = 0  # tokens
        self.decoded = 0  # characters, held ones included
        self.stop_reason: str | int | None = None  # the stop string or token that was found

    def push(self, token_id: int) -> str:
        self.count += 1
        is_stop = token_id in self._stop_ids
        if token_id in self._text_ids and (self._include_stop or not is_stop):
            self._append(self._detokenizer.push(token_id))
        if is_stop and self.count > self._min_tokens:
            self.stop_reason = token_id
        return self._release()

    def flush(self) -> str:
        """The rest of the text after the last id. An incomplete character becomes U+FFFD, an incomplete stop string is text."""
        if not isinstance(self.stop_reason, str):
            self._append(self._detokenizer.flush())
        released, self._held = self._find_stop(), ""
        return released

    def _append(self, text: str) -> None:
        self._held += text
        self.decoded += len(text)

    def _release(self) -> str:
        if not self._stop or self.count <= self._min_tokens:
            released, self._held = self._held, ""
            return released
        text = self._find_stop()
        if isinstance(self.stop_reason, str):
            self._held = ""
            return text
        cut = len(text) - self._possible_stop()
        self._held = text[cut:]
        return text[:cut]

    def _find_stop(self) -> str:
        """The held text, cut at the stop string that ends first, if there is one. Then sets `stop_reason`."""
        if self.count <= self._min_tokens:
            return self._held
        ends = [(at + len(s), at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if not ends:
            return self._held
        end, start, self.stop_reason = min(ends)
        return self._held[: end if self._include_stop else start]

    def _possible_stop(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stop)), 0)


def text_offsets(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> list[int]:
    """Where the text of each id of a prompt begins, in characters."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
    offsets, length = [], 0
    for token_id in ids:
        offsets.append(length)
        length += len(detokenizer.push(token_id))
    return offsets


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""
