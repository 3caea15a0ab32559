"""Before a long run: what would go wrong later is said now, and nothing is left behind."""

import re
from pathlib import Path

from tests.training.conftest import Job, before, changed, refused

#: What is printed goes to a file; a stand-in for a GPU says how much memory a step takes.
MEMORY = """
import sys
sys.stdout = open({said!r}, "a")
from forgetting_transformer.training.execution import preflight
from forgetting_transformer.training import trainer
used, step = [0], trainer.Trainer.step
def limited(self, batch):
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
    used[0] = self.config.train.grad_acc_tokens // 32 * (10 if checkpointing else 40)
    return step(self, batch)
trainer.Trainer.step = limited
preflight._memory = lambda device: (used[0], 90)
preflight.torch.cuda.reset_peak_memory_stats = preflight.torch.cuda.memory_allocated = lambda device: 0
"""


def test_it_measures_proposes_and_leaves_the_run_alone(tiny, tmp_path):
    said = tmp_path / "said"
    job = Job(changed(tiny, preflight=True), 2, patch=MEMORY.format(said=str(said)))
    assert job.wait() == [0, 0], job.errors()
    assert "deprecated" not in job.errors(), "of a library that it uses in two versions"
    assert not Path(tiny["output_dir"]).exists()
    said = said.read_text()
    for row in ("tokens per second", "training takes", "process-hours", "a checkpoint", "disk: needed, free"):
        assert row in said, said
    assert "20 of 4 x 32" in said
    rows = re.findall(r"^(yes|no) +(\d+) +([\d,]+|-) +(.*)$", said, re.MULTILINE)
    found = [(row[0], row[1], row[3]) for row in rows]
    assert found == [("yes", "32", "10 B"), ("yes", "64", "20 B"), ("no", "32", "40 B"), ("no", "64", "80 B")]
    assert re.search(r"^  train\.grad_acc_tokens=(32|64) train\.gradient_checkpointing=(true|false)$", said, re.M), said


def test_a_disk_too_small_for_the_checkpoints_to_come_is_noticed(tiny):
    patch = "import shutil, collections; shutil.disk_usage = lambda p: collections.namedtuple('U', 'free')(300_000)"
    said = refused(changed(tiny, preflight=True), patch=patch)
    assert "the checkpoints to come need" in said and "checkpoint_keep_interval" in said


def test_it_finds_what_training_would_find_after_hours(tiny):
    assert "train.max_tokens=1,000,000 is more than" in refused(changed(tiny, preflight=True, train__max_tokens=10**6))
    # The last batch cannot be read.
    missing = "from forgetting_transformer.data import DataError\nraise DataError('c/4/0 is missing')"
    patch = before("data.token_array.TokenArray", "read", missing, "first >= 76", "self, first, *rest")
    assert "c/4/0 is missing" in refused(changed(tiny, preflight=True, skip_eval=True), patch=patch)
