"""Shared parts of all figures: colours of models, fonts, the title, the legend and the line of conditions below it.

Drawn without pyplot, so nothing global is left behind and no display is needed. The first colours are those of Okabe
and Ito, which people with colour-vision deficiencies can tell apart; line styles and markers repeat the distinction.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from forgetting_transformer.analysis import known_models
from forgetting_transformer.analysis.tables import format_tokens

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.solid_capstyle": "round",
    "figure.constrained_layout.use": True,
}
GREY = "#555555"
#: Colour of a single curve of no particular model, and of highlights.
MAIN, ACCENT = "#0072B2", "#D55E00"
DOTS_PER_INCH = 200
#: Characters per inch of title, legend and conditions that always fit.
_TITLE_CHARACTERS, _LEGEND_CHARACTERS, _NOTE_CHARACTERS = 10, 14, 15
#: Inches of a column of the legend beside its text.
_LEGEND_KEY = 0.7
#: White edges, so that overlapping markers can be distinguished.
MARKER: dict[str, Any] = {"markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.7}


@dataclass(frozen=True)
class CurveStyle:
    """Style of a model in figures."""

    colour: str
    line: Any
    marker: str


_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#000000", "#882255", "#999933", "#777777"),
)
_LINES, _MARKERS = ("-", "--", "-.", ":"), ("os^DvPX<>h", "*pd8H*pd8H")
#: A colour each, and for figures with more curves the same colours with other lines and markers.
_STYLES = [
    CurveStyle(colour, _LINES[(number - again) % len(_LINES)], _MARKERS[again][number])
    for again in (0, 1)
    for number, colour in enumerate(_COLOURS)
]


def curve_styles(names: Sequence[str]) -> list[CurveStyle]:
    """A style for each name, no two alike while there are enough.

    A name with a known model in it ("fox_pro", "FoX (Pro)", "demo_fox_pro_seed1") gets that model's colour in every
    figure; where two want the same, the first has it. All other names get the next colour that no known model here
    wants, in their order.
    """
    known = [known_models.find(name) for name in names]
    wanted = [None if model is None else model.style % len(_COLOURS) for model in known]
    found: list[int] = []
    for number, style in enumerate(wanted):
        own = [] if style is None else [style]
        order = [*own, *(i for i in range(len(_COLOURS)) if i not in wanted), *range(len(_STYLES))]
        found.append(next((i for i in order if i not in found), number % len(_STYLES)))
    return [_STYLES[i] for i in found]


@dataclass
class Picture:
    """A figure while it is drawn.

    Attributes:
        figure: the whole.
        axes: (rows, columns) of it; those that nothing is drawn into are hidden.
        handles: what the legend below the axes explains, in order.
        notes: the conditions, written below the legend.
    """

    figure: Figure
    axes: np.ndarray
    handles: list[Artist] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@contextmanager
def picture(
    path: Path, title: str, size: tuple[float, float], rows: int = 1, columns: int = 1, **subplots: Any
) -> Iterator[Picture]:
    """A figure to draw into; at the end it gets its title, legend and conditions, and is written.

    Args:
        path: where to write; the suffix chooses the format (.png, .pdf, .svg).
        title: what is shown, and of which run or model.
        size: width and height of the axes with their labels, inches; title, legend and conditions add to the height.
        subplots: for `Figure.subplots`.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=DOTS_PER_INCH)
        drawn = Picture(figure, figure.subplots(rows, columns, squeeze=False, **subplots))
        yield drawn
        for axes in drawn.axes.flat:
            if not axes.has_data():
                axes.set_axis_off()
        _frame(drawn, title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight")


def panels(path: Path, title: str, count: int, size: tuple[float, float], **subplots: Any) -> Any:
    """A `picture` of so many axes, up to three beside each other; the size is that of one."""
    columns = 2 if count == 4 else min(3, count)
    rows = math.ceil(count / columns)
    return picture(path, title, (max(5.2, columns * size[0]), rows * size[1]), rows, columns, **subplots)


def _frame(drawn: Picture, title: str) -> None:
    """Puts the title above the axes, the legend below them and the conditions below that, outside of the figure's
    size: saving includes everything around it."""
    figure, width = drawn.figure, drawn.figure.get_figwidth()
    figure.text(0, 1.01, plain_text(title, int(_TITLE_CHARACTERS * width)), fontsize=10, weight="bold", va="bottom")
    bottom = 0.0
    if drawn.handles:
        most = int(_LEGEND_CHARACTERS * (width - _LEGEND_KEY))
        labels = [plain_text(str(handle.get_label()), most) for handle in drawn.handles]
        longest = max(len(line) for label in labels for line in label.split("\n"))
        columns = max(1, min(len(labels), int(width / (_LEGEND_KEY + longest / _LEGEND_CHARACTERS))))
        below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "ncols": columns}
        legend = figure.legend(drawn.handles, labels, handlelength=2.8, **below)
        figure.draw_without_rendering()
        bottom = legend.get_window_extent().y0 / figure.bbox.height
    note = plain_text(" · ".join(drawn.notes), int(_NOTE_CHARACTERS * width))
    figure.text(0, bottom, note, fontsize=7.5, color=GREY, va="top")


