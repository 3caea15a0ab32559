"""strategy.context: ranks that share sequences train the run that one process trains."""

from pathlib import Path

import numpy as np
import pytest

from tests.training.conftest import STEP, changed, lines, losses, rank_log, refused, train, untimed

pytestmark = pytest.mark.slow


@pytest.fixture
def shared(tiny) -> dict:
    return changed(tiny, model__config__num_heads=4, train__max_tokens=8 * STEP, eval_interval=4 * STEP)


def assert_same_losses(a: str, b: str) -> None:
    """To 1e-6: training, held-out, and at every position; the same counts and counters."""
    ours, theirs = losses(a), losses(b)
    assert ours.keys() == theirs.keys() and len(ours) == 8
    assert max(abs(ours[s] - theirs[s]) for s in ours) < 1e-6
    for kind in ("train_eval", "val"):
        for x, y in zip(lines(a, kind), lines(b, kind), strict=True):
            want = {key: y[key] for key in untimed(y)}
            assert {key: x[key] for key in untimed(x)} == pytest.approx(want, abs=1e-5, rel=1e-5)
    assert [lines(run, "train_data_info")[0]["train_data_info/global_batch_size"] for run in (a, b)] == [4, 4]
    files = sorted(p.relative_to(a) for p in Path(a).glob("metrics/npz/*/*.npz"))
    assert len(files) >= 4
    for file in files:
        x, y = np.load(Path(a) / file), np.load(Path(b) / file)
        (key,) = [key for key in x.files if key.endswith("loss_per_token")]
        assert x[key].size == 32
        np.testing.assert_allclose(x[key], y[key], rtol=0, atol=1e-5)


def test_the_run_is_that_of_one_process(shared, finished):
    """On four, two to a sequence."""
    together = finished(changed(shared, strategy={"name": "fsdp", "context": 2}), 4)
    assert_same_losses(finished(shared), together)
    (block,) = rank_log({"output_dir": together}, 0).split("about to train")[1:]
    assert "each group of 2 processes 2 sequences" in block


def test_on_a_corpus_of_packed_documents_too(shared, finished):
    packed = changed(shared, datamodule__name="packed", train__grad_acc_tokens=128)
    assert_same_losses(finished(packed), finished(changed(packed, strategy__context=2), 2))


def test_continued_by_other_numbers_of_ranks_that_share_it_is_the_same_run(shared, finished):
    for steps, strategy, world_size, context in [(3, "ddp", 2, 2), (5, "auto", 1, 1), (8, "ddp", 2, 2)]:
        strategy = {"strategy__name": strategy, "strategy__context": context}
        train(changed(shared, **strategy, train__max_tokens=steps * STEP), world_size)
    ours, theirs = losses(shared["output_dir"]), losses(finished(shared))
    assert ours.keys() == theirs.keys() and len(ours) == 8
    assert max(abs(ours[s] - theirs[s]) for s in ours) < 1e-6


#: For a training process: torch.compile that captures graphs and runs them as they are, within a second.
CAPTURE_ONLY = """
import torch
from forgetting_transformer.ops import compiling
compiling.compiled = lambda function, recordable=False: torch.compile(function, dynamic=False, backend="eager")
"""


def test_compiled_graphs_go_through_the_exchange(shared, finished, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    # Pruned, so that heads are dealt out by their gates.
    shared = changed(shared, train__max_tokens=4 * STEP, skip_eval=True, model__config__log_pruning_tolerance=-10.0)
    compiled = {"train__compile": True, "train__gradient_checkpointing": True}
    train(changed(shared, strategy__name="ddp", strategy__context=2, **compiled), 2, patch=CAPTURE_ONLY)
    assert "the first step is done" in rank_log(shared, 0) and "runs uncompiled" not in rank_log(shared, 0)
    ours, theirs = losses(shared["output_dir"]), losses(finished(shared))
    assert max(abs(ours[s] - theirs[s]) for s in theirs) < 1e-6


def test_heads_that_ranks_cannot_share_are_refused(tiny):
    said = refused(changed(tiny, strategy__context=2, model__config__num_heads=1), 2)
    assert "model.name=forgetting_transformer (ForgettingAttentionLayer has 1 heads)" in said
