"""Compiling grammars: in a thread, once for each text, with limits that do not depend on time.

A rank compiles in one thread of low priority, a short grammar before a long one that came a little earlier. llguidance
releases the interpreter lock meanwhile, so steps continue. Compiled grammars are cached, and every sequence gets a copy.
The limits count llguidance's operations, not seconds. What a copy can do also depends on those before it, which share its
lexer. So all ranks cache the same ones, and reach the same result.

Imports no torch: the frontend validates grammars with the same limits, in processes that should stay small.
"""

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from errors import UserError

if TYPE_CHECKING:
    from text.tokenizer import Tokenizer

MAX_TEXT = 1 << 20  # bytes of one grammar
MAX_COMPILING = 64  # most different grammars that requests wait for; a client alone may have half of them
CACHED = 32  # most compiled grammars in the cache
CACHED_TEXT = 4 << 20  # most bytes of their texts; compiled, a grammar takes about 50 times as much
CHARACTER_SECONDS = 12e-6  # of a long grammar's compilation, on a core of its own
MAX_DIGITS = 40  # of a JSON number in a row: a model may otherwise write 0.333… up to its token limit
NICENESS = 10
# bytes: llguidance follows a grammar's rules by recursion; a worker of the frontend, which has less, has tried it before
STACK = 64 << 20
TRIED = 4  # tokens that a compilation tries after the first mask, because much of a grammar's cost comes later

FAILED, COMPILED = 1, 2  # `Compilation.state`; 0: not compiled yet


def limits(symbols: int = 50_000) -> Any:
    """The limits of one grammar, of at most so many symbols: about 0.2 s and 20 MB for the lexer, and 2 ms for the mask of one sequence's
    step, also of a grammar that is so ambiguous that the parser has many items. A vocabulary of 128,000 tokens and 400 tools stay below
    them."""
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=2_000,
        max_items_in_row=1_000,
        max_lexer_states=20_000,
        max_grammar_size=symbols,
        verbose_errors=False,
    )


class Digits:
    """Ends the digits of JSON numbers, which llguidance cannot."""

    def __init__(self, tokens: list[bytes]) -> None:
        """tokens: the bytes of each id."""
        self.counts = {i: len(token) for i, token in enumerate(tokens) if token.isdigit()}
        self.beginning = sum(1 << i for i, token in enumerate(tokens) if token[:1].isdigit())
        self.letter = next((i for i, token in enumerate(tokens) if token == b"z"), 0)  # text, but no number, may go on with it

    def bound(self, written: Sequence[int], packed: bytes) -> bytes:
        """A grammar's mask behind the ids `written`, without further digits if they end with MAX_DIGITS of a number."""
        count = 0
        for token in reversed(written):
            if token not in self.counts or count >= MAX_DIGITS:
                break
            count += self.counts[token]
        mask = int.from_bytes(packed, "little") if count >= MAX_DIGITS else 0
        left = mask & ~self.beginning
        return left.to_bytes(len(packed), "little") if left and not mask >> self.letter & 1 else packed


