"""What all figures share: colours of models, fonts, the title, the legend and the line of conditions below it.

Drawn without pyplot, so nothing global is left behind and no display is needed. The first colours are those of Okabe
and Ito, which people with colour-vision deficiencies can tell apart; line styles and markers repeat the distinction.
"""

import textwrap
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from forgetting_transformer.analysis import known_models

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "figure.constrained_layout.use": True,
}
GREY = "#555555"
#: The colour of a single curve that stands for no model, and of what is to be seen first.
MAIN, ACCENT = "#0072B2", "#D55E00"
_DPI = 200
_LEGEND_CHARACTERS = 70
_TITLE_SIZE, _NOTE_SIZE = 10, 7.5
_MARGIN, _GAP = 0.08, 0.07  # inches
#: Where a curve leaves the axes: no marker of a model looks like it.
_ARROW = r"$\uparrow$"


@dataclass(frozen=True)
class CurveStyle:
    """How a model is drawn."""

    colour: str
    line: Any
    marker: str


_STYLES = (
    CurveStyle("#0072B2", "-", "o"),
    CurveStyle("#D55E00", "--", "s"),
    CurveStyle("#009E73", "-.", "^"),
    CurveStyle("#CC79A7", ":", "D"),
    CurveStyle("#E69F00", "-", "v"),
    CurveStyle("#56B4E9", "--", "P"),
    CurveStyle("#000000", "-.", "X"),
    CurveStyle("#882255", ":", "<"),
    CurveStyle("#999933", "-", ">"),
    CurveStyle("#777777", "--", "h"),
)
#: For figures with more curves: the same colours with other lines and markers.
_FURTHER = tuple(
    CurveStyle(style.colour, _STYLES[number - 1].line, marker)
    for number, (style, marker) in enumerate(zip(_STYLES, 2 * "*pd8H", strict=True))
)


def curve_styles(names: Sequence[str]) -> list[CurveStyle]:
    """A style for each name, no two alike while there are enough.

    A name with a known model in it ("fox_pro", "FoX (Pro)", "demo_fox_pro_seed1") gets that model's colour in
    every figure, any other name one that depends on the name alone. Where two want the same, the first has it.
    """
    styles = _STYLES + _FURTHER
    wanted = [_preferred(name) for name in names]
    found: list[int] = []
    for number, style in enumerate(wanted):
        # The styles that no other name wants come before those that one further down is waiting for.
        order = [style, *(i for i in range(len(_STYLES)) if i not in wanted), *range(len(styles))]
        found.append(next((i for i in order if i not in found), number % len(styles)))
    return [styles[i] for i in found]


def _preferred(name: str) -> int:
    known = known_models.find(name)
    number = known.style if known is not None else zlib.crc32(known_models.plain(name).encode(errors="replace"))
    return number % len(_STYLES)


