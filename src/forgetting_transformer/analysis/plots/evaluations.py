"""The figure of scores over training: what the callbacks lm_eval, needle and gate_statistics logged."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from forgetting_transformer.analysis.plots.losses import run_styles
from forgetting_transformer.analysis.plots.style import (
    GREY,
    CurveStyle,
    curve_styles,
    line_handle,
    log_axis,
    picture,
    plain_text,
    token_axis,
)
from forgetting_transformer.analysis.runs import Run
from forgetting_transformer.analysis.scores_in_training import Score, labels, read_scores

#: A score, its curve's name in the legend and its style.
_Curve = tuple[Score, str, CurveStyle]
#: Half of a 95 % interval, in standard errors.
_INTERVAL = 1.96
_TITLE_CHARACTERS = 34


def has_scores(run: Run) -> bool:
    """Whether `scores_over_training` has something to draw of a run."""
    return bool(read_scores(run))


def scores_over_training(runs: Sequence[Run], path: Path, conditions: Sequence[str] = ()) -> None:
    """Draws every score against training tokens, with 95 % intervals where standard errors were logged.

    Of one run, scores of one unit share a panel, a curve for each task. Of several, a task has its panel, with a curve
    for each run. A test with other settings or texts has a curve, or a panel, of its own. Dotted lines are what a model
    without the skill would reach.

    Args:
        path: where to write; the suffix chooses the format.
        conditions: what the runs have in common, for the foot of the figure.

    Raises:
        ValueError: no run has logged a score.
    """
    panels: dict[tuple[str, ...], list[_Curve]] = {}
    if len(runs) == 1:
        scores = read_scores(runs[0])
        found = labels(scores)
        tasks = list(dict.fromkeys(found))
        # Dots are for the baselines. Where colours come again, lines are dashed.
        seen: list[CurveStyle] = []
        for style in curve_styles(tasks):
            seen.append(replace(style, line="-" if replace(style, line="-") not in seen else "--"))
        styles = dict(zip(tasks, seen, strict=True))
        for score, name in zip(scores, found, strict=True):
            panels.setdefault((score.unit,), []).append((score, name, styles[name]))
    else:
        owned = [
            (score, run.name, style)
            for run, style in zip(runs, run_styles(runs), strict=True)
            for score in read_scores(run)
        ]
        for curve, name in zip(owned, labels([score for score, _, _ in owned]), strict=True):
            panels.setdefault((curve[0].unit, name), []).append(curve)
    if not panels:
        names = ", ".join(run.name for run in runs) or "no run"
        raise ValueError(f"Nothing to plot: {names} has logged no scores of evaluations yet.")
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    title = f"Evaluations during training of {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}"
    with picture(path, title, (max(5.2, 3.3 * columns), 2.5 * rows), rows, columns) as drawn:
        free = iter(drawn.axes.flatten())
        for (unit, *task), curves in panels.items():
            axes = next(free)
            _panel(axes, unit, curves)
            if task:
                axes.set_title(plain_text(task[0], _TITLE_CHARACTERS), fontsize=8.5)
        for axes in free:
            axes.set_axis_off()
        shown = [curve for curves in panels.values() for curve in curves]
        drawn.handles += [
            line_handle(style, label, with_marker=True)
            for label, style in {label: style for _, label, style in shown}.items()
        ]
        baselines = dict.fromkeys(score.baseline_name for score, _, _ in shown if score.baseline.tokens.size)
        if baselines:
            drawn.handles.append(
                Line2D([], [], color=GREY, linestyle=":", linewidth=1.2, label=", or ".join(baselines))
            )
        bars = any(np.isfinite(score.errors).any() for score, _, _ in shown)
        drawn.notes += [*conditions, *(["bars: 95 % intervals over examples"] if bars else [])]


def _panel(axes: Axes, unit: str, curves: Sequence[_Curve]) -> None:
    levels: dict[tuple[float, ...], int] = {}
    for score, _, _ in curves:
        levels[tuple(score.baseline.values)] = levels.get(tuple(score.baseline.values), 0) + 1
    for number, (score, _, style) in enumerate(curves):
        (tokens, values), errors = score.series, _INTERVAL * score.errors
        axes.plot(
            tokens, values, color=style.colour, linestyle=style.line, linewidth=1.3, zorder=3 + number,
            marker=style.marker, markersize=4.5, markeredgecolor="white", markeredgewidth=0.6,
        )  # fmt: skip
        known = np.isfinite(errors)
        if known.any():
            bars: dict[str, Any] = {"fmt": "none", "ecolor": style.colour, "elinewidth": 0.8, "alpha": 0.6, "zorder": 2}
            axes.errorbar(tokens[known], values[known], errors[known], **bars)
        if score.baseline.tokens.size:
            # One that several curves share is nobody's. One of a lone curve is seen on it, where they meet.
            own = len(curves) > 1 and levels[tuple(score.baseline.values)] == 1
            colour = style.colour if own else GREY
            place = score.baseline.tokens
            spread = place if place.size > 1 else np.array([0.0, 2.0 * place[0]])
            level = np.broadcast_to(score.baseline.values, spread.shape)
            axes.plot(spread, level, color=colour, linestyle=":", linewidth=1.2, zorder=30)
    seen = np.concatenate([score.series.values for score, _, _ in curves])
    seen = seen[np.isfinite(seen)]
    if unit.endswith("(%)"):
        top = max([*seen, *(value for score, _, _ in curves for value in score.baseline.values), 8.0])
        axes.set_ylim(-0.03 * min(100.0, 1.25 * top), min(103.0, 1.25 * top))
    elif seen.size and seen.min() > 0 and seen.max() > 10 * seen.min():
        log_axis(axes)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylabel(unit)
    token_axis(axes)
