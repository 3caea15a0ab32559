"""When something goes wrong the message says what, and nothing that was good is lost."""

import errno
import json
import os
import pty
import select
import signal
import socket
import struct
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from forgetting_transformer import training
from forgetting_transformer.training.callbacks import wandb
from forgetting_transformer.training.faults import failures
from forgetting_transformer.training.faults.peers import is_gone
from forgetting_transformer.training.metrics import MetricsLog
from forgetting_transformer.training.run_directory import RunDirectory
from tests.processes import Command, free_port, run_command, shell_environment
from tests.training.conftest import STEP, Job, changed, refused, train
from tests.training.test_resume import assert_same_run, lines, losses
from tests.waiting import HANG, wait_until

pytestmark = pytest.mark.slow

#: While the checkpoint of step 8 is written, writing fails; at step 12 it works again.
FAILING_WRITES = """
import errno, os, torch.distributed.checkpoint.filesystem as filesystem
from forgetting_transformer.training.checkpoint import writing
original, save = filesystem._write_item, writing.Writer.write
fails = False
def write(*arguments, **options):
    if fails:
        raise OSError(errno.{code}, os.strerror(errno.{code}))
    return original(*arguments, **options)
def count(self, step, *arguments):
    global fails
    fails = step == 1024
    return save(self, step, *arguments)
filesystem._write_item, writing.Writer.write = write, count
"""


FULL = pytest.mark.rare("tests/training/test_failures.py::test_a_disk_that_fails_costs_a_checkpoint_and_not_the_run")


@pytest.mark.parametrize(
    ("code", "world_size", "background"),
    [
        pytest.param("ENOSPC", 1, True, marks=FULL),
        ("ENOSPC", 2, True),
        ("ENOSPC", 1, False),
        pytest.param("EIO", 1, True, marks=FULL),
        pytest.param("EROFS", 1, True, marks=FULL),
    ],
)
def test_a_disk_that_fails_costs_a_checkpoint_and_not_the_run(tiny, finished, code, world_size, background):
    straight = finished(changed(tiny, checkpoint_background=not background), world_size)
    tiny = changed(tiny, checkpoint_background=background)
    job = Job(tiny, world_size, patch=FAILING_WRITES.format(code=code))
    assert job.wait() == [0] * world_size, job.errors()
    log = (Path(tiny["output_dir"]) / "logs/rank-0.log").read_text()
    reason = os.strerror(getattr(errno, code))
    assert f"{reason}; the last good checkpoint is at {4 * STEP:,} tokens. Training goes on" in log
    assert not list(Path(tiny["output_dir"]).glob("checkpoints/.tmp-*"))
    assert_same_run(straight, tiny["output_dir"])


def test_garbage_collected_during_a_step_leaves_ddp_its_reference_to_itself(tiny):
    """Collected by another thread between forward and backward pass, it has made a run fail.

    What the autograd graph holds must therefore not be the only reference. The failure itself is a race that no test
    can rely on.
    """
    patch = """
import gc, weakref
from forgetting_transformer.training import trainer
original = trainer.Trainer.run
def run(self):
    ddp = next(found for found in gc.get_objects() if type(found).__name__ == "DistributedDataParallel")
    # Python makes one such object for all that ask for it, the graph of a step included.
    owners = gc.get_referrers(weakref.ref(ddp))
    assert any(owner is self.fabric.strategy or owner is vars(self.fabric.strategy) for owner in owners), owners
    return original(self)
trainer.Trainer.run = run
"""
    job = Job(changed(tiny, strategy__name="ddp", train__max_tokens=STEP, skip_eval=True), 2, patch=patch)
    assert job.wait() == [0, 0], job.errors()


OUT_OF_MEMORY = """
import torch
from forgetting_transformer.training import trainer
from forgetting_transformer.training.callbacks.held_out import HeldOut
def fail(*arguments):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of …")
step = trainer.Trainer.step
{what}
"""


