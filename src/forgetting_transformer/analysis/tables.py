"""Tables of results in Markdown and LaTeX, with the best and the second best value of each column marked, and their figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forgetting_transformer.analysis.plots.scores import Scores, scores_by_task
from forgetting_transformer.evaluation.generation import read_json
from forgetting_transformer.evaluation.models import EvaluationError

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
}


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
    def error_key(self) -> str:
        """Under which a row has the standard error of the value, if it is known."""
        return f"{self.key}_stderr"

    @property
    def head(self) -> str:
        return self.title + {"higher": " ↑", "lower": " ↓", None: ""}[self.better]


def ranks(column: Column, values: Sequence[float | None]) -> list[int | None]:
    """1 for the best value and those printed like it, 2 for the next, None for the rest.

    Values that are printed alike are equal: nothing is said to be better that a reader cannot see to be.
    """
    if column.better is None:
        return [None] * len(values)
    shown = [None if value is None else round(value, column.digits) for value in values]
    distinct = sorted({value for value in shown if value is not None}, reverse=column.better == "higher")
    if len(distinct) < 2:  # nothing to compare with
        return [None] * len(values)
    return [distinct.index(value) + 1 if value is not None and distinct.index(value) < 2 else None for value in shown]


def markdown(rows: Mapping[str, Mapping[str, float | None]], columns: Sequence[Column], first: str = "Model") -> str:
    """A Markdown table: a row per model, the best value bold and the second best underlined (`<u>`)."""
    cells = _cells(rows, columns, lambda text: f"**{text}**", lambda text: f"<u>{text}</u>", "–")
    lines = [
        "| " + " | ".join([first, *(column.head for column in columns)]) + " |",
        "|" + "|".join(["---", *("---:" for _ in columns)]) + "|",
    ]
    for name, row in zip(rows, cells, strict=True):
        lines.append("| " + " | ".join([name.replace("|", "\\|"), *row]) + " |")
    return "\n".join(lines) + "\n"


def latex(rows: Mapping[str, Mapping[str, float | None]], columns: Sequence[Column], first: str = "Model") -> str:
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
        lines.append(" & ".join([_escape(name), *row]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _cells(rows, columns, best, second, missing) -> list[list[str]]:
    table: list[list[str]] = [[] for _ in rows]
    for column in columns:
        values = [row.get(column.key) for row in rows.values()]
        for line, value, rank in zip(table, values, ranks(column, values), strict=True):
            text = missing if value is None else f"{value:.{column.digits}f}"
            line.append(best(text) if rank == 1 else second(text) if rank == 2 else text)
    return table


def _escape(text: str) -> str:
    return "".join(_LATEX_SPECIAL.get(character, character) for character in text)


def read_results(named: Sequence[str], file: str = "results.json", missing: Any = None) -> dict[str, Any]:
    """Reads this file of every `[NAME=]FOLDER`, as on a command line; by name, in that order.

    Args:
        missing: what stands for a file that is not there; None makes that an error.

    Raises:
        EvaluationError: one is not there, is damaged, or a name occurs twice.
    """
    results: dict[str, Any] = {}
    for text in named:
        name, separator, path = text.partition("=")
        folder = Path(path) if separator and not Path(text).exists() else Path(text)
        name = name if separator and not Path(text).exists() else folder.resolve().name
        if name in results:
            raise EvaluationError(f"two results are called {name!r}: give them names, NAME=FOLDER")
        absent = missing is not None and not (folder / file).is_file()
        results[name] = missing if absent else read_json(folder / file)
    return results


def write_tables(
    rows: Mapping[str, Mapping[str, float | None]],
    columns: Sequence[Column],
    folder: Path | None,
    title: str = "Scores",
) -> None:
    """Prints both tables and, if there is a folder, writes `table.md`, `table.tex` and `scores.png` into it.

    Args:
        title: of the figure.

    Raises:
        EvaluationError: there is no number at all.
    """
    if not has_numbers(rows, columns):
        raise EvaluationError(f"nothing to table: the results of {', '.join(rows)} hold no number")
    in_markdown, in_latex = markdown(rows, columns), latex(rows, columns)
    print(f"{in_markdown}\n{in_latex}", end="")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "table.md").write_text(in_markdown, encoding="utf-8")
        (folder / "table.tex").write_text(in_latex, encoding="utf-8")
        draw_scores(rows, columns, folder / "scores.png", title)


def has_numbers(rows: Mapping[str, Mapping[str, float | None]], columns: Sequence[Column]) -> bool:
    """Whether any model has a value in any column."""
    return any(row.get(column.key) is not None for row in rows.values() for column in columns)


def draw_scores(
    rows: Mapping[str, Mapping[str, float | None]], columns: Sequence[Column], path: Path, title: str = "Scores"
) -> None:
    """Draws the table: a panel for each unit, and in it a line of dots for each column, one for each model, with its
    standard error. Columns that no model has a value in are left out."""
    panels: dict[tuple[str, str | None], Scores] = {}
    for column in columns:
        if has_numbers(rows, [column]):
            panel = panels.setdefault((column.unit, column.better), Scores(column.unit, column.better))
            panel.values[column.title] = [row.get(column.key) for row in rows.values()]
            panel.errors[column.title] = [row.get(column.error_key) for row in rows.values()]
            if column.chance is not None:
                panel.chance[column.title] = column.chance
    scores_by_task(
        list(rows), list(panels.values()), path, title if len(rows) > 1 else f"{title} of {next(iter(rows))}"
    )
