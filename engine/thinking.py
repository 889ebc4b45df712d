"""Reasoning at the start of an answer: how models mark it, and a limit of its tokens, at which its end is forced."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import ThinkingBudget
from text.tokenizer import Tokenizer

PROMPT_END = 32  # tokens, at least a marker and spaces


@dataclass(frozen=True)
class ReasoningSyntax:
    """What surrounds the reasoning. `begun`: an answer begins inside it, also if the prompt does not say so. `sign`: a text in the chat
    templates of the family; empty: `end`. `also`: further markers that the family's parser reads."""

    start: str
    end: str
    begun: bool = False
    sign: str = ""
    also: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return self.start, self.end, *self.also


ANALYSIS = "<|channel|>analysis<|message|>"
THINK = ReasoningSyntax("<think>", "</think>")
REASONING = {
    "think": THINK,
    "deepseek_r1": ReasoningSyntax("<think>", "</think>", begun=True),
    "qwen3": THINK,
    "thinking": ReasoningSyntax("<thinking>", "</thinking>"),
    "reasoning": ReasoningSyntax("<reasoning>", "</reasoning>"),
    "seed_oss": ReasoningSyntax("<seed:think>", "</seed:think>"),
    "mistral": ReasoningSyntax("[THINK]", "[/THINK]"),
    "gemma4": ReasoningSyntax("<|channel>thought", "<channel|>"),
    "harmony": ReasoningSyntax(ANALYSIS, "<|end|>", sign=ANALYSIS, also=("<|start|>",)),
}


def reasoning_of(template: str) -> ReasoningSyntax | None:
    """How a model with this chat template marks its reasoning; None: it marks none."""
    return next((syntax for syntax in REASONING.values() if (syntax.sign or syntax.end) in template), None)


def reasoning_after(
    tokenizer: Tokenizer, reasoning: ReasoningSyntax | None, prompt: Sequence[int], continued: str = ""
) -> tuple[ReasoningSyntax | None, bool]:
    """How the answer to a conversation marks its reasoning, and whether it begins inside it. None: it does not reason. reasoning: how
    the model does. prompt: its token ids. continued: the text of the message that the answer continues."""
    end = tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False).rstrip() if prompt else ""
    if reasoning is None or end.endswith(reasoning.end):  # the prompt says not to reason
        return None, False
    if reasoning.start in continued or reasoning.end in continued:
        return reasoning, continued.rfind(reasoning.start) > continued.rfind(reasoning.end)
    return reasoning, (reasoning.begun and not continued) or end.endswith(reasoning.start)


def budget_of(tokenizer: Tokenizer, syntax: ReasoningSyntax, tokens: int, inside: bool) -> ThinkingBudget:
    """inside: the answer begins in the reasoning."""
    return ThinkingBudget(tokens, "" if inside else syntax.start, syntax.end, tokenizer.encode(syntax.end, False))


def budget_after(tokenizer: Tokenizer, syntax: ReasoningSyntax, tokens: int, prompt: Sequence[int]) -> ThinkingBudget | None:
    """The same for what follows a prompt, given as ids, of which nothing else is known. None: its last word is the reasoning's end."""
    text, start, end = spelled(tokenizer, prompt).rstrip(), syntax.start.encode(), syntax.end.encode()
    if text.endswith(end):
        return None
    return budget_of(tokenizer, syntax, tokens, syntax.begun or text.rfind(start) > text.rfind(end))


def spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """The bytes of tokens, which take far less time than their text. Those that only the model's vocabulary has are none."""
    return b"".join([tokenizer.token_bytes(i) for i in ids if i < tokenizer.vocab_size])


class Thinking:
    """How far the reasoning of one answer is. The marks are found in the text, as the server's parser finds them: not every tokenizer
    has tokens for them."""

    def __init__(self, budget: ThinkingBudget, tokenizer: Tokenizer) -> None:
        self.seen = 0  # tokens of the answer
        self.is_open = True  # whether there may be reasoning from here on
        self._budget, self._tokenizer = budget, tokenizer
        self._start, self._end = budget.start.encode(), budget.end.encode()
        self._inside, self._count = not budget.start, 0  # the tokens of the reasoning so far
        self._text = b""  # the newest that may be a part of a mark
        self._ids: list[int] = []  # the newest that may be a part of the end

    def read(self, ids: Sequence[int]) -> None:
        """Go on behind further tokens of the answer."""
        for token in ids:
            self.seen += 1
            if self.is_open:
                self._text += spelled(self._tokenizer, [token])
                self._enter() if not self._inside else self._think(token)

    def _enter(self) -> None:
        self._text = self._text.lstrip()
        self._inside = self._text.startswith(self._start)
        self.is_open = self._inside or self._start.startswith(self._text)
        if self._inside:
            self._text = self._text[len(self._start) :]

    def _think(self, token: int) -> None:
        self._count += 1
        self.is_open = self._end not in self._text
        self._text = self._text[1 - len(self._end) :]
        self._ids = [*self._ids, token][1 - len(self._budget.end_ids) :] if len(self._budget.end_ids) > 1 else []

    def forced(self) -> int | None:
        """The only token that may follow; None: any may."""
        if not (self.is_open and self._inside) or self._count < self._budget.tokens:
            return None
        ends, last = self._budget.end_ids, self._ids
        written = next(k for k in range(len(last), -1, -1) if last[len(last) - k :] == ends[:k])
        return ends[written]