@pytest.mark.parametrize(
    ("what", "world_size", "said"),
    [
        (
            "trainer.Trainer.step = lambda self, batch: fail() if self.counters.batch_count > 4 else step(self, batch)",
            1,
            "out of memory in training for 2.50 GiB more. Start the same command again with "
            "train.grad_acc_tokens=32 (now 64) or train.gradient_checkpointing=true or strategy=fsdp on several GPUs; "
            "the last good checkpoint is at 512 tokens",
        ),
        (
            "trainer.Trainer.step = lambda self, batch: fail() if self.fabric.global_rank else step(self, batch)",
            2,
            "train.grad_acc_tokens=32 (now 64) or train.gradient_checkpointing=true or strategy=fsdp",
        ),
        (
            "HeldOut.on_interval = lambda self, trainer, kind: kind == 'eval' and fail()",
            1,
            "out of memory in evaluation for 2.50 GiB more. Start the same command again with "
            "datamodule.eval_local_batch_size=",
        ),
    ],
)
def test_out_of_memory_is_one_line_with_the_keys_that_help(tiny, what, world_size, said):
    job = Job(tiny, world_size, patch=OUT_OF_MEMORY.format(what=what))
    assert all(job.wait())
    status = json.loads((Path(tiny["output_dir"]) / "status.json").read_text())
    assert said in status["reason"], status["reason"]


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nFor"), "uncorrectable ECC error enc"),
        (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), "unspecified launch failure"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublas`"), "CUBLAS_STATUS_EXECUTION"),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), None),
        (torch.AcceleratorError("CUDA error: out of memory"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), None),
        (ValueError("CUDA error: unspecified launch failure"), None),
        (RuntimeError("shapes do not fit"), None),
    ],
)
def test_errors_of_the_program_are_not_taken_for_those_of_a_gpu(error, what):
    found = failures.device_error(error)
    assert found is None if what is None else found is not None and found.startswith(what)


def test_a_gpu_that_fails_is_one_line_that_says_where_and_how_to_go_on(tiny):
    patch = """
import torch
from forgetting_transformer.training import trainer
original = trainer.Trainer.step
def step(self, batch):
    if self.counters.batch_count > 4:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\\nSearch for `cudaErrorLaunchFailure'")
    return original(self, batch)
trainer.Trainer.step = step
"""
    job = Job(tiny, patch=patch)
    assert job.wait() == [1], job.errors()
    reason = json.loads((Path(tiny["output_dir"]) / "status.json").read_text())["reason"]
    assert reason.startswith("DeviceError: cpu of ") and "Search" not in reason
    assert "failed: unspecified launch failure; the last good checkpoint is at 512 tokens. Start the same" in reason


def test_an_evaluation_that_fails_costs_the_steps_since_the_last_checkpoint_and_no_bit(tiny, finished):
    """Nothing is saved at the failure: what failed may have left other weights in the model."""
    straight = finished(tiny)
    patch = """
from forgetting_transformer.training.callbacks.held_out import HeldOut
original = HeldOut.on_interval
def fail(self, trainer, kind):
    if kind == "eval" and trainer.counters.batch_count > 8:
        next(trainer.model.parameters()).data.zero_()
        raise ZeroDivisionError("boom")
    original(self, trainer, kind)
