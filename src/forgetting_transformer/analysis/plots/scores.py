"""Scores of models, task by task: a panel for each unit, with intervals and the level of chance."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from forgetting_transformer.analysis.plots.style import GREY, curve_styles, marker_handle, picture, plain_text

_TASK_CHARACTERS = 32
#: Values above are labelled by their power of ten.
_LARGE = 1e5


@dataclass
class Scores:
    """Tasks whose values share a unit, and so an axis.

    Attributes:
        unit: what the axis says, as in "accuracy (%)".
        better: "higher" or "lower"; None says nothing.
        values: task -> a value for each model, None where it has none.
        errors: task -> half of the 95 % interval of each, None where it is unknown.
        chance: task -> what guessing gives, where that is known.
    """

    unit: str
    better: str | None
    values: dict[str, Sequence[float | None]] = field(default_factory=dict)
    errors: dict[str, Sequence[float | None]] = field(default_factory=dict)
    chance: dict[str, float] = field(default_factory=dict)


def scores_by_task(
    models: Sequence[str], panels: Sequence[Scores], path: Path, title: str = "Scores", conditions: Sequence[str] = ()
) -> None:
    """Draws a row for each task and in it a marker for each model, with its interval.

    Args:
        models: names.
        panels: one after the other, two beside each other.
        path: where to write; the suffix chooses the format.
        conditions: for the foot of the figure.

    Raises:
        ValueError: there is no value at all.
    """
    if not panels:
        raise ValueError(f"Nothing to plot: no scores of {', '.join(models)}.")
    columns = min(2, len(panels))
    lines = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [0.75 + max(len(panel.values) for panel in line) * (0.18 + 0.07 * len(models)) for line in lines]
    size = (5.0 if columns == 1 else 8.4, sum(heights))
    with picture(path, title, size, len(lines), columns, height_ratios=heights) as drawn:
        found = curve_styles(models)
        for axes_row, line in zip(drawn.axes, lines, strict=True):
            most = max(len(panel.values) for panel in line)
            for axes in axes_row[len(line) :]:
                axes.set_axis_off()
            for axes, panel in zip(axes_row, line, strict=False):
                tasks = list(panel.values)
                for number, style in enumerate(found):
                    # One below the other, as equal values would hide each other.
                    shift = 0.6 * ((number + 0.5) / len(models) - 0.5)
                    for row, task in enumerate(tasks):
                        value, error = panel.values[task][number], panel.errors.get(task, [None] * len(models))[number]
                        if value is not None:
                            edge = {"markeredgecolor": "white", "markeredgewidth": 0.7}
                            axes.errorbar(
                                value,
                                row + shift,
                                xerr=error,
                                fmt=style.marker,
                                color=style.colour,
                                ms=6,
                                capsize=2,
                                **edge,
                            )
                for row, task in enumerate(tasks):
                    if task in panel.chance:
                        axes.plot([panel.chance[task]] * 2, [row - 0.45, row + 0.45], color=GREY, linestyle=":", lw=1.2)
                axes.set_yticks(range(len(tasks)), [plain_text(task, _TASK_CHARACTERS) for task in tasks])
                axes.set_ylim(most - 0.5, -0.5)
                axes.grid(axis="y", visible=False)
                for row in range(1, len(tasks)):
                    axes.axhline(row - 0.5, color="#dddddd", linewidth=0.6, zorder=0)
                axes.margins(x=0.08)
                seen = [value for values in panel.values.values() for value in values if value is not None]
                if panel.better == "lower" and max(seen) > 20 * min(seen) > 0:
                    axes.set_xscale("log")
                elif np.ptp([*seen, *panel.chance.values()]) == 0:
                    axes.set_xlim(0.0, 2 * seen[0] or 1.0)
                if axes.get_xlim()[0] <= 0 <= min(seen):
                    axes.set_xlim(left=-0.02 * axes.get_xlim()[1])
                if axes.get_xscale() == "linear":
                    large = max(map(abs, axes.get_xlim())) >= _LARGE
                    axes.xaxis.set_major_locator(MaxNLocator(nbins=3 if large else 5))
                    if large:
                        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
                axes.set_xlabel(panel.unit + (f", {panel.better} is better" if panel.better else ""))
        drawn.handles += [
            marker_handle(style.marker, name, style.colour, markersize=6)
            for style, name in zip(found, models, strict=True)
        ]
        if any(panel.chance for panel in panels):
            drawn.handles.append(Line2D([], [], color=GREY, linestyle=":", linewidth=1.2, label="chance"))
        known = any(error is not None for panel in panels for errors in panel.errors.values() for error in errors)
        drawn.notes += [*conditions, "bars: 95 % intervals" if known else "intervals are not known"]
