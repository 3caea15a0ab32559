"""Means over seeds and how far to trust them.

Seeds differ in initial weights and not in data, so the intervals say what other initial weights would change, not
what another corpus would.
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
#: Of sums in place of integrals.
_NODES = 200


class Estimate(NamedTuple):
    """A value and the half-width of its 95 % interval; the half-width is NaN where one seed tells nothing of it."""

    value: float
    half_width: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval leaves zero out; False where there is none."""
        return abs(self.value) > self.half_width

    def text(self, sign: str = "", digits: int = 4) -> str:
        """As in "1.2345 ± 0.0123", without an interval where there is none; `sign` "+" shows a plus sign."""
        text = f"{self.value:{sign}.{digits}f}"
        return text if math.isnan(self.half_width) else f"{text} ± {self.half_width:.{digits}f}"


def mean_and_error(values: np.ndarray) -> tuple[float, float | None]:
    """The mean of independent values `(n,)` and its standard error, None for a single value."""
    n = len(values)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else None


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
        return Estimate(float(values.mean()), math.nan)
    return Estimate(float(values.mean()), quantile(values.size - 1) * math.sqrt(values.var(ddof=1) / values.size))


def difference(losses: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Mean of `losses` minus mean of `baseline`, with Welch's t interval: spreads and seed counts may differ."""
    one, other = np.asarray(losses, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    value = float(one.mean()) - float(other.mean())
    if min(one.size, other.size) < 2 or not math.isfinite(value):
        return Estimate(value, math.nan)
    shares = np.array([one.var(ddof=1) / one.size, other.var(ddof=1) / other.size])
    if shares.sum() == 0:
        return Estimate(value, 0.0)
    # Welch and Satterthwaite's degrees of freedom.
    freedom = shares.sum() ** 2 / (shares**2 / np.array([one.size - 1, other.size - 1])).sum()
    return Estimate(value, quantile(freedom) * math.sqrt(shares.sum()))


def mean_over_texts(values_N: np.ndarray, group_N: np.ndarray | None = None) -> Estimate:
    """The mean over texts, or questions, with Student's t interval; none for a single text or group.

    Args:
        values_N: a value of each text.
        group_N: the group that each is from. Whole groups are drawn (`clustered_error`), and there are as many degrees
            of freedom as groups less one. Without groups, texts count as independent. Where groups differ much in
            size the interval is somewhat too narrow.
    """
    if group_N is None:
        return mean(values_N.tolist())
    value, error = float(values_N.mean()), clustered_error(values_N, group_N)
    return Estimate(value, math.nan if error is None else quantile(len(np.unique(group_N)) - 1) * error)


def with_texts_and_seeds(values_SN: np.ndarray, group_N: np.ndarray | None = None) -> tuple[Estimate, float, float]:
    """The mean of something measured with some seeds on some texts, and its 95 % interval with its two parts.

    Two parts add up as variances: other texts would change the mean of the seeds (`mean_over_texts`), and other seeds
    would change the mean over the texts (Student's t). Without a second seed or text there is no interval.

    Args:
        values_SN: a value of each seed on each text.
        group_N: the group of texts that each is from.

    Returns:
        The mean with its interval; the half-widths that texts alone and seeds alone would give, NaN where unknown.
    """
    of_texts = mean_over_texts(values_SN.mean(0), group_N).half_width
    value, of_seeds = mean(values_SN.mean(1).tolist())
    return Estimate(value, math.hypot(of_texts, of_seeds)), of_texts, of_seeds


def quantile(degrees_of_freedom: float) -> float:
    """Student's t that a two-sided 95 % interval takes."""
    from scipy import stats  # a second to import, and only needed with several seeds

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees_of_freedom))


# Several models against one -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contrasts:
    """Models against a baseline, with seeds as blocks: loss = model + seed + noise.

    Attributes:
        against: model -> difference of means, with an interval that holds for all models together (Dunnett); without
            one for a model that lacks seeds of the baseline.
        deviation: of the noise, one for all models; NaN where there is nothing to estimate it from.
        freedom: its degrees of freedom, (models - 1) (seeds - 1); models with the same losses count once.
        seeds: how many every model has.
        estimated_from: the models that have all of these seeds, the baseline among them.
    """

    against: dict[str, Estimate]
    deviation: float
    freedom: int
    seeds: int
    estimated_from: tuple[str, ...]

    def detectable(self, power: float = 0.8) -> float:
        """Difference to the baseline that an interval excludes zero for, with this probability; NaN if unknown."""
        if not self.freedom or not self.deviation > 0:
            return math.nan
        return detectable(self.deviation, self.seeds, self.freedom, len(self.estimated_from) - 1, power)


