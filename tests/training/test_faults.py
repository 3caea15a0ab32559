"""Faults of a run (training/faults): it ends as it should, says which rank or resource, and the same command goes on to
the weights, moments and lines of a run that was left alone, bit for bit.

Faults 4, 6, 7, 9, 10 and 12 of the list have their files: test_bad_steps.py, test_resume.py, tests/data,
test_resume.py, test_corruption.py, and tests/data/test_remote.py with test_wandb.py.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tests.processes import Command
from tests.training.conftest import (
    ENDLESS,
    HEARD,
    STEP,
    STOP,
    Job,
    assert_same_run,
    before,
    changed,
    command_line,
    in_step,
    lines,
    rank_log,
    refused,
    start,
    status,
    train,
    wait_for_training,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

HANG = "\ntime.sleep(36000)"


def in_reader(what: str) -> str:
    return before("data.longcrawl64.TrainBatches", "__getitem__", what, "batch == 5", "self, batch")


def in_start(what: str, rank: int = 0) -> str:
    """While the initial weights are drawn."""
    owner, chosen = "training.initialisation.from_seed", f"os.environ.get('RANK', '0') == '{rank}'"
    return before(owner, "initialise", what, chosen, "*arguments")


def in_writer(what: str) -> str:
    """While the checkpoint of step 8 is written."""
    owner = "training.checkpoint.writing.dcp.filesystem"
    return before(owner, "_write_item", what, f"'{8 * STEP:015d}' in arguments[1].name", "*arguments")


class Fault(NamedTuple):
    """A fault: the injected code, the expected text in status.json or the log, and the exit codes of the ranks."""

    patch: str
    said: str
    codes: Sequence[int] = (1,)
    status: str = "failed"
    log: str = ""
    config: Mapping[str, Any] = MappingProxyType({})


FAULTS = {
    "a signal in the start": Fault(
        in_start(STOP + HANG), "^stopped by SIGTERM in '(self-test|model)', before the first step$", [75], "preempted"
    ),
    "a signal while a rank is still in its first step": Fault(
        before("training.faults.step_guard.StepGuard", "judge", "time.sleep(2)", "os.environ['RANK'] == '1'")
        + before(
            "training.callbacks.losses.Loss",
            "on_interval",
            "os.kill(trainer.supervisor.peers._process(1), signal.SIGTERM)\n" + STOP,
            "trainer.counters.batch_count == 1",
            "self, trainer, kind",
        ),
        "^SIGTERM$",
        [0, 0],
        "preempted",
    ),
    "a signal in a step that hangs": Fault(
        in_step("watchdog.PATIENCE_SECONDS = 0.5\n" + STOP + HANG),
        "stopped by SIGTERM; no step ended for .*the last good checkpoint is at",
        [75],
        "preempted",
        "in patched",
    ),
    "a second signal": Fault(
        in_step(STOP + HEARD + "\ntime.sleep(1.1)\n" + STOP + HANG),
        "^SIGTERM, after SIGTERM: left at once; the last good checkpoint is at",
        [128 + signal.SIGTERM],
    ),
    "a killed rank": Fault(
        in_step("os.kill(os.getpid(), 9)", ranks="1"),
        r"rank 1 was killed or has crashed \(seen here as: .*the last good checkpoint is at",
        [1, -signal.SIGKILL],
    ),
    "a hung rank": Fault(
        in_step("self.watchdog.timeout = 2" + HANG, ranks="1"),
        "rank 1 has failed: no step ended for .*this rank makes no progress",
        [1, 1],
        config={"strategy__timeout_seconds": 3600},
    ),
    "a hung start": Fault(
        in_start("watchdog.START_SECONDS = 1" + HANG),
        "the start stood still in 'model' for ",
        config={"strategy__timeout_seconds": 1},
    ),
    "a reader that is silent": Fault(
        # After the steps before it, which a busy machine may take longer for.
        in_reader(
            "import gc\nfrom forgetting_transformer.training.trainer import Trainer\n"
            "(run,) = (one for one in gc.get_objects() if isinstance(one, Trainer))\n"
            "while run.counters.batch_count < 5:\n    time.sleep(0.01)\nrun.watchdog.timeout = 1" + HANG
        ),
        "no batch of datamodule.name='longcrawl64' came for .*this rank makes no progress",
    ),
    "a reader that is killed": Fault(
        in_step("import multiprocessing\nfor one in multiprocessing.active_children():\n    os.kill(one.pid, 9)"),
        *("^$", [0], "done"),
        log="Readers are restarted",
        config={"datamodule__train_num_workers": 1},
    ),
    "a writer that hangs": Fault(
        in_writer(HANG)
        + before(
            "training.checkpoint.Checkpointer",
            "_wait",
            "watchdog.START_SECONDS = 0\nself.watch.__self__.timeout = 1",
            f"self._step == {8 * STEP}",
        ),
        "the checkpoint at 1,024 tokens was not written for .*the last good checkpoint is at 512 tokens",
    ),
    "what hangs after the end": Fault(
        before("training.records.metrics.MetricsLog", "close", HANG[1:])
        + before("training.trainer.Trainer", "close", "self.watchdog.timeout = 1"),
        *("^$", [1], "done"),
        log="training was over and the process did not end for",
    ),
    "a full disk at a save": Fault(
        in_writer("raise OSError(28, 'No space left on device')"),
        *("^$", [0], "done"),
        log="No space left on device; the last good checkpoint is at 512 tokens. Training continues",
    ),
    "weights that are not finite": Fault(
        in_step("next(self.model.parameters()).data.fill_(float('nan'))", ranks="01"),
        "weights or moments became infinite or NaN .*the last good checkpoint is at 1,024 tokens",
        [1, 1],
    ),
    "a GPU that fails": Fault(
        in_step("raise torch.AcceleratorError('CUDA error: unspecified launch failure\\nSearch for more')"),
        "^DeviceError: cpu of .* failed: unspecified launch failure; the last good checkpoint is at 1,024 tokens",
    ),
    "a GPU out of memory": Fault(
        in_step("raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has …')"),
        r"out of memory in training for 2.50 GiB more. Start the same command again with train.grad_acc_tokens=32 "
        r"\(now 64\) or train.gradient_checkpointing=true or strategy=fsdp on several GPUs; the last good checkpoint",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_the_same_command_goes_on_bitwise(tiny, finished, name):
    fault, tiny = FAULTS[name], changed(tiny, train__max_tokens=12 * STEP)
    world_size = len(fault.codes)
    job = Job(changed(tiny, **fault.config), world_size, patch=fault.patch)
    assert job.wait() == [*fault.codes], job.errors()
    found = status(tiny)
    assert found["status"] == fault.status and re.search(fault.said, found["reason"]), found
    assert "\n" not in found["reason"] and fault.log in rank_log(tiny, 0)
    train(tiny, world_size)
    assert status(tiny)["status"] == "done"
    assert_same_run(finished(tiny, world_size), tiny["output_dir"])


def test_a_second_start_in_the_same_folder_is_refused_with_the_name_of_the_first(tiny):
    slow = changed(tiny, train__max_tokens=10**6 * STEP, datamodule__repeat=True, skip_eval=True)
    first = Job(slow)
    try:
        metrics = Path(tiny["output_dir"]) / "metrics/jsonlines/train.jsonl"
        wait_until(metrics.exists, first.processes[0].is_alive, first.errors)
        before = status(tiny)
        for world_size in (1, 2):
            message = refused(slow, world_size)
            assert "another run is writing to output_dir" in message and f'"pid": {first.processes[0].pid}' in message
        assert status(tiny) == before
    finally:
        first.kill()
    train(changed(slow, train__max_tokens=lines(tiny["output_dir"], "train")[-1]["step"] + 8 * STEP))


def test_a_launcher_passes_signals_on_and_ends_with_75(tiny, tmp_path):
    """SIGUSR1 among them, of which `fabric run` by itself would die and tell its ranks nothing."""
    folder = tmp_path / "run"
    launcher = start(tiny, folder, "scripts/launch.py", "--accelerator", "cpu", "--devices", "1")
    wait_for_training(folder, launcher)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait() == 75
    found = status({"output_dir": folder})
    assert found["status"] == "preempted" and found["reason"] == "SIGUSR1"
    assert (folder / f"checkpoints/step-{found['step']:015d}/manifest.json").is_file()
    said = (folder / "printed").read_text()
    assert "Traceback" not in said and said.splitlines()[-1].endswith(str(folder)), said


def test_ctrl_c_exits_with_75_and_a_kill_leaves_the_folder_free_although_readers_live_on(tiny, tmp_path):
    printed, logged = tmp_path / "printed", tmp_path / "cli/metrics/jsonlines/train.jsonl"
    command = ["train.py", *command_line(tiny, tmp_path / "cli"), *ENDLESS, "datamodule.train_num_workers=1"]
    process = Command(*command)
    wait_until(logged.exists, lambda: process.poll() is None)
    process.kill()
    process.wait()
    size = logged.stat().st_size
    process = Command(*command, errors=printed)
    wait_until(lambda: logged.stat().st_size > size, lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    code, said = process.wait(), printed.read_text()
    assert code == 75 and "Traceback" not in said, said
    assert "SIGINT: stopping after this step" in said and "stopped and saved" in said
