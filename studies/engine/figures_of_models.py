"""Figures of many models at once: loss by octaves of positions, and needle in a haystack."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.analysis.plots.heatmaps import draw_grid, mark_training_length
from forgetting_transformer.analysis.plots.losses import (
    draw_differences,
    mark_training,
    position_axis,
    position_limits,
)
from forgetting_transformer.analysis.plots.style import (
    Curve,
    curve_styles,
    draw_line,
    line_handle,
    picture,
    plain_text,
    set_limits,
)

#: Grids of models beside each other.
_GRIDS_IN_A_ROW = 7


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
            draw_line(left, style, x, y, marker=style.marker, markersize=4.5)
            curves.append((name, style, x, y))
            drawn.handles.append(line_handle(style, name, with_marker=True))
        begins = [begin for octaves in losses.values() for begin in octaves]
        position_axis(left, min(begins), 2 * max(begins))
        left.set(xlabel="token position, by octaves", ylabel="mean loss of the octave\n(nats per token)")
        draw_differences(right, rows)
        for axes in (left, right):
            marks = mark_training(axes, train_length, list(losses))
        drawn.handles += marks
        set_limits(left, *position_limits([y for *_, y in curves]), curves)
        left.set_title("mean of each octave of positions", loc="left")
        right.set_title(f"above {rows[0]['against']}, on the same documents", loc="left")
        drawn.notes += [*conditions, "bars: ± one standard error of the differences"]


def score_grids(
    scores: Mapping[tuple[str, str], np.ndarray],
    lengths: Sequence[int],
    depths: Sequence[float],
    path: Path,
    *,
    title: str,
    label: str,
    limits: tuple[float, float],
    train_length: int | None = None,
    conditions: Sequence[str] = (),
) -> None:
    """Draws the grids of several models beside each other, a row for each mode; missing scores stay grey.

    Args:
        scores: (mode, model) -> `(depths, lengths)`, NaN for missing.
        lengths: tokens of the contexts. depths: 0 (beginning of the context) to 1.
        label, limits: of the colour scale.
        train_length: drawn as a dashed line between the lengths within and beyond it.
        conditions: for the foot of the figure.
    """
    modes, models = (list(dict.fromkeys(key[place] for key in scores)) for place in (0, 1))
    columns = min(len(models), _GRIDS_IN_A_ROW)
    blocks = -(-len(models) // columns)
    size = (1.6 + 1.2 * columns, 0.4 + 1.15 * len(modes) * blocks)
    with picture(path, title, size, len(modes) * blocks, columns) as drawn:
        image: Any = None
        cells = {
            (place // columns * len(modes) + number, place % columns): (mode, model)
            for place, model in enumerate(models)
            for number, mode in enumerate(modes)
            if (mode, model) in scores
        }
        for (row, column), (mode, model) in cells.items():
            axes = drawn.axes[row, column]
            image = draw_grid(axes, scores[mode, model], limits)
            block = range(row - row % len(modes), row - row % len(modes) + len(modes))
            rows = [number for number in block if (number, column) in cells]
            is_left = not any((row, other) in cells for other in range(column))
            first_and_last = [sorted({0, len(values) - 1}) for values in (lengths, depths)]
            axes.set_xticks(first_and_last[0], [f"{lengths[n]:,}" for n in first_and_last[0]], fontsize=7)
            axes.set_yticks(first_and_last[1], [f"{100 * depths[n]:.0f}%" for n in first_and_last[1]], fontsize=7)
            axes.tick_params(length=2, labelbottom=row == rows[-1], labelleft=is_left)
            if row == rows[0]:
                axes.set_title(plain_text(model, 18), fontsize=7.5)
            if is_left:
                axes.set_ylabel(f"{mode} mode\ndepth", fontsize=7.5)
        last = max(row for row, _ in cells)
        first = min(column for row, column in cells if row == last)
        drawn.axes[last, first].set_xlabel("context length (tokens)", fontsize=7.5)
        mark_training_length(drawn, [drawn.axes[cell] for cell in cells], lengths, train_length, 0.6)
        bar = drawn.figure.colorbar(image, ax=drawn.axes, shrink=0.8, aspect=30)
        bar.set_label(label, fontsize=7.5)
        bar.ax.tick_params(labelsize=7)
        drawn.notes += conditions
