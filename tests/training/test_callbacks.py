"""Callbacks: when their hooks are called, what the trainer sees to around them, and what a checkpoint keeps of them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forgetting_transformer.training.callbacks.base import Callback, Callbacks
from forgetting_transformer.training.callbacks.profile import Profile
from forgetting_transformer.training.errors import TrainingError
from tests.training.conftest import STEP, Job, assert_same_run, changed, dies, lines, refused, status, train

pytestmark = pytest.mark.slow

#: As a plug-in registers it: writes down its calls, counts steps, and keeps the count in checkpoints.
DIARY = """
import json
import torch
from forgetting_transformer import plugins
from forgetting_transformer.training.callbacks import Callback

@plugins.CALLBACKS.register("diary", free=[plugins.ALL])
class Diary(Callback):
    kind = "diary"
    evaluates = True
    interval = 512

    def __init__(self):
        self.steps, self.calls = torch.zeros((), dtype=torch.bfloat16), []

    def on_start(self, trainer):
        self.calls.append("start")

    def on_step(self, trainer, step):
        self.steps += 1

    def on_interval(self, trainer, kind):
        self.calls.append(kind)
        if kind == "eval":
            trainer.report("diary", {"steps": int(self.steps)})

    def on_save(self, trainer, saved):
        self.calls.append(f"saved {saved.step}")

    def on_end(self, trainer):
        (trainer.directory.root / "diary.json").write_text(json.dumps([*self.calls, "end"]))

    def state(self):
        return {"steps": self.steps.expand(2, 3).t()}  # neither of NumPy's types nor contiguous

    def load(self, state):
        self.steps.copy_(state["steps"][0, 0])
"""
#: Leaves nothing as it found it.
VANDAL = """
import random
import numpy as np
import torch
from forgetting_transformer import plugins
from forgetting_transformer.training.callbacks import Callback

@plugins.CALLBACKS.register("vandal", free=[plugins.ALL])
class Vandal(Callback):
    all_ranks = True
    evaluates = True
    kind = "vandal"
    interval = 128

    def on_start(self, trainer):
        before = random.random(), np.random.rand(), torch.rand(()).item()
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        trainer.model.eval()
        trainer.model.module.decoder.layers[0].train()
        return before

    def on_step(self, trainer, step):
        assert trainer.model.training and trainer.model.module.decoder.layers[1].training
        self.drawn = self.on_start(trainer)

    def on_interval(self, trainer, kind):
        assert self.on_start(trainer) == self.drawn, "random numbers are those that on_step found"
"""


def with_callbacks(config: dict, *names: str, **changes) -> dict:
    return changed(config, callbacks=dict.fromkeys(names, None), **changes)


def test_hooks_are_called_in_the_order_that_is_written_down(tiny):
    tiny = with_callbacks(tiny, "diary", train__max_tokens=6 * STEP, checkpoint_background=False)
    train(tiny, patch=DIARY)
    calls = json.loads((Path(tiny["output_dir"]) / "diary.json").read_text())
    assert calls == [
        *("start", "log", "log", "log"),
        # Step 4: its line, its evaluation (the interval is 512 tokens), its checkpoint.
        *("log", "eval", "save", f"saved {4 * STEP}"),
        "log",
        # The last step: all of them.
        *("log", "train_eval", "eval", "save", f"saved {6 * STEP}", "end"),
    ]


def test_state_comes_back_and_lines_past_the_checkpoint_are_cut(tiny):
    tiny = with_callbacks(tiny, "diary", checkpoint_background=False)
    assert Job(tiny, patch=DIARY + dies(11)).wait() == [9]
    folder = Path(tiny["output_dir"])
    with (folder / "metrics/jsonlines/diary.jsonl").open("a") as file:
        file.write(json.dumps({"step": 11 * STEP, "diary/steps": 11}) + "\n")  # of the time that is lost
    # Without the callback its lines are cut as well: it may come back.
    train(changed(tiny, callbacks={}, train__max_tokens=12 * STEP), patch=DIARY)
    assert [entry["step"] for entry in lines(tiny["output_dir"], "diary")] == [4 * STEP, 8 * STEP]
    train(tiny, patch=DIARY)
    # The start without it kept nothing of it, so it counts from there, and does what was due at step 12 first.
    found = {entry["step"] // STEP: entry["diary/steps"] for entry in lines(tiny["output_dir"], "diary")}
    assert found == {4: 4, 8: 8, 12: 0, 16: 4, 20: 8}


def test_random_numbers_and_train_mode_are_left_as_found(tiny, finished):
    tiny = changed(tiny, train__max_tokens=12 * STEP)
    train(with_callbacks(tiny, "vandal"), patch=VANDAL)
    assert_same_run(finished(tiny), tiny["output_dir"])


def test_long_work_of_one_rank_alone_is_refused_with_the_reason(tiny):
    patch = DIARY.replace('trainer.report("diary", {"steps": int(self.steps)})', "trainer.should_stop()")
    said = refused(with_callbacks(tiny, "diary"), 2, patch)
    assert "the callback 'diary' calls trainer.should_stop: it needs all_ranks = True" in said
    assert "all_ranks = True" in status(tiny)["reason"]


@pytest.mark.quick
@pytest.mark.parametrize(
    "state", [{"count": 3}, None, {"count": torch.ones(2).to_sparse()}, {"count": torch.ones(2).to(torch.complex128)}]
)
def test_a_state_that_no_checkpoint_holds_is_refused_with_its_name(state):
    class Odd(Callback):
        name = "odd"

        def state(self):
            return state

    callbacks = Callbacks(SimpleNamespace(fabric=SimpleNamespace(is_global_zero=True)), [], [Odd()])
    with pytest.raises(TrainingError, match=re.escape(f"callbacks.odd: state() gave {state}; it must give a dic")):
        callbacks.on_start()  # not with the first checkpoint, hours later


@pytest.mark.quick
def test_a_hook_that_fails_is_named():
    class Fails(Callback):
        name = "fails"

        def on_save(self, trainer, saved):
            raise ZeroDivisionError("boom")

    cpu = SimpleNamespace(is_global_zero=True, device=torch.device("cpu"))
    good = "the last good checkpoint is at 512 tokens"
    trainer = SimpleNamespace(fabric=cpu, model=torch.nn.Identity(), last_good_checkpoint=good)
    with pytest.raises(ZeroDivisionError) as error:
        Callbacks(trainer, [], [Fails()]).call_all("on_save", None)
    assert error.value.__notes__ == ["raised by on_save of callbacks.fails; the last good checkpoint is at 512 tokens"]


def test_a_trace_that_cannot_be_written_costs_a_warning_and_not_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("where the folder of traces would be")
    trainer = SimpleNamespace(
        counters=SimpleNamespace(token_count=0),
        fabric=SimpleNamespace(global_rank=0),
        directory=SimpleNamespace(traces=tmp_path / "file/traces"),
    )
    profile = Profile(1, 1)
    profile.on_start(trainer)
    for _ in range(2):
        profile.on_step(trainer, None)
    profile.on_end(trainer)
    assert "train.profile_steps: no trace" in caplog.text and "file/traces" in caplog.text
