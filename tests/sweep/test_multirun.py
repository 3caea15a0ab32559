"""`python train.py -m …`: each job in its own folder and process, failures reported, the rest still run."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir

from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.sweep import SweepError, jobs, machines, runner
from forgetting_transformer.sweep.jobs import State
from forgetting_transformer.training import parse
from hydra_plugins import forgetting_transformer_launchers as launchers
from tests.processes import run_command
from tests.sweep.conftest import DEMO, ROOT, starts
from tests.training.conftest import STEP
from tests.training.test_failures import command_line
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def make_job(folder: Path, name: str, *overrides: str) -> jobs.Job:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = parse(compose("config", overrides=[*DEMO, *overrides, "output_dir=out"]))
    config.output_dir = str(folder / name)
    return jobs.Job(name, ROOT / "train.py", (*DEMO, *overrides), config)


@pytest.mark.quick
def test_each_job_has_a_folder_named_after_what_is_swept_and_a_row_in_the_table(faults, train_main, tmp_path, capsys):
    assert train_main("-m", *DEMO[1:], "output_dir=out", "seed=0,1", "+experiment/demo=fox_pro,hgrn2") is None
    names = ["seed=0", "seed=1"]
    folders = [f"seed={s},experiment-demo={e}" for s in (0, 1) for e in ("fox_pro", "hgrn2")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(folders)
    table = capsys.readouterr().out
    assert table.count("finished") == 4 and all(name in table for name in names)
    (summary,) = (tmp_path / "multirun").glob("*/*/summary-0.md")
    assert summary.read_text().strip() == table.strip()


def test_an_output_dir_that_contains_what_differs_is_taken_as_it_is(faults, train_main, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert train_main("-m", *DEMO, "output_dir=out/lr-${optimizer.lr}", "optimizer.lr=0.001,0.002") is None
    assert train_main("-m", *DEMO, "output_dir=a,b") is None
    assert train_main("-m", *DEMO, "output_dir=${oc.env:HOME}/c", "seed=0,1") is None
    assert starts(tmp_path / "c/seed=0") and starts(tmp_path / "c/seed=1"), "the same for both: not what differs"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["lr-0.001", "lr-0.002"]
    assert starts(tmp_path / "a") and starts(tmp_path / "b")


def test_a_failed_job_is_reported_and_the_rest_still_run(faults, train_main, tmp_path, capsys):
    faults |= {"fail": "seed=1", "diverge": "seed=2", "preempt": "seed=4"}
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0,1,2,3,4") == 1
    printed = capsys.readouterr()
    rows = {line.split("|")[1].strip(): line for line in printed.out.splitlines() if line.startswith("| seed")}
    assert "finished" in rows["seed=0"] and "finished" in rows["seed=3"]
    assert "failed" in rows["seed=1"] and "RuntimeError: the GPU fell off the bus" in rows["seed=1"]
    assert "diverged" in rows["seed=2"]
    assert "incomplete" in rows["seed=4"] and "the same command continues it" in rows["seed=4"]
    assert "3 of 5 jobs did not finish: seed=1, seed=2, seed=4" in printed.err and "Traceback" not in printed.err


def test_a_job_whose_gpu_failed_goes_on_once_after_the_others(faults, train_main, tmp_path, capsys):
    faults |= {"device": "seed=0", "device_always": "seed=1"}
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0,1,2") == 1
    printed = capsys.readouterr()
    rows = {line.split("|")[1].strip(): line for line in printed.out.splitlines() if line.startswith("| seed")}
    assert "finished" in rows["seed=0"] and "failed" in rows["seed=1"] and "finished" in rows["seed=2"]
    assert [len(starts(tmp_path / f"out/seed={seed}")) for seed in (0, 1, 2)] == [2, 2, 1]
    order = [line.split()[:2] for line in printed.err.splitlines() if line.split()[:1] in (["started"], ["again"])]
    wanted = ["started 0", "again 0:", "started 1", "again 1:", "started 2", "started 0", "started 1"]
    assert [f"{what} {name.removeprefix('seed=')}" for what, name in order] == wanted
    log = (tmp_path / "out/seed=0/metrics/jsonlines/train.jsonl").read_text().splitlines()
    assert len(log) == 10, "it went on from where it was"


def test_jobs_get_the_config_dir_and_name_of_the_command(faults, train_main, tmp_path, monkeypatch):
    (tmp_path / "mine/experiment").mkdir(parents=True)
    experiment = "# @package _global_\ndefaults: [/recipe/demo, {override /datamodule: corpus}, _self_]\ntag: mine\n"
    (tmp_path / "mine/experiment/my.yaml").write_text(experiment)
    seen = []
    monkeypatch.setattr(runner, "run_jobs", lambda jobs, *_: seen.extend(jobs) or [])
    options = ["--config-dir", str(tmp_path / "mine")]
    train_main(*options, "-m", "+experiment=my", "data_dir=data", "output_dir=out", "seed=0,1")
    assert [job.config.tag for job in seen] == ["mine", "mine"]
    assert seen[1].overrides == (f"--config-dir={tmp_path}/mine", "+experiment=my", "data_dir=data", "seed=1")


def test_the_value_of_a_job_for_hydras_sweepers_is_its_final_loss(faults, train_main, monkeypatch):
    returned = []
    launch = launchers.FabricLauncher.launch

    def keep(self, *overrides, **options):
        returned.extend(launch(self, *overrides, **options))
        return returned

    monkeypatch.setattr(launchers.FabricLauncher, "launch", keep)
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0", "optimizer.lr=2e-3,4e-3") is None
    assert [job.return_value for job in returned] == pytest.approx([2.998, 2.998 + 0.1 * math.log(2) ** 2])


def test_the_same_command_again_starts_only_what_is_not_finished(faults, train_main, tmp_path, capsys):
    faults["fail"] = "seed=1"
    command = ("-m", *DEMO, "output_dir=out", "seed=0,1")
    assert train_main(*command) == 1
    del faults["fail"]
    assert train_main(*command) is None
    assert [len(starts(tmp_path / f"out/seed={s}")) for s in (0, 1)] == [1, 2]
    assert "finished before" in capsys.readouterr().out
    # Other settings, or an order to start over: train.py must see them, and refuse or obey.
    assert train_main(*command, "optimizer.weight_decay=0.2") is None
    assert train_main(*command, "resume=false") is None
    assert [len(starts(tmp_path / f"out/seed={s}")) for s in (0, 1)] == [3, 4]


def test_a_run_that_was_killed_after_its_last_checkpoint_is_not_taken_for_finished(faults, train_main, tmp_path):
    """An evaluation may still be due."""
    faults["die"] = "seed=0"
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0,1") == 1
    del faults["die"]
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0,1") is None
    assert [len(starts(tmp_path / f"out/seed={s}")) for s in (0, 1)] == [2, 1]


def test_what_cannot_work_is_refused_before_anything_starts(faults, train_main, tmp_path, capsys, monkeypatch):
    assert train_main("-m", *DEMO, "seed=0,1") == 1
    assert "no value for output_dir" in capsys.readouterr().err
    assert train_main("-m", *DEMO, "output_dir=out,./out") == 1
    assert "jobs 'output_dir=out' and 'output_dir=./out' would both write to output_dir=" in capsys.readouterr().err
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0,1", "fabric.accelerator=cuda") == 1
    assert "no GPU is visible" in capsys.readouterr().err
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0,1", "fabric.devices=[0,1]") == 1
    assert "fabric.devices=[0, 1]: jobs of a sweep need a number of devices" in capsys.readouterr().err
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0,1", "hydra.launcher.jobs_at_once=0") == 1
    assert "jobs_at_once=0 must be 1 or more" in capsys.readouterr().err
    monkeypatch.setenv("LT_CLI_USED", "1")
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0,1") == 1
    assert "-m under `fabric run` is not possible" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_jobs_share_the_gpus_and_never_one(faults, tmp_path):
    """Four GPUs: jobs of one, two and one start together, and the one that needs all waits until they have ended."""
    machine = machines.LocalMachine(gpus=[0, 1, 2, 3])
    devices = {"a": 1, "b": 2, "c": 1, "d": 4, "e": 2}
    todo = [make_job(tmp_path, name, f"fabric.devices={n}") for name, n in devices.items()]
    processes = [machine.start(job, tmp_path / f"{job.name}.log") for job in todo[:3]]
    assert None not in processes and machine.start(todo[3], tmp_path / "d.log") is None
    for process in processes:
        wait_until(lambda: process.poll() is not None)  # noqa: B023
    results = runner.run_jobs(todo, machine, tmp_path / "logs")
    assert {result.state for result in results} == {State.FINISHED}
    gpus = {name: starts(tmp_path / name)[0].split()[0].split(",") for name in devices}
    assert {name: len(mine) for name, mine in gpus.items()} == devices
    assert sorted(gpus["a"] + gpus["b"] + gpus["c"]) == ["0", "1", "2", "3"]
    with pytest.raises(SweepError, match=r"fabric.devices=5, but the sweep has 4 GPUs \(0, 1, 2, 3\)"):
        runner.run_jobs([make_job(tmp_path, "f", "fabric.devices=5")], machine, tmp_path / "logs")


def test_without_settings_a_cpu_runs_one_job_at_a_time_and_gpus_as_many_as_fit(faults, tmp_path, monkeypatch):
    todo = [make_job(tmp_path, name, "fabric.devices=1") for name in ("a", "b", "c", "d")]
    for gpus, at_once in (("", 1), ("2,3", 2), ("GPU-5f,7", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        machine = machines.LocalMachine()
        started = [machine.start(job, tmp_path / "log") for job in todo]
        assert [process is not None for process in started] == [True] * at_once + [False] * (4 - at_once)
        for process in started[:at_once]:
            wait_until(lambda: process.poll() is not None)  # noqa: B023
    on_cpu = machines.LocalMachine(gpus=[], jobs_at_once=3)
    assert sum(on_cpu.start(job, tmp_path / "log") is not None for job in todo) == 3
    # fabric.devices=auto, the default, takes all GPUs of the node.
    machine = machines.LocalMachine(gpus=[0, 1])
    process = machine.start(make_job(tmp_path, "all"), tmp_path / "log")
    wait_until(lambda: process.poll() is not None)
    assert starts(tmp_path / "all")[0].startswith("0,1 ")


def test_an_error_of_the_one_who_asks_for_jobs_ends_those_that_run(faults, tmp_path):
    faults["hang"] = "hanging"
    machine = machines.LocalMachine(gpus=[], jobs_at_once=2)

    def fail(result):
        assert machine._running == 1
        raise SweepError("what comes next is unknown")

    with pytest.raises(SweepError, match="what comes next is unknown"):
        runner.run_jobs(
            [make_job(tmp_path, "hanging"), make_job(tmp_path, "quick")], machine, tmp_path / "logs", on_result=fail
        )
    assert machine._running == 0


def test_timeout_which_signals_twice_interrupts_once_and_later_signals_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now))
    with runner._Interrupts() as interrupts:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
            now += 0.01
        assert interrupts.count == 1
        now += 1
        signal.raise_signal(signal.SIGINT)
        assert interrupts.count == 2


def test_jobs_that_share_a_gpu(faults, tmp_path):
    """Six jobs at a time on two GPUs, three on each; a job of two GPUs waits for one place on both."""
    machine = machines.LocalMachine(gpus=[0, 1], jobs_per_gpu=3)
    todo = [make_job(tmp_path, name, "fabric.devices=1") for name in "abcdefg"]
    assert machine.room(todo[0]) == 6
    processes = [machine.start(job, tmp_path / f"{job.name}.log") for job in todo]
    assert [process is not None for process in processes] == [True] * 6 + [False]
    assert machine.start(make_job(tmp_path, "both", "fabric.devices=2"), tmp_path / "log") is None
    for process in processes[:6]:
        process._process.wait()
        process.poll()
    # In turn, so that the jobs of one model, which start one after another, are on both.
    assert [starts(tmp_path / name)[0].split()[0] for name in "abcdef"] == ["0", "1"] * 3
    both = make_job(tmp_path, "both", "fabric.devices=2")
    assert machine.room(both) == 3
    assert runner.run_jobs([both], machine, tmp_path / "logs")[0].state == State.FINISHED
    with pytest.raises(SweepError, match="jobs_per_gpu=0"):
        machines.LocalMachine(gpus=[0], jobs_per_gpu=0)


def test_jobs_that_come_of_a_result_wait_by_priority(faults, tmp_path, capsys):
    machine = machines.LocalMachine(gpus=[])
    late = make_job(tmp_path, "late")
    urgent = dataclasses.replace(make_job(tmp_path, "urgent"), priority=1)
    first = make_job(tmp_path, "first")
    results = runner.run_jobs(
        [first, late], machine, tmp_path / "logs", on_result=lambda r: [urgent] if r.job is first else []
    )
    assert [result.job.name for result in results] == ["first", "late", "urgent"]
    begun = [line.split()[1] for line in capsys.readouterr().err.splitlines() if line.startswith("started")]
    assert begun == ["first", "urgent", "late"]


def test_the_command_of_a_job_is_a_fabric_run_with_nothing_of_another_launch(tmp_path, monkeypatch):
    job = make_job(tmp_path, "a=1,b", "fabric.devices=2", "fabric.accelerator=cpu", "seed=3")
    command = jobs.training_command(job, 2)
    assert command[1:7] == ["-m", "lightning.fabric.cli", "--devices", "2", "--accelerator", "cpu"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        composed = parse(compose("config", overrides=command[command.index(str(ROOT / "train.py")) + 1 :]))
    assert composed.output_dir == str(tmp_path / "a=1,b") and composed.seed == 3
    assert composed.fabric.devices == composed.fabric.accelerator == "auto"
    alone = jobs.training_command(job, 1, alone=True)
    assert alone[1] == str(ROOT / "train.py") and alone[2:-2] == list(job.overrides)
    assert alone[-2:] == [f"output_dir='{tmp_path / 'a=1,b'}'", "fabric.devices=1"]
    for name in ("LT_DEVICES", "TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("MASTER_PLAN", "7")
    assert {name for name, value in jobs.job_environment().items() if value == "7"} == {"MASTER_PLAN"}


def test_ctrl_c_ends_the_jobs_and_the_sweep_says_what_is_left(faults, train_main, tmp_path, capsys):
    faults["hang"] = "seed=0"

    def interrupt() -> None:
        wait_until((tmp_path / "out/seed=0/metrics/jsonlines/train.jsonl").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    message = train_main("-m", *DEMO, "output_dir=out", "seed=0,1")
    thread.join()
    assert "the same command continues" in message
    assert capsys.readouterr().out.count("interrupted") == 2
    assert not starts(tmp_path / "out/seed=1")
    del faults["hang"]
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0,1") is None


SBATCH = """#!/usr/bin/env python3
import os, subprocess, sys
print("Submitted batch job 4711", flush=True)
script = open(sys.argv[-1]).read()
log = [line.split("=", 1)[1] for line in script.splitlines() if line.startswith("#SBATCH --output=")][0]
with open(log, "a") as output:
    code = subprocess.run(["bash", sys.argv[-1]], stdout=output, stderr=output).returncode
