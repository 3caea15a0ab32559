"""Figures of losses: against training tokens, against the position in the context, and differences of two models."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from forgetting_transformer.analysis.plots.style import (
    GREY,
    Curve,
    CurveStyle,
    curve_styles,
    line_handle,
    log_axis,
    marker_handle,
    picture,
    plain_text,
    reference_line,
    set_limits,
    token_axis,
)
from forgetting_transformer.analysis.runs import EMA_WEIGHTS, Run

#: What a training loss is averaged over: this part of the tokens before, to either side, up to a part of all logs.
_SMOOTHING, _MOST_OF_LOGS = 0.25, 1 / 40
SMOOTHED = (
    f"training loss smoothed: mean over ± {_SMOOTHING:.0%} of the tokens so far, "
    f"at most ± {_MOST_OF_LOGS:.1%} of the run"
)
READING_ORDER = (
    "training losses rise and fall with the texts of each batch, alike in runs that read in the same order: "
    "compare held-out losses"
)
_POSITION_SMOOTHING = 0.1
#: The mark of a training loss that was logged once, and so has no line; no model's marker looks like it.
ONCE = "x"
#: Losses everywhere so much above those of another model, in nats, are of one that diverged: 150 times the perplexity.
_FAR_ABOVE = 5.0
#: What a line beside the losses may add to the height of their axis, as a part of it.
_ROOM = 0.5
_ERRORS = "bars: ± one standard error of the differences"


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


def smooth_training(loss: np.ndarray) -> np.ndarray:
    """A training loss as `SMOOTHED` says: quiet enough to compare runs, with the bends of the curve still in it."""
    return smooth(loss, _SMOOTHING, most=math.ceil(loss.size * _MOST_OF_LOGS))


def prefix_perplexity(loss: np.ndarray) -> np.ndarray:
    """Perplexity of the first i tokens, for every context length i: exp of the mean loss up to there.

    Args:
        loss: (seq_len,), mean loss at each position.

    Returns:
        (seq_len,); element i - 1 belongs to context length i.
    """
    return np.exp(np.cumsum(loss, dtype=np.float64) / np.arange(1, loss.size + 1))


def loss_against_tokens(
    runs: Sequence[Run],
    path: Path,
    entropy: float | None = None,
    conditions: Sequence[str] = (),
) -> None:
    """Draws the training loss (as logged, light; smoothed, strong) and held-out loss (markers) of each run.

    The loss axis leaves out the highest 1 % of the logged training losses and what is above a run's first loss, so that
    neither the first steps nor a run that diverges flatten the rest. A run that ends above the axis has an arrow there.
    Dotted lines are where the reading order comes back to the first document, if that is the same for all runs.

    Args:
        path: where to write; the suffix chooses the format (.png, .pdf, .svg).
        entropy: entropy of the corpus's token frequencies in nats, drawn as a line: what a model reaches that ignores
            context. A run above it has not yet learnt to use any. Far from all losses it is in the legend only.
        conditions: what the runs have in common, for the foot of the figure.

    Raises:
        ValueError: no run, or no finite loss in any of them.
    """
    logged = [loss[np.isfinite(loss)] for run in runs for loss in (run.train_loss, run.heldout_loss)]
    if sum(loss.size for loss in logged) == 0:
        names = ", ".join(run.name for run in runs) or "no runs given"
        raise ValueError(f"Nothing to plot: no finite loss ({names}).")
    title = f"Training and held-out loss of {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}"
    with picture(path, title, (6.4, 3.8)) as drawn:
        axes = drawn.axes[0, 0]
        curves = []
        for number, (run, style) in enumerate(zip(runs, run_styles(runs), strict=True)):
            if run.train_loss.size > 1:
                as_logged = {"color": style.colour, "alpha": 0.25, "linewidth": 0.8, "zorder": 1}
                axes.plot(run.train_tokens, run.train_loss, **as_logged)
            smoothed = smooth_training(run.train_loss)
            point = ONCE if run.train_loss.size == 1 else None
            axes.plot(
                run.train_tokens, smoothed, color=style.colour, linestyle=style.line, marker=point, zorder=2 + number
            )
            _markers(axes, style, run.heldout_tokens, run.heldout_loss, 20 + number)
            if run.ema.tokens.size:
                _markers(axes, style, *run.ema, 20 + number, hollow=True)
            curves.append((run.name, style, run.train_tokens, smoothed))
        drawn.handles += _token_legend(runs) + _ema_legend(runs)
        low, high = loss_limits(runs, entropy)
        if entropy is not None:
            drawn.handles.append(_mark_entropy(axes, entropy, low, high))
        axes.set_xlim(left=0)
        set_limits(axes, low, high, curves)
        drawn.handles += mark_passes(axes, runs)
        axes.set_ylabel("loss (nats per token)")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
        token_axis(axes)
        drawn.notes += [*conditions, *smoothing(runs), *([READING_ORDER] if len(runs) > 1 else [])]


def loss_on_sets(runs: Sequence[Run], path: Path, conditions: Sequence[str] = ()) -> None:
    """Draws held-out loss against training tokens, in a panel for the corpus's own documents and each other set.

    Args:
        path: where to write; the suffix chooses the format.
        conditions: what the runs have in common, for the foot of the figure.

    Raises:
        ValueError: no run has a loss on another set.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.eval_sets))
    if not names:
        raise ValueError("Nothing to plot: no run has losses on more held-out sets than the corpus's own.")
    panels = [("held-out documents of the corpus", list(runs))] if any(run.heldout_loss.size for run in runs) else []
    panels += [(name, [run.on(name) for run in runs]) for name in names]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    title = f"Held-out loss of {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}, set by set"
    with picture(path, title, (max(5.2, 3.1 * columns), 2.5 * rows), rows, columns) as drawn:
        found = run_styles(runs)
        if len(runs) > 1:
            drawn.handles += [line_handle(style, run.name, True) for style, run in zip(found, runs, strict=True)]
        drawn.handles += _ema_legend(runs)
        free = iter(drawn.axes.flatten())
        for name, members in panels:
            axes = next(free)
            for run, style in zip(members, found, strict=True):
                axes.plot(run.heldout_tokens, run.heldout_loss, color=style.colour, linestyle=style.line, linewidth=1.2)
                _markers(axes, style, run.heldout_tokens, run.heldout_loss, 20)
                if not run.eval_set and run.ema.tokens.size:
                    axes.plot(*run.ema, color=style.colour, linestyle=":", linewidth=1.2)
                    _markers(axes, style, *run.ema, 21, hollow=True)
            axes.set_title(plain_text(name, 34), loc="left")
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
            axes.set_ylabel("loss (nats per token)")
            token_axis(axes)
        for axes in free:
            axes.set_axis_off()
        drawn.notes += conditions


