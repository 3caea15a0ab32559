"""What a run says before its first step, and how its seconds are written."""

import logging
import types
from pathlib import Path

import pytest
import torch

from forgetting_transformer.data import LongCrawl64DataModule
from forgetting_transformer.model import registry
from forgetting_transformer.ops.selftest import Backend
from forgetting_transformer.training import parse, setup
from forgetting_transformer.training.parallel import gpus
from forgetting_transformer.training.records.metrics import duration
from forgetting_transformer.training.start.start_block import _blocks, human_count, start_block
from tests.model.small_models import SMALL_FIELDS, small
from tests.training.conftest import STEP, Job, changed, train


def blocks(output_dir: str) -> list[dict[str, str]]:
    """The rows of every block in rank 0's log."""
    found: list[dict[str, str]] = []
    for line in (Path(output_dir) / "logs/rank-0.log").read_text().splitlines():
        if "about to train" in line:
            found.append({})
        elif found and line.startswith("  "):
            name, _, value = line.strip().partition(" ")
            found[-1].setdefault(name, value.strip())
    return found


@pytest.mark.slow
def test_a_run_says_what_it_is_before_its_first_step(tiny, tmp_path):
    """Three starts: a new run on two processes, its continuation, and a fork with another learning rate."""
    train(changed(tiny, strategy__name="fsdp", train__max_tokens=8 * STEP), 2)
    train(tiny)
    fork = changed(tiny, output_dir=str(tmp_path / "fork"), fork_dir=tiny["output_dir"], fork_step=8 * STEP)
    train(changed(fork, optimizer__lr=2e-2, schedule__name="constant", schedule__total_tokens=None))
    new, continued = blocks(tiny["output_dir"])
    checkpoint = f"{tiny['output_dir']}/checkpoints/step-{8 * STEP:015d} ({8 * STEP:,} tokens)"
    assert len(new) == 15
    assert new["model"].startswith("forgetting_transformer, ") and new["model"].count("parameters") == 1
    assert new["corpus"] == f"{tiny['data_dir']}/tiny/train.zarr, 6,144 tokens in 96 documents"
    assert new["batch"] == "4 x 32 = 128 tokens; each process 2 sequences, 2 at a time"
    assert new["steps"] == f"8 to go, to {8 * STEP:,} tokens; 0 are done"
    assert new["devices"] == "2 x cpu, 1 thread each; 2 processes"
    assert new["precision"] == "32-true, strategy fsdp"
    assert new["corruption"] == "comparison of ranks off (each holds other shards)"
    assert continued["corruption"].startswith("comparison of ranks off (one process)")
    assert new["attention"] == new["gated_norm"] == "PyTorch" and new["compiled"] == "no"
    assert new["optimizer"] == "adamw, lr 0.01, betas 0.9, 0.95, eps 1e-08, weight decay 0.1"
    assert new["schedule"] == f"warmup_cosine, warm-up 512 tokens, ends at {20 * STEP:,} with lr 0"
    assert (new["output_dir"], new["wandb"], new["start"]) == (tiny["output_dir"], "disabled", "a new run")
    assert continued["steps"] == f"12 to go, to {20 * STEP:,} tokens; {8 * STEP:,} are done"
    assert continued["precision"] == "32-true, strategy none"
    assert continued["start"] == f"continuing from {checkpoint}"
    (forked,) = blocks(fork["output_dir"])
    assert forked["start"] == f"forked from {checkpoint}"
    assert forked["optimizer"].startswith("adamw, lr 0.02") and forked["schedule"] == "constant, warm-up 512 tokens"


def test_the_slow_parts_before_the_first_step_are_named_as_they_come(tiny):
    train(changed(tiny, train__max_tokens=4 * STEP))
    train(changed(tiny, train__max_tokens=5 * STEP))
    log = (Path(tiny["output_dir"]) / "logs/rank-0.log").read_text()
    second = log[log.index("training finished") :]
    said = [
        "reading the corpus: tiny in",
        "building the model",
        "continuing from",
        "about to train",
        "training finished",
    ]
    places = [second.index(text, 1 if i == 4 else 0) for i, text in enumerate(said)]
    assert places == sorted(places)