HeldOut.on_interval = fail
"""
    job = Job(tiny, patch=patch)
    assert job.wait() == [1]
    said = job.errors()
    assert "ZeroDivisionError: boom" in said and "raised by on_interval of callbacks.held_out; the last good" in said
    held = sorted(Path(tiny["output_dir"]).glob("checkpoints/step-*"))
    failed = json.loads((Path(tiny["output_dir"]) / "status.json").read_text())
    assert failed["status"] == "failed" and held and int(held[-1].name[5:]) < failed["step"] <= 20 * STEP
    train(tiny)
    assert_same_run(straight, tiny["output_dir"])


def test_a_disk_too_small_for_a_checkpoint_is_noticed_before_writing(tiny):
    patch = "import shutil, collections; shutil.disk_usage = lambda p: collections.namedtuple('U', 'free')(1000)"
    job = Job(tiny, patch=patch)
    assert job.wait() == [1]
    log = (Path(tiny["output_dir"]) / "logs/rank-0.log").read_text()
    assert "the disk has 1.00 kB left, a checkpoint needs" in log
    assert "nothing was saved. Training goes on" in log
    assert "TrainingError" in job.errors(), "the last checkpoint is the run's result: without it the run has failed"


DEATH = pytest.mark.rare(
    "tests/training/test_checkpoint.py::test_death_between_any_two_writes_leaves_a_whole_checkpoint"
)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("before the rename", marks=DEATH),
        "before the manifest",
        pytest.param("while deleting the old one", marks=DEATH),
    ],
)
def test_death_inside_a_save_leaves_the_last_good_checkpoint(tiny, finished, moment):
    where = {
        "before the rename": "pathlib.Path.rename",
        "before the manifest": "checkpoint.write_atomically",
        "while deleting the old one": "writing.shutil.rmtree",
    }[moment]
    condition = {
        "before the rename": "'.tmp-step-000000000001536' in str(a[0])",  # step 12
        "before the manifest": "'step-000000000001536' in str(a[0])",
        "while deleting the old one": "a and 'step-000000000000512' in str(a[0]) and '.tmp' not in str(a[0])",
    }[moment]
    patch = f"""
import os, pathlib
from forgetting_transformer.training.checkpoint import writing
original = {where}
def dies(*a, **k):
    if {condition}:
        os.kill(os.getpid(), 9)
    return original(*a, **k)
{where} = dies
"""
    job = Job(tiny, patch=patch)
    assert job.wait() == [-signal.SIGKILL]
    train(tiny)
    assert_same_run(finished(tiny), tiny["output_dir"])
    folders = list((Path(tiny["output_dir"]) / "checkpoints").iterdir())
    assert all((folder / "manifest.json").is_file() for folder in folders), "wreckage is cleared away"


def test_metrics_that_cannot_be_written_stop_the_run_with_a_message(tiny):
    patch = """
from forgetting_transformer.training import metrics
original = metrics.MetricsLog.report
def report(self, kind, step, values):
    if (kind, step) != ("train", 1280):
        return original(self, kind, step, values)
    file = metrics._file(self.directory, kind)
    aside = file.rename(file.with_suffix(".aside"))
    file.symlink_to("/dev/full")
    try:
        original(self, kind, step, values)
    finally:
        aside.rename(file)
metrics.MetricsLog.report = report
"""
    job = Job(changed(tiny, checkpoint_background=False), patch=patch)
    assert job.wait() == [1]
    file = Path(tiny["output_dir"]) / "metrics/jsonlines/train.jsonl"
    reason = f"TrainingError: {file}: No space left on device; the last good checkpoint is at {8 * STEP:,} tokens"
    assert reason in job.errors()
    train(tiny)
    assert sorted(losses(tiny["output_dir"])) == [n * STEP for n in range(1, 21)]


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
    job = Job(changed(tiny, train__max_tokens=4 * STEP), 2, patch=patch)
    assert job.wait() == [0, 0], job.errors()


def test_a_second_run_in_the_same_folder_is_refused_with_the_name_of_the_first(tiny):
    slow = changed(tiny, train__max_tokens=10**6 * STEP, datamodule__repeat=True, skip_eval=True)
    first = Job(slow)
    try:
        metrics = Path(tiny["output_dir"]) / "metrics/jsonlines/train.jsonl"
        wait_until(metrics.exists, first.processes[0].is_alive, first.errors)
        message = refused(slow)
        assert "another run is writing to output_dir" in message
        assert f'"pid": {first.processes[0].pid}' in message
    finally:
        first.kill()
    train(changed(slow, train__max_tokens=lines(tiny["output_dir"], "train")[-1]["step"] + 8 * STEP))


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(
            1,
            marks=pytest.mark.rare(
                "tests/training/test_failures.py::test_weights_that_are_not_finite_stop_every_rank_and_are_never_saved"
            ),
        ),
        2,
    ],
)
def test_weights_that_are_not_finite_stop_every_rank_and_are_never_saved(tiny, world_size):
    patch = """
