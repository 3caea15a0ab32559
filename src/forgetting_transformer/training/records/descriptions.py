"""Descriptions of a run before its first step: in files its configuration, modules, parameter groups and starts; in the
log a block with its settings and the choices made for this machine."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.strategies import DDPStrategy

from forgetting_transformer.command_line import installed_versions
from forgetting_transformer.data import DataInfo
from forgetting_transformer.files import append_durably, write_atomically
from forgetting_transformer.metric_names import MODEL_INFO, RESUME, TRAIN_DATA_INFO, VAL_DATA_INFO
from forgetting_transformer.training.faults.step_guard import decides_on_device
from forgetting_transformer.training.interface import TrainerInterface
from forgetting_transformer.training.parallel.sharding import Sharded
from forgetting_transformer.training.records.metrics import MetricsLog

# Packages that can change a run's numbers.
PACKAGES = (
    "torch", "triton", "lightning", "hydra-core", "omegaconf", "transformers", "tokenizers", "zarr", "numpy", "wandb",
    "flash-linear-attention", "fla-core", "forgetting-transformer",
)  # fmt: skip


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


def open_metrics(trainer: TrainerInterface) -> MetricsLog:
    """Writes config.yaml, model.txt and the lists of parameters, appends this start to starts.jsonl, and begins or
    continues the metrics; rank 0."""
    config, step = trainer.config, trainer.counters.token_count
    data, shares = config.datamodule, trainer.ranks.data_size
    root, model = trainer.directory.root, trainer.model.module
    parameters = [*model.parameters()]
    total, embedding = sum(p.numel() for p in parameters), model.get_input_embeddings().weight.numel()
    info = {
        "total_params": total,
        "trainable_params": sum(p.numel() for p in parameters if p.requires_grad),
        "embedding_params": embedding,
        "non_embedding_params": total - embedding,
        "flops_per_token": trainer.flops_per_token,
    }
    write_atomically(trainer.directory.config, yaml.safe_dump(trainer.resolved, sort_keys=False))
    write_atomically(root / "model.txt", f"{model}\n{json.dumps(info, indent=1)}\n")
    for file, decayed in (("decay_params.txt", True), ("no_decay_params.txt", False)):
        listed = [(name, p) for name, p in model.named_parameters() if (name not in trainer.undecayed) is decayed]
        write_atomically(root / file, "".join(f"{name} {tuple(p.shape)}\n" for name, p in listed))
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": trainer.counters.token_count,
        "origin": trainer.origin.text,
        "world_size": trainer.fabric.world_size,
        **trainer.environment,
    }
    append_durably(root / "starts.jsonl", f"{json.dumps(start)}\n".encode())
    tokenizer = trainer.data.folder / "tokenizer"
    if tokenizer.is_dir() and not trainer.directory.tokenizer.exists():  # so that an export needs the run alone
        shutil.copytree(tokenizer, trainer.directory.tokenizer)
    metrics = MetricsLog(trainer.directory, step)
    local = data.train_batch_size // shares
    facts = {
        RESUME: {"resume_step": step},
        MODEL_INFO: info,
        TRAIN_DATA_INFO: _data_description(trainer.data_info, local, shares),
    }
    if not config.skip_eval:
        facts[VAL_DATA_INFO] = _data_description(trainer.data.eval_info(), data.eval_local_batch_size, shares)
    for kind, values in facts.items():
        metrics.report(kind, step, values)
    return metrics


def git_state(folder: Path) -> dict[str, Any]:
    """Commit of the repository that holds `folder`, and the uncommitted changes as a patch; {} outside a repository."""

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
        return {"commit": git("rev-parse", "HEAD").strip(), "patch": git("diff", "HEAD")}
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


_WAITS = "; cannot skip a bad step on the device (found_inf): the host waits for the loss in every step"


def start_block(trainer: TrainerInterface) -> str:
    """The block for rank 0 of a trainer that is about to take its first step."""
    config, data, info = trainer.config, trainer.config.datamodule, trainer.data_info
    done, tokens = trainer.counters.token_count, data.train_batch_size * data.train_batch_len
    to_go = max(0, math.ceil(config.train.max_tokens / tokens) - trainer.counters.batch_count)
    local, context_size = data.train_batch_size // trainer.ranks.data_size, trainer.ranks.context_size
    each = "process" if context_size == 1 else f"group of {context_size} processes"
    at_once = config.sequences_at_once(trainer.ranks.data_size)
    parameters = sum(p.numel() for p in trainer.model.module.parameters())
    rows = {
        "model": f"{config.model.name}, {parameters / 1e6:,.1f}M parameters ({parameters:,})",
        "corpus": f"{info.path}, {info.total_tokens:,} tokens in {info.documents:,} documents",
        "batch": f"{data.train_batch_size:,} x {data.train_batch_len:,} = {tokens:,} tokens; each {each} {local:,} "
        f"sequences, {at_once:,} at a time",
        "steps": f"{to_go:,} to go, to {config.train.max_tokens:,} tokens; {done:,} are done",
        "devices": _devices(trainer),
        "precision": f"{config.fabric.precision}, strategy {_strategy(trainer)}",
        **{op: backend.text for op, backend in trainer.backends.items()},
        "compiled": ("yes, with CUDA graphs" if trainer.graphs.on else "yes") if trainer.compiled else "no",
        "optimizer": _section(config.optimizer) + ("" if decides_on_device(trainer.optimizer.optimizer) else _WAITS),
        "schedule": _section(config.schedule),
        "output_dir": str(trainer.directory.root),
        **{callback.name: callback.summary for callback in trainer.callbacks if callback.summary},
        "start": trainer.origin.text,
    }
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())


def _devices(trainer: TrainerInterface) -> str:
    fabric = trainer.fabric
    nodes = int(os.environ.get("LT_NUM_NODES") or os.environ.get("GROUP_WORLD_SIZE") or 1)
    where = f" on {nodes} nodes" if nodes > 1 else ""
    if fabric.device.type == "cuda":
        device = torch.cuda.get_device_name(fabric.device)
    else:
        threads = torch.get_num_threads()
        device = f"{fabric.device.type}, {threads} thread{'s' * (threads != 1)} each"
    return f"{fabric.world_size} x {device}{where}"


def _strategy(trainer: TrainerInterface) -> str:
    strategy = trainer.fabric.strategy
    if isinstance(strategy, Sharded):
        return "fsdp" + (f" ({'; '.join(strategy.notes)})" if strategy.notes else "")
    if isinstance(strategy, DDPStrategy):
        return "ddp"
    return "none (one process: nothing to shard)" if trainer.config.strategy.name == "fsdp" else "none"


def _section(section: Any) -> str:
    """Name and keys of a section of the config, as a command line would set them, without those that are not set."""
    keys = {key: value for key, value in vars(section).items() if value not in (None, [])}
    return ", ".join([keys.pop("name"), *(f"{key}={str(value).lower()}" for key, value in keys.items())])
