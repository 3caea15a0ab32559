"""A step with a loss or gradient that is not finite leaves no trace but a line that says so."""

import math

import pytest
import torch

from forgetting_transformer.training.faults.step_guard import StepGuard
from tests.training.conftest import (
    HEARD,
    STEP,
    STOP,
    assert_same_tensors,
    changed,
    checkpoint_tensors,
    in_step,
    lines,
    losses,
    rank_log,
    refused,
    status,
    train,
)

pytestmark = pytest.mark.slow

#: The gradient of one rank is filled with the given value in the given steps.
POISON = """
import torch
from forgetting_transformer.training import trainer
unpoisoned = trainer.Trainer.step
def step(self, batch):
    first = next(p for p in self.model.module.parameters())
    hook = None
    value = {values}.get(self.counters.batch_count)
    if value is not None and self.fabric.global_rank == {rank}:
        hook = first.register_hook(lambda gradient: torch.full_like(gradient, float(value)))
    result = unpoisoned(self, batch)
    if hook is not None:
        hook.remove()
    return result
trainer.Trainer.step = step
"""


def bad_steps(config: dict) -> list[dict]:
    return lines(config["output_dir"], "bad_step")


def single(config: dict) -> dict:
    """A configuration in which hooks on parameters act under every strategy: one micro-batch, one piece."""
    return changed(config, train__grad_acc_tokens=128)


def test_a_bad_gradient_on_one_rank_skips_the_update_on_all(tiny):
    """Weights and moments afterwards are those of a run whose learning rate and data skip the step."""
    tiny = single(changed(tiny, checkpoint_interval=STEP, checkpoint_keep_last=30, train__max_tokens=12 * STEP))
    train(tiny, 2, patch=POISON.format(values={8: "inf"}, rank=1))
    assert_same_tensors(tiny["output_dir"], tiny["output_dir"], 8 * STEP, 9 * STEP)
    later = checkpoint_tensors(tiny["output_dir"], 12 * STEP)
    assert all(torch.isfinite(tensor).all() for tensor in later.values())
    steps = {name: tensor.item() for name, tensor in later.items() if name.endswith(".step")}
    assert set(steps.values()) == {11.0}, "AdamW's bias correction counts the updates that were made"
    (line,) = bad_steps(tiny)
    assert line["step"] == 9 * STEP and line["bad_step/batch"] == 8 and line["bad_step/in_a_row"] == 1
    assert not math.isfinite(line["bad_step/global_grad_norm"])
    assert line["bad_step/sequences"] == [f"document {n}, tokens 0–31" for n in range(32, 36)]
    assert min(losses(tiny["output_dir"]).values()) < 4.0, "it goes on learning"


def test_a_bad_loss_names_its_document_and_leaves_the_averages_alone(tiny):
    patch = in_step(
        """
def poison(module, arguments, output):
    output.loss = output.loss.clone()
    output.loss[1, 5] = float("nan")
    hook.remove()
    return output
hook = self.model.module.register_forward_hook(poison)""",
        2,
    )
    train(single(tiny), patch=patch)
    (line,) = bad_steps(tiny)
    assert line["bad_step/sequences_not_finite"] == [f"document {2 * 4 + 1}, tokens 0–31"]
    first = lines(tiny["output_dir"], "train_eval")[0]
    assert first["train_eval/window_seq_count"] == 5 * 4, "of six steps"
    logged = losses(tiny["output_dir"])
    counted = [logged[n * STEP] for n in (1, 2, 4, 5, 6)]
    assert first["train_eval/loss_avg_len_32"] == pytest.approx(sum(counted) / 5)


def test_after_so_many_in_a_row_the_run_stops_saved_and_says_where_to_look(tiny):
    tiny = single(changed(tiny, train__max_bad_steps=3))
    said = refused(tiny, patch=POISON.format(values=dict.fromkeys(range(9, 20), "nan"), rank=0))
    assert "3 updates in a row were left out" in said and "bad_step.jsonl" in said
    found = status(tiny)
    assert (found["status"], found["step"]) == ("failed", 12 * STEP) and "updates in a row" in found["reason"]
    tensors = checkpoint_tensors(tiny["output_dir"], 12 * STEP)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert [line["bad_step/in_a_row"] for line in bad_steps(tiny)] == [1, 2, 3]


def test_a_run_that_skipped_steps_resumes_bitwise(tiny, tmp_path):
    patch = POISON.format(values={2: "nan", 4: "nan", 5: "nan", 6: "nan"}, rank=0)
    tiny = single(changed(tiny, train__max_tokens=9 * STEP, skip_eval=True))
    straight = changed(tiny, output_dir=str(tmp_path / "straight"))
    stopped = patch + in_step(STOP + HEARD, 5)  # two updates in a row left out by then
    for config, faults in ((straight, patch), (tiny, stopped), (tiny, patch)):
        train(config, patch=faults)
    for config in (straight, tiny):
        left_out = [(line["bad_step/batch"], line["bad_step/in_a_row"]) for line in bad_steps(config)]
        assert left_out == [(2, 1), (4, 1), (5, 2), (6, 3)]
        assert "4 of 9 updates were left out" in rank_log(config, 0)
    assert_same_tensors(tiny["output_dir"], straight["output_dir"], 9 * STEP)
    assert losses(tiny["output_dir"]) == losses(straight["output_dir"])


@pytest.mark.quick
def test_bad_steps_with_a_good_one_between_them_are_not_in_a_row():
    guard = StepGuard(torch.device("cpu"))
    for batch, norm in enumerate([math.inf, 1.0, math.nan, math.nan]):
        guard.judge(batch, torch.ones(2), torch.tensor(norm))
    guard.poll(wait=True)
    assert [(bad.batch, bad.in_a_row) for bad in guard.take_reports()] == [(0, 1), (2, 1), (3, 2)]
    assert guard.most_in_a_row == 2 and guard.state()["guard_skipped"] == 3
