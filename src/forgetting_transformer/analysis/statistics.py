"""Means over seeds and their intervals.

Seeds differ in initial weights and not in data, so the intervals cover other initial weights, not another corpus.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A value and the half-width of its 95 % interval, NaN if unknown."""

    value: float
    half_width: float = math.nan

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes zero; False without an interval."""
        return abs(self.value) > self.half_width

    def scaled(self, factor: float) -> "Estimate":
        return Estimate(factor * self.value, factor * self.half_width)

    def text(self, sign: str = "", digits: int = 4) -> str:
        """Text such as "1.2345 ± 0.0123", without an interval if unknown; `sign` "+" shows a plus sign."""
        text = f"{self.value:{sign}.{digits}f}"
        return text if math.isnan(self.half_width) else f"{text} ± {self.half_width:.{digits}f}"


def mean_and_error(values: np.ndarray, clusters: np.ndarray | None = None) -> tuple[float, float | None]:
    """The mean of values `(n,)` and its standard error, None for a single value or cluster.

    Args:
        clusters: of each value; those of one cluster are alike (`clustered_error`). None: values are independent.
    """
    value, n = float(values.mean()), len(values)
    if clusters is not None:
        return value, clustered_error(values, clusters)
    return value, float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else None


def clustered_error(values: np.ndarray, clusters: np.ndarray, draws: int = 4000) -> float | None:
    """The standard error of the mean of values `(n,)` of which those of one cluster are alike; None for one cluster.

    Bootstrap: whole clusters are drawn with replacement, always the same ones for the same clusters. The deviation of
    the draws is too small by √((G - 1) / G) for G clusters, which is made up for.
    """
    labels, inverse = np.unique(clusters, return_inverse=True)
    if len(labels) < 2:
        return None
    sums, counts = np.bincount(inverse, weights=values), np.bincount(inverse)
    drawn = np.random.default_rng(0).integers(0, len(labels), (draws, len(labels)))
    deviation = (sums[drawn].sum(1) / counts[drawn].sum(1)).std(ddof=1)
    return float(deviation * math.sqrt(len(labels) / (len(labels) - 1)))


def mean(losses: Sequence[float]) -> Estimate:
    """The mean over seeds with Student's t interval; `losses` has one loss per seed, at least one."""
    values = np.asarray(losses, dtype=np.float64)
    if values.size < 2 or not np.isfinite(values).all():
        return Estimate(float(values.mean()))
    return Estimate(float(values.mean()), quantile(values.size - 1) * math.sqrt(values.var(ddof=1) / values.size))


def difference(losses: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Mean of `losses` minus mean of `baseline`, with Welch's t interval: spreads and seed counts may differ."""
    one, other = np.asarray(losses, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    value = float(one.mean()) - float(other.mean())
    if min(one.size, other.size) < 2 or not math.isfinite(value):
        return Estimate(value)
    if one.var() == other.var() == 0:
        return Estimate(value, 0.0)
    from scipy import stats  # a second to import, and only needed with several seeds

    interval = stats.ttest_ind(one, other, equal_var=False).confidence_interval(CONFIDENCE)
    return Estimate(value, float(interval.high - interval.low) / 2)


def mean_over_texts(values_N: np.ndarray, group_N: np.ndarray | None = None) -> Estimate:
    """The mean over texts, or questions, with Student's t interval; none for a single text or group.

    Args:
        values_N: a value of each text.
        group_N: the group that each is from. Whole groups are drawn (`clustered_error`), and there are as many degrees
            of freedom as groups less one. Without groups, texts count as independent. Where groups differ much in
            size the interval is somewhat too narrow.
    """
    value, error = mean_and_error(values_N, group_N)
    groups = len(values_N) if group_N is None else len(np.unique(group_N))
    return Estimate(value, math.nan if error is None else quantile(groups - 1) * error)


def quantile(degrees_of_freedom: float) -> float:
    """Student's t that a two-sided 95 % interval takes."""
    from scipy import stats

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees_of_freedom))
