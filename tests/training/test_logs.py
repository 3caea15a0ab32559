"""What a run writes down: official names, loss at every position, and enough to know where a run came from."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from forgetting_transformer.analysis.runs import read_run
from tests.training.conftest import STEP, lines

COUNTERS = {"token_count", "batch_count", "flop_count", "total_time", "update_time"}


@pytest.fixture
def run(tiny, finished) -> Path:
    return Path(finished(tiny))


@pytest.mark.slow
def test_train_lines_have_the_official_names(run):
    entries = lines(str(run), "train")
    assert [e["step"] for e in entries] == [n * STEP for n in range(1, 21)]
    names = {f"train/{name}" for name in (*COUNTERS, "lr", "loss", "global_grad_norm")}
    assert all(set(e) == names | {"step"} for e in entries)
    last = entries[-1]
    assert (last["train/token_count"], last["train/batch_count"]) == (20 * STEP, 20)
    assert 0 < last["train/update_time"] <= last["train/total_time"]
    info = read_run(run).info("model")
    assert last["train/flop_count"] == pytest.approx(20 * STEP * info["flops_per_token"])
    assert info["total_params"] == info["embedding_params"] + info["non_embedding_params"]


def test_norms_cover_every_parameter(run):
    entry = lines(str(run), "norm")[-1]
    assert entry["pnorm/model.embeddings.weight"] > 0
    named = {k.split("/", 1)[1] for k in entry if k.startswith("pnorm/")}
    assert named == {k.split("/", 1)[1] for k in entry if k.startswith("gnorm/")} and len(named) > 20
    squares = sum(v**2 for k, v in entry.items() if k.startswith("gnorm/"))
    clipped = min(1.0, lines(str(run), "train")[-1]["train/global_grad_norm"])
    assert math.sqrt(squares) == pytest.approx(clipped, rel=1e-4)


@pytest.mark.parametrize("kind", ["train_eval", "val"])
def test_position_losses_and_their_prefixes_agree(run, kind):
    for entry in lines(str(run), kind):
        arrays = np.load(run / f"metrics/npz/{kind}/step-{entry['step']:015d}.npz")
        loss_T = arrays[f"{kind}/loss_per_token"]
        assert loss_T.shape == (32,) and int(arrays["step"]) == entry["step"]
        for length in (32, 16, 8):
            assert entry[f"{kind}/loss_avg_len_{length}"] == pytest.approx(loss_T[:length].mean())
            assert entry[f"{kind}/perplexity_len_{length}"] == pytest.approx(math.exp(loss_T[:length].mean()))
        assert {f"{kind}/train_{name}" for name in COUNTERS} <= set(entry)


def test_the_training_window_averages_exactly_the_steps_since_the_last_report(run):
    losses = {e["step"]: e["train/loss"] for e in lines(str(run), "train")}
    reports = lines(str(run), "train_eval")
    assert [e["step"] for e in reports] == [n * STEP for n in (6, 12, 18, 20)]
    first = [losses[n * STEP] for n in range(1, 7)]
    assert reports[0]["train_eval/loss_avg_len_32"] == pytest.approx(sum(first) / 6)
    assert reports[-1]["train_eval/window_seq_count"] == 2 * 4


def test_the_run_says_where_it_came_from(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["train"]["max_tokens"] == 20 * STEP and config["optimizer"]["betas"] == [0.9, 0.95]
    start = json.loads((run / "starts.jsonl").read_text().splitlines()[0])
    assert start["versions"]["torch"] and start["machine"]["host"] and start["world_size"] == 1
    assert "ForgettingAttentionLayer" in (run / "model.txt").read_text()
    decay = (run / "decay_params.txt").read_text().splitlines()
    no_decay = (run / "no_decay_params.txt").read_text().splitlines()
    assert any(line.startswith("model.embeddings.weight") for line in decay)
    assert any(line.startswith("model.norm.weight") for line in no_decay) and not set(decay) & set(no_decay)
    info = read_run(run).info("train_data")
    assert info["documents"] == 96 and info["total_tokens"] == 96 * 64 and len(info["fingerprint"]) == 16


def test_descriptions_have_the_official_names_and_share_none(run):
    """wandb keeps one row per step, in which the held-out corpus would take the place of the training one."""
    training, heldout, model = (lines(str(run), f"{kind}_info")[0] for kind in ("train_data", "val_data", "model"))
    assert training.keys() & heldout.keys() == training.keys() & model.keys() == {"step"}
    sizes = {
        "vocab_size": 64, "seq_len": 32, "batch_len": 32, "total_tokens": 96 * 64, "global_batch_size": 4,
        "local_batch_size": 4, "global_tokens_per_batch": 128, "local_tokens_per_batch": 128,
    }  # fmt: skip
    assert {name: training[f"train_data_info/{name}"] for name in sizes} == sizes
    assert heldout["val_data_info/total_tokens"] == 10 * 64 and heldout["val_data_info/global_batch_size"] == 4
    assert model["model_info/total_params"] > model["model_info/embedding_params"] > 0
