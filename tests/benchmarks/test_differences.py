"""benchmarks/differences.py measures what it says, in the direction that theory says."""

import json

import pytest

from tests.benchmarks.conftest import load


@pytest.mark.rare("no contract: benchmarks")
def test_rows_are_what_the_page_needs(capsys):
    assert load("differences").main(["--steps", "2", "--length", "512"]) == 0
    rows = {
        (row["what"], row.get("head_dim"), row.get("length")): row
        for row in map(json.loads, capsys.readouterr().out.splitlines())
    }
    assert 0 < rows["reduction", None, None]["gradient_error"] < 2**-7 and "difference" in rows["seeds", None, None]
    for head_dim in (64, 128):
        rotary = rows["rotary", head_dim, 512]
        assert 0 < rotary["fp32_tables"] < rotary["bf16_tables"] < 0.01
    pruned = rows["pruning", None, None]
    assert 0 < pruned["skipped"] < 1 and 0 < pruned["largest_of_a_row"] < pruned["bound"]
    assert 0 < rows["cumsum", None, 512]["largest"] <= rows["cumsum", None, 2048]["largest"]
    assert 0 < rows["fixed gate", None, None]["largest_change"] < 0.1