from forgetting_transformer.training import trainer
original = trainer.Trainer.step
def step(self, batch):
    if self.counters.batch_count == 9:
        next(self.model.parameters()).data.fill_(float("nan"))
    return original(self, batch)
trainer.Trainer.step = step
"""
    job = Job(changed(tiny, log_interval=100 * STEP), world_size, patch=patch)
    assert job.wait() == [1] * world_size
    assert f"the last good checkpoint is at {8 * STEP:,} tokens, and nothing was saved since" in job.errors()
    saved = sorted(p.name for p in Path(tiny["output_dir"]).glob("checkpoints/step-*"))
    assert saved[-1] == f"step-{8 * STEP:015d}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_dir": "/nonexistent"}, "no token array at /nonexistent/tiny/train.zarr. Set data_dir"),
        ({"train__max_tokens": 10**6}, "train.max_tokens=1,000,000 is more than the 6,144 tokens"),
        (
            {"datamodule__train_batch_len": 48, "train__grad_acc_tokens": 48},
            "datamodule.train_batch_len=48 must divide",
        ),
        ({"model__config__hidden_sizes": 3}, "hidden_sizes"),
        ({"model__name": "fox"}, "forgetting_transformer"),
        ({"model__config__vocab_size": 7}, "vocab_size=7 is not the corpus's 64"),
        ({"schedule__name": "cosine"}, "schedule.name='cosine' is unknown"),
        ({"output_dir": "/proc/nowhere"}, "cannot write to output_dir=/proc/nowhere"),
    ],
)
def test_errors_come_before_the_first_step_and_name_the_fix(tiny, change, message):
    if "output_dir" not in change:
        assert message in refused(changed(tiny, **change))
        assert not (Path(tiny["output_dir"]) / "metrics/jsonlines/train.jsonl").exists()
    else:
        from omegaconf import OmegaConf

        from forgetting_transformer.training import parse
        from forgetting_transformer.training.run_directory import RunDirectory, RunDirectoryError

        config = parse(OmegaConf.create(changed(tiny, **change)))
        with pytest.raises(RunDirectoryError, match=message):
            RunDirectory(config.output_dir).acquire()


def test_refusals_reach_every_rank(tiny):
    errors = refused(changed(tiny, data_dir="/nonexistent"), world_size=2)
    assert errors.count("NoArrayError: no token array at") == 2


def test_a_port_that_another_job_has_is_named(tiny, tmp_path, monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        said = f"port {port}, over which the processes of a job find each other, is taken by another process"
        monkeypatch.setattr("tests.training.conftest.free_port", lambda: port)
        job = Job(tiny, 2)
        job.processes[0].join(HANG)
        job.kill()  # rank 1 waits for rank 0: a launcher would end it
        assert job.processes[0].exitcode == 1 and said in job.errors()
        environment = shell_environment() | {"MASTER_PORT": str(port)}
        overrides = [*command_line(tiny, tmp_path / "cli"), "fabric.devices=2", "fabric.accelerator=cpu"]
        done = run_command("train.py", *overrides, environment=environment)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


def test_processes_that_would_train_alone_are_refused(tiny):
    """torchrun with one device each: N runs that all believe to be rank 0."""
    patch = "import os; os.environ.update(WORLD_SIZE='2', RANK='1', LOCAL_RANK='1')"
    job = Job(changed(tiny, fabric__devices=1), patch=patch)
    assert job.wait() == [1]
    assert "2 processes were started but each trains alone" in job.errors()


@pytest.mark.quick
def test_stray_fabric_variables_are_refused(tiny):
    job = Job(tiny, patch="import os; os.environ['LT_DEVICES'] = '2'")
    assert job.wait() == [1]
    assert "LT_DEVICES would override the config" in job.errors()


@pytest.mark.quick
def test_an_optimizer_of_other_parameters_is_refused():
    from forgetting_transformer.training.config import ConfigError
    from forgetting_transformer.training.setup import check_optimizer_owns

    model, stale = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    check_optimizer_owns(model, torch.optim.AdamW(model.parameters()), "adamw")
    with pytest.raises(ConfigError, match=r"optimizer\.name='adamw' leaves out 2 of the model.s 2 parameter tensors"):
        check_optimizer_owns(model, torch.optim.AdamW(stale.parameters()), "adamw")


def test_a_half_written_last_line_of_metrics_is_dropped(tiny, finished, interrupted):
    interrupted(tiny, 8)
    with (Path(tiny["output_dir"]) / "metrics/jsonlines/train.jsonl").open("a") as file:
        file.write('{"step": 11')
    train(tiny)
    assert losses(tiny["output_dir"]) == losses(finished(tiny))


def wandb_rows(file: Path) -> list[dict]:
    """History rows of an offline run: a LevelDB-style log of protocol-buffer records."""
    from wandb.proto import wandb_internal_pb2

    data, position, record, rows = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            message = wandb_internal_pb2.Record()
            message.ParseFromString(record)
            if message.WhichOneof("record_type") == "history":
                items = message.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
            record = b""
    return rows


def test_wandb_has_every_step_once_although_it_loses_rows_when_killed(tiny):
    tiny = changed(tiny, wandb__mode="offline", datamodule__repeat=True, train__max_tokens=60 * STEP)
    tiny = changed(tiny, schedule__total_tokens=60 * STEP, skip_eval=True)
    log = Path(tiny["output_dir"]) / "metrics/jsonlines/train.jsonl"
    job = Job(tiny)
    wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 31, job.processes[0].is_alive, job.errors)
    job.kill()
    train(tiny)
    folder = Path(tiny["output_dir"]) / "wandb"
    assert len(list(folder.glob("superseded-offline-run-*"))) == 1
    (file,) = folder.glob("offline-run-*/*.wandb")
    rows = [row for row in wandb_rows(file) if "train/loss" in row]
    assert [row["_step"] for row in rows] == [n * STEP for n in range(1, 61)]
    logged = losses(tiny["output_dir"])
    assert all(row["train/loss"] == pytest.approx(logged[row["_step"]]) for row in rows)


def test_wandb_absent_or_failing_never_stops_a_run(tiny, tmp_path):
    tiny = changed(tiny, wandb__mode="online", train__max_tokens=4 * STEP)
    absent = changed(tiny, output_dir=str(tmp_path / "absent"))
    job = Job(absent, patch="import sys; sys.modules['wandb'] = None")
    assert job.wait() == [0], job.errors()
    assert "wandb is not installed" in (tmp_path / "absent/logs/rank-0.log").read_text()
    for fault in ("init", "log", "finish"):
        patch = f"""
