"""Resume is exact: a run that was stopped and continued is the run that was not."""

import json
import random
import time
from pathlib import Path

import pytest

from tests.training.conftest import STEP, Job, assert_same_run, before, changed, lines, losses, refused, train
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SHORTER = {"train__max_tokens": 12 * STEP}
#: Name -> what is changed of the tiny configuration, and the number of processes.
RUNS = {
    "one process": ({}, 1),
    "ddp": (SHORTER | {"strategy__name": "ddp"}, 2),
    "fsdp": ({"strategy__name": "fsdp"}, 2),
    # Evaluations leave weights gathered.
    "weights that stay gathered and checkpointed activations": (
        SHORTER
        | {"strategy__name": "fsdp", "strategy__keep_gathered": True, "fabric__precision": "bf16-mixed"}
        | {"train__gradient_checkpointing": True, "train__grad_acc_tokens": 32, "eval_interval": 3 * STEP},
        2,
    ),
    "sequences that ranks share": (
        SHORTER | {"strategy__name": "ddp", "strategy__context": 2, "model__config__num_heads": 4},
        2,
    ),
    "muon": ({"optimizer__name": "muon"}, 1),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.quick] * (n == "one process")) for n in RUNS])
def test_straight_run_equals_interrupted_run_bitwise(tiny, continued, name):
    changes, world_size = RUNS[name]
    straight = continued(changed(tiny, **changes), world_size)
    manifest = Path(straight) / f"checkpoints/step-{8 * STEP:015d}/manifest.json"
    assert json.loads(manifest.read_text())["permanent"]


def test_strategies_agree_from_the_first_step(tiny, finished):
    one = losses(finished(tiny))
    for name in ("ddp", "fsdp"):
        changes, world_size = RUNS[name]
        ours = losses(finished(changed(tiny, **changes), world_size))
        assert len(ours) >= 12 and max(abs(ours[step] - one[step]) for step in ours) < 1e-6


KILLED = pytest.mark.rare("tests/training/test_resume.py::test_killed_at_random_moments_it_ends_in_the_same_weights")


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("auto", 1), pytest.param("ddp", 2, marks=KILLED), pytest.param("fsdp", 2, marks=KILLED)],
)
def test_killed_at_random_moments_it_ends_in_the_same_weights(request, tiny, finished, strategy, world_size):
    """SIGKILL again and again, also while checkpoints are being written: one is due at every step."""
    kills = 50 if request.config.getoption("--all") else 2
    steps = max(20, 4 * kills)
    tiny = changed(tiny, strategy__name=strategy)
    if steps != 20:
        budget = {"train__max_tokens": steps * STEP, "schedule__total_tokens": steps * STEP}
        tiny = changed(tiny, **budget, datamodule__repeat=True)
    straight, config = finished(tiny, world_size), changed(tiny, checkpoint_interval=STEP)
    # A kill that comes late, on a busy machine, still comes before the last step.
    unhurried = """
time.sleep(0.1)
while self.counters.batch_count > {last}:
    time.sleep(0.01)"""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    log = Path(config["output_dir"]) / "metrics/jsonlines/train.jsonl"
    for _ in range(kills):
        done = log.read_bytes().count(b"\n") if log.exists() else 0
        # A few steps further than the last life, at whatever that process happens to be doing then.
        goal = min(done + generator.randint(0, 3), steps - 3)
        patch = before("training.trainer.Trainer", "step", unhurried.format(last=min(goal + 3, steps - 2)))
        job = Job(config, world_size, patch=patch)
        wait_until(
            lambda: log.exists() and log.read_bytes().count(b"\n") > goal,  # noqa: B023
            lambda: all(p.is_alive() for p in job.processes),  # noqa: B023
            job.errors,
        )
        time.sleep(generator.uniform(0, 0.1))
        job.kill()
    assert len(losses(config["output_dir"])) < steps, "the kills came too late to prove anything"
    assert Job(config, world_size).wait() == [0] * world_size
    assert_same_run(straight, config["output_dir"])