sys.exit(code if "--wait" in sys.argv else 0)
"""


@pytest.fixture
def sbatch(tmp_path, monkeypatch) -> Path:
    """A folder on PATH with an `sbatch` that runs the script at once."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(SBATCH)
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_slurm_jobs_are_written_submitted_and_waited_for(faults, train_main, tmp_path, sbatch, capsys):
    faults["fail"] = "seed=1"
    slurm = ["hydra/launcher=slurm", "hydra.launcher.partition=long", "hydra.launcher.time='2:00:00'"]
    slurm += ["hydra.launcher.sbatch=['--constraint=h100']", "hydra.launcher.setup=['export OMP_NUM_THREADS=3']"]
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0,1", "fabric.devices=4", *slurm) == 1
    printed = capsys.readouterr().out
    assert "finished" in printed and "failed" in printed and "the GPU fell off the bus" in printed
    assert starts(tmp_path / "out/seed=0") == ["all 3"], "the setup lines run before training"
    (script,) = (tmp_path / "multirun").glob("*/*/seed=0.sbatch")
    options = [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if "#SBATCH" in line]
    assert {"--partition=long", "--time=2:00:00", "--constraint=h100", "--nodes=1", "--gpus-per-node=4"} <= set(options)
    assert {"--requeue", "--dependency=singleton"} <= set(options)
    names = {o for o in options if o.startswith("--job-name=seed=0-")}
    assert len(names) == 1


