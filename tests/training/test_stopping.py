"""Asked to stop, all ranks stop after the same step, saved; a rank that hangs or dies ends the others."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.processes import Command, free_port, run_command
from tests.training.conftest import STEP, Job, changed, train
from tests.training.test_failures import ENDLESS, FABRIC, command_line
from tests.training.test_resume import assert_same_run, lines, losses
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

#: The signal comes in the middle of step 6, on one rank only.
SIGNAL_IN_STEP_SIX = """
import os, signal, time
from forgetting_transformer.training import trainer
original = trainer.Trainer.step
def step(self, batch):
    if self.counters.batch_count == 5 and self.fabric.global_rank == {rank}:
        os.kill(os.getpid(), signal.{name})
        while self.sentinel.request is None:  # until it is heard
            time.sleep(0.001)
    return original(self, batch)
trainer.Trainer.step = step
"""


def status(config: dict) -> dict:
    return json.loads((Path(config["output_dir"]) / "status.json").read_text())


STOPPED = pytest.mark.rare(
    "tests/training/test_stopping.py::test_a_signal_stops_all_ranks_within_two_steps_and_nothing_is_lost"
)


@pytest.mark.parametrize(
    ("name", "strategy", "world_size", "rank"),
    [
        ("SIGTERM", "auto", 1, 0),
        pytest.param("SIGINT", "auto", 1, 0, marks=STOPPED),
        ("SIGUSR1", "ddp", 2, 1),
        pytest.param("SIGTERM", "fsdp", 2, 0, marks=STOPPED),
    ],
)
def test_a_signal_stops_all_ranks_within_two_steps_and_nothing_is_lost(
    tiny, finished, name, strategy, world_size, rank
):
    tiny = changed(tiny, strategy__name=strategy)
    straight = finished(tiny, world_size)
    assert status({"output_dir": straight})["status"] == "done"
    job = Job(tiny, world_size, patch=SIGNAL_IN_STEP_SIX.format(name=name, rank=rank))
    assert job.wait() == [0] * world_size, job.errors()
    stopped = status(tiny)
    assert stopped["status"] == "preempted" and stopped["reason"] in ("", name)
    # The step it came in and, with several ranks, the one in which they agree.
    assert stopped["step"] == (6 if world_size == 1 else 7) * STEP
    assert (Path(tiny["output_dir"]) / f"checkpoints/step-{stopped['step']:015d}/manifest.json").is_file()
    train(tiny, world_size)
    assert status(tiny)["status"] == "done"
    assert_same_run(straight, tiny["output_dir"])


def test_an_evaluation_is_broken_off_and_done_again(tiny, finished):
    patch = """
import os, signal, time
from forgetting_transformer.training import trainer
original = trainer.Trainer.evaluate
def evaluate(self, due):
    os.kill(os.getpid(), signal.SIGTERM)
    while self.sentinel.request is None:
        time.sleep(0.001)
    return original(self, due)
trainer.Trainer.evaluate = evaluate
"""
    job = Job(tiny, patch=patch)
    assert job.wait() == [0], job.errors()
    assert status(tiny)["step"] == 10 * STEP and not (Path(tiny["output_dir"]) / "metrics/jsonlines/val.jsonl").exists()
    train(tiny)
    assert [entry["step"] for entry in lines(tiny["output_dir"], "val")] == [10 * STEP, 20 * STEP]
    assert_same_run(finished(tiny), tiny["output_dir"])


def test_a_second_signal_leaves_at_once_and_what_is_saved_stays(tiny, tmp_path):
    patch = """
import os, signal, time
from forgetting_transformer.training import trainer
from forgetting_transformer.training.faults import sentinel
sentinel.AT_ONCE_SECONDS = 600  # for the status, also on a slow disk
original = trainer.Trainer.step
def step(self, batch):
    if self.counters.batch_count == 9:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # forwarded by a launcher: the same request
        while self.sentinel.request is None:
            time.sleep(0.001)
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3600)
    return original(self, batch)
trainer.Trainer.step = step
"""
    job = Job(tiny, patch=patch)
    assert job.wait() == [128 + signal.SIGTERM]
    found = status(tiny)
    assert (
        found["status"] == "failed" and "SIGTERM, after SIGTERM: left at once, without a checkpoint" in found["reason"]
    )
    assert "the last good checkpoint is at" in found["reason"]  # of step 4, or 8 where the disk was quick
    train(tiny)
    kept = f"continuing from {tiny['output_dir']}/checkpoints/step-"
    assert any(f"{kept}{step * STEP:015d}" in rank_log(tiny, 0) for step in (4, 8))


def rank_log(config: dict, rank: int) -> str:
    return (Path(config["output_dir"]) / f"logs/rank-{rank}.log").read_text()


def test_a_rank_that_hangs_says_where_and_the_others_do_not_wait_for_ever(tiny):
    # Short from here on: the ranks of a busy machine may take longer to find each other.
    patch = """
import os, time
from forgetting_transformer.training import trainer
original = trainer.Trainer.step
def lost_in_thought():
    time.sleep(3600)
