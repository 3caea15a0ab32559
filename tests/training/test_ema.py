"""The moving average of the weights that the callback ema keeps."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forgetting_transformer.training.checkpoint.folder import CheckpointError
from forgetting_transformer.training.export import MARK, export
from forgetting_transformer.training.export import contents as export_contents
from tests.training.conftest import (
    STEP,
    Job,
    changed,
    checkpoint_tensors,
    lines,
    train,
)
from tests.training.test_export import held_out_loss

pytestmark = pytest.mark.slow
KEPT = [8, 16, 20]  # steps whose checkpoints a run of the tiny configuration keeps


def with_ema(config: dict, **keys) -> dict:
    return changed(config, callbacks={"ema": {"decay": 0.7, **keys}})


def ema_of(output_dir: str, step: int) -> dict[str, torch.Tensor]:
    tensors = checkpoint_tensors(output_dir, step * STEP)
    return {name: tensor for name, tensor in tensors.items() if name.startswith("callbacks.ema.")}


#: Writes down the weights after every step.
WEIGHTS = """
import torch
from forgetting_transformer.training import trainer
original = trainer.Trainer.step
def step(self, batch):
    found = original(self, batch)
    weights = {name: p.detach().clone() for name, p in self.model.module.named_parameters()}
    torch.save(weights, f"{self.directory.root}.weights-{self.counters.batch_count + 1}.pt")
    return found
trainer.Trainer.step = step
"""


def test_the_average_is_what_its_formula_says_and_the_weights_are_what_they_are_without(tiny, finished):
    config = with_ema(tiny)
    job = Job(config, patch=WEIGHTS)
    assert job.wait() == [0], job.errors()
    assert_weights_alone(finished(tiny), config["output_dir"])
    weights = {n: torch.load(f"{config['output_dir']}.weights-{n}.pt") for n in range(1, 21)}
    average = None
    for steps, n in enumerate(range(1, 21)):
        decay = min(0.7, (1 + steps) / (10 + steps))
        average = {
            name: w.double() if average is None else decay * average[name] + (1 - decay) * w.double()
            for name, w in weights[n].items()
        }
        if n in KEPT:
            for name, tensor in ema_of(config["output_dir"], n).items():
                torch.testing.assert_close(
                    tensor.double(), average[name.removeprefix("callbacks.ema.")], rtol=1e-5, atol=1e-7
                )


def assert_weights_alone(plain: str, other: str) -> None:
    """The run with a callback has, besides what it keeps, bitwise what the run without has."""
    for step in KEPT:
        ours, theirs = checkpoint_tensors(plain, step * STEP), checkpoint_tensors(other, step * STEP)
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
        assert len(theirs) > len(ours)
    keys = ("train/loss", "train/global_grad_norm")
    for x, y in zip(lines(plain, "train"), lines(other, "train"), strict=True):
        assert all(x.get(key) == y.get(key) for key in keys)


def test_shards_of_it_are_kept_and_a_killed_run_ends_bitwise_the_same(tiny, tmp_path, finished, continued, tokenizer):
    straight = continued(with_ema(changed(tiny, strategy__name="fsdp")), 2)
    assert_weights_alone(finished(changed(tiny, strategy__name="fsdp"), 2), straight)
    assert len(ema_of(straight, 20)) > 20
    assert "held-out loss of the average " in (Path(straight) / "logs/rank-0.log").read_text()
    assert [e["val_ema/loss"] for e in lines(straight, "val_ema")] == [
        e["val_ema/loss"] for e in lines(tiny["output_dir"], "val_ema")
    ]
    # What an export of it predicts is what the run's own evaluation of it says.
    export(Path(straight), tmp_path / "ema", tokenizer=tokenizer, weights="ema")
    stored = load_file(tmp_path / "ema/model.safetensors")
    for name, tensor in ema_of(straight, 20).items():
        assert torch.equal(stored[name.removeprefix("callbacks.ema.")], tensor)
    assert held_out_loss(tmp_path / "ema", tiny) == pytest.approx(
        lines(straight, "val_ema")[-1]["val_ema/loss"], abs=1e-6
    )
    assert lines(straight, "val_ema")[-1]["val_ema/loss"] != lines(straight, "val")[-1]["val/loss"]
    assert (
        json.loads((tmp_path / "ema" / MARK).read_text())["weights"]
        == "the moving average ema of the weights in training"
    )


def test_it_may_be_added_and_left_out_and_the_log_says_so(tiny, tmp_path, interrupted, tokenizer):
    tiny = changed(tiny, skip_eval=True)  # then it needs no held-out documents
    interrupted(tiny, 8)
    with pytest.raises(CheckpointError, match=r"--weights=ema: .* has no such weights; .* callbacks=\[ema\]"):
        export(Path(tiny["output_dir"]), tmp_path / "ema", tokenizer=tokenizer, weights="ema")
    train(with_ema(changed(tiny, train__max_tokens=12 * STEP)))
    assert ema_of(tiny["output_dir"], 12)
    train(tiny)
    log = (Path(tiny["output_dir"]) / "logs/rank-0.log").read_text()
    assert "has no state of callbacks.ema, which begins here" in log
    assert "has the state of callbacks.ema, which this start does not choose: it ends here" in log
    assert not ema_of(tiny["output_dir"], 20)


def test_an_average_that_is_not_finite_is_not_exported(tiny, tmp_path, finished, monkeypatch):
    read = export_contents.read_weights
    wrong = {"lm_head.weight": torch.full((64, 32), torch.inf)}
    monkeypatch.setattr(export_contents, "read_weights", lambda *args, **kwargs: read(*args, **kwargs) | wrong)
    with pytest.raises(CheckpointError, match=r"/step-\d+, ema: lm_head.weight holds 2,048 of 2,048 values"):
        export(Path(finished(with_ema(tiny))), tmp_path / "hf", weights="ema")
