"""benchmarks/whole_run.py: training as the README starts it, and what is read from the run."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from forgetting_transformer.training import check
from tests.benchmarks.conftest import load
from tests.evaluation.conftest import quickstart  # noqa: F401 (a fixture)
from tests.training.conftest import train

pytestmark = pytest.mark.slow

EXPERIMENT = "forgetting_transformer/pro_125m_2b"


@pytest.fixture(scope="module")
def benchmark():
    return load("whole_run")


def started(benchmark, args, experiment, monkeypatch, output_dir, tokens) -> list[str]:
    """The command that part `train` starts."""
    commands = []
    monkeypatch.setattr(benchmark, "follow", lambda command, log: commands.append(command) or ([], 1.0, 2.0))
    monkeypatch.setattr(benchmark, "speeds", lambda output_dir: {})
    config = benchmark.compose(experiment, args.overrides)
    benchmark.train(experiment, args, config, output_dir, tokens)
    return commands[-1]


def test_it_starts_the_command_of_the_readme_and_keeps_its_learning_rates(benchmark, monkeypatch, tmp_path):
    args = benchmark.parse_args(["--device", "cuda", "--data_dir", str(tmp_path)])
    assert args.experiments == [EXPERIMENT] and args.tokens == 44_000_000
    command = started(benchmark, args, EXPERIMENT, monkeypatch, tmp_path / "train", args.tokens)
    program, (name, *overrides) = command[:5], command[5:]
    assert Path(program[0]).name == "fabric" and Path(program[2]).name == "train.py"
    assert program[1] == "run" and program[3:] == ["--devices", "1"]
    assert name == "+experiment/longcrawl64/forgetting_transformer=pro_125m_2b"
    plain = benchmark.compose(EXPERIMENT, [])
    config = benchmark.compose(EXPERIMENT, [o for o in overrides if not o.startswith(("output_dir", "data_dir"))])
    check(config, 1)
    assert config.train.max_tokens == 84 * 524_288 and config.log_interval == 4 * 524_288
    assert config.schedule == plain.schedule and config.optimizer == plain.optimizer
    assert (config.model, config.fabric, config.strategy) == (plain.model, plain.fabric, plain.strategy)
    config.train.max_tokens = plain.train.max_tokens
    assert config.train == plain.train


def test_the_kept_log_names_no_folders(benchmark):
    line = "compiled code is in /home/me/.cache/inductor/v1, kernels/s 1.5/2, read (/data/x/train.zarr)"
    assert benchmark.FOLDERS.sub("…/", line) == "compiled code is in …/v1, kernels/s 1.5/2, read (…/train.zarr)"


def test_without_the_fabric_command_its_module_is_started(benchmark, monkeypatch, tmp_path):
    args = benchmark.parse_args(["--device", "cpu", "--data_dir", str(tmp_path)])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    command = started(benchmark, args, "demo/fox_pro", monkeypatch, tmp_path / "train", 10**4)
    assert command[:3] == [str(tmp_path / "python"), "-m", "lightning.fabric.cli"]
    # The module is `fabric run`, and takes its script next.
    assert Path(command[3]).name == "train.py" and "--accelerator" in command


def test_without_pruning_only_pruning_differs(benchmark, monkeypatch, tmp_path):
    args = benchmark.parse_args(["--device", "cuda", "--data_dir", str(tmp_path), "--overrides", "seed=3"])
    pruned = started(benchmark, args, EXPERIMENT, monkeypatch, tmp_path / "train", 10**6)
    unpruned = started(benchmark, args, EXPERIMENT, monkeypatch, tmp_path / "train_unpruned", 10**6)
    assert (
        set(unpruned) - set(pruned)
        == {
            benchmark.NO_PRUNING,
            f"output_dir={tmp_path / 'train_unpruned'}",
        }
        and pruned[-1] == unpruned[-1] == "seed=3"
    )


@pytest.fixture
def in_process(benchmark, monkeypatch):
    """Trains in a process that has imported everything, instead of `fabric run train.py`; returns the commands."""
    commands = []

    def follow(command, log):
        commands.append(command)
        output_dir, data_dir = (next(x for x in command if x.startswith(key)) for key in ("output_dir=", "data_dir="))
        overrides = [x for x in command if "=" in x and x[0] != "+" and x not in (output_dir, data_dir)]
        config = dataclasses.asdict(benchmark.compose("demo/fox_pro", overrides))
        config |= {key: value for key, _, value in (x.partition("=") for x in (output_dir, data_dir))}
        log.parent.mkdir(parents=True, exist_ok=True)
        train(config)
        return ["INFO attention: PyTorch", "INFO 1,024 of 2,048 tokens, loss 3.0"], 1.0, 2.0

    monkeypatch.setattr(benchmark, "follow", follow)
    return commands


SMALL = [
    "scale.hidden_size=64", "scale.num_hidden_layers=1", "datamodule.train_batch_len=32", "train.grad_acc_tokens=256",
    "schedule.warmup_tokens=512", "datamodule.train_num_workers=0", "datamodule.eval_tokens=512", "wandb.mode=disabled",
]  # fmt: skip


@pytest.fixture
def small(quickstart, tmp_path) -> list[str]:  # noqa: F811
    """Options of a run of 8 steps and one of 4; --overrides come last."""
    corpus = ["--device", "cpu", "--data_dir", str(quickstart.data), "--dataset", "words"]
    runs = ["--tokens", "2000", "--unpruned_tokens", "1000", "--folder", str(tmp_path / "runs")]
    return [*corpus, *runs, "--out", str(tmp_path / "results.json"), "--overrides", *SMALL]


@pytest.mark.rare("no contract: benchmarks")
def test_runs_give_speeds_losses_and_what_the_log_says_of_backends(benchmark, small, in_process, tmp_path, capsys):
    arguments = ["--parts", "train", "train_unpruned", *small]
    assert benchmark.main(arguments) == 0
    pruned, unpruned = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (pruned["part"], pruned["tokens"], pruned["steps"]) == ("train", 2048, 8)
    assert (unpruned["part"], unpruned["tokens"], unpruned["steps"]) == ("train_unpruned", 1024, 4)
    assert pruned["tokens_per_second"] > 0 and pruned["tokens_per_second_at_the_end"] > 0
    assert [tokens for tokens, _ in pruned["losses"]] == [256 * i for i in range(1, 9)]
    assert pruned["heldout_loss"] > 0 and pruned["log"] == ["INFO attention: PyTorch"]
    assert "steps" in pruned["goodput"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].startswith("| demo/fox_pro | train | 2,048 |") and printed[-1] == "INFO attention: PyTorch"
    # The same command again starts nothing.
    assert len(in_process) == 2 and benchmark.main(arguments) == 0 and len(in_process) == 2
    # A run that is there is moved aside and not continued: its first steps would be missing.
    assert benchmark.main([*arguments, "--replace"]) == 0
    assert "resume=false" in in_process[2] and len(list((tmp_path / "runs/demo_fox_pro/train/previous").iterdir())) == 1


@pytest.mark.rare("no contract: benchmarks")
def test_steps_are_measured_with_the_weights_of_the_run(benchmark, small, monkeypatch, tmp_path):
    (tmp_path / "runs/demo_fox_pro/train/checkpoints").mkdir(parents=True)
    commands = []

    def follow(command, log):
        commands.append(command)
        row = {"experiment": str(log), "status": "ok", "tokens_per_second": 5.0, "mfu": None}
        Path(command[command.index("--out") + 1]).write_text(json.dumps({"rows": [row]}))

    monkeypatch.setattr(benchmark, "follow", follow)
    assert benchmark.main(["--parts", "step", "step_unpruned", *small]) == 0
    pruned, unpruned = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert pruned == {"experiment": "demo/fox_pro", "part": "step", "tokens_per_second": 5.0, "mfu": None}
    assert unpruned["part"] == "step_unpruned"
    one, other = (load("training").parse_args(command[2:]) for command in commands)
    assert one.experiments == other.experiments == [str(tmp_path / "runs/demo_fox_pro/train")]
    assert (one.batch_size, one.seq_len, one.optimizer_step, one.checkpointing) == (8, 32, True, "off")
    assert (one.overrides, other.overrides) == ([], [benchmark.NO_PRUNING])


def test_weights_that_are_not_there_are_an_error(benchmark, tmp_path, capsys):
    assert benchmark.main(["--device", "cpu", "--parts", "step", "--folder", str(tmp_path)]) == 1
    assert "part step needs the weights of part train" in capsys.readouterr().err


def test_what_cannot_be_composed_is_an_error(benchmark, tmp_path, capsys):
    arguments = ["--device", "cpu", "--folder", str(tmp_path), "--overrides", "train.max_tokns=3"]
    assert benchmark.main(arguments) == 1
    assert "train.max_tokns" in capsys.readouterr().err


def test_speed_counts_from_the_first_line_to_the_last(benchmark, tmp_path):
    folder = tmp_path / "metrics" / "jsonlines"
    folder.mkdir(parents=True)

    def write(name: str, entries: list[dict]) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    write("goodput", [{"step": 500, "goodput/steps": 1.0}])
    write("train", [{"step": 100, "train/loss": 2.0}])
    write("model_info", [{"step": 0, "model_info/total_params": 7}])
    # The first step, which compiles, took 90 seconds, the next ones 10, the last one 5.
    clock = {200: 100.0, 300: 110.0, 400: 120.0, 500: 125.0}
    counters = ("token_count", "batch_count")
    logged = [
        {"step": step, "throughput/total_time": seconds}
        | {f"throughput/{key}": step / (1 if key == "token_count" else 100) for key in counters}
        for step, seconds in clock.items()
    ]
    write("throughput", logged)
    found = benchmark.speeds(tmp_path)
    assert found["tokens_per_second"] == 300 / 25 and found["tokens_per_second_at_the_end"] == 100 / 5
    assert found["mfu"] is None and found["heldout_loss"] is None and (found["steps"], found["parameters"]) == (5, 7)
    write("throughput", logged[:1])
    with pytest.raises(benchmark.BenchmarkError, match="too few steps for a speed"):
        benchmark.speeds(tmp_path)


def test_output_is_shown_kept_and_timed(benchmark, tmp_path, capsys):
    script = "print('11-22 08:18:40 rank 0 INFO 4 of 8 tokens, loss 2.5, lr 0'); print('WARNING slow')"
    lines, first_loss, seconds = benchmark.follow([sys.executable, "-c", script], tmp_path / "new" / "log")
    assert lines == ["INFO 4 of 8 tokens, loss 2.5, lr 0", "WARNING slow"] and 0 < first_loss <= seconds
    assert (tmp_path / "new" / "log").read_text() == capsys.readouterr().err
    with pytest.raises(benchmark.BenchmarkError, match="ended with code 3; its output is in"):
        benchmark.follow([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")
