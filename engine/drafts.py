"""Drafts: guesses of a sequence's next tokens, which one step verifies together (speculative decoding).

A drafted token is right if it is the one that the model draws there, greedy or sampled. A draw depends on the tokens before it, the
seed and the position only, so an answer has the same tokens with drafts as without, as far as the logits have the same bits.

The source of a draft is what followed the longest suffix of prompt and answer that occurred before: in the prompt, in the answer, or
in a text that the request predicts (`SamplingParams.prediction`). Drafts are a function of tokens that all ranks know, so ranks agree
on them without a message.
"""

from collections.abc import Sequence as List

from engine.protocol import Drafted
from engine.scheduler import Chunk, Sequence

MOST_INDEXED = 1 << 16  # tokens of a request; a longer one gets no more drafts
MOST_INDEXED_TOGETHER = 1 << 20  # tokens of all running requests; an automaton takes up to 0.5 KB for each
INDEXED_A_STEP = 512  # tokens of all requests: a long prompt must not hold up a step; about 1 ms
LEAST_MATCH = 2, 3  # tokens, if the sequence's last draft was right and otherwise; what follows fewer is hardly ever the same
TAIL = 8  # tokens of the prompt that are put before a prediction, so that the first tokens of the answer find it
END = -1  # stands behind a prediction; no token's id
WORTH = 0.15  # drafts must promise so many tokens a step for each running sequence, because such a step is not launched ahead
FIRST_MEAN = 1.5  # accepted tokens of a draft, before there is one
WEIGHT = 0.25  # of the newest draft in a request's mean
PAUSES = 32, 512  # tokens without drafts after they did not pay: at first, and at most


def least_accepted(running: int) -> float:
    """How many tokens a draft must bring for its rows to pay. A step of few sequences takes hardly longer with more rows, because
    it has to read all weights anyway; but it is not launched ahead."""
    return min(1.0, running / 4)


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
    """The drafts of one sequence. Their length adapts to how many of their tokens were right lately."""

    def __init__(self, sequence: Sequence, ceiling: int) -> None:
        self.sequence, self.ceiling = sequence, ceiling
        prediction = sequence.params.prediction
        tail = sequence.tokens[: sequence.prompt_length][-TAIL:]
        self._head = [*tail, *prediction, END] if prediction else []  # comes before the sequence's tokens
        self._text = SuffixAutomaton()
        self.mean = FIRST_MEAN  # accepted tokens of a draft
        self._least_match = LEAST_MATCH[1]
        self._resume, self._pause = 0, PAUSES[0]  # generated tokens

    def follow(self, most: int) -> int:
        """Index at most `most` of the tokens that are not indexed yet. Returns how many."""
        done = self.indexed
        new = self._head[done : done + most]
        first = done + len(new) - len(self._head)
        new += self.sequence.tokens[first : min(first + most - len(new), MOST_INDEXED)]
        for token in new:
            self._text.append(token)
        return len(new)

    @property
    def indexed(self) -> int:
        """How many tokens the automaton holds."""
        return len(self._text.tokens)

    @property
    def is_likely(self) -> bool:
        """Whether the sequence's next token, or the one after it, will probably find a draft that pays."""
        return self._text.match[0] >= self._least_match and self.sequence.generated >= self._resume

    @property
    def source(self) -> str:
        return "prediction" if self._text.match[1] < len(self._head) else "ngram"

    def draft(self) -> list[int]:
        """The next tokens, perhaps none. All tokens of the sequence must be known."""
        complete = self.indexed == len(self._head) + len(self.sequence.tokens)
        if not complete or not self.is_likely:
            return []
        found = self._text.after_match(min(self.ceiling, 1 + round(2 * self.mean)))
        return found[: found.index(END)] if END in found else found

    def learn(self, accepted: int, least: float) -> None:
        """accepted: how many tokens of the last draft were right. least: how many it takes for drafts to pay."""
        self._least_match = LEAST_MATCH[0 if accepted else 1]
        self.mean += WEIGHT * (accepted - self.mean)
        if self.mean >= 2 * least:
            self._pause = PAUSES[0]
        elif self.mean < least:
            self._resume = self.sequence.generated + self._pause
            self._pause = min(2 * self._pause, PAUSES[1])
            self.mean = 1.25 * least  # one more failure, and the next pause begins


class Speculation:
    """The drafts of an engine's sequences, and how many of their tokens were right."""

    def __init__(self, ceiling: int) -> None:
        """ceiling: most tokens of a draft; 0 makes none."""
        self.ceiling = ceiling
        self.total = {source: Drafted() for source in ("ngram", "prediction")}
        self._sources: dict[Sequence, str] = {}

    def drafts(self, running: List[Sequence]) -> dict[Sequence, list[int]]:
        """Drafts for the next step. No step may be in flight."""
        if not self.expects(running):
            return {}
        decoding = [s for s in running if s.generated and s.length - s.computed == 1]
        found = {s: draft for s in decoding if (draft := s.drafter.draft())}
        self._sources = {s: s.drafter.source for s in found}
        return found

    def expects(self, running: List[Sequence]) -> bool:
        """Whether the next step will probably have drafts that are worth it."""
        if not self.ceiling:
            return False
        for sequence in running:
            sequence.drafter = sequence.drafter or Drafter(sequence, self.ceiling)
        left = min(INDEXED_A_STEP, MOST_INDEXED_TOGETHER - sum(s.drafter.indexed for s in running))
        for sequence in running:
            left -= sequence.drafter.follow(max(left, 0))
        promised = sum(s.drafter.mean for s in running if s.drafter.is_likely)
        return promised > WORTH * len(running)

    def learn(self, chunk: Chunk, accepted: int, running: int) -> None:
        """Note that `accepted` tokens of the chunk's draft were right, in a step of `running` sequences."""
        source = self._sources[chunk.sequence]
        total = self.total[source]
        self.total[source] = Drafted(total.drafts + 1, total.tokens + len(chunk.draft), total.accepted + accepted)
        chunk.sequence.drafter.learn(accepted, least_accepted(running))
