"""The steps of a server, from the times at which its clients got tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

APART = 1.2e-3  # seconds between the tokens of two steps; those of one step come closer together


@dataclass(frozen=True)
class SeenStep:
    decoding: int  # sequences
    context: int  # their tokens
    prompts: int  # that it finished
    seconds: float


def seen_steps(answers: Iterable[dict[str, Any]], prompt_length: int) -> list[SeenStep]:
    """Those that follow a step in which each of their decoding sequences got a token, too. answers: records of the load generator,
    each with seconds until the first token and, in `gaps_us`, the microseconds between tokens."""
    found = []
    for before, step in pairwise(_steps(answers)):
        decoding = {request: token for request, token, _ in step if token}
        if decoding and decoding.items() <= {(request, token + 1) for request, token, _ in before}:
            seconds = _middle(step) - _middle(before)
            context = sum(prompt_length + token for token in decoding.values())
            found.append(SeenStep(len(decoding), context, len(step) - len(decoding), seconds))
    return found


def _steps(answers: Iterable[dict[str, Any]]) -> list[list[tuple[int, int, float]]]:
    """The tokens of each step: request, number in its answer, and time."""
    tokens = []
    for request, answer in enumerate(answers):
        at = answer["arrival"] + answer["first"]
        tokens.append((request, 0, at))
        for number, gap in enumerate(answer["gaps_us"], 1):
            at += gap / 1e6
            tokens.append((request, number, at))
    tokens.sort(key=lambda token: token[2])
    steps: list[list[tuple[int, int, float]]] = []
    for token in tokens:
        if steps and token[2] - steps[-1][-1][2] < APART and all(token[0] != other[0] for other in steps[-1]):
            steps[-1].append(token)
        else:
            steps.append([token])
    return steps


def _middle(step: Sequence[tuple[int, int, float]]) -> float:
    return median(at for _, _, at in step)
