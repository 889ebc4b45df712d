"""The longest suffix of a growing list of tokens that occurred before."""


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
