"""The figure of a ladder: loss against rate at each size, best rate against parameters, loss against compute."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

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
        styles = curve_styles([size.name for size in result.sizes])
        for size, best, style in zip(result.sizes, result.optima, styles, strict=True):
            means = {rate: float(np.mean(losses)) for rate, losses in sorted(size.losses.items())}
            inside = {rate: loss for rate, loss in means.items() if math.isfinite(loss)}
            left.plot([*inside], [*inside.values()], style.line, color=style.colour, marker=style.marker, ms=5)
            face = style.colour if size.complete else "none"
            if size.complete:
                left.plot([best.rate], [best.loss], "*", color=style.colour, ms=12, mec="white", mew=0.7, zorder=5)
            # No bar to an end that is unknown.
            around = np.nan_to_num([[best.rate - best.low], [best.high - best.rate]])
            look = {"color": style.colour, "marker": style.marker, "mfc": face, "ms": 6, "zorder": 5}
            middle.errorbar([size.parameters], [best.rate], around, capsize=3, **look)
            right.plot([size.compute], [best.loss], **look)
            name = f"{size.name}, shrunk" + ("" if size.complete else ", not finished")
            drawn.handles.append(line_handle(style, name, with_marker=True))
        left.set(xscale="log", xlabel="peak learning rate", ylabel=f"{loss_name}\n(nats per token)")
        middle.set(xscale="log", yscale="log", xlabel="parameters without embeddings", ylabel="best learning rate")
        right.set(xscale="log", xlabel="training FLOPs of a run", ylabel="loss at the best rate")
        every = sorted({rate for size in result.sizes for rate in size.losses})
        left.set_xticks(every, list(map(rate_text, every)))
        computes = [size.compute for size in result.sizes]
        right.set_xticks(computes, [f"{compute:.1e}".replace("e+", "e") for compute in computes])
        for axes in (left, right):
            axes.xaxis.set_minor_locator(NullLocator())
        if result.rate is not None:
            rates = [best.rate for best in result.optima]
            _law(middle, result.rate, [size.parameters for size in result.sizes if size.complete], result.full.values())
            for _, parameters, rate, _ in result.extrapolated():
                middle.plot([parameters], [rate], "D", mfc="none", mec=MAIN, ms=5)
            middle.set_ylim(min(rates) / _MOST, max(rates) * _MOST)
        if result.loss is not None:
            _law(right, result.loss, [size.compute for size in result.sizes if size.complete], ())
            losses = [best.loss for best in result.optima]
            margin = max(0.5 * (max(losses) - min(losses)), 1e-3)
            right.set_ylim(min(losses) - margin, max(losses) + margin)
        drawn.handles.append(marker_handle("*", "best rate of a size", GREY, markersize=10))
        drawn.handles.append(marker_handle("D", "extrapolated, not shrunk", MAIN, mfc="none"))
        drawn.notes += [*notes, "bars: neighbours in the grid", "lines and bands: power laws, 95 % of new sizes"]


def _law(axes: Axes, law: PowerLaw, measured: Sequence[float], beyond: Iterable[float]) -> None:
    """A line through what was measured, dotted outside of it, with the band of a new measurement."""
    x = np.geomspace(min(measured) / 1.3, max([*measured, *beyond]) * 1.3, 100)
    inside = x <= max(measured) * 1.05
    for part, line in ((inside, "-"), (~inside, ":")):
        axes.plot(x[part], [law.at(value) for value in x[part]], line, color=MAIN, zorder=2)
    band = np.array([law.interval(value) for value in x])
    if np.isfinite(band).all():
        axes.fill_between(x, band[:, 0], band[:, 1], color=MAIN, alpha=0.15, linewidth=0)
