"""`python train.py -m …`: each job in its own folder and process, failures reported, the rest still run."""

import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.plugins import Plugins

from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.sweep import SweepError, jobs, runner
from forgetting_transformer.sweep.composer import compose_config
from forgetting_transformer.sweep.jobs import State
from hydra_plugins import forgetting_transformer_launchers as launchers
from tests.sweep.conftest import DEMO, starts
from tests.training.conftest import STEP, command_line
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def make_job(folder: Path, name: str, *overrides: str) -> jobs.Job:
    return jobs.Job(name, (*DEMO, *overrides), compose_config([*DEMO, *overrides, f"output_dir={folder / name}"]))


def test_each_job_has_a_folder_a_row_and_a_value_whatever_becomes_of_the_others(
    faults, train_main, tmp_path, capsys, monkeypatch
):
    Plugins.instance()  # Hydra's first look at plug-ins makes the launcher's class anew
    returned = []
    launcher = sys.modules[launchers.__name__].FabricLauncher
    launch = launcher.launch
    monkeypatch.setattr(
        launcher, "launch", lambda *all, **named: returned.append(launch(*all, **named)) or returned[-1]
    )
    faults |= {"fail": "seed=1", "diverge": "seed=2", "preempt": "seed=3", "die": "seed=4"}
    command = ("-m", *DEMO, "output_dir=out", "seed=0,1,2,3,4")
    assert train_main(*command) == 1
    printed = capsys.readouterr()
    rows = {line.split("|")[1].strip(): line for line in printed.out.splitlines() if line.startswith("| seed")}
    assert "finished" in rows["seed=0"] and "diverged" in rows["seed=2"] and "failed" in rows["seed=4"]
    assert "failed" in rows["seed=1"] and "RuntimeError: the GPU fell off the bus" in rows["seed=1"]
    assert "incomplete" in rows["seed=3"] and "the same command continues it" in rows["seed=3"]
    assert "4 of 5 jobs did not finish: seed=1, seed=2, seed=3, seed=4" in printed.err
    assert "Traceback" not in printed.err
    (summary,) = (tmp_path / "multirun").glob("*/*/summary-0.md")
    assert summary.read_text().strip() == printed.out.strip()
    assert returned[0][0].return_value == pytest.approx(3.0144, abs=1e-4), "for Hydra's sweepers"
    # The same command starts only what is not finished. Other settings, and an order to start over, are train.py's.
    for fault in ("fail", "diverge", "preempt", "die"):
        del faults[fault]
    assert train_main(*command) is None and "finished before" in capsys.readouterr().out
    assert [len(starts(tmp_path / f"out/seed={seed}")) for seed in range(5)] == [1, 2, 2, 2, 2]
    for other in ("optimizer.weight_decay=0.2", "resume=false"):
        assert train_main(*command[:-1], "seed=0,1", other) is None
    assert [len(starts(tmp_path / f"out/seed={seed}")) for seed in range(5)] == [3, 4, 2, 2, 2]