class Compilation:
    """The compilation of one grammar. The thread writes `matcher` or `error`, and `state` last."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.due = time.monotonic() + CHARACTER_SECONDS * len(text)  # when it would be ready if it began now
        self.state = 0
        self.matcher: Any = None  # llguidance's, never advanced
        self.error = ""


class Grammars:
    """The grammars of one model on this rank."""

    def __init__(self, tokenizer: "Tokenizer | None", vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._for_library: Any = None
        self._digits: Digits | None = None
        self._cache: OrderedDict[str, Compilation] = OrderedDict()  # least recently used first; the same on all ranks
        self._waiting: list[Compilation] = []  # for the thread
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def check(self, text: str) -> None:
        """Raises UserError for a grammar that can be refused without compiling it."""
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer, so it cannot follow a grammar; ask for plain text")
        if self.tokenizer.no_grammars:
            raise UserError(f"{self.tokenizer.no_grammars}, so it cannot follow a grammar; ask for plain text")
        if len(text.encode()) > MAX_TEXT:
            raise UserError(f"the grammar or JSON schema is longer than {MAX_TEXT} bytes; send a smaller one")

    def digits(self, text: str) -> "Digits | None":
        """What bounds the digits of a grammar that was compiled; None if it has no JSON schema."""
        return self._digits if '"json_schema"' in text else None

    def warm_up(self) -> None:
        """Prepare llguidance's form of the tokenizer before the first grammar needs it: seconds for a large vocabulary."""
        if self.tokenizer is not None and not self.tokenizer.no_grammars:
            self._start_thread()

    def start(self, text: str) -> Compilation:
        """The compilation of a grammar: from the cache, or a new one."""
        if (compilation := self._cache.get(text)) is not None:
            self._cache.move_to_end(text)
        else:
            compilation = Compilation(text)
            with self._changed:
                self._waiting.append(compilation)
                self._changed.notify()
            self._start_thread()
        return compilation

    def drop(self, compilation: Compilation) -> None:
        """No request waits for the compilation any more."""
        with self._changed:
            self._waiting = [one for one in self._waiting if one is not compilation]

    def keep(self, compilation: Compilation) -> None:
        """Cache a compilation that has succeeded on all ranks."""
        self._cache[compilation.text] = compilation
        self._cache.move_to_end(compilation.text)
        while len(self._cache) > CACHED or sum(map(len, self._cache)) > CACHED_TEXT:
            self._cache.popitem(last=False)

    def forget(self, matcher: Any) -> None:
        """Drop a compilation whose copy failed, so that the next request compiles the grammar again: copies share a lexer, whose states
        add up to the limit."""
        self._cache = OrderedDict((text, one) for text, one in self._cache.items() if one.matcher is not matcher)

    def compile(self, text: str) -> Any:
        """Compile in this thread. Returns a matcher that has computed its first mask. Raises UserError."""
        self.check(text)
        return compiled(self._tokenizer(), text)

    def _tokenizer(self) -> Any:
        import llguidance

        if self._for_library is None:
            assert self.tokenizer is not None
            tokenizer = _LLGuidanceTokenizer(self.tokenizer, self.vocab_size)
            self._digits = Digits(tokenizer.tokens)
            wrapper = llguidance.TokenizerWrapper(tokenizer)
            self._for_library = llguidance.LLTokenizer(wrapper, eos_token=list(self.tokenizer.eos_ids))
        return self._for_library

    def _start_thread(self) -> None:
        if self._thread is None:
            before = threading.stack_size(STACK)
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
            threading.stack_size(before)

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # only Linux has priorities for single threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        with contextlib.suppress(BaseException):  # each compilation will fail with it
            self._tokenizer()
        while True:
            compilation = self._next()
            try:
                compilation.matcher = self.compile(compilation.text)
                compilation.state = COMPILED
            except BaseException as e:  # also a panic of the library: requests wait for this thread, so it must not end
                compilation.error = str(e)
                compilation.state = FAILED

    def _next(self) -> Compilation:
        """The one that would be ready first if each was compiled as soon as it came. So a short one does not wait for all long ones
        before it, and a long one waits only for those that come while it would have been compiled."""
        with self._changed:
            while not self._waiting:
                self._changed.wait()
            found = min(self._waiting, key=lambda one: one.due)
            self._waiting.remove(found)
            return found


def compiled(tokenizer: Any, text: str) -> Any:
    """A matcher of the grammar that has computed its first mask. Raises UserError, also if a limit is passed within the first tokens.
    tokenizer: llguidance's."""
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits())
    trial = matcher
    for _ in range(TRIED + 1):
        if trial.is_error():
            break
        packed = trial.compute_bitmask()  # some limits are only checked here
        if trial.is_error() or trial.is_stopped():
            break
        if trial is matcher:
            trial = matcher.deep_copy()
        allowed = int.from_bytes(packed, "little")
        trial.consume_token((allowed & -allowed).bit_length() - 1)  # the first that is allowed
    if problem := error_of(trial):
        raise UserError(problem)
    return matcher


def error_of(matcher: Any) -> str:
    """A matcher's error in one line; empty if it has none."""
    if not matcher.is_error():
        return ""
    error = (matcher.get_error().splitlines() or ["unknown error"])[0]
    if error in ("NoExtension", "NoExtensionBias"):  # llguidance's names of it
        error = "no text follows it"
    return f"the grammar or JSON schema cannot be used: {error[:300]}"


class _LLGuidanceTokenizer:
    """The tokenizer's interface for llguidance: the bytes of each id, and a function that encodes."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        known = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.tokens = known + [b""] * (vocab_size - len(known))
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)
