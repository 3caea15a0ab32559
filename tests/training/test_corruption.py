"""Finite but wrong weights or moments are found: by digests, comparison of ranks, and when a checkpoint is loaded."""

import json
from pathlib import Path

import pytest
import torch

from forgetting_transformer.training.checkpoint.folder import CheckpointError, newest_valid
from forgetting_transformer.training.export import build_from_checkpoint
from forgetting_transformer.training.faults import corruption
from forgetting_transformer.training.faults.corruption import digests, judge
from tests.training.conftest import STEP, Job, changed, checkpoint_tensors, refused, train
from tests.training.test_resume import losses

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


def by_definition(tensor: torch.Tensor, start: int = 0) -> int:
    bits = tensor.contiguous().view(-1).view(corruption._BITS[tensor.element_size()]).tolist()
    return sum(b * (2 * (start + i) + 1) for i, b in enumerate(bits)) % 2**64


def digest(tensor: torch.Tensor, start: int = 0) -> int:
    return int(digests([(tensor, start)])) % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64])
@pytest.mark.parametrize("piece", [1 << 16, 500, 64])
def test_a_digest_is_what_its_definition_says_however_it_is_computed(monkeypatch, dtype, piece):
    """In one piece, in many, and together with other tensors: the order of additions does not matter."""
    monkeypatch.setitem(corruption._PIECES, "cpu", piece)
    torch.manual_seed(0)
    tensors = [(torch.randn(shape) * 100).to(dtype) for shape in ((), (1,), (7, 9), (0, 4), (33,), (5, 2, 40))]
    starts = [0, 3, 10**9, 0, 2**31, 5]
    found = digests(list(zip(tensors, starts, strict=True)))
    assert [int(d) % 2**64 for d in found] == [by_definition(t, s) for t, s in zip(tensors, starts, strict=True)]
    assert [digest(t, s) for t, s in zip(tensors, starts, strict=True)] == [int(d) % 2**64 for d in found]


def test_any_bit_and_any_exchange_changes_a_digest():
    torch.manual_seed(0)
    tensor = torch.randn(40)
    whole = digest(tensor)
    for element in range(40):
        for bit in range(32):
            wrong = tensor.clone()
            wrong.view(torch.int32)[element] ^= (1 << bit) if bit < 31 else -(1 << 31)
            assert digest(wrong) != whole
        for other in range(element):
            swapped = tensor.clone()
            swapped[[element, other]] = tensor[[other, element]]
            assert digest(swapped) != whole
    assert digest(torch.zeros(3)) != digest(-torch.zeros(3))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 12])
def test_digests_of_shards_add_up_to_that_of_the_whole(world_size):
    tensor = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
    rows = -(-10 // world_size)
    shards = [(tensor[k * rows : (k + 1) * rows], min(k * rows, 10) * 6) for k in range(world_size)]
    assert int(digests(shards).sum()) % 2**64 == by_definition(tensor)


def test_a_comparison_names_ranks_and_tensors():
    table = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 5, 3], [1, 2, 3]])
    assert judge(8, "abc", table[:2]) is None
    assert judge(8, "abc", table) == "rank(s) 2 differ from the other ranks in b after step 8"
    table[3, 2] = 9
    assert judge(8, "abc", table) == "ranks 0, 2, 3 differ in b and 1 more after step 8"
    assert judge(8, "abc", table[1:3]).startswith("ranks 0, 1 differ in b"), "of two, nobody knows which is wrong"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "tensor", "who"),
    [
        pytest.param(
            2,
            WEIGHT,
            "ranks 0, 1 differ",
            marks=pytest.mark.rare(
                "tests/training/test_corruption.py::test_before_a_checkpoint_ranks_are_compared_at_any_step"
            ),
        ),
        (3, MOMENT, "rank(s) 1 differ from"),
    ],
)
def test_a_rank_that_differs_stops_the_run_and_nothing_wrong_is_saved(tiny, tmp_path, world_size, tensor, who):
    tiny = changed(tiny, strategy={"name": "ddp", "compare_steps": 2}, datamodule__train_batch_size=6)
    tiny = changed(
        tiny, checkpoint_interval=3 * 192, train__max_tokens=12 * 192, train__grad_acc_tokens=32, skip_eval=True
    )
    tiny["schedule"] |= {"warmup_tokens": 192, "total_tokens": 12 * 192}
    job = Job(tiny, world_size, patch=FLIP.format(batch=6, rank=1, tensor=tensor))
    assert job.wait() == [1] * world_size
    status = json.loads((Path(tiny["output_dir"]) / "status.json").read_text())
    kind = ".exp_avg_sq" if tensor == MOMENT else ""
    for part in (
        who,
        "in ",
        kind,
        "after step 8. All ranks",
        f"the last good checkpoint is at {6 * 192:,} tokens",
    ):
        assert part in status["reason"], (part, status["reason"])
    assert status["status"] == "failed" and all(part in job.errors() for part in (who, "TrainingError"))
    assert newest_valid(Path(tiny["output_dir"]) / "checkpoints").step == 6 * 192
    straight = changed(tiny, output_dir=str(tmp_path / "straight"))
    train(straight, world_size)
    train(tiny, world_size)
    ours, theirs = (checkpoint_tensors(c["output_dir"], 12 * 192) for c in (tiny, straight))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert losses(tiny["output_dir"]) == losses(straight["output_dir"])


