"""docs/operations.md promises nothing without a test: tests/FAULTS.md names one for every row of its faults."""

import ast
import re

from tests.docs.commands import ROOT, section


def test_every_fault_has_a_test_that_exists():
    page = section((ROOT / "docs/operations.md").read_text(encoding="utf-8"), "Twelve faults")
    rows = re.findall(r"^\| (.+?) \| .+ \|$", page, re.MULTILINE)[1:]
    items = re.findall(r"^\d+\. \*\*(.+)\*\*: (.+)$", (ROOT / "tests/FAULTS.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) == len(items) == 12
    for row, (fault, tests) in zip(rows, items, strict=True):
        assert row.startswith(fault)
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named, fault
        for file, name in named:
            tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
            assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body), (file, name)
