"""Several models against one, with the same seeds: intervals that hold for all of them at once (Dunnett), the noise of
all models together, and intervals over texts and seeds.
"""

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from forgetting_transformer.analysis.statistics import CONFIDENCE, Estimate, mean, mean_over_texts

#: Terms of sums in place of integrals.
_NODES = 200


@dataclass(frozen=True)
class Contrasts:
    """Models against a baseline, with seeds as blocks: loss = model + seed + noise.

    Attributes:
        against: model -> difference of means, with an interval that holds for all models together (Dunnett); without
            one for a model that lacks seeds of the baseline.
        deviation: of the noise, one for all models; NaN where there is nothing to estimate it from.
        freedom: its degrees of freedom, (models - 1) (seeds - 1); models with the same losses count once.
        seeds: how many every model has.
    """

    against: dict[str, Estimate]
    deviation: float
    freedom: int
    seeds: int


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
    return Contrasts(against, deviation, freedom, n_seeds)


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
