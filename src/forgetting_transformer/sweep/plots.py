"""Figures of sweeps: loss against learning rate; loss of several models against tokens and against FLOPs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from forgetting_transformer.evaluation.plots import _STYLE, _add_legend, _line, _look, _save


def loss_against_learning_rate(
    curves: Mapping[str, Mapping[float, Sequence[float]]], loss_name: str, path: Path
) -> None:
    """Draws a search: the mean loss at each learning rate as a line, each seed as a dot, the best ringed, and runs
    without a loss (diverged or ended early) as crosses on the upper edge.

    Args:
        curves: name -> learning rate -> the loss of each seed in nats per token, infinite where there is none. The
            name "" is not shown.
        path: where to write; the suffix chooses the format.
    """
    means = {
        name: {rate: float(np.mean(losses)) for rate, losses in sorted(curve.items())} for name, curve in curves.items()
    }
    finite = [loss for curve in curves.values() for losses in curve.values() for loss in losses if np.isfinite(loss)]
    best = min(((m, rate, name) for name, curve in means.items() for rate, m in curve.items()), default=None)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 3.8))
        axes = figure.add_subplot()
        for number, (name, curve) in enumerate(means.items()):
            colour, line, marker = _look(number)
            inside = {rate: loss for rate, loss in curve.items() if np.isfinite(loss)}
            axes.plot(list(inside), list(inside.values()), line, color=colour, marker=marker, markersize=6, zorder=3)
            for rate, losses in curves[name].items():
                seen = [loss for loss in losses if np.isfinite(loss)]
                if len(losses) > 1:
                    axes.plot([rate] * len(seen), seen, ".", color=colour, alpha=0.5, markersize=5, zorder=2)
                if len(seen) < len(losses):
                    axes.plot([rate], [0.97], "x", color=colour, transform=axes.get_xaxis_transform(), zorder=3)
        if best is not None and np.isfinite(best[0]):
            axes.plot([best[1]], [best[0]], "o", mfc="none", mec="#000000", markersize=12, zorder=4)
        rates = sorted({rate for curve in means.values() for rate in curve})
        axes.set_xscale("log")
        axes.set_xlim(rates[0] / 1.4, rates[-1] * 1.4)
        axes.xaxis.set_major_locator(FixedLocator(rates))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:.0e}".replace("e-0", "e-")))
        if finite:
            margin = 0.08 * max(max(finite) - min(finite), 1e-3)
            axes.set_ylim(min(finite) - margin, max(finite) + 2 * margin)
        axes.set(xlabel="peak learning rate", ylabel=f"{loss_name} (nats per token)")
        handles = [_line(number, name, with_marker=True) for number, name in enumerate(means) if name]
        if best is not None and np.isfinite(best[0]):
            handles.append(_mark("o", "best", mfc="none", markersize=10))
        if any(len(losses) > 1 for curve in curves.values() for losses in curve.values()):
            handles.append(_mark(".", "one seed", alpha=0.6))
        if any(not np.isfinite(losses).all() for curve in curves.values() for losses in curve.values()):
            handles.append(_mark("x", "diverged or ended early"))
        _add_legend(figure, handles)
        _save(figure, path)


def _mark(marker: str, label: str, **look: object) -> Line2D:
    return Line2D([], [], color="#333333", linestyle="none", marker=marker, label=label, **look)