@dataclass
class Picture:
    """A figure while it is drawn.

    Attributes:
        figure: the whole.
        axes: (rows, columns) of it.
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
        figure = Figure(figsize=size, dpi=_DPI)  # what is measured is what is written
        drawn = Picture(figure, figure.subplots(rows, columns, squeeze=False, **subplots))
        yield drawn
        _frame(drawn, title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _frame(drawn: Picture, title: str) -> None:
    """Puts the title above the axes, legend and conditions below, and makes the figure taller by what they need."""
    figure = drawn.figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    width, height = figure.get_size_inches()

    def inches(artist: Any) -> float:
        return artist.get_window_extent(renderer).height / figure.dpi

    heading = _fitted(figure, renderer, title, _TITLE_SIZE, va="top", weight="bold")
    top = _MARGIN + inches(heading) + _GAP
    bottom, total = _MARGIN, 0.0
    note = legend = None
    if drawn.notes:
        note = _fitted(figure, renderer, " · ".join(drawn.notes), _NOTE_SIZE, va="bottom", color=GREY)
        bottom += inches(note) + _GAP
    legend_bottom = bottom
    if drawn.handles:
        legend = _legend(figure, renderer, drawn.handles)
        bottom += inches(legend) + _GAP
    total = height + top + bottom
    figure.set_size_inches(width, total)
    heading.set_position((_MARGIN / width, 1 - _MARGIN / total))
    if note is not None:
        note.set_position((_MARGIN / width, _MARGIN / total))
    if legend is not None:
        legend.set_bbox_to_anchor((0, legend_bottom / total, 1, 1))
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0, bottom / total, 1, height / total))


def _fitted(figure: Figure, renderer: Any, text: str, size: float, **style: Any) -> Text:
    """A text at the left edge, in lines that are no wider than the figure."""
    room = figure.bbox.width - 2 * _MARGIN * figure.dpi
    characters = int(room / figure.dpi * 72 / (0.45 * size))
    artist = figure.text(0, 0, "", fontsize=size, ha="left", linespacing=1.25, **style)
    while True:
        artist.set_text(plain_text(text, characters))
        if artist.get_window_extent(renderer).width <= room or characters <= 8:
            return artist
        characters -= max(1, characters // 20)


def _legend(figure: Figure, renderer: Any, handles: Sequence[Artist]) -> Legend:
    """The legend in as many columns as fit."""
    labels = [plain_text(str(handle.get_label()), _LEGEND_CHARACTERS) for handle in handles]
    for columns in range(len(handles), 0, -1):
        legend = figure.legend(
            handles,
            labels,
            loc="lower center",
            ncols=columns,
            handlelength=2.8,
            columnspacing=1.6,
            borderaxespad=0,
            borderpad=0,
        )
        if legend.get_window_extent(renderer).width <= figure.bbox.width - 2 * _MARGIN * figure.dpi or columns == 1:
            return legend
        legend.remove()
    raise AssertionError("a legend has at least one column")


def plain_text(name: str, characters: int) -> str:
    """A name as matplotlib should show it: wrapped, with no formula between dollar signs, never hidden, all Unicode."""
    name = name.encode(errors="backslashreplace").decode()  # of a folder that is not UTF-8
    text = textwrap.fill(name, characters, break_on_hyphens=False).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # a leading underscore keeps a label out of a legend


def line_handle(style: CurveStyle, label: str, with_marker: bool = False) -> Line2D:
    handle = Line2D([], [], color=style.colour, linestyle=style.line, label=label)
    if with_marker:
        handle.set(marker=style.marker, markersize=5.5, markeredgecolor="white", markeredgewidth=0.7)
    return handle


def marker_handle(marker: str, label: str, colour: str = "#333333", **style: Any) -> Line2D:
    return Line2D([], [], color=colour, linestyle="none", marker=marker, label=label, **style)


def reference_line(axes: Axes, value: float, label: str, vertical: bool = False, line: object = (0, (6, 3))) -> Line2D:
    """Draws a thin grey line across the axes and returns its handle for the legend."""
    style: dict[str, Any] = {"color": GREY, "linestyle": line, "linewidth": 1.1}
    (axes.axvline if vertical else axes.axhline)(value, zorder=1, **style)
    return Line2D([], [], label=label, **style)


#: Name, style, x and y.
Curve = tuple[str, CurveStyle, np.ndarray, np.ndarray]


def set_limits(axes: Axes, low: float, high: float, curves: Sequence[Curve]) -> None:
    """Sets the ends of the vertical axis; a curve that ends above it gets an arrow there with its last value.

    Call it when the horizontal axis is as it stays.
    """
    axes.set_ylim(low, high)
    above = 0
    for name, style, x, y in curves:
        seen = np.flatnonzero(~np.isnan(y))
        if not seen.size or y[seen[-1]] <= high:
            continue
        leaves = _crossing(axes, x, y, seen, high)
        edge = axes.transAxes
        axes.plot([leaves], [1], marker=_ARROW, markersize=9, color=style.colour, transform=edge, clip_on=False)
        on_the_left = leaves < 0.5
        # In lines that end before the axes do.
        room = (1 - leaves if on_the_left else leaves) * axes.bbox.width / axes.figure.dpi * 72
        text = plain_text(f"{name} ends at {y[seen[-1]]:.3g}", max(12, int(room / (0.55 * 7.5))))
        axes.annotate(
            text,
            (leaves, 1),
            xycoords=edge,
            xytext=(6 if on_the_left else -6, -3 - 11 * above),
            textcoords="offset points",
            ha="left" if on_the_left else "right",
            va="top",
            fontsize=7.5,
            color=style.colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.6},
        ).set_in_layout(False)
        above += text.count("\n") + 1


def _crossing(axes: Axes, x: np.ndarray, y: np.ndarray, seen: np.ndarray, high: float) -> float:
    """Where a curve rises above `high` for the last time, as a part of the width of the axes."""
    to_axes = axes.transData + axes.transAxes.inverted()
    inside = seen[y[seen] <= high]
    if not inside.size:
        return float(to_axes.transform((x[seen[0]], high))[0])
    beyond = seen[seen > inside[-1]][0]
    (x0, y0), (x1, y1) = to_axes.transform([(x[i], y[i]) for i in (inside[-1], beyond)])
    return float(x0 + (1 - y0) / (y1 - y0) * (x1 - x0))


def log_axis(axes: Axes) -> None:
    """Makes the vertical axis logarithmic, with plain numbers if it spans few powers of ten. Call it after drawing."""
    axes.set_yscale("log")
    axis = axes.yaxis
    low, high = axes.get_ylim()
    if high < 500 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 30 * low else (1, 1.5, 2, 3, 5, 7), numticks=20))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
        axis.set_minor_locator(NullLocator())


def token_axis(axes: Axes, label: str = "training tokens") -> None:
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: format_tokens(tokens)))
    axes.set_xlabel(label)


def format_tokens(tokens: float) -> str:
    """A number of tokens for an axis: 0, 500, 1.5K, 250M, 48B, 1.2T."""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(tokens) >= unit:
            return f"{tokens / unit:.6g}{suffix}"
    return f"{tokens:.6g}"
