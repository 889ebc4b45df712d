"""What steps and drafts cost, in seconds and in tokens; what drafts gain; and a budget for drafts that may lose.

Gains and prices are in tokens: one is the time in which a step computes a token without drafts (`Costs.token_seconds`). An accepted
token saves a step of its sequence, and so gains one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from engine.sequence import Sequence

Points = tuple[tuple[int, float], ...]
LEAST_PRICE = 0.1  # tokens; a drafted row also takes time on the host
LEAST_GAIN = 0.05  # tokens of each sequence of a step with drafts: the work of the host that `Costs` does not contain
FIRST_ACCEPTED = 2.0  # accepted tokens of a draft, before there is one
WEIGHT = 0.25  # of the newest draft in a request's averages, and of the newest request in those of requests
WEIGHT_OF_ALL = 0.02  # of the newest draft in the averages of all requests
SHARE = 0.005  # of a request's tokens, and of the time of all steps, that may be lost to find out whether drafts pay


class Costs:
    """How long steps and drafts take, in seconds, by rows or by sequences. Fewer never take longer than was measured for more: if they
    did, the clock was disturbed. Prices are in tokens: one is the time in which a step computes a token without drafts."""

    def __init__(
        self,
        steps: Mapping[int, float],
        draft_steps: Mapping[int, float] | None = None,
        prompts: Mapping[int, float] | None = None,
        host_seconds: float = 0.0,
        indexing: float = 0.0,
        mixed: float = 0.0,
    ) -> None:
        """Each mapping has at least two numbers, in ascending order. Others are on the lines through these points.

        steps: by rows. draft_steps: a step of the draft model, by sequences. prompts: what the draft model takes to compute a prompt,
        by its tokens. None if no model drafts. host_seconds: what a step takes longer if it is not launched while the one before runs.
        indexing: a token of a text. mixed: what a step takes longer if only some of its sequences have drafts."""
        self._steps, self._draft_steps, self._prompts = map(_points, (steps, draft_steps, prompts))
        self.host_seconds, self.indexing, self.mixed = host_seconds, indexing, mixed

    def seconds(self, rows: int) -> float:
        """Of a step of so many rows."""
        return _on_lines(self._steps, rows)

    def prompt_seconds(self, tokens: int) -> float:
        """For which the draft model computes a prompt."""
        most, seconds = self._prompts[-1]  # the last two may be equal, and a prompt is far longer than they
        return max(_on_lines(self._prompts, tokens), seconds * tokens / most if tokens > most else 0.0)

    def token_seconds(self, rows: int) -> float:
        """In which a step of so many rows computes a token without drafts: the unit of the prices."""
        return self.seconds(rows) / rows

    def row_price(self, rows: int) -> float:
        """How many tokens a drafted row must bring in a step of so many other rows: the time that it adds, if each of the others
        has two drafted ones."""
        return max(LEAST_PRICE, (self.seconds(3 * rows) / self.seconds(rows) - 1) / 2)

    def draft_step_price(self, rows: int, sequences: int) -> float:
        """How many tokens a step of the draft model for so many sequences must bring in a step of so many other rows."""
        return _on_lines(self._draft_steps, sequences) / self.token_seconds(rows)

    def fixed_price(self, rows: int) -> float:
        """How many tokens drafts must bring to a step of so many other rows, because it is not launched ahead, mostly not all of its
        sequences have one, and for the host's work."""
        seconds = self.host_seconds + (self.mixed if rows > 1 else 0.0)
        return seconds / self.token_seconds(rows) + LEAST_GAIN * rows


def _points(seconds: Mapping[int, float] | None) -> Points:
    """Measured points, of which none is above a later one."""
    found = seconds or {1: 0.0, 2: 0.0}
    return tuple(zip(found, list(accumulate([*found.values()][::-1], min))[::-1], strict=True))


@lru_cache(maxsize=1 << 12)  # asked for the same numbers in each step
def _on_lines(points: Points, x: int) -> float:
    last = len(points) - 1
    i = next((i for i in range(1, last) if x <= points[i][0]), last)
    (first, before), (second, after) = points[i - 1], points[i]
    return before + (after - before) * (x - first) / (second - first)


