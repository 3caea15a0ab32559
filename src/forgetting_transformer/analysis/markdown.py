"""Markdown tables that also read well on a terminal, and pages whose tables and numbers come from files."""

import re
from collections.abc import Mapping, Sequence

from forgetting_transformer.analysis import AnalysisError

#: A table stands on lines of its own between <!-- NAME --> and <!-- end of NAME -->, a number in a sentence between
#: <!-- NAME --> and <!-- end -->.
_MARKED = re.compile(r"<!-- (\w+) -->(?:\n.*?<!-- end of \1 -->|[^\n]*?<!-- end -->)", re.DOTALL)
_MARK = re.compile(r"<!-- (?:end|end of \w+|\w+) -->")


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


def fill_in(page: str, sections: Mapping[str, str]) -> str:
    """A page in which what stands between marks is replaced by the section of that name.

    Args:
        page: Markdown with marks, `<!-- NAME -->` and `<!-- end of NAME -->` around lines, `<!-- NAME -->` and `<!--
            end -->` within a line.
        sections: tables and numbers by name.

    Raises:
        AnalysisError: the page has marks for a section that is not there, or a mark without the one that ends it.
    """

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in sections:
            raise AnalysisError(
                f"the page wants {name!r}, and there is no such section; there are {', '.join(sections)}"
            )
        text = sections[name].strip()
        if match[0].endswith("<!-- end -->"):
            return f"<!-- {name} -->{text}<!-- end -->"
        return f"<!-- {name} -->\n{text}\n<!-- end of {name} -->"

    if unpaired := _MARK.search(_MARKED.sub("", page)):
        raise AnalysisError(f"the mark {unpaired[0]} has no other one to pair with")
    return _MARKED.sub(replace, page)
