"""The launcher and the Slurm script, without a GPU or a Slurm."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import launch  # noqa: E402


@pytest.mark.parametrize(
    ("arguments", "standalone", "threads"),
    [
        (["--devices", "4", "+experiment/demo=fox_pro"], True, "4"),
        (["--devices=2", "--main-port", "1234"], False, "8"),
        (["--devices", "8", "--num-nodes", "2"], False, "2"),
        (["--devices", "8", "--num-nodes=1"], True, "2"),
        (["--devices", "32"], True, "1"),
        ([], True, "16"),
    ],
)
def test_what_the_launcher_adds(arguments, standalone, threads):
    added = launch.environment(arguments, cores=16)
    assert ("PET_STANDALONE" in added) == standalone
    assert added["OMP_NUM_THREADS"] == threads
    assert "SIGUSR1" in added["PET_SIGNALS_TO_HANDLE"].split(",")


@pytest.mark.parametrize("devices", ["0", "abc", "-2", "", "1.5", "0;1"])
def test_devices_that_cannot_be_are_one_line_and_nothing_starts(monkeypatch, capsys, devices):
    monkeypatch.setattr(launch, "launch", lambda arguments: pytest.fail("started"))
    monkeypatch.setattr(sys, "argv", ["launch.py", f"--devices={devices}"])
    assert launch.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --devices={devices} must be") and said.count("\n") == 1


@pytest.mark.parametrize("devices", ["1", "8", "-1", "auto", "0,1", "0,", "1,2,3,"])
def test_devices_that_fabric_knows_are_left_to_it(devices):
    assert launch.problem(["--devices", devices]) is None and launch.problem([]) is None


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


@pytest.mark.parametrize(
    ("status", "launcher", "code", "requeued"),
    [
        ("done", 0, 0, False),
        ("preempted", 75, 0, True),
        ("failed", 1, 1, False),
        ("starting", 137, 1, False),
        (None, 1, 1, False),
        (None, 75, 0, True),
    ],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_slurm_script_requeues_what_was_preempted_and_nothing_else(
    tmp_path, status, launcher, code, requeued, nodes
):
    """srun and scontrol are stand-ins; the run's own launcher is one that leaves the given status."""
    write = f'echo \'{{\n "status": "{status}",\n "step": 1\n}}\' > "$OUT/status.json"' if status else "true"
    executable(tmp_path / "bin/srun", '#!/bin/bash\nshift\nSLURM_NODEID=0 exec "$@"\n')
    executable(tmp_path / "bin/python", f'#!/bin/bash\nprintf "%s\\n" "$@" > "$OUT/arguments"\n{write}\nexit {launcher}\n')
    executable(
        tmp_path / "bin/scontrol",
        '#!/bin/bash\n[ "$1" = show ] && echo node-a && exit\necho "$@" > "$OUT/requeued"\n',
    )
    out = tmp_path / "run"
    out.mkdir()
    (out / "status.json").write_text('{\n "status": "preempted"\n}')  # of the job before
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "OUT": str(out),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_ON_NODE": "4",
    }
    script = ROOT / "scripts/slurm/train.sbatch"
    done = subprocess.run(
        ["bash", script, out, "+experiment/demo=fox_pro", "data_dir=/a b"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert (out / "requeued").exists() == requeued
    arguments = (out / "arguments").read_text().splitlines()
    many = ["--num-nodes", "2", "--main-address", "node-a", "--main-port", "20007"] if nodes == 2 else []
    rank = ["--node-rank", "0"] if nodes == 2 else []
    expected = ["scripts/launch.py", "--devices", "4", *rank, *many, f"output_dir={out}"]
    assert arguments == [*expected, "+experiment/demo=fox_pro", "data_dir=/a b"]


def test_a_run_of_a_sweep_is_launched_with_the_same_settings(monkeypatch):
    """Two places state them: this script must start without importing the package, which imports PyTorch."""
    from forgetting_transformer.sweep.jobs import job_environment

    settings = ("PET_SIGNALS_TO_HANDLE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    for name in settings:
        monkeypatch.delenv(name, raising=False)
    alone, in_sweep = launch.environment([], cores=16), job_environment()
    assert {name: alone[name] for name in settings} == {name: in_sweep[name] for name in settings}
