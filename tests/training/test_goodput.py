"""Where the time went, added up over starts that lost some of their work."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from forgetting_transformer.training.callbacks.goodput import Goodput, describe, shares
from forgetting_transformer.training.clock import CATEGORIES, Clock
from tests.training.conftest import STEP, Job, before, changed, dies, lines, train

pytestmark = pytest.mark.slow


def start(from_step: int, step: int, seconds: float, saved: tuple[int, float] | None = None) -> dict:
    return {
        "from_step": from_step,
        "step": step,
        "seconds": {"steps": seconds, "start": 10.0},
        "saved": [saved[0], {"steps": saved[1], "start": 10.0}] if saved else [from_step, {}],
    }


def test_what_came_after_the_checkpoint_a_later_start_used_was_lost():
    starts = [
        start(0, 100, 100.0, (80, 80.0)),  # died at 100: 20 s lost
        start(80, 90, 10.0),  # died before it saved: all 20 s lost
        start(80, 200, 120.0, (200, 120.0)),
    ]
    found = shares(starts)
    assert found["hours"] * 3600 == pytest.approx(110 + 20 + 130)
    assert found["lost"] * 260 == pytest.approx(20 + 20)
    assert found["steps"] * 260 == pytest.approx(80 + 120) and found["start"] * 260 == pytest.approx(20)
    assert sum(found[c] for c in CATEGORIES) + found["lost"] == pytest.approx(1)
    assert "lost 15.4%" in describe(shares(starts))
    # A damaged newest checkpoint: the third start goes back to one before it, and the first one's work is lost.
    starts[2]["from_step"] = 40
    assert shares(starts)["lost"] * 260 == pytest.approx(110 + 20)


def test_a_start_that_ends_while_it_saves_has_lost_only_what_came_after_the_checkpoint_before(tmp_path):
    trainer = SimpleNamespace(counters=SimpleNamespace(token_count=0), stages=Clock("a"), report=lambda *_, **__: None)
    trainer.clock, trainer.directory = Clock("start"), SimpleNamespace(goodput=tmp_path / "goodput.json")
    goodput = Goodput()
    goodput.on_start(trainer)
    for step, is_written in ((100, True), (200, False)):
        trainer.counters.token_count = step
        goodput.on_interval(trainer, "save")
        if is_written:
            goodput.on_save(trainer, SimpleNamespace(step=step, copy_seconds=1.0, write_seconds=2.0))
    goodput.on_interval(trainer, "log")
    assert json.loads((tmp_path / "goodput.json").read_text())["starts"][0]["saved"][0] == 100


def test_a_run_accounts_for_all_its_starts(tiny):
    assert Job(changed(tiny, checkpoint_background=False), patch=dies(11)).wait() == [9]
    train(tiny)
    ledger = json.loads((Path(tiny["output_dir"]) / "goodput.json").read_text())["starts"]
    assert [entry["from_step"] // STEP for entry in ledger] == [0, 8]
    last = lines(tiny["output_dir"], "goodput")[-1]
    parts = {key.removeprefix("goodput/"): value for key, value in last.items() if key not in ("step", "goodput/hours")}
    assert sum(parts.values()) == pytest.approx(1) and parts["lost"] > 0
    for category in ("steps", "first step", "data", "evaluation", "checkpoint", "start"):
        assert parts[category] > 0, category
    log = (Path(tiny["output_dir"]) / "logs/rank-0.log").read_text()
    assert "of wall time: steps" in log and "lost" in log


def test_the_time_of_a_run_has_the_evaluation_before_the_checkpoint(tiny):
    config = changed(tiny, train__max_tokens=8 * STEP, eval_interval=8 * STEP, checkpoint_interval=8 * STEP)
    Job(config, patch=before("training.trainer.Trainer", "evaluate", "time.sleep(1)")).wait()
    state = Path(tiny["output_dir"]) / f"checkpoints/step-{8 * STEP:015d}/trainer.json"
    counters = json.loads(state.read_text())
    assert counters["total_time"] - counters["update_time"] >= 1
