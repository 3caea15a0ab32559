"""docs/operations.md holds no promise without a test: every row of its tables of faults names one, and it exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER = "| fault | what happens | the test that shows it |\n"
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_row_names_a_test_that_exists():
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    tables = [table.partition("\n\n")[0].splitlines()[1:] for table in page.split(HEADER)[1:]]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for table in tables for row in table]
    assert all(len(row) == 3 and all(row) for row in rows)
    assert len({row[0] for row in rows}) == len(rows) == 12
    for fault, _, cell in rows:
        assert TEST.search(cell), f"{fault}: no test as `folder/test_file.py::test_name`"
        for file, name in TEST.findall(cell):
            assert name in functions_of(ROOT / "tests" / file), f"{fault}: there is no {file}::{name}"
