"""Standard errors of means and ratios, the paired t test, Holm's adjustment, and the spread about a median."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, quantiles, stdev

INTERVALS = 400  # of Simpson's rule, even


def mean_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of independent values, and its standard error: the sample's deviation (n - 1) over the root of n. NaN for one value."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def ratio_error(sums: Sequence[float], sizes: Sequence[float]) -> tuple[float, float]:
    """The ratio of the sum of `sums` to that of `sizes`, of independent clusters, and its standard error, robust to any dependence
    within clusters. NaN for one cluster.

    With one value a cluster (size 1) these are the mean and error of `mean_error`."""
    ratio, count = math.fsum(sums) / math.fsum(sizes), len(sums)
    residuals = math.fsum((value - ratio * size) ** 2 for value, size in zip(sums, sizes, strict=True))
    error = math.sqrt(count / (count - 1) * residuals) / math.fsum(sizes) if count > 1 else math.nan
    return ratio, error


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Between which the middle half of the values is."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return low, high


def median_error(values: Sequence[float]) -> float:
    """The standard error of the median of independent values, from their quartiles as if they were normal. NaN for one value."""
    low, high = quartiles(values)
    return median_deviations(len(values)) * (high - low) if len(values) > 1 else math.nan


def median_deviations(count: int) -> float:
    """The standard deviation of the median of `count` > 1 normal values, in units of the mean distance of their quartiles.

    With many values it is sqrt(pi / 2 / count) / 1.349. Few have quartiles closer together: those of Blom's approximation of the mean
    order statistics. The additions to `count` are for the median, which of an even number is a mean of two. 3 % low for 3 values and
    6 % for 2, else within 2 %."""
    ordered = [NormalDist().inv_cdf((i + 0.625) / (count + 0.25)) for i in range(count)]
    low, high = quartiles(ordered)
    return math.sqrt(math.pi / 2 / (count + (0.5 if count % 2 else 1.3))) / (high - low)


def paired_test(differences: Sequence[float]) -> tuple[float, float, float]:
    """The mean of paired differences, its standard error, and the two-sided p of Student's t test that the mean is 0.

    p is NaN for one pair, and 1 if all differences are 0."""
    mean, error = mean_error(differences)
    if error == 0:  # as no t has
        return mean, error, 1.0 if mean == 0 else 0.0
    return mean, error, t_tails(mean / error, len(differences) - 1)


def holm(ps: Sequence[float]) -> list[float]:
    """The p of several tests, adjusted by Holm: the smallest times the number of tests, the next times one fewer, and so on; none below
    a smaller one's, and at most 1. A NaN is no test and stays."""
    tests = sorted((p, place) for place, p in enumerate(ps) if not math.isnan(p))
    adjusted, least = list(ps), 0.0
    for rank, (p, place) in enumerate(tests):
        least = max(least, min(1.0, p * (len(tests) - rank)))
        adjusted[place] = least
    return adjusted


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
