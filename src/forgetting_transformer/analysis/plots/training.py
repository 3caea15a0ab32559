"""Figures of a run beside its losses: learning rate, norms, throughput, memory, time, and scores of tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis.plots.losses import (
    LOSS_LABEL,
    SMOOTHED,
    loss_limits,
    of_runs,
    run_styles,
    smooth_training,
)
from forgetting_transformer.analysis.plots.style import (
    ACCENT,
    GREY,
    CurveStyle,
    draw_line,
    draw_markers,
    line_handle,
    log_axis,
    marker_handle,
    panels,
    picture,
    plain_text,
    token_axis,
)
from forgetting_transformer.analysis.runs import Run, Series
from forgetting_transformer.analysis.scores_in_training import read_scores

#: Lines of weights outside the blocks, and markers where a run has logged once.
_DASHES, _POINTS = ("--", ":", "-."), "s^D"
#: Label, kind, name, factor to the unit of the label, and whether the axis may be logarithmic.
_PANELS = (
    ("learning rate", names.TRAIN, names.LEARNING_RATE, 1.0, False),
    ("gradient norm\nbefore clipping", names.TRAIN, names.GRADIENT_NORM, 1.0, True),
    ("tokens per second", names.THROUGHPUT, names.per_second("token_count", "total", "recent"), 1.0, False),
    ("MFU (%)", names.THROUGHPUT, names.mfu("total", "recent"), 100.0, False),
    # PyTorch's tensors on a GPU, the whole process on a CPU.
    ("peak memory (GB)", names.THROUGHPUT, names.PEAK_MEMORY, 1e-9, False),
)


def has_metrics(run: Run) -> bool:
    """Whether a run has logged anything that `training_metrics` draws."""
    return any(run.series(kind, name).tokens.size for _, kind, name, *_ in _PANELS)


def training_metrics(runs: Sequence[Run], path: Path, conditions: Sequence[str] = ()) -> None:
    """Draws what a run logs beside its losses: each panel only where a run has logged it.

    Loss is drawn against wall time; learning rate, gradient norm, throughput, MFU and memory against training tokens.
    At least one run `has_metrics`.
    """
    curves: list[tuple[str, list[Series], bool]] = [
        (label, [run.series(kind, name).scaled(factor) for run in runs], logarithmic)
        for label, kind, name, factor, logarithmic in _PANELS
    ]
    curves = [curve for curve in curves if any(series.tokens.size for series in curve[1])]
    timed = [run for run in runs if run.train.values.size and run.hours.tokens.size]
    count = bool(timed) + len(curves)
    styles = dict(zip((run.name for run in runs), run_styles(runs), strict=True))
    with panels(path, f"Training of {of_runs(runs)}", count, (3.1, 2.3)) as drawn:
        free = iter(drawn.axes.flatten())
        drawn.handles += [line_handle(style, name) for name, style in styles.items()]
        if timed:
            _loss_against_hours(next(free), timed, styles)
            if any(run.heldout.values.size for run in timed):
                drawn.handles.append(marker_handle("o", "held-out loss", GREY, markersize=5))
        for label, several, logarithmic in curves:
            axes = next(free)
            for series, style in zip(several, styles.values(), strict=True):
                draw_line(axes, style, *series)
            values = np.concatenate([one.values for one in several])
            positive = values[np.isfinite(values) & (values > 0)]
            if logarithmic and positive.size and positive.max() > 10 * positive.min():
                log_axis(axes)
            elif positive.size:
                axes.set_ylim(0, 1.06 * positive.max())
            axes.set_ylabel(label)
            token_axis(axes)
        drawn.notes += [*conditions, *([SMOOTHED] if timed else [])]


def _loss_against_hours(axes: Axes, runs: Sequence[Run], styles: Mapping[str, CurveStyle]) -> None:
    """Draws losses over wall time, in a unit that suits the longest run."""
    longest = max(run.hours.values[-1] for run in runs)
    unit, scale = ("hours", 1) if longest >= 2 else ("minutes", 60) if longest >= 1 / 30 else ("seconds", 3600)
    for run in runs:
        style, hours = styles[run.name], run.hours
        draw_line(axes, style, scale * np.interp(run.train.tokens, *hours), smooth_training(run.train.values))
        draw_markers(axes, style, scale * np.interp(run.heldout.tokens, *hours), run.heldout.values)
    axes.set_xlim(left=0)
    axes.set_ylim(loss_limits(runs))
    axes.set(xlabel=f"wall time of training ({unit})", ylabel=LOSS_LABEL)


def norms(run: Run, path: Path, conditions: Sequence[str] = ()) -> None:
    """Draws the norms of weights and of gradients of every block against training tokens, on logarithmic axes.

    Blocks go from dark to light with their depth; weights outside the blocks (embedding, last norm, head) are dashed.
    """
    weights, gradients = run.norms(names.PARAMETER_NORM), run.norms(names.GRADIENT_NORM_OF_PARAMETER)
    layers = [part for part in weights if part.startswith("layer ")]
    others = [part for part in weights if part not in layers]
    colours = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(layers)))
    styles = {part: CurveStyle(colour, "-", "") for part, colour in zip(layers, colours, strict=True)}
    styles |= {part: CurveStyle(ACCENT, _DASHES[i % 3], _POINTS[i % 3]) for i, part in enumerate(others)}
    with picture(path, f"Norms of {run.name}, block by block", (7.6, 2.9), columns=2) as drawn:
        for axes, of_blocks, label in zip(
            drawn.axes[0],
            (weights, gradients),
            ("L2 norm of weights", "L2 norm of gradients, after clipping"),
            strict=True,
        ):
            for part, series in of_blocks.items():
                draw_line(axes, styles[part], *series)
            log_axis(axes)
            axes.set_ylabel(label)
            token_axis(axes)
        shown = [layers[i] for i in np.unique(np.linspace(0, len(layers) - 1, min(8, len(layers))).astype(int))]
        logged_once = any(series.tokens.size == 1 for series in weights.values())
        drawn.handles += [line_handle(styles[part], part, logged_once) for part in (*shown, *others)]
        drawn.notes += [*conditions, "of each block: all its parameters together"]


def scores_over_training(runs: Sequence[Run], path: Path, conditions: Sequence[str] = ()) -> None:
    """Draws every score against training tokens, a panel each, with 95 % intervals where standard errors were logged.

    Dotted lines are what a model without the skill would reach. At least one run has a score.
    """
    scores = [read_scores(run) for run in runs]
    found = list(dict.fromkeys(name for of_run in scores for name in of_run))
    with panels(path, f"Evaluations during training of {of_runs(runs)}", len(found), (3.1, 2.2)) as drawn:
        styles = run_styles(runs)
        for axes, name in zip(drawn.axes.flat, found, strict=False):
            for of_run, style in zip(scores, styles, strict=True):
                if score := of_run.get(name):
                    draw_line(axes, style, *score.series, marker=style.marker, markersize=4.5, markeredgecolor="white")
                    bars = {"fmt": "none", "ecolor": style.colour, "elinewidth": 0.8, "alpha": 0.6}
                    axes.errorbar(*score.series, 1.96 * score.errors, **bars)
                    axes.plot(*score.baseline, color=style.colour, linestyle=":", linewidth=1.2)
            axes.set_title(plain_text(name, 34), loc="left")
            token_axis(axes)
        drawn.handles += [line_handle(style, run.name, True) for style, run in zip(styles, runs, strict=True)]
        every = [score for of_run in scores for score in of_run.values()]
        drawn.notes += conditions
        if any(score.baseline.tokens.size for score in every):
            drawn.notes.append("dotted: a guess, or the answer's loss with no needle in the text")
        if any(np.isfinite(score.errors).any() for score in every):
            drawn.notes.append("bars: 95 % intervals over examples")