def step(self, batch):
    if self.counters.batch_count == 5:
        assert self.sentinel.timeout == 3600, "as it was set"
        self.sentinel.timeout = 4
        if self.fabric.global_rank == 1:
            lost_in_thought()
    return original(self, batch)
trainer.Trainer.step = step
"""
    job = Job(changed(tiny, strategy__timeout_seconds=3600), 2, patch=patch)
    assert job.wait() == [1, 1]
    assert "this rank stands still" in rank_log(tiny, 1) and "in lost_in_thought" in rank_log(tiny, 1)
    assert "in lost_in_thought" not in rank_log(tiny, 0)
    # Whichever comes first there: its own patience, or the end of the rank it waits for.
    assert re.search("Where its threads are|[Cc]onnection (closed|reset)", rank_log(tiny, 0) + job.errors())
    assert status(tiny)["status"] == "failed"
    assert "where it stands" in status(tiny)["reason"] or "rank 1 has failed: no step ended" in status(tiny)["reason"]
    train(tiny, 2)


def test_an_error_is_how_the_run_ended_although_its_time_is_over_before_that_is_written(tiny):
    """As on a slow disk, when the rank that hangs ends in the moment in which this one has waited long enough."""
    patch = """
import threading, time
from forgetting_transformer.training import trainer
from forgetting_transformer.training.faults import sentinel, status
leaving = threading.Event()
leave, write, original = sentinel.Sentinel._leave, status.write_status, trainer.Trainer.step
def leave_and_say(self, *arguments):
    leaving.set()
    leave(self, *arguments)
def write_slowly(root, name, *arguments):
    if name == "failed":
        running.sentinel.timeout = 0
        leaving.wait()
        time.sleep(1)
    write(root, name, *arguments)
def step(self, batch):
    global running
    if self.counters.batch_count == 5:
        running = self
        raise RuntimeError("an error of the step")
    return original(self, batch)
sentinel.Sentinel._leave, status.write_status, trainer.Trainer.step = leave_and_say, write_slowly, step
"""
    assert Job(tiny, patch=patch).wait() == [1]
    found = status(tiny)
    assert (found["status"], found["step"]) == ("failed", 5 * STEP) and "an error of the step" in found["reason"]


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        pytest.param(
            "fsdp",
            marks=pytest.mark.rare(
                "tests/training/test_stopping.py::test_a_rank_that_is_killed_ends_the_others_and_the_run_goes_on_later"
            ),
        ),
    ],
)
def test_a_rank_that_is_killed_ends_the_others_and_the_run_goes_on_later(tiny, finished, strategy):
    tiny = changed(tiny, strategy__name=strategy)
    patch = """
import os
from forgetting_transformer.training import trainer
original = trainer.Trainer.step
def step(self, batch):
    if self.counters.batch_count == 9 and self.fabric.global_rank == 1:
        os.kill(os.getpid(), 9)
    return original(self, batch)
trainer.Trainer.step = step
"""
    job = Job(tiny, 2, patch=patch)
    assert job.wait() == [1, -signal.SIGKILL]
    found = status(tiny)
    assert found["status"] == "failed"
    assert f"rank 1 (process {job.processes[1].pid} on " in found["reason"], found
    assert (
        "was killed or has crashed (seen here as: " in found["reason"]
        and "the last good checkpoint is" in found["reason"]
    )
    train(tiny, 2)
    assert_same_run(finished(tiny, 2), tiny["output_dir"])


def test_a_rank_inside_of_a_call_that_never_returns_notices_that_another_was_killed(tiny):
    """As in a CUDA call that waits for NCCL. A launcher asks the remaining ranks to stop, and kills them 30 s later."""
    patch = """
import os, signal, time
from forgetting_transformer.training import trainer
from forgetting_transformer.training.faults import sentinel
sentinel.PEER_PATIENCE_SECONDS = 0.5
original = trainer.Trainer.step
def step(self, batch):
    if self.counters.batch_count == 9:
        if self.fabric.global_rank == 1:
            os.kill(os.getpid(), 9)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(36000)
    return original(self, batch)
trainer.Trainer.step = step
"""
    job = Job(tiny, 2, patch=patch)
    assert job.wait() == [1, -signal.SIGKILL]
    found = status(tiny)
    assert found["status"] == "failed"
    assert f"rank 1 (process {job.processes[1].pid} on " in found["reason"], found
    assert "was killed or has crashed; no step ended for " in found["reason"]
    assert "the last good checkpoint is" in found["reason"]


def test_a_data_worker_that_is_killed_is_replaced_and_no_batch_is_lost(tiny, finished):
    """It is deaf to the signals that stop a run, which schedulers and launchers send to every process."""
    patch = """
import multiprocessing, os, signal
from forgetting_transformer.training import trainer
original = trainer.Trainer.step
def step(self, batch):
    if self.counters.batch_count == 2:
        for worker in multiprocessing.active_children():
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                os.kill(worker.pid, number)
    if self.counters.batch_count == 5:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, 9)
    return original(self, batch)
