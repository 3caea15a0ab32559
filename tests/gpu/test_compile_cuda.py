"""On CUDA: every architecture trains fully compiled, and resumes with empty caches, and CUDA graphs, change no bit.

Models and batches are large enough for TorchInductor to have choices between launch configurations of reductions.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from forgetting_transformer.model import registry
from tests.training.conftest import Job, changed, checkpoint_tensors, lines, losses, rank_log, tiny_config, untimed
from tests.training.test_compile import assert_same_bits

LENGTH, SEQUENCES, VOCABULARY = 512, 16, 2048
STEP = LENGTH * SEQUENCES
PRO = {"qk_norm": True, "use_output_gate": True, "use_output_norm": True, "use_k_shift": True, "use_v_shift": True}
FIELDS = {
    "forgetting_transformer": {"num_heads": 8, "log_pruning_tolerance": -10.0, **PRO},
    "transformer": {"num_heads": 8},
    "mamba2": {"num_heads": 16, "head_dim": 64, "state_size": 128},
    "hgrn2": {"expand_ratio": 128},
    "delta_net": {"num_heads": 4},
    "gated_delta_net": {"num_heads": 4},
    "kda": {"num_heads": 4},
    "path_fox": {"num_heads": 8},
    "samba": {"attn": {"num_heads": 8, "window_size": 128, "layers": None}},
    "hybrid": {
        "pattern": ["delta", "fox"],
        "mixers": {
            "delta": {"architecture": "gated_delta_net", "num_heads": 4},
            "fox": {"architecture": "forgetting_transformer", "num_heads": 8, **PRO},
        },
    },
}
#: (strategy, processes) that this machine can run.
RUNS = [("auto", 1)] if torch.cuda.device_count() < 2 else [("auto", 1), ("ddp", 2), ("fsdp", 2)]
CACHES = """
import os
os.environ["TORCHINDUCTOR_CACHE_DIR"] = {folder!r} + "/inductor"
os.environ["TRITON_CACHE_DIR"] = {folder!r} + "/triton"
"""
# What wins TorchInductor's races between launch configurations where its caches are empty, loses here.
SLOWEST_WINS = """
import torch._inductor.config
torch._inductor.config.test_configs.distort_benchmarking_result = "inverse"
"""
KILLED_IN_THE_SIXTH_STEP = """
import os, signal
from forgetting_transformer.training import saving
from forgetting_transformer.training.trainer import Trainer
step = Trainer.step
def dying(self, batch):
    if self.counters.batch_count == 5:
        saving.collect(self, wait=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch)