def smoothing(runs: Sequence[Run]) -> list[str]:
    """What a figure says of its smoothed training losses; nothing where all have logged once."""
    return [SMOOTHED] if any(run.train_loss.size > 1 for run in runs) else []


def _mark_entropy(axes: Axes, entropy: float, low: float, high: float) -> Line2D:
    """Draws the line where it is inside of the axis; returns what the legend says of it."""
    label = f"token frequencies alone ({entropy:.2f} nats{{}})"
    if low < entropy < high:
        return reference_line(axes, entropy, label.format(""))
    where = ", below the axis" if entropy <= low else ", above the axis"
    return Line2D([], [], linestyle="none", label=label.format(where))


def run_styles(runs: Sequence[Run]) -> list[CurveStyle]:
    """A style for each run, that of its model where no run before it has it."""
    return curve_styles([run.config.get("model", {}).get("label") or run.name for run in runs])


def mark_passes(axes: Axes, runs: Sequence[Run]) -> list[Line2D]:
    """Draws where the reading order comes back to the first document; returns what the legend says of it.

    The order reads the first part of every document, then the second of every document, and so on.
    """
    passes = {run.pass_tokens for run in runs}
    pass_tokens = passes.pop() if len(passes) == 1 else None
    if pass_tokens is None:
        return []
    label = "dotted: back to the first document"
    starts = range(pass_tokens, max(run.tokens for run in runs), pass_tokens)
    return [reference_line(axes, start, label, vertical=True, line=":") for start in starts][:1]


