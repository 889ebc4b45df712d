"""Convert ids to text as they arrive, with stop strings, special tokens, and the position of each token in the text."""

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from engine.protocol import SamplingParams, TokenLogprobs, TokenOutput
from text.tokenizer import IncrementalDetokenizer, Tokenizer

SIGNS = 0xD800  # lone surrogates, which are in no decoded text: each stands for one hidden special token


def banned_by(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """The ids of each word, as the beginning of a text and behind a space: what `SamplingParams.banned` takes. A word that spells a
    special token is that token. Other ways to spell a word with tokens stay possible, as in vLLM."""
    found = list[list[int]]()
    for word in words:
        bare = word.lstrip(" ") or word
        for text in (bare, " " + bare):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids and ids not in found:
                found.append(ids)
    return found


@lru_cache(maxsize=16)  # a tokenizer may have thousands of special tokens
def special_ids(tokenizer: Tokenizer, texts: tuple[str, ...]) -> dict[str, int]:
    """The special tokens that are in the texts, with their ids. Shared: not to be changed."""
    return {special: i for special, i in tokenizer.special_texts.items() if any(special in text for text in texts)}


class Delta(msgspec.Struct):  # made for every token; a dataclass takes twice as long to make
    """The new part of one answer."""

    index: int  # the answer's number
    first: bool
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # one for each of token_ids; None: not requested
    offsets: list[int]  # where each token begins in the answer's text, in characters
    finish_reason: str | None  # `stop`, `length`; None while the answer goes on
    stop_reason: str | int | None  # the stop string or token that ended it
    prompt_logprobs: list[TokenLogprobs | None] | None  # in the first delta, if requested
    drafted: int = 0  # how many of token_ids, the first ones, were drafted before they were drawn


class AnswerStream:
    """Turns the engine's outputs of one sequence into text, and ends it at a stop string."""

    def __init__(
        self, index: int, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], params: SamplingParams, hidden: bool = False
    ) -> None:
        """tokenizer: None for a model without one; the text then stays empty. hidden: show no token."""
        self.index, self.hidden, self.first, self.finished = index, hidden, True, False
        self.text = TextStream(tokenizer, prompt_ids, params)
        self.with_logprobs = params.logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None

    def push(self, output: TokenOutput) -> Delta | None:
        """What `output` adds; None if it adds nothing, as between the parts of a long prompt. Tokens after a stop string are
        dropped."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if not output.token_ids and not output.finish_reason:
            return None
        text, offsets = "", list[int]()
        for token_id in () if self.hidden else output.token_ids:
            offsets.append(self.text.decoded)
            text += self.text.push(token_id)
            if isinstance(self.text.stop_reason, str):
                break
        ids = output.token_ids[: len(offsets)]
        finish_reason = "length" if self.hidden else output.finish_reason
        if isinstance(self.text.stop_reason, str):
            finish_reason = "stop"
        elif finish_reason:
            text += self.text.flush()
            finish_reason = "stop" if isinstance(self.text.stop_reason, str) else finish_reason
        self.finished = bool(finish_reason)
        logprobs = (output.logprobs or [])[: len(ids)] if self.with_logprobs else None
        first, self.first = self.first, False
        prompt_logprobs = self.prompt_logprobs if first else None
        reason, drafted = self.text.stop_reason, min(output.accepted, len(ids))
        return Delta(self.index, first, text, ids, logprobs, offsets, finish_reason, reason, prompt_logprobs, drafted)


class TextStream:
    """The text of one sequence. What `push` returns is final: no later stop string can remove it.

    The text does not depend on how the ids are grouped into messages, so that a streamed answer equals a whole one.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._text_ids = range(tokenizer.vocab_size if tokenizer else 0)  # a model may pad its vocabulary with ids without text
        if prompt_ids and max(prompt_ids) not in self._text_ids:
            prompt_ids = [i for i in prompt_ids if i in self._text_ids]
        kept = params.kept_special
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special, prompt_ids, kept) if tokenizer else None
        self._signs = _spelled(tokenizer, params) if tokenizer and params.stop and params.skip_special else {}
        self._stop_ids, self._stops = frozenset(params.stop_token_ids), {stop: stop for stop in params.stop}
        if self._signs and tokenizer:
            self._stops |= {_with_signs(stop, tokenizer, self._signs): stop for stop in params.stop}
        self._include_stop, self._min_tokens = params.include_stop, params.min_tokens
        self._held = ""  # text that might be the start of a stop string
        self.token_count = 0
        self.decoded = 0  # characters, held ones included
        self.stop_reason: str | int | None = None  # the stop string or token that was found

    def push(self, token_id: int) -> str:
        self.token_count += 1
        is_stop = token_id in self._stop_ids
        if self._detokenizer and token_id in self._text_ids and (self._include_stop or not is_stop):
            self._append(self._detokenizer.push(token_id))
        self._held += self._signs.get(token_id, "")
        if is_stop and self.token_count > self._min_tokens:
            self.stop_reason = token_id
        return self._release()

    def flush(self) -> str:
        """The rest of the text after the last id. An incomplete character becomes U+FFFD, an incomplete stop string is text."""
        if self._detokenizer and not isinstance(self.stop_reason, str):
            self._append(self._detokenizer.flush())
        released, self._held = self._find_stop(), ""
        return self._without_signs(released)

    def _append(self, text: str) -> None:
        self._held += text
        self.decoded += len(text)

    def _release(self) -> str:
        if not self._stops or self.token_count <= self._min_tokens:
            released, self._held = self._held, ""
            return self._without_signs(released)
        text = self._find_stop()
        if isinstance(self.stop_reason, str):
            self._held = ""
            return text
        cut = len(text) - self._possible_stop()
        self._held = text[cut:]
        return self._without_signs(text[:cut])

    def _find_stop(self) -> str:
        """The held text, cut at the stop string that ends first, if there is one. Then sets `stop_reason`."""
        if self.token_count <= self._min_tokens:
            return self._held
        ends = [(at + len(s), at, stop) for s, stop in self._stops.items() if (at := self._held.find(s)) >= 0]
        if not ends:
            return self._held
        _, start, stop = min(ends)
        self.stop_reason = stop
        return self._without_signs(self._held[:start]) + stop * self._include_stop

    def _possible_stop(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)

    def _without_signs(self, text: str) -> str:
        return "".join(c for c in text if c not in self._signs.values()) if self._signs else text


def _spelled(tokenizer: Tokenizer, params: SamplingParams) -> dict[int, str]:
    """A sign for each special token that a stop string spells and the text hides, by its id."""
    hidden = [(text, i) for text, i in tokenizer.special_texts.items() if i not in params.kept_special]
    found = [i for text, i in hidden if any(text in stop for stop in params.stop)]
    return {i: chr(SIGNS + n) for n, i in enumerate(found)}


def _with_signs(stop: str, tokenizer: Tokenizer, signs: dict[int, str]) -> str:
    for i in sorted(signs, key=lambda i: len(tokenizer.token_text(i)), reverse=True):
        stop = stop.replace(tokenizer.token_text(i), signs[i])
    return stop
