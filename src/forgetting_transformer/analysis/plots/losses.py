"""Figures of losses: against training tokens, against the position in the context, and differences of two models."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.comparisons import Model
from forgetting_transformer.analysis.plots.style import (
    GREY,
    CurveStyle,
    Picture,
    curve_styles,
    draw_line,
    draw_markers,
    draw_mean,
    line_handle,
    log_axis,
    marker_handle,
    picture,
    reference_line,
    token_axis,
)
from forgetting_transformer.analysis.runs import Run

#: Reach of the average of a training loss: this part of the tokens before, to either side, up to a part of all logs.
_SMOOTHING, _MOST_OF_LOGS = 0.25, 1 / 40
SMOOTHED = (
    f"training loss smoothed: mean over ± {_SMOOTHING:.0%} of the tokens so far, "
    f"at most ± {_MOST_OF_LOGS:.1%} of the run"
)
_READING_ORDER = (
    "training losses rise and fall with the texts of each batch, alike in runs that read in the same order: "
    "compare held-out losses"
)
_POSITION_SMOOTHING = 0.1
#: Points of a curve over positions: one for each of 65,536 positions would fill the gaps of dashes.
_POINTS = 400
LOSS_LABEL = "loss (nats per token)"


def smooth(loss: np.ndarray, fraction: float = _POSITION_SMOOTHING, most: int | None = None) -> np.ndarray:
    """Moving average with a growing window: value p (from 1) is averaged over p - fraction * p ... p + fraction * p.

    Losses fall steeply first and slowly later, both over training and over a sequence. The first values therefore stay
    as they are, and late ones, where the fall is small against the noise, are averaged over many. The window is centred
    except at the end, where it stops with the data: one that shrank there would show the noise of the last values as a
    trend. Values that are not finite are left out, and the average of none is NaN.

    Args:
        loss: (n,).
        fraction: how far a window reaches to either side, as a part of the position.
        most: the most values that a window reaches to either side.

    Returns:
        (n,).
    """
    index = np.arange(loss.size)
    reach = np.floor(fraction * (index + 1)).astype(np.int64)
    if most is not None:
        reach = np.minimum(reach, most)
    first, last = index - reach, np.minimum(index + reach, loss.size - 1)
    finite = np.isfinite(loss)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, loss, 0.0), dtype=np.float64)])
    count = np.concatenate([[0], np.cumsum(finite)])
    number = count[last + 1] - count[first]
    mean = np.full(loss.shape, np.nan)
    return np.divide(total[last + 1] - total[first], number, out=mean, where=number > 0)


def smooth_training(loss: np.ndarray) -> np.ndarray:
    """A training loss smoothed by `SMOOTHED`: quiet enough to compare runs, and still with the bends of the curve."""
    return smooth(loss, _SMOOTHING, most=math.ceil(loss.size * _MOST_OF_LOGS))


def prefix_perplexity(loss_T: np.ndarray) -> np.ndarray:
    """Perplexity of the first i tokens, for every i from 1 on: exp of the mean loss up to there."""
    return np.exp(np.cumsum(loss_T, dtype=np.float64) / np.arange(1, loss_T.size + 1))


def of_runs(runs: Sequence[Run]) -> str:
    """The run, or the number of runs, in the title of a figure."""
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def run_styles(runs: Sequence[Run]) -> list[CurveStyle]:
    """A style for each run, that of its model where no run before it has it."""
    return curve_styles([run.setting("model", "label") or run.name for run in runs])


def loss_against_tokens(runs: Sequence[Run], path: Path, conditions: Sequence[str] = ()) -> None:
    """Draws the training loss (as logged, light; smoothed, strong) and held-out loss (markers) of each run.

    The loss axis leaves out the highest 1 % of the logged training losses and losses above a run's first one. So
    neither the first steps nor a diverging run flatten the rest.

    Raises:
        AnalysisError: no run has a finite loss.
    """
    if not any(run.has_loss for run in runs):
        raise AnalysisError(f"nothing to plot: no finite loss ({', '.join(run.name for run in runs)})")
    styles = run_styles(runs)
    with picture(path, f"Training and held-out loss of {of_runs(runs)}", (6.4, 3.8)) as drawn:
        axes = drawn.axes[0, 0]
        for run, style in zip(runs, styles, strict=True):
            draw_line(axes, style, *run.train, alpha=0.25, linewidth=0.8, linestyle="-")
        _draw_losses(drawn, [Model(run.name, (run,)) for run in runs], styles)
        # The legend has the colours of a single run.
        key = styles[0] if len(runs) == 1 else CurveStyle(GREY, "-", "o")
        names = [line_handle(style, run.name, True) for style, run in zip(styles, runs, strict=True)]
        drawn.handles += names if len(runs) > 1 else []
        if any(run.train.values.size for run in runs):
            logged: dict[str, Any] = {"alpha": 0.35, "linewidth": 0.8, "label": "training loss, as logged"}
            drawn.handles += [Line2D([], [], color=key.colour, **logged), line_handle(key, "training loss, smoothed")]
        if any(run.heldout.values.size for run in runs):
            drawn.handles.append(marker_handle(key.marker, "held-out loss", key.colour, markersize=5))
        drawn.notes += [*conditions, SMOOTHED, *([_READING_ORDER] if len(runs) > 1 else [])]


def loss_of_models(
    models: Sequence[Model],
    path: Path,
    tokens: float | None = None,
    flops: float | None = None,
    conditions: Sequence[str] = (),
) -> None:
    """Draws each model's loss against training tokens (left) and training FLOPs (right): lines are training loss,
    smoothed and averaged over seeds, the shade from the lowest seed to the highest, markers held-out loss.

    The loss axis leaves out the first quarter of the tokens, so that differences can be seen.

    Args:
        tokens, flops: where the models are compared, drawn as vertical lines.
    """
    columns = 2 if all(np.isfinite(model.flops_per_token) for model in models) else 1
    title = f"Loss of {models[0].name if len(models) == 1 else f'{len(models)} models'} over training"
    styles = curve_styles([model.name for model in models])
    with picture(path, title, (2.8 + 2.8 * columns, 3.7), columns=columns, sharey=True) as drawn:
        _draw_losses(drawn, models, styles, begin=0.25)
        for style, model in zip(styles, models, strict=True):
            seeds = f"{len(model.runs)} seed{'s' * (len(model.runs) > 1)}"
            drawn.handles.append(line_handle(style, f"{model.name} ({seeds})", with_marker=True))
        several = any(len(model.runs) > 1 for model in models)
        mean_of = ", mean of seeds" if several else ""
        drawn.handles.append(Line2D([], [], color=GREY, label=f"line: training loss, smoothed{mean_of}"))
        if several:
            drawn.handles.append(Patch(color=GREY, alpha=0.2, linewidth=0, label="shade: lowest to highest seed"))
        drawn.handles.append(marker_handle("o", f"marker: held-out loss{mean_of}", markersize=5))
        compared = [
            reference_line(axes, point, "dashed: where the models are compared", vertical=True)
            for axes, point in zip(drawn.axes[0], (tokens, flops), strict=False)
            if point is not None
        ]
        drawn.handles += compared[:1]
        for axes in drawn.axes[0, 1:]:
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}".replace("e+", "e")))
            axes.set(xlabel="training FLOPs", ylabel="")
        drawn.notes += [*conditions, SMOOTHED, _READING_ORDER]


def _draw_losses(drawn: Picture, models: Sequence[Model], styles: Sequence[CurveStyle], begin: float = 0.0) -> None:
    """Draws smoothed training losses and held-out losses, against tokens and in a second panel against FLOPs.

    Args:
        begin: part of the tokens whose losses the axis may leave out.
    """
    for style, model in zip(styles, models, strict=True):
        first = model.runs[0]
        steps = first.train.tokens[first.train.tokens <= model.tokens]
        # Seeds may have been logged at other intervals.
        smoothed = [np.interp(steps, r.train.tokens, smooth_training(r.train.values)) for r in model.runs if steps.size]
        evaluated = [step for step in first.heldout.tokens if all(step in run.heldout.tokens for run in model.runs)]
        heldout = [np.mean([run.heldout_loss_at(step) for run in model.runs]) for step in evaluated]
        for axes, scale in zip(drawn.axes[0], (1.0, model.flops_per_token), strict=False):
            if smoothed:
                draw_mean(axes, style, steps * scale, np.array(smoothed))
            draw_markers(axes, style, np.array(evaluated) * scale, np.array(heldout))
            token_axis(axes)
    drawn.axes[0, 0].set_ylabel(LOSS_LABEL)
    drawn.axes[0, 0].set_ylim(loss_limits([run for model in models for run in model.runs], begin))


def loss_limits(runs: Sequence[Run], begin: float = 0.0) -> tuple[float, float]:
    """Ends of a loss axis that shows what runs learn after a part of their tokens; see `loss_against_tokens`."""
    low, high = [], []
    for run in runs:
        shown = smooth_training(run.train.values) if begin else run.train.values
        for tokens, values in ((run.train.tokens, shown), run.heldout):
            later = values[np.isfinite(values) & (tokens >= begin * run.tokens)]
            if later.size:
                # No loss of a model that has learnt anything is above its first one.
                low.append(later.min())
                high.append(min(np.quantile(later, 0.99), max(*run.train.values[:1], later.min() + 1e-3)))
    margin = 0.04 * max(max(high) - min(low), 1e-3)
    return min(low) - margin, max(high) + margin


def loss_against_position(
    curves: Mapping[str, np.ndarray],
    path: Path,
    train_length: int | Mapping[str, int | None] | None = None,
    conditions: Sequence[str] = (),
    of: str = "models",
) -> None:
    """Draws, over a logarithmic token position, the loss at each position (left) and the perplexity up to it (right).

    The left curve shows what a longer context is worth: it falls as long as the model uses the added tokens. The
    right one is what a benchmark with that context length would report. Positions below 1/512 of the longest sequence
    are left out (127 of 65,536), because their losses are far above the rest. The axes end above the losses of the
    first positions drawn, so that a model which is or ends far above them does not flatten others.

    Args:
        curves: name -> (seq_len,) mean loss in nats at each position, or (seeds, seq_len) for several runs that differ
            in their seed only: their mean is drawn, and the range they span shaded. Lengths may differ.
        train_length: sequence length of training, of all or by name, drawn as a vertical line: right of it a model
            extrapolates. Lengths that differ have a line each.
        of: what several curves are, for the title.

    Raises:
        AnalysisError: a curve has fewer than two losses, or one that is not finite.
    """
    for name, loss in curves.items():
        if loss.shape[-1] < 2 or not np.isfinite(loss).all():
            raise AnalysisError(f"'{name}': expected two or more losses, one for each position, all finite")
    names, lengths = list(curves), [loss.shape[-1] for loss in curves.values()]
    first = max(1, min(max(lengths) // 512, min(lengths) // 2))
    title = f"Loss at every position of {names[0] if len(names) == 1 else f'{len(names)} {of}'}"
    with picture(path, title, (7.6, 3.4), columns=2) as drawn:
        styles = curve_styles(names)
        shown: list[Callable[[np.ndarray], np.ndarray]] = [smooth, prefix_perplexity]
        for axes, of_loss in zip(drawn.axes[0], shown, strict=True):
            means: list[np.ndarray] = []
            for losses, style in zip(curves.values(), styles, strict=True):
                position = np.unique(np.geomspace(first, losses.shape[-1], _POINTS).round().astype(np.int64))
                values = np.stack([of_loss(loss)[position - 1] for loss in np.atleast_2d(losses)])
                draw_mean(axes, style, position, values)
                means.append(values.mean(axis=0))
            position_axis(axes, first, max(lengths))
            marks = mark_training(axes, train_length, names)
            axes.set_ylim(position_limits(means))
        left, right = drawn.axes[0]
        left.set(xlabel="token position $i$", ylabel="loss at position $i$ (nats per token)")
        right.set(xlabel="context length (tokens)", ylabel="perplexity over the context")
        log_axis(right)
        for (name, losses), style in zip(curves.items(), styles, strict=True):
            seeds = f" ({len(losses)} seeds: mean and range)" if losses.ndim == 2 else ""
            drawn.handles.append(line_handle(style, f"{name}{seeds}"))
        drawn.handles += marks
        drawn.notes += [*conditions, f"loss: mean over i ± {_POSITION_SMOOTHING:.0%}"]


def position_limits(curves: Sequence[np.ndarray]) -> tuple[float, float]:
    """Ends of a vertical axis for the curves that stay near the first positions of most; for all if none does."""
    low, tops = min(curve.min() for curve in curves), [curve.max() for curve in curves]
    first = sorted(curve[: 1 + curve.size // 4].max() for curve in curves)[(len(curves) - 1) // 2]
    high = max([top for top in tops if top <= low + 1.25 * (first - low)] or tops)
    margin = 0.05 * max(high - low, 1e-3)
    return low - margin, high + margin


def position_axis(axes: Axes, first: int, longest: int) -> None:
    """A logarithmic axis labelled at powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(first, 1.02 * longest)  # a line at the end is seen whole
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda position, _: f"{position:,.0f}"))


