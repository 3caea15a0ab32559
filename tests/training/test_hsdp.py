"""strategy=hsdp: sharded within a node, replicated between nodes; four processes as two nodes of two."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forgetting_transformer.training import ConfigError, parse
from forgetting_transformer.training.parallel.launch import _shard_size
from tests.processes import ROOT, free_port, shell_environment
from tests.training.conftest import (
    ENDLESS,
    SIGNAL_IN_STEP_SIX,
    STEP,
    Job,
    changed,
    checkpoint_tensors,
    command_line,
    refused,
    status,
    train,
)
from tests.training.test_corruption import FLIP, MOMENT, WEIGHT
from tests.training.test_resume import assert_same_run, lines, losses
from tests.training.test_start_block import blocks
from tests.waiting import HANG, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def hsdp(tiny) -> dict:
    return changed(tiny, strategy__name="hsdp", train__grad_acc_tokens=32)


def test_two_nodes_train_like_one_process(hsdp, tiny, finished):
    """Losses, the norms of all parameters and gradients, the norm that is clipped, evaluations, weights, moments."""
    ours, theirs = finished(hsdp, 4, nodes=2), finished(tiny)
    assert blocks(ours)[0]["precision"] == (
        "32-true, strategy hsdp (2 copies of the model, each sharded over 2 processes)"
    )
    assert max(abs(losses(ours)[step] - loss) for step, loss in losses(theirs).items()) < 1e-6
    for kind, tolerance in (("train", 1e-4), ("norm", 1e-4), ("val", 1e-5)):
        mine, others = lines(ours, kind), lines(theirs, kind)
        assert len(mine) == len(others) > 0
        for line, other in zip(mine, others, strict=True):
            numbers = {k: v for k, v in other.items() if isinstance(v, float) and "time" not in k and "second" not in k}
            assert {key: line[key] for key in numbers} == pytest.approx(numbers, rel=tolerance, abs=1e-6), kind
    ours, theirs = checkpoint_tensors(ours, 20 * STEP), checkpoint_tensors(theirs, 20 * STEP)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() <= 1e-3 * tensor.norm() + 1e-7, name


def test_a_checkpoint_is_written_once_and_not_once_for_each_copy(hsdp, tiny, finished):
    def written(folder: str) -> int:
        return sum(f.stat().st_size for f in Path(folder).glob(f"checkpoints/step-{20 * STEP:015d}/state/*.distcp"))

    # Each shard has a header of some hundred bytes.
    assert written(finished(hsdp, 4, nodes=2)) < 1.5 * written(finished(tiny))


@pytest.mark.rare("tests/training/test_elastic.py::test_one_two_four_and_one_process_with_other_micro_batches")
def test_two_nodes_of_two_one_of_four_and_back(hsdp, tiny, tmp_path, finished):
    moved = changed(hsdp, output_dir=str(tmp_path / "moved"), skip_eval=True)
    parts = [(5, "hsdp", 4, 2), (9, "hsdp", 4, 1), (12, "fsdp", 4, 1), (15, "hsdp", 4, 2), (18, "ddp", 4, 2)]
    for steps, strategy, world_size, nodes in [*parts, (20, "hsdp", 1, 1)]:
        part = changed(moved, strategy__name=strategy, train__max_tokens=steps * STEP)
        train(part, world_size, nodes=nodes)
    ours, theirs = losses(moved["output_dir"]), losses(finished(tiny))
    assert len(ours) == 20 and max(abs(ours[step] - theirs[step]) for step in theirs) < 1e-6
    said = [block["precision"].partition("strategy ")[2] for block in blocks(moved["output_dir"])]
    assert said[1] == "fsdp (one copy of the model: nothing to replicate)"
    assert said[2] == "fsdp" and said[3].startswith("hsdp (2 copies") and said[4] == "ddp"
    assert said[5] == "none (one process: nothing to shard)"


def test_with_one_process_per_node_it_is_ddp_and_says_so(hsdp, tiny, finished):
    train(changed(hsdp, train__max_tokens=STEP, skip_eval=True), 2, nodes=2)
    (block,) = blocks(hsdp["output_dir"])
    assert block["precision"].endswith("strategy ddp (one process for each copy of the model: nothing to shard)")


def test_copies_of_another_size_and_of_none(hsdp):
    train(changed(hsdp, strategy__shard_size=2, train__max_tokens=STEP, skip_eval=True), 4)
    (block,) = blocks(hsdp["output_dir"])
    assert "hsdp (2 copies of the model, each sharded over 2 processes)" in block["precision"], "on one node too"
    said = refused(changed(hsdp, strategy__shard_size=3, output_dir=hsdp["output_dir"] + "-3"), 4)
    assert "strategy.shard_size=3 does not divide 4 processes into equal groups; choose one of [1, 2, 4]" in said


def test_a_run_that_was_interrupted_on_two_nodes_is_bitwise_one_that_was_not(hsdp, finished):
    """The signal comes to one process of the second node; all processes of both stop after the same step."""
    straight = finished(hsdp, 4, nodes=2)
    job = Job(hsdp, 4, patch=SIGNAL_IN_STEP_SIX.format(name="SIGUSR1", rank=2), nodes=2)
    assert job.wait() == [0] * 4, job.errors()
    assert status(hsdp)["status"] == "preempted" and status(hsdp)["step"] == 7 * STEP
    train(hsdp, 4, nodes=2)
    assert_same_run(straight, hsdp["output_dir"])


@pytest.mark.rare(
    "tests/training/test_hsdp.py::test_a_run_that_was_interrupted_on_two_nodes_is_bitwise_one_that_was_not"
)
def test_a_signal_to_one_launcher_of_two_stops_both_nodes(tiny, tmp_path):
    """The other one waits five minutes for the launcher that has gone, which this test does not."""
    folder, port = tmp_path / "run", str(free_port())
    launch = [sys.executable, "scripts/launch.py", "--accelerator", "cpu", "--devices", "2", "--num-nodes", "2"]
    launch += ["--main-port", port, *command_line(tiny, folder), *ENDLESS, "strategy=hsdp", "train.grad_acc_tokens=32"]
    printed = [tmp_path / "0", tmp_path / "1"]
    nodes = []
    for rank, file in enumerate(printed):
        with file.open("w") as said:
            command = [*launch[:2], "--node-rank", str(rank), *launch[2:]]
            nodes.append(subprocess.Popen(command, cwd=ROOT, env=shell_environment(), stdout=said, stderr=said))
    logged = folder / "metrics/jsonlines/train.jsonl"
    wait_until(logged.exists, lambda: nodes[0].poll() is None, printed[0].read_text)
    nodes[1].send_signal(signal.SIGUSR1)
    assert nodes[1].wait(HANG) == 75
    wait_until(lambda: status({"output_dir": folder})["status"] == "preempted")
    nodes[0].kill()
    assert blocks(str(folder))[0]["precision"].endswith("hsdp (2 copies of the model, each sharded over 2 processes)")
    last, other = (file.read_text().splitlines() for file in printed)
    assert "stopped and saved" in last[-1], last
    assert all("SIGUSR1: stopping after this step" in line for line in other), other


def test_nodes_of_different_sizes_are_refused(hsdp, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"^strategy=hsdp: this node has 3 of 4 processes, .* set strategy.shard_size"
    ):
        _shard_size(parse(hsdp), 4)
    assert _shard_size(parse(changed(hsdp, strategy__shard_size=2)), 4) == 2


@pytest.mark.rare("tests/training/test_bad_steps.py::test_a_bad_gradient_on_one_rank_skips_the_update_on_all")
def test_a_bad_gradient_on_one_process_skips_the_update_on_both_nodes(hsdp):
    patch = """
