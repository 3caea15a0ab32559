"""Means over seeds and over texts: the intervals are those of SciPy, and hold as often as they say."""

import math

import numpy as np
import pytest
from scipy import stats

from forgetting_transformer.analysis import position_loss, statistics


def test_intervals_are_students_and_welchs() -> None:
    a, b = [3.01, 3.05, 2.98], [3.10, 3.12]
    interval = stats.t.interval(0.95, 2, loc=np.mean(a), scale=stats.sem(a))
    mean = statistics.mean(a)
    assert (mean.value - mean.half_width, mean.value + mean.half_width) == pytest.approx(interval)
    welch = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    apart = statistics.difference(a, b)
    assert (apart.value - apart.half_width, apart.value + apart.half_width) == pytest.approx((welch.low, welch.high))
    assert math.isnan(statistics.mean([3.0]).half_width) and math.isnan(statistics.difference([3.0], a).half_width)
    assert not statistics.difference([3.0], a).excludes_zero
    assert statistics.difference([3.0, 3.0], [2.0, 2.0]).excludes_zero


def test_clusters_widen_the_error_and_clusters_of_one_give_the_usual_one() -> None:
    draws = np.random.default_rng(0)
    folders = np.repeat(np.arange(5), 8)  # so few that a deviation without √(G / (G - 1)) is 11 % too small
    values = np.repeat(draws.normal(size=5), 8)  # rows of a folder are the same
    alone = statistics.mean_and_error(values)[1]
    assert statistics.clustered_error(values, np.arange(40)) == pytest.approx(alone, rel=0.05)
    of_folders = statistics.mean_and_error(values[::8])[1]
    assert statistics.clustered_error(values, folders) == pytest.approx(of_folders, rel=0.05)
    assert statistics.clustered_error(values[:8], folders[:8]) is None


def test_intervals_over_few_groups_of_texts_hold_as_often_as_they_say() -> None:
    """Of 95 % intervals about 95 % have the truth, 0, in them, also where a study has few groups."""
    draws = np.random.default_rng(0)
    groups, hits = np.arange(5).repeat(8), 0
    for _ in range(400):
        by_text_N = draws.normal(size=5)[groups] + 0.1 * draws.normal(size=groups.size)
        found = statistics.mean_over_texts(by_text_N, groups)
        hits += abs(found.value) < found.half_width
    assert 0.93 < hits / 400 < 0.985, "with 1.96 in place of Student's t these are 90 %"


def test_models_are_compared_with_errors_over_groups_of_texts_where_they_are_known() -> None:
    octaves = np.random.default_rng(0).normal(size=(8, 4)).repeat(4, axis=0)
    group = np.arange(8).repeat(4)

    def compared(groups: np.ndarray | None) -> list[dict]:
        losses = {"a": np.zeros_like(octaves), "b": octaves}
        results = [
            position_loss.Result(name, np.ones(64), {"data": "x"}, loss, group_N=groups)
            for name, loss in losses.items()
        ]
        return position_loss.compare(results)

    known, unknown = compared(group), compared(None)
    assert [row["loss"] for row in known] == [row["loss"] for row in unknown]
    assert all(1.5 < row["loss_error"] / other["loss_error"] < 2.5 for row, other in zip(known, unknown, strict=True))
