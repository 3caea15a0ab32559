"""Tables in Markdown and LaTeX: of any cells, and of scores with the best and the second best of each column marked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forgetting_transformer.analysis import AnalysisError, outputs
from forgetting_transformer.analysis.statistics import Estimate
from forgetting_transformer.files import write_atomically

_LATEX_SPECIAL = {
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "±": r"$\pm$",
}
#: What a cell of a table of scores holds; an `Estimate` is printed with its interval.
Value = float | Estimate | None
Rows = Mapping[str, Mapping[str, Value]]


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

    def markdown(self, padded: bool = False) -> str:
        """A Markdown table without a newline at its end; padded, its columns also line up on a terminal."""
        cells = [[cell.replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]
        if not padded:
            head, *rows = (f"| {' | '.join(row)} |" for row in cells)
            rule = "|".join("---:" if a == "r" else "---" for a in self.alignment)
            return "\n".join([head, f"|{rule}|", *rows])
        widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
        columns = list(zip(widths, self.alignment, strict=True))
        cells.insert(1, ["-" * (w - 1) + ":" if a == "r" else "-" * w for w, a in columns])
        padded_cells = (
            [c.rjust(w) if a == "r" else c.ljust(w) for c, (w, a) in zip(row, columns, strict=True)] for row in cells
        )
        return "\n".join(f"| {' | '.join(row)} |" for row in padded_cells)

    def without_empty_columns(self) -> "Table":
        """The table without the columns that are empty in every row."""
        keep = [i for i in range(len(self.header)) if any(row[i] for row in self.rows)]
        header, *rows = ([row[i] for i in keep] for row in (self.header, *self.rows))
        return Table(header, rows, "".join(self.alignment[i] for i in keep))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], alignment: str) -> str:
    """A Markdown table with padded columns; columns that are empty in every row are left out.

    Args:
        alignment: a letter per column, "l" or "r".
    """
    return Table(header, rows, alignment).without_empty_columns().markdown(padded=True)


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
        title: what the head says.
        better: which values are good; None marks nothing.
        digits: after the decimal point.
        group: a head over neighbouring columns that have the same.
        unit: what figures write on the axis; columns share an axis with those of the same unit.
        chance: the value of a guess, where it is known.
    """

    key: str
    title: str
    better: Literal["higher", "lower"] | None = None
    digits: int = 2
    group: str | None = None
    unit: str = "score"
    chance: float | None = None

    @property
    def head(self) -> str:
        return self.title + {"higher": " ↑", "lower": " ↓", None: ""}[self.better]


def number(value: Value) -> float | None:
    """The value of a cell without its interval."""
    return value.value if isinstance(value, Estimate) else value


def half_width(value: Value) -> float | None:
    """Half of the cell's interval, if it has one."""
    return value.half_width if isinstance(value, Estimate) and math.isfinite(value.half_width) else None


def ranks(column: Column, values: Sequence[Value]) -> list[int | None]:
    """1 for the best value and those printed like it, 2 for the next, None for the rest.

    Values that are printed alike are equal: nothing is said to be better that a reader cannot see to be.
    """
    if column.better is None:
        return [None] * len(values)
    numbers = [number(value) for value in values]
    shown = [None if value is None else round(value, column.digits) for value in numbers]
    distinct = sorted({value for value in shown if value is not None}, reverse=column.better == "higher")
    if len(distinct) < 2:  # nothing to compare with
        return [None] * len(values)
    return [distinct.index(value) + 1 if value is not None and distinct.index(value) < 2 else None for value in shown]


def score_table(rows: Rows, columns: Sequence[Column], first: str = "Model") -> Table:
    """A row per model, the best value bold and the second best underlined (`<u>`)."""
    cells = _cells(rows, columns, lambda text: f"**{text}**", lambda text: f"<u>{text}</u>", "–")
    header = [first, *(column.head for column in columns)]
    return Table(header, [[name, *row] for name, row in zip(rows, cells, strict=True)], "l" + "r" * len(columns))


def markdown(rows: Rows, columns: Sequence[Column], first: str = "Model") -> str:
    """`score_table` in Markdown."""
    return score_table(rows, columns, first).markdown() + "\n"


