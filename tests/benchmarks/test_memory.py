"""benchmarks/memory.py on a CPU, where there is no peak to see: lengths, places of block inputs, and equal numbers."""

import json

import pytest

from tests.benchmarks.conftest import load


@pytest.mark.slow
@pytest.mark.rare("no contract: benchmarks")
def test_places_of_block_inputs_compute_the_same_and_a_second_start_measures_what_is_missing(tmp_path, monkeypatch):
    out = tmp_path / "memory.json"
    arguments = ["--experiment", "demo/fox_pro", "--seq_len", "64", "128", "--inputs", "gpu", "host", "--device", "cpu"]
    arguments += ["--vocab_size", "100", "--steps", "1", "--overrides", "fabric.precision=32-true", "--out", str(out)]
    memory = load("memory")
    assert memory.main(arguments) == 0
    monkeypatch.setattr(memory, "measure", lambda *_: pytest.fail("measured again"))
    assert memory.main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["seq_len"], row["inputs"]) for row in rows] == [(64, "gpu"), (64, "host"), (128, "gpu"), (128, "host")]
    for here, there in zip(rows[::2], rows[1::2], strict=True):
        assert here["losses"] == there["losses"] and here["gradient_norms"] == there["gradient_norms"]


def test_an_experiment_that_is_not_there_is_one_line(capsys):
    with pytest.raises(SystemExit):
        load("memory").main(["--experiment", "demo/fox_prow", "--seq_len", "64"])
    assert "there is no experiment 'demo/fox_prow'; choose from " in capsys.readouterr().err
