"""Drafts from text, for one sequence: what followed its last tokens where they occurred before (n-gram or prompt lookup).

They are looked up in a text that the request predicts (`SamplingParams.prediction`), its prompt and its answer (`SuffixAutomaton`);
if nothing is found, perhaps in the prompts of other requests (`PromptIndex`).
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from engine.draft_costs import LEAST_PRICE, NO_DRAFT, SHARE, Acceptance, DraftPlan
from engine.sequence import Sequence

# --- the longest suffix of a growing list of tokens that occurred before -------------------------------------------------------


class SuffixAutomaton:
    """All substrings of a growing list of tokens, with O(1) amortized time and memory for each token (A. Blumer et al., The
    smallest automaton recognizing the subwords of a text, 1985, section 2).

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
        """The `count` tokens after the earlier occurrence of the match. If they reach the end of the list, they go on
        periodically."""
        found = self.tokens[self.match[1] : self.match[1] + count]
        return [found[i % len(found)] for i in range(count)]

    def _target(self, state: int, token: int) -> int:
        """The state of the longest string of `state` and the token; it is split off where it has got more places than longer
        ones."""
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


# --- what followed a few tokens in the newest prompts ------------------------------------------------------------------------


GRAM = 4  # tokens that must be the same: what follows fewer is often something else in another prompt
GAP = -1  # stands behind each prompt; no token's id


