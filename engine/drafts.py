"""Drafts: guesses of a sequence's next tokens, which one step verifies together (speculative decoding).

A drafted token is right if it is the one that the model draws there, greedy or sampled. A draw depends on the tokens before it, the
seed and the position only, so an answer has the same tokens with drafts as without, as far as the logits have the same bits.

The source of a draft is what followed the longest suffix of prompt and answer that occurred before: in the prompt, in the answer, or
in a text that the request predicts (`SamplingParams.prediction`). Drafts are a function of tokens that all ranks know, so ranks agree
on them without a message.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from itertools import accumulate

from engine.protocol import Drafted
from engine.scheduler import Chunk, Sequence

MOST_INDEXED = 1 << 16  # tokens of a request and its prediction; a longer one gets no more drafts
MOST_INDEXED_TOGETHER = 1 << 19  # tokens of all running requests; an automaton takes up to 0.7 KB for each, on each rank
MOST_WITH_GRAMMAR = 2  # drafted tokens: each takes a mask, which the host computes
INDEXED_A_STEP = 512  # tokens of all requests: a long prompt must not hold up a step; about 1 ms
LEAST_MATCH = 2, 3  # tokens, if the sequence's last draft was right and otherwise; what follows fewer is hardly ever the same
TAIL = 8  # tokens of the prompt that are put before a prediction, so that the first tokens of the answer find it
END = -1  # stands behind a prediction; no token's id
# Drafts must promise so many tokens a step for each running sequence: such a step is not launched ahead on a GPU, and attends to
# several rows of a sequence on a CPU.
WORTH = 0.25
LEAST_PRICE = 0.2  # tokens; a drafted row also takes time on the host
FIRST_RIGHT = 1.5  # accepted tokens of a draft, before there is one
WEIGHT = 0.25  # of the newest draft in a request's averages
PAUSES = 32, 512  # tokens between two drafts of a request whose drafts do not pay: at first, and at most


class Costs:
    """How long steps take by their rows."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """seconds: of steps of at least two numbers of rows, which are in ascending order. Other steps are on the lines through these
        points. More rows never take less time: where they seem to, the clock was disturbed."""
        self._points = list(zip(seconds, accumulate(seconds.values(), max), strict=True))

    def seconds(self, rows: int) -> float:
        last = len(self._points) - 1
        i = next((i for i in range(1, last) if rows <= self._points[i][0]), last)
        (first, before), (second, after) = self._points[i - 1], self._points[i]
        return before + (after - before) * (rows - first) / (second - first)

    def price(self, rows: int) -> float:
        """How many tokens a drafted row must bring in a step of so many other rows: the time that it adds over that of a token, if
        each of the others has two drafted ones."""
        return max(LEAST_PRICE, (self.seconds(3 * rows) / self.seconds(rows) - 1) / 2)


def count_equal(draft: List[int], drawn: List[int]) -> int:
    """How many tokens of a draft are right: the first ones, as long as they are those that were drawn."""
    return next(
        (i for i, (one, other) in enumerate(zip(draft, drawn, strict=False)) if one != other), min(len(draft), len(drawn))
    )


class SuffixAutomaton:
    """All substrings of a growing list of tokens, with O(1) amortized time and memory for each token (A. Blumer et al., The smallest
    automaton recognizing the subwords of a text, 1985, section 2).

    A state stands for substrings that end at the same places. `match` is the length of the longest suffix that occurred before, and
    the place behind an earlier occurrence of it, mostly the latest one."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.match = 0, 0
        self._next: list[dict[int, int]] = [{}]  # of each state, by token
        self._link = [-1]  # the state of its longest suffix that occurs at more places
        self._length = [0]  # of its longest string
        self._end = [0]  # a place behind its strings
        self._last = 0  # the state of the whole list

    def append(self, token: int) -> None:
        self.tokens.append(token)
        count = len(self.tokens)
        new = self._add({}, 0, count, count)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._target(state, token)
        self._last, suffix = new, self._link[new]
        self.match = self._length[suffix], self._end[suffix]
        self._end[suffix] = count

    def after_match(self, count: int) -> list[int]:
        """The `count` tokens after the earlier occurrence of the match. If they reach the end of the list, they go on periodically."""
        found = self.tokens[self.match[1] : self.match[1] + count]
        return [found[i % len(found)] for i in range(count)]

    def _target(self, state: int, token: int) -> int:
        """The state of the longest string of `state` and the token; it is split off where it has got more places than longer ones."""
        target, length = self._next[state][token], self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._add(dict(self._next[target]), self._link[target], length, self._end[target])
        self._link[target] = clone
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _add(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


class Drafter:
    """The drafts of one sequence. Their length adapts to how many of their tokens were right lately, and to what a row costs."""

    def __init__(self, sequence: Sequence, ceiling: int) -> None:
        self.sequence = sequence
        self.ceiling = ceiling if sequence.params.grammar is None else min(ceiling, MOST_WITH_GRAMMAR)
        prediction = (sequence.params.prediction or [])[: MOST_INDEXED // 2]
        tail = sequence.tokens[: sequence.prompt_length][-TAIL:]
        self._head = [*tail, *prediction, END] if prediction else []  # comes before the sequence's tokens
        self._text = SuffixAutomaton()
        self._right, self._wrong = FIRST_RIGHT, 1.0  # averages over the drafts: tokens that were right, and whether one was not
        self._least_match = LEAST_MATCH[1]
        self._resume, self._pause = 0, PAUSES[0]  # generated tokens

    def follow(self, most: int) -> int:
        """Index at most `most` of the tokens that are not indexed yet. Returns how many."""
        done = self.indexed
        stop = min(done + most, MOST_INDEXED)
        new = self._head[done:stop]
        first = done + len(new) - len(self._head)
        new += self.sequence.tokens[first : max(first, stop - len(self._head))]
        for token in new:
            self._text.append(token)
        return len(new)

    @property
    def indexed(self) -> int:
        """How many tokens the automaton holds."""
        return len(self._text.tokens)

    @property
    def missing(self) -> int:
        """How many tokens are not indexed."""
        return len(self._head) + len(self.sequence.tokens) - self.indexed

    @property
    def source(self) -> str:
        return "prediction" if self._text.match[1] < len(self._head) else "ngram"

    def promise(self, price: float) -> tuple[int, float]:
        """How many drafted tokens pay at this price, and how many of them will probably be right, if the next token finds a draft at
        all. A token is right if all before it are, and it is, too. The newest token may still be on the device."""
        if self.missing > 1 or self._text.match[0] < self._least_match:
            return 0, 0.0
        count, right, rate = 0, 0.0, self._right / (self._right + self._wrong)
        chance = rate
        while count < self.ceiling and chance >= price:
            count, right, chance = count + 1, right + chance, chance * rate
        if not count and self.sequence.generated >= self._resume:
            return 1, 2 * WORTH  # a trial, which few other sequences have to wait for
        return count, right

    def draft(self, price: float) -> list[int]:
        """The next tokens, perhaps none. All tokens of the sequence must be known."""
        found = [] if self.missing else self._text.after_match(self.promise(price)[0])
        return found[: found.index(END)] if END in found else found

    def learn(self, accepted: int, drafted: int) -> None:
        """How many tokens of the last draft were right, and how many it had."""
        self._least_match = LEAST_MATCH[0 if accepted else 1]
        self._right += WEIGHT * (accepted - self._right)
        self._wrong += WEIGHT * ((accepted < drafted) - self._wrong)
        if accepted:
            self._resume, self._pause = 0, PAUSES[0]
        else:
            self._resume = self.sequence.generated + self._pause
            self._pause = min(2 * self._pause, PAUSES[1])


class Speculation:
    """The drafts of an engine's sequences, and how many of their tokens were right."""

    def __init__(self, ceiling: int, measure: Callable[[], Mapping[int, float]]) -> None:
        """ceiling: most tokens of a draft; 0 makes none. measure: the seconds of steps, see `Costs`; the same on all ranks."""
        self.ceiling, self.measure = ceiling, measure
        self.costs: Costs | None = None
        self.total = {source: Drafted() for source in ("ngram", "prediction")}
        self._sources: dict[Sequence, str] = {}

    def prepare(self) -> None:
        """Measure what steps cost, unless it is known. No step may be in flight. Collective."""
        if self.ceiling and self.costs is None:
            self.costs = Costs(self.measure())

    def drafts(self, running: List[Sequence]) -> dict[Sequence, list[int]]:
        """Drafts for the next step. No step may be in flight."""
        if not self.expects(running):
            return {}
        self.prepare()
        price = self._price(running)
        decoding = [s for s in running if s.generated and s.length - s.computed == 1]
        found = {s: draft for s in decoding if (draft := s.drafter.draft(price))}
        self._sources = {s: s.drafter.source for s in found}
        return found

    def expects(self, running: List[Sequence]) -> bool:
        """Whether the next step will probably have drafts that are worth it."""
        if not self.ceiling or not running:
            return False
        for sequence in running:
            sequence.drafter = sequence.drafter or Drafter(sequence, self.ceiling)
        left = min(INDEXED_A_STEP, MOST_INDEXED_TOGETHER - sum([s.drafter.indexed for s in running]))
        for drafter in sorted([s.drafter for s in running], key=lambda drafter: drafter.missing):  # long texts make none wait
            left -= drafter.follow(max(left, 0))
        price = self._price(running)
        return sum([s.drafter.promise(price)[1] for s in running]) > WORTH * len(running)

    def learn(self, chunk: Chunk, accepted: int) -> None:
        """Note that `accepted` tokens of the chunk's draft were right."""
        source = self._sources.pop(chunk.sequence)
        total = self.total[source]
        self.total[source] = Drafted(total.drafts + 1, total.tokens + len(chunk.draft), total.accepted + accepted)
        if chunk.sequence.drafter is not None:  # it has not ended
            chunk.sequence.drafter.learn(accepted, len(chunk.draft))

    def _price(self, running: List[Sequence]) -> float:
        return LEAST_PRICE if self.costs is None else self.costs.price(len(running))
