"""Figures of evaluations that are not curves: matrices of heads, heads over layers and training, grids of scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import FuncFormatter, MaxNLocator

from forgetting_transformer.analysis.evaluations import Evaluation, Number
from forgetting_transformer.analysis.plots.style import MAIN, marker_handle, picture

_AT_LEAST = "at least this: not forgotten within the text"
_MEMORY = "memory length: tokens until the decay reaches 1/e, median over the second half of the text"
#: Largest grid, in cells per direction, that shows its numbers.
_NUMBERED_CELLS = 12
#: Score -> its name for people, and the ends of its scale.
_SCORES = {
    "words": ("share of the answer's words", (0.0, 1.0)),
    "exact": ("answered word for word", (0.0, 1.0)),
    "judge": ("rating by {judge}", (1.0, 10.0)),
}


def head_matrices(
    pictures: Mapping[tuple[int, int], np.ndarray],
    titles: Mapping[tuple[int, int], str],
    path: Path,
    length: int,
    title: str,
    label: str,
    threshold: float | None,
    conditions: Sequence[str],
) -> None:
    """Draws one square picture a head, a row of them a layer; queries run down, keys to the right.

    Args:
        pictures: (layer, head) -> values from 0 to 1.
        titles: what stands over each picture.
        length: of the text, tokens.
        title: of the figure.
        label: of the colour bar.
        threshold: values below stay white.
    """
    layers = sorted({layer for layer, _ in pictures})
    columns = max(sum(key[0] == layer for key in pictures) for layer in layers)
    # Without the palest yellow, so that 0 is distinct from the white of what is not shown.
    colours = ListedColormap(mpl.colormaps["viridis_r"](np.linspace(0.05, 1, 256)))
    size = (1.0 + 1.75 * columns, 0.3 + 1.85 * len(layers))
    with picture(path, title, size, len(layers), columns) as drawn:
        image: Any = None
        for row, layer in zip(drawn.axes, layers, strict=True):
            for axes, head in zip(row, sorted(head for one, head in pictures if one == layer), strict=False):
                values = pictures[layer, head]
                hidden = np.triu(np.ones_like(values, dtype=bool), k=1)
                if threshold is not None:
                    hidden |= values < threshold
                image = axes.imshow(
                    np.ma.masked_array(values, hidden),
                    cmap=colours,
                    vmin=threshold or 0,
                    vmax=1,
                    extent=(0, length, length, 0),
                    interpolation="nearest",
                )
                axes.set_title(titles[layer, head], fontsize=7.5)
                axes.set(xticks=(0, length // 2, length), yticks=(0, length // 2, length))
                axes.tick_params(length=2, labelsize=6.5)
                axes.grid(visible=False)
        drawn.axes[-1, 0].set_xlabel("key position j (tokens)", fontsize=8)
        drawn.axes[-1, 0].set_ylabel("query position i (tokens)", fontsize=8)
        drawn.figure.colorbar(image, ax=drawn.axes, label=label, shrink=0.7, aspect=30)
        drawn.notes += conditions


def heads_by_layer(
    layers: Sequence[int],
    memory: Sequence[float],
    is_bound: Sequence[bool],
    path: Path,
    title: str,
    conditions: Sequence[str] = (),
) -> None:
    """Draws the memory length of every head over its layer, on a logarithmic axis; heads of a layer stand beside each
    other, so that equal ones are all seen."""
    with picture(path, title, (5.2, 2.9)) as drawn:
        axes = drawn.axes[0, 0]
        place = [layers[:number].count(layer) for number, layer in enumerate(layers)]
        beside = [layer + 0.6 * ((n + 0.5) / (max(place) + 1) - 0.5) for layer, n in zip(layers, place, strict=True)]
        for x, y, bound in zip(beside, memory, is_bound, strict=True):
            axes.plot(x, max(y, 0.5), "^" if bound else "o", color=MAIN, markersize=4.5, alpha=0.8)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "<1" if value < 1 else f"{value:,.0f}"))
        axes.set(xlabel="layer (heads side by side)", ylabel="memory length (tokens)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="x", visible=False)
        if any(is_bound):
            drawn.handles.append(marker_handle("^", _AT_LEAST, MAIN))
        drawn.notes += [*conditions, _MEMORY]


def draw_needles(evaluation: Evaluation, score: str, *paths: Path) -> None:
    """Draws the heat-map of one score of needle in a haystack into each file: a row for every depth, a column for
    every length. Missing scores stay grey.

    Args:
        score: "words" or "exact" (0 to 1), or "judge" (1 to 10).
    """
    cells = [number for number in evaluation.numbers if number.metric == score]
    lengths = sorted({number.at["length"] for number in evaluation.numbers})
    depths = sorted({number.at["depth"] for number in evaluation.numbers})
    matrix = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        matrix[depths.index(cell.at["depth"]), lengths.index(cell.at["length"])] = cell.value
    mode = evaluation.settings["mode"]
    label, limits = _SCORES[score]
    # So large at least that the labels of a small grid have room.
    size = (max(4.4, 1.9 + 0.48 * len(lengths)), max(2.7, 1.2 + 0.26 * len(depths)))
    for path in paths:
        with picture(path, f"{evaluation.model}, needle in a haystack, mode {mode}", size) as drawn:
            axes = drawn.axes[0, 0]
            axes.set_facecolor("#bbbbbb")
            axes.grid(visible=False)
            shown = np.ma.masked_invalid(matrix)
            image = axes.imshow(shown, cmap="viridis", vmin=limits[0], vmax=limits[1], aspect="auto")
            axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right")
            axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
            axes.set(xlabel="context length (tokens)", ylabel="depth of the needle")
            if max(matrix.shape) <= _NUMBERED_CELLS:
                for (row, column), value in np.ndenumerate(matrix):
                    if np.isfinite(value):
                        colour = "black" if value > sum(limits) / 2 else "white"
                        axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=6.5, color=colour)
            drawn.notes += _mark_training_length(axes, lengths, evaluation.about.get("train_length"))
            drawn.figure.colorbar(image, ax=axes, label=label.format(judge=evaluation.settings.get("judge")))
            drawn.notes += _described(cells)


def _described(cells: Sequence[Number]) -> list[str]:
    """Number of prompts in a grid, and their mean score."""
    samples = np.array([number.samples or 1 for number in cells])
    mean = samples @ np.array([number.value for number in cells]) / max(1, samples.sum())
    most = int(max(samples, default=0))
    return [f"{most} prompt{'s' * (most != 1)} a cell", f"mean {mean:.3f} over {samples.sum()} prompts"]


def _mark_training_length(axes: Axes, lengths: Sequence[int], train_length: int | None) -> list[str]:
    """A dashed line behind the lengths within it; white over black is seen on every colour of the scale."""
    if train_length is None:
        return []
    within = sum(length <= train_length for length in lengths)
    if within in (0, len(lengths)):
        return [f"all lengths are {'within' if within else 'beyond'} the training length of {train_length:,} tokens"]
    axes.axvline(within - 0.5, color="black", linewidth=2.6)
    axes.axvline(within - 0.5, color="white", linestyle=(0, (4, 2)), linewidth=1.3)
    return [f"dashed line: training length, {train_length:,} tokens"]
