"""Every benchmark starts, lists its cases and measures a small one on a CPU; every command of measure.py is taken."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from forgetting_transformer.ops import forgetting_attention
from tests.benchmarks.conftest import FOLDER, load
from tests.docs.commands import check_command
from tests.evaluation.conftest import quickstart  # noqa: F401 (a fixture)

#: Benchmark -> options, and how many cases they are.
CASES = {
    "attention": ([], 40),
    "authors": ([], 8),
    "interruptions": (["--devices", "4"], 6),
    "scaling": (["--cases", "one", "context", "--micro_batches", "1", "8"], 4),
    "start": (["--devices", "4", "--launcher", "launch.py"], 2),
    "training": ([], 18),
    "whole_run": ([], 3),
}


def test_all_benchmarks_are_here():
    scripts = {file.stem for file in FOLDER.glob("*.py") if "__main__" in file.read_text(encoding="utf-8")}
    assert scripts == {*CASES, "measure"}


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_lists_the_cases_of_a_gpu(name, capsys):
    options, number = CASES[name]
    assert load(name).main(["--dry_run", "--device", "cuda", *options]) == 0
    assert len(capsys.readouterr().out.splitlines()) == number


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_kernels_need_a_gpu(capsys):
    assert load("attention").main([]) == 2
    assert "PyTorch sees no GPU" in capsys.readouterr().err


def test_wrong_options_are_refused_with_what_there_is(capsys):
    for name, options, said in (
        ("training", ["--experiments", "mamba3/760m_16b"], "longcrawl64/mamba2/760m_16b"),
        ("attention", ["--shapes", "1,24,64"], "a shape is 4 numbers B,T,H,D"),
        ("interruptions", ["--devices", "2", "--steps", "13"], "--steps 13 must be a multiple of 4"),
    ):
        with pytest.raises(SystemExit):
            load(name).parse_args(["--device", "cpu", *options])
        assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.rare("no contract: benchmarks")
def test_every_command_of_measure_would_be_taken_and_every_measured_file_has_one():
    found = load("measure").measurements()
    assert len({m.name for m in found}) == len(found) > 30
    for measurement in found:
        check_command(shlex.split(f"python benchmarks/{measurement.command} --out {measurement.name}.json"))
        devices = re.search(r"--devices (\d)", measurement.command)
        assert devices is None or measurement.gpus == int(devices[1])
    files = {file.stem for file in (FOLDER / "results").glob("*.json") if "source" not in json.loads(file.read_text())}
    of_any_triton = {re.sub(r"(triton)_.*", r"\1", m.name) for m in found}
    assert {re.sub(r"(triton)_.*", r"\1", name) for name in files} <= of_any_triton


def rows_of(name: str, out: Path, *options: str, code: int = 0) -> list[dict]:
    assert load(name).main(["--device", "cpu", "--out", str(out), *options]) == code
    return json.loads(out.read_text())["rows"]


STEPS = ["--seq_len", "32", "--steps", "2", "--warmup_steps", "1"]


@pytest.mark.slow
def test_steps_of_a_model_and_an_override_that_reaches_it(tmp_path):
    training = load("training")
    options = [*STEPS, "--device", "cpu", "--optimizer_step", "--peak_flops", "1e12", "--kernels", "3"]
    rows = []
    for overrides in ([], ["scale.num_hidden_layers=1"]):
        args = training.parse_args([*options, "--overrides", "optimizer.lr=1e-3", *overrides])
        rows.append(training.measure(args, {"experiment": "demo/fox_pro", "checkpointing": False}))
    row, shallow = rows
    assert row["tokens_per_step"] == 32 and len(row["step_seconds"]) == 2 and len(row["kernels"]) == 3
    assert row["mfu"] == pytest.approx(row["tokens_per_second"] * row["flops_per_token"] / 1e12)
    assert row["pruned"] and not row["compiled"] and row["peak_memory_bytes"] is None
    assert shallow["parameters"] < row["parameters"]


@pytest.mark.slow
@pytest.mark.rare("no contract: benchmarks")
def test_a_trained_run_is_measured_on_its_heldout_tokens(quickstart):  # noqa: F811
    training = load("training")
    options = [*STEPS, "--device", "cpu", "--vocab_size", "64", "--batch_size", "2", "--experiments"]
    args = training.parse_args([*options, str(quickstart.run), "--overrides", "model.config.log_pruning_tolerance=-3"])
    model, _, tokens_BT = training.read_run(args, str(quickstart.run), False)
    assert model.config.log_pruning_tolerance == -3 and tokens_BT.shape == (2, 33)
    args = training.parse_args([*options, str(quickstart.run), "--overrides", "model=mamba2"])
    with pytest.raises(ValueError, match="--overrides model=mamba2: for a run, give KEY=VALUE"):
        training.read_run(args, str(quickstart.run), False)


@pytest.mark.slow
@pytest.mark.rare("no contract: benchmarks")
def test_steps_on_two_processes_under_every_strategy(tmp_path):
    options = ["--experiments", "demo/fox_pro", "--seq_len", "32", "--steps", "1", "--micro_batches", "2"]
    rows = rows_of("scaling", tmp_path / "out.json", *options, "--cases", "one", "ddp", "fsdp", "fsdp_kept", "context")
    assert {row["status"] for row in rows} == {"ok"}
    losses = {row["case"]: row["loss"] for row in rows}
    assert losses["ddp"] == pytest.approx(losses["fsdp"]) and losses["fsdp"] == losses["fsdp_kept"]


#: Stands in for the authors' model, with what the benchmark and their train.py use of it.
MODEL = """
from types import SimpleNamespace
import torch
from forgetting_transformer.ops.forgetting_attention import forgetting_attention