def loss_against_position(
    curves: Mapping[str, np.ndarray],
    path: Path,
    train_length: int | Mapping[str, int | None] | None = None,
    first: int | None = None,
    conditions: Sequence[str] = (),
    of: str = "models",
) -> None:
    """Draws, over a logarithmic token position, the loss at each position (left) and the perplexity up to it (right).

    The left curve says what a longer context is worth: it falls as long as the model uses the tokens it is given. The
    right one is what a benchmark with that context length would report. Positions below 1/512 of the longest sequence
    are left out (127 of 65,536), because their losses are far above the rest. A model whose loss ends far above those
    of the first positions, or is far above another's everywhere, has an arrow at the upper edge, so that it does not
    flatten others.

    Args:
        curves: name -> (seq_len,) mean loss in nats at each position, or (seeds, seq_len) for several runs that differ
            in their seed only: their mean is drawn, and the range they span shaded. Lengths may differ.
        path: where to write; the suffix chooses the format (.png, .pdf, .svg).
        train_length: sequence length of training, of all or by name, drawn as a vertical line: right of it a model
            extrapolates. Lengths that differ have a line each, in the colour of their model.
        first: the first position drawn, from 1; default as above.
        conditions: for the foot of the figure.
        of: what several curves are, for the title.

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
    names = list(curves)
    title = f"Loss at every position of {names[0] if len(names) == 1 else f'{len(names)} {of}'}"
    with picture(path, title, (7.6, 3.4), columns=2) as drawn:
        left, right = drawn.axes[0]
        means: dict[Axes, list[Curve]] = {left: [], right: []}
        spans: dict[Axes, list[np.ndarray]] = {left: [], right: []}  # what the loss axes show: curves and their shades
        for (name, losses), style in zip(curves.items(), curve_styles(names), strict=True):
            several = losses.ndim == 2
            losses = np.atleast_2d(losses)
            # Evenly spaced on the logarithmic axis: a point for each of 65,536 positions would fill the gaps of dashes.
            position = np.unique(np.geomspace(first, losses.shape[1], 400).round().astype(np.int64))
            for axes, curve in ((left, _smooth_position), (right, prefix_perplexity)):
                values = np.stack([curve(loss)[position - 1] for loss in losses])
                axes.plot(position, values.mean(axis=0), color=style.colour, linestyle=style.line)
                if len(values) > 1:
                    axes.fill_between(
                        position, values.min(axis=0), values.max(axis=0), color=style.colour, alpha=0.2, lw=0
                    )
                means[axes].append((name, style, position, values.mean(axis=0)))
                spans[axes] += [values.min(axis=0), values.max(axis=0)] if len(values) > 1 else [values[0]]
            if several:
                drawn.handles.append(line_handle(style, f"{name} ({len(losses)} seeds: mean and range)"))
            elif len(names) > 1:  # a single one is named in the title
                drawn.handles.append(line_handle(style, name))
        left.set(xlabel="token position $i$", ylabel="loss at position $i$ (nats per token)")
        right.set(xlabel="context length (tokens)", ylabel="perplexity over the context")
        right.set_yscale("log")
        for axes in (left, right):
            _set_position_axis(axes, first, longest)
            marks = _mark_training(axes, train_length, names)
        drawn.handles += marks
        set_limits(left, *_position_limits(spans[left]), means[left])
        low, high = _position_limits([np.log(y) for y in spans[right]])
        set_limits(right, math.exp(low), math.exp(high), means[right])
        log_axis(right)
        drawn.notes += [*conditions, f"loss: mean over $i$ ± {_POSITION_SMOOTHING:.0%}".replace("$", "")]


def _by_length(train_length: int | Mapping[str, int | None] | None, names: Sequence[str]) -> dict[int, str]:
    """Training length -> "" if it is that of all, else whose it is."""
    if not isinstance(train_length, Mapping):
        return {} if train_length is None else {train_length: ""}
    known = {name: train_length.get(name) for name in names}
    lengths = sorted({length for length in known.values() if length is not None})
    if len(lengths) == 1:
        return {lengths[0]: ""}
    return {length: f"of {', '.join(name for name in names if known[name] == length)} " for length in lengths}


def _smooth_position(loss: np.ndarray) -> np.ndarray:
    return smooth(loss, _POSITION_SMOOTHING)


def _position_limits(curves: Sequence[np.ndarray]) -> tuple[float, float]:
    """Ends of the loss axis, without models far above another everywhere.

    A loss far above all first positions is left out too, where another model stays below.
    """
    lowest = min(curve[: 1 + curve.size // 4].max() for curve in curves)
    curves = [curve for curve in curves if curve.min() <= lowest + _FAR_ABOVE]
    low, high = min(curve.min() for curve in curves), max(curve.max() for curve in curves)
    enough = low + 1.25 * (max(curve[: 1 + curve.size // 4].max() for curve in curves) - low)
    if any(curve.max() <= enough for curve in curves):
        high = min(high, enough)
    margin = 0.05 * max(high - low, 1e-3)
    return low - margin, high + margin


def loss_differences(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    conditions: Sequence[str] = (),
    train_length: int | Mapping[str, int | None] | None = None,
) -> None:
    """Draws by how much models differ from the first on the same documents, in every octave of positions.

    Args:
        rows: as from `position_loss.compare`: `model`, `against`, positions `begin` to `end`, `loss` and `loss_error`.
        path: where to write; the suffix chooses the format.
        conditions, train_length: as for `loss_against_position`.

    Raises:
        ValueError: there is no row.
    """
    if not rows:
        raise ValueError("Nothing to plot: no model was evaluated on the same documents as the first.")
    with picture(path, f"Loss above that of {rows[0]['against']}, on the same documents", (5.6, 3.4)) as drawn:
        drawn.handles += _draw_differences(drawn.axes[0, 0], rows)
        drawn.handles += _mark_training(drawn.axes[0, 0], train_length, _models(rows))
        drawn.notes += [*conditions, _ERRORS]


def loss_by_octave(
    losses: Mapping[str, Mapping[int, float]],
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    conditions: Sequence[str] = (),
    train_length: int | Mapping[str, int | None] | None = None,
) -> None:
    """Draws the mean loss of every octave of positions (left) and the differences to the first model (right).

    For results of which no more than their tables are left; `loss_against_position` shows every position.

    Args:
        losses: model -> first position of an octave -> mean loss in it.
        rows, conditions, train_length: as for `loss_differences`.
    """
    with picture(path, f"Loss by position of {len(losses)} models", (8.2, 3.4), columns=2) as drawn:
        left, right = drawn.axes[0]
        curves: list[Curve] = []
        for (name, octaves), style in zip(losses.items(), curve_styles(list(losses)), strict=True):
            x, y = np.array(list(octaves)) * math.sqrt(2), np.array(list(octaves.values()))
            left.plot(
                x, y, color=style.colour, linestyle=style.line, marker=style.marker, markersize=4.5, linewidth=1.2
            )
            curves.append((name, style, x, y))
            drawn.handles.append(line_handle(style, name, with_marker=True))
        begins = [begin for octaves in losses.values() for begin in octaves]
        _set_position_axis(left, min(begins), 2 * max(begins))
        left.set(xlabel="token position, by octaves", ylabel="mean loss of the octave\n(nats per token)")
        _draw_differences(right, rows)
        for axes in (left, right):
            marks = _mark_training(axes, train_length, list(losses))
        drawn.handles += marks
        set_limits(left, *_position_limits([y for *_, y in curves]), curves)
        left.set_title("mean of each octave of positions", loc="left")
        right.set_title(f"above {rows[0]['against']}, on the same documents", loc="left")
        drawn.notes += [*conditions, _ERRORS]


def _models(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The model that others are compared with, and these."""
    return list(dict.fromkeys([rows[0]["against"], *(row["model"] for row in rows)]))


