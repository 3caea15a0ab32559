"""strategy=hsdp: sharded within a node, replicated between nodes; four processes as two nodes of two."""

import pytest

from forgetting_transformer.training import ConfigError, parse
from forgetting_transformer.training.parallel.launch import _shard_size
from tests.training.conftest import (
    STEP,
    Job,
    blocks,
    changed,
    checkpoint_tensors,
    lines,
    losses,
    status,
    train,
)
from tests.training.test_corruption import FLIP, MOMENT

pytestmark = pytest.mark.slow


@pytest.fixture
def hsdp(tiny) -> dict:
    return changed(tiny, strategy__name="hsdp", train__grad_acc_tokens=32, train__max_tokens=12 * STEP)


def test_two_nodes_train_like_one_process(hsdp, tiny, finished):
    """Losses, the norms of all parameters and gradients, the norm that is clipped, evaluations, weights, moments."""
    ours, theirs = finished(hsdp, 4, nodes=2), finished(changed(tiny, train__max_tokens=12 * STEP))
    assert blocks(ours)[0]["precision"] == (
        "32-true, strategy hsdp (2 copies of the model, each sharded over 2 processes)"
    )
    assert max(abs(losses(ours)[step] - loss) for step, loss in losses(theirs).items()) < 1e-6
    for kind, tolerance in (("train", 1e-4), ("norm", 1e-4), ("val", 1e-5)):
        mine, others = lines(ours, kind), lines(theirs, kind)
        assert len(mine) == len(others) > 0
        for line, other in zip(mine, others, strict=True):
            numbers = {k: v for k, v in other.items() if isinstance(v, float) and "time" not in k and "second" not in k}
            assert {key: line[key] for key in numbers} == pytest.approx(numbers, rel=tolerance, abs=1e-6), kind
    ours, theirs = checkpoint_tensors(ours, 12 * STEP), checkpoint_tensors(theirs, 12 * STEP)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() <= 1e-3 * tensor.norm() + 1e-7, name


@pytest.mark.rare("tests/training/test_elastic.py::test_one_two_four_and_one_process_with_other_micro_batches")
def test_two_nodes_of_two_one_of_four_and_back(hsdp, tiny, tmp_path, finished):
    moved = changed(hsdp, output_dir=str(tmp_path / "moved"), skip_eval=True)
    parts = [(5, "hsdp", 4, 2), (9, "hsdp", 4, 1), (12, "fsdp", 4, 1), (15, "hsdp", 4, 2), (18, "ddp", 4, 2)]
    for steps, strategy, world_size, nodes in [*parts, (20, "hsdp", 1, 1)]:
        part = changed(moved, strategy__name=strategy, train__max_tokens=steps * STEP)
        train(part, world_size, nodes=nodes)
    ours, theirs = losses(moved["output_dir"]), losses(finished(tiny))
    assert len(ours) == 20 and max(abs(ours[step] - theirs[step]) for step in theirs) < 1e-6
    said = [block["precision"].partition("strategy ")[2] for block in blocks(moved["output_dir"])]
    assert said[1] == "fsdp (one copy of the model: nothing to replicate)"
    assert said[2] == "fsdp" and said[3].startswith("hsdp (2 copies") and said[4] == "ddp"
    assert said[5] == "none (one process: nothing to shard)"


def test_a_run_that_was_killed_on_two_nodes_is_bitwise_one_that_was_not(hsdp, continued):
    continued(hsdp, 4, nodes=2)


def test_nodes_of_different_sizes_are_refused(hsdp, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"^strategy=hsdp: this node has 3 of 4 processes, .* set strategy.shard_size"
    ):
        _shard_size(parse(hsdp), 4)
    assert _shard_size(parse(changed(hsdp, strategy__shard_size=2)), 4) == 2


def test_a_copy_that_differs_stops_the_run_and_names_its_rank(hsdp):
    hsdp = changed(hsdp, strategy__compare_steps=2)
    flip = FLIP.replace("flat = tensor", "flat = tensor.to_local()").format(batch=6, rank=3, tensor=MOMENT)
    job = Job(hsdp, 4, patch=flip, nodes=2)
    assert job.wait() == [1] * 4, "one process differs"
    # With two copies nobody knows which of both is wrong.
    assert status(hsdp)["status"] == "failed" and "ranks 1, 3 differ in" in status(hsdp)["reason"], status(hsdp)
