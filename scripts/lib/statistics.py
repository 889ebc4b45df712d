"""Standard errors of means, and the paired t test."""

import math
from collections.abc import Sequence

INTERVALS = 400  # of Simpson's rule, even


def mean_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of independent values, and its standard error: the sample's deviation (n - 1) over the root of n. NaN for one value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def paired_test(differences: Sequence[float]) -> tuple[float, float, float]:
    """The mean of paired differences, its standard error, and the two-sided p of Student's t test that the mean is 0.

    p is NaN for one pair, and 1 if all differences are 0."""
    mean, error = mean_error(differences)
    if error == 0:  # as no t has
        return mean, error, 1.0 if mean == 0 else 0.0
    return mean, error, t_tails(mean / error, len(differences) - 1)


def t_tails(t: float, freedom: int) -> float:
    """The probability that Student's t with `freedom` degrees is at least |t| away from 0.

    With x = sqrt(freedom) * tan(a), the density of x becomes proportional to cos(a) ** (freedom - 1), which Simpson's rule sums.
    """
    if math.isnan(t):
        return math.nan

    def area(low: float) -> float:
        step = (math.pi / 2 - low) / INTERVALS
        weights = (1 if i in (0, INTERVALS) else 4 if i % 2 else 2 for i in range(INTERVALS + 1))
        return step / 3 * sum(w * math.cos(low + i * step) ** (freedom - 1) for i, w in enumerate(weights))

    return area(math.atan(abs(t) / math.sqrt(freedom))) / area(0.0)