def latex(rows: Rows, columns: Sequence[Column], first: str = "Model") -> str:
    r"""A LaTeX tabular for the package booktabs: the best value `\textbf`, the second best `\underline`."""
    cells = _cells(rows, columns, lambda text: rf"\textbf{{{text}}}", lambda text: rf"\underline{{{text}}}", "--")
    lines = [rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule"]
    if any(column.group for column in columns):
        groups: list[tuple[str, int]] = []
        for column in columns:
            if groups and groups[-1][0] == (column.group or ""):
                groups[-1] = (groups[-1][0], groups[-1][1] + 1)
            else:
                groups.append((column.group or "", 1))
        lines.append(
            " & ".join(["", *(rf"\multicolumn{{{n}}}{{c}}{{{_escape(name)}}}" for name, n in groups)]) + r" \\"
        )
    lines.append(" & ".join([_escape(first), *(_escape(column.head) for column in columns)]) + r" \\")
    lines.append(r"\midrule")
    for name, row in zip(rows, cells, strict=True):
        lines.append(" & ".join([_escape(name), *(cell.replace("±", r"$\pm$") for cell in row)]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _cells(rows, columns, best, second, missing) -> list[list[str]]:
    table: list[list[str]] = [[] for _ in rows]
    for column in columns:
        values = [row.get(column.key) for row in rows.values()]
        for line, value, rank in zip(table, values, ranks(column, values), strict=True):
            text = missing if value is None else _text(value, column.digits)
            line.append(best(text) if rank == 1 else second(text) if rank == 2 else text)
    return table


def _text(value: float | Estimate, digits: int) -> str:
    text = f"{number(value):.{digits}f}"
    around = half_width(value)
    return text if around is None else f"{text} ± {around:.{digits}f}"


def _escape(text: str) -> str:
    return "".join(_LATEX_SPECIAL.get(character, character) for character in text)


def has_numbers(rows: Rows, columns: Sequence[Column]) -> bool:
    """Whether any model has a value in any column."""
    return any(row.get(column.key) is not None for row in rows.values() for column in columns)


def write_tables(
    rows: Rows,
    columns: Sequence[Column],
    folder: Path | None,
    title: str = "Scores",
    conditions: Sequence[str] = (),
    differences: Table | None = None,
) -> None:
    """Prints the tables and, if there is a folder, writes `table.md`, `table.tex`, `scores.png` and, where there are
    differences, `differences.md` into it.

    Args:
        title: of the figure.
        conditions: for its foot.
        differences: between models, on the same questions.

    Raises:
        AnalysisError: there is no number at all, or the folder holds a file of one of these names that is not such a
            table or was changed since.
    """
    if not has_numbers(rows, columns):
        raise AnalysisError(f"nothing to table: the results of {', '.join(rows)} hold no number")
    in_markdown, in_latex = markdown(rows, columns), latex(rows, columns)
    print(f"{in_markdown}\n{in_latex}", end="")
    if differences is not None:
        print(f"\n{differences.markdown()}")
    if folder is not None:
        if differences is None:
            outputs.remove(folder, f"the table of {title}", ["differences.md"])  # of other models, perhaps
        with outputs.writing(folder, f"the table of {title}", _has_latex_table) as new:
            if differences is not None:
                write_atomically(new / "differences.md", f"{differences.markdown()}\n", durable=False)
            write_atomically(new / "table.md", in_markdown, durable=False)
            write_atomically(new / "table.tex", in_latex, durable=False)
            draw_scores(rows, columns, new / "scores.png", title, conditions)


def _has_latex_table(path: Path) -> bool:
    """Whether the file lies beside a table of an earlier version."""
    latex_file = path.with_name("table.tex")
    if path.name not in ("table.md", "table.tex", "scores.png"):
        return False  # which that version did not write
    return latex_file.is_file() and latex_file.read_bytes().startswith(rb"\begin{tabular}{l")


def draw_scores(
    rows: Rows, columns: Sequence[Column], path: Path, title: str = "Scores", conditions: Sequence[str] = ()
) -> None:
    """Draws the table: a panel for each unit, and in it a line of dots for each column, one for each model, with its
    interval. Columns that no model has a value in are left out."""
    from forgetting_transformer.analysis.plots.scores import Scores, scores_by_task  # loads matplotlib

    panels: dict[tuple[str, str | None], Scores] = {}
    for column in columns:
        if has_numbers(rows, [column]):
            panel = panels.setdefault((column.unit, column.better), Scores(column.unit, column.better))
            values = [row.get(column.key) for row in rows.values()]
            panel.values[column.title] = [number(value) for value in values]
            panel.errors[column.title] = [half_width(value) for value in values]
            if column.chance is not None:
                panel.chance[column.title] = column.chance
    title = title if len(rows) > 1 else f"{title} of {next(iter(rows))}"
    scores_by_task(list(rows), list(panels.values()), path, title, conditions)
