"""Every benchmark starts, lists its cases and measures a small one on a CPU; every command of measure.py is taken."""

import functools
import json
import re
import shlex
from pathlib import Path

import pytest

from tests.docs.commands import check_command
from tests.processes import ROOT, load_script

FOLDER = ROOT / "benchmarks"
load = functools.partial(load_script, folder="benchmarks")
#: Benchmark -> options, and how many cases they are.
CASES = {
    "attention": ([], 40),
    "authors": ([], 8),
    "interruptions": (["--devices", "4"], 3),
    "scaling": (["--cases", "one", "context", "--micro_batches", "1", "8"], 4),
    "start": (["--devices", "4", "--launcher", "launch.py"], 2),
    "training": ([], 18),
    "whole_run": ([], 1),
}


def test_a_dry_run_of_every_benchmark_lists_its_cases_on_a_gpu(capsys):
    scripts = {file.stem for file in FOLDER.glob("*.py") if "__main__" in file.read_text(encoding="utf-8")}
    assert scripts == {*CASES, "measure"}
    for name, (options, number) in CASES.items():
        assert load(name).main(["--dry_run", "--device", "cuda", *options]) == 0
        assert len(capsys.readouterr().out.splitlines()) == number, name


@pytest.mark.slow
@pytest.mark.rare("no contract: benchmarks")
def test_every_command_of_measure_would_be_taken_and_every_measured_file_has_one():
    found = load("measure").measurements()
    assert len({m.name for m in found}) == len(found) > 10
    for measurement in found:
        check_command(shlex.split(f"python benchmarks/{measurement.command} --out {measurement.name}.json"))
        devices = re.search(r"--devices (\d)", measurement.command)
        assert devices is None or measurement.gpus == int(devices[1])
    assert {file.stem for file in (FOLDER / "results").glob("*.json")} <= {m.name for m in found}


@pytest.mark.slow
def test_steps_of_a_model_and_an_override_that_reaches_it():
    training = load("training")
    options = ["--device", "cpu", "--seq_len", "32", "--steps", "2", "--warmup_steps", "1"]
    options += ["--optimizer_step", "--peak_flops", "1e12"]
    rows = []
    for overrides in ([], ["scale.num_hidden_layers=1"]):
        args = training.parse_args([*options, "--overrides", "optimizer.lr=1e-3", *overrides])
        rows.append(training.measure(args, {"experiment": "demo/fox_pro", "checkpointing": False}))
    row, shallow = rows
    assert row["tokens_per_step"] == 32 and len(row["step_seconds"]) == 2
    assert row["mfu"] == pytest.approx(row["tokens_per_second"] * row["flops_per_token"] / 1e12)
    assert row["pruned"] and not row["compiled"] and row["peak_memory_bytes"] is None
    assert shallow["parameters"] < row["parameters"]


def test_speed_counts_from_the_first_line_to_the_last(tmp_path):
    speeds, folder = load("whole_run").speeds, tmp_path / "metrics" / "jsonlines"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text('{"step": 100, "train/loss": 2.0}\n')
    (folder / "model_info.jsonl").write_text('{"step": 0, "model_info/total_params": 7}\n')
    # The first step, which compiles, took 90 seconds, the next ones 10, the last one 5.
    clock = {200: 100.0, 300: 110.0, 400: 120.0, 500: 125.0}
    logged = [
        {"step": step, "throughput/total_time": seconds, "throughput/token_count": step, "throughput/batch_count": 5}
        for step, seconds in clock.items()
    ]
    (folder / "throughput.jsonl").write_text("\n".join(map(json.dumps, logged)))
    found = speeds(tmp_path)
    assert found["tokens_per_second"] == 300 / 25 and found["tokens_per_second_at_the_end"] == 100 / 5
    (folder / "throughput.jsonl").write_text(json.dumps(logged[0]))
    with pytest.raises(RuntimeError, match="too few steps for a speed"):
        speeds(tmp_path)


def rows_of(name: str, out: Path, *options: str) -> list[dict]:
    assert load(name).main(["--device", "cpu", "--out", str(out), *options]) == 0
    return json.loads(out.read_text())["rows"]


@pytest.mark.slow
@pytest.mark.rare("no contract: benchmarks")
def test_steps_on_two_processes_under_every_strategy(tmp_path):
    options = ["--experiments", "demo/fox_pro", "--seq_len", "32", "--steps", "1", "--micro_batches", "2"]
    rows = rows_of("scaling", tmp_path / "out.json", *options, "--cases", "one", "ddp", "fsdp", "fsdp_kept", "context")
    assert {row["status"] for row in rows} == {"ok"}
    losses = {row["case"]: row["loss"] for row in rows}
    assert losses["ddp"] == pytest.approx(losses["fsdp"]) and losses["fsdp"] == losses["fsdp_kept"]


@pytest.mark.slow
@pytest.mark.rare("no contract: benchmarks")
def test_a_start_of_a_tiny_run_and_its_continuation_on_other_numbers_of_processes(tmp_path):
    empty, warm = rows_of("start", tmp_path / "start.json", "--experiments", "demo/fox_pro")
    assert (empty["status"], warm["status"]) == ("ok", "ok") and empty["launcher_seconds"] > 0
    rows = rows_of("interruptions", tmp_path / "interruptions.json", "--devices", "2", "--steps", "6")
    assert [row["devices"] for row in rows] == [[2], [1], [2, 1, 2]] and rows[-1]["largest_difference"] < 1e-3
