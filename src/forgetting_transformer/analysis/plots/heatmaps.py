"""Figures of the evaluations that are not curves: matrices of heads, heads over layers and training, grids of scores."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from forgetting_transformer.analysis.plots.losses import format_tokens

_STYLE = {"font.family": "DejaVu Sans", "font.size": 8, "figure.constrained_layout.use": True}
_DPI = 150
_AT_LEAST = "▲ at least this: not forgotten within the text"
_TITLE_CHARACTERS = 11  # in an inch of the width of a grid of scores


def head_matrices(
    pictures: Mapping[tuple[int, int], np.ndarray],
    path: Path,
    length: int,
    label: str,
    titles: Mapping[tuple[int, int], str] | None = None,
    threshold: float | None = None,
) -> None:
    """Draws one square picture a head, a row of them a layer; queries run down, keys to the right.

    Args:
        pictures: (layer, head) -> values from 0 to 1.
        length: of the text, tokens.
        label: of the colour bar.
        titles: what stands over a picture, default its layer and head.
        threshold: values below stay white.
    """
    layers = sorted({layer for layer, _ in pictures})
    columns = max(sum(key[0] == layer for key in pictures) for layer in layers)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(1.0 + 1.75 * columns, 0.5 + 1.85 * len(layers)))
        grid = figure.subplots(len(layers), columns, squeeze=False)
        image = None
        for row, layer in zip(grid, layers, strict=True):
            heads = sorted(head for one, head in pictures if one == layer)
            for axes, head in zip(row, heads, strict=False):
                picture = pictures[layer, head]
                hidden = np.triu(np.ones_like(picture, dtype=bool), k=1)
                if threshold is not None:
                    hidden |= picture < threshold
                image = axes.imshow(
                    np.ma.masked_array(picture, hidden),
                    cmap=_colours(),
                    vmin=threshold or 0,
                    vmax=1,
                    extent=(0, length, length, 0),
                    interpolation="nearest",
                )
                axes.set_title((titles or {}).get((layer, head), f"layer {layer}, head {head}"), fontsize=7.5)
                axes.set(xticks=(0, length // 2, length), yticks=(0, length // 2, length))
                axes.tick_params(length=2, labelsize=6.5)
            for axes in row[len(heads) :]:
                axes.set_axis_off()
        figure.supxlabel("key position j", fontsize=8)
        figure.supylabel("query position i", fontsize=8)
        figure.colorbar(image, ax=grid, label=label, shrink=0.7, aspect=30)
        _save(figure, path)


def heads_by_layer(layers: Sequence[int], memory: Sequence[float], is_bound: Sequence[bool], path: Path) -> None:
    """Draws the memory length of every head over its layer, on a logarithmic axis."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 3.0))
        axes = figure.add_subplot()
        _memory_axis(axes)
        for bound, marker in ((False, "o"), (True, "^")):
            chosen = [(x, max(y, 0.5)) for x, y, b in zip(layers, memory, is_bound, strict=True) if b == bound]
            if chosen:
                axes.plot(*zip(*chosen, strict=True), marker, color="#0072B2", markersize=5, alpha=0.8)
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if any(is_bound):
            axes.set_title(_AT_LEAST, fontsize=7.5, loc="left")
        _save(figure, path)


def heads_over_training(
    tokens: Sequence[int],
    memory: Mapping[tuple[int, int], Sequence[float]],
    is_bound: Mapping[tuple[int, int], Sequence[bool]],
    pruned: Sequence[float],
    path: Path,
) -> None:
    """Draws the memory length of every head against training tokens, and below it the share of tiles that pruning skips.

    Layers have colours, heads of a layer share one.

    Args:
        memory, is_bound: (layer, head) -> tokens, and whether that is a lower bound, at each of the checkpoints.
        pruned: share of the tiles of all heads, 0 to 1, at each of them.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.8, 4.6))
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        _memory_axis(axes)
        _light_grid(below)
        below.plot(tokens, 100 * np.array(pruned), color="black", marker="o", markersize=2.5, linewidth=1.1)
        below.set(ylim=(-4, 104), yticks=(0, 50, 100), ylabel="tiles pruned (%)", xlabel="training tokens")
        below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tokens(value)))
        layers = sorted({layer for layer, _ in memory})
        colours = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(layers)))
        for key, values in memory.items():
            colour, values = colours[layers.index(key[0])], np.maximum(values, 0.5)
            axes.plot(tokens, values, color=colour, marker="o", markersize=2.5, linewidth=1.1)
            at_least = np.array(is_bound[key])
            axes.plot(np.array(tokens)[at_least], values[at_least], "^", color=colour, markersize=6)
        if any(map(any, is_bound.values())):
            axes.set_title(_AT_LEAST, fontsize=7.5, loc="left")
        shown = (
            layers if len(layers) <= 8 else [layers[i] for i in np.linspace(0, len(layers) - 1, 6).round().astype(int)]
        )
        axes.legend(
            handles=[Line2D([], [], color=colours[layers.index(layer)], label=f"layer {layer}") for layer in shown],
            frameon=False,
            fontsize=7,
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
        )
        _save(figure, path)


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
) -> None:
    """Draws a score for every depth (rows) and length (columns); missing scores stay grey.

    Args:
        scores: `(depths, lengths)`, NaN for missing.
        depths: 0 (beginning of the context) to 1.
        limits: ends of the colour scale.
        train_length: drawn as a dashed line between the lengths within and beyond it.
    """
    with mpl.rc_context(_STYLE):
        # So large at least that title and labels of a small grid have room.
        width, height = max(4.4, 1.9 + 0.48 * len(lengths)), max(3.0, 1.5 + 0.26 * len(depths))
        figure = Figure(figsize=(width, height))
        axes = figure.add_subplot()
        axes.set_facecolor("#bbbbbb")
        image = axes.imshow(np.ma.masked_invalid(scores), cmap="viridis", vmin=limits[0], vmax=limits[1], aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right")
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
        axes.set(xlabel="context length (tokens)", ylabel="depth of the needle")
        axes.set_title(textwrap.fill(title, int(_TITLE_CHARACTERS * width)), fontsize=9)
        if train_length is not None:
            within = sum(length <= train_length for length in lengths)
            if 0 < within < len(lengths):
                # White over black is seen on every colour of the scale.
                axes.axvline(within - 0.5, color="black", linewidth=2.6)
                axes.axvline(within - 0.5, color="white", linestyle=(0, (4, 2)), linewidth=1.3)
                axes.set_xlabel(f"context length (tokens); dashed line: training length, {train_length:,}")
        figure.colorbar(image, ax=axes, label=label)
        _save(figure, path)


def _memory_axis(axes) -> None:
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "<1" if value < 1 else f"{value:,.4g}"))
    axes.set_ylabel("memory length (tokens)")
    _light_grid(axes)


def _light_grid(axes) -> None:
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _colours() -> ListedColormap:
    """Viridis reversed and without its palest yellow, so that 0 is distinct from the white of what is not shown."""
    return ListedColormap(mpl.colormaps["viridis_r"](np.linspace(0.05, 1, 256)))


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