FREE = Costs({1: 1.0, 2: 1.0})  # of steps, before they are measured


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How many tokens a draft may have, and how many it will probably gain beyond those that its own time costs."""

    length: int
    gain: float
    price: float = 0.0  # tokens that each of its tokens costs
    fixed: float = 0.0  # tokens that it costs besides

    def charged(self, cost: float) -> "DraftPlan":
        """The same if it also costs so many tokens besides, NO_DRAFT if it does not gain them."""
        return replace(self, gain=self.gain - cost, fixed=self.fixed + cost) if self.gain > cost else NO_DRAFT


NO_DRAFT = DraftPlan(0, 0.0)


@dataclass
class Acceptance:
    """What became of the last drafts from one source: averages of the tokens that saved a step, and of whether one did not, because
    it was wrong or ended the answer."""

    saved: float = FIRST_ACCEPTED
    rejected: float = 1.0
    lost: float = 0.0  # tokens that drafts have cost a request and not brought back

    @property
    def rate(self) -> float:
        """The chance that a token saves a step if its predecessors do."""
        return self.saved / (self.saved + self.rejected)

    def plan(self, price: float, most: int) -> DraftPlan:
        """The draft that pays at this price of a token, of up to `most` tokens."""
        length, rate = 0, self.rate
        while length < most and rate ** (length + 1) >= price:
            length += 1
        return self.plan_of(length, price)

    def plan_of(self, length: int, price: float) -> DraftPlan:
        """A draft of so many tokens. A token saves a step if all before it do, and it does, too."""
        return DraftPlan(length, sum([self.rate**i - price for i in range(1, length + 1)]), price)

    def trial(self, price: float, fixed: float, generated: int) -> DraftPlan:
        """A draft of one token where drafts do not pay, to find out whether they do again. There is one now and then: after so many
        generated tokens, no more than a SHARE of them may be lost."""
        if price < 1 and self.lost + price + fixed - self.rate <= SHARE * generated:
            return DraftPlan(1, 0.0, price, fixed)
        return NO_DRAFT

    def learn(self, saved: int, drafted: int, cost: float = 0.0, weight: float = WEIGHT) -> None:
        """Note that `saved` tokens of a draft saved a step each, which has cost the time of so many."""
        self.saved += weight * (saved - self.saved)
        self.rejected += weight * ((saved < drafted) - self.rejected)
        self.lost = max(0.0, self.lost + cost - saved)


TRIALS_ALONE = Acceptance(saved=0.0)  # at which no draft pays


class Budget:
    """For which requests a source drafts. It must first see the prompt, whose time the drafts may not bring back, and the drafts of
    short answers may save nothing.

    It does where drafts have brought other requests that time, on average, or where the budget allows to find that out. A request's
    drafts pay from the budget what they cost, and into it the steps that they save. SHARE of the time of all steps goes there, too,
    up to the most that a request lacked beyond the grant. So requests that begin lose no more than SHARE of the time, a grant, and
    what drafts have brought. The budget does not stop requests that have begun; there the `Acceptance` of each says when drafts do
    not pay."""

    def __init__(self) -> None:
        self._brought = 0.0  # see `brought`
        self._saved = 0.0  # seconds, besides the grant; negative if that was used
        self._most = 0.0  # seconds that it may save
        self._by_request: dict[Sequence, float] = {}  # what drafts have brought

    @property
    def brought(self) -> float:
        """Seconds that drafts bring to a request, on average of those that have ended; without its prompt."""
        for sequence in [s for s in self._by_request if s.finish_reason is not None]:
            self._brought += WEIGHT * (self._by_request.pop(sequence) - self._brought)
        return self._brought

    def take(self, sequence: Sequence, seconds: float, grant: float) -> bool:
        """Pay for the sequence's prompt, if the budget covers what will probably be lost. grant: seconds that it holds at first."""
        lacking = seconds - self.brought - grant
        if lacking > self._saved:
            self._most = max(self._most, lacking)
            return False
        self._by_request[sequence] = 0.0
        self.add(-seconds)
        return True

    def add(self, seconds: float, sequence: Sequence | None = None) -> None:
        """sequence: whose drafts have brought them."""
        self._saved = min(self._most, self._saved + seconds)
        if sequence in self._by_request:
            self._by_request[sequence] += seconds

    def take_back(self, seconds: float, sequence: Sequence) -> None:
        """Drafts have brought so much less to the sequence than they seemed to."""
        if sequence in self._by_request:
            self.add(-seconds, sequence)
