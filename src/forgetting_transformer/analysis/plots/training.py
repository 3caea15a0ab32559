"""Figures of what a run logs beside its losses: learning rate, norms, throughput, memory, and where the time went."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from forgetting_transformer.analysis.plots.losses import ONCE, loss_limits, run_styles, smooth_training, smoothing
from forgetting_transformer.analysis.plots.style import (
    GREY,
    CurveStyle,
    line_handle,
    log_axis,
    marker_handle,
    picture,
    plain_text,
    set_limits,
    token_axis,
)
from forgetting_transformer.analysis.runs import Run, Series

#: What wall time goes to, with the useful first; others are grey.
_TIME_COLOURS = {
    "steps": "#009E73",
    "first step": "#56B4E9",
    "start": "#0072B2",
    "data": "#E69F00",
    "evaluation": "#CC79A7",
    "checkpoint": "#882255",
    "log": "#999933",
    "lost": "#D55E00",
}
_DASHES = ("--", ":", "-.")


def has_metrics(run: Run) -> bool:
    """Whether a run has logged anything that `training_metrics` draws."""
    series = (run.total_hours, run.learning_rate, run.gradient_norm, run.tokens_per_second)
    return bool(run.goodput) or any(one.tokens.size for one in series)


def training_metrics(runs: Sequence[Run], path: Path, conditions: Sequence[str] = ()) -> None:
    """Draws what a run logs beside its losses: each panel only where a run has logged it.

    Loss is drawn against wall time; learning rate, gradient norm, throughput, MFU and memory against training tokens;
    shares of wall time as bars.

    Args:
        path: where to write; the suffix chooses the format.
        conditions: what the runs have in common, for the foot of the figure.

    Raises:
        ValueError: no run has logged anything.
    """
    rates = [run.learning_rate for run in runs]
    curves: list[tuple[str, list[Series], bool]] = [
        ("learning rate", rates, _spread(rates) > 10),
        ("gradient norm\nbefore clipping", [run.gradient_norm for run in runs], True),
        ("tokens per second", [run.tokens_per_second for run in runs], False),
        ("MFU (%)", [_scaled(run.mfu, 100) for run in runs], False),
        (_memory_label(runs), [_scaled(run.peak_memory_bytes, 1e-9) for run in runs], False),
    ]
    curves = [curve for curve in curves if any(series.tokens.size for series in curve[1])]
    timed = any(run.train_loss.size and run.total_hours.tokens.size for run in runs)
    goodput = {run.name: run.goodput for run in runs if run.goodput}
    panels = timed + len(curves) + bool(goodput)
    if not any(map(has_metrics, runs)):
        raise ValueError(f"Nothing to plot: {', '.join(run.name for run in runs) or 'no run'} has logged nothing yet.")
    columns = min(3, panels)
    rows = -(-panels // columns)
    title = f"Training of {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}"
    with picture(path, title, (max(5.2, 3.1 * columns), 2.3 * rows), rows, columns) as drawn:
        free = iter(drawn.axes.flatten())
        found = run_styles(runs)
        drawn.handles += [line_handle(style, run.name) for style, run in zip(found, runs, strict=True)]
        if timed:
            _loss_against_hours(next(free), runs, found)
            drawn.notes += [*conditions, *smoothing(runs)]
            if any(run.train_loss.size == 1 for run in runs):
                drawn.handles.append(marker_handle(ONCE, "training loss, logged once", GREY, markersize=5))
            if any(run.heldout_loss.size for run in runs):
                drawn.handles.append(marker_handle("o", "held-out loss", GREY, markersize=5))
        for label, series, logarithmic in curves:
            axes = next(free)
            for (tokens, values), style in zip(series, found, strict=True):
                point = "." if tokens.size == 1 else None
                axes.plot(tokens, values, color=style.colour, linestyle=style.line, marker=point, linewidth=1.2)
            values = np.concatenate([one.values for one in series])
            values = values[np.isfinite(values)]
            # A learning rate may begin and end at zero.
            positive = values[values > 0]
            if logarithmic and positive.size and positive.max() > 10 * positive.min():
                log_axis(axes)
            elif positive.size:
                axes.set_ylim(0, 1.06 * positive.max())
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
            axes.set_ylabel(label)
            token_axis(axes)
        if goodput:
            _shares_of_time(next(free), goodput)
        for axes in free:
            axes.set_axis_off()


def _spread(series: Sequence[Series]) -> float:
    """The largest of the peaks over the smallest."""
    peaks = [one.values.max() for one in series if one.values.size]
    return max(peaks) / min(peaks) if peaks and min(peaks) > 0 else 1.0


def _memory_label(runs: Sequence[Run]) -> str:
    """What was measured: of PyTorch's tensors on a GPU, of the whole process on a CPU."""
    on_cpu = {run.device.startswith("CPU") for run in runs if run.device}
    if len(on_cpu) != 1:
        return "peak memory (GB)"
    return "peak memory of\nthe process (GB)" if on_cpu.pop() else "peak GPU memory (GB)"