@pytest.mark.slow
def test_before_a_checkpoint_ranks_are_compared_at_any_step(tiny):
    tiny = changed(tiny, strategy={"name": "ddp", "compare_steps": 1000}, skip_eval=True)
    job = Job(tiny, 2, patch=FLIP.format(batch=6, rank=0, tensor=WEIGHT))
    assert job.wait() == [1, 1] and "after step 8. All ranks" in job.errors()
    assert newest_valid(Path(tiny["output_dir"]) / "checkpoints").step == 4 * STEP


#: What goes to the disk is not what the digest was made of: memory of the host failed in between.
IN_THE_COPY = """
from forgetting_transformer.training import checkpoint
sound = checkpoint.share
def share(tensors, rank, world_size):
    if rank == 0:
        name = "model.model.layers.1.mixer.q_proj.weight"
        name = name if name in tensors else next(n for n in sorted(tensors) if "layers.1" in n and n.endswith("weight"))
        tensors = dict(tensors)
        tensors[name] = wrong = tensors[name].detach().clone()
        local = wrong.to_local() if hasattr(wrong, "to_local") else wrong
        local.view(-1)[1] += 1
        print(name)
    return sound(tensors, rank, world_size)
checkpoint.share = share
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world_size", "elsewhere"),
    [
        ("fsdp", 2, ("auto", 1)),
        pytest.param(
            "auto",
            1,
            ("fsdp", 2),
            marks=pytest.mark.rare(
                "tests/training/test_corruption.py::test_a_checkpoint_that_is_not_what_training_held_is_refused"
            ),
        ),
    ],
)
def test_a_checkpoint_that_is_not_what_training_held_is_refused(tiny, tmp_path, strategy, world_size, elsewhere):
    tiny = changed(tiny, strategy__name=strategy, skip_eval=True)
    train(changed(tiny, train__max_tokens=4 * STEP), world_size)
    job = Job(changed(tiny, train__max_tokens=8 * STEP), world_size, patch=IN_THE_COPY)
    assert job.wait() == [0] * world_size, job.errors()
    said = refused(changed(tiny, strategy__name=elsewhere[0]), elsewhere[1])
    assert "layers.1" in said and f"is not what training held after {8 * STEP:,} tokens" in said
    assert f"the last good checkpoint before it is at {4 * STEP:,} tokens" in said
    checkpoint = newest_valid(Path(tiny["output_dir"]) / "checkpoints")
    assert checkpoint.step == 8 * STEP, "no file is damaged"
    with pytest.raises(CheckpointError, match=r"layers\.1.* is not what training held"):
        build_from_checkpoint(checkpoint, checkpoint.trainer_state())
    # What the message says to do.
    checkpoint.path.rename(tmp_path / "away")
    train(changed(tiny, strategy__name=elsewhere[0], train__max_tokens=8 * STEP), elsewhere[1])
    assert checkpoint_tensors(tiny["output_dir"], 8 * STEP)


@pytest.mark.slow
def test_a_sound_checkpoint_is_taken_on_every_world_size(tiny):
    """Digests of shards, of copies and of the whole are one: written by one strategy, compared by another."""
    for strategy, world_size, steps in (("fsdp", 2, 1), ("auto", 1, 2), ("ddp", 2, 3), ("fsdp", 1, 4)):
        train(changed(tiny, strategy__name=strategy, train__max_tokens=steps * STEP, skip_eval=True), world_size)
    state = newest_valid(Path(tiny["output_dir"]) / "checkpoints").trainer_state()
    tensors = checkpoint_tensors(tiny["output_dir"], 4 * STEP)
    assert len(state["digests"]) == len([name for name in tensors if not name.startswith("windows.")]) > 50
    assert all(int(state["digests"][name], 16) == by_definition(tensors[name]) for name in state["digests"])
