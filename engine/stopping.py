"""When a sequence ends, and which part of its text is final: stop tokens, stop strings, the length limit."""

from collections.abc import Sequence

from tokenizer import IncrementalDetokenizer, Tokenizer


class OutputStream:
    """The output of one sequence, token by token.

    `push` returns text that is final: complete characters that cannot become part of a stop string. `finish_reason` is
    None while the sequence continues, `stop` after a stop token or string, `length` at the token limit. The text ends
    before a stop string. A stop token is in `token_ids` but not in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        max_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
    ) -> None:
        """tokenizer: None for a model without one; the text then stays empty."""
        self.text_ids = range(tokenizer.vocab_size if tokenizer else 0)  # a model's vocabulary may have more ids, as padding
        prompt_ids = [i for i in prompt_ids if i in self.text_ids]
        self.detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt_ids) if tokenizer else None
        self.max_tokens, self.stop_ids, self.stop = max_tokens, stop_ids, tuple(stop)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._held = ""  # text that may be the start of a stop string

    def push(self, token_id: int) -> str:
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            return self._finish("stop")
        if self.detokenizer and token_id in self.text_ids:
            self._held += self.detokenizer.push(token_id)
        if self._cut_at_stop():
            self.finish_reason = "stop"
            return self._release(len(self._held))
        if len(self.token_ids) >= self.max_tokens:
            return self._finish("length")
        return self._release(len(self._held) - self._possible_stop())

    def _finish(self, reason: str) -> str:
        self.finish_reason = reason
        if self.detokenizer:
            self._held += self.detokenizer.flush()
        if self._cut_at_stop():
            self.finish_reason = "stop"
        return self._release(len(self._held))

    def _cut_at_stop(self) -> bool:
        """Cut the held text before the first stop string in it, if there is one."""
        starts = [start for s in self.stop if (start := self._held.find(s)) >= 0]
        if starts:
            self._held = self._held[: min(starts)]
        return bool(starts)

    def _possible_stop(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        lengths = range(min(len(self._held), max(map(len, self.stop), default=0)), 0, -1)
        return next((n for n in lengths if any(s.startswith(self._held[-n:]) for s in self.stop)), 0)

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        self.text += released
        return released
