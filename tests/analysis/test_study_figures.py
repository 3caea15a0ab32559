"""Figures of a study say what they show: a row per model and its interval, a curve per seed."""

import math

import pytest
from matplotlib.figure import Figure

from forgetting_transformer.analysis.plots import studies
from forgetting_transformer.analysis.statistics import Estimate


@pytest.fixture
def figures(monkeypatch):
    """The figures that were written."""
    written = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *rest: (written.append(figure), save(figure, *rest)))
    return written


def test_differences_are_ordered_and_those_without_an_interval_have_no_bar(figures, tmp_path):
    against = {"a": Estimate(0.1, 0.05), "b": Estimate(-0.02, 0.05), "c": Estimate(0.3, math.nan)}
    against["d"] = Estimate(math.nan, math.nan)
    studies.differences_to_baseline({"models": ("FoX", against)}, {"a": "Model A"}, tmp_path / "a.png")
    (figure,) = figures
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c", "Model A", "b"], "d has no number"
    bars = [container for container in axes.containers if container.has_xerr]
    assert len(axes.containers) == 3 and len(bars) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "interval excludes zero", "interval includes zero", "no interval (too few seeds)",
    ]  # fmt: skip
    assert (tmp_path / "a.png").stat().st_size > 0


def test_heads_have_a_curve_for_each_seed_and_pruning_only_where_there_is_some(figures, tmp_path):
    def seed(step, **more):
        sizes = {"shortest": 1.0, "median": 20.0 * step, "longest": 400.0 * step}
        return [{"tokens": 1e6 * n, **sizes, **{key: value / n for key, value in more.items()}} for n in (1, 2, 3)]

    models = {"FoX (Pro)": [seed(1, pruned=0.9), seed(2, pruned=0.8)], "Transformer (Pro)": [seed(3)]}
    studies.heads_over_training(models, tmp_path / "heads.png", 512)
    left, right = figures[0].axes
    # Shortest, median and longest of three seeds, and the training length.
    assert len(left.lines) == 3 * 3 + 1 and len(right.lines) == 2
    assert right.lines[0].get_ydata().tolist() == pytest.approx([90, 45, 30])
    assert "training length (512 tokens)" in [text.get_text() for text in figures[0].legends[0].get_texts()]
