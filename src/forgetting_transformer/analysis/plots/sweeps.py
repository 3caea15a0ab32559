"""The figure of a learning-rate search."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from forgetting_transformer.analysis.plots.style import CurveStyle, curve_styles, line_handle, marker_handle, picture
from forgetting_transformer.analysis.tables import format_tokens, rate_text


def budget(config: Any) -> list[str]:
    """Corpus and tokens of the runs of a sweep, for the foot of its figure.

    Args:
        config: training settings that all runs have in common.
    """
    tokens = f"{format_tokens(config.train.max_tokens)} training tokens each"
    return [config.datamodule.dataset, tokens, f"sequences of {config.datamodule.train_batch_len:,} tokens"]


def loss_against_learning_rate(
    curves: Mapping[str, Mapping[float, Sequence[float]]],
    loss_name: str,
    path: Path,
    title: str = "Learning-rate search",
    conditions: Sequence[str] = (),
) -> None:
    """Draws a search: the mean loss at each learning rate as a line with its standard error over seeds, and each seed
    as a dot. The best is ringed; runs without a loss (diverged or ended early) are crosses on the upper edge.

    The ring is dotted where the lowest loss is at an end of the rates tried, beyond which it may fall further.

    Args:
        curves: name -> learning rate -> the loss of each seed in nats per token, infinite where there is none. The
            name "" is not shown.
    """
    means = {name: {rate: float(np.mean(curve[rate])) for rate in sorted(curve)} for name, curve in curves.items()}
    lowest, rate, name = min((loss, rate, name) for name, curve in means.items() for rate, loss in curve.items())
    is_open = rate in (min(means[name]), max(means[name]))
    every = [losses for curve in curves.values() for losses in curve.values()]
    finite = [loss for losses in every for loss in losses if np.isfinite(loss)]
    fewest, most = min(map(len, every)), max(map(len, every))
    # Without a name, the title names the model.
    styles = dict(zip(means, curve_styles(list(means) if any(means) else [title]), strict=True))
    with picture(path, title, (5.6, 3.6)) as drawn:
        axes = drawn.axes[0, 0]
        for name, style in styles.items():
            _draw_search(axes, style, curves[name], means[name])
            if name:
                drawn.handles.append(line_handle(style, name, with_marker=True))
        if np.isfinite(lowest):
            ring = {"facecolors": "none", "edgecolors": "#000000", "linestyles": ":" if is_open else "-"}
            axes.scatter([rate], [lowest], s=144, zorder=4, **ring)
        rates = sorted({rate for curve in means.values() for rate in curve})
        axes.set_xscale("log")
        axes.set_xlim(rates[0] / 1.4, rates[-1] * 1.4)
        axes.xaxis.set_major_locator(FixedLocator(rates))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: rate_text(rate)))
        if finite:
            margin = 0.08 * max(max(finite) - min(finite), 1e-3)
            axes.set_ylim(min(finite) - margin, max(finite) + 2 * margin)
        axes.set(xlabel="peak learning rate", ylabel=f"{loss_name}\n(nats per token)")
        if np.isfinite(lowest) and not is_open:
            drawn.handles.append(marker_handle("o", "best", mfc="none", markersize=10))
        if most > 1:
            drawn.handles.append(marker_handle(".", "one seed", alpha=0.6))
        if any(not np.isfinite(losses).all() for losses in every):
            drawn.handles.append(marker_handle("x", "diverged or ended early"))
        if np.isfinite(lowest) and is_open:
            drawn.notes.append("dotted ring: lowest so far, at an end of the rates tried; the search is not finished")
        seeds = f"mean of {most if fewest == most else f'{fewest} to {most}'} seeds, bars: ± one standard error"
        drawn.notes += [*conditions, seeds if most > 1 else "one seed each, so that noise is unknown"]


def _draw_search(
    axes: Axes, style: CurveStyle, curve: Mapping[float, Sequence[float]], means: Mapping[float, float]
) -> None:
    inside = {rate: loss for rate, loss in means.items() if np.isfinite(loss)}
    axes.plot(
        list(inside), list(inside.values()), style.line, color=style.colour, marker=style.marker, markersize=6, zorder=3
    )
    for rate, losses in curve.items():
        seen = [loss for loss in losses if np.isfinite(loss)]
        if len(losses) > 1:
            axes.plot([rate] * len(seen), seen, ".", color=style.colour, alpha=0.5, markersize=5, zorder=2)
        if len(losses) > 1 and rate in inside:
            error = np.std(losses, ddof=1) / math.sqrt(len(losses))
            axes.errorbar([rate], [inside[rate]], [error], color=style.colour, capsize=3, linewidth=1.2)
        if len(seen) < len(losses):
            axes.plot([rate], [0.97], "x", color=style.colour, transform=axes.get_xaxis_transform(), zorder=3)
