"""Descriptions of a run before its first step: configuration, modules, parameter groups, where it started."""

import json
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from forgetting_transformer.command_line import installed_versions
from forgetting_transformer.data import DataInfo
from forgetting_transformer.files import append_durably, write_atomically
from forgetting_transformer.metric_names import MODEL_INFO, RESUME, TRAIN_DATA_INFO, VAL_DATA_INFO, name_of
from forgetting_transformer.training.interface import TrainerInterface
from forgetting_transformer.training.records.metrics import MetricsLog
from forgetting_transformer.training.records.run_directory import RunDirectory

# Packages that can change a run's numbers.
PACKAGES = (
    "torch", "triton", "lightning", "hydra-core", "omegaconf", "transformers", "tokenizers", "zarr", "numpy", "wandb",
    "flash-linear-attention", "fla-core", "forgetting-transformer",
)  # fmt: skip


def _model_info(model: Any, flops_per_token: float) -> dict[str, float]:
    """Parameter counts, over all ranks, and FLOPs."""
    total = sum(p.numel() for p in model.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    return {
        "total_params": total,
        "trainable_params": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "embedding_params": embedding,
        "non_embedding_params": total - embedding,
        "flops_per_token": flops_per_token,
    }


def _data_description(info: DataInfo, local_batch_size: int, data_size: int) -> dict[str, Any]:
    """Size of a split, with the sizes of batches under their official names.

    Args:
        local_batch_size: sequences of one rank's batch.
        data_size: how many ranks, or groups of ranks that share sequences, take different ones.
    """
    return {
        **vars(info),
        "batch_len": info.seq_len,
        "local_batch_size": local_batch_size,
        "global_batch_size": local_batch_size * data_size,
        "local_tokens_per_batch": local_batch_size * info.seq_len,
        "global_tokens_per_batch": local_batch_size * data_size * info.seq_len,
    }


def _write_descriptions(trainer: TrainerInterface, info: dict[str, float]) -> None:
    """Writes config.yaml, model.txt and the lists of parameters, and appends this start to starts.jsonl."""
    directory, model = trainer.directory, trainer.model.module
    root = directory.root
    write_atomically(directory.config, yaml.safe_dump(trainer.resolved, sort_keys=False))
    write_atomically(root / "model.txt", f"{model}\n{json.dumps(info, indent=1)}\n")
    shapes = {name: f"{name} {tuple(p.shape)}\n" for name, p in model.named_parameters()}
    decayed = [line for name, line in shapes.items() if name not in trainer.undecayed]
    write_atomically(root / "decay_params.txt", "".join(decayed))
    write_atomically(root / "no_decay_params.txt", "".join(shapes[n] for n in shapes if n in trainer.undecayed))
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": trainer.counters.token_count,
        "origin": trainer.origin.text,
        "world_size": trainer.fabric.world_size,
        **trainer.environment,
    }
    append_durably(root / "starts.jsonl", f"{json.dumps(start)}\n".encode())


def open_metrics(trainer: TrainerInterface) -> MetricsLog:
    """Writes the descriptions of a run, and begins or continues its metrics; rank 0."""
    config, step = trainer.config, trainer.counters.token_count
    data, shares = config.datamodule, trainer.ranks.data_size
    info = _model_info(trainer.model.module, trainer.flops_per_token)
    _write_descriptions(trainer, info)
    _copy_tokenizer(trainer.data.folder, trainer.directory)
    metrics = MetricsLog(trainer.directory, step, trainer.kinds)
    metrics.report(RESUME, step, {name_of(RESUME, "resume_step"): step})
    local = data.train_batch_size // shares
    metrics.report_once(TRAIN_DATA_INFO, step, _data_description(trainer.data_info, local, shares))
    if not config.skip_eval:
        described = _data_description(trainer.data.eval_info(), data.eval_local_batch_size, shares)
        metrics.report_once(VAL_DATA_INFO, step, described)
    metrics.report_once(MODEL_INFO, step, info)
    return metrics


def _copy_tokenizer(data_folder: Path, directory: RunDirectory) -> None:
    """Keeps the corpus's tokenizer with the run, so that an export needs nothing but the run's folder."""
    if (data_folder / "tokenizer").is_dir() and not directory.tokenizer.exists():
        shutil.copytree(data_folder / "tokenizer", directory.tokenizer)


def git_state(folder: Path) -> dict[str, Any]:
    """Commit of the repository that holds `folder`, the uncommitted changes as a patch, and the names of files that git
    does not know; {} outside a repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            env=os.environ | {"GIT_TERMINAL_PROMPT": "0"},  # a partial clone may ask for a password to fetch a file
        )
        return done.stdout

    try:
        untracked = git("ls-files", "--others", "--exclude-standard", "--full-name", ":/").splitlines()
        return {"commit": git("rev-parse", "HEAD").strip(), "patch": git("diff", "HEAD"), "untracked": untracked}
    except (OSError, subprocess.SubprocessError):
        return {}


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, git state and hardware of this process, as plain JSON types."""
    return {
        "versions": installed_versions(PACKAGES),
        "git": git_state(Path(__file__).parent),
        "machine": {
            "host": platform.node(),
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        },
    }
