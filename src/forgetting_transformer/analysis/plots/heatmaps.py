"""Figures of evaluations that are not curves: matrices of heads, heads over layers and training, grids of scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import FuncFormatter, MaxNLocator

from forgetting_transformer.analysis.plots.style import MAIN, Picture, marker_handle, picture, plain_text

_AT_LEAST = "at least this: not forgotten within the text"
_MEMORY = "memory length: tokens until the decay reaches 1/e, median over the second half of the text"
#: Cells of a grid of scores, in each direction, whose numbers are written into them.
_NUMBERED_CELLS = 12
#: Grids of models beside each other.
_GRIDS_IN_A_ROW = 7


def head_matrices(
    pictures: Mapping[tuple[int, int], np.ndarray],
    path: Path,
    length: int,
    label: str,
    titles: Mapping[tuple[int, int], str] | None = None,
    threshold: float | None = None,
    title: str = "",
    conditions: Sequence[str] = (),
) -> None:
    """Draws one square picture a head, a row of them a layer; queries run down, keys to the right.

    Args:
        pictures: (layer, head) -> values from 0 to 1.
        length: of the text, tokens.
        label: of the colour bar.
        titles: what stands over a picture, default its layer and head.
        threshold: values below stay white.
        title: of the figure, default the label.
        conditions: for the foot of the figure.
    """
    layers = sorted({layer for layer, _ in pictures})
    columns = max(sum(key[0] == layer for key in pictures) for layer in layers)
    size = (1.0 + 1.75 * columns, 0.3 + 1.85 * len(layers))
    with picture(path, title or label, size, len(layers), columns) as drawn:
        image: Any = None
        for row, layer in zip(drawn.axes, layers, strict=True):
            heads = sorted(head for one, head in pictures if one == layer)
            for axes, head in zip(row, heads, strict=False):
                values = pictures[layer, head]
                hidden = np.triu(np.ones_like(values, dtype=bool), k=1)
                if threshold is not None:
                    hidden |= values < threshold
                image = axes.imshow(
                    np.ma.masked_array(values, hidden),
                    cmap=_colours(),
                    vmin=threshold or 0,
                    vmax=1,
                    extent=(0, length, length, 0),
                    interpolation="nearest",
                )
                axes.set_title((titles or {}).get((layer, head), f"layer {layer}, head {head}"), fontsize=7.5)
                axes.set(xticks=(0, length // 2, length), yticks=(0, length // 2, length))
                axes.tick_params(length=2, labelsize=6.5)
                axes.grid(visible=False)
            for axes in row[len(heads) :]:
                axes.set_axis_off()
        drawn.axes[-1, 0].set_xlabel("key position j (tokens)", fontsize=8)
        drawn.axes[-1, 0].set_ylabel("query position i (tokens)", fontsize=8)
        drawn.figure.colorbar(image, ax=drawn.axes, label=label, shrink=0.7, aspect=30)
        drawn.notes += conditions


def heads_by_layer(
    layers: Sequence[int],
    memory: Sequence[float],
    is_bound: Sequence[bool],
    path: Path,
    title: str = "Memory length of every head",
    conditions: Sequence[str] = (),
) -> None:
    """Draws the memory length of every head over its layer, on a logarithmic axis; heads of a layer stand beside each
    other, so that equal ones are all seen."""
    with picture(path, title, (5.2, 2.9)) as drawn:
        axes = drawn.axes[0, 0]
        _memory_axis(axes)
        place = [layers[:number].count(layer) for number, layer in enumerate(layers)]
        most = max(place) + 1
        beside = [layer + 0.6 * ((number + 0.5) / most - 0.5) for layer, number in zip(layers, place, strict=True)]
        for bound, marker in ((False, "o"), (True, "^")):
            chosen = [(x, max(y, 0.5)) for x, y, b in zip(beside, memory, is_bound, strict=True) if b == bound]
            if chosen:
                axes.plot(*zip(*chosen, strict=True), marker, color=MAIN, markersize=4.5, alpha=0.8)
        axes.set_xlabel("layer (heads side by side)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="x", visible=False)
        if any(is_bound):
            drawn.handles.append(marker_handle("^", _AT_LEAST, MAIN))
        drawn.notes += [*conditions, _MEMORY]


def score_grid(
    scores: np.ndarray,
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
    """Draws a score for every depth (rows) and length (columns); missing scores stay grey.

    Args:
        scores: `(depths, lengths)`, NaN for missing.
        depths: 0 (beginning of the context) to 1.
        limits: ends of the colour scale.
        train_length: drawn as a dashed line between the lengths within and beyond it.
        conditions: for the foot of the figure.
    """
    # So large at least that the labels of a small grid have room.
    size = (max(4.4, 1.9 + 0.48 * len(lengths)), max(2.7, 1.2 + 0.26 * len(depths)))
    with picture(path, title, size) as drawn:
        axes = drawn.axes[0, 0]
        image = _grid(axes, scores, limits)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right")
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
        axes.set(xlabel="context length (tokens)", ylabel="depth of the needle")
        if max(scores.shape) <= _NUMBERED_CELLS:
            middle = sum(limits) / 2
            for (row, column), value in np.ndenumerate(scores):
                if np.isfinite(value):
                    colour = "black" if value > middle else "white"
                    axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=6.5, color=colour)
        _show_training_length(drawn, [axes], lengths, train_length)
        drawn.figure.colorbar(image, ax=axes, label=label)
        drawn.notes += conditions


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
        depths, label, limits, train_length, conditions: as of `score_grid`.
    """
    modes, models = (list(dict.fromkeys(key[place] for key in scores)) for place in (0, 1))
    columns = min(len(models), _GRIDS_IN_A_ROW)
    blocks = -(-len(models) // columns)
    size = (1.6 + 1.2 * columns, 0.4 + 1.15 * len(modes) * blocks)
    with picture(path, title, size, len(modes) * blocks, columns) as drawn:
        image: Any = None
        for axes in drawn.axes.flat:
            axes.set_axis_off()
        cells = {
            (place // columns * len(modes) + number, place % columns): (mode, model)
            for place, model in enumerate(models)
            for number, mode in enumerate(modes)
            if (mode, model) in scores
        }
        for (row, column), (mode, model) in cells.items():
            axes = drawn.axes[row, column]
            axes.set_axis_on()
            image = _grid(axes, scores[mode, model], limits)
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
        _show_training_length(drawn, [drawn.axes[cell] for cell in cells], lengths, train_length, 0.6)
        bar = drawn.figure.colorbar(image, ax=drawn.axes, shrink=0.8, aspect=30)
        bar.set_label(label, fontsize=7.5)
        bar.ax.tick_params(labelsize=7)
        drawn.notes += conditions


def _grid(axes: Axes, scores: np.ndarray, limits: tuple[float, float]) -> Any:
    axes.set_facecolor("#bbbbbb")
    axes.grid(visible=False)
    shown = np.ma.masked_invalid(scores)
    return axes.imshow(shown, cmap="viridis", vmin=limits[0], vmax=limits[1], aspect="auto")


def _show_training_length(
    drawn: Picture, grids: Sequence[Axes], lengths: Sequence[int], train_length: int | None, scale: float = 1.0
) -> None:
    """A dashed line behind the lengths within it; white over black is seen on every colour of the scale."""
    within = 0 if train_length is None else sum(length <= train_length for length in lengths)
    if 0 < within < len(lengths):
        for axes in grids:
            axes.axvline(within - 0.5, color="black", linewidth=2.6 * scale)
            axes.axvline(within - 0.5, color="white", linestyle=(0, (4, 2)), linewidth=1.3 * scale)
        drawn.notes.append(f"dashed line: training length, {train_length:,} tokens")
    elif train_length is not None:
        side = "within" if within else "beyond"
        drawn.notes.append(f"all lengths are {side} the training length of {train_length:,} tokens")


def _memory_axis(axes: Axes) -> None:
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "<1" if value < 1 else f"{value:,.0f}"))
    axes.set_ylabel("memory length (tokens)")


def _colours() -> ListedColormap:
    """Viridis reversed and without its palest yellow, so that 0 is distinct from the white of what is not shown."""
    return ListedColormap(mpl.colormaps["viridis_r"](np.linspace(0.05, 1, 256)))
