"""The figure of a ladder: loss against rate at each size, best rate against parameters, loss against compute."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from forgetting_transformer.analysis.plots.style import GREY, MAIN, curve_styles, line_handle, marker_handle, picture
from forgetting_transformer.analysis.tables import rate_text
from studies.engine.scaling import Fit, PowerLaw

#: Beyond so many times the best rates of the sizes, a band leaves the picture: it says "unknown".
_MOST = 30.0


def ladder_figure(result: Fit, loss_name: str, path: Path, title: str, notes: Sequence[str]) -> None:
    """Draws a ladder.

    Args:
        loss_name: of the vertical axes.
        path: where to write; the suffix chooses the format.
        notes: for the foot of the figure.
    """
    with picture(path, title, (10.2, 3.6), 1, 3) as drawn:
        left, middle, right = drawn.axes[0]
        found = curve_styles([size.name for size in result.sizes])
        for size, best, style in zip(result.sizes, result.optima, found, strict=True):
            means = {rate: float(np.mean(losses)) for rate, losses in sorted(size.losses.items())}
            inside = {rate: loss for rate, loss in means.items() if math.isfinite(loss)}
            left.plot(list(inside), list(inside.values()), style.marker, color=style.colour, ms=5)
            left.plot(list(inside), list(inside.values()), style.line, color=style.colour, alpha=0.35, linewidth=1)
            if best.vertex:
                near = [rate for rate in inside if best.low <= rate <= best.high] or [best.rate]
                x = np.linspace(math.log(min(near)), math.log(max(near)), 50)
                y = best.loss + best.curvature * (x - math.log(best.rate)) ** 2
                left.plot(np.exp(x), y, "-", color=style.colour, linewidth=1.8)
            if size.complete:
                left.plot([best.rate], [best.loss], "*", color=style.colour, ms=12, mec="white", mew=0.7, zorder=5)
            face = style.colour if size.complete else "none"
            # No bar to an end that is unknown.
            around = np.nan_to_num([[best.rate - best.low], [best.high - best.rate]])
            middle.errorbar(
                [size.parameters],
                [best.rate],
                around,
                color=style.colour,
                marker=style.marker,
                capsize=3,
                ms=6,
                mfc=face,
                zorder=5,
            )
            right.plot([size.compute], [best.loss], style.marker, color=style.colour, mfc=face, ms=6, zorder=5)
            name = f"{size.name}, shrunk" + ("" if size.complete else ", not finished")
            drawn.handles.append(line_handle(style, name, with_marker=True))
        drawn.handles.append(
            marker_handle("*", "best rate of a size: of the parabola or the grid", GREY, markersize=10)
        )
        left.set(xscale="log", xlabel="peak learning rate", ylabel=f"{loss_name}\n(nats per token)")
        middle.set(xscale="log", yscale="log", xlabel="parameters without embeddings", ylabel="best learning rate")
        right.set(xscale="log", xlabel="training FLOPs of a run", ylabel="loss at the best rate")
        every = sorted({rate for size in result.sizes for rate in size.losses})
        left.xaxis.set_major_locator(FixedLocator(every))
        left.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: rate_text(rate)))
        right.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        right.xaxis.set_major_formatter(FuncFormatter(lambda flops, _: f"{flops:.0e}".replace("e+", "e")))
        for axes in (left, right):
            axes.xaxis.set_minor_locator(NullLocator())
        if result.rate is not None:
            rates = [best.rate for best in result.optima]
            sizes = [size.parameters for size in result.sizes if size.complete]
            _law(middle, result.rate, sizes, list(result.full.values()))
            for parameters in result.full.values():
                middle.plot([parameters], [result.rate.at(parameters)], "D", mfc="none", mec=MAIN, ms=5)
            middle.set_ylim(min(rates) / _MOST, max(rates) * _MOST)
            drawn.handles.append(Line2D([], [], color=MAIN, label="power law through the sizes"))
            drawn.handles.append(
                Line2D(
                    [], [], color=MAIN, linestyle=":", marker="D", mfc="none", ms=5, label="extrapolated, not shrunk"
                )
            )
            if math.isfinite(result.rate.half_width):
                drawn.handles.append(Patch(color=MAIN, alpha=0.15, linewidth=0, label="95 % interval of a new size"))
        if result.loss is not None:
            _law(right, result.loss, [size.compute for size in result.sizes if size.complete], [])
            losses = [best.loss for best in result.optima]
            margin = max(0.5 * (max(losses) - min(losses)), 1e-3)
            right.set_ylim(min(losses) - margin, max(losses) + margin)
        drawn.handles.append(
            Line2D([], [], color=GREY, marker="|", linestyle="-", label="bars: neighbours in the grid")
        )
        drawn.notes += notes


def _law(axes: Axes, law: PowerLaw, measured: Sequence[float], beyond: Sequence[float]) -> None:
    """A line through what was measured, dotted outside of it, with the band of a new measurement."""
    low, high = min(measured), max([*measured, *beyond])
    x = np.geomspace(low / 1.3, high * 1.3, 100)
    inside = x <= max(measured) * 1.05
    axes.plot(x[inside], [law.at(value) for value in x[inside]], "-", color=MAIN, zorder=2)
    axes.plot(x[~inside], [law.at(value) for value in x[~inside]], ":", color=MAIN, zorder=2)
    band = np.array([law.interval(value) for value in x])
    if np.isfinite(band).all():
        axes.fill_between(x, band[:, 0], band[:, 1], color=MAIN, alpha=0.15, linewidth=0)
