"""benchmarks/training.py: a table and a JSON file of what it measured, and of what could not be measured."""

import importlib.metadata
import json
from types import SimpleNamespace

import pytest
import torch
import zarr

from forgetting_transformer.evaluation.models import load_model
from tests.benchmarks.conftest import load
from tests.evaluation.conftest import quickstart  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def benchmark():
    return load("training")


SMALL = ["--device", "cpu", "--seq_len", "32", "--steps", "3", "--warmup_steps", "1", "--vocab_size", "64"]


@pytest.mark.rare("no contract: benchmarks")
def test_measures_a_demo_model_with_and_without_checkpointing(benchmark, tmp_path, capsys):
    out = tmp_path / "new" / "results.json"
    arguments = [*SMALL, "--experiments", "demo/fox_pro", "--optimizer_step", "--peak_flops", "1e12", "--out", str(out)]
    assert benchmark.main(arguments) == 0
    result = json.loads(out.read_text())
    assert result["settings"]["seq_len"] == 32
    assert result["environment"]["versions"]["torch"] == importlib.metadata.version("torch")
    with_checkpointing, without = result["rows"]
    assert (with_checkpointing["checkpointing"], without["checkpointing"]) == (True, False)
    for row in result["rows"]:
        assert row["status"] == "ok" and len(row["step_seconds"]) == 3
        assert row["tokens_per_second"] == pytest.approx(32 / sorted(row["step_seconds"])[1])
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * row["flops_per_token"] / 1e12)
    # Only the first measurement of a process is a cold one.
    assert 0 < with_checkpointing["first_step_seconds"] < with_checkpointing["cold_start_seconds"]
    assert without["first_step_seconds"] is without["cold_start_seconds"] is None
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:3] for line in printed[2:4]] == [[" demo/fox_pro ", " yes "], [" demo/fox_pro ", " no "]]
    assert {line.count("|") for line in printed[:4]} == {9}
    assert "forward, backward, clipping, AdamW" in printed[-1] and "MFU: causal-exact" in printed[-1]


@pytest.mark.rare("no contract: benchmarks")
def test_steps_with_the_optimizer_change_no_weight(benchmark, monkeypatch):
    """They repeat one batch: FoX learns it by heart in ten steps, and prunes as no model of initialisation does."""
    from forgetting_transformer.training import setup

    built, build = [], setup.build_model
    monkeypatch.setattr(setup, "build_model", lambda *given: built.append(build(*given)) or built[0])
    arguments = [*SMALL, "--experiments", "demo/fox_pro", "--optimizer_step", "--checkpointing", "off"]
    torch.manual_seed(0)
    assert benchmark.measure(benchmark.parse_args(arguments), "demo/fox_pro", False, cold=False)["step_seconds"]
    torch.manual_seed(0)
    fresh = build(benchmark.compose("demo/fox_pro", []), SimpleNamespace(vocab_size=64, bos_token_id=0)).state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in built[0].state_dict().items())


@pytest.mark.rare("no contract: benchmarks")
def test_a_run_is_measured_with_its_trained_weights_on_its_held_out_text(benchmark, quickstart):  # noqa: F811
    args = benchmark.parse_args([*SMALL, "--experiments", str(quickstart.run), "--batch_size", "2"])
    model, _, tokens_BT = benchmark.read_run(args, str(quickstart.run), checkpointing=False)
    trained = load_model(str(quickstart.run)).model.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    heldout = zarr.open_array(quickstart.data / "words" / "heldout.zarr")[0, :64].reshape(2, 32)
    assert (tokens_BT[:, 0] == 0).all() and (tokens_BT[:, 1:].numpy() == heldout).all()
    row = benchmark.measure(args, str(quickstart.run), checkpointing=False, cold=True)
    assert row["trained"] and row["tokens_per_step"] == 64


@pytest.mark.rare("no contract: benchmarks")
def test_overrides_change_a_run_where_its_weights_allow_it(benchmark, quickstart):  # noqa: F811
    def read(*overrides: str):
        args = benchmark.parse_args([*SMALL, "--experiments", str(quickstart.run), "--overrides", *overrides])
        return benchmark.read_run(args, str(quickstart.run), checkpointing=False)

    model, config, _ = read("model.config.log_pruning_tolerance=-3", "optimizer.lr=0.5")
    assert model.config.log_pruning_tolerance == -3 and config.optimizer.lr == 0.5
    trained = load_model(str(quickstart.run)).model.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(RuntimeError, match="size mismatch"):
        read("model.config.intermediate_size=96")
    with pytest.raises(
        ValueError, match=r"--overrides model=mamba2: for a run, give KEY=VALUE with a key of its config"
    ):
        read("model=mamba2")
    with pytest.raises(ValueError, match=r"unknown config key 'optimizer\.rate'"):
        read("optimizer.rate=0.5")


