"""Stopping, saving in the background, bad steps and changes of size on CUDA, with NCCL where there are two GPUs."""

import signal

import pytest
import torch

from tests.training.conftest import (
    HEARD,
    STEP,
    STOP,
    Job,
    assert_same_run,
    changed,
    checkpoint_tensors,
    in_step,
    losses,
    rank_log,
    start,
    status,
    wait_for_training,
)

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
#: (strategy, processes) that this machine can run.
RUNS = [("auto", 1)] if torch.cuda.device_count() < 2 else [("auto", 1), ("ddp", 2), ("fsdp", 2)]


@pytest.fixture
def on_gpus(tiny):
    """The tiny configuration for a strategy on so many GPUs."""

    def configure(strategy: str, world_size: int, **changes) -> dict:
        fabric = {"precision": "32-true", "accelerator": "cuda", "devices": world_size}
        # Compiling would take most of the time; tests/gpu/test_compile_cuda.py is about that.
        tiny["train"] |= {"grad_acc_tokens": 32, "compile": False}
        return changed(changed(tiny, strategy__name=strategy, fabric=fabric), **changes)

    return configure


def run(config: dict, world_size: int, patch: str | None = None, codes: list[int] | None = None) -> Job:
    job = Job(config, world_size, patch=patch, accelerator="cuda")
    assert job.wait() == (codes or [0] * world_size), job.errors()
    return job


@pytest.mark.parametrize(("strategy", "world_size"), RUNS)
def test_a_signal_on_the_last_rank_stops_all_and_the_run_goes_on_bitwise(on_gpus, tmp_path, strategy, world_size):
    config = on_gpus(strategy, world_size, fabric__precision="32-true" if strategy == "ddp" else "bf16-mixed")
    straight = changed(config, output_dir=str(tmp_path / "straight"))
    run(straight, world_size)
    run(config, world_size, in_step(STOP + HEARD, 5, str(world_size - 1)))
    assert status(config)["status"] == "preempted"
    assert status(config)["step"] == (6 if world_size == 1 else 7) * STEP
    run(config, world_size)
    assert status(config)["status"] == "done"
    assert_same_run(straight["output_dir"], config["output_dir"])


def test_what_is_saved_in_the_background_is_what_is_saved_in_the_foreground(on_gpus, tmp_path):
    """A checkpoint at every step, while the next steps change what was copied."""
    strategy, world_size = RUNS[-1]
    config = on_gpus(strategy, world_size, checkpoint_interval=STEP, checkpoint_keep_last=20)
    waiting = changed(config, output_dir=str(tmp_path / "waiting"), checkpoint_background=False)
    run(config, world_size)
    run(waiting, world_size)
    for step in range(1, 21):
        ours, theirs = (checkpoint_tensors(c["output_dir"], step * STEP) for c in (config, waiting))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours), step


def test_a_step_and_its_vote_wait_for_nothing(on_gpus):
    """PyTorch raises at any call that would make the host wait for the GPU."""
    patch = """
import torch
from forgetting_transformer.training import trainer
step, vote = trainer.Trainer.step, trainer.Trainer.check_in
def strictly(function):
    def call(self, *arguments):
        torch.cuda.set_sync_debug_mode("error" if self.counters.batch_count > 2 else "default")
        try:
            return function(self, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return call
trainer.Trainer.step, trainer.Trainer.check_in = strictly(step), strictly(vote)
"""
    config = on_gpus("auto", 1, checkpoint_interval=100 * STEP)
    run(config, 1, patch)


@two_gpus
def test_a_rank_that_hangs_ends_the_run_and_says_where(on_gpus):
    patch = in_step("def lost_in_thought():\n    time.sleep(600)\nlost_in_thought()", 5, "1")
    config = on_gpus("fsdp", 2, strategy__timeout_seconds=20)
    job = Job(config, 2, patch=patch, accelerator="cuda")
    codes = job.wait()
    assert all(codes), codes
    assert "in lost_in_thought" in rank_log(config, 1)
    assert status(config)["status"] == "failed"


@two_gpus
def test_a_rank_that_is_killed_is_named(on_gpus):
    """Rank 0 waits for it in a CUDA call. There is no launcher, which would ask it to stop."""
    patch = in_step("os.kill(os.getpid(), 9)", 9, "1")
    config = on_gpus("ddp", 2, strategy__timeout_seconds=20)
    job = Job(config, 2, patch=patch, accelerator="cuda")
    assert job.wait() == [1, -signal.SIGKILL]
    assert status(config)["status"] == "failed"
    assert "rank 1 was killed or has crashed" in status(config)["reason"]


@two_gpus
def test_two_one_and_two_gpus_with_other_micro_batches(on_gpus, tmp_path):
    straight = on_gpus("auto", 1, output_dir=str(tmp_path / "straight"))
    run(straight, 1)
    moved = str(tmp_path / "moved")
    for steps, strategy, world_size, micro_batch in [(6, "ddp", 2, 64), (13, "auto", 1, 128), (20, "fsdp", 2, 32)]:
        part = on_gpus(strategy, world_size, output_dir=moved, train__max_tokens=steps * STEP, skip_eval=True)
        run(changed(part, train__grad_acc_tokens=micro_batch), world_size)
    ours, theirs = losses(moved), losses(straight["output_dir"])
    assert len(ours) == 20 and max(abs(ours[step] - theirs[step]) for step in theirs) < 1e-6
    ours, theirs = checkpoint_tensors(moved, 20 * STEP), checkpoint_tensors(straight["output_dir"], 20 * STEP)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].item() == 20.0 for name in ours if name.endswith(".step"))
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() <= 1e-3 * tensor.norm() + 1e-7, name


@two_gpus
def test_the_launcher_stops_two_gpus_in_order(on_gpus, tmp_path):
    folder = tmp_path / "run"
    launch = ["scripts/launch.py", "--accelerator", "cuda", "--devices", "2", "strategy=fsdp"]
    launcher = start(on_gpus("fsdp", 2), folder, *launch)
    wait_for_training(folder, launcher)
    launcher.send_signal(signal.SIGTERM)
    said = folder / "printed"
    assert launcher.wait() == 75, said.read_text()
    found = status({"output_dir": folder})
    assert found["status"] == "preempted" and found["reason"] == "SIGTERM"
    assert (folder / f"checkpoints/step-{found['step']:015d}/manifest.json").is_file()
    assert "Traceback" not in said.read_text()