def test_a_finished_run_started_again_does_nothing(tiny, interrupted):
    interrupted(tiny, 20)
    before = {p: p.stat().st_mtime_ns for p in Path(tiny["output_dir"]).glob("checkpoints/*/*")}
    logged = {kind: lines(tiny["output_dir"], kind) for kind in ("train", "val", "train_eval")}
    train(tiny)
    assert before == {p: p.stat().st_mtime_ns for p in Path(tiny["output_dir"]).glob("checkpoints/*/*")}
    assert logged == {kind: lines(tiny["output_dir"], kind) for kind in logged}


def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tiny, finished, interrupted):
    interrupted(tiny, 12)
    newest = Path(tiny["output_dir"]) / f"checkpoints/step-{12 * STEP:015d}"
    shard = next((newest / "state").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    train(tiny)
    log = (Path(tiny["output_dir"]) / "logs/rank-0.log").read_text()
    assert f"checkpoint {newest}: the contents of state/{shard.name} do not match its checksum" in log
    assert f"continuing from {newest.with_name(f'step-{8 * STEP:015d}')}" in log
    assert [*newest.parent.glob(f"damaged-{newest.name}-*")], "what a copy may mend is not deleted"
    assert all((path / "manifest.json").is_file() for path in newest.parent.glob("step-*"))
    assert_same_run(finished(tiny), tiny["output_dir"])


def test_a_damaged_older_checkpoint_does_not_stop_training(tiny, interrupted):
    interrupted(tiny, 8)
    (Path(tiny["output_dir"]) / f"checkpoints/step-{4 * STEP:015d}/manifest.json").write_text("")
    train(tiny)
    assert "could not tidy up" in (Path(tiny["output_dir"]) / "logs/rank-0.log").read_text()


def test_a_change_that_would_alter_the_run_is_refused_by_name(tiny, interrupted):
    interrupted(tiny, 4)
    for change, message in (
        ({"optimizer__lr": 2e-2}, "optimizer.lr: 0.01 -> 0.02"),
        ({"model__config__num_heads": 4}, "model.config.num_heads: 2 -> 4"),
        ({"datamodule__train_batch_size": 8}, "datamodule.train_batch_size: 4 -> 8"),
        ({"seed": 1}, "seed: 0 -> 1"),
    ):
        assert message in refused(changed(tiny, **change))
    train(changed(tiny, train__max_tokens=5 * STEP))  # undone, it continues


def test_a_fork_continues_another_run_with_other_settings(tiny, finished):
    fork = changed(tiny, fork_dir=finished(tiny), fork_step=8 * STEP, optimizer__lr=5e-3)
    train(fork)
    ours, source = losses(fork["output_dir"]), losses(finished(tiny))
    assert min(ours) == 9 * STEP, "counters continue"
    assert ours[9 * STEP] == source[9 * STEP], "the first loss comes from the source's weights"
    assert ours[10 * STEP] != source[10 * STEP], "then its own learning rate acts"
    assert lines(fork["output_dir"], "model_info") and lines(fork["output_dir"], "train_data_info")
    train(fork)  # started again, it continues itself and does not fork again
    assert "fork_dir, fork_step:" in refused(changed(fork, fork_step=16 * STEP))


def test_a_fork_of_nothing_or_of_another_shape_is_refused(tiny, finished):
    source = finished(tiny)
    fork = changed(tiny, fork_dir=source, fork_step=7)
    assert f"fork_step=7: no valid checkpoint of that many tokens in {source}" in refused(fork)
    nowhere = changed(tiny, fork_dir=f"{source}-2", fork_step=7)
    assert f"{source}-2/checkpoints, which holds none" in refused(nowhere)
    official = Path(f"{source}-3/checkpoints/step-000000000000007.pt")
    official.parent.mkdir(parents=True)
    official.touch()
    assert "scripts/import_checkpoint.py and fork that" in refused(changed(fork, fork_dir=f"{source}-3"))
    assert "nothing would be trained" in refused(changed(tiny, fork_dir=source, fork_step=20 * STEP))
    fork = changed(tiny, fork_dir=source, fork_step=8 * STEP, datamodule__train_batch_size=8)
    assert "datamodule.train_batch_size: 4 -> 8" in refused(fork)