def test_attention_may_be_cudnns_to_compare_with(benchmark):
    from forgetting_transformer.ops import attention

    ours, flash = attention.takes_kernel, torch.backends.cuda.flash_sdp_enabled()
    with benchmark.cudnn_attention():
        assert not attention.takes_kernel(torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16))
        assert torch.backends.cuda.cudnn_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
    assert attention.takes_kernel is ours and torch.backends.cuda.flash_sdp_enabled() is flash


@pytest.mark.rare("no contract: benchmarks")
def test_a_row_without_checkpointing_may_have_cuda_graphs_where_the_experiment_checkpoints(benchmark):
    args = benchmark.parse_args([*SMALL, "--overrides", "train.cuda_graphs=true"])
    name = "forgetting_transformer/pro_760m_16b"
    assert benchmark.compose(name, []).train.gradient_checkpointing
    config = benchmark.compose(name, benchmark.overrides(args, False))
    assert config.train.cuda_graphs and not config.train.gradient_checkpointing
    with pytest.raises(
        ValueError, match=r"train.cuda_graphs=true does not work with train.gradient_checkpointing=true"
    ):
        benchmark.compose(name, benchmark.overrides(args, True))


@pytest.mark.rare("no contract: benchmarks")
def test_cudnns_attention_is_asked_of_models_that_could_use_it(benchmark):
    """Gates would go on in our kernels, and the row would say that it is cuDNN's."""
    args = benchmark.parse_args([*SMALL, "--experiments", "demo/fox_pro"])
    args.attention = "cudnn"
    for experiment in ("demo/fox_pro", "demo/mamba2"):
        with pytest.raises(ValueError, match="--attention cudnn: no layer of this model has attention without gates"):
            benchmark.measure(args, experiment, checkpointing=False, cold=True)
    with pytest.raises(ValueError, match="--attention cudnn needs a GPU"):
        benchmark.measure(args, "demo/transformer_llama", checkpointing=False, cold=True)


@pytest.mark.rare("no contract: benchmarks")
def test_overrides_reach_the_model(benchmark):
    args = benchmark.parse_args([*SMALL, "--experiments", "demo/fox_pro", "--overrides", "scale.num_hidden_layers=1"])
    shallow = benchmark.measure(args, "demo/fox_pro", checkpointing=False, cold=True)
    args.overrides = []
    assert shallow["parameters"] < benchmark.measure(args, "demo/fox_pro", checkpointing=False, cold=True)["parameters"]


def test_an_unknown_gpu_has_no_mfu(benchmark):
    args = benchmark.parse_args([*SMALL, "--experiments", "demo/fox_pro"])
    row = benchmark.measure(args, "demo/fox_pro", checkpointing=False, cold=True)
    assert row["mfu"] is None and row["peak_memory_bytes"] is None
    line = benchmark.describe_row({"experiment": "demo/fox_pro", "checkpointing": False, "status": "ok", **row})
    assert line.split("|")[5:7] == [" – ", " – "]


def raising(error: Exception):
    def measurement() -> dict:
        raise error

    return measurement


def test_out_of_memory_is_a_row_and_another_error_says_what_it_was(benchmark):
    assert benchmark.attempt(raising(torch.OutOfMemoryError("too much"))) == {"status": "out of memory"}
    failed = benchmark.attempt(raising(ValueError("no such\nkernel")))
    assert failed == {"status": "failed: ValueError: no such kernel"}
    row = {"experiment": "mamba2/760m_16b", "checkpointing": False, "status": "out of memory"}
    assert benchmark.describe_row(row) == "| mamba2/760m_16b | no | out of memory | | | | | |"


def test_an_experiment_that_takes_too_long_is_stopped_and_the_next_one_runs(benchmark, capsys):
    arguments = [*SMALL, "--experiments", "demo/fox_pro", "demo/fox_llama", "--time_limit", "0.05"]
    assert benchmark.main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:4] for line in printed[2:6]] == [
        [f" demo/{name} ", checkpointing, " stopped after 0.05 s "]
        for name in ("fox_pro", "fox_llama")
        for checkpointing in (" yes ", " no ")
    ]


def test_an_unknown_experiment_is_refused_with_what_there_is(benchmark, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse_args([*SMALL, "--experiments", "mamba3/760m_16b"])
    message = capsys.readouterr().err
    assert "no experiment 'mamba3/760m_16b'" in message and "longcrawl64/mamba2/760m_16b" in message


@pytest.mark.parametrize("defaults", ["ON_GPU", "ON_CPU"])
def test_the_default_experiments_exist(benchmark, defaults):
    for name in getattr(benchmark, defaults)["experiments"]:
        assert benchmark.experiment_file(name).is_file(), name
