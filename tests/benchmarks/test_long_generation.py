"""benchmarks/long_generation.py: its rows, and what it refuses."""

import json

import pytest

from tests.benchmarks.conftest import load
from tests.benchmarks.test_long_contexts import results

ROW = {"experiment": "forgetting_transformer/pro_760m_16b", "tokens": 65536, "part": 16384, "status": "ok"}
ROW |= {
    "cuda_graph": True,
    "prompt_seconds": 3.0,
    "token_seconds": 0.02,
    "cache_bytes": 10**10,
    "peak_memory_bytes": 2 * 10**10,
}


def test_differences_are_those_from_the_cache_that_keeps_all_keys(tmp_path, monkeypatch):
    load("long_generation")
    rows = [
        {**ROW, "evict_below": None, "cuda_graph": False, "log_probabilities": [-1.1, -2.0]},
        {**ROW, "evict_below": None, "log_probabilities": [-1.0, -2.0]},
        {**ROW, "evict_below": None, "part": 8192, "log_probabilities": [-1.0, -2.5]},
        {**ROW, "evict_below": -10.0, "cache_bytes": 10**9, "log_probabilities": [-1.001, -2.0]},
        {**ROW, "evict_below": -5.0, "status": "out of memory"},
    ]
    tables, _ = results(tmp_path, monkeypatch, [])
    (tmp_path / "long_generation.json").write_text(json.dumps({"environment": {"versions": {}}, "rows": rows}))
    _, _, *lines = tables.long_generation(tables.Results("long_generation*.json")).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[1] == ["FoX (Pro) 760M", "65,536", "–", "yes", "3.0", "20.0", "10.00", "20.0", ""]
    assert [row[2] for row in cells] == ["–", "–", "– (half)", "-10", "-5"]
    assert [row[3] for row in cells] == ["no", "yes", "yes", "yes", "yes"]
    assert [row[-1] for row in cells] == ["1.0e-01", "", "5.0e-01", "1.0e-03", ""] and cells[4][4] == "out of memory"


@pytest.mark.slow
@pytest.mark.rare("no contract: benchmarks")
def test_a_tiny_model_generates_the_same_from_all_caches(tmp_path, capsys):
    out = tmp_path / "results.json"
    command = ["--device", "cpu", "--seq_len", "1200", "--part", "300", "--decode", "4", "--time_constants", "2", "8"]
    benchmark = load("long_generation")
    assert benchmark.main([*command, "--experiment", "demo/fox_pro", "--out", str(out)]) == 0
    whole, halves, evicted = json.loads(out.read_text())["rows"]
    assert evicted["cache_bytes"] < 0.7 * whole["cache_bytes"]
    for row in (halves, evicted):
        assert row["log_probabilities"] == pytest.approx(whole["log_probabilities"], abs=1e-4)
    assert benchmark.main([*command, "--experiment", "demo/mamba2"]) == 2
    assert "error: --evict_below: evict_below is -10.0; Mamba2Model has no layer that evicts" in capsys.readouterr().err
