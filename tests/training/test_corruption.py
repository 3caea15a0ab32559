"""Ranks that hold other weights or moments than the others are found, and nothing wrong is saved."""

from pathlib import Path

import pytest
import torch

from forgetting_transformer.training.checkpoint.folder import newest_valid
from forgetting_transformer.training.faults.corruption import digests, judge
from tests.training.conftest import STEP, assert_same_tensors, changed, losses, refused, status, train

#: One element of one tensor of one rank changes after a step.
FLIP = """
import torch
from forgetting_transformer.training import trainer
sound = trainer.Trainer.step
def step(self, batch):
    result = sound(self, batch)
    if self.counters.batch_count == {batch} and self.fabric.global_rank == {rank}:
        name, parameter = list(self.model.module.named_parameters())[3]
        tensor = {tensor}
        with torch.no_grad():
            flat = tensor.view(-1).view(torch.int32)
            # One bit: of a weight one that the roundings of the next step cannot swallow, of a moment one too small for
            # a weight.
            flat[5] ^= 1 << (12 if tensor is parameter else 0)
    return result
trainer.Trainer.step = step
"""
WEIGHT, MOMENT = "parameter", "self.optimizer.optimizer.state[parameter]['exp_avg_sq']"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_bit_of_any_element_changes_a_digest(dtype):
    torch.manual_seed(0)
    tensors = [(torch.randn(shape) * 100).to(dtype) for shape in ((), (7, 3), (0, 4))]
    whole = digests(tensors)
    assert whole.tolist()[2] == 0 and torch.equal(whole, digests([tensor.clone() for tensor in tensors]))
    size = tensors[1].element_size()
    bits = {2: torch.int16, 4: torch.int32}[size]
    for element in (0, 20):
        for bit in range(8 * size):
            wrong = tensors[1].clone()
            wrong.view(-1).view(bits)[element] ^= (1 << bit) if bit < 8 * size - 1 else -(1 << bit)
            assert digests([wrong]) != whole[1]


def test_a_comparison_names_ranks_and_tensors():
    table = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 5, 3], [1, 2, 3]])
    assert judge(8, "abc", table[:2]) is None
    assert judge(8, "abc", table) == "rank(s) 2 differ from the other ranks in b after step 8"
    table[3, 2] = 9
    assert judge(8, "abc", table) == "ranks 0, 2, 3 differ in b after step 8"
    assert judge(8, "abc", table[1:3]) == "ranks 0, 1 differ in b after step 8", "of two, nobody knows which is wrong"


@pytest.mark.slow
def test_a_rank_that_differs_stops_the_run_and_nothing_wrong_is_saved(tiny, tmp_path):
    tiny = changed(tiny, strategy={"name": "ddp", "compare_steps": 2}, datamodule__train_batch_size=6)
    tiny = changed(tiny, checkpoint_interval=3 * 192, train__max_tokens=9 * 192, train__grad_acc_tokens=32)
    tiny = changed(tiny, skip_eval=True, schedule__total_tokens=9 * 192)
    errors, found = refused(tiny, 3, FLIP.format(batch=6, rank=1, tensor=MOMENT)), status(tiny)
    who, good = "rank(s) 1 differ from", f"the last good checkpoint is at {6 * 192:,} tokens"
    for part in (who, ".exp_avg_sq", "after step 8. All ranks", good):
        assert part in found["reason"], (part, found["reason"])
    assert found["status"] == "failed" and who in errors and "TrainingError" in errors
    assert newest_valid(Path(tiny["output_dir"]) / "checkpoints").step == 6 * 192
    straight = changed(tiny, output_dir=str(tmp_path / "straight"))
    train(straight, 3)
    train(tiny, 3)
    assert_same_tensors(tiny["output_dir"], straight["output_dir"], 9 * 192)
    assert losses(tiny["output_dir"]) == losses(straight["output_dir"])


@pytest.mark.slow
def test_before_a_checkpoint_ranks_are_compared_at_any_step(tiny):
    tiny = changed(tiny, strategy={"name": "ddp", "compare_steps": 1000}, skip_eval=True)
    said = refused(tiny, 2, FLIP.format(batch=6, rank=0, tensor=WEIGHT))
    assert "ranks 0, 1 differ" in said and "after step 8. All ranks" in said
    assert newest_valid(Path(tiny["output_dir"]) / "checkpoints").step == 4 * STEP