trainer.Trainer.step = step
"""
    job = Job(changed(tiny, datamodule__train_num_workers=1), patch=patch)
    assert job.wait() == [0], job.errors()
    assert rank_log(tiny, 0).count("Readers are restarted") == 1
    assert_same_run(finished(tiny), tiny["output_dir"])


@pytest.mark.rare("tests/training/test_stopping.py::test_a_data_worker_that_is_killed_is_replaced_and_no_batch_is_lost")
def test_data_workers_are_deaf_to_the_signals_that_stop_a_run(tiny):
    """Schedulers and launchers send them to every process."""
    patch = """
import multiprocessing, os, signal, time
from forgetting_transformer.training import trainer
original = trainer.Trainer.step
def step(self, batch):
    if self.counters.batch_count == 5:
        for pid in (*(worker.pid for worker in multiprocessing.active_children()), os.getpid()):
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                os.kill(pid, number)
        while self.sentinel.request is None:
            time.sleep(0.001)
    return original(self, batch)
trainer.Trainer.step = step
"""
    job = Job(changed(tiny, datamodule__train_num_workers=1), patch=patch)
    assert job.wait() == [0], job.errors()
    assert status(tiny)["status"] == "preempted"
    assert "Readers are restarted" not in rank_log(tiny, 0)


def test_a_clock_that_is_set_back_changes_nothing(tiny, finished, interrupted):
    interrupted(tiny, 8)
    patch = "import time; real = time.time; time.time = lambda: real() - 86400"
    job = Job(tiny, patch=patch)
    assert job.wait() == [0], job.errors()
    assert losses(tiny["output_dir"]) == losses(finished(tiny))


def wait_for_training(folder: Path, launcher: Command) -> None:
    """Until the run has logged a step."""
    logged, printed = folder / "metrics/jsonlines/train.jsonl", folder / "printed"
    wait_until(logged.exists, lambda: launcher.poll() is None, printed.read_text)


def start(tiny: dict, folder: Path, *command: str) -> Command:
    """A run without an end in `folder`, which takes what it prints too. The ranks are started as users start them."""
    folder.mkdir()
    printed = folder / "printed"
    return Command(*command, *command_line(tiny, folder), *ENDLESS, output=printed, errors=printed)


@pytest.mark.parametrize(
    "devices",
    [
        "1",
        pytest.param(
            "2",
            marks=pytest.mark.rare(
                "tests/training/test_stopping.py::test_the_launcher_passes_signals_on_and_two_share_a_machine"
            ),
        ),
    ],
)
def test_the_launcher_passes_signals_on_and_two_share_a_machine(tiny, tmp_path, devices):
    """SIGUSR1 among them, of which `fabric run` by itself would die and tell its ranks nothing."""
    launch = ["scripts/launch.py", "--accelerator", "cpu", "--devices", devices]
    signals = (signal.SIGUSR1, signal.SIGTERM)
    runs = {number: start(tiny, tmp_path / number.name, *launch) for number in signals}
    for number, launcher in runs.items():
        folder = tmp_path / number.name
        wait_for_training(folder, launcher)
        launcher.send_signal(number)
        assert launcher.wait() == 75
        found = json.loads((folder / "status.json").read_text())
        assert found["status"] == "preempted" and found["reason"] == number.name
        assert (folder / f"checkpoints/step-{found['step']:015d}/manifest.json").is_file()
        said = (folder / "printed").read_text()
        assert "Traceback" not in said and said.splitlines()[-1].endswith(str(folder)), said


def test_a_rank_of_fabric_run_that_is_asked_to_stop_is_no_failure(tiny, tmp_path):
    """The launcher itself gets no signal, and would report a rank that ends with 75 at length."""
    folder = tmp_path / "run"
    launcher = start(tiny, folder, *FABRIC, "--devices", "1", "--main-port", str(free_port()))
    wait_for_training(folder, launcher)
    os.kill(json.loads((folder / "run.lock").read_text())["pid"], signal.SIGTERM)
    assert launcher.wait() == 0
    assert "Traceback" not in (folder / "printed").read_text()
    stopped = status({"output_dir": folder})
    assert stopped["status"] == "preempted"
    tokens = stopped["step"] + 4 * STEP
    done = run_command("train.py", *command_line(tiny, folder), *ENDLESS, f"train.max_tokens={tokens}")
    assert done.returncode == 0 and "continuing from" in done.stderr and "training finished" in done.stderr
    assert sorted(losses(str(folder))) == list(range(STEP, tokens + 1, STEP))


def test_ctrl_c_exits_with_a_code_of_its_own(tiny, tmp_path):
    printed = tmp_path / "printed"
    process = Command("train.py", *command_line(tiny, tmp_path / "cli"), *ENDLESS, errors=printed)
    wait_until((tmp_path / "cli/metrics/jsonlines/train.jsonl").exists, lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    code, said = process.wait(), printed.read_text()
    assert code == 75 and "Traceback" not in said, said
    assert "SIGINT: stopping after this step" in said and "stopped and saved" in said
