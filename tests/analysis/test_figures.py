"""Every figure draws the numbers it is given, and says of which runs and under which conditions."""

import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from forgetting_transformer.analysis import run_figures
from forgetting_transformer.analysis.evaluations import Evaluation, Number
from forgetting_transformer.analysis.plots import heatmaps, losses, sweeps, training
from forgetting_transformer.analysis.runs import read_run
from tests.analysis.conftest import (
    MakeRun,
    add_callbacks,
    is_picture,
    legend,
    title_and_note,
)


def panels(figure: Figure) -> dict[str, mpl.axes.Axes]:
    """Axes by what their vertical axis says, or their horizontal one."""
    return {axes.get_ylabel() or axes.get_xlabel(): axes for axes in figure.axes if axes.axison}


def test_smoothing_by_hand() -> None:
    loss = np.array([8.0, 6.0, 4.0, 6.0, 2.0, 4.0])
    # fraction 0.5: reaches 0, 1, 1, 2, 2, 3 to either side, cut at the end of the data.
    np.testing.assert_allclose(losses.smooth(loss, 0.5), [8, 6, 16 / 3, 22 / 5, 16 / 4, 16 / 4])
    np.testing.assert_allclose(losses.smooth(loss, 0.5, most=1), [8, 6, 16 / 3, 4, 4, 3])
    gaps = np.array([8.0, 6.0, math.nan, 6.0, math.inf, 3.0])
    np.testing.assert_allclose(losses.smooth(gaps, 0.5, most=1), [8, 7, 6, 6, 4.5, 3])
    assert np.isnan(losses.smooth(np.array([1.0, math.nan]), 0.1)[1]) and losses.smooth(np.array([]), 0.1).size == 0
    np.testing.assert_allclose(losses.prefix_perplexity(np.log([8.0, 2.0, 4.0])), [8, 4, 4])


def test_losses_against_tokens_of_one_run(make_run: MakeRun, drawn: list[Figure], tmp_path: Path) -> None:
    (run,) = run_figures.read_runs([make_run()])
    before = dict(mpl.rcParams)
    losses.loss_against_tokens([run], tmp_path / "new folder" / "loss.png", run_figures.conditions([run]))
    assert is_picture(tmp_path / "new folder" / "loss.png") and dict(mpl.rcParams) == before
    axes = drawn[0].axes[0]
    logged, smoothed, heldout = axes.lines
    np.testing.assert_array_equal(logged.get_xydata(), np.stack(run.train, axis=1))
    np.testing.assert_array_equal(smoothed.get_ydata(), losses.smooth(run.train.values, 0.25, most=5))
    np.testing.assert_allclose(heldout.get_xydata(), [[50_000, 4.4], [100_000, 4.3], [150_000, 4.2]])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("training tokens", "loss (nats per token)")
    low, high = axes.get_ylim()
    assert low < run.train.values.min() and 7 < high < 8
    assert legend(drawn[0]) == ["training loss, as logged", "training loss, smoothed", "held-out loss"]
    title, note = title_and_note(drawn[0])
    assert title == "Training and held-out loss of run (fox_pro)"
    for part in (
        "code", "35.7K parameters", "200K tokens of training", "2.05K held-out tokens", "sequences of 512 tokens",
        "4,096 tokens a step", "learning rate 0.003", "seed 0", "on CPU (x86_64)", "smoothed: mean over ± 25%",
    ):  # fmt: skip
        assert part in note


def test_losses_against_position(drawn: list[Figure], tmp_path: Path) -> None:
    """Seeds are a mean and a range, lengths may differ, and each training length has a line."""
    seeds = np.stack([np.full(1024, 3.0), np.full(1024, 5.0)])
    curves = {"fox": seeds, "llama": np.linspace(6, 4, 512)}
    losses.loss_against_position(curves, tmp_path / "x.png", {"fox": 256, "llama": 128}, conditions=["seed 0"])
    left, right = drawn[0].axes
    fox, llama, *lengths = left.lines
    assert np.allclose(fox.get_ydata(), 4.0) and (fox.get_xdata()[0], fox.get_xdata()[-1]) == (2, 1024)
    shade = left.collections[0].get_paths()[0].vertices[:, 1]
    assert (shade.min(), shade.max()) == (3.0, 5.0)
    position = llama.get_xdata()
    np.testing.assert_array_equal(llama.get_ydata(), losses.smooth(curves["llama"], 0.1)[position - 1])
    np.testing.assert_allclose(right.lines[1].get_ydata(), losses.prefix_perplexity(curves["llama"])[position - 1])
    assert [line.get_xdata()[0] for line in lengths] == [128, 256] and left.get_xscale() == right.get_yscale() == "log"
    assert legend(drawn[0]) == [
        "fox (2 seeds: mean and range)", "llama", "training length of llama (128 tokens)",
        "training length of fox (256 tokens)",
    ]  # fmt: skip
    assert title_and_note(drawn[0]) == ["Loss at every position of 2 models", "seed 0 · loss: mean over i ± 10%"]


