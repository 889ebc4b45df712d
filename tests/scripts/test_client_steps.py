"""Steps as clients saw them, against the steps of a small simulated server."""

import random
from itertools import pairwise

import pytest

from scripts.lib.client_steps import APART, SeenStep, seen_steps


def test_steps_are_found_in_the_times_of_tokens(seed: int) -> None:
    """Requests come and end; each token of a step arrives a little later than the one before."""
    prompt, now, steps = random.randint(1, 2000), 0.0, list[SeenStep]()
    answers: list[list[float]] = []  # times of tokens
    lengths = [random.randint(1, 40) for _ in range(30)]
    while len(answers) < len(lengths) or any(len(a) < n for a, n in zip(answers, lengths, strict=False)):
        decoding = [a for a, n in zip(answers, lengths, strict=False) if len(a) < n]
        new = random.choice([0, 0, 1, 2]) if decoding else 1
        new = min(new, len(lengths) - len(answers))
        seconds = random.uniform(5, 50) * APART
        now += seconds
        steps.append(SeenStep(len(decoding), sum(prompt + len(a) for a in decoding), new, seconds))
        fresh: list[list[float]] = [[] for _ in range(new)]
        answers += fresh
        for i, answer in enumerate(random.sample(decoding + fresh, len(decoding) + new)):
            answer.append(now + i * 1e-6)
    records = []
    for times in answers:
        arrival = times[0] - random.uniform(0.01, 0.05)
        gaps = [round((b - a) * 1e6) for a, b in pairwise(times)]
        records.append({"arrival": arrival, "first": times[0] - arrival, "gaps_us": gaps})
    expected = [step for step in steps if step.decoding]  # no gap shows how long a step took that only finished prompts
    found = seen_steps(random.sample(records, len(records)), prompt)
    assert [(s.decoding, s.context, s.prompts) for s in found] == [(s.decoding, s.context, s.prompts) for s in expected]
    assert [s.seconds for s in found] == pytest.approx([s.seconds for s in expected], abs=1e-4)
