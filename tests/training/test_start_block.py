"""What a run says before its first step, and how its seconds are written."""

import logging

import pytest
import torch
from omegaconf import OmegaConf

from forgetting_transformer.training import parse, setup
from forgetting_transformer.training.execution import hardware
from forgetting_transformer.training.records.metrics import duration
from tests.training.conftest import STEP, blocks, changed, train
from tests.training.test_compile import INFO


@pytest.mark.slow
def test_a_run_says_what_it_is_before_its_first_step(tiny, tmp_path):
    """Three starts: a new run on two processes, its continuation, and a fork with another learning rate."""
    train(changed(tiny, strategy__name="fsdp", train__max_tokens=8 * STEP), 2)
    tiny = changed(tiny, train__max_tokens=10 * STEP)
    train(tiny)
    fork = changed(tiny, output_dir=str(tmp_path / "fork"), fork_dir=tiny["output_dir"], fork_step=8 * STEP)
    train(changed(fork, optimizer__lr=2e-2, schedule__name="constant", schedule__total_tokens=None))
    new, continued = blocks(tiny["output_dir"])
    checkpoint = f"{tiny['output_dir']}/checkpoints/step-{8 * STEP:015d} ({8 * STEP:,} tokens)"
    assert len(new) == 14
    assert new["model"].startswith("forgetting_transformer, ") and new["model"].count("parameters") == 1
    assert new["corpus"] == f"{tiny['data_dir']}/tiny/train.zarr, 6,144 tokens in 96 documents"
    assert new["batch"] == "4 x 32 = 128 tokens; each process 2 sequences, 2 at a time"
    assert new["steps"] == f"8 to go, to {8 * STEP:,} tokens; 0 are done"
    assert new["devices"] == "2 x cpu, 1 thread each"
    assert new["precision"] == "32-true, strategy fsdp"
    assert new["attention"] == new["gated_norm"] == "PyTorch" and new["compiled"] == "no"
    assert new["optimizer"] == "adamw, lr=0.01, lr_scale=1.0, betas=[0.9, 0.95], eps=1e-08, weight_decay=0.1"
    assert new["schedule"] == f"warmup_cosine, warmup_tokens=512, total_tokens={20 * STEP}, init_lr=0.0, end_lr=0.0"
    assert (new["output_dir"], new["wandb"], new["start"]) == (tiny["output_dir"], "disabled", "a new run")
    assert continued["steps"] == f"2 to go, to {10 * STEP:,} tokens; {8 * STEP:,} are done"
    assert continued["precision"] == "32-true, strategy none"
    assert continued["start"] == f"continuing from {checkpoint}"
    (forked,) = blocks(fork["output_dir"])
    assert forked["start"] == f"forked from {checkpoint}"
    assert forked["optimizer"].startswith("adamw, lr=0.02")
    assert forked["schedule"] == "constant, warmup_tokens=512, init_lr=0.0, end_lr=0.0"


def test_less_than_a_minute_is_in_seconds():
    for seconds, text in [(0.4, "0 s"), (42, "42 s"), (59.6, "1:00"), (125, "2:05"), (3725, "1:02:05")]:
        assert duration(seconds) == text


def no_gpu_warnings(tiny: dict, caplog, monkeypatch, large: int = 1000, **changes) -> list[str]:
    config = parse(OmegaConf.create(changed(tiny, **changes)))
    monkeypatch.setattr(hardware, "LARGE", large)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        hardware.warn_without_gpu(
            config, torch.device("cpu"), setup.build_model(config, INFO, initialise=False, device="meta")
        )
    return [record.getMessage() for record in caplog.records]


def test_a_large_model_without_a_gpu_gets_a_warning_unless_the_cpu_was_chosen(tiny, caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (warning,) = no_gpu_warnings(tiny, caplog, monkeypatch, fabric__accelerator="auto")
    assert "no GPU was found" in warning and "fabric.accelerator=cpu" in warning and "a build for " in warning
    assert no_gpu_warnings(tiny, caplog, monkeypatch, fabric__accelerator="cpu") == []
    assert no_gpu_warnings(tiny, caplog, monkeypatch, large=10**8, fabric__accelerator="auto") == []
    monkeypatch.setenv("LT_ACCELERATOR", "cpu")
    assert no_gpu_warnings(tiny, caplog, monkeypatch, fabric__accelerator="auto") == []
