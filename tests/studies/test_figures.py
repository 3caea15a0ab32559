"""Figures of a study say what they show: a row per model and its interval, a curve per seed."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from forgetting_transformer.analysis.plots import heatmaps
from forgetting_transformer.analysis.statistics import Estimate
from studies.engine import figures as studies

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]


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


@pytest.mark.parametrize("models, rows, columns", [(3, 2, 3), (9, 4, 7)])
def test_needles_of_models_are_beside_each_other_and_named_also_where_a_mode_is_missing(
    figures, tmp_path, models, rows, columns
):
    scores = {(mode, f"M{n}"): np.full((2, 4), 0.1 * n) for n in range(models) for mode in ("standard", "easy")}
    del scores["standard", "M1"], scores["easy", "M0"]
    heatmaps.score_grids(
        scores, [256, 512, 1024, 2048], [0.0, 1.0], tmp_path / "needle.png", title="Needle", label="words",
        limits=(0.0, 1.0), train_length=512, conditions=["one seed"],
    )  # fmt: skip
    *grids, bar = figures[0].axes
    assert len(grids) == rows * columns and bar.get_ylabel() == "words"
    shown = [axes for axes in grids if axes.axison]
    assert len(shown) == len(scores) == 2 * models - 2
    assert {axes.get_title() for axes in shown if axes.get_title()} == {f"M{n}" for n in range(models)}
    labels = [axes.get_ylabel() for axes in shown if axes.get_ylabel()]
    assert labels == ["standard mode\ndepth", "easy mode\ndepth"] * (rows // 2)
    assert [axes.get_xlabel() for axes in shown if axes.get_xlabel()] == ["context length (tokens)"]
    # Two lines, black and white, after the second of the four lengths.
    assert all([line.get_xdata()[0] for line in axes.lines] == [1.5, 1.5] for axes in shown)
    assert sorted(axes.images[0].get_array()[0, 0] for axes in shown)[:3] == pytest.approx([0.0, 0.1, 0.2])
