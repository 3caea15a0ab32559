"""Figures of training runs: loss against training tokens, and loss against position in the context.

Drawn without pyplot, so nothing global is left behind and no display is needed. Colours are those of Okabe and Ito,
which people with colour-vision deficiencies can tell apart; line styles and markers repeat the distinction.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from forgetting_transformer.analysis.runs import Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "figure.constrained_layout.use": True,
}
_DPI = 200
_TITLE_CHARACTERS = 80  # a longer run name continues on the next line
_LEGEND_CHARACTERS = 70


def smooth(loss: np.ndarray, fraction: float, most: int | None = None) -> np.ndarray:
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


def prefix_perplexity(loss: np.ndarray) -> np.ndarray:
    """Perplexity of the first i tokens, for every context length i: exp of the mean loss up to there.

    Args:
        loss: (seq_len,), mean loss at each position.

    Returns:
        (seq_len,); element i - 1 belongs to context length i.
    """
    return np.exp(np.cumsum(loss, dtype=np.float64) / np.arange(1, loss.size + 1))


def loss_against_tokens(runs: Sequence[Run], path: Path, entropy: float | None = None) -> None:
    """Draws the training loss (as logged, light; smoothed, strong) and held-out loss (markers) of each run.

    The upper end of the loss axis leaves out the highest 1 % of the logged training losses, so that the first steps do
    not flatten the rest; held-out losses and the entropy are always inside.

    Args:
        path: where to write; the suffix chooses the format (.png, .pdf, .svg).
        entropy: entropy of the corpus's token frequencies in nats, drawn as a line: what a model reaches that ignores
            context. A run above it has not yet learnt to use any.

    Raises:
        ValueError: no run, or no finite loss in any of them.
    """
    logged = [loss[np.isfinite(loss)] for run in runs for loss in (run.train_loss, run.heldout_loss)]
    if sum(loss.size for loss in logged) == 0:
        names = ", ".join(run.name for run in runs) or "no runs given"
        raise ValueError(f"Nothing to plot: no finite loss ({names}).")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.0))
        axes = figure.add_subplot()
        for number, run in enumerate(runs):
            colour, line, marker = look(number)
            # A run that has logged once has no line yet, only this point.
            point = "." if run.train_loss.size == 1 else None
            axes.plot(
                run.train_tokens,
                run.train_loss,
                color=colour,
                marker=point,
                alpha=0.25,
                linewidth=0.8,
                zorder=1,
            )
            smoothed = smooth(run.train_loss, 0.25, most=_smoothing_reach(run.train_loss.size))
            axes.plot(run.train_tokens, smoothed, color=colour, linestyle=line, marker=point, zorder=2 + number)
            axes.plot(
                run.heldout_tokens,
                run.heldout_loss,
                color=colour,
                linestyle="none",
                marker=marker,
                markersize=5.5,
                markeredgecolor="white",
                markeredgewidth=0.7,
                zorder=20 + number,
            )
        if len(runs) == 1:
            axes.set_title(_text(runs[0].name, _TITLE_CHARACTERS), loc="left", fontsize=9, color="#555555")
        if entropy is not None:
            axes.axhline(entropy, color="#555555", linestyle=(0, (6, 3)), linewidth=1.1, zorder=1)
        axes.set_ylim(*_loss_limits(runs, entropy))
        axes.set_xlim(left=0)
        axes.set_xlabel("training tokens")
        axes.set_ylabel("loss (nats per token)")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: format_tokens(tokens)))
        add_legend(figure, _token_legend(runs, entropy))
        save(figure, path)


def loss_against_position(
    curves: Mapping[str, np.ndarray], path: Path, train_length: int | None = None, first: int | None = None
) -> None:
    """Draws, over a logarithmic token position, the loss at each position (left) and the perplexity up to it (right).

    The left curve says what a longer context is worth: it falls as long as the model uses the tokens it is given. The
    right one is what a benchmark with that context length would report. Positions below 1/512 of the longest sequence
    are left out (127 of 65,536), because their losses are far above the rest.

    Args:
        curves: name -> (seq_len,) mean loss in nats at each position, or (seeds, seq_len) for several runs that differ
            in their seed only: their mean is drawn, and the range they span shaded. Lengths may differ.
        path: where to write; the suffix chooses the format (.png, .pdf, .svg).
        train_length: sequence length of training, drawn as a vertical line: right of it the model extrapolates.
        first: the first position drawn, from 1; default as above.

    Raises:
        ValueError: no curve, or one that is not a vector of at least two finite losses.
    """
    if not curves:
        raise ValueError("Nothing to plot: no curve of losses at each position was given.")
    for name, loss in curves.items():
        if loss.ndim not in (1, 2) or loss.shape[-1] < 2 or not np.isfinite(loss).all():
            raise ValueError(
                f"'{name}': expected a vector of two or more finite losses, one for each position, but got shape "
                f"{loss.shape} with {np.count_nonzero(~np.isfinite(loss))} values that are not finite."
            )
    lengths = [loss.shape[-1] for loss in curves.values()]
    longest = max(lengths)
    first = max(1, min(longest // 512 if first is None else first, min(lengths) // 2))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 3.5))
        left, right = figure.subplots(1, 2)
        for number, losses in enumerate(curves.values()):
            colour, line, _ = look(number)
            losses = np.atleast_2d(losses)
            # Evenly spaced on the logarithmic axis: a point for each of 65,536 positions would fill the gaps of dashes.
            position = np.unique(np.geomspace(first, losses.shape[1], 400).round().astype(np.int64))
            for axes, curve in ((left, _smooth_position), (right, prefix_perplexity)):
                values = np.stack([curve(loss)[position - 1] for loss in losses])
                axes.plot(position, values.mean(axis=0), color=colour, linestyle=line)
                if len(values) > 1:
                    axes.fill_between(position, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2, lw=0)
        left.set(xlabel="token position $i$", ylabel="loss at position $i$ (nats per token),\nmean over $i$ ± 10 %")
        right.set(xlabel="context length (tokens)", ylabel="perplexity over the context")
        for axes in (left, right):
            _set_position_axis(axes, first, longest)
            if train_length is not None:
                axes.axvline(train_length, color="#555555", linestyle=(0, (6, 3)), linewidth=1.1, zorder=1)
        handles = [
            line_handle(number, name if losses.ndim == 1 else f"{name} ({len(losses)} seeds: mean and range)")
            for number, (name, losses) in enumerate(curves.items())
        ]
        if train_length is not None:
            handles.append(reference_line(f"training length ({train_length:,} tokens)"))
        add_legend(figure, handles)
        save(figure, path)


def _smooth_position(loss: np.ndarray) -> np.ndarray:
    return smooth(loss, 0.1)  # as the label of the axis says


def scores_by_task(
    models: Sequence[str],
    scores: Mapping[str, Sequence[float | None]],
    perplexities: Mapping[str, Sequence[float | None]],
    path: Path,
) -> None:
    """Draws a row for each task and in it a marker for each model; perplexities, if any, in a panel of their own.

    Args:
        models: names.
        scores: task -> a value for each model, None where it has none. Higher is better.
        perplexities: likewise for what is better lower and spans powers of ten.
        path: where to write; the suffix chooses the format.

    Raises:
        ValueError: there is no value at all.
    """
    panels = [(tasks, lower) for tasks, lower in ((scores, False), (perplexities, True)) if tasks]
    if not panels:
        raise ValueError(f"Nothing to plot: no scores of {', '.join(models)}.")
    most = max(len(tasks) for tasks, _ in panels)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.9 * len(panels) + 0.8, 0.7 + most * (0.18 + 0.07 * len(models))))
        for axes, (tasks, lower) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for number in range(len(models)):
                # One below the other, as equal values would hide each other.
                shift = 0.6 * ((number + 0.5) / len(models) - 0.5)
                points = [(values[number], row + shift) for row, values in enumerate(tasks.values())]
                x, y = np.array([point for point in points if point[0] is not None], dtype=float).reshape(-1, 2).T
                colour, _, marker = look(number)
                axes.plot(x, y, marker, color=colour, markersize=6, markeredgecolor="white", markeredgewidth=0.7)
            axes.set_yticks(range(len(tasks)), [_text(task, _LEGEND_CHARACTERS) for task in tasks])
            axes.set_ylim(most - 0.5, -0.5)
            axes.grid(axis="y", visible=False)
            for row in range(1, len(tasks)):
                axes.axhline(row - 0.5, color="#dddddd", linewidth=0.6, zorder=0)
            axes.margins(x=0.08)
            found = [value for values in tasks.values() for value in values if value is not None]
            if lower and max(found) > 20 * min(found) > 0:
                axes.set_xscale("log")
            axes.set_xlabel("lower is better" if lower else "score, higher is better")
        handles = [
            Line2D([], [], color=look(n)[0], marker=look(n)[2], linestyle="none", markersize=6, label=name)
            for n, name in enumerate(models)
        ]
        add_legend(figure, handles)
        save(figure, path)


def format_tokens(tokens: float) -> str:
    """A number of tokens for an axis: 0, 500, 1.5K, 250M, 48B, 1.2T."""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(tokens) >= unit:
            return f"{tokens / unit:.6g}{suffix}"
    return f"{tokens:.6g}"


def _smoothing_reach(logs: int) -> int:
    """A fortieth of the logged values: wide enough to quiet batch noise, narrow enough to keep bends of the curve."""
    return math.ceil(logs / 40)


def _loss_limits(runs: Sequence[Run], entropy: float | None) -> tuple[float, float]:
    must_show = [run.heldout_loss for run in runs] + [np.array([] if entropy is None else [entropy])]
    low, high = [], []
    for run in runs:
        train = run.train_loss[np.isfinite(run.train_loss)]
        if train.size:
            low.append(train.min())
            high.append(np.quantile(train, 0.99))
    for values in must_show:
        finite = values[np.isfinite(values)]
        low.extend(finite)
        high.extend(finite)
    margin = 0.04 * max(max(high) - min(low), 1e-3)
    return min(low) - margin, max(high) + margin


def _set_position_axis(axes: Axes, first: int, longest: int) -> None:
    """A logarithmic axis labelled at powers of two, every second or third of them if there are many."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(first, longest)
    powers = range(math.ceil(math.log2(first)), math.floor(math.log2(longest)) + 1)
    stride = math.ceil(len(powers) / 6)
    # Counted from the right: the full length is the label that a reader looks for.
    axes.xaxis.set_major_locator(FixedLocator([2.0**power for power in powers[::-1][::stride]]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda position, _: f"{position:,.0f}"))


