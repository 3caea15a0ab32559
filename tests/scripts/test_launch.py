"""The launcher and the Slurm script, without a GPU or a Slurm."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.fabric import cli
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import launch  # noqa: E402


def test_what_the_launcher_adds():
    for arguments, standalone, threads in (
        (["--devices", "4", "+experiment/demo=fox_pro"], True, "4"),
        (["--devices=2", "--main-port", "1234"], False, "8"),
        (["--devices", "8", "--num-nodes", "2"], False, "2"),
        ([], True, "16"),
    ):
        args, _ = launch.parse(arguments)
        added = launch.environment(args, launch.processes(args, here=0), cores=16)
        assert (("PET_STANDALONE" in added), added["OMP_NUM_THREADS"]) == (standalone, threads), arguments
        assert "SIGUSR1" in added["PET_SIGNALS_TO_HANDLE"].split(",")


def test_devices_are_those_that_are_there_or_one_line_says_why_not(monkeypatch, capsys):
    monkeypatch.setattr("torch.distributed.run.main", lambda arguments: pytest.fail("started"))
    for devices in ("0", "abc", "0,1"):
        monkeypatch.setattr(sys, "argv", ["launch.py", f"--devices={devices}"])
        assert launch.main() == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: --devices={devices} must be") and said.count("\n") == 1
    for devices, accelerator, gpus, count in (
        ("1", (), 0, 1), ("8", ("--accelerator", "cpu"), 2, 8), ("auto", (), 4, 4), ("auto", (), 0, 1),
        ("auto", ("--accelerator", "cpu"), 4, 1),
    ):  # fmt: skip
        assert launch.processes(launch.parse(["--devices", devices, *accelerator])[0], gpus) == count
    with pytest.raises(ValueError, match=r"^--devices=3, but this machine has 2 GPUs"):
        launch.processes(launch.parse(["--devices", "3"])[0], here=2)


def test_ranks_find_what_fabric_run_leaves_for_them(monkeypatch):
    """Word for word, so that a run does not depend on which of both started it."""
    words = ["--devices", "2", "--accelerator", "cpu", "--num-nodes", "3", "--node-rank", "1"]
    words += ["--main-address", "a", "--main-port", "7"]
    rest = ["+experiment/demo=fox_pro", "optimizer.lr=1e-3", "--config-dir", "mine", "-m"]
    started, left = [], []
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if not k.startswith("LT_")})
    monkeypatch.setattr("torch.distributed.run.main", lambda arguments: started.append(list(arguments)))
    monkeypatch.setattr(sys, "argv", ["launch.py", *words[:4], *rest[:1], *words[4:], *rest[1:]])
    for start in (lambda: cli._main(["run", str(launch.TRAIN), *words, *rest], standalone_mode=False), launch.main):
        start()
        left.append({name: os.environ.pop(name) for name in list(os.environ) if name.startswith("LT_")})
    assert started[0] == started[1] and left[0] == left[1] and left[0]["LT_DEVICES"] == "2"


@pytest.mark.parametrize(
    ("told", "error", "code", "said"),
    [
        ("done", None, 0, ""),
        ("preempted", None, 75, ""),
        ("preempted", SignalException("", signal.SIGTERM), 75, ""),
        (None, SignalException("", signal.SIGTERM), 143, "SIGTERM: the ranks have ended without a status"),
        ("failed", DistNetworkError("EADDRINUSE"), 1, "--main-port"),
        ("failed", {0: 1, 1: -15}, 1, ""),  # rank 0 has printed its error
        ("failed", {0: 1, 1: -9}, 1, "rank 1 (process 101) was killed by SIGKILL"),
        (None, {0: -15, 1: 17}, 1, "rank 1 (process 101) ended with code 17"),
        ("preempted", {0: 75, 1: -9}, 1, "rank 1 (process 101) was killed by SIGKILL"),
    ],
)
def test_how_it_ends_and_which_ranks_it_names(told, error, code, said):
    if isinstance(error, dict):
        failures = {
            rank: ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file="<N/A>")
            for rank, exitcode in error.items()
        }
        error = ChildFailedError("train.py", failures)
    ended, lines = launch.conclude(error, told)
    assert ended == code and len(lines) == bool(said) and said in "".join(lines)


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


#: Functions in place of bash's own commands, for moments that are hard to meet: the launcher has ended when the script
#: first asks for it, …
ENDED_BEFORE_IT_IS_LOOKED_AT = """
kill() { while builtin kill -0 "$2" 2>/dev/null; do sleep 0.01; done; return 1; }
"""
#: … or ends while a signal interrupts the first `wait`.
ENDED_WHEN_A_SIGNAL_CAME = """
wait() {
    [ -n "${waited:-}" ] && { builtin wait "$1"; return; }
    waited=1
    while builtin kill -0 "$1" 2>/dev/null; do sleep 0.01; done
    return 138
}
"""


@pytest.mark.parametrize(
    ("status", "launcher", "code", "requeued", "nodes", "bash"),
    [
        ("done", 0, 0, False, 1, ""),
        ("preempted", 75, 0, True, 2, ""),
        (None, 75, 0, True, 1, ""),
        (None, 75, 0, True, 1, ENDED_BEFORE_IT_IS_LOOKED_AT),
        (None, 75, 0, True, 2, ENDED_WHEN_A_SIGNAL_CAME),
        ("preempted", 1, 1, False, 1, ""),  # one rank heard a signal, because another one had failed
    ],
)
def test_the_slurm_script_requeues_what_was_preempted_and_nothing_else(
    tmp_path, status, launcher, code, requeued, nodes, bash
):
    """srun and scontrol are stand-ins; the run's own launcher is one that leaves the given status."""
    (tmp_path / "bash").write_text(bash)
    write = f'echo \'{{\n "status": "{status}",\n "step": 1\n}}\' > "$OUT/status.json"' if status else "true"
    executable(tmp_path / "bin/srun", '#!/bin/bash\nshift\nSLURM_NODEID=0 exec "$@"\n')
    executable(
        tmp_path / "bin/python", f'#!/bin/bash\nprintf "%s\\n" "$@" > "$OUT/arguments"\n{write}\nexit {launcher}\n'
    )
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
        "BASH_ENV": str(tmp_path / "bash"),
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


def test_the_slurm_script_refuses_an_empty_folder(tmp_path):
    """It would be the root of the file system: mkdir /logs, rm /status.json."""
    for tool in ("mkdir", "rm", "scontrol", "srun", "python"):
        executable(tmp_path / tool, f'#!/bin/sh\necho "{tool} $*" >> {tmp_path}/calls\nexit 1\n')
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT)}
    command = ["bash", ROOT / "scripts/slurm/train.sbatch", "", "data_dir=data"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "is empty" in done.stderr and not (tmp_path / "calls").exists()


def test_a_run_of_a_sweep_is_launched_with_the_same_settings(monkeypatch):
    """Two places state them: this script must start without importing the package, which imports PyTorch."""
    from forgetting_transformer.sweep.jobs import job_environment

    settings = ("PET_SIGNALS_TO_HANDLE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    for name in settings:
        monkeypatch.delenv(name, raising=False)
    alone, in_sweep = launch.environment(launch.parse([])[0], 1, cores=16), job_environment()
    assert {name: alone[name] for name in settings} == {name: in_sweep[name] for name in settings}
