"""Before a long run: what would go wrong later is said now, and nothing is left behind."""

import re
from pathlib import Path

from omegaconf import OmegaConf

from forgetting_transformer import training
from forgetting_transformer.training.preflight import checkpoints_to_come
from tests.training.conftest import STEP, Job, changed, refused


def test_it_measures_and_leaves_the_run_alone(tiny, tmp_path):
    said = tmp_path / "said"
    job = Job(changed(tiny, preflight="check"), 2, patch=f"import sys; sys.stdout = open({str(said)!r}, 'a')")
    assert job.wait() == [0, 0], job.errors()
    assert not Path(tiny["output_dir"]).exists()
    said = said.read_text()
    for row in (
        "tokens per second",
        "training takes",
        "process-hours",
        "a checkpoint",
        "disk: needed, free",
        "all-reduce",
    ):
        assert row in said, said
    assert re.search(r"^disk: speed of writing +[\d.]+ [kMG]B/s$", said, re.MULTILINE), said
    assert "20 of 4 x 32" in said


def test_a_disk_too_small_for_the_checkpoints_to_come_is_noticed(tiny):
    patch = "import shutil, collections; shutil.disk_usage = lambda p: collections.namedtuple('U', 'free')(300_000)"
    job = Job(changed(tiny, preflight="check"), patch=patch)
    assert job.wait() == [1]
    assert "the checkpoints to come need" in job.errors() and "checkpoint_keep_interval" in job.errors()


def test_checkpoints_that_are_kept_already_need_no_room_and_free_none(tiny, interrupted):
    """checkpoint_keep_interval counts for those to come: at 12 steps of 20, with one kept at 8."""
    interrupted(tiny, 12)
    counted = {}
    for interval in (4, 8, 12, 20):
        config = training.parse(OmegaConf.create(changed(tiny, checkpoint_keep_interval=interval * STEP)))
        counted[interval] = checkpoints_to_come(Path(tiny["output_dir"]), config)
    assert counted == {4: 4, 8: 3, 12: 2, 20: 3}
    assert checkpoints_to_come(Path("new"), config) == 4


def test_it_finds_what_training_would_find_after_hours(tiny):
    assert "train.max_tokens=1,000,000 is more than" in refused(
        changed(tiny, preflight="check", train__max_tokens=10**6)
    )
    # The last batch cannot be read.
    patch = """
from forgetting_transformer.data import TokenArray, DataError
original = TokenArray.read
def read(self, first, *rest):
    if first >= 76:
        raise DataError("c/4/0 is missing")
    return original(self, first, *rest)
TokenArray.read = read
"""
    job = Job(changed(tiny, preflight="check", skip_eval=True), patch=patch)
    assert job.wait() == [1] and "c/4/0 is missing" in job.errors()


def test_an_evaluation_that_does_not_fit_beside_a_step_is_said(tiny):
    patch = """
import torch
from forgetting_transformer.model.decoder import DecoderForCausalLM as Model
forward = Model.forward
def fail(self, *args, **kwargs):
    if not self.training:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
    return forward(self, *args, **kwargs)
Model.forward = fail
"""
    config = changed(tiny, preflight="check")
    job = Job(config, patch=patch)
    assert job.wait() == [1]
    assert "out of memory in evaluation for 2.50 GiB more" in job.errors()
    assert "datamodule.eval_local_batch_size=2" in job.errors()
    assert Job(config | {"skip_eval": True}, patch=patch).wait() == [0]


def test_a_step_that_does_not_fit_is_said_as_in_training(tiny):
    patch = """
import torch
from forgetting_transformer.training import trainer
def fail(self, batch):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
trainer.Trainer.step = fail
"""
    job = Job(changed(tiny, preflight="check"), patch=patch)
    assert job.wait() == [1]
    assert (
        "StepTooBigError: out of memory in a step for 2.50 GiB more. Start the same command again with "
        "train.grad_acc_tokens=32 (now 64) or train.gradient_checkpointing=true or strategy=fsdp on several GPUs"
    ) in job.errors()
