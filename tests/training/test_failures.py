"""When something goes wrong the message says what, and nothing that was good is lost."""

import errno
import json
import logging
import os
import pty
import select
import signal
import struct
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from forgetting_transformer import training
from forgetting_transformer.data import DataError
from forgetting_transformer.training import setup
from forgetting_transformer.training.errors import TrainingError
from forgetting_transformer.training.faults import failures
from forgetting_transformer.training.faults.peers import is_gone
from forgetting_transformer.training.records.logs import LogFile
from forgetting_transformer.training.records.run_directory import RunDirectoryError
from tests.processes import Command, run_command
from tests.training.conftest import ENDLESS, STEP, before, changed, command_line, losses, rank_log, refused, train
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def test_a_step_waits_for_no_barrier(tiny):
    patch = """
import torch.distributed as dist
from forgetting_transformer.training import trainer
original, barrier = trainer.Trainer.step, dist.barrier
def refuse(*arguments, **options):
    raise AssertionError("a barrier in a training step")
def step(self, batch):
    dist.barrier = refuse
    try:
        return original(self, batch)
    finally:
        dist.barrier = barrier
trainer.Trainer.step = step
"""
    train(changed(tiny, strategy__name="ddp", train__max_tokens=4 * STEP), 2, patch=patch)


def test_errors_of_the_program_are_not_taken_for_those_of_a_gpu():
    for error, what in (
        (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), "unspecified launch failure"),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), None),
        (ValueError("CUDA error: unspecified launch failure"), None),
    ):
        assert failures.device_error(error) == what


def test_a_disk_too_small_for_a_checkpoint_is_noticed_before_writing(tiny):
    patch = "import shutil, collections; shutil.disk_usage = lambda p: collections.namedtuple('U', 'free')(1000)"
    said = refused(changed(tiny, train__max_tokens=8 * STEP), patch=patch)
    assert "TrainingError" in said, "the last checkpoint is the run's result: without it the run has failed"
    log = rank_log(tiny, 0)
    assert "the disk has 1.00 kB left, a checkpoint needs" in log and "nothing was saved. Training continues" in log


def test_metrics_that_cannot_be_written_stop_the_run_with_a_message(tiny):
    file = Path(tiny["output_dir"]) / "metrics/jsonlines/train.jsonl"
    full = f"os.rename({str(file)!r}, {str(file)!r} + '.aside')\nos.symlink('/dev/full', {str(file)!r})"
    condition = f"arguments[:2] == ('train', {10 * STEP})"
    patch = before("training.records.metrics.MetricsLog", "report", full, condition)
    said = refused(changed(tiny, checkpoint_background=False), patch=patch)
    reason = f"TrainingError: {file}: No space left on device; the last good checkpoint is at {8 * STEP:,} tokens"
    assert reason in said
    file.with_name("train.jsonl.aside").rename(file)
    train(changed(tiny, train__max_tokens=12 * STEP))
    assert sorted(losses(tiny["output_dir"])) == [n * STEP for n in range(1, 13)]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_dir": "/nonexistent"}, "no token array at /nonexistent/tiny/train.zarr. Set data_dir"),
        ({"train__max_tokens": 10**6}, "train.max_tokens=1,000,000 is more than the 6,144 tokens"),
        ({"model__config__hidden_sizes": 3}, "hidden_sizes"),
        ({"model__config__vocab_size": 7}, "vocab_size=7 is not the corpus's 64"),
        ({"output_dir": "/proc/nowhere"}, "cannot write to output_dir=/proc/nowhere"),
        ({"data_dir": os.fsdecode(b"caf\xe9")}, r"^data_dir=caf\udce9 must be UTF-8; make a link .*ln -s"),
    ],
)
def test_errors_come_before_the_first_step_and_name_the_fix(tiny, change, message):
    with pytest.raises((training.ConfigError, DataError, RunDirectoryError), match=message):
        training.run(training.parse(OmegaConf.create(changed(tiny, **change))))
    assert not (Path(tiny["output_dir"]) / "metrics/jsonlines/train.jsonl").exists()


#: The disk takes no more than 600 bytes a file from the moment that training begins. The kernel refuses, and gives no
#: path, as a full disk does.
NO_ROOM = """
import resource
from forgetting_transformer.training.faults.failures import Supervisor
enter, leave = Supervisor.__enter__, Supervisor.__exit__
def limited(self):
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
    return enter(self)
def freed(self, *error):
    try:
        return leave(self, *error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
Supervisor.__enter__, Supervisor.__exit__ = limited, freed
"""


def test_a_disk_that_is_full_from_the_start_is_one_line_with_its_place(tiny):
    said = refused(tiny, patch=NO_ROOM).strip().splitlines()[-1]
    assert said.startswith("forgetting_transformer.training.errors.TrainingError: cannot start: "), said
    assert tiny["output_dir"] in said and "File too large" in said and "start the same command again" in said


