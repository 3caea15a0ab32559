"""Tables in Markdown and LaTeX: of any cells, and of scores with the best and the second best of each column marked."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from forgetting_transformer.analysis.statistics import Estimate

_LATEX_SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--",
        "↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$",
    }
    | {character: f"\\{character}" for character in "&%$#_{}"}
)  # fmt: skip
#: Scores of models by the keys of columns; missing scores have no entry, and known intervals are shown.
Rows = Mapping[str, Mapping[str, Estimate]]


@dataclass(frozen=True)
class Table:
    """Cells of text.

    Attributes:
        header: a cell per column.
        rows: cells may be bold (`**…**`) or underlined (`<u>…</u>`).
        alignment: a letter per column, "l" or "r".
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    alignment: str

    def markdown(self) -> str:
        """A Markdown table, whose columns also line up on a terminal, without a newline at its end."""
        cells = [[cell.replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]
        widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
        columns = list(zip(widths, self.alignment, strict=True))
        lines = [
            f"| {' | '.join(c.rjust(w) if a == 'r' else c.ljust(w) for c, (w, a) in zip(row, columns, strict=True))} |"
            for row in cells
        ]
        rule = f"| {' | '.join('-' * (w - 1) + ':' if a == 'r' else '-' * w for w, a in columns)} |"
        return "\n".join([lines[0], rule, *lines[1:]])

    def without_empty_columns(self) -> "Table":
        """The table without columns that are empty in every row."""
        keep = [i for i in range(len(self.header)) if not self.rows or any(row[i] for row in self.rows)]
        header, *rows = ([row[i] for i in keep] for row in (self.header, *self.rows))
        return Table(header, rows, "".join(self.alignment[i] for i in keep))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], alignment: str) -> str:
    """A Markdown table; columns that are empty in every row are left out.

    Args:
        alignment: a letter per column, "l" or "r".
    """
    return Table(header, rows, alignment).without_empty_columns().markdown()


def format_tokens(tokens: float) -> str:
    """A number of tokens with three digits: 0, 500, 1.5K, 32.8K, 250M, 48B, 1.2T."""
    tokens = float(f"{tokens:.3g}")
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(tokens) >= unit:
            return f"{tokens / unit:g}{suffix}"
    return f"{tokens:g}"


def plain_number(number: float, digits: int) -> str:
    """A number with so many digits that count, and no exponent below a million: 123.4 with 2 -> 120."""
    return f"{float(f'{number:.{digits}g}'):g}"


def rate_text(rate: float) -> str:
    """A learning rate of the grid, as in "2e-3"."""
    return f"{rate:.0e}".replace("e-0", "e-")


def with_error(value: float, error: float | None) -> str:
    """ "+0.0123 ± 0.0045": a difference and its standard error, if that is known."""
    return f"{value:+.4f}" if error is None else f"{value:+.4f} ± {error:.4f}"


@dataclass(frozen=True)
class Column:
    """One column of numbers.

    Attributes:
        key: of its values.
        title: text of the head.
        better: which values are good; None marks nothing.
        digits: after the decimal point.
        group: a head over neighbouring columns that have the same.
    """

    key: str
    title: str
    better: Literal["higher", "lower"] | None = None
    digits: int = 2
    group: str | None = None

    @property
    def head(self) -> str:
        return self.title + {"higher": " ↑", "lower": " ↓", None: ""}[self.better]


def has_numbers(rows: Rows, columns: Sequence[Column]) -> bool:
    """Whether any model has a value in any column."""
    return any(column.key in row for row in rows.values() for column in columns)


def ranks(column: Column, values: Sequence[Estimate | None]) -> list[int | None]:
    """1 for the best value and those printed like it, 2 for the next, None for the rest.

    Values that are printed alike are equal: no value is marked as better unless a reader can see it.
    """
    shown = [None if one is None else round(one.value, column.digits) for one in values]
    distinct = sorted({value for value in shown if value is not None}, reverse=column.better == "higher")
    if column.better is None or len(distinct) < 2:  # nothing to compare with
        return [None] * len(values)
    return [distinct.index(value) + 1 if value in distinct[:2] else None for value in shown]


def score_table(rows: Rows, columns: Sequence[Column], first: str = "Model") -> Table:
    """A row per model, the best value bold and the second best underlined (`<u>`)."""
    cells: list[list[str]] = [[name] for name in rows]
    for column in columns:
        values = [row.get(column.key) for row in rows.values()]
        for line, value, rank in zip(cells, values, ranks(column, values), strict=True):
            text = "–" if value is None else value.text(digits=column.digits)
            line.append(f"**{text}**" if rank == 1 else f"<u>{text}</u>" if rank == 2 else text)
    return Table([first, *(column.head for column in columns)], cells, "l" + "r" * len(columns))


def latex(rows: Rows, columns: Sequence[Column]) -> str:
    r"""A LaTeX tabular for the package booktabs: the best value `\textbf`, the second best `\underline`."""
    table = score_table(rows, columns)
    lines = [rf"\begin{{tabular}}{{{table.alignment}}}", r"\toprule"]
    if any(column.group for column in columns):
        groups = [(name or "", len([*of])) for name, of in itertools.groupby(columns, lambda column: column.group)]
        heads = (rf"\multicolumn{{{count}}}{{c}}{{{name.translate(_LATEX_SPECIAL)}}}" for name, count in groups)
        lines.append(" & ".join(["", *heads]) + r" \\")
    head, *body = (" & ".join(map(_latex_cell, row)) + r" \\" for row in (table.header, *table.rows))
    return "\n".join([*lines, head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex_cell(text: str) -> str:
    for pattern, command in ((r"\*\*(.*)\*\*", "textbf"), (r"<u>(.*)</u>", "underline")):
        if found := re.fullmatch(pattern, text):
            return rf"\{command}{{{found[1].translate(_LATEX_SPECIAL)}}}"
    return text.translate(_LATEX_SPECIAL)