class PromptIndex:
    """The newest `capacity` tokens of prompts, in a ring, and where each GRAM of them ended last. Takes 0.3 KB for each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._ring = [GAP] * capacity
        self._grams: list[tuple[int, ...]] = [()] * capacity  # that end at each place
        self._places: dict[tuple[int, ...], int] = {}  # behind the newest occurrence of each, counted from the first token
        self._count = 0  # tokens so far
        self._gram: deque[int] = deque(maxlen=GRAM)  # the newest ones
        self._waiting: deque[int] = deque()

    def add(self, prompt: list[int]) -> None:
        """Let `index` read a prompt, of which the newest tokens if it is too long, unless too many tokens wait already."""
        prompt = prompt[-(self.capacity - 1) :]
        if len(self._waiting) + len(prompt) < self.capacity:
            self._waiting.extend((*prompt, GAP))

    def index(self, most: int) -> None:
        """Index at most `most` of the tokens that wait."""
        for _ in range(min(most, len(self._waiting))):
            self._append(self._waiting.popleft())

    def _append(self, token: int) -> None:
        place = self._count % self.capacity
        if self._places.get(self._grams[place]) == self._count - self.capacity + 1:
            del self._places[self._grams[place]]
        self._count += 1
        self._gram.append(token)
        gram = tuple(self._gram)
        self._ring[place], self._grams[place] = token, gram
        if len(gram) == GRAM and GAP not in gram:
            self._places[gram] = self._count

    def finds(self, tokens: list[int]) -> bool:
        """Whether something follows the last tokens of a sequence in a prompt."""
        return bool(self.after(tokens, 1))

    def after(self, tokens: list[int], count: int) -> list[int]:
        """At most `count` tokens that follow the last ones of a sequence where they occurred last, up to the end of that prompt."""
        start = self._places.get(tuple(tokens[-GRAM:]))
        if start is None:
            return []
        found = [self._ring[i % self.capacity] for i in range(start, min(start + count, self._count))]
        return found[: found.index(GAP)] if GAP in found else found


# --- the drafts of a sequence ------------------------------------------------------------------------------------------------


MOST_INDEXED = 1 << 16  # tokens of a request and its prediction; a longer one gets no more drafts from text
MOST_WITH_GRAMMAR = 2  # drafted tokens: each takes a mask, which the host computes
LEAST_MATCH = 2, 3  # tokens, if the sequence's last draft was right and otherwise; what follows fewer is hardly ever the same
TAIL = 8  # tokens of the prompt that are put before a prediction, so that the first tokens of the answer find it
END = -1  # stands behind a prediction; no token's id
# sources of drafts from text: the request's own, and the prompts of other requests
NGRAM, PREDICTION, PROMPTS = TEXTS = "ngram", "prediction", "prompts"


class TextDrafter:
    """Drafts for one sequence from text, and how many of its drafts from each source were accepted. Their length adapts to that, and to
    what a row costs."""

    def __init__(
        self,
        sequence: Sequence,
        most: int,
        acceptance: Mapping[str, Acceptance] | None = None,
        prompts: PromptIndex | None = None,
    ) -> None:
        """most: tokens of a draft. acceptance: what it begins with, of each source that may draft. prompts: of all requests."""
        self.sequence = sequence
        masked = sequence.params.grammar is not None and not sequence.params.late_grammar
        self.most = min(most, MOST_WITH_GRAMMAR) if masked else most
        prediction = (sequence.params.prediction or [])[: MOST_INDEXED // 2]
        tail = sequence.tokens[: sequence.prompt_length][-TAIL:]
        self._prefix = [*tail, *prediction, END] if prediction else []  # comes before the sequence's tokens in the index
        self._text = SuffixAutomaton()
        begun = dict.fromkeys(TEXTS, Acceptance()) if acceptance is None else acceptance
        self.acceptance, self._prompts = {source: replace(one) for source, one in begun.items()}, prompts
        self.of_model: Acceptance | None = None  # of a model's drafts; None before it was decided whether it makes some
        self._least_match = LEAST_MATCH[1]
        self.last_source: str | None = None  # of a draft

    def index(self, most: int) -> int:
        """Index at most `most` of the tokens that are not indexed yet. Returns how many."""
        done = self.indexed
        stop = min(done + most, MOST_INDEXED)
        new = self._prefix[done:stop]
        first = done + len(new) - len(self._prefix)
        new += self.sequence.tokens[first : max(first, stop - len(self._prefix))]
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
        return len(self._prefix) + len(self.sequence.tokens) - self.indexed

    @property
    def may_pay(self) -> bool:
        """Whether there can be a draft or a trial, at the least price. If not, nothing needs to be indexed yet."""
        least = LEAST_PRICE - SHARE * self.sequence.generated
        return least <= 0 or any(one.rate >= least for one in self.acceptance.values())

    @property
    def source(self) -> str:
        """Where the next token will probably find a draft, if it does."""
        if not self._finds_own:
            return PROMPTS
        return PREDICTION if self._text.match[1] < len(self._prefix) else NGRAM

    @property
    def _finds_own(self) -> bool:
        """Whether the next token will probably find a draft in the request's own text. The newest one may still be on the device."""
        return self.missing <= 1 and self._text.match[0] >= self._least_match

    @property
    def finds(self) -> bool:
        """Whether the next token will probably find a draft."""
        return self._finds_own or (self._prompts is not None and self._prompts.finds(self.sequence.tokens))

    @property
    def _current(self) -> Acceptance | None:
        """Of this source."""
        return self.acceptance[self.source] if self.finds else None

    def plan(self, price: float) -> DraftPlan:
        """The draft that pays at this price of a token, if the next token finds one at all."""
        return current.plan(price, self.most) if (current := self._current) else NO_DRAFT

    def trial(self, price: float, fixed: float) -> DraftPlan:
        """The same where drafts do not pay."""
        return current.trial(price, fixed, self.sequence.generated) if (current := self._current) else NO_DRAFT

    def draft(self, count: int) -> list[int]:
        """The next tokens, perhaps fewer than `count`. All tokens of the sequence must be known."""
        if not self._finds_own and self._prompts is not None:
            return self._prompts.after(self.sequence.tokens, count)
        found = [] if self.missing or not count else self._text.after_match(count)
        return found[: found.index(END)] if END in found else found

    def learn(self, source: str, accepted: int, drafted: int, cost: float = 0.0) -> None:
        """Note how many tokens of the last draft were accepted, how many it had, and what it has cost, in tokens."""
        acceptance = self.acceptance[source] if source in TEXTS else self.of_model
        assert acceptance is not None
        if source in (NGRAM, PREDICTION):
            self._least_match = LEAST_MATCH[0 if accepted else 1]
        acceptance.learn(accepted, drafted, cost)
        self.last_source = source