@pytest.mark.quick
@pytest.mark.parametrize(
    ("error", "said"),
    [
        ((errno.ENOSPC, "No space left on device"), "No space left on device"),
        ((errno.EMFILE, "Too many open files", "/a/file"), r"Too many open files: .* may have .*`ulimit -n`\)"),
        ((errno.EIO, "Input/output error", "/a/file"), "/a/file: Input/output error"),
    ],
)
def test_an_error_of_the_system_is_put_down_to_what_it_concerns(tiny, monkeypatch, error, said):
    """And to no folder that has nothing to do with it: full may be shared memory, say."""

    def refuse(*_: object) -> None:
        raise OSError(*error)

    monkeypatch.setattr(setup, "open_data", refuse)
    with pytest.raises(TrainingError, match=f"^cannot start: {said}. Mend this and start the same command again$"):
        training.run(training.parse(OmegaConf.create(tiny)))


@pytest.mark.quick
def test_a_log_that_cannot_be_written_says_so_once(capsys):
    handler = LogFile("/dev/full")
    for number in range(3):
        handler.handle(logging.LogRecord("x", logging.INFO, "", 0, f"line {number}", (), None))
    sys.stderr.flush()
    said = capsys.readouterr().err
    assert said == "/dev/full cannot be written: No space left on device; lines of the log are lost\n"


@pytest.mark.quick
def test_a_line_with_a_name_that_is_not_utf_8_is_in_the_log(tmp_path, capsys):
    LogFile(tmp_path / "log").handle(logging.LogRecord("x", logging.INFO, "", 0, os.fsdecode(b"caf\xe9"), (), None))
    assert (tmp_path / "log").read_text() == "caf\\udce9\n" and not capsys.readouterr().err


def test_processes_that_would_train_alone_are_refused(tiny):
    """torchrun with one device each: N runs that all believe to be rank 0."""
    patch = "import os; os.environ.update(WORLD_SIZE='2', RANK='1', LOCAL_RANK='1')"
    assert "2 processes were started but each trains alone" in refused(changed(tiny, fabric__devices=1), patch=patch)


def test_the_command_line_trains_resumes_and_explains_itself(tiny, tmp_path):
    """Arguments as users type them."""
    overrides = command_line(tiny, tmp_path / "cli")
    done = run_command("train.py", *overrides, f"train.max_tokens={6 * STEP}")
    assert done.returncode == 0, done.stderr
    done = run_command("train.py", *overrides, f"train.max_tokens={10 * STEP}")
    assert done.returncode == 0, done.stderr
    assert "continuing from" in done.stderr and "training finished" in done.stderr
    assert sorted(losses(str(tmp_path / "cli"))) == [n * STEP for n in range(1, 11)]
    done = run_command("train.py", *overrides, "train.max_tokens=999999999")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "train.max_tokens=999,999,999 is more than" in done.stderr
    assert "train.max_tokens=999,999,999 is more than" in (tmp_path / "cli/logs/rank-0.log").read_text()


#: A launcher of PyTorch that dies of any signal and tells the rank that it started nothing, as `fabric run` of SIGUSR1.
LAUNCHER = """
import os, runpy, sys
if os.fork():
    sys.exit(os.wait()[1])
os.environ.update(TORCHELASTIC_RUN_ID="1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
sys.argv = {}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ranks_do_not_outlive_their_launcher(tiny, tmp_path):
    launcher = Command("-c", LAUNCHER.format(["train.py", *command_line(tiny, tmp_path / "cli"), *ENDLESS]))
    metrics = tmp_path / "cli/metrics/jsonlines/train.jsonl"
    wait_until(metrics.exists, lambda: launcher.poll() is None)
    rank_zero = json.loads((tmp_path / "cli/run.lock").read_text())["pid"]
    launcher.send_signal(signal.SIGUSR1)
    launcher.wait()
    # Where nobody asks how orphans have ended, its entry in /proc stays.
    wait_until(lambda: is_gone(rank_zero), said="a rank lives on without its launcher")


def test_a_terminal_gets_a_live_bar_and_a_file_gets_plain_lines(tiny, tmp_path):
    import fcntl
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    terminal = os.ttyname(slave)
    overrides = [*command_line(tiny, tmp_path / "bar"), f"train.max_tokens={4 * STEP}"]
    process = Command("train.py", *overrides, output=terminal, errors=terminal)
    shown = b""
    while process.poll() is None or select.select([master], [], [], 0)[0]:
        if select.select([master], [], [], 0.1)[0]:
            shown += os.read(master, 4096)
    os.close(slave)
    os.close(master)
    assert process.wait() == 0, shown.decode()
    assert b"tok/s" in shown and b"loss=" in shown and b"512/512" in shown, shown.decode()
    log = (tmp_path / "bar/logs/rank-0.log").read_text()
    assert "tok/s" not in log and "held-out loss" in log
    assert " of 512 tokens, loss " in log and b" of 512 tokens, loss " not in shown, "the bar shows it"
