"""docs/operations.md holds no promise without a test: every row of its tables of faults names one, and it exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = ["fault", "what happens", "the test that shows it"]
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table of faults.

    Raises:
        AssertionError: a row without a fault, an outcome or a test.
    """
    found, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells == HEADER:
            inside = True
        elif inside and cells and set(line) - set("|- "):
            assert len(cells) == 3 and all(cells), f"a row has a fault, what happens, and a test: {line}"
            assert TEST.search(cells[2]), f"this row names no test as `folder/test_file.py::test_name`: {line}"
            found.append(cells)
        inside = inside and bool(cells)
    return found


def missing(cell: str) -> list[str]:
    """The tests named in a cell that are not in tests/."""
    return [f"{file}::{name}" for file, name in TEST.findall(cell) if name not in functions_of(ROOT / "tests" / file)]


def functions_of(file: Path) -> set[str]:
    if not file.is_file():
        return set()
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_row_names_a_test_that_exists():
    found = rows((ROOT / "docs" / "operations.md").read_text(encoding="utf-8"))
    assert len({row[0] for row in found}) == len(found) == 12
    assert not [name for row in found for name in missing(row[2])]


@pytest.mark.parametrize(
    "row",
    [
        "| the moon falls | nothing | see above |",
        "| the moon falls | nothing | |",
        "| the moon falls | nothing | `test_moon` |",
    ],
)
def test_a_promise_without_a_test_is_found(row):
    with pytest.raises(AssertionError, match="the moon falls"):
        rows(f"| {' | '.join(HEADER)} |\n|---|---|---|\n{row}\n")


def test_a_test_that_does_not_exist_is_found():
    assert missing("`training/test_resume.py::test_no_such`, `training/test_none.py::test_x`") == [
        "training/test_resume.py::test_no_such", "training/test_none.py::test_x",
    ]  # fmt: skip