#: SLURM that preempts the job in its fifth step and, as --requeue asks, starts it again, with the number it had.
PREEMPTING = """#!/usr/bin/env python3
import os, pathlib, subprocess, sys, time
print("Submitted batch job 4711", flush=True)
here, script = pathlib.Path(sys.argv[0]).parent, pathlib.Path(sys.argv[-1])
with open(here / "submitted", "a") as file:
    file.write(f"{script}\\n")
job = subprocess.Popen(["bash", script])
while not [log for log in here.parent.glob("out/**/train.jsonl") if log.read_text().count("\\n") >= 5]:
    time.sleep(0.02)
job.terminate()
job.wait()
if "#SBATCH --requeue" not in script.read_text().splitlines():
    sys.exit(1)
sys.exit(subprocess.run(["bash", "-c", script.read_text().replace("hang", "no fault")]).returncode)
"""


def test_slurm_puts_a_preempted_job_back_into_the_queue_and_nobody_else_does(
    faults, train_main, tmp_path, sbatch, capsys
):
    faults["hang"] = "out"
    (sbatch / "sbatch").write_text(PREEMPTING)
    for tool in ("scontrol", "scancel"):
        (sbatch / tool).write_text(f"#!/usr/bin/env bash\necho {tool} >> {sbatch}/submitted\n")
        (sbatch / tool).chmod(0o755)
    command = ["-m", *DEMO, "output_dir=out", "seed=0", "fabric.devices=1", "hydra/launcher=slurm"]
    assert train_main(*command, "hydra.launcher.setup=['export OMP_NUM_THREADS=3']") is None
    assert "finished" in capsys.readouterr().out
    assert len((sbatch / "submitted").read_text().splitlines()) == 1, "neither the sweep nor the script requeues"
    (folder,) = (path.parent for path in tmp_path.glob("out/**/starts.txt"))
    assert len(starts(folder)) == 2
    steps = [json.loads(line)["step"] for line in (folder / "metrics/jsonlines/train.jsonl").read_text().splitlines()]
    assert len(steps) == 10 == len({*steps}), "the second start continued the first"


