"""A run may change its number of processes, its strategy and its micro-batch whenever it starts."""

import numpy as np
import pytest

from tests.training.conftest import STEP, assert_same_tensors, changed, checkpoint_tensors, losses, train

pytestmark = pytest.mark.slow

#: Every rank writes the tokens of every step it takes.
RECORD = """
import numpy as np
from forgetting_transformer.training import trainer
original = trainer.Trainer.step
def step(self, batch):
    np.save(f"{folder}/{{self.counters.batch_count:03d}}-{{self.fabric.global_rank}}.npy", batch["labels"].numpy())
    return original(self, batch)
trainer.Trainer.step = step
"""


def global_batches(folder) -> list[np.ndarray]:
    """The tokens of every step: its ranks' shares in the order of the ranks."""
    steps = sorted({file.name.split("-")[0] for file in folder.iterdir()})
    return [np.concatenate([np.load(f) for f in sorted(folder.glob(f"{step}-*.npy"))]) for step in steps]


def test_one_two_four_and_one_process_with_other_micro_batches(tiny, tmp_path):
    """Same global batches in the same order, losses equal to 1e-6, weights and moments intact."""
    tiny = changed(tiny, train__max_tokens=12 * STEP)
    straight = changed(tiny, output_dir=str(tmp_path / "straight"))
    for folder in ("straight", "moved"):
        (tmp_path / f"{folder}-tokens").mkdir()
    train(straight, patch=RECORD.format(folder=tmp_path / "straight-tokens"))
    moved = changed(tiny, output_dir=str(tmp_path / "moved"))
    parts = [(3, "auto", 1, 32), (6, "fsdp", 2, 32), (9, "ddp", 4, 32), (12, "auto", 1, 128)]
    for steps, strategy, world_size, micro_batch in parts:
        part = changed(moved, strategy__name=strategy, train__grad_acc_tokens=micro_batch, skip_eval=True)
        record = RECORD.format(folder=tmp_path / "moved-tokens")
        train(changed(part, train__max_tokens=steps * STEP), world_size, patch=record)
    ours, theirs = global_batches(tmp_path / "moved-tokens"), global_batches(tmp_path / "straight-tokens")
    assert len(ours) == len(theirs) == 12
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    ours, theirs = losses(moved["output_dir"]), losses(straight["output_dir"])
    assert len(ours) == 12 and max(abs(ours[step] - theirs[step]) for step in theirs) < 1e-6
    ours, theirs = (checkpoint_tensors(config["output_dir"], 12 * STEP) for config in (moved, straight))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if name.endswith(".step"):
            assert ours[name].item() == 12.0
        # AdamW divides by the root of the second moment: where that is tiny, so is what tells two sums apart.
        assert (ours[name] - tensor).norm() <= 1e-3 * tensor.norm() + 1e-7, name


def test_moments_pass_from_one_number_of_processes_to_another_bit_for_bit(tiny, tmp_path):
    """Loaded elsewhere and saved again before a step is taken."""
    train(changed(tiny, train__max_tokens=4 * STEP))
    patch = """
from forgetting_transformer.training import trainer
def fit(self):
    self.callbacks.call_all("on_start")
    self.counters.token_count += 1  # under another name
    self.save(permanent=False, must_succeed=True)
trainer.Trainer.fit = fit
"""
    train(changed(tiny, strategy__name="fsdp"), 2, patch=patch)
    assert_same_tensors(tiny["output_dir"], tiny["output_dir"], 4 * STEP, 4 * STEP + 1)