def test_folders_are_named_after_what_is_swept_unless_output_dir_differs(faults, train_main, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert train_main("-m", *DEMO, "output_dir=rates/lr-${optimizer.lr}", "optimizer.lr=0.001,0.002") is None
    assert (
        train_main("-m", *DEMO[1:], "output_dir=${oc.env:HOME}/c", "seed=0", "+experiment/demo=fox_pro,hgrn2") is None
    )
    folders = {str(file.parent.relative_to(tmp_path)) for file in tmp_path.rglob("starts.txt")}
    assert folders == {"c/experiment-demo=fox_pro", "c/experiment-demo=hgrn2", "rates/lr-0.001", "rates/lr-0.002"}


def test_what_cannot_work_is_refused_before_anything_starts(faults, train_main, tmp_path, capsys, monkeypatch):
    for arguments, message in [
        (["output_dir=out,./out"], "jobs 'output_dir=out' and 'output_dir=./out' would both write to output_dir="),
        (["output_dir=out", "seed=0,1", "fabric.accelerator=cuda"], "no GPU is visible"),
        (["output_dir=out", "seed=0,1", "hydra.launcher.jobs_per_gpu=0"], "jobs_per_gpu=0 must be 1 or more"),
        (["output_dir=out", "seed=0,1", "+hydra.launcher.job_at_once=2"], "did you mean hydra.launcher.jobs_at_once?"),
    ]:
        assert train_main("-m", *DEMO, *arguments) == 1
        assert message in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0,1") == 1
    assert "-m under `fabric run` is not possible" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    settings = [name for name in vars(launchers.FabricLauncherConfig()) if name != "_target_"]
    assert settings == list(signature(runner.Machine).parameters)


def test_jobs_share_gpus_and_wait_for_those_they_need(faults, tmp_path, monkeypatch):
    devices = {"a": 1, "b": 2, "c": 1, "d": 4, "e": 2}
    todo = {name: make_job(tmp_path, name, f"fabric.devices={n}") for name, n in devices.items()}
    machine = runner.Machine(gpus=[0, 1, 2, 3])
    taken: list[list[str]] = []
    for name in "abc":
        taken.append(machine.take(todo[name], taken))
    assert sorted(itertools.chain(*taken)) == machine.gpus and machine.take(todo["d"], taken) is None
    assert machine.take(todo["e"], taken[1:]) is None and machine.take(todo["a"], taken[1:]) == taken[0]
    shared, taken = runner.Machine(gpus=[0, 1], jobs_per_gpu=3), []
    while (gpus := shared.take(todo["a"], taken)) is not None:
        taken.append(gpus)
    assert taken == [["0"], ["1"]] * 3 and shared.take(todo["b"], taken) is None
    for named, at_once in (("", 1), ("GPU-5f,7", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        machine, taken = runner.Machine(), []
        while (gpus := machine.take(todo["a"], taken)) is not None:
            taken.append(gpus)
        assert len(taken) == at_once == machine.room(todo["a"])
    # fabric.devices=auto, the default, takes all GPUs of the node.
    assert runner.Machine(gpus=[0, 1]).take(make_job(tmp_path, "auto"), []) == ["0", "1"]
    with pytest.raises(SweepError, match=r"fabric.devices=4, but the sweep has 2 GPUs \(0, 1\)"):
        runner.Machine(gpus=[0, 1]).check([todo["d"]])
    results = runner.run_jobs([*todo.values()], runner.Machine(gpus=[0, 1, 2, 3]), tmp_path / "logs")
    assert {result.state for result in results} == {State.FINISHED}
    assert {name: len(starts(tmp_path / name)[0].split()[0].split(",")) for name in devices} == devices


def test_sigterm_lets_jobs_end_and_a_second_one_within_half_a_second_is_the_same(faults, tmp_path, monkeypatch):
    # No time passes between the two, however busy the machine is.
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: 7.0, sleep=time.sleep))
    faults["hang"] = "a"
    todo = [make_job(tmp_path, name) for name in ("a", "b")]

    def interrupt() -> None:
        wait_until(lambda: read_run(tmp_path / "a").tokens >= todo[0].config.train.max_tokens // 2)
        for number in (signal.SIGTERM, signal.SIGTERM):  # as `timeout` does
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    results = runner.run_jobs(todo, runner.Machine(gpus=[]), tmp_path / "logs")
    thread.join()
    assert [result.state for result in results] == [State.INTERRUPTED] * 2 and results[1].note == "not started"


def test_a_real_job_trains_in_a_fabric_run_of_two_processes(train_main, tmp_path, corpus, monkeypatch):
    """No stand-in: what the command of a user starts."""
    overrides = [o for o in command_line({"data_dir": str(corpus)}, tmp_path / "out") if "schedule.total" not in o]
    overrides += [f"train.max_tokens={4 * STEP}", "schedule.warmup_tokens=128"]
    overrides += ["fabric.accelerator=cpu", "fabric.devices=2"]
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.1)
    assert train_main("-m", *overrides, "optimizer.lr=choice(1e-3)") is None
    run = read_run(tmp_path / "out")
    assert json.loads((run.output_dir / "starts.jsonl").read_text())["world_size"] == 2
    assert run.finished(4 * STEP) and run.tokens == 4 * STEP and math.isfinite(run.final_loss(heldout=True))