def test_slurm_without_waiting_ends_when_all_are_submitted(faults, train_main, tmp_path, sbatch, capsys):
    faults["hang"] = "never"
    (sbatch / "sbatch").write_text("#!/usr/bin/env bash\necho Submitted batch job 815\n")
    slurm = ["hydra/launcher=slurm", "hydra.launcher.wait=false", "fabric.devices=1"]
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0,1", *slurm) is None
    assert capsys.readouterr().out.count("SLURM job 815") == 2
    assert train_main("-m", *DEMO, "output_dir=out", "seed=0,1", *slurm, "hydra.launcher.jobs_at_once=1") == 1
    assert "needs wait=true" in capsys.readouterr().err


def test_ctrl_c_leaves_slurm_jobs_in_the_queue_and_a_hopeless_one_is_cancelled(tmp_path, sbatch, monkeypatch):
    (sbatch / "sbatch").write_text("#!/usr/bin/env bash\necho Submitted batch job 99\nexec sleep 600\n")
    (sbatch / "scancel").write_text(f"#!/usr/bin/env bash\necho $1 >> {tmp_path}/cancelled\n")
    (sbatch / "scancel").chmod(0o755)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.02)
    job, machine = make_job(tmp_path, "a", "fabric.devices=1"), machines.Slurm()
    started: list[machines.Process] = []

    def interrupt_when_it_is_submitted() -> None:
        wait_until(lambda: started and started[0].description)
        os.kill(os.getpid(), signal.SIGTERM)

    start = machine.start
    monkeypatch.setattr(machine, "start", lambda *arguments: started.append(start(*arguments)) or started[-1])
    thread = threading.Thread(target=interrupt_when_it_is_submitted)
    thread.start()
    (result,) = runner.run_jobs([job], machine, tmp_path / "logs")
    thread.join()
    assert result.state == State.INTERRUPTED and result.note == "SLURM job 99 goes on"
    assert not (tmp_path / "cancelled").exists()
    process = start(job, tmp_path / "logs/a.log")
    wait_until(lambda: process.description)
    process.stop()
    assert (tmp_path / "cancelled").read_text() == "99\n"
    process.kill()