def against_baseline(
    losses: Mapping[str, Mapping[int, float]], baseline: str, compared: Collection[str] | None = None
) -> Contrasts:
    """Compare models with a baseline by what they reach with the same seeds.

    The model is a two-way layout without interaction: what a seed does to all models cancels in differences, and the
    noise is estimated from the residuals of all models together. The intervals cover all differences at once with
    95 % probability (C. W. Dunnett, 1955). Models without all of the baseline's seeds do not take part in the estimate.

    Args:
        losses: model -> seed -> loss.
        compared: the models that are compared with the baseline, for which the intervals hold at once; None: all. The
            noise is estimated from all models.
    """
    seeds = sorted(seed for seed, loss in losses[baseline].items() if math.isfinite(loss))
    table = {
        name: [of[seed] for seed in seeds]
        for name, of in losses.items()
        if all(math.isfinite(of.get(seed, math.nan)) for seed in seeds)
    }
    loss_MS = np.array([table[name] for name in table], dtype=np.float64)
    # Models with the same losses in all bits say nothing new about the noise.
    if 1 < len(distinct_MS := np.unique(loss_MS, axis=0)) < len(loss_MS):
        loss_MS = distinct_MS
    n_models, n_seeds = loss_MS.shape
    freedom = max(0, (n_models - 1) * (n_seeds - 1))
    deviation = half_width = math.nan
    if freedom:
        residual_MS = loss_MS - loss_MS.mean(1, keepdims=True) - loss_MS.mean(0, keepdims=True) + loss_MS.mean()
        deviation = math.sqrt(float((residual_MS**2).sum()) / freedom)
        asked = len(table.keys() - {baseline} if compared is None else table.keys() & set(compared))
        half_width = dunnett_quantile(max(1, asked), freedom) * deviation * math.sqrt(2 / n_seeds)
    against = {}
    for name, of in losses.items():
        if name == baseline or (compared is not None and name not in compared):
            continue
        common = [seed for seed in seeds if math.isfinite(of.get(seed, math.nan))]
        apart = float(np.mean([of[seed] - losses[baseline][seed] for seed in common])) if common else math.nan
        against[name] = Estimate(apart, half_width if name in table else math.nan)
    return Contrasts(against, deviation, freedom, n_seeds, tuple(table))


def equal_noise(losses: Sequence[Sequence[float]]) -> float:
    """The probability that deviations of models differ so much by chance (M. S. Bartlett, 1937); NaN if unknown.

    A rough check: what seeds do to all models alike is in the deviations too.

    Args:
        losses: of each model, by seed.
    """
    from scipy import stats

    several = [of for of in losses if len(of) > 1 and len(set(of)) > 1]
    return float(stats.bartlett(*several).pvalue) if len(several) > 1 else math.nan


@functools.cache
def dunnett_quantile(comparisons: int, freedom: float) -> float:
    """Critical value of two-sided 95 % intervals for means of equal size against one more, which cover all at once.

    Differences share the baseline's mean Z_0 and the deviation s, so that given both they are independent:
    P(all |Z_i - Z_0| <= sqrt(2) c s) = E[(F(Z_0 + sqrt(2) c s) - F(Z_0 - sqrt(2) c s))^comparisons], F being the normal
    distribution. Both expectations are sums over quantiles.
    """
    from scipy import optimize, stats

    nodes, node_weights = np.polynomial.legendre.leggauss(_NODES)
    z, z_weights = 8 * nodes, 8 * node_weights * stats.norm.pdf(8 * nodes)
    s, s_weights = _deviations(freedom)

    def coverage(c: float) -> float:
        reach = math.sqrt(2) * c * s[:, None]
        inside = stats.norm.cdf(z + reach) - stats.norm.cdf(z - reach)
        return float(s_weights @ (inside**comparisons) @ z_weights)

    return float(optimize.brentq(lambda c: coverage(c) - CONFIDENCE, 0.5, 1000))


def _deviations(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Estimates of a standard deviation of one, and their weights: nodes over the quantiles of their distribution."""
    from scipy import stats

    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    if not math.isfinite(freedom):
        return np.ones_like(nodes), weights / 2
    return np.sqrt(stats.chi2.ppf((nodes + 1) / 2, freedom) / freedom), weights / 2


def detectable(deviation: float, seeds: int, freedom: float, comparisons: int = 1, power: float = 0.8) -> float:
    """Difference of two means of `seeds` runs that is found with probability `power`.

    Found means that the 95 % interval of `comparisons` models against one baseline excludes zero.

    Args:
        deviation: of a single run.
        freedom: degrees of freedom of that deviation.
    """
    from scipy import optimize, stats

    critical = dunnett_quantile(comparisons, freedom)

    s, weights = _deviations(freedom)

    def found(errors: float) -> float:
        """Probability for a difference of so many standard errors."""
        return float(weights @ (stats.norm.sf(critical * s - errors) + stats.norm.cdf(-critical * s - errors)))

    needed = optimize.brentq(lambda errors: found(errors) - power, 0, 20 * critical)
    return needed * deviation * math.sqrt(2 / seeds)
