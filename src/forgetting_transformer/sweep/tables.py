"""Markdown tables that also read well on a terminal."""

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], alignment: str) -> str:
    """A Markdown table with padded columns; columns that are empty in every row are left out.

    Args:
        alignment: a letter per column, "l" or "r".
    """
    keep = [i for i in range(len(header)) if any(row[i] for row in rows)]
    cells = [[row[i].replace("|", "\\|") for i in keep] for row in (header, *rows)]
    alignment = "".join(alignment[i] for i in keep)
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(alignment))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(w) if a == "r" else cell.ljust(w) for cell, w, a in zip(row, widths, alignment, strict=True)
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * (w - 1) + ":" if a == "r" else "-" * w for w, a in zip(widths, alignment, strict=True)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def rate_text(rate: float) -> str:
    """A learning rate of the grid, as in "2e-3"."""
    return f"{rate:.0e}".replace("e-0", "e-")