Trainer.step = dying
"""


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for split in ("train", "heldout"):
        tokens = generator.zipf(1.3, size=(16 * SEQUENCES, LENGTH)).clip(max=VOCABULARY - 1).astype(np.uint16)
        array = zarr.create_array(
            folder / "tiny" / f"{split}.zarr", shape=tokens.shape, dtype="uint16", chunks=(16, LENGTH)
        )
        array[:] = tokens
    return folder


def large_config(output_dir: Path, corpus: Path, name: str, strategy: str = "auto", world_size: int = 1) -> dict:
    """Eight steps in bf16, gradient accumulation included; `train.compile` is left alone."""
    config = changed(
        tiny_config(output_dir, corpus),
        log_interval=STEP,
        train_eval_interval=8 * STEP,
        skip_eval=True,
        checkpoint_interval=4 * STEP,
        checkpoint_keep_interval=4 * STEP,
        fabric={"precision": "bf16-mixed", "accelerator": "cuda", "devices": world_size},
        strategy__name=strategy,
        model={"name": name, "config": {"hidden_size": 512, "num_hidden_layers": 2, **FIELDS[name]}},
        schedule={"name": "constant", "warmup_tokens": 0},
        optimizer={"lr": 1e-3},
    )
    config["train"] |= {"max_tokens": 8 * STEP, "grad_acc_tokens": STEP // 4}
    config["datamodule"] |= {
        "train_batch_len": LENGTH, "train_batch_size": SEQUENCES, "eval_batch_len": LENGTH, "eval_tokens": 4 * LENGTH,
        "vocab_size": VOCABULARY,
    }  # fmt: skip
    return config


def start(config: dict, world_size: int, caches: Path, patch: str = "") -> Job:
    return Job(config, world_size, patch=CACHES.format(folder=str(caches)) + patch, accelerator="cuda")


def log_of(job: Job, config: dict, code: int = 0) -> str:
    """The log of rank 0, which trained to its end with everything compiled."""
    assert {*job.wait()} == {code}, job.errors()
    log = rank_log(config, 0)
    assert "compiling; " in log and "the first step is done" in log
    assert "runs uncompiled" not in log and "not bitwise from here" not in log
    return log


def run(config: dict, world_size: int, caches: Path, patch: str = "", code: int = 0) -> str:
    return log_of(start(config, world_size, caches, patch), config, code)


@pytest.mark.parametrize(
    ("name", "strategy", "world_size"),
    [*(("forgetting_transformer", *how) for how in RUNS), ("samba", "auto", 1)],
)
def test_a_resume_with_empty_caches_is_bitwise_the_straight_run(long_corpus, tmp_path, name, strategy, world_size):
    config = large_config(tmp_path / "stopped", long_corpus, name, strategy, world_size)
    config["train"]["gradient_checkpointing"] = strategy == "fsdp"
    straight = changed(config, output_dir=str(tmp_path / "straight"))
    halved = changed(config, train__max_tokens=4 * STEP)
    jobs = [(start(x, world_size, tmp_path / f"caches {i}"), x) for i, x in enumerate((straight, halved))]
    for job, trained in jobs:
        log_of(job, trained)
    run(config, world_size, tmp_path / "caches 2", SLOWEST_WINS)
    assert_same_bits(straight["output_dir"], config["output_dir"], 8 * STEP)


@pytest.mark.parametrize("name", registry.model_names())
def test_auto_compiles_every_architecture_and_cuda_graphs_change_no_bit(long_corpus, tmp_path, name):
    """The run without graphs evaluates too."""
    config = large_config(tmp_path / "graphs", long_corpus, name)
    config["train"] |= {"max_tokens": 4 * STEP, "grad_acc_tokens": STEP // 2}
    plain = changed(config, output_dir=str(tmp_path / "plain"), train__cuda_graphs=False)
    run(changed(plain, skip_eval=False, eval_interval=4 * STEP), 1, tmp_path / "caches")
    state = json.loads((tmp_path / f"plain/checkpoints/step-{4 * STEP:015d}/trainer.json").read_text())
    assert state["execution"]["compile"] is True and state["execution"]["device"] == "cuda"
    if name != "path_fox":  # its gradients are sums by atomics
        run(changed(config, train__cuda_graphs=True), 1, tmp_path / "caches")
        assert_same_bits(plain["output_dir"], config["output_dir"], 4 * STEP)


def assert_identical(a: str, b: str, step: int) -> None:
    """Weights and moments, signs of zeros included, and what was logged and evaluated."""
    first, second = checkpoint_tensors(a, step), checkpoint_tensors(b, step)
    assert first.keys() == second.keys() and len(first) > 20
    assert not [name for name, x in first.items() if x.numpy().tobytes() != second[name].numpy().tobytes()]
    assert losses(a) == losses(b)
    for kind in ("norm", "val"):
        ours, theirs = (
            [{key: line[key] for key in untimed(line)} for line in lines(folder, kind)] for folder in (a, b)
        )
        assert ours == theirs and ours


def test_cuda_graphs_change_no_bit_and_survive_a_kill(long_corpus, tmp_path):
    """With packed documents and evaluations in between; the run without was not killed."""
    config = large_config(tmp_path / "graphs", long_corpus, "forgetting_transformer")
    config |= {"skip_eval": False, "eval_interval": 3 * STEP}
    config["train"] |= {"grad_acc_tokens": STEP // 2, "cuda_graphs": True, "max_grad_norm": 0.1}
    config["datamodule"] |= {"name": "packed", "bos_token_id": 3}
    plain = changed(config, output_dir=str(tmp_path / "plain"), train__cuda_graphs=False)
    run(plain, 1, tmp_path / "caches")
    run(config, 1, tmp_path / "caches", KILLED_IN_THE_SIXTH_STEP, code=-9)
    log = run(config, 1, tmp_path / "caches")
    assert_identical(plain["output_dir"], config["output_dir"], 8 * STEP)
    assert "yes, with CUDA graphs" in log and f"step-{4 * STEP:015d}" in log and "cannot be recorded" not in log


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_cuda_graphs_change_no_bit_of_ddp(long_corpus, tmp_path):
    config = large_config(tmp_path / "graphs", long_corpus, "forgetting_transformer", "ddp", 2)
    config["train"] |= {"max_tokens": 6 * STEP, "grad_acc_tokens": STEP // 4, "cuda_graphs": True}
    plain = changed(config, output_dir=str(tmp_path / "plain"), train__cuda_graphs=False)
    run(plain, 2, tmp_path / "caches")
    assert "cannot be recorded" not in run(config, 2, tmp_path / "caches")
    assert_same_bits(plain["output_dir"], config["output_dir"], 6 * STEP)


def test_a_command_that_says_nothing_of_graphs_has_them_where_they_help(long_corpus, tmp_path):
    """The GPU's own peak is not used: here the machine that runs the test may have any."""
    for peak_flops, said in ((1e15, "compiled yes, with CUDA graphs"), (1e9, "compiled yes\n")):
        config = large_config(tmp_path / f"{peak_flops:.0e}", long_corpus, "forgetting_transformer")
        config["train"] |= {"max_tokens": STEP}
        config["fabric"] |= {"peak_flops": peak_flops}
        assert said in re.sub(" +", " ", run(config, 1, tmp_path / "caches"))