def _scaled(series: Series, factor: float) -> Series:
    return series._replace(values=factor * series.values)


def _loss_against_hours(axes: Axes, runs: Sequence[Run], found: Sequence[CurveStyle]) -> None:
    """The unit of time is what suits the longest run."""
    longest = max(run.total_hours.values[-1] for run in runs if run.total_hours.tokens.size)
    unit, scale = ("hours", 1) if longest >= 2 else ("minutes", 60) if longest >= 1 / 30 else ("seconds", 3600)
    curves = []
    for run, style in zip(runs, found, strict=True):
        if not run.total_hours.tokens.size:
            continue
        if run.heldout_hours.tokens.size:
            time = scale * np.interp(run.heldout_tokens, *run.heldout_hours)
            axes.plot(time, run.heldout_loss, style.marker, color=style.colour, markersize=4)
        time, smoothed = scale * np.interp(run.train_tokens, *run.total_hours), smooth_training(run.train_loss)
        point = ONCE if smoothed.size == 1 else None
        axes.plot(time, smoothed, color=style.colour, linestyle=style.line, linewidth=1.2, marker=point, markersize=5)
        curves.append((run.name, style, time, smoothed))
    axes.set_xlim(left=0)
    set_limits(axes, *loss_limits(runs), curves)
    axes.set(xlabel=f"wall time of training ({unit})", ylabel="loss (nats per token)")


def _shares_of_time(axes: Axes, goodput: Mapping[str, Mapping[str, float]]) -> None:
    """A bar for each run, divided by what its wall time went to."""
    named = dict.fromkeys(kind for shares in goodput.values() for kind in shares if kind != "hours")
    kinds = [kind for kind in named if any(shares.get(kind, 0) >= 0.005 for shares in goodput.values())]
    for row, shares in enumerate(goodput.values()):
        left = 0.0
        for kind in kinds:
            share = 100 * shares.get(kind, 0.0)
            axes.barh(row, share, left=left, height=0.6, color=_TIME_COLOURS.get(kind, GREY))
            left += share
    names = [plain_text(name, 22) for name in goodput] if len(goodput) > 1 else [""]
    axes.set_yticks(range(len(goodput)), names, fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(goodput) - 0.3 + 0.4 * len(goodput), -0.7)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of wall time (%)")
    axes.grid(axis="y", visible=False)
    axes.legend(
        handles=[Patch(color=_TIME_COLOURS.get(kind, GREY), label=kind) for kind in kinds],
        loc="lower left",
        ncols=2,
        fontsize=7,
        handlelength=1.0,
        columnspacing=1.0,
    )


def norms(run: Run, path: Path, conditions: Sequence[str] = ()) -> None:
    """Draws the norms of weights and of gradients of every block against training tokens, on logarithmic axes.

    Blocks go from dark to light with their depth; what is in no block (embedding, last norm, head) is dashed.

    Raises:
        ValueError: the run has logged none.
    """
    weights, gradients = run.weight_norms, run.gradient_norms
    if not weights:
        raise ValueError(f"Nothing to plot: {run.name} has logged no norms yet.")
    with picture(path, f"Norms of {run.name}, block by block", (7.6, 2.9), columns=2) as drawn:
        layers = [part for part in weights if part.startswith("layer ")]
        colours = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(layers)))
        styles = {part: CurveStyle(colour, "-", "") for part, colour in zip(layers, colours, strict=True)}
        styles |= {
            part: CurveStyle("#D55E00", _DASHES[i % 3], "")
            for i, part in enumerate(part for part in weights if part not in layers)
        }
        for axes, by_layer, label in (
            (drawn.axes[0, 0], weights, "L2 norm of weights"),
            (drawn.axes[0, 1], gradients, "L2 norm of gradients, after clipping"),
        ):
            for part, (tokens, values) in by_layer.items():
                style = styles[part]
                point = "." if tokens.size == 1 else None
                axes.plot(tokens, values, color=style.colour, linestyle=style.line, marker=point, linewidth=1.1)
            log_axis(axes)
            axes.set_ylabel(label)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
            token_axis(axes)
        shown = layers if len(layers) <= 8 else [layers[i] for i in np.linspace(0, len(layers) - 1, 6).astype(int)]
        drawn.handles += [
            line_handle(style, part) for part, style in styles.items() if part in shown or part not in layers
        ]
        drawn.notes += [*conditions, "of each block: all its parameters together"]