def test_gpus_nodes_kernels_and_wandb_are_named(monkeypatch):
    """A trainer that this machine cannot have."""
    monkeypatch.setenv("LT_NUM_NODES", "2")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    config = parse(
        {
            "train": {"max_tokens": 10**9, "grad_acc_tokens": 2**16},
            "datamodule": {
                "train_batch_len": 2**14,
                "train_batch_size": 32,
                "eval_batch_len": 1,
                "eval_local_batch_size": 1,
            },
            "optimizer": {"lr": 1e-3},
            "schedule": {
                "name": "warmup_stable_decay",
                "warmup_tokens": 10**8,
                "total_tokens": 10**9,
                "decay_tokens": 10**8,
            },
            "model": {"name": "forgetting_transformer"},
            "fabric": {"precision": "bf16-mixed"},
            "output_dir": "/runs/fox",
            "data_dir": "/data",
            **dict.fromkeys(("log_interval", "train_eval_interval", "eval_interval"), 1),
            **dict.fromkeys(("checkpoint_interval", "checkpoint_keep_interval"), 1),
        }
    )
    trainer = types.SimpleNamespace(
        config=config,
        ranks=types.SimpleNamespace(data_size=8, sharing=1),
        fabric=types.SimpleNamespace(world_size=8, device=torch.device("cuda", 0), strategy=None),
        data_info=types.SimpleNamespace(path="/data/longcrawl64/train.zarr", total_tokens=48 * 10**9, documents=10**6),
        model=types.SimpleNamespace(module=torch.nn.Linear(10, 20)),
        optimizer=types.SimpleNamespace(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])),
        counters=types.SimpleNamespace(batch_count=7, token_count=7 * 2**19),
        backends={"attention": Backend("gluon", "Gluon for Hopper, Triton 3.7.1, self-test within 2e-3")},
        directory=types.SimpleNamespace(root=Path("/runs/fox")),
        callbacks=[types.SimpleNamespace(name="wandb", summary="online, https://wandb.ai/me/fox/runs/1")],
        origin=types.SimpleNamespace(text="a new run"),
        compiled=True,
        graphs=types.SimpleNamespace(on=True),
        comparison=None,
    )
    text = start_block(trainer)
    rows = dict(line.strip().split(maxsplit=1) for line in text.splitlines())
    assert rows["model"] == "forgetting_transformer, 220 parameters (220)"
    assert rows["devices"] == "8 x NVIDIA H200; 8 processes on 2 nodes"
    assert rows["attention"] == "Gluon for Hopper, Triton 3.7.1, self-test within 2e-3"
    assert rows["compiled"] == "yes, with CUDA graphs"
    assert rows["optimizer"].endswith("ignores found_inf: the host waits in every step to learn whether it counts")
    assert rows["batch"] == "32 x 16,384 = 524,288 tokens; each process 4 sequences, 4 at a time"
    assert rows["steps"].startswith("1,901 to go")
    assert rows["schedule"].endswith("decay in the last 100,000,000, ends at 1,000,000,000 with lr 0")
    assert rows["corruption"] == "comparison of ranks off (strategy.compare_steps=null)"
    trainer.comparison = object()
    assert "corruption  ranks compared every 100 steps and before checkpoints" in start_block(trainer)
    assert rows["wandb"] == "online, https://wandb.ai/me/fox/runs/1"
    assert len({line.index(rows[line.split()[0]]) for line in text.splitlines()}) == 1, "aligned"


def test_a_hybrid_says_what_its_blocks_are():
    fox = {"architecture": "forgetting_transformer", "num_heads": 2}
    mamba = {"architecture": "mamba2", "num_heads": 4, "head_dim": 16, "state_size": 8}
    hybrid = small(
        "hybrid", pattern=["mamba2", "mamba2", "fox"], mixers={"mamba2": mamba, "fox": fox}, num_hidden_layers=3
    )
    assert _blocks(hybrid) == "mamba2 (4 heads) x 2, fox (2 heads), in turns"
    assert _blocks(small("forgetting_transformer")) == "" == _blocks(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (42, "42 s"), (59.6, "1:00"), (125, "2:05"), (3725, "1:02:05")]
)
def test_less_than_a_minute_is_in_seconds(seconds, text):
    assert duration(seconds) == text


def test_counts_are_short():
    assert [human_count(n) for n in (7, 1_500, 124_337_408, 1_300_000_000)] == ["7", "1.5k", "124.3M", "1.3B"]


def no_gpu_warnings(tiny: dict, caplog, monkeypatch, large: int = 1000, **changes) -> list[str]:
    config = parse(changed(tiny, **changes))
    data = LongCrawl64DataModule(config.data_dir, **{k: v for k, v in vars(config.datamodule).items() if k != "name"})
    monkeypatch.setattr(gpus, "LARGE", large)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        gpus.warn_without(config, torch.device("cpu"), lambda: setup.outline(config, data.train_info()))
    return [record.getMessage() for record in caplog.records]


def test_a_large_model_without_a_gpu_gets_a_warning_unless_the_cpu_was_chosen(tiny, caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (warning,) = no_gpu_warnings(tiny, caplog, monkeypatch, fabric__accelerator="auto")
    assert "no GPU was found" in warning and "fabric.accelerator=cpu" in warning and gpus.missing() in warning
    assert no_gpu_warnings(tiny, caplog, monkeypatch, fabric__accelerator="cpu") == []
    assert no_gpu_warnings(tiny, caplog, monkeypatch, large=10**8, fabric__accelerator="auto") == []
    monkeypatch.setenv("LT_ACCELERATOR", "cpu")
    assert no_gpu_warnings(tiny, caplog, monkeypatch, fabric__accelerator="auto") == []


def test_the_warning_comes_before_the_model_is_built(tiny):
    patch = """
import torch
from forgetting_transformer.training.parallel import gpus
gpus.LARGE, torch.cuda.is_available = 1000, lambda: False
"""
    job = Job(changed(tiny, fabric__accelerator="auto", train__max_tokens=STEP), patch=patch)
    assert job.wait() == [0], job.errors()
    log = (Path(tiny["output_dir"]) / "logs/rank-0.log").read_text()
    assert log.index("no GPU was found") < log.index("building the model")


@pytest.mark.parametrize("name", SMALL_FIELDS)
def test_parameters_are_counted_without_building(name):
    with torch.device("meta"):
        counted = small(name)
    assert {p.device.type for p in counted.parameters()} == {"meta"}
    assert sum(p.numel() for p in counted.parameters()) == sum(p.numel() for p in small(name).parameters())
    assert registry.get(name)


@pytest.mark.parametrize(
    ("cuda", "visible", "reason"),
    [(None, None, "is a build for CPUs"), ("13.0", "", "CUDA_VISIBLE_DEVICES=''"), ("13.0", None, "nvidia-smi")],
)
def test_the_probable_cause_of_a_missing_gpu_is_named(monkeypatch, cuda, visible, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert reason in gpus.missing()
