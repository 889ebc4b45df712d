"""What followed a few tokens in the newest prompts of all requests."""

from collections import deque

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