import sys, types
def fails(*arguments, **options):
    raise OSError("no network")
works = lambda *arguments, **options: None
run = types.SimpleNamespace(step=0, log=fails if {fault == "log"} else works, finish=fails)
init = fails if {fault == "init"} else lambda **options: run
sys.modules["wandb"] = types.SimpleNamespace(init=init, Settings=dict)
"""
        job = Job(changed(tiny, output_dir=str(tmp_path / fault)), patch=patch)
        assert job.wait() == [0], job.errors()
        assert "(no network)" in (tmp_path / fault / "logs/rank-0.log").read_text()
        assert len(losses(str(tmp_path / fault))) == 4


@pytest.mark.quick
def test_wandb_without_a_key_asks_nothing_of_a_terminal(tiny, tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HOME": tmp_path,
        "NETRC": tmp_path / "none",
        "WANDB_CONFIG_DIR": tmp_path,
        "TERM": "xterm",
    }.items():
        monkeypatch.setenv(name, str(value))
    master, slave = pty.openpty()
    os.write(master, b"3\n")  # an answer that lets wandb.init go through
    config = training.parse(OmegaConf.create(changed(tiny, wandb__mode="online")))
    callback, metrics = wandb.Wandb(), MetricsLog(RunDirectory(config.output_dir), 0)
    with os.fdopen(os.dup(slave), "r") as keyboard, os.fdopen(slave, "w") as screen:
        monkeypatch.setattr(sys, "stdin", keyboard)
        monkeypatch.setattr(sys, "stderr", screen)
        callback.open(metrics, config, {})
        assert sys.stdin is keyboard
    os.close(master)
    assert callback.summary == "not available" and not metrics.sinks
    (record,) = [record for record in caplog.records if record.name == wandb.__name__]
    assert record.levelname == "WARNING" and "API key" in record.message and "\n" not in record.message


FABRIC = [str(Path(sys.executable).with_name("fabric")), "run", "train.py", "--accelerator", "cpu"]
ENDLESS = ["train.max_tokens=99999999", "datamodule.repeat=true", "skip_eval=true"]


def command_line(tiny: dict, output_dir: Path) -> list[str]:
    """The tiny configuration as overrides of an experiment."""
    return [
        "+experiment/demo=fox_pro",
        f"data_dir={tiny['data_dir']}",
        f"output_dir={output_dir}",
        "datamodule.dataset=tiny",
        "datamodule.vocab_size=64",
        "datamodule.bos_token_id=0",
        "datamodule.train_batch_len=32",
        "datamodule.train_batch_size=4",
        "datamodule.eval_tokens=640",
        "scale.hidden_size=64",
        "scale.heads_of_64=1",
        "scale.num_hidden_layers=1",
        "train.grad_acc_tokens=64",
        "schedule.warmup_tokens=128",
        "schedule.total_tokens=1280",
        f"log_interval={STEP}",
        f"checkpoint_interval={4 * STEP}",
        "wandb.mode=disabled",
    ]


def test_the_command_line_trains_resumes_and_explains_itself(tiny, tmp_path):
    """What users type; test_stopping.py runs it as separate processes."""
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
    under_fabric = shell_environment() | {"LT_CLI_USED": "1"}
    done = run_command("train.py", "-m", *overrides, "seed=0,1", environment=under_fabric)
    assert done.returncode != 0 and "-m under `fabric run` is not possible" in done.stderr


def test_after_a_kill_the_folder_is_free_at_once_although_workers_live_on(tiny, tmp_path):
    """Data workers notice the death of their process only after seconds."""
    from forgetting_transformer.training.run_directory import RunDirectory

    workers = "datamodule.train_num_workers=2"
    process = Command("train.py", *command_line(tiny, tmp_path / "cli"), *ENDLESS, workers)
    wait_until((tmp_path / "cli/metrics/jsonlines/train.jsonl").exists, lambda: process.poll() is None)
    process.kill()
    process.wait()
    directory = RunDirectory(tmp_path / "cli")
    directory.acquire()
    directory.release()


def test_ranks_do_not_outlive_their_launcher(tiny, tmp_path):
    """`fabric run` dies of SIGUSR1 and tells the ranks it started nothing."""
    launch = [*FABRIC, "--devices", "1", "--main-port", str(free_port())]
    command = [*launch, *command_line(tiny, tmp_path / "cli"), *ENDLESS]
    launcher = Command(*command)
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
