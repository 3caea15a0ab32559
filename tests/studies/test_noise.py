"""Several models against one: the numbers are those of published tables and of SciPy."""

import math

import numpy as np
import pytest
from scipy import stats

from studies.engine import noise


@pytest.mark.parametrize(
    ("comparisons", "freedom", "published"),
    # C. W. Dunnett, New tables for multiple comparisons with a control, 1964: two-sided, 5 %.
    [
        (1, 10, 2.23), (2, 10, 2.57), (3, 10, 2.76), (9, 20, 2.95), (5, 20, 2.73), (2, math.inf, 2.21),
        (9, math.inf, 2.69),
    ],
)  # fmt: skip
def test_critical_values_are_those_of_dunnetts_tables(comparisons: int, freedom: float, published: float) -> None:
    assert noise.dunnett_quantile(comparisons, freedom) == pytest.approx(published, abs=0.0051)


def test_two_models_are_a_paired_t_test() -> None:
    one, other = [1.1, 1.5, 1.9, 1.2], [1.0, 1.3, 1.85, 1.25]
    found = noise.against_baseline({"a": dict(enumerate(other)), "b": dict(enumerate(one))}, "a")
    interval = stats.ttest_rel(one, other).confidence_interval(0.95)
    assert found.against["b"].value == pytest.approx((interval.high + interval.low) / 2)
    assert found.against["b"].half_width == pytest.approx((interval.high - interval.low) / 2, rel=1e-5)
    assert found.freedom == 3


def test_what_a_seed_does_to_all_models_cancels_and_the_noise_is_of_all_models() -> None:
    scatter = np.array([[0.01, -0.01, 0.0], [-0.02, 0.01, 0.01], [0.01, 0.0, -0.01]])
    scatter -= scatter.mean(0)  # so that the additive model leaves just this
    models, seeds = np.array([1.0, 1.2, 0.9]), np.array([0.0, 0.5, -0.5])
    losses = models[:, None] + seeds + scatter
    named = {name: dict(enumerate(row)) for name, row in zip("abc", losses.tolist(), strict=True)}
    found = noise.against_baseline(named, "a")
    assert found.deviation == pytest.approx(math.sqrt((scatter**2).sum() / 4)) and found.freedom == 4
    assert found.against["b"].value == pytest.approx(0.2) and found.against["c"].value == pytest.approx(-0.1)
    expected = noise.dunnett_quantile(2, 4) * found.deviation * math.sqrt(2 / 3)
    assert found.against["b"].half_width == pytest.approx(expected)


def test_a_model_without_all_seeds_has_a_difference_and_no_interval() -> None:
    losses = {"a": {0: 1.0, 1: 1.1}, "b": {0: 1.2, 1: 1.4}, "c": {1: 1.5}, "d": {0: 0.5, 1: math.nan}}
    found = noise.against_baseline(losses, "a")
    assert found.against["c"].value == pytest.approx(0.4) and math.isnan(found.against["c"].half_width)
    assert found.against["d"].value == pytest.approx(-0.5) and math.isnan(found.against["d"].half_width)
    assert found.freedom == 1 and math.isfinite(found.against["b"].half_width)
