"""Quartiles of a few values."""

from collections.abc import Sequence
from statistics import quantiles


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and third quartile, between which the middle half of the values lies."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return low, high