class ForgettingTransformerConfig:
    def __init__(self, vocab_size=32000, log_pruning_tolerance=None, fuse_norm=True):
        self.vocab_size, self.log_pruning_tolerance = vocab_size, log_pruning_tolerance

class ForgettingTransformerForCausalLM(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.checkpointing = config, None
        self.embeddings = torch.nn.Embedding(config.vocab_size, 8)

    def gradient_checkpointing_enable(self, settings):
        self.checkpointing = settings

    def forward(self, input_ids, labels, return_dict):
        seen = (forgetting_attention(), self.config.log_pruning_tolerance, self.checkpointing, self.training)
        open("seen", "a").write(repr(seen) + "\\n")
        return SimpleNamespace(loss=self.embeddings(input_ids).sum(-1) - labels)
"""


@pytest.mark.slow
def test_the_authors_model_runs_in_the_mode_of_the_row_and_ours_keeps_its_op(tmp_path, monkeypatch, capsys):
    authors = load("authors")
    assert authors.main(["--device", "cpu", "--authors", str(tmp_path)]) == 2
    assert f"git clone https://github.com/zhixuan-lin/forgetting-transformer {tmp_path}" in capsys.readouterr().err
    (tmp_path / authors.MODEL).mkdir(parents=True)
    (tmp_path / authors.OP).parent.mkdir()
    (tmp_path / authors.OP).write_text("def forgetting_attention():\n    return 'theirs'\n")
    (tmp_path / authors.MODEL / "modeling_forgetting_transformer.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    args = authors.parse_args(["--device", "cpu", *STEPS, "--authors", str(tmp_path)])
    for pruned, checkpointing in ((True, False), (False, True)):
        case = {"experiment": "demo/fox_pro", "pruned": pruned, "checkpointing": checkpointing, "code": "authors"}
        row = authors.measure(args, case)
        assert row["tokens_per_step"] == 32 and row["parameters"] == 8 * 4096
        tolerance, checkpointed = (-10.0, None) if pruned else (None, {"use_reentrant": False})
        assert eval((tmp_path / "seen").read_text().splitlines()[-1]) == ("theirs", tolerance, checkpointed, True)
    assert sys.modules["forgetting_transformer.ops.forgetting_attention"] is forgetting_attention
    for name in [name for name in sys.modules if name.startswith("authors_fox")]:
        del sys.modules[name]


@pytest.mark.slow
def test_a_whole_run_starts_the_command_of_the_readme_and_measures_its_weights(tmp_path, monkeypatch):
    whole_run, commands = load("whole_run"), []
    monkeypatch.setattr(whole_run, "follow", lambda command, log: commands.append(command) or 1.0)
    monkeypatch.setattr(whole_run, "speeds", lambda output_dir: {})
    experiment = "forgetting_transformer/pro_125m_2b"
    args = whole_run.parse_args(["--device", "cuda", "--data_dir", str(tmp_path), "--folder", str(tmp_path)])
    plain = whole_run.compose(experiment, [])
    whole_run.measure(args, plain, {"experiment": experiment, "part": "train"})
    program, (name, *overrides) = commands[0][:5], commands[0][5:]
    assert Path(program[2]).name == "train.py" and program[1] == "run" and program[3:] == ["--devices", "1"]
    assert name == "+experiment/longcrawl64/forgetting_transformer=pro_125m_2b"
    overrides = [override for override in overrides if not override.startswith(("output_dir", "data_dir"))]
    config = whole_run.compose(experiment, overrides)
    assert config.train.max_tokens == 84 * 524_288 and config.log_interval == 4 * 524_288
    assert config.schedule == plain.schedule and config.optimizer == plain.optimizer
    assert (config.model, config.fabric, config.strategy) == (plain.model, plain.fabric, plain.strategy)
    run = tmp_path / "forgetting_transformer_pro_125m_2b/train"
    with pytest.raises(RuntimeError, match="part step needs the weights of part train"):
        whole_run.measure(args, plain, {"experiment": experiment, "part": "step"})
    (run / "checkpoints").mkdir(parents=True)
    (run.parent / "step.json").write_text('{"rows": [{"experiment": "x", "status": "ok", "mfu": 0.5}]}')
    assert whole_run.measure(args, plain, {"experiment": experiment, "part": "step_unpruned"}) == {"mfu": 0.5}
    step = load("training").parse_args(commands[-1][2:])
    assert (step.experiments, step.batch_size, step.seq_len, step.checkpointing) == ([str(run)], 4, 16384, "off")
    assert step.overrides == [whole_run.NO_PRUNING] and step.optimizer_step


def test_speed_counts_from_the_first_line_to_the_last(tmp_path):
    speeds, folder = load("whole_run").speeds, tmp_path / "metrics" / "jsonlines"
    folder.mkdir(parents=True)

    def write(name: str, entries: list[dict]) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    write("train", [{"step": 100, "train/loss": 2.0}])
    write("model_info", [{"step": 0, "model_info/total_params": 7}])
    # The first step, which compiles, took 90 seconds, the next ones 10, the last one 5.
    clock = {200: 100.0, 300: 110.0, 400: 120.0, 500: 125.0}
    logged = [
        {"step": step, "throughput/total_time": seconds, "throughput/token_count": step, "throughput/batch_count": 5}
        for step, seconds in clock.items()
    ]
    write("throughput", logged)
    found = speeds(tmp_path)
    assert found["tokens_per_second"] == 300 / 25 and found["tokens_per_second_at_the_end"] == 100 / 5
    write("throughput", logged[:1])
    with pytest.raises(RuntimeError, match="too few steps for a speed"):
        speeds(tmp_path)


@pytest.mark.slow
@pytest.mark.rare("no contract: benchmarks")
def test_a_start_and_an_interruption_of_a_tiny_run(tmp_path):
    empty, warm = rows_of("start", tmp_path / "start.json", "--experiments", "demo/fox_pro")
    assert (empty["status"], warm["status"]) == ("ok", "ok") and empty["launcher_seconds"] > 0
    options = ["--devices", "2", "--steps", "12", "--checks", "sigterm"]
    *_, row = rows_of("interruptions", tmp_path / "interruptions.json", *options)
    assert row["bitwise"] and row["steps_lost"] == 0 and row["exit_code"] == 75
