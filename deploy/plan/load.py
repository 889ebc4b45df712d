"""A replica under load: a simulation of the engine's steps, by the rules of `engine/scheduler.py`, with requests of one client.

A step computes one token of each decoding sequence first, then of prompts in the order of their arrival, within
--max-num-seqs and --max-batch-tokens. It is scheduled shortly before the end of the step before (`engine/pace.py`), or when
that one begins, if that one follows none. Sequences have their longest length and all blocks that they need, so that none is
preempted; no prefix is cached, and nothing is drafted.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deploy.plan.steps import Steps

HOST_SECONDS = 0.003  # until the first token, of frontend and client: fastest quarter of `make bench-frontend`, 1,024 ids each
LEAD = 0.004  # before the end of a step, the next one is scheduled; an estimate: hosts of 2 H200s needed 3 ms for one with a prompt
WARM_UP = 0.25  # share of the requests that only fill the replica
REQUESTS = 300  # simulated, and twice the batch
PRECISION, BISECTIONS = 0.01, 12  # of the largest load: relative, and at most


@dataclass
class Answers:
    """Seconds, in the order of arrival; a gap is the time between two tokens of an answer."""

    first: Any  # (N,) until the first token
    mean_gap: Any  # (N,)
    end: Any  # (N,) when the last token came, from the start
    prompt_share: float = 0.0  # of the time, of the steps that compute tokens of prompts

    @property
    def steady(self) -> slice:
        return slice(int(len(self.first) * WARM_UP), None)


def serve(
    steps: Steps, arrivals: Sequence[float], prompts: Sequence[int], answers: Sequence[int], lead: float = LEAD
) -> Answers:
    """`simulate` with the clock that the GPU has if prompts take the share of its time that they take at its full clock."""
    cold = simulate(steps, arrivals, prompts, answers, lead)
    return simulate(steps.heated(cold.prompt_share), arrivals, prompts, answers, lead) if steps.heat > 1 else cold


def simulate(
    steps: Steps, arrivals: Sequence[float], prompts: Sequence[int], answers: Sequence[int], lead: float = LEAD
) -> Answers:
    """Serve requests that arrive at these seconds, in order, with prompts and answers of so many tokens."""
    n, most, budget = len(arrivals), steps.most, steps.budget
    first, end = np.zeros(n), np.zeros(n)
    ends: list[tuple[int, int]] = []  # a heap: the number of the step that draws a request's last token, and the request
    now, busy, due = 0.0, 0.0, -math.inf  # now: the end of the last step. due: when the next one is scheduled
    admitted = rows = context = number = 0
    partial: tuple[int, int] | None = None  # the request whose prompt has begun, and how many of its tokens are computed
    while rows or partial or admitted < n:
        if idle := not rows and not partial and arrivals[admitted] > due:
            now = due = max(now, arrivals[admitted])
        tokens, pairs, begun, unused = 0, 0.0, list[int](), budget - rows
        while unused > 0:
            if partial is None:
                if rows + len(begun) == most or admitted == n or arrivals[admitted] > due:
                    break
                partial, admitted = (admitted, 0), admitted + 1
            request, done = partial
            count = min(unused, prompts[request] - done)
            tokens += count
            pairs += count * (done + count / 2)
            unused -= count
            partial = (request, done + count) if done + count < prompts[request] else None
            if partial is None:
                begun.append(request)
        if tokens:
            repeats, begin, then = 1, now, now + steps.seconds(rows, context, tokens, pairs)
            busy += then - now
        else:
            blocked = rows == most or admitted == n
            until = math.inf if blocked else arrivals[admitted] - now
            repeats = steps.repeats(rows, context, ends[0][0] - number + 1, until, lead)
            begin, then = (now + steps.repeated(rows, context, k) for k in (repeats - 1, repeats))
        due = begin if idle else max(begin, then - lead)
        now, number, context = then, number + repeats, context + rows * repeats
        for request in begun:
            first[request] = now - arrivals[request]
            heapq.heappush(ends, (number + answers[request] - 2, request))
            rows, context = rows + 1, context + prompts[request] + 1
        while ends and ends[0][0] < number:
            request = heapq.heappop(ends)[1]
            end[request] = now
            rows, context = rows - 1, context - prompts[request] - answers[request]
    taken = end - np.asarray(arrivals) - first
    mean_gaps = taken / np.maximum(1, np.asarray(answers) - 1)
    return Answers(first + HOST_SECONDS, mean_gaps, end + HOST_SECONDS, busy / now)


@dataclass(frozen=True)
class Goals:
    """The most seconds until the first token, and on average between tokens, that `share` of the requests may take (the
    goodput of DistServe, Zhong et al., arXiv:2401.09670, section 2)."""

    first: float
    gap: float
    share: float

    def met(self, answers: Answers) -> bool:
        kept = (answers.first <= self.first) & (answers.mean_gap <= self.gap)
        return bool(np.mean(kept[answers.steady]) >= self.share)


def poisson(rate: float, count: int, seed: int) -> Any:
    """The first `count` arrivals of `rate` a second. With one seed, all rates have the same gaps, scaled."""
    return np.cumsum(np.random.default_rng(seed).exponential(size=count)) / rate


def at_rate(steps: Steps, rate: float, prompt: int, answer: int, seed: int) -> Answers:
    count = REQUESTS + 2 * steps.most
    return serve(steps, poisson(rate, count, seed).tolist(), [prompt] * count, [answer] * count)


def highest_rate(steps: Steps, prompt: int, answer: int) -> float:
    """Requests a second that a replica cannot exceed: if steps had no other work than their prompts, or than their answers."""
    prompts = steps.budget / steps.seconds(0, 0, steps.budget, 0) / prompt
    return min(prompts, steps.most / steps.seconds(steps.most, 0, 0, 0) / answer)


def largest_rate(steps: Steps, prompt: int, answer: int, goals: Goals, seed: int, least: float = 0.0) -> float:
    """The largest number of requests a second that meets the goals, by bisection; 0 if it is not above `least`."""

    def met(rate: float) -> bool:
        return goals.met(at_rate(steps, rate, prompt, answer, seed))

    low, high = least, highest_rate(steps, prompt, answer)
    if low >= high or (low and not met(low)):
        return 0.0
    smallest = high / 2**BISECTIONS
    if not low and not met(smallest):
        return 0.0
    while high - low > max(PRECISION * high, smallest):
        middle = (low + high) / 2
        low, high = (middle, high) if met(middle) else (low, middle)
    return low
