"""benchmarks/peers.py: models of other packages have our sizes, run in the same command, or say why they do not."""

import json
from types import SimpleNamespace

import pytest

from tests.benchmarks.conftest import load

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: benchmarks")]

SMALL = ["--device", "cpu", "--seq_len", "32", "--steps", "1", "--warmup_steps", "1"]


@pytest.fixture(scope="module")
def benchmark():
    return load("peers")


def test_peers_are_measured_beside_our_model_with_its_number_of_parameters(benchmark, tmp_path, capsys):
    out = tmp_path / "peers.json"
    chosen = ["--experiments", "demo/transformer_llama", "--compiled", "no", "--out", str(out)]
    assert benchmark.main([*SMALL, *chosen]) == 0
    rows = {row["code"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["ours", "fla", "hf"]
    ours, theirs = rows["ours"], rows["hf"]
    assert ours["status"] == theirs["status"] == "ok" and not ours["compiled"] and not theirs["compiled"]
    for key in ("parameters", "flops_per_token", "tokens_per_step"):
        assert ours[key] == theirs[key]
    assert rows["fla"]["status"].startswith(("ok", "not run: "))
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| demo/")]
    assert [line.count("|") for line in printed] == [9] * 3 and "| Hugging Face | no |" in printed[2]


@pytest.mark.parametrize("experiment", ["mamba2/760m_16b", "transformer/llama_760m_16b"])
def test_a_model_of_hugging_face_has_as_many_parameters_as_ours_of_760m(benchmark, experiment):
    import torch

    from forgetting_transformer.training import setup

    args = benchmark.parse_args(["--device", "cpu", "--experiments", experiment])
    chosen, file = benchmark.options_of_training(args, experiment, compiled=False)
    config = benchmark.training.compose(file, chosen.overrides)
    with torch.device("meta"):
        ours = setup.build_model(config, SimpleNamespace(vocab_size=50257, bos_token_id=0, eos_token_id=0))
        theirs, _, _ = benchmark.PEERS["hf"][benchmark.model_of(experiment)](ours.config)
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
    assert counts[0] == counts[1] > 8e8


def test_a_package_that_does_not_run_a_model_is_a_row_that_says_why(benchmark, monkeypatch):
    def missing(_):
        raise benchmark.NotRun("it is not installed")

    monkeypatch.setitem(benchmark.PEERS["fla"], "transformer", missing)
    args = benchmark.parse_args([*SMALL, "--experiments", "demo/transformer_llama"])
    row = benchmark.cases(args, "demo/transformer_llama", "fla")[0]
    row |= benchmark.training.attempt(lambda: benchmark.measure(args, row, cold=True))
    assert row["status"] == "not run: it is not installed"
    assert benchmark.describe_row(row).endswith("| not run: it is not installed |")


def test_an_unknown_experiment_is_refused_with_what_there_is(benchmark, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse_args(["--device", "cpu", "--experiments", "demo/transformer_lama"])
    assert "there is no experiment 'demo/transformer_lama'" in capsys.readouterr().err


def test_the_experiments_of_a_gpu_exist_and_have_peers(benchmark):
    args = benchmark.parse_args(["--device", "cpu", "--experiments", *benchmark.ON_GPU])
    for experiment in args.experiments:
        assert any(benchmark.model_of(experiment) in peers for peers in benchmark.PEERS.values())
