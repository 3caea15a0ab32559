"""Scores of models, task by task: a panel for each unit, with intervals and the level of chance; and their tables."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from forgetting_transformer.analysis import AnalysisError, outputs
from forgetting_transformer.analysis.plots.style import (
    GREY,
    MARKER,
    CurveStyle,
    curve_styles,
    marker_handle,
    picture,
    plain_text,
)
from forgetting_transformer.analysis.tables import (
    Column,
    Rows,
    Table,
    has_numbers,
    latex,
    markdown,
)
from forgetting_transformer.files import write_atomically

_TASK_CHARACTERS = 32


def write_tables(
    rows: Rows,
    columns: Sequence[Column],
    folder: Path | None,
    title: str = "Scores",
    conditions: Sequence[str] = (),
    differences: Table | None = None,
) -> None:
    """Prints the tables and, if there is a folder, writes `table.md`, `table.tex` and `scores.png` into it.

    Args:
        title: of the figure.
        differences: between models, on the same questions; for `table.md`, below the scores.

    Raises:
        AnalysisError: there is no number at all, or the folder holds a file of one of these names that is not such a
            table or was changed since.
    """
    if not has_numbers(rows, columns):
        raise AnalysisError(f"nothing to table: the results of {', '.join(rows)} hold no number")
    texts = {"table.md": markdown(rows, columns), "table.tex": latex(rows, columns)}
    if differences is not None:
        texts["table.md"] += f"\n{differences.markdown()}\n"
    print("\n".join(texts.values()), end="")
    if folder is not None:
        with outputs.writing(folder, f"the table of {title}") as new:
            for name, text in texts.items():
                write_atomically(new / name, text, durable=False)
            draw_scores(rows, columns, new / "scores.png", title, conditions)


def draw_scores(
    rows: Rows, columns: Sequence[Column], path: Path, title: str = "Scores", conditions: Sequence[str] = ()
) -> None:
    """Draws the table: a panel for each unit, and in it a line of markers for each column, one for each model, with its
    interval. Columns that no model has a value in are left out; at least one has one.
    """
    units: dict[tuple[str, str | None], list[Column]] = {}
    for column in columns:
        if has_numbers(rows, [column]):
            units.setdefault((column.unit, column.better), []).append(column)
    beside = min(2, len(units))
    lines = [list(units.values())[start : start + beside] for start in range(0, len(units), beside)]
    heights = [0.75 + max(map(len, line)) * (0.18 + 0.07 * len(rows)) for line in lines]
    size = (5.0 if beside == 1 else 8.4, sum(heights))
    title = title if len(rows) > 1 else f"{title} of {next(iter(rows))}"
    styles = curve_styles(list(rows))
    with picture(path, title, size, len(lines), beside, height_ratios=heights) as drawn:
        for axes_row, line in zip(drawn.axes, lines, strict=True):
            for axes, tasks in zip(axes_row, line, strict=False):
                _draw_unit(axes, rows, tasks, styles)
                axes.set_ylim(max(map(len, line)) - 0.5, -0.5)
        drawn.handles += [
            marker_handle(style.marker, name, style.colour, markersize=6)
            for style, name in zip(styles, rows, strict=True)
        ]
        if any(column.chance is not None for tasks in units.values() for column in tasks):
            drawn.handles.append(Line2D([], [], color=GREY, linestyle=":", linewidth=1.2, label="chance"))
        known = any(math.isfinite(value.half_width) for row in rows.values() for value in row.values())
        drawn.notes += [*conditions, "bars: 95 % intervals" if known else "intervals are not known"]


def _draw_unit(axes: Axes, rows: Rows, tasks: Sequence[Column], styles: Sequence[CurveStyle]) -> None:
    """Draws the tasks of one unit, from top to bottom."""
    seen: list[float] = []
    for line, task in enumerate(tasks):
        for model, (row, style) in enumerate(zip(rows.values(), styles, strict=True)):
            if score := row.get(task.key):
                # One below the other, as equal values would hide each other.
                place = line + 0.6 * ((model + 0.5) / len(rows) - 0.5)
                error = score.half_width if math.isfinite(score.half_width) else None
                axes.errorbar(score.value, place, xerr=error, fmt=style.marker, color=style.colour, capsize=2, **MARKER)
                seen.append(score.value)
        if task.chance is not None:
            axes.plot([task.chance] * 2, [line - 0.45, line + 0.45], color=GREY, linestyle=":", linewidth=1.2)
            seen.append(task.chance)
    axes.set_yticks(range(len(tasks)), [plain_text(task.title, _TASK_CHARACTERS) for task in tasks])
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.08)
    better = tasks[0].better
    if better == "lower" and max(seen) > 20 * min(seen) > 0:
        axes.set_xscale("log")
    elif np.ptp(seen) == 0:
        axes.set_xlim(0.0, 2 * seen[0] or 1.0)
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    axes.set_xlabel(tasks[0].unit + (f", {better} is better" if better else ""))