def plain_text(name: str, characters: int) -> str:
    """A name as matplotlib should show it: wrapped, with no formula between dollar signs, never hidden, all Unicode."""
    name = name.encode(errors="backslashreplace").decode()  # of a folder that is not UTF-8
    text = textwrap.fill(name, characters, break_on_hyphens=False).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # a leading underscore keeps a label out of a legend


def draw_line(axes: Axes, style: CurveStyle, x: np.ndarray, y: np.ndarray, **more: Any) -> None:
    """Draws a curve; one of a single point is its marker, or a dot."""
    point = {"marker": style.marker or "."} if x.size == 1 else {}
    axes.plot(x, y, **{"color": style.colour, "linestyle": style.line, "linewidth": 1.6, **point, **more})


def draw_mean(axes: Axes, style: CurveStyle, x: np.ndarray, several: np.ndarray) -> None:
    """Draws the mean of curves `(seeds, n)`, and shades what they span where there are several."""
    draw_line(axes, style, x, several.mean(0), zorder=3)
    if len(several) > 1:
        axes.fill_between(x, several.min(0), several.max(0), color=style.colour, alpha=0.2, linewidth=0)


def draw_markers(axes: Axes, style: CurveStyle, x: np.ndarray, y: np.ndarray) -> None:
    """Draws a marker for each point, above all lines."""
    axes.plot(x, y, color=style.colour, linestyle="none", marker=style.marker, zorder=20, **MARKER)


def line_handle(style: CurveStyle, label: str, with_marker: bool = False) -> Line2D:
    marker: dict[str, Any] = {"marker": style.marker, **MARKER} if with_marker else {}
    return Line2D([], [], color=style.colour, linestyle=style.line, label=label, **marker)


def marker_handle(marker: str, label: str, colour: str = "#333333", **style: Any) -> Line2D:
    return Line2D([], [], color=colour, linestyle="none", marker=marker, label=label, **style)


def reference_line(axes: Axes, value: float, label: str, vertical: bool = False, line: object = (0, (6, 3))) -> Line2D:
    """Draws a thin grey line across the axes and returns its handle for the legend."""
    style: dict[str, Any] = {"color": GREY, "linestyle": line, "linewidth": 1.1}
    (axes.axvline if vertical else axes.axhline)(value, zorder=1, **style)
    return Line2D([], [], label=label, **style)


def log_axis(axes: Axes) -> None:
    """Makes the vertical axis logarithmic, with plain numbers if it spans few powers of ten. Call it after drawing."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 500 * low:
        subs = (1, 2, 5) if high > 30 * low else (1, 1.5, 2, 3, 5, 7)
        few = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20) if high > 4 * low else few)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def token_axis(axes: Axes) -> None:
    """Makes the horizontal axis one of training tokens from 0 on."""
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: format_tokens(tokens)))
    axes.set_xlabel("training tokens")