@pytest.mark.slow
def test_a_panel_for_everything_that_a_run_logs(make_run: MakeRun, drawn: list[Figure], tmp_path: Path) -> None:
    folder = make_run()
    training.training_metrics([read_run(folder)], tmp_path / "x.png", ["seed 7"])
    found = panels(drawn[0])
    loss = found.pop("loss (nats per token)")
    assert loss.get_xlabel() == "wall time of training (minutes)"
    assert loss.lines[0].get_xdata()[-1] == pytest.approx(200 / 60)
    assert loss.lines[1].get_xydata()[0] == pytest.approx([50 / 60, 4.4])
    assert {name: axes.lines[0].get_ydata()[-1] for name, axes in found.items() if axes.lines} == pytest.approx({
        "learning rate": 0.001, "gradient norm\nbefore clipping": 16, "tokens per second": 50, "MFU (%)": 50,
        "peak memory (GB)": 3,
    })  # fmt: skip
    assert found["gradient norm\nbefore clipping"].get_yscale() == "log"
    assert "seed 7" in title_and_note(drawn[0])[1]
    training.norms(read_run(folder), tmp_path / "x.png")
    left, right = drawn[1].axes
    assert [line.get_ydata()[0] for line in left.lines] == pytest.approx([5.0, 2.0]), "a block's parameters together"
    assert [line.get_ydata()[0] for line in right.lines] == pytest.approx([0.5, 0.2])
    assert legend(drawn[1]) == ["layer 0", "lm_head"]


@pytest.mark.slow
def test_scores_over_training(make_run: MakeRun, drawn: list[Figure], tmp_path: Path) -> None:
    """A panel for each score, with intervals and what a guess would have; gates have no value after the first."""
    runs = [read_run(add_callbacks(make_run("a"))), read_run(add_callbacks(make_run("b"), 0.1))]
    training.scores_over_training(runs, tmp_path / "x.png", ["65 M parameters"])
    found = {axes.get_title("left"): axes for axes in drawn[0].axes if axes.axison}
    needle = [f"needle length {length} {metric}" for length in (512, 1024) for metric in ("loss", "accuracy")]
    # The paper's metric of a task, not all that lm_eval has.
    assert [*found] == ["arc easy acc", "wikitext word perplexity", "mine exact match,strict", *needle, "gates longest"]
    scores, chance, other, _ = found["arc easy acc"].lines
    assert scores.get_ydata() == pytest.approx([0.25, 0.35, 0.45]) and set(chance.get_ydata()) == {0.25}
    assert other.get_ydata() == pytest.approx([0.35, 0.45, 0.55]) and chance.get_linestyle() == ":"
    bars = found["arc easy acc"].containers[0].lines[2][0].get_segments()
    assert bars[0][:, 1].tolist() == pytest.approx([0.25 - 1.96 * 0.02, 0.25 + 1.96 * 0.02])
    assert set(found["needle length 512 loss"].lines[1].get_ydata()) == {5.5}, "without a needle"
    assert legend(drawn[0]) == ["a", "b"] and "65 M parameters · dotted: a guess" in title_and_note(drawn[0])[1]


def test_a_learning_rate_search_rings_the_best(drawn: list[Figure], tmp_path: Path) -> None:
    curve = {1e-3: [3.0, 3.2], 2e-3: [2.5, 2.7], 4e-3: [2.9, math.inf]}
    sweeps.loss_against_learning_rate({"": curve}, "held-out loss", tmp_path / "x.png", conditions=["a corpus"])
    axes = drawn[0].axes[0]
    assert axes.lines[0].get_xydata() == pytest.approx(np.array([[1e-3, 3.1], [2e-3, 2.6]]))
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "x"] == [4e-3]
    ring = axes.collections[-1]
    assert ring.get_offsets().tolist() == [[2e-3, 2.6]] and ring.get_linestyle() == [(0, None)], "not at an end"
    assert legend(drawn[0]) == ["best", "one seed", "diverged or ended early"]
    assert title_and_note(drawn[0])[1] == "a corpus · mean of 2 seeds, bars: ± one standard error"
    sweeps.loss_against_learning_rate({"a": curve, "b": {1e-3: [2.3]}}, "held-out loss", tmp_path / "x.png")
    assert drawn[1].axes[0].collections[-1].get_offsets().tolist() == [[1e-3, 2.3]]
    assert "dotted ring: lowest so far, at an end of the rates tried" in title_and_note(drawn[1])[1]


def test_a_grid_of_needles_shows_every_cell_and_the_training_length(drawn: list[Figure], tmp_path: Path) -> None:
    numbers = [
        Number("needle, easy", "words", 0.25 * depth + 0.001 * length, 0.1, 4, {"length": length, "depth": depth})
        for length in (100, 200, 400)
        for depth in (0.0, 1.0)
    ]
    needle = Evaluation("niah", "fox", numbers[:-1], {"train_length": 200}, {"mode": "easy"})
    heatmaps.draw_needles(needle, "words", tmp_path / "x.png")
    axes, bar = drawn[0].axes
    shown = axes.images[0].get_array()
    assert shown[1, 0] == pytest.approx(0.35) and shown.mask.tolist() == [[False] * 3, [False, False, True]]
    assert [text.get_text() for text in axes.texts] == ["0.1", "0.2", "0.4", "0.35", "0.45"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["100", "200", "400"]
    assert {line.get_xdata()[0] for line in axes.lines} == {1.5} and bar.get_ylabel() == "share of the answer's words"
    title, note = title_and_note(drawn[0])
    assert title == "fox, needle in a haystack, mode easy" and "4 prompts a cell · mean 0.300 over 20 prompts" in note
    assert "dashed line: training length, 200 tokens" in note