def test_slurm_says_what_it_lacks(faults, train_main, tmp_path, sbatch, capsys, monkeypatch):
    command = ("-m", *DEMO, "output_dir=out", "seed=0,1", "hydra/launcher=slurm")
    assert train_main(*command) == 1
    assert "fabric.devices=auto; say how many devices a job has on a node" in capsys.readouterr().err
    assert train_main(*command, "fabric.devices=1", "hydra.launcher.sbatch=[exclusive]") == 1
    assert "sbatch=['exclusive']: these are options of sbatch" in capsys.readouterr().err
    (sbatch / "sbatch").write_text("#!/usr/bin/env bash\necho 'sbatch: error: invalid partition' >&2; exit 1\n")
    assert train_main(*command, "fabric.devices=1") == 1
    assert "sbatch: error: invalid partition" in capsys.readouterr().out
    (sbatch / "sbatch").unlink()
    assert train_main(*command, "fabric.devices=1") == 1
    assert "there is no sbatch on PATH" in capsys.readouterr().err


def test_a_slurm_job_on_two_nodes_starts_fabric_run_on_each(tmp_path, sbatch):
    """Run for real, with stand-ins for srun (both nodes at once) and scontrol, and echo for the training."""
    job = make_job(tmp_path, "it's a job", "fabric.devices=4")
    script = machines.Slurm(nodes=2).batch_script(job, tmp_path / "log")
    script = script.replace(sys.executable, "echo")
    (sbatch / "scontrol").write_text("#!/usr/bin/env bash\nprintf 'node7\\nnode8\\n'\n")
    (sbatch / "srun").write_text('#!/usr/bin/env bash\nshift\nSLURM_NODEID=0 "$@"\nSLURM_NODEID=1 "$@"\n')
    for tool in ("scontrol", "srun"):
        (sbatch / tool).chmod(0o755)
    environment = os.environ | {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[7-8]"}
    done = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for rank, line in enumerate(done.stdout.splitlines()):
        assert "--devices 4" in line and "--num-nodes 2" in line
        assert f"--node-rank {rank} --main-address node7 --main-port 20012 {ROOT / 'train.py'}" in line
        assert f"output_dir='{tmp_path}/it\\'s a job'" in line
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize(("settings", "machine"), [("FabricLauncher", "LocalMachine"), ("SlurmLauncher", "Slurm")])
def test_a_launchers_settings_are_its_machines(settings, machine):
    fields = dataclasses.fields(getattr(launchers, f"{settings}Config"))
    wanted = signature(getattr(machines, machine)).parameters
    assert [f.name for f in fields if f.name != "_target_"] == list(wanted)


def test_a_real_job_trains_in_a_fabric_run_of_two_processes(tmp_path, corpus):
    """No stand-in: the command a user types."""
    overrides = tiny_overrides(corpus, tmp_path / "out")
    command = ["-m", *overrides, "fabric.accelerator=cpu", "fabric.devices=2", "optimizer.lr=choice(1e-3)"]
    done = run_command("train.py", *command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| finished |" in done.stdout
    started = json.loads((tmp_path / "out/optimizer.lr=0.001/starts.jsonl").read_text())
    assert started["world_size"] == 2
    run = read_run(tmp_path / "out/optimizer.lr=0.001")
    assert run.finished(4 * STEP) and run.tokens == 4 * STEP and not run.diverged
    assert run.final_loss(heldout=True) < 4.2 and run.flops_per_token > 0


def test_a_real_run_whose_loss_is_not_finite_has_diverged(tmp_path, corpus):
    overrides = [
        *tiny_overrides(corpus, tmp_path / "out"),
        "optimizer.lr=1e3",
        "optimizer.weight_decay=1e3",
        "train.max_bad_steps=1",
    ]
    assert run_command("train.py", *overrides, folder=tmp_path).returncode == 1
    run = read_run(tmp_path / "out")
    assert run.diverged and not run.finished(4 * STEP) and run.flops_per_token > 0


def tiny_overrides(corpus: Path, output_dir: Path) -> list[str]:
    """A run of four steps that takes a second."""
    overrides = [o for o in command_line({"data_dir": str(corpus)}, output_dir) if "schedule.total" not in o]
    return [*overrides, f"train.max_tokens={4 * STEP}"]