def _draw_differences(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> list[Line2D]:
    """Points with error bars of every model; returns what the legend says of them."""
    first, *names = _models(rows)
    handles: list[Line2D] = []
    curves: list[Curve] = []
    for number, (name, style) in enumerate(zip(names, curve_styles([first, *names])[1:], strict=True)):
        own = [row for row in rows if row["model"] == name]
        # Beside each other: error bars of equal differences would hide each other.
        shift = 2 ** (0.3 * ((number + 1) / (len(names) + 1) - 0.5))
        x = np.array([math.sqrt(row["begin"] * row["end"]) * shift for row in own])
        y = np.array([row["loss"] for row in own])
        error = [row["loss_error"] or 0.0 for row in own]
        line = {"color": style.colour, "linestyle": style.line, "marker": style.marker, "markersize": 4.5}
        axes.errorbar(x, y, error, linewidth=1.0, elinewidth=1.2, capsize=2.5, **line)
        handles.append(line_handle(style, name, with_marker=True))
        curves.append((name, style, x, y))
    handles.append(reference_line(axes, 0.0, first, line="-"))
    _set_position_axis(axes, min(row["begin"] for row in rows), max(row["end"] for row in rows))
    axes.set(xlabel="token position, by octaves", ylabel="difference in loss\n(nats per token)")
    low, high = axes.get_ylim()
    *others, _ = sorted([0.0, *(y.max() for *_, y in curves)])
    if high > 2.5 * others[-1] > 0:  # one model alone, which would flatten the others
        set_limits(axes, low, 1.4 * others[-1], curves)
    return handles


def _mark_training(
    axes: Axes, train_length: int | Mapping[str, int | None] | None, names: Sequence[str]
) -> list[Line2D]:
    """Draws a vertical line at each training length; returns what the legend says of it."""
    return [
        reference_line(axes, length, f"training length {of}({length:,} tokens)", vertical=True)
        for length, of in _by_length(train_length, names).items()
    ]


def _markers(axes: Axes, style: CurveStyle, x: np.ndarray, y: np.ndarray, zorder: int, hollow: bool = False) -> None:
    edge: dict[str, Any] = {"markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.7}
    if hollow:
        edge |= {"markerfacecolor": "none", "markeredgecolor": style.colour, "markeredgewidth": 1.1}
    axes.plot(x, y, color=style.colour, linestyle="none", marker=style.marker, zorder=zorder, **edge)


def _ema_legend(runs: Sequence[Run]) -> list[Line2D]:
    """What hollow marks mean, where there are any."""
    if not any(run.ema.tokens.size for run in runs):
        return []
    style = run_styles(runs)[0]
    colour, marker = (style.colour, style.marker) if len(runs) == 1 else (GREY, "o")
    label = f"held-out loss, {EMA_WEIGHTS}"
    return [marker_handle(marker, label, colour, markersize=5.5, markerfacecolor="none", markeredgewidth=1.1)]


def loss_limits(runs: Sequence[Run], entropy: float | None = None) -> tuple[float, float]:
    """Ends of a loss axis that shows what runs learn, and `entropy` if it is near; see `loss_against_tokens`."""
    low, high = [], []
    for run in runs:
        train = run.train_loss[np.isfinite(run.train_loss)]
        heldout = np.concatenate([run.heldout_loss, run.ema.values])
        heldout = heldout[np.isfinite(heldout)]
        if train.size:
            low.append(train.min())
            # No loss of a model that has learnt anything is above its first one.
            high.append(min(np.quantile(train, 0.99), max(train[0], train.min() + 1e-3)))
        if heldout.size:
            low.append(heldout.min())
            high.append(min([heldout.max(), *train[:1]]))
    if entropy is not None:
        room = _ROOM * (max(high) - min(low))
        if min(low) - room <= entropy <= max(high) + room:
            low.append(entropy)
            high.append(entropy)
    margin = 0.04 * max(max(high) - min(low), 1e-3)
    return min(low) - margin, max(high) + margin


def _set_position_axis(axes: Axes, first: int, longest: int) -> None:
    """A logarithmic axis labelled at powers of two, every second or third of them if there are many."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(first, 1.02 * longest)  # a line at the end is seen whole
    powers = range(math.ceil(math.log2(first)), math.floor(math.log2(longest)) + 1)
    stride = math.ceil(len(powers) / 6)
    # Counted from the right: the full length is the label that a reader looks for.
    axes.xaxis.set_major_locator(FixedLocator([2.0**power for power in powers[::-1][::stride]]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda position, _: f"{position:,.0f}"))


def _token_legend(runs: Sequence[Run]) -> list[Line2D]:
    """One run's legend explains its three kinds of marks; several runs each get a line, then what the marks mean."""
    has_heldout = any(run.heldout_loss.size for run in runs)
    found = run_styles(runs)
    if len(runs) == 1:
        colour, marker = found[0].colour, found[0].marker
        handles = [
            Line2D([], [], color=colour, alpha=0.35, linewidth=0.8, label="training loss, as logged"),
            line_handle(found[0], "training loss, smoothed"),
        ]
        if runs[0].train_loss.size == 1:
            handles = [marker_handle(ONCE, "training loss, logged once", colour)]
    else:
        colour, marker = GREY, "o"
        handles = [
            line_handle(style, run.name, run.heldout_loss.size > 0) for style, run in zip(found, runs, strict=True)
        ]
        handles.append(Line2D([], [], color=colour, label="line: training loss, smoothed (light: as logged)"))
        if any(run.train_loss.size == 1 for run in runs):
            handles.append(marker_handle(ONCE, "cross: training loss, logged once", colour))
    if has_heldout:
        label = "held-out loss" if len(runs) == 1 else "marker: held-out loss"
        handles.append(marker_handle(marker, label, colour, markersize=5))
    return handles