def look(number: int) -> tuple[str, str, str]:
    """Colour, line style and marker of the curve with this number."""
    return (
        COLOURS[number % len(COLOURS)],
        _LINES[number % len(_LINES)],
        _MARKERS[number % len(_MARKERS)],
    )


def line_handle(number: int, label: str, with_marker: bool = False) -> Line2D:
    colour, line, marker = look(number)
    handle = Line2D([], [], color=colour, linestyle=line, label=label)
    if with_marker:
        handle.set(marker=marker, markersize=5.5, markeredgecolor="white", markeredgewidth=0.7)
    return handle


def reference_line(label: str) -> Line2D:
    return Line2D([], [], color="#555555", linestyle=(0, (6, 3)), linewidth=1.1, label=label)


def _token_legend(runs: Sequence[Run], entropy: float | None) -> list[Line2D]:
    """One run's legend explains its three kinds of marks; several runs each get a line, then what the marks mean."""
    has_heldout = any(run.heldout_loss.size for run in runs)
    if len(runs) == 1:
        colour, _, marker = look(0)
        handles = [
            Line2D([], [], color=colour, alpha=0.35, linewidth=0.8, label="training loss, as logged"),
            line_handle(0, "training loss, smoothed"),
        ]
    else:
        colour, marker = "#555555", "o"
        handles = [line_handle(number, run.name, run.heldout_loss.size > 0) for number, run in enumerate(runs)]
        handles.append(Line2D([], [], color=colour, label="line: training loss, smoothed (light: as logged)"))
    if has_heldout:
        label = "held-out loss" if len(runs) == 1 else "marker: held-out loss"
        handles.append(Line2D([], [], color=colour, linestyle="none", marker=marker, markersize=5, label=label))
    if entropy is not None:
        handles.append(reference_line(f"token frequencies alone ({entropy:.2f} nats)"))
    return handles


def add_legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Puts the legend under the axes, in as many columns as fit, and makes the figure taller by its height."""
    labels = [_text(str(handle.get_label()), _LEGEND_CHARACTERS) for handle in handles]
    renderer = FigureCanvasAgg(figure).get_renderer()
    for columns in range(len(handles), 0, -1):
        legend = figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, handlelength=2.8, columnspacing=1.6
        )
        extent = legend.get_window_extent(renderer)
        if extent.width <= figure.bbox.width or columns == 1:
            break
        legend.remove()
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + extent.height / figure.dpi)


def _text(name: str, characters: int) -> str:
    """A name as matplotlib should show it: wrapped, with no formula between dollar signs, and never hidden."""
    text = textwrap.fill(name, characters, break_on_hyphens=False).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # a leading underscore keeps a label out of a legend


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