from forgetting_transformer.training import trainer
original = trainer.Trainer.step
def step(self, batch):
    if self.counters.batch_count == 3 and self.fabric.global_rank == 3:
        backward = self.fabric.backward
        self.fabric.backward = lambda loss: backward(loss * float("nan"))
        result = original(self, batch)
        del self.fabric.backward
        return result
    return original(self, batch)
trainer.Trainer.step = step
"""
    job = Job(changed(hsdp, train__max_tokens=8 * STEP), 4, patch=patch, nodes=2)
    assert job.wait() == [0] * 4, job.errors()
    assert [line["step"] for line in lines(hsdp["output_dir"], "bad_step")] == [4 * STEP]
    tensors = checkpoint_tensors(hsdp["output_dir"], 8 * STEP)
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert next(t.item() for name, t in tensors.items() if name.endswith(".step")) == 7


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(
            WEIGHT,
            marks=pytest.mark.rare(
                "tests/training/test_hsdp.py::test_a_copy_that_differs_stops_the_run_and_names_its_rank"
            ),
        ),
        MOMENT,
    ],
)
def test_a_copy_that_differs_stops_the_run_and_names_its_rank(hsdp, tensor):
    hsdp = changed(hsdp, strategy__compare_steps=2, datamodule__train_batch_size=4)
    flip = FLIP.replace("flat = tensor", "flat = tensor.to_local()").format(batch=6, rank=3, tensor=tensor)
    job = Job(hsdp, 4, patch=flip, nodes=2)
    assert job.wait() == [1] * 4, "one process differs"
    found = json.loads((Path(hsdp["output_dir"]) / "status.json").read_text())
    assert found["status"] == "failed"
    # With two copies nobody knows which of both is wrong.
    assert "weights or moments are corrupt: ranks 1, 3 differ in" in found["reason"], found
    assert f"the last good checkpoint is at {4 * STEP:,} tokens" in found["reason"]


@pytest.mark.rare("tests/training/test_faults.py::test_a_fault_is_named_and_the_same_command_goes_on_bitwise")
def test_a_node_that_dies_ends_the_other_and_the_same_command_continues(hsdp, finished):
    patch = """
import os
from forgetting_transformer.training import trainer
original = trainer.Trainer.step
def step(self, batch):
    if self.counters.batch_count == 9 and self.fabric.global_rank > 1:
        os.kill(os.getpid(), 9)
    return original(self, batch)
trainer.Trainer.step = step
"""
    job = Job(hsdp, 4, patch=patch, nodes=2)
    assert job.wait() == [1, 1, -signal.SIGKILL, -signal.SIGKILL]
    found = status(hsdp)
    assert found["status"] == "failed" and "was killed or has crashed (seen here as: " in found["reason"], found
    train(hsdp, 4, nodes=2)
    assert_same_run(finished(hsdp, 4, nodes=2), hsdp["output_dir"])


@pytest.mark.rare("tests/training/test_optimizers.py::test_muon_sharded_agrees_with_one_process")
def test_muon_sees_whole_matrices_in_every_copy(hsdp, tiny, finished):
    muon = {"name": "muon", "lr": 1e-2}
    ours = finished(changed(hsdp, optimizer=muon, skip_eval=True), 4, nodes=2)
    theirs = finished(changed(tiny, optimizer=muon, skip_eval=True))
    assert max(abs(losses(ours)[step] - loss) for step, loss in losses(theirs).items()) < 1e-3
    assert all(torch.isfinite(tensor).all() for tensor in checkpoint_tensors(ours, 20 * STEP).values())