def mark_training(
    axes: Axes, train_length: int | Mapping[str, int | None] | None, names: Sequence[str]
) -> list[Line2D]:
    """Draws a vertical line at each training length, of all or by name; returns its entries for the legend."""
    by_name = train_length if isinstance(train_length, Mapping) else dict.fromkeys(names, train_length)
    lengths = sorted({length for name in names if (length := by_name.get(name)) is not None})
    handles = []
    for length in lengths:
        whose = f"of {', '.join(name for name in names if by_name.get(name) == length)} " if len(lengths) > 1 else ""
        handles.append(reference_line(axes, length, f"training length {whose}({length:,} tokens)", vertical=True))
    return handles


def loss_differences(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    conditions: Sequence[str] = (),
    train_length: int | Mapping[str, int | None] | None = None,
) -> None:
    """Draws the differences of models from the first on the same documents, in every octave of positions.

    Args:
        rows: as from `position_loss.compare`, at least one.
        train_length: as for `loss_against_position`.
    """
    with picture(path, f"Loss above that of {rows[0]['against']}, on the same documents", (5.6, 3.4)) as drawn:
        drawn.handles += draw_differences(drawn.axes[0, 0], rows)
        models = list(dict.fromkeys([rows[0]["against"], *(row["model"] for row in rows)]))
        drawn.handles += mark_training(drawn.axes[0, 0], train_length, models)
        drawn.notes += [*conditions, "bars: ± one standard error of the differences"]


def draw_differences(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> list[Line2D]:
    """Draws points with error bars for every model; returns their entries for the legend."""
    first, names = rows[0]["against"], list(dict.fromkeys(row["model"] for row in rows))
    handles: list[Line2D] = []
    for number, (name, style) in enumerate(zip(names, curve_styles([first, *names])[1:], strict=True)):
        own = [row for row in rows if row["model"] == name]
        # Beside each other: error bars of equal differences would hide each other.
        shift = 2 ** (0.3 * ((number + 1) / (len(names) + 1) - 0.5))
        x = [math.sqrt(row["begin"] * row["end"]) * shift for row in own]
        line: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "marker": style.marker}
        errors = [row["loss_error"] or 0.0 for row in own]
        axes.errorbar(x, [row["loss"] for row in own], errors, linewidth=1.0, capsize=2.5, markersize=4.5, **line)
        handles.append(line_handle(style, name, with_marker=True))
    handles.append(reference_line(axes, 0.0, first, line="-"))
    position_axis(axes, min(row["begin"] for row in rows), max(row["end"] for row in rows))
    axes.set(xlabel="token position, by octaves", ylabel="difference in loss\n(nats per token)")
    return handles
